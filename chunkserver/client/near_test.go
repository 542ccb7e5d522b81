package client

import (
	"bytes"
	"context"
	"errors"
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
	peering "penstock.io/penstock/meta/peer"
)

// slowRelay is a relay before a server; each burst of the server's bytes is delayed.
type slowRelay struct {
	ln    net.Listener
	delay atomic.Int64
	ended chan struct{}
	mu    sync.Mutex
	all   []net.Conn
}

func newSlowRelay(t *testing.T, to string) *slowRelay {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &slowRelay{ln: ln, ended: make(chan struct{})}
	var wg sync.WaitGroup
	keep := func(c net.Conn) {
		r.mu.Lock()
		r.all = append(r.all, c)
		r.mu.Unlock()
	}
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
			keep(c)
			keep(up)
			wg.Go(func() { _, _ = io.Copy(up, c); up.Close() })
			wg.Go(func() {
				defer c.Close()
				buf := make([]byte, 1<<20)
				for {
					n, err := up.Read(buf)
					select {
					case <-time.After(time.Duration(r.delay.Load())):
					case <-r.ended:
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
		r.mu.Lock()
		for _, c := range r.all {
			c.Close()
		}
		r.mu.Unlock()
		wg.Wait()
	})
	return r
}

// written makes a sealed chunk on all servers.
func (f *fixture) written(n int, seed uint64) (meta.ChunkPlace, []byte) {
	f.t.Helper()
	g := f.grant()
	w := f.NewWriter(g)
	defer w.Close()
	data := random(n, seed)
	if _, err := w.Append(f.t.Context(), data); err != nil {
		f.t.Fatal(err)
	}
	return f.sealSynced(w, g), data
}

func (f *fixture) served() (n []uint64) {
	for i := range len(f.servers) {
		n = append(n, f.servers[meta.ServerID(i+1)].Stats().Disks[0].Reads)
	}
	return n
}

// TestNearest: the nearest replica is read. When it is gone, the next replica is read,
// and after a short while the lost server is not asked first any more.
func TestNearest(t *testing.T) {
	f := newFixture(t, "tcp", 3, Config{Topology: "/dc1/rack2/n9"})
	for id, at := range map[meta.ServerID]string{1: "/dc2/rack1/n1", 2: "/dc1/rack1/n2", 3: "/dc1/rack2/n3"} {
		i := f.infos[id]
		i.Topology = at // all on one machine, like name spaces
		f.infos[id] = i
	}
	pl, data := f.written(3<<20, 1)
	before := f.served()
	read := func() {
		t.Helper()
		p := make([]byte, len(data))
		if err := f.ReadAt(t.Context(), pl, p, 0); err != nil || !bytes.Equal(p, data) {
			t.Fatalf("DATA: other bytes, or %v", err)
		}
	}
	read()
	asked, _ := f.Hedged() // a busy machine makes hedged reads
	if n := f.served(); n[0]+n[1]-before[0]-before[1] > asked || n[2] == before[2] {
		t.Fatalf("reads %v, before %v: the same rack comes first", n, before)
	}
	if got := f.order([]meta.ServerID{1, 2, 3}); !slices.Equal(got, []meta.ServerID{3, 2, 1}) {
		t.Fatalf("order %v", got)
	}
	if err := f.servers[3].Close(); err != nil {
		t.Fatal(err)
	}
	read()
	if got := f.order([]meta.ServerID{1, 2, 3}); !slices.Equal(got, []meta.ServerID{2, 1, 3}) {
		t.Fatalf("with 3 dead, order %v", got)
	}
}

// TestTopologyOfTheMachine: a client has the place of a server on its machine.
func TestTopologyOfTheMachine(t *testing.T) {
	c := New(Config{HostID: "me", Logger: quiet, Resolve: func(meta.ServerID) (meta.ServerInfo, bool) { return meta.ServerInfo{}, false },
		Servers: func() []meta.ServerInfo {
			return []meta.ServerInfo{{ID: 1, Host: "other", Topology: "/a/b/c"}, {ID: 2, Host: "me", Topology: "/a/x/y"}}
		}})
	defer c.Close()
	if got := c.topology(); got != "/a/x/y" {
		t.Fatal(got)
	}
	for _, tc := range []struct {
		a, b string
		n    int
	}{{"/a/b/c", "/a/b/c", 1}, {"/a/b/c", "/a/b/d", 2}, {"/a/b/c", "/a/x/c", 3}, {"/a/b/c", "/z/b/c", 4}, {"", "/a", farAway}} {
		if n := apart(tc.a, tc.b); n != tc.n {
			t.Errorf("%s and %s: %d levels apart, want %d", tc.a, tc.b, n, tc.n)
		}
	}
}

// TestHedge: a read does not wait for a slow replica; the additional requests are few.
func TestHedge(t *testing.T) {
	f := newFixture(t, "tcp", 2, Config{Topology: "/dc/rack1/n9"})
	slow := newSlowRelay(t, f.infos[1].Addr)
	for id, at := range map[meta.ServerID]string{1: "/dc/rack1/n1", 2: "/dc/rack2/n2"} {
		i := f.infos[id]
		i.Topology, i.Host = at, "other"
		if id == 1 {
			i.Addr = slow.ln.Addr().String()
		}
		f.infos[id] = i
	}
	pl, data := f.written(1<<20, 1)
	p := make([]byte, 8192)
	read := func(i int) time.Duration {
		t.Helper()
		off := uint64(i*len(p)) % uint64(len(data))
		begun := time.Now()
		if err := f.ReadAt(t.Context(), pl, p, off); err != nil || !bytes.Equal(p, data[off:off+uint64(len(p))]) {
			t.Fatalf("DATA: other bytes, or %v", err)
		}
		return time.Since(begun)
	}
	for i := range 300 {
		read(i)
	}
	few, _ := f.Hedged()
	if few > 300*hedgeShare+hedgeBurst {
		t.Errorf("%d of 300 quick reads were hedged", few)
	}
	slow.delay.Store(int64(time.Hour))
	f.lat.mu.Lock()
	f.lat.tokens = hedgeBurst
	f.lat.mu.Unlock()
	for i := range 4 {
		if d := read(i); d > 20*time.Second { // some 10 ms, where nothing keeps us from the processor
			t.Errorf("a read took %v with a good replica at hand", d)
		}
	}
	if asked, won := f.Hedged(); won < 3 || asked < few+3 {
		t.Errorf("hedged %d, won %d", asked, won)
	}
}

// TestCorruptIsTold: a replica with changed bytes is reported, and another replica serves
// the bytes.
func TestCorruptIsTold(t *testing.T) {
	var mu sync.Mutex
	var bad []meta.ServerID
	f := newFixture(t, "tcp", 2, Config{Corrupt: func(_ meta.ChunkID, s meta.ServerID) {
		mu.Lock()
		defer mu.Unlock()
		bad = append(bad, s)
	}})
	pl, data := f.written(1<<20, 1)
	for _, id := range []meta.ServerID{1, 2} {
		i := f.infos[id]
		i.Host = "other"
		f.infos[id] = i
	}
	name := filepath.Join(f.dirs[1], "chunks", pl.ID.String()[30:], pl.ID.String()+".data")
	raw, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := raw.WriteAt([]byte{^data[300_000]}, 300_000); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		p := make([]byte, len(data))
		if err := f.ReadAt(t.Context(), pl, p, 0); err != nil || !bytes.Equal(p, data) {
			t.Fatalf("DATA: other bytes, or %v", err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(bad, []meta.ServerID{1}) {
		t.Fatalf("told of %v: once, of 1", bad)
	}
}

// TestFilesAreBackWithTheSocket: if the socket of a server on this machine is away for a
// moment, or the server compressed a chunk, the client uses the server's files again
// later.
func TestFilesAreBackWithTheSocket(t *testing.T) {
	f := newFixture(t, "tcp", 1, Config{})
	path := filepath.Join(t.TempDir(), "sock")
	ln, err := peering.ListenTicketed("unix:"+path, f.creds[0])
	if err != nil {
		t.Fatal(err)
	}
	go f.servers[1].Serve(context.Background(), ln)
	info := f.infos[1]
	info.Local = "unix:" + path
	f.infos[1] = info
	pl, data := f.written(3*block+5, 9)
	away := func(yes bool) {
		t.Helper()
		from, to := path+".away", path
		if yes {
			from, to = path, path+".away"
		}
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
		p := f.Client.peer(1)
		p.mu.Lock()
		p.noLocal = time.Time{} // the pause after the last failure is over
		links := slices.Concat(p.pools[:]...)
		p.mu.Unlock()
		for _, l := range links {
			l.fail(errors.New("its server was restarted"))
		}
	}
	direct := func() bool {
		t.Helper()
		_, done, err := f.File(t.Context(), pl, 0, 1)
		if err == nil {
			done()
		} else if meta.KindOf(err) != meta.NotSupported {
			t.Fatal(err)
		}
		return err == nil
	}
	away(true)
	if direct() {
		t.Fatal("a descriptor came over TCP")
	}
	readAll(t, f, pl, data)
	away(false)
	if !direct() {
		t.Fatal("the socket is back, and no descriptor is asked for")
	}
	readAll(t, f, pl, data)

	// A local server's own answer holds for a while.
	f.Client.forgetFile(pl.ID)
	f.Client.noteNoFile(1, pl.ID)
	if direct() {
		t.Fatal("it is asked again at once")
	}
	f.Client.mu.Lock()
	f.Client.noFile[badReplica{pl.ID, 1}] = time.Now()
	f.Client.mu.Unlock()
	if !direct() {
		t.Fatal("it is never asked again")
	}
}

// forgetFile closes the kept descriptor of a chunk.
func (c *Client) forgetFile(id meta.ChunkID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if f := c.files[id]; f != nil {
		c.forgetLocked(f)
	}
}
