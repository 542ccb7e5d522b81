package client

import (
	"sync/atomic"
	"time"
)

// begun counts the kernel requests in progress. A server drops a stored reply once the session
// acknowledges the reply. Receiving the reply is no sufficient reason to acknowledge: if this
// process is killed before it answers the kernel, its successor sends the operation again and
// must get the same reply. So the session counts kernel requests in two alternating classes,
// and acknowledges a sequence number only when every request begun before the number became
// durable has ended. (A later request sends operations with larger numbers.)
type begun struct {
	turn  atomic.Uint32
	count [2]atomic.Int64
}

// Begin counts a kernel request. The caller passes turn to End.
func (s *Session) Begin() (turn uint32) {
	for {
		turn = s.begun.turn.Load()
		s.begun.count[turn].Add(1)
		if s.begun.turn.Load() == turn {
			return turn
		}
		s.begun.count[turn].Add(-1) // the turn changed meanwhile
	}
}

// End ends the count of a kernel request: the request was answered.
func (s *Session) End(turn uint32) { s.begun.count[turn].Add(-1) }

// resentWithin is the time after its start during which a successor acknowledges nothing. By
// the end of resentWithin the successor has read and counted the requests that the kernel
// sends again; the operations of such requests may be old. The kernel sends old requests at
// once, before new ones.
const resentWithin = 5 * time.Second

// settle begins the next turn if every request of the previous turn has ended. The caller
// holds mu.
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
