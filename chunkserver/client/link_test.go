package client

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// line is a link; the test plays the far end.
type line struct {
	t *testing.T
	*link
	far net.Conn
}

func newLine(t *testing.T) *line {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	near, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	far, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	w, err := wire.NewConn(near, "")
	if err != nil {
		t.Fatal(err)
	}
	c := New(Config{Logger: quiet, Timeout: time.Hour})
	c.held = time.Hour // nothing goes on because time passes
	l := &link{Conn: w, p: c.peer(1), pending: map[uint64]*call{}, hurry: make(chan struct{}, 1)}
	ended := make(chan struct{})
	go func() { l.read(); close(ended) }()
	t.Cleanup(func() {
		far.Close()
		l.fail(net.ErrClosed)
		<-ended
		c.Close()
	})
	return &line{t, l, far}
}

// ahead requests n bytes, which may wait in the socket, and returns the channel with the call's
// end.
func (l *line) ahead(n int) (*call, uint64, chan error) {
	l.t.Helper()
	done := make(chan error, 1)
	buf := make([]byte, n)
	k := &call{t: wire.Read, hold: true, turn: make(chan struct{}, 1), place: func() []byte { return buf },
		notify: func(_ *wire.Answer, err error) { done <- err }}
	id, err := l.start(k)
	if err != nil {
		l.t.Fatal(err)
	}
	return k, id, done
}

func (l *line) write(b []byte) {
	l.t.Helper()
	if _, err := l.far.Write(b); err != nil {
		l.t.Fatal(err)
	}
}

// bytesFor is an answer with data.
func bytesFor(id uint64, p []byte) []byte {
	return append((&wire.Answer{}).AppendFrame(nil, wire.Read, 0, id, len(p), chunkserver.CRC(p)), p...)
}

func (l *line) until(what string, ok func() bool) {
	l.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); !ok(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			l.t.Fatal("not in time: " + what)
		}
	}
}

// holds waits until the answer to a call is held.
func (l *line) holds(k *call) {
	l.t.Helper()
	l.until("an answer is held", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.held != nil && l.held.k == k && !l.taken
	})
}

func (l *line) gets(what string, done chan error) error {
	l.t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(60 * time.Second):
		l.t.Fatal(what + ": nobody hears of its end")
		return nil
	}
}

// TestLastAnswerStalls: an answer that stops in the middle counts as silence, also if no
// other answer is awaited; an answer with slow data does not.
func TestLastAnswerStalls(t *testing.T) {
	l := newLine(t)
	const limit = time.Second
	p := random(64<<10, 1)
	k := &call{t: wire.Read, dst: make([]byte, len(p))}
	done := make(chan error, 1)
	go func() { done <- l.do(t.Context(), &wire.Request{}, k, 0) }()
	waiting := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.pending)
	}
	l.until("it is asked", func() bool { return waiting() == 1 })
	frame := bytesFor(1, p)
	now := time.Now()
	for at := 0; at < 48<<10; at += 8 << 10 {
		l.write(frame[at : at+8<<10])
		l.until("the bytes have come", func() bool { return l.Received() == uint64(at+8<<10) })
		now = now.Add(2 * limit)
		l.watch(now, limit)
	}
	l.until("the answer has begun", func() bool { return waiting() == 0 })
	select {
	case err := <-done:
		t.Fatalf("given up while bytes come: %v", err)
	default:
	}
	l.watch(now.Add(2*limit), limit)
	if err := l.gets("a read that stalls", done); meta.KindOf(err) != meta.Unavailable {
		t.Fatalf("a read that stalls: %v", err)
	}
}

// TestEndStalls: the same end to end: a lone reader, and a reader of a chunk's end in
// order, are served over another connection in the end.
func TestEndStalls(t *testing.T) {
	for _, tc := range []struct {
		name    string
		n, step int
	}{{"alone", 1 << 20, 1 << 20}, {"whole", 8 << 20, 1 << 20}, {"parts", 8 << 20, 128 << 10}} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, "tcp", 1, Config{Conns: 1})
			relay := newStallingRelay(t, f.infos[1].Addr)
			f.remote()
			i := f.infos[1]
			i.Addr = relay.ln.Addr().String()
			f.infos[1] = i
			pl, data := f.written(tc.n, 1)
			f.impatient(400 * time.Millisecond)
			relay.at.Store(int64(tc.n) - 300_000)
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			for off := 0; off < tc.n; off += tc.step {
				p := make([]byte, tc.step)
				err := f.ReadAt(ctx, pl, p, uint64(off))
				for meta.KindOf(err) == meta.Unavailable && ctx.Err() == nil {
					time.Sleep(10 * time.Millisecond) // the server is left alone for a moment
					err = f.ReadAt(ctx, pl, p, uint64(off))
				}
				if err != nil || !bytes.Equal(p, data[off:off+tc.step]) {
					t.Fatalf("DATA: %d bytes at %d: wrong, or %v", tc.step, off, err)
				}
			}
			if relay.at.Load() != 0 {
				t.Error("nothing stalled")
			}
		})
	}
}

// TestTakenError: a reader whose answer is an error gets the error, and the connection
// goes on.
func TestTakenError(t *testing.T) {
	l := newLine(t)
	p := random(1000, 1)
	k1, id1, done1 := l.ahead(len(p))
	k2, id2, done2 := l.ahead(len(p))
	k3, id3, done3 := l.ahead(len(p))
	b := bytesFor(id1, p)
	b = (&wire.Answer{Kind: meta.NoSuchChunk}).AppendFrame(b, wire.Read, 0, id2, 0, 0)
	l.write(append(b, bytesFor(id3, p)...)) // all at once, so that the reader of one answer finds the next
	l.holds(k1)
	l.turn(k1, func(f *frame) (*frame, error) {
		k2.takers.Add(1) // while the other reads
		k2.await()
		return l.now(f)
	})
	select {
	case <-k2.turn:
	default:
		t.Fatal("the turn is not given to who waits for it")
	}
	l.take(k2)
	l.holds(k3)
	l.take(k3)
	for i, done := range []chan error{done1, done2, done3} {
		want := []meta.Kind{meta.KindOK, meta.NoSuchChunk, meta.KindOK}[i]
		if err := l.gets("a read", done); meta.KindOf(err) != want {
			t.Errorf("read %d: %v", i+1, err)
		}
	}
}

// TestTurnOfNobody: an abandoned reader gets no turn: its answer holds up neither the
// answers behind it nor the end of the connection.
func TestTurnOfNobody(t *testing.T) {
	for _, fails := range []bool{false, true} {
		l := newLine(t)
		p := random(1000, 1)
		k1, id1, done1 := l.ahead(len(p))
		k2, id2, done2 := l.ahead(len(p))
		k3, id3, done3 := l.ahead(len(p))
		l.write(append(append(bytesFor(id1, p), bytesFor(id2, p)...), bytesFor(id3, p)...))
		l.holds(k1)
		l.turn(k1, func(f *frame) (*frame, error) {
			if fails {
				k2.takers.Add(1)
			}
			k2.await() // otherwise the answer is dropped
			k3.takers.Add(1)
			k3.await()
			f, err := l.now(f)
			if fails {
				l.fail(io.ErrUnexpectedEOF)
				l.until("the reader's goroutine has heard", func() bool { return len(l.hurry) == 0 })
			}
			return f, err
		})
		for i, done := range []chan error{done1, done2, done3} {
			if err := l.gets("a read", done); err != nil && !fails {
				t.Errorf("read %d: %v", i+1, err)
			}
		}
	}
}
