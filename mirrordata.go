package penstock

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// Which bytes of a mirror's file differ from the base, and how the bytes are copied.

// span is the bytes [lo, hi) of a file.
type span struct{ lo, hi uint64 }

// ranges tells which bytes are to be copied, and which are to become holes.
func (m *mirrorCopy) ranges(ctx context.Context, f *mirrorFile, t *meta.Attr) (data, holes []span, err error) {
	if f.fresh && f.a.Blocks >= f.a.Size && t.Blocks == 0 {
		return []span{{0, f.a.Size}}, nil, nil // whole, and from the beginning
	}
	size := f.a.Size
	now, err := placesOf(ctx, m.to, f.src)
	if err != nil {
		return nil, nil, err
	}
	var was []meta.Extent // in the source's base
	if !f.fresh {
		if was, err = placesOf(ctx, m.from, f.src); err != nil {
			return nil, nil, err
		}
	}
	todo := otherPlaces(was, now, size)
	if size >= mirrorResume && t.Blocks > 0 {
		// Where the places of the target's bytes differ from its base, an earlier process
		// copied the bytes, but did not reach the end of the file.
		var before []meta.Extent
		if !f.fresh {
			if before, err = placesOf(ctx, m.base, f.dst); err != nil {
				return nil, nil, err
			}
		}
		have, err := placesOf(ctx, m.dst, f.dst)
		if err != nil {
			return nil, nil, err
		}
		todo = without(todo, otherPlaces(before, have, size))
	}
	data = within(todo, now)
	return data, without(todo, data), nil
}

// placesOf lists the places of a file's committed bytes. An inline file has one extent with a
// unique place.
func placesOf(ctx context.Context, v *Volume, ino meta.Ino) (all []meta.Extent, err error) {
	for off := uint64(0); ; {
		l, err := v.Locate(ctx, ino, off)
		if err != nil {
			return nil, err
		}
		if l.Inline {
			e, err := v.GetAttr(ctx, ino)
			return []meta.Extent{{Len: max(e.Attr.Size, 1), Chunk: meta.ChunkID{Term: 1, Counter: e.Attr.Change, Volume: v.id}}}, err
		}
		for _, e := range l.Extents {
			if e.End() > off {
				all = append(all, e.Extent)
				off = e.End()
			}
		}
		if l.EOF || len(l.Extents) == 0 {
			return all, nil
		}
	}
}

// otherPlaces tells which bytes of the first size lie elsewhere in b than in a:
// in another place, or nowhere.
func otherPlaces(a, b []meta.Extent, size uint64) (out []span) {
	type where struct {
		chunk meta.ChunkID
		at    uint64 // of the file's byte zero, modulo 2^64
	}
	place := func(l []meta.Extent, off uint64) (w where, end uint64, rest []meta.Extent) {
		for len(l) > 0 && l[0].End() <= off {
			l = l[1:]
		}
		switch {
		case len(l) == 0:
			return w, size, l
		case l[0].Off > off:
			return w, l[0].Off, l
		case l[0].Chunk.IsZero(): // preallocated: reads as zeros, like a hole
			return w, l[0].End(), l
		}
		return where{l[0].Chunk, l[0].ChunkOff - l[0].Off}, l[0].End(), l
	}
	for off := uint64(0); off < size; {
		var x, y where
		var ex, ey uint64
		x, ex, a = place(a, off)
		y, ey, b = place(b, off)
		end := min(ex, ey, size)
		if x != y {
			out = addSpan(out, span{off, end})
		}
		off = end
	}
	return out
}

func addSpan(l []span, s span) []span {
	if n := len(l); n > 0 && l[n-1].hi == s.lo {
		l[n-1].hi = s.hi
		return l
	}
	return append(l, s)
}

// within returns the parts of l with bytes in chunks, or inline.
func within(l []span, data []meta.Extent) (out []span) {
	for _, s := range l {
		i, _ := slices.BinarySearchFunc(data, s.lo, func(e meta.Extent, off uint64) int {
			if e.End() <= off {
				return -1
			}
			return 1
		})
		for ; i < len(data) && data[i].Off < s.hi; i++ {
			if e := data[i]; !e.Chunk.IsZero() {
				out = addSpan(out, span{max(s.lo, e.Off), min(s.hi, e.End())})
			}
		}
	}
	return out
}

// without returns l minus sub. Both are sorted.
func without(l, sub []span) (out []span) {
	for _, s := range l {
		for len(sub) > 0 && sub[0].hi <= s.lo {
			sub = sub[1:]
		}
		for _, x := range sub {
			if x.lo >= s.hi {
				break
			}
			if x.lo > s.lo {
				out = append(out, span{s.lo, x.lo})
			}
			s.lo = max(s.lo, min(x.hi, s.hi))
		}
		if s.lo < s.hi {
			out = append(out, s)
		}
	}
	return out
}

// mirrorBuffers are the read buffers of copyRanges: reused memory costs a fraction of fresh
// memory.
var mirrorBuffers = sync.Pool{New: func() any { return new([mirrorSegment]byte) }}

// copyRanges reads ranges and calls write for the bytes, in order. Reads run ahead of writes.
func (m *mirrorCopy) copyRanges(ctx context.Context, src meta.Ino, ranges []span, write func(ctx context.Context, p []byte, off uint64) error) error {
	var segments []span
	for _, r := range ranges {
		for ; r.lo < r.hi; r.lo += min(mirrorSegment, r.hi-r.lo) {
			segments = append(segments, span{r.lo, min(r.lo+mirrorSegment, r.hi)})
		}
	}
	type answer struct {
		buf *[mirrorSegment]byte
		p   []byte // of it
		err error
	}
	read := func(s span, at float64) (a answer) {
		if a.err = m.pace.wait(ctx, at); a.err != nil {
			return a
		}
		buf := mirrorBuffers.Get().(*[mirrorSegment]byte)
		a.buf, a.p = buf, buf[:s.hi-s.lo]
		n, err := m.to.Read(ctx, src, a.p, int64(s.lo))
		if err == nil && n < len(a.p) {
			err = meta.E("mirror", meta.Corrupt, m.to.subject(src), fmt.Errorf("%d bytes at %d, there should be %d", n, s.lo, len(a.p)))
		}
		a.err = err
		return a
	}
	answers := make([]chan answer, len(segments))
	begin := func(i int) {
		answers[i] = make(chan answer, 1)
		// Turns are in file order: earlier bytes are written first.
		at := m.pace.turn(segments[i].hi - segments[i].lo)
		go func() { answers[i] <- read(segments[i], at) }()
	}
	// Only as many reads run ahead as keep the writer busy: for a near source two buffers
	// suffice, which stay in the processor's caches.
	begun, ahead := 0, 2
	more := func(upTo int) {
		for ; begun < min(upTo, len(segments)); begun++ {
			begin(begun)
		}
	}
	more(ahead)
	var failed error
	for i, s := range segments {
		if answers[i] == nil {
			break
		}
		var a answer // every started read is awaited
		select {
		case a = <-answers[i]:
		default:
			waits := time.Now()
			a = <-answers[i]
			if i > 0 && time.Since(waits) > mirrorLate {
				ahead = min(ahead+1, mirrorReads)
			}
		}
		if failed == nil {
			failed = a.err
		}
		if failed == nil {
			failed = write(ctx, a.p, s.lo)
		}
		if failed == nil {
			m.sent.Add(s.hi - s.lo)
			more(i + 1 + ahead)
		}
		if a.buf != nil {
			mirrorBuffers.Put(a.buf)
		}
	}
	return failed
}

// pace bounds bytes per second. Bytes to be sent stand in a queue that moves at the rate, so
// that a new rate also applies to queued bytes. A nil pace, or a rate of zero, bounds nothing.
type pace struct {
	mu     sync.Mutex
	rate   uint64
	queued float64 // bytes that ever entered the queue
	passed float64 // bytes that had passed the queue at the time at
	at     time.Time
	moved  chan struct{} // closed when the rate changes; nil: nobody waits
}

func newPace(rate uint64) *pace { return &pace{rate: rate} }

// advance moves the queue up to now. The caller holds mu.
func (p *pace) advance() {
	now := time.Now()
	if p.rate == 0 {
		p.passed = p.queued
	} else {
		p.passed = min(p.queued, p.passed+now.Sub(p.at).Seconds()*float64(p.rate))
	}
	p.at = now
}

// set changes the rate.
func (p *pace) set(rate uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if rate == p.rate {
		return
	}
	p.advance()
	p.rate = rate
	if p.moved != nil {
		close(p.moved)
		p.moved = nil
	}
}

// turn adds n bytes to the queue and returns the position for wait: the position is reached
// when all bytes queued earlier have passed.
func (p *pace) turn(n uint64) (at float64) {
	if p == nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.advance()
	at = p.queued
	p.queued += float64(n)
	return at
}

// wait waits for a turn. Errors: the cause of ctx's end.
func (p *pace) wait(ctx context.Context, at float64) error {
	if p == nil {
		return context.Cause(ctx)
	}
	for {
		p.mu.Lock()
		p.advance()
		missing := at - p.passed
		if missing <= 0 || p.rate == 0 {
			p.mu.Unlock()
			return context.Cause(ctx)
		}
		if p.moved == nil {
			p.moved = make(chan struct{})
		}
		moved, wait := p.moved, time.Duration(missing/float64(p.rate)*float64(time.Second))
		p.mu.Unlock()
		select {
		case <-time.After(wait + time.Microsecond): // a duration rounded down would end a moment too early
		case <-moved:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
