package server

import (
	"errors"
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Any server answers: it passes a call on to the owner of the volume, wherever that goes
// meanwhile, or to the server that the request names, and tells which servers are silent.
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

// A call about a volume that nobody owns for a moment waits until somebody does.
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
