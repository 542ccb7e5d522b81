package placement

import (
	"cmp"
	"slices"

	"penstock.io/penstock/meta"
)

// JoinRule says which parts of a file are copied together. A fragment is a run of extents with
// the same order in one chunk and in the file, with or without holes between. Fragments of at
// least Small bytes stay in place: reading such fragments costs little more than necessary, and
// copying much. A sequence of at least Least smaller fragments is joined.
//
// So fewer than Small bytes are copied for each removed fragment, plus at most Small bytes for
// each Least fragments: however a file is overwritten, the number of new fragments bounds the
// copying.
type JoinRule struct {
	Least int    // at least 2; less: nothing is ever joined
	Small uint64 // bytes
}

// Piece is an extent, in the form for joining.
type Piece struct {
	meta.Extent
	// Fixed: the piece must stay where it is. A snapshot or another file refers to the bytes,
	// too, so a copy would double the bytes; or the chunk is open, belongs to another volume,
	// or is out of reach.
	Fixed bool
}

// Stretch is a part of a file to be joined.
type Stretch struct {
	Pieces    []Piece
	Fragments int
	Bytes     uint64
}

// Stretches returns the parts of a file to be joined. pieces are the file's extents, in order;
// the result shares the memory of pieces. Preallocated space without a chunk counts as a hole.
func (r JoinRule) Stretches(pieces []Piece) (out []Stretch) {
	if r.Least < 2 {
		return nil
	}
	pieces = slices.DeleteFunc(pieces, func(p Piece) bool { return p.Chunk.IsZero() })
	var s Stretch
	from := 0 // where s begins
	end := func(at int) {
		if s.Fragments >= r.Least {
			s.Pieces = pieces[from:at:at]
			out = append(out, s)
		}
		s = Stretch{}
	}
	for i := 0; i < len(pieces); {
		k, n := i+1, pieces[i].Len
		for k < len(pieces) && pieces[k-1].continues(&pieces[k]) {
			n += pieces[k].Len
			k++
		}
		if pieces[i].Fixed || n >= r.Small {
			end(i)
			from = k
		} else {
			s.Fragments++
			s.Bytes += n
		}
		i = k
	}
	end(len(pieces))
	return out
}

// continues: next is of the same fragment.
func (p *Piece) continues(next *Piece) bool {
	return p.Chunk == next.Chunk && p.ChunkOff+p.Len == next.ChunkOff && p.Fixed == next.Fixed
}

// Fragmented is a file with stretches to be joined.
type Fragmented struct {
	Ino       meta.Ino
	Stretches []Stretch
}

// Size sums up the stretches.
func (f *Fragmented) Size() (fragments int, bytes uint64) {
	for i := range f.Stretches {
		fragments += f.Stretches[i].Fragments
		bytes += f.Stretches[i].Bytes
	}
	return fragments, bytes
}

// MostFragmented orders files by the bytes copied for each removed fragment, the fewest first.
func MostFragmented(a, b *Fragmented) int {
	af, ab := a.Size()
	bf, bb := b.Size()
	return cmp.Or(cmp.Compare(float64(ab)*float64(bf), float64(bb)*float64(af)), cmp.Compare(bf, af), cmp.Compare(a.Ino, b.Ino))
}

// Part is a file's part of a batch: pieces in the order of their offsets.
type Part struct {
	Ino    meta.Ino
	Pieces []Piece
}

// Batch is the contents of a new chunk, in order.
type Batch struct {
	Parts []Part
	Bytes uint64
}

// Batches packs files, in the given order, into chunks of at most target bytes (a single larger
// piece gets a whole chunk). A file of at least alone bytes shares no chunk with other files,
// so deleting the file frees the chunk; smaller files are packed together.
func Batches(files []Fragmented, target, alone uint64) (out []Batch) {
	pack := -1 // index in out of the batch being packed
	for i := range files {
		f := &files[i]
		_, bytes := f.Size()
		at := -1
		if bytes < alone {
			at = pack
		}
		for _, s := range f.Stretches {
			for _, p := range s.Pieces {
				if at < 0 || out[at].Bytes+p.Len > target {
					out = append(out, Batch{})
					at = len(out) - 1
				}
				b := &out[at]
				if n := len(b.Parts); n == 0 || b.Parts[n-1].Ino != f.Ino {
					b.Parts = append(b.Parts, Part{Ino: f.Ino})
				}
				part := &b.Parts[len(b.Parts)-1]
				part.Pieces = append(part.Pieces, p)
				b.Bytes += p.Len
			}
		}
		if bytes < alone {
			pack = at
		}
	}
	return out
}

// Uses counts the references to pieces. The caller passes each extent of the volume, of every
// generation, once.
type Uses struct {
	chunks map[meta.ChunkID]*usedChunk
}

type usedChunk struct {
	ranges []meta.CopyRun // by Off, each once
	seen   []uint32       // extents overlapping the piece
	most   uint64         // the longest
}

// NewUses is for the pieces of some files.
func NewUses(files []Fragmented) *Uses {
	u := &Uses{chunks: map[meta.ChunkID]*usedChunk{}}
	for _, f := range files {
		for _, s := range f.Stretches {
			for _, p := range s.Pieces {
				c := u.chunks[p.Chunk]
				if c == nil {
					c = &usedChunk{}
					u.chunks[p.Chunk] = c
				}
				c.ranges = append(c.ranges, meta.CopyRun{Off: p.ChunkOff, Len: p.Len})
				c.most = max(c.most, p.Len)
			}
		}
	}
	for _, c := range u.chunks { // in any order
		slices.SortFunc(c.ranges, compareRuns)
		c.ranges = slices.Compact(c.ranges)
		c.seen = make([]uint32, len(c.ranges))
	}
	return u
}

func compareRuns(a, b meta.CopyRun) int {
	return cmp.Or(cmp.Compare(a.Off, b.Off), cmp.Compare(a.Len, b.Len))
}

// Saw notes an extent.
func (u *Uses) Saw(e *meta.Extent) {
	c := u.chunks[e.Chunk]
	if c == nil {
		return
	}
	i, _ := slices.BinarySearchFunc(c.ranges, meta.CopyRun{Off: e.ChunkOff - min(e.ChunkOff, c.most)}, compareRuns)
	for ; i < len(c.ranges) && c.ranges[i].Off < e.ChunkOff+e.Len; i++ {
		if c.ranges[i].Off+c.ranges[i].Len > e.ChunkOff {
			c.seen[i]++
		}
	}
}

// Shared reports whether more than one extent refers to bytes of a piece.
func (u *Uses) Shared(e *meta.Extent) bool {
	c := u.chunks[e.Chunk]
	i, ok := slices.BinarySearchFunc(c.ranges, meta.CopyRun{Off: e.ChunkOff, Len: e.Len}, compareRuns)
	return !ok || c.seen[i] > 1
}
