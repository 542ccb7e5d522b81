package server

import (
	"context"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// A mount that is away keeps nobody from what it was promised, nor a quota from coming.
func TestPromiseOfWhoIsAway(t *testing.T) {
	s := newSiteTTL(t, 10*time.Second)
	other := s.dial("other")
	o := s.srv.opened(1)
	idler := s.lingering("mount without a promise", func(p *peer) { p.create(t, "x") })
	s.goAway(idler)
	began := time.Now()
	other.admin(t, wire.Admin{Op: wire.AdminSetPolicy, Volume: 1, Policy: meta.Policy{Replicas: 1, QuotaBytes: 1 << 20}})
	if took := time.Since(began); took >= settleWait {
		t.Errorf("a quota came after %v", took)
	}
	hoard := func(name string) *session {
		return s.lingering(name, func(p *peer) {
			if _, err := p.Reserve(t.Context(), 1, 0, 900<<10, 0); err != nil {
				t.Fatal(err)
			}
		})
	}
	sess := hoard("a")
	s.goAway(sess)
	if got, err := other.Reserve(t.Context(), 1, 0, 500<<10, 0); err != nil || got.Granted < 500<<10 {
		t.Errorf("%+v, %v", got, err)
	}
	if !sess.ended.Load() || idler.ended.Load() {
		t.Errorf("who had it has ended: %v; who had none: %v", sess.ended.Load(), idler.ended.Load())
	}
	if _, err := other.Reserve(t.Context(), 1, 1<<20, 0, 0); err != nil {
		t.Fatal(err)
	}

	// Nobody is refused before it is known what becomes of one that is silent.
	sess = hoard("b")
	refusal := meta.E("quota", meta.QuotaExceeded, "", nil)
	final := func(k roomSearch) bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.findRoom(&k, refusal) == nil
	}
	asked := roomSearch{rounds: 2, waits: roomTries, synced: true}
	sess.renewed.Store(int64(time.Since(s.srv.epoch) - s.ttl*3/4))
	if final(asked) {
		t.Error("refused, though who has it may be dead")
	}
	sess.touch()
	eventually(t, "refused, though it lives", func() error {
		sess.touch()
		return unless(final(asked))
	})
	o.mu.Lock()
	entry := o.entered[sess]
	delete(o.entered, sess) // as while what it left open is sealed
	o.mu.Unlock()
	asked.waits = 0
	if final(asked) {
		t.Error("refused, though who has it is being ended")
	}
	o.mu.Lock()
	o.entered[sess] = entry
	o.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if got, err := other.Reserve(ctx, 1, 0, 100<<10, 0); err != nil || got.Granted < 100<<10 {
		t.Errorf("what is free is not given: %+v, %v", got, err)
	}
}
