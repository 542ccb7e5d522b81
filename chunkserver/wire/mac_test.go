package wire

import (
	"bytes"
	"net"
	"os"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// sockets gives both ends of a TCP connection.
func sockets(t testing.TB) (a, b *Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	out, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	in, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	for i, nc := range []net.Conn{out, in} {
		c, err := NewConn(nc, "")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if i == 0 {
			a = c
		} else {
			b = c
		}
	}
	return a, b
}

// Frames of every way of sending pass between two ends that share a secret, and no other frame
// passes.
func TestProtect(t *testing.T) {
	a, b := sockets(t)
	a.Protect([]byte("secret"), []byte("x"), []byte("y"))
	b.Protect([]byte("secret"), []byte("x"), []byte("y"))
	data := bytes.Repeat([]byte("z"), 1000)
	frame := func(id uint64, n int) []byte {
		return requests[1].q.AppendFrame(nil, Append, 0, id, n, chunkserver.CRC(data[:n]))
	}
	path := t.TempDir() + "/f"
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	a.Queue(frame(1, 0))
	for _, err := range []error{a.SendSoon(frame(2, 1000), data), a.Flush(), a.Send(frame(3, 0), nil), a.Send(frame(4, 1000), data), a.SendFile(frame(5, 1000), int(f.Fd()), 0, 1000)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for id := uint64(1); id <= 5; id++ {
		h, body, err := b.Next()
		if err != nil || h.ID != id {
			t.Fatalf("frame %d: %+v, %v", id, h, err)
		}
		if _, err := DecodeRequest(h.Type, h.Flags, body); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, h.Data)
		if err := b.Data(got); err != nil || !bytes.Equal(got, data[:h.Data]) {
			t.Fatal(err)
		}
	}
}

func TestForgedFrames(t *testing.T) {
	good := requests[5].q.AppendFrame(nil, Stat, 0, 1, 0, 0)
	whole := func(secret, mine, theirs string) []byte {
		a, _ := sockets(t)
		a.Protect([]byte(secret), []byte(mine), []byte(theirs))
		return a.macs.seal(nil, good)
	}
	flipped := whole("secret", "x", "y")
	flipped[HeaderSize+3] ^= 1
	h, _ := ParseHeader(flipped)
	h.BodyCRC = chunkserver.CRC(flipped[HeaderSize:])
	h.Put(flipped)
	otherID := whole("secret", "x", "y")
	h, _ = ParseHeader(otherID)
	h.ID++
	h.Put(otherID)
	short := (&Request{}).AppendFrame(nil, Ping, 0, 1, 0, 0)
	for name, b := range map[string][]byte{
		"no MAC":               good,
		"no room for one":      short,
		"another secret":       whole("guess", "x", "y"),
		"another connection's": whole("secret", "x", "z"),
		"another body":         flipped,
		"another request id":   otherID,
	} {
		in, out := sockets(t)
		out.Protect([]byte("secret"), []byte("x"), []byte("y"))
		if _, err := in.nc.Write(b); err != nil {
			t.Fatal(err)
		}
		if _, _, err := out.Next(); meta.KindOf(err) != meta.AccessDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
	// The control: the same frame, made by a sender with the secret.
	in, out := sockets(t)
	out.Protect([]byte("secret"), []byte("x"), []byte("y"))
	in.nc.Write(whole("secret", "x", "y"))
	if _, _, err := out.Next(); err != nil {
		t.Fatal(err)
	}
}

func BenchmarkSeal(b *testing.B) {
	a, _ := sockets(b)
	a.Protect([]byte("secret"), []byte("x"), []byte("y"))
	frame := requests[1].q.AppendFrame(nil, Append, 0, 1, 0, 0)
	buf := make([]byte, 0, 1024)
	for b.Loop() {
		buf = a.macs.seal(buf[:0], frame)
	}
}
