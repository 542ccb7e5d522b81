package namespace

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"penstock.io/penstock/meta"
)

//
// The bytes that snapshots hold, counted exactly. A byte of a file is identified by inode,
// offset and place: the position in a chunk. Preallocated space has the same place everywhere;
// equal bytes in an inode's record have equal places. All generations of the live tree and of
// snapshots that map an identical byte hold a single byte. Without the live tree among the
// holders, only snapshots hold the byte.
//
// So a byte of two snapshots counts once. A byte mapped, cut off and mapped again is the same
// byte, even if the bounds of extents changed meanwhile. A byte of a chunk mapped by two files,
// or twice by the same file, is two bytes, as in Blocks. Truncating and unlinking moves bytes
// from the live tree to the snapshots and never increases the sum of both; overwriting a byte
// of a snapshot increases the sum by the byte; deleting snapshots never increases the sum.
//
// The base of a clone is not a snapshot of the clone: bytes of the base alone belong to the
// origin.

// Held is the number of bytes that snapshots hold besides the live tree.
type Held struct {
	Live  uint64 // bytes of the live tree, as in Usage
	Alone uint64 // bytes that only snapshots hold
	Going uint64 // of Alone, bytes that only snapshots under deletion hold
	Freed uint64 // of Alone, bytes freed by deleting all the snapshots in question
	Each  []HeldBy
}

// HeldBy is the part of one snapshot.
type HeldBy struct {
	meta.Snapshot
	Alone uint64 // bytes without another holder: deleting the snapshot frees the bytes
}

// piece is a range of a file whose bytes follow each other in one place or, with data, are in
// the inode's record, and the holders of the range: the readable snapshots number first to
// last, in order; last = the number of snapshots stands for the live tree. first > last: no
// holder.
type piece struct {
	chunk       meta.ChunkID // zero: preallocated
	shift       uint64       // added to an offset in the file, gives the offset in the chunk; wraps around
	lo, hi      uint64
	data        []byte
	first, last int
}

// doubt is a piece without holder, or held by the base of a clone only.
type doubt struct {
	piece
	key []byte // of the version
}

// holding is the state of the count.
type holding struct {
	Held
	t      tx
	gens   []uint32 // of the readable snapshots
	asked  []int    // how many of the first so many were asked about
	origin uint32   // generation of a clone's base; 0: not a clone
	// The fields below belong to one inode.
	pieces  []piece
	records []piece // with data
	doubts  []doubt
}

// ReadHeld counts the bytes that snapshots hold, and the bytes freed by deleting all snapshots
// in drop. ReadHeld reads the versions superseded since the oldest snapshot, and all extents of
// files changed since. Memory: about 90 bytes for each extent of a file, twice as much while
// the extents are collected, and 8 bytes for each changed file. Errors: NoSuchSnapshot.
func ReadHeld(r Reader, drop []meta.Generation) (*Held, error) {
	h := &holding{t: tx{view: view{r: r}}}
	if err := h.t.begin(); err != nil {
		return nil, err
	}
	h.t.view.base = h.t.vol.base
	h.Live = h.t.vol.bytes
	all, err := h.t.snaps().snapshots()
	if err != nil {
		return nil, err
	}
	h.asked = []int{0}
	n := 0
	for _, s := range all {
		switch s.state {
		case snapshotBase:
			h.origin = s.gen
		case snapshotLive:
			h.gens = append(h.gens, s.gen)
			if slices.Contains(drop, meta.Generation(s.gen)) {
				n++
			}
			h.asked = append(h.asked, n)
			h.Each = append(h.Each, HeldBy{Snapshot: s.told()})
		}
	}
	for _, at := range drop {
		if _, ok := slices.BinarySearch(h.gens, uint32(at)); !ok {
			return nil, fail("snapshot", meta.NoSuchSnapshot, fmt.Sprintf("generation %d", at))
		}
	}
	inos, err := h.superseded()
	if err != nil {
		return nil, err
	}
	for _, ino := range inos {
		if err := h.inode(ino); err != nil {
			return nil, err
		}
	}
	return &h.Held, nil
}

// superseded lists the inodes of which a version was superseded. Of others everything
// is live.
func (h *holding) superseded() (all []meta.Ino, err error) {
	err = h.t.r.Scan([]byte{prefixBuried}, []byte{prefixBuried + 1}, func(k, _ []byte) bool {
		if len(k) < 5+9 || k[5] != prefixInode && k[5] != prefixExtent {
			return true
		}
		ino := meta.Ino(binary.BigEndian.Uint64(k[6:]))
		if n := len(all); n == 0 || all[n-1] != ino {
			all = append(all, ino)
		}
		return true
	})
	slices.Sort(all)
	return slices.Compact(all), err
}

// inode counts the bytes of one inode.
func (h *holding) inode(ino meta.Ino) error {
	if err := h.read(ino); err != nil {
		return err
	}
	h.eachLine(h.line)
	h.inline()
	return nil
}

// read gathers the versions of an inode's record and extents.
func (h *holding) read(ino meta.Ino) error {
	h.pieces, h.records, h.doubts = h.pieces[:0], h.records[:0], h.doubts[:0]
	err := h.versions(appendInodeBase(nil, ino), func(base, val []byte, gen, newer uint32) error {
		in := &inode{}
		if err := decodeInode(val, ino, in); err != nil || !in.IsRegular() || in.Flags&meta.FlagInline == 0 {
			return err
		}
		h.found(piece{data: bytes.Clone(in.data)}, base, gen, newer)
		return nil
	})
	if err != nil {
		return err
	}
	if err := h.versions(appendExtentBase(nil, ino, 0)[:9], func(base, val []byte, gen, newer uint32) error {
		if len(base) != 17 {
			return fail("extent", meta.Corrupt, fmt.Sprintf("key %x", base))
		}
		e, err := decodeExtent(val, binary.BigEndian.Uint64(base[9:]))
		if err != nil {
			return err
		}
		p := piece{chunk: e.Chunk, lo: e.Off, hi: e.End()}
		if !e.Chunk.IsZero() {
			p.shift = e.ChunkOff - e.Off
		}
		h.found(p, base, gen, newer)
		return nil
	}); err != nil {
		return err
	}
	for _, d := range h.doubts {
		_, origins, err := h.t.r.Get(appendBuriedKey(nil, h.origin, d.key))
		if err != nil {
			return err
		}
		if !origins {
			h.add(d.piece)
		}
	}
	return nil
}

// eachLine visits the extents read so far, a line of places at a time.
func (h *holding) eachLine(fn func(l []piece)) {
	slices.SortFunc(h.pieces, func(a, b piece) int {
		return cmp.Or(a.chunk.Compare(b.chunk), cmp.Compare(a.shift, b.shift), cmp.Compare(a.lo, b.lo))
	})
	for l := h.pieces; len(l) > 0; {
		n := 1
		for n < len(l) && l[n].chunk == l[0].chunk && l[n].shift == l[0].shift {
			n++
		}
		fn(l[:n])
		l = l[n:]
	}
}

// versions visits all versions of the keys with a prefix, newest first, with the superseding
// generation (0: none). Tombstones are not visited, but do supersede.
func (h *holding) versions(prefix []byte, fn func(base, val []byte, gen, newer uint32) error) error {
	var last []byte
	var newer uint32
	var inner error
	under := false // the version of a clone's base was seen
	err := h.t.r.Scan(prefix, after(prefix), func(k, v []byte) bool {
		if len(k) < 1+8+genLen {
			inner = fail("scan", meta.Corrupt, fmt.Sprintf("key %x", k))
			return false
		}
		base, gen := k[:len(k)-genLen], ^binary.BigEndian.Uint32(k[len(k)-genLen:])
		if !bytes.Equal(last, base) {
			last, newer, under = append(last[:0], base...), 0, false
		}
		if under || h.t.base.hides(gen) {
			return true
		}
		under = h.t.base.below(gen)
		if !isTombstone(v) {
			inner = fn(base, v, gen, newer)
		}
		newer = gen
		return inner == nil
	})
	if inner != nil {
		return inner
	}
	return err
}

// found handles a version. A version that no readable snapshot sees belongs to snapshots under
// deletion, unless only a clone's base has the version. The list with which the version is
// buried decides. Generations can't: some versions of a snapshot under deletion are gone, and
// the snapshot would seem to see the versions below the removed versions.
func (h *holding) found(p piece, base []byte, gen, newer uint32) {
	p.first, _ = slices.BinarySearch(h.gens, gen)
	if p.last = len(h.gens); newer != 0 {
		p.last, _ = slices.BinarySearch(h.gens, newer)
		p.last--
	}
	if p.first > p.last && gen <= h.origin {
		h.doubts = append(h.doubts, doubt{p, putGen(bytes.Clone(base), gen)})
		return
	}
	h.add(p)
}

func (h *holding) add(p piece) {
	if p.data != nil {
		h.records = append(h.records, p)
		return
	}
	h.pieces = append(h.pieces, p)
}

// line counts the bytes of a line of places with sorted pieces.
func (h *holding) line(l []piece) {
	sweep(l, func(in []piece, n uint64) {
		s := h.nobody()
		for _, p := range in {
			s.join(h, p.first, p.last)
		}
		h.count(&s, n)
	})
}

// sweep visits the ranges of a line of places, with the pieces over each range and the range's
// length.
func sweep(l []piece, fn func(in []piece, n uint64)) {
	var in []piece // pieces over at, at most one for each holder
	for at := uint64(0); len(l) > 0 || len(in) > 0; {
		if len(in) == 0 {
			at = l[0].lo
		}
		for len(l) > 0 && l[0].lo == at {
			in, l = append(in, l[0]), l[1:]
		}
		to := uint64(math.MaxUint64)
		if len(l) > 0 {
			to = l[0].lo
		}
		for _, p := range in {
			to = min(to, p.hi)
		}
		fn(in, to-at)
		at = to
		in = slices.DeleteFunc(in, func(p piece) bool { return p.hi <= at })
	}
}

// inline counts inline bytes.
func (h *holding) inline() {
	if len(h.records) < 2 {
		for _, r := range h.records {
			s := h.nobody()
			s.join(h, r.first, r.last)
			h.count(&s, uint64(len(r.data)))
		}
		return
	}
	most := 0
	for _, r := range h.records {
		most = max(most, len(r.data))
	}
	var by [256]sharers
	var met []byte
	for x := range most {
		met = met[:0]
		for _, r := range h.records {
			if x >= len(r.data) {
				continue
			}
			b := r.data[x]
			if !bytes.Contains(met, []byte{b}) {
				met = append(met, b)
				by[b] = h.nobody()
			}
			by[b].join(h, r.first, r.last)
		}
		for _, b := range met {
			h.count(&by[b], 1)
		}
	}
}

// sharers are the holders of a byte.
type sharers struct {
	first, last int
	asked       bool // all the snapshots are in question
}

func (h *holding) nobody() sharers { return sharers{math.MaxInt, -1, true} }

func (s *sharers) join(h *holding, first, last int) {
	if first > last {
		return
	}
	s.first, s.last = min(s.first, first), max(s.last, last)
	s.asked = s.asked && last < len(h.gens) && h.asked[last+1]-h.asked[first] == last-first+1
}

// count records n bytes with the same holders.
func (h *holding) count(s *sharers, n uint64) {
	if s.last == len(h.gens) {
		return // live
	}
	h.Alone += n
	switch {
	case s.last < 0:
		h.Going += n
		return
	case s.first == s.last:
		h.Each[s.first].Alone += n
	}
	if s.asked {
		h.Freed += n
	}
}
