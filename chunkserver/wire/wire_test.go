package wire

import (
	"bytes"
	"encoding/hex"
	"os"
	"reflect"
	"strings"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

var (
	id    = meta.ChunkID{Volume: 1, Term: 2, Counter: 3}
	fence = meta.Fence{Term: 4, Seals: 5}
	info  = chunkserver.Info{ID: id, State: meta.ChunkSealed, Length: 6, Synced: 5, Fence: fence, CRC: 7}
)

var requests = []struct {
	t     Type
	flags uint16
	q     Request
}{
	{Hello, 0, Request{Cap: []byte{}, Speaks: 1, Name: "me"}},
	{Append, 0, Request{Cap: []byte("cap"), Chunk: id, Fence: fence, Off: 9}},
	{Append, FlagShared, Request{Cap: []byte("cap"), Chunk: id, Fence: fence, Off: 9, Pos: 1, N: 2, CRC: 3}},
	{Sync, 0, Request{Cap: []byte("cap"), Chunk: id, Off: 9}},
	{Read, FlagRaw, Request{Cap: []byte("cap"), Chunk: id, Off: 9, N: 8}},
	{Stat, 0, Request{Cap: []byte("cap"), Chunk: id}},
	{Seal, 0, Request{Cap: []byte("cap"), Chunk: id, Fence: fence, Off: 9, Final: true}},
	{Delete, 0, Request{Cap: []byte("cap"), Chunk: id, Fence: fence}},
	{Local, FlagVerify, Request{Cap: []byte("cap"), Chunk: id, N: MaxLocal}},
	{Local, FlagDescriptor, Request{Cap: []byte("cap"), Chunk: id, Off: 9, N: 8}},
	{Ping, 0, Request{Cap: []byte{}}},
	{Share, 0, Request{Cap: []byte{}, Off: 1 << 20}},
	{Ticket, 0, Request{Cap: []byte{}}},
}

var answers = []struct {
	t     Type
	flags uint16
	a     Answer
}{
	{Hello, 0, Answer{Speaks: 1, Server: 2, Host: "h"}},
	{Append, 0, Answer{Kind: meta.Fenced, Detail: "no"}},
	{Append, 0, Answer{}},
	{Sync, 0, Answer{Synced: 9}},
	{Read, FlagRaw, Answer{CRCs: []uint32{1, 2}}},
	{Read, 0, Answer{}},
	{Stat, 0, Answer{Info: info}},
	{Seal, 0, Answer{Kind: meta.Sealed, Info: info}},
	{Local, 0, Answer{Info: info, First: 4, Time: 5}},
	{Local, 0, Answer{Info: info, Time: -1}},
	{Delete, 0, Answer{}},
	{Hello, FlagTicket, Answer{Speaks: 1, Server: 2, Host: "h", Ticket: []byte("random")}},
	{Ticket, 0, Answer{Ticket: []byte("ticket"), Secret: []byte("secret"), TTL: 9}},
}

func TestRoundTrip(t *testing.T) {
	for _, c := range requests {
		b := c.q.AppendFrame([]byte("x"), c.t, c.flags, 77, 5, 6)[1:]
		h, err := ParseHeader(b)
		if err != nil || h.Type != c.t || h.ID != 77 || h.Data != 5 || h.DataCRC != 6 || int(h.Body) != len(b)-HeaderSize {
			t.Fatalf("type %d: %+v, %v", c.t, h, err)
		}
		if err := h.CheckBody(b[HeaderSize:]); err != nil {
			t.Fatal(err)
		}
		if q, err := DecodeRequest(h.Type, h.Flags, b[HeaderSize:]); err != nil || !reflect.DeepEqual(q, c.q) {
			t.Fatalf("type %d: %+v, %v", c.t, q, err)
		}
	}
	for _, c := range answers {
		b := c.a.AppendFrame(nil, c.t, c.flags, 77, 0, 0)
		h, err := ParseHeader(b)
		if err != nil || h.Type != c.t|Reply {
			t.Fatalf("type %d: %+v, %v", c.t, h, err)
		}
		if a, err := DecodeAnswer(c.t, h.Flags, b[HeaderSize:]); err != nil || !reflect.DeepEqual(a, c.a) {
			t.Fatalf("type %d: %+v, %v", c.t, a, err)
		}
	}
}

// A frame made by a program of version 1 is read, and made again byte by byte: an old program
// understands exactly those bytes.
func TestFramesOfOldPrograms(t *testing.T) {
	b, err := os.ReadFile("testdata/frames-v1")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[Type]bool{}
	for line := range strings.Lines(string(b)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		frame, err := hex.DecodeString(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		h, err := ParseHeader(frame)
		if err != nil || h.CheckBody(frame[HeaderSize:]) != nil {
			t.Fatalf("%x: %v", frame, err)
		}
		seen[h.Type] = true
		var again []byte
		if typ := h.Type &^ Reply; typ == h.Type {
			q, qerr := DecodeRequest(typ, h.Flags, frame[HeaderSize:])
			again, err = q.AppendFrame(nil, typ, h.Flags, h.ID, int(h.Data), h.DataCRC), qerr
		} else {
			a, aerr := DecodeAnswer(typ, h.Flags, frame[HeaderSize:])
			again, err = a.AppendFrame(nil, typ, h.Flags, h.ID, int(h.Data), h.DataCRC), aerr
		}
		if err != nil || !bytes.Equal(again, frame) {
			t.Errorf("an old program would not understand %x (%v), it says %x", again, err, frame)
		}
	}
	for typ := Hello; typ < lastType; typ++ {
		if !seen[typ] {
			t.Errorf("no request of type %d", typ)
		}
	}
}

// Any flipped bit in a header or body is noticed.
func TestFlips(t *testing.T) {
	good := requests[1].q.AppendFrame(nil, Append, 0, 1, 0, 0)
	for i := range len(good) * 8 {
		b := bytes.Clone(good)
		b[i/8] ^= 1 << (i % 8)
		h, err := ParseHeader(b)
		if err == nil {
			err = h.CheckBody(b[HeaderSize:])
		}
		if k := meta.KindOf(err); k != meta.Protocol && k != meta.Version {
			t.Fatalf("bit %d: %v", i, err)
		}
	}
}

func FuzzFrame(f *testing.F) {
	for _, c := range requests {
		f.Add(c.q.AppendFrame(nil, c.t, c.flags, 1, 0, 0))
	}
	for _, c := range answers {
		f.Add(c.a.AppendFrame(nil, c.t, c.flags, 1, 0, 0))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < HeaderSize {
			return
		}
		h, err := ParseHeader(b)
		if err != nil {
			// Decode the body as any type all the same.
			h = Header{Type: Type(b[5]), Flags: uint16(b[7])}
		}
		body := b[HeaderSize:]
		if q, err := DecodeRequest(h.Type, h.Flags, body); err == nil {
			again := q.AppendFrame(nil, h.Type, h.Flags, 1, 0, 0)
			if h.Type != Seal && !bytes.Equal(again[HeaderSize:], body) {
				t.Fatalf("type %d decodes %x, encodes %x", h.Type, body, again[HeaderSize:])
			}
		}
		_, _ = DecodeAnswer(h.Type&^Reply, h.Flags, body)
	})
}

// A reply that does not fit becomes an error that says so, also on a ticketed connection, where
// the proof needs room.
func TestRepliesAreBounded(t *testing.T) {
	for _, c := range []struct {
		n    int
		kind meta.Kind
	}{{1, 0}, {maxBody - 16, 0}, {maxBody - 15, meta.ResourceExceeded}, {1 << 16, meta.ResourceExceeded}, {1 << 20, meta.ResourceExceeded}} {
		a := Answer{Speaks: 1, Server: 2, Host: strings.Repeat("h", c.n)}
		b := a.AppendFrame([]byte("before"), Hello, 0, 7, 0, 0)[len("before"):]
		h, err := ParseHeader(b)
		if err == nil {
			err = h.CheckBody(b[HeaderSize:])
		}
		if err != nil || h.ID != 7 || h.Type != Hello|Reply || int(h.Body) > MaxBody-MACSize {
			t.Fatalf("%+v %v", h, err)
		}
		got, err := DecodeAnswer(Hello, 0, b[HeaderSize:])
		if err != nil || got.Kind != c.kind || c.kind == 0 && got.Host != a.Host {
			t.Errorf("%d bytes: kind %v, %v", c.n, got.Kind, err)
		}
	}
}
