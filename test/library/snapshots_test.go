package library

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/test/operator"
)

func TestSnapshots(t *testing.T) {
	t.Parallel()
	c, ctx := newCluster(t), t.Context()
	admin, boss := c.admin(), c.operator("admin")
	v := c.volume(admin, "data")
	c.put(v, "/kept", "kept")
	c.put(v, "/gone", "gone")
	c.put(v, "/moved", "moved")
	// Written and not synced, by another client.
	w := c.user("writer", "data", "write")
	f, err := c.open(w, "data").Tree().OpenFile(ctx, "/buffered", os.O_CREATE|os.O_RDWR, 0o644)
	c.must(err)
	defer f.Close()
	buffered := strings.Repeat("buffered ", 3000)
	c.must(second(f.Write([]byte(buffered))))

	one, err := boss.TakeSnapshot(ctx, v.ID(), "one")
	if err != nil || one.Name != "one" || one.At == 0 || one.Inodes != 5 || one.Unanswered != 0 {
		t.Fatalf("%+v, %v", one, err)
	}
	c.refused(second(boss.TakeSnapshot(ctx, v.ID(), "one")), meta.Exists, "one")
	for _, name := range badNames {
		c.refused(second(boss.TakeSnapshot(ctx, v.ID(), name)), meta.Invalid)
	}
	c.refused(second(boss.TakeSnapshot(ctx, v.ID(), strings.Repeat("x", meta.MaxName+1))), meta.NameTooLong)
	c.must(v.Tree().Remove(ctx, "/gone"))
	c.must(v.Tree().Rename(ctx, "/moved", "/there"))
	c.put(v, "/kept", "WRITTEN")
	c.put(v, "/new", "new")
	two, err := boss.TakeWhole(ctx, v.ID(), "two")
	if err != nil || two.At <= one.At {
		t.Fatalf("%+v, %v", two, err)
	}
	list, err := boss.Snapshots(ctx, v.ID())
	if l := list.Snapshots; err != nil || len(l) != 2 || l[0].Name != "one" || l[1].Name != "two" || l[0].Inodes != one.Inodes {
		t.Errorf("%+v, %v", list, err)
	}

	// The earlier state, through a view, which refuses changes.
	s, err := admin.Snapshot(ctx, "data", "one")
	c.must(err)
	of, info, ok := s.View()
	if !ok || of != v.ID() || info.At != one.At || s.Name() != "data@one" {
		t.Errorf("%s is a view of %d: %+v %v", s.Name(), of, info, ok)
	}
	for path, text := range map[string]string{"/kept": "kept", "/gone": "gone", "/moved": "moved", "/buffered": buffered} {
		c.has(s, path, text)
	}
	c.has(v, "/.snapshot/one/gone", "gone")
	c.refused(s.Tree().WriteFile(ctx, "/new", nil, 0o644), meta.ReadOnly)
	c.refused(s.Tree().Remove(ctx, "/kept"), meta.ReadOnly)
	for _, err := range []error{second(admin.Snapshot(ctx, "data", "none")), second(v.Snapshot(ctx, "none")), second(boss.DeleteSnapshot(ctx, v.ID(), "none")), boss.RollBack(ctx, v.ID(), "none", true)} {
		c.refused(err, meta.NoSuchSnapshot, "none")
	}
	c.refused(second(admin.Snapshot(ctx, "none", "one")), meta.NoSuchVolume)

	// The changes between snapshots.
	diff := func(by *operator.Operator, from, to string) (l []string, err error) {
		err = by.DiffSnapshots(ctx, v.ID(), from, to, func(ch meta.Change) error {
			l = append(l, fmt.Sprintf("%v %s %s %v", ch.Kind, ch.From, ch.Path, ch.Content))
			return nil
		})
		return l, err
	}
	want := []string{
		fmt.Sprintf("%v  gone false", meta.PathRemoved), fmt.Sprintf("%v  kept true", meta.PathChanged), fmt.Sprintf("%v  new false", meta.PathAdded), fmt.Sprintf("%v moved there false", meta.PathRenamed),
	}
	if l, err := diff(boss, "one", "two"); err != nil || !slices.Equal(l, want) {
		t.Errorf("%q, %v; it should be %q", l, err, want)
	}
	if l, err := diff(boss, "two", ""); err != nil || len(l) != 0 {
		t.Errorf("up to now: %q, %v", l, err)
	}
	c.refused(second(diff(boss, "two", "one")), meta.Invalid)
	c.refused(second(diff(boss, "none", "")), meta.NoSuchSnapshot, "none")
	enough := errors.New("enough")
	if err := boss.DiffSnapshots(ctx, v.ID(), "one", "two", func(meta.Change) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("what fn says does not come through: %v", err)
	}

	// The bytes that only the snapshots have: the old contents of "kept", and "gone" once
	// its extents are removed, a moment after it lost its name; until then two snapshots
	// may count its bytes.
	c.Until("what both hold", func() error {
		use, err := boss.SnapshotUse(ctx, v.ID(), []string{"one", "two"})
		if err == nil && (use.Alone != uint64(len("gone")+len("kept")) || use.Freed != use.Alone || len(use.Snapshots) != 2 || use.Snapshots[0].Alone < uint64(len("kept")) || use.Snapshots[1].Alone != 0) {
			err = fmt.Errorf("%+v", use)
		}
		return err
	})
	c.refused(second(boss.SnapshotUse(ctx, v.ID(), []string{"none"})), meta.NoSuchSnapshot, "none")

	// Rights: a client that may read can look, and change nothing.
	r := c.open(c.user("reader", "data", "read"), "data")
	reader := c.operator("reader")
	if l, err := reader.Snapshots(ctx, r.ID()); err != nil || len(l.Snapshots) != 2 {
		t.Errorf("%+v, %v", l, err)
	}
	if l, err := diff(reader, "one", "two"); err != nil || !slices.Equal(l, want) {
		t.Errorf("%q, %v", l, err)
	}
	rs, err := r.Snapshot(ctx, "one")
	c.must(err)
	c.has(rs, "/gone", "gone")
	for _, err := range []error{
		second(reader.TakeSnapshot(ctx, r.ID(), "mine")), second(reader.TakeWhole(ctx, r.ID(), "mine")), second(reader.DeleteSnapshot(ctx, r.ID(), "one")), reader.RollBack(ctx, r.ID(), "one", true),
		reader.ScheduleSnapshots(ctx, r.ID(), "24h:hourly"), second(reader.SnapshotUse(ctx, r.ID(), nil)),
	} {
		c.refused(err, meta.AccessDenied)
	}

	// A schedule takes snapshots by itself, and leaves all others alone.
	c.refused(boss.ScheduleSnapshots(ctx, v.ID(), "nonsense"), meta.Invalid, "nonsense")
	c.must(boss.ScheduleSnapshots(ctx, v.ID(), "24h:hourly"))
	c.Until("a snapshot by schedule", func() error {
		l, err := boss.Snapshots(ctx, v.ID())
		if err == nil && (len(l.Snapshots) != 3 || !strings.HasPrefix(l.Snapshots[2].Name, "auto-")) {
			err = fmt.Errorf("%+v", l)
		}
		return err
	})
	c.must(boss.ScheduleSnapshots(ctx, v.ID(), ""))

	// The way back.
	c.refused(boss.RollBack(ctx, v.ID(), "one", false), meta.Busy)
	c.must(f.Close())
	c.must(boss.RollBack(ctx, v.ID(), "one", true))
	c.Until("the volume is what it was", func() error {
		b, err := v.Tree().ReadFile(ctx, "/gone")
		if err == nil && string(b) != "gone" {
			err = fmt.Errorf("%q", b)
		}
		return err
	})
	c.refused(second(v.Tree().Stat(ctx, "/new")), meta.NotFound)
	c.has(v, "/kept", "kept")

	c.must(second(boss.DeleteSnapshot(ctx, v.ID(), "one")))
	// While the deletion goes on, a second deletion is a repetition of the first.
	c.Until("it is gone", func() error {
		if _, err := boss.DeleteSnapshot(ctx, v.ID(), "one"); !errors.Is(err, meta.NoSuchSnapshot) {
			return fmt.Errorf("its deletion says %v", err)
		}
		return nil
	})
	c.Until("its view has ended", func() error {
		_, err := v.Snapshot(ctx, "one")
		if !errors.Is(err, meta.NoSuchSnapshot) || !s.Ended() {
			return fmt.Errorf("%v, ended %v", err, s.Ended())
		}
		return nil
	})
	c.refused(second(s.GetAttr(ctx, meta.RootIno)), meta.Stale)
	c.Must("fsck", "--volume", "data")
}

func TestGroups(t *testing.T) {
	t.Parallel()
	c, ctx := newCluster(t), t.Context()
	admin, boss := c.admin(), c.operator("admin")
	a, b := c.volume(admin, "a"), c.volume(admin, "b")
	groups, err := admin.Groups()
	c.must(err)
	c.put(a, "/f", "of a")
	c.put(b, "/f", "of b")
	g, err := groups.Take(ctx, "g", true, a, b)
	if err != nil || g.State != meta.GroupReady || !slices.Equal(g.Volumes(), []meta.VolumeID{a.ID(), b.ID()}) {
		t.Fatalf("%+v, %v", g, err)
	}
	for _, v := range []*penstock.Volume{a, b} {
		s, err := v.Snapshot(ctx, "g")
		c.must(err)
		c.has(s, "/f", "of "+v.Name())
		c.refused(second(groups.Take(ctx, "h", false, s)), meta.ReadOnly)
	}
	c.must(second(boss.TakeSnapshot(ctx, b.ID(), "own")))
	c.refused(second(groups.Take(ctx, "g", false, a)), meta.Exists, "g")
	c.refused(second(groups.Take(ctx, "own", false, a, b)), meta.Exists, "own")
	for _, name := range badNames {
		c.refused(second(groups.Take(ctx, name, false, a, b)), meta.Invalid)
	}
	c.refused(second(groups.Take(ctx, "h", false)), meta.Invalid)
	c.refused(second(groups.Take(ctx, "h", false, a, a)), meta.Invalid)
	if l, err := boss.Snapshots(ctx, a.ID()); err != nil || len(l.Snapshots) != 1 {
		t.Errorf("what was refused left %+v, %v", l, err)
	}
	if x, err := groups.Find(ctx, "g"); err != nil || x.Name != "g" {
		t.Errorf("%+v, %v", x, err)
	}
	c.refused(second(groups.Find(ctx, "h")), meta.NotFound)
	if l, err := groups.All(ctx); err != nil || !slices.ContainsFunc(l, func(g meta.Group) bool { return g.Name == "g" && g.State == meta.GroupReady }) {
		t.Errorf("%+v, %v", l, err)
	}
	half := c.user("half", "a", "admin")
	theirs, err := half.Groups()
	c.must(err)
	c.must(second(c.operator("half").TakeSnapshot(ctx, a.ID(), "mine")))
	c.refused(second(theirs.All(ctx)), meta.AccessDenied)
	c.refused(theirs.Delete(ctx, "g"), meta.AccessDenied)
	c.must(groups.Delete(ctx, "g"))
	c.refused(groups.Delete(ctx, "g"), meta.NotFound)
	for _, v := range []*penstock.Volume{a, b} {
		c.refused(second(boss.DeleteSnapshot(ctx, v.ID(), "g")), meta.NoSuchSnapshot)
	}
}

// TestPins: a run names the snapshot that it reads, keeps the snapshot, and verifies its
// contents.
func TestPins(t *testing.T) {
	t.Parallel()
	c, ctx := newCluster(t), t.Context()
	admin, boss := c.admin(), c.operator("admin")
	v := c.volume(admin, "data")
	c.put(v, "/small", "small")
	c.put(v, "/large", strings.Repeat("large ", 300_000))
	c.must(second(boss.TakeSnapshot(ctx, v.ID(), "v1")))
	r := c.open(c.user("run", "data", "read"), "data")
	run := c.operator("run")
	p, err := run.PinSnapshot(ctx, r.ID(), "v1", "run-42", time.Hour)
	if left := time.Until(p.Until); err != nil || p.Holder != "run-42" || p.By != "client/run" || left < 50*time.Minute || left > 70*time.Minute {
		t.Fatalf("%+v, %v", p, err)
	}
	if again, err := run.PinSnapshot(ctx, r.ID(), "v1", "run-42", time.Minute); err != nil || again.Until.Before(p.Until) {
		t.Errorf("pinned for less, it lasts until %v, %v; it did until %v", again.Until, err, p.Until)
	}
	for _, bad := range []struct {
		name, holder string
		ttl          time.Duration
		kind         meta.Kind
	}{
		{"none", "run", time.Hour, meta.NoSuchSnapshot}, {"v1", "", time.Hour, meta.Invalid}, {"v1", "a\nb", time.Hour, meta.Invalid}, {"v1", strings.Repeat("x", 256), time.Hour, meta.NameTooLong},
		{"v1", "run", 0, meta.Invalid}, {"v1", "run", -time.Hour, meta.Invalid}, {"v1", "run", meta.MaxPinTTL + 1, meta.Invalid},
	} {
		c.refused(second(run.PinSnapshot(ctx, r.ID(), bad.name, bad.holder, bad.ttl)), bad.kind)
	}
	vols, err := admin.Volumes()
	c.must(err)
	c.refused(second(boss.DeleteSnapshot(ctx, v.ID(), "v1")), meta.Busy, "run-42")
	c.refused(vols.Delete(ctx, v.ID(), true), meta.Busy, "run-42")

	// A view renews its pins, and releases none.
	view, err := r.Snapshot(ctx, "v1")
	c.must(err)
	c.refused(v.Pin(ctx, "run-43", time.Hour), meta.NotSupported)
	c.must(view.Pin(ctx, "run-43", 6*time.Second))
	until := func() (t time.Time) {
		l, err := boss.Snapshots(ctx, v.ID())
		c.must(err)
		for _, p := range l.Snapshots[0].Pins {
			if p.Holder == "run-43" {
				t = p.Until
			}
		}
		return t
	}
	first := until()
	keeping, end := context.WithCancel(ctx)
	kept := make(chan struct{})
	go func() { view.KeepPinned(keeping, "run-43", 6*time.Second); close(kept) }()
	c.Until("the pin is renewed", func() error {
		if now := until(); !now.After(first) {
			return fmt.Errorf("until %v", now)
		}
		return nil
	})
	end()
	<-kept
	c.user("other", "data", "read")
	other := c.operator("other")
	c.refused(second(other.UnpinSnapshot(ctx, v.ID(), "v1", "run-42")), meta.AccessDenied)
	c.refused(second(run.UnpinSnapshot(ctx, r.ID(), "none", "run-42")), meta.NoSuchSnapshot)
	if released, err := run.UnpinSnapshot(ctx, r.ID(), "v1", "nobody"); released || err != nil {
		t.Errorf("nobody's pin: %v, %v", released, err)
	}
	for _, by := range []struct {
		o      *operator.Operator
		holder string
	}{{run, "run-42"}, {boss, "run-43"}} {
		if released, err := by.o.UnpinSnapshot(ctx, v.ID(), "v1", by.holder); !released || err != nil {
			t.Errorf("%s: %v, %v", by.holder, released, err)
		}
	}

	// The digest, as the owner records it, and as a reader computes it.
	c.refused(second(v.RecordedDigest(ctx)), meta.NotSupported)
	c.refused(second(second3(v.ComputeDigest(ctx, nil))), meta.NotSupported)
	recorded := c.digest(view)
	sum, progress, err := view.ComputeDigest(ctx, nil)
	if err != nil || sum != recorded || progress.Inodes != 3 || progress.Bytes != 5+1_800_000 {
		t.Errorf("%v over %+v, %v; recorded is %v", sum, progress, err, recorded)
	}
	c.must(view.Demand(ctx, recorded))
	c.put(v, "/small", "SMALL")
	c.must(second(boss.TakeSnapshot(ctx, v.ID(), "v2")))
	v2, err := r.Snapshot(ctx, "v2")
	c.must(err)
	later := c.digest(v2)
	err = view.Demand(ctx, later)
	c.refused(err, meta.Corrupt, recorded.String(), later.String())
	if wrong, ok := errors.AsType[*penstock.WrongDigestError](err); !ok || wrong.Have != recorded || wrong.Want != later {
		t.Errorf("%+v", err)
	}
	if text, err := penstock.ParseDigest(recorded.String()); err != nil || text != recorded {
		t.Errorf("%v, %v", text, err)
	}

	// The same files in another volume have the same digest.
	b := c.volume(admin, "imported")
	c.put(b, "/large", strings.Repeat("large ", 300_000))
	c.put(b, "/small", "small")
	c.must(second(boss.TakeSnapshot(ctx, b.ID(), "x")))
	copied, err := b.Snapshot(ctx, "x")
	c.must(err)
	if d := c.digest(copied); d != recorded {
		t.Errorf("imported, the same files have %v, not %v", d, recorded)
	}

	c.must(second(boss.DeleteSnapshot(ctx, v.ID(), "v1")))
	c.refused(view.Pin(ctx, "run-44", time.Hour), meta.NoSuchSnapshot)
}

// digest waits for a view's.
func (c *cluster) digest(view *penstock.Volume) (d penstock.Digest) {
	c.T.Helper()
	c.Until("the digest of "+view.Name(), func() (err error) {
		d, err = view.RecordedDigest(c.T.Context())
		if err != nil && !errors.Is(err, meta.Unavailable) {
			c.T.Fatal(err)
		}
		return err
	})
	return d
}

func second3[T, U any](v T, _ U, err error) (T, error) { return v, err }
