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
// The tally: the bytes that only snapshots hold, counted with each change, for volumes whose
// quota includes them. The sum is, over all snapshots, the number of bytes that a snapshot maps
// and the next one does not map at the same offset of the same file in the same place (next
// after the youngest is the live tree). For a byte in an inode's record, the value is the
// place. So a byte counts once for each run of consecutive snapshots with the byte, and does
// not count in the run that includes the live tree. ReadHeld differs in one case: a byte absent
// from a snapshot between (after a rollback, or a copy from an older snapshot to the old place)
// is one byte for ReadHeld, and two runs here, until the snapshots between are gone.
//
// A change of the live tree changes only the last part of the sum, which a few records
// determine: the youngest snapshot maps the live extents that are as old as the snapshot, and
// the versions buried with the youngest snapshot, found by key. Taking a snapshot changes
// nothing. Deleting a snapshot replaces the parts of two pairs of snapshots by the part of one
// pair: the sum never grows, and the tally finds the decrease by counting a state at rest again
// (Recounted); the later changes are in both. The counted state is in the journal, so a crash
// never takes back room given before. Until the result is recorded (CountSnapshots), the sum is
// too large.
//
// Two kinds of snapshots do not count: a snapshot that is being worked off, some of whose
// versions are gone, and the base of a clone, which belongs to the clone's origin.

// tally is the part of the volume's record.
type tally struct {
	mode  byte
	alone int64  // INVARIANT: the sum in mode tallyExact, at least the sum in mode tallyStale
	ref   uint32 // INVARIANT: the generation of the youngest counted snapshot; 0: none
	epoch uint64 // increases when the sum changes without being counted
}

const (
	tallyOff     = iota
	tallyBegun   // a count is under way; alone is the change since the count began
	tallyExact   // alone is the sum
	tallyStale   // alone is too large: count again
	tallyMoved   // alone may also be too small, even negative: count again
	tallyUnknown // the first mode unknown to the program
)

// inForce reports whether the bytes of snapshots count in the quota.
func (y *tally) inForce() bool { return y.mode >= tallyExact }

// holds returns the bytes that are compared with the quota.
func (v *volume) holds() uint64 {
	if v.tally.inForce() && v.tally.alone > 0 {
		return v.bytes + uint64(v.tally.alone)
	}
	return v.bytes
}

// setTally switches the count on or off.
func (t *tx) setTally(on bool) error {
	y := &t.vol.tally
	if on == (y.mode != tallyOff) {
		return nil
	}
	if !on {
		*y = tally{}
		return nil
	}
	all, err := t.snaps().snapshots()
	if err != nil {
		return err
	}
	*y = tally{mode: tallyBegun}
	for _, s := range all {
		if s.tallied() {
			y.ref = s.gen
		}
	}
	if y.ref == 0 {
		y.mode = tallyExact // without snapshots, the sum is zero
	}
	return nil
}

// tallied reports whether the snapshot counts.
func (s *snapshot) tallied() bool { return s.state != snapshotLeaving && s.state != snapshotBase }

// tallyLeaves records that the working off of the snapshot all[at] begins.
func (t *tx) tallyLeaves(all []snapshot, at int) {
	y := &t.vol.tally
	if y.mode == tallyOff {
		return
	}
	y.epoch++
	if y.mode == tallyExact {
		y.mode = tallyStale
	}
	y.ref = 0
	for i, s := range all {
		if i != at && s.tallied() {
			y.ref = s.gen
		}
	}
}

// tallyMoves records that extents of several generations move one by one.
func (t *tx) tallyMoves() {
	if y := &t.vol.tally; y.mode != tallyOff && y.ref != 0 {
		y.epoch++
		if y.inForce() {
			y.mode = tallyMoved
		}
	}
}

// tallyExtents records that the live tree has the extents fresh in place of old in a range of
// a file; both are sorted.
func (t *tx) tallyExtents(ino meta.Ino, old []extent, fresh []meta.Extent) error {
	y := &t.vol.tally
	if y.mode == tallyOff || y.ref == 0 || len(old)+len(fresh) == 0 {
		return nil
	}
	lo, hi := uint64(math.MaxUint64), uint64(0)
	was := make([]meta.Extent, len(old))
	for i, o := range old {
		was[i] = o.Extent
		lo, hi = min(lo, o.Off), max(hi, o.End())
	}
	for _, f := range fresh {
		lo, hi = min(lo, f.Off), max(hi, f.End())
	}
	// Where the live tree and the snapshot have the same extent, nothing else is searched.
	var then []meta.Extent
	gap, gapEnd := uint64(math.MaxUint64), uint64(0)
	at := lo
	for _, o := range old {
		if o.gen > y.ref {
			continue
		}
		then = append(then, o.Extent)
		if o.Off > at {
			gap, gapEnd = min(gap, at), o.Off
		}
		at = o.End()
	}
	if at < hi {
		gap, gapEnd = min(gap, at), hi
	}
	if gap < gapEnd {
		for _, snap := range t.tallyLists() {
			var err error
			if then, err = t.superseded(then, snap, ino, gap, gapEnd); err != nil {
				return err
			}
		}
		slices.SortFunc(then, func(a, b meta.Extent) int { return cmp.Compare(a.Off, b.Off) })
	}
	y.alone += int64(inCommon(then, was)) - int64(inCommon(then, fresh))
	return nil
}

// tallyLists returns the snapshots whose lists have buried versions seen by the youngest
// counted snapshot: the youngest counted snapshot, and the snapshot being worked off, if
// younger.
func (t *tx) tallyLists() []uint32 {
	if t.vol.lastSnap != t.vol.tally.ref {
		return []uint32{t.vol.tally.ref, t.vol.lastSnap}
	}
	return []uint32{t.vol.lastSnap}
}

// superseded appends the extents of an inode between two offsets that are buried with the
// snapshot snap and seen by the youngest counted snapshot.
func (t *tx) superseded(l []meta.Extent, snap uint32, ino meta.Ino, lo, hi uint64) ([]meta.Extent, error) {
	const prefix = 5 // of the list
	from := appendBuriedKey(nil, snap, appendExtentBase(nil, ino, lo+1))
	end := after(from[:prefix+9])
	for page := 4; ; page = min(2*page, 256) {
		var keys [][]byte
		if err := t.r.Scan(from, end, func(k, _ []byte) bool {
			keys = append(keys, bytes.Clone(k))
			return len(keys) < page
		}); err != nil {
			return nil, err
		}
		for _, k := range keys {
			key := k[prefix:]
			if len(key) != 17+genLen {
				return nil, fail("count snapshots", meta.Corrupt, fmt.Sprintf("key %x", k))
			}
			if ^binary.BigEndian.Uint32(key[17:]) > t.vol.tally.ref {
				continue // written after the snapshot
			}
			val, ok, err := t.r.Get(key)
			if err != nil {
				return nil, err
			}
			if !ok {
				return nil, fail("count snapshots", meta.Corrupt, fmt.Sprintf("key %x is buried and not there", key))
			}
			if isTombstone(val) {
				continue
			}
			e, err := decodeExtent(val, binary.BigEndian.Uint64(key[9:]))
			if err != nil {
				return nil, err
			}
			if e.Off >= hi {
				return l, nil
			}
			l = append(l, e)
		}
		if len(keys) < page {
			return l, nil
		}
		from = append(keys[page-1], 0)
	}
}

// inCommon is how many bytes two lists of extents, each in order, have at the same
// offsets in the same places.
func inCommon(a, b []meta.Extent) (n uint64) {
	for len(a) > 0 && len(b) > 0 {
		x, y := &a[0], &b[0]
		if lo, hi := max(x.Off, y.Off), min(x.End(), y.End()); lo < hi && x.Chunk == y.Chunk &&
			(x.Chunk.IsZero() || x.ChunkOff-x.Off == y.ChunkOff-y.Off) {
			n += hi - lo
		}
		if x.End() <= y.End() {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return n
}

// tallyInline records that an inode's record has the inline data now in place of was.
func (t *tx) tallyInline(ino meta.Ino, was, now []byte) error {
	y := &t.vol.tally
	if y.mode == tallyOff || y.ref == 0 || bytes.Equal(was, now) {
		return nil
	}
	then, err := t.inlineThen(ino)
	if err != nil {
		return err
	}
	y.alone += int64(sameBytes(then, was)) - int64(sameBytes(then, now))
	return nil
}

// inlineThen returns the inline data of an inode in the youngest counted snapshot.
func (t *tx) inlineThen(ino meta.Ino) ([]byte, error) {
	q := view{r: t.r, gen: t.vol.tally.ref, base: t.base}
	b, _, ok, err := q.get(appendInodeBase(nil, ino))
	if err != nil || !ok {
		return nil, err
	}
	in := &inode{}
	if err := decodeInode(b, ino, in); err != nil {
		return nil, err
	}
	return bytes.Clone(in.inline()), nil
}

// inline returns a file's inline data.
func (in *inode) inline() []byte {
	if in.IsRegular() && in.Flags&meta.FlagInline != 0 {
		return in.data
	}
	return nil
}

// sameBytes is how many bytes are the same in both.
func sameBytes(a, b []byte) (n uint64) {
	for i := range min(len(a), len(b)) {
		if a[i] == b[i] {
			n++
		}
	}
	return n
}

// countSnapshots records the result of a count at rest.
func (t *tx) countSnapshots(op *meta.CountSnapshots) error {
	y := &t.vol.tally
	if y.mode == tallyOff || y.epoch != op.Epoch {
		return fail("count snapshots", meta.Again, fmt.Sprintf("counted as of %d, it is %d", op.Epoch, y.epoch))
	}
	if y.mode == tallyExact {
		return nil
	}
	y.alone += op.Add
	if y.alone < 0 {
		return fail("count snapshots", meta.Corrupt, fmt.Sprintf("snapshots alone hold %d bytes", y.alone))
	}
	y.mode = tallyExact
	return nil
}

// ---- the count as a whole

// Tally describes the count of bytes that only snapshots hold.
type Tally struct {
	On      bool   // the volume's policy asks for the count
	InForce bool   // the bytes count in the quota
	Stale   bool   // something else than changes of the live tree happened: Recounted is to be asked
	Alone   uint64 // the sum, if in force; too large if stale
}

// Tallied reads the tally.
func Tallied(r Reader) (Tally, error) {
	t := tx{view: view{r: r}}
	err := t.begin()
	return t.vol.tally.told(), err
}

func (y *tally) told() Tally {
	l := Tally{On: y.mode != tallyOff, InForce: y.inForce(), Stale: y.mode != tallyOff && y.mode != tallyExact}
	if l.InForce && y.alone > 0 {
		l.Alone = uint64(y.alone)
	}
	return l
}

// Recounted counts the bytes that only snapshots hold, and returns the operation that reports
// the result to a later state of the volume, or nil if nothing is to be reported. Recounted
// reads the versions superseded since the oldest snapshot, and all extents of files changed
// since, each once. Recounted needs as much memory as ReadHeld.
func Recounted(r Reader) (*meta.CountSnapshots, error) {
	h := &holding{t: tx{view: view{r: r}}}
	if err := h.t.begin(); err != nil {
		return nil, err
	}
	y := h.t.vol.tally
	if y.mode == tallyOff || y.mode == tallyExact {
		return nil, nil
	}
	n, err := h.runs()
	return &meta.CountSnapshots{Epoch: y.epoch, Add: int64(n) - y.alone}, err
}

// Room returns the most bytes by which a volume may grow if n bytes at off of a file are
// written again: bytes at offsets without bytes, bytes that a snapshot has unchanged and, for
// an inline file, the whole file. Errors: Stale.
func Room(r Reader, ino meta.Ino, off, n uint64) (uint64, error) {
	t := &tx{view: view{r: r}}
	if err := t.begin(); err != nil {
		return 0, err
	}
	in, err := t.inode(ino)
	if err != nil {
		return 0, err
	}
	lo, hi := off, off+n
	if hi < lo || hi > meta.MaxFileSize {
		return 0, fail("reserve", meta.FileTooBig, fmt.Sprintf("%d+%d", off, n))
	}
	need := n
	if k := uint64(len(in.inline())); lo < k {
		need -= min(k, hi) - lo
	}
	counts := t.vol.tally.mode != tallyOff && t.vol.tally.ref != 0
	ref := t.vol.tally.ref
	var live []meta.Extent
	err = t.extents().scanLive(in, lo, func(e extent) bool {
		if e.Off >= hi {
			return false
		}
		x := sub(e.Extent, max(lo, e.Off), min(hi, e.End()))
		need -= x.Len
		switch {
		case counts && e.gen <= ref:
			need += x.Len
		case counts:
			live = append(live, x)
		}
		return true
	})
	if err != nil {
		return 0, err
	}
	if hi <= meta.InlineMax {
		need = max(need, hi-min(hi, in.Blocks))
	}
	if !counts {
		return need, nil
	}
	if then, err := t.inlineThen(ino); err != nil {
		return 0, err
	} else if need += sameBytes(then, in.inline()); len(live) == 0 {
		return need, nil
	}
	var then []meta.Extent
	for _, snap := range t.tallyLists() {
		if then, err = t.superseded(then, snap, ino, lo, hi); err != nil {
			return 0, err
		}
	}
	slices.SortFunc(then, func(a, b meta.Extent) int { return cmp.Compare(a.Off, b.Off) })
	return need + inCommon(then, live), nil
}

// runs is the sum.
func (h *holding) runs() (uint64, error) {
	h.t.view.base = h.t.vol.base
	all, err := h.t.snaps().snapshots()
	if err != nil {
		return 0, err
	}
	for _, s := range all {
		if s.tallied() {
			h.gens = append(h.gens, s.gen)
		}
	}
	inos, err := h.superseded()
	if err != nil || len(h.gens) == 0 {
		return 0, err
	}
	sum := uint64(0)
	h.origin = 0 // bytes that no counted snapshot sees are left out
	for _, ino := range inos {
		if err := h.read(ino); err != nil {
			return 0, err
		}
		h.eachLine(func(l []piece) {
			sweep(l, func(in []piece, n uint64) { sum += n * h.ended(in) })
		})
		slices.SortFunc(h.records, func(a, b piece) int { return cmp.Compare(a.first, b.first) })
		for i, a := range h.records {
			if a.first > a.last || a.last == len(h.gens) {
				continue
			}
			sum += uint64(len(a.data))
			for _, b := range h.records[i+1:] {
				if b.first == a.last+1 && b.first <= b.last {
					sum -= sameBytes(a.data, b.data)
				}
			}
		}
	}
	return sum, nil
}

// ended returns the number of runs of snapshots, without the live tree, with pieces of one
// place.
func (h *holding) ended(in []piece) (n uint64) {
	l := slices.DeleteFunc(slices.Clone(in), func(p piece) bool { return p.first > p.last })
	slices.SortFunc(l, func(a, b piece) int { return cmp.Compare(a.first, b.first) })
	for len(l) > 0 {
		last := l[0].last
		for l = l[1:]; len(l) > 0 && l[0].first <= last+1; l = l[1:] {
			last = max(last, l[0].last)
		}
		if last < len(h.gens) {
			n++
		}
	}
	return n
}
