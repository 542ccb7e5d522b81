package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	adminapi "penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
)

// TestSnapshotBarrier: while clients give their exclusive leases back no client gets an exclusive
// lease, and everything else goes on; the snapshot has the changes that a client commits before
// its answer.
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
		defer close(taken) // also if the snapshot fails
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
	// The bytes that a had buffered are committed now.
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

// TestLeasesComeBackTogether: with the lease on a file, a session gets back the leases that the
// barrier took, in the same answer, where no session has to give anything up for the leases; and
// the next barrier takes all of the leases.
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
	// Not for a reader, not for a session that gave nothing back, and a limited number at a time.
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

	// The next barrier: no lease is granted while the barrier is up, and the barrier does not end
	// before all granted leases are back.
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()
	taken := make(chan meta.SnapshotInfo, 1)
	go func() {
		defer close(taken) // also if the snapshot fails
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
	o := s.srv.hosted.opened(1)
	o.mu.Lock()
	up := o.leases.barrier != nil // otherwise this machine is slow
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

// TestSnapshotCutsWhoDoesNotAnswer: the file of a client that answers no recall ends in the
// snapshot at its last synced byte; the client's commits without an end come after the snapshot.
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

// TestSnapshotAsksWhoComesBack: a client that was away when a snapshot began, and comes back
// while the end of its file is being settled, is asked to give its lease back.
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
	o := s.srv.hosted.opened(1)
	eventually(t, "the file's end is being settled", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(o.leases.barrier != nil && o.leases.barrier.cut)
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

// TestSnapshotOfWhoHoldsOn: a client that can't commit its buffer says so. The snapshot has the
// client's file in its last synced state, and tells so; the client keeps its lease, writes on,
// and commits its buffer later. A caller that asks for a whole snapshot gets none.
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
	o := s.srv.hosted.opened(1)
	o.mu.Lock()
	_, out, _ := o.leases.Waits()
	still := o.leases.HeldExclusively(ino) && out == 0
	o.mu.Unlock()
	if !still || a.mode(ino) != meta.LeaseExclusive {
		t.Fatal("its lease went, or is asked for still")
	}
	// The client's buffer goes to another chunk, and belongs to the volume, not to the snapshot.
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

// TestSnapshotSentAgain: a request that is sent again gets the first answer, also without room;
// and an owner that did not take the snapshot itself does not claim that the snapshot is whole.
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
	s.srv.room.tight.Store(&shortage{err: meta.E("journal", meta.NoSpace, "test", nil)})
	if _, err := admin.TakeSnapshot(t.Context(), 1, "three"); !errors.Is(err, meta.NoSpace) {
		t.Errorf("without room: %v", err)
	}
	if i := take("one", torn); i.At != one.At || i.Unanswered != 1 || !slices.Equal(i.UnansweredBy, one.UnansweredBy) {
		t.Errorf("sent again: %+v", i)
	}
	if i := take("two", whole); i.At != two.At || !i.Strict {
		t.Errorf("sent again: %+v", i)
	}
	torn.Strict = true // as if an earlier owner had taken the snapshot
	if i := take("one", torn); i.At != one.At || i.Strict {
		t.Errorf("sent again: %+v", i)
	}
	s.srv.room.tight.Store(nil)
	s.crash()
	s.start()
	if i := take("two", whole); i.At != two.At || i.Strict {
		t.Errorf("sent to the next owner: %+v", i)
	}
	s.exact()
}

// TestSnapshotHeedsNoEarlierAnswer: a client's earlier refusal to give a lease back says nothing
// of the present.
func TestSnapshotHeedsNoEarlierAnswer(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	a, admin := s.dial("writer"), s.dial("admin")
	ino := a.create(t, "f").Attr.Ino
	o := s.srv.hosted.opened(1)
	for n := 0; ; n++ {
		if n == 5 { // on a slow machine a second is over before the next question
			t.Fatal("it is not asked again")
		}
		a.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive)
		a.mu.Lock()
		a.hold, a.holdsOn = true, true
		a.mu.Unlock()
		o.mu.Lock()
		o.leases.askInBackground(ino, meta.LeaseShared, time.Second)
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
			return unless(o.leases.barrier != nil || len(taken) > 0)
		})
		a.mu.Lock()
		a.holdsOn = false
		a.mu.Unlock()
		a.letGo() // an answer to the earlier question, that a keeps its lease
		if i := <-taken; i.Unanswered == 0 {
			break
		}
	}
	s.exact()
}

// TestSnapshotSealsBehindTheBarrier: a chunk server that hangs does not keep clients from opening
// files while the snapshot settles the ends of files; the snapshot is taken when the ends are
// settled.
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
	o := s.srv.hosted.opened(1)
	state := func(up bool) func() error {
		return func() error {
			o.mu.Lock()
			defer o.mu.Unlock()
			return unless((o.leases.barrier != nil && o.leases.barrier.cut) == up)
		}
	}
	// try tells whether the barrier was lifted while the seal went on: on a slow machine the seal
	// may be given up before try looks.
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

// TestOwnerDiesAtTheBarrier: the request goes on at the next owner, and a single snapshot
// results; writers are not delayed for ever.
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
