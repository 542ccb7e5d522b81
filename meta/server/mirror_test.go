package server

import (
	"encoding/json"
	"errors"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// fill takes the right to fill volume 1, or gives it up.
func (p *peer) fill(t *testing.T, typ meta.LockType) {
	t.Helper()
	if err := p.SetLock(t.Context(), 1, meta.Lock{Ino: meta.MirrorLock, Owner: 7, Type: typ, Flock: true, End: 1<<63 - 1}, false); err != nil {
		t.Fatal(err)
	}
}

// Who filled a mirror's target, slept, and wakes when the right is another's, or the
// volume one like others, keeps no snapshot of it and rolls nothing back: others
// wrote what is there.
func TestOnlyWhoFillsRollsBack(t *testing.T) {
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
	// The right may go while what clients hold is taken back for the snapshot.
	if _, err := s.srv.opened(1).takeSnapshot(ctx, &meta.TakeSnapshot{Name: "late"}, s.srv.session(a.ID())); !errors.Is(err, meta.ReadOnly) {
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

// TestMirrorRecords: a volume that a mirror's record names is not deleted before the
// record, and a record whose volume is gone is dropped by who lists them.
func TestMirrorRecords(t *testing.T) {
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
	a.refused(t, meta.Busy, wire.Admin{Op: wire.AdminDeleteVolume, Volume: v})
	for range 2 {
		var l []meta.Mirror
		if err := json.Unmarshal(a.admin(t, wire.Admin{Op: wire.AdminMirrors}).Report, &l); err != nil || len(l) != 1 || l[0].Target != v {
			t.Fatal(l, err)
		}
	}
	if l, err := s.cluster.Mirrors(t.Context()); err != nil || len(l) != 1 {
		t.Errorf("%v, %v", l, err)
	}
	a.admin(t, wire.Admin{Op: wire.AdminMirrorDrop, Volume: v})
	a.admin(t, wire.Admin{Op: wire.AdminDeleteVolume, Volume: v})
}
