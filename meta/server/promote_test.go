package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// toPromote makes a clone of a volume with two files, each in a chunk of its own, and has chunk
// servers report orders to copy before the copy begins.
func (s *site) toPromote(t *testing.T, a *peer, copying func(meta.Order)) (c meta.VolumeID, inos []meta.Ino, chunks *fakeChunks) {
	t.Helper()
	chunks = s.chunkServer(1)
	for i := range 2 {
		ino := a.create(t, fmt.Sprint("f", i)).Attr.Ino
		g := a.alloc(t, false)
		chunks.has(g.ID, 1<<30, 1<<30) // a copy of the chunk may take longer than a rollback waits
		a.commit(t, ino, g, 0, 1<<30, true)
		inos = append(inos, ino)
	}
	a.snapshot(t, "v1")
	chunks.mu.Lock()
	chunks.copying = copying
	chunks.mu.Unlock()
	return a.clone(t, 1, "v1", "c"), inos, chunks
}

// A promotion copies to disks of the clone's class, if the servers of the original have such
// disks: any name of a class counts, not only nvme, ssd and hdd.
func TestPromotionKeepsTheClass(t *testing.T) {
	t.Parallel()
	for has, want := range map[string]string{"fast": "fast", "hdd": ""} {
		s := newSiteTTL(t, 2*time.Second)
		a := s.dial("a")
		chunks := s.chunkServerOf(1, "", has)
		ino := a.create(t, "f").Attr.Ino
		g := a.alloc(t, false)
		chunks.has(g.ID, 1<<20, 1<<20)
		a.commit(t, ino, g, 0, 1<<20, true)
		a.snapshot(t, "v1")
		c := a.clone(t, 1, "v1", "c")
		if _, err := a.SetVolume(t.Context(), c, meta.Policy{Replicas: 1, Class: "fast"}, meta.VolumeWords{Force: true}); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Promote(t.Context(), c, nil); err != nil {
			t.Fatal(err)
		}
		s.promoted(t, c)
		for _, o := range chunks.copied() {
			if o.Class != want {
				t.Errorf("disks of class %q: the copy asks for class %q", has, o.Class)
			}
		}
		if len(chunks.copied()) == 0 {
			t.Error("nothing was copied")
		}
	}
}

// promoted waits until a clone does not need its origin any more.
func (s *site) promoted(t *testing.T, c meta.VolumeID) {
	t.Helper()
	eventually(t, "the clone is promoted", func() error {
		row, err := s.cluster.Volume(t.Context(), c)
		if err == nil && row.Origin != nil {
			err = errors.New("it has an origin")
		}
		return err
	})
	s.exactIn(c)
}

// A clone is rolled back while the clone is promoted, at any state of the chunk servers: the
// rollback does not wait for the promotion, and the promotion goes on after the rollback.
func TestRollbackOfPromoted(t *testing.T) {
	t.Parallel()
	for _, copied := range []bool{false, true} {
		t.Run(fmt.Sprintf("the chunk at hand is copied %v", copied), func(t *testing.T) {
			t.Parallel()
			s := newSiteTTL(t, 10*time.Second)
			a := s.dial("a")
			begun, goOn := make(chan struct{}, 100), make(chan struct{})
			release := sync.OnceFunc(func() { close(goOn) })
			defer release()
			c, _, chunks := s.toPromote(t, a, func(meta.Order) {
				begun <- struct{}{}
				<-goOn
			})
			if _, err := a.TakeSnapshot(t.Context(), c, "s1"); err != nil {
				t.Fatal(err)
			}
			a.createIn(t, c, "later")
			if _, err := a.Promote(t.Context(), c, nil); err != nil {
				t.Fatal(err)
			}
			<-begun
			o := s.srv.hosted.opened(c)
			done := make(chan error, 1)
			admin := s.dial("admin")
			go func() { done <- admin.RollBack(context.Background(), c, "s1", true) }()
			eventually(t, "the rollback begins", func() error {
				o.mu.Lock()
				defer o.mu.Unlock()
				return unless(o.closed != nil || len(done) > 0)
			})
			if copied {
				release()
			}
			select {
			case err := <-done:
				if err != nil {
					t.Fatal(err)
				}
			case <-time.After(90 * time.Second):
				t.Fatal("the rollback does not end")
			}
			if !copied {
				if n := len(chunks.copied()); n != 0 {
					t.Errorf("%d orders to copy were carried out", n)
				}
				release()
			}
			s.promoted(t, c)
			b := s.dial("b")
			if got := fmt.Sprint(b.list(t, c)); got != "[f0 f1]" {
				t.Error(got)
			}
		})
	}
}

// changed changes the origin of a clone, whose base has files f0 and f1, so that a later copy of
// the base has further records that the clone can't see.
func (p *peer) changed(t *testing.T, times int) {
	t.Helper()
	name := fmt.Sprint("later", times)
	p.create(t, name)
	for _, f := range []string{"f0", "f1"} { // each is another file from now on
		p.do(t, &meta.Rename{Parent: meta.RootIno, Name: name, NewParent: meta.RootIno, NewName: f}, meta.LeaseNone)
		p.create(t, name)
	}
	if err := p.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
}

// Until a clone has a checkpoint of its own, the clone's state is made again from its origin's
// present state. The records that the sweep of a promotion removed before, and the origin's
// changes since, are not in the clone.
func TestSweptCloneIsMadeAgain(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 2*time.Second)
	a := s.dial("a")
	begun, goOn := make(chan struct{}, 100), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	c, inos, _ := s.toPromote(t, a, func(meta.Order) {
		begun <- struct{}{}
		<-goOn
	})
	before := fmt.Sprint(a.list(t, c)) // the volume is opened
	a.changed(t, 1)
	if _, err := a.Promote(t.Context(), c, nil); err != nil {
		t.Fatal(err)
	}
	<-begun // all is swept, and no chunk is copied
	a.changed(t, 2)
	if err := a.Sync(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	s.crash()
	if err := s.cluster.DropStore(c); err != nil {
		t.Fatal(err)
	}
	s.start()
	b := s.dial("b")
	same := func() {
		t.Helper()
		if got := fmt.Sprint(b.list(t, c)); got != before {
			t.Errorf("the clone has %s, it had %s", got, before)
		}
		for i, ino := range inos {
			r, err := b.Do(t.Context(), c, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: fmt.Sprint("f", i)}, meta.LeaseNone)
			if err != nil || r.Attr.Ino != ino {
				t.Errorf("f%d was inode %d: %+v, %v", i, ino, r, err)
			}
		}
	}
	same()
	release()
	s.promoted(t, c) // and is exact
	same()
}

// A follower of a clone's journal, whose copy comes from another state of the origin than the
// owner's copy, reaches the same state, byte by byte, when the clone is promoted.
func TestStandbyOfPromoted(t *testing.T) {
	t.Parallel()
	etcd := startEtcd(t, shortDir(t))
	t.Cleanup(func() { etcd.Close() })
	crew := newCrew(t, 1, etcd.Client())
	first := crew.hands[0]
	first.own(1)
	p := first.dial("p")
	p.create(t, "f0")
	p.create(t, "f1")
	p.snapshot(t, "v1")
	c := p.clone(t, 1, "v1", "c")
	o := first.own(c)
	p.createIn(t, c, "own")
	p.changed(t, 1)
	crew.add(1)
	crew.hands[1].at(c, o.durableNow())
	p.changed(t, 2)
	if _, err := p.Promote(t.Context(), c, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the clone is promoted", func() error {
		row, err := first.cluster.Volume(t.Context(), c)
		if err == nil {
			err = unless(row.Origin == nil)
		}
		return err
	})
	if got := fmt.Sprint(p.list(t, c)); got != "[f0 f1 own]" {
		t.Error(got)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	p.Session.Close(ctx)
	crew.same(c)
}

// A promotion moves the cached files of a mount that is away when the mount is back, or gone; the
// other files at once.
func TestPromotionWaitsForNobodyAway(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 2*time.Second)
	a := s.dial("a")
	c, inos, _ := s.toPromote(t, a, nil)
	sess := s.lingering("mount", func(p *peer) {
		if _, err := p.Do(t.Context(), c, meta.OpID{}, &meta.GetAttr{Ino: inos[0]}, meta.LeaseShared); err != nil {
			t.Fatal(err)
		}
	})
	s.goAway(sess)
	var st meta.PromoteStatus
	eventually(t, "the other file is copied", func() (err error) {
		if st, err = a.Promote(t.Context(), c, nil); err == nil {
			err = unless(st.Copied == 1<<30 && st.Left == 1<<30)
		}
		return err
	})
	s.looked()
	if st, err := a.Promote(t.Context(), c, nil); err != nil || st.Done || sess.ended.Load() {
		t.Errorf("%+v, %v; the session ended: %v", st, err, sess.ended.Load())
	}
	s.srv.clients.endSession(sess, errLeft)
	s.promoted(t, c)
}

// A promotion moves a file whose writer can't commit when the writer can; the other files at
// once, and the client keeps its lease.
func TestPromotionLeavesWhoHoldsOn(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 2*time.Second)
	a, b := s.dial("a"), s.dial("b")
	c, inos, _ := s.toPromote(t, a, nil)
	if _, err := b.Do(t.Context(), c, meta.OpID{}, &meta.Open{Ino: inos[0]}, meta.LeaseExclusive); err != nil || b.mode(inos[0]) != meta.LeaseExclusive {
		t.Fatal(b.mode(inos[0]), err)
	}
	b.mu.Lock()
	b.holdsOn = true
	b.mu.Unlock()
	eventually(t, "the other file is copied", func() error {
		st, err := a.Promote(t.Context(), c, nil)
		if err == nil {
			err = unless(st.Copied == 1<<30 && st.Left == 1<<30)
		}
		return err
	})
	o := s.srv.hosted.opened(c)
	eventually(t, "it said that it holds on", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(o.leases.Refused(time.Now(), inos[0]))
	})
	if b.mode(inos[0]) != meta.LeaseExclusive || b.recalls != 0 {
		t.Errorf("it has %v left", b.mode(inos[0]))
	}
	b.mu.Lock()
	b.holdsOn = false
	b.mu.Unlock()
	o.asksAgain()
	s.promoted(t, c)
}

// Of a file that a client keeps, which the promotion learns after copying the file's first chunk,
// the other chunks are not copied in vain.
func TestPromotionCopiesNoMoreOfWhatIsHeld(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 2*time.Second)
	a, b := s.dial("a"), s.dial("b")
	chunks := s.chunkServer(1)
	ino := a.create(t, "f").Attr.Ino
	const n = 4
	for i := range uint64(n) {
		g := a.alloc(t, false)
		chunks.has(g.ID, 1<<20, 1<<20)
		a.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: i << 20, Len: 1 << 20, Chunk: g.ID}}, Size: (i + 1) << 20, Synced: true}, meta.LeaseNone)
	}
	a.snapshot(t, "v1")
	var copies atomic.Int64
	chunks.mu.Lock()
	chunks.copying = func(meta.Order) { copies.Add(1) }
	chunks.mu.Unlock()
	c := a.clone(t, 1, "v1", "c")
	if _, err := b.Do(t.Context(), c, meta.OpID{}, &meta.Open{Ino: ino}, meta.LeaseExclusive); err != nil || b.mode(ino) != meta.LeaseExclusive {
		t.Fatal(b.mode(ino), err)
	}
	b.mu.Lock()
	b.holdsOn = true
	b.mu.Unlock()
	if _, err := a.Promote(t.Context(), c, nil); err != nil {
		t.Fatal(err)
	}
	o := s.srv.hosted.opened(c)
	eventually(t, "it said that it holds on", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(o.leases.Refused(time.Now(), ino))
	})
	for last := int64(-1); last != copies.Load(); time.Sleep(time.Second) {
		last = copies.Load()
	}
	if got := copies.Load(); got == 0 || got >= n { // one copy for each recall
		t.Errorf("%d chunks were copied", got)
	}
}

// A rate that is set while the promotion reads the earlier rate holds.
func TestRateGivenMeanwhile(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	a := s.dial("a")
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	c, _, _ := s.toPromote(t, a, func(meta.Order) { <-goOn })
	o, err := s.srv.hosted.open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	<-o.recovered
	eventually(t, "what it begins with is looked at", func() error {
		o.clones.one.Lock()
		defer o.clones.one.Unlock()
		return unless(o.promotion.looks.Load() > 0)
	})
	var read atomic.Bool
	given, over := make(chan error, 1), make(chan struct{})
	give := func() {
		rate := uint64(1 << 30)
		_, err := o.promotion.promote(context.Background(), &rate)
		given <- err
		close(over)
	}
	if _, err := s.cluster.UpdateVolume(t.Context(), c, func(v *cluster.Volume) error {
		v.Origin.Promoting, v.Origin.Rate = true, 1<<20
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	s.cluster.mu.Lock()
	s.cluster.read = func(meta.VolumeID) {
		// Others read rows, too.
		if !bytes.Contains(debug.Stack(), []byte(").toPromote(")) || read.Swap(true) {
			return
		}
		free := o.clones.one.TryLock()
		if free {
			o.clones.one.Unlock()
		}
		go give()
		if free { // nothing keeps another caller from setting a rate before the end
			<-over
		}
	}
	s.cluster.mu.Unlock()
	o.tasks.promotion.Wake()
	if err := <-given; err != nil {
		t.Fatal(err)
	}
	eventually(t, "the promotion is at work", func() error { return unless(o.promotion.looks.Load() > 1) })
	if rate := o.promotion.rate.Load(); rate != 1<<30 {
		t.Errorf("the rate is %d", rate)
	}
	release()
	s.promoted(t, c)
}

// While a volume is rolled back, a promotion opens no chunk: the rollback and the promotion would
// wait for each other.
func TestNoChunkIsBegunInRollback(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	a := s.dial("a")
	c, inos, chunks := s.toPromote(t, a, nil)
	o, err := s.srv.hosted.open(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	<-o.recovered
	var refs []namespace.ForeignExtent
	o.mu.Lock()
	err = namespace.ForeignExtents(o.view(), func(e namespace.ForeignExtent) bool {
		if e.Ino == inos[0] {
			refs = append(refs, e)
		}
		return true
	})
	o.closed = make(chan struct{})
	o.mu.Unlock()
	if err != nil || len(refs) != 1 {
		t.Fatal(refs, err)
	}
	if err := o.promotion.adoptChunk(t.Context(), meta.ChunkPlace{ID: refs[0].Chunk, Servers: []meta.ServerID{1}, Sealed: true}, refs); !errors.Is(err, errRolled) {
		t.Error(err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if err := namespace.AllOpenChunks(o.view(), func(r meta.ChunkRecord, _ meta.Ino) bool {
		t.Errorf("chunk %v is open", r.ID)
		return true
	}); err != nil {
		t.Error(err)
	}
	if len(o.collection.filling) != 0 || len(chunks.copied()) != 0 {
		t.Errorf("it fills %v, ordered %v", o.collection.filling, chunks.copied())
	}
	o.closed = nil
}
