package server

import (
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/namespace"
)

// Bytes that snapshots alone hold count in a quota by policy: the bytes from before the policy
// came, and bytes overwritten since, until the snapshots or the policy go. A request without a
// need for room makes no count, and the next owner knows the count.
func TestSnapshotsCount(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.chunkServer(1)
	a := s.dial("a")
	ino, g := a.create(t, "f").Attr.Ino, a.alloc(t, false)
	next := uint64(0)
	write := func(off, n uint64) error {
		t.Helper()
		err := a.try(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: off, Len: n, Chunk: g.ID, ChunkOff: next}}, Synced: true})
		next += n
		return err
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	counts := func(what string, alone uint64) {
		t.Helper()
		eventually(t, what, func() error {
			q := a.snapshots(t).Quota
			if q == nil || !q.InForce || q.Falls || q.Bytes != alone {
				return fmt.Errorf("%+v, want %d", q, alone)
			}
			return nil
		})
		o := s.srv.hosted.opened(1)
		o.mu.Lock()
		defer o.mu.Unlock()
		if r, err := namespace.Check(o.view()); err != nil || !r.OK() {
			t.Errorf("%s: %v, %v", what, r.Problems, err)
		}
	}
	policy := meta.Policy{Replicas: 1, LocalFirst: true, QuotaBytes: 20000}
	set := func(on bool) {
		t.Helper()
		policy.QuotaSnapshots = on
		a.mustSet(t, policy)
	}
	must(write(0, 8192))
	a.snapshot(t, "one")
	must(write(0, 4096))
	set(true)
	counts("what was there before", 4096)
	must(write(4096, 2048))
	counts("overwritten since", 6144)
	if u := a.do(t, &meta.StatFSOp{}, meta.LeaseNone).StatFS; u.UsedBytes != 8192+6144 {
		t.Errorf("%d bytes are used", u.UsedBytes)
	}
	must(write(8192, 4000)) // 1664 are left
	a.snapshot(t, "two")
	counts("another snapshot", 6144)
	reserve := func(off, n uint64) (uint64, meta.Kind) {
		t.Helper()
		p, err := a.Reserve(t.Context(), 1, client.AnyEpoch, 0, n, 0, client.Place{Ino: ino, Off: off, Len: n})
		if err == nil {
			_, err = a.Reserve(t.Context(), 1, client.AnyEpoch, p.Granted, 0, 0, client.Place{})
			must(err)
		}
		return p.Granted, meta.KindOf(err)
	}
	must(write(0, 1000))
	for _, c := range []struct {
		off, n, granted uint64
		kind            meta.Kind
	}{
		{0, 1000, 0, meta.KindOK}, // no snapshot has these bytes, and 664 are left
		{0, 1664, 664, meta.KindOK},
		{0, 1665, 0, meta.QuotaExceeded},
		{12192, 665, 0, meta.QuotaExceeded},
		{12000, 192, 192, meta.KindOK},
	} {
		if n, kind := reserve(c.off, c.n); kind != c.kind || kind == meta.KindOK && n < c.granted || c.n > 664 && n > c.granted {
			t.Errorf("%d bytes at %d: %d, %v", c.n, c.off, n, kind)
		}
	}
	if err := write(0, 1665); meta.KindOf(err) != meta.QuotaExceeded {
		t.Errorf("one byte too many is overwritten: %v", err)
	}
	must(write(0, 1664))
	counts("it is full", 6144+1664)
	must(write(0, 1664))
	a.do(t, &meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 8192}, meta.LeaseNone) // both snapshots have the removed bytes
	counts("still full", 6144+1664+4000)
	s.crash()
	s.start()
	counts("the next owner", 6144+1664+4000)
	if err := write(0, 1665); meta.KindOf(err) != meta.QuotaExceeded {
		t.Errorf("one byte too many is overwritten after a crash: %v", err)
	}
	_, err := a.DeleteSnapshot(t.Context(), 1, "two")
	must(err)
	// The first snapshot has the same 4096 to 8192 less the bytes overwritten before.
	counts("the second one is gone", 6144)
	must(write(0, 5000))
	_, err = a.DeleteSnapshot(t.Context(), 1, "one")
	must(err)
	counts("both are gone", 0)
	set(false)
	if q := a.snapshots(t).Quota; q != nil {
		t.Errorf("switched off: %+v", q)
	}
	a.snapshot(t, "three")
	must(write(0, 8192))
	if u := a.do(t, &meta.StatFSOp{}, meta.LeaseNone).StatFS; u.UsedBytes != 8192 {
		t.Errorf("%d bytes are used", u.UsedBytes)
	}
	set(true)
	counts("switched on again", 8192)
	a.snapshot(t, "four")
	_, err = a.DeleteSnapshot(t.Context(), 1, "four")
	must(err)
	counts("one of which nothing is left at once", 8192)
}
