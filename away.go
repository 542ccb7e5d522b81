package penstock

import (
	"context"
	"errors"
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// While servers are away, callers that wait for a flush keep waiting: the bytes in memory are
// safe, and a pause is all that the callers notice.

// flushAgain is the time between two rounds of a flush after a transient failure.
const flushAgain = time.Second

// patiently repeats a round of flushing after transient failures. Between two rounds the
// file's turns are free, for example for a recall.
func (wb *writeBack) patiently(ctx context.Context, in *inode, round func() error) error {
	v := wb.v
	for {
		err := round()
		if !passing(err) {
			return err
		}
		v.c.log.Warn("written bytes wait until servers answer", "inode", v.subject(in.ino), "err", err)
		select {
		case <-time.After(flushAgain):
		case <-ctx.Done():
			return meta.E("write back", meta.Interrupted, v.subject(in.ino), errors.Join(context.Cause(ctx), err))
		case <-v.c.ctx.Done():
			return err
		}
	}
}

// passes reports whether the failure of a flush ends when servers are back: servers are
// unreachable, or chunks failed on the way. The bytes themselves are all still here.
func passes(err error) bool {
	if !errors.Is(err, errAgain) {
		return false
	}
	var hard func(err error) bool
	hard = func(err error) bool {
		if several, ok := err.(interface{ Unwrap() []error }); ok {
			return slices.ContainsFunc(several.Unwrap(), hard)
		}
		switch meta.KindOf(err) {
		case meta.Unavailable, meta.NotOwner, meta.Fenced, meta.Sealed, meta.NoSuchChunk, meta.WrongOffset, meta.BadCapability:
			return false
		}
		return err != errAgain
	}
	return !hard(err)
}

// passing is passes for a verdict.
func passing(err error) bool {
	return meta.KindOf(err) == meta.Unavailable && errors.Is(err, errAgain)
}

// mayPass reports whether a later flush of the bytes may succeed: servers come back, space is
// freed, a quota is raised, a broken disk is replaced.
func mayPass(err error) bool {
	switch {
	case errors.Is(err, meta.AccessDenied):
		return false
	case errors.Is(err, meta.NoSpace), errors.Is(err, meta.QuotaExceeded):
		return true
	}
	return errors.Is(err, errAgain)
}

// recalled reports whether a recall waits for the lease of one of the files.
func recalled(ws []*work) bool {
	return slices.ContainsFunc(ws, func(w *work) bool {
		w.in.mu.Lock()
		defer w.in.mu.Unlock()
		return w.in.recall != nil
	})
}
