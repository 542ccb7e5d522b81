package server

import (
	"bytes"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
)

// TestScheduleAcrossOwners: owners die by SIGKILL between two due times of a snapshot, and at a
// due time. The next owner takes no second snapshot for an interval that has a snapshot, takes
// the snapshot that is due when the owner begins, or when an interval began without an owner, and
// gives up the snapshots of earlier owners that no rule wants any more; all without a caller.
func TestScheduleAcrossOwners(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	const every = 3 * time.Second
	a.schedule(t, "12s:3s")
	intervals := map[int64]meta.Generation{} // that have a snapshot
	newest := int64(0)
	first := meta.Generation(0)
	// look notes the snapshots, in the journal's words.
	look := func() (all []meta.Snapshot) {
		t.Helper()
		o, err := s.srv.hosted.ownerFor(t.Context(), 1)
		if err == nil {
			err = o.await(t.Context(), o.recovered)
		}
		if err == nil {
			all, err = o.snapshots.list()
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
		s.crash() // this interval has a snapshot
		s.start()
		taken("the next owner takes one")
	}
	// No owner lives when a snapshot is due.
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

// schedule sets the volume's schedule.
func (p *peer) schedule(t *testing.T, keep string) {
	t.Helper()
	if err := p.ScheduleSnapshots(t.Context(), 1, keep); err != nil {
		t.Fatal(err)
	}
}

func TestScheduleIsKept(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.snapshot(t, "mine")
	if err := a.ScheduleSnapshots(t.Context(), 1, "24h"); !errors.Is(err, meta.Invalid) {
		t.Errorf("no schedule: %v", err)
	}
	a.schedule(t, "3s:1s")
	scheduled := func() (l []string) {
		for _, n := range a.names(t) {
			if strings.HasPrefix(n, "auto-") && strings.HasSuffix(n, string(meta.SnapshotReady)) {
				l = append(l, n)
			}
		}
		return l
	}
	var first string
	eventually(t, "two snapshots", func() error {
		l := scheduled()
		if len(l) > 0 {
			first = l[0]
		}
		return unless(len(l) >= 2)
	})
	s.crash()
	s.start()
	eventually(t, "the first is not kept any more", func() error {
		l := scheduled()
		return unless(len(l) > 0 && !slices.Contains(l, first))
	})
	a.schedule(t, "")
	if !slices.Contains(a.names(t), "mine ready") {
		t.Fatal("a snapshot that is none of the schedule's was deleted")
	}
	n := len(a.names(t))
	time.Sleep(2500 * time.Millisecond)
	if l := a.names(t); len(l) > n+1 { // a snapshot may have been under way
		t.Fatalf("it goes on: %v", l)
	}
	s.exact()
}

// TestScheduleThatFails: health tells of a due snapshot that can't be taken until the snapshot
// could be taken, and the owner tries ever more rarely.
func TestScheduleThatFails(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 20*time.Second)
	chunks := s.chunkServer(1)
	a := s.dial("a")
	a.openEnd(t, chunks)
	a.mu.Lock()
	a.holdsOn = true
	a.mu.Unlock()
	chunks.refuse(meta.IO)
	a.schedule(t, "24h:hourly")
	health := func() (l []meta.VolumeHealth) {
		return slices.DeleteFunc(s.srv.health.Health(t.Context()).Volumes, func(v meta.VolumeHealth) bool { return v.Undone == "" })
	}
	eventually(t, "it is told", func() error { return unless(len(health()) == 1) })
	o := s.srv.hosted.opened(1)
	for range 20 { // looked at again, the snapshot is not tried again yet
		o.tasks.snapshots.Wake()
		time.Sleep(5 * time.Millisecond)
	}
	f := a.snapshots(t).Failing
	if f == nil || f.Tries > 2 || f.Why == "" || f.Next.Sub(f.Since) < scheduleRetry || !health()[0].UndoneSince.Equal(f.Since) {
		t.Fatalf("%+v, %+v", f, health())
	}
	chunks.refuse(meta.KindOK)
	eventually(t, "it is taken", func() error {
		o.mu.Lock()
		o.schedule.going.next = time.Time{}
		o.mu.Unlock()
		o.tasks.snapshots.Wake()
		return unless(len(a.names(t)) == 1)
	})
	eventually(t, "nothing is wrong any more", func() error { return unless(len(health()) == 0 && a.snapshots(t).Failing == nil) })

	var sch scheduling
	var waits []time.Duration
	now := time.Now()
	for range 8 {
		waits = append(waits, sch.failed(errors.New("x"), now, time.Hour))
	}
	if want := []time.Duration{15, 30, 60, 120, 240, 480, 600, 600}; !slices.EqualFunc(waits, want, func(a, b time.Duration) bool { return a == b*time.Second }) {
		t.Error(waits)
	}
	if sch.failed(errors.New("x"), now, time.Minute) != time.Minute || sch.failed(errors.New("x"), now, time.Second) != scheduleRetry {
		t.Error("tries of short intervals")
	}
}

// TestFailingScheduleStaysOpen: an unused volume is not closed while its schedule fails, a
// failure that the next owner would not know.
func TestFailingScheduleStaysOpen(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.create(t, "f")
	o := s.srv.hosted.opened(1)
	s.srv.room.tight.Store(&shortage{err: meta.E("journal", meta.NoSpace, "test", nil)})
	a.schedule(t, "24h:hourly")
	var failing scheduling
	eventually(t, "it fails", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		if failing = o.schedule.going; failing.tries == 0 {
			return errors.New("not yet")
		}
		failing.next = time.Now().Add(time.Hour) // the snapshot is not tried again meanwhile
		o.schedule.going = failing
		return nil
	})
	s.srv.room.tight.Store(nil)
	if err := a.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	unused := func(sch scheduling) bool {
		o.mu.Lock()
		o.schedule.going = sch
		o.mu.Unlock()
		return o.unused()
	}
	eventually(t, "nothing else keeps it open", func() error { return unless(unused(scheduling{next: failing.next})) })
	if unused(failing) {
		t.Error("it would be closed")
	}
}

// TestScheduleSetWhileRead: a schedule that is set while the owner reads the earlier schedule
// holds.
func TestScheduleSetWhileRead(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.create(t, "f")
	o := s.srv.hosted.opened(1)
	known := func(keep string) func() error {
		return func() error {
			o.mu.Lock()
			defer o.mu.Unlock()
			return unless(!o.schedule.read.IsZero() && o.schedule.keep == keep)
		}
	}
	eventually(t, "it was looked at", known(""))
	const keep = "24h:6h"
	var read atomic.Bool
	s.cluster.mu.Lock()
	s.cluster.read = func(v meta.VolumeID) {
		// Others read rows, too.
		if v == 1 && bytes.Contains(debug.Stack(), []byte(").readSchedule(")) && !read.Swap(true) {
			a.schedule(t, keep)
		}
	}
	s.cluster.mu.Unlock()
	o.schedule.scheduleChanged()
	eventually(t, "it is read", func() error { return unless(read.Load()) })
	eventually(t, "the new one holds", known(keep))
}

// TestDeletionsStandBack: a large deletion pauses for due snapshots, and goes on afterwards.
func TestDeletionsStandBack(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.try(t, &meta.GetAttr{Ino: meta.RootIno})
	var made, gone []client.BatchOp
	for i := range 3 * dropStep {
		made = append(made, client.BatchOp{Op: newFile(fmt.Sprint("f", i))})
		gone = append(gone, client.BatchOp{Op: &meta.Unlink{Parent: meta.RootIno, Name: fmt.Sprint("f", i)}})
	}
	batch := func(ops []client.BatchOp) {
		t.Helper()
		if _, _, err := a.DoBatch(t.Context(), 1, client.AnyEpoch, ops); err != nil {
			t.Fatal(err)
		}
	}
	batch(made)
	one := a.snapshot(t, "one")
	batch(gone)
	o := s.srv.hosted.opened(1)
	eventually(t, "the schedule was looked at", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(!o.schedule.read.IsZero() && !o.tasks.snapshots.Status().Woken)
	})
	o.mu.Lock() // no owner is told to go on with the deletion
	_, err := o.run(&meta.DropSnapshot{At: one.At, Max: 1}, 0)
	o.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		more, err := o.snapshots.dropUntil(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if !more {
			if n < 3 {
				t.Fatalf("after %d steps it was gone", n)
			}
			break
		}
	}
	if l := a.names(t); len(l) != 0 {
		t.Fatal(l)
	}
	s.exact()
}

func TestSchedulePlan(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"24h", "24h:", ":hourly", "1h:daily", "x:hourly", "24h:x", "-1h:1s", "24h:1ms", "24h:hourly,", "1000d:minutely"} {
		if r, err := parseKeep(bad); meta.KindOf(err) != meta.Invalid {
			t.Errorf("%q: %v, %v", bad, r, err)
		}
	}
	rules, err := parseKeep("24h:hourly, 7d:daily")
	if err != nil {
		t.Fatal(err)
	}
	// Run the schedule for three weeks, looking every ten minutes.
	var have []meta.Snapshot
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for now := began; now.Before(began.Add(21 * 24 * time.Hour)); now = now.Add(10 * time.Minute) {
		due, unwanted := plan(rules, have, now)
		if due != (now.Minute() == 0) {
			t.Fatalf("%v: due %v", now, due)
		}
		have = slices.DeleteFunc(have, func(s meta.Snapshot) bool {
			return slices.ContainsFunc(unwanted, func(u meta.Snapshot) bool { return u.At == s.At })
		})
		if due {
			have = append(have, meta.Snapshot{At: meta.Generation(len(have)) + meta.Generation(now.Unix()), Created: meta.Time(now.UnixNano()), Name: scheduledName(now)})
		}
	}
	days := map[int]int{}
	for _, s := range have {
		if !isScheduled(s.Name) {
			t.Fatal(s.Name)
		}
		days[time.Unix(0, int64(s.Created)).UTC().YearDay()]++
	}
	if len(have) != 24+7 && len(have) != 24+6 {
		t.Errorf("%d are kept, 24 hourly and 7 daily ones were wanted: %v", len(have), days)
	}
	for d := 16; d < 20; d++ {
		if days[d] != 1 {
			t.Errorf("%d of day %d are kept", days[d], d)
		}
	}
}
