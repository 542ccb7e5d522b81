package server

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// TestDeletedOnce: the home of a volume that is being deleted goes on with the deletion at the
// moment when the first server has let the volume go, and the volume's row still exists. No
// server owns the volume afterwards: giving the volume up would fail when the server stops.
func TestDeletedOnce(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	a := s.dial("a")
	v, err := a.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, meta.VolumeWords{})
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
			again, _ := s.srv.hosted.finishDeletion(row, true)
			home <- again
		}()
		// Taking the volume would need a fraction of this time.
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
	for end := time.Now().Add(30 * time.Second); s.srv.hosted.opened(v.ID) != nil; time.Sleep(5 * time.Millisecond) {
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

// TestTrashAnew: a volume whose time in the trash was over is taken out of the trash, and put
// into the trash anew, before its turn to go comes: the volume has its whole time in the trash
// again.
func TestTrashAnew(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second) // the server waits for sessions that may come back to a volume
	a := s.dial("a")
	day := uint64(86400)
	v, err := a.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, meta.VolumeWords{TrashSeconds: &day})
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
	s.srv.trash.purge(old)
	if row, err := s.cluster.Volume(t.Context(), v.ID); err != nil || row.State != cluster.VolumeTrash || row.Until != fresh.Until {
		t.Errorf("%+v, %v; it was put into the trash until %v", row, err, fresh.Until)
	}
	if _, err := a.UndeleteVolume(t.Context(), v.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	s.srv.trash.purge(discard())
	if row, err := s.cluster.Volume(t.Context(), v.ID); !errors.Is(err, meta.NoSuchVolume) {
		t.Errorf("it stays: %+v, %v", row, err)
	}
}

// TestDiscardByName: a volume that is to go for its name stays if the volume gets another name
// before the volume is condemned, however late.
func TestDiscardByName(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second) // the server waits for sessions that may come back to a volume
	a := s.dial("a")
	day := uint64(86400)
	v, err := a.CreateVolume(t.Context(), "draft", meta.Policy{Replicas: 1}, meta.VolumeWords{TrashSeconds: &day})
	if err != nil {
		t.Fatal(err)
	}
	a.createIn(t, v.ID, "f")
	stays := func(when string) {
		t.Helper()
		if err := a.DiscardVolume(t.Context(), v.ID, "draft"); !errors.Is(err, meta.Busy) {
			t.Errorf("%s: %v", when, err)
		}
		if row, err := s.cluster.Volume(t.Context(), v.ID); err != nil || row.State == cluster.VolumeDeleting || row.Name != "whole" {
			t.Errorf("%s: %+v, %v", when, row, err)
		}
	}
	// At the last moment, behind all earlier checks.
	s.cluster.beforeUpdate = func() {
		row := s.cluster.rows[v.ID]
		row.Name = "whole"
		s.cluster.rows[v.ID] = row
		s.cluster.beforeUpdate = nil
	}
	stays("renamed while it goes")
	if s.cluster.beforeUpdate != nil {
		t.Fatal("nobody tried to condemn it")
	}
	stays("renamed before")
	if err := a.DeleteVolume(t.Context(), v.ID, false); err != nil {
		t.Fatal(err)
	}
	stays("in the trash")
	if _, err := a.UndeleteVolume(t.Context(), v.ID, "", "draft"); err != nil {
		t.Fatal(err)
	}
	if err := a.DiscardVolume(t.Context(), v.ID, "draft"); err != nil {
		t.Fatal(err)
	}
	if row, err := s.cluster.Volume(t.Context(), v.ID); !errors.Is(err, meta.NoSuchVolume) {
		t.Errorf("it stays: %+v, %v", row, err)
	}
}

// TestPurgesTakeTurns: volumes that can't leave the trash, as many as the server purges at once,
// keep no other volumes in the trash.
func TestPurgesTakeTurns(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second) // the server waits for sessions that may come back to a volume
	a := s.dial("a")
	day := uint64(86400)
	var due []cluster.Volume
	for i := range maxPurges + 2 {
		v, err := a.CreateVolume(t.Context(), fmt.Sprint("v", i), meta.Policy{Replicas: 1}, meta.VolumeWords{TrashSeconds: &day})
		if err != nil {
			t.Fatal(err)
		}
		if err := a.DeleteVolume(t.Context(), v.ID, false); err != nil {
			t.Fatal(err)
		}
		row, err := s.cluster.Volume(t.Context(), v.ID)
		if err != nil || row.State != cluster.VolumeTrash {
			t.Fatal(row, err)
		}
		if i < maxPurges {
			row.Attach = &cluster.Attach{} // as the row is refused
		}
		due = append(due, row)
	}
	eventually(t, "the last two leave the trash", func() error {
		s.srv.trash.startPurges(due)
		for _, v := range due[maxPurges:] {
			if _, err := s.cluster.Volume(t.Context(), v.ID); !errors.Is(err, meta.NoSuchVolume) {
				return fmt.Errorf("%s stays, %v", v.Name, err)
			}
		}
		return nil
	})
	for _, v := range due[:maxPurges] {
		if _, err := s.cluster.Volume(t.Context(), v.ID); err != nil {
			t.Errorf("%s: %v", v.Name, err)
		}
	}
}

// hungSite is a site with a chunk server that leaves every order unanswered from now on, and the
// volumes "a" and "b", of which "a" has chunks on that server.
func hungSite(t *testing.T, patience time.Duration) (s *site, f *fakeChunks, p *peer, a, b meta.VolumeID) {
	t.Helper()
	s = newTree(t, func(c *Config) { c.deletePatience = patience })
	f = s.chunkServer(1)
	p = s.dial("p")
	second := uint64(1)
	for _, v := range []*meta.VolumeID{&a, &b} {
		x, err := p.CreateVolume(t.Context(), fmt.Sprint("v", v == &a), meta.Policy{Replicas: 1}, meta.VolumeWords{TrashSeconds: &second})
		if err != nil {
			t.Fatal(err)
		}
		*v = x.ID
		p.createIn(t, x.ID, "f")
	}
	if _, err := p.AllocChunks(t.Context(), a, 3*deleteWidth, false); err != nil {
		t.Fatal(err)
	}
	f.hang()
	return s, f, p, a, b
}

// A chunk server hangs, with its stream alive: other volumes that leave the trash, or are half
// attached, do not wait for the volume that has chunks on the hung server.
func TestTrashBesideHungServer(t *testing.T) {
	t.Parallel()
	s, f, p, a, b := hungSite(t, time.Hour)
	for _, v := range []meta.VolumeID{a, b} {
		if err := p.DeleteVolume(t.Context(), v, false); err != nil {
			t.Fatal(err)
		}
		if v == a {
			eventually(t, "the first is being purged", func() error {
				row, err := s.cluster.Volume(t.Context(), a)
				return errors.Join(err, unless(row.State == cluster.VolumeDeleting))
			})
		}
	}
	c, err := p.CreateVolume(t.Context(), "c", meta.Policy{Replicas: 1}, meta.VolumeWords{})
	if err != nil {
		t.Fatal(err)
	}
	s.cluster.mu.Lock()
	row := s.cluster.rows[c.ID]
	row.Attach = &cluster.Attach{Parent: 1, Ino: meta.RootIno, Name: "c", Step: cluster.Attaching}
	s.cluster.rows[c.ID] = row
	s.cluster.mu.Unlock()
	gone := func(v meta.VolumeID) func() error {
		return func() error {
			_, err := s.cluster.Volume(t.Context(), v)
			return unless(errors.Is(err, meta.NoSuchVolume))
		}
	}
	eventually(t, "the second leaves the trash", gone(b))
	eventually(t, "what was half attached is settled", func() error {
		on, err := s.consistent(c.ID, "c")
		return errors.Join(err, unless(on))
	})
	if gone(a)() == nil {
		t.Error("the first is gone, though its chunk server hangs")
	}
	f.wake()
	eventually(t, "the first is gone", gone(a))
}

// A volume goes although a chunk server leaves orders unanswered: the server notes the remaining
// chunks, for the time when the chunk server answers.
func TestHungServerIsNoted(t *testing.T) {
	t.Parallel()
	s, f, p, a, _ := hungSite(t, 100*time.Millisecond)
	if err := p.DeleteVolume(t.Context(), a, true); err != nil {
		t.Fatal(err)
	}
	s.cluster.mu.Lock()
	on := s.cluster.deleted[a]
	s.cluster.mu.Unlock()
	if len(on) != 1 || on[0] != f.id {
		t.Errorf("servers that may have chunks of it: %v", on)
	}
	f.wake()
}
