package client

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// remote makes the client reach all servers as if they were on other machines.
func (f *fixture) remote() {
	for id, i := range f.infos {
		i.Host = "other"
		f.infos[id] = i
	}
}

// inOrder reads a chunk from its beginning to its end.
func (f *fixture) inOrder(pl meta.ChunkPlace, data []byte, step int, before func(off int)) {
	f.t.Helper()
	p := make([]byte, step)
	for off := 0; off < len(data); off += step {
		if before != nil {
			before(off)
		}
		p := p[:min(step, len(data)-off)]
		clear(p)
		if err := f.ReadAt(f.t.Context(), pl, p, uint64(off)); err != nil || !bytes.Equal(p, data[off:off+len(p)]) {
			f.t.Fatalf("DATA: %d bytes at %d: wrong, or %v", len(p), off, err)
		}
	}
}

// links are the connections for reading.
func (f *fixture) links() (all []*link) {
	p := f.peer(1)
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Concat(p.pools[forOthers], p.pools[forOthers+plain])
}

// TestStreamIsTaken: a reader in order takes the bytes out of the socket itself once the bytes
// have come, and no other goroutine handles the bytes. All bytes come over one connection, though
// more are allowed.
func TestStreamIsTaken(t *testing.T) {
	for _, network := range []string{"tcp", "ticket"} {
		for _, step := range []int{64 << 10, 128 << 10, 1 << 20} {
			streamIsTaken(t, network, step)
		}
	}
}

func streamIsTaken(t *testing.T, network string, step int) {
	t.Helper()
	f := newFixture(t, network, 1, Config{Timeout: time.Hour}) // no pings
	f.held = time.Hour
	pl, data := f.written(24<<20, 1)
	// Wait until the next piece is held: the test does not measure the speed.
	ready := func(off int) {
		if off < 4<<20 || off > 22<<20 { // behind the last piece nothing is held
			return
		}
		for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(100 * time.Microsecond) {
			for _, l := range f.links() {
				l.mu.Lock()
				held := l.held != nil && !l.taken
				l.mu.Unlock()
				if held {
					return
				}
			}
		}
		t.Fatalf("%s, %d: nothing is held for the reader at %d", network, step, off)
	}
	before := f.taken.Load()
	f.inOrder(pl, data, step, ready)
	// At least once a piece: if only a part of a piece has come, the rest goes to a
	// buffer.
	if taken := f.taken.Load() - before; taken < 10 {
		t.Fatalf("%s, %d: readers took bytes %d times themselves, of 18 pieces", network, step, taken)
	}
	var asked []uint64
	for _, l := range f.links() {
		l.mu.Lock()
		asked = append(asked, l.next)
		l.mu.Unlock()
	}
	slices.Sort(asked)
	var others uint64
	for _, n := range asked[:len(asked)-1] {
		others += n
	}
	if most := asked[len(asked)-1]; most < 18 || others > most/2 {
		t.Fatalf("%s, %d: requests by connection: %v", network, step, asked)
	}
}

// TestStreamCorrupt: unverified bytes reach no reader, in whatever way the reader reads and
// whichever goroutine receives; another replica serves the bytes.
func TestStreamCorrupt(t *testing.T) {
	for _, tc := range []struct{ step, conns int }{{64 << 10, 4}, {128 << 10, 1}, {1 << 20, 4}, {8 << 20, 1}} {
		t.Run(fmt.Sprint(tc.step), func(t *testing.T) {
			var mu sync.Mutex
			bad := map[meta.ServerID]bool{}
			f := newFixture(t, "tcp", 2, Config{Conns: tc.conns, Corrupt: func(_ meta.ChunkID, s meta.ServerID) {
				mu.Lock()
				defer mu.Unlock()
				bad[s] = true
			}})
			f.remote()
			const n = 24<<20 + 777
			pl, data := f.written(n, 1)
			name := filepath.Join(f.dirs[1], "chunks", pl.ID.String()[30:], pl.ID.String()+".data")
			raw, err := os.OpenFile(name, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer raw.Close()
			for at := 5 << 20; at < n; at += 3<<20 + 100_000 {
				if _, err := raw.WriteAt([]byte{^data[at]}, int64(at)); err != nil {
					t.Fatal(err)
				}
			}
			f.inOrder(pl, data, tc.step, nil)
			mu.Lock()
			defer mu.Unlock()
			if bad[2] {
				t.Error("a good replica is said to be corrupt")
			}
		})
	}
}

// stallingRelay is a relay before a server; on request, the server's bytes stop coming in
// the middle.
type stallingRelay struct {
	ln      net.Listener
	stalled atomic.Bool
	at      atomic.Int64 // 0, or the number of bytes of one connection after which it stalls, once
	ended   chan struct{}
}

func newStallingRelay(t *testing.T, to string) *stallingRelay {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &stallingRelay{ln: ln, ended: make(chan struct{})}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", to)
			if err != nil {
				c.Close()
				continue
			}
			end := func() { <-r.ended; c.Close(); up.Close() }
			wg.Go(end)
			wg.Go(func() { _, _ = io.Copy(up, c); up.Close() })
			wg.Go(func() {
				defer c.Close()
				buf := make([]byte, 200_001)
				var sent int64
				for {
					n, err := up.Read(buf)
					if at := r.at.Load(); at > 0 && sent+int64(n) > at && r.at.CompareAndSwap(at, 0) {
						_, _ = c.Write(buf[:max(0, at-sent)])
						<-r.ended
						return
					}
					sent += int64(n)
					if r.stalled.Load() {
						_, _ = c.Write(buf[:n/2])
						<-r.ended
						return
					}
					if _, werr := c.Write(buf[:n]); err != nil || werr != nil {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		close(r.ended)
		wg.Wait()
	})
	return r
}

// TestStreamStalls: a read does not wait for a server that stops in the middle of an
// answer, even if the reader has already taken some of the bytes.
func TestStreamStalls(t *testing.T) {
	for _, step := range []int{128 << 10, 1 << 20, 8 << 20} {
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "tcp", 2, Config{Conns: 1})
			relay := newStallingRelay(t, f.infos[1].Addr)
			f.remote()
			i := f.infos[1]
			i.Addr = relay.ln.Addr().String()
			f.infos[1] = i
			f.cfg.Topology = ""
			pl, data := f.written(24<<20, 1)
			f.impatient(1200 * time.Millisecond)
			f.inOrder(pl, data, step, func(off int) {
				if off >= 8<<20 {
					relay.stalled.Store(true)
				}
			})
			if n := f.served(); n[1] == 0 {
				t.Errorf("reads by server: %v", n)
			}
		})
	}
}
