package client

import (
	"sync/atomic"
	"time"
)

// A server lets go of a reply once it is acknowledged. That the reply came is
// not enough if this process may be killed and a successor is asked again for
// what the kernel was not answered: it must get the same reply. So requests
// from above are counted, in two classes that take turns, and a sequence number
// is acknowledged when every request that had begun by the time at which it
// became durable is over. (A request that begins later asks for operations with
// larger numbers.)
type begun struct {
	turn  atomic.Uint32
	count [2]atomic.Int64
}

// Begin counts a request from above; End takes what it gives.
func (s *Session) Begin() (turn uint32) {
	for {
		turn = s.begun.turn.Load()
		s.begun.count[turn].Add(1)
		if s.begun.turn.Load() == turn {
			return turn
		}
		s.begun.count[turn].Add(-1) // the turn changed in between
	}
}

// End tells that the request was answered.
func (s *Session) End(turn uint32) { s.begun.count[turn].Add(-1) }

// resentWithin is how long after its beginning a successor acknowledges nothing:
// by then it has read, and counts, what the kernel sends it again, and what that
// asked for may be old. The kernel sends it at once, before anything new.
const resentWithin = 5 * time.Second

// settle begins the next turn if all of the turn before are over. Caller holds
// mu.
func (s *Session) settle() {
	if s.cfg.Session != 0 && now()-s.born < resentWithin {
		return
	}
	turn := s.begun.turn.Load()
	if s.begun.count[1-turn].Load() != 0 {
		return
	}
	s.begun.turn.Store(1 - turn)
	for _, vs := range s.volumes {
		vs.settled, vs.settling = max(vs.settled, vs.settling), vs.durable
	}
}
