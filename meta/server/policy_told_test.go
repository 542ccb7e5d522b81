package server

import (
	"context"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// slowToFollow has the peer take in policies only once the channel is closed, and sends each
// policy to the returned channel.
func (p *peer) slowToFollow(until <-chan struct{}) (came <-chan meta.Policy) {
	ch := make(chan meta.Policy, 8)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.policySet = func(policy meta.Policy) {
		ch <- policy
		<-until
	}
	return ch
}

func (p *peer) follows() meta.Policy {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.policy
}

// TestPolicyIsFollowedWhenAnswered: a session in the volume follows a policy when the request
// that sets the policy is answered, in both directions; a session that comes back after a restart
// of the owner gets the policy when the session enters.
func TestPolicyIsFollowedWhenAnswered(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, admin := s.dial("a"), s.dial("admin")
	a.create(t, "f")
	set := func(ctx context.Context, on bool) error {
		return admin.setWords(ctx, false, func(p *meta.Policy) { p.Immutable, p.SyncOnClose, p.NoAtime = on, on, on }, "immutable", "sync-on-close", "noatime")
	}
	for _, on := range []bool{true, false} {
		until := make(chan struct{})
		came := a.slowToFollow(until)
		done := make(chan error, 1)
		go func() { done <- set(t.Context(), on) }()
		select {
		case <-came:
		case err := <-done:
			t.Fatalf("immutable=%v is answered (%v), and a session in the volume was not told", on, err)
		case <-time.After(time.Minute):
			t.Fatal("a session in the volume is not told of a policy that was set")
		}
		select {
		case err := <-done:
			t.Fatalf("immutable=%v is answered (%v) before a session in the volume follows it", on, err)
		default:
		}
		close(until)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if p := a.follows(); p.Immutable != on || p.SyncOnClose != on || p.NoAtime != on {
			t.Errorf("the request that sets all to %v is answered, and a session follows %+v", on, p)
		}
	}
	a.mu.Lock()
	a.policy, a.policySet = meta.Policy{}, nil
	a.mu.Unlock()
	if err := set(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	a.mu.Lock()
	a.policy = meta.Policy{}
	a.mu.Unlock()
	s.crash()
	s.start()
	a.do(t, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone)
	if p := a.follows(); !p.Immutable || !p.SyncOnClose || !p.NoAtime {
		t.Errorf("a session that entered again follows %+v", p)
	}
}

// TestPolicyWaitsForNobodyWhoIsLate: a late session does not delay a change of policy. (The
// session sees whether the change waited: the order to follow comes only after the answer.)
func TestPolicyWaitsForNobodyWhoIsLate(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 2*time.Second)
	admin := s.dial("admin")
	p, sess := s.late("late", func(p *peer) { p.create(t, "f") })
	until := make(chan struct{})
	defer close(until)
	p.slowToFollow(until)
	stop := make(chan struct{})
	still := make(chan struct{})
	go func() {
		defer close(still)
		for {
			select {
			case <-stop:
				return
			case <-time.After(5 * time.Millisecond):
				sess.renewed.Store(int64(time.Since(s.srv.epoch) - 100*s.ttl))
			}
		}
	}()
	defer func() { close(stop); <-still }()
	eventually(t, "the session is late", func() error { return unless(sess.away.Load()) })
	if err := admin.setWords(t.Context(), false, func(p *meta.Policy) { p.NoAtime = true }, "noatime"); err != nil {
		t.Fatal(err)
	}
	s.srv.hosted.opened(1).mu.Lock()
	defer s.srv.hosted.opened(1).mu.Unlock()
	if n := len(s.srv.hosted.opened(1).told.pending); n > 0 {
		t.Errorf("the owner waits for %d sessions that are late", n)
	}
}
