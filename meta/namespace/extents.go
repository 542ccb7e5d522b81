package namespace

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"penstock.io/penstock/meta"
)

const (
	// reapBatch bounds the extents that an operation removes for a removed or truncated file;
	// the rest waits in the reap queue.
	reapBatch = 1000
	// maxEdit bounds the extents that an operation reads and writes otherwise. At some 60 bytes
	// an extent, the effects stay well below the bound of a journal entry.
	maxEdit = 8192
)

// span is a range of file offsets, lo <= x < hi.
type span struct{ lo, hi uint64 }

// foundEnds are the versions of keys seen by a scan of an inode's extents. The versions stay
// right until the end of the operation, because the store does not change.
type foundEnds struct {
	ino    meta.Ino
	lo, hi uint64     // every key of an end above lo and up to hi was met,
	at     []foundEnd // the keys seen, in order
}

type foundEnd struct {
	end uint64
	gen uint32 // of the newest version, also of a tombstone
}

// maxEnds bounds foundEnds.
const maxEnds = 64

func (f *foundEnds) add(end uint64, gen uint32) {
	if len(f.at) < maxEnds {
		f.at = append(f.at, foundEnd{end, gen})
		f.hi = end
	}
}

// under returns the generation of the newest version of an extent's key (0: no version), and
// whether the generation is known.
func (f *foundEnds) under(ino meta.Ino, end uint64) (gen uint32, known bool) {
	if ino != f.ino || end <= f.lo || end > f.hi {
		return 0, false
	}
	if i, ok := slices.BinarySearchFunc(f.at, end, func(e foundEnd, end uint64) int { return cmp.Compare(e.end, end) }); ok {
		gen = f.at[i].gen
	}
	return gen, true
}

// extentEdits are the changes of files' extents, within an operation on the namespace.
type extentEdits struct{ *tx }

func (t *tx) extents() extentEdits { return extentEdits{t} }

// scanExtents visits the extents of an inode that end after off, in order.
func (t extentEdits) scanExtents(ino meta.Ino, off uint64, fn func(e extent) bool) error {
	if off == math.MaxUint64 {
		return nil
	}
	lo := appendExtentBase(nil, ino, off+1)
	hi := after(lo[:9])
	remember := t.gen != firstGen && t.gen == t.vol.gen
	if remember {
		t.ends = foundEnds{ino: ino, lo: off, hi: off, at: t.ends.at[:0]}
	}
	stopped := false
	err := t.scanAll(lo, hi, func(base, val []byte, gen uint32) (bool, error) {
		if len(base) != 17 {
			return false, fail("extent", meta.Corrupt, fmt.Sprintf("key %x", base))
		}
		e, err := decodeExtent(val, binary.BigEndian.Uint64(base[9:]))
		if err != nil {
			return false, err
		}
		if remember {
			t.ends.add(e.End(), gen)
		}
		stopped = !fn(extent{e, gen})
		return !stopped, nil
	}, func(base []byte, gen uint32) {
		if remember && len(base) == 17 {
			t.ends.add(binary.BigEndian.Uint64(base[9:]), gen)
		}
	})
	if err == nil && remember && !stopped && len(t.ends.at) < maxEnds {
		t.ends.hi = math.MaxUint64
	}
	return err
}

// scanLive is scanExtents without the unreaped extents of a truncation.
func (t extentEdits) scanLive(in *inode, off uint64, fn func(e extent) bool) error {
	return t.scanExtents(in.Ino, off, func(e extent) bool {
		if in.reap && e.End() > in.reapFrom {
			return false
		}
		return fn(e)
	})
}

// edit removes everything in the ranges cuts of a file and puts the extents news into the
// ranges. cuts are sorted and don't overlap; each extent of news, also sorted, lies within one
// cut. Adjacent extents that continue each other in the same chunk become a single extent. edit
// updates chunk counts and the inode's Blocks.
//
// edit reads the store once for each group of cuts that an extent connects, so the cost of many
// small writes to a large file depends on the touched extents, not on extents between.
func (t extentEdits) edit(in *inode, cuts []span, news []meta.Extent) error {
	total := 0
	for len(cuts) > 0 {
		lo, hi := cuts[0].lo, cuts[0].hi // of the cuts in this group
		reach := hi                      // of the cuts and the touched extents
		n := 1
		join := func() {
			for n < len(cuts) && cuts[n].lo <= reach {
				hi = cuts[n].hi
				reach = max(reach, hi)
				n++
			}
		}
		join()
		var old []extent
		from := lo
		if from > 0 {
			from-- // the first new extent may continue an extent that ends at lo
		}
		err := t.scanExtents(in.Ino, from, func(e extent) bool {
			join()
			if e.Off > hi || total >= maxEdit {
				return false
			}
			old = append(old, e)
			total++
			reach = max(reach, e.End())
			return true
		})
		if err != nil {
			return err
		}
		join()
		if total >= maxEdit || len(news) > maxEdit {
			return fail("edit extents", meta.ResourceExceeded, fmt.Sprintf("more than %d extents of inode %d", maxEdit, in.Ino))
		}
		k := 0
		for k < len(news) && news[k].Off < cuts[n-1].hi {
			k++
		}
		fresh := splice(old, cuts[:n], news[:k])
		if err := t.replace(in, old, fresh); err != nil {
			return err
		}
		cuts, news = cuts[n:], news[k:]
	}
	return nil
}

// splice computes old without cuts, with news, merged.
func splice(old []extent, cuts []span, news []meta.Extent) []meta.Extent {
	out := make([]meta.Extent, 0, len(old)+len(news)+2)
	for _, o := range old {
		out = appendOutside(out, o.Extent, cuts)
	}
	if len(news) > 0 {
		out = append(out, news...)
		slices.SortFunc(out, func(a, b meta.Extent) int {
			if a.Off < b.Off {
				return -1
			}
			return 1
		})
	}
	return merge(out)
}

// appendOutside appends the parts of e outside all cuts.
func appendOutside(out []meta.Extent, e meta.Extent, cuts []span) []meta.Extent {
	for _, c := range cuts {
		if c.hi <= e.Off {
			continue
		}
		if c.lo >= e.End() {
			break
		}
		if c.lo > e.Off {
			out = append(out, sub(e, e.Off, c.lo))
		}
		if c.hi >= e.End() {
			return out
		}
		e = sub(e, c.hi, e.End())
	}
	return append(out, e)
}

// sub is the part of e between two file offsets.
func sub(e meta.Extent, lo, hi uint64) meta.Extent {
	if !e.Chunk.IsZero() {
		e.ChunkOff += lo - e.Off
	}
	if hi != e.End() {
		e.OpenEnded = false
	}
	e.Off, e.Len = lo, hi-lo
	return e
}

// merge joins extents that continue each other. merge reuses l.
func merge(l []meta.Extent) []meta.Extent {
	out := l[:0]
	for _, e := range l {
		if n := len(out) - 1; n >= 0 {
			p := &out[n]
			if p.End() == e.Off && p.Chunk == e.Chunk && !p.OpenEnded && !e.OpenEnded &&
				(e.Chunk.IsZero() || p.ChunkOff+p.Len == e.ChunkOff) {
				p.Len += e.Len
				continue
			}
		}
		out = append(out, e)
	}
	return out
}

// replace writes the difference between two sorted lists of extents of one range of a file:
// keys, chunk counts, Blocks.
func (t extentEdits) replace(in *inode, old []extent, fresh []meta.Extent) error {
	if err := t.tallyExtents(in.Ino, old, fresh); err != nil {
		return err
	}
	i, j := 0, 0
	for i < len(old) || j < len(fresh) {
		switch {
		case j == len(fresh) || i < len(old) && old[i].End() < fresh[j].End():
			if err := t.uncount(in, old[i]); err != nil {
				return err
			}
			s := t.mark()
			t.buf = appendExtentBase(t.buf, in.Ino, old[i].End())
			if err := t.dropFrom(s, old[i].gen); err != nil {
				return err
			}
			i++
		case i < len(old) && old[i].End() == fresh[j].End():
			if old[i].Extent != fresh[j] {
				if err := t.uncount(in, old[i]); err != nil {
					return err
				}
				if err := t.putExtent(in, fresh[j]); err != nil {
					return err
				}
			}
			i++
			j++
		default:
			if err := t.putExtent(in, fresh[j]); err != nil {
				return err
			}
			j++
		}
	}
	return nil
}

// putExtent writes an extent and counts it.
func (t extentEdits) putExtent(in *inode, e meta.Extent) error {
	in.Blocks += e.Len
	if !e.Chunk.IsZero() && !t.clones().foreign(e.Chunk) {
		c, err := t.chunk(e.Chunk)
		if err != nil {
			return err
		}
		if c.State == meta.ChunkDeleting {
			return fail("extent", meta.NoSuchChunk, e.Chunk.String())
		}
		if e.OpenEnded {
			if c.State != meta.ChunkOpen || !c.Own || c.owner != 0 && c.owner != in.Ino {
				return fail("extent", meta.Invalid, "an open-ended extent needs an open chunk of its own: "+e.Chunk.String())
			}
			c.owner = in.Ino
			in.openOff = e.Off
			in.Flags |= meta.FlagOpenEnded
		} else {
			c.Live += e.Len
		}
	}
	s := t.mark()
	t.buf = appendExtentBase(t.buf, in.Ino, e.End())
	if gen, known := t.ends.under(in.Ino, e.End()); known {
		s = t.renewFrom(s, gen)
	} else {
		var err error
		if s, err = t.renew(s); err != nil {
			return err
		}
	}
	t.buf = putGen(t.buf, t.gen)
	v := len(t.buf)
	t.buf = appendExtent(t.buf, e)
	t.putAt(s, v)
	return nil
}

// uncount subtracts an extent's bytes from the inode and the chunk. An extent seen by a
// snapshot stays in the store, so the chunk keeps the count.
func (t extentEdits) uncount(in *inode, e extent) error {
	in.Blocks -= e.Len
	if e.OpenEnded {
		in.Flags &^= meta.FlagOpenEnded
		in.openOff = 0
	}
	if e.Chunk.IsZero() || t.clones().foreign(e.Chunk) {
		return nil
	}
	c, err := t.chunk(e.Chunk)
	if err != nil {
		return err
	}
	if e.OpenEnded {
		c.owner = 0
		return nil
	}
	if e.gen <= t.vol.lastSnap {
		t.vol.buried += e.Len
		return nil
	}
	if c.Live < e.Len {
		return fail("extent", meta.Corrupt, fmt.Sprintf("chunk %v counts %d live bytes, an extent of inode %d holds %d", e.Chunk, c.Live, in.Ino, e.Len))
	}
	c.Live -= e.Len
	return nil
}

// cutTail removes extents beyond a file offset, as many as the operation's budget allows, and
// returns whether none is left. cutTail shortens an extent across the offset.
func (t extentEdits) cutTail(in *inode, from uint64) (all bool, err error) {
	var old []extent
	all = true
	err = t.scanExtents(in.Ino, from, func(e extent) bool {
		if len(old) >= t.budget {
			all = false
			return false
		}
		old = append(old, e)
		return true
	})
	if err != nil || len(old) == 0 {
		return all, err
	}
	t.budget -= len(old)
	return all, t.replace(in, old, appendOutside(nil, old[0].Extent, []span{{from, math.MaxUint64}}))
}

// truncateTo drops the file's bytes beyond an offset. Extents beyond the step's budget are left
// to Reap.
func (t extentEdits) truncateTo(in *inode, size uint64) error {
	all, err := t.cutTail(in, size)
	if err != nil {
		return err
	}
	if in.reap {
		in.reapFrom, all = min(in.reapFrom, size), true
	}
	if uint64(len(in.data)) > size && in.Flags&meta.FlagInline != 0 {
		in.Blocks -= uint64(len(in.data)) - size
		in.data = in.data[:size]
		if size == 0 {
			in.data = nil
			in.Flags &^= meta.FlagInline
		}
	}
	if !all {
		t.queueReap(in, size)
	}
	return nil
}

func (t extentEdits) queueReap(in *inode, from uint64) {
	in.reap, in.reapFrom = true, from
	s := t.mark()
	t.buf = appendReapKey(t.buf, in.Ino)
	t.putMarker(s)
}

// remove removes an inode without names and holders: at once if the extents fit the step's
// budget, else through the reap queue.
func (t extentEdits) remove(in *inode) error {
	in.dirty = true
	left := in.Flags&meta.FlagHasXattrs != 0 && t.budget <= 0
	if !left {
		n, err := t.xattrs().dropXattrs(in)
		if err != nil {
			return err
		}
		t.budget -= n
	}
	if in.reap {
		in.reapFrom = 0
		return nil
	}
	// If all bytes lie in the record, as in most small files, no extents need a scan.
	all := in.Flags&meta.FlagInline != 0 && in.Flags&meta.FlagOpenEnded == 0 && in.Blocks == uint64(len(in.data))
	if in.IsRegular() && in.Blocks > 0 && !all {
		if err := t.truncateTo(in, 0); err != nil || in.reap {
			return err
		}
	}
	if left {
		t.queueReap(in, 0)
		return nil
	}
	return in.vanish()
}

// vanish marks an inode as gone. Blocks still counted then are damage.
func (in *inode) vanish() error {
	if in.Flags&meta.FlagInline != 0 {
		in.Blocks -= uint64(len(in.data))
		in.data, in.Flags = nil, in.Flags&^meta.FlagInline
	}
	if in.Blocks != 0 {
		return fail("remove", meta.Corrupt, fmt.Sprintf("inode %d counts %d bytes more than its extents hold", in.Ino, in.Blocks))
	}
	in.gone = true
	return nil
}

func (t extentEdits) reap(op *meta.Reap, res *meta.Result) error {
	in, err := t.load(op.Ino)
	if meta.KindOf(err) == meta.Stale {
		res.EOF = true
		return nil
	}
	if err != nil {
		return err
	}
	if !in.reap {
		res.EOF = true
		return nil
	}
	if op.Max > 0 && op.Max < reapBatch {
		t.budget = int(op.Max)
	}
	all, err := t.cutTail(in, in.reapFrom)
	if err != nil {
		return err
	}
	in.dirty = true
	res.EOF = all
	if all {
		in.reap, in.reapFrom = false, 0
		s := t.mark()
		t.buf = appendReapKey(t.buf, in.Ino)
		t.deleteAt(s)
		if in.dead() {
			if _, err := t.xattrs().dropXattrs(in); err != nil {
				return err
			}
			return in.vanish()
		}
	}
	res.Attr = in.Attr
	return nil
}
