package server

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/btree"

	"penstock.io/penstock/meta"
	adminapi "penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/index"
	"penstock.io/penstock/meta/namespace"
)

var indexSeed = flag.Uint64("index-seed", 0, "seed of the random trees that are indexed; 0: a new one")

// plainStore is a volume's store in memory.
type plainStore struct{ t *btree.BTreeG[storeItem] }

type storeItem struct{ k, v []byte }

func newPlainStore() *plainStore {
	return &plainStore{btree.NewG(32, func(a, b storeItem) bool { return bytes.Compare(a.k, b.k) < 0 })}
}

func (s *plainStore) Get(key []byte) ([]byte, bool, error) {
	it, ok := s.t.Get(storeItem{k: key})
	return it.v, ok, nil
}

func (s *plainStore) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	s.t.AscendRange(storeItem{k: lo}, storeItem{k: hi}, func(it storeItem) bool { return fn(it.k, it.v) })
	return nil
}

func (s *plainStore) apply(l []namespace.Effect) {
	for _, e := range l {
		switch e.Kind {
		case namespace.Put:
			s.t.ReplaceOrInsert(storeItem{bytes.Clone(e.Key), bytes.Clone(e.Value)})
		case namespace.Delete:
			s.t.Delete(storeItem{k: e.Key})
		case namespace.DeleteRange:
			var gone []storeItem
			s.t.AscendRange(storeItem{k: e.Key}, storeItem{k: e.Value}, func(it storeItem) bool { gone = append(gone, it); return true })
			for _, it := range gone {
				s.t.Delete(it)
			}
		}
	}
}

// grove makes a random tree, operation by operation.
type grove struct {
	t    *testing.T
	rng  *rand.Rand
	s    *plainStore
	now  meta.Time
	dirs []meta.Ino
	all  []meta.Ino
	ents []grownEntry
	used map[meta.ChunkID]uint64
	last meta.ChunkID
}

type grownEntry struct {
	dir  meta.Ino
	name string
}

func newGrove(t *testing.T, rng *rand.Rand) *grove {
	g := &grove{t: t, rng: rng, s: newPlainStore(), now: 1_700_000_000_000_000_000, dirs: []meta.Ino{meta.RootIno}, all: []meta.Ino{meta.RootIno}, used: map[meta.ChunkID]uint64{}}
	g.s.apply(namespace.Format(1, g.now, 0o755, 0, 0, meta.Policy{Replicas: 1}))
	g.must(&meta.SessionStart{Session: 5, Name: "grove"})
	return g
}

func (g *grove) do(op meta.Op) (*meta.Result, error) {
	g.now += meta.Time(g.rng.Int64N(1e9))
	res, effects, err := namespace.Execute(g.s, namespace.Context{Now: g.now, Session: 5, Term: 1, Volume: 1}, op)
	if err == nil {
		g.s.apply(effects)
	}
	return res, err
}

func (g *grove) must(op meta.Op) *meta.Result {
	g.t.Helper()
	res, err := g.do(op)
	if err != nil {
		g.t.Fatalf("%T%+v: %v", op, op, err)
	}
	return res
}

// name draws the bytes of a valid name.
func (g *grove) name() string {
	n := 1 + g.rng.IntN(12)
	if g.rng.IntN(20) == 0 {
		n = meta.MaxName
	}
	b := make([]byte, n)
	for i := range b {
		for b[i] = byte(g.rng.Uint32()); b[i] == 0 || b[i] == '/'; {
			b[i]++
		}
	}
	if s := string(b); s != "." && s != ".." {
		return s
	}
	return "dots"
}

func (g *grove) place(n uint64) (meta.ChunkID, uint64) {
	if g.last.IsZero() || g.rng.IntN(6) == 0 {
		g.last = g.must(&meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{{1, 2, meta.ServerID(3 + g.rng.IntN(9))}}, Fence: meta.Fence{Term: 1}}).Chunks[0].ID
	}
	off := g.used[g.last]
	g.used[g.last] += n
	return g.last, off
}

func (g *grove) step() {
	r := g.rng
	dir, ino := g.dirs[r.IntN(len(g.dirs))], g.all[r.IntN(len(g.all))]
	switch k := r.IntN(20); {
	case k < 7:
		mode := []uint32{meta.TypeRegular, meta.TypeRegular, meta.TypeRegular, meta.TypeDir, meta.TypeDir, meta.TypeSymlink, meta.TypeFIFO, meta.TypeSocket, meta.TypeBlock, meta.TypeChar}[r.IntN(10)]
		op := &meta.Create{Parent: dir, Name: g.name(), Mode: mode | r.Uint32()&0o7777, UID: r.Uint32(), GID: r.Uint32N(3), Excl: true}
		switch mode {
		case meta.TypeSymlink:
			op.Target = strings.Repeat(g.name(), 1+r.IntN(9))
		case meta.TypeBlock, meta.TypeChar:
			op.Rdev = r.Uint32()
		}
		res, err := g.do(op)
		if err != nil {
			return
		}
		g.ents = append(g.ents, grownEntry{dir, op.Name})
		g.all = append(g.all, res.Attr.Ino)
		if mode == meta.TypeDir {
			g.dirs = append(g.dirs, res.Attr.Ino)
		}
	case k < 8:
		name := g.name()
		if _, err := g.do(&meta.Link{Ino: ino, Parent: dir, Name: name}); err == nil {
			g.ents = append(g.ents, grownEntry{dir, name})
		}
	case k < 12:
		if r.IntN(3) == 0 {
			data := []byte(strings.Repeat(g.name(), 1+r.IntN(10)))
			g.do(&meta.Write{Ino: ino, Inline: true, Data: data, Size: uint64(len(data)), Synced: true})
			return
		}
		n := 1 + r.Uint64N(1<<20)
		chunk, at := g.place(n)
		off := r.Uint64N(1 << uint(1+r.IntN(40)))
		g.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Off: off, Len: n, Chunk: chunk, ChunkOff: at}}, Size: off + n, Synced: true})
	case k < 13:
		g.do(&meta.Fallocate{Ino: ino, Off: r.Uint64N(1 << 30), Len: 1 + r.Uint64N(1<<20), Mode: []uint32{0, meta.FallocKeepSize, meta.FallocKeepSize | meta.FallocPunchHole, meta.FallocZeroRange}[r.IntN(4)]})
	case k < 16:
		name := []string{"user.", "trusted.", "security."}[r.IntN(3)] + g.name()
		value := bytes.Repeat([]byte(g.name()), r.IntN(20))
		if r.IntN(4) == 0 {
			name = "system.posix_acl_access"
			value = binary.LittleEndian.AppendUint32(nil, 2)
			for _, e := range [][3]uint32{{1, 6, 0xffffffff}, {2, 4, r.Uint32N(100)}, {4, 4, 0xffffffff}, {16, 6, 0xffffffff}, {32, 0, 0xffffffff}} {
				value = binary.LittleEndian.AppendUint16(value, uint16(e[0]))
				value = binary.LittleEndian.AppendUint16(value, uint16(e[1]))
				value = binary.LittleEndian.AppendUint32(value, e[2])
			}
		}
		g.do(&meta.SetXattr{Ino: ino, Name: name, Value: value})
	case k < 17:
		g.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: r.Uint64N(1 << 32)})
	case k < 18:
		name := g.name()
		if _, err := g.do(&meta.Junction{Parent: dir, Name: name, Volume: 2 + meta.VolumeID(r.Uint32N(1000))}); err == nil {
			g.ents = append(g.ents, grownEntry{dir, name})
		}
	case len(g.ents) > 0:
		i := r.IntN(len(g.ents))
		e := g.ents[i]
		if k == 18 {
			name := g.name()
			if _, err := g.do(&meta.Rename{Parent: e.dir, Name: e.name, NewParent: dir, NewName: name}); err == nil {
				g.ents[i] = grownEntry{dir, name}
			}
			return
		}
		if _, err := g.do(&meta.Unlink{Parent: e.dir, Name: e.name, Dir: r.IntN(4) == 0}); err == nil {
			g.ents = slices.Delete(g.ents, i, i+1)
		}
	}
}

// memSpool is a Spool in memory.
type memSpool struct{ bytes.Buffer }

func (m *memSpool) ReadAt(p []byte, off int64) (int, error) {
	return bytes.NewReader(m.Bytes()).ReadAt(p, off)
}

func buildOf(t *testing.T, s namespace.Reader, at meta.Generation) ([]byte, index.Sum, uint64) {
	t.Helper()
	res, err := namespace.Query(s, namespace.Context{At: at}, &meta.StatFSOp{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := index.NewBuilder(index.Head{Volume: 1, At: at, UsedBytes: res.StatFS.UsedBytes, UsedInodes: res.StatFS.UsedInodes}, func() (index.Spool, error) { return &memSpool{}, nil })
	if err != nil {
		t.Fatal(err)
	}
	f := feeder{r: s, at: at, b: b, pace: func() error { return nil }}
	if err := f.feed(); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	n, sum, err := b.Finish(&out)
	if err != nil || n != uint64(out.Len()) {
		t.Fatal(n, out.Len(), err)
	}
	return out.Bytes(), sum, f.inodes
}

// same compares an answer of the index with the owner's.
func same(t *testing.T, x *index.Index, s namespace.Reader, at meta.Generation, op meta.Op) *meta.Result {
	t.Helper()
	want, werr := namespace.Query(s, namespace.Context{At: at}, op)
	got, err := x.Query(op)
	if meta.KindOf(err) != meta.KindOf(werr) {
		t.Fatalf("%T%+v: the index says %v, the owner %v", op, op, err, werr)
	}
	if err != nil {
		return nil
	}
	byID := func(p, q meta.ChunkPlace) int { return p.ID.Compare(q.ID) }
	slices.SortFunc(got.Places, byID)
	slices.SortFunc(want.Places, byID)
	if !reflect.DeepEqual(normal(got), normal(want)) {
		t.Fatalf("%T%+v:\nthe index says %+v\nthe owner says %+v", op, op, got, want)
	}
	return want
}

// normal turns empty slices into nil.
func normal(r *meta.Result) meta.Result {
	n := *r
	if len(n.Data) == 0 {
		n.Data = nil
	}
	if len(n.Entries) == 0 {
		n.Entries = nil
	}
	if len(n.Extents) == 0 {
		n.Extents, n.Places = nil, nil
	}
	if len(n.Places) == 0 {
		n.Places = nil
	}
	return n
}

// TestIndexAnswersAsTheOwner: of random trees with everything in them, every
// question gets the owner's answer from the index of a snapshot, also once the
// volume has changed.
func TestIndexAnswersAsTheOwner(t *testing.T) {
	t.Parallel()
	seed := *indexSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-index-seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	for range 3 {
		g := newGrove(t, rng)
		var at []meta.Generation
		for i := range 2 {
			for range 400 + rng.IntN(400) {
				g.step()
			}
			at = append(at, meta.Generation(g.must(&meta.TakeSnapshot{Name: fmt.Sprint("s", i)}).Off))
		}
		for range 300 {
			g.step()
		}
		for _, at := range at {
			compareIndex(t, g, at)
		}
	}
}

func compareIndex(t *testing.T, g *grove, at meta.Generation) {
	t.Helper()
	data, sum, inodes := buildOf(t, g.s, at)
	x, err := index.Open(data, sum)
	if err != nil {
		t.Fatal(err)
	}
	if x.Inodes() != inodes || x.At != at || x.Volume != 1 {
		t.Fatal(x.Inodes(), inodes, x.Head)
	}
	same(t, x, g.s, at, &meta.StatFSOp{})
	seen := uint64(0)
	ask := func(op meta.Op) *meta.Result { t.Helper(); return same(t, x, g.s, at, op) }
	for _, ino := range append(slices.Clone(g.all), 0, meta.MaxIno, meta.MaxIno-1) {
		res, err := namespace.Query(g.s, namespace.Context{At: at}, &meta.GetAttr{Ino: ino})
		if err == nil && res.Attr.Nlink == 0 {
			continue // held open by a client: no name leads to the file
		}
		if ask(&meta.GetAttr{Ino: ino}) != nil {
			seen++
		}
		ask(&meta.ReadLink{Ino: ino})
		for _, name := range []string{"user.none", "system.posix_acl_access", "system.posix_acl_default", "system.other", "user.", "", "user.\x00", "penstock.x", strings.Repeat("x", 300)} {
			ask(&meta.GetXattr{Ino: ino, Name: name})
		}
		if res := ask(&meta.ListXattr{Ino: ino}); res != nil {
			for _, name := range strings.Split(strings.TrimSuffix(string(res.Data), "\x00"), "\x00") {
				ask(&meta.GetXattr{Ino: ino, Name: name})
			}
		}
		ask(&meta.Open{Ino: ino})
		for range 4 {
			ask(&meta.Open{Ino: ino, Off: g.rng.Uint64N(1 << uint(1+g.rng.IntN(41))), Len: g.rng.Uint64N(1 << 22)})
		}
		for _, name := range []string{".", "..", "absent", "a/b", "\x00", "", "\x01", "\xff\xff", strings.Repeat("n", 256)} {
			ask(&meta.Lookup{Parent: ino, Name: name})
		}
		for _, plus := range []bool{false, true} {
			res := ask(&meta.ReadDir{Ino: ino, Plus: plus})
			ask(&meta.ReadDir{Ino: ino, Cookie: 1<<64 - 1, Plus: plus})
			if res == nil {
				continue
			}
			for _, e := range res.Entries {
				ask(&meta.Lookup{Parent: ino, Name: e.Name})
				ask(&meta.Lookup{Parent: ino, Name: e.Name + "\x01"})
				ask(&meta.ReadDir{Ino: ino, Cookie: e.Cookie, Max: 1 + g.rng.Uint32N(3), Plus: plus})
			}
		}
	}
	if seen != inodes {
		t.Errorf("%d inodes were compared, the index has %d", seen, inodes)
	}
}

// TestDamagedIndex: a flipped bit anywhere is found when its record is read, at the latest by
// Check; no answer comes from the damaged record.
func TestDamagedIndex(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(7, 7))
	g := newGrove(t, rng)
	for range 600 {
		g.step()
	}
	at := meta.Generation(g.must(&meta.TakeSnapshot{Name: "s"}).Off)
	data, sum, _ := buildOf(t, g.s, at)
	for range 300 {
		bad := bytes.Clone(data)
		bad[rng.IntN(len(bad))] ^= 1 << rng.IntN(8)
		x, err := index.Open(bad, sum)
		if err == nil {
			err = x.Check()
		}
		if k := meta.KindOf(err); k != meta.Corrupt && k != meta.Version {
			t.Fatalf("a flipped bit is not seen: %v", err)
		}
	}
	for _, n := range []int{0, 1, 4095, 4096, len(data) - 1} {
		if _, err := index.Open(data[:n], sum); meta.KindOf(err) != meta.Corrupt {
			t.Fatalf("the first %d bytes: %v", n, err)
		}
	}
}

var _ io.ReaderAt = (*memSpool)(nil)

// failingWriter has no room for its first index.
type failingWriter struct {
	calls atomic.Int64
	err   error
}

func (w *failingWriter) Write(_ context.Context, _ meta.ChunkGrant, r io.Reader) (uint64, error) {
	if w.calls.Add(1) == 1 {
		return 0, w.err
	}
	n, err := io.Copy(io.Discard, r)
	return uint64(n), err
}

// A snapshot whose index can't be made keeps no other snapshot from its index, and an index
// without room is not tried again and again.
func TestIndexesFailAlone(t *testing.T) {
	t.Parallel()
	w := &failingWriter{err: meta.E("write", meta.Unavailable, "", nil)}
	g := newGrid(t, func(c *Config) { c.ChunkWriter = w }, racks[0])
	a := g.s.dial("a")
	a.snapshot(t, "one")
	a.create(t, "f")
	a.snapshot(t, "two")
	state := func(name string) *adminapi.SnapshotIndex {
		ans, err := a.SnapshotIndex(t.Context(), 1, name)
		if err != nil {
			t.Fatal(err)
		}
		return ans
	}
	eventually(t, "the first fails", func() error { return unless(state("one").Detail != "") })
	eventually(t, "the second", func() error { return unless(state("two").State == adminapi.IndexState_INDEX_READY) })
	if one := state("one"); one.State != adminapi.IndexState_INDEX_BUILDING || w.calls.Load() != 2 {
		t.Errorf("%+v after %d writes", one, w.calls.Load())
	}
	now := time.Now()
	x := retry{}
	for range 10 {
		x.failed(w.err, now)
	}
	if x.due.Sub(now) != digestRetryMost {
		t.Error(x.due.Sub(now))
	}
}

// No caller waits for an index that is too large: the answer says that no index exists, and why.
func TestIndexTooLarge(t *testing.T) {
	t.Parallel()
	w := &failingWriter{err: meta.E("make index", meta.ResourceExceeded, "", nil)}
	g := newGrid(t, func(c *Config) { c.ChunkWriter = w }, racks[0])
	a := g.s.dial("a")
	a.create(t, "f")
	a.snapshot(t, "one")
	eventually(t, "there is none", func() error {
		ans, err := a.SnapshotIndex(t.Context(), 1, "one")
		return errors.Join(err, unless(ans.State == adminapi.IndexState_INDEX_NONE && strings.Contains(ans.Detail, "limit exceeded")))
	})
	o := g.s.srv.hosted.opened(1)
	o.indexing.mu.Lock()
	for at, r := range o.indexing.wanted {
		if until := time.Until(r.due); until < indexAgain-time.Minute {
			t.Errorf("%d is made again in %v", at, until)
		}
	}
	o.indexing.mu.Unlock()
	full := meta.SnapshotIndex{Length: 1 << 40, Parts: make([]meta.IndexPart, meta.MaxIndexParts)}
	if err := o.indexing.putIndex(strings.NewReader("x"), &full); !tooLarge(err) || w.calls.Load() != 1 {
		t.Errorf("%v after %d writes", err, w.calls.Load())
	}
}

// The index of a snapshot that was deleted by a program without indexes goes when the volume is
// opened; the indexes of other snapshots stay.
func TestLeftIndexesGo(t *testing.T) {
	t.Parallel()
	w := &failingWriter{}
	w.calls.Store(1)
	g := newGrid(t, func(c *Config) { c.ChunkWriter = w }, racks[0])
	a := g.s.dial("a")
	a.create(t, "f")
	var at [2]meta.Generation
	for i, name := range []string{"left", "stays"} {
		at[i] = a.snapshot(t, name).At
		eventually(t, "an index", func() error {
			ans, err := a.SnapshotIndex(t.Context(), 1, name)
			return errors.Join(err, unless(ans.State == adminapi.IndexState_INDEX_READY))
		})
	}
	indexes := func() (all []meta.Generation, err error) {
		o, err := g.s.srv.hosted.ownerFor(t.Context(), 1)
		if err != nil {
			return nil, err
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		l, err := namespace.Indexes(o.view())
		return slices.Sorted(maps.Keys(l)), err
	}
	// Such a program begins to delete the snapshot: the snapshot's state is 2 from then on.
	o, err := g.s.srv.hosted.ownerFor(t.Context(), 1)
	if err != nil {
		t.Fatal(err)
	}
	o.mu.Lock()
	key := binary.BigEndian.AppendUint32([]byte{'s'}, uint32(at[0]))
	record, ok, err := (o.view()).Get(key)
	if err != nil || !ok || record[1] != 1 {
		t.Fatalf("%x, %v", record, err)
	}
	record = bytes.Clone(record)
	record[1] = 2
	seq := o.cur.seq
	o.apply([]namespace.Effect{{Kind: namespace.Put, Key: key, Value: record}}, 0)
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err := o.await(t.Context(), wait); err != nil {
		t.Fatal(err)
	}
	if l, err := indexes(); err != nil || len(l) != 2 {
		t.Fatal(l, err)
	}
	g.s.crash()
	g.s.start()
	eventually(t, "the index of the deleted snapshot is gone", func() error {
		l, err := indexes()
		return errors.Join(err, unless(slices.Equal(l, at[1:])))
	})
	eventually(t, "the snapshot is gone", func() error {
		l := a.snapshots(t).Snapshots
		return unless(len(l) == 1 && l[0].Name == "stays")
	})
	if o, err = g.s.srv.hosted.ownerFor(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if r, err := namespace.Check(o.view()); err != nil || !r.OK() {
		t.Errorf("%+v, %v", r, err)
	}
}
