package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/namespace"
)

// Stories of docs/rules.md on the real server, through its socket.

// expire lets a session's lease run out; its client goes on with a new session.
func (s *site) expire(p *peer) {
	s.t.Helper()
	s.runOut(s.srv.clients.session(p.ID()))
}

// runOut has a session end, as a session that was silent for longer than the server keeps
// sessions. A frame under way may renew the session meanwhile.
func (s *site) runOut(sess *session) {
	s.t.Helper()
	eventually(s.t, "the session ends", func() error {
		sess.renewed.Store(-int64(2 * DefaultCourtesy))
		select {
		case <-sess.gone:
			return nil
		default:
			return errors.New("it is still there")
		}
	})
}

func (s *site) clean(t *testing.T, v meta.VolumeID) {
	t.Helper()
	r, err := s.srv.checker.Fsck(t.Context(), v)
	if err != nil || r.Count != 0 {
		t.Fatalf("DATA: fsck: %v %+v", err, r)
	}
}

// Rules 1 and 2: the right to the volume is lost under load: nobody is told of
// a failure, nothing that was answered is lost or has another number.
func TestOwnershipLostUnderLoad(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	peers := []*peer{s.dial("a"), s.dial("b"), s.dial("c")}
	made := make([]map[string]meta.Ino, len(peers))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for n, p := range peers {
		made[n] = map[string]meta.Ino{}
		wg.Go(func() {
			for i := 0; ; i++ {
				name := fmt.Sprintf("%d-%d", n, i)
				r, err := p.Do(t.Context(), 1, meta.OpID{}, newFile(name), meta.LeaseNone)
				if err != nil {
					t.Errorf("%s: %v", name, err)
					return
				}
				made[n][name] = r.Attr.Ino
				select {
				case <-stop:
					return
				default:
				}
			}
		})
	}
	for range 4 {
		time.Sleep(150 * time.Millisecond)
		before := s.srv.hosted.opened(1)
		s.cluster.lose(1)
		eventually(t, "it is served again", func() error {
			if o := s.srv.hosted.opened(1); o == nil || o == before {
				return errors.New("not yet")
			}
			return nil
		})
	}
	time.Sleep(100 * time.Millisecond)
	close(stop)
	wg.Wait()
	seen := map[meta.Ino]string{}
	for n, p := range peers {
		if len(made[n]) == 0 {
			t.Errorf("session %d made no file", n)
		}
		for name, ino := range made[n] {
			if other := seen[ino]; other != "" {
				t.Fatalf("%s and %s are both inode %d", other, name, ino)
			}
			seen[ino] = name
			if r := p.do(t, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseNone); r.Attr.Ino != ino {
				t.Fatalf("%s is inode %d, was %d", name, r.Attr.Ino, ino)
			}
		}
		if p.expired != 0 {
			t.Errorf("session %d expired", n)
		}
	}
	s.clean(t, 1)
}

// Rule 2: outside its lease an owner answers no request.
func TestNoAnswerOutsideTheOwnersLease(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	a := s.dial("a")
	a.create(t, "x")
	o := s.srv.hosted.opened(1)
	o.mu.Lock()
	own := o.own
	o.own = expiredOwn{own}
	o.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		_, err := a.Do(t.Context(), 1, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "x"}, meta.LeaseNone)
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("it answered: %v", err)
	case <-time.After(150 * time.Millisecond):
	}
	o.mu.Lock()
	o.own = own // renewed
	o.mu.Unlock()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

type expiredOwn struct{ Ownership }

func (expiredOwn) Left() time.Duration { return 0 }

// Rule 3: early replies and quota. A's files, answered and never journaled, fit
// the quota again after a crash, though b asks at once.
func TestEarlyRepliesAndQuota(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	a, b := s.dial("a"), s.dial("b")
	if _, err := a.SetVolume(t.Context(), 1, meta.Policy{Replicas: 1, QuotaInodes: 6}, meta.VolumeWords{}); err != nil {
		t.Fatal(err)
	}
	b.create(t, "b0")
	if err := b.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	var inos []meta.Ino
	for i := range 4 {
		inos = append(inos, a.create(t, fmt.Sprint("a", i)).Attr.Ino)
	}
	s.crash()
	late := make(chan error, 1)
	go func() {
		_, err := b.Do(t.Context(), 1, meta.OpID{}, newFile("b1"), meta.LeaseNone)
		late <- err
	}()
	s.start()
	if err := <-late; !errors.Is(err, meta.QuotaExceeded) {
		t.Fatalf("b took the room of what a was promised: %v", err)
	}
	for i, ino := range inos {
		if r := a.do(t, &meta.Lookup{Parent: meta.RootIno, Name: fmt.Sprint("a", i)}, meta.LeaseNone); r.Attr.Ino != ino {
			t.Fatalf("a%d is inode %d, was %d", i, r.Attr.Ino, ino)
		}
	}
}

// Rule 4: numbers and chunks are handed out only after the journal has the entry.
func TestChunksAreHandedOutFromTheJournal(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	s.chunkServer(1)
	a := s.dial("a")
	seen := map[meta.ChunkID]bool{}
	for range 3 {
		for range 5 {
			g := a.alloc(t, false)
			if seen[g.ID] {
				t.Fatalf("%v twice", g.ID)
			}
			seen[g.ID] = true
			o := s.srv.hosted.opened(1)
			o.mu.Lock()
			pending := o.ov.m[string(append([]byte{'c'}, func() []byte { b := g.ID.Bytes(); return b[:] }()...))]
			bad := pending != nil && pending.seq > o.durable
			o.mu.Unlock()
			if bad {
				t.Fatalf("%v was handed out before it was journaled", g.ID)
			}
		}
		s.crash()
		s.start()
		eventually(t, "the chunk server is back", func() error {
			if len(s.srv.chunkServers.liveServers()) == 0 {
				return errors.New("no")
			}
			return nil
		})
	}
}

// Rule 5: which length a seal takes.
func TestSealLength(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	f := s.chunkServer(1)
	a := s.dial("a")
	ino := a.create(t, "x").Attr.Ino

	t.Run("the longest that verifies, journaled before it is cut", func(t *testing.T) {
		g := a.alloc(t, false)
		f.has(g.ID, 1000, 600)
		a.commit(t, ino, g, 0, 600, true)
		rec, err := a.SealChunk(t.Context(), 1, g.ID)
		if err != nil || rec.Length != 1000 || rec.State != meta.ChunkSealed {
			t.Fatalf("%+v %v", rec, err)
		}
		seals := f.ordered(g.ID, meta.OrderSeal)
		if len(seals) != 2 || seals[0].Final || !seals[1].Final || seals[1].Length != 1000 || !g.Fence.Less(seals[0].Fence) {
			t.Fatalf("%+v", seals)
		}
	})
	t.Run("less than was synced is corrupt, not short", func(t *testing.T) {
		g := a.alloc(t, false)
		f.has(g.ID, 500, 600)
		if _, err := a.SealChunk(t.Context(), 1, g.ID); !errors.Is(err, meta.Corrupt) {
			t.Fatal(err)
		}
	})
	t.Run("when no replica can tell it waits", func(t *testing.T) {
		g := a.alloc(t, false)
		f.has(g.ID, 10, 10)
		f.setAway(true)
		if _, err := a.SealChunk(t.Context(), 1, g.ID); !errors.Is(err, meta.Unavailable) {
			t.Fatal(err)
		}
		f.setAway(false)
		if rec, err := a.SealChunk(t.Context(), 1, g.ID); err != nil || rec.Length != 10 {
			t.Fatalf("%+v %v", rec, err)
		}
	})
}

// Rule 7: a file that ends in its own open chunk gets its size from the chunk when the writer
// dies.
func TestOpenEndedFileIsClosedWhenItsWriterDies(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	f := s.chunkServer(1)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "log").Attr.Ino
	g := a.alloc(t, true)
	f.has(g.ID, 100, 100)
	a.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 100, Chunk: g.ID, OpenEnded: true}}, Size: 100, Synced: true}, meta.LeaseNone)
	a.do(t, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseShared)
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	f.has(g.ID, 777, 700) // appended and synced since, with no word to the journal
	// While the chunk server does not answer, the size is unknown, and no client may get less
	// than the synced size: neither other clients nor the writer when the writer comes back.
	f.hang()
	s.expire(a)
	// The writer's cache of the directory is void: other clients do not wait for the chunk.
	b.create(t, "beside")
	sizes := make(chan uint64)
	for _, p := range []*peer{a, b} {
		go func() {
			for {
				r, err := p.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: ino}, meta.LeaseNone)
				if err == nil {
					sizes <- r.Attr.Size
					return
				}
				if t.Context().Err() != nil {
					return
				}
				time.Sleep(10 * time.Millisecond) // the client was told that its session expired
			}
		}()
	}
	select {
	case size := <-sizes:
		t.Errorf("size %d while nobody can know it", size)
		f.wake()
		<-sizes
	case <-time.After(300 * time.Millisecond):
		f.wake()
		for range 2 {
			if size := <-sizes; size != 777 {
				t.Errorf("size %d", size)
			}
		}
	}
	s.clean(t, 1)
}

// A chunk that files of two sessions share (copy_file_range) exists as long as either file needs
// the chunk.
func TestChunkSharedByTwoSessions(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	f := s.chunkServer(1)
	a, b := s.dial("a"), s.dial("b")
	src := a.create(t, "src").Attr.Ino
	g := a.alloc(t, false)
	f.has(g.ID, 5000, 5000)
	a.commit(t, src, g, 0, 5000, true)
	dst := b.create(t, "dst").Attr.Ino
	b.do(t, &meta.CopyRange{Src: src, Dst: dst, Len: 5000}, meta.LeaseNone)
	a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "src"}, meta.LeaseNone)
	a.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{src}}, meta.LeaseNone)
	if _, err := a.SealChunk(t.Context(), 1, g.ID); err != nil {
		t.Fatal(err)
	}
	time.Sleep(150 * time.Millisecond)
	if n := len(f.ordered(g.ID, meta.OrderDelete)); n != 0 {
		t.Fatal("b's bytes were deleted with a's file")
	}
	s.clean(t, 1)
	b.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "dst"}, meta.LeaseNone)
	b.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{dst}}, meta.LeaseNone)
	eventually(t, "nobody needs it: it is deleted", func() error {
		if len(f.ordered(g.ID, meta.OrderDelete)) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	s.clean(t, 1)
}

// Rule 11: a rename over a file waits for the new bytes.
func TestRenameOverTargetNeedsSyncedBytes(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	f := s.chunkServer(1)
	a := s.dial("a")
	tmp, target := a.create(t, "tmp").Attr.Ino, a.create(t, "target").Attr.Ino
	g := a.alloc(t, false)
	f.has(g.ID, 9000, 9000)
	a.commit(t, target, g, 0, 4500, true)
	a.commit(t, tmp, g, 4500, 4500, false)
	over := &meta.Rename{Parent: meta.RootIno, Name: "tmp", NewParent: meta.RootIno, NewName: "target"}
	if err := a.try(t, over); !errors.Is(err, meta.NotSynced) {
		t.Fatalf("bytes that a power cut may take replace synced ones: %v", err)
	}
	a.do(t, &meta.Write{Ino: tmp, MarkSynced: true, Synced: true}, meta.LeaseNone)
	a.do(t, over, meta.LeaseNone)
	if r := a.do(t, &meta.Lookup{Parent: meta.RootIno, Name: "target"}, meta.LeaseNone); r.Attr.Ino != tmp {
		t.Fatalf("target is inode %d, want %d", r.Attr.Ino, tmp)
	}
}

// Rule 12: the only file in an open packed chunk goes while the writer appends
// the next; the chunk is its session's.
func TestOpenChunkIsNoOrphan(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	f := s.chunkServer(1)
	a := s.dial("a")
	first := a.create(t, "first").Attr.Ino
	g := a.alloc(t, false)
	f.has(g.ID, 5000, 5000)
	a.commit(t, first, g, 0, 5000, true)
	a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "first"}, meta.LeaseNone)
	a.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{first}}, meta.LeaseNone)
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	s.srv.hosted.opened(1).tasks.collection.Wake()
	time.Sleep(150 * time.Millisecond)
	if n := len(f.ordered(g.ID, meta.OrderDelete)) + len(f.ordered(g.ID, meta.OrderSeal)); n != 0 {
		t.Fatalf("the collector gave %d orders for a chunk that its writer holds", n)
	}
	second := a.create(t, "second").Attr.Ino
	f.has(g.ID, 10_000, 10_000)
	a.commit(t, second, g, 5000, 5000, true)
	s.clean(t, 1)
}

// Rule 13: no session sees another session's changes before the changes are durable: new names
// and removed names, directories' lists, counters.
func TestNobodySeesWhatCouldBeLost(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.crash()
	s.adjust = func(c *Config) { c.CommitDelay = time.Hour } // nothing is journaled unless somebody waits
	s.start()
	a, b := s.dial("a"), s.dial("b")
	a.create(t, "gone")
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for what, step := range map[string]struct{ change, look meta.Op }{
		"a new name":        {newFile("new"), &meta.Lookup{Parent: meta.RootIno, Name: "new"}},
		"a name that is no": {&meta.Unlink{Parent: meta.RootIno, Name: "gone"}, &meta.Lookup{Parent: meta.RootIno, Name: "gone"}},
		"a list":            {newFile("listed"), &meta.ReadDir{Ino: meta.RootIno, Max: 100}},
		"attributes":        {&meta.SetAttr{Ino: meta.RootIno, Mask: meta.SetMode, Mode: 0o700}, &meta.GetAttr{Ino: meta.RootIno}},
		"counters":          {newFile("counted"), &meta.StatFSOp{}},
		"an empty folder":   {newFile("full"), &meta.Unlink{Parent: meta.RootIno, Name: "full", Dir: true}},
	} {
		a.do(t, step.change, meta.LeaseNone)
		o := s.srv.hosted.opened(1)
		o.mu.Lock()
		seq := o.cur.seq
		o.mu.Unlock()
		_ = b.try(t, step.look) // whatever the answer
		o.mu.Lock()
		durable := o.durable
		o.mu.Unlock()
		if durable < seq {
			t.Errorf("%s: b was answered when entry %d was in the journal, the change is in %d", what, durable, seq)
		}
	}
}

// Rule 16: an operation that is requested twice is carried out once, with the same answer.
func TestRepeatedOperation(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	id := a.NextOp()
	first, err := a.Do(t.Context(), 1, id, newFile("x"), meta.LeaseNone)
	if err != nil {
		t.Fatal(err)
	}
	again, err := a.Do(t.Context(), 1, id, newFile("x"), meta.LeaseNone)
	if err != nil || again.Attr.Ino != first.Attr.Ino {
		t.Fatalf("again: inode %d, %v; first %d", again.Attr.Ino, err, first.Attr.Ino)
	}
}

// An expired session lets go of everything: locks, orphans, leases.
func TestExpiredSessionLetsGo(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "x").Attr.Ino
	b.do(t, &meta.Open{Ino: ino}, meta.LeaseShared)
	l := meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: 1<<63 - 1}
	if err := b.SetLock(t.Context(), 1, l, false); err != nil {
		t.Fatal(err)
	}
	if err := a.SetLock(t.Context(), 1, l, false); !errors.Is(err, meta.WouldBlock) {
		t.Fatal(err)
	}
	a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "x"}, meta.LeaseNone)
	a.do(t, &meta.ReleaseOrphans{Inos: []meta.Ino{ino}}, meta.LeaseNone)
	a.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone) // b holds the lease
	s.expire(b)
	if err := a.SetLock(t.Context(), 1, l, false); err != nil {
		t.Fatalf("b's lock is still there: %v", err)
	}
	eventually(t, "the orphan goes", func() error {
		if err := a.try(t, &meta.GetAttr{Ino: ino}); !errors.Is(err, meta.Stale) {
			return fmt.Errorf("still there: %v", err)
		}
		return nil
	})
	eventually(t, "b knows", func() error {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.expired == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	b.create(t, "goes on")
	s.clean(t, 1)
}

// Rule 10: checkpoint, trimming, and a server that has lost its store: the last entry is kept,
// and nothing is missing.
func TestCheckpointTrimRestore(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	a := s.dial("a")
	made := map[string]meta.Ino{}
	more := func(n int) {
		for range n {
			name := fmt.Sprint("f", len(made))
			made[name] = a.create(t, name).Attr.Ino
		}
		if err := a.Sync(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
	}
	checkpoint := s.checkpoint
	more(50)
	checkpoint()
	more(50)
	checkpoint()
	more(50)
	recs, err := s.cluster.log.Reader().Range(t.Context(), 1, 10_000)
	if err != nil || len(recs) == 0 || recs[0].Seq == 1 {
		t.Fatalf("the log was not trimmed: %d entries from %d, %v", len(recs), recs[0].Seq, err)
	}
	blobs, err := os.ReadDir(filepath.Join(s.dir, "blobs"))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d entries, %d files of checkpoints", len(recs), len(blobs))
	s.crash()
	if err := os.RemoveAll(s.cluster.storeDir(1)); err != nil {
		t.Fatal(err)
	}
	s.start()
	for name, ino := range made {
		if r := a.do(t, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseNone); r.Attr.Ino != ino {
			t.Fatalf("%s is inode %d, was %d", name, r.Attr.Ino, ino)
		}
	}
	s.clean(t, 1)
	more(10)
	checkpoint()
	s.clean(t, 1)
}

// fsck asks the chunk servers for every chunk that a file refers to.
func TestFsckFindsMissingChunks(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	f := s.chunkServer(1)
	a := s.dial("a")
	ino := a.create(t, "x").Attr.Ino
	g := a.alloc(t, false)
	f.has(g.ID, 5000, 5000)
	a.commit(t, ino, g, 0, 5000, true)
	if _, err := a.SealChunk(t.Context(), 1, g.ID); err != nil {
		t.Fatal(err)
	}
	s.clean(t, 1)
	f.has(g.ID, 4000, 4000)
	if r, err := s.srv.checker.Fsck(t.Context(), 1); err != nil || r.Count != 1 {
		t.Fatalf("a short replica: %v %+v", err, r)
	}
	f.order(t.Context(), meta.Order{Kind: meta.OrderDelete, Chunk: g.ID})
	if r, err := s.srv.checker.Fsck(t.Context(), 1); err != nil || r.Count != 1 {
		t.Fatalf("a missing replica: %v %+v", err, r)
	}
	if _, _, err := namespace.ReadChunk(s.srv.hosted.opened(1).view(), g.ID); err != nil {
		t.Fatal(err)
	}
}

// After a crash, the server does not wait for a client that said good-bye.
func TestGoodByeIsJournaled(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 2*time.Minute)
	a := s.dial("a")
	for i := range 2000 {
		a.create(t, fmt.Sprint("x", i))
	}
	if err := a.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.crash()
	began := time.Now()
	s.start()
	s.dial("b").create(t, "y")
	if d := time.Since(began); d > time.Minute {
		t.Fatalf("b waited %v for a session that had ended", d)
	}
}

// A session that ends with very many orphans delays no other session: others are answered when
// some orphans are gone, and not yet all.
func TestSessionWithManyOrphansEnds(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 10*time.Second)
	b := s.dial("b")
	for range 10 { // b may get no processor meanwhile
		if answeredBetweenOrphans(t, s, b) {
			s.clean(t, 1)
			return
		}
	}
	t.Error("who asks for an attribute waits until all of them are gone")
}

func answeredBetweenOrphans(t *testing.T, s *site, b *peer) bool {
	t.Helper()
	a := s.dial("a")
	const n = 20_000
	ops := make([]client.BatchOp, 0, 2*n)
	for i := range n {
		ops = append(ops, client.BatchOp{Op: newFile(fmt.Sprint("x", i))}, client.BatchOp{Op: &meta.Unlink{Parent: meta.RootIno, Name: fmt.Sprint("x", i)}})
	}
	if _, errs, err := a.DoBatch(t.Context(), 1, client.AnyEpoch, ops); err != nil || errors.Join(errs...) != nil {
		t.Fatal(err, errors.Join(errs...))
	}
	id := a.ID()
	first := func() (first meta.Ino) { // the orphan that goes next; 0 if none is left
		o := s.srv.hosted.opened(1)
		o.mu.Lock()
		defer o.mu.Unlock()
		if err := namespace.Orphans(o.view(), id, func(ino meta.Ino) bool { first = ino; return false }); err != nil {
			t.Fatal(err)
		}
		return first
	}
	all := first()
	done := make(chan error, 1)
	began := time.Now()
	go func() { done <- a.Close(t.Context()) }()
	for answers := 0; ; {
		some := first() > all
		b.do(t, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone)
		if some && first() != 0 {
			answers++
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d orphans went in %v, meanwhile b was answered %d times", n, time.Since(began).Round(time.Millisecond), answers)
			return answers > 0
		default:
		}
	}
}
