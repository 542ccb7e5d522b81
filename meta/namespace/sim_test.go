package namespace

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

// sim drives the machine and the model with the same random operations.
type sim struct {
	*fixture
	m   *model
	rng *rand.Rand
	log []string

	frozen []frozen          // snapshots
	going  []meta.Generation // snapshots under deletion
	copy   *follower         // nil: nobody follows the events
}

func (s *sim) pick() meta.Ino {
	if s.rng.IntN(30) == 0 {
		return meta.Ino(s.rng.IntN(50) + 1)
	}
	inos := slices.Sorted(maps.Keys(s.m.nodes))
	return inos[s.rng.IntN(len(inos))]
}

// dirOrAny mostly picks an existing directory.
func (s *sim) dirOrAny() meta.Ino {
	for range 20 {
		ino := s.pick()
		if n := s.m.nodes[ino]; n != nil && n.isDir() && n.nlink > 0 || s.rng.IntN(50) == 0 {
			return ino
		}
	}
	return meta.RootIno
}

func (s *sim) fileOrAny() meta.Ino {
	for range 20 {
		ino := s.pick()
		if n := s.m.nodes[ino]; n != nil && n.isReg() || s.rng.IntN(50) == 0 {
			return ino
		}
	}
	return s.pick()
}

func (s *sim) name() string {
	return []string{"a", "bb", "ccc", "d", "e\xff", strings.Repeat("f", 255)}[s.rng.IntN(6)]
}

func (s *sim) holders() []meta.SessionID {
	return [][]meta.SessionID{nil, {testSession}, {testSession, otherSess}, {otherSess, otherSess}}[s.rng.IntN(4)]
}

// existing tries to find an existing name.
func (s *sim) existing() (meta.Ino, string) {
	d := s.dirOrAny()
	if n := s.m.nodes[d]; n != nil && len(n.kids) > 0 && s.rng.IntN(8) != 0 {
		names := slices.Sorted(maps.Keys(n.kids))
		return d, names[s.rng.IntN(len(names))]
	}
	return d, s.name()
}

func (s *sim) chunkFor(own bool) *mchunk {
	var l []*mchunk
	for _, c := range s.m.chunks {
		if c.open && c.own == own {
			l = append(l, c)
		}
	}
	if len(l) < 3 {
		c := &mchunk{id: s.chunks(1, own)[0], own: own, open: true}
		s.m.chunks = append(s.m.chunks, c)
		return c
	}
	return l[s.rng.IntN(len(l))]
}

func (s *sim) step() {
	s.session = []meta.SessionID{testSession, otherSess}[s.rng.IntN(2)]
	s.m.session = s.session
	rng := s.rng
	run := func(op meta.Op, want func() meta.Kind) *meta.Result {
		s.log = append(s.log, fmt.Sprintf("%x %T %+v", uint64(s.session), op, op))
		s.m.now = s.now + 1
		res, err := s.try(op)
		if got, want := meta.KindOf(err), want(); got != want {
			s.t.Fatalf("%T %+v: %v, the model says %v", op, op, err, want)
		}
		if err == nil && res.Attr.Ino != 0 {
			if n := s.m.nodes[res.Attr.Ino]; n != nil {
				s.sameAttr(res.Attr, n)
			}
		}
		if err == nil && res.Attr2.Ino != 0 {
			if n := s.m.nodes[res.Attr2.Ino]; n != nil {
				s.sameAttr(res.Attr2, n)
			}
		}
		return res
	}
	units := func(n int) uint64 { return uint64(rng.IntN(n)) * unit }
	switch r := rng.IntN(100); {
	case r < 16:
		types := []uint32{meta.TypeRegular, meta.TypeRegular, meta.TypeRegular, meta.TypeDir, meta.TypeDir, meta.TypeSymlink, meta.TypeFIFO, meta.TypeBlock}
		op := &meta.Create{Parent: s.dirOrAny(), Name: s.name(), Mode: types[rng.IntN(len(types))], Umask: 0o022, UID: uint32(rng.IntN(3)), GID: uint32(rng.IntN(3)),
			Rdev: 77, Target: "x", Excl: rng.IntN(2) == 0}
		if op.Mode != meta.TypeSymlink {
			op.Mode |= uint32(rng.IntN(0o10000))
		}
		ino := meta.Ino(0)
		if b, _, _ := s.s.Get(volumeKey); b != nil {
			var v volume
			if err := decodeVolume(b, &v); err != nil {
				s.t.Fatal(err)
			}
			ino = meta.Ino(v.nextIno)
		}
		run(op, func() meta.Kind { return s.m.create(op, ino) })
	case r < 22:
		op := &meta.Link{Ino: s.pick(), Parent: s.dirOrAny(), Name: s.name()}
		run(op, func() meta.Kind { return s.m.link(op) })
	case r < 30:
		d, name := s.existing()
		op := &meta.Unlink{Parent: d, Name: name, Dir: rng.IntN(3) == 0, Holders: s.holders()}
		run(op, func() meta.Kind { return s.m.unlink(op) })
	case r < 42:
		d, name := s.existing()
		op := &meta.Rename{Parent: d, Name: name, Flags: []uint32{0, 0, 0, 1, 2, 2, 3}[rng.IntN(7)], Holders: s.holders()}
		op.NewParent, op.NewName = s.existing()
		run(op, func() meta.Kind { return s.m.rename(op) })
	case r < 50:
		op := &meta.SetAttr{Ino: s.pick(), Mask: meta.SetMask(rng.IntN(1<<10)) &^ (meta.SetMtime | meta.SetAtimeNow | meta.SetCtime), Mode: uint32(rng.IntN(0o10000)),
			UID: uint32(rng.IntN(3)), GID: uint32(rng.IntN(3)), Size: units(40), Atime: meta.Time(rng.Int64())}
		if rng.IntN(2) == 0 {
			op.Mask &^= meta.SetSize
		}
		run(op, func() meta.Kind { return s.m.setAttr(op) })
	case r < 66:
		s.stepWrite(run, units)
	case r < 74:
		op := &meta.Fallocate{Ino: s.fileOrAny(), Mode: []uint32{0, 1, 3, 0x10, 0x11, 8, 0x20}[rng.IntN(7)], Off: units(40), Len: units(20) + unit}
		if rng.IntN(2) == 0 {
			op.Off, op.Len = op.Off/meta.BlockSize*meta.BlockSize, op.Len/meta.BlockSize*meta.BlockSize+meta.BlockSize
		}
		if n := s.m.nodes[op.Ino]; n != nil && n.size > 200 && op.Mode == meta.FallocInsert {
			return
		}
		run(op, func() meta.Kind { return s.m.fallocate(op) })
	case r < 80:
		op := &meta.CopyRange{Src: s.fileOrAny(), Dst: s.fileOrAny(), SrcOff: units(40), DstOff: units(40), Len: units(30) + unit}
		want, from := 0, s.m.nodes
		if len(s.frozen) > 0 && rng.IntN(2) == 0 {
			sn := &s.frozen[rng.IntN(len(s.frozen))]
			op.At, from = sn.gen, sn.nodes
			if inos := slices.Sorted(maps.Keys(from)); rng.IntN(4) > 0 {
				op.Src = inos[rng.IntN(len(inos))]
			}
			if rng.IntN(4) == 0 {
				op.Dst, op.DstOff = op.Src, op.SrcOff // brought back
			}
		} else if len(s.going) > 0 && rng.IntN(4) == 0 {
			op.At = s.going[rng.IntN(len(s.going))] // may never have been begun to be deleted
			if _, err := (&tx{view: view{r: s.s}}).snaps().snapshotAt(uint32(op.At)); err == nil {
				return
			}
			s.fails(meta.NoSuchSnapshot, op)
			return
		}
		res := run(op, func() (k meta.Kind) { want, k = s.m.copyRange(op, from); return k })
		if res != nil && res.Off != uint64(want*unit) {
			s.t.Fatalf("%+v copied %d bytes, want %d", op, res.Off, want*unit)
		}
	case r < 85:
		s.stepXattr(run)
	case r < 91:
		op := &meta.ReleaseOrphans{Inos: []meta.Ino{s.pick(), s.pick(), s.pick()}}
		for _, ino := range slices.Sorted(maps.Keys(s.m.nodes)) {
			if s.m.nodes[ino].nlink == 0 && rng.IntN(2) == 0 {
				op.Inos = append(op.Inos, ino)
			}
		}
		run(op, func() meta.Kind {
			for _, ino := range op.Inos {
				if n := s.m.nodes[ino]; n != nil && n.nlink == 0 {
					delete(n.holders, s.session)
					n.tmp = n.tmp && len(n.holders) > 0
					s.m.gone(n)
				}
			}
			return 0
		})
	case r < 94:
		op := &meta.Tmpfile{Parent: s.dirOrAny(), Mode: 0o644}
		res := run(op, func() meta.Kind { _, k := s.m.dir(op.Parent); return k })
		if res != nil {
			n := &mnode{ino: res.Attr.Ino, mode: meta.TypeRegular | 0o644, tmp: true, holders: map[meta.SessionID]bool{s.session: true}, xattrs: map[string]string{},
				a: s.m.now, m: s.m.now, c: s.m.now}
			if d := s.m.nodes[op.Parent]; d.mode&meta.ModeSetGID != 0 {
				n.gid = d.gid
			}
			s.m.nodes[n.ino] = n
			s.sameAttr(res.Attr, n)
		}
	case r < 97:
		s.stepSeal(run)
	case r < 98:
		d, name := s.existing()
		op := &meta.Junction{Parent: d, Name: name, Volume: 9, Detach: rng.IntN(2) == 0}
		run(op, func() meta.Kind {
			n, k := s.m.dir(op.Parent)
			if k != 0 {
				return k
			}
			old := n.kids[op.Name]
			switch {
			case op.Detach && old == nil:
				return meta.NotFound
			case op.Detach && old.vol == 0:
				return meta.NotAttached
			case op.Detach:
				delete(n.kids, op.Name)
				n.nlink--
			case old != nil:
				return meta.Exists
			default:
				n.kids[op.Name] = &mnode{vol: 9}
				n.nlink++
			}
			n.changed(s.m.now)
			return 0
		})
	case r < 99:
		s.stepCompact(run)
	default:
		s.stepReplicas(run)
	}
}

type runner func(op meta.Op, want func() meta.Kind) *meta.Result

func (s *sim) stepWrite(run runner, units func(int) uint64) {
	op := &meta.Write{Ino: s.fileOrAny(), Synced: s.rng.IntN(3) != 0, Kill: s.rng.IntN(4) == 0, CloseEnded: s.rng.IntN(3) == 0, Seal: s.rng.IntN(60) == 0}
	n := s.m.nodes[op.Ino]
	var advance func()
	switch r := s.rng.IntN(10); {
	case r < 5:
		c := s.chunkFor(false)
		e := meta.Extent{Off: units(40), Len: units(12) + unit, Chunk: c.id, ChunkOff: uint64(c.length * unit)}
		op.Extents = []meta.Extent{e}
		advance = func() { c.length += int(e.Len / unit) }
	case r < 7:
		op.Inline, op.Data = true, make([]byte, s.rng.IntN(5)*unit)
		for i := 0; i < len(op.Data); i += 8 {
			binary.BigEndian.PutUint64(op.Data[i:], 1<<63|uint64(s.rng.Uint32()))
			copy(op.Data[i/unit*unit:], op.Data[i:i+8])
		}
		for i := 0; i < len(op.Data); i++ {
			op.Data[i] = op.Data[i/unit*unit+i%8]
		}
	case r < 8:
		op.MarkSynced = true
	case r < 9:
		op.Size = units(60)
	default: // open-ended
		var c *mchunk
		e := meta.Extent{OpenEnded: true, Len: units(6) + unit}
		if n != nil && n.open != nil && !op.CloseEnded {
			c = n.open
			e.Off, e.ChunkOff = uint64(n.openOff*unit), uint64(n.openAt*unit)
			e.Len += uint64((n.size - n.openOff) * unit)
		} else {
			c = &mchunk{id: s.chunks(1, true)[0], own: true, open: true}
			s.m.chunks = append(s.m.chunks, c)
			if n != nil {
				e.Off = uint64(n.size * unit)
			}
		}
		e.Chunk = c.id
		op.Extents = []meta.Extent{e}
		advance = func() { c.length = max(c.length, int((e.ChunkOff+e.Len)/unit)) }
	}
	if n != nil && n.sealed {
		op.Seal = false
	}
	res := run(op, func() meta.Kind {
		// A refused operation must leave the model unchanged.
		if n == nil {
			return s.m.write(op)
		}
		was := *n
		was.data, was.alloc, was.xattrs = slices.Clone(n.data), slices.Clone(n.alloc), maps.Clone(n.xattrs)
		k := s.m.write(op)
		if k != 0 {
			*n = was
		}
		return k
	})
	if res != nil && advance != nil {
		advance()
	}
}

func (s *sim) stepXattr(run runner) {
	ino := s.pick()
	n := s.m.nodes[ino]
	name := []string{"user.a", "user.b", "security.capability", "trusted.x"}[s.rng.IntN(4)]
	admits := func() meta.Kind {
		switch {
		case n == nil:
			return meta.Stale
		case strings.HasPrefix(name, "user.") && !n.isReg() && !n.isDir():
			return meta.NotPermitted
		}
		return 0
	}
	if n != nil && n.xattrs == nil {
		n.xattrs = map[string]string{}
	}
	if s.rng.IntN(3) == 0 {
		run(&meta.RemoveXattr{Ino: ino, Name: name}, func() meta.Kind {
			if k := admits(); k != 0 {
				return k
			}
			if _, ok := n.xattrs[name]; !ok {
				return meta.NoAttribute
			}
			delete(n.xattrs, name)
			n.c = s.m.now
			return 0
		})
		return
	}
	op := &meta.SetXattr{Ino: ino, Name: name, Value: []byte(fmt.Sprint(s.rng.IntN(100))), Flags: uint32(s.rng.IntN(3))}
	run(op, func() meta.Kind {
		if k := admits(); k != 0 {
			return k
		}
		_, ok := n.xattrs[name]
		switch {
		case ok && op.Flags == meta.XattrCreate:
			return meta.Exists
		case !ok && op.Flags == meta.XattrReplace:
			return meta.NoAttribute
		}
		if was, ok := n.xattrs[name]; !ok || was != string(op.Value) {
			n.c = s.m.now
		}
		n.xattrs[name] = string(op.Value)
		return 0
	})
}

// stepSeal seals a chunk, perhaps at more than the journaled length, and drops chunks
// without references.
func (s *sim) stepSeal(run runner) {
	var l []*mchunk
	for _, c := range s.m.chunks {
		if c.open {
			l = append(l, c)
		}
	}
	if len(l) == 0 {
		return
	}
	c := l[s.rng.IntN(len(l))]
	length := c.length
	if c.own {
		length += s.rng.IntN(3)
	}
	run(&meta.SealChunk{Chunk: c.id, Length: uint64(length * unit), CRC: 9, Fence: meta.Fence{Term: 3, Seals: 1}, Servers: []meta.ServerID{1}}, func() meta.Kind {
		s.m.seal(c, length)
		c.servers = []meta.ServerID{1}
		return 0
	})
	var gone []meta.ChunkID
	if err := DeletingChunks(s.s, func(c meta.ChunkRecord) bool { gone = append(gone, c.ID); return true }); err != nil {
		s.t.Fatal(err)
	}
	for _, id := range gone {
		s.do(&meta.DropChunk{Chunk: id})
	}
}

// stepReplicas moves a chunk to other servers, or makes an invalid move: from a wrong
// server, to no server, of an open chunk.
func (s *sim) stepReplicas(run runner) {
	if len(s.m.chunks) == 0 {
		return
	}
	c := s.m.chunks[s.rng.IntN(len(s.m.chunks))]
	expect := c.servers
	if s.rng.IntN(6) == 0 {
		expect = []meta.ServerID{8, 9}
	}
	var to []meta.ServerID
	for range s.rng.IntN(5) {
		to = append(to, meta.ServerID(s.rng.IntN(12)))
	}
	bad := len(to) == 0 || slices.Contains(to, 0) || len(slices.Compact(slices.Sorted(slices.Values(to)))) != len(to)
	before, _, err := ReadChunk(s.s, c.id)
	run(&meta.SetReplicas{Chunk: c.id, Expect: expect, Servers: to}, func() meta.Kind {
		switch {
		case bad:
			return meta.Invalid
		case meta.KindOf(err) == meta.NoSuchChunk, err == nil && before.State == meta.ChunkDeleting:
			return meta.NoSuchChunk
		case c.open:
			return meta.Busy
		case !slices.Equal(expect, c.servers):
			return meta.Again
		}
		c.servers = to
		return 0
	})
	if err != nil || before.State != meta.ChunkSealed {
		return
	}
	after, _, err := ReadChunk(s.s, c.id)
	before.Servers = c.servers
	if err != nil || fmt.Sprint(after) != fmt.Sprint(before) {
		s.t.Fatalf("%+v, %v; want %+v", after, err, before)
	}
}

// stepCompact moves an extent to a new place in an open chunk; the model names contents
// by their place, so it learns the new names.
func (s *sim) stepCompact(run runner) {
	ino := s.fileOrAny()
	n := s.m.nodes[ino]
	if n == nil || !n.isReg() || n.open != nil {
		return
	}
	ext := s.do(&meta.Open{Ino: ino}).Extents
	if len(ext) == 0 {
		return
	}
	old := ext[s.rng.IntN(len(ext))]
	if old.Chunk.IsZero() {
		return
	}
	if k := uint64(s.rng.IntN(int(old.Len / unit))); k > 0 {
		old = sub(old, old.Off, old.Off+k*unit)
	}
	c := s.chunkFor(false)
	fresh := meta.Extent{Off: old.Off, Len: old.Len, Chunk: c.id, ChunkOff: uint64(c.length * unit)}
	run(&meta.ReplaceExtents{Ino: ino, Old: []meta.Extent{old}, New: []meta.Extent{fresh}}, func() meta.Kind {
		off := int(old.Off / unit)
		for i := range int(old.Len / unit) {
			n.data[off+i] = contents(c.id, c.length+i)
		}
		c.length += int(old.Len / unit)
		return 0
	})
	run(&meta.ReplaceExtents{Ino: ino, Old: []meta.Extent{old}, New: []meta.Extent{fresh}}, func() meta.Kind { return meta.Again })
}

func (s *sim) sameAttr(got meta.Attr, n *mnode) {
	s.t.Helper()
	want := n.attr()
	got.Btime, got.Change = 0, 0
	if n.isDir() && n.nlink == 0 {
		got.Parent, want.Parent = 0, 0
	}
	if got != want {
		s.t.Fatalf("inode %d:\n got %+v\nwant %+v", n.ino, got, want)
	}
}

// sameTree compares all readable state.
func (s *sim) sameTree() {
	s.t.Helper()
	s.check()
	for _, ino := range slices.Sorted(maps.Keys(s.m.nodes)) {
		n := s.m.nodes[ino]
		s.sameAttr(s.attr(ino), n)
		var list string
		for _, name := range slices.Sorted(maps.Keys(n.xattrs)) {
			list += name + "\x00"
			if got := s.do(&meta.GetXattr{Ino: ino, Name: name}).Data; string(got) != n.xattrs[name] {
				s.t.Fatalf("inode %d attribute %s: %q, want %q", ino, name, got, n.xattrs[name])
			}
		}
		if got := s.do(&meta.ListXattr{Ino: ino}).Data; string(got) != list {
			s.t.Fatalf("inode %d: attributes %q, want %q", ino, got, list)
		}
		switch {
		case n.isDir():
			s.sameDir(n)
		case n.isReg():
			s.sameFile(n)
		case n.target != "":
			if got := s.do(&meta.ReadLink{Ino: ino}).Data; string(got) != n.target {
				s.t.Fatalf("inode %d: target %q, want %q", ino, got, n.target)
			}
		}
	}
	if _, inodes, _ := Usage(s.s); inodes != uint64(len(s.m.nodes)) {
		s.t.Fatalf("%d inodes, want %d", inodes, len(s.m.nodes))
	}
}

func (s *sim) sameDir(n *mnode) {
	s.t.Helper()
	seen := map[string]bool{}
	var cookie uint64
	for eof := false; !eof; {
		res := s.do(&meta.ReadDir{Ino: n.ino, Cookie: cookie, Max: 2, Plus: true})
		for _, e := range res.Entries {
			kid := n.kids[e.Name]
			if kid == nil || seen[e.Name] || e.Cookie <= cookie || e.Volume != kid.vol {
				s.t.Fatalf("directory %d lists %+v, the model has %+v", n.ino, e, kid)
			}
			if kid.vol == 0 {
				if e.Ino != kid.ino || e.Type != kid.mode&meta.TypeMask {
					s.t.Fatalf("directory %d lists %+v, want inode %d", n.ino, e, kid.ino)
				}
				s.sameAttr(*e.Attr, kid)
				if got := s.do(&meta.Lookup{Parent: n.ino, Name: e.Name}).Attr.Ino; got != kid.ino {
					s.t.Fatalf("lookup %q: inode %d, want %d", e.Name, got, kid.ino)
				}
			}
			seen[e.Name] = true
			cookie = e.Cookie
		}
		eof = res.EOF
	}
	if len(seen) != len(n.kids) {
		s.t.Fatalf("directory %d lists %d names, want %d", n.ino, len(seen), len(n.kids))
	}
}

// read returns a file's units as a client sees them.
func (s *sim) read(ino meta.Ino) []uint64 {
	s.t.Helper()
	res := s.do(&meta.Open{Ino: ino})
	out := make([]uint64, res.Attr.Size/unit)
	for i := range min(len(out), len(res.Data)/unit) {
		out[i] = binary.BigEndian.Uint64(res.Data[i*unit:])
	}
	for _, e := range res.Extents {
		for i := range int(e.Len / unit) {
			if at := int(e.Off/unit) + i; at < len(out) && !e.Chunk.IsZero() {
				out[at] = contents(e.Chunk, int(e.ChunkOff/unit)+i)
			}
		}
	}
	return out
}

func (s *sim) sameFile(n *mnode) {
	s.t.Helper()
	n.grow(n.size)
	got := s.read(n.ino)
	if !slices.Equal(got, n.data[:n.size]) {
		s.t.Fatalf("inode %d:\n got %x\nwant %x", n.ino, got, n.data[:n.size])
	}
	for at := 0; at <= n.size; at++ {
		for _, hole := range []bool{false, true} {
			want := at
			for want < n.size && (n.data[want] == 0 && want >= n.inline) != hole {
				want++
			}
			res, err := s.try(&meta.Seek{Ino: n.ino, Off: uint64(at * unit), Hole: hole})
			if at == n.size || !hole && want == n.size {
				if meta.KindOf(err) != meta.NoSuchOffset {
					s.t.Fatalf("inode %d: seek %v from %d of %d: %v", n.ino, hole, at, n.size, err)
				}
			} else if err != nil || res.Off != uint64(want*unit) {
				s.t.Fatalf("inode %d: seek %v from %d: %v, %v; want %d", n.ino, hole, at, res, err, want)
			}
		}
	}
}

func TestAgainstModel(t *testing.T) {
	seeds, steps := uint64(30), 500
	if testing.Short() {
		seeds = 10
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			runModel(t, seed, steps)
		})
	}
}

func runModel(t *testing.T, seed uint64, steps int) {
	f := newFixture(t)
	s := &sim{fixture: f, rng: rand.New(rand.NewPCG(seed, 1))}
	s.m = newModel(f.now-2, testSession) // two sessions were started after formatting
	defer func() {
		if t.Failed() {
			t.Logf("seed %d, the last of %d operations:\n%s", seed, len(s.log), strings.Join(s.log[max(0, len(s.log)-12):], "\n"))
		}
	}()
	if seed%3 > 0 {
		s.do(&meta.SetEvents{Keep: meta.MaxEvents})
		s.m.now = s.now
		s.copy = newFollower(s)
	}
	if seed%4 == 3 {
		s.counts(true)
		s.m.now = s.now
	}
	for i := range steps {
		if seed%2 == 1 {
			s.snapshots(i)
		}
		s.step()
		if s.copy != nil && s.rng.IntN(4) == 0 {
			s.copy.poll()
		}
		if i%25 == 24 {
			s.sameTree()
			if s.copy != nil {
				s.copy.sameNames()
			}
		}
	}
	for _, sn := range s.frozen {
		sn.compare(s)
	}
	// All holds end.
	for _, id := range []meta.SessionID{testSession, otherSess} {
		for eof := false; !eof; {
			eof = s.do(&meta.SessionEnd{Session: id}).EOF
		}
	}
	for _, ino := range slices.Sorted(maps.Keys(s.m.nodes)) {
		if n := s.m.nodes[ino]; n.nlink == 0 {
			delete(s.m.nodes, ino)
		}
	}
	s.sameTree()
	if s.copy != nil {
		s.copy.sameFiles()
	}
	if seed%2 == 1 {
		s.rollBack()
		s.dropAll()
	}
}

// rollBack rolls back to a snapshot, in steps of any size: then the volume shows the same
// as the snapshot.
func (s *sim) rollBack() {
	s.t.Helper()
	if len(s.frozen) == 0 || s.rng.IntN(3) == 0 {
		return
	}
	for _, c := range s.m.chunks {
		if c.open {
			s.m.now = s.now + 1
			s.seal(c.id, uint64(c.length*unit))
			s.m.seal(c, c.length)
		}
	}
	s.reapAll()
	for range 2 { // back to any snapshot, then from there to any snapshot
		to := s.frozen[s.rng.IntN(len(s.frozen))]
		s.log = append(s.log, fmt.Sprintf("roll back to %d", to.gen))
		steps := 0
		for op := (&meta.Rollback{To: to.gen}); ; steps++ {
			op.Max = uint32(s.rng.IntN(6) + 1)
			res := s.do(op)
			l, err := Snapshots(s.s)
			if err != nil {
				s.t.Fatal(err)
			}
			for _, sn := range l {
				if sn.Rolling != (sn.At == to.gen && !res.EOF) {
					s.t.Fatalf("step %d, at its end %v: %+v", steps, res.EOF, sn)
				}
			}
			if res.EOF {
				break
			}
			s.fails(meta.Busy, &meta.DropSnapshot{At: to.gen})
			op.From = res.Data
		}
		s.check()
		to.compare(s)
		a, b := s.walk(to.gen), s.walk(0)
		if !maps.Equal(a.inodes, b.inodes) || !maps.Equal(a.content, b.content) || !maps.Equal(a.entries, b.entries) {
			s.t.Fatalf("after %d steps\n%v\n%v\n%v\n%v", steps, a.entries, b.entries, a.inodes, b.inodes)
		}
		for ino, e := range a.extents {
			// Extents that only compaction moved stay in the new place.
			if e != b.extents[ino] && s.noted(to.gen, ino) {
				s.t.Fatalf("inode %d after %d steps: %s, was %s", ino, steps, b.extents[ino], e)
			}
		}
		if l, err := Diff(s.s, to.gen, 0); err != nil || len(l) != 0 {
			s.t.Fatal(l, err)
		}
	}
	s.m = nil // the model does not cover rollbacks
}

// noted tells whether an inode was changed after a snapshot.
func (s *sim) noted(since meta.Generation, ino meta.Ino) (yes bool) {
	for gen := uint32(since) + 1; !yes && gen < uint32(since)+1000; gen++ {
		_, yes, _ = s.s.Get(appendInoGenKey(nil, gen, ino))
	}
	return yes
}

// reapAll removes the rest of unlinked and truncated files.
func (s *sim) reapAll() {
	s.t.Helper()
	var inos []meta.Ino
	if err := ReapQueue(s.s, func(ino meta.Ino) bool {
		inos = append(inos, ino)
		return true
	}); err != nil {
		s.t.Fatal(err)
	}
	for _, ino := range inos {
		for !s.do(&meta.Reap{Ino: ino}).EOF {
		}
	}
}

// snapshots takes and deletes some, in any order, in steps of any size, while
// the volume changes.
func (s *sim) snapshots(i int) {
	s.t.Helper()
	if i == 50 || i > 50 && s.rng.IntN(25) == 0 {
		s.frozen = append(s.frozen, s.freeze(i))
	}
	if len(s.frozen) > 0 && s.rng.IntN(40) == 0 {
		n := s.rng.IntN(len(s.frozen))
		s.frozen[n].compare(s)
		s.going = append(s.going, s.frozen[n].gen)
		s.frozen = slices.Delete(s.frozen, n, n+1)
	}
	if len(s.going) > 0 && s.rng.IntN(3) == 0 {
		s.dropStep(s.rng.IntN(len(s.going)))
	}
	if s.rng.IntN(60) == 0 {
		s.diffs()
	}
	if len(s.frozen) > 0 && s.rng.IntN(20) == 0 {
		s.frozen[s.rng.IntN(len(s.frozen))].compare(s)
		s.check()
	}
}

func (s *sim) dropStep(n int) {
	s.t.Helper()
	if s.m != nil {
		s.m.now = s.now + 1
	}
	s.log = append(s.log, fmt.Sprintf("drop snapshot %d", s.going[n]))
	res := s.do(&meta.DropSnapshot{At: s.going[n], Max: uint32(s.rng.IntN(30) + 1)})
	if res.EOF {
		s.going = slices.Delete(s.going, n, n+1)
	}
}

// dropAll deletes the remaining snapshots: then no trace of snapshots may be left.
func (s *sim) dropAll() {
	s.t.Helper()
	for _, sn := range s.frozen {
		s.going = append(s.going, sn.gen)
	}
	for len(s.going) > 0 {
		s.dropStep(s.rng.IntN(len(s.going)))
	}
	if s.m != nil {
		s.sameTree()
	}
	s.check()
	if n, err := Buried(s.s); err != nil || n != 0 {
		s.t.Fatal(n, err)
	}
	tombs, bases := 0, map[string]int{}
	for _, p := range []byte("idrexbghs") {
		err := s.s.Scan([]byte{p}, []byte{p + 1}, func(k, v []byte) bool {
			if strings.IndexByte("bghs", p) >= 0 {
				s.t.Errorf("left: %x", k)
			}
			if isTombstone(v) {
				tombs++
			}
			bases[string(k[:len(k)-genLen])]++
			return true
		})
		if err != nil {
			s.t.Fatal(err)
		}
	}
	for base, n := range bases {
		if n != 1 {
			s.t.Errorf("%x has %d versions", base, n)
		}
	}
	if tombs != 0 {
		s.t.Errorf("%d tombstones are left", tombs)
	}
}

// frozen is the state of a generation at the snapshot that ended it.
type frozen struct {
	gen   meta.Generation
	attrs map[meta.Ino]meta.Attr
	open  map[meta.Ino]string
	list  map[meta.Ino]string
	nodes map[meta.Ino]*mnode // nodes of the model, for copies from the snapshot
}

// freeze takes a snapshot: it closes open ends first (rule 8), and notes everything that
// the snapshot must show.
func (s *sim) freeze(i int) frozen {
	s.t.Helper()
	for _, c := range s.m.chunks {
		if c.open && c.own {
			length := c.length
			s.m.now = s.now + 1
			s.seal(c.id, uint64(length*unit))
			s.m.seal(c, length)
			c.servers = []meta.ServerID{1}
		}
	}
	sn := frozen{attrs: map[meta.Ino]meta.Attr{}, open: map[meta.Ino]string{}, list: map[meta.Ino]string{}, nodes: map[meta.Ino]*mnode{}}
	for ino, n := range s.m.nodes {
		was := *n
		was.data, was.alloc = slices.Clone(n.data), slices.Clone(n.alloc)
		sn.nodes[ino] = &was
		sn.attrs[ino], sn.open[ino], sn.list[ino] = s.seen(ino, 0)
	}
	s.m.now = s.now + 1
	s.log = append(s.log, fmt.Sprintf("snapshot %d", i))
	sn.gen = meta.Generation(s.do(&meta.TakeSnapshot{Name: fmt.Sprint(i)}).Off)
	return sn
}

// seen reads an inode in a generation.
func (s *sim) seen(ino meta.Ino, gen meta.Generation) (a meta.Attr, open, list string) {
	s.t.Helper()
	c := s.ctx()
	c.At = gen
	res, err := Query(s.s, c, &meta.Open{Ino: ino})
	if err != nil {
		s.t.Fatalf("inode %d in generation %d: %v", ino, gen, err)
	}
	a, open = res.Attr, fmt.Sprintf("%+v %x", res.Extents, res.Data)
	if a.IsDir() {
		if res, err = Query(s.s, c, &meta.ReadDir{Ino: ino}); err != nil {
			s.t.Fatalf("directory %d in generation %d: %v", ino, gen, err)
		}
		list = fmt.Sprintf("%+v", res.Entries)
	}
	if res, err = Query(s.s, c, &meta.ListXattr{Ino: ino}); err != nil {
		s.t.Fatal(err)
	}
	return a, open, list + string(res.Data)
}

func (sn frozen) compare(s *sim) {
	s.t.Helper()
	for _, ino := range slices.Sorted(maps.Keys(sn.attrs)) {
		a, open, list := s.seen(ino, sn.gen)
		if a != sn.attrs[ino] || open != sn.open[ino] || list != sn.list[ino] {
			s.t.Fatalf("inode %d in generation %d\n now %+v %s %s\n was %+v %s %s", ino, sn.gen, a, open, list, sn.attrs[ino], sn.open[ino], sn.list[ino])
		}
	}
}
