package server

import (
	"bytes"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
)

// Reads that are sent from the file are answered in the order in which they were
// asked for, those that fail too; what is beside them is not kept waiting for good.
func TestRawReadsInOrder(t *testing.T) {
	s, path := newServer(t, 1)
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
			q.Chunk.Counter++ // nobody knows that chunk, and the capability is of another
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
