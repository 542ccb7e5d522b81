package library

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

func TestEvents(t *testing.T) {
	t.Parallel()
	c, ctx := newCluster(t), t.Context()
	v, boss := c.volume(c.admin(), "inbox"), c.operator("admin").API
	volume := admin.Numbered(v.ID())
	keep := func(by *admin.Client, keep uint64) error {
		return second(by.Events.KeepEvents(ctx, &admin.KeepEventsRequest{Volume: volume, Keep: keep}))
	}
	if l, err := boss.EventLog(ctx, volume); err != nil || l.Keep != 0 {
		t.Errorf("%+v, %v", l, err)
	}
	c.refused(c.events(boss, volume, 0, nil), meta.NotSupported, "switched off")
	for _, n := range []uint64{1, meta.MinEvents - 1, meta.MaxEvents + 1} {
		c.refused(keep(boss, n), meta.Invalid)
	}
	c.must(keep(boss, meta.MinEvents))

	// A client with the right to read follows the events as they come.
	c.user("index", "inbox", "read")
	r := c.operator("index").API
	c.refused(keep(r, 0), meta.AccessDenied)
	c.volume(c.admin(), "other")
	c.refused(second(r.EventLog(ctx, admin.Named("other"))), meta.AccessDenied)
	c.refused(r.Follow(ctx, &admin.ReadEventsRequest{Volume: admin.Named("other")}, true, nil), meta.AccessDenied)
	log, err := r.EventLog(ctx, volume)
	if err != nil || log.Keep != meta.MinEvents || log.First <= log.Last {
		t.Errorf("%+v, %v", log, err)
	}
	following, end := context.WithTimeout(ctx, 5*time.Minute)
	defer end()
	type told struct {
		e   admin.VolumeEvent
		err error
	}
	ch := make(chan told, 100)
	go func() {
		defer close(ch)
		err := r.Follow(following, &admin.ReadEventsRequest{Volume: volume, Since: log.Last}, true, func(e admin.VolumeEvent) error {
			ch <- told{e, nil}
			return nil
		})
		ch <- told{err: err}
	}()
	var all []admin.VolumeEvent
	await := func(kind meta.EventKind, path string) admin.VolumeEvent {
		t.Helper()
		for timeout := time.After(90 * time.Second); ; {
			select {
			case x := <-ch:
				c.must(x.err)
				if n := len(all); n > 0 && x.e.Seq != all[n-1].Seq+1 {
					t.Fatalf("%d came after %d", x.e.Seq, all[n-1].Seq)
				}
				all = append(all, x.e)
				if x.e.Kind == kind && (x.e.Path == path || x.e.Name == path) {
					return x.e
				}
			case <-timeout:
				t.Fatalf("nothing is told of %v %s; %+v", kind, path, all)
			}
		}
	}
	tree := v.Tree()
	c.must(tree.MkdirAll(ctx, "/d", 0o755))
	await(meta.EventCreated, "d")
	f, err := tree.OpenFile(ctx, "/d/part", os.O_CREATE|os.O_WRONLY, 0o644)
	c.must(err)
	made := await(meta.EventCreated, "d/part")
	for range 3 {
		c.must(second(f.Write([]byte("some"))))
		c.must(f.Sync())
	}
	c.must(f.Close())
	if e := await(meta.EventChanged, "d/part"); e.Ino != made.Ino || e.Name != "part" {
		t.Errorf("%+v", e)
	}
	c.must(tree.Rename(ctx, "/d/part", "/d/whole"))
	if e := await(meta.EventRenamed, "d/whole"); e.From != "part" || e.FromPath != "d/part" || e.FromParent != e.Parent || e.Ino != made.Ino {
		t.Errorf("%+v", e)
	}
	c.must(tree.Remove(ctx, "/d/whole"))
	if e := await(meta.EventRemoved, "d/whole"); !e.Last {
		t.Errorf("%+v", e)
	}
	c.must(second(boss.Snapshots.CreateSnapshot(ctx, &admin.CreateSnapshotRequest{Volume: volume, Name: "v1"})))
	taken := await(meta.EventSnapshotTaken, "v1")
	if n := len(all); n != 6 {
		t.Errorf("%d events, of six things that happened: %+v", n, all)
	}
	end()
	for x := range ch {
		if x.err == nil {
			t.Errorf("after the end: %+v", x.e)
		} else if !errors.Is(x.err, context.Canceled) && !errors.Is(x.err, meta.Interrupted) && !errors.Is(x.err, meta.Canceled) {
			t.Error(x.err)
		}
	}

	// A follower that begins again gets the same later events.
	for from := range all {
		var again []admin.VolumeEvent
		c.must(c.events(boss, volume, log.Last+uint64(from), func(e admin.VolumeEvent) bool { again = append(again, e); return true }))
		if !slices.EqualFunc(again, all[from:], func(a, b admin.VolumeEvent) bool { return a.Event == b.Event }) {
			t.Errorf("after %d: %+v, it was %+v", log.Last+uint64(from), again, all[from:])
		}
	}
	n := 0
	c.must(c.events(boss, volume, log.Last, func(admin.VolumeEvent) bool { n++; return false }))
	if n != 1 {
		t.Errorf("who stops hears %d more", n-1)
	}

	// The requested events are gone, and the answer says after which number to continue.
	for i := range meta.MinEvents + meta.MinEvents/4 {
		c.must(second(v.Create(ctx, nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("f", i), Mode: meta.TypeRegular | 0o644})))
	}
	c.Until("all is in the journal", func() error { // followers get only journaled events
		l, err := boss.EventLog(ctx, volume)
		if err == nil && l.Last < taken.Seq+meta.MinEvents+meta.MinEvents/4 {
			err = fmt.Errorf("%+v", l)
		}
		return err
	})
	err = c.events(boss, volume, taken.Seq, nil)
	missed, ok := errors.AsType[*meta.RescanError](err)
	if !ok || missed.Since != taken.Seq || missed.First <= taken.Seq+1 || missed.Last < missed.First+meta.MinEvents-1 {
		t.Fatalf("%+v", err)
	}
	c.put(v, "/after", "x")
	var names []string
	c.Until("what came after is told", func() error {
		names = nil
		err := c.events(boss, volume, missed.Last, func(e admin.VolumeEvent) bool { names = append(names, e.Name); return true })
		if err == nil && !slices.Contains(names, "after") {
			err = fmt.Errorf("%q", names)
		}
		return err
	})
	if len(names) > 2 { // the file was made and closed
		t.Errorf("%q", names)
	}
	if err := c.events(boss, volume, missed.Last+1_000_000, nil); !errors.As(err, &missed) {
		t.Errorf("a number that there never was: %v", err)
	}
	c.must(keep(boss, 0))
	c.refused(c.events(boss, volume, missed.Last, nil), meta.NotSupported)
}

// errEnough ends events.
var errEnough = errors.New("enough")

// events iterates over the present events, while fn wants more.
func (c *cluster) events(by *admin.Client, volume *admin.VolumeRef, since uint64, fn func(admin.VolumeEvent) bool) error {
	err := by.Follow(c.T.Context(), &admin.ReadEventsRequest{Volume: volume, Since: since}, false, func(e admin.VolumeEvent) error {
		if fn != nil && !fn(e) {
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		return nil
	}
	return err
}
