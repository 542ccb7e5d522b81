package kafka

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
)

// newServer makes a server without streams.
func newServer(t testing.TB, limits Limits) *Server {
	s := New(Config{
		Host: func(context.Context) (*stream.Host, error) {
			return nil, meta.E("connect", meta.Unavailable, "test", errors.New("there is no cluster"))
		},
		Cluster: "test", Logger: slog.New(slog.DiscardHandler), Limits: limits,
	})
	t.Cleanup(s.Close)
	return s
}

// frameOf encodes a request.
func frameOf(q kmsg.Request, correlation int32) []byte {
	return kmsg.NewRequestFormatter(kmsg.FormatterClientID("test")).AppendRequest(nil, q, correlation)
}

// requests has every known request, in every known version.
func requests() (all []kmsg.Request) {
	for key, k := range keys {
		for v := k.min; v <= k.max; v++ {
			q := kmsg.RequestForKey(key)
			q.SetVersion(v)
			all = append(all, q)
		}
	}
	return all
}

// TestVersions: every request of every version that ApiVersions names is decoded and answered
// in its version.
func TestVersions(t *testing.T) {
	s := newServer(t, Limits{})
	k := newConnection(s, &fakeConn{})
	for _, q := range requests() {
		r := &request{ctx: t.Context(), conn: k}
		if err := s.begin(r, frameOf(q, 7)[4:]); err != nil {
			t.Errorf("request %d, version %d: %v", q.Key(), q.GetVersion(), err)
			continue
		}
		p := r.answer()
		if q, ok := q.(*kmsg.ProduceRequest); ok && q.Acks == 0 {
			if p != nil {
				t.Error("acks=0 was answered")
			}
			continue
		}
		b := appendResponse(nil, 7, p)
		again := q.ResponseKind()
		again.SetVersion(q.GetVersion())
		body := b[8:]
		if q.IsFlexible() && q.Key() != apiVersionsKey {
			body = body[1:]
		}
		if err := again.ReadFrom(body); err != nil {
			t.Errorf("the response to request %d, version %d: %v", q.Key(), q.GetVersion(), err)
		}
	}
}

// fakeConn is the address of a connection.
type fakeConn struct{ net.Conn }

func (fakeConn) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 9092} }
func (fakeConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1} }

// dial serves a connection and returns the client's end.
func dial(t *testing.T, s *Server) net.Conn {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Close()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(90 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c
}

// TestBadFrames: a frame that is no known request ends the connection, and nothing else.
func TestBadFrames(t *testing.T) {
	size := func(n uint32, rest ...byte) []byte { return append(binary.BigEndian.AppendUint32(nil, n), rest...) }
	tooNew := kmsg.NewPtrFetchRequest()
	tooNew.Version = 14
	old := kmsg.NewPtrProduceRequest()
	old.Version = 2
	unknown := frameOf(kmsg.NewPtrApiVersionsRequest(), 1)
	binary.BigEndian.PutUint16(unknown[4:], 999)
	cut := frameOf(kmsg.NewPtrJoinGroupRequest(), 1)
	cut = append(size(uint32(len(cut)-4-3)), cut[4:len(cut)-3]...)
	for name, frame := range map[string][]byte{
		"negative length":          size(0xffffffff, 0, 0),
		"short length":             size(3, 0, 0, 0),
		"too long":                 size(1<<30, 0, 0),
		"too long for its key":     size(2<<20, 0, 3),
		"unknown key":              unknown,
		"unknown version":          frameOf(tooNew, 1),
		"version that is too old":  frameOf(old, 1),
		"cut body":                 cut,
		"HTTP":                     []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
		"nothing after the length": size(100, 0, 3),
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(t, Limits{Transfer: 2 * time.Second})
			c := dial(t, s)
			if _, err := c.Write(frame); err != nil {
				t.Fatal(err)
			}
			if b, err := io.ReadAll(c); len(b) > 0 {
				t.Errorf("the answer is %q, %v", b, err)
			}
			if !s.memory.TryAcquire(s.cfg.Limits.Memory) {
				t.Error("memory was not given back")
			}
		})
	}
}

// TestNewApiVersions: an unknown version of ApiVersions is answered with version 0, and the
// connection goes on.
func TestNewApiVersions(t *testing.T) {
	s := newServer(t, Limits{})
	c := dial(t, s)
	q := kmsg.NewPtrApiVersionsRequest()
	for i, v := range []int16{99, 0, 3} {
		q.Version = min(v, 3)
		frame := frameOf(q, int32(i))
		binary.BigEndian.PutUint16(frame[6:], uint16(v))
		if _, err := c.Write(frame); err != nil {
			t.Fatal(err)
		}
		var head [8]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			t.Fatal(err)
		}
		body := make([]byte, binary.BigEndian.Uint32(head[:])-4)
		if _, err := io.ReadFull(c, body); err != nil {
			t.Fatal(err)
		}
		p := kmsg.NewPtrApiVersionsResponse()
		p.Version = v
		if v > 3 {
			p.Version = 0
		}
		if err := p.ReadFrom(body); err != nil {
			t.Fatal(err)
		}
		if want := int16(35); (v > 3) != (p.ErrorCode == want) || len(p.ApiKeys) != len(keys) || binary.BigEndian.Uint32(head[4:]) != uint32(i) {
			t.Errorf("version %d: %+v", v, p)
		}
	}
}

// TestBoundProduce: a Produce request with very many partitions is refused before decoding.
func TestBoundProduce(t *testing.T) {
	for v := int16(3); v <= 9; v++ {
		for _, n := range []int{10, maxProduce + 1} {
			q := kmsg.NewPtrProduceRequest()
			q.Version = v
			topic := kmsg.NewProduceRequestTopic()
			topic.Topic, topic.Partitions = "v.clicks", make([]kmsg.ProduceRequestTopicPartition, n)
			q.Topics = append(q.Topics, topic)
			_, rest, err := parseHeader(frameOf(q, 1)[4:])
			if err != nil {
				t.Fatal(err)
			}
			if _, err := parseBody(header{key: 0, version: v}, rest); (err != nil) != (n > maxProduce) {
				t.Errorf("version %d, %d partitions: %v", v, n, err)
			}
		}
	}
}

// FuzzFrame reads frames and begins their requests.
func FuzzFrame(f *testing.F) {
	for _, q := range requests() {
		f.Add(frameOf(q, 1))
	}
	s := newServer(f, Limits{})
	k := newConnection(s, &fakeConn{})
	ended, cancel := context.WithCancel(context.Background())
	cancel() // nothing waits
	f.Fuzz(func(t *testing.T, b []byte) {
		r := bytes.NewReader(b)
		for {
			frame, err := readFrame(r, func(_ int16, size int) error {
				if size > 1<<20 {
					return errFrame
				}
				return nil
			})
			if err != nil {
				return
			}
			q := &request{ctx: ended, conn: k}
			if err := s.begin(q, frame); err != nil {
				return
			}
			if p := q.answer(); p != nil {
				appendResponse(nil, q.correlation, p)
			}
			q.release()
		}
	})
}
