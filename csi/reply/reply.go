// Package reply owns the answers of the driver's services: the table from kinds of errors to
// gRPC codes, and the refusal of a call while another call about the same volume, name or path
// is running.
package reply

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
)

// table maps an error's kind to a code. A kind without an entry is Internal.
var table = map[meta.Kind]codes.Code{
	meta.NotFound:         codes.NotFound,
	meta.NoSuchVolume:     codes.NotFound,
	meta.NoSuchSnapshot:   codes.NotFound,
	meta.Exists:           codes.AlreadyExists,
	meta.VolumeExists:     codes.AlreadyExists,
	meta.Invalid:          codes.InvalidArgument,
	meta.NameTooLong:      codes.InvalidArgument,
	meta.Range:            codes.OutOfRange,
	meta.NoSpace:          codes.ResourceExhausted,
	meta.QuotaExceeded:    codes.ResourceExhausted,
	meta.ResourceExceeded: codes.ResourceExhausted,
	meta.Busy:             codes.FailedPrecondition,
	meta.NotEmpty:         codes.FailedPrecondition,
	meta.NotDir:           codes.FailedPrecondition,
	meta.NotPermitted:     codes.PermissionDenied,
	meta.AccessDenied:     codes.PermissionDenied,
	meta.BadCapability:    codes.Unauthenticated,
	meta.NotSupported:     codes.Unimplemented,
	meta.Unavailable:      codes.Unavailable,
	meta.NotOwner:         codes.Unavailable,
	meta.SessionExpired:   codes.Unavailable,
	meta.Again:            codes.Aborted,
	meta.Canceled:         codes.Canceled,
	meta.Corrupt:          codes.DataLoss,
}

// Error converts an error into a gRPC status. A status stays unchanged, a context's error
// becomes DeadlineExceeded or Canceled, and every other error is mapped by table.
func Error(err error) error {
	if err == nil {
		return nil
	}
	// A wrapped status is only a cause: the error around the status says more.
	if _, is := err.(interface{ GRPCStatus() *status.Status }); is {
		return err
	}
	code, known := table[meta.KindOf(err)]
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	case !known:
		code = codes.Internal
	}
	return status.Error(code, err.Error())
}

// Pending is the set of keys (volumes, names, paths) claimed by running calls. The zero value
// is ready for use.
type Pending struct {
	mu sync.Mutex
	on map[string]struct{}
}

// Begin claims either all of things or nothing; end releases the claims. Errors: a status of
// Aborted if another call has claimed a key; the orchestrator then calls again later.
func (p *Pending) Begin(things ...string) (end func(), err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, x := range things {
		if _, busy := p.on[x]; busy {
			return nil, status.Errorf(codes.Aborted, "a call about %q is under way", x)
		}
	}
	if p.on == nil {
		p.on = map[string]struct{}{}
	}
	for _, x := range things {
		p.on[x] = struct{}{}
	}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, x := range things {
			delete(p.on, x)
		}
	}, nil
}
