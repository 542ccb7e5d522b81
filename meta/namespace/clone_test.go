package namespace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

var cloneSeeds = flag.Uint64("clones", 8, "how many random families of clones are made")

// copied returns a copy of the model for a clone, without inodes that have no name.
func (m *model) copied() *model {
	n := &model{nodes: map[meta.Ino]*mnode{}, now: m.now, session: m.session}
	for ino, x := range m.nodes {
		if x.nlink > 0 {
			y := *x
			y.data, y.alloc, y.xattrs = slices.Clone(x.data), slices.Clone(x.alloc), maps.Clone(x.xattrs)
			y.holders, y.tmp = nil, false
			n.nodes[ino] = &y
		}
	}
	for ino, y := range n.nodes {
		x := m.nodes[ino]
		if x.parent != nil {
			y.parent = n.nodes[x.parent.ino]
		}
		if x.kids != nil {
			y.kids = map[string]*mnode{}
		}
		for name, k := range x.kids {
			if k.vol != 0 {
				j := *k
				j.parent = y
				y.kids[name] = &j
				continue
			}
			y.kids[name] = n.nodes[k.ino]
		}
	}
	n.root = n.nodes[meta.RootIno]
	return n
}

func (m *memStore) copied() *memStore {
	n := newMemStore()
	for _, it := range m.items() {
		n.t.ReplaceOrInsert(memItem{bytes.Clone(it.k), bytes.Clone(it.v)})
	}
	return n
}

// family is an origin with its clones and their clones.
type family struct {
	t    *testing.T
	rng  *rand.Rand
	all  map[meta.VolumeID]*member
	next meta.VolumeID
	log  []string
}

type member struct {
	*sim
	id     meta.VolumeID
	origin meta.VolumeID   // 0: none, or none any more
	at     meta.Generation // in the origin
	then   *model          // the member's state in the snapshot kept for clones
	from   frozen          // the snapshot kept for clones
	kept   bool
	steps  int
}

// keep takes the snapshot from which clones will be made.
func (f *family) keep(m *member) {
	m.from = m.freeze(1_000_000 + m.steps)
	m.then, m.kept = m.m.copied(), true
}

// clone makes a clone of a member's snapshot from the member's present state.
func (f *family) clone(o *member) {
	f.t.Helper()
	id := f.next
	f.next++
	f.log = append(f.log, fmt.Sprintf("volume %d is a clone of %d at %d", id, o.id, o.from.gen))
	o.m.now = o.now + 1
	o.do(&meta.PinClone{At: o.from.gen, Clone: id})
	o.fails(meta.Busy, &meta.DropSnapshot{At: o.from.gen})
	x := &fixture{t: f.t, s: o.s.copied(), replica: o.s.copied(), now: o.now, session: testSession, journal: true}
	policy := meta.Policy{Replicas: 1, QuotaSnapshots: id%2 == 0}
	effects, err := CloneEffects(x.s, o.from.gen, id, policy, x.now)
	if err != nil {
		f.t.Fatal(err)
	}
	x.commit(effects)
	if again, err := CloneEffects(o.s, o.from.gen, id, policy, x.now); err != nil || !bytes.Equal(AppendEffects(nil, again), AppendEffects(nil, effects)) {
		f.t.Fatal("the same clone twice is not the same", err)
	}
	for _, s := range []meta.SessionID{testSession, otherSess} {
		x.do(&meta.SessionStart{Session: s, Name: "test", Host: "boot", PID: 1, Start: 2})
	}
	c := &member{sim: &sim{fixture: x, rng: f.rng, m: o.then.copied()}, id: id, origin: o.id, at: o.from.gen}
	f.all[id] = c
	x.check()
	c.reapAll() // reaps inodes that were unlinked and held open, which the model does not have
	c.sameTree()
}

// remake makes a clone's state again from its origin's present state, and goes on with
// it: another server does so until the clone has its own checkpoint.
func (f *family) remake(m *member) {
	f.t.Helper()
	f.log = append(f.log, fmt.Sprintf("volume %d is made again", m.id))
	m.s = f.replayed(m)
	m.replica = m.s.copied()
	m.check()
}

// replayed returns a clone's state made from its origin's state and the clone's journal.
func (f *family) replayed(m *member) *memStore {
	f.t.Helper()
	s := f.all[m.origin].s.copied()
	for _, e := range m.entries {
		l, err := DecodeEffects(e)
		if err == nil {
			err = Unseen(s, l, func(keys [][]byte) error {
				for _, k := range keys {
					s.apply([]Effect{{Kind: Delete, Key: k}})
				}
				return nil
			})
		}
		if err != nil {
			f.t.Fatal(err)
		}
		s.apply(l)
	}
	return s
}

// servable requires that a member's owner keeps the bytes of a chunk up to end.
func (f *family) servable(id meta.ChunkID, end uint64) error {
	o := f.all[id.Volume]
	if o == nil {
		return errors.New("its volume is gone")
	}
	c, _, err := ReadChunk(o.s, id)
	if err != nil {
		return err
	}
	if c.State == meta.ChunkDeleting || c.State == meta.ChunkSealed && c.Length < end {
		return fmt.Errorf("%+v", c)
	}
	return nil
}

// check requires that every member is whole, and that the bytes that it refers to in
// other members exist.
func (f *family) check() {
	f.t.Helper()
	for _, id := range slices.Sorted(maps.Keys(f.all)) {
		m := f.all[id]
		m.check()
		if err := ForeignExtents(m.s, func(e ForeignExtent) bool {
			if err := f.servable(e.Chunk, e.ChunkOff+e.Len); err != nil {
				f.t.Fatalf("volume %d: inode %d of generation %d needs %v: %v", id, e.Ino, e.At, e.Chunk, err)
			}
			return true
		}); err != nil {
			f.t.Fatal(err)
		}
		if m.kept {
			m.from.compare(m.sim)
		}
		m.held()
	}
}

// held requires that the bytes that only a member's snapshots have are counted exactly.
// It takes nothing from the family's random source.
func (m *member) held() {
	m.t.Helper()
	sameHeld(m.t, m.s, rand.New(rand.NewPCG(uint64(m.now), 1)))
	sameTally(m.t, m.s)
	if m.now%5 == 0 {
		m.recount(func() {})
	}
}

func (f *family) childrenOf(id meta.VolumeID) (n int) {
	for _, m := range f.all {
		if m.origin == id {
			n++
		}
	}
	return n
}

// remove deletes a volume on which no other volume depends.
func (f *family) remove(m *member) {
	f.log = append(f.log, fmt.Sprintf("volume %d is deleted", m.id))
	delete(f.all, m.id)
	f.release(m)
}

func (f *family) release(m *member) {
	if o := f.all[m.origin]; o != nil {
		o.do(&meta.PinClone{At: m.at, Clone: m.id, Drop: true})
	}
	m.origin = 0
}

// promote makes a clone independent, in small steps, while the clone is used.
func (f *family) promote(m *member) {
	f.t.Helper()
	f.log = append(f.log, fmt.Sprintf("volume %d is promoted", m.id))
	m.fails(meta.Busy, &meta.SweepClone{Forget: true})
	step := func() {
		switch f.rng.IntN(16) {
		case 0, 1, 2, 3:
			m.step()
		case 4, 5: // a state made again is made from a later state of the origin
			f.all[m.origin].step()
		case 6:
			f.remake(m)
		}
	}
	var base meta.Generation
	for op := (&meta.SweepClone{}); ; step() {
		op.Max = uint32(f.rng.IntN(20) + 1)
		res := m.do(op)
		if f.rng.IntN(8) == 0 {
			m.check()
			m.held()
		}
		if res.EOF {
			base = meta.Generation(res.Off)
			break
		}
		op.From = res.Data
	}
	m.check()
	for ; ; step() {
		if m.do(&meta.DropSnapshot{At: base, Max: uint32(f.rng.IntN(20) + 1)}).EOF {
			break
		}
	}
	for len(m.going) > 0 {
		m.dropStep(0)
	}
	m.check()
	moved := map[meta.ChunkID]meta.ChunkID{}
	for {
		var l []meta.Adopted
		if err := ForeignExtents(m.s, func(e ForeignExtent) bool {
			l = append(l, meta.Adopted{Ino: e.Ino, At: e.At, Old: e.Extent, Off: e.ChunkOff})
			return len(l) < 5
		}); err != nil {
			f.t.Fatal(err)
		}
		if len(l) == 0 {
			break
		}
		for i := range l {
			src := l[i].Old.Chunk
			if _, ok := moved[src]; !ok {
				to := m.chunks(1, false)[0]
				m.seals(l[i], to)
				moved[src] = to
			}
			l[i].Copy = moved[src]
		}
		if res := m.do(&meta.AdoptExtents{Extents: l}); res.Off == 0 {
			f.t.Fatal("nothing was adopted")
		}
		if f.rng.IntN(8) == 0 {
			m.check()
			m.held()
		}
	}
	m.do(&meta.SweepClone{Forget: true})
	if yes, err := IsClone(m.s); yes || err != nil {
		f.t.Fatal(yes, err)
	}
	if got := f.replayed(m); !bytes.Equal(got.dump(), m.s.dump()) {
		f.t.Fatalf("volume %d made again after its promotion differs", m.id)
	}
	f.release(m)
	m.kept = false // the bytes have moved, so snapshots can't be compared by place
	m.frozen = nil
	m.m = nil
	m.check()
}

// seals holds a copy's chunk open for as long as the test goes on.
func (m *member) seals(meta.Adopted, meta.ChunkID) {}

// TestClones makes clones of random states and of other clones, changes all of them, and
// deletes and promotes them in any order. After every few steps each volume has the
// expected contents and exact counts, and finds all bytes that it refers to.
func TestClones(t *testing.T) {
	for seed := range *cloneSeeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { runClones(t, seed, 700) })
	}
}

func runClones(t *testing.T, seed uint64, steps int) {
	f := &family{t: t, rng: rand.New(rand.NewPCG(seed, 7)), all: map[meta.VolumeID]*member{}, next: testVolume + 1}
	x := newFixture(t)
	root := &member{sim: &sim{fixture: x, rng: f.rng, m: newModel(x.now-2, testSession)}, id: testVolume}
	f.all[testVolume] = root
	if seed%2 == 1 {
		root.counts(true)
		root.m.now = root.now
	}
	defer func() {
		if t.Failed() {
			t.Logf("seed %d:\n%s", seed, strings.Join(f.log, "\n"))
		}
	}()
	for i := range steps {
		ids := slices.Sorted(maps.Keys(f.all))
		m := f.all[ids[f.rng.IntN(len(ids))]]
		if m.m == nil { // promoted: the model does not know the new places
			continue
		}
		m.steps++
		m.snapshots(m.steps)
		m.step()
		if m.steps%25 == 24 {
			m.sameTree()
		}
		switch r := f.rng.IntN(100); {
		case i < 100 || r > 5:
		case !m.kept:
			f.keep(m)
		case r < 3 && len(f.all) < 5:
			f.clone(m)
		case m.origin != 0 && f.childrenOf(m.id) == 0 && r == 3:
			f.remove(m)
		case m.origin != 0 && f.childrenOf(m.id) == 0 && r == 4:
			f.promote(m)
		case m.origin != 0 && r == 5:
			f.remake(m)
			m.sameTree()
		}
		if i%40 == 39 {
			f.check()
		}
	}
	for _, m := range f.all {
		if m.m != nil {
			m.sameTree()
			for _, sn := range m.frozen {
				sn.compare(m.sim)
			}
		}
	}
	f.check()
	for _, id := range slices.Sorted(maps.Keys(f.all)) {
		if m := f.all[id]; m.m != nil && m.origin != 0 {
			for _, s := range []meta.SessionID{testSession, otherSess} {
				for !m.do(&meta.SessionEnd{Session: s}).EOF {
				}
			}
			m.rollBack()
		}
	}
	// All clones go, the youngest first; then the origin owes nobody anything.
	for len(f.all) > 1 {
		ids := slices.Sorted(maps.Keys(f.all))
		f.remove(f.all[ids[len(ids)-1]])
	}
	f.check()
	if pins, err := ClonePins(root.s); err != nil || len(pins) != 0 {
		t.Fatal(pins, err)
	}
	if root.kept {
		root.going = append(root.going, root.from.gen)
	}
	root.dropAll()
}

// TestClonesAreSmall: the entry that makes a clone does not grow with the tree.
func TestClonesAreSmall(t *testing.T) {
	size := func(files int) int {
		f := newFixture(t)
		c := f.chunks(1, false)[0]
		for i := range files {
			ino := f.file(fmt.Sprint("f", i))
			f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 4096, Chunk: c, ChunkOff: uint64(i) * 4096}}, Size: 4096, Synced: true})
		}
		f.file("held")
		at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
		f.do(&meta.Unlink{Parent: meta.RootIno, Name: "held", Holders: []meta.SessionID{testSession}})
		l, err := CloneEffects(f.s, at, 9, meta.Policy{Replicas: 1}, f.now)
		if err != nil {
			t.Fatal(err)
		}
		return len(AppendEffects(nil, l))
	}
	if a, b := size(10), size(2000); b > a+8 {
		t.Errorf("%d bytes for 10 files, %d for 2,000", a, b)
	}
}

// TestCloneOfUnlinked: a file that was unlinked and open at the snapshot has no name in
// the clone, and is removed there.
func TestCloneOfUnlinked(t *testing.T) {
	for _, later := range []bool{false, true} {
		f := newFixture(t)
		c := f.chunks(1, false)[0]
		ino := f.file("a")
		f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 4096, Chunk: c}}, Size: 4096, Synced: true})
		f.do(&meta.Unlink{Parent: meta.RootIno, Name: "a", Holders: []meta.SessionID{testSession}})
		at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
		if later { // and removed in the origin before the clone is made
			f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
		}
		x := &fixture{t: t, s: f.s.copied(), replica: f.s.copied(), now: f.now, session: testSession}
		l, err := CloneEffects(x.s, at, 9, meta.Policy{Replicas: 1}, x.now)
		if err != nil {
			t.Fatal(err)
		}
		x.commit(l)
		x.check()
		if _, n, _ := Usage(x.s); n != 2 {
			t.Fatalf("%d inodes", n)
		}
		if !x.do(&meta.Reap{Ino: ino}).EOF {
			t.Fatal("not reaped")
		}
		x.check()
		if b, n, _ := Usage(x.s); n != 1 || b != 0 {
			t.Fatalf("%d inodes, %d bytes", n, b)
		}
	}
}

// TestCloneDamage: Check sees every damage of a clone's record.
func TestCloneDamage(t *testing.T) {
	f := newFixture(t)
	c := f.chunks(1, false)[0]
	ino := f.file("a")
	f.do(&meta.Write{Ino: ino, Extents: []meta.Extent{{Len: 4096, Chunk: c}}, Size: 4096, Synced: true})
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	f.do(&meta.PinClone{At: at, Clone: 9})
	x := &fixture{t: t, s: f.s.copied(), replica: f.s.copied(), now: f.now, session: testSession}
	l, err := CloneEffects(x.s, at, 9, meta.Policy{Replicas: 1}, x.now)
	if err != nil {
		t.Fatal(err)
	}
	x.commit(l)
	x.check()
	gap := binary.BigEndian.AppendUint32(nil, ^uint32(at+1))
	for name, spoil := range map[string]struct {
		of *memStore
		fn func(s *memStore)
	}{
		"a note of a clone of a snapshot that is not there": {f.s, func(s *memStore) {
			s.apply([]Effect{{Put, appendCloneKey(nil, uint32(at)+1, 9), marker}})
		}},
		"a malformed note of a clone": {f.s, func(s *memStore) {
			s.apply([]Effect{{Put, []byte("f12345678"), []byte{2}}})
		}},
		"a base that is gone": {x.s, func(s *memStore) {
			s.apply([]Effect{{Kind: Delete, Key: appendSnapKey(nil, uint32(at))}})
		}},
		"a base in a volume that is no clone": {f.s, func(s *memStore) {
			s.apply([]Effect{{Put, appendSnapKey(nil, uint32(at)), appendSnapshot(nil, &snapshot{gen: uint32(at), state: snapshotBase, name: "x"})}})
		}},
		"an extent in a foreign chunk in a volume that is no clone": {f.s, func(s *memStore) {
			b := appendExtentBase(nil, ino, 8192)
			s.apply([]Effect{{Put, putGen(b, uint32(at)+1), appendExtent(nil, meta.Extent{Off: 4096, Len: 4096, Chunk: meta.ChunkID{Volume: 8, Term: 1, Counter: 1}})}})
		}},
	} {
		s := spoil.of.copied()
		spoil.fn(s)
		if rep, err := Check(s); err != nil || rep.OK() {
			t.Errorf("%s: not seen (%v)", name, err)
		}
	}
	// Versions in the gap of generations are not part of the clone.
	s := x.s.copied()
	s.apply([]Effect{{Put, append(appendInodeBase(nil, 77), gap...), []byte("rubbish")}})
	if rep, err := Check(s); err != nil || !rep.OK() {
		t.Errorf("what lies in the gap was looked at: %v %v", rep.Problems, err)
	}
}

// TestSweepWhileASnapshotGoes: a clone is swept at every point of the deletion of one of
// its snapshots. The snapshot has tombstones that then cover nothing: they are removed,
// wherever they are buried by then. Earlier servers also buried tombstones with which a
// clone began.
func TestSweepWhileASnapshotGoes(t *testing.T) {
	f := newFixture(t)
	names := []string{"a", "b", "c", "d", "e", "f"}
	for _, n := range names {
		f.file(n)
	}
	f.do(&meta.TakeSnapshot{Name: "with"})
	for _, n := range names {
		f.do(&meta.Unlink{Parent: meta.RootIno, Name: n})
	}
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "without"}).Off)
	f.do(&meta.PinClone{At: at, Clone: 9})
	x := &fixture{t: t, s: f.s.copied(), replica: f.s.copied(), now: f.now, session: testSession}
	effects, err := CloneEffects(x.s, at, 9, meta.Policy{Replicas: 1}, x.now)
	if err != nil {
		t.Fatal(err)
	}
	x.commit(effects)
	x.do(&meta.SessionStart{Session: testSession, Name: "test", Host: "boot", PID: 1, Start: 2})
	x.do(&meta.TakeSnapshot{Name: "stays"})
	going := meta.Generation(x.do(&meta.TakeSnapshot{Name: "goes"}).Off)
	for _, n := range names {
		x.file(n)
	}
	buried := 0
	for _, it := range x.s.items() {
		if len(it.k) > 1+8+genLen && it.k[0] == prefixDentry && isTombstone(it.v) {
			key := append(appendBuriedKey(nil, uint32(going), nil), it.k...)
			x.commit([]Effect{{Put, key, marker}})
			buried++
		}
	}
	x.check()
	if buried != len(names) {
		t.Fatalf("%d tombstones", buried)
	}
	for points := 1; ; points++ {
		y := &fixture{t: t, s: x.s.copied(), replica: x.s.copied(), now: x.now, session: testSession}
		for op := (&meta.SweepClone{Max: 3}); ; {
			res := y.do(op)
			y.check()
			if res.EOF {
				break
			}
			op.From = res.Data
		}
		for !y.do(&meta.DropSnapshot{At: going, Max: 2}).EOF {
			y.check()
		}
		y.check()
		if x.do(&meta.DropSnapshot{At: going, Max: 1}).EOF {
			if points < len(names) {
				t.Errorf("swept at %d points", points)
			}
			return
		}
	}
}

// TestNameGoesAgainWhileASnapshotGoes: a name that is made again and removed again after
// a snapshot leaves the tombstone below unchanged, at every point of the snapshot's
// deletion.
func TestNameGoesAgainWhileASnapshotGoes(t *testing.T) {
	f := newFixture(t)
	names := []string{"a", "b", "c", "d", "e", "f"}
	for _, n := range names {
		f.file(n)
	}
	f.do(&meta.TakeSnapshot{Name: "with"})
	for _, n := range names {
		f.do(&meta.Unlink{Parent: meta.RootIno, Name: n})
	}
	f.do(&meta.TakeSnapshot{Name: "stays"})
	going := meta.Generation(f.do(&meta.TakeSnapshot{Name: "goes"}).Off)
	for _, n := range names {
		f.file(n)
	}
	for points := 1; ; points++ {
		x := &fixture{t: t, s: f.s.copied(), replica: f.s.copied(), now: f.now, session: testSession}
		for _, n := range names {
			x.do(&meta.Unlink{Parent: meta.RootIno, Name: n})
			x.check()
		}
		for !x.do(&meta.DropSnapshot{At: going, Max: 2}).EOF {
			x.check()
		}
		x.check()
		if f.do(&meta.DropSnapshot{At: going, Max: 1}).EOF {
			if points < len(names) {
				t.Errorf("unlinked at %d points", points)
			}
			return
		}
	}
}

// TestCloneKeepsItsBase: the snapshot below a clone can't be deleted, and only readable
// snapshots can be cloned.
func TestCloneKeepsItsBase(t *testing.T) {
	f := newFixture(t)
	f.fails(meta.NoSuchSnapshot, &meta.PinClone{At: 1, Clone: 9})
	f.file("a")
	old := meta.Generation(f.do(&meta.TakeSnapshot{Name: "old"}).Off)
	f.file("b")
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	f.do(&meta.Unlink{Parent: meta.RootIno, Name: "a"})
	if f.do(&meta.DropSnapshot{At: old, Max: 1}).EOF {
		t.Fatal("it is gone")
	}
	f.fails(meta.NoSuchSnapshot, &meta.PinClone{At: old, Clone: 9}) // the snapshot is being deleted
	f.do(&meta.PinClone{At: at, Clone: 9})
	f.fails(meta.Busy, &meta.DropSnapshot{At: at})
	x := &fixture{t: t, s: f.s.copied(), replica: f.s.copied(), now: f.now, session: testSession}
	effects, err := CloneEffects(x.s, at, 9, meta.Policy{Replicas: 1}, x.now)
	if err != nil {
		t.Fatal(err)
	}
	x.commit(effects)
	x.fails(meta.Busy, &meta.DropSnapshot{At: at})
	x.check()
	for op := (&meta.SweepClone{}); ; {
		res := x.do(op)
		if op.From = res.Data; res.EOF {
			break
		}
	}
	for !x.do(&meta.DropSnapshot{At: at}).EOF { // nothing is left out any more
	}
	f.do(&meta.PinClone{At: at, Clone: 9, Drop: true})
	f.do(&meta.DropSnapshot{At: at})
}

// TestCloneOfATruncatedFile: at the snapshot, a file was truncated and had more extents
// to remove than one operation removes. The clone has the rest to remove, too, even if
// the origin has already done so.
func TestCloneOfATruncatedFile(t *testing.T) {
	const pieces = reapBatch + 10
	f := newFixture(t)
	ino, id := f.file("f"), f.chunks(1, false)[0]
	for i := uint64(0); i < pieces; i += 100 {
		op := &meta.Write{Ino: ino, Synced: true}
		for k := i; k < min(i+100, pieces); k++ {
			op.Extents = append(op.Extents, meta.Extent{Off: k * 4096, Len: 4096, Chunk: id, ChunkOff: k * 8192})
		}
		f.do(op)
	}
	f.seal(id, pieces*8192)
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 4096})
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	f.do(&meta.PinClone{At: at, Clone: 9})
	f.check()
	clone := func() {
		t.Helper()
		x := &fixture{t: t, s: f.s.copied(), replica: f.s.copied(), now: f.now, session: testSession}
		effects, err := CloneEffects(x.s, at, 9, meta.Policy{Replicas: 1}, x.now)
		if err != nil {
			t.Fatal(err)
		}
		x.commit(effects)
		x.do(&meta.SessionStart{Session: testSession, Name: "test", Host: "boot", PID: 1, Start: 2})
		x.check()
		for !x.do(&meta.Reap{Ino: ino}).EOF {
		}
		x.check()
		if a := x.attr(ino); a.Size != 4096 || a.Blocks != 4096 {
			t.Errorf("%+v", a)
		}
		x.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 3 * 4096})
		if l := x.do(&meta.Open{Ino: ino}).Extents; len(l) != 1 {
			t.Errorf("what was cut off is back: %+v", l)
		}
	}
	clone()
	for !f.do(&meta.Reap{Ino: ino}).EOF {
	}
	clone()
}
