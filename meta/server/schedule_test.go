package server

import (
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestScheduleAcrossOwners: owners die by SIGKILL between two times at which a snapshot is
// due, and while one is. The next one takes no second for an interval that has one, takes
// what is due when it begins, or when an interval began while nobody was there, and gives
// up what the ones before it took and no rule wants any more; and nobody asks it to.
func TestScheduleAcrossOwners(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	const every = 3 * time.Second
	a.schedule(t, "12s:3s")
	intervals := map[int64]meta.Generation{} // that have a snapshot
	newest := int64(0)
	first := meta.Generation(0)
	// look notes what there is, in the journal's words.
	look := func() (all []meta.Snapshot) {
		t.Helper()
		o, err := s.srv.ownerFor(t.Context(), 1)
		if err == nil {
			err = o.await(t.Context(), o.recovered)
		}
		if err == nil {
			all, err = o.snapshots()
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, sn := range all {
			b := bucket(time.Unix(0, int64(sn.Created)), every)
			if had, ok := intervals[b]; ok && had != sn.At {
				t.Fatalf("snapshots %d and %d were taken in one interval", had, sn.At)
			}
			intervals[b] = sn.At
			newest = max(newest, b)
			if first == 0 {
				first = sn.At
			}
		}
		return all
	}
	taken := func(what string) {
		t.Helper()
		before := newest
		eventually(t, what, func() error { look(); return unless(newest > before) })
	}
	taken("the first")
	for range 3 {
		s.crash() // there is one of this interval
		s.start()
		taken("the next owner takes one")
	}
	// Nobody is there when one is due.
	s.crash()
	now := time.Now()
	time.Sleep(now.Truncate(every).Add(every + every/4).Sub(now))
	s.start()
	taken("it is taken by who comes late")
	eventually(t, "the first owner's is not kept any more", func() error {
		for _, sn := range look() {
			if sn.At == first && !sn.Deleting {
				return errors.New("it is")
			}
		}
		return nil
	})
	s.exact()
}
