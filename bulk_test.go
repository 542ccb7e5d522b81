package penstock

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sync/semaphore"

	"penstock.io/penstock/meta"
)

// bulkCopy returns a mirror's copier between two files of one volume.
func bulkCopy(v *Volume) *mirrorCopy {
	return &mirrorCopy{to: v, dst: v, room: semaphore.NewWeighted(bulkUnready)}
}

// filled is a file of random bytes, in chunks.
func filled(t *testing.T, v *Volume, name string, size int, seed uint64) (meta.Ino, []byte) {
	t.Helper()
	r, p := rand.New(rand.NewPCG(seed, 1)), make([]byte, size)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	ino := create(t, v, name)
	for off := 0; off < size; off += 1 << 20 {
		write(t, v, ino, p[off:min(off+1<<20, size)], int64(off))
	}
	if err := v.SyncAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	return ino, p
}

// noneOpen waits until every chunk with bytes is sealed.
func noneOpen(t *testing.T, w *world) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		open := 0
		w.mu.Lock()
		for _, c := range w.chunks {
			if len(c.data) > 0 && !c.sealed {
				open++
			}
		}
		w.mu.Unlock()
		if open == 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d chunks stay open", open)
		}
	}
}

// TestBulkWaitsForOneSync: bulk writes take no room in the write buffer, however long a
// sync takes, are synced once a chunk, and are visible after the commit.
func TestBulkWaitsForOneSync(t *testing.T) {
	const size, takes = 24<<20 + 777, time.Minute
	inFakeTime(t, Config{WriteBuffer: 8 << 20, FlushEvery: time.Hour}, func(t *testing.T, w *world, v *Volume) {
		src, want := filled(t, v, "src", size, 1)
		v.Release(t.Context(), src, rdwr)
		dst := create(t, v, "dst")
		v.Release(t.Context(), dst, rdwr)
		w.mu.Lock()
		w.syncTakes = func(meta.ChunkID) time.Duration { return takes }
		before := w.chunkSyncs
		w.mu.Unlock()
		began := time.Now()
		m := bulkCopy(v)
		rest, err := m.fillData(t.Context(), &mirrorFile{src: src, dst: dst, fresh: true, content: true, a: meta.Attr{Mode: meta.TypeRegular, Size: size, Blocks: size}}, &meta.Attr{})
		if err != nil || rest == nil {
			t.Fatal(rest != nil, err)
		}
		if took, held := time.Since(began), v.c.buf.inUse(); took > 0 || held > 0 {
			t.Errorf("writing took %v, and holds %d bytes", took, held)
		}
		p := make([]byte, 10)
		if n, err := v.Read(t.Context(), dst, p, 5); err != nil || !bytes.Equal(p[:n], make([]byte, 10)) {
			t.Errorf("DATA: before the commit a reader sees %x, %v", p[:n], err)
		}
		if err := rest(); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		syncs := w.chunkSyncs - before
		w.syncTakes = nil
		w.mu.Unlock()
		if took := time.Since(began); took != takes || syncs != 1 {
			t.Errorf("it took %v and %d syncs", took, syncs)
		}
		if !bytes.Equal(contents(t, v, dst), want) {
			t.Error("DATA: other bytes arrived")
		}
	})
}

// TestBulkSurvivesChunks: chunks that fail during a bulk write cost time and no bytes,
// and no chunk stays open.
func TestBulkSurvivesChunks(t *testing.T) {
	for seed := range uint64(8) {
		w := newWorld(t, meta.Policy{Replicas: 1, MaxChunk: 5 << 20})
		_, v := open(t, w, Config{WriteBuffer: 8 << 20})
		src, want := filled(t, v, "src", 7<<20+5, seed)
		dst := create(t, v, "dst")
		v.Release(t.Context(), dst, rdwr)
		v.Release(t.Context(), src, rdwr)
		r := rand.New(rand.NewPCG(seed, 2)) // under w.mu
		failed := 0
		w.mu.Lock()
		w.failChunk = func(what string, _ meta.ChunkID) error {
			if r.IntN(6) == 0 && failed < 3 {
				failed++
				return meta.E(what, meta.IO, "", errors.New("the disk is broken"))
			}
			return nil
		}
		w.mu.Unlock()
		m := bulkCopy(v)
		rest, err := m.fillData(t.Context(), &mirrorFile{src: src, dst: dst, fresh: true, content: true, a: meta.Attr{Mode: meta.TypeRegular, Size: uint64(len(want)), Blocks: uint64(len(want))}}, &meta.Attr{})
		if err == nil && rest != nil {
			err = rest()
		}
		if err == nil {
			err = v.SyncAll(t.Context())
		}
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if got := contents(t, v, dst); !bytes.Equal(got, want) {
			i := 0
			for i < min(len(got), len(want)) && got[i] == want[i] {
				i++
			}
			t.Fatalf("DATA: seed %d: other bytes arrived: %d, %d, the same up to %d; %d chunks failed", seed, len(got), len(want), i, failed)
		}
		v.chunks.retireAll(t.Context())
		noneOpen(t, w)
		w.check()
	}
}

// TestBulkGoesOnWhereItWas: after the failure of a chunk, only the uncommitted part of
// the file is copied again. An error of the source is returned at once.
func TestBulkGoesOnWhereItWas(t *testing.T) {
	const size, most = 24 << 20, 4 << 20
	for _, failing := range []string{"append", "sync", "read"} {
		w := newWorld(t, meta.Policy{Replicas: 1, MaxChunk: 5 << 20})
		_, v := open(t, w, Config{WriteBuffer: 8 << 20})
		src, want := filled(t, v, "src", size, 1)
		dst := create(t, v, "dst")
		v.Release(t.Context(), dst, rdwr)
		v.Release(t.Context(), src, rdwr)
		m := bulkCopy(v)
		m.most = most
		asked := map[string]int{}
		w.mu.Lock()
		w.failChunk = func(what string, _ meta.ChunkID) error {
			if asked[what]++; what == failing && m.sent.Load() >= size/2 && asked["failed"] == 0 {
				asked["failed"]++
				return meta.E(what, meta.IO, "", errors.New("the disk is broken"))
			}
			return nil
		}
		w.failRead = func() error {
			if failing == "read" && m.sent.Load() >= size/2 {
				return meta.E("read", meta.Corrupt, "", errors.New("the source is broken"))
			}
			return nil
		}
		w.mu.Unlock()
		rest, err := m.fillData(t.Context(), &mirrorFile{src: src, dst: dst, fresh: true, content: true, a: meta.Attr{Mode: meta.TypeRegular, Size: size, Blocks: size}}, &meta.Attr{})
		if err == nil && rest != nil {
			err = rest()
		}
		sent, planned := m.sent.Load(), m.planned.Load()
		w.mu.Lock()
		failed := asked["failed"]
		w.mu.Unlock()
		if failing == "read" {
			if meta.KindOf(err) != meta.Corrupt || planned != size || sent > size/2+mirrorReads*mirrorSegment {
				t.Errorf("a source that fails: %v after %d bytes of %d", err, sent, planned)
			}
			continue
		}
		if err != nil || failed == 0 {
			t.Fatalf("%s: %v, failed %d times", failing, err, failed)
		}
		if sent != planned || sent > size+most {
			t.Errorf("%s fails: %d bytes of %d were sent, of a file of %d", failing, sent, planned, size)
		}
		if err := v.SyncAll(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(contents(t, v, dst), want) {
			t.Errorf("DATA: %s fails: other bytes arrived", failing)
		}
		v.chunks.retireAll(t.Context())
		noneOpen(t, w)
		w.check()
	}
}

// TestBulkCommitsOnTheWay: the parts of a large bulk write that were committed on the way
// stay, in one extent a chunk, and bytes between pieces stay as they are.
func TestBulkCommitsOnTheWay(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1, MaxChunk: 6 << 20})
	_, v := open(t, w, Config{})
	dst, want := filled(t, v, "dst", 16<<20, 3)
	v.Release(t.Context(), dst, rdwr)
	b := v.back.newBulk(dst)
	b.most = 4 << 20
	var pieces []span
	for off := uint64(1 << 20); off+3<<20 < uint64(len(want)); off += 4 << 20 {
		pieces = append(pieces, span{off, off + 3<<20})
	}
	for i, s := range pieces {
		for ; s.lo < s.hi; s.lo += 1 << 20 {
			p := bytes.Repeat([]byte{byte(i), byte(s.lo >> 20)}, 1<<19)
			copy(want[s.lo:], p)
			if err := b.write(t.Context(), p, s.lo); err != nil {
				t.Fatal(err)
			}
		}
	}
	if b.done == 0 {
		t.Error("nothing was committed on the way")
	}
	if len(b.chunks) > 2 {
		t.Errorf("%d chunks are held open, full ones and committed", len(b.chunks))
	}
	if err := b.commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.end()
	if !bytes.Equal(contents(t, v, dst), want) {
		t.Error("DATA: other bytes arrived")
	}
	l, err := placesOf(t.Context(), v, dst)
	if err != nil {
		t.Fatal(err)
	}
	// A piece of 3 MiB lies in one chunk, or in two if the first is full.
	if len(l) > 4*len(pieces)+2 {
		t.Errorf("%d extents of %d pieces: %v", len(l), len(pieces), l)
	}
	v.chunks.retireAll(t.Context())
	noneOpen(t, w)
	w.check()
}

// TestBulkOfAnEpochBefore: bytes of a bulk write from before the session's end are never
// committed afterwards: another client may have the file by then.
func TestBulkOfAnEpochBefore(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{})
	dst := create(t, v, "dst")
	b := v.back.newBulk(dst)
	if err := b.write(t.Context(), bytes.Repeat([]byte("x"), 1<<20), 0); err != nil {
		t.Fatal(err)
	}
	c.sess.(*fakeSession).expire()
	if err := b.commit(t.Context()); err == nil {
		t.Error("it was committed")
	}
	b.end()
	e, err := v.GetAttr(t.Context(), dst)
	if err == nil && e.Attr.Size > 0 {
		t.Errorf("the file has %d bytes", e.Attr.Size)
	}
}

// TestBulkFits: writes that do not suit a bulk write take the ordinary way.
func TestBulkFits(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{})
	for _, x := range []struct {
		pieces int
		n      uint64
		want   bool
	}{{1, 1 << 20, true}, {1, 1<<20 - 1, false}, {4, 1 << 20, true}, {5, 1 << 20, false}, {bulkPieces, 1 << 40, true}, {bulkPieces + 1, 1 << 40, false}} {
		if got := v.back.bulkFits(x.pieces, x.n); got != x.want {
			t.Error(fmt.Sprint(x.pieces, x.n), got)
		}
	}
	v.meter.on.Store(true)
	if v.back.bulkFits(1, 1<<30) {
		t.Error("bytes that a quota has to promise first")
	}
	v.meter.on.Store(false)
}
