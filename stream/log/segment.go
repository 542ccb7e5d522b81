package log

import (
	"errors"
	"hash/crc32"
	"io"
	"sort"
)

// indexEvery is the distance of two entries of an index, in bytes.
const indexEvery = 4 << 10

// Index finds the position of an offset or a time in one segment. It has an entry for about
// every indexEvery bytes, and is made again by Scan.
//
// INVARIANT: the entries ascend by offset, position and time.
type Index struct {
	entries []entry
}

type entry struct {
	base int64 // offset of the first record of the batch
	pos  int64 // of the batch in the segment
	time int64 // greatest time of a record before the batch, ms since 1970
}

// add adds a batch at a position; before is the greatest time of a record before the batch.
func (x *Index) add(b *Batch, pos, before int64) {
	if n := len(x.entries); n > 0 && pos-x.entries[n-1].pos < indexEvery {
		return
	}
	x.entries = append(x.entries, entry{base: b.Base, pos: pos, time: before})
}

// Find returns a position at or before the batch with an offset, at most about indexEvery bytes
// and one batch before it.
func (x *Index) Find(offset int64) int64 {
	i := sort.Search(len(x.entries), func(i int) bool { return x.entries[i].base > offset })
	if i == 0 {
		return 0
	}
	return x.entries[i-1].pos
}

// FindTime returns a position before which all records are older than a time, ms since 1970,
// and at most about indexEvery bytes and one batch before the first record of that time or
// later.
func (x *Index) FindTime(ms int64) int64 {
	i := sort.Search(len(x.entries), func(i int) bool { return x.entries[i].time >= ms })
	if i == 0 {
		return 0
	}
	return x.entries[i-1].pos
}

// Segment is what a scan or the appends have told of one segment.
type Segment struct {
	First int64 // offset of the first record
	Next  int64 // offset after the last record
	Size  int64 // bytes of whole batches
	Time  int64 // greatest time of a record, ms since 1970; -1: no record
	Epoch int32 // of the last batch's leader
	Index Index
}

// NewSegment returns an empty segment that begins at an offset.
func NewSegment(first int64) Segment { return Segment{First: first, Next: first, Time: -1} }

// Add applies a batch that was appended at the end of the segment.
func (s *Segment) Add(b *Batch) {
	s.Index.add(b, s.Size, s.Time)
	s.Next, s.Size, s.Time, s.Epoch = b.Next(), s.Size+int64(b.Size), max(s.Time, b.MaxTime), b.LeaderEpoch
}

// Scan reads a segment from its beginning and returns everything before the first bytes that
// are not the next batch: a batch that is cut, that does not match its checksum, that does not
// follow the batch before, or that an earlier leader has appended. seen, unless nil, is called
// for each batch in order. max bounds the size of a batch.
//
// end is nil if the segment ends with a whole batch; otherwise it says why the bytes after
// Segment.Size are no batch. A segment that a crash has cut ends so, and the leader that
// recovers it continues at Segment.Size. Errors: those of r, and seen's.
func Scan(r io.Reader, first int64, max int, seen func(*Batch)) (s Segment, end, err error) {
	s = NewSegment(first)
	buf := make([]byte, 0, 64<<10)
	eof := false
	at := 0 // of the next batch in buf
	for {
		b, perr := Parse(buf[at:], max)
		if errors.Is(perr, ErrShort) && !eof {
			if at > 0 {
				buf = append(buf[:0], buf[at:]...)
				at = 0
			}
			need := cap(buf)
			if b.Size > need {
				need = b.Size
			} else if len(buf) == cap(buf) {
				need = 2 * cap(buf)
			}
			if need > cap(buf) {
				buf = append(make([]byte, 0, need), buf...)
			}
			n, rerr := r.Read(buf[len(buf):cap(buf)])
			buf = buf[:len(buf)+n]
			if rerr == io.EOF {
				eof = true
			} else if rerr != nil {
				return s, nil, rerr
			}
			continue
		}
		if len(buf) == at {
			return s, nil, nil
		}
		if perr != nil {
			return s, perr, nil
		}
		if verr := b.Verify(buf[at:]); verr != nil {
			return s, verr, nil
		}
		if b.Base != s.Next || b.LeaderEpoch < s.Epoch {
			return s, errors.New("a batch does not follow the batch before it"), nil
		}
		s.Add(&b)
		if seen != nil {
			seen(&b)
		}
		at += b.Size
	}
}

// checksum computes the checksum of a batch.
func checksum(p []byte) uint32 { return crc32.Checksum(p[21:], castagnoli) }
