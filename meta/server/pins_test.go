package server

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/operator"
)

// holders lists the pins of a snapshot.
func (p *peer) holders(t *testing.T, name string) (l []string) {
	t.Helper()
	for _, s := range p.snapshots(t).Snapshots {
		for _, pin := range s.Pins {
			if s.Name == name {
				l = append(l, pin.Holder)
			}
		}
	}
	return l
}

// TestPins: no caller deletes a pinned snapshot, under this owner and the next, and the snapshot
// survives a rollback; when all pins are released the snapshot goes.
func TestPins(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.create(t, "f")
	a.snapshot(t, "one")
	a.create(t, "g")
	a.snapshot(t, "two")
	first, err := a.PinSnapshot(t.Context(), 1, "two", "run-1", time.Hour)
	if err != nil || first.By != "local" || time.Until(first.Until) < 50*time.Minute {
		t.Fatalf("%+v, %v", first, err)
	}
	if _, err := a.PinSnapshot(t.Context(), 1, "two", "run-2", time.Hour); err != nil {
		t.Fatal(err)
	}
	// A shorter renewal takes nothing away, a longer renewal adds.
	if p, err := a.PinSnapshot(t.Context(), 1, "two", "run-1", time.Minute); err != nil || !p.Until.Equal(first.Until) {
		t.Fatalf("%+v, %v", p, err)
	}
	if p, err := a.PinSnapshot(t.Context(), 1, "two", "run-1", 2*time.Hour); err != nil || !p.Until.After(first.Until) || !p.Made.Equal(first.Made) {
		t.Fatalf("%+v, %v", p, err)
	}
	for why, f := range map[meta.Kind]func() error{
		meta.NoSuchSnapshot: func() error { _, err := a.PinSnapshot(t.Context(), 1, "three", "x", time.Hour); return err },
		meta.Invalid:        func() error { _, err := a.PinSnapshot(t.Context(), 1, "two", "", time.Hour); return err },
	} {
		if err := f(); meta.KindOf(err) != why {
			t.Errorf("%v, want %v", err, why)
		}
	}
	refused := func(when string) {
		t.Helper()
		_, err := a.DeleteSnapshot(t.Context(), 1, "two")
		if meta.KindOf(err) != meta.Busy || !strings.Contains(err.Error(), "run-1 until 20") || !strings.Contains(err.Error(), "run-2 until 20") {
			t.Fatalf("%s: %v", when, err)
		}
		if got := a.holders(t, "two"); !slices.Equal(got, []string{"run-1", "run-2"}) {
			t.Fatalf("%s: %v", when, got)
		}
	}
	refused("at once")
	s.crash()
	s.start()
	refused("under the next owner")
	if err := a.RollBack(t.Context(), 1, "one", true); err != nil {
		t.Fatal(err)
	}
	refused("after a rollback")

	for holder, want := range map[string]bool{"run-1": true, "run-3": false} {
		if got, err := a.UnpinSnapshot(t.Context(), 1, "two", holder); err != nil || got != want {
			t.Fatalf("%s: %v, %v", holder, got, err)
		}
	}
	if _, err := a.DeleteSnapshot(t.Context(), 1, "two"); meta.KindOf(err) != meta.Busy || strings.Contains(err.Error(), "run-1") {
		t.Fatal(err)
	}
	s.crash()
	s.start()
	if got := a.holders(t, "two"); !slices.Equal(got, []string{"run-2"}) {
		t.Fatal(got)
	}
	if got, err := a.UnpinSnapshot(t.Context(), 1, "two", "run-2"); err != nil || !got {
		t.Fatal(got, err)
	}
	if _, err := a.DeleteSnapshot(t.Context(), 1, "two"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "two is gone", func() error { return unless(slices.Equal(a.names(t), []string{"one ready"})) })
	s.exact()
}

// TestPinOfOneThatIsGone: a caller that means a deleted snapshot pins no other snapshot of the
// same name.
func TestPinOfOneThatIsGone(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	was := a.snapshot(t, "one").At
	if _, err := a.PinSnapshotAt(t.Context(), 1, "one", was, "run", time.Hour); err != nil {
		t.Fatal(err)
	}
	if _, err := a.UnpinSnapshot(t.Context(), 1, "one", "run"); err != nil {
		t.Fatal(err)
	}
	if _, err := a.DeleteSnapshot(t.Context(), 1, "one"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another one", func() error {
		_, err := a.TakeSnapshot(t.Context(), 1, "one")
		return err
	})
	if _, err := a.PinSnapshotAt(t.Context(), 1, "one", was, "run", time.Hour); meta.KindOf(err) != meta.NoSuchSnapshot {
		t.Error(err)
	}
	if l := a.holders(t, "one"); len(l) > 0 {
		t.Errorf("the other one is pinned by %v", l)
	}
}

// TestPinnedOfSchedule: the schedule deletes its own snapshots when their last pin ends, and not
// before.
func TestPinnedOfSchedule(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.schedule(t, "2s:1s")
	var first string
	eventually(t, "a snapshot is taken and pinned", func() error {
		for _, i := range a.snapshots(t).Snapshots {
			if i.State == meta.SnapshotReady {
				first = i.Name
				_, err := a.PinSnapshot(t.Context(), 1, first, "run", time.Hour)
				return err
			}
		}
		return errors.New("none")
	})
	taken := map[string]bool{}
	eventually(t, "the schedule goes on", func() error {
		for _, n := range a.names(t) {
			taken[n] = true
		}
		return unless(len(taken) > 5)
	})
	if !slices.Contains(a.names(t), first+" ready") {
		t.Fatalf("%s is pinned, and gone: %v", first, a.names(t))
	}
	if _, err := a.UnpinSnapshot(t.Context(), 1, first, "run"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the schedule deletes it", func() error {
		return unless(!slices.ContainsFunc(a.names(t), func(n string) bool { return strings.HasPrefix(n, first+" ") }))
	})
}

// TestPinnedVolume can't be deleted.
func TestPinnedVolume(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	v := a.must(t, toCreate("v", meta.Policy{}))
	if _, err := a.TakeSnapshot(t.Context(), v, "one"); err != nil {
		t.Fatal(err)
	}
	if _, err := a.PinSnapshot(t.Context(), v, "one", "run", time.Hour); err != nil {
		t.Fatal(err)
	}
	a.mustNot(t, meta.Busy, toDelete(v))
	if _, err := a.UnpinSnapshot(t.Context(), v, "one", "run"); err != nil {
		t.Fatal(err)
	}
	a.must(t, toDelete(v))
}

// TestWhoMayPin: readers may pin; only administrators of the volume release another caller's pin.
func TestWhoMayPin(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.grants(2, cluster.Grant{Who: "client/reader", Volume: 1, Rights: cluster.ReadRights, Users: cluster.UsersAsIs},
		cluster.Grant{Who: "client/other", Volume: 1, Rights: cluster.WriteRights, Users: cluster.UsersAsIs},
		cluster.Grant{Who: "client/boss", Volume: 1, Rights: cluster.AdminRights, Users: cluster.UsersAsIs})
	as := func(name string) *operator.Operator {
		return operator.New(t, s.addr, s.creds(peering.Client, name))
	}
	boss := as("boss")
	if _, err := boss.TakeSnapshot(t.Context(), 1, "one"); err != nil {
		t.Fatal(err)
	}
	p, err := as("reader").PinSnapshot(t.Context(), 1, "one", "run", time.Hour)
	if err != nil || p.By != "client/reader" {
		t.Fatalf("%+v, %v", p, err)
	}
	if _, err := as("stranger").PinSnapshot(t.Context(), 1, "one", "x", time.Hour); meta.KindOf(err) != meta.AccessDenied {
		t.Errorf("a client without a grant: %v", err)
	}
	if _, err := as("stranger").UnpinSnapshot(t.Context(), 1, "one", "run"); meta.KindOf(err) != meta.AccessDenied {
		t.Errorf("a client without a grant: %v", err)
	}
	if _, err := as("other").UnpinSnapshot(t.Context(), 1, "one", "run"); meta.KindOf(err) != meta.AccessDenied || !strings.Contains(err.Error(), "client/reader") {
		t.Errorf("another's pin: %v", err)
	}
	// A renewal does not change a pin's maker.
	if p, err := as("other").PinSnapshot(t.Context(), 1, "one", "run", 2*time.Hour); err != nil || p.By != "client/reader" {
		t.Errorf("%+v, %v", p, err)
	}
	if ok, err := as("reader").UnpinSnapshot(t.Context(), 1, "one", "run"); err != nil || !ok {
		t.Errorf("one's own: %v, %v", ok, err)
	}
	// A reader has a digest computed before others, but at the rate of all.
	for _, who := range []string{"other", "boss"} {
		i, err := as(who).AwaitDigest(t.Context(), 1, "one", true)
		if err != nil {
			t.Fatal(err)
		}
		if awaited, unpaced := s.srv.hosted.opened(1).digesting.isAwaited(i.At); !awaited || unpaced != (who == "boss") {
			t.Errorf("for %s: awaited %v, at no rate %v", who, awaited, unpaced)
		}
	}
	if _, err := as("reader").PinSnapshot(t.Context(), 1, "one", "run", time.Hour); err != nil {
		t.Fatal(err)
	}
	if ok, err := boss.UnpinSnapshot(t.Context(), 1, "one", "run"); err != nil || !ok {
		t.Errorf("the administrator: %v, %v", ok, err)
	}
}
