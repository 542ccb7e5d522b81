// Package reply owns how the driver's services answer: kinds of errors as codes
// of gRPC, in one table, and calls that are refused because another one about the
// same thing is under way.
package reply

import (
	"context"
	"errors"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
)

// table says which code a kind is. What is not named is Internal.
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

// Error turns an error into one that gRPC sends: statuses as they are, ends of
// contexts by their nature, kinds by the table.
func Error(err error) error {
	if err == nil {
		return nil
	}
	// One that is wrapped is a cause; what it is the cause of says more.
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

// Pending is the set of things that calls are about right now. The zero value is
// ready.
type Pending struct {
	mu sync.Mutex
	on map[string]struct{}
}

// Begin claims things, all or none of them; end gives them back. Errors: a
// status of Aborted if one is claimed already, which tells the orchestrator to
// call again later.
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
