package library

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

func TestEvents(t *testing.T) {
	t.Parallel()
	c, ctx := newCluster(t), t.Context()
	admin := c.admin()
	v := c.volume(admin, "inbox")
	if l, err := v.EventLog(ctx); err != nil || l.Keep != 0 {
		t.Errorf("%+v, %v", l, err)
	}
	c.refused(c.events(v, 0, nil), meta.NotSupported, "switched off")
	for _, keep := range []uint64{1, meta.MinEvents - 1, meta.MaxEvents + 1} {
		c.refused(v.SetEvents(ctx, keep), meta.Invalid)
	}
	c.must(v.SetEvents(ctx, meta.MinEvents))

	// Followed by who may read, as they come.
	r := c.open(c.user("index", "inbox", "read"), "inbox")
	c.refused(r.SetEvents(ctx, 0), meta.AccessDenied)
	log, err := r.EventLog(ctx)
	if err != nil || log.Keep != meta.MinEvents || log.First <= log.Last {
		t.Errorf("%+v, %v", log, err)
	}
	following, end := context.WithTimeout(ctx, 5*time.Minute)
	defer end()
	type told struct {
		e   penstock.Event
		err error
	}
	ch := make(chan told, 100)
	go func() {
		defer close(ch)
		for e, err := range r.Events(following, log.Last, true) {
			ch <- told{e, err}
		}
	}()
	var all []penstock.Event
	await := func(kind meta.EventKind, path string) penstock.Event {
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
	c.must(second(c.operator("admin").TakeSnapshot(ctx, v.ID(), "v1")))
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

	// Who begins again has what came after, and the same.
	for from := range all {
		var again []penstock.Event
		c.must(c.events(v, log.Last+uint64(from), func(e penstock.Event) bool { again = append(again, e); return true }))
		if !slices.EqualFunc(again, all[from:], func(a, b penstock.Event) bool { return a.Event == b.Event }) {
			t.Errorf("after %d: %+v, it was %+v", log.Last+uint64(from), again, all[from:])
		}
	}
	n := 0
	c.must(c.events(v, log.Last, func(penstock.Event) bool { n++; return false }))
	if n != 1 {
		t.Errorf("who stops hears %d more", n-1)
	}

	// Too late, of which there is no doubt, and how to go on.
	for i := range meta.MinEvents + meta.MinEvents/4 {
		c.must(second(v.Create(ctx, nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("f", i), Mode: meta.TypeRegular | 0o644})))
	}
	c.Until("all is in the journal", func() error { // and only that is told
		l, err := v.EventLog(ctx)
		if err == nil && l.Last < taken.Seq+meta.MinEvents+meta.MinEvents/4 {
			err = fmt.Errorf("%+v", l)
		}
		return err
	})
	err = c.events(v, taken.Seq, nil)
	missed, ok := errors.AsType[*penstock.RescanError](err)
	if !ok || missed.Since != taken.Seq || missed.First <= taken.Seq+1 || missed.Last < missed.First+meta.MinEvents-1 {
		t.Fatalf("%+v", err)
	}
	c.put(v, "/after", "x")
	var names []string
	c.Until("what came after is told", func() error {
		names = nil
		err := c.events(v, missed.Last, func(e penstock.Event) bool { names = append(names, e.Name); return true })
		if err == nil && !slices.Contains(names, "after") {
			err = fmt.Errorf("%q", names)
		}
		return err
	})
	if len(names) > 2 { // it was made, and closed
		t.Errorf("%q", names)
	}
	if err := c.events(v, missed.Last+1_000_000, nil); !errors.As(err, &missed) {
		t.Errorf("a number that there never was: %v", err)
	}
	c.must(v.SetEvents(ctx, 0))
	c.refused(c.events(v, missed.Last, nil), meta.NotSupported)
	s, err := v.Snapshot(ctx, "v1")
	c.must(err)
	c.refused(second(s.EventLog(ctx)), meta.ReadOnly)
	c.refused(s.SetEvents(ctx, meta.MinEvents), meta.ReadOnly)
}

// events goes over those that there are, while fn wants more.
func (c *cluster) events(v *penstock.Volume, since uint64, fn func(penstock.Event) bool) error {
	for e, err := range v.Events(c.T.Context(), since, false) {
		if err != nil {
			return err
		}
		if fn != nil && !fn(e) {
			return nil
		}
	}
	return nil
}
