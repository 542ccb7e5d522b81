package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// sourceOf says in an order where a chunk is.
func sourceOf(o meta.Order) meta.CopySource {
	c := meta.CopySource{Chunk: o.Chunk, Length: o.Length, CRC: o.CRC}
	for _, s := range o.Sources {
		c.Servers = append(c.Servers, s.ID)
	}
	return c
}

// TestGather gathers random pieces of chunks that lie on this server, on another, or on
// both. The new chunk has the pieces in order, on each server that gathers, by one order
// or several, and a repeated order changes nothing.
func TestGather(t *testing.T) {
	f, all := cluster(t, 3, 1)
	r := rand.New(rand.NewPCG(3, 4))
	var sources []meta.CopySource
	var data [][]byte
	for i := range 6 {
		b := random(300_000+r.IntN(400_000), uint64(i))
		var on []*Server
		for k, s := range all {
			if i%3 == k || r.IntN(3) == 0 {
				on = append(on, s)
			}
		}
		sources, data = append(sources, sourceOf(fill(t, meta.ChunkID{Volume: 1, Term: 1, Counter: uint64(i + 1)}, b, on...))), append(data, b)
	}
	var reads atomic.Int64
	f.before = func(meta.ServerID, uint64) error { reads.Add(1); return nil }
	for round := range 12 {
		target := meta.ChunkID{Volume: 1, Term: 1, Counter: uint64(100 + round)}
		var want []byte
		for range 1 + r.IntN(4) {
			o := meta.Order{Kind: meta.OrderGather, Chunk: target, Fence: fence, Length: uint64(len(want)), Chunks: sources}
			for range 1 + r.IntN(60) {
				c := r.IntN(len(sources))
				off := r.Uint64N(sources[c].Length)
				p := meta.CopyPiece{Chunk: uint32(c), Off: off, Len: 1 + r.Uint64N(min(9000, sources[c].Length-off))}
				want = append(want, data[c][p.Off:p.Off+p.Len]...)
				o.Pieces = append(o.Pieces, p)
			}
			for _, s := range all[:2] {
				for range 2 {
					if got := s.Order(ctx, o); got.Err != 0 || got.Length != uint64(len(want)) || got.Synced != got.Length {
						t.Fatalf("round %d: %+v, want %d bytes", round, got, len(want))
					}
				}
			}
		}
		for _, s := range all[:2] {
			holds(t, s, target, want)
		}
	}
	if reads.Load() == 0 {
		t.Error("nothing was read from another server")
	}
}

// Pieces scattered over a chunk are read once for each window, not a block each.
func TestGatherReadsBlocksOnce(t *testing.T) {
	f, all := cluster(t, 2, 1)
	data := random(2<<20, 1)
	src := sourceOf(fill(t, meta.ChunkID{Volume: 1, Term: 1, Counter: 1}, data, all[0]))
	var n atomic.Int64
	f.after = func(_ meta.ServerID, _ uint64, p []byte) { n.Add(int64(len(p))) }
	o := meta.Order{Kind: meta.OrderGather, Chunk: meta.ChunkID{Volume: 1, Term: 1, Counter: 2}, Fence: fence, Chunks: []meta.CopySource{src}}
	var want []byte
	for _, i := range rand.New(rand.NewPCG(1, 1)).Perm(len(data) / 4096) {
		o.Pieces = append(o.Pieces, meta.CopyPiece{Off: uint64(i) * 4096, Len: 4096})
		want = append(want, data[i*4096:(i+1)*4096]...)
	}
	if r := all[1].Order(ctx, o); r.Err != 0 {
		t.Fatal(r)
	}
	holds(t, all[1], o.Chunk, want)
	if n.Load() > int64(len(data)) {
		t.Errorf("%d bytes were read for %d", n.Load(), len(data))
	}
}

// TestGatherTakesOnlyWhatIsSealed: a replica that is not sealed as the journal says is no
// source (rule 5), nor is a corrupt replica; without another source nothing is appended.
func TestGatherTakesOnlyWhatIsSealed(t *testing.T) {
	_, all := cluster(t, 3, 1)
	id := meta.ChunkID{Volume: 1, Term: 1, Counter: 1}
	data := random(100_000, 1)
	src := sourceOf(fill(t, id, data, all[1]))
	other := random(100_000, 2)
	other[0] = ^data[0]
	if err := all[0].Append(ctx, id, fence, 0, other, chunkserver.CRC(other)); err != nil {
		t.Fatal(err)
	}
	src.Servers = []meta.ServerID{1, 3, 2}
	o := meta.Order{Kind: meta.OrderGather, Chunk: meta.ChunkID{Volume: 1, Term: 1, Counter: 2}, Fence: fence,
		Chunks: []meta.CopySource{src}, Pieces: []meta.CopyPiece{{Len: 1000}, {Off: 50_000, Len: 1000}}}
	want := slices.Concat(data[:1000], data[50_000:51_000])
	if r := all[0].Order(ctx, o); r.Err != 0 {
		t.Fatal(r)
	}
	holds(t, all[0], o.Chunk, want)
	// A replica on a server outside the record is no source either.
	for i, on := range [][]meta.ServerID{{1, 2}, {1}} {
		o.Chunk.Counter, o.Chunks[0].Servers = uint64(10+i), on
		switch r := all[2].Order(ctx, o); {
		case len(on) > 1 && r.Err == 0:
			holds(t, all[2], o.Chunk, want)
		case len(on) > 1 || r.Err != meta.Unavailable:
			t.Fatalf("%v: %+v", on, r)
		default:
			nothing(t, all[2], o.Chunk)
		}
	}
	// Sealed, but at other bytes.
	if r := all[0].Order(ctx, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: meta.Fence{Term: 1, Seals: 1}, Final: true, Length: 100_000}); r.Err != 0 {
		t.Fatal(r)
	}
	o.Chunk.Counter, o.Chunks[0].Servers = 3, []meta.ServerID{1}
	if r := all[0].Order(ctx, o); r.Err != meta.Unavailable {
		t.Fatalf("%+v", r)
	}
	nothing(t, all[0], o.Chunk)
	// A replica here that the record does not name may be left from a move.
	o.Chunk.Counter, o.Chunks[0].Servers, o.Chunks[0].CRC = 4, []meta.ServerID{2}, 0
	if r := all[0].Order(ctx, o); r.Err != 0 {
		t.Fatal(r)
	}
	holds(t, all[0], o.Chunk, want)
}

func TestGatherBounds(t *testing.T) {
	_, all := cluster(t, 1, 1)
	src := sourceOf(fill(t, meta.ChunkID{Volume: 1, Term: 1, Counter: 1}, random(1000, 1), all[0]))
	good := meta.Order{Kind: meta.OrderGather, Chunk: meta.ChunkID{Volume: 1, Term: 1, Counter: 2}, Fence: fence, Chunks: []meta.CopySource{src}, Pieces: []meta.CopyPiece{{Len: 10}}}
	for name, spoil := range map[string]func(*meta.Order){
		"no pieces":       func(o *meta.Order) { o.Pieces = nil },
		"no such source":  func(o *meta.Order) { o.Pieces = []meta.CopyPiece{{Chunk: 1, Len: 1}} },
		"empty":           func(o *meta.Order) { o.Pieces = []meta.CopyPiece{{}} },
		"beyond the end":  func(o *meta.Order) { o.Pieces = []meta.CopyPiece{{Off: 999, Len: 2}} },
		"beyond all":      func(o *meta.Order) { o.Pieces = []meta.CopyPiece{{Off: 1<<64 - 1, Len: 2}} },
		"too many pieces": func(o *meta.Order) { o.Pieces = slices.Repeat(o.Pieces, meta.MaxPieces+1) },
		"too many chunks": func(o *meta.Order) { o.Chunks = slices.Repeat(o.Chunks, meta.MaxSources+1) },
	} {
		o := good
		spoil(&o)
		if r := all[0].Order(ctx, o); r.Err != meta.Invalid {
			t.Errorf("%s: %+v", name, r)
		}
	}
	nothing(t, all[0], good.Chunk)
	if r := all[0].Order(ctx, good); r.Err != 0 {
		t.Error(r)
	}
	// An order of a deposed owner gathers nothing.
	late := good
	late.Length, late.Owner, late.Term = 10, 1, 3
	if r := all[0].Order(ctx, late); r.Err != 0 {
		t.Error(r)
	}
	late.Length, late.Term = 20, 2
	if r := all[0].Order(ctx, late); r.Err != meta.Fenced {
		t.Errorf("%+v", r)
	}
}

// TestGatherHasAClass: a gathered chunk goes on a disk of the requested class.
func TestGatherHasAClass(t *testing.T) {
	f := &fabric{servers: map[meta.ServerID]*Server{}}
	specs := mkdirs(t, 4)
	for i := range specs[1:] {
		specs[i+1].Class = []string{"hdd", "hdd", "nvme"}[i]
	}
	s := diskServer(t, f, 1, t.TempDir(), specs...)
	src := sourceOf(fill(t, meta.ChunkID{Volume: 1, Term: 1, Counter: 1}, random(1000, 1), s))
	o := meta.Order{Kind: meta.OrderGather, Fence: fence, Class: "nvme", Chunks: []meta.CopySource{src}, Pieces: []meta.CopyPiece{{Len: 10}}}
	for i := range 8 {
		o.Chunk = meta.ChunkID{Volume: 1, Term: 1, Counter: uint64(i + 2)}
		if r := s.Order(ctx, o); r.Err != 0 {
			t.Fatal(r)
		}
		if d, err := s.findDisk(ctx, o.Chunk, false, ""); err != nil || d.class != "nvme" {
			t.Errorf("it lies on class %q: %v", d.class, err)
		}
	}
	o.Chunk.Counter, o.Class = 99, "tape"
	if r := s.Order(ctx, o); r.Err != meta.NoSpace {
		t.Errorf("%+v", r)
	}
}

// TestPacer: the pacer holds its users together to the rate over any period: never more than the
// rate allows and a piece for each user. The pacer starves no user, makes up for no idle time,
// and releases users that give up.
func TestPacer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const rate, users, piece = 1 << 20, 4, 64 << 10
		var p pacer
		var mu sync.Mutex
		type sent struct {
			at time.Time
			by int
		}
		var all []sent
		run := func(d time.Duration) {
			ctx, cancel := context.WithTimeout(t.Context(), d)
			defer cancel()
			var wg sync.WaitGroup
			for i := range users {
				wg.Go(func() {
					for p.wait(ctx, piece, rate) == nil {
						mu.Lock()
						all = append(all, sent{time.Now(), i})
						mu.Unlock()
					}
				})
			}
			wg.Wait()
		}
		run(10 * time.Second)
		time.Sleep(time.Minute)
		run(10 * time.Second)
		for i, a := range all {
			for k := i; k < len(all); k++ {
				n := float64(k-i+1) * piece
				if d := all[k].at.Sub(a.at); n > d.Seconds()*rate+users*piece {
					t.Fatalf("%.0f bytes in %v", n, d)
				}
			}
		}
		total := float64(len(all)) * piece
		if least := 20.0 * rate * 0.95; total < least {
			t.Errorf("%.0f bytes in 20 s, %d a second are allowed", total, rate)
		}
		by := [users]int{}
		for _, x := range all {
			by[x.by]++
		}
		if slices.Min(by[:])*3 < slices.Max(by[:]) {
			t.Errorf("some get much more than others: %v", by)
		}
		// Without a rate no user waits; a user that gives up gets the reason.
		began := time.Now()
		for range 1000 {
			if err := p.wait(t.Context(), 1<<40, 0); err != nil {
				t.Fatal(err)
			}
		}
		if time.Since(began) != 0 {
			t.Error("it waited without a rate")
		}
		why := context.DeadlineExceeded
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Second, why)
		defer cancel()
		if err := p.wait(ctx, 100*rate, rate); err != nil {
			t.Errorf("the first waits for nobody: %v", err)
		}
		if err := p.wait(ctx, piece, rate); err != why || time.Since(began) != time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// TestGatherIsPaced: an order to gather keeps its rate and the server's rate in the bytes read,
// which for scattered pieces are more than the bytes appended. No read is larger than the bound.
func TestGatherIsPaced(t *testing.T) {
	f, all := cluster(t, 2, 1)
	data := random(12<<20, 1)
	src := sourceOf(fill(t, meta.ChunkID{Volume: 1, Term: 1, Counter: 1}, data, all[0]))
	var read, most atomic.Int64
	f.after = func(_ meta.ServerID, _ uint64, p []byte) {
		read.Add(int64(len(p)))
		for n := most.Load(); int64(len(p)) > n && !most.CompareAndSwap(n, int64(len(p))); n = most.Load() {
		}
	}
	whole := []meta.CopyPiece{{Len: 12 << 20}}
	var scattered []meta.CopyPiece
	for off := uint64(0); off < 12<<20; off += gatherGap {
		scattered = append(scattered, meta.CopyPiece{Off: off, Len: 4096})
	}
	counter := uint64(2)
	for name, pieces := range map[string][]meta.CopyPiece{"whole": whole, "scattered": scattered} {
		for i, set := range []func(*meta.Order, uint64){
			func(o *meta.Order, rate uint64) { o.Rate = rate },
			func(_ *meta.Order, rate uint64) { all[1].cfg.PullRate = rate },
		} {
			o := meta.Order{Kind: meta.OrderGather, Chunk: meta.ChunkID{Volume: 1, Term: 1, Counter: counter}, Fence: fence, Chunks: []meta.CopySource{src}, Pieces: pieces}
			counter++
			set(&o, 40<<20)
			read.Store(0)
			began := time.Now()
			if r := all[1].Order(ctx, o); r.Err != 0 {
				t.Fatal(r)
			}
			if d := time.Since(began); d < 190*time.Millisecond { // of three readings of 4 MiB two wait
				t.Errorf("%s, %d: %d bytes were read in %v", name, i, read.Load(), d)
			}
			all[1].cfg.PullRate = 1 << 40
			var want []byte
			for _, p := range pieces {
				want = append(want, data[p.Off:p.Off+p.Len]...)
			}
			holds(t, all[1], o.Chunk, want)
			if n := read.Load(); n > 12<<20 {
				t.Errorf("%s, %d: %d bytes were read", name, i, n)
			}
		}
	}
	if n := most.Load(); n > gatherRead {
		t.Errorf("%d bytes were read at once", n)
	}
}

// TestGatherFromADeafSource: a source that does not answer, or stops answering, delays nothing
// while another source has the bytes; after a failure, the source is not asked for each range.
func TestGatherFromADeafSource(t *testing.T) {
	f, all := cluster(t, 4, 1)
	data := random(8<<20, 1)
	src := sourceOf(fill(t, meta.ChunkID{Volume: 1, Term: 1, Counter: 1}, data, all[:3]...))
	src.Servers = []meta.ServerID{1, 2, 3}
	o := meta.Order{Kind: meta.OrderGather, Fence: fence, Chunks: []meta.CopySource{src}}
	var want []byte
	for off := uint64(0); off < 8<<20; off += 4 * gatherGap { // none near another
		o.Pieces = append(o.Pieces, meta.CopyPiece{Off: off, Len: 4096})
		want = append(want, data[off:off+4096]...)
	}
	gather := func(counter uint64) meta.OrderResult {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // of an owner's patience
		defer cancel()
		o.Chunk = meta.ChunkID{Volume: 1, Term: 1, Counter: counter}
		return all[3].Order(ctx, o)
	}
	set := func(deaf map[meta.ServerID]int) {
		f.mu.Lock()
		f.deaf, f.asked = deaf, map[meta.ServerID]int{}
		f.mu.Unlock()
	}
	for i, deaf := range []map[meta.ServerID]int{{1: 1}, {1: 1, 2: 1}, {1: 1, 3: 1}, {1: 2}, {1: 2, 2: 1}} {
		set(deaf)
		if r := gather(uint64(10 + i)); r.Err != 0 {
			t.Fatalf("deaf %v: %+v", deaf, r)
		}
		holds(t, all[3], o.Chunk, want)
		for id, how := range deaf {
			if n := f.asked[id]; how == 1 && n > 0 {
				t.Errorf("server %d, which did not answer, was read %d times", id, n)
			}
		}
	}
	// No source answers: the gathering ends with the order, and the error gives the
	// reason.
	set(map[meta.ServerID]int{1: 1, 2: 1, 3: 2})
	cctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	o.Chunk = meta.ChunkID{Volume: 1, Term: 1, Counter: 99}
	if r := all[3].Order(cctx, o); r.Err != meta.Canceled {
		t.Fatalf("%+v", r)
	}
	nothing(t, all[3], o.Chunk)
}

// TestGatherFromItself: the server's own replica is read first. Where it is gone or
// partly corrupt, other servers serve, and the own replica is not asked again in vain.
func TestGatherFromItself(t *testing.T) {
	f, all := cluster(t, 2, 1)
	data := random(4<<20, 1)
	src := sourceOf(fill(t, meta.ChunkID{Volume: 1, Term: 1, Counter: 1}, data, all...))
	src.Servers = []meta.ServerID{1, 2}
	f.asked = map[meta.ServerID]int{}
	o := meta.Order{Kind: meta.OrderGather, Chunk: meta.ChunkID{Volume: 1, Term: 1, Counter: 2}, Fence: fence, Chunks: []meta.CopySource{src}, Pieces: []meta.CopyPiece{{Len: 4 << 20}}}
	if r := all[0].Order(ctx, o); r.Err != 0 {
		t.Fatal(r)
	}
	holds(t, all[0], o.Chunk, data)
	if len(f.asked) > 0 {
		t.Errorf("others were read: %v", f.asked)
	}
	rot(t, all[0], src.Chunk, 1000)
	o.Chunk.Counter = 3
	o.Pieces = nil
	for off := uint64(0); off < 4<<20; off += 4 * gatherGap {
		o.Pieces = append(o.Pieces, meta.CopyPiece{Off: off, Len: 4096})
	}
	if r := all[0].Order(ctx, o); r.Err != 0 {
		t.Fatal(r)
	}
	if n := f.asked[2]; n != 1 {
		t.Errorf("one range of this server's replica is bad, and %d were read elsewhere", n)
	}
}

// rot flips a bit of a plain chunk on a server of one disk.
func rot(t *testing.T, s *Server, id meta.ChunkID, off int64) {
	t.Helper()
	name := filepath.Join(s.disks.list()[0].path, "chunks", fmt.Sprintf("%02x", byte(id.Counter)), id.String()+".data")
	file, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	b := make([]byte, 1)
	if _, err := file.ReadAt(b, off); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 1
	if _, err := file.WriteAt(b, off); err != nil {
		t.Fatal(err)
	}
}
