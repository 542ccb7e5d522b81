package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	adminapi "penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/namespace"
)

// snapshot takes a snapshot. The request may be sent again, when a connection was silent.
func (p *peer) snapshot(t *testing.T, name string) (i meta.SnapshotInfo) {
	t.Helper()
	i, err := p.TakeSnapshot(t.Context(), 1, name)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func (p *peer) snapshots(t *testing.T) (l meta.SnapshotList) {
	t.Helper()
	l, err := p.Snapshots(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// names lists a volume's snapshots by name and state.
func (p *peer) names(t *testing.T) (l []string) {
	t.Helper()
	for _, s := range p.snapshots(t).Snapshots {
		l = append(l, s.Name+" "+string(s.State))
	}
	return l
}

// unless is an error until ok.
func unless(ok bool) error {
	if ok {
		return nil
	}
	return errors.New("not yet")
}

// exact fails if fsck finds anything.
func (s *site) exact() {
	s.t.Helper()
	r, err := s.srv.checker.Fsck(s.t.Context(), 1)
	if err != nil {
		s.t.Fatal(err)
	}
	if r.Count > 0 {
		s.t.Fatal("DATA: fsck:", r.Problems)
	}
}

// letGo answers the recalls that the peer was holding back, and holds nothing more.
func (p *peer) letGo() {
	p.mu.Lock()
	held := p.held
	p.hold, p.held = false, nil
	p.mu.Unlock()
	for _, done := range held {
		done()
	}
}

// refusedAt is the kind of error that a read at a snapshot ends with.
func (p *peer) refusedAt(t *testing.T, at meta.Generation, op meta.Op) meta.Kind {
	t.Helper()
	_, err := p.DoAt(t.Context(), 1, at, op)
	return meta.KindOf(err)
}

func TestReadsAtASnapshot(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "f").Attr.Ino
	a.do(t, &meta.SetXattr{Ino: ino, Name: "user.x", Value: []byte("then")}, meta.LeaseNone)
	at := a.snapshot(t, "one").At
	a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "f"}, meta.LeaseNone)
	a.create(t, "g")

	// b sees the earlier state, at once, though a holds leases on all of the tree.
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	before := a.recalls
	r, err := b.DoAt(ctx, 1, at, &meta.Lookup{Parent: meta.RootIno, Name: "f"})
	if err != nil || r.Attr.Ino != ino || r.Attr.Nlink != 1 {
		t.Fatalf("lookup at the snapshot: %+v, %v", r, err)
	}
	if r, err = b.DoAt(ctx, 1, at, &meta.GetXattr{Ino: ino, Name: "user.x"}); err != nil || string(r.Data) != "then" {
		t.Fatalf("DATA: attribute at the snapshot: %q, %v", r.Data, err)
	}
	if r, err = b.DoAt(ctx, 1, at, &meta.ReadDir{Ino: meta.RootIno, Max: 10}); err != nil || len(r.Entries) != 1 || r.Entries[0].Name != "f" {
		t.Fatalf("names at the snapshot: %+v, %v", r.Entries, err)
	}
	if r, err = b.DoAt(ctx, 1, at, &meta.StatFSOp{}); err != nil || r.StatFS.UsedInodes != 2 {
		t.Fatalf("usage at the snapshot: %+v, %v", r.StatFS, err)
	}
	if a.recalls != before || b.mode(ino) != meta.LeaseNone || b.mode(meta.RootIno) != meta.LeaseNone {
		t.Fatal("reads at a snapshot asked for leases")
	}
	for kind, got := range map[meta.Kind]meta.Kind{
		meta.NotFound:       b.refusedAt(t, at, &meta.Lookup{Parent: meta.RootIno, Name: "g"}),
		meta.NoSuchSnapshot: b.refusedAt(t, at+1, &meta.GetAttr{Ino: meta.RootIno}),
		meta.ReadOnly:       b.refusedAt(t, at, &meta.Unlink{Parent: meta.RootIno, Name: "f"}),
	} {
		if kind != got {
			t.Errorf("%v, want %v", got, kind)
		}
	}

	// The next owner answers at once, before a has come back.
	s.crash()
	s.start()
	if r, err = b.DoAt(ctx, 1, at, &meta.Lookup{Parent: meta.RootIno, Name: "f"}); err != nil || r.Attr.Ino != ino {
		t.Fatalf("lookup at the snapshot under the next owner: %+v, %v", r, err)
	}
}

// openEnd makes a file whose end is open: the owner knows of 500 bytes, 700 are synced and 900
// written.
func (p *peer) openEnd(t *testing.T, chunks *fakeChunks) (meta.Ino, meta.ChunkGrant) {
	t.Helper()
	ino := p.create(t, "log").Attr.Ino
	g := p.alloc(t, true)
	chunks.has(g.ID, 900, 700)
	p.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 500, Chunk: g.ID, OpenEnded: true}}, Size: 500, Synced: true}, meta.LeaseNone)
	return ino, g
}

func TestSnapshotNames(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.snapshot(t, "one")
	for name, why := range map[string]meta.Kind{
		"one": meta.Exists, "": meta.Invalid, ".": meta.Invalid, "a/b": meta.Invalid, "a@b": meta.Invalid, "a:b": meta.Invalid, "..": meta.Invalid, "a\xff": meta.Invalid, "a\nb": meta.Invalid,
		strings.Repeat("x", 300): meta.NameTooLong,
	} {
		if _, err := a.TakeSnapshot(t.Context(), 1, name); !errors.Is(err, why) {
			t.Errorf("%q: %v, want %v", name, err, why)
		}
	}
	// A request that is sent again, also to the next owner, makes a single snapshot.
	create := &adminapi.CreateSnapshotRequest{Volume: adminapi.Numbered(1), Name: "two", RequestId: 77}
	first, err := a.API.Snapshots.CreateSnapshot(t.Context(), create)
	if err != nil {
		t.Fatal(err)
	}
	s.crash()
	s.start()
	again, err := a.API.Snapshots.CreateSnapshot(t.Context(), create)
	if err != nil || !proto.Equal(first, again) {
		t.Fatal(first, again, err)
	}
	create.RequestId = 78
	if _, err := a.API.Snapshots.CreateSnapshot(t.Context(), create); !errors.Is(err, meta.Exists) {
		t.Errorf("another request: %v", err)
	}
	for what, err := range map[string]error{"delete": second(a.DeleteSnapshot(t.Context(), 1, "three")), "roll back": a.RollBack(t.Context(), 1, "three", false)} {
		if !errors.Is(err, meta.NoSuchSnapshot) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := a.API.Snapshots.DeleteSnapshot(t.Context(), &adminapi.DeleteSnapshotRequest{Volume: adminapi.Numbered(1), Name: "two"}); !errors.Is(err, meta.Invalid) {
		t.Errorf("a deletion that does not say of which generation: %v", err)
	}
	if got := a.names(t); !slices.Equal(got, []string{"one ready", "two ready"}) {
		t.Fatal(got)
	}
}

// TestSnapshotsAreDissolved: data that deleted snapshots alone held goes in steps that any owner
// continues; a chunk is deleted when the last snapshot with the chunk is gone, and not before.
func TestSnapshotsAreDissolved(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	chunks := s.chunkServer(1)
	a := s.dial("a")
	ino := a.create(t, "f").Attr.Ino
	g := a.alloc(t, false)
	chunks.has(g.ID, 4096, 4096)
	a.commit(t, ino, g, 0, 4096, true)
	if _, err := a.EndChunk(t.Context(), 1, g.ID, 4096); err != nil {
		t.Fatal(err)
	}
	for i := range 900 {
		a.create(t, fmt.Sprint("n", i))
	}
	for _, name := range []string{"one", "two", "three"} {
		a.snapshot(t, name)
	}
	for i := range 900 {
		a.do(t, &meta.SetAttr{Ino: ino + 1 + meta.Ino(i), Mask: meta.SetMode, Mode: 0o600}, meta.LeaseNone)
	}
	a.do(t, &meta.SetAttr{Ino: ino, Mask: meta.SetSize}, meta.LeaseNone)
	if held := a.snapshots(t).Held; held != 4096 {
		t.Fatal(held)
	}
	remove := func(name string) {
		t.Helper()
		if _, err := a.DeleteSnapshot(t.Context(), 1, name); err != nil {
			t.Fatal(err)
		}
	}
	gone := func(name string) func() error {
		return func() error {
			return unless(!slices.ContainsFunc(a.names(t), func(n string) bool { return strings.HasPrefix(n, name+" ") }))
		}
	}
	at := a.snapshots(t).Snapshots[0].At
	remove("three")
	// The owner dies while dissolving a snapshot.
	s.crash()
	s.start()
	if err := s.srv.chunkServers.AwaitServer(t.Context(), []meta.ServerID{1}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "three is gone", gone("three"))
	s.exact()
	remove("one")
	if k := a.refusedAt(t, at, &meta.GetAttr{Ino: ino}); k != meta.NoSuchSnapshot {
		t.Fatal(k)
	}
	eventually(t, "one is gone", gone("one"))
	s.exact()
	if n := len(chunks.ordered(g.ID, meta.OrderDelete)); n != 0 || a.snapshots(t).Held != 4096 {
		t.Fatal("the chunk that a snapshot sees was deleted")
	}
	remove("two")
	eventually(t, "the chunk is deleted", func() error { return unless(len(chunks.ordered(g.ID, meta.OrderDelete)) > 0) })
	eventually(t, "two is gone", gone("two"))
	s.exact()
	if l := a.snapshots(t); len(l.Snapshots) != 0 || l.Held != 0 {
		t.Fatal(l)
	}
}

// TestRollback: back to a snapshot, with the owner dying at any step; sessions
// are told, and nobody sees anything in between.
func TestRollback(t *testing.T) {
	t.Parallel()
	for steps := range 4 {
		t.Run(fmt.Sprint(steps), func(t *testing.T) {
			s := newSite(t)
			a := s.dial("a")
			var inos []meta.Ino
			for i := range 600 {
				inos = append(inos, a.create(t, fmt.Sprint("n", i)).Attr.Ino)
			}
			a.snapshot(t, "one")
			for i, ino := range inos {
				a.do(t, &meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600}, meta.LeaseNone)
				if i%2 == 0 {
					a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: fmt.Sprint("n", i)}, meta.LeaseNone)
				}
			}
			a.create(t, "new")
			admin := s.dial("admin")
			if err := admin.RollBack(t.Context(), 1, "one", false); !errors.Is(err, meta.Busy) {
				t.Errorf("although a is in it: %v", err)
			}
			if steps == 0 {
				if err := admin.RollBack(t.Context(), 1, "one", true); err != nil {
					t.Fatal(err)
				}
			} else {
				o := s.srv.hosted.opened(1)
				o.mu.Lock()
				o.closed = make(chan struct{})
				o.mu.Unlock()
				if err := o.rollbacks.endAll(); err != nil {
					t.Fatal(err)
				}
				for o.collection.reapSome() {
				}
				step := &meta.Rollback{To: 1}
				for range steps {
					o.mu.Lock()
					res, err := o.run(step, 0)
					wait := o.untilDurable(o.newest())
					o.mu.Unlock()
					if err != nil {
						t.Fatal(err)
					}
					<-wait
					if step.From = res.Data; res.EOF {
						t.Fatalf("%d steps were all", steps)
					}
				}
				s.crash()
				s.start()
				if l := admin.names(t); !slices.Equal(l, []string{"one ready"}) && !slices.Equal(l, []string{"one rolling back"}) {
					t.Fatal(l)
				}
			}
			eventually(t, "a hears that its session ended", func() error {
				a.mu.Lock()
				defer a.mu.Unlock()
				return unless(a.expired == 1)
			})
			r := a.do(t, &meta.ReadDir{Ino: meta.RootIno, Max: 4096, Plus: true}, meta.LeaseNone)
			if len(r.Entries) != 600 {
				t.Fatalf("%d entries", len(r.Entries))
			}
			for _, e := range r.Entries {
				if e.Name == "new" || e.Attr == nil || e.Attr.Mode&0o777 != 0o644 {
					t.Fatalf("%+v", e)
				}
			}
			a.create(t, "after")
			s.exact()
			if l := admin.names(t); !slices.Equal(l, []string{"one ready"}) {
				t.Fatal(l)
			}
		})
	}
}

func TestSnapshotDiff(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	ask := func(from, to string) (kinds []string) {
		t.Helper()
		if err := a.DiffSnapshots(t.Context(), 1, from, to, func(c meta.Change) error {
			kinds = append(kinds, fmt.Sprint(c.Kind, " ", c.Path, c.From))
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return kinds
	}
	a.create(t, "\xff")
	ino := a.create(t, "b").Attr.Ino
	a.snapshot(t, "one")
	if got := ask("one", ""); len(got) != 0 {
		t.Fatal(got)
	}
	a.do(t, &meta.Rename{Parent: meta.RootIno, Name: "\xff", NewParent: meta.RootIno, NewName: "\xfe"}, meta.LeaseNone)
	a.do(t, &meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600}, meta.LeaseNone)
	want := []string{fmt.Sprint(meta.PathChanged, " b"), fmt.Sprint(meta.PathRenamed, " \xfe\xff")}
	if got := ask("one", ""); !slices.Equal(got, want) {
		t.Fatalf("%q, want %q", got, want)
	}
	a.snapshot(t, "two")
	for i := range diffPage + 5 {
		a.create(t, fmt.Sprint("n", i))
	}
	if got := ask("one", "two"); !slices.Equal(got, want) {
		t.Fatalf("%q, want %q", got, want)
	}
	if got := ask("two", ""); len(got) != diffPage+5 || !slices.IsSorted(got) {
		t.Fatalf("%d changes", len(got))
	}
	// Two at a time, page by page.
	page := func(q *adminapi.DiffSnapshotsRequest) (told int) {
		t.Helper()
		q.Volume = adminapi.Numbered(1)
		answer, err := a.API.Snapshots.DiffSnapshots(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		q.PageToken = answer.NextPageToken
		return len(answer.Changes)
	}
	x, y := &adminapi.DiffSnapshotsRequest{From: "two"}, &adminapi.DiffSnapshotsRequest{From: "one"}
	page(x)
	page(y)
	if m, n := page(x), page(y); m != 5 || n != 7 {
		t.Fatalf("last pages of %d and %d changes", m, n)
	}
	// The owner keeps two comparisons; comparisons read to the end make room.
	s.srv.comparisons.most = 2
	x, y = &adminapi.DiffSnapshotsRequest{From: "two"}, &adminapi.DiffSnapshotsRequest{From: "one"}
	page(x)
	page(y)
	o := s.srv.hosted.opened(1)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := o.diff(ctx, "one", "two", false); meta.KindOf(err) != meta.Interrupted {
		t.Fatalf("a third comparison: %v", err)
	}
	third := make(chan error, 1)
	go func() {
		_, err := o.diff(t.Context(), "one", "two", false)
		third <- err
	}()
	page(x)
	if err := <-third; err != nil {
		t.Fatalf("a third comparison, when the first was told: %v", err)
	}
	page(y)
	// The owner does not make a comparison for a caller that waits no more.
	if err := o.settled(t.Context()); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	frozen, release, err := o.freezeWhole(gone)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	two, err := o.snapshots.find("two")
	if err != nil {
		t.Fatal(err)
	}
	_, err = namespace.Diff(frozen, two.At, 0)
	if err := frozen.Close(); err != nil {
		t.Error(err)
	}
	release()
	if meta.KindOf(err) != meta.Canceled {
		t.Errorf("a comparison whose caller is gone: %v", err)
	}
	for why, q := range map[meta.Kind]*adminapi.DiffSnapshotsRequest{
		meta.Invalid: {From: "two", To: "one"}, meta.NoSuchSnapshot: {From: "nine"}, meta.Stale: {From: "one", PageToken: "7.0"},
	} {
		q.Volume = adminapi.Numbered(1)
		if _, err := a.API.Snapshots.DiffSnapshots(t.Context(), q); !errors.Is(err, why) {
			t.Errorf("%v: %v, want %v", q, err, why)
		}
	}
}

// TestSnapshotCostsTheSame, however much the volume holds: one entry of two records.
func TestSnapshotCostsTheSame(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	var entries []int
	have := 0
	for _, files := range []int{1_000, 30_000} {
		for ; have < files; have += 1000 {
			var ops []client.BatchOp
			for i := range 1000 {
				ops = append(ops, client.BatchOp{Op: newFile(fmt.Sprint("n", have+i))})
			}
			if _, _, err := a.DoBatch(t.Context(), 1, client.AnyEpoch, ops); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.Sync(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		o := s.srv.hosted.opened(1)
		o.mu.Lock()
		_, effects, err := namespace.Execute(o.view(), o.context(0), &meta.TakeSnapshot{Name: fmt.Sprint("at", files)})
		o.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		a.snapshot(t, fmt.Sprint("at", files))
		t.Logf("%d files: %v, %d records", files, time.Since(began), len(effects))
		entries = append(entries, len(effects))
	}
	if entries[0] != entries[1] || entries[1] > 2 {
		t.Errorf("%v records: it grows with the volume", entries)
	}
}

// use counts the bytes that snapshots hold.
func (p *peer) use(t *testing.T, drop ...string) (u meta.SnapshotUse) {
	t.Helper()
	u, err := p.SnapshotUse(t.Context(), 1, drop)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// The owner counts the bytes that snapshots hold exactly, not by extents; the next owner counts
// the same; and the predicted gain of deleting some snapshots is the real gain.
func TestSnapshotUse(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.chunkServer(1)
	a := s.dial("a")
	ino, g := a.create(t, "f").Attr.Ino, a.alloc(t, false)
	next := uint64(0)
	write := func(n uint64) {
		t.Helper()
		a.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: n, Chunk: g.ID, ChunkOff: next}}, Synced: true}, meta.LeaseNone)
		next += n
	}
	says := func(when string, live, alone, freed uint64, drop []string, each ...uint64) {
		t.Helper()
		u := a.use(t, drop...)
		var got []uint64
		for _, i := range u.Snapshots {
			got = append(got, i.Alone)
		}
		if u.Live != live || u.Alone != alone || u.Going != 0 || u.Freed != freed || !slices.Equal(got, each) {
			t.Errorf("%s: %+v; want %d live, %d alone, %d freed by %v, each %v", when, u, live, alone, freed, drop, each)
		}
	}
	both := []string{"two", "one"}
	write(8192)
	a.snapshot(t, "one")
	says("nothing changed", 8192, 0, 0, []string{"one"}, 0)
	write(4096)
	a.snapshot(t, "two")
	write(2048)
	says("the first bytes were written anew, twice", 8192, 4096+2048, 4096+2048, both, 4096, 2048)
	if held := a.snapshots(t).Held; held <= 4096+2048 {
		t.Errorf("whole extents are %d bytes: this tests nothing", held)
	}
	a.do(t, &meta.SetAttr{Ino: ino, Mask: meta.SetSize}, meta.LeaseNone)
	says("the file was cut off, both have the last bytes", 0, 8192+4096, 4096, both[:1], 4096, 4096)
	says("both", 0, 8192+4096, 8192+4096, both, 4096, 4096)
	if _, err := a.SnapshotUse(t.Context(), 1, []string{"one", "none"}); !errors.Is(err, meta.NoSuchSnapshot) {
		t.Errorf("one that is not there: %v", err)
	}
	s.crash()
	s.start()
	says("the next owner", 0, 8192+4096, 8192+4096, both, 4096, 4096)
	if _, err := a.DeleteSnapshot(t.Context(), 1, "one"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first one is gone", func() error { return unless(a.use(t).Going == 0) })
	says("what one alone held is free", 0, 8192, 8192, both[:1], 8192)
}
