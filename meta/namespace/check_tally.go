package namespace

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"slices"

	"penstock.io/penstock/meta"
)

//
// Check counts the bytes that only snapshots hold in another way than tally.go, which follows
// places through all generations. Check goes version by version, and compares a version with
// the versions seen by the next snapshot, and not by the snapshot that sees the version.

// seenExtent is a version of an extent, and the first and last counted snapshots that see it,
// as indexes of c.tally.gens; len(gens) stands for the live tree.
type seenExtent struct {
	chunk       [16]byte
	lo, hi, at  uint64
	first, last int
}

type checkedTally struct {
	gens   []uint32 // counted snapshots, ascending
	sum    uint64
	ino    uint64
	all    []seenExtent
	inline []seenInline
}

type seenInline struct {
	data        []byte
	first, last int
}

// counts tells whether the volume counts at all.
func (c *checker) counts() bool { return c.vol != nil && c.vol.tally != 0 }

// seenBy returns the snapshots that see a version of generation gen, which the generation
// newer superseded (0: none).
func (y *checkedTally) seenBy(gen, newer uint32) (first, last int) {
	first, _ = slices.BinarySearch(y.gens, gen)
	if last = len(y.gens); newer != 0 {
		last, _ = slices.BinarySearch(y.gens, newer)
		last--
	}
	return first, last
}

// tallyExtent handles a version of an extent. Versions come in the order of inodes.
func (c *checker) tallyExtent(ino uint64, e seenExtent, gen, newer uint32) {
	y := &c.tally
	if ino != y.ino {
		c.tallyInode()
		y.ino = ino
	}
	if e.first, e.last = y.seenBy(gen, newer); e.first <= e.last {
		y.all = append(y.all, e)
	}
}

// tallyInode counts the extents of a completely visited inode.
func (c *checker) tallyInode() {
	y := &c.tally
	n := len(y.gens)
	slices.SortFunc(y.all, func(a, b seenExtent) int { return cmp.Or(cmp.Compare(a.first, b.first), cmp.Compare(a.lo, b.lo)) })
	for _, v := range y.all {
		if v.last == n {
			continue
		}
		y.sum += v.hi - v.lo
		// Extents that begin with the next snapshot don't overlap each other.
		i, _ := slices.BinarySearchFunc(y.all, v, func(w, v seenExtent) int {
			if w.first < v.last+1 || w.first == v.last+1 && w.hi <= v.lo {
				return -1
			}
			return 1
		})
		for ; i < len(y.all) && y.all[i].first == v.last+1 && y.all[i].lo < v.hi; i++ {
			w := &y.all[i]
			if w.chunk == v.chunk && (v.chunk == [16]byte{} || w.at-w.lo == v.at-v.lo) {
				y.sum -= min(v.hi, w.hi) - max(v.lo, w.lo)
			}
		}
	}
	y.all = y.all[:0]
}

// tallyRecord handles a version of an inode's record. The versions of a record come newest
// first.
func (c *checker) tallyRecord(k, v []byte, gen, newer uint32) {
	if len(k) != 13 {
		return
	}
	y := &c.tally
	if newer == 0 {
		c.tallyInline()
	}
	rec, problem := readInode(v)
	if problem != "" || rec.mode>>12 != 8 || rec.flags&uint32(meta.FlagInline) == 0 {
		return
	}
	first, last := y.seenBy(gen, newer)
	if first <= last {
		y.inline = append(y.inline, seenInline{bytes.Clone(rec.bytes), first, last})
	}
}

// tallyInline counts the inline bytes of a completely visited inode.
func (c *checker) tallyInline() {
	y := &c.tally
	for i, v := range y.inline {
		if v.last == len(y.gens) {
			continue
		}
		y.sum += uint64(len(v.data))
		if i == 0 || y.inline[i-1].first != v.last+1 {
			continue
		}
		next := y.inline[i-1].data
		for x := 0; x < len(v.data) && x < len(next); x++ {
			if v.data[x] == next[x] {
				y.sum--
			}
		}
	}
	y.inline = y.inline[:0]
}

// compareTally compares the count with the volume's record.
func (c *checker) compareTally() {
	if !c.counts() {
		return
	}
	c.tallyInode()
	c.tallyInline()
	youngest := uint32(0)
	if n := len(c.tally.gens); n > 0 {
		youngest = c.tally.gens[n-1]
	}
	if c.vol.tallyRef != uint64(youngest) {
		c.bad([]byte{'v'}, "the youngest snapshot that is counted is of generation %d, the record says %d", youngest, c.vol.tallyRef)
	}
	is, says := c.tally.sum, uint64(c.vol.tallied)
	if c.vol.tally == 2 && says != is || c.vol.tally == 3 && says < is {
		c.bad([]byte{'v'}, "snapshots alone hold %d bytes, %d are counted (mode %d)", is, says, c.vol.tally)
	}
}

// tallyWords decodes the tally in a volume's record.
func (r *wireVolume) tallyWords(w *walker) (problem string) {
	r.tally = w.u8()
	z := w.n()
	r.tallied = int64(z / 2)
	if z%2 == 1 {
		r.tallied = -r.tallied - 1
	}
	r.tallyRef = w.n()
	w.n() // epoch
	if r.tally < 1 || r.tally > 4 || r.tallyRef > r.lastSnap || r.tally != 1 && r.tally != 4 && r.tallied < 0 {
		return "what snapshots hold is counted in a way that is not known, or is less than nothing"
	}
	return ""
}

// countedGen notes a snapshot's generation if the snapshot counts.
func (c *checker) countedGen(k []byte, state byte) {
	if state == 1 || state == 2 {
		c.tally.gens = append(c.tally.gens, binary.BigEndian.Uint32(k[1:]))
	}
}
