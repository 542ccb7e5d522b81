package namespace

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

// richVolume has a record of every kind.
func richVolume(t testing.TB) *fixture {
	f := newFixture(t)
	f.do(&meta.SetEvents{Keep: meta.MinEvents})
	d := f.mkdir(1, "d")
	f.do(&meta.SetXattr{Ino: d, Name: xattrDefaultACL, Value: mkACL(t, "u::rwx,u:5:rwx,g::rx,m::rwx,o::r")})
	a := f.create(d, "a", reg|0o666).Ino
	b := f.file("b")
	f.do(&meta.Create{Parent: d, Name: "link", Mode: meta.TypeSymlink, Target: "target"})
	f.do(&meta.Create{Parent: d, Name: "dev", Mode: meta.TypeChar, Rdev: 259})
	f.do(&meta.Junction{Parent: d, Name: "vol", Volume: 9})
	f.do(&meta.Tmpfile{Parent: d, Mode: 0o600})
	c := f.chunks(3, true)
	f.do(&meta.Write{Ino: a, Synced: true, Extents: []meta.Extent{{Len: 100, Chunk: c[0]}, {Off: 100, Len: 50, Chunk: c[1], OpenEnded: true}}})
	f.do(&meta.Lead{Ino: b, Address: "host"})
	f.do(&meta.Fallocate{Ino: b, Len: 10_000})
	f.do(&meta.SetXattr{Ino: b, Name: xattrCaps, Value: []byte("cap")})
	f.do(&meta.Write{Ino: f.file("inline"), Inline: true, Data: []byte("data")})
	f.seal(c[0], 100)
	f.seal(c[2], 100)
	f.file("gone")
	f.do(&meta.Unlink{Parent: 1, Name: "gone", Holders: []meta.SessionID{testSession, otherSess}})
	big := f.file("big")
	p := f.chunks(1, false)[0]
	op := &meta.Write{Ino: big, Synced: true}
	for i := range uint64(reapBatch + 20) {
		op.Extents = append(op.Extents, meta.Extent{Off: i * 20, Len: 10, Chunk: p, ChunkOff: i * 10})
	}
	f.do(op)
	f.do(&meta.SetAttr{Ino: big, Mask: meta.SetSize, Size: 100})
	f.commit([]Effect{PutReply(testSession, 1, meta.OpID{Incarnation: 1}, &meta.Result{Attr: f.attr(a)})})
	return f
}

// someOps returns each operation once, on inodes and names of richVolume.
func someOps() []meta.Op {
	var l []meta.Op
	for ino := meta.Ino(1); ino < 14; ino++ {
		l = append(l, &meta.GetAttr{Ino: ino}, &meta.Open{Ino: ino}, &meta.ReadDir{Ino: ino, Plus: true}, &meta.ReadLink{Ino: ino}, &meta.ListXattr{Ino: ino},
			&meta.GetXattr{Ino: ino, Name: xattrCaps}, &meta.Seek{Ino: ino}, &meta.Leader{Ino: ino}, &meta.Lead{Ino: ino}, &meta.Write{Ino: ino, CloseEnded: true, Kill: true}, &meta.Fallocate{Ino: ino, Len: 1},
			&meta.SetAttr{Ino: ino, Mask: meta.SetMode | meta.SetKillPriv}, &meta.SetAttr{Ino: ino, Mask: meta.SetSize}, &meta.Create{Parent: ino, Name: "x", Mode: dir},
			&meta.Link{Ino: ino, Parent: 1, Name: "y"}, &meta.CopyRange{Src: ino, Dst: 4, Len: 100, DstOff: 1 << 20}, &meta.Reap{Ino: ino}, &meta.ReleaseOrphans{Inos: []meta.Ino{ino}},
			&meta.Rename{Parent: 1, Name: "b", NewParent: ino, NewName: "a"}, &meta.SetXattr{Ino: ino, Name: xattrAccessACL})
		for _, name := range []string{"a", "b", "d", "link", "vol", "inline", "big", "dev"} {
			l = append(l, &meta.Lookup{Parent: ino, Name: name}, &meta.Unlink{Parent: ino, Name: name, Holders: []meta.SessionID{0}})
		}
	}
	for n := uint64(1); n < 5; n++ {
		id := meta.ChunkID{Volume: testVolume, Term: 3, Counter: n}
		l = append(l, &meta.SealChunk{Chunk: id, Length: 1000, Fence: meta.Fence{Term: 9}},
			&meta.SetReplicas{Chunk: id, Servers: []meta.ServerID{1, 2}}, &meta.DropChunk{Chunk: id})
	}
	return append(l, &meta.SessionEnd{Session: testSession}, &meta.SessionStart{Session: testSession}, &meta.StatFSOp{}, &meta.SetPolicy{})
}

// walkAll runs all readers of records; only errors and panics count.
func (f *fixture) walkAll() (kinds map[meta.Kind]int) {
	kinds = map[meta.Kind]int{}
	note := func(err error) { kinds[meta.KindOf(err)]++ }
	for _, op := range someOps() {
		if op.Code().Mutates() {
			_, _, err := Execute(f.s, f.ctx(), op)
			note(err)
			_, err = Touched(f.s, op)
			note(err)
		} else {
			_, err := Query(f.s, f.ctx(), op)
			note(err)
		}
	}
	note(Chunks(f.s, func(meta.ChunkRecord) bool { return true }))
	note(DeletingChunks(f.s, func(meta.ChunkRecord) bool { return true }))
	note(OpenEnded(f.s, func(meta.Ino, meta.ChunkRecord) bool { return true }))
	note(Sessions(f.s, func(meta.SessionStart, bool) bool { return true }))
	note(Orphans(f.s, testSession, func(meta.Ino) bool { return true }))
	note(ReapQueue(f.s, func(meta.Ino) bool { return true }))
	note(Replies(f.s, 0, func(k, v []byte) bool {
		_, _, _, _, err := DecodeReply(k, v)
		note(err)
		return true
	}))
	_, _, err := Usage(f.s)
	note(err)
	_, err = Events(f.s, 0, 100)
	note(err)
	return kinds
}

func (m *memStore) items() (l []memItem) {
	m.t.Ascend(func(it memItem) bool {
		l = append(l, it)
		return true
	})
	return l
}

// TestDamage damages every record in several ways: Check must see each damage, and each
// reader must return an error and not panic.
func TestDamage(t *testing.T) {
	f := richVolume(t)
	f.check()
	clean := f.walkAll()
	if clean[meta.Corrupt]+clean[meta.Version]+clean[meta.IO] != 0 {
		t.Fatalf("a good volume gives errors: %v", clean)
	}
	extents := 0
	for _, it := range f.s.items() {
		kind := it.k[0]
		if kind == prefixExtent {
			if extents++; extents > 10 {
				continue // one file has a thousand similar records
			}
		}
		for _, d := range []struct {
			name string
			make func(v []byte) []byte
			want meta.Kind // kind of error that some reader must return; 0: only Check sees the damage
		}{
			{"cut", func(v []byte) []byte { return v[:len(v)-1] }, meta.Corrupt},
			{"emptied", func([]byte) []byte { return nil }, meta.Corrupt},
			{"version", func(v []byte) []byte { v[0] = 9; return v }, meta.Version},
			{"longer", func(v []byte) []byte { return append(v, 1) }, meta.Corrupt},
			{"gone", nil, 0},
		} {
			named := kind == prefixXattr || kind == prefixCookie // their ends are free
			if kind == prefixReply && d.name == "gone" || named && (d.name == "longer" || d.name == "cut") || (kind == prefixSession || kind == prefixChanger || kind == prefixLeader && len(it.k) > 1) && d.name == "gone" {
				continue
			}
			if d.make != nil {
				f.s.t.ReplaceOrInsert(memItem{it.k, d.make(bytes.Clone(it.v))})
			} else {
				f.s.t.Delete(it)
			}
			rep, err := Check(f.s)
			if err != nil || rep.OK() {
				t.Errorf("%s %q: Check sees nothing (%v)", d.name, it.k, err)
			}
			kinds := f.walkAll()
			isMarker := strings.IndexByte("kwoqz", kind) >= 0
			if d.want != 0 && !isMarker && kinds[d.want] == 0 {
				t.Errorf("%s %q: readers say %v, none %v", d.name, it.k, kinds, d.want)
			}
			f.s.t.ReplaceOrInsert(it)
		}
	}
	f.check()
}

// TestCheckSees changes numbers in records that still decode.
func TestCheckSees(t *testing.T) {
	editInode := func(ino meta.Ino, fn func(in *inode)) func(f *fixture) {
		return func(f *fixture) {
			k := putGen(appendInodeBase(nil, ino), firstGen)
			b, ok, _ := f.s.Get(k)
			in := &inode{}
			if err := decodeInode(b, ino, in); !ok || err != nil {
				f.t.Fatalf("inode %d: %v %v", ino, ok, err)
			}
			fn(in)
			f.s.t.ReplaceOrInsert(memItem{k, appendInode(nil, in)})
		}
	}
	editVolume := func(fn func(v *volume)) func(f *fixture) {
		return func(f *fixture) {
			b, _, _ := f.s.Get(volumeKey)
			var v volume
			if err := decodeVolume(b, &v); err != nil {
				f.t.Fatal(err)
			}
			fn(&v)
			f.s.t.ReplaceOrInsert(memItem{volumeKey, appendVolume(nil, &v)})
		}
	}
	editChunk := func(n uint64, fn func(c *chunk)) func(f *fixture) {
		return func(f *fixture) {
			id := meta.ChunkID{Volume: testVolume, Term: 3, Counter: n}
			k := appendChunkKey(nil, prefixChunk, id)
			b, ok, _ := f.s.Get(k)
			c, err := decodeChunk(b, id)
			if !ok || err != nil {
				f.t.Fatal(err)
			}
			fn(c)
			f.s.t.ReplaceOrInsert(memItem{k, appendChunk(nil, c)})
		}
	}
	put := func(k, v []byte) func(f *fixture) {
		return func(f *fixture) { f.s.t.ReplaceOrInsert(memItem{k, v}) }
	}
	for _, c := range []struct {
		name  string
		spoil func(f *fixture)
		want  string
	}{
		{"links of a file", editInode(3, func(in *inode) { in.Nlink = 2 }), "2 links, 1 names"},
		{"links of a directory", editInode(2, func(in *inode) { in.Nlink = 2 }), "2 links, 1 names, 1 directories"},
		{"links of the root", editInode(1, func(in *inode) { in.Nlink = 9 }), "the root"},
		{"parent", editInode(2, func(in *inode) { in.Parent = 3 }), "lies in 1, but says 3"},
		{"directory's size", editInode(2, func(in *inode) { in.Size++ }), "has size"},
		{"next position", editInode(2, func(in *inode) { in.next = 3 }), "gives out position 3"},
		{"blocks", editInode(3, func(in *inode) { in.Blocks += 5 }), "counts 155 bytes, its extents have 150"},
		{"open end", editInode(3, func(in *inode) { in.openOff = 7 }), "open-ended extent at 100"},
		{"size with an open end", editInode(3, func(in *inode) { in.Size = 7 }), "open-ended extent up to 150"},
		{"holders", editInode(9, func(in *inode) { in.holders = 1 }), "1 holders are counted, 2 hold it"},
		{"reap mark", editInode(10, func(in *inode) { in.reap = false }), "has nothing to reap"},
		{"attribute flags", editInode(4, func(in *inode) { in.Flags = 0 }), "says attribute flags"},
		{"mode against ACL", editInode(3, func(in *inode) { in.Mode = reg | 0o600 }), "the ACL says mode"},
		{"inodes", editVolume(func(v *volume) { v.inodes-- }), "inodes are counted"},
		{"bytes", editVolume(func(v *volume) { v.bytes++ }), "bytes are counted"},
		{"next inode", editVolume(func(v *volume) { v.nextIno = 3 }), "the next to be given out is 3"},
		{"next chunk", editVolume(func(v *volume) { v.chunks = 1 }), "which has given out 1"},
		{"live count", editChunk(1, func(c *chunk) { c.Live-- }), "counts 99 live bytes, extents have 100"},
		{"owner", editChunk(2, func(c *chunk) { c.owner = 4 }), "open-ended extent of inode 4"},
		{"sealed shorter", editChunk(1, func(c *chunk) { c.Length = 50 }), "which ends at 50"},
		{"packed with an open end", editChunk(2, func(c *chunk) { c.Own = false }), "is packed"},
		{"writer", editChunk(2, func(c *chunk) { c.Session = 9 }), "does not hold"},
		{"name without inode", put(appendDentryGen(1, "ghost"), appendDentry(nil, dentry{typ: reg, ino: 777, cookie: 900})), "inode 777 has no record"},
		{"impossible name", put(appendDentryGen(1, "a/b"), appendDentry(nil, dentry{typ: reg, ino: 3, cookie: 900})), "can't be"},
		{"name without position", func(f *fixture) { f.s.t.Delete(memItem{k: putGen(appendCookieBase(nil, 1, 4), firstGen)}) }, "names and"},
		{"position of another name", put(putGen(appendCookieBase(nil, 1, 4), firstGen), appendCookie(nil, dentry{typ: dir, ino: 2}, "d")), "says"},
		{"position of another generation", func(f *fixture) {
			editVolume(func(v *volume) { v.gen = 2 })(f)
			base := appendCookieBase(nil, 1, 4)
			it, _ := f.s.t.Get(memItem{k: putGen(bytes.Clone(base), 1)})
			f.s.t.Delete(it)
			f.s.t.ReplaceOrInsert(memItem{putGen(base, 2), it.v})
		}, "another generation than its name"},
		{"generation to come", put(putGen(appendInodeBase(nil, 3), 5), appendInode(nil, &inode{Attr: meta.Attr{Ino: 3, Mode: reg, Nlink: 1}})), "generation 5"},
		{"position without name", put(putGen(appendCookieBase(nil, 1, 900), firstGen), appendCookie(nil, dentry{typ: reg, ino: 3}, "ghost")), "is not there"},
		{"orphan of nobody", put(appendOrphanKey(nil, 77, 10), marker), "has no record"},
		{"overlap", put(putGen(appendExtentBase(nil, 4, 5000), firstGen), appendExtent(nil, meta.Extent{Off: 0, Len: 5000})), "begins before"},
		{"extent of nobody", put(putGen(appendExtentBase(nil, 777, 5000), firstGen), appendExtent(nil, meta.Extent{Off: 0, Len: 5000})), "no record"},
		{"unknown prefix", put([]byte("~~~"), marker), "unknown prefix"},
		{"leader", put([]byte("lll"), marker), "leader of epoch 0"},
		{"snapshot", put(appendSnapKey(nil, 1), appendSnapshot(nil, &snapshot{gen: 1, state: snapshotLive, name: "x"})), "snapshots are counted"},
		{"buried", put(appendBuriedKey(nil, 1, putGen(appendInodeBase(nil, 4), firstGen)), marker), "not superseded"},
		{"no snapshot", put(putGen(appendInodeBase(nil, 4), firstGen+1), appendInode(nil, &inode{})), "generation 2"},
		{"event too many", put(appendEventKey(nil, 99), appendEvent(nil, &meta.Event{Kind: meta.EventCreated})), "event 99"},
		{"event counter", editVolume(func(v *volume) { v.events.next++ }), "are counted"},
		{"changed by nobody", put(appendChangerKey(nil, 77, 4), marker), "which has no record"},
		{"snapshots counted", editVolume(func(v *volume) { v.tally = tally{mode: tallyExact, alone: 1} }), "snapshots alone hold 0 bytes, 1 are counted"},
		{"the youngest counted", editVolume(func(v *volume) {
			v.tally = tally{mode: tallyExact}
			v.gen, v.lastSnap, v.snaps, v.tally.ref = 2, 1, 1, 1
		}), "the youngest snapshot that is counted is of generation 0"},
		{"change", put(appendInoGenKey(nil, 7, 4), marker), "a change in generation 7"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := &fixture{t: t}
			base := richVolume(t)
			f.s = newMemStore()
			for _, it := range base.s.items() {
				f.s.t.ReplaceOrInsert(it)
			}
			c.spoil(f)
			rep, err := Check(f.s)
			if err != nil || rep.OK() {
				t.Fatalf("%v: nothing found", err)
			}
			if all := fmt.Sprint(rep.Problems); !strings.Contains(all, c.want) {
				t.Errorf("%s\nnot among them: %s", all, c.want)
			}
		})
	}
}

func appendDentryGen(parent meta.Ino, name string) []byte {
	return putGen(appendDentryBase(nil, parent, name), firstGen)
}

// TestGenerations: values written in generation 1 can still be read there after
// generation 2 has changed them.
func TestGenerations(t *testing.T) {
	f := richVolume(t)
	f.seal(meta.ChunkID{Volume: testVolume, Term: 3, Counter: 2}, 60) // a snapshot's barrier closes open ends first
	c := f.chunks(1, false)[0]
	ino := f.file("file")
	f.do(&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Len: 1000, Chunk: c}}})
	f.do(&meta.SetXattr{Ino: ino, Name: "user.a", Value: []byte("old")})
	at := func(op meta.Op, gen meta.Generation) (*meta.Result, error) {
		ctx := f.ctx()
		ctx.At = gen
		return Query(f.s, ctx, op)
	}
	reads := []meta.Op{&meta.GetAttr{Ino: 1}, &meta.GetAttr{Ino: ino}, &meta.Open{Ino: ino}, &meta.ReadDir{Ino: 1, Plus: true}, &meta.ReadDir{Ino: 2},
		&meta.GetXattr{Ino: ino, Name: "user.a"}, &meta.ListXattr{Ino: ino}, &meta.Lookup{Parent: 1, Name: "file"}, &meta.Lookup{Parent: 1, Name: "file2"},
		&meta.Lookup{Parent: 2, Name: "a"}, &meta.Open{Ino: 3}, &meta.ListXattr{Ino: 3}, &meta.Seek{Ino: ino, Hole: true}}
	show := func(gen meta.Generation) (l []string) {
		for _, op := range reads {
			res, err := at(op, gen)
			if err != nil {
				l = append(l, fmt.Sprint(meta.KindOf(err)))
				continue
			}
			res.Places = nil // where chunks lie is not versioned
			if _, ok := op.(*meta.ReadDir); ok {
				res.Off = 0 // the position of the next name; a view gets no more names
			}
			for i := range res.Entries {
				if a := res.Entries[i].Attr; a != nil {
					l = append(l, fmt.Sprintf("%+v", *a))
					res.Entries[i].Attr = nil
				}
			}
			l = append(l, fmt.Sprintf("%T %+v", op, *res))
		}
		return l
	}
	before := show(0)

	for range 2 { // a repeated request
		if res := f.do(&meta.TakeSnapshot{Name: "one", Token: 77}); res.Off != 1 {
			t.Fatal(res.Off)
		}
	}
	f.fails(meta.Exists, &meta.TakeSnapshot{Name: "one", Token: 78})
	f.fails(meta.Exists, &meta.TakeSnapshot{Name: "one"})
	same := func(what string) {
		t.Helper()
		f.check()
		if got := show(1); fmt.Sprint(got) != fmt.Sprint(before) {
			for i := range got {
				if got[i] != before[i] {
					t.Errorf("%s: generation 1\n now %s\n was %s", what, got[i], before[i])
				}
			}
			t.FailNow()
		}
	}
	same("nothing")
	for _, op := range []meta.Op{
		&meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: 500, Len: 100, Chunk: c, ChunkOff: 5000}}},
		&meta.SetXattr{Ino: ino, Name: "user.a", Value: []byte("new")},
		&meta.SetXattr{Ino: ino, Name: "user.b", Value: []byte("new")},
		&meta.RemoveXattr{Ino: ino, Name: "user.a"},
		&meta.RemoveXattr{Ino: ino, Name: "user.b"},
		&meta.Create{Parent: 1, Name: "file2", Mode: reg},
		&meta.Rename{Parent: 1, Name: "file", NewParent: 1, NewName: "file2"},
		&meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 550},
		&meta.Rename{Parent: 2, Name: "a", NewParent: 1, NewName: "a"},
		&meta.Unlink{Parent: 1, Name: "a", Holders: []meta.SessionID{0}},
		&meta.Unlink{Parent: 1, Name: "file2", Holders: []meta.SessionID{0}},
	} {
		f.do(op)
		same(fmt.Sprintf("%T", op))
	}
	if got := f.live(c); got != 1000 {
		t.Errorf("a snapshot still refers to 1000 bytes of the chunk, it counts %d", got)
	}
	f.fails(meta.NotFound, &meta.Lookup{Parent: 1, Name: "file"})
	f.fails(meta.Stale, &meta.GetAttr{Ino: ino})
	// Created and removed within generation 2 leaves nothing, not even a tombstone.
	records := func() (n int) {
		for _, p := range []byte("dreix") {
			f.s.Scan([]byte{p}, []byte{p + 1}, func(_, _ []byte) bool { n++; return true })
		}
		return n
	}
	n := records()
	tmp := f.file("short")
	f.do(&meta.Unlink{Parent: 1, Name: "short", Holders: []meta.SessionID{0}})
	if now := records(); now > n+1 { // the root's record in generation 2 may be new
		t.Errorf("%d records became %d", n, now)
	}
	f.fails(meta.Stale, &meta.GetAttr{Ino: tmp})
}

// ---- fuzzing

func FuzzDecodeEffects(f *testing.F) {
	f.Add(AppendEffects(nil, Format(testVolume, 1, 0o755, 0, 0, meta.Policy{})))
	f.Add(AppendEffects(nil, []Effect{{Delete, []byte("k"), nil}, {DeleteRange, []byte("a"), []byte("b")}}))
	f.Add([]byte{1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := DecodeEffects(b)
		if err != nil {
			if k := meta.KindOf(err); k != meta.Corrupt && k != meta.Version {
				t.Fatalf("kind %v", k)
			}
			return
		}
		again, err := DecodeEffects(AppendEffects(nil, l))
		if err != nil || len(again) != len(l) {
			t.Fatalf("%v: %d effects became %d", err, len(l), len(again))
		}
	})
}

// FuzzRecords puts any bytes in place of any record: errors, never a panic.
func FuzzRecords(f *testing.F) {
	base := richVolume(f)
	items := base.s.items()
	for i, it := range items {
		if i%7 == 0 || it.k[0] != prefixExtent {
			f.Add(uint16(i), it.v)
		}
	}
	f.Fuzz(func(t *testing.T, which uint16, v []byte) {
		it := items[int(which)%len(items)]
		fx := &fixture{t: t, s: &memStore{base.s.t.Clone()}, now: base.now, session: testSession}
		fx.s.t.ReplaceOrInsert(memItem{it.k, v})
		kinds := fx.walkAll()
		if kinds[meta.IO] != 0 {
			t.Fatalf("an error without a kind: %v", kinds)
		}
		if _, err := Check(fx.s); err != nil {
			t.Fatal(err)
		}
	})
}

// ---- a store that fails

// brokenStore fails from its n-th read on.
type brokenStore struct {
	*memStore
	n int
}

var errBroken = meta.E("read", meta.IO, "disk", nil)

func (b *brokenStore) Get(k []byte) ([]byte, bool, error) {
	if b.n--; b.n < 0 {
		return nil, false, errBroken
	}
	return b.memStore.Get(k)
}

func (b *brokenStore) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	if b.n--; b.n < 0 {
		return errBroken
	}
	return b.memStore.Scan(lo, hi, fn)
}

// TestStoreErrors: an error of the store at any read becomes the operation's error; no
// operation answers from the missing data.
func TestStoreErrors(t *testing.T) {
	f := richVolume(t)
	for _, op := range append(someOps(), &meta.Write{Ino: 4, Extents: []meta.Extent{{Len: 10, Chunk: meta.ChunkID{Volume: testVolume, Term: 3, Counter: 4}}}},
		&meta.Rename{Parent: 1, Name: "b", NewParent: 2, NewName: "a"}, &meta.SetXattr{Ino: 4, Name: "user.x"}) {
		run := func(r Reader) error {
			if op.Code().Mutates() {
				_, _, err := Execute(r, f.ctx(), op)
				return err
			}
			_, err := Query(r, f.ctx(), op)
			return err
		}
		want := meta.KindOf(run(f.s))
		for n := 0; ; n++ {
			b := &brokenStore{f.s, n}
			err := run(b)
			if b.n >= 0 {
				if meta.KindOf(err) != want {
					t.Errorf("%T %+v: %v after %d good reads, want %v", op, op, err, n, want)
				}
				break
			}
			if meta.KindOf(err) != meta.IO {
				t.Errorf("%T %+v: the store failed at read %d, the answer is %v", op, op, n, err)
			}
		}
	}
}
