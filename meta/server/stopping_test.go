package server

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/wire"
)

// A caller that waits for a lost volume to be taken again learns that the server stops.
func TestWaitingForALostVolumeEndsWithTheServer(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	lost, cancel := context.WithCancel(t.Context())
	cancel()
	const v = 99
	op := &opening{state: cluster.VolumeActive, o: &owner{kernel: kernel{ctx: lost}}, done: make(chan struct{}), gone: make(chan struct{})}
	close(op.done)
	s.srv.hosted.mu.Lock()
	s.srv.hosted.volumes[v] = op
	s.srv.hosted.mu.Unlock()
	ended := make(chan error, 1)
	go func() {
		_, err := s.srv.hosted.open(context.Background(), v)
		ended <- err
	}()
	select {
	case err := <-ended:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	s.srv.hosted.mu.Lock()
	delete(s.srv.hosted.volumes, v)
	s.srv.hosted.mu.Unlock()
	s.srv.cancel(errors.New("the test ends it"))
	select {
	case err := <-ended:
		if !errors.Is(err, meta.NotOwner) || !errors.Is(err, errStopping) {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Error("it waits for ever")
	}
}

// A server that stops after etcd does not wait for etcd.
func TestStopWithoutEtcd(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.cluster.mu.Lock()
	s.cluster.unregister = func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) }
	s.cluster.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	begun := time.Now()
	_ = s.srv.Close(ctx) // as far as Close gets
	if took := time.Since(begun); took > time.Minute {
		t.Errorf("it stopped after %v", took)
	}
}

// A call that meets a stopping server is made at the next server, also a call that must not be
// executed twice, by administrators of both protocols. Without another server, the error names
// the server and the reason.
func TestCallsGoOnWhenAServerStops(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	v, err := s.cluster.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	stopping := func(is bool) { s.srv.closing.Store(is) }
	api, sess := s.api(), s.dial("admin")
	if _, err := api.Volumes.CheckpointVolume(t.Context(), &admin.CheckpointVolumeRequest{Volume: admin.Numbered(1)}); err != nil {
		t.Fatal(err) // both are connected
	}
	calls := map[string]func(context.Context) error{
		"a call": func(ctx context.Context) error {
			return second(api.Nodes.ScrubNodes(ctx, &admin.ScrubNodesRequest{Node: 9}))
		},
		"a request to a volume's owner": func(ctx context.Context) error {
			return second(sess.Admin(ctx, wire.Admin{Op: wire.AdminViews, Volume: v.ID}))
		},
	}
	stopping(true)
	ended := map[string]chan error{}
	for name, call := range calls {
		c := make(chan error, 1)
		ended[name] = c
		go func() { c <- call(t.Context()) }()
	}
	time.Sleep(200 * time.Millisecond) // both were refused; without waiting, less is tried
	for name, c := range ended {
		select {
		case err := <-c:
			t.Errorf("%s ended: %v", name, err)
			c <- err
		default:
		}
	}
	stopping(false) // the next server
	for name, c := range ended {
		if err := <-c; errors.Is(err, errStopping) || err != nil && strings.Contains(err.Error(), "stopping") {
			t.Errorf("%s: %v", name, err)
		}
	}
	stopping(true)
	alone, err := admin.New(admin.Config{Addrs: []string{"unix:" + s.addr}, Reach: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer alone.Close()
	_, err = alone.Nodes.ScrubNodes(t.Context(), &admin.ScrubNodesRequest{Node: 9})
	if !errors.Is(err, meta.Unavailable) || !strings.Contains(err.Error(), "call m: unavailable: the server is stopping") {
		t.Errorf("with no other server: %v", err)
	}
	stopping(false)
}
