package server

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// What one client identity asks for is bounded, so that others get their turn:
// all its sessions here together do so many operations a second. What is
// beyond is read later; nothing is refused, and the client waits as it does for a
// busy server. Its keep-alives wait behind its own operations, so that time counts as a
// sign of life. Servers and administrators are not held up, nor is who needs no
// certificate.

// paceBurst is how much an identity may do at once after it was idle, as time.
const paceBurst = time.Second

// paces are the identities' accounts. There are as many as identities were
// admitted.
type paces struct {
	m sync.Map // identity -> *pace

	held   atomic.Uint64 // operations that waited
	waited atomic.Int64  // nanoseconds, all together
}

// pace is one identity's account.
type pace struct {
	mu sync.Mutex
	// due is when all that was taken would be done at the rate.
	due time.Time
}

// of gives an identity's account; nil: it is not held up.
func (p *paces) of(who peering.Identity) *pace {
	if who.Role != peering.Client || who.Anyone() {
		return nil
	}
	a, _ := p.m.LoadOrStore(who.String(), new(pace))
	return a.(*pace)
}

// take books n operations at a rate per second, and tells how long to wait.
func (a *pace) take(now time.Time, n int, rate float64) time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if early := now.Add(-paceBurst); a.due.Before(early) {
		a.due = early
	}
	a.due = a.due.Add(time.Duration(float64(n) / rate * float64(time.Second)))
	return a.due.Sub(now)
}

// costOf counts the operations in a frame. What a client has to answer, and what keeps
// its session, is free.
func costOf(t wire.Type, calls int) int {
	switch t {
	case wire.TKeepAlive, wire.TRecalled, wire.TPolicyTaken, wire.TDrop, wire.TBye, wire.TBack, wire.TClaim, wire.TCancel, wire.TTrouble, wire.TGaveUp:
		return 0
	}
	return max(1, calls)
}

// hold keeps a session from being read for as long as its identity is ahead of what
// it may do.
func (s *session) hold(ctx context.Context, n int) {
	if s.pace == nil || n == 0 || s.srv.cfg.Unsafe.NoPace {
		return
	}
	rate := uint32(cluster.DefaultClientRate)
	if v := s.srv.cfg.Cluster.View(); v != nil && v.Settings.ClientRate != 0 {
		rate = v.Settings.ClientRate
	}
	wait := s.pace.take(time.Now(), n, float64(rate))
	if wait <= 0 {
		return
	}
	s.srv.paces.held.Add(uint64(n))
	s.srv.paces.waited.Add(int64(wait))
	s.flush() // what was answered
	// In steps: the session must not run out while it is this server that does not listen.
	for end := time.Now().Add(wait); wait > 0; wait = time.Until(end) {
		select {
		case <-time.After(min(wait, paceBurst)):
			s.touch()
		case <-ctx.Done():
			return
		}
	}
}
