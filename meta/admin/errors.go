package admin

import (
	"context"
	"errors"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
)

// codeOf returns the gRPC code nearest to a kind, for programs that do not read kinds.
func codeOf(k meta.Kind) codes.Code {
	switch k {
	case meta.NotFound, meta.NoAttribute, meta.NoSuchChunk, meta.NoSuchVolume, meta.NoSuchSnapshot:
		return codes.NotFound
	case meta.Exists, meta.VolumeExists:
		return codes.AlreadyExists
	case meta.NotPermitted, meta.AccessDenied, meta.BadCapability:
		return codes.PermissionDenied
	case meta.Invalid, meta.NameTooLong, meta.NotDir, meta.IsDir, meta.Loop, meta.CrossVolume, meta.Protocol, meta.TooBig, meta.Range:
		return codes.InvalidArgument
	case meta.NoSpace, meta.QuotaExceeded, meta.ResourceExceeded, meta.FileTooBig, meta.TooManyLinks:
		return codes.ResourceExhausted
	case meta.ReadOnly, meta.NotEmpty, meta.Busy, meta.TextBusy, meta.NotAttached, meta.DirectoryInUse, meta.Sealed:
		return codes.FailedPrecondition
	case meta.Stale, meta.Again, meta.Fenced, meta.SessionExpired:
		return codes.Aborted
	case meta.NotSupported, meta.Version:
		return codes.Unimplemented
	case meta.Canceled, meta.Interrupted:
		return codes.Canceled
	case meta.Unavailable, meta.NotOwner:
		return codes.Unavailable
	case meta.Corrupt, meta.Ahead:
		return codes.DataLoss
	}
	return codes.Internal
}

// notBegun is the error of a call that its server refused before it began.
type notBegun struct{ why *meta.Error }

func (e *notBegun) Error() string { return e.why.Error() }
func (e *notBegun) Unwrap() error { return e.why }

// NotBegun is the error of a server that can't begin a call now, though another server may: the
// client asks another one, whether or not the call may be executed twice. The kind is
// Unavailable.
func NotBegun(server string, why error) error {
	return &notBegun{&meta.Error{Op: "call", Kind: meta.Unavailable, Subject: server, Err: why}}
}

// IsNotBegun reports whether an error is a NotBegun.
func IsNotBegun(err error) bool {
	_, is := errors.AsType[*notBegun](err)
	return is
}

// StatusOf translates an error for the wire: a gRPC status carrying an Error.
func StatusOf(err error) error {
	if err == nil {
		return nil
	}
	s, serr := status.New(codeOf(meta.KindOf(err)), err.Error()).WithDetails(ErrorOf(err))
	if serr != nil {
		panic("admin: an Error is a plain message: " + serr.Error())
	}
	return s.Err()
}

// ErrorOf translates an error to a message of the API.
func ErrorOf(err error) *Error {
	e := &Error{Kind: Kind(meta.KindOf(err))}
	if x, ok := errors.AsType[*notBegun](err); ok {
		e.NotBegun, err = true, x.why
	}
	if x, ok := err.(*meta.Error); ok {
		e.Operation, e.Subject = x.Op, x.Subject
		if x.Err != nil {
			e.Cause = x.Err.Error()
		}
	} else {
		e.Cause = err.Error()
	}
	return e
}

// AsError translates back to the server's *meta.Error.
func (e *Error) AsError() error {
	var cause error
	if e.Cause != "" {
		cause = errors.New(e.Cause)
	}
	err := &meta.Error{Op: e.Operation, Kind: meta.Kind(e.Kind), Subject: e.Subject, Err: cause}
	if e.NotBegun {
		return &notBegun{err}
	}
	return err
}

// errorOf translates a status back to an error. answered: a server sent the error. Otherwise
// the connection failed, and the call may or may not have been executed.
func errorOf(err error) (_ error, answered bool) {
	if err == nil {
		return nil, true
	}
	s, ok := status.FromError(err)
	if !ok {
		return err, false
	}
	for _, d := range s.Details() {
		if e, ok := d.(*Error); ok {
			return e.AsError(), true
		}
	}
	const op = "call"
	switch s.Code() {
	case codes.Unimplemented:
		return meta.E(op, meta.NotSupported, "", errors.New(s.Message())), true
	case codes.ResourceExhausted:
		return meta.E(op, meta.ResourceExceeded, "", errors.New(s.Message())), true
	case codes.Internal:
		if strings.Contains(s.Message(), "invalid UTF-8") { // the request was not sent
			return meta.E(op, meta.Invalid, "", errors.New("names and other text of a request are UTF-8")), true
		}
		return meta.E(op, meta.Protocol, "", errors.New(s.Message())), true
	case codes.InvalidArgument, codes.Unknown:
		return meta.E(op, meta.Protocol, "", errors.New(s.Message())), true
	case codes.Canceled:
		return meta.E(op, meta.Canceled, "", context.Canceled), false
	}
	return meta.E(op, meta.Unavailable, "", errors.New(s.Message())), false
}
