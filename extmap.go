package penstock

import (
	"slices"
	"sync/atomic"

	"penstock.io/penstock/meta"
)

// chunkRef is the place of a chunk, shared by all segments in the chunk. A new place replaces
// the old one when the chunk is sealed or its replicas move.
type chunkRef struct {
	place atomic.Pointer[meta.ChunkPlace]
}

// segment maps bytes of a file to a blob in memory (b), to a chunk (ref) or, with neither, to
// preallocated zeros. A range without a segment is a hole.
type segment struct {
	off, n uint64
	b      *blob
	ref    *chunkRef
	pos    uint64 // in b.data or in the chunk
}

func (s segment) end() uint64 { return s.off + s.n }

// cut gives the part of s within [lo, hi), which must not be empty.
func (s segment) cut(lo, hi uint64) segment {
	if lo > s.off {
		if s.b != nil || s.ref != nil {
			s.pos += lo - s.off
		}
		s.n -= lo - s.off
		s.off = lo
	}
	if s.end() > hi {
		s.n = hi - s.off
	}
	return s
}

// joins reports whether t continues s in file and chunk.
func (s segment) joins(t segment) bool {
	if s.b != nil || t.b != nil || s.end() != t.off || s.ref != t.ref {
		return false
	}
	return s.ref == nil || s.pos+s.n == t.pos
}

// pageMax bounds a page of segments, so that a change of one segment among a million moves
// only a few kilobytes.
const pageMax = 256

// extmap is the map of a file: segments in file order, without overlap, in
// pages of at most pageMax. Nearly all files have one segment.
type extmap struct {
	pages [][]segment
}

// page returns the page that may contain the byte at off: the last page that starts at or
// before off, else the first page.
func (m *extmap) page(off uint64) int {
	lo, hi := 0, len(m.pages)
	for lo < hi {
		mid := (lo + hi) / 2
		if m.pages[mid][0].off <= off {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return max(lo-1, 0)
}

// find returns the position of the first segment that ends after off.
func (m *extmap) find(off uint64) (page, i int) {
	if len(m.pages) == 0 {
		return 0, 0
	}
	page = m.page(off)
	i, _ = slices.BinarySearchFunc(m.pages[page], off, func(s segment, off uint64) int {
		if s.end() <= off {
			return -1
		}
		return 1
	})
	if i == len(m.pages[page]) {
		return page + 1, 0
	}
	return page, i
}

// each calls fn with a pointer to every segment that overlaps [lo, hi), in order, until fn
// returns false. fn may change the place of a segment's bytes, but not the range.
func (m *extmap) each(lo, hi uint64, fn func(s *segment) bool) {
	p, i := m.find(lo)
	for ; p < len(m.pages); p, i = p+1, 0 {
		for ; i < len(m.pages[p]); i++ {
			s := &m.pages[p][i]
			if s.off >= hi || !fn(s) {
				return
			}
		}
	}
}

// before returns the segment that ends exactly at off.
func (m *extmap) before(off uint64) (*segment, bool) {
	if off == 0 || len(m.pages) == 0 {
		return nil, false
	}
	p, i := m.find(off - 1)
	if p >= len(m.pages) {
		return nil, false
	}
	s := &m.pages[p][i]
	if s.end() != off || s.off >= off {
		return nil, false
	}
	return s, true
}

// replace replaces everything in [lo, hi) by segs (in order, within [lo, hi)). It maintains
// each blob's count of segments, and calls free for a blob without segments.
func (m *extmap) replace(lo, hi uint64, segs []segment, free func(*blob)) {
	for i := range segs {
		if segs[i].b != nil {
			segs[i].b.refs++
		}
	}
	if len(m.pages) == 0 {
		if len(segs) > 0 {
			m.pages = split(nil, slices.Clone(segs))
		}
		return
	}
	if p, i := m.find(lo); p >= len(m.pages) { // after the end, as most writes are
		for _, s := range segs {
			k := len(m.pages) - 1
			if len(m.pages[k]) < pageMax {
				m.pages[k] = append(m.pages[k], s)
			} else {
				m.pages = append(m.pages, []segment{s})
			}
		}
		return
	} else if len(segs) == 0 && m.pages[p][i].off >= hi {
		return
	}
	first := m.page(lo)
	last := first
	for last+1 < len(m.pages) && m.pages[last+1][0].off < hi {
		last++
	}
	n := len(segs) + 2
	for p := first; p <= last; p++ {
		n += len(m.pages[p])
	}
	out := make([]segment, 0, n)
	placed := false
	place := func() {
		if !placed {
			out = append(out, segs...)
			placed = true
		}
	}
	for p := first; p <= last; p++ {
		for _, s := range m.pages[p] {
			switch {
			case s.end() <= lo:
				out = append(out, s)
			case s.off >= hi:
				place()
				out = append(out, s)
			default:
				parts := int32(0)
				if s.off < lo {
					out = append(out, s.cut(s.off, lo))
					parts++
				}
				place()
				if s.end() > hi {
					out = append(out, s.cut(hi, s.end()))
					parts++
				}
				if s.b != nil {
					s.b.refs += parts - 1
					if s.b.refs == 0 {
						free(s.b)
					}
				}
			}
		}
	}
	place()
	var pages [][]segment
	if len(out) > 0 {
		pages = split(pages, out)
	}
	if first == last && len(pages) == 1 {
		m.pages[first] = pages[0]
		return
	}
	m.pages = slices.Replace(m.pages, first, last+1, pages...)
}

// split appends segs to pages, in pages of at most pageMax segments. If it makes several
// pages, they are half full, so that the next insertion finds room.
func split(pages [][]segment, segs []segment) [][]segment {
	for len(segs) > pageMax {
		pages = append(pages, slices.Clone(segs[:pageMax/2]))
		segs = segs[pageMax/2:]
	}
	return append(pages, segs)
}

// append adds s after the last segment, and joins the two if s continues the last segment.
func (m *extmap) append(s segment) {
	if s.b != nil {
		s.b.refs++
	}
	if k := len(m.pages); k > 0 {
		pg := m.pages[k-1]
		if last := &pg[len(pg)-1]; last.joins(s) {
			last.n += s.n
			return
		}
		if len(pg) < pageMax {
			m.pages[k-1] = append(pg, s)
			return
		}
	}
	m.pages = append(m.pages, []segment{s})
}

// join merges adjacent segments in [lo, hi] that continue each other.
func (m *extmap) join(lo, hi uint64) {
	if len(m.pages) == 0 {
		return
	}
	first := m.page(max(lo, 1) - 1)
	for p := first; p < len(m.pages) && m.pages[p][0].off <= hi; {
		pg := m.pages[p]
		w := 0
		for i := 1; i < len(pg); i++ {
			if pg[w].joins(pg[i]) {
				pg[w].n += pg[i].n
				continue
			}
			w++
			pg[w] = pg[i]
		}
		clear(pg[w+1:])
		m.pages[p] = pg[:w+1]
		// The first segment of the next page may continue the last segment of this page.
		if p+1 < len(m.pages) {
			next := m.pages[p+1]
			if m.pages[p][w].joins(next[0]) {
				m.pages[p][w].n += next[0].n
				if len(next) == 1 {
					m.pages = slices.Delete(m.pages, p+1, p+2)
					continue
				}
				m.pages[p+1] = slices.Delete(next, 0, 1)
				continue
			}
		}
		p++
	}
}

// end is the offset after the last segment.
func (m *extmap) end() uint64 {
	if len(m.pages) == 0 {
		return 0
	}
	pg := m.pages[len(m.pages)-1]
	return pg[len(pg)-1].end()
}

// count is the number of segments.
func (m *extmap) count() (n int) {
	for _, p := range m.pages {
		n += len(p)
	}
	return n
}

// ---- lists of extents, as commits carry them

// trimBefore drops all but the last extent from off on.
func trimBefore(ext []meta.Extent, off uint64) []meta.Extent {
	last := ext[len(ext)-1]
	out := ext[:0]
	for _, e := range ext[:len(ext)-1] {
		if e.Off >= off {
			continue
		}
		e.Len = min(e.Len, off-e.Off)
		out = append(out, e)
	}
	return append(out, last)
}

func overlaps(ext []meta.Extent, e meta.Extent) bool {
	for _, x := range ext {
		if x.Off < e.End() && e.Off < x.End() {
			return true
		}
	}
	return false
}

// overlay puts e over the extents that it overlaps.
func overlay(ext []meta.Extent, e meta.Extent) []meta.Extent {
	var out []meta.Extent
	done := false
	for _, x := range ext {
		if x.End() <= e.Off {
			out = append(out, x)
			continue
		}
		if x.Off < e.Off {
			out = append(out, meta.Extent{Off: x.Off, Len: e.Off - x.Off, Chunk: x.Chunk, ChunkOff: x.ChunkOff})
		}
		if !done {
			out, done = append(out, e), true
		}
		if x.End() > e.End() {
			d := max(e.End(), x.Off) - x.Off
			out = append(out, meta.Extent{Off: x.Off + d, Len: x.Len - d, Chunk: x.Chunk, ChunkOff: x.ChunkOff + d})
		}
	}
	if !done {
		out = append(out, e)
	}
	return out
}

// at returns the segment with the byte at off.
func (m *extmap) at(off uint64) (*segment, bool) {
	if len(m.pages) == 0 {
		return nil, false
	}
	p, i := m.find(off)
	if p >= len(m.pages) || m.pages[p][i].off > off {
		return nil, false
	}
	return &m.pages[p][i], true
}
