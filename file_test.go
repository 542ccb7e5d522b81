package penstock

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"os"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

func open(t testing.TB, w *world, cfg Config) (*Client, *Volume) {
	t.Helper()
	c := w.client(cfg)
	v, err := c.Volume(t.Context(), "root")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(t.Context()); err != nil {
			// In a cleanup the test's context has ended; tests that care about the error
			// close the client themselves.
			_ = err
		}
	})
	return c, v
}

const rdwr = uint32(os.O_RDWR)

func create(t testing.TB, v *Volume, name string) meta.Ino {
	t.Helper()
	info, err := v.CreateOpen(t.Context(), &Call{}, meta.Create{Parent: meta.RootIno, Name: name, Mode: 0o644}, rdwr)
	if err != nil {
		t.Fatal(err)
	}
	return info.Entry.Attr.Ino
}

func write(t testing.TB, v *Volume, ino meta.Ino, p []byte, off int64) {
	t.Helper()
	if n, err := v.Write(t.Context(), &Call{}, ino, p, off, false, false); err != nil || n != len(p) {
		t.Fatalf("write: %d, %v", n, err)
	}
}

func contents(t testing.TB, v *Volume, ino meta.Ino) []byte {
	t.Helper()
	e, err := v.GetAttr(t.Context(), ino)
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, e.Attr.Size+10)
	n, err := v.Read(t.Context(), ino, p, 0)
	if err != nil {
		t.Fatal(err)
	}
	if uint64(n) != e.Attr.Size {
		t.Fatalf("read %d bytes of %d", n, e.Attr.Size)
	}
	return p[:n]
}

func TestCreateWriteReadElsewhere(t *testing.T) {
	for _, size := range []int{0, 1, 100, 4096, 4097, 100 << 10, 1 << 20, 5<<20 + 17} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			w := newWorld(t, meta.Policy{Replicas: 1})
			_, a := open(t, w, Config{})
			_, b := open(t, w, Config{})
			ino := create(t, a, "f")
			data := make([]byte, size)
			rand.New(rand.NewSource(int64(size))).Read(data)
			for off := 0; off < size; off += 130000 {
				write(t, a, ino, data[off:min(off+130000, size)], int64(off))
			}
			if !bytes.Equal(contents(t, a, ino), data) {
				t.Fatal("DATA: the writer reads something else")
			}
			if !bytes.Equal(contents(t, b, ino), data) {
				t.Fatal("DATA: another client reads something else")
			}
			w.check()
		})
	}
}

// model is a file as a byte array.
type model struct{ b []byte }

func (m *model) write(p []byte, off int) {
	if n := off + len(p); n > len(m.b) {
		m.b = append(m.b, make([]byte, n-len(m.b))...)
	}
	copy(m.b[off:], p)
}

func (m *model) truncate(n int) {
	if n <= len(m.b) {
		m.b = m.b[:n]
		return
	}
	m.b = append(m.b, make([]byte, n-len(m.b))...)
}

// TestRandomAgainstModel runs random operations on one file from two clients in turn,
// with flushes, syncs and failing chunks at random points.
func TestRandomAgainstModel(t *testing.T) {
	for seed := range int64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewSource(seed))
			w := newWorld(t, meta.Policy{Replicas: 1, MaxChunk: 6 << 20})
			if seed%4 == 3 {
				calls := 0
				w.failChunk = func(string, meta.ChunkID) error {
					if calls++; calls > 6 && w.rng.Intn(8) == 0 {
						calls = 0 // a flush has three tries
						return meta.E("append", meta.IO, "injected", nil)
					}
					return nil
				}
			}
			_, a := open(t, w, Config{FlushEvery: 2 * time.Millisecond, WriteBuffer: 8 << 20})
			_, b := open(t, w, Config{FlushEvery: time.Hour})
			vs := []*Volume{a, b}
			ino := create(t, a, "f")
			if _, err := b.Open(t.Context(), &Call{}, ino, rdwr); err != nil {
				t.Fatal(err)
			}
			scale := []int{300, 9000, 300000, 3 << 20}[seed%4]
			stick := 1 + rng.Intn(12)
			m := &model{}
			v := a
			for step := range 250 {
				if rng.Intn(stick) == 0 {
					v = vs[rng.Intn(2)]
				}
				switch k := rng.Intn(20); {
				case k < 7: // somewhere
					off := rng.Intn(scale)
					p := make([]byte, 1+rng.Intn(1+scale/4))
					rng.Read(p)
					m.write(p, off)
					write(t, v, ino, p, int64(off))
				case k < 11: // at the end
					p := make([]byte, 1+rng.Intn(1+scale/8))
					rng.Read(p)
					if n, err := v.Write(t.Context(), &Call{}, ino, p, 0, true, false); err != nil || n != len(p) {
						t.Fatalf("step %d: append: %d, %v", step, n, err)
					}
					m.write(p, len(m.b))
				case k < 14: // sync after an append, again and again
					for range 1 + rng.Intn(5) {
						p := make([]byte, 1+rng.Intn(1+scale/16))
						rng.Read(p)
						m.write(p, len(m.b))
						if _, err := v.Write(t.Context(), &Call{}, ino, p, 0, true, false); err != nil {
							t.Fatal(err)
						}
						if err := v.Fsync(t.Context(), ino, true); err != nil {
							t.Fatalf("step %d: fsync: %v", step, err)
						}
					}
				case k < 16:
					n := rng.Intn(len(m.b) + 1 + scale/4)
					m.truncate(n)
					if _, err := v.SetAttr(t.Context(), &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: uint64(n)}); err != nil {
						t.Fatalf("step %d: truncate to %d: %v", step, n, err)
					}
				case k < 17:
					if err := v.Fsync(t.Context(), ino, false); err != nil {
						t.Fatalf("step %d: fsync: %v", step, err)
					}
				case k < 18 && len(m.b) > 0: // punch or zero
					off := rng.Intn(len(m.b))
					n := 1 + rng.Intn(scale)
					mode := meta.FallocPunchHole | meta.FallocKeepSize
					if rng.Intn(2) == 0 {
						mode = meta.FallocZeroRange | meta.FallocKeepSize
					}
					clear(m.b[off:min(off+n, len(m.b))])
					if err := v.Fallocate(t.Context(), &Call{}, meta.Fallocate{Ino: ino, Mode: mode, Off: uint64(off), Len: uint64(n)}); err != nil {
						t.Fatalf("step %d: fallocate: %v", step, err)
					}
				default:
					off := rng.Intn(len(m.b) + 1)
					p := make([]byte, 1+rng.Intn(scale))
					n, err := v.Read(t.Context(), ino, p, int64(off))
					if err != nil {
						t.Fatalf("step %d: read: %v", step, err)
					}
					want := m.b[off:min(off+len(p), len(m.b))]
					if !bytes.Equal(p[:n], want) {
						t.Fatalf("DATA: step %d: read %d bytes at %d of %d: differs at %d", step, n, off, len(m.b), diff(p[:n], want))
					}
				}
			}
			for i, v := range vs {
				if got := contents(t, v, ino); !bytes.Equal(got, m.b) {
					t.Fatalf("DATA: client %d at the end: %d bytes, not %d; differs at %d", i, len(got), len(m.b), diff(got, m.b))
				}
			}
			for _, v := range vs {
				v.Release(t.Context(), ino, rdwr)
				if err := v.SyncAll(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			w.check()
			for i, v := range vs {
				if err := v.c.Close(t.Context()); err != nil {
					t.Fatalf("close of client %d: %v", i, err)
				}
				if used := v.c.buf.inUse(); used != 0 {
					t.Errorf("client %d leaks %d bytes of write buffer", i, used)
				}
				if d := v.back.dirtyBytes.Load(); d != 0 {
					t.Errorf("client %d counts %d dirty bytes at its end", i, d)
				}
			}
			w.check()
		})
	}
}

func diff(a, b []byte) int {
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			return i
		}
	}
	return min(len(a), len(b))
}

// TestErrorStays: a failed write-back is returned by the next write, fsync and close,
// once each; the bytes stay, and are written when that is possible.
func TestErrorStays(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{FlushEvery: 5 * time.Millisecond})
	ino := create(t, v, "f")
	full := true
	w.fail = func(op meta.Op) error {
		if _, ok := op.(*meta.AllocChunks); ok && full {
			return meta.E("allocate", meta.NoSpace, "", nil)
		}
		return nil
	}
	data := bytes.Repeat([]byte("x"), 10000)
	write(t, v, ino, data, 0)
	in := v.node(ino)
	defer in.put()
	for range 1000 {
		in.mu.Lock()
		failed := in.file.failed != nil
		in.mu.Unlock()
		if failed {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err := v.Flush(t.Context(), &Call{}, ino, 0); !errors.Is(err, meta.NoSpace) {
		t.Fatalf("close tells %v", err)
	}
	if err := v.Fsync(t.Context(), ino, false); !errors.Is(err, meta.NoSpace) {
		t.Fatalf("fsync tells %v", err)
	}
	w.mu.Lock()
	full = false
	w.mu.Unlock()
	for range 1000 {
		if v.Fsync(t.Context(), ino, false) == nil {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatalf("fsync with space again: %v", err)
	}
	_, b := open(t, w, Config{})
	if !bytes.Equal(contents(t, b, ino), data) {
		t.Fatal("DATA: bytes were lost")
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.check()
}

// TestExpiry: unsynced bytes are lost, with an error; then everything works again.
func TestExpiry(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, v, "f")
	write(t, v, ino, []byte("synced"), 0)
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	write(t, v, ino, bytes.Repeat([]byte("lost"), 5000), 6)
	c.sess.(*fakeSession).expire()
	if _, err := v.Write(t.Context(), &Call{}, ino, []byte("x"), 6, false, false); !errors.Is(err, meta.IO) {
		t.Fatalf("write tells %v", err)
	}
	if err := v.Fsync(t.Context(), ino, false); !errors.Is(err, meta.IO) {
		t.Fatalf("fsync tells %v", err)
	}
	if got := contents(t, v, ino); string(got) != "synced" {
		t.Fatalf("DATA: after the session expired: %q", got)
	}
	write(t, v, ino, []byte(" again"), 6)
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	_, b := open(t, w, Config{})
	if got := contents(t, b, ino); string(got) != "synced again" {
		t.Fatalf("DATA: elsewhere: %q", got)
	}
	w.check()
}

// TestAppendSyncNeedsNoMeta: after a few appends with fsync, a further append with fsync
// sends no request to the owner.
func TestAppendSyncNeedsNoMeta(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, v, "log")
	line := bytes.Repeat([]byte("l"), 5000)
	add := func() {
		if _, err := v.Write(t.Context(), &Call{}, ino, line, 0, true, false); err != nil {
			t.Fatal(err)
		}
		if err := v.Fsync(t.Context(), ino, true); err != nil {
			t.Fatal(err)
		}
	}
	for range 6 {
		add()
	}
	before := c.Stats().RPCs
	for range 20 {
		add()
	}
	if n := c.Stats().RPCs - before; n > 2 {
		t.Errorf("20 appends with fsync took %d requests", n)
	}
	_, b := open(t, w, Config{})
	if got := contents(t, b, ino); len(got) != 26*len(line) {
		t.Fatalf("DATA: %d bytes elsewhere, not %d", len(got), 26*len(line))
	}
	add()
	if got := contents(t, b, ino); len(got) != 27*len(line) {
		t.Fatalf("DATA: %d bytes elsewhere, not %d", len(got), 27*len(line))
	}
	w.check()
}

// TestManyWriters: several clients append to one file at the same time; every append is in the
// file, once.
func TestManyWriters(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	w.delay = time.Millisecond
	_, a := open(t, w, Config{})
	ino := create(t, a, "f")
	const clients, each = 3, 40
	var wg sync.WaitGroup
	for k := range clients {
		_, v := open(t, w, Config{FlushEvery: 3 * time.Millisecond})
		wg.Go(func() {
			for i := range each {
				rec := fmt.Sprintf("%02d:%04d\n", k, i)
				if _, err := v.Write(t.Context(), &Call{}, ino, []byte(rec), 0, true, false); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	got := contents(t, a, ino)
	if len(got) != clients*each*8 {
		t.Fatalf("DATA: %d bytes, not %d", len(got), clients*each*8)
	}
	next := make([]int, clients)
	for r := bytes.NewReader(got); ; {
		var line [8]byte
		if _, err := io.ReadFull(r, line[:]); err != nil {
			break
		}
		var k, i int
		fmt.Sscanf(string(line[:]), "%02d:%04d", &k, &i)
		if next[k] != i {
			t.Fatalf("record %q where %d of client %d was due", line, next[k], k)
		}
		next[k]++
	}
	w.check()
}
