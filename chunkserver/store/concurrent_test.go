package store

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// kept lists the promises to a writer about its chunk.
type kept struct {
	id       meta.ChunkID
	data     []byte // acknowledged, and maybe one append more
	acked    int
	synced   int
	sealed   bool
	deleting bool
	deleted  bool
}

// work appends to chunk after chunk, syncing, reading, sealing, compressing, deleting
// and copying, until the disk is gone.
func work(s *Store, r *rand.Rand, first uint64, out *[]*kept) error {
	f := meta.Fence{Term: 1}
	for n := first; ; n += 100 {
		k := &kept{id: testID(n)}
		*out = append(*out, k)
		for range 1 + r.IntN(30) {
			p := make([]byte, 1+r.IntN([]int{100, 5000, 150_000}[r.IntN(3)]))
			for i := range p {
				p[i] = byte(n) ^ byte(i*13) ^ byte(len(k.data))
			}
			k.data = append(k.data, p...)
			if s.Append(ctx, k.id, f, uint64(k.acked), p, chunkserver.CRC(p)) != nil {
				return nil
			}
			k.acked = len(k.data)
			if r.IntN(2) == 0 {
				n, err := s.Sync(ctx, k.id, uint64(k.acked))
				if err != nil {
					return nil
				}
				if int(n) != k.acked {
					return fmt.Errorf("DATA: synced %d of %d", n, k.acked)
				}
				k.synced = k.acked
			}
			off := r.IntN(k.acked)
			got := make([]byte, 1+r.IntN(k.acked-off))
			if err := s.Read(ctx, k.id, got, uint64(off)); err == nil && !bytes.Equal(got, k.data[off:off+len(got)]) {
				return fmt.Errorf("DATA: %d bytes at %d read something else", len(got), off)
			} else if meta.KindOf(err) == meta.Corrupt {
				return err
			}
		}
		if r.IntN(3) > 0 {
			if _, err := s.Seal(ctx, k.id, f, true, uint64(k.acked)); err != nil {
				return nil
			}
			k.sealed, k.synced = true, k.acked
			if r.IntN(2) == 0 {
				s.Compress(k.id, meta.CompressS2)
			}
		}
		if r.IntN(4) == 0 {
			k.deleting = true
			if s.Delete(ctx, k.id, f) != nil {
				return nil
			}
			k.deleted = true
			if r.IntN(2) == 0 { // and a copy comes
				k.deleted, k.sealed = false, true
				if err := receive(s, k.id, meta.Fence{Term: 2}, k.data[:k.acked], 1<<20); err != nil {
					return nil
				}
				k.deleting, k.synced = false, k.acked
			}
		}
	}
}

// Many writers, checkpoints in the background all the time, and then the power fails: the
// promises to each writer hold.
func TestConcurrentCrash(t *testing.T) {
	for seed := range seeds(25) {
		r := rand.New(rand.NewPCG(seed, 3))
		o := options()
		o.Manual, o.CheckpointEvery, o.batch = false, time.Millisecond, 1+int(seed%20)
		d := newMemDisk()
		if err := Init(d, o); err != nil {
			t.Fatal(err)
		}
		s, err := Open(d, o)
		if err != nil {
			t.Fatal(err)
		}
		d.mu.Lock()
		d.powerAt = d.ops + 200 + r.IntN(2000)
		d.mu.Unlock()
		stop := make(chan struct{})
		var kicker sync.WaitGroup
		kicker.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
					s.points.want()
				}
			}
		})
		all := make([][]*kept, 6)
		errs := make([]error, len(all))
		var wg sync.WaitGroup
		for w := range all {
			wr := rand.New(rand.NewPCG(seed, uint64(w)+10))
			wg.Go(func() { errs[w] = work(s, wr, uint64(w)+1, &all[w]) })
		}
		wg.Wait()
		close(stop)
		kicker.Wait()
		s.Abandon()
		for w, err := range errs {
			if err != nil {
				t.Fatalf("seed %d, writer %d: %v", seed, w, err)
			}
		}
		o.Manual = true
		if s, err = Open(d.crash(r), o); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		for w, ks := range all {
			for _, k := range ks {
				if err := k.check(s); err != nil {
					t.Fatalf("seed %d, writer %d, chunk %d: %v", seed, w, k.id.Counter, err)
				}
			}
		}
		s.Abandon()
	}
}

// A chunk is deleted while a checkpoint goes on, and the power fails before the log has the
// deletion: the checkpoint has not taken the chunk's files, whose earlier records are gone from
// the log.
func TestDeleteUnderCheckpoint(t *testing.T) {
	o := options()
	d := newMemDisk()
	if err := Init(d, o); err != nil {
		t.Fatal(err)
	}
	s, err := Open(d, o)
	if err != nil {
		t.Fatal(err)
	}
	id, f := testID(1), meta.Fence{Term: 1}
	var data []byte
	more := func() {
		t.Helper()
		p := bytes.Repeat([]byte{byte(len(data) + 1)}, 5000)
		if err := s.Append(ctx, id, f, uint64(len(data)), p, chunkserver.CRC(p)); err != nil {
			t.Fatal(err)
		}
		data = append(data, p...)
		if _, err := s.Sync(ctx, id, uint64(len(data))); err != nil {
			t.Fatal(err)
		}
	}
	more()
	inside, goOn := make(chan struct{}), make(chan struct{})
	deleting, release := make(chan struct{}), make(chan struct{})
	var once, stuck sync.Once
	var hold atomic.Bool
	d.before = func(op, name string) error {
		switch {
		case op == "open" && name == metaName(id)+tmpSuffix:
			once.Do(func() { close(inside); <-goOn })
		case op == "fsync" && hold.Load() && strings.HasPrefix(name, logDir+"/") && name != cpName:
			stuck.Do(func() { close(deleting) })
			<-release
		}
		return nil
	}
	checkpoint, deleted := make(chan error, 1), make(chan error, 1)
	go func() { checkpoint <- s.Checkpoint() }()
	<-inside
	more()
	hold.Store(true)
	go func() { deleted <- s.Delete(ctx, id, f) }()
	<-deleting
	close(goOn)
	if err := <-checkpoint; err != nil {
		t.Fatal(err)
	}
	lost := d.keep(rand.New(rand.NewPCG(1, 1)), 0)
	close(release)
	if err := <-deleted; err != nil {
		t.Fatal(err)
	}
	s.Abandon()
	for _, c := range []struct {
		d    *memDisk
		here bool
	}{{lost, true}, {d.clone(), false}} {
		if s, err = Open(c.d, o); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(data))
		err := s.Read(ctx, id, got, 0)
		if here := err == nil && bytes.Equal(got, data); here != c.here {
			t.Errorf("the chunk is there: %v, should be %v: %v", here, c.here, err)
		}
		s.Abandon()
	}
}

// Checkpoints while the log has a chunk's deletion but is not synced yet: they put the
// chunk's metadata in place, or don't. Should the power fail when all is done, the chunk
// is gone: the log no longer tells of the deletion.
func TestCheckpointUnderDelete(t *testing.T) {
	t.Run("begun after the record", func(t *testing.T) {
		c := newDeletion(t)
		hold := c.holdSync()
		deleted := c.delete()
		<-hold.inside
		checkpoint := c.checkpoint()
		hold.release(c.placed)
		c.finish(checkpoint, deleted)
	})
	t.Run("begun before the record, and another after it", func(t *testing.T) {
		c := newDeletion(t)
		p := []byte("not synced")
		if err := c.s.Append(ctx, testID(2), meta.Fence{Term: 1}, 0, p, chunkserver.CRC(p)); err != nil {
			t.Fatal(err)
		}
		first := c.holdSync()
		checkpoint := c.checkpoint()
		<-first.inside
		end := c.s.log.end()
		deleted := c.delete()
		for c.s.log.end() == end {
			time.Sleep(time.Millisecond)
		}
		second := c.holdSync()
		first.release(nil)
		<-second.inside
		if err := <-checkpoint; err != nil {
			t.Fatal(err)
		}
		checkpoint = c.checkpoint()
		second.release(nil)
		c.finish(checkpoint, deleted)
	})
}

// A chunk is deleted while a checkpoint goes on, and a copy of the chunk comes: the log, which
// begins before the deletion, must not say that the copy was deleted.
func TestCopyAfterDeleteUnderCheckpoint(t *testing.T) {
	c := newDeletion(t)
	s := c.s
	close(c.done)
	s.points.mu.Lock()
	pos := s.log.end()
	s.mu.Lock()
	dirty := s.dirty
	s.dirty = map[*chunk]struct{}{}
	s.mu.Unlock()
	if err := <-c.delete(); err != nil {
		t.Fatal(err)
	}
	err := s.points.settle(dirty, pos)
	if err == nil {
		err = s.log.checkpoint(pos)
	}
	for c := range dirty {
		s.unpin(c)
	}
	s.points.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	p := []byte("a copy")
	if err := receive(s, c.id, meta.Fence{Term: 2}, p, len(p)); err != nil {
		t.Fatal(err)
	}
	s.Abandon()
	if s, err = Open(c.d.keep(rand.New(rand.NewPCG(1, 1)), 0), c.o); err != nil {
		t.Fatal(err)
	}
	defer s.Abandon()
	if i, err := s.Stat(ctx, c.id); err != nil || i.State != meta.ChunkSealed || i.Length != uint64(len(p)) {
		t.Errorf("the copy is lost: %+v, %v", i, err)
	}
}

// deletion is a store with a chunk to delete, on a disk that a test can stop.
type deletion struct {
	t      *testing.T
	s      *Store
	d      *memDisk
	o      Options
	id     meta.ChunkID
	mu     sync.Mutex
	held   *held
	placed chan struct{} // closed when the chunk's directory is synced
	done   chan struct{} // closed when the files may go
}

// held is a waiting sync of the log.
type held struct{ inside, goOn chan struct{} }

// patience is the wait for an event that only a mistake would cause.
const patience = 100 * time.Millisecond

func (h *held) release(when chan struct{}) {
	if when != nil {
		select {
		case <-when:
		case <-time.After(patience):
		}
	}
	close(h.goOn)
}

func newDeletion(t *testing.T) *deletion {
	c := &deletion{t: t, d: newMemDisk(), o: options(), id: testID(1), placed: make(chan struct{}), done: make(chan struct{})}
	err := Init(c.d, c.o)
	if err == nil {
		c.s, err = Open(c.d, c.o)
	}
	if err != nil {
		t.Fatal(err)
	}
	p := bytes.Repeat([]byte{7}, 5000)
	if err = c.s.Append(ctx, c.id, meta.Fence{Term: 1}, 0, p, chunkserver.CRC(p)); err == nil {
		_, err = c.s.Sync(ctx, c.id, uint64(len(p)))
	}
	if err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	c.d.before = func(op, name string) error {
		switch {
		case op == "fsync" && strings.HasPrefix(name, logDir+"/") && name != cpName:
			c.mu.Lock()
			h := c.held
			c.held = nil
			c.mu.Unlock()
			if h != nil {
				close(h.inside)
				<-h.goOn
			}
		case op == "sync" && name == dirOf(c.id):
			once.Do(func() { close(c.placed) })
		case op == "remove" && name == dataName(c.id):
			select {
			case <-c.done:
			case <-time.After(patience):
			}
		}
		return nil
	}
	return c
}

// holdSync has the next sync of the log wait.
func (c *deletion) holdSync() *held {
	h := &held{make(chan struct{}), make(chan struct{})}
	c.mu.Lock()
	c.held = h
	c.mu.Unlock()
	return h
}

func (c *deletion) delete() chan error {
	err := make(chan error, 1)
	go func() { err <- c.s.Delete(ctx, c.id, meta.Fence{Term: 1}) }()
	return err
}

func (c *deletion) checkpoint() chan error {
	err := make(chan error, 1)
	go func() { err <- c.s.Checkpoint() }()
	return err
}

// finish cuts the power when both are done, and looks for the chunk.
func (c *deletion) finish(checkpoint, deleted chan error) {
	c.t.Helper()
	if err := <-checkpoint; err != nil {
		c.t.Fatal(err)
	}
	close(c.done)
	if err := <-deleted; err != nil {
		c.t.Fatal(err)
	}
	lost := c.d.keep(rand.New(rand.NewPCG(1, 1)), 0)
	c.s.Abandon()
	s, err := Open(lost, c.o)
	if err != nil {
		c.t.Fatal(err)
	}
	defer s.Abandon()
	if i, err := s.Stat(ctx, c.id); meta.KindOf(err) != meta.NoSuchChunk {
		c.t.Errorf("deleted, and back: %+v, %v", i, err)
	}
}

func (k *kept) check(s *Store) error {
	i, err := s.Stat(ctx, k.id)
	switch {
	case meta.KindOf(err) == meta.NoSuchChunk:
		if k.synced > 0 && !k.deleting {
			return fmt.Errorf("DATA: gone, %d bytes were synced", k.synced)
		}
		return nil
	case err != nil:
		return err
	case k.deleted:
		return fmt.Errorf("DATA: deleted, and back: %+v", i)
	case int(i.Length) < k.synced || int(i.Length) > len(k.data):
		return fmt.Errorf("DATA: %d bytes, synced %d of %d", i.Length, k.synced, len(k.data))
	case k.sealed && (i.State != meta.ChunkSealed || int(i.Length) != k.acked):
		return fmt.Errorf("DATA: sealed at %d: %+v", k.acked, i)
	case i.Length == 0:
		return nil
	}
	got := make([]byte, i.Length)
	if err := s.Read(ctx, k.id, got, 0); err != nil {
		return err
	}
	if !bytes.Equal(got, k.data[:len(got)]) {
		return fmt.Errorf("DATA: reads something else")
	}
	return nil
}

// fill fills the log, without a record of a fence, and with a record of a deletion.
func (c *deletion) fill() {
	l := c.s.log
	id := testID(99).Bytes()
	for {
		l.mu.Lock()
		used, most := l.usedLocked()
		left := l.f.segmentSize - l.off
		l.mu.Unlock()
		const mark, least = recHead, recHead + 16 + recHead // a record leaves room for the end's
		typ, body := recMark, []byte(nil)
		if over := left - (least + (left-least)%16); used >= most && over <= 1<<10 {
			if over == 0 {
				return
			}
			if over%mark != 0 {
				typ, body = recDelete, id[:]
			}
		}
		if _, err := l.append(typ, body, nil); err != nil {
			c.t.Fatal(err)
		}
	}
}

// A copy of an existing chunk only raises the fence. While the log is full, the fence waits for a
// checkpoint; a deletion's record, which is shorter, still fits. The fence must not come after
// the deletion: a deleted chunk with a later record is corruption.
func TestFenceComesBeforeDeletion(t *testing.T) {
	c := newDeletion(t)
	close(c.done)
	s, f := c.s, meta.Fence{Term: 1}
	i, err := s.Seal(ctx, c.id, f, true, 5000)
	if err != nil {
		t.Fatal(err)
	}
	s.points.mu.Lock()
	c.fill()
	raised := make(chan error, 1)
	go func() {
		in, err := s.Receive(ctx, c.id, meta.Fence{Term: 2}, 5000, i.CRC)
		if in != nil {
			in.Abort()
		}
		raised <- err
	}()
	p := s.pin(c.id)
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		p.mu.Lock()
		up := p.fence.Term == 2
		p.mu.Unlock()
		if up {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the fence is not raised")
		}
	}
	s.unpin(p)
	deleted := make(chan error, 1)
	go func() { deleted <- s.Delete(ctx, c.id, meta.Fence{Term: 3}) }()
	select {
	case err := <-deleted: // before the fence
		deleted <- err
	case <-time.After(patience):
	}
	s.points.mu.Unlock()
	<-raised // or refused, since the chunk was deleted
	if err := <-deleted; err != nil {
		t.Fatal(err)
	}
	s.Abandon()
	s, err = Open(c.d.clone(), c.o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Abandon()
	if i, err := s.Stat(ctx, c.id); meta.KindOf(err) != meta.NoSuchChunk {
		t.Errorf("deleted, and back: %+v, %v", i, err)
	}
}

// A deletion fails half way: the log is full, and so is the disk, to which a checkpoint would
// write. Then the disk gets room, and a copy of the chunk comes: reads return the copy.
func TestCopyOverFailedDeletion(t *testing.T) {
	c := newDeletion(t)
	close(c.done)
	s := c.s
	got := make([]byte, 100)
	if err := s.Read(ctx, c.id, got, 0); err != nil { // the chunk's file is open
		t.Fatal(err)
	}
	hook := c.d.before
	c.d.before = func(op, name string) error {
		if op == "open" && strings.HasSuffix(name, tmpSuffix) {
			return syscall.ENOSPC
		}
		return hook(op, name)
	}
	c.fill()
	if _, err := s.log.append(recDelete, make([]byte, 16), nil); err != nil { // the last record that fits
		t.Fatal(err)
	}
	if err := s.Delete(ctx, c.id, meta.Fence{Term: 1}); meta.KindOf(err) != meta.NoSpace {
		t.Fatalf("deleted in a full log: %v", err)
	}
	c.d.before = hook
	p := bytes.Repeat([]byte("copy"), 3000)
	if err := receive(s, c.id, meta.Fence{Term: 2}, p, len(p)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		got = make([]byte, len(p))
		if err := s.Read(ctx, c.id, got, 0); err != nil || !bytes.Equal(got, p) {
			t.Fatalf("DATA: the copy reads %.10q, %v", got, err)
		}
		s.Abandon()
		var err error
		if s, err = Open(c.d.clone(), c.o); err != nil {
			t.Fatal(err)
		}
	}
	s.Abandon()
}
