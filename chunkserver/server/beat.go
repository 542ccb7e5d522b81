package server

import (
	"time"

	"penstock.io/penstock/chunkserver/wire"
)

// beatEvery is how often a client that waits for an answer hears that we live.
// Appends are done by the connection's reader, which takes no pings meanwhile:
// without this, a disk that takes its time would look like a dead server.
const beatEvery = 250 * time.Millisecond

// beat gives signs of life until the server ends: replies to a ping that
// nobody sent, number 0.
func (s *Server) beat() {
	tick := time.NewTicker(beatEvery)
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		before := time.Now().Add(-beatEvery / 2).UnixNano()
		s.mu.Lock()
		for c := range s.conns {
			if since := c.since.Load(); (since != 0 && since < before || len(c.busy) > 0) && c.beating.CompareAndSwap(false, true) {
				// Beside us: the client may not be reading.
				s.wg.Go(func() {
					_ = c.send(wire.Ping, 0, 0, &wire.Answer{})
					c.beating.Store(false)
				})
			}
		}
		s.mu.Unlock()
	}
}
