package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// newTree makes a site whose server sees leftovers in the table, and soon.
func newTree(t *testing.T, adjust ...func(*Config)) *site {
	t.Helper()
	dir := t.TempDir()
	s := &site{t: t, dir: dir, ttl: 3 * time.Second, addr: dir + "/m.sock"}
	s.cluster = newFakeCluster(t, dir)
	s.adjust = func(c *Config) {
		c.Cluster, c.HomeAfter = viewed{s.cluster}, 50*time.Millisecond
		c.treeLook, c.treeGrace = 20*time.Millisecond, 100*time.Millisecond
		for _, f := range adjust {
			f(c)
		}
	}
	s.start()
	t.Cleanup(func() {
		s.srv.Close(context.Background())
		<-s.done
		s.cluster.Shared.Close()
	})
	return s
}

// consistent compares the parent in a volume's row with the entry in the root volume.
func (s *site) consistent(v meta.VolumeID, name string) (attached bool, err error) {
	row, err := s.cluster.Volume(s.t.Context(), v)
	if err != nil {
		return false, err
	}
	o, err := s.srv.hosted.ownerFor(s.t.Context(), meta.RootVolume)
	if err != nil {
		return false, err
	}
	leads := o.leadsTo(cluster.Attach{Ino: meta.RootIno, Name: name})
	switch {
	case row.Attach == nil && leads == 0:
		return false, nil
	case row.Attach != nil && row.Attach.Step == cluster.Attached && leads == v:
		return true, nil
	}
	return false, fmt.Errorf("the row says %+v, the entry leads to %d", row.Attach, leads)
}

var errKilled = errors.New("killed")

// dieAt has the server die at the n-th of the following steps, and tells whether the n-th step
// came.
func (s *site) dieAt(n int) (died func() bool) {
	left := n
	s.cluster.mu.Lock()
	defer s.cluster.mu.Unlock()
	s.cluster.dies = func(string) error {
		if left--; left <= 0 {
			return errKilled
		}
		return nil
	}
	return func() bool {
		s.cluster.mu.Lock()
		defer s.cluster.mu.Unlock()
		s.cluster.dies = nil
		return left <= 0
	}
}

// A server dies at each step of attaching and of detaching a volume: the next server settles the
// leftovers without a caller, wholly done or wholly undone.
func TestTreeStepsSurviveDeath(t *testing.T) {
	t.Parallel()
	s := newTree(t)
	steps := 0
	for _, detach := range []bool{false, true} {
		for n := 1; ; n++ {
			name := fmt.Sprintf("v%v%d", detach, n)
			a := s.dial(name)
			v := a.must(t, toCreate(name, meta.Policy{}))
			attach := toAttach(v, 1, name)
			do := proto.Message(attach)
			if detach {
				a.must(t, attach)
				do = toDetach(v)
			}
			died := s.dieAt(n)
			_, err := a.ask(t.Context(), do)
			s.crash()
			if !died() {
				if err != nil {
					t.Fatalf("nobody died, yet %v", err)
				}
				s.start()
				if on, err := s.consistent(v, name); err != nil || on == detach {
					t.Fatalf("attached %v, %v", on, err)
				}
				break
			}
			steps++
			s.start()
			eventually(t, "the step is settled", func() error { _, err := s.consistent(v, name); return err })
			// And the volume can be attached again.
			b := s.dial("after " + name)
			if on, _ := s.consistent(v, name); on {
				b.must(t, toDetach(v))
			}
			b.must(t, attach)
			b.must(t, attach) // twice is once
			if on, err := s.consistent(v, name); err != nil || !on {
				t.Fatalf("attached %v, %v", on, err)
			}
		}
	}
	if steps < 6 {
		t.Errorf("servers died at %d steps only", steps)
	}
	s.clean(t, 1)
}

// A server dies at each step of deleting a volume, and of taking a volume out of the trash: the
// volume is in place as before, in the trash, or gone, and never in between.
func TestDeletionSurvivesDeath(t *testing.T) {
	t.Parallel()
	s := newTree(t)
	day := uint64(86400)
	states := map[cluster.VolumeState]int{}
	for _, what := range []string{"trash", "now", "undelete"} {
		for n := 1; ; n++ {
			name := fmt.Sprintf("%s%d", what, n)
			a := s.dial(name)
			r, err := a.CreateVolume(t.Context(), name, meta.Policy{Replicas: 1}, meta.VolumeWords{TrashSeconds: &day})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := a.Do(t.Context(), r.ID, meta.OpID{}, newFile("kept"), meta.LeaseNone); err != nil {
				t.Fatal(err)
			}
			if what == "undelete" {
				if err := a.DeleteVolume(t.Context(), r.ID, false); err != nil {
					t.Fatal(err)
				}
			}
			died := s.dieAt(n)
			if what == "undelete" {
				_, err = a.UndeleteVolume(t.Context(), 0, name, "")
			} else {
				err = a.DeleteVolume(t.Context(), r.ID, what == "now")
			}
			s.crash()
			over := !died()
			s.start()
			if over && err != nil {
				t.Fatalf("nobody died, yet %v", err)
			}
			eventually(t, "the volume is in one state", func() error {
				row, err := s.cluster.Volume(t.Context(), r.ID)
				switch {
				case errors.Is(err, meta.NoSuchVolume):
					states["gone"]++
					return nil
				case err != nil || row.State == cluster.VolumeDeleting:
					return fmt.Errorf("it is %s, %v", row.State, err)
				}
				states[row.State]++
				b := s.dial("after " + name)
				if row.State == cluster.VolumeTrash {
					if _, err := b.Do(t.Context(), r.ID, meta.OpID{}, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone); !errors.Is(err, meta.NoSuchVolume) {
						t.Fatalf("a volume in the trash answers: %v", err)
					}
					if _, err := b.UndeleteVolume(t.Context(), 0, name, ""); err != nil {
						t.Fatal(err)
					}
				}
				if _, err := b.Do(t.Context(), r.ID, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "kept"}, meta.LeaseNone); err != nil {
					t.Fatalf("what was in it: %v", err)
				}
				return nil
			})
			if over {
				break
			}
		}
	}
	for _, want := range []cluster.VolumeState{cluster.VolumeActive, cluster.VolumeTrash, "gone"} {
		if states[want] == 0 {
			t.Errorf("no volume was found %s: %v", want, states)
		}
	}
}

// The trash: a name is free at once, two volumes of the same name lie in the trash, each comes
// back, and a volume that stays is deleted when its time is over.
func TestTrash(t *testing.T) {
	t.Parallel()
	s := newTree(t)
	a := s.dial("a")
	long, short := uint64(86400), uint64(1)
	make := func(words meta.VolumeWords) meta.VolumeID {
		v, err := a.CreateVolume(t.Context(), "x", meta.Policy{Replicas: 1}, words)
		if err != nil {
			t.Fatal(err)
		}
		return v.ID
	}
	one := make(meta.VolumeWords{TrashSeconds: &long})
	if err := a.DeleteVolume(t.Context(), one, false); err != nil {
		t.Fatal(err)
	}
	two := make(meta.VolumeWords{TrashSeconds: &long})
	if _, err := a.UndeleteVolume(t.Context(), 0, "x", ""); !errors.Is(err, meta.VolumeExists) {
		t.Errorf("undelete over another: %v", err)
	}
	if v, err := a.UndeleteVolume(t.Context(), 0, "x", "y"); err != nil || v.ID != one || v.Name != "y" {
		t.Errorf("undelete as y: %+v, %v", v, err)
	}
	if err := a.DeleteVolume(t.Context(), two, false); err != nil {
		t.Fatal(err)
	}
	three := make(meta.VolumeWords{TrashSeconds: &short})
	if err := a.DeleteVolume(t.Context(), three, false); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the third leaves the trash", func() error {
		if _, err := s.cluster.Volume(t.Context(), three); !errors.Is(err, meta.NoSuchVolume) {
			return fmt.Errorf("it is there: %v", err)
		}
		return nil
	})
	if v, err := a.UndeleteVolume(t.Context(), 0, "x", ""); err != nil || v.ID != two {
		t.Errorf("undelete: %+v, %v", v, err)
	}
	if _, err := a.UndeleteVolume(t.Context(), 0, "x", ""); !errors.Is(err, meta.NoSuchVolume) {
		t.Errorf("undelete what is not there: %v", err)
	}
	if _, err := a.RenameVolume(t.Context(), two, "y"); !errors.Is(err, meta.VolumeExists) {
		t.Errorf("rename over another: %v", err)
	}
	if v, err := a.RenameVolume(t.Context(), two, "z"); err != nil || v.Name != "z" {
		t.Errorf("rename: %+v, %v", v, err)
	}
	if _, err := a.Snapshots(t.Context(), two); err != nil { // which opens the volume
		t.Fatal(err)
	}
	for _, name := range []string{"zz", "z"} { // and metrics have its name
		if _, err := a.RenameVolume(t.Context(), two, name); err != nil {
			t.Fatal(err)
		}
		if o := s.srv.hosted.opened(two); o == nil || o.words.name != name {
			t.Errorf("renamed to %s it is counted as %+v", name, o)
		}
	}
	if _, err := a.RenameVolume(t.Context(), meta.RootVolume, "z2"); !errors.Is(err, meta.NotPermitted) {
		t.Errorf("rename the root: %v", err)
	}
	var names []string
	for v, err := range a.Volumes(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, v.Name+" "+string(v.State))
	}
	if want := "[root ready y ready z ready]"; fmt.Sprint(names) != want {
		t.Errorf("listed: %v, want %s", names, want)
	}
}

// A check of a volume sees junctions without a row, and rows without a junction.
func TestFsckComparesJunctions(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	var ids []meta.VolumeID
	for _, name := range []string{"one", "two", "three"} {
		v := a.must(t, toCreate(name, meta.Policy{}))
		a.must(t, toAttach(v, 1, name))
		ids = append(ids, v)
	}
	r, err := s.srv.checker.Fsck(t.Context(), 1)
	if err != nil || r.Count != 0 || r.Junctions != 3 {
		t.Fatalf("DATA: fsck: %+v, %v", r, err)
	}
	forget := func(v *cluster.Volume) error { v.Attach = nil; return nil }
	if _, err := s.cluster.UpdateVolume(t.Context(), ids[0], forget); err != nil {
		t.Fatal(err)
	}
	move := func(v *cluster.Volume) error { v.Attach.Name = "elsewhere"; return nil }
	if _, err := s.cluster.UpdateVolume(t.Context(), ids[1], move); err != nil {
		t.Fatal(err)
	}
	if r, err = s.srv.checker.Fsck(t.Context(), 1); err != nil || r.Count != 3 {
		t.Fatalf("want three problems: %+v, %v", r, err)
	}
}

// The table can't be asked while a volume is attached: an attached volume stays, and the next
// caller attaches a volume that is not attached.
func TestAttachWhileTableIsAway(t *testing.T) {
	t.Parallel()
	s := newTree(t)
	a := s.dial("a")
	away := func(id meta.VolumeID, after int) {
		s.cluster.mu.Lock()
		defer s.cluster.mu.Unlock()
		var mu sync.Mutex
		s.cluster.noRow = func(v meta.VolumeID) error {
			mu.Lock()
			defer mu.Unlock()
			if v != id {
				return nil
			}
			if after--; after < 0 && after >= -1 {
				return meta.E("volume", meta.Unavailable, "", nil)
			}
			return nil
		}
	}
	var ids []meta.VolumeID
	for _, name := range []string{"p", "v"} {
		ids = append(ids, a.must(t, toCreate(name, meta.Policy{})))
	}
	a.must(t, toAttach(ids[0], 1, "p"))
	attach := toAttach(ids[1], ids[0], "v")
	hangs := func() error {
		row, err := s.cluster.Volume(t.Context(), ids[1])
		if err != nil {
			return err
		}
		o, err := s.srv.hosted.ownerFor(t.Context(), ids[0])
		if err != nil {
			return err
		}
		if row.Attach == nil || row.Attach.Step != cluster.Attached || o.leadsTo(*row.Attach) != ids[1] {
			return fmt.Errorf("the row says %+v", row.Attach)
		}
		return nil
	}
	failed := 0
	for _, state := range []string{"new", "attached"} {
		// At whichever reading of the parent's row the failure comes.
		for n := range 8 {
			if state == "new" {
				a.ask(t.Context(), toDetach(ids[1])) // the attached volume
			}
			away(ids[0], n)
			_, err := a.ask(t.Context(), attach)
			s.cluster.mu.Lock()
			s.cluster.noRow = nil
			s.cluster.mu.Unlock()
			if err != nil {
				failed++
			}
			row, _ := s.cluster.Volume(t.Context(), ids[1])
			if state == "new" && err != nil && row.Attach == nil {
				continue // refused before anything was written
			}
			if state == "attached" {
				if err := hangs(); err != nil {
					t.Fatalf("it was attached, and the table away at reading %d: %v", n, err)
				}
			}
			eventually(t, "the volume hangs", hangs)
		}
		a.must(t, attach)
	}
	if failed < 3 {
		t.Errorf("the table was away at %d of its readings only", failed)
	}
	s.clean(t, 1)
}

// Two servers died, each after writing that it attaches one volume below the other, and before
// looking for a circle: no circle results.
func TestNoCycleIsLeft(t *testing.T) {
	t.Parallel()
	s := newTree(t)
	a := s.dial("a")
	var ids []meta.VolumeID
	for _, name := range []string{"one", "two"} {
		ids = append(ids, a.must(t, toCreate(name, meta.Policy{})))
	}
	s.cluster.mu.Lock()
	for i, id := range ids {
		v := s.cluster.rows[id]
		v.Attach = &cluster.Attach{Parent: ids[1-i], Ino: meta.RootIno, Name: "below", Step: cluster.Attaching}
		s.cluster.rows[id] = v
	}
	s.cluster.mu.Unlock()
	eventually(t, "the steps are settled", func() error {
		for _, id := range ids {
			if row, err := s.cluster.Volume(t.Context(), id); err != nil || row.Attach != nil && row.Attach.Step != cluster.Attached {
				return fmt.Errorf("%+v, %v", row.Attach, err)
			}
		}
		return nil
	})
	one, _ := s.cluster.Volume(t.Context(), ids[0])
	two, _ := s.cluster.Volume(t.Context(), ids[1])
	if one.Attach != nil && two.Attach != nil {
		t.Errorf("both hang below each other: %+v, %+v", one.Attach, two.Attach)
	}
}
