package penstock

import (
	"context"
	"errors"
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// While servers are away whoever waits for a flush waits on: nothing is lost that is
// in memory, so that a pause is all there is to tell.

// flushAgain is the time between two rounds of a flush, if what failed passes.
const flushAgain = time.Second

// patiently repeats a round of flushing that fails with what passes. Between two the
// file's turns are free, as for who gives its lease back.
func (v *Volume) patiently(ctx context.Context, in *inode, round func() error) error {
	for {
		err := round()
		if !passing(err) {
			return err
		}
		v.c.log.Warn("write back waits for servers", "inode", v.subject(in.ino), "err", err)
		select {
		case <-time.After(flushAgain):
		case <-ctx.Done():
			return meta.E("write back", meta.Interrupted, v.subject(in.ino), errors.Join(context.Cause(ctx), err))
		case <-v.c.ctx.Done():
			return err
		}
	}
}

// passes tells whether what a flush failed with is over once servers are back: they
// can't be reached, or chunks of theirs ended on the way. It says nothing against what
// was to be written, which is all here still.
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

// mayPass tells whether bytes that could not be flushed may get there later: servers come
// back, space is made, a quota is raised, a broken disk is replaced.
func mayPass(err error) bool {
	switch {
	case errors.Is(err, meta.AccessDenied):
		return false
	case errors.Is(err, meta.NoSpace), errors.Is(err, meta.QuotaExceeded):
		return true
	}
	return errors.Is(err, errAgain)
}

// recalled tells whether somebody waits for the lease of one of the files.
func recalled(ws []*work) bool {
	return slices.ContainsFunc(ws, func(w *work) bool {
		w.in.mu.Lock()
		defer w.in.mu.Unlock()
		return w.in.recall != nil
	})
}
