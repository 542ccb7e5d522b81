package penstock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// flushAll makes a volume ready for a snapshot, as an owner's barrier does.
func flushAll(t testing.TB, v *Volume) {
	t.Helper()
	if err := v.back.flushAll(t.Context(), flushClose); err != nil {
		t.Fatal(err)
	}
	if err := v.back.closeEnds(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func snapshotOf(t testing.TB, v *Volume, name string) *Volume {
	t.Helper()
	s, err := v.Snapshot(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSnapshotShowsWhatWas(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1, MaxChunk: 8 << 20})
	k := newKernel()
	_, v := open(t, w, Config{Notify: k})
	ctx := t.Context()
	random := func(n int) []byte {
		b := make([]byte, n)
		w.rng.Read(b)
		return b
	}
	then := map[string][]byte{"inline": random(100), "packed": random(50_000), "big": random(3 << 20), "empty": nil}
	for name, data := range then {
		write(t, v, create(t, v, name), data, 0)
	}
	tr := v.Tree()
	if err := tr.MkdirAll(ctx, "/d/e", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := tr.WriteFile(ctx, "/d/e/f", []byte("deep"), 0o600); err != nil {
		t.Fatal(err)
	}
	big, err := tr.Stat(ctx, "/big")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Link(ctx, &Call{}, big.Attr.Ino, meta.RootIno, "same"); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Create(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: "link", Mode: meta.TypeSymlink | 0o777, Target: "d/e/f"}); err != nil {
		t.Fatal(err)
	}
	if err := v.SetXattr(ctx, &Call{}, meta.SetXattr{Ino: big.Attr.Ino, Name: "user.a", Value: []byte("then")}); err != nil {
		t.Fatal(err)
	}
	w.run(&meta.Junction{Parent: meta.RootIno, Name: "elsewhere", Volume: 9})
	flushAll(t, v)
	at := w.take("one")

	// Everything changes.
	for name := range then {
		ino := must(v.Lookup(ctx, meta.RootIno, name)).Attr.Ino
		write(t, v, ino, random(70_000), 10)
	}
	for _, err := range []error{
		v.SetXattr(ctx, &Call{}, meta.SetXattr{Ino: big.Attr.Ino, Name: "user.a", Value: []byte("now")}),
		v.Unlink(ctx, &Call{}, meta.RootIno, "same", false),
		v.Unlink(ctx, &Call{}, meta.RootIno, "link", false),
		tr.Rename(ctx, "/d/e/f", "/moved"),
		tr.Remove(ctx, "/d/e"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	flushAll(t, v)

	s := snapshotOf(t, v, "one")
	of, info, ok := s.View()
	if id := v.ViewID(at); !ok || of != v.ID() || info.At != at || info.Name != "one" || id != s.ID() || id <= meta.MaxVolume || s.Name() != "root@one" {
		t.Fatalf("the view is %d %q of %d, %+v; its number %d", s.ID(), s.Name(), of, info, id)
	}
	check := func() {
		t.Helper()
		for name, data := range then {
			e := must(s.Lookup(ctx, meta.RootIno, name))
			if e.Volume != s.ID() || e.Attr.Size != uint64(len(data)) || e.Valid != viewValid {
				t.Fatalf("%s: %+v", name, e)
			}
			info, err := s.Open(ctx, &Call{}, e.Attr.Ino, 0)
			if err != nil || !info.Sealed || !info.KeepCache {
				t.Fatalf("open %s: %+v, %v", name, info, err)
			}
			if got := contents(t, s, e.Attr.Ino); !bytes.Equal(got, data) {
				t.Fatalf("DATA: %s has other bytes in the snapshot", name)
			}
			s.Release(ctx, e.Attr.Ino, 0)
		}
		if e := must(s.Lookup(ctx, meta.RootIno, "moved")); !e.Negative || e.Valid != viewValid {
			t.Fatalf("a later name is in the snapshot: %+v", e)
		}
		if e := must(s.Lookup(ctx, meta.RootIno, "same")); e.Attr.Ino != big.Attr.Ino || e.Attr.Nlink != 2 {
			t.Fatalf("hard link: %+v", e)
		}
		// A junction is an empty directory, always with the same inode number.
		j := must(s.Lookup(ctx, meta.RootIno, "elsewhere"))
		if j.Volume != s.ID() || !j.Attr.IsDir() || j.Negative || must(s.GetAttr(ctx, j.Attr.Ino)) != j {
			t.Fatalf("junction: %+v", j)
		}
		if l, eof, err := s.ReadDir(ctx, j.Attr.Ino, &DirCursor{}, 0, true); len(l) > 0 || !eof || err != nil {
			t.Fatalf("a junction holds %v, %v", l, err)
		}
		if e := must(s.Lookup(ctx, j.Attr.Ino, "x")); !e.Negative {
			t.Fatalf("%+v in a junction", e)
		}
	}
	check()
	if b, err := s.GetXattr(ctx, big.Attr.Ino, "user.a"); err != nil || string(b) != "then" {
		t.Fatalf("DATA: attribute: %q, %v", b, err)
	}
	l, err := tr.ReadDirAll(ctx, "/.snapshot/one")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range l {
		if e.Volume != s.ID() || e.Entry.Attr.Ino != e.Ino || e.Entry.Valid != viewValid {
			t.Errorf("listed: %+v", e)
		}
		names = append(names, e.Name)
	}
	slices.Sort(names)
	if !slices.Equal(names, []string{"big", "d", "elsewhere", "empty", "inline", "link", "packed", "same"}) {
		t.Errorf("names: %q", names)
	}
	if b, err := tr.ReadFile(ctx, "/.snapshot//one/link"); err != nil || string(b) != "deep" {
		t.Errorf("DATA: by a link in the snapshot: %q, %v", b, err)
	}
	if _, err := tr.Stat(ctx, "/.snapshot/two/x"); !errors.Is(err, meta.NotFound) {
		t.Errorf("a snapshot that is not there: %v", err)
	}
	if st, err := s.StatFS(ctx); err != nil || st.UsedInodes != info.Inodes || st.UsedBytes != info.Bytes {
		t.Errorf("usage: %+v, %v", st, err)
	}

	// A warm view sends no requests; recalls of the live volume do not touch the view.
	for try := 0; ; try++ {
		w.mu.Lock()
		before := w.callsAt
		w.mu.Unlock()
		check()
		w.mu.Lock()
		asked := w.callsAt - before
		w.mu.Unlock()
		if asked == 0 {
			break
		}
		if try == 100 { // a prefetched listing may be under way for a moment
			t.Fatalf("a warm snapshot asks %d times", asked)
		}
		time.Sleep(time.Millisecond)
	}

	// A view refuses all changes.
	e := must(s.Lookup(ctx, meta.RootIno, "big"))
	for what, err := range map[string]error{
		"create": second(s.Create(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: "new", Mode: meta.TypeDir})),
		"open":   second(s.Open(ctx, &Call{}, e.Attr.Ino, rdwr)),
		"make":   second(s.CreateOpen(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: "big"}, rdwr)),
		"tmp":    second(s.Tmpfile(ctx, &Call{}, meta.Tmpfile{Parent: meta.RootIno}, rdwr)),
		"write":  second(s.Write(ctx, &Call{}, e.Attr.Ino, []byte("x"), 0, false, false)),
		"size":   second(s.SetAttr(ctx, &Call{}, meta.SetAttr{Ino: e.Attr.Ino, Mask: meta.SetSize})),
		"mode":   second(s.SetAttr(ctx, &Call{}, meta.SetAttr{Ino: e.Attr.Ino, Mask: meta.SetMode})),
		"xattr":  s.SetXattr(ctx, &Call{}, meta.SetXattr{Ino: e.Attr.Ino, Name: "user.b"}),
		"link":   second(s.Link(ctx, &Call{}, e.Attr.Ino, meta.RootIno, "l")),
		"unlink": s.Unlink(ctx, &Call{}, meta.RootIno, "big", false),
		"rename": s.Rename(ctx, &Call{}, meta.RootIno, "big", meta.RootIno, "b", 0),
		"punch":  s.Fallocate(ctx, &Call{}, meta.Fallocate{Ino: e.Attr.Ino, Mode: meta.FallocPunchHole, Len: 1}),
		"copy":   second(s.CopyRange(ctx, &Call{}, meta.CopyRange{Src: e.Attr.Ino, Dst: e.Attr.Ino, DstOff: 1, Len: 1})),
	} {
		if !errors.Is(err, meta.ReadOnly) {
			t.Errorf("%s in a snapshot: %v", what, err)
		}
	}
	if err := errors.Join(s.Fsync(ctx, e.Attr.Ino, false), s.SyncAll(ctx), s.Flush(ctx, &Call{}, e.Attr.Ino, 1)); err != nil {
		t.Error(err)
	}
	for _, err := range []error{second(v.Create(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: SnapshotDir, Mode: meta.TypeDir})), tr.WriteFile(ctx, "/.snapshot", nil, 0o644), tr.Rename(ctx, "/d", "/.snapshot")} {
		if !errors.Is(err, meta.Exists) {
			t.Errorf("a name that would hide the snapshots: %v", err)
		}
	}
	if err := tr.Remove(ctx, "/.snapshot/one"); !errors.Is(err, meta.Busy) {
		t.Errorf("removing a snapshot by its path: %v", err)
	}
	check()
	w.check()
}

func must(e Entry, err error) Entry {
	if err != nil {
		panic(err)
	}
	return e
}

func second[T any](_ T, err error) error { return err }

func TestSnapshotDeleted(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	k := newKernel()
	c, v := open(t, w, Config{Notify: k})
	ctx := t.Context()
	ino := create(t, v, "f")
	write(t, v, ino, []byte("first"), 0)
	flushAll(t, v)
	first := w.take("s")
	s := snapshotOf(t, v, "s")
	if string(contents(t, s, ino)) != "first" {
		t.Fatal("DATA: the snapshot has other bytes")
	}
	k.attrs[ino] = meta.Attr{} // as if the kernel knew the inode from the view
	write(t, v, ino, []byte("again"), 0)
	flushAll(t, v)
	w.drop(first)
	if w.take("s") == first {
		t.Fatal("a generation was used twice")
	}
	// Cached state is returned until a caller needs uncached state.
	if string(contents(t, s, ino)) != "first" {
		t.Fatal("DATA: the view was forgotten before anybody knew")
	}
	if _, err := s.ReadLink(ctx, ino); !errors.Is(err, meta.Stale) {
		t.Fatalf("a question about a deleted snapshot: %v", err)
	}
	for what, err := range map[string]error{
		"getattr": second(s.GetAttr(ctx, ino)), "lookup": second(s.Lookup(ctx, meta.RootIno, "f")),
		"read": second(s.Read(ctx, ino, make([]byte, 5), 0)), "open": second(s.Open(ctx, &Call{}, ino, 0)),
		"its number": second(c.VolumeByID(ctx, s.ID())),
	} {
		if !errors.Is(err, meta.Stale) {
			t.Errorf("%s after the snapshot was deleted: %v", what, err)
		}
	}
	deadline := time.Now().Add(10 * time.Second)
	for told := false; !told; {
		k.mu.Lock()
		_, has := k.attrs[ino]
		k.mu.Unlock()
		told = !has
		if time.Now().After(deadline) {
			t.Fatal("what the kernel holds of a view that ended was not dropped")
		}
		time.Sleep(time.Millisecond)
	}
	// The name leads to the new snapshot as soon as the list is asked for again.
	v.snapshots.changed()
	n := snapshotOf(t, v, "s")
	if n == s || n.ID() == s.ID() || string(contents(t, n, ino)) != "again" {
		t.Fatalf("DATA: the name leads to view %d as before", n.ID())
	}
	// The list of snapshots alone ends views, too, but not views that are younger than
	// the list.
	w.drop(n.view.snap.At)
	n.view.born = time.Now().Add(time.Hour)
	v.snapshots.since(ctx, 0)
	if n.view.gone.Load() {
		t.Fatal("an old list ended a young view")
	}
	n.view.born = time.Time{}
	v.snapshots.since(ctx, 0)
	if !n.view.gone.Load() {
		t.Fatal("a view outlived its snapshot's place in the list")
	}
	if _, err := v.Snapshot(ctx, "s"); !errors.Is(err, meta.NoSuchSnapshot) {
		t.Fatal(err)
	}
	w.check()
}

// TestSnapshotsAgainstModel changes a tree, takes and deletes snapshots, and reads names
// and bytes of any of them, with a small cache, in two clients.
func TestSnapshotsAgainstModel(t *testing.T) {
	for seed := range int64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewSource(seed))
			w := newWorld(t, meta.Policy{Replicas: 1})
			ctx := t.Context()
			var vs []*Volume
			for range 2 {
				_, v := open(t, w, Config{Notify: newKernel(), MetaCache: 15})
				vs = append(vs, v)
			}
			live := map[string]string{}
			snaps := map[string]map[string]string{}
			at := map[string]meta.Generation{}
			for step := range 400 {
				v := vs[rng.Intn(2)]
				name := fmt.Sprintf("n%d", rng.Intn(30))
				switch op := rng.Intn(20); {
				case op < 6: // write
					info, err := v.CreateOpen(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: name, Mode: 0o644}, rdwr)
					if err != nil {
						t.Fatal(err)
					}
					text := fmt.Sprintf("%d %s %s", step, name, bytes.Repeat([]byte("x"), rng.Intn(9000)))
					ino := info.Entry.Attr.Ino
					if _, err := v.SetAttr(ctx, &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize}); err != nil {
						t.Fatal(err)
					}
					write(t, v, ino, []byte(text), 0)
					v.Release(ctx, ino, rdwr)
					live[name] = text
				case op < 8:
					err := v.Unlink(ctx, &Call{}, meta.RootIno, name, false)
					if _, there := live[name]; there != (err == nil) {
						t.Fatalf("step %d: unlink %s: %v", step, name, err)
					}
					delete(live, name)
				case op < 10 && len(live) > 0:
					from := slices.Sorted(maps.Keys(live))[rng.Intn(len(live))]
					if err := v.Rename(ctx, &Call{}, meta.RootIno, from, meta.RootIno, name, 0); err != nil {
						t.Fatal(err)
					}
					text := live[from]
					delete(live, from)
					live[name] = text
				case op == 10 && len(snaps) < 8:
					for _, v := range vs {
						flushAll(t, v)
					}
					s := fmt.Sprintf("s%d", rng.Intn(10))
					if snaps[s] != nil {
						continue
					}
					at[s], snaps[s] = w.take(s), maps.Clone(live)
				case op == 11 && len(snaps) > 0:
					s := slices.Sorted(maps.Keys(snaps))[rng.Intn(len(snaps))]
					w.drop(at[s])
					delete(snaps, s)
					for _, v := range vs { // otherwise the name could mean the old snapshot for a second
						v.snapshots.since(ctx, 0)
					}
				case len(snaps) > 0:
					s := slices.Sorted(maps.Keys(snaps))[rng.Intn(len(snaps))]
					view, want := snapshotOf(t, v, s), snaps[s]
					if rng.Intn(3) == 0 {
						l, err := view.Tree().ReadDirAll(ctx, "/")
						if err != nil || len(l) != len(want) {
							t.Fatalf("step %d: %s lists %d names, not %d: %v", step, s, len(l), len(want), err)
						}
					}
					e := must(view.Lookup(ctx, meta.RootIno, name))
					text, there := want[name]
					if e.Negative == there {
						t.Fatalf("step %d: %s in %s: %+v", step, name, s, e)
					}
					if there && string(contents(t, view, e.Attr.Ino)) != text {
						t.Fatalf("DATA: step %d: %s in %s has other bytes", step, name, s)
					}
				}
			}
			for _, v := range vs {
				evicted(t, v.c, 30)
			}
			w.check()
		})
	}
}

// evicted waits until the table has at most so many inodes: eviction runs in parallel,
// and inodes that are open or unsynced stay for a while.
func evicted(t testing.TB, c *Client, most int) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); c.table.len() > most; time.Sleep(time.Millisecond) {
		c.kickEvict()
		if time.Now().After(end) {
			t.Fatalf("%d inodes stay, of at most %d", c.table.len(), most)
		}
	}
}

// Eviction takes inodes of a view without telling anybody.
func TestViewsAreEvicted(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{MetaCache: 64})
	for i := range 1000 {
		create(t, v, fmt.Sprintf("f%d", i))
		v.Release(t.Context(), meta.Ino(i+2), rdwr)
	}
	flushAll(t, v)
	w.take("s")
	s := snapshotOf(t, v, "s")
	for range 2 {
		if l, err := s.Tree().ReadDirAll(t.Context(), "/"); err != nil || len(l) != 1000 {
			t.Fatal(len(l), err)
		}
	}
	for i := range 1000 {
		must(s.Lookup(t.Context(), meta.RootIno, fmt.Sprintf("f%d", i)))
	}
	evicted(t, c, 100)
	w.mu.Lock()
	defer w.mu.Unlock()
	for ino := range w.leases {
		if ino > 1001 {
			t.Errorf("a lease on %d", ino)
		}
	}
}

// TestViewNumbers: each snapshot has its own number, which no volume has, and the same
// number next time.
func TestViewNumbers(t *testing.T) {
	var a, b views
	seen := map[meta.VolumeID]bool{}
	for g := meta.Generation(1); g <= 3000; g++ {
		k := viewKey{1 + meta.VolumeID(g%7), g}
		would := a.find(k)
		id, turn, err := a.numberOf(k)
		if err != nil || turn != 0 || id != would || seen[id] || id <= meta.MaxVolume || id >= 1<<meta.VolumeBits {
			t.Fatalf("number %d, turn %d, %v; it was to be %d", id, turn, err, would)
		}
		seen[id] = true
	}
	// Inode numbers are made of these numbers, which stay the same in all versions.
	for k, want := range map[viewKey]meta.VolumeID{{1, 1}: 1010017, {2, 1}: 999310, {1, 4095}: 887647} {
		if id, _, _ := b.numberOf(k); id != want {
			t.Errorf("volume %d generation %d is view %d, not %d", k.v, k.at, id, want)
		}
	}
	for len(b.number) < maxViews {
		b.numberOf(viewKey{3, meta.Generation(len(b.number) + 10)})
	}
	if _, _, err := b.numberOf(viewKey{4, 1}); !errors.Is(err, meta.ResourceExceeded) {
		t.Errorf("one more than there are numbers: %v", err)
	}
	if id := b.find(viewKey{4, 1}); b.all[id] != nil {
		t.Errorf("what would get number %d is there already", id)
	}
}

// holder is a kernel above a client that knows inodes of some views.
type holder struct {
	*kernel
	views map[meta.VolumeID]bool
	asked map[meta.VolumeID]int
}

func (h *holder) HoldsView(v meta.VolumeID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asked[v]++
	return h.views[v]
}

// holds sets whether the kernel knows inodes of a view.
func (h *holder) holds(v meta.VolumeID, holds bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.views[v] = holds
}

// wasAsked returns how often the kernel was asked about a view.
func (h *holder) wasAsked(v meta.VolumeID) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked[v]
}

// TestViewNumbersComeBack: a client that reads snapshots for years, each of which is
// deleted later, never runs out of numbers, and keeps no state of deleted snapshots. A
// view that the kernel knows keeps its number until the kernel forgets it; the next
// snapshot with that number is then distinguished.
func TestViewNumbersComeBack(t *testing.T) {
	h := &holder{newKernel(), map[meta.VolumeID]bool{}, map[meta.VolumeID]int{}}
	inFakeTime(t, Config{Notify: h}, func(t *testing.T, w *world, v *Volume) {
		c, ctx := v.c, t.Context()
		const most = 6
		c.mu.Lock()
		c.views.max = most
		c.mu.Unlock()
		look := func(name string) (*Volume, meta.VolumeID) {
			t.Helper()
			e, err := v.LookupSnapshot(ctx, name)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			s, err := c.VolumeByID(ctx, e.Volume)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			return s, e.Volume
		}
		gone := func(at meta.Generation) {
			t.Helper()
			for !w.run(&meta.DropSnapshot{At: at}).EOF {
			}
			time.Sleep(3 * viewCheck)
		}
		held := w.take("held")
		was, number := look("held")
		h.holds(number, true)
		kept := w.take("kept")
		look("kept")
		gone(held)
		if !was.Ended() || h.wasAsked(number) == 0 {
			t.Fatal("the view has not ended, or nobody asked who knows it: nothing is tested")
		}
		for i := range 10 * most {
			name := fmt.Sprint("s", i)
			at := w.take(name)
			s, id := look(name)
			if id == number {
				t.Fatalf("%s got the number of a snapshot of which the kernel holds an inode", name)
			}
			if got := v.ViewID(at); got != id {
				t.Fatalf("%s is view %d, and was to be %d", name, id, got)
			}
			gone(at)
			if _, err := s.GetAttr(ctx, meta.RootIno); meta.KindOf(err) != meta.Stale {
				t.Fatalf("%s is gone, and shows %v", name, err)
			}
		}
		c.mu.Lock()
		given, open := len(c.views.number), len(c.volumes)
		// This view would get the held number if it could.
		next := viewKey{v.id, kept + 1}
		for mix(uint64(next.v)<<32|uint64(next.at))%meta.Views != uint64(number-meta.MaxVolume-1) {
			next.at++
		}
		other := c.views.find(next)
		c.mu.Unlock()
		if given != 2 || open != 2 {
			t.Errorf("%d numbers are given and %d volumes open with one snapshot and one that is held", given, open)
		}
		if other == number {
			t.Error("a number that is held would be given again")
		}
		h.holds(number, false)
		time.Sleep(3 * viewCheck)
		c.mu.Lock()
		id, turn, err := c.views.numberOf(next)
		delete(c.views.over, id)
		c.mu.Unlock()
		if id != number || turn != 1 || err != nil {
			t.Errorf("the number %d that nobody knows any more: the next got %d, turn %d, %v", number, id, turn, err)
		}
		if look("kept"); h.wasAsked(v.ViewID(kept)) > 0 {
			t.Error("who knows the view of a snapshot that is there was asked")
		}
	})
}

// TestViewNumbersAreInherited: a successor gives out no number that its predecessors gave
// and that the kernel may know, and distinguishes the earlier numbers.
func TestViewNumbersAreInherited(t *testing.T) {
	m, err := keep.New(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	a := views{keep: m}
	numberOf := func(s *views, k viewKey) (meta.VolumeID, uint32) {
		t.Helper()
		id, turn, err := s.numberOf(k)
		if err != nil {
			t.Fatal(err)
		}
		return id, turn
	}
	first := viewKey{1, 1}
	number, _ := numberOf(&a, first)
	second := viewKey{1, 2} // the next snapshot with the same number
	for mix(uint64(second.v)<<32|uint64(second.at))%meta.Views != uint64(number-meta.MaxVolume-1) {
		second.at++
	}
	others := map[viewKey]meta.VolumeID{}
	for g := range meta.Generation(100) {
		k := viewKey{2, g + 1}
		others[k], _ = numberOf(&a, k)
	}
	freed := viewKey{2, 50}
	a.set(number, viewKey{}, 0)
	if id, turn := numberOf(&a, second); id != number || turn != 1 {
		t.Fatalf("number %d, turn %d: nothing is tested", id, turn)
	}
	a.set(others[freed], viewKey{}, 0)
	for range 2 { // and the successor's
		l, err := m.Records()
		if err != nil {
			t.Fatal(err)
		}
		if m, err = keep.New(1 << 20); err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		c := newClient(Config{Keep: m, Logger: slog.New(slog.DiscardHandler)})
		c.attach(noSession{}, nil)
		c.closed = true // no goroutine maintains the views
		for _, r := range l {
			c.reopenView(t.Context(), r)
		}
		b := &c.views
		if id, turn := numberOf(b, second); id != number || turn != 1 {
			t.Errorf("what was number %d, turn 1, is %d, turn %d", number, id, turn)
		}
		if id := b.find(first); id == number {
			t.Error("a number is given anew that is in use")
		}
		for k, want := range others {
			id := b.find(k)
			if id != want {
				t.Errorf("what was number %d is %d", want, id)
			}
			if n := b.all[id]; n == nil || (n.key.at == 0) != (k == freed) {
				t.Errorf("of number %d is known: %+v", id, n)
			}
		}
		if len(b.over) != len(others)-1 {
			t.Errorf("%d numbers are free when the kernel knows them no more, not %d", len(b.over), len(others)-1)
		}
	}
}

// TestCopyFromASnapshot: a file is copied back from a snapshot without moving bytes, over
// later bytes that are still buffered; the bytes stay when the snapshot is deleted.
func TestCopyFromASnapshot(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1, MaxChunk: 8 << 20})
	c, v := open(t, w, Config{})
	ctx := t.Context()
	then, small := make([]byte, 3<<20), []byte("small")
	w.rng.Read(then)
	ino, inline := create(t, v, "f"), create(t, v, "inline")
	write(t, v, ino, then, 0)
	write(t, v, inline, small, 0)
	flushAll(t, v)
	at := w.take("s")
	write(t, v, ino, make([]byte, 1<<20), 1<<20)
	copied := create(t, v, "copy")
	write(t, v, copied, []byte("in the way"), 0)
	flushAll(t, v)
	write(t, v, ino, []byte("not committed"), 5)
	sent := c.Stats().AppendedBytes
	for _, to := range []meta.Ino{ino, copied} {
		n, err := v.CopyRange(ctx, &Call{}, meta.CopyRange{Src: ino, Dst: to, Len: 1 << 30, At: at})
		if to == copied && meta.KindOf(err) == meta.NotSupported { // the file was inline
			write(t, v, copied, make([]byte, meta.InlineMax+1), 0)
			flushAll(t, v)
			sent = c.Stats().AppendedBytes
			n, err = v.CopyRange(ctx, &Call{}, meta.CopyRange{Src: ino, Dst: to, Len: 1 << 30, At: at})
		}
		if n != uint64(len(then)) || err != nil {
			t.Fatalf("copied %d bytes, %v", n, err)
		}
	}
	if n := c.Stats().AppendedBytes - sent; n > 100 { // only buffered bytes were sent
		t.Errorf("%d bytes were sent", n)
	}
	if _, err := v.CopyRange(ctx, &Call{}, meta.CopyRange{Src: inline, Dst: copied, Len: 10, At: at}); meta.KindOf(err) != meta.NotSupported {
		t.Errorf("inline bytes: %v", err)
	}
	for !w.run(&meta.DropSnapshot{At: at}).EOF {
	}
	if _, err := v.CopyRange(ctx, &Call{}, meta.CopyRange{Src: ino, Dst: copied, Len: 10, At: at}); meta.KindOf(err) != meta.NoSuchSnapshot {
		t.Errorf("from one that is gone: %v", err)
	}
	for _, to := range []meta.Ino{ino, copied} {
		if !bytes.Equal(contents(t, v, to), then) {
			t.Errorf("DATA: inode %d has other bytes", to)
		}
	}
}

// noSession opens no volume.
type noSession struct{ metaSession }

func (noSession) Volume(context.Context, meta.VolumeID, string) (volumeInfo, error) {
	return volumeInfo{}, meta.E("volume", meta.NoSuchVolume, "", nil)
}

// TestLocksInASnapshot: locks on a snapshot work between the processes of one client,
// also with waiting.
func TestLocksInASnapshot(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{})
	ino := create(t, v, "f")
	w.take("s")
	s := snapshotOf(t, v, "s")
	ctx := t.Context()
	mine := meta.Lock{Ino: ino, Owner: 1, Type: meta.LockWrite, End: 1<<63 - 1}
	other := mine
	other.Owner = 2
	if err := s.SetLock(ctx, mine, false); err != nil {
		t.Fatal(err)
	}
	if err := s.SetLock(ctx, other, false); !errors.Is(err, meta.WouldBlock) {
		t.Fatalf("the second lock: %v", err)
	}
	if l, err := s.GetLock(ctx, other); err != nil || l.Owner != 1 {
		t.Fatalf("%+v, %v", l, err)
	}
	soon, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if err := s.SetLock(soon, other, true); !errors.Is(err, meta.Interrupted) {
		t.Fatalf("interrupted waiting: %v", err)
	}
	var wg sync.WaitGroup
	got := make(chan error, 1)
	wg.Go(func() { got <- s.SetLock(ctx, other, true) })
	time.Sleep(20 * time.Millisecond)
	if err := s.Flush(ctx, &Call{}, ino, 1); err != nil { // close(2) by the lock's holder
		t.Fatal(err)
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	if l, err := s.GetLock(ctx, mine); err != nil || l.Owner != 2 {
		t.Fatalf("%+v, %v", l, err)
	}
}

// TestViewsEndWithTheGrant: a client without a grant on the volume shows nothing of its
// snapshots any more.
func TestViewsEndWithTheGrant(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	k := newKernel()
	c, v := open(t, w, Config{Notify: k})
	ino := create(t, v, "f")
	write(t, v, ino, []byte("text"), 0)
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	w.take("s")
	s := snapshotOf(t, v, "s")
	if string(contents(t, s, ino)) != "text" {
		t.Fatal("DATA: the view shows something else")
	}
	c.Expired([]meta.VolumeID{1}, meta.E("session", meta.SessionExpired, "", nil))
	if s.view.gone.Load() {
		t.Error("a session that ran out ended a view, which never changes")
	}
	k.mu.Lock()
	k.attrs[ino] = meta.Attr{}
	k.mu.Unlock()
	c.Expired([]meta.VolumeID{1}, meta.E("authorize", meta.AccessDenied, "", nil))
	if !s.view.gone.Load() {
		t.Error("the view goes on without a grant")
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		k.mu.Lock()
		_, has := k.attrs[ino]
		k.mu.Unlock()
		if !has {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the kernel keeps what it has of the view")
		}
	}
	if s := snapshotOf(t, v, "s"); string(contents(t, s, ino)) != "text" {
		t.Error("DATA: who is let in again finds something else")
	}
}

// TestViewsOfOneNumber: a snapshot is opened anew while files of its ended view are open,
// or not yet forgotten. The new view can be read; open files of the old view stay stale.
func TestViewsOfOneNumber(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{})
	ino := create(t, v, "f")
	write(t, v, ino, []byte("text"), 0)
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	w.take("s")
	old := snapshotOf(t, v, "s")
	if _, err := old.Open(t.Context(), nil, ino, 0); err != nil {
		t.Fatal(err)
	}
	c.Expired([]meta.VolumeID{1}, meta.E("authorize", meta.AccessDenied, "", nil))
	s := snapshotOf(t, v, "s")
	if s == old || s.id != old.id {
		t.Fatalf("the view that was opened anew is %v with number %d, the old one %v with %d", s, s.id, old, old.id)
	}
	for range 2 {
		if got := string(contents(t, s, ino)); got != "text" {
			t.Errorf("who is let in again reads %q", got)
		}
		if _, err := old.Read(t.Context(), ino, make([]byte, 4), 0); meta.KindOf(err) != meta.Stale {
			t.Errorf("what ended reads: %v", err)
		}
	}
	old.Release(t.Context(), ino, 0)
	if n := len(c.table.all(func(in *inode) bool { return in.vol == old })); n > 0 {
		t.Errorf("%d inodes of the old view are kept beside the new", n)
	}
}

// between is a kernel above a client that calls f whenever it is told to forget
// something.
type between struct{ f func() }

func (b *between) told() {
	if b.f != nil {
		b.f()
	}
}

func (b *between) InvalAttr(meta.VolumeID, meta.Ino)               { b.told() }
func (b *between) InvalData(meta.VolumeID, meta.Ino, int64, int64) { b.told() }
func (b *between) InvalEntries(meta.VolumeID, meta.Ino)            { b.told() }

// openViews opens and ends the view of a snapshot again and again, always with the same
// number. openViews pauses while nothing else runs: see inFakeTime.
type openViews struct {
	t     *testing.T
	v     *Volume
	s     *Volume // the present view; nil: none
	ended []*Volume
}

func (o *openViews) view() *Volume {
	if o.s == nil {
		o.s = snapshotOf(o.t, o.v, "s")
	}
	return o.s
}

func (o *openViews) end() {
	if o.s != nil {
		o.s.view.end()
		synctest.Wait()
		o.ended, o.s = append(o.ended, o.s), nil
	}
}

// TestEvictedWhileItsNumberIsGivenAnew: a file of an ended view is being evicted when a
// new view with the same number opens its own file: the new file stays.
func TestEvictedWhileItsNumberIsGivenAnew(t *testing.T) {
	n := &between{}
	inFakeTime(t, Config{Notify: n}, func(t *testing.T, w *world, v *Volume) {
		tb, ctx := &v.c.table, t.Context()
		ino, live := create(t, v, "f"), create(t, v, "live")
		v.Release(ctx, ino, rdwr)
		v.Release(ctx, live, rdwr)
		flushAll(t, v)
		w.take("s")
		o := openViews{t: t, v: v}
		old := o.view()
		if _, err := old.Open(ctx, nil, ino, 0); err != nil {
			t.Fatal(err)
		}
		o.end() // the inode stays while in use
		old.Release(ctx, ino, 0)
		v.c.evicting.Store(true) // nobody else does
		defer v.c.evicting.Store(false)
		tb.mu.Lock()
		was := tb.max
		tb.max = 0
		left := tb.m[inodeKey{old.id, ino}]
		tb.mu.Unlock()
		if left == nil || left.vol != old {
			t.Fatal("nothing is left of the view that ended: nothing is tested")
		}
		var opened *inode
		n.f = func() {
			n.f = nil
			if _, err := o.view().Open(ctx, nil, ino, 0); err != nil {
				t.Error(err)
			}
			tb.mu.Lock()
			opened = tb.m[inodeKey{old.id, ino}]
			tb.mu.Unlock()
		}
		for range 2 { // used inodes are spared once
			tb.evict(tb.choose())
		}
		tb.mu.Lock()
		tb.max = was
		kept := tb.m[inodeKey{old.id, ino}]
		tb.mu.Unlock()
		if opened == nil || o.s.id != old.id {
			t.Fatal("it was not opened anew meanwhile: nothing is tested")
		}
		if kept != opened {
			t.Error("what is open is not in the table")
		}
		if err := tb.check(); err != nil {
			t.Error(err)
		}
		o.s.Release(ctx, ino, 0)
		if opened.file.users.opens != 0 {
			t.Error("what was released stays open")
		}
	})
}

// TestTableIsWhole: after inodes are used, opened, evicted, forgotten and given up, with
// the two halves of evictions in any order, the table's ring and its map have the same
// inodes, and the counted names are their names.
func TestTableIsWhole(t *testing.T) {
	for seed := range int64(20) {
		n := &between{}
		inFakeTime(t, Config{Notify: n}, func(t *testing.T, w *world, v *Volume) {
			ctx, c, tb := t.Context(), v.c, &v.c.table
			rng := rand.New(rand.NewSource(seed))
			var inos []meta.Ino
			for i := range 8 {
				ino := create(t, v, fmt.Sprint(i))
				v.Release(ctx, ino, rdwr)
				inos = append(inos, ino)
			}
			flushAll(t, v)
			w.take("s")
			c.evicting.Store(true) // only when the test starts an eviction
			defer c.evicting.Store(false)
			tb.max = 6
			type opening struct {
				v   *Volume
				ino meta.Ino
			}
			var opens []opening
			o := openViews{t: t, v: v}
			evictions, within := 0, 0
			check := func() {
				t.Helper()
				synctest.Wait()
				if err := tb.check(); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
				names := 0
				for _, in := range tb.all(func(*inode) bool { return true }) {
					if in.dir != nil {
						names += len(in.dir.names)
					}
					in.put()
				}
				if counted := int(c.dentries.Load()); counted != names {
					t.Fatalf("seed %d: %d names are counted, the table has %d", seed, counted, names)
				}
			}
			var step func(depth int)
			step = func(depth int) {
				ino := inos[rng.Intn(len(inos))]
				switch op := rng.Intn(20); {
				case op < 4:
					must(v.Lookup(ctx, meta.RootIno, fmt.Sprint(rng.Intn(len(inos)))))
				case op < 8:
					must(o.view().Lookup(ctx, meta.RootIno, fmt.Sprint(rng.Intn(len(inos)))))
				case op < 10:
					from := []*Volume{v, o.view()}[rng.Intn(2)]
					if _, err := from.Open(ctx, nil, ino, 0); err != nil {
						t.Fatal(err)
					}
					opens = append(opens, opening{from, ino})
				case op < 13 && len(opens) > 0:
					i := rng.Intn(len(opens))
					opens[i].v.Release(ctx, opens[i].ino, 0)
					opens = slices.Delete(opens, i, i+1)
				case op == 13:
					was := n.f
					n.f = nil // the view's end tells the kernel beside us
					o.end()
					n.f = was
				case op == 14 && o.s != nil: // the first half of the view's end; the rest comes later
					c.mu.Lock()
					delete(c.volumes, o.s.id)
					c.mu.Unlock()
					half := o.s
					half.view.gone.Store(true)
					o.s = nil
					if o.view().id != half.id {
						t.Fatal("another number")
					}
					o.view().node(meta.RootIno).put()
					for _, in := range tb.all(func(in *inode) bool { return in.vol == half }) {
						in.mu.Lock()
						in.lowerLocked(meta.LeaseNone)
						in.mu.Unlock()
						tb.drop(in)
					}
				case op == 15 && len(o.ended) > 0:
					o.ended[rng.Intn(len(o.ended))].node(ino).put()
				case op == 16:
					v.back.forgetDead([]meta.Ino{ino})
				case depth < 3:
					evictions++
					was := n.f
					n.f = func() {
						within++
						step(depth + 1)
					}
					tb.evict(tb.choose())
					n.f = was
				}
				check()
			}
			for range 150 {
				n.f = nil
				step(0)
			}
			if evictions == 0 || within == 0 {
				t.Errorf("%d evictions, and %d times something in the midst of one: nothing is tested", evictions, within)
			}
			n.f = nil
			for _, x := range opens {
				x.v.Release(ctx, x.ino, 0)
			}
		})
	}
}
