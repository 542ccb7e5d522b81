package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
)

var (
	ctx   = context.Background()
	quiet = slog.New(slog.NewTextHandler(io.Discard, nil))
	key   = meta.CapKey{ID: 1, Secret: bytes.Repeat([]byte{3}, 32)}
	id    = meta.ChunkID{Volume: 1, Term: 1, Counter: 1}
	fence = meta.Fence{Term: 1}
)

func newStore(t testing.TB) *store.Store {
	t.Helper()
	dir := t.TempDir()
	if err := store.Init(store.DirDisk(dir), store.Options{SegmentSize: 1 << 20, Segments: 4}); err != nil {
		t.Fatal(err)
	}
	st, err := store.Open(store.DirDisk(dir), store.Options{Logger: quiet, Reserve: 1})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func newServer(t testing.TB, disks int) (*Server, string) {
	t.Helper()
	var stores []*store.Store
	for range disks {
		stores = append(stores, newStore(t))
	}
	return serve(t, stores...)
}

func serve(t testing.TB, stores ...*store.Store) (*Server, string) {
	t.Helper()
	return serveAs(t, func(*Server) {}, stores...)
}

// serveAs is serve for a server that adjust changes before.
func serveAs(t testing.TB, adjust func(*Server), stores ...*store.Store) (*Server, string) {
	t.Helper()
	s := New(Config{ID: 7, Host: "h", Keys: []meta.CapKey{key}, Logger: quiet}, stores...)
	adjust(s)
	path := filepath.Join(t.TempDir(), "sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, ln) }()
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), <-served); err != nil {
			t.Error(err)
		}
	})
	return s, path
}

func dial(t testing.TB, path string) *wire.Conn {
	t.Helper()
	nc, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	_ = nc.SetDeadline(time.Now().Add(time.Minute))
	c, err := wire.NewConn(nc, "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func greet(t testing.TB, c *wire.Conn) {
	t.Helper()
	a := ask(t, c, wire.Hello, 0, &wire.Request{Speaks: 9, Name: "test"}, nil)
	if a.Kind != meta.KindOK || a.Speaks != wire.Version || a.Server != 7 || a.Host != "h" {
		t.Fatalf("hello: %+v", a)
	}
}

func ask(t testing.TB, c *wire.Conn, typ wire.Type, flags uint16, q *wire.Request, data []byte) wire.Answer {
	t.Helper()
	if err := c.Send(q.AppendFrame(nil, typ, flags, 5, len(data), chunkserver.CRC(data)), data); err != nil {
		t.Fatal(err)
	}
	h, body, err := c.Next()
	for err == nil && h.Type == wire.Ping|wire.Reply && h.ID == 0 {
		h, body, err = c.Next() // a sign of life, while something takes long
	}
	if err != nil {
		t.Fatal(err)
	}
	a, err := wire.DecodeAnswer(h.Type&^wire.Reply, h.Flags, body)
	if err != nil || h.ID != 5 || h.Type != typ|wire.Reply {
		t.Fatalf("answer %+v: %v", h, err)
	}
	if err := c.Skip(int(h.Data)); err != nil {
		t.Fatal(err)
	}
	return a
}

func token(r capability.Rights, f meta.Fence) []byte {
	return capability.Sign(key, capability.Claims{Volume: 1, Chunk: id, Rights: r, Fence: f, Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
}

// ended asserts that the server closes the connection.
func ended(t *testing.T, c *wire.Conn) {
	t.Helper()
	for {
		h, _, err := c.Next()
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Skip(int(h.Data)); err != nil {
			t.Fatal(err)
		}
	}
}

// A peer of another version is told so in words before the connection ends.
func TestVersion(t *testing.T) {
	_, path := newServer(t, 1)
	c := dial(t, path)
	b := (&wire.Request{}).AppendFrame(nil, wire.Hello, 0, 1, 0, 0)
	b[4] = wire.Version + 1
	if err := c.Send(b, nil); err != nil {
		t.Fatal(err)
	}
	h, body, err := c.Next()
	if err != nil {
		t.Fatal(err)
	}
	if a, err := wire.DecodeAnswer(wire.Hello, h.Flags, body); err != nil || a.Kind != meta.Version || a.Detail == "" {
		t.Fatalf("%+v, %v", a, err)
	}
	ended(t, c)
}

// TestGarbage: bytes outside the protocol end the connection, and nothing else.
func TestGarbage(t *testing.T) {
	_, path := newServer(t, 1)
	bad := map[string][]byte{
		"noise":    bytes.Repeat([]byte("GET / HTTP/1.1\r\n"), 10),
		"no hello": (&wire.Request{}).AppendFrame(nil, wire.Ping, 0, 1, 0, 0),
	}
	flipped := (&wire.Request{}).AppendFrame(nil, wire.Hello, 0, 1, 0, 0)
	flipped[20] ^= 0x80
	bad["flipped"] = flipped
	for name, b := range bad {
		t.Run(name, func(t *testing.T) {
			c := dial(t, path)
			if err := c.Send(b, nil); err != nil {
				t.Fatal(err)
			}
			ended(t, c)
		})
	}
	greet(t, dial(t, path))
}

// Bytes of strangers are not even stored in memory, and the connection goes on.
func TestStranger(t *testing.T) {
	s, path := newServer(t, 1)
	c := dial(t, path)
	greet(t, c)
	data := make([]byte, chunkserver.MaxAppend)
	for range 3 {
		if a := ask(t, c, wire.Append, 0, &wire.Request{Cap: []byte("let me in"), Chunk: id, Fence: fence}, data); a.Kind != meta.BadCapability {
			t.Fatalf("append: %+v", a)
		}
	}
	for _, typ := range []wire.Type{wire.Sync, wire.Read, wire.Stat, wire.Seal, wire.Delete, wire.Local} {
		if a := ask(t, c, typ, 0, &wire.Request{Cap: []byte("let me in"), Chunk: id, N: 1}, nil); a.Kind != meta.BadCapability {
			t.Errorf("type %d: %+v", typ, a)
		}
	}
	s.mu.Lock()
	var served *conn
	for k := range s.conns {
		served = k
	}
	s.mu.Unlock()
	c.Close()
	for ended := false; !ended; time.Sleep(time.Millisecond) {
		s.mu.Lock()
		ended = len(s.conns) == 0
		s.mu.Unlock()
	}
	if cap(served.data) != 0 {
		t.Errorf("%d bytes were allocated", cap(served.data))
	}
	c = dial(t, path)
	greet(t, c)
	if a := ask(t, c, wire.Append, 0, &wire.Request{Cap: token(capability.Append, fence), Chunk: id, Fence: fence}, data); a.Kind != meta.KindOK {
		t.Fatalf("append: %+v", a)
	}
	if a := ask(t, c, wire.Sync, 0, &wire.Request{Cap: token(capability.Append, fence), Chunk: id, Off: 10}, nil); a.Kind != meta.KindOK || a.Synced != 10 {
		t.Fatalf("sync: %+v", a)
	}
}

// TestShareAbuse: the server checks the ring of shared memory before using the ring.
func TestShareAbuse(t *testing.T) {
	_, path := newServer(t, 1)
	share := func(t *testing.T, seal bool, size uint64) (*wire.Conn, wire.Answer) {
		fd, err := unix.MemfdCreate("x", unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Ftruncate(fd, 1<<20); err != nil {
			t.Fatal(err)
		}
		if seal {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK); err != nil {
				t.Fatal(err)
			}
		}
		c := dial(t, path)
		greet(t, c)
		if err := c.SendDescriptor((&wire.Request{Off: size}).AppendFrame(nil, wire.Share, 0, 2, 0, 0), nil, fd); err != nil {
			t.Fatal(err)
		}
		h, body, err := c.Next()
		if err != nil {
			t.Fatal(err)
		}
		a, err := wire.DecodeAnswer(wire.Share, h.Flags, body)
		if err != nil {
			t.Fatal(err)
		}
		return c, a
	}
	if _, a := share(t, false, 1<<20); a.Kind != meta.Invalid {
		t.Errorf("memory that may shrink: %+v", a)
	}
	if _, a := share(t, true, 2<<20); a.Kind != meta.Invalid {
		t.Errorf("more than the file holds: %+v", a)
	}
	if _, a := share(t, true, 1<<40); a.Kind != meta.Invalid {
		t.Errorf("too much: %+v", a)
	}
	c, a := share(t, true, 1<<20)
	if a.Kind != meta.KindOK {
		t.Fatalf("share: %+v", a)
	}
	good := wire.Request{Cap: token(capability.Append, fence), Chunk: id, Fence: fence, Pos: 100, N: 1000, CRC: chunkserver.CRC(make([]byte, 1000))}
	if a := ask(t, c, wire.Append, wire.FlagShared, &good, nil); a.Kind != meta.KindOK {
		t.Fatalf("append: %+v", a)
	}
	for _, pos := range []uint64{1<<20 - 999, 1 << 40, ^uint64(0) - 10} {
		c, _ := share(t, true, 1<<20)
		bad := good
		bad.Pos = pos
		if err := c.Send(bad.AppendFrame(nil, wire.Append, wire.FlagShared, 3, 0, 0), nil); err != nil {
			t.Fatal(err)
		}
		ended(t, c)
	}
}

// Owners' orders: freeze, seal, stat, delete, new keys.
func TestOrders(t *testing.T) {
	s, path := newServer(t, 3)
	c := dial(t, path)
	greet(t, c)
	data := []byte("some bytes")
	app := func(f meta.Fence, off uint64) meta.Kind {
		return ask(t, c, wire.Append, 0, &wire.Request{Cap: token(capability.Append, f), Chunk: id, Fence: f, Off: off}, data).Kind
	}
	if k := app(fence, 0); k != meta.KindOK {
		t.Fatal(k)
	}
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderStat, Chunk: id}); r.Err != 0 || !r.Existing || r.Length != 10 || r.State != meta.ChunkOpen {
		t.Fatalf("stat: %+v", r)
	}
	f2 := meta.Fence{Term: 1, Seals: 1}
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: f2}); r.Err != 0 || r.Length != 10 || r.Fence != f2 {
		t.Fatalf("freeze: %+v", r)
	}
	if k := app(fence, 10); k != meta.Fenced {
		t.Fatal(k)
	}
	r := s.Order(ctx, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: f2, Final: true, Length: 4})
	if r.Err != 0 || r.Length != 4 || r.Synced != 4 || r.State != meta.ChunkSealed || r.CRC != chunkserver.SealCRC([]uint32{chunkserver.CRC(data[:4])}) {
		t.Fatalf("seal: %+v", r)
	}
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: fence, Final: true, Length: 5}); r.Err != meta.Sealed {
		t.Fatalf("seal elsewhere: %+v", r)
	}
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderDelete, Chunk: id, Fence: f2}); r.Err != 0 {
		t.Fatalf("delete: %+v", r)
	}
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderStat, Chunk: id}); r.Err != meta.NoSuchChunk || r.Existing {
		t.Fatalf("stat: %+v", r)
	}
	if k := app(f2, 0); k != meta.NoSuchChunk {
		t.Fatalf("append to a deleted chunk: %v", k)
	}
	if r := s.Order(ctx, meta.Order{Kind: meta.OrderKeys, Keys: []meta.CapKey{{ID: 2, Secret: key.Secret}}}); r.Err != 0 {
		t.Fatal(r)
	}
	if k := app(f2, 0); k != meta.BadCapability {
		t.Fatalf("capability of a key that is gone: %v", k)
	}
	if r := s.Order(ctx, meta.Order{Kind: 99}); r.Err != meta.NotSupported {
		t.Fatal(r)
	}
	if i := s.Info(); i.ID != 7 || i.Total == 0 || i.Free == 0 {
		t.Fatalf("%+v", i)
	}
}

func FuzzServer(f *testing.F) {
	f.Add((&wire.Request{}).AppendFrame(nil, wire.Ping, 0, 1, 0, 0))
	f.Add((&wire.Request{Cap: token(capability.Read, fence), Chunk: id, N: 100}).AppendFrame(nil, wire.Read, wire.FlagRaw, 1, 0, 0))
	_, path := newServer(f, 1)
	f.Fuzz(func(t *testing.T, b []byte) {
		c := dial(t, path)
		greet(t, c)
		if len(b) >= wire.HeaderSize {
			// A right header, so that the code behind it is reached.
			h := wire.Header{Type: wire.Type(b[5] % 12), Flags: uint16(b[7]), ID: 1, Body: uint32(len(b) - wire.HeaderSize), BodyCRC: chunkserver.CRC(b[wire.HeaderSize:])}
			if h.Body <= wire.MaxBody {
				h.Put(b)
			}
		}
		_ = c.Send(b, nil)
		c.Close()
	})
}

// TestCopyOrder copies ranges of one chunk into another; the order may be repeated.
func TestCopyOrder(t *testing.T) {
	s, _ := newServer(t, 1)
	data := bytes.Repeat([]byte("0123456789"), 300_000)
	for off := 0; off < len(data); off += 1_000_000 {
		p := data[off : off+1_000_000]
		if err := s.Append(ctx, id, fence, uint64(off), p, chunkserver.CRC(p)); err != nil {
			t.Fatal(err)
		}
	}
	to := meta.ChunkID{Volume: 1, Term: 1, Counter: 2}
	o := meta.Order{Kind: meta.OrderCopy, From: id, Chunk: to, Fence: fence, Ranges: []meta.CopyRun{{Off: 5, Len: 2_500_000}, {Off: 3, Len: 4}}}
	want := append(bytes.Clone(data[5:2_500_005]), data[3:7]...)
	for range 2 {
		if r := s.Order(ctx, o); r.Err != meta.KindOK || r.Length != uint64(len(want)) || r.Synced != r.Length {
			t.Fatalf("copy: %+v", r)
		}
	}
	got := make([]byte, len(want))
	if err := s.Read(ctx, to, got, 0); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("DATA: the copy is another: %v", err)
	}
}
