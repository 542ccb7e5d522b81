package client

import (
	"bytes"
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestReadAhead: reading ahead returns the same bytes as a plain read: in order, with
// several readers of one chunk, in jumps, up to the chunk's end, and with the server gone
// in between.
func TestReadAhead(t *testing.T) {
	f := newFixture(t, "tcp", 2, Config{})
	const n = 9<<20 + 12345
	pl, data := f.written(n, 1)
	check := func(off, size int) {
		size = min(size, n-off)
		p := make([]byte, size)
		if err := f.ReadAt(t.Context(), pl, p, uint64(off)); err != nil || !bytes.Equal(p, data[off:off+size]) {
			t.Errorf("DATA: %d bytes at %d: %v", size, off, err)
		}
	}
	before := f.served()
	for off := 0; off < n; off += 128 << 10 {
		check(off, 128<<10)
	}
	after := f.served()
	hedged, _ := f.Hedged() // a busy machine causes hedged reads
	if asked := after[0] + after[1] - before[0] - before[1]; asked > 9+10+hedged {
		t.Errorf("%d requests for 9 MiB in order, %d of them hedged", asked, hedged)
	}
	var wg sync.WaitGroup
	for i := range 4 { // as the kernel reads ahead
		wg.Go(func() {
			for off := i * (128 << 10); off < n; off += 4 * (128 << 10) {
				check(off, 128<<10)
			}
		})
	}
	wg.Wait()
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		check(r.IntN(n-1), 1+r.IntN(300<<10))
	}
	for off := 0; off < n; off += 100_000 {
		if off == 2_000_000 {
			if err := f.servers[1].Close(); err != nil {
				t.Fatal(err)
			}
		}
		check(off, 100_000)
	}
	f.dropRuns(true)
	if k := len(f.pieces); k != 0 {
		t.Errorf("%d pieces are still held", k)
	}
}

// TestReadAheadWhole: readers in order, one or several, get whole pieces without a copy,
// aligned or not; a reader that is slow, gives up or loses the server reads the same
// bytes.
func TestReadAheadWhole(t *testing.T) {
	f := newFixture(t, "tcp", 2, Config{Conns: 1})
	const n = 24<<20 + 12345
	pl, data := f.written(n, 1)
	check := func(off, size int) {
		size = min(size, n-off)
		p := make([]byte, size)
		if err := f.ReadAt(t.Context(), pl, p, uint64(off)); err != nil || !bytes.Equal(p, data[off:off+size]) {
			t.Errorf("DATA: %d bytes at %d: %v", size, off, err)
		}
	}
	both := pl.Servers
	pl.Servers = pl.Servers[:1] // no other server is asked, however late an answer is
	before := f.served()
	for off := 0; off < n; off += aheadPiece {
		check(off, aheadPiece)
	}
	after := f.served()
	pl.Servers = both
	if asked := after[0] + after[1] - before[0] - before[1]; asked > 25+10 {
		t.Errorf("%d requests for 25 pieces in order", asked)
	}
	for off := 0; off < n; off += aheadPiece {
		check(off, aheadPiece)
		time.Sleep(2 * aheadHold) // longer than pieces are held
	}
	for off := 777; off < n; off += aheadPiece - 4096 {
		check(off, aheadPiece-4096)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for off := i * aheadPiece; off < n; off += 4 * aheadPiece {
				check(off, aheadPiece)
			}
		})
	}
	wg.Wait()
	for off := 0; off < n; off += aheadPiece {
		if off == 8*aheadPiece {
			if err := f.servers[1].Close(); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		if off%(3*aheadPiece) == 0 {
			go cancel()
		}
		p := make([]byte, min(aheadPiece, n-off))
		err := f.ReadAt(ctx, pl, p, uint64(off))
		if err == nil && !bytes.Equal(p, data[off:off+len(p)]) || err != nil && ctx.Err() == nil {
			t.Errorf("DATA: %d bytes at %d: %v", len(p), off, err)
		}
		cancel()
	}
	f.dropRuns(true)
	deadline := time.Now().Add(time.Minute)
	for len(f.pieces) > 0 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond) // until the fetching goroutine gives the buffers back
	}
	if k := len(f.pieces); k != 0 {
		t.Errorf("%d pieces are still held", k)
	}
}

// TestHeldGivesWay: an answer that waits in the socket for its reader gives way to other
// requests of the connection, and to the connection's end.
func TestHeldGivesWay(t *testing.T) {
	f := newFixture(t, "tcp", 1, Config{Conns: 1})
	f.held = time.Hour
	const n = 24 << 20
	one, data := f.written(n, 1)
	two, other := f.written(n, 2)
	read := func(pl meta.ChunkPlace, data []byte, off, size int) {
		t.Helper()
		p := make([]byte, size)
		if err := f.ReadAt(t.Context(), pl, p, uint64(off)); err != nil || !bytes.Equal(p, data[off:off+size]) {
			t.Fatalf("DATA: %d bytes at %d: %v", size, off, err)
		}
	}
	for off := 0; off < 12<<20; off += aheadPiece {
		read(one, data, off, aheadPiece) // pieces beyond are held now
		read(two, other, off/4, 4096)    // a request of another kind
	}
	for off := 0; off < 12<<20; off += aheadPiece {
		read(two, other, off, aheadPiece) // held answers of two chunks, one behind the other
		read(one, data, 12<<20+off, aheadPiece)
	}
	done := make(chan struct{})
	go func() { f.Close(); close(done) }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("Close waits for what is held")
	}
}
