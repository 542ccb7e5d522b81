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

// The rate of operations of a client identity is bounded, for the sake of other identities.
// The bound covers all sessions of the identity at this server together, in operations a
// second. Frames above the bound are read later: no operation is refused, and the client waits
// as for a busy server. Keep-alives wait behind the client's own operations, so the waiting
// time counts as a sign of life. Servers, administrators, and clients that need no certificate
// have no bound.

// paceBurst is how many operations an identity may do at once after idle time, as time at the
// rate.
const paceBurst = time.Second

// paces are the accounts of identities: one for each identity admitted.
type paces struct {
	m sync.Map // identity -> *pace

	held   atomic.Uint64 // number of operations that waited
	waited atomic.Int64  // nanoseconds, all together
}

// pace is the account of an identity.
type pace struct {
	mu sync.Mutex
	// due is when all operations taken so far would be done at the rate.
	due time.Time
}

// of returns an identity's account; nil: the identity has no bound.
func (p *paces) of(who peering.Identity) *pace {
	if !who.Role.Granted() || who.Anyone() {
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

// costOf returns the number of operations in a frame. Answers required of the client, and
// frames that keep its session, cost nothing.
func costOf(t wire.Type, calls int) int {
	switch t {
	case wire.TKeepAlive, wire.TRecalled, wire.TPolicyTaken, wire.TGrowthRe, wire.TDrop, wire.TBye, wire.TBack, wire.TClaim, wire.TCancel, wire.TTrouble, wire.TGaveUp:
		return 0
	}
	return max(1, calls)
}

// hold takes n operations and delays the reading of the session while its identity is above
// its rate.
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
	s.srv.clients.paces.held.Add(uint64(n))
	s.srv.clients.paces.waited.Add(int64(wait))
	s.flush() // send the answers queued before
	// Touch the session at each step: it must not expire while this server does not read.
	for end := time.Now().Add(wait); wait > 0; wait = time.Until(end) {
		select {
		case <-time.After(min(wait, paceBurst)):
			s.touch()
		case <-ctx.Done():
			return
		}
	}
}
