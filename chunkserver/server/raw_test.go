package server

import (
	"bytes"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
)

// TestRawReadsInOrder: reads sent directly from the file are answered in the order of the
// requests, also failed reads; other requests do not wait for them.
func TestRawReadsInOrder(t *testing.T) {
	s, path := serveAs(t, func(s *Server) { s.rawWait = time.Hour }, newStore(t)) // however busy the machine is
	const n = 40
	const size = chunkserver.ChecksumBlock
	for i := range n {
		data := bytes.Repeat([]byte{byte(i)}, size)
		if err := s.Append(ctx, id, fence, uint64(i*size), data, chunkserver.CRC(data)); err != nil {
			t.Fatal(err)
		}
	}
	c := dial(t, path)
	greet(t, c)
	cap := token(capability.Read, fence)
	var frames []byte
	for i := range n {
		q := wire.Request{Cap: cap, Chunk: id, Off: uint64(i * size), N: size}
		if i%8 == 7 {
			q.Chunk.Counter++ // an unknown chunk, with another chunk's capability
		}
		frames = q.AppendFrame(frames, wire.Read, wire.FlagRaw, uint64(100+i), 0, 0)
	}
	frames = (&wire.Request{}).AppendFrame(frames, wire.Ping, 0, 99, 0, 0)
	if err := c.Send(frames, nil); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, size)
	ping := false
	for i := 0; i < n || !ping; {
		h, body, err := c.Next()
		if err != nil {
			t.Fatal(err)
		}
		if h.Type == wire.Ping|wire.Reply {
			ping = ping || h.ID == 99
			continue
		}
		a, err := wire.DecodeAnswer(wire.Read, h.Flags, body)
		if err != nil || h.ID != uint64(100+i) {
			t.Fatalf("answer %d has id %d, want %d: %v", i, h.ID, 100+i, err)
		}
		switch {
		case i%8 == 7:
			if a.Kind != meta.BadCapability || h.Data != 0 {
				t.Fatalf("read %d: %v with %d bytes", i, a.Kind, h.Data)
			}
		case a.Kind != meta.KindOK || int(h.Data) != size:
			t.Fatalf("read %d: %v with %d bytes", i, a.Kind, h.Data)
		default:
			if err := c.Data(got); err != nil || got[0] != byte(i) || chunkserver.CRC(got) != a.CRCs[0] {
				t.Fatalf("read %d: wrong bytes, or %v", i, err)
			}
		}
		i++
	}
}

// hangingDisk is a disk on which, once it hangs, opening a file waits.
type hangingDisk struct {
	store.Disk
	hangs atomic.Bool
	until chan struct{}
}

func (d *hangingDisk) OpenRead(name string) (store.File, error) {
	if d.hangs.Load() {
		<-d.until
	}
	return d.Disk.OpenRead(name)
}

// TestRawReadsBesideHangingDisk: a hanging disk delays reads from this disk, and nothing
// else of the connection.
func TestRawReadsBesideHangingDisk(t *testing.T) {
	bad := &hangingDisk{Disk: store.DirDisk(t.TempDir()), until: make(chan struct{})}
	if err := store.Init(bad, store.Options{SegmentSize: 1 << 20, Segments: 4}); err != nil {
		t.Fatal(err)
	}
	open := func() *store.Store {
		st, err := store.Open(bad, store.Options{Logger: quiet, Reserve: 1})
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	stores := []*store.Store{open(), newStore(t)}
	ids := []meta.ChunkID{id, id}
	ids[1].Counter++
	const size = chunkserver.ChecksumBlock
	for i, st := range stores {
		data := bytes.Repeat([]byte{byte(i)}, size)
		if err := st.Append(ctx, ids[i], fence, 0, data, chunkserver.CRC(data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := stores[0].Close(); err != nil {
		t.Fatal(err)
	}
	stores[0] = open() // and has no file open
	s, path := serve(t, stores...)
	for _, id := range ids {
		if _, err := s.Stat(ctx, id); err != nil { // the server knows the chunk's disk
			t.Fatal(err)
		}
	}
	bad.hangs.Store(true)
	release := sync.OnceFunc(func() { close(bad.until) })
	t.Cleanup(release)
	c := dial(t, path)
	_ = c.NetConn().SetDeadline(time.Now().Add(60 * time.Second))
	greet(t, c)
	cap := capability.Sign(key, capability.Claims{Volume: 1, Rights: capability.Read, Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
	var frames []byte
	for i, on := range []int{0, 1, 0, 1} {
		q := wire.Request{Cap: cap, Chunk: ids[on], N: size}
		frames = q.AppendFrame(frames, wire.Read, wire.FlagRaw, uint64(100+i), 0, 0)
	}
	if err := c.Send(frames, nil); err != nil {
		t.Fatal(err)
	}
	next := func() uint64 {
		t.Helper()
		for {
			h, body, err := c.Next()
			if err != nil {
				t.Fatal(err)
			}
			if h.Type == wire.Ping|wire.Reply {
				continue
			}
			a, err := wire.DecodeAnswer(wire.Read, h.Flags, body)
			got := make([]byte, size)
			if err != nil || a.Kind != meta.KindOK || h.Data != size || c.Data(got) != nil || got[0] != byte(h.ID%2) || chunkserver.CRC(got) != a.CRCs[0] {
				t.Fatalf("read %d: %v, %v, %d bytes", h.ID, err, a, h.Data)
			}
			return h.ID
		}
	}
	for _, want := range []uint64{101, 103} {
		if n := next(); n != want {
			t.Fatalf("answer %d comes, not %d", n, want)
		}
	}
	release()
	if a, b := next(), next(); a+b != 100+102 {
		t.Fatalf("answers %d and %d come from the disk that hung", a, b)
	}
}
