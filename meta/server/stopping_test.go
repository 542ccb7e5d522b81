package server

import (
	"context"
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// Who waits for a volume that was lost, to take it again, is told that the server stops.
func TestWaitingForALostVolumeEndsWithTheServer(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	lost, cancel := context.WithCancel(t.Context())
	cancel()
	const v = 99
	op := &opening{state: cluster.VolumeActive, o: &owner{ctx: lost}, done: make(chan struct{}), gone: make(chan struct{})}
	close(op.done)
	s.srv.mu.Lock()
	s.srv.volumes[v] = op
	s.srv.mu.Unlock()
	ended := make(chan error, 1)
	go func() {
		_, err := s.srv.open(context.Background(), v)
		ended <- err
	}()
	select {
	case err := <-ended:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	s.srv.mu.Lock()
	delete(s.srv.volumes, v)
	s.srv.mu.Unlock()
	s.srv.cancel(errors.New("the test ends it"))
	select {
	case err := <-ended:
		if !errors.Is(err, meta.Unavailable) {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Error("it waits for ever")
	}
}

// A server that stops after etcd did does not wait for it.
func TestStopWithoutEtcd(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.cluster.mu.Lock()
	s.cluster.unregister = func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	s.cluster.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	begun := time.Now()
	_ = s.srv.Close(ctx) // as far as it gets
	if took := time.Since(begun); took > time.Minute {
		t.Errorf("it stopped after %v", took)
	}
}
