package server

import (
	"testing"

	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
)

// TestThreadsAreGivenBack: a connection takes one thread, however often the connection changes
// its chunk, and gives the thread back at its end. At most maxThreads connections have a thread.
func TestThreadsAreGivenBack(t *testing.T) {
	s, path := newServer(t, 1)
	appends := func(c *wire.Conn, counter uint64) {
		t.Helper()
		chunk := meta.ChunkID{Volume: 1, Term: 1, Counter: counter}
		may := capability.Sign(key, capability.Claims{Volume: 1, Chunk: chunk, Rights: capability.Append, Fence: fence, Expiry: 1 << 62})
		for n := range uint64(aloneFrom + 1) {
			if a := ask(t, c, wire.Append, 0, &wire.Request{Cap: may, Chunk: chunk, Fence: fence, Off: n}, []byte{1}); a.Kind != meta.KindOK {
				t.Fatalf("append %d to chunk %v: %+v", n, chunk, a)
			}
		}
	}
	var conns []*wire.Conn
	for n := range uint64(3) {
		c := dial(t, path)
		greet(t, c)
		appends(c, 2*n+1)
		appends(c, 2*n+2)
		conns = append(conns, c)
	}
	if n := s.threads.Load(); n != 3 {
		t.Errorf("three connections have %d threads", n)
	}
	for _, c := range conns {
		c.Close()
	}
	until(t, "the threads are given back", func() bool { return s.threads.Load() == 0 })

	s.threads.Store(maxThreads)
	c := dial(t, path)
	greet(t, c)
	appends(c, 9)
	if n := s.threads.Load(); n != maxThreads {
		t.Errorf("%d connections have threads, the most is %d", n, maxThreads)
	}
	c.Close()
}
