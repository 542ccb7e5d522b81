package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	adminapi "penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
)

// Requests with lost answers are sent again, to the same owner or the next owner. The tests
// themselves send each request twice.

// row reads a volume's row, in the state that the row must have.
func (s *site) row(id meta.VolumeID, want cluster.VolumeState) cluster.Volume {
	s.t.Helper()
	v, err := s.cluster.Volume(s.t.Context(), id)
	if err != nil || v.State != want {
		s.t.Fatalf("volume %d is %q, %v; want %q", id, v.State, err, want)
	}
	return v
}

// TestVolumeRequestsAgain: create, rename, delete, undelete, attach and detach, each sent twice,
// change the volume once, whatever other callers did in between.
func TestVolumeRequestsAgain(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second)
	a := s.dial("a")
	day := uint64(86400)
	create := func(name string, token uint64) proto.Message {
		return &adminapi.CreateVolumeRequest{Name: name, RequestId: token, Settings: &adminapi.VolumeSettings{TrashSeconds: &day}}
	}
	v := a.must(t, create("v", 1))
	if again := a.must(t, create("v", 1)); again != v {
		t.Fatalf("volumes %d and %d were made", v, again)
	}
	a.mustNot(t, meta.VolumeExists, create("v", 2))

	number := adminapi.Numbered(v)
	rename := &adminapi.RenameVolumeRequest{Volume: number, Name: "w", RequestId: 3}
	a.must(t, rename)
	a.must(t, &adminapi.RenameVolumeRequest{Volume: number, Name: "v", RequestId: 4})
	a.must(t, rename)
	if row := s.row(v, cluster.VolumeActive); row.Name != "v" {
		t.Errorf("renamed again, to %q", row.Name)
	}

	attach := func(name string, token uint64) proto.Message {
		q := toAttach(v, 1, name)
		q.RequestId = token
		return q
	}
	here := attach("here", 5)
	detach := &adminapi.DetachVolumeRequest{Volume: number, RequestId: 6}
	hangs := func(want string) {
		t.Helper()
		at := ""
		if row := s.row(v, cluster.VolumeActive); row.Attach != nil {
			at = row.Attach.Name
		}
		if at != want {
			t.Errorf("it hangs at %q, want %q", at, want)
		}
	}
	a.must(t, here)
	a.must(t, here)
	hangs("here")
	a.must(t, detach)
	a.must(t, detach)
	a.must(t, here) // late
	hangs("")
	a.must(t, attach("there", 7))
	a.must(t, detach) // late
	hangs("there")
	a.must(t, &adminapi.DetachVolumeRequest{Volume: number, RequestId: 8})
	// A refused request is refused again.
	a.create(t, "taken")
	bad := attach("taken", 9)
	a.mustNot(t, meta.Exists, bad)
	a.mustNot(t, meta.Exists, bad)

	remove := &adminapi.DeleteVolumeRequest{Volume: adminapi.Numbered(v), RequestId: 10}
	a.must(t, remove)
	trash := s.row(v, cluster.VolumeTrash)
	a.must(t, remove)
	if row := s.row(v, cluster.VolumeTrash); row.Until != trash.Until {
		t.Errorf("in the trash until %v, and then until %v", trash.Until, row.Until)
	}
	undelete := &adminapi.UndeleteVolumeRequest{Volume: adminapi.Named("v"), RequestId: 11}
	a.must(t, undelete)
	a.must(t, undelete)
	a.must(t, remove) // late
	s.row(v, cluster.VolumeActive)
	// The last volume that had the name before stays in its place.
	old := a.must(t, create("x", 12))
	a.must(t, &adminapi.DeleteVolumeRequest{Volume: adminapi.Numbered(old), RequestId: 13})
	a.must(t, &adminapi.DeleteVolumeRequest{Volume: adminapi.Numbered(v), RequestId: 14})
	undelete = &adminapi.UndeleteVolumeRequest{Volume: adminapi.Named("v"), Name: "x", RequestId: 15}
	a.must(t, undelete)
	a.must(t, undelete)
	s.row(old, cluster.VolumeTrash)
	s.row(v, cluster.VolumeActive)
	if _, err := a.ask(t.Context(), &adminapi.UndeleteVolumeRequest{Volume: adminapi.Numbered(old), RequestId: 16}); meta.KindOf(err) != meta.VolumeExists || !strings.Contains(err.Error(), "undelete volume x: ") {
		t.Errorf("its name is another's by now: %v", err)
	}

	if n := len(s.row(v, cluster.VolumeActive).Done); n > 8 {
		t.Errorf("its row remembers %d requests", n)
	}
	s.exact()
}

// TestDeletionsAtOnce: a plain deletion that comes again while the first is under way, by another
// connection, purges nothing.
func TestDeletionsAtOnce(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second)
	a := s.dial("a")
	day := uint64(86400)
	for i := range 5 {
		v, err := a.CreateVolume(t.Context(), fmt.Sprint("v", i), meta.Policy{Replicas: 1}, meta.VolumeWords{TrashSeconds: &day})
		if err != nil {
			t.Fatal(err)
		}
		a.createIn(t, v.ID, "f")
		remove := &adminapi.DeleteVolumeRequest{Volume: adminapi.Numbered(v.ID), RequestId: 77}
		errs := make(chan error, 3)
		for range cap(errs) {
			go func() {
				_, err := a.ask(t.Context(), remove)
				errs <- err
			}()
		}
		for range cap(errs) {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
		s.row(v.ID, cluster.VolumeTrash)
	}
}

// TestDeletionFinishedElsewhere: the server that began to delete a volume loses the volume, and
// the next home goes on with the deletion, as with every deletion that it finds: the caller that
// has to ask again hears that the volume is deleted, not that no such volume exists.
func TestDeletionFinishedElsewhere(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 3*time.Second)
	a := s.dial("a")
	v, err := a.CreateVolume(t.Context(), "v", meta.Policy{Replicas: 1}, meta.VolumeWords{})
	if err != nil {
		t.Fatal(err)
	}
	a.createIn(t, v.ID, "f")
	s.cluster.mu.Lock()
	s.cluster.dies = func(step string) error {
		if step != "row gone" {
			return nil
		}
		delete(s.cluster.rows, v.ID) // by the next home
		return meta.E("delete volume", meta.NotOwner, "", nil)
	}
	s.cluster.mu.Unlock()
	if err := a.DeleteVolume(t.Context(), v.ID, true); err != nil {
		t.Error(err)
	}
	if err := a.DeleteVolume(t.Context(), v.ID, true); !errors.Is(err, meta.NoSuchVolume) {
		t.Errorf("who asks for the first time hears %v", err)
	}
}

// TestSnapshotDeletionAgain: a newer snapshot of the name is not meant.
func TestSnapshotDeletionAgain(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.create(t, "f")
	a.snapshot(t, "one")
	at := a.snapshots(t).Snapshots[0].At
	remove := func() {
		t.Helper()
		if _, err := a.API.Snapshots.DeleteSnapshot(t.Context(), &adminapi.DeleteSnapshotRequest{Volume: adminapi.Numbered(1), Name: "one", Generation: uint64(at)}); err != nil {
			t.Fatal(err)
		}
	}
	remove()
	eventually(t, "it is gone", func() error { return unless(len(a.snapshots(t).Snapshots) == 0) })
	a.create(t, "g")
	a.snapshot(t, "one")
	remove()
	if l := a.names(t); !slices.Equal(l, []string{"one ready"}) {
		t.Errorf("the newer one: %q", l)
	}
	// The client names the snapshot's time, and by the name alone finds the newer snapshot.
	if i, err := a.DeleteSnapshot(t.Context(), 1, "one"); err != nil || i.At == at || i.State != meta.SnapshotDeleting {
		t.Errorf("%+v, %v", i, err)
	}
	if _, err := a.DeleteSnapshot(t.Context(), 1, "two"); !errors.Is(err, meta.NoSuchSnapshot) {
		t.Error(err)
	}
}

// onMessage calls do in the goroutine that logs a message, before the log call returns.
type onMessage struct {
	slog.Handler
	message string
	do      func()
}

func (h onMessage) Enabled(context.Context, slog.Level) bool { return true }

func (h onMessage) Handle(_ context.Context, r slog.Record) error {
	if r.Message == h.message {
		h.do()
	}
	return nil
}

func (h onMessage) WithAttrs([]slog.Attr) slog.Handler { return h }

// TestRollbackAfterRollback: a rollback that is over excludes nothing. The next request is sent
// at the last moment before the answer to the first.
func TestRollbackAfterRollback(t *testing.T) {
	t.Parallel()
	var sent atomic.Bool
	second := errors.New("no second request was sent")
	var s *site
	s = newSiteWith(t, 10*time.Second, func(cfg *Config) {
		cfg.Logger = slog.New(onMessage{Handler: cfg.Logger.Handler(), message: "the volume was rolled back", do: func() {
			if !sent.Swap(true) { // the second request logs the message, too
				second = s.srv.hosted.opened(1).rollbacks.rollBack(t.Context(), nil, "one", rollHow{token: 2, force: true})
			}
		}})
	})
	s.dial("a").snapshot(t, "one")
	admin := s.dial("admin")
	back := func(n uint64) error {
		_, err := admin.API.Snapshots.RollBackVolume(t.Context(), &adminapi.RollBackVolumeRequest{Volume: adminapi.Numbered(1), Snapshot: "one", Force: true, RequestId: n})
		return err
	}
	if err := back(1); err != nil {
		t.Error("the first:", err)
	}
	if second != nil {
		t.Error("the second, sent when the first was over:", second)
	}
}

// TestRollbackAgain: writes since the rollback of a volume stay, however often the request comes,
// at once with itself, later, or to the next owner.
func TestRollbackAgain(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.create(t, "before")
	a.snapshot(t, "one")
	a.create(t, "since")
	admin := s.dial("admin")
	back := func(n uint64) error {
		_, err := admin.API.Snapshots.RollBackVolume(t.Context(), &adminapi.RollBackVolumeRequest{Volume: adminapi.Numbered(1), Snapshot: "one", Force: true, RequestId: n})
		return err
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	stays := func(when string, want ...string) {
		t.Helper()
		names := []string{}
		eventually(t, "the directory is read", func() error { // in another epoch, after a rollback
			r, err := a.Do(t.Context(), 1, meta.OpID{}, &meta.ReadDir{Ino: meta.RootIno, Max: 4096}, meta.LeaseNone)
			if err != nil {
				return err
			}
			for _, e := range r.Entries {
				names = append(names, e.Name)
			}
			return nil
		})
		slices.Sort(names)
		if !slices.Equal(names, want) {
			t.Errorf("%s: %q, want %q", when, names, want)
		}
	}
	// Three at once: the second and third may come when the first is done, and somebody
	// has written since.
	errs := make(chan error, 3)
	for range cap(errs) {
		go func() { errs <- back(1) }()
	}
	if err := <-errs; err != nil {
		t.Fatal(err)
	}
	a.expiredTimes(t, 1)
	a.create(t, "after")
	for range cap(errs) - 1 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	must(back(1))
	stays("sent again", "after", "before")
	s.crash()
	s.start()
	must(back(1))
	stays("sent to the next owner", "after", "before")
	// A request with another id is another request; and the server remembers a limited number.
	for n := range uint64(2 * maxRolled) {
		must(back(2 + n))
	}
	stays("asked for anew", "before")
	s.crash()
	s.start()
	must(back(1 + 2*maxRolled))
	o := s.srv.hosted.opened(1)
	o.mu.Lock()
	n := len(o.rollbacks.done)
	o.mu.Unlock()
	if n != maxRolled {
		t.Errorf("%d requests are remembered, want %d", n, maxRolled)
	}
	s.exact()
}
