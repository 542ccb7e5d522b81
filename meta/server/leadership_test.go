package server

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// leads asks until the session leads a file, and returns the epoch.
func (p *peer) leads(t *testing.T, ino meta.Ino, address string, between func()) (epoch uint64) {
	t.Helper()
	eventually(t, "the file is led from "+address, func() error {
		between()
		r, err := p.Do(t.Context(), 1, meta.OpID{}, &meta.Lead{Ino: ino, Address: address}, meta.LeaseNone)
		if err == nil {
			epoch = r.Off
		}
		return err
	})
	return epoch
}

// Rule 25: while a session leads a file, no other session's bytes get into the file; the next
// leader begins behind the sealed end of its predecessor, in a later epoch, also after the
// owner's death. Control: meta-noleadership.
func TestLeadership(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 60*time.Second)
	f := s.chunkServer(1)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "log").Attr.Ino
	nothing := func() {}
	refused := func(p *peer, op meta.Op, want meta.LeaseMode) {
		t.Helper()
		if _, err := p.Do(t.Context(), 1, meta.OpID{}, op, want); !errors.Is(err, meta.NotPermitted) {
			t.Errorf("DATA: %T of a session that does not lead: %v", op, err)
		}
	}
	led := func(p *peer, epoch uint64, address string) {
		t.Helper()
		r := p.do(t, &meta.Leader{Ino: ino}, meta.LeaseNone)
		if r.Off != epoch || string(r.Data) != address {
			t.Errorf("epoch %d from %q, not %d from %q", r.Off, r.Data, epoch, address)
		}
	}
	if err := b.try(t, &meta.Leader{Ino: ino}); !errors.Is(err, meta.NotFound) {
		t.Errorf("a file that nobody leads: %v", err)
	}
	first := a.leads(t, ino, "a:1", nothing)
	led(b, first, "a:1")
	g := a.alloc(t, true)
	f.has(g.ID, 100, 100)
	a.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 100, Chunk: g.ID, OpenEnded: true}}, Size: 100, Synced: true}, meta.LeaseNone)
	if _, err := b.Do(t.Context(), 1, meta.OpID{}, &meta.Lead{Ino: ino}, meta.LeaseNone); !errors.Is(err, meta.Busy) {
		t.Errorf("a second leader: %v", err)
	}
	h := b.alloc(t, false)
	f.has(h.ID, 50, 50)
	of := func(id meta.ChunkID) *meta.Write {
		return &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: 5000, Len: 50, Chunk: id}}, Size: 5050, Synced: true}
	}
	refused(b, of(h.ID), meta.LeaseNone)
	refused(b, &meta.SetAttr{Ino: ino, Mask: meta.SetSize}, meta.LeaseNone)
	refused(b, &meta.Fallocate{Ino: ino, Len: 10}, meta.LeaseNone)
	refused(b, &meta.Open{Ino: ino}, meta.LeaseExclusive)
	if err := b.try(t, &meta.GetAttr{Ino: ino}); err != nil {
		t.Error(err)
	}
	// The leader is silent, and another session wants to lead: the leader's session ends. The
	// leader appended on, with no word to the journal.
	f.has(g.ID, 777, 700)
	sess := s.srv.clients.session(a.ID())
	second := b.leads(t, ino, "b:1", func() { sess.renewed.Store(int64(time.Since(s.srv.epoch) - 100*s.ttl)) })
	if second <= first {
		t.Errorf("DATA: epoch %d after epoch %d", second, first)
	}
	if size := b.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone).Attr.Size; size != 777 {
		t.Errorf("DATA: %d bytes of 777", size)
	}
	if len(f.ordered(g.ID, meta.OrderSeal)) == 0 {
		t.Error("DATA: the predecessor's chunk is open")
	}
	eventually(t, "the old leader is told that its session ended", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.expired == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	i := a.alloc(t, false)
	f.has(i.ID, 50, 50)
	refused(a, of(i.ID), meta.LeaseNone)
	led(a, second, "b:1")
	s.clean(t, 1)
	// The next owner knows the leader, and goes on with the epochs.
	s.crash()
	s.start()
	led(a, second, "b:1")
	refused(a, of(i.ID), meta.LeaseNone)
	b.do(t, &meta.EndLead{Ino: ino, Epoch: second - 1}, meta.LeaseNone)
	led(a, second, "b:1")
	b.do(t, &meta.EndLead{Ino: ino, Epoch: second}, meta.LeaseNone)
	third := a.leads(t, ino, "a:2", nothing)
	if third <= second {
		t.Errorf("DATA: epoch %d after epoch %d", third, second)
	}
	// A session that leads without knowing leads anew.
	if fourth := a.leads(t, ino, "a:3", nothing); fourth <= third {
		t.Errorf("DATA: epoch %d after epoch %d", fourth, third)
	}
}

// A session begins many leaderships at a time, while its other calls acknowledge durable entries:
// each Lead gets its own reply.
func TestManyLeadAtOnce(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 60*time.Second)
	a := s.dial("a")
	const files, tasks = 320, 16
	var inos []meta.Ino
	for i := range files {
		inos = append(inos, a.create(t, fmt.Sprintf("log%d", i)).Attr.Ino)
	}
	var wg sync.WaitGroup
	for task := range tasks {
		wg.Go(func() {
			for i := task; i < files; i += tasks {
				if _, err := a.Do(t.Context(), 1, meta.OpID{}, &meta.Lead{Ino: inos[i], Address: "a:1"}, meta.LeaseNone); err != nil {
					t.Errorf("file %d, which nobody leads: %v", i, err)
				}
			}
		})
	}
	wg.Wait()
}

// A file that a live session writes, without leading the file, is sealed before another session
// leads the file.
func TestLeadSealsAnOpenEnd(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 60*time.Second)
	f := s.chunkServer(1)
	a, b := s.dial("a"), s.dial("b")
	ino := a.create(t, "log").Attr.Ino
	g := a.alloc(t, true)
	f.has(g.ID, 300, 300)
	a.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 100, Chunk: g.ID, OpenEnded: true}}, Size: 100, Synced: true}, meta.LeaseNone)
	b.leads(t, ino, "b", func() {})
	if size := b.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone).Attr.Size; size != 300 {
		t.Errorf("DATA: %d bytes of 300", size)
	}
	if _, err := a.Do(t.Context(), 1, meta.OpID{}, &meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 400, Chunk: g.ID, OpenEnded: true}}, Size: 400, Synced: true}, meta.LeaseNone); err == nil {
		t.Error("DATA: the writer before went on")
	}
	s.clean(t, 1)
}

// A leader keeps its lease while other sessions ask to lead its file, or to write the file, and
// the owner asks the leader for the file's length when other sessions read the file. A question
// under way ends with the leadership: the reader then gets the end that the next leader begins
// behind.
func TestLeaderIsReadWithoutRecall(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 60*time.Second)
	chunks := s.chunkServer(1)
	w, b, r := s.grower("leader"), s.dial("b"), s.dial("reader")
	ino, _ := w.openEnd(t, chunks)
	epoch := w.leads(t, ino, "w", func() {})
	if size := w.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive).Attr.Size; size != 700 && size != 900 {
		t.Fatalf("the file was sealed at %d bytes", size)
	}
	size := w.do(t, &meta.GetAttr{Ino: ino}, meta.LeaseNone).Attr.Size
	g := w.alloc(t, true)
	chunks.has(g.ID, 400, 300)
	w.do(t, &meta.Write{Ino: ino, Extents: []meta.Extent{{Off: size, Len: 100, Chunk: g.ID, OpenEnded: true}}, Size: size + 100, Synced: true}, meta.LeaseNone)
	change := b.stateOf(t, w, ino)
	w.mu.Lock()
	before := w.recalls
	w.mu.Unlock()
	if err := b.try(t, &meta.Lead{Ino: ino}); !errors.Is(err, meta.Busy) {
		t.Errorf("a second leader: %v", err)
	}
	if err := b.try(t, &meta.SetAttr{Ino: ino, Mask: meta.SetSize}); !errors.Is(err, meta.NotPermitted) {
		t.Errorf("DATA: a truncation by another session: %v", err)
	}
	if _, err := b.Do(t.Context(), 1, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: "log", Mode: meta.TypeRegular | 0o644, Excl: true}, meta.LeaseExclusive); !errors.Is(err, meta.Exists) {
		t.Errorf("a file of the same name: %v", err)
	}
	type told struct {
		size uint64
		err  error
	}
	read := func() chan told {
		ch := make(chan told, 1)
		go func() {
			res, err := r.Do(t.Context(), 1, meta.OpID{}, &meta.GetAttr{Ino: ino}, meta.LeaseNone)
			if err != nil {
				ch <- told{0, err}
				return
			}
			ch <- told{res.Attr.Size, nil}
		}()
		return ch
	}
	first := read()
	w.question(t)(meta.Growth{OK: true, Size: size + 250, Change: change})
	if got := <-first; got.err != nil || got.size != size+250 {
		t.Errorf("a reader was told of %d bytes, %v; the leader of %d", got.size, got.err, size+250)
	}
	w.mu.Lock()
	recalls := w.recalls - before
	w.mu.Unlock()
	if recalls > 0 || w.mode(ino) != meta.LeaseExclusive {
		t.Errorf("%d recalls; the leader has %v", recalls, w.mode(ino))
	}
	// A question that the leader never answers.
	second := read()
	w.question(t)
	w.do(t, &meta.EndLead{Ino: ino, Epoch: epoch}, meta.LeaseNone)
	b.leads(t, ino, "b", func() {})
	if got := <-second; got.err != nil || got.size < size+300 {
		t.Errorf("DATA: a reader was told of %d bytes, %v; %d were synced", got.size, got.err, size+300)
	}
	if w.mode(ino) == meta.LeaseExclusive {
		t.Error("DATA: the predecessor has its lease")
	}
	s.clean(t, 1)
}

// A rollback ends the leader's session, and keeps the count of the epochs: also a file that the
// rollback brings back gets a later epoch than all before.
func TestLeadershipOverRollback(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 60*time.Second)
	a, b, admin := s.dial("a"), s.dial("b"), s.dial("admin")
	kept, gone := a.create(t, "kept").Attr.Ino, a.create(t, "gone").Attr.Ino
	admin.snapshot(t, "one")
	of := map[meta.Ino]uint64{}
	last := uint64(0)
	leads := func(p *peer, ino meta.Ino) {
		t.Helper()
		epoch := p.leads(t, ino, "here", func() {})
		if epoch <= last {
			t.Errorf("DATA: inode %d is led in epoch %d; epoch %d was before", ino, epoch, last)
		}
		last, of[ino] = epoch, epoch
	}
	leads(a, gone)
	a.do(t, &meta.EndLead{Ino: gone}, meta.LeaseNone)
	leads(a, gone)
	a.do(t, &meta.Unlink{Parent: meta.RootIno, Name: "gone"}, meta.LeaseNone)
	leads(a, kept)
	for again := range 2 {
		if err := admin.RollBack(t.Context(), 1, "one", true); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the leader is told that its session ended", func() error {
			a.mu.Lock()
			defer a.mu.Unlock()
			return unless(a.expired == again+1)
		})
		for ino := range of {
			eventually(t, "the file is led by nobody", func() error { // in the next epoch of the session
				_, err := b.Do(t.Context(), 1, meta.OpID{}, &meta.Leader{Ino: ino}, meta.LeaseNone)
				if errors.Is(err, meta.NotFound) {
					return nil
				}
				return fmt.Errorf("asked for the leader: %w", err)
			})
		}
		leads(b, gone)
		leads(a, kept)
		if again == 0 {
			s.crash()
			s.start()
		}
	}
	s.clean(t, 1)
}
