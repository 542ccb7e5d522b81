package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	adminapi "penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// exactIn fails if fsck finds anything in a volume.
func (s *site) exactIn(v meta.VolumeID) {
	s.t.Helper()
	r, err := s.srv.checker.Fsck(s.t.Context(), v)
	if err != nil {
		s.t.Fatal(err)
	}
	if r.Count > 0 {
		s.t.Fatal("DATA: fsck of volume", v, r.Problems)
	}
}

// pins lists the notes of a volume's clones.
func (s *site) pins(v meta.VolumeID) []namespace.ClonePin {
	s.t.Helper()
	o, err := s.srv.hosted.open(s.t.Context(), v)
	if err != nil {
		s.t.Fatal(err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	all, err := namespace.ClonePins(o.view())
	if err != nil {
		s.t.Fatal(err)
	}
	return all
}

// list names the entries of the root directory of a volume.
func (p *peer) list(t *testing.T, v meta.VolumeID) (names []string) {
	t.Helper()
	r, err := p.Do(t.Context(), v, meta.OpID{}, &meta.ReadDir{Ino: meta.RootIno}, meta.LeaseNone)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range r.Entries {
		names = append(names, e.Name)
	}
	slices.Sort(names)
	return names
}

func (p *peer) createIn(t *testing.T, v meta.VolumeID, name string) {
	t.Helper()
	if _, err := p.Do(t.Context(), v, meta.OpID{}, newFile(name), meta.LeaseNone); err != nil {
		t.Fatal(err)
	}
}

func (p *peer) clone(t *testing.T, v meta.VolumeID, snapshot, name string) meta.VolumeID {
	t.Helper()
	i, err := p.Clone(t.Context(), v, snapshot, name)
	if err != nil {
		t.Fatal(err)
	}
	return i.ID
}

// TestFirstLookupIsFlat: the number of records that the first lookup in a clone reads does not
// grow with the tree, and neither does the number for a clone of a clone.
func TestFirstLookupIsFlat(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute) // a slow machine is no matter
	var reads atomic.Int64
	s.cluster.reads = &reads
	a := s.dial("a")
	have := 0
	first := func(of meta.VolumeID, snapshot, name string) (meta.VolumeID, int64) {
		t.Helper()
		reads.Store(0)
		c := a.clone(t, of, snapshot, name)
		if _, err := a.Do(t.Context(), c, meta.OpID{}, &meta.Lookup{Parent: meta.RootIno, Name: "0"}, meta.LeaseNone); err != nil {
			t.Fatal(err)
		}
		return c, reads.Load()
	}
	for _, n := range []int{50, 3000} {
		for ; have < n; have++ {
			a.createIn(t, 1, fmt.Sprint(have))
		}
		at := fmt.Sprint("v", n)
		a.snapshot(t, at)
		c, read := first(1, at, fmt.Sprint("c", n))
		_, again := first(c, "", fmt.Sprint("cc", n))
		t.Logf("%d files: %d records were read, %d in the clone of the clone", n, read, again)
		// The background work of the volume reads a little, too.
		if most := int64(1000); read > most || again > most {
			t.Errorf("with %d files %d and %d records were read for the first lookup", n, read, again)
		}
	}
}

func TestClone(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.createIn(t, 1, "old")
	a.snapshot(t, "v1")
	a.createIn(t, 1, "later")
	c := a.clone(t, 1, "v1", "c")
	now := a.clone(t, 1, "", "now")
	a.createIn(t, c, "mine")
	if got := a.list(t, c); !slices.Equal(got, []string{"mine", "old"}) {
		t.Fatal(got)
	}
	if got := a.list(t, now); !slices.Equal(got, []string{"later", "old"}) {
		t.Fatal(got)
	}
	// A clone of a clone, of the present state.
	cc := a.clone(t, c, "", "cc")
	a.createIn(t, c, "mine too")
	if got := a.list(t, cc); !slices.Equal(got, []string{"mine", "old"}) {
		t.Fatal(got)
	}
	refused := func(err error, kind meta.Kind, words ...string) {
		t.Helper()
		if meta.KindOf(err) != kind {
			t.Fatalf("%v, not %v", err, kind)
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) {
				t.Fatalf("%v says nothing of %s", err, w)
			}
		}
	}
	_, err := a.Clone(t.Context(), 1, "nothing", "x")
	refused(err, meta.NoSuchSnapshot, "nothing")
	_, err = a.Clone(t.Context(), 1, "v1", "c")
	refused(err, meta.VolumeExists, "c")
	_, err = a.DeleteSnapshot(t.Context(), 1, "v1")
	refused(err, meta.Busy, "v1", ": c;")
	_, err = a.ask(t.Context(), toDelete(c))
	refused(err, meta.Busy, ": cc;")
	// The table of volumes names the origin of each clone.
	l, err := a.Clones(t.Context(), 1)
	if err != nil || len(l) != 2 || l[0].Name != "c" || l[0].Snapshot != "v1" || l[0].Implied || l[1].Name != "now" || !l[1].Implied {
		t.Fatal(l, err)
	}
	for _, again := range []bool{false, true} {
		for _, v := range []meta.VolumeID{1, c, now, cc} {
			s.exactIn(v)
		}
		if !again {
			s.crash()
			s.start()
		}
	}
	// The clones go, the youngest first; the snapshots taken for the clones go too.
	for _, v := range []meta.VolumeID{cc, c, now} {
		a.must(t, toDelete(v))
	}
	eventually(t, "what was taken for a clone is gone", func() error {
		got := a.names(t)
		return unless(slices.Equal(got, []string{"v1 ready"}))
	})
	if got := s.pins(1); len(got) != 0 {
		t.Fatal(got)
	}
	if _, err := a.DeleteSnapshot(t.Context(), 1, "v1"); err != nil {
		t.Fatal(err)
	}
	s.exactIn(1)
}

// A snapshot that was deleted while clones need the snapshot is reported as such, makes no more
// clones, and goes with the last clone, also when the server dies in between.
func TestSnapshotGoesWithClones(t *testing.T) {
	s := newSite(t)
	a := s.dial("a")
	a.createIn(t, 1, "old")
	taken := &adminapi.CreateSnapshotRequest{Volume: adminapi.Numbered(1), Name: "v1", RequestId: 7}
	for range 2 {
		if _, err := a.API.Snapshots.CreateSnapshot(t.Context(), taken); err != nil {
			t.Fatal(err)
		}
	}
	c, d := a.clone(t, 1, "v1", "c"), a.clone(t, 1, "v1", "d")
	for range 2 { // a caller that repeats the request gets the same answer
		if i, err := a.DropSnapshot(t.Context(), 1, "v1"); err != nil || i.State != meta.SnapshotDropped {
			t.Fatal(i, err)
		}
	}
	told := func() {
		t.Helper()
		if got := a.names(t); !slices.Equal(got, []string{"v1 " + string(meta.SnapshotDropped)}) {
			t.Fatal(got)
		}
		if _, err := a.TakeSnapshot(t.Context(), 1, "v1"); meta.KindOf(err) != meta.Exists || !strings.Contains(err.Error(), "was deleted, but keeps its name") {
			t.Fatal(err)
		}
		if _, err := a.API.Snapshots.CreateSnapshot(t.Context(), taken); meta.KindOf(err) != meta.Exists {
			t.Fatalf("the request that took it, once more: %v", err)
		}
		for _, v := range []meta.VolumeID{c, d} {
			if row, err := s.cluster.Volume(t.Context(), v); err == nil && row.State == cluster.VolumeActive {
				if got := a.list(t, v); !slices.Equal(got, []string{"old"}) {
					t.Fatal(got)
				}
			}
		}
	}
	told()
	if _, err := a.Clone(t.Context(), 1, "v1", "e"); meta.KindOf(err) != meta.NoSuchSnapshot {
		t.Fatal(err)
	}
	a.must(t, toDelete(c))
	told()
	s.crash()
	s.start()
	told()
	a.must(t, toDelete(d))
	eventually(t, "it went with its last clone", func() error {
		row, err := s.cluster.Volume(t.Context(), 1)
		if err != nil {
			return err
		}
		return unless(len(a.names(t)) == 0 && len(row.Dropped) == 0)
	})
	// A snapshot that nothing needs goes at once.
	a.snapshot(t, "v2")
	if _, err := a.DropSnapshot(t.Context(), 1, "v2"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing is left", func() error { return unless(len(a.names(t)) == 0 && len(s.pins(1)) == 0) })
	s.exactIn(1)
}

// TestPinnedBesideClones: a pinned snapshot is not deleted because clones need the snapshot, too.
// A snapshot that was pinned only after the deletion stays when its last clone goes, and delays
// no other snapshot.
func TestPinnedBesideClones(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.createIn(t, 1, "old")
	a.snapshot(t, "v1")
	c := a.clone(t, 1, "v1", "c")
	pin := func() {
		t.Helper()
		if _, err := a.PinSnapshot(t.Context(), 1, "v1", "run-1", time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	unpin := func() {
		t.Helper()
		if had, err := a.UnpinSnapshot(t.Context(), 1, "v1", "run-1"); err != nil || !had {
			t.Fatal(had, err)
		}
	}
	shows := func(want ...string) {
		t.Helper()
		if got := a.names(t); !slices.Equal(got, want) {
			t.Fatalf("%v, want %v", got, want)
		}
	}
	pin()
	if _, err := a.DropSnapshot(t.Context(), 1, "v1"); meta.KindOf(err) != meta.Busy || !strings.Contains(err.Error(), "run-1 until 20") {
		t.Fatal(err)
	}
	shows("v1 ready")
	unpin()
	drop := func(name string) {
		t.Helper()
		if i, err := a.DropSnapshot(t.Context(), 1, name); err != nil || i.State != meta.SnapshotDropped {
			t.Fatal(i, err)
		}
	}
	drop("v1")
	pin()
	drop("v1") // the same answer as before
	a.must(t, toDelete(c))
	for range 2 {
		a.admin(t, wire.Admin{Op: wire.AdminCloneSettle, Volume: 1}) // which fails in nothing
		shows("v1 " + string(meta.SnapshotDropped))
	}
	a.snapshot(t, "v2")
	d := a.clone(t, 1, "v2", "d")
	drop("v2")
	unpin()
	a.must(t, toDelete(d))
	eventually(t, "both are gone", func() error {
		row, err := s.cluster.Volume(t.Context(), 1)
		if err != nil {
			return err
		}
		return unless(len(a.names(t)) == 0 && len(row.Dropped) == 0)
	})
	s.exactIn(1)
}

// afterVolumes is a cluster that runs a function, once, after the cluster has read the volumes.
type afterVolumes struct {
	Cluster
	then atomic.Pointer[func()]
}

func (b *afterVolumes) Volumes(ctx context.Context) ([]cluster.Volume, error) {
	all, err := b.Cluster.Volumes(ctx)
	if f := b.then.Swap(nil); f != nil {
		(*f)()
	}
	return all, err
}

// TestDroppedNameIsAnothers: a snapshot that goes with its last clone, and was deleted by hand in
// the same moment, takes no later snapshot of the same name along.
func TestDroppedNameIsAnothers(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	var b *afterVolumes
	s.adjust = func(cfg *Config) {
		b = &afterVolumes{Cluster: cfg.Cluster}
		cfg.Cluster = b
	}
	s.crash()
	s.start()
	a := s.dial("a")
	was := a.snapshot(t, "v1").At
	c := a.clone(t, 1, "v1", "c")
	if _, err := a.DropSnapshot(t.Context(), 1, "v1"); err != nil {
		t.Fatal(err)
	}
	o := s.srv.hosted.opened(1)
	if err := s.cluster.DeleteVolume(t.Context(), c); err != nil { // nobody tells the owner
		t.Fatal(err)
	}
	if err := o.leases.durably(t.Context(), &meta.PinClone{At: was, Clone: c, Drop: true}); err != nil {
		t.Fatal(err)
	}
	ran := make(chan error, 1)
	f := func() {
		_, err := o.snapshots.delete(t.Context(), "v1", 0)
		if err == nil {
			_, _, err = o.snapshots.take(t.Context(), &meta.TakeSnapshot{Name: "v1", Token: 9}, takeHow{})
		}
		ran <- err
	}
	b.then.Store(&f)
	if _, err := o.clones.settleClones(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-ran; err != nil {
		t.Fatal(err)
	}
	eventually(t, "only the other one is there", func() error {
		l := a.snapshots(t).Snapshots
		if len(l) == 0 || l[len(l)-1].At == was || l[len(l)-1].State != meta.SnapshotReady {
			t.Fatalf("%+v", l)
		}
		return unless(len(l) == 1)
	})
}

// TestChunkOfDeletedClone: a client that met a chunk in a clone still reads the chunk in the
// volume that owns the chunk, after the clone is gone.
func TestChunkOfDeletedClone(t *testing.T) {
	s := newSite(t)
	a := s.dial("a")
	a.createIn(t, 1, "old")
	c := a.clone(t, 1, "", "c")
	chunk := meta.ChunkID{Volume: 1, Term: 1, Counter: 1}
	a.Via(chunk, c)
	a.must(t, toDelete(c))
	if token := a.ReadChunkCap(chunk); token == nil {
		t.Error("no right to read it")
	}
	a.Via(chunk, c)
	if token := a.RenewChunkCap(chunk, []byte("refused")); token == nil {
		t.Error("no right to read it instead of one that was refused")
	}
}

// The server dies at each step of making a clone and of deleting a clone. After the restart, a
// clone is complete or absent, and the origin knows which. A file lies in chunks of two other
// volumes, and the place of only one volume is known. Both owners are asked: otherwise two slow
// owners would take turns in letting a place become stale, and no client could ever open the
// file.
func TestPlacesComeTogether(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	o := s.srv.hosted.opened(1)
	known, unknown := meta.ChunkID{Volume: 71, Counter: 1}, meta.ChunkID{Volume: 72, Counter: 1}
	later := time.Now().Add(time.Hour) // fresh, however slow the machine is
	o.mu.Lock()
	o.foreign.clone = true
	o.foreign.m = map[meta.ChunkID]foreignPlace{known: {ChunkPlace: meta.ChunkPlace{ID: known}, at: later}}
	wait, err := o.foreign.fillPlaces(&meta.Result{Extents: []meta.Extent{{Len: 1, Chunk: known}, {Off: 1, Len: 1, Chunk: unknown}}})
	o.mu.Unlock()
	if wait == nil {
		t.Fatalf("the place of a chunk that nobody asked for is known: %v", err)
	}
	<-wait
	o.mu.Lock()
	defer o.mu.Unlock()
	o.foreign.clone = false
	a, b := o.foreign.m[known].at, o.foreign.m[unknown].at
	if !a.Equal(b) || a.Equal(later) {
		t.Errorf("the places are as of %v and %v", a, b)
	}
}

func TestCloneInterrupted(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"clone", "clone written", "row", "row written", "delete: row", "delete: row written", "delete: row gone", "delete: row and journal gone"} {
		for _, snapshot := range []string{"v1", ""} {
			t.Run(fmt.Sprintf("%s of %q", step, snapshot), func(t *testing.T) { cloneInterrupted(t, step, snapshot) })
		}
	}
}

func cloneInterrupted(t *testing.T, step, snapshot string) {
	s := newSite(t)
	a := s.dial("a")
	a.createIn(t, 1, "old")
	a.snapshot(t, "v1")
	step, deleting := strings.CutPrefix(step, "delete: ")
	ask := func(p *peer) error {
		_, err := p.Clone(context.Background(), 1, snapshot, "c")
		return err
	}
	if deleting {
		c := a.clone(t, 1, snapshot, "c")
		ask = func(p *peer) error {
			_, err := p.ask(context.Background(), toDelete(c))
			return err
		}
	}
	reached, dead := make(chan struct{}), false
	s.cluster.mu.Lock()
	s.cluster.dies = func(at string) error { // from the step on the table answers nothing
		if at == step && !dead {
			dead = true
			close(reached)
		}
		if dead {
			return meta.E("table of volumes", meta.Unavailable, at, nil)
		}
		return nil
	}
	s.cluster.mu.Unlock()
	answer := make(chan error, 1)
	admin := s.dial("admin")
	go func() { answer <- ask(admin) }()
	select {
	case <-reached:
	case <-time.After(30 * time.Second):
		t.Fatal("the step was not reached")
	}
	s.crash()
	s.cluster.mu.Lock()
	s.cluster.dies = nil
	s.cluster.mu.Unlock()
	s.start()
	select {
	case err := <-answer: // the caller was told of the failure, or asked again
		t.Log(err)
	case <-time.After(60 * time.Second):
		t.Fatal("no answer")
	}
	var there cluster.Volume
	eventually(t, "the clone is there or not", func() error {
		all, err := s.cluster.Volumes(t.Context())
		if err != nil {
			return err
		}
		there = cluster.Volume{}
		for _, v := range all {
			if v.Origin != nil {
				there = v
			}
		}
		switch want := there.ID != 0; {
		case there.State == cluster.VolumeCreating:
			return errors.New("it is being created")
		case len(s.pins(1)) != 0 != want:
			return fmt.Errorf("the clone is there: %v, notes: %v", want, s.pins(1))
		case snapshot == "" && len(a.names(t)) > 1 != want:
			return fmt.Errorf("the clone is there: %v, snapshots: %v", want, a.names(t))
		}
		return nil
	})
	s.exactIn(1)
	if there.ID != 0 && there.State == cluster.VolumeActive {
		if got := a.list(t, there.ID); !slices.Equal(got, []string{"old"}) {
			t.Fatal(got)
		}
		s.exactIn(there.ID)
	}
	if there.ID != 0 {
		a.must(t, toDelete(there.ID))
	}
	// The name is free, and so is the origin.
	c := a.clone(t, 1, snapshot, "c")
	a.createIn(t, c, "mine")
	s.exactIn(c)
	a.must(t, toDelete(c))
	if _, err := a.DeleteSnapshot(t.Context(), 1, "v1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing is left", func() error { return unless(len(a.names(t)) == 0 && len(s.pins(1)) == 0) })
	s.exactIn(1)
}

// listsGone is a cluster that lists a volume which is deleted right afterwards.
type listsGone struct{ Cluster }

func (c listsGone) Volumes(ctx context.Context) ([]cluster.Volume, error) {
	all, err := c.Cluster.Volumes(ctx)
	return append(all, cluster.Volume{ID: 99, Name: "gone", State: cluster.VolumeActive}), err
}

// A server starts although a volume is deleted while the server opens its volumes.
func TestStartsBesideADeletion(t *testing.T) {
	t.Parallel()
	s := newSiteWith(t, 10*time.Second, func(c *Config) { c.Cluster = listsGone{c.Cluster} })
	s.dial("a").createIn(t, 1, "f")
}

// A clone without a checkpoint of its own is loaded from the checkpoint of its origin, which has
// gone on since, in a process that does not serve the origin.
func TestCloneFromCheckpoint(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.createIn(t, 1, "old")
	at := a.snapshot(t, "v1").At
	for i := range 3 {
		a.snapshot(t, fmt.Sprint("later ", i))
		a.createIn(t, 1, fmt.Sprint("later ", i))
	}
	s.checkpoint()
	a.createIn(t, 1, "after the checkpoint")
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	row, err := s.cluster.CreateClone(t.Context(), "c", meta.Policy{Replicas: 1}, 0, cluster.Origin{Volume: 1, At: at, Snapshot: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	srv := s.srv
	srv.hosted.mu.Lock()
	op := srv.hosted.volumes[1]
	delete(srv.hosted.volumes, 1) // as far as the server knows, another server serves the origin
	srv.hosted.mu.Unlock()
	defer func() {
		srv.hosted.mu.Lock()
		srv.hosted.volumes[1] = op
		srv.hosted.mu.Unlock()
	}()
	for try := range 2 { // made, and then found
		st, err := srv.opener.openStore(t.Context(), row.ID, journal.Checkpoint{}, false)
		if err != nil {
			t.Fatal(err)
		}
		if at := st.Applied(); at.Seq != 0 {
			t.Fatal(at)
		}
		effects, err := firstEffects(st, &row)
		if err != nil {
			t.Fatal(err)
		}
		if try == 1 {
			if err := st.Apply(journal.Position{Seq: 1}, effects); err != nil {
				t.Fatal(err)
			}
			if rep, err := namespace.Check(st); err != nil || !rep.OK() || rep.Entries != 1 {
				t.Fatal(rep, err)
			}
		}
		if err := st.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestCloneCostsTheSame, however much the volume holds.
func TestCloneCostsTheSame(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	have := 0
	for _, files := range []int{1_000, 30_000} {
		for ; have < files; have += 1000 {
			var ops []client.BatchOp
			for i := range 1000 {
				ops = append(ops, client.BatchOp{Op: newFile(fmt.Sprint("n", have+i))})
			}
			if _, _, err := a.DoBatch(t.Context(), 1, client.AnyEpoch, ops); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.Sync(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		o := s.srv.hosted.opened(1)
		o.mu.Lock()
		before := o.newest()
		o.mu.Unlock()
		began := time.Now()
		a.clone(t, 1, "", fmt.Sprint("of ", files))
		took := time.Since(began)
		o.mu.Lock()
		entries := o.newest() - before
		o.mu.Unlock()
		t.Logf("%d files: %v, %d entries of the origin's journal", files, took, entries)
		if entries > 3 {
			t.Errorf("%d entries for %d files", entries, files)
		}
	}
}

// A snapshot with too many unlinked open files can't be cloned: the server makes no clone that no
// server could ever open.
func TestCloneOfUnnamed(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	a := s.dial("a")
	a.createIn(t, 1, "named")
	var held []meta.Ino
	for range 4001 {
		held = append(held, a.do(t, &meta.Tmpfile{Parent: meta.RootIno, Mode: 0o600}, meta.LeaseNone).Attr.Ino)
	}
	a.snapshot(t, "full")
	for _, snapshot := range []string{"full", ""} {
		if _, err := a.Clone(t.Context(), 1, snapshot, "c"); !errors.Is(err, meta.ResourceExceeded) {
			t.Fatalf("a clone of %q: %v", snapshot, err)
		}
		if row, err := s.cluster.VolumeByName(t.Context(), "c"); !errors.Is(err, meta.NoSuchVolume) {
			t.Fatalf("%+v, %v", row, err)
		}
	}
	// The files go from now on, without a change to the snapshot; a later snapshot can be cloned.
	a.do(t, &meta.ReleaseOrphans{Inos: held}, meta.LeaseNone)
	if _, err := a.Clone(t.Context(), 1, "full", "c"); !errors.Is(err, meta.ResourceExceeded) {
		t.Fatal(err)
	}
	eventually(t, "what was unlinked is reaped", func() error {
		_, err := a.Clone(t.Context(), 1, "", "c")
		return err
	})
	c, err := a.FindVolume(t.Context(), "c")
	if err != nil {
		t.Fatal(err)
	}
	if got := a.list(t, c.ID); !slices.Equal(got, []string{"named"}) {
		t.Error(got)
	}
	eventually(t, "snapshots that were taken in vain are gone", func() error {
		return unless(len(a.names(t)) == 2)
	})
}
