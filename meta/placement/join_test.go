package placement

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

// model is a file whose map is a list of pieces and whose contents are known: a single write
// wrote each unit of the file, and left the unit in a single place.
type model struct {
	r      *rand.Rand
	units  []meta.CopyRun // by unit of the file: the write's number, 0 a hole; and the unit's place in the written bytes
	pieces []Piece
	bytes  map[meta.ChunkID][]meta.CopyRun // the chunks' contents, by unit
	chunks uint64
	writes uint64
}

func newModel(r *rand.Rand, units int) *model {
	return &model{r: r, units: make([]meta.CopyRun, units), bytes: map[meta.ChunkID][]meta.CopyRun{}}
}

func (m *model) chunk() meta.ChunkID {
	m.chunks++
	return meta.ChunkID{Volume: 1, Term: 1, Counter: m.chunks}
}

// put maps [off, off+n) to a place in a chunk, or to none; joined with a piece that continues, as
// the state machine does.
func (m *model) put(e Piece, mapped bool) {
	var out []Piece
	for _, p := range m.pieces {
		if p.End() <= e.Off || p.Off >= e.End() {
			out = append(out, p)
			continue
		}
		if p.Off < e.Off {
			l := p
			l.Len = e.Off - p.Off
			out = append(out, l)
		}
		if p.End() > e.End() {
			h := p
			h.Off, h.ChunkOff, h.Len = e.End(), p.ChunkOff+e.End()-p.Off, p.End()-e.End()
			out = append(out, h)
		}
	}
	if mapped {
		out = append(out, e)
	}
	slices.SortFunc(out, func(a, b Piece) int { return int(int64(a.Off) - int64(b.Off)) })
	m.pieces = out[:0]
	for _, p := range out {
		if n := len(m.pieces); n > 0 && m.pieces[n-1].End() == p.Off && m.pieces[n-1].continues(&p) {
			m.pieces[n-1].Len += p.Len
			continue
		}
		m.pieces = append(m.pieces, p)
	}
}

func (m *model) write(into meta.ChunkID, off, n uint64, fixed bool) {
	m.writes++
	at := uint64(len(m.bytes[into]))
	for i := range n {
		x := meta.CopyRun{Off: m.writes, Len: i}
		m.bytes[into] = append(m.bytes[into], x)
		m.units[off+i] = x
	}
	m.put(Piece{meta.Extent{Off: off, Len: n, Chunk: into, ChunkOff: at}, fixed}, true)
}

func (m *model) punch(off, n uint64) {
	for i := range n {
		m.units[off+i] = meta.CopyRun{}
	}
	m.put(Piece{Extent: meta.Extent{Off: off, Len: n}}, false)
}

// check compares the contents by the map with the last written contents.
func (m *model) check() error {
	got := make([]meta.CopyRun, len(m.units))
	for _, p := range m.pieces {
		copy(got[p.Off:p.End()], m.bytes[p.Chunk][p.ChunkOff:p.ChunkOff+p.Len])
	}
	if !slices.Equal(got, m.units) {
		return fmt.Errorf("the file has other bytes")
	}
	return nil
}

// join carries out the batches, as the owner does, all at once.
func (m *model) join(rule JoinRule, target uint64) (copied uint64) {
	st := rule.Stretches(slices.Clone(m.pieces))
	for _, b := range Batches([]Fragmented{{Ino: 5, Stretches: st}}, target, 1) {
		to := m.chunk()
		for _, part := range b.Parts {
			for _, p := range part.Pieces {
				at := uint64(len(m.bytes[to]))
				m.bytes[to] = append(m.bytes[to], m.bytes[p.Chunk][p.ChunkOff:p.ChunkOff+p.Len]...)
				p.Chunk, p.ChunkOff = to, at
				m.put(p, true)
				copied += p.Len
			}
		}
	}
	return copied
}

// fragments counts the fragments by walking unit by unit, another way than the tested code.
func fragments(pieces []Piece) (n int) {
	var next uint64
	var in meta.ChunkID
	fixed := false
	for _, p := range pieces {
		for i := range p.Len {
			if at := p.ChunkOff + i; p.Chunk != in || at != next || p.Fixed != fixed {
				n++
			}
			in, next, fixed = p.Chunk, p.ChunkOff+i+1, p.Fixed
		}
	}
	return n
}

// Random files are written, punched and joined. Joining keeps every byte, moves no fixed piece,
// leaves nothing to be joined unless a chunk was full, and copies less than Small for each
// removed fragment.
func TestJoinKeepsBytesAndConverges(t *testing.T) {
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 7))
		const units = 600
		m := newModel(r, units)
		rule := JoinRule{Least: 2 + r.IntN(6), Small: 4 + r.Uint64N(40)}
		open := []meta.ChunkID{m.chunk(), m.chunk(), m.chunk()}
		for step := range 60 {
			for range 1 + r.IntN(20) {
				off := r.Uint64N(units)
				n := min(1+r.Uint64N(1<<r.IntN(6)), units-off)
				if r.IntN(8) == 0 {
					m.punch(off, n)
					continue
				}
				m.write(open[r.IntN(len(open))], off, n, r.IntN(12) == 0)
			}
			where := fmt.Sprintf("seed %d, step %d", seed, step)
			before := fragments(m.pieces)
			was := slices.Clone(m.pieces)
			st := rule.Stretches(slices.Clone(m.pieces))
			for _, s := range st {
				if got := fragments(s.Pieces); got != s.Fragments || got < rule.Least {
					t.Fatalf("%s: a stretch of %d fragments says it has %d, the rule wants %d", where, got, s.Fragments, rule.Least)
				}
			}
			copied := m.join(rule, 1<<40)
			if err := m.check(); err != nil {
				t.Fatalf("%s: %v", where, err)
			}
			for _, p := range was {
				if p.Fixed && !slices.ContainsFunc(m.pieces, func(q Piece) bool {
					return q.Fixed && q.Chunk == p.Chunk && q.Off <= p.Off && q.End() >= p.End() && q.ChunkOff-q.Off == p.ChunkOff-p.Off
				}) {
					t.Fatalf("%s: %+v moved", where, p)
				}
			}
			if gone := before - fragments(m.pieces); copied > 0 && (gone < 1 || copied >= rule.Small*uint64(gone+len(st))) {
				t.Fatalf("%s: %d bytes copied, %d fragments went", where, copied, gone)
			}
			if again := rule.Stretches(slices.Clone(m.pieces)); len(again) > 0 {
				t.Fatalf("%s: joined again at once: %+v", where, again)
			}
		}
	}
}

// The rule finds everything: each run of Least small movable fragments lies within a stretch, by
// a search that tries every window.
func TestStretchesAreWhole(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 8))
		rule := JoinRule{Least: 2 + r.IntN(4), Small: 8}
		var pieces []Piece // no two continue each other: a piece is a fragment
		off := uint64(0)
		for i := range r.IntN(30) {
			off += r.Uint64N(2) * 3
			p := Piece{meta.Extent{Off: off, Len: 1 + r.Uint64N(10), Chunk: meta.ChunkID{Volume: 1, Counter: uint64(i + 1)}}, r.IntN(6) == 0}
			off += p.Len
			pieces = append(pieces, p)
		}
		covered := map[uint64]int{}
		for i, s := range rule.Stretches(slices.Clone(pieces)) {
			for _, p := range s.Pieces {
				if covered[p.Off] != 0 {
					t.Fatalf("seed %d: the piece at %d is in two stretches", seed, p.Off)
				}
				covered[p.Off] = i + 1
			}
		}
		want := map[uint64]bool{}
		for i := range pieces {
			for k := i + 1; k <= len(pieces); k++ {
				w := pieces[i:k]
				if len(w) < rule.Least || slices.ContainsFunc(w, func(p Piece) bool { return p.Fixed || p.Len >= rule.Small }) {
					continue
				}
				for _, p := range w {
					want[p.Off] = true
					if covered[p.Off] == 0 || covered[p.Off] != covered[w[0].Off] {
						t.Fatalf("seed %d: %+v is not in one stretch", seed, w)
					}
				}
			}
		}
		if len(want) != len(covered) {
			t.Fatalf("seed %d: %d pieces are in stretches, %d ought to be", seed, len(covered), len(want))
		}
	}
}

// Batches hold every piece once, in order, none above the target; large files
// have chunks of their own, and the most fragmented come first.
func TestBatches(t *testing.T) {
	for seed := range uint64(500) {
		r := rand.New(rand.NewPCG(seed, 9))
		const target, alone = 100, 40
		var files []Fragmented
		for i := range r.IntN(20) {
			f := Fragmented{Ino: meta.Ino(i + 2)}
			off := uint64(0)
			for range 1 + r.IntN(3) {
				var s Stretch
				for range 2 + r.IntN(12) {
					p := Piece{Extent: meta.Extent{Off: off, Len: 1 + r.Uint64N(9), Chunk: meta.ChunkID{Counter: uint64(len(s.Pieces) + 1)}}}
					off += p.Len
					s.Pieces, s.Fragments, s.Bytes = append(s.Pieces, p), s.Fragments+1, s.Bytes+p.Len
				}
				f.Stretches = append(f.Stretches, s)
			}
			files = append(files, f)
		}
		slices.SortFunc(files, func(a, b Fragmented) int { return MostFragmented(&a, &b) })
		got := map[meta.Ino][]Piece{}
		for _, b := range Batches(files, target, alone) {
			var n uint64
			for _, part := range b.Parts {
				got[part.Ino] = append(got[part.Ino], part.Pieces...)
				for _, p := range part.Pieces {
					n += p.Len
				}
				i := slices.IndexFunc(files, func(f Fragmented) bool { return f.Ino == part.Ino })
				if _, bytes := files[i].Size(); bytes >= alone && len(b.Parts) > 1 {
					t.Fatalf("seed %d: inode %d of %d bytes shares a chunk", seed, part.Ino, bytes)
				}
			}
			if n != b.Bytes || n > target || n == 0 {
				t.Fatalf("seed %d: a batch of %d bytes says %d", seed, n, b.Bytes)
			}
		}
		mean := 0.0
		for _, f := range files {
			var want []Piece
			for _, s := range f.Stretches {
				want = append(want, s.Pieces...)
			}
			if !slices.Equal(got[f.Ino], want) {
				t.Fatalf("seed %d: inode %d: %d pieces in batches, %d to be joined", seed, f.Ino, len(got[f.Ino]), len(want))
			}
			n, bytes := f.Size()
			if m := float64(bytes) / float64(n); m < mean {
				t.Fatalf("seed %d: inode %d with %.1f bytes a fragment comes after one with %.1f", seed, f.Ino, m, mean)
			} else {
				mean = m
			}
		}
	}
}
