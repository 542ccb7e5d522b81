package server

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// Clients apply parts of a volume's policy by themselves: they refuse to write, sync on close,
// leave access times alone. So the owner sends a new policy to the sessions in the volume, and
// answers the change of policy after all sessions within reach follow it. A session that has
// no connection, or is late, gets the policy when it enters again.

// policyWait bounds how long a change of policy waits for sessions within reach. policyLook is
// how often the owner checks whether the sessions are still within reach.
const (
	policyWait = 10 * time.Second
	policyLook = 50 * time.Millisecond
)

// policyTold holds the sessions that got the policy and have not answered. The owner's mu
// guards policyTold.
type policyTold struct {
	k       *kernel
	round   uint64
	pending map[*session]struct{}
	done    chan struct{} // closed when nothing is pending
}

// answered notes that a session follows the policy of the present round. An answer to an
// earlier round is ignored.
func (t *policyTold) answered(s *session, round uint64) {
	if _, ok := t.pending[s]; !ok || round != t.round {
		return
	}
	delete(t.pending, s)
	if len(t.pending) == 0 {
		close(t.done)
	}
}

// tellPolicy sends the volume's policy to the sessions in the volume, and waits until they
// follow it, at most for policyWait. The caller has the turn to change the policy.
func (t *policyTold) tellPolicy(ctx context.Context) {
	t.k.mu.Lock()
	policy, err := namespace.Policy(t.k.view())
	if err != nil || t.k.failed != nil || t.k.srv.cfg.Unsafe.NoTellPolicy {
		t.k.mu.Unlock()
		return // the next owner sends the policy
	}
	t.round++
	t.pending, t.done = map[*session]struct{}{}, make(chan struct{})
	for s := range t.k.entered {
		if s.enqueue(t.round, &wire.Policy{Volume: t.k.vol, Policy: policy}) && !s.away.Load() {
			t.pending[s] = struct{}{}
			go s.flush()
		}
	}
	if len(t.pending) == 0 {
		close(t.done)
	}
	done := t.done
	t.k.mu.Unlock()
	look := time.NewTicker(policyLook)
	defer look.Stop()
	bound := time.After(policyWait)
	for {
		select {
		case <-done:
			return
		case <-ctx.Done():
			return
		case <-bound:
			t.k.mu.Lock()
			left := len(t.pending)
			t.k.mu.Unlock()
			if left > 0 {
				t.k.log.Warn("the policy is set, and some mounts have not confirmed it yet: they follow it once they read the owner's message", "mounts", left, "waited", policyWait)
			}
			return
		case <-look.C:
			t.k.mu.Lock()
			for s := range t.pending {
				if _, in := t.k.entered[s]; !in || s.away.Load() || s.ended.Load() || !s.connected() {
					t.answered(s, t.round)
				}
			}
			t.k.mu.Unlock()
		}
	}
}

// connected reports whether the session has a connection.
func (s *session) connected() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.send != nil
}

// enteredPolicy is the policy sent to a session that enters. The session need not answer.
// Caller holds mu.
func (o *owner) enteredPolicy(s *session) (meta.Policy, error) {
	o.told.answered(s, o.told.round)
	return namespace.Policy(o.view())
}
