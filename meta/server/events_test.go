package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
)

// copyOf is a tree kept by events alone: inode -> its place.
type copyOf struct {
	mu    sync.Mutex
	names map[string]meta.Ino // parent/name
	seq   uint64
	wrong error
}

// take applies an event; an event that does not fit was lost, repeated, or out of order.
func (c *copyOf) take(e admin.VolumeEvent) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := fmt.Sprintf("%d/%s", e.Parent, e.Name)
	from := fmt.Sprintf("%d/%s", e.FromParent, e.From)
	if e.Seq != c.seq+1 {
		return fmt.Errorf("event %d after %d", e.Seq, c.seq)
	}
	c.seq = e.Seq
	fits := func(ok bool) error {
		if !ok {
			return fmt.Errorf("%+v does not fit %v", e, c.names)
		}
		return nil
	}
	switch e.Kind {
	case meta.EventCreated, meta.EventLinked:
		if err := fits(c.names[at] == 0); err != nil {
			return err
		}
		c.names[at] = e.Ino
	case meta.EventRemoved:
		if err := fits(c.names[at] == e.Ino); err != nil {
			return err
		}
		delete(c.names, at)
	case meta.EventRenamed:
		if err := fits(c.names[from] == e.Ino && c.names[at] == e.Replaced); err != nil {
			return err
		}
		delete(c.names, from)
		c.names[at] = e.Ino
	}
	return nil
}

// eventsAfter asks for the events of volume 1 after a number.
func eventsAfter(since uint64) *admin.ReadEventsRequest {
	return &admin.ReadEventsRequest{Volume: admin.Numbered(1), Since: since}
}

// keepEvents switches the events of volume 1 on.
func (s *site) keepEvents(keep uint64) {
	s.t.Helper()
	if _, err := s.api().Events.KeepEvents(s.t.Context(), &admin.KeepEventsRequest{Volume: admin.Numbered(1), Keep: keep}); err != nil {
		s.t.Fatal(err)
	}
}

// follow keeps the copy until ctx ends.
func (c *copyOf) follow(ctx context.Context, api *admin.Client) {
	err := api.Follow(ctx, eventsAfter(c.seq), true, c.take)
	if ctx.Err() == nil {
		c.mu.Lock()
		c.wrong = err
		c.mu.Unlock()
	}
}

// tree is the volume's tree, in the copy's words.
func (p *peer) tree(t *testing.T) map[string]meta.Ino {
	t.Helper()
	names := map[string]meta.Ino{}
	todo := []meta.Ino{meta.RootIno}
	for len(todo) > 0 {
		dir := todo[0]
		todo = todo[1:]
		for cookie, eof := uint64(0), false; !eof; {
			r := p.do(t, &meta.ReadDir{Ino: dir, Cookie: cookie}, meta.LeaseNone)
			for _, e := range r.Entries {
				names[fmt.Sprintf("%d/%s", dir, e.Name)] = e.Ino
				if e.Type == meta.TypeDir {
					todo = append(todo, e.Ino)
				}
				cookie = e.Cookie
			}
			eof = r.EOF
		}
	}
	return names
}

// A copy of the tree that is kept by events alone equals the tree, while clients change the tree
// at random, owners die and are followed by other owners, and the journal is trimmed. Each event
// comes once, in order.
func TestEventsMakeTheTree(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	s.keepEvents(1_000_000)
	ctx, cancel := context.WithCancel(t.Context())
	c := &copyOf{names: map[string]meta.Ino{}}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	f := s.api()
	wg.Go(func() { c.follow(ctx, f) })

	const rounds, workers, ops = 4, 3, 60
	for round := range rounds {
		var work sync.WaitGroup
		for w := range workers {
			p := s.dial(fmt.Sprint("worker ", w))
			work.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(round), uint64(w)))
				dirs := []meta.Ino{meta.RootIno}
				name := func() string { return fmt.Sprint(rng.IntN(12)) }
				dir := func() meta.Ino { return dirs[rng.IntN(len(dirs))] }
				for range ops {
					var op meta.Op
					switch rng.IntN(6) {
					case 0, 1:
						op = &meta.Create{Parent: dir(), Name: name(), Mode: meta.TypeRegular | 0o644, Excl: true}
					case 2:
						op = &meta.Create{Parent: dir(), Name: name(), Mode: meta.TypeDir | 0o755, Excl: true}
					case 3:
						op = &meta.Unlink{Parent: dir(), Name: name(), Dir: rng.IntN(2) == 0}
					default:
						op = &meta.Rename{Parent: dir(), Name: name(), NewParent: dir(), NewName: name()}
					}
					r, err := p.Do(t.Context(), 1, meta.OpID{}, op, meta.LeaseNone)
					if err == nil && r.Attr.IsDir() && r.Attr.Nlink > 0 {
						dirs = append(dirs, r.Attr.Ino)
					}
				}
			})
		}
		switch round {
		case 1: // in the middle of a change, as SIGKILL would
			time.Sleep(30 * time.Millisecond)
			s.crash()
			s.start()
		case 2:
			s.checkpoint()
		}
		work.Wait()
	}
	want := a.tree(t)
	eventually(t, "the copy", func() error {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.wrong != nil {
			t.Fatal(c.wrong)
		}
		if !maps.Equal(c.names, want) {
			return fmt.Errorf("after event %d the copy has %d names, the volume %d", c.seq, len(c.names), len(want))
		}
		return nil
	})
	s.exact()
}

// An owner that wrote a crossed quota into the row, and died before its event, leaves the event
// to the next owner; the next owner makes the event once, however often the owner opens the
// volume and reads the row.
func TestEventsOfQuota(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, api := s.dial("a"), s.api()
	s.keepEvents(meta.MinEvents)
	expect := func(what string, want ...string) {
		t.Helper()
		eventually(t, what, func() error {
			var got []string
			err := api.Follow(t.Context(), eventsAfter(0), false, func(e admin.VolumeEvent) error {
				if e.Kind == meta.EventQuota {
					got = append(got, fmt.Sprint(e.Name, " ", e.Over, " ", e.Limit))
				}
				return nil
			})
			if err != nil || !slices.Equal(got, want) {
				return fmt.Errorf("%q, %v", got, err)
			}
			return nil
		})
	}
	row := func(change func(a *cluster.Advisory)) {
		t.Helper()
		if _, err := s.cluster.UpdateVolume(t.Context(), 1, func(v *cluster.Volume) error {
			var a cluster.Advisory
			if v.Advisory != nil {
				a = *v.Advisory
			}
			change(&a)
			v.Advisory = &a
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	a.create(t, "one")
	a.create(t, "two")
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	s.crash()
	row(func(a *cluster.Advisory) { a.Inodes, a.InodesOver = 2, 77 })
	for range 3 {
		s.start()
		a.create(t, fmt.Sprint(time.Now().UnixNano()))
		expect("the successor tells", "inodes true 2")
		s.crash()
	}
	row(func(a *cluster.Advisory) { a.Inodes, a.InodesOver = 0, 0 })
	s.start()
	expect("it is no quota any more", "inodes true 2", "inodes false 0")
	s.exact()
}

// A follower that comes too late, or asks for events that never were, is told to look again; a
// follower that asks for the newest event learns where to go on. A volume whose events are off
// has no events.
func TestEventsAreMissed(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, api := s.dial("a"), s.api()
	none := func(e admin.VolumeEvent) error { return fmt.Errorf("%+v", e) }
	if err := api.Follow(t.Context(), eventsAfter(0), false, none); meta.KindOf(err) != meta.NotSupported {
		t.Fatal(err)
	}
	if _, err := api.Events.KeepEvents(t.Context(), &admin.KeepEventsRequest{Volume: admin.Numbered(1), Keep: 5}); meta.KindOf(err) != meta.Invalid {
		t.Fatal(err)
	}
	s.keepEvents(meta.MinEvents)
	const n = 2*meta.MinEvents + 7
	var batch []client.BatchOp
	for i := range n {
		batch = append(batch, client.BatchOp{Op: &meta.Create{Parent: meta.RootIno, Name: fmt.Sprint(i), Mode: meta.TypeRegular | 0o644}})
	}
	if _, _, err := a.DoBatch(t.Context(), 1, client.AnyEpoch, batch); err != nil {
		t.Fatal(err)
	}
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	var log meta.EventLog
	eventually(t, "events", func() (err error) {
		log, err = api.EventLog(t.Context(), admin.Numbered(1))
		return errors.Join(err, unless(log.Last == n))
	})
	for _, since := range []uint64{0, 5, log.First - 2, n + 1, 1 << 63, 1<<64 - 1} {
		err := api.Follow(t.Context(), eventsAfter(since), since%2 == 0, none)
		r, ok := errors.AsType[*meta.RescanError](err)
		if !ok || r.Since != since || r.First != log.First || r.Last != n {
			t.Errorf("after %d: %v", since, err)
		}
	}
	var got []string
	if err := api.Follow(t.Context(), eventsAfter(log.First-1), false, func(e admin.VolumeEvent) error {
		got = append(got, e.Path)
		return nil
	}); err != nil || len(got) != int(log.Last+1-log.First) || got[len(got)-1] != fmt.Sprint(n-1) {
		t.Errorf("%d events, %v", len(got), err)
	}
	if err := api.Follow(t.Context(), eventsAfter(n), false, none); err != nil {
		t.Error(err)
	}
	// A follower can ask for all kept events without a number: the oldest kept number could be
	// trimmed meanwhile.
	for _, follow := range []bool{false, true} {
		kept, stop := log.First, errors.New("the last")
		err := api.Follow(t.Context(), &admin.ReadEventsRequest{Volume: admin.Numbered(1), Oldest: true}, follow, func(e admin.VolumeEvent) error {
			if e.Seq != kept {
				return fmt.Errorf("event %d, not %d", e.Seq, kept)
			}
			if kept++; follow && e.Seq == n {
				return stop
			}
			return nil
		})
		if kept != n+1 || follow && !errors.Is(err, stop) || !follow && err != nil {
			t.Errorf("to event %d: %v", kept-1, err)
		}
	}
	// An error of the caller's function ends the following.
	enough := errors.New("enough")
	if err := api.Follow(t.Context(), eventsAfter(n-3), true, func(admin.VolumeEvent) error { return enough }); !errors.Is(err, enough) {
		t.Error(err)
	}
	s.exact()
}

// A request waits for an event no longer than the request's own limit, is answered as soon as an
// event exists, and keeps the volume from being closed as idle. Followers get an event when the
// event is in the journal, not before.
func TestEventsAreWaitedFor(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	s.keepEvents(meta.MinEvents)
	o := s.srv.hosted.opened(1)
	ask := func(wait time.Duration) *admin.ReadEventsResponse {
		t.Helper()
		ans, err := o.eventWaits.events(t.Context(), eventsQuery{wait: wait})
		if err != nil {
			t.Fatal(err)
		}
		return ans
	}
	began := time.Now()
	if ans := ask(50 * time.Millisecond); len(ans.Events) != 0 || time.Since(began) < 50*time.Millisecond {
		t.Errorf("%+v after %v", ans, time.Since(began))
	}
	told := make(chan *admin.ReadEventsResponse, 1)
	go func() {
		ans, err := o.eventWaits.events(t.Context(), eventsQuery{wait: time.Hour})
		if err != nil {
			t.Error(err)
		}
		told <- ans
	}()
	eventually(t, "waiting", func() error {
		o.mu.Lock()
		defer o.mu.Unlock()
		return unless(o.eventWaits.watchers == 1)
	})
	if o.unused() {
		t.Error("a volume that is followed counts as idle")
	}
	a.create(t, "x")
	o.mu.Lock()
	durable := o.durable >= o.newest() // whether the change was durable, by the time of the early reply
	o.mu.Unlock()
	ans := <-told
	if len(ans.Events) != 1 || string(ans.Events[0].Name) != "x" || string(ans.Events[0].Path) != "x" {
		t.Errorf("DATA: %+v (in the journal at once: %v)", ans, durable)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.eventWaits.watchers != 0 {
		t.Error(o.eventWaits.watchers, "wait")
	}
}

// Early replies that are lost with their owner, and answered again by the next owner, are a
// single event; so are commits that a client sends again.
func TestEventsOfReplays(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.srv.cfg.CommitDelay = time.Hour // the first owner journals only operations that a client waits for
	a, api := s.dial("a"), s.api()
	s.keepEvents(meta.MinEvents)
	const n = 20
	for i := range n {
		a.create(t, fmt.Sprint(i))
	}
	if log, err := api.EventLog(t.Context(), admin.Numbered(1)); err != nil || log.Last >= n {
		t.Fatalf("%+v, %v: what is not in the journal is told", log, err)
	}
	s.crash()
	s.start()
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	eventually(t, "events", func() error {
		clear(seen)
		err := api.Follow(t.Context(), eventsAfter(0), false, func(e admin.VolumeEvent) error { seen[e.Name]++; return nil })
		return errors.Join(err, unless(len(seen) == n))
	})
	for name, times := range seen {
		if times != 1 {
			t.Errorf("%s is told of %d times", name, times)
		}
	}
}
