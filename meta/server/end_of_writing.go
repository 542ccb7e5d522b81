package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// Three operations end writing in a volume (rule 20): it becomes immutable, is deleted, or is
// rolled back. Under an exclusive lease, a client acknowledges a program's writes and commits
// the writes a moment later. A commit after the end of writing would be refused, although the
// program's write succeeded. So the owner ends writing behind the barrier used for snapshots
// (snapshot.go): the owner recalls exclusive leases, with the writes made under them, grants
// no exclusive lease until writing has ended, and from then on write(2) itself fails.
//
// A snapshot takes the last synced state of a file whose writer does not commit in time. The
// end of writing does not: if a client can't commit in time, the owner refuses the request,
// unless the request gives up the client's uncommitted writes.

// endingWait is how long clients may take to commit in a round. endingFor bounds all rounds
// together; afterwards the request is refused. Between two rounds, writers go on for
// endingPause.
const (
	endingWait  = 10 * time.Second
	endingFor   = time.Minute
	endingPause = time.Second
)

// writingEnd says how writing ends.
type writingEnd struct {
	op    string // for errors and logs
	force bool   // give up writes that can't be committed
	// goesOn: writers may write afterwards, so a client that can't commit in time commits
	// later.
	goesOn bool
}

// late reports whether writing ends without the clients that can't commit in time.
func (e writingEnd) late() bool { return e.force || e.goesOn }

// openEnds ends the writing of clients: for a moment or for good, with every acknowledged byte
// committed and no file open-ended.
type openEnds struct {
	k       *kernel
	leases  *leases
	sealing *sealing
}

// endWriting runs end at a moment when no client holds uncommitted writes, no file has an open
// end, and no client may begin to write: end must make sure that no client may write afterwards.
// end runs without the owner's mu. With how.force or how.goesOn, end runs despite clients that
// can't commit in time. Errors: Unavailable (a client did not commit its writes, or a chunk left
// open can't be sealed), and end's.
func (oe *openEnds) endWriting(ctx context.Context, how writingEnd, end func() error) error {
	k := oe.k
	if k.srv.cfg.Unsafe.NoRecall {
		return end()
	}
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	sealing, cancel := context.WithCancel(ctx)
	defer cancel()
	began := time.Now()
	for {
		ended, again, err := oe.endBehindBarrier(ctx, sealing, how, end)
		if ended || err != nil && !again {
			return err
		}
		if time.Since(began) > cmp.Or(k.srv.cfg.endingFor, endingFor) {
			return err
		}
		select {
		case <-time.After(endingPause):
		case <-ctx.Done():
			return err
		}
	}
}

// endBehindBarrier makes a single attempt behind the barrier. ended: end has run, and err is
// end's error. again: the obstacle may be gone soon.
func (oe *openEnds) endBehindBarrier(ctx, sealing context.Context, how writingEnd, end func() error) (ended, again bool, err error) {
	k := oe.k
	if err := oe.leases.lockWithoutBarrier(ctx, nil); err != nil {
		return false, false, err
	}
	if k.failed != nil {
		defer k.mu.Unlock()
		return false, false, k.failed
	}
	b := oe.leases.raiseBarrier(endingWait)
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		oe.leases.lowerBarrier()
	}()
	late, err := oe.leases.recallWriters(ctx, b.patience)
	if err != nil {
		return false, false, err
	}
	if late.files > 0 && !how.late() {
		return false, true, meta.E(how.op, meta.Unavailable, k.subject(), fmt.Errorf("not all written bytes have arrived yet: %v: wait until the mounts can write them back, or end the mounts; --force gives the bytes up", late))
	}
	k.mu.Lock()
	seals, err := oe.cut(sealing, b)
	k.mu.Unlock()
	if err == nil && seals != nil && !how.late() {
		if err = seals.wait(); err == nil {
			err = meta.E(how.op, meta.Unavailable, k.subject(), errors.New("files are still being appended to"))
		}
		return false, err != nil && ctx.Err() == nil, err
	}
	if err != nil && !how.late() {
		return false, true, err
	}
	if late.files > 0 && !how.goesOn {
		k.log.Warn("writing to the volume ends: bytes that mounts had not written back are given up", "why", how.op, "files", late.files, "by", late.clients)
	}
	return true, false, end()
}

// immutable reports whether the volume's policy forbids all writes. The caller holds mu.
func (o *owner) immutable() bool {
	p, err := namespace.Policy(o.view())
	return err == nil && p.Immutable
}

// cut seals the open chunks at the ends of files. If cut returns neither seals
// nor an error, no file is open-ended, and none becomes so before the mu is released. If the
// seals take longer than barrierHeld, cut returns the running seals. The caller holds
// the owner's mu; cut unlocks the mu while waiting.
func (oe *openEnds) cut(sealing context.Context, b *barrier) (goOn *seals, err error) {
	k := oe.k
	over := time.NewTimer(barrierHeld)
	defer over.Stop()
	for {
		var open []meta.ChunkID
		if err := namespace.OpenEnded(k.view(), func(_ meta.Ino, c meta.ChunkRecord) bool {
			open = append(open, c.ID)
			return true
		}); err != nil {
			return nil, err
		}
		if len(open) == 0 {
			return nil, nil
		}
		b.cut = true
		s := oe.sealing.sealThese(sealing, open)
		k.mu.Unlock()
		select {
		case <-s.done:
			k.mu.Lock()
		case <-over.C:
			k.mu.Lock()
			return s, nil
		}
		if err := s.wait(); err != nil {
			return nil, oe.cantSettle(err)
		}
	}
}

func (oe *openEnds) cantSettle(err error) error {
	k := oe.k
	return meta.E("take snapshot", meta.Unavailable, k.subject(), fmt.Errorf("a file's end can't be settled: %w", err))
}
