package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	adminapi "penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/namespace"
)

// snapshot takes one. The request may be sent again, when a connection was silent.
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

// schedule sets the volume's schedule.
func (p *peer) schedule(t *testing.T, keep string) {
	t.Helper()
	if err := p.ScheduleSnapshots(t.Context(), 1, keep); err != nil {
		t.Fatal(err)
	}
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
	r, err := s.srv.Fsck(s.t.Context(), 1)
	if err != nil {
		s.t.Fatal(err)
	}
	if r.Count > 0 {
		s.t.Fatal("DATA: fsck:", r.Problems)
	}
}

// letGo answers what the peer was holding back, and holds nothing more.
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

	// b sees what was, at once, though a holds leases on all of it.
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

// TestSnapshotBarrier: while clients give their exclusive leases back nobody
// gets one, and everything else goes on; what a client commits before it answers
// is in the snapshot.
func TestSnapshotBarrier(t *testing.T) {
	t.Parallel()
	for range 20 {
		if barrierInTime(t) {
			return
		}
	}
	t.Fatal("this machine never did within a second what takes a few milliseconds")
}

// barrierInTime is false if the barrier's second may have been over before its clients
// had answered: nothing is shown then.
func barrierInTime(t *testing.T) bool {
	s := newSite(t)
	s.chunkServer(1)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "f").Attr.Ino
	other := b.create(t, "g").Attr.Ino
	b.do(t, &meta.GetAttr{Ino: other}, meta.LeaseNone)
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()

	admin := s.dial("admin")
	taken := make(chan meta.SnapshotInfo, 1)
	began := time.Now()
	go func() {
		defer close(taken) // also if it fails
		taken <- admin.snapshot(t, "one")
	}()
	eventually(t, "the lease is asked for", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		return unless(len(a.held) > 0)
	})
	if m := b.mode(other); m == meta.LeaseExclusive {
		eventually(t, "b gives its lease back", func() error { return unless(b.mode(other) < meta.LeaseExclusive) })
	}
	// Exclusive leases wait, whatever the file; the rest does not.
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	_, opened := b.Do(ctx, 1, meta.OpID{}, &meta.Open{Ino: other}, meta.LeaseExclusive)
	cancel()
	mode := b.mode(b.create(t, "h").Attr.Ino)
	// What a had buffered is committed now.
	a.do(t, &meta.Write{Ino: ino, Inline: true, Data: []byte("buffered"), Size: 8, Synced: true}, meta.LeaseNone)
	a.letGo()
	info, ok := <-taken
	if !ok {
		t.Fatal("no snapshot")
	}
	if took := time.Since(began); took > barrierWait {
		t.Logf("the snapshot took %v", took)
		return false
	}
	if meta.KindOf(opened) != meta.Interrupted {
		t.Errorf("a file could be opened for writing: %v", opened)
	}
	if mode == meta.LeaseExclusive {
		t.Error("a new file came with an exclusive lease")
	}
	r, err := b.DoAt(t.Context(), 1, info.At, &meta.Open{Ino: ino})
	if err != nil || string(r.Data) != "buffered" {
		t.Fatalf("DATA: the snapshot has %q, %v", r.Data, err)
	}
	b.do(t, &meta.Open{Ino: other}, meta.LeaseExclusive)
	if b.mode(other) != meta.LeaseExclusive {
		t.Fatal("no exclusive lease after the snapshot")
	}
	s.exact()
	return true
}

// TestLeasesComeBackTogether: with the lease on one file a session gets back those that
// the barrier took, in one answer, where nobody has to give anything up for them; and
// the next barrier takes them all.
func TestLeasesComeBackTogether(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b, admin := s.dial("a"), s.dial("b"), s.dial("admin")
	var inos []meta.Ino
	for i := range 6 {
		inos = append(inos, a.create(t, fmt.Sprint("f", i)).Attr.Ino)
	}
	first, others, read, written := inos[0], inos[1:4], inos[4], inos[5]
	expect := func(when string, inos []meta.Ino, want meta.LeaseMode) {
		t.Helper()
		for _, ino := range inos {
			if got := a.mode(ino); got != want {
				t.Errorf("%s it has lease %v on inode %d, not %v", when, got, ino, want)
			}
		}
	}
	recalls := func(p *peer) int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.recalls
	}
	again := func(p *peer, ino meta.Ino, want meta.LeaseMode, also ...meta.Ino) {
		t.Helper()
		p.do(t, &meta.Open{Ino: ino, Also: also}, want)
	}
	for try := 0; admin.snapshot(t, fmt.Sprint("one", try)).Unanswered > 0; try++ { // on a machine that stood still
		if try == 20 {
			t.Fatal("it never answers in time")
		}
	}
	expect("after a barrier", inos, meta.LeaseShared)
	b.do(t, &meta.Open{Ino: read}, meta.LeaseShared)
	b.do(t, &meta.Open{Ino: written}, meta.LeaseExclusive)
	asked := recalls(b)
	// Not for who reads, not for who gave nothing back, and so many at a time.
	again(a, first, meta.LeaseShared, others...)
	expect("with a shared lease", inos[:4], meta.LeaseShared)
	again(b, b.create(t, "g").Attr.Ino, meta.LeaseExclusive, read, meta.RootIno)
	if b.mode(read) != meta.LeaseShared || b.mode(meta.RootIno) > meta.LeaseShared {
		t.Error("it got what it never had")
	}
	again(a, inos[1], meta.LeaseExclusive, append(slices.Repeat([]meta.Ino{inos[1]}, meta.MaxAlso), inos[2])...)
	expect("beyond the bound", inos[2:3], meta.LeaseShared)

	a.do(t, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseShared)
	again(a, first, meta.LeaseExclusive, append(slices.Clone(inos[1:]), 12345, meta.RootIno)...)
	expect("asked for together,", inos[:4], meta.LeaseExclusive)
	expect("what another reads:", []meta.Ino{read}, meta.LeaseShared)
	expect("what another writes:", []meta.Ino{written}, meta.LeaseNone)
	expect("a directory:", []meta.Ino{meta.RootIno}, meta.LeaseShared)
	if n := recalls(b) - asked; n != 0 {
		t.Errorf("another had to give up %d leases", n)
	}

	// The next barrier: none is given while it is up, and it does not end before all
	// that were given are back.
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()
	taken := make(chan meta.SnapshotInfo, 1)
	go func() {
		defer close(taken) // also if it fails
		taken <- admin.snapshot(t, "two")
	}()
	eventually(t, "all leases are asked for", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		return unless(len(a.held) == 4)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	_, err := b.Do(ctx, 1, meta.OpID{}, &meta.Open{Ino: written, Also: inos}, meta.LeaseExclusive)
	cancel()
	o := s.srv.opened(1)
	o.mu.Lock()
	up := o.barrier != nil // else this machine is slow
	o.mu.Unlock()
	if up && meta.KindOf(err) != meta.Interrupted {
		t.Errorf("a file could be opened for writing: %v", err)
	}
	for _, ino := range inos[:4] {
		a.do(t, &meta.Write{Ino: ino, Inline: true, Data: []byte("buffered"), Size: 8, Synced: true}, meta.LeaseNone)
	}
	a.letGo()
	two := <-taken
	for _, ino := range inos[:4] {
		if r, err := b.DoAt(t.Context(), 1, two.At, &meta.Open{Ino: ino}); err != nil || two.Unanswered == 0 && string(r.Data) != "buffered" {
			t.Errorf("DATA: the snapshot has %q of inode %d, %v", r.Data, ino, err)
		}
	}
	s.exact()
}

// openEnd makes a file whose end is open: 500 bytes of it were told of, 700 are synced
// and 900 written.
func (p *peer) openEnd(t *testing.T, chunks *fakeChunks) (meta.Ino, meta.ChunkGrant) {
	t.Helper()
	ino := p.create(t, "log").Attr.Ino
	g := p.alloc(t, true)
	chunks.has(g.ID, 900, 700)
	p.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 500, Chunk: g.ID, OpenEnded: true}}, Size: 500, Synced: true}, meta.LeaseNone)
	return ino, g
}

// TestSnapshotCutsWhoDoesNotAnswer: the file of a client that answers no recall
// ends in the snapshot where it was synced last; its commits without an end come
// after the snapshot.
func TestSnapshotCutsWhoDoesNotAnswer(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	chunks := s.chunkServer(1)
	a := s.dial("a")
	ino, g := a.openEnd(t, chunks)
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()
	began := time.Now()
	one := s.dial("admin").snapshot(t, "one")
	if took := time.Since(began); took < barrierWait {
		t.Fatalf("it did not wait: %v", took)
	} else {
		t.Logf("with one client that does not answer: %v", took)
	}
	r, err := a.DoAt(t.Context(), 1, one.At, &meta.Open{Ino: ino})
	if err != nil || r.Attr.Size < 700 || len(r.Extents) != 1 || r.Extents[0].OpenEnded || r.Extents[0].Len != r.Attr.Size {
		t.Fatalf("the file's end in the snapshot: %+v, %v", r, err)
	}
	if n := len(chunks.ordered(g.ID, meta.OrderSeal)); n < 2 {
		t.Fatalf("%d orders to seal the chunk, not a freeze and a seal", n)
	}
	a.letGo()
	s.exact()
}

// TestSnapshotAsksWhoComesBack: a client that was away when a snapshot began, and comes
// back while the end of its file is being settled, is asked to give its lease back.
func TestSnapshotAsksWhoComesBack(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	chunks := s.chunkServer(1)
	var ino meta.Ino
	sess := s.lingering("mount", func(p *peer) {
		ino, _ = p.openEnd(t, chunks)
	})
	s.goAway(sess)
	chunks.hang()
	wake := sync.OnceFunc(chunks.wake)
	defer wake()
	admin := s.dial("admin")
	taken := make(chan error, 1)
	go func() {
		_, err := admin.TakeSnapshot(t.Context(), 1, "one")
		taken <- err
	}()
	o := s.srv.opened(1)
	eventually(t, "the file's end is being settled", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(o.barrier != nil && o.barrier.cut)
	})
	p := &peer{leases: map[meta.Ino]meta.LeaseMode{ino: meta.LeaseExclusive}}
	var err error
	if p.Session, err = client.Dial(t.Context(), client.Config{
		Addrs: []string{"unix:" + s.addr}, Name: "mount", Handler: p, Session: sess.id, Joined: []meta.VolumeID{1}, Generation: 1, Linger: time.Hour,
	}); err != nil {
		t.Fatal(err)
	}
	defer p.Leave()
	p.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone)
	eventually(t, "it gives its lease back", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(p.mode(ino) < meta.LeaseExclusive && !o.leases.HeldExclusively(ino))
	})
	wake()
	if err := <-taken; err != nil {
		t.Log("on a machine this slow the chunk could not be sealed in time: ", err)
	}
	if sess.ended.Load() {
		t.Error("its session ended")
	}
}

// TestSnapshotOfWhoHoldsOn: a client that can't commit what it buffered says so. The
// snapshot has its file as it was synced last, and says that; the client keeps its
// lease, writes on, and commits later what it had. Who asks for a whole snapshot gets
// none.
func TestSnapshotOfWhoHoldsOn(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	chunks := s.chunkServer(1)
	a := s.dial("writer")
	ino, g := a.openEnd(t, chunks)
	holdOn := func(on bool) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.holdsOn = on
	}
	holdOn(true)
	admin := s.dial("admin")
	if _, err := admin.TakeWhole(t.Context(), 1, "whole"); !errors.Is(err, meta.Unavailable) || !strings.Contains(err.Error(), "writer") {
		t.Fatalf("a whole snapshot: %v", err)
	}
	if l := admin.names(t); len(l) != 0 || len(chunks.ordered(g.ID, meta.OrderSeal)) != 0 {
		t.Fatal("something was done for it: ", l)
	}
	one := admin.snapshot(t, "one")
	if one.Unanswered != 1 || !slices.Equal(one.UnansweredBy, []string{"writer"}) {
		t.Fatalf("%+v", one)
	}
	if l := admin.snapshots(t); l.Snapshots[0].Unanswered != 1 {
		t.Fatalf("the list: %+v", l)
	}
	o := s.srv.opened(1)
	o.mu.Lock()
	_, out, _ := o.leases.Waits()
	still := o.leases.HeldExclusively(ino) && out == 0
	o.mu.Unlock()
	if !still || a.mode(ino) != meta.LeaseExclusive {
		t.Fatal("its lease went, or is asked for still")
	}
	// What it had goes to another chunk, and is the volume's, not the snapshot's.
	more := a.alloc(t, true)
	chunks.has(more.ID, 500, 500)
	a.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 500, Len: 500, Chunk: more.ID}}, Size: 1000, Synced: true, CloseEnded: true}, meta.LeaseNone)
	r, err := a.DoAt(t.Context(), 1, one.At, &meta.Open{Ino: ino})
	if err != nil || r.Attr.Size != one.Bytes || r.Attr.Size < 700 || len(r.Extents) != 1 || r.Extents[0].OpenEnded {
		t.Fatalf("in the snapshot: %+v, %v", r, err)
	}
	holdOn(false)
	whole, err := admin.TakeWhole(t.Context(), 1, "whole")
	if err != nil || whole.Unanswered != 0 {
		t.Fatalf("%+v, %v", whole, err)
	}
	if r, err = a.DoAt(t.Context(), 1, whole.At, &meta.Open{Ino: ino}); err != nil || r.Attr.Size != 1000 {
		t.Fatalf("in the whole snapshot: %+v, %v", r, err)
	}
	s.exact()
}

// TestSnapshotSentAgain: a request that is sent again hears what the first answer said,
// also when there is no room; and an owner that did not take the snapshot itself does not
// say that it is whole.
func TestSnapshotSentAgain(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	a, admin := s.dial("writer"), s.dial("admin")
	a.create(t, "f")
	a.mu.Lock()
	a.holdsOn = true
	a.mu.Unlock()
	take := func(name string, q *adminapi.CreateSnapshotRequest) (i meta.SnapshotInfo) {
		t.Helper()
		q.Volume, q.Name = adminapi.Numbered(1), name
		x, err := admin.API.Snapshots.CreateSnapshot(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		return x.Info()
	}
	torn, whole := &adminapi.CreateSnapshotRequest{RequestId: 7}, &adminapi.CreateSnapshotRequest{RequestId: 8, Strict: true}
	one := take("one", torn)
	if one.Unanswered != 1 || one.Strict {
		t.Fatalf("%+v", one)
	}
	a.mu.Lock()
	a.holdsOn = false
	a.mu.Unlock()
	two := take("two", whole)
	if two.Unanswered != 0 || !two.Strict {
		t.Fatalf("%+v", two)
	}
	s.srv.tight.Store(&shortage{err: meta.E("journal", meta.NoSpace, "test", nil)})
	if _, err := admin.TakeSnapshot(t.Context(), 1, "three"); !errors.Is(err, meta.NoSpace) {
		t.Errorf("without room: %v", err)
	}
	if i := take("one", torn); i.At != one.At || i.Unanswered != 1 || !slices.Equal(i.UnansweredBy, one.UnansweredBy) {
		t.Errorf("sent again: %+v", i)
	}
	if i := take("two", whole); i.At != two.At || !i.Strict {
		t.Errorf("sent again: %+v", i)
	}
	torn.Strict = true // as if an owner had taken it that is gone
	if i := take("one", torn); i.At != one.At || i.Strict {
		t.Errorf("sent again: %+v", i)
	}
	s.srv.tight.Store(nil)
	s.crash()
	s.start()
	if i := take("two", whole); i.At != two.At || i.Strict {
		t.Errorf("sent to the next owner: %+v", i)
	}
	s.exact()
}

// TestSnapshotHeedsNoEarlierAnswer: that a client could not give a lease back when it was
// asked before says nothing of now.
func TestSnapshotHeedsNoEarlierAnswer(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	a, admin := s.dial("writer"), s.dial("admin")
	ino := a.create(t, "f").Attr.Ino
	o := s.srv.opened(1)
	for n := 0; ; n++ {
		if n == 5 { // on a slow machine a second is over before it is asked again
			t.Fatal("it is not asked again")
		}
		a.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive)
		a.mu.Lock()
		a.hold, a.holdsOn = true, true
		a.mu.Unlock()
		o.mu.Lock()
		o.askInBackground(ino, meta.LeaseShared, time.Second)
		o.mu.Unlock()
		eventually(t, "it is asked", func() error {
			a.mu.Lock()
			defer a.mu.Unlock()
			return unless(len(a.held) == 1)
		})
		taken := make(chan meta.SnapshotInfo, 1)
		go func() {
			i, err := admin.TakeSnapshot(t.Context(), 1, fmt.Sprint("s", n))
			if err != nil {
				t.Error(err)
			}
			taken <- i
		}()
		eventually(t, "the barrier is up", func() error {
			o.mu.Lock()
			defer o.mu.Unlock()
			return unless(o.barrier != nil || len(taken) > 0)
		})
		a.mu.Lock()
		a.holdsOn = false
		a.mu.Unlock()
		a.letGo() // that it holds on, which it was asked before
		if i := <-taken; i.Unanswered == 0 {
			break
		}
	}
	s.exact()
}

// TestSnapshotSealsBehindTheBarrier: a chunk server that hangs does not keep others from
// opening files for as long as it takes to settle the ends of files; the snapshot is
// taken when that is done.
func TestSnapshotSealsBehindTheBarrier(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	chunks := s.chunkServer(1)
	a, b := s.dial("a"), s.dial("b")
	other := b.create(t, "other").Attr.Ino
	a.openEnd(t, chunks)
	a.mu.Lock()
	a.holdsOn = true
	a.mu.Unlock()
	admin := s.dial("admin")
	o := s.srv.opened(1)
	state := func(up bool) func() error {
		return func() error {
			o.mu.Lock()
			defer o.mu.Unlock()
			return unless((o.barrier != nil && o.barrier.cut) == up)
		}
	}
	// It tells whether the barrier was lifted while the seal went on: a machine may be
	// so slow that the seal is given up before one looks.
	try := func() (lifted bool) {
		chunks.hang()
		wake := sync.OnceFunc(chunks.wake)
		defer wake()
		taken := make(chan error, 1)
		go func() {
			_, err := admin.TakeSnapshot(t.Context(), 1, "one")
			taken <- err
		}()
		eventually(t, "the file's end is being settled", state(true))
		eventually(t, "the barrier is lifted", state(false))
		b.do(t, &meta.Open{Ino: other}, meta.LeaseExclusive)
		select {
		case err := <-taken:
			t.Log("it was given up: ", err)
			return false
		default:
		}
		if b.mode(other) != meta.LeaseExclusive {
			t.Fatal("nobody can open a file for writing")
		}
		wake()
		err := <-taken
		if err != nil {
			t.Log("it was given up: ", err)
		}
		return err == nil
	}
	for n := 1; !try(); n++ {
		if n == 4 {
			t.Fatal("the barrier stays up until everything is sealed")
		}
	}
	if l := admin.names(t); !slices.Equal(l, []string{"one ready"}) {
		t.Fatal(l)
	}
	s.exact()
}

// TestSnapshotNobodyCanSettle: a file whose end no chunk server can tell keeps
// the snapshot from being taken, with words, and nothing is left half.
func TestSnapshotNobodyCanSettle(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	chunks := s.chunkServer(1)
	a := s.dial("a")
	a.openEnd(t, chunks)
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()
	chunks.refuse(meta.IO)
	admin := s.dial("admin")
	if _, err := admin.TakeSnapshot(t.Context(), 1, "one"); !errors.Is(err, meta.Unavailable) {
		t.Errorf("what can't be settled: %v", err)
	}
	if l := admin.names(t); len(l) != 0 {
		t.Fatal(l)
	}
	chunks.refuse(meta.KindOK)
	admin.snapshot(t, "one")
	a.letGo()
	a.do(t, &meta.Open{Ino: a.create(t, "next").Attr.Ino}, meta.LeaseExclusive)
	s.exact()
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
	// A request that is sent again, also to the next owner, makes one snapshot.
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

// TestSnapshotsAreDissolved: what deleted snapshots alone held goes in steps
// that any owner goes on with; chunks are deleted when the last that saw them
// is gone, and not before.
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
	// The owner dies while it is at it.
	s.crash()
	s.start()
	if err := s.srv.AwaitServer(t.Context(), []meta.ServerID{1}); err != nil {
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
				o := s.srv.opened(1)
				o.mu.Lock()
				o.closed = make(chan struct{})
				o.mu.Unlock()
				if err := o.endAll(); err != nil {
					t.Fatal(err)
				}
				for o.reapSome() {
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
	// So many are kept; those that were told to the end make room.
	s.srv.comparisons.most = 2
	x, y = &adminapi.DiffSnapshotsRequest{From: "two"}, &adminapi.DiffSnapshotsRequest{From: "one"}
	page(x)
	page(y)
	o := s.srv.opened(1)
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
	// Who waits no more does not have it made.
	if err := o.settled(t.Context()); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	frozen, release, err := o.freezeWhole(gone)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	two, err := o.snapshot("two")
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

func TestScheduleIsKept(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.snapshot(t, "mine")
	if err := a.ScheduleSnapshots(t.Context(), 1, "24h"); !errors.Is(err, meta.Invalid) {
		t.Errorf("no schedule: %v", err)
	}
	a.schedule(t, "3s:1s")
	scheduled := func() (l []string) {
		for _, n := range a.names(t) {
			if strings.HasPrefix(n, "auto-") && strings.HasSuffix(n, string(meta.SnapshotReady)) {
				l = append(l, n)
			}
		}
		return l
	}
	var first string
	eventually(t, "two snapshots", func() error {
		l := scheduled()
		if len(l) > 0 {
			first = l[0]
		}
		return unless(len(l) >= 2)
	})
	s.crash()
	s.start()
	eventually(t, "the first is not kept any more", func() error {
		l := scheduled()
		return unless(len(l) > 0 && !slices.Contains(l, first))
	})
	a.schedule(t, "")
	if !slices.Contains(a.names(t), "mine ready") {
		t.Fatal("a snapshot that is none of the schedule's was deleted")
	}
	n := len(a.names(t))
	time.Sleep(2500 * time.Millisecond)
	if l := a.names(t); len(l) > n+1 { // one may have been under way
		t.Fatalf("it goes on: %v", l)
	}
	s.exact()
}

// TestScheduleThatFails: a snapshot that is due and can't be taken is told of until it
// could, and tried ever more rarely.
func TestScheduleThatFails(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	chunks := s.chunkServer(1)
	a := s.dial("a")
	a.openEnd(t, chunks)
	a.mu.Lock()
	a.holdsOn = true
	a.mu.Unlock()
	chunks.refuse(meta.IO)
	a.schedule(t, "24h:hourly")
	health := func() (l []meta.VolumeHealth) {
		return slices.DeleteFunc(s.srv.Health(t.Context()).Volumes, func(v meta.VolumeHealth) bool { return v.Undone == "" })
	}
	eventually(t, "it is told", func() error { return unless(len(health()) == 1) })
	o := s.srv.opened(1)
	for range 20 { // looked at again, it is not tried again yet
		o.tasks.snapshots.Wake()
		time.Sleep(5 * time.Millisecond)
	}
	f := a.snapshots(t).Failing
	if f == nil || f.Tries > 2 || f.Why == "" || f.Next.Sub(f.Since) < scheduleRetry || !health()[0].UndoneSince.Equal(f.Since) {
		t.Fatalf("%+v, %+v", f, health())
	}
	chunks.refuse(meta.KindOK)
	eventually(t, "it is taken", func() error {
		o.mu.Lock()
		o.schedule.going.next = time.Time{}
		o.mu.Unlock()
		o.tasks.snapshots.Wake()
		return unless(len(a.names(t)) == 1)
	})
	eventually(t, "nothing is wrong any more", func() error { return unless(len(health()) == 0 && a.snapshots(t).Failing == nil) })

	var sch scheduling
	var waits []time.Duration
	now := time.Now()
	for range 8 {
		waits = append(waits, sch.failed(errors.New("x"), now, time.Hour))
	}
	if want := []time.Duration{15, 30, 60, 120, 240, 480, 600, 600}; !slices.EqualFunc(waits, want, func(a, b time.Duration) bool { return a == b*time.Second }) {
		t.Error(waits)
	}
	if sch.failed(errors.New("x"), now, time.Minute) != time.Minute || sch.failed(errors.New("x"), now, time.Second) != scheduleRetry {
		t.Error("tries of short intervals")
	}
}

// TestFailingScheduleStaysOpen: a volume that nobody uses is not closed while its schedule
// can't be kept, which the next owner would not know.
func TestFailingScheduleStaysOpen(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.create(t, "f")
	o := s.srv.opened(1)
	s.srv.tight.Store(&shortage{err: meta.E("journal", meta.NoSpace, "test", nil)})
	a.schedule(t, "24h:hourly")
	var failing scheduling
	eventually(t, "it fails", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		if failing = o.schedule.going; failing.tries == 0 {
			return errors.New("not yet")
		}
		failing.next = time.Now().Add(time.Hour) // it is not tried again meanwhile
		o.schedule.going = failing
		return nil
	})
	s.srv.tight.Store(nil)
	if err := a.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	unused := func(sch scheduling) bool {
		o.mu.Lock()
		o.schedule.going = sch
		o.mu.Unlock()
		return o.unused()
	}
	eventually(t, "nothing else keeps it open", func() error { return unless(unused(scheduling{next: failing.next})) })
	if unused(failing) {
		t.Error("it would be closed")
	}
}

// TestScheduleSetWhileRead: a schedule that is set while the owner reads the one of before
// holds.
func TestScheduleSetWhileRead(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.create(t, "f")
	o := s.srv.opened(1)
	known := func(keep string) func() error {
		return func() error {
			o.mu.Lock()
			defer o.mu.Unlock()
			return unless(!o.schedule.read.IsZero() && o.schedule.keep == keep)
		}
	}
	eventually(t, "it was looked at", known(""))
	const keep = "24h:6h"
	var read atomic.Bool
	s.cluster.mu.Lock()
	s.cluster.read = func(v meta.VolumeID) {
		// Others read rows, too.
		if v == 1 && bytes.Contains(debug.Stack(), []byte(").readSchedule(")) && !read.Swap(true) {
			a.schedule(t, keep)
		}
	}
	s.cluster.mu.Unlock()
	o.scheduleChanged()
	eventually(t, "it is read", func() error { return unless(read.Load()) })
	eventually(t, "the new one holds", known(keep))
}

// TestDeletionsStandBack: a large deletion is left for what is due meanwhile, and gone
// on with.
func TestDeletionsStandBack(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.try(t, &meta.GetAttr{Ino: meta.RootIno})
	var made, gone []client.BatchOp
	for i := range 3 * dropStep {
		made = append(made, client.BatchOp{Op: newFile(fmt.Sprint("f", i))})
		gone = append(gone, client.BatchOp{Op: &meta.Unlink{Parent: meta.RootIno, Name: fmt.Sprint("f", i)}})
	}
	batch := func(ops []client.BatchOp) {
		t.Helper()
		if _, _, err := a.DoBatch(t.Context(), 1, client.AnyEpoch, ops); err != nil {
			t.Fatal(err)
		}
	}
	batch(made)
	one := a.snapshot(t, "one")
	batch(gone)
	o := s.srv.opened(1)
	eventually(t, "the schedule was looked at", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(!o.schedule.read.IsZero() && !o.tasks.snapshots.Status().Woken)
	})
	o.mu.Lock() // nobody is told to go on with it
	_, err := o.run(&meta.DropSnapshot{At: one.At, Max: 1}, 0)
	o.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		more, err := o.dropUntil(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if !more {
			if n < 3 {
				t.Fatalf("after %d steps it was gone", n)
			}
			break
		}
	}
	if l := a.names(t); len(l) != 0 {
		t.Fatal(l)
	}
	s.exact()
}

func TestSchedulePlan(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"24h", "24h:", ":hourly", "1h:daily", "x:hourly", "24h:x", "-1h:1s", "24h:1ms", "24h:hourly,", "1000d:minutely"} {
		if r, err := parseKeep(bad); meta.KindOf(err) != meta.Invalid {
			t.Errorf("%q: %v, %v", bad, r, err)
		}
	}
	rules, err := parseKeep("24h:hourly, 7d:daily")
	if err != nil {
		t.Fatal(err)
	}
	// Run it for three weeks, looking every ten minutes.
	var have []meta.Snapshot
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for now := began; now.Before(began.Add(21 * 24 * time.Hour)); now = now.Add(10 * time.Minute) {
		due, unwanted := plan(rules, have, now)
		if due != (now.Minute() == 0) {
			t.Fatalf("%v: due %v", now, due)
		}
		have = slices.DeleteFunc(have, func(s meta.Snapshot) bool {
			return slices.ContainsFunc(unwanted, func(u meta.Snapshot) bool { return u.At == s.At })
		})
		if due {
			have = append(have, meta.Snapshot{At: meta.Generation(len(have)) + meta.Generation(now.Unix()), Created: meta.Time(now.UnixNano()), Name: scheduledName(now)})
		}
	}
	days := map[int]int{}
	for _, s := range have {
		if !isScheduled(s.Name) {
			t.Fatal(s.Name)
		}
		days[time.Unix(0, int64(s.Created)).UTC().YearDay()]++
	}
	if len(have) != 24+7 && len(have) != 24+6 {
		t.Errorf("%d are kept, 24 hourly and 7 daily ones were wanted: %v", len(have), days)
	}
	for d := 16; d < 20; d++ {
		if days[d] != 1 {
			t.Errorf("%d of day %d are kept", days[d], d)
		}
	}
}

// TestOwnerDiesAtTheBarrier: the request goes on at the next owner, and there is
// one snapshot; writers are not held for ever.
func TestOwnerDiesAtTheBarrier(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	ino := a.create(t, "f").Attr.Ino
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()
	admin := s.dial("admin")
	taken := make(chan error, 1)
	go func() {
		_, err := admin.TakeSnapshot(context.Background(), 1, "one")
		taken <- err
	}()
	eventually(t, "the lease is asked for", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		return unless(len(a.held) > 0)
	})
	s.crash()
	s.start()
	a.letGo()
	if err := <-taken; err != nil {
		t.Fatal(err)
	}
	if got := admin.names(t); !slices.Equal(got, []string{"one ready"}) {
		t.Fatal(got)
	}
	a.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive)
	if a.mode(ino) != meta.LeaseExclusive {
		t.Fatal("no exclusive lease after the snapshot")
	}
	s.exact()
}

// TestSnapshotCostsTheSame whatever the volume holds: one entry of two records.
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
		o := s.srv.opened(1)
		o.mu.Lock()
		_, effects, err := namespace.Execute(&view{o: o}, o.context(0), &meta.TakeSnapshot{Name: fmt.Sprint("at", files)})
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

// use counts what snapshots hold.
func (p *peer) use(t *testing.T, drop ...string) (u meta.SnapshotUse) {
	t.Helper()
	u, err := p.SnapshotUse(t.Context(), 1, drop)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// What snapshots hold is told to the byte, not by extents; the next owner tells the
// same; and what deleting some would give back is what it gives back.
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
