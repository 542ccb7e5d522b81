package server

import (
	"time"

	"penstock.io/penstock/chunkserver/wire"
)

// beatEvery is the interval of signs of life for a client that waits for an answer. The
// connection's reader does appends and takes no pings meanwhile: without signs of life, a slow
// disk would look like a dead server.
const beatEvery = 250 * time.Millisecond

// beat sends signs of life until the server ends: replies to a ping number 0, which nobody
// sent.
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
