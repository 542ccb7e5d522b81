package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Any server answers: the server passes a call on to the owner of the volume, through changes of
// owners, or to the server that the request names, and tells which servers are silent.
func TestCallsArePassedOn(t *testing.T) {
	t.Parallel()
	e := startEtcd(t, shortDir(t)+"/e")
	t.Cleanup(func() { e.Close() })
	c := newCrew(t, 2, e.Client())
	first, second := c.hands[0], c.hands[1]
	api := newAPIClient(t, "unix:"+first.addr(), nil)
	eventually(t, "both servers are known", func() error {
		l, err := api.Health.ListServers(t.Context(), &admin.ListServersRequest{})
		if err == nil && len(l.Servers) != 2 {
			err = fmt.Errorf("%v", l.Servers)
		}
		return err
	})
	second.own(1)
	root := &admin.GetRepairStatusRequest{Volume: admin.Named("root")}
	before := second.srv.api.done.Load()
	if st, err := api.Nodes.GetRepairStatus(t.Context(), root); err != nil || st.Status.Volumes != 1 {
		t.Errorf("of a volume that the other server owns: %v, %v", st, err)
	}
	if n := second.srv.api.done.Load() - before; n != 1 {
		t.Errorf("its owner was asked %d times", n)
	}
	for _, name := range []string{"m0", "m1", ""} {
		st, err := api.Health.GetServerStatus(t.Context(), &admin.GetServerStatusRequest{Server: name})
		if want := max(name, "m0"); err != nil || st.Name != want {
			t.Errorf("the status of %q is that of %q: %v", name, st.GetName(), err)
		}
	}
	if st, err := api.Nodes.GetRepairStatus(t.Context(), &admin.GetRepairStatusRequest{}); err != nil || st.Status.Volumes != 1 || len(st.Unanswered) != 0 {
		t.Errorf("of all: %v, %v", st, err)
	}
	if _, err := api.Nodes.GetRepairStatus(t.Context(), &admin.GetRepairStatusRequest{Volume: admin.Numbered(99)}); !errors.Is(err, meta.NoSuchVolume) {
		t.Errorf("of a volume that is not there: %v", err)
	}

	// The volume changes owners.
	second.yield(1)
	if st, err := api.Nodes.GetRepairStatus(t.Context(), root); err != nil || st.Status.Volumes != 1 {
		t.Errorf("after its owner let it go: %v, %v", st, err)
	}

	// The other server is still on the list, and gone.
	second.srv.Abandon()
	st, err := api.Nodes.GetRepairStatus(t.Context(), &admin.GetRepairStatusRequest{})
	if err != nil || len(st.Unanswered) != 1 || st.Unanswered[0].Server != "m1" || !errors.Is(st.Unanswered[0].Error.AsError(), meta.Unavailable) {
		t.Errorf("with a silent server: %v, %v", st, err)
	}
	if _, err := api.Health.GetServerStatus(t.Context(), &admin.GetServerStatusRequest{Server: "m1"}); !errors.Is(err, meta.Unavailable) {
		t.Errorf("of the silent server itself: %v", err)
	}
}

// A call about a volume without an owner waits until a server owns the volume.
func TestCallsWaitForAnOwner(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	v, err := s.cluster.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	owning := func(err error) {
		s.cluster.mu.Lock()
		defer s.cluster.mu.Unlock()
		s.cluster.noOwner = err
	}
	owning(meta.E("own", meta.NotOwner, "", nil))
	done := make(chan error, 1)
	api := s.api()
	go func() {
		_, err := api.Nodes.GetRepairStatus(t.Context(), &admin.GetRepairStatusRequest{Volume: admin.Numbered(v.ID)})
		done <- err
	}()
	eventually(t, "it was tried twice", func() error {
		if n := s.srv.api.done.Load(); n < 2 {
			return fmt.Errorf("%d times", n)
		}
		return nil
	})
	owning(nil)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A follower of events gets each event once, in order, from a server that owns nothing, while the
// volume changes owners and answers are lost. A request that waits for an event delays no other
// call.
func TestFollowersAnywhere(t *testing.T) {
	t.Parallel()
	e := startEtcd(t, shortDir(t)+"/e")
	t.Cleanup(func() { e.Close() })
	c := newCrew(t, 2, e.Client())
	first := c.hands[0]
	c.hands[1].own(1)
	worker := first.dial("worker")
	if _, err := worker.API.Events.KeepEvents(t.Context(), &admin.KeepEventsRequest{Volume: admin.Numbered(1), Keep: meta.MinEvents}); err != nil {
		t.Fatal(err)
	}
	b := newBreaker(t, first.addr())
	follower := newAPIClient(t, b.addr(), nil)
	ctx, cancel := context.WithCancel(t.Context())
	var mu sync.Mutex
	var told []string
	ended := make(chan error, 1)
	go func() {
		ended <- follower.Follow(ctx, eventsAfter(0), true, func(e admin.VolumeEvent) error {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, e.Path)
			return nil
		})
	}()
	var want []string
	for round := range 6 {
		cut := func() bool { return true }
		b.when.Store(&cut) // the next answer is lost
		for i := range 5 {
			name := fmt.Sprintf("%d.%d", round, i)
			worker.create(t, name)
			want = append(want, name)
		}
		if err := worker.Sync(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the follower was told", func() error {
			mu.Lock()
			defer mu.Unlock()
			if len(told) < len(want) {
				return fmt.Errorf("%q", told)
			}
			return nil
		})
		if b.when.Load() != nil {
			t.Errorf("round %d: no answer was lost", round)
		}
		if round%2 == 1 {
			for _, h := range c.hands { // the first server asked has the volume next
				if o := h.srv.hosted.opened(1); o != nil {
					if err := o.handOver(t.Context(), ""); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) && !errors.Is(err, meta.Canceled) {
		t.Errorf("it ended: %v", err)
	}
	if !slices.Equal(told, want) {
		t.Errorf("DATA: it was told %q, want %q", told, want)
	}
	peers := first.srv.api.peers
	long, err := peers.client("unix:x", true)
	if other, oerr := peers.client("unix:x", false); err != nil || oerr != nil || long == other {
		t.Errorf("long calls share a connection with others: %v, %v", err, oerr)
	}
}
