package sim

import (
	"errors"
	"os"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// Stories are single interleavings, each behind a rule of docs/rules.md. The faults of
// the story are the only faults; all checks of truth.go apply.

type stage struct {
	*world
	t *testing.T
}

func newStage(t *testing.T) *stage {
	s := &stage{newWorld(Config{Seed: 7, Calm: true, Servers: 2, Clients: 2}), t}
	if testing.Verbose() {
		s.cfg.Log = func(l string) { t.Log(l) }
	}
	for _, srv := range s.servers {
		srv.boot()
	}
	for _, c := range s.clients {
		c.stopping = true // the client starts no operations by itself
		c.boot()
	}
	s.until("sessions", func() bool {
		for _, c := range s.clients {
			for _, cv := range c.vols {
				if !cv.ready {
					return false
				}
			}
		}
		return true
	})
	return s
}

// until runs the world until something is so.
func (s *stage) until(what string, so func() bool) {
	s.t.Helper()
	for end := s.Now + 20*sessionTTL; s.Now < end && !so(); {
		s.run(1)
	}
	if !so() {
		s.t.Fatalf("at %d ms: it never came to this: %s", s.Now, what)
	}
}

func (s *stage) run(ms int64) {
	s.t.Helper()
	end := s.Now + ms
	for at, ok := s.First(); ok && at <= end; at, ok = s.First() {
		s.step()
	}
	if s.err != nil {
		s.t.Fatal(s.err)
	}
	if at, ok := s.First(); ok {
		s.Now = max(s.Now, min(s.Now+ms, at))
	}
}

// end removes the faults and checks the final state.
func (s *stage) end() {
	s.t.Helper()
	s.rest()
	if s.err != nil {
		s.t.Fatal(s.err)
	}
}

// do starts an operation. r is nil until the answer arrives.
func (s *stage) do(cv *clientVolume, op meta.Op) (r **reply) {
	r = new(*reply)
	var id meta.OpID
	if op.Code().Mutates() {
		id = cv.opID()
	}
	cv.do(id, op, func(got *reply) { *r = got })
	return r
}

func (s *stage) wait(r **reply) *reply {
	s.t.Helper()
	s.until("an answer", func() bool { return *r != nil })
	return *r
}

func (s *stage) create(cv *clientVolume, name string) *reply {
	s.t.Helper()
	r := s.wait(s.do(cv, newFile(name)))
	if r.err != nil {
		s.t.Fatal(r.err)
	}
	return r
}

func newFile(name string) *meta.Create {
	return &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true}
}

func (s *stage) lookup(cv *clientVolume, name string) *reply {
	s.t.Helper()
	return s.wait(s.do(cv, &meta.Lookup{Parent: meta.RootIno, Name: name}))
}

// write writes and syncs a file, trying again while chunks come and go.
func (s *stage) write(cv *clientVolume, ino meta.Ino) {
	s.t.Helper()
	for range 20 {
		done, ok := false, false
		cv.write(ino, func(r *reply) { done, ok = true, r != nil && r.err == nil })
		s.until("a write's end", func() bool { return done })
		if ok {
			return
		}
	}
	s.t.Fatal("no write succeeds")
}

func (s *stage) sync(cv *clientVolume) {
	s.t.Helper()
	cv.busy++
	cv.sync()
	s.until("a sync", func() bool { return cv.busy == 0 })
}

// Rules 1 and 2: owner O1 executes a create and stands still before the commit, and O2
// takes over. O1 wakes: its commit is refused, and O1 sends no answer. When O1 owns the
// volume again, the file of the create is not there.
func TestStoryFencedOwnerWakesUp(t *testing.T) {
	s := newStage(t)
	a, b := s.clients[0].vols[0], s.clients[1].vols[0]
	s.create(a, "before")
	s.sync(a)
	o1 := s.log[0].owner
	ghost := s.do(b, newFile("ghost"))
	s.until("O1 executed it", func() bool { o := o1.owners[1]; return o != nil && len(o.names) > 1 && len(o.cur.effects) > 0 })
	s.pause(&o1.node, 3*ownerTTL)
	// B dies: nobody brings the ghost back.
	s.clients[1].stopping = false
	s.clients[1].crash()
	s.until("another owner", func() bool { o := s.log[0].owner; return o != o1 && o.owners[1] != nil && o.owners[1].recovered })
	if *ghost != nil {
		t.Fatal("the ghost was answered")
	}
	made := s.create(a, "after")
	s.until("O1 wakes", func() bool { return o1.paused <= s.Now })
	s.run(50)
	if r := s.lookup(a, "ghost"); !errors.Is(r.err, meta.NotFound) {
		t.Fatalf("the ghost is there: inode %d, %v", r.res.Attr.Ino, r.err)
	}
	if r := s.lookup(a, "after"); r.res.Attr.Ino != made.res.Attr.Ino {
		t.Fatalf("after is inode %d, was %d", r.res.Attr.Ino, made.res.Attr.Ino)
	}
	s.clients[1].stopping = true
	s.end()
}

// Rule 3: client C1 got the answer "a is inode n", and the owner dies before its commit.
// Client C2, which wants to create a, too, gets no answer before C1 is back, and never
// gets n.
func TestStoryEarlyRepliesSurviveTheOwner(t *testing.T) {
	s := newStage(t)
	a, b := s.clients[0].vols[0], s.clients[1].vols[0]
	s.create(b, "other") // b's session is journaled
	s.sync(b)
	s.create(a, "first")
	s.sync(a)
	got := s.create(a, "a")
	if len(a.retained) == 0 {
		t.Fatal("it was not an early reply")
	}
	s.log[0].owner.crash()
	r := s.wait(s.do(b, newFile("a")))
	if !errors.Is(r.err, meta.Exists) {
		t.Fatalf("b created a, too: inode %d, %v", r.res.Attr.Ino, r.err)
	}
	if l := s.lookup(b, "a"); l.res.Attr.Ino != got.res.Attr.Ino {
		t.Fatalf("a is inode %d, was %d", l.res.Attr.Ino, got.res.Attr.Ino)
	}
	if n := s.create(b, "b"); n.res.Attr.Ino == got.res.Attr.Ino {
		t.Fatal("one inode number twice")
	}
	s.end()
}

// Rule 4: an owner that allocates a chunk and dies never allocates the chunk again, and
// neither does the owner's successor (truth.handedOut).
func TestStoryChunksAreHandedOutOnce(t *testing.T) {
	s := newStage(t)
	cv := s.clients[0].vols[0]
	ino := s.create(cv, "f").res.Attr.Ino
	for range 4 {
		s.write(cv, ino)
		s.log[0].owner.crash()
		cv.chunk = nil
		s.write(cv, ino)
	}
	if len(s.truth.chunks) < 5 {
		t.Fatalf("only %d chunks were handed out", len(s.truth.chunks))
	}
	s.end()
}

// Rule 5: the writer dies with synced bytes and appended bytes; then a disk crashes. The
// seal keeps all synced bytes, and the file can be read.
func TestStorySealKeepsWhatWasSynced(t *testing.T) {
	s := newStage(t)
	cv := s.clients[0].vols[0]
	ino := s.create(cv, "f").res.Attr.Ino
	s.write(cv, ino)
	s.sync(cv)
	id := cv.chunk.rec.ID
	synced := s.disks[0].chunks[id].synced
	// Bytes on a single replica, which never synced the bytes.
	r := s.disks[0].chunks[id]
	if err := s.disks[0].append(id, r.fence, len(r.data), block(meta.OpID{Unique: 1})); err != nil {
		t.Fatal(err)
	}
	s.clients[0].stopping = false
	s.clients[0].crash()
	s.disks[1].crash()
	s.clients[0].stopping = true
	s.until("it is sealed", func() bool { return s.res.Seals > 0 })
	s.run(200)
	o := s.log[0].owner.owners[1]
	c, _, err := namespace.ReadChunk(&view{o: o}, id)
	if err != nil || c.State != meta.ChunkSealed || c.Length < uint64(synced) {
		t.Fatalf("%+v, %v; %d bytes were synced", c, err, synced)
	}
	// The previous writer is fenced.
	for _, d := range s.disks {
		if err := d.append(id, meta.Fence{Term: 1}, int(c.Length), []byte("late")); err == nil {
			t.Fatalf("%s takes an append after the seal", d.name)
		}
	}
	s.end()
}

// Two open volumes are independent: a fault of one owner does not delay the other volume,
// and no sequence number of one volume appears in the other.
func TestStoryTwoVolumesAreIndependent(t *testing.T) {
	s := newStage(t)
	s.until("both are owned", func() bool { return s.log[0].owner != nil && s.log[1].owner != nil })
	a, b := s.clients[0].vols[0], s.clients[0].vols[1]
	s.create(a, "x")
	s.create(b, "x")
	// The first volume moves to the other server, alone.
	o := s.log[0].owner
	o.owners[1].lose("it is sent away")
	s.log[0].until = s.Now
	o.taking[1] = true // and not taken back
	began := s.Now
	for range 20 {
		ino := s.create(b, string(rune('a'+s.rng.IntN(26)))+string(rune('a'+s.Now%26))+string(rune('a'+len(s.truth.inos)%26))).res.Attr.Ino
		s.write(b, ino)
	}
	if s.log[1].owner.owners[2] == nil {
		t.Fatal("the second volume was lost, too")
	}
	t.Logf("20 files in the second volume in %d ms", s.Now-began)
	s.until("the first is served elsewhere", func() bool { return s.log[0].owner != o && s.log[0].owner.owners[1] != nil })
	s.create(a, "y")
	delete(o.taking, 1)
	s.end()
}

// Rule 12: the only file in an open packed chunk is unlinked while the writer appends the
// next file: the session holds the chunk, so the chunk is no orphan.
func TestStoryOnlyFileInAnOpenChunkIsUnlinked(t *testing.T) {
	s := newStage(t)
	cv := s.clients[0].vols[0]
	first := s.create(cv, "first").res.Attr.Ino
	s.write(cv, first)
	id := cv.chunk.rec.ID
	s.wait(s.do(cv, &meta.Unlink{Parent: meta.RootIno, Name: "first"}))
	s.wait(s.do(cv, &meta.ReleaseOrphans{Inos: []meta.Ino{first}}))
	s.sync(cv)
	s.run(300) // the collector had every chance
	second := s.create(cv, "second").res.Attr.Ino
	s.write(cv, second)
	if cv.chunk == nil || cv.chunk.rec.ID != id {
		t.Fatal("the chunk was taken from its writer")
	}
	for _, d := range s.disks {
		if r := d.chunks[id]; r == nil || r.gone {
			t.Fatalf("%s deleted it", d.name)
		}
	}
	s.end()
}

// Rule 13: no client sees a change that could be lost. A request of b waits until a's
// change is in the journal: names that exist, names that are gone, counters.
func TestStoryNobodySeesWhatCouldBeLost(t *testing.T) {
	s := newStage(t)
	a, b := s.clients[0].vols[0], s.clients[1].vols[0]
	s.create(a, "gone")
	s.sync(a)
	s.create(b, "mine")
	s.sync(b)
	s.create(a, "new")
	n := s.do(b, &meta.Lookup{Parent: meta.RootIno, Name: "new"})
	st := s.do(b, &meta.StatFSOp{})
	s.wait(n)
	s.wait(st)
	s.wait(s.do(a, &meta.Unlink{Parent: meta.RootIno, Name: "gone"}))
	if r := s.lookup(b, "gone"); !errors.Is(r.err, meta.NotFound) {
		t.Fatal(r.err)
	}
	if got := (*st).res.StatFS.UsedInodes; got != 4 {
		t.Fatalf("%d inodes are counted, want 4", got)
	}
	s.end() // truth.saw has checked that each change was journaled when b saw it
}

// A client stands still for longer than its lease while nobody needs its leases. Its
// session resumes with an early reply that is not in the journal yet, and with leases on
// names. The client stands still again while another client changes one of these names:
// the other client waits no longer than a lease, and the first client learns that its
// session ended.
func TestStoryLateSessionComesBack(t *testing.T) {
	s := newStage(t)
	s.cfg.Off.Courtesy = os.Getenv("PENSTOCK_CONTROL") == "sim-nocourtesy"
	a, b := s.clients[0].vols[0], s.clients[1].vols[0]
	s.create(a, "first")
	s.lookup(a, "first") // the answer has a lease on the names of the root
	was, expired := a.session, s.res.Expired
	a.c.paused = s.Now + 3*sessionTTL
	s.run(3*sessionTTL + sessionTTL/2)
	s.until("it is served again", func() bool { return a.ready && a.w.clock(&a.c.node) < a.leaseUntil })
	if s.res.Expired != expired || a.session != was {
		t.Fatalf("its session ended, and nobody needed what it had")
	}
	s.create(a, "second")

	a.c.paused = s.Now + 5*sessionTTL
	s.run(sessionTTL / 10)
	began := s.Now
	s.create(b, "third") // in a directory of which a may keep the names
	if took := s.Now - began; took > 2*sessionTTL {
		t.Errorf("another waited %d ms for a client that stands still", took)
	}
	if s.res.Expired == expired {
		t.Error("its session stands, and it has not answered")
	}
	s.run(6 * sessionTTL)
	if l := s.lookup(a, "third"); l.err != nil {
		t.Errorf("it does not see what was made meanwhile: %v", l.err)
	}
	s.end()
}
