package library

import (
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// logged is the byte at an offset of the test's logs.
func logged(off int64) byte { return byte(off>>8) ^ byte(off*7) }

// record is the bytes of a log from off on.
func record(off int64, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = logged(off + int64(i))
	}
	return p
}

// TestReadersTakeNothingFromAWriter: another client appends to a file. Readers see every
// write that returned before their request, never see a shorter file than before, and
// take no lease from the writer.
func TestReadersTakeNothingFromAWriter(t *testing.T) {
	t.Parallel()
	c, ctx := newCluster(t), t.Context()
	writer := c.admin()
	v := c.volume(writer, "logs")
	info, err := v.CreateOpen(ctx, &penstock.Call{}, meta.Create{Parent: meta.RootIno, Name: "log", Mode: 0o644}, uint32(os.O_RDWR))
	c.must(err)
	ino := info.Entry.Attr.Ino
	var written atomic.Int64 // bytes of writes that have returned
	rng := rand.New(rand.NewPCG(1, 2))
	appendSome := func() {
		off := written.Load()
		p := record(off, 1+rng.IntN(6000))
		_, err := v.Write(ctx, &penstock.Call{}, ino, p, 0, true, false)
		c.must(err)
		written.Store(off + int64(len(p)))
	}
	for range 5 { // until the journal has an open end
		appendSome()
		c.must(v.Fsync(ctx, ino, true))
	}
	before := writer.Stats()

	var readers sync.WaitGroup
	stop := make(chan struct{})
	reader := func(r *penstock.Volume, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 3))
		size := int64(0)
		p := make([]byte, 16<<10)
		for {
			select {
			case <-stop:
				return
			default:
			}
			least := max(size, written.Load())
			if rng.IntN(2) == 0 {
				var e penstock.Entry
				var err error
				if rng.IntN(2) == 0 {
					e, err = r.GetAttr(ctx, ino)
				} else {
					e, err = r.Lookup(ctx, meta.RootIno, "log")
				}
				if size = int64(e.Attr.Size); err != nil || size < least {
					t.Errorf("DATA: the file has %d bytes for a reader, %v; it had %d before the reader asked", size, err, least)
					return
				}
				continue
			}
			off := max(0, least-rng.Int64N(int64(len(p))))
			n, err := r.Read(ctx, ino, p, off)
			if err != nil || off+int64(n) < least && n < len(p) {
				t.Errorf("DATA: %d bytes were read at %d, %v; the file had %d before the reader asked", n, off, err, least)
				return
			}
			size = max(size, off+int64(n))
			for i, b := range p[:n] {
				if b != logged(off+int64(i)) {
					t.Errorf("DATA: byte %d is %d, not %d", off+int64(i), b, logged(off+int64(i)))
					return
				}
			}
		}
	}
	for i := range 2 {
		r := c.open(c.dial("admin"), "logs")
		for k := range 3 {
			readers.Go(func() { reader(r, uint64(10*i+k)) })
		}
	}
	for i := range 400 {
		appendSome()
		if i%2 == 0 {
			c.must(v.Fsync(ctx, ino, true))
		}
	}
	close(stop)
	readers.Wait()
	after := writer.Stats()
	if n := after.Recalls - before.Recalls; n > 0 {
		t.Errorf("%d leases were recalled from the writer", n)
	}
	if n := after.Commits - before.Commits; n > 4 {
		t.Errorf("%d of the writer's syncs went through the journal", n)
	}
	t.Logf("%d questions, %d commits", after.Growths-before.Growths, after.Commits-before.Commits)
	if after.Growths == before.Growths {
		t.Error("nobody asked the writer")
	}
}
