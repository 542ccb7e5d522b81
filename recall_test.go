package penstock

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math/rand"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// pageCache is a kernel's page cache above a client: a READ holds its page's lock, and so
// does an invalidation.
type pageCache struct {
	kernel
	v     *Volume
	ino   meta.Ino
	pages []page
}

type page struct {
	mu   sync.Mutex
	data []byte // nil: not cached
}

const testPage = 4096

func (k *pageCache) InvalData(_ meta.VolumeID, ino meta.Ino, off, n int64) {
	if ino != k.ino {
		return
	}
	first, last := off/testPage, int64(len(k.pages))
	if n > 0 {
		last = min(last, (off+n+testPage-1)/testPage)
	}
	for i := first; i < last; i++ {
		k.pages[i].mu.Lock()
		k.pages[i].data = nil
		k.pages[i].mu.Unlock()
	}
}

func (k *pageCache) read(t *testing.T, i int) []byte {
	p := &k.pages[i]
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.data == nil {
		b := make([]byte, testPage)
		if _, ok := k.v.ReadCached(k.ino, b, int64(i)*testPage, true); !ok { // as a mount does
			if _, err := k.v.Read(t.Context(), k.ino, b, int64(i)*testPage); err != nil {
				t.Error(err)
				return b
			}
		}
		p.data = b
	}
	return p.data
}

// TestReadersSeeEveryWrite: while one client writes and another reads through a page
// cache, a read never returns less than the bytes written before it began, and no call
// hangs.
func TestReadersSeeEveryWrite(t *testing.T) {
	for _, exclusiveReads := range []bool{false, true} {
		w := newWorld(t, meta.Policy{Replicas: 1})
		w.delay = 200 * time.Microsecond
		const pages = 16
		_, a := open(t, w, Config{})
		ino := create(t, a, "f")
		write(t, a, ino, make([]byte, pages*testPage), 0)
		k := &pageCache{kernel: *newKernel(), ino: ino, pages: make([]page, pages)}
		_, b := open(t, w, Config{Notify: k})
		k.v = b
		var done [pages]atomic.Uint64 // the newest value of a returned write
		stop := make(chan struct{})
		var wg sync.WaitGroup
		var reads atomic.Int64
		for g := range 4 {
			rng := rand.New(rand.NewSource(int64(g)))
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					i := rng.Intn(pages)
					least := done[i].Load()
					if got := binary.BigEndian.Uint64(k.read(t, i)); got < least {
						t.Errorf("page %d: read %d after %d was written", i, got, least)
						return
					}
					reads.Add(1)
				}
			})
		}
		writes := 300
		if exclusiveReads {
			writes = 100
		}
		rng := rand.New(rand.NewSource(9))
		for n := range uint64(writes) {
			i := rng.Intn(pages)
			var p [8]byte
			binary.BigEndian.PutUint64(p[:], n+1)
			v := a
			if exclusiveReads && rng.Intn(4) == 0 {
				// The reading client writes, too: around its own page cache, so its
				// kernel drops the page as for direct writes.
				v = b
			}
			write(t, v, ino, p[:], int64(i)*testPage)
			if v == b {
				k.InvalData(1, ino, int64(i)*testPage, 8)
			}
			done[i].Store(n + 1)
			time.Sleep(time.Duration(rng.Intn(500)) * time.Microsecond)
		}
		close(stop)
		wg.Wait()
		if reads.Load() == 0 {
			t.Error("nobody read anything")
		}
		w.check()
	}
}

// TestRecallWaitsForNobody: a recall of a file ends although reads of the file never
// stop.
func TestRecallWaitsForNobody(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, a := open(t, w, Config{})
	ino := create(t, a, "f")
	write(t, a, ino, make([]byte, 64<<10), 0)
	k := &pageCache{kernel: *newKernel(), ino: ino, pages: make([]page, 16)}
	_, b := open(t, w, Config{Notify: k})
	k.v = b
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := g; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				k.pages[i%16].mu.Lock()
				k.pages[i%16].data = nil // evicted, so every read asks
				k.pages[i%16].mu.Unlock()
				k.read(t, i%16)
			}
		})
	}
	for range 50 {
		begun := time.Now()
		if _, err := a.SetAttr(t.Context(), &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took > 5*time.Second {
			t.Fatalf("a recall took %v", took)
		}
	}
	close(stop)
	wg.Wait()
	w.check()
}

// TestStaleReplyIsNotCached: a reply that is handled after a recall of its inode is not
// cached.
func TestStaleReplyIsNotCached(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, a := open(t, w, Config{})
	_, b := open(t, w, Config{})
	ino := create(t, a, "f")
	w.delay = 5 * time.Millisecond // waiters run late, the reader does not
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				if _, err := b.GetAttr(t.Context(), ino); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range 50 {
		want := uint32(0o600 + i%8)
		if _, err := a.SetAttr(t.Context(), &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: want}); err != nil {
			t.Fatal(err)
		}
		e, err := b.GetAttr(t.Context(), ino)
		if err != nil || e.Attr.Mode&0o7777 != want {
			t.Fatalf("round %d: mode %o, not %o, %v", i, e.Attr.Mode&0o7777, want, err)
		}
	}
	wg.Wait()
	w.check()
}

// TestOpenFilesAreClaimed: a file that is open without a lease is claimed, too: the next
// owner must know this open file when its last name goes.
func TestOpenFilesAreClaimed(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, va := open(t, w, Config{})
	ino := create(t, va, "f")
	b, vb := open(t, w, Config{})
	if _, err := vb.Open(t.Context(), &Call{}, ino, 0); err != nil {
		t.Fatal(err)
	}
	write(t, va, ino, []byte("taken back"), 0)
	claimed := func() (modes []meta.LeaseMode) {
		leases, _ := b.Claims(vb.id)
		for _, g := range leases {
			if g.Ino == ino {
				modes = append(modes, g.Mode)
			}
		}
		return modes
	}
	if m := claimed(); !slices.Equal(m, []meta.LeaseMode{meta.LeaseNone}) {
		t.Fatalf("leases of an open file: %v", m)
	}
	vb.Release(t.Context(), ino, 0)
	if m := claimed(); len(m) != 0 {
		t.Fatalf("leases of a closed file: %v", m)
	}
}

// TestRefusedForgetsAll: when a grant is revoked, the kernel also forgets files without a
// lease.
func TestRefusedForgetsAll(t *testing.T) {
	w := newWorld(t, meta.Policy{})
	k := newKernel()
	c, v := open(t, w, Config{Notify: k})
	ino := create(t, v, "f")
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	in.lowerLocked(meta.LeaseNone)
	in.mu.Unlock()
	k.mu.Lock()
	k.attrs[ino] = meta.Attr{}
	k.mu.Unlock()
	c.Expired([]meta.VolumeID{1}, meta.E("authorize", meta.AccessDenied, "", nil))
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		k.mu.Lock()
		_, has := k.attrs[ino]
		k.mu.Unlock()
		if !has {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the kernel keeps what it has")
		}
	}
}

// TestRecallWithinGivesNothingUp: a client that reaches no chunk server is asked for a
// lease for a moment, as for a snapshot. The client keeps the lease and every byte, its
// writers go on, and when the servers are back all bytes are committed.
func TestRecallWithinGivesNothingUp(t *testing.T) {
	inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
		cutOff := meta.E("append", meta.Unavailable, "every chunk server", nil)
		w.failChunk = func(string, meta.ChunkID) error { return cutOff }
		ino := create(t, v, "log")
		first, second := bytes.Repeat([]byte("1"), 300_000), bytes.Repeat([]byte("2"), 300_000)
		write(t, v, ino, first, 0)
		recall := func(keep meta.LeaseMode) (held bool, took time.Duration) {
			began := time.Now()
			done := make(chan bool)
			v.c.RecallWithin(meta.Recall{Volume: 1, Ino: ino, Keep: keep, Within: time.Second}, func(held bool) { done <- held })
			return <-done, time.Since(began)
		}
		lease := func() meta.LeaseMode {
			in := v.c.table.peek(1, ino)
			defer in.put()
			in.mu.Lock()
			defer in.mu.Unlock()
			return in.lease
		}
		for _, keep := range []meta.LeaseMode{meta.LeaseShared, meta.LeaseNone, meta.LeaseShared} {
			if held, took := recall(keep); !held || took > time.Second {
				t.Fatalf("held %v after %v", held, took)
			}
		}
		// A mount during a take-over answers later, after its time is over.
		v.c.kept.mu.Lock()
		v.c.kept.resumed = false
		v.c.kept.mu.Unlock()
		time.AfterFunc(10*time.Second, v.c.Resumed)
		if held, took := recall(meta.LeaseShared); !held || took != 10*time.Second {
			t.Fatalf("held %v after %v", held, took)
		}
		if lease() != meta.LeaseExclusive {
			t.Fatal("its lease went")
		}
		write(t, v, ino, second, int64(len(first))) // waits for nobody
		w.mu.Lock()
		w.failChunk = nil
		w.mu.Unlock()
		if held, _ := recall(meta.LeaseShared); held {
			t.Fatal("it holds on to what it could commit")
		}
		if lease() != meta.LeaseShared || v.c.Stats().LostBytes != 0 {
			t.Fatalf("lease %v, %d bytes lost", lease(), v.c.Stats().LostBytes)
		}
		if err := v.Fsync(t.Context(), ino, false); err != nil && !errors.Is(err, cutOff) { // an earlier failure is told once
			t.Fatal(err)
		}
		got := make([]byte, len(first)+len(second))
		if n, err := v.Read(t.Context(), ino, got, 0); err != nil || !bytes.Equal(got[:n], append(first, second...)) {
			t.Fatalf("DATA: %d bytes, %v", n, err)
		}
	})
}

// TestRecallLosesNothingThatWasSynced: a file grows by fsyncs that only its chunk knows,
// and then the client loses the right to write. Another client waits for the file. When
// the writer gives up its unsynced bytes, the other client finds the synced bytes at
// once.
func TestRecallLosesNothingThatWasSynced(t *testing.T) {
	inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
		barred := meta.E("append", meta.AccessDenied, "every chunk server", nil)
		ino := create(t, v, "log")
		if _, err := v.Open(t.Context(), &Call{}, ino, rdwr); err != nil {
			t.Fatal(err)
		}
		size := int64(0)
		for range 5 {
			p := bytes.Repeat([]byte("s"), 300_000)
			write(t, v, ino, p, size)
			size += int64(len(p))
			if err := v.Fsync(t.Context(), ino, false); err != nil {
				t.Fatal(err)
			}
		}
		known := func() int64 {
			w.mu.Lock()
			defer w.mu.Unlock()
			res, err := namespace.Query(w.store, w.context(0, meta.OpID{}), &meta.GetAttr{Ino: ino})
			if err != nil {
				t.Fatal(err)
			}
			return int64(res.Attr.Size)
		}
		if n := known(); n == size {
			t.Fatal("the owner knows its length: the end is not open")
		}
		w.mu.Lock()
		w.failChunk = func(string, meta.ChunkID) error { return barred }
		ends := 0
		w.failEnd = func(meta.ChunkID) error {
			if ends++; ends < 3 {
				return meta.E("end chunk", meta.Unavailable, "its owner", nil)
			}
			return nil
		}
		w.mu.Unlock()
		write(t, v, ino, bytes.Repeat([]byte("n"), 300_000), size)
		done := make(chan bool)
		v.c.Recall(meta.Recall{Volume: 1, Ino: ino, Keep: meta.LeaseNone}, func() { close(done) })
		<-done
		if n := known(); n < size {
			t.Fatalf("DATA: %d bytes are there for others, %d were synced", n, size)
		}
		if v.c.Stats().LostBytes == 0 {
			t.Fatal("nothing was lost")
		}
		if err := v.Fsync(t.Context(), ino, false); !errors.Is(err, meta.AccessDenied) {
			t.Fatalf("the writer is told %v", err)
		}
	})
}

// haltedKernel stops in the first request to forget a file.
type haltedKernel struct {
	*kernel
	once      sync.Once
	asked, on chan struct{}
}

func (k *haltedKernel) InvalData(v meta.VolumeID, ino meta.Ino, off, n int64) {
	k.once.Do(func() {
		close(k.asked)
		<-k.on
	})
	k.kernel.InvalData(v, ino, off, n)
}

// TestRecallEndsWithItsSession: a recall under way at the end of its session belongs to the ended
// session: the recall takes nothing from the next session's lease, under which bytes may have
// been written by then.
func TestRecallEndsWithItsSession(t *testing.T) {
	for _, had := range []meta.LeaseMode{meta.LeaseShared, meta.LeaseExclusive} {
		w := newWorld(t, meta.Policy{Replicas: 1})
		k := &haltedKernel{kernel: newKernel(), asked: make(chan struct{}), on: make(chan struct{})}
		c, v := open(t, w, Config{FlushEvery: time.Hour, Notify: k})
		_, other := open(t, w, Config{FlushEvery: time.Hour})
		var ino meta.Ino
		if had == meta.LeaseExclusive {
			ino = create(t, v, "f")
			write(t, v, ino, []byte("old"), 0)
			if err := v.Fsync(t.Context(), ino, false); err != nil {
				t.Fatal(err)
			}
		} else {
			ino = create(t, other, "f")
			write(t, other, ino, []byte("old"), 0)
			if got := string(contents(t, v, ino)); got != "old" {
				t.Fatalf("DATA: it reads %q", got)
			}
		}
		recalled, queued := make(chan struct{}), make(chan struct{})
		c.Recall(meta.Recall{Volume: 1, Ino: ino, Keep: meta.LeaseNone}, func() { close(recalled) })
		<-k.asked
		c.Recall(meta.Recall{Volume: 1, Ino: ino, Keep: meta.LeaseNone}, func() { close(queued) })
		c.sess.(*fakeSession).expire()
		wrote := make(chan struct{})
		go func() {
			defer close(wrote)
			if n, err := v.Write(context.Background(), &Call{}, ino, []byte("new"), 0, false, false); err != nil || n != 3 {
				t.Errorf("had %v: write in the new session: %d, %v", had, n, err)
			}
		}()
		in := v.node(ino)
		eventually(t, "the new session has the file's lease", func() bool {
			in.mu.Lock()
			defer in.mu.Unlock()
			return in.lease == meta.LeaseExclusive
		})
		if had == meta.LeaseShared {
			<-wrote // nothing holds writers back
		}
		close(k.on)
		<-recalled
		<-queued
		<-wrote
		eventually(t, "no recall is served", func() bool {
			in.mu.Lock()
			defer in.mu.Unlock()
			return in.recall == nil
		})
		in.mu.Lock()
		if in.lease != meta.LeaseExclusive {
			t.Errorf("had %v: the new session's lease is %v, with %d bytes buffered under it", had, in.lease, in.file.uncommitted)
		}
		in.mu.Unlock()
		in.put()
		if got := string(contents(t, other, ino)); got != "new" {
			t.Errorf("DATA: had %v: another client reads %q after \"new\" was written", had, got)
		}
		w.check()
	}
}

// TestCleanFilesAreGivenBackAtOnce: a barrier asks for the leases of very many files that
// their mount has just made. Leases of completely committed files are given back during
// the request, without a goroutine each. A file with uncommitted bytes commits them
// first.
func TestCleanFilesAreGivenBackAtOnce(t *testing.T) {
	const (
		closed = iota // and committed
		opened
		appended
		dirty
		busy
	)
	for what, state := range map[string]int{"closed": closed, "open": opened, "appended to, and synced": appended, "dirty": dirty, "being worked on": busy} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, meta.Policy{Replicas: 1})
			c, v := open(t, w, Config{FlushEvery: time.Hour})
			_, b := open(t, w, Config{})
			ino := create(t, v, "f")
			data := bytes.Repeat([]byte("A"), 5000)
			write(t, v, ino, data, 0)
			if err := v.SyncAll(t.Context()); err != nil {
				t.Fatal(err)
			}
			in := v.node(ino)
			defer in.put()
			switch state {
			case closed:
				v.Release(t.Context(), ino, rdwr)
			case appended:
				for range 8 {
					data = append(data, "more"...)
					write(t, v, ino, []byte("more"), int64(len(data)-4))
					if err := v.Fsync(t.Context(), ino, true); err != nil {
						t.Fatal(err)
					}
				}
				in.mu.Lock()
				ended := in.file.own.ended
				in.mu.Unlock()
				if !ended {
					t.Fatal("the journal knows the file's end")
				}
			case dirty:
				data = append(data, "more"...)
				write(t, v, ino, []byte("more"), int64(len(data)-4))
			case busy:
				in.mu.Lock()
				if _, err := in.take(t.Context(), turnCommit); err != nil {
					t.Error(err)
				}
				in.mu.Unlock()
			}
			held := make(chan bool, 1)
			in.mu.Lock()
			had := in.lease
			in.mu.Unlock()
			c.RecallWithin(meta.Recall{Volume: 1, Ino: ino, Keep: meta.LeaseShared, Within: time.Minute}, func(h bool) { held <- h })
			atOnce := len(held) == 1
			if state == busy {
				select {
				case <-held:
					t.Fatal("DATA: it was given back while somebody worked on it")
				default:
				}
				in.mu.Lock()
				in.file.turns.leave(turnCommit)
				in.mu.Unlock()
			}
			if h := <-held; h || had != meta.LeaseExclusive {
				t.Fatalf("held %v, it was %v", h, had)
			}
			in.mu.Lock()
			lease, f := in.lease, in.file
			left := f != nil && (f.uncommitted > 0 || f.own.ended || f.metaDirty)
			in.mu.Unlock()
			if lease != meta.LeaseShared || left {
				t.Errorf("DATA: its lease is %v, and there is something to commit: %v", lease, left)
			}
			if state <= opened && !atOnce {
				t.Error("it was given back later")
			}
			if got := contents(t, b, ino); !bytes.Equal(got, data) {
				t.Errorf("DATA: %d bytes elsewhere, not %d", len(got), len(data))
			}
			if state != closed {
				write(t, v, ino, []byte("B"), 0) // gets the lease again
				data[0] = 'B'
				if got := contents(t, b, ino); !bytes.Equal(got, data) {
					t.Errorf("DATA: %d bytes after another write, not %d", len(got), len(data))
				}
			}
			w.check()
		})
	}
}
