package server

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// fill takes the right to fill volume 1, or gives the right up.
func (p *peer) fill(t *testing.T, typ meta.LockType) {
	t.Helper()
	if err := p.SetLock(t.Context(), 1, meta.Lock{Ino: meta.MirrorLock, Owner: 7, Type: typ, Flock: true, End: 1<<63 - 1}, false); err != nil {
		t.Fatal(err)
	}
}

// A mirror that filled a target, slept, and wakes when another session has the right, or the
// volume is an ordinary volume, takes no snapshot of the volume and rolls nothing back: the
// contents are of other writers.
func TestOnlyWhoFillsRollsBack(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	ctx := t.Context()
	a.snapshot(t, "one")
	refused := func(p *peer, when string) {
		t.Helper()
		if err := p.RollBackTarget(ctx, 1, "one"); meta.KindOf(err) != meta.ReadOnly {
			t.Errorf("%s it was rolled back: %v", when, err)
		}
		if err := p.TakeTarget(ctx, 1, "late"); meta.KindOf(err) != meta.ReadOnly {
			t.Errorf("%s a snapshot was taken: %v", when, err)
		}
	}
	a.fill(t, meta.LockWrite)
	refused(a, "before the volume was a target")
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(a.ShowSnapshot(ctx, 1, "one"))
	refused(b, "by who does not fill it")
	a.create(t, "filled")
	must(a.TakeTarget(ctx, 1, "two"))

	a.fill(t, meta.LockUnlock)
	// The right may go while the snapshot recalls the clients' leases.
	if _, _, err := s.srv.hosted.opened(1).snapshots.take(ctx, &meta.TakeSnapshot{Name: "late"}, takeHow{filler: s.srv.clients.session(a.ID())}); !errors.Is(err, meta.ReadOnly) {
		t.Errorf("a snapshot was taken after the right was lost in between: %v", err)
	}
	b.fill(t, meta.LockWrite)
	refused(a, "after the right was lost")
	must(b.ShowSnapshot(ctx, 1, ""))
	refused(b, "after the volume was released")
	b.fill(t, meta.LockUnlock)
	b.create(t, "mine")
	a.fill(t, meta.LockWrite)
	refused(a, "with a right to fill what is no target")
	for _, name := range []string{"filled", "mine"} {
		if b.do(t, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseNone).Attr.Ino == 0 {
			t.Errorf("%q is gone", name)
		}
	}

	must(a.ShowSnapshot(ctx, 1, "one"))
	must(a.RollBackTarget(ctx, 1, "one"))
	// The right went with the session.
	eventually(t, "another fills it", func() error {
		return b.SetLock(ctx, 1, meta.Lock{Ino: meta.MirrorLock, Owner: 8, Type: meta.LockWrite, Flock: true, End: 1<<63 - 1}, false)
	})
	if _, err := b.Do(ctx, 1, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "mine"}, meta.LeaseNone); !errors.Is(err, meta.NotFound) {
		t.Errorf("what was written before is there: %v", err)
	}
}

// TestMirrorRecords: a volume that a mirror's record names is not deleted before the record, and
// a caller that lists mirrors drops a record whose volume is gone.
func TestMirrorRecords(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.snapshot(t, "one")
	v := a.clone(t, 1, "one", "target")
	s.cluster.mu.Lock()
	s.cluster.mirrors = map[meta.VolumeID]meta.Mirror{
		v:  {Version: meta.MirrorVersion, Name: "m", Target: v, State: meta.MirrorPromoted, Source: meta.MirrorSource{Volume: "src"}},
		99: {Version: meta.MirrorVersion, Name: "lost", Target: 99, State: meta.MirrorPromoted},
	}
	s.cluster.mu.Unlock()
	a.mustNot(t, meta.Busy, toDelete(v))
	for range 2 {
		l, err := a.API.Mirrors.ListMirrors(t.Context(), &admin.ListMirrorsRequest{})
		if err != nil || len(l.Mirrors) != 1 || l.Mirrors[0].Target != uint32(v) {
			t.Fatal(l, err)
		}
	}
	if l, err := s.cluster.Mirrors(t.Context()); err != nil || len(l) != 1 {
		t.Errorf("%v, %v", l, err)
	}
	if _, err := a.API.Mirrors.DropMirror(t.Context(), &admin.DropMirrorRequest{Target: admin.Numbered(v)}); err != nil {
		t.Error(err)
	}
	a.must(t, toDelete(v))
}

// A reader that leaves recalls unanswered delays the next shown snapshot, and delays no session:
// neither a reader that was silent from the beginning, nor a reader that answered and fell silent
// with a new lease.
func TestShowHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute) // a session that does not answer lasts so long, and longer
	a, reader := s.dial("a"), s.dial("reader")
	ctx := t.Context()
	sub := a.do(t, &meta.Create{Parent: meta.RootIno, Name: "sub", Mode: meta.TypeDir | 0o755}, meta.LeaseNone).Attr.Ino
	a.snapshot(t, "one")
	a.fill(t, meta.LockWrite)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(a.ShowSnapshot(ctx, 1, "one"))
	a.create(t, "new")
	must(a.TakeTarget(ctx, 1, "two"))
	silent := func(name string, ino meta.Ino) *peer {
		p := s.dial(name)
		p.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseShared)
		if p.mode(ino) != meta.LeaseShared {
			t.Fatalf("%s has no lease", name)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.hold = true
		return p
	}
	asked := func(p *peer) {
		t.Helper()
		eventually(t, "it is asked for its lease", func() error {
			p.mu.Lock()
			defer p.mu.Unlock()
			return unless(len(p.held) > 0) // more often, if the connection was lost
		})
	}
	answer := func(p *peer) {
		p.mu.Lock()
		held := p.held
		p.held = nil
		p.mu.Unlock()
		for _, done := range held {
			done()
		}
	}
	first, second := silent("first", sub), silent("second", meta.RootIno)
	shown := make(chan error, 1)
	go func() { shown <- a.ShowSnapshot(ctx, 1, "two") }()
	reads := func(when string) {
		t.Helper()
		for range 20 {
			ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
			_, err := reader.Do(ctx, 1, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "new"}, meta.LeaseShared)
			cancel()
			if !errors.Is(err, meta.NotFound) {
				t.Fatalf("%s, a reader of the snapshot before gets %v", when, err)
			}
		}
		select {
		case err := <-shown:
			t.Fatalf("%s, the next is shown: %v", when, err)
		default:
		}
	}
	asked(first)
	asked(second)
	reads("while nobody answers")
	answer(first)
	first.do(t, &meta.GetAttr{Ino: sub}, meta.LeaseShared)
	if first.mode(sub) != meta.LeaseShared {
		t.Fatal("it is leased nothing again")
	}
	answer(second)
	asked(first)
	reads("while one that had answered does not")
	for range 100 { // the owner may ask the reader again before the next snapshot is shown
		answer(first)
		select {
		case err := <-shown:
			must(err)
			reader.do(t, &meta.Lookup{Parent: meta.RootIno, Name: "new"}, meta.LeaseShared)
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
	t.Fatal("what readers see is never another")
}

// The shown snapshot changes at a moment without leases, also while the session that fills the
// target, which no reader delays, goes on.
func TestUnleasedBesideFiller(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	a := s.dial("a")
	a.snapshot(t, "one")
	a.fill(t, meta.LockWrite)
	if err := a.ShowSnapshot(t.Context(), 1, "one"); err != nil {
		t.Fatal(err)
	}
	o := s.srv.hosted.opened(1)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := a.Do(ctx, 1, meta.OpID{}, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseShared); err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	// A goroutine that waits long for a mutex gets the mutex in turn, so that another holder
	// comes between any two.
	wg.Go(func() {
		for ctx.Err() == nil {
			o.mu.Lock()
			time.Sleep(2 * time.Millisecond)
			o.mu.Unlock()
		}
	})
	defer wg.Wait()
	defer cancel()
	for range 30 {
		eventually(t, "something is leased", func() error {
			o.mu.Lock()
			defer o.mu.Unlock()
			return unless(o.leases.Mode(s.srv.clients.session(a.ID()), meta.RootIno) != meta.LeaseNone)
		})
		if err := o.mirror.whenUnleased(ctx, func() error {
			if leased, _ := o.leases.RecallAll(time.Now()); len(leased) > 0 {
				t.Errorf("%d inodes are leased", len(leased))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// A session that fills a target takes no lease of the shown snapshot away, and does not wait for
// a lease; its own leases keep nothing from readers. Two sessions that fill one after the other
// see the same tree.
func TestFillerIsApart(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	a, b, reader := s.dial("a"), s.dial("b"), s.dial("reader")
	ctx := t.Context()
	a.fill(t, meta.LockWrite)
	f := a.create(t, "f").Attr.Ino
	a.snapshot(t, "one")
	if err := a.ShowSnapshot(ctx, 1, "one"); err != nil {
		t.Fatal(err)
	}
	recalls := func(p *peer) int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.recalls
	}
	leased := func(p *peer, ino meta.Ino, want meta.LeaseMode) {
		t.Helper()
		var op meta.Op = &meta.GetAttr{Ino: ino}
		if want == meta.LeaseExclusive {
			op = &meta.Open{Ino: ino}
		}
		p.do(t, op, want)
		if got := p.mode(ino); got != want {
			t.Errorf("of inode %d it is leased %v, not %v", ino, got, want)
		}
	}
	before := recalls(a) // for the first to be shown
	reader.mu.Lock()
	reader.hold = true // the reader would never answer
	reader.mu.Unlock()
	leased(reader, meta.RootIno, meta.LeaseShared)
	leased(reader, f, meta.LeaseShared)
	leased(a, f, meta.LeaseExclusive)
	change := func(p *peer, name string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		for _, op := range []meta.Op{&meta.SetAttr{Ino: f, Mask: meta.SetMode, Mode: 0o600}, &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular}} {
			if _, err := p.Do(ctx, 1, meta.OpID{}, op, meta.LeaseExclusive); err != nil {
				t.Fatalf("%T: %v", op, err)
			}
		}
	}
	change(a, "filled")
	if n := recalls(reader); n > 0 {
		t.Errorf("a reader was asked for %d leases", n)
	}
	other := s.dial("other")
	leased(other, f, meta.LeaseShared)
	leased(other, meta.RootIno, meta.LeaseShared)
	if n := recalls(a) - before; n > 0 {
		t.Errorf("who fills was asked for %d leases", n)
	}
	a.fill(t, meta.LockUnlock)
	b.fill(t, meta.LockWrite)
	change(b, "too")
	if a.mode(f) != meta.LeaseNone || a.mode(meta.RootIno) != meta.LeaseNone {
		t.Error("who filled before was not asked for what another changes")
	}
	if n := recalls(reader) + recalls(other); n > 0 {
		t.Errorf("readers were asked for %d leases", n)
	}
}
