package server

import (
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/wire"
)

// TestDeletedOnce: the home of a volume that is being deleted goes on with that at
// the moment when who began has let it go, and its row is still there. Nobody owns
// it afterwards: to give that up would fail when the server stops.
func TestDeletedOnce(t *testing.T) {
	s := newSiteTTL(t, time.Minute)
	a := s.dial("a")
	v, err := a.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, wire.VolumeWords{})
	if err != nil {
		t.Fatal(err)
	}
	a.createIn(t, v.ID, "f")
	home := make(chan bool, 1)
	s.cluster.dies = func(step string) error {
		if step != "row gone" {
			return nil
		}
		row := s.cluster.rows[v.ID]
		s.cluster.mu.Unlock() // the row is looked at by others meanwhile
		defer s.cluster.mu.Lock()
		go func() {
			again, _ := s.srv.finishDeletion(row, true)
			home <- again
		}()
		// To take it would need a fraction of that.
		for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
			s.cluster.mu.Lock()
			taken := s.cluster.taken[v.ID]
			s.cluster.mu.Unlock()
			if taken > 1 {
				break
			}
		}
		return nil
	}
	if err := a.DeleteVolume(t.Context(), v.ID, true); err != nil {
		t.Fatal(err)
	}
	if <-home {
		t.Error("the home would look at it again")
	}
	for end := time.Now().Add(30 * time.Second); s.srv.opened(v.ID) != nil; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a volume that was deleted is owned")
		}
	}
	s.cluster.mu.Lock()
	defer s.cluster.mu.Unlock()
	if taken := s.cluster.taken[v.ID]; taken != 1 {
		t.Errorf("it was taken %d times", taken)
	}
}

// TestTrashAnew: a volume whose time in the trash was over is taken out of it, and put
// into it anew, before its turn to go comes: it has all its time there before it.
func TestTrashAnew(t *testing.T) {
	s := newSite(t)
	a := s.dial("a")
	day := uint64(86400)
	v, err := a.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, wire.VolumeWords{TrashSeconds: &day})
	if err != nil {
		t.Fatal(err)
	}
	a.createIn(t, v.ID, "f")
	discard := func() cluster.Volume {
		t.Helper()
		if err := a.DeleteVolume(t.Context(), v.ID, false); err != nil {
			t.Fatal(err)
		}
		row, err := s.cluster.Volume(t.Context(), v.ID)
		if err != nil || row.State != cluster.VolumeTrash {
			t.Fatal(row, err)
		}
		return row
	}
	old := discard()
	if _, err := a.UndeleteVolume(t.Context(), v.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	fresh := discard()
	s.srv.purge(old)
	if row, err := s.cluster.Volume(t.Context(), v.ID); err != nil || row.State != cluster.VolumeTrash || row.Until != fresh.Until {
		t.Errorf("%+v, %v; it was put into the trash until %v", row, err, fresh.Until)
	}
	if _, err := a.UndeleteVolume(t.Context(), v.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	s.srv.purge(discard())
	if row, err := s.cluster.Volume(t.Context(), v.ID); !errors.Is(err, meta.NoSuchVolume) {
		t.Errorf("it stays: %+v, %v", row, err)
	}
}
