package server

import (
	"bytes"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/peer"
)

// client is a greeted connection, and its other end.
type client struct {
	*wire.Conn
	t      *testing.T
	served *conn
	token  []byte
}

func greeted(t *testing.T, s *Server, dial func() *wire.Conn, token []byte) *client {
	t.Helper()
	before := map[*conn]bool{}
	s.mu.Lock()
	for k := range s.conns {
		before[k] = true
	}
	s.mu.Unlock()
	c := dial()
	greet(t, c)
	s.mu.Lock()
	defer s.mu.Unlock()
	for k := range s.conns {
		if !before[k] {
			return &client{c, t, k, token}
		}
	}
	t.Fatal("it is not served")
	return nil
}

// take has an answer of the largest size in memory, not sent.
func (c *client) take() (giveBack func()) {
	c.t.Helper()
	giveBack, err := c.served.room(ctx, wire.MaxData)
	if err != nil {
		c.t.Fatal(err)
	}
	return giveBack
}

// ask requests n bytes, answered reads them.
func (c *client) ask(n int) {
	c.t.Helper()
	q := wire.Request{Cap: c.token, Chunk: id, N: uint32(n)}
	if err := c.Send(q.AppendFrame(nil, wire.Read, 0, 5, 0, 0), nil); err != nil {
		c.t.Fatal(err)
	}
}

func (c *client) answered(want []byte) {
	c.t.Helper()
	h, body, err := c.Next()
	for err == nil && h.Type == wire.Ping|wire.Reply {
		h, body, err = c.Next()
	}
	if err != nil {
		c.t.Fatal(err)
	}
	p := make([]byte, len(want))
	if a, err := wire.DecodeAnswer(wire.Read, h.Flags, body); err != nil || a.Kind != 0 || int(h.Data) != len(want) {
		c.t.Fatalf("%+v, %d bytes, %v", a, h.Data, err)
	}
	if err := c.Data(p); err != nil || !bytes.Equal(p, want) {
		c.t.Fatalf("DATA: %v, or other bytes", err)
	}
}

// until waits for a condition that must soon be true.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// TestAnswersAreBounded: a connection with the largest amount of answers in memory is not read
// further until an answer was sent; other connections are. A connection that ends while waiting
// leaves nothing.
func TestAnswersAreBounded(t *testing.T) {
	s, path := newServer(t, 1)
	data := random(wire.MaxData, 3)
	if err := s.Append(ctx, id, fence, 0, data, chunkserver.CRC(data)); err != nil {
		t.Fatal(err)
	}
	read := token(capability.Read, fence)
	open := func() *wire.Conn { return dial(t, path) }
	c, other := greeted(t, s, open, read), greeted(t, s, open, read)
	var took []func()
	for range answersConn / wire.MaxData {
		took = append(took, c.take())
	}
	reads := s.Stats().Disks[0].Reads
	c.ask(1000)
	until(t, "nothing is held", func() bool { return s.Stats().Held == 1 })
	other.ask(wire.MaxData)
	other.answered(data)
	// The room of a sent answer is given back a moment after its arrival.
	until(t, "other bytes of answers are in memory", func() bool { return s.Stats().Answering == answersConn })
	if n := s.Stats().Disks[0].Reads - reads; n != 1 {
		t.Errorf("%d reads", n)
	}
	took[0]()
	c.answered(data[:1000])
	took[0] = c.take() // waits, too, before the answer's room is given back
	held := s.Stats().Held
	c.ask(1000)
	until(t, "nothing is held", func() bool { return s.Stats().Held == held+1 })
	c.Close()
	until(t, "the connection stays", func() bool { return s.Stats().Conns == 1 })
	for _, giveBack := range took {
		giveBack()
	}
	until(t, "bytes of answers are left", func() bool { return s.Stats().Answering == 0 })
}

// TestAnswersOfAnIdentityAreBounded: the connections of one identity have a common bound,
// another identity has its own; connections without a certificate are separate.
func TestAnswersOfAnIdentityAreBounded(t *testing.T) {
	s, addr, a := secure(t)
	data := random(wire.MaxData, 4)
	if err := s.Append(ctx, id, fence, 0, data, chunkserver.CRC(data)); err != nil {
		t.Fatal(err)
	}
	open := func(name string) *client {
		dial := func() *wire.Conn { return dialTLS(t, addr, as(t, a, peer.Client, name)) }
		return greeted(t, s, dial, capability.Sign(key, capability.Claims{Volume: 1, Chunk: id,
			Rights: capability.Read, Fence: fence, Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano()), Client: "client/" + name}))
	}
	const each, all = answersConn / wire.MaxData, answersPeer / wire.MaxData
	var took []func()
	var many []*client
	for i := range all {
		if i%each == 0 {
			many = append(many, open("many"))
		}
		took = append(took, many[i/each].take())
	}
	c, other := open("many"), open("other")
	c.ask(1000)
	until(t, "nothing is held", func() bool { return s.Stats().Held == 1 })
	other.ask(wire.MaxData)
	other.answered(data)
	took[0]()
	c.answered(data[:1000])
	for _, giveBack := range took[1:] {
		giveBack()
	}
	for _, c := range append(many, c, other) {
		c.Close()
	}
	until(t, "identities are remembered", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.shares) == 0
	})
}
