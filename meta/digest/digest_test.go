package digest

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// tree is a Source in memory.
type tree struct {
	inodes map[meta.Ino]*file
	reads  int
}

type file struct {
	meta.Attr
	target  string
	xattrs  []Xattr
	extents []meta.Extent
	data    []byte
	inline  int
	entries map[string]meta.Ino
	volumes map[string]meta.VolumeID
	order   []string
}

func (t *tree) Stat(_ context.Context, ino meta.Ino) (meta.Attr, error) {
	f := t.inodes[ino]
	a := f.Attr
	a.Size = uint64(len(f.data))
	if len(f.xattrs) > 0 {
		a.Flags |= meta.FlagHasXattrs
	}
	return a, nil
}

func (t *tree) List(_ context.Context, dir meta.Ino, fn func(string, meta.Ino, meta.VolumeID) error) error {
	for _, name := range t.inodes[dir].order {
		if err := fn(name, t.inodes[dir].entries[name], t.inodes[dir].volumes[name]); err != nil {
			return err
		}
	}
	return nil
}

func (t *tree) ReadLink(_ context.Context, ino meta.Ino) (string, error) {
	return t.inodes[ino].target, nil
}

func (t *tree) Xattrs(_ context.Context, ino meta.Ino) ([]Xattr, error) {
	return t.inodes[ino].xattrs, nil
}

func (t *tree) Extents(_ context.Context, ino meta.Ino) ([]meta.Extent, []byte, error) {
	f := t.inodes[ino]
	return f.extents, f.data[:f.inline], nil
}

func (t *tree) ReadAt(_ context.Context, ino meta.Ino, p []byte, off uint64) error {
	t.reads++
	copy(p, t.inodes[ino].data[off:])
	return nil
}

func (t *tree) add(dir meta.Ino, name string, f file) meta.Ino {
	ino := meta.Ino(len(t.inodes) + 1)
	f.Ino = ino
	if f.IsDir() {
		f.entries, f.volumes = map[string]meta.Ino{}, map[string]meta.VolumeID{}
	}
	t.inodes[ino] = &f
	if d := t.inodes[dir]; dir != 0 {
		d.entries[name] = ino
		d.order = append(d.order, name)
	}
	return ino
}

func bytesOf(seed uint64, n int) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// sample is a tree with something of everything.
func sample() *tree {
	t := &tree{inodes: map[meta.Ino]*file{}}
	root := t.add(0, "", file{Attr: meta.Attr{Mode: meta.TypeDir | 0o755}})
	sub := t.add(root, "sub", file{Attr: meta.Attr{Mode: meta.TypeDir | 0o700, UID: 3, GID: 4}, xattrs: []Xattr{{"user.b", []byte("2")}, {"user.a", []byte("1")}}})
	big := bytesOf(1, 2*BlockSize+BlockSize/2)
	clear(big[BlockSize : 2*BlockSize])
	c := meta.ChunkID{Volume: 1, Term: 1, Counter: 1}
	t.add(sub, "big", file{Attr: meta.Attr{Mode: meta.TypeRegular | 0o644}, data: big,
		extents: []meta.Extent{{Off: 0, Len: BlockSize, Chunk: c}, {Off: 2 * BlockSize, Len: BlockSize / 2, Chunk: c, ChunkOff: BlockSize}}})
	t.add(sub, "small", file{Attr: meta.Attr{Mode: meta.TypeRegular | 0o4755, UID: 1}, data: []byte("inline"), inline: 6})
	t.add(root, "empty", file{Attr: meta.Attr{Mode: meta.TypeRegular | 0o600}})
	t.add(root, "link", file{Attr: meta.Attr{Mode: meta.TypeSymlink | 0o777}, target: "sub/big"})
	t.add(root, "null", file{Attr: meta.Attr{Mode: meta.TypeChar | 0o666, Rdev: 259}})
	t.add(root, "fifo", file{Attr: meta.Attr{Mode: meta.TypeFIFO | 0o644}})
	t.inodes[root].order = append(t.inodes[root].order, "other")
	t.inodes[root].volumes["other"] = 7
	return t
}

func walk(t *testing.T, s *tree, known Known) Sum {
	t.Helper()
	sum, _, err := Walk(t.Context(), s, Way{Known: known})
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

// aside is a tree of which blocks are read beside each other.
type aside struct {
	*tree
	mu        sync.Mutex
	now, most int
	fails     map[uint64]error // by offset
}

func (a *aside) ReadAt(ctx context.Context, ino meta.Ino, p []byte, off uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now++
	a.most = max(a.most, a.now)
	a.mu.Unlock()
	time.Sleep(time.Millisecond)
	a.mu.Lock()
	a.now--
	if err := a.fails[off]; err != nil {
		return err
	}
	return a.tree.ReadAt(ctx, ino, p, off)
}

// TestAside: read side by side, now several blocks and now a single block, a tree has the same
// digest as ever, each block had a turn and is remembered; no reader is left at the end.
func TestAside(t *testing.T) {
	s := sample()
	for d := range 2 {
		dir := s.add(1, fmt.Sprint("d", d), file{Attr: meta.Attr{Mode: meta.TypeDir | 0o755}})
		for i := range 7 {
			n := i * BlockSize / 2
			f := file{Attr: meta.Attr{Mode: meta.TypeRegular | 0o644}, data: bytesOf(uint64(20*d+i), n)}
			if n > 0 {
				f.extents = []meta.Extent{{Len: uint64(n), Chunk: meta.ChunkID{Volume: 1, Term: 2, Counter: uint64(20*d + i)}}}
			}
			s.add(dir, fmt.Sprint(i), f)
		}
	}
	want, p, err := Walk(t.Context(), s, Way{})
	if err != nil {
		t.Fatal(err)
	}
	many := func() int { return 4 }
	n := 0
	for name, way := range map[string]Way{"many": {Aside: many}, "by turns": {Aside: func() int { n++; return n % 5 }}} {
		a, k := &aside{tree: s}, remembered{}
		turns := uint64(0)
		way.Known, way.Turn = k, func(_ context.Context, n int) error { turns += uint64(n); return nil }
		sum, q, err := Walk(t.Context(), a, way)
		if err != nil || sum != want || q != p || turns != p.Read || a.now != 0 {
			t.Errorf("%s: %v, want %v; %+v, want %+v; turns for %d bytes; %d still read; %v", name, sum, want, q, p, turns, a.now, err)
		}
		if a.most < 2 || a.most > 4+1 { // with a bound of one, the walk reads the block, beside earlier readers
			t.Errorf("%s: %d blocks at a time", name, a.most)
		}
		turns = 0
		known := 0
		way.Turn = func(_ context.Context, n int) error { turns += uint64(n); known++; return nil }
		if sum, q, err := Walk(t.Context(), a, way); err != nil || sum != want || q.Read != turns || q.Read > 6 || known < 20 {
			t.Errorf("%s, again: %v, %+v, %d bytes in %d turns, %v", name, sum, q, turns, known, err)
		}
	}
	bad := errors.New("this one")
	a := &aside{tree: s, fails: map[uint64]error{BlockSize: bad}}
	if _, _, err := Walk(t.Context(), a, Way{Aside: many}); !errors.Is(err, bad) || a.now != 0 {
		t.Errorf("%v, while %d still read", err, a.now)
	}
}

// The format is for ever: the sums were computed once.
func TestFormat(t *testing.T) {
	var none Tree
	for want, got := range map[string]Sum{
		"e52d9c508c502347344d8c07ad91cbd6068afc75ff6292f062a09ca381c89e71": none.Root(),
		"6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d": Block(nil),
		"fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125": node(Block(nil), Block([]byte{0})),
	} {
		if hex.EncodeToString(got[:]) != want {
			t.Errorf("%x, want %s", got[:], want)
		}
	}
	// By another program, from the drawing alone.
	two := &tree{inodes: map[meta.Ino]*file{}}
	root := two.add(0, "", file{Attr: meta.Attr{Mode: meta.TypeDir | 0o755}})
	if got, want := walk(t, two, nil).String(), "sha256-tree-1:0b1a017540e6f1ee349eb917a2a96acca92fdfead4a3022a0e989d0d929b936f"; got != want {
		t.Errorf("empty: %s, want %s", got, want)
	}
	two.add(root, "b", file{Attr: meta.Attr{Mode: meta.TypeSymlink | 0o777}, target: "a"})
	two.add(root, "a", file{Attr: meta.Attr{Mode: meta.TypeRegular | 0o644, UID: 1, GID: 2}, data: []byte("abc"), inline: 3, xattrs: []Xattr{{"user.x", []byte("y")}}})
	if got, want := walk(t, two, nil).String(), "sha256-tree-1:97028e6d3ae11b05ed875aa309cef930c0a27db093aebad1dc77d8383c0a1d6e"; got != want {
		t.Errorf("two: %s, want %s", got, want)
	}
	back, err := Parse(walk(t, sample(), nil).String())
	if err != nil || back != walk(t, sample(), nil) {
		t.Error(back, err)
	}
	for text, kind := range map[string]meta.Kind{"": meta.Invalid, "sha256-tree-2:00": meta.Version, "sha256-tree-1:0g": meta.Invalid, prefix + "00": meta.Invalid} {
		if _, err := Parse(text); meta.KindOf(err) != kind {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// The stream of leaves makes the tree of the definition.
func TestTree(t *testing.T) {
	var define func(l []Sum) Sum
	define = func(l []Sum) Sum {
		switch len(l) {
		case 0:
			return sha256.Sum256([]byte{tagNone})
		case 1:
			return l[0]
		}
		k := 1
		for 2*k < len(l) {
			k *= 2
		}
		return node(define(l[:k]), define(l[k:]))
	}
	var tr Tree
	var l []Sum
	for i := range 300 {
		if got, want := tr.Root(), define(l); got != want {
			t.Fatalf("%d leaves: %v, want %v", i, got, want)
		}
		s := Block([]byte{byte(i), byte(i >> 8)})
		l = append(l, s)
		tr.Add(s)
	}
}

// Every difference that a user can see changes the digest; invisible differences do not.
func TestWhatCounts(t *testing.T) {
	base := walk(t, sample(), nil)
	find := func(s *tree, path ...string) *file {
		ino := meta.RootIno
		for _, name := range path {
			ino = s.inodes[ino].entries[name]
		}
		return s.inodes[ino]
	}
	differs := map[string]func(s *tree){
		"a bit of content": func(s *tree) { find(s, "sub", "big").data[5] ^= 1 },
		"a bit in a hole": func(s *tree) {
			f := find(s, "sub", "big")
			f.data[BlockSize+9] = 1
			f.extents = []meta.Extent{{Len: uint64(len(f.data)), Chunk: f.extents[0].Chunk}}
		},
		"a byte more":       func(s *tree) { f := find(s, "sub", "big"); f.data = append(f.data, 0) },
		"zeros at the end":  func(s *tree) { f := find(s, "empty"); f.data = make([]byte, 1) },
		"inline bytes":      func(s *tree) { find(s, "sub", "small").data[0]++ },
		"mode":              func(s *tree) { find(s, "empty").Mode ^= 0o001 },
		"set-id":            func(s *tree) { find(s, "sub", "small").Mode ^= 0o4000 },
		"owner":             func(s *tree) { find(s, "sub").UID++ },
		"group":             func(s *tree) { find(s, "fifo").GID++ },
		"type":              func(s *tree) { find(s, "fifo").Mode = meta.TypeSocket | 0o644 },
		"device":            func(s *tree) { find(s, "null").Rdev++ },
		"target":            func(s *tree) { find(s, "link").target += "x" },
		"attribute's value": func(s *tree) { find(s, "sub").xattrs[0].Value = []byte("3") },
		"attribute's name":  func(s *tree) { find(s, "sub").xattrs[0].Name = "user.c" },
		"attribute more":    func(s *tree) { find(s, "empty").xattrs = []Xattr{{"user.a", nil}} },
		"name": func(s *tree) {
			r := s.inodes[meta.RootIno]
			r.entries["Empty"] = r.entries["empty"]
			r.order[slices.Index(r.order, "empty")] = "Empty"
		},
		"an entry less": func(s *tree) { r := s.inodes[meta.RootIno]; r.order = r.order[1:] },
		"no junction":   func(s *tree) { r := s.inodes[meta.RootIno]; r.order = r.order[:len(r.order)-1] },
		"root's mode":   func(s *tree) { s.inodes[meta.RootIno].Mode ^= 0o010 },
		"moved a level up": func(s *tree) {
			r := s.inodes[meta.RootIno]
			r.order = append(r.order, "small")
			r.entries["small"] = find(s, "sub").entries["small"]
		},
	}
	seen := map[Sum]string{base: "the sample"}
	for _, what := range slices.Sorted(maps.Keys(differs)) {
		s := sample()
		differs[what](s)
		got := walk(t, s, nil)
		if other, ok := seen[got]; ok {
			t.Errorf("%s: the same digest as %s", what, other)
		}
		seen[got] = what
	}
	same := map[string]func(s *tree){
		"times":         func(s *tree) { find(s, "empty").Mtime, find(s, "sub").Ctime = 5, 6 },
		"order":         func(s *tree) { slices.Reverse(s.inodes[meta.RootIno].order) },
		"xattrs' order": func(s *tree) { slices.Reverse(find(s, "sub").xattrs) },
		"link counts":   func(s *tree) { find(s, "sub", "big").Nlink = 9 },
		"other volume":  func(s *tree) { s.inodes[meta.RootIno].volumes["other"] = 8 },
		"places": func(s *tree) {
			f := find(s, "sub", "big")
			f.extents = nil
			for off := uint64(0); off < uint64(len(f.data)); off += 100_000 { // zeros of the hole written
				f.extents = append(f.extents, meta.Extent{Off: off, Len: min(100_000, uint64(len(f.data))-off), Chunk: meta.ChunkID{Counter: 1 + off}})
			}
		},
		"preallocated zeros": func(s *tree) {
			f := find(s, "sub", "big")
			f.extents = slices.Insert(f.extents, 1, meta.Extent{Off: BlockSize, Len: BlockSize})
		},
	}
	for what, change := range same {
		s := sample()
		change(s)
		if got := walk(t, s, nil); got != base {
			t.Errorf("%s changed the digest", what)
		}
	}
}

type remembered map[Sum]Sum

func (r remembered) Get(places Sum) (Sum, bool) { b, ok := r[places]; return b, ok }
func (r remembered) Put(places, block Sum)      { r[places] = block }

// Bytes read for one snapshot are not read again for the next; bytes in another place are.
func TestKnownBlocksAreNotReadAgain(t *testing.T) {
	known := remembered{}
	s := sample()
	base := walk(t, s, known)
	if s.reads != 3 {
		t.Fatalf("%d blocks were read, the sample has 2 and an inline one", s.reads)
	}
	s = sample()
	if got := walk(t, s, known); got != base || s.reads != 1 {
		t.Fatalf("%d blocks were read again (one is inline)", s.reads)
	}
	s = sample()
	for _, f := range s.inodes {
		if len(f.extents) > 1 {
			f.extents[1].Chunk.Counter++ // rewritten
			f.data[2*BlockSize] ^= 1
		}
	}
	if got := walk(t, s, known); got == base || s.reads != 2 {
		t.Fatalf("after a rewrite %d blocks were read", s.reads)
	}
}

func BenchmarkBlock(b *testing.B) {
	p := bytesOf(1, BlockSize)
	b.SetBytes(BlockSize)
	for b.Loop() {
		Block(p)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(Block(nil).String())
	f.Add("sha256-tree-1:")
	f.Fuzz(func(t *testing.T, text string) {
		if s, err := Parse(text); err == nil && fmt.Sprint(s) != text && len(text) != len(s.String()) {
			t.Fatalf("%q gives %s", text, s)
		}
	})
}
