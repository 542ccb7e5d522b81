package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/server"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	peering "penstock.io/penstock/meta/peer"
)

// fixture has some chunk servers, each with one disk, and a client.
type fixture struct {
	t       testing.TB
	key     meta.CapKey
	servers map[meta.ServerID]*server.Server
	infos   map[meta.ServerID]meta.ServerInfo
	dirs    map[meta.ServerID]string
	*Client
	next uint64
	// network is unix, tcp, tls, or ticket: TLS with tickets for plain connections.
	network string
	creds   [2]*peering.Credentials // the servers', the client's
}

const host = "boot-1"

var testKey = meta.CapKey{ID: 1, Secret: bytes.Repeat([]byte{3}, 32)}

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// plainRight returns the right that capabilities need for the network.
func (f *fixture) plainRight() capability.Rights {
	if f.network == "ticket" {
		return capability.Plain
	}
	return 0
}

// credentials makes an authority and the certificates that it signs.
func (f *fixture) credentials() {
	f.t.Helper()
	a, err := peering.NewAuthority("test", time.Hour)
	if err != nil {
		f.t.Fatal(err)
	}
	for i, id := range []peering.Identity{{Cluster: "test", Role: peering.ChunkServer, Name: "k"}, {Cluster: "test", Role: peering.Client, Name: "c"}} {
		dir := filepath.Join(f.t.TempDir(), "c")
		if err := a.Issue(dir, id, nil); err != nil {
			f.t.Fatal(err)
		}
		if f.creds[i], err = peering.Load(dir, quiet); err != nil {
			f.t.Fatal(err)
		}
	}
}

// newFixture starts servers 1..n.
func newFixture(t testing.TB, network string, n int, cfg Config) *fixture {
	f := &fixture{t: t, key: testKey, network: network, creds: [2]*peering.Credentials{peering.Insecure(), peering.Insecure()},
		servers: map[meta.ServerID]*server.Server{}, infos: map[meta.ServerID]meta.ServerInfo{}, dirs: map[meta.ServerID]string{}}
	if network == "tls" || network == "ticket" {
		f.credentials()
	}
	for i := range n {
		id := meta.ServerID(i + 1)
		f.dirs[id] = t.TempDir()
		if err := store.Init(store.DirDisk(f.dirs[id]), store.Options{SegmentSize: 8 << 20, Segments: 5}); err != nil {
			t.Fatal(err)
		}
		f.start(id, network)
	}
	if cfg.Direct != nil {
		cfg.Direct = func(id meta.ServerID) chunkserver.Service {
			if id == 1 {
				return f.servers[1]
			}
			return nil
		}
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 10 * time.Second // long, so that a short standstill of the machine breaks no connection
	}
	cfg.HostID = host
	cfg.Creds = f.creds[1]
	cfg.Logger = quiet
	cfg.Resolve = func(id meta.ServerID) (meta.ServerInfo, bool) { i, ok := f.infos[id]; return i, ok }
	cfg.ReadCap = func(v meta.VolumeID) []byte {
		return capability.Sign(f.key, capability.Claims{Volume: v, Rights: capability.Read | f.plainRight(), Client: "client/c", Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
	}
	f.Client = New(cfg)
	t.Cleanup(func() {
		if err := f.Client.Close(); err != nil {
			t.Error(err)
		}
		for _, s := range f.servers {
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return f
}

// impatient replaces the client by a client with a shorter timeout.
func (f *fixture) impatient(timeout time.Duration) {
	f.t.Helper()
	cfg := f.Client.cfg
	if err := f.Client.Close(); err != nil {
		f.t.Fatal(err)
	}
	cfg.Timeout = timeout
	f.Client = New(cfg)
}

func (f *fixture) start(id meta.ServerID, network string) {
	f.t.Helper()
	st, err := store.Open(store.DirDisk(f.dirs[id]), store.Options{Logger: quiet, Reserve: 1, Boot: host})
	if err != nil {
		f.t.Fatal(err)
	}
	addr := "127.0.0.1:0"
	if network == "unix" {
		addr = "unix:" + filepath.Join(f.dirs[id], "sock")
	}
	ln, err := peering.ListenTicketed(addr, f.creds[0])
	if err != nil {
		f.t.Fatal(err)
	}
	info := meta.ServerInfo{ID: id, Addr: ln.Addr().String(), Host: host}
	if network == "unix" {
		info.Addr = addr
	}
	s := server.New(server.Config{ID: id, Addr: info.Addr, Host: host, Keys: []meta.CapKey{f.key}, Logger: quiet, Congestion: "cubic",
		UnsafeNoCap: os.Getenv("PENSTOCK_CONTROL") == "chunk-nocap"}, st)
	go s.Serve(context.Background(), ln)
	f.servers[id], f.infos[id] = s, info
}

func (f *fixture) grant() meta.ChunkGrant {
	f.next++
	g := meta.ChunkGrant{ID: meta.ChunkID{Volume: 1, Term: 1, Counter: f.next}, Fence: meta.Fence{Term: 1}, MaxLen: 1 << 30}
	for i := range len(f.servers) {
		g.Servers = append(g.Servers, meta.ServerID(i+1))
	}
	g.Cap = capability.Sign(f.key, capability.Claims{Volume: 1, Chunk: g.ID, Rights: capability.Append | f.plainRight(), Client: "client/c", Fence: g.Fence,
		MaxLen: g.MaxLen, Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
	return g
}

func (f *fixture) seal(g meta.ChunkGrant, length uint64) meta.ChunkPlace {
	f.t.Helper()
	for _, id := range g.Servers {
		r := f.servers[id].Order(context.Background(), meta.Order{Kind: meta.OrderSeal, Chunk: g.ID, Fence: meta.Fence{Term: 1, Seals: 1}, Final: true, Length: length})
		if r.Err != meta.KindOK || r.Length != length || r.State != meta.ChunkSealed {
			f.t.Fatalf("seal: %+v", r)
		}
	}
	return meta.ChunkPlace{ID: g.ID, Servers: g.Servers, Sealed: true, Length: length}
}

// nobody asks newFixture for direct calls to server 1.
func nobody(meta.ServerID) chunkserver.Service { return nil }

func random(n int, seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := 0; i+8 <= n; i += 8 {
		v := r.Uint64()
		for j := range 8 {
			b[i+j] = byte(v >> (8 * j))
		}
	}
	return b
}

var forms = []struct {
	name, network string
	replicas      int
	cfg           Config
}{
	{"unix", "unix", 1, Config{}},
	{"unix-noshare", "unix", 1, Config{NoShare: true}},
	{"tcp", "tcp", 1, Config{Congestion: "cubic"}},
	{"three", "tcp", 3, Config{}},
	{"tls", "tls", 1, Config{Congestion: "cubic"}},
	{"ticket", "ticket", 2, Config{}},
	{"direct", "unix", 1, Config{Direct: nobody}},
	{"mixed", "unix", 2, Config{Direct: nobody}},
}

// TestWriteRead: bytes appended in pieces of all sizes read back, open and sealed, by
// every way of reading.
func TestWriteRead(t *testing.T) {
	for _, form := range forms {
		t.Run(form.name, func(t *testing.T) {
			f := newFixture(t, form.network, form.replicas, form.cfg)
			ctx := t.Context()
			g := f.grant()
			w := f.NewWriter(g)
			defer w.Close()
			data := random(5_000_001, 1)
			r := rand.New(rand.NewPCG(5, 6))
			for off := 0; off < len(data); {
				n := min(1+r.IntN(1<<r.IntN(22)), len(data)-off)
				got, err := w.Append(ctx, data[off:off+n])
				if err != nil || got != uint64(off) {
					t.Fatalf("append at %d: %d, %v", off, got, err)
				}
				off += n
				if r.IntN(20) == 0 {
					if err := w.Sync(ctx); err != nil || w.Synced() != uint64(off) {
						t.Fatalf("sync: %d, %v", w.Synced(), err)
					}
				}
			}
			if err := w.Wait(ctx); err != nil || w.Acked() != uint64(len(data)) {
				t.Fatalf("wait: %d, %v", w.Acked(), err)
			}
			open := meta.ChunkPlace{ID: g.ID, Servers: g.Servers}
			readAll(t, f, open, data)
			pl := f.seal(g, uint64(len(data)))
			readAll(t, f, pl, data)
			_, err := w.Append(ctx, []byte("x"))
			if err = errors.Join(err, w.Wait(ctx)); meta.KindOf(err) != meta.Fenced && meta.KindOf(err) != meta.Sealed {
				t.Fatalf("append to a sealed chunk: %v", err)
			}
			file, done, err := f.File(ctx, pl, 100, 1000)
			if form.network != "unix" {
				if meta.KindOf(err) != meta.NotSupported {
					t.Fatal(err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 1000)
			if _, err := file.ReadAt(b, 100); err != nil || !bytes.Equal(b, data[100:1100]) {
				t.Fatal("DATA: descriptor reads something else")
			}
			if _, err := file.WriteAt(b, 0); err == nil {
				t.Fatal("the descriptor can be written to")
			}
			done()
			back, err := f.Backing(ctx, pl)
			if err != nil {
				t.Fatal(err)
			}
			defer back.Close()
			whole, err := io.ReadAll(io.NewSectionReader(back, 0, 1<<40))
			if err != nil || !bytes.Equal(whole, data) {
				t.Fatal("DATA: backing descriptor reads something else")
			}
		})
	}
}

func readAll(t *testing.T, f *fixture, pl meta.ChunkPlace, data []byte) {
	t.Helper()
	r := rand.New(rand.NewPCG(7, 8))
	for range 60 {
		off := r.IntN(len(data))
		n := min(1+r.IntN(1<<r.IntN(23)), len(data)-off)
		p := make([]byte, n)
		if err := f.ReadAt(t.Context(), pl, p, uint64(off)); err != nil || !bytes.Equal(p, data[off:off+n]) {
			t.Fatalf("DATA: %d bytes at %d: %v", n, off, err)
		}
	}
	if err := f.ReadAt(t.Context(), pl, make([]byte, 2), uint64(len(data)-1)); meta.KindOf(err) != meta.NoSuchOffset {
		t.Fatalf("past the end: %v", err)
	}
}

// TestCapabilities: no request is served without a capability that allows exactly this
// request.
func TestCapabilities(t *testing.T) {
	f := newFixture(t, "unix", 1, Config{})
	ctx := t.Context()
	g := f.grant()
	other := f.grant()
	for name, token := range map[string][]byte{"none": nil, "of another chunk": other.Cap, "to read only": f.cfg.ReadCap(1)} {
		bad := g
		bad.Cap = token
		w := f.NewWriter(bad)
		_, err := w.Append(ctx, []byte("hello"))
		err = errors.Join(err, w.Wait(ctx))
		if meta.KindOf(err) != meta.BadCapability {
			t.Errorf("append with a capability %s: %v", name, err)
		}
		w.Close()
	}
	if _, err := f.Client.Stat(ctx, 1, g.ID); meta.KindOf(err) != meta.NoSuchChunk {
		t.Errorf("something was written: %v", err)
	}
	if err := f.Client.Delete(ctx, 1, g.Cap, g.ID, g.Fence); meta.KindOf(err) != meta.BadCapability {
		t.Errorf("delete with a capability to append: %v", err)
	}
	f.cfg.ReadCap = func(meta.VolumeID) []byte { return nil }
	if err := f.ReadAt(ctx, meta.ChunkPlace{ID: g.ID, Servers: g.Servers}, make([]byte, 1), 0); meta.KindOf(err) != meta.BadCapability {
		t.Errorf("read without capability: %v", err)
	}
}

// TestServerDies: the death of a server fails the writer at once, and the server comes
// back with the synced bytes.
func TestServerDies(t *testing.T) {
	f := newFixture(t, "unix", 1, Config{})
	ctx := t.Context()
	g := f.grant()
	w := f.NewWriter(g)
	defer w.Close()
	data := random(300_000, 2)
	if _, err := w.Append(ctx, data); err != nil {
		t.Fatal(err)
	}
	if err := w.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	if err := f.servers[1].Close(); err != nil {
		t.Fatal(err)
	}
	_, err := w.Append(ctx, data)
	if err = errors.Join(err, w.Wait(ctx)); meta.KindOf(err) != meta.Unavailable {
		t.Fatalf("append to a dead server: %v", err)
	}
	p := make([]byte, len(data))
	place := meta.ChunkPlace{ID: g.ID, Servers: g.Servers}
	if f.Awaited(g.Servers) {
		t.Error("a server that nobody missed yet is awaited")
	}
	if err := f.ReadAt(ctx, place, p, 0); meta.KindOf(err) != meta.Unavailable {
		t.Fatalf("read from a dead server: %v", err)
	}
	if !f.Awaited(g.Servers) {
		t.Error("a server that died just now is not awaited")
	}
	f.peer(1).mu.Lock()
	f.peer(1).away = time.Now().Add(-Patience)
	f.peer(1).missedLocked()
	f.peer(1).mu.Unlock()
	if f.Awaited(g.Servers) {
		t.Error("a server that is away for long is awaited")
	}
	f.peer(1).mu.Lock()
	f.peer(1).missed = time.Now().Add(-2 * missedLong)
	f.peer(1).missedLocked()
	f.peer(1).mu.Unlock()
	if !f.Awaited(g.Servers) {
		t.Error("a server that nobody asked for long is not awaited")
	}
	f.start(1, "unix")
	time.Sleep(450 * time.Millisecond)
	if err := f.ReadAt(ctx, place, p, 0); err != nil || !bytes.Equal(p, data) {
		t.Fatalf("DATA: other bytes, or %v", err)
	}
	if p := f.peer(1); !p.away.IsZero() {
		t.Error("it came back, and counts as away")
	}
	// A server in no list does not count as present.
	if nobody := []meta.ServerID{99}; f.ReadAt(ctx, meta.ChunkPlace{ID: f.grant().ID, Servers: nobody}, p, 0) == nil || !f.Awaited(nobody) {
		t.Error("a server that is not known yet is not awaited")
	}
}

// TestManyWriters: many writers at once, each with its own chunk.
func TestManyWriters(t *testing.T) {
	f := newFixture(t, "unix", 1, Config{})
	ctx := t.Context()
	errs := make(chan error, 20)
	for i := range 20 {
		g := f.grant()
		go func() {
			errs <- func() error {
				w := f.NewWriter(g)
				defer w.Close()
				data := random(200_000, uint64(i))
				for off := 0; off < len(data); off += 20_000 {
					if _, err := w.Append(ctx, data[off:off+20_000]); err != nil {
						return err
					}
					if err := w.Sync(ctx); err != nil {
						return err
					}
				}
				p := make([]byte, len(data))
				if err := f.ReadAt(ctx, meta.ChunkPlace{ID: g.ID, Servers: g.Servers}, p, 0); err != nil {
					return err
				}
				if !bytes.Equal(p, data) {
					return fmt.Errorf("DATA: writer %d reads something else", i)
				}
				return nil
			}()
		}()
	}
	for range 20 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%+v", f.servers[1].Stats().Disks[0])
}

// TestRot: a sealed chunk's file is changed without the server: local readers, which read
// without a request, notice the change and use another replica.
func TestRot(t *testing.T) {
	for _, replicas := range []int{1, 2} {
		t.Run(fmt.Sprint(replicas), func(t *testing.T) {
			f := newFixture(t, "unix", replicas, Config{})
			ctx := t.Context()
			g := f.grant()
			w := f.NewWriter(g)
			defer w.Close()
			data := random(400_000, 9)
			if _, err := w.Append(ctx, data); err != nil {
				t.Fatal(err)
			}
			pl := f.sealSynced(w, g)
			p := make([]byte, 100)
			if err := f.ReadAt(ctx, pl, p, 200_000); err != nil {
				t.Fatal(err)
			}
			name := filepath.Join(f.dirs[1], "chunks", pl.ID.String()[30:], pl.ID.String()+".data")
			raw, err := os.OpenFile(name, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer raw.Close()
			if _, err := raw.WriteAt([]byte{data[200_050] ^ 1}, 200_050); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * lookEvery)
			err = f.ReadAt(ctx, pl, p, 200_000)
			if replicas == 1 {
				if meta.KindOf(err) != meta.Corrupt {
					t.Fatalf("read of flipped bytes: %v", err)
				}
				if _, err := f.Backing(ctx, pl); meta.KindOf(err) != meta.Corrupt {
					t.Fatalf("descriptor of flipped bytes: %v", err)
				}
				return
			}
			if err != nil || !bytes.Equal(p, data[200_000:200_100]) {
				t.Fatalf("DATA: the other replica isn't read: %v", err)
			}
		})
	}
}

// TestGrowingTail: the last block of a growing chunk changes until it is full: its
// earlier checksum is neither held against the replica nor used for the new bytes.
func TestGrowingTail(t *testing.T) {
	for _, look := range []bool{false, true} {
		t.Run(fmt.Sprintf("read before: %t", look), func(t *testing.T) {
			bad := 0
			f := newFixture(t, "unix", 1, Config{Corrupt: func(meta.ChunkID, meta.ServerID) { bad++ }})
			g := f.grant()
			w := f.NewWriter(g)
			defer w.Close()
			data := random(4*block, 7)
			grow := func(from, to int) {
				if _, err := w.Append(t.Context(), data[from:to]); err != nil {
					t.Fatal(err)
				}
				if err := w.Sync(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			open := meta.ChunkPlace{ID: g.ID, Servers: g.Servers}
			read := func(off, n int) {
				t.Helper()
				p := make([]byte, n)
				if err := f.ReadAt(t.Context(), open, p, uint64(off)); err != nil || !bytes.Equal(p, data[off:off+n]) {
					t.Errorf("DATA: %d bytes at %d: %v", n, off, err)
				}
			}
			const end = block + block/2
			grow(0, end)
			read(0, 1000)
			if look {
				read(block, 1000)
			}
			grow(end, len(data))
			read(3*block, 1000) // learns the present length
			read(block, 1000)
			read(end, 1000)
			if bad > 0 {
				t.Errorf("%d times a good replica was said to be corrupt", bad)
			}
		})
	}
}

func (f *fixture) sealSynced(w *Writer, g meta.ChunkGrant) meta.ChunkPlace {
	f.t.Helper()
	if err := w.Sync(context.Background()); err != nil {
		f.t.Fatal(err)
	}
	return f.seal(g, w.Len())
}

// TestVerifiedRestart: a verified chunk is not verified again after both sides were
// restarted, neither by reads nor for passthrough. An unverified chunk is verified by its
// reader.
func TestVerifiedRestart(t *testing.T) {
	f := newFixture(t, "unix", 1, Config{})
	ctx := t.Context()
	g := f.grant()
	w := f.NewWriter(g)
	data := random(3_000_000, 9)
	if _, err := w.Append(ctx, data); err != nil {
		t.Fatal(err)
	}
	pl := f.sealSynced(w, g)
	w.Close()
	p := make([]byte, 4096)
	if err := f.ReadAt(ctx, pl, p, 100_000); err != nil || f.Checked() > block {
		t.Fatalf("%d bytes verified, %v", f.Checked(), err)
	}
	checked := func() uint64 { return f.servers[1].Stats().Disks[0].Checked }
	back, err := f.Backing(ctx, pl)
	if err != nil || checked() != uint64(len(data)) || f.Checked() > block {
		t.Fatalf("%d bytes verified by the server, %d by the client, %v", checked(), f.Checked(), err)
	}
	back.Close()
	if err := f.servers[1].Close(); err != nil {
		t.Fatal(err)
	}
	f.start(1, "unix")
	again := New(f.Client.cfg)
	defer again.Close()
	if back, err = again.Backing(ctx, pl); err != nil {
		t.Fatal(err)
	}
	defer back.Close()
	for off := 0; off < len(data); off += 70_000 {
		n := min(len(p), len(data)-off)
		if err := again.ReadAt(ctx, pl, p[:n], uint64(off)); err != nil || !bytes.Equal(p[:n], data[off:off+n]) {
			t.Fatalf("DATA: other bytes, or %v", err)
		}
	}
	if checked() != 0 || again.Checked() != 0 {
		t.Fatalf("%d bytes verified by the server, %d by the client", checked(), again.Checked())
	}
}

// TestSilentServer: calls to a server that accepts and then is silent fail in time, and so do
// calls to a server that is stopped in between.
func TestSilentServer(t *testing.T) {
	f := newFixture(t, "unix", 1, Config{Timeout: 400 * time.Millisecond})
	g := f.grant()
	path := filepath.Join(t.TempDir(), "sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	f.infos[2] = meta.ServerInfo{ID: 2, Addr: "unix:" + path, Host: host}
	start := time.Now()
	_, err = f.Client.Stat(t.Context(), 2, g.ID)
	if meta.KindOf(err) != meta.Unavailable || time.Since(start) > time.Minute {
		t.Fatalf("after %v: %v", time.Since(start), err)
	}
	// Greets, then falls silent.
	path3 := filepath.Join(t.TempDir(), "sock")
	ln3, err := net.Listen("unix", path3)
	if err != nil {
		t.Fatal(err)
	}
	defer ln3.Close()
	go func() {
		for {
			nc, err := ln3.Accept()
			if err != nil {
				return
			}
			c, err := wire.NewConn(nc, "")
			if err != nil {
				return
			}
			if h, _, err := c.Next(); err == nil {
				_ = c.Send((&wire.Answer{Speaks: 1, Server: 3}).AppendFrame(nil, wire.Hello, 0, h.ID, 0, 0), nil)
			}
		}
	}()
	f.infos[3] = meta.ServerInfo{ID: 3, Addr: "unix:" + path3, Host: "elsewhere"}
	start = time.Now()
	_, err = f.Client.Stat(t.Context(), 3, g.ID)
	if meta.KindOf(err) != meta.Unavailable || time.Since(start) > time.Minute {
		t.Fatalf("after %v: %v", time.Since(start), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err = f.Client.Stat(ctx, 3, g.ID); meta.KindOf(err) != meta.Canceled && meta.KindOf(err) != meta.Unavailable {
		t.Fatalf("canceled: %v", err)
	}
}

// TestCloseUnderLoneWriter: a server ends under its only writer, whose connection blocks
// a thread.
func TestCloseUnderLoneWriter(t *testing.T) {
	f := newFixture(t, "unix", 1, Config{})
	w := f.NewWriter(f.grant())
	defer w.Close()
	alone := make(chan struct{}) // closed when the writer has had the server alone for a while
	go func() {
		<-alone
		time.Sleep(20 * time.Millisecond)
		f.servers[1].Close()
	}()
	for n := 0; ; n++ {
		if n == 20 {
			close(alone)
		}
		_, err := w.Append(t.Context(), random(4096, 1))
		if err = errors.Join(err, w.Sync(t.Context())); err != nil {
			if n < 20 || meta.KindOf(err) != meta.Unavailable && meta.KindOf(err) != meta.Canceled {
				t.Fatalf("after %d: %v", n, err)
			}
			return
		}
	}
}

// TestDeletedDescriptors: the space of deleted chunks is freed even if a reader has their
// descriptors.
func TestDeletedDescriptors(t *testing.T) {
	f := newFixture(t, "unix", 1, Config{Timeout: 1200 * time.Millisecond}) // the client looks for deleted chunks a little less often than the timeout
	g := f.grant()
	w := f.NewWriter(g)
	defer w.Close()
	if _, err := w.Append(t.Context(), random(1000, 1)); err != nil {
		t.Fatal(err)
	}
	pl := f.sealSynced(w, g)
	if err := f.ReadAt(t.Context(), pl, make([]byte, 10), 0); err != nil {
		t.Fatal(err)
	}
	f.servers[1].Order(t.Context(), meta.Order{Kind: meta.OrderDelete, Chunk: g.ID, Fence: meta.Fence{Term: 9}})
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if c := f.cached(g.ID, true); c == nil {
			if err := f.ReadAt(t.Context(), pl, make([]byte, 10), 0); meta.KindOf(err) != meta.NoSuchChunk {
				t.Fatal(err)
			}
			return
		} else {
			c.unref()
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the descriptor is kept")
}
