package namespace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"penstock.io/penstock/meta"
)

//
// Clones. The store of a clone begins as a copy of its origin's store, made at any time after
// the snapshot was taken; CloneEffects turns the copy into the clone with a cost independent of
// the size of the tree:
//
//	generations   1 ...... g | g+1 ............ g+cloneGens | g+cloneGens+1 ...
//	              snapshot g | a gap: later changes of the  | the clone's own
//	              and older  | origin, which are absent     | changes
//
// Snapshot g is the clone's base: a snapshot record hidden from users. The base makes the
// versions below immutable for the rest of this package. Versions of a key below the base's
// version are absent, too.
//
// Extents of the base lie in chunks of the origin, or of the volumes from which the origin was
// cloned. Such chunks are foreign: the ids name another volume. The allocating volume counts,
// seals, repairs and deletes the chunk for ever (rule 9), so a clone keeps no records of
// foreign chunks and counts nothing in foreign chunks. The origin keeps the snapshot, with
// every byte, as long as it has the clone's note (prefix f).

const (
	// cloneGens is the number of generations of the origin that a clone skips. The origin takes
	// at most cloneGens snapshots after a cloned snapshot.
	cloneGens = 1 << 24
	// sweepBatch is the default number of versions examined by one SweepClone.
	sweepBatch = 1000
	// baseName is the name of a clone's base in its record.
	baseName = "origin"
	// maxUnnamed bounds the unlinked files that were open when the snapshot was taken. A clone
	// removes such files, and the effects of the removal are one journal entry.
	maxUnnamed = 4000
)

// base is the state with which a clone began.
type base struct {
	gaps []gap // ascending; none: all versions that the clone can't see were removed
}

// gap is the generations above lo and up to hi.
type gap struct{ lo, hi uint32 }

// swept reports that the sweep has begun: the last gap is one generation shorter than at the
// beginning of the clone. No other state can have such a gap, because no origin reaches the
// gap's last generation.
func (b *base) swept() bool {
	last := b.gaps[len(b.gaps)-1]
	return last.hi-last.lo < cloneGens
}

func (b *base) hides(gen uint32) bool {
	if b == nil {
		return false
	}
	for _, g := range b.gaps {
		if gen > g.lo && gen <= g.hi {
			return true
		}
	}
	return false
}

// below reports that a generation belongs to the base, or is older.
func (b *base) below(gen uint32) bool {
	return b != nil && len(b.gaps) > 0 && gen <= b.gaps[len(b.gaps)-1].lo
}

// absent reports whether, by a version, the key did not exist when the clone began. Such a
// version counts as no version, and older versions do not count either.
func (b *base) absent(gen uint32, val []byte) bool { return isTombstone(val) && b.below(gen) }

// clones are the operations on clones and on the snapshots that clones are made of, within an operation on the namespace.
type clones struct{ *tx }

func (t *tx) clones() clones { return clones{t} }

// foreign reports that the chunk belongs to another volume.
func (t clones) foreign(id meta.ChunkID) bool { return t.vol.base != nil && id.Volume != t.vol.id }

// clonesOf lists the volumes cloned from a snapshot; gen 0: from any.
func (t clones) clonesOf(gen uint32) (all []meta.VolumeID, oldest uint32, err error) {
	prefix := []byte{prefixClone}
	if gen != 0 {
		prefix = binary.BigEndian.AppendUint32(prefix, gen)
	}
	err = eachKey(t.r, prefix, 9, func(k, _ []byte) (bool, error) {
		if oldest == 0 {
			oldest = binary.BigEndian.Uint32(k[1:])
		}
		all = append(all, meta.VolumeID(binary.BigEndian.Uint32(k[5:])))
		return true, nil
	})
	return all, oldest, err
}

// roomForClones refuses a snapshot whose generation a clone would take for a generation of the
// clone.
func (t clones) roomForClones() error {
	_, oldest, err := t.clonesOf(0)
	if err == nil && oldest != 0 && t.vol.gen-oldest >= cloneGens-1 {
		err = fail("take snapshot", meta.ResourceExceeded, fmt.Sprintf("%d were taken since the one of generation %d, which has clones", t.vol.gen-oldest, oldest))
	}
	return err
}

// mayDrop refuses to delete a snapshot that clones need.
func (t clones) mayDrop(sn *snapshot) error {
	switch {
	case sn.state == snapshotBase && len(t.vol.base.gaps) > 0:
		return fail("delete snapshot", meta.Busy, "the volume is a clone of it")
	case sn.state != snapshotLive:
		return nil
	}
	all, _, err := t.clonesOf(sn.gen)
	if err == nil && len(all) > 0 {
		err = meta.E("delete snapshot", meta.Busy, sn.name, fmt.Errorf("volumes %v are clones of it", all))
	}
	return err
}

func (t clones) pinClone(op *meta.PinClone) error {
	key := appendCloneKey(nil, uint32(op.At), op.Clone)
	_, have, err := t.r.Get(key)
	if err != nil || have != op.Drop {
		return err
	}
	s := t.mark()
	if op.Drop {
		t.buf = append(t.buf, key...)
		t.deleteAt(s)
		return nil
	}
	if _, err := t.snaps().snapshotAt(uint32(op.At)); err != nil {
		return err
	}
	all, _, err := t.clonesOf(uint32(op.At))
	if err != nil {
		return err
	}
	if len(all) >= meta.MaxClones {
		return fail("clone", meta.ResourceExceeded, fmt.Sprintf("%d clones of one snapshot", len(all)))
	}
	if uint64(t.vol.gen)+cloneGens >= 1<<32-cloneGens {
		return fail("clone", meta.ResourceExceeded, "it is a clone of a clone, and so on, too many times")
	}
	t.buf = append(t.buf, key...)
	t.putMarker(s)
	return nil
}

// ClonePin notes that a volume was cloned from a snapshot.
type ClonePin struct {
	At    meta.Generation
	Clone meta.VolumeID
}

// ClonePins lists the notes of a volume's clones.
func ClonePins(r Reader) (all []ClonePin, err error) {
	err = eachKey(r, []byte{prefixClone}, 9, func(k, _ []byte) (bool, error) {
		all = append(all, ClonePin{meta.Generation(binary.BigEndian.Uint32(k[1:])), meta.VolumeID(binary.BigEndian.Uint32(k[5:]))})
		return true, nil
	})
	return all, err
}

// IsClone tells whether a volume may refer to other volumes' chunks.
func IsClone(r Reader) (bool, error) {
	t := tx{view: view{r: r}}
	err := t.begin()
	return t.vol.base != nil, err
}

// CloneEffects returns the effects that turn a copy of a volume's state into a clone of a
// snapshot of the volume, under another id: the first entry of the clone's journal. The effects
// mean the same for a copy of any later state of the origin, so the copy can be made again from
// a later state. The number of effects grows with the unlinked inodes that the snapshot still
// had; the cost of finding the inodes, with the changes since the snapshot. Errors:
// NoSuchSnapshot, ResourceExceeded.
func CloneEffects(r Reader, at meta.Generation, id meta.VolumeID, p meta.Policy, now meta.Time) ([]Effect, error) {
	t := &tx{view: view{r: r}, c: Context{Now: now, Volume: id}}
	sn, unnamed, err := t.clones().beginClone(at)
	if err != nil {
		return nil, err
	}
	t.mark()
	for _, p := range []byte{prefixChunk, prefixDelete, prefixWriter, prefixOrphan, prefixSession, prefixReply, prefixReap, prefixSnap, prefixBuried, prefixInoGen, prefixNameGen, prefixClone, prefixPin, prefixDigest, prefixIndex, prefixEvent, prefixChanger, prefixMirror, prefixOver, prefixLeader} {
		t.effects = append(t.effects, Effect{DeleteRange, []byte{p}, []byte{p + 1}})
	}
	v := &t.vol
	b := &base{}
	if v.base != nil {
		b.gaps = append(b.gaps, v.base.gaps...)
	}
	b.gaps = append(b.gaps, gap{sn.gen, sn.gen + cloneGens})
	v.id, v.gen, v.base, v.policy, v.events = id, sn.gen+cloneGens+1, b, p, eventLog{}
	v.inodes, v.bytes, v.lastSnap, v.snaps, v.buried = sn.inodes, sn.bytes, sn.gen, 1, 0
	if v.tally = (tally{}); p.QuotaSnapshots {
		v.tally.mode = tallyExact // the clone has no snapshots of its own
	}
	t.gen, t.base = v.gen, b
	t.snaps().putSnapshot(&snapshot{gen: sn.gen, state: snapshotBase, created: sn.created, inodes: sn.inodes, bytes: sn.bytes, name: baseName})
	for _, ino := range unnamed {
		in, err := t.load(ino)
		if err != nil {
			return nil, err
		}
		if in.Nlink == 0 {
			in.holders, in.tmp = 0, 0
		}
		from := uint64(0)
		if in.Nlink != 0 {
			from = in.reapFrom
		}
		t.extents().queueReap(in, from)
		in.dirty = true
	}
	if err := t.finish(false); err != nil {
		return nil, err
	}
	return t.effects, nil
}

// MayClone checks whether CloneEffects can make a clone of a snapshot, now or later: the
// refusals depend on the snapshot alone. Costs and errors are as for CloneEffects.
func MayClone(r Reader, at meta.Generation) error {
	t := &tx{view: view{r: r}}
	_, _, err := t.clones().beginClone(at)
	return err
}

// beginClone finds a snapshot and its unnamed inodes.
func (t clones) beginClone(at meta.Generation) (sn snapshot, unnamed []meta.Ino, err error) {
	if err := t.begin(); err != nil {
		return sn, nil, err
	}
	if sn, err = t.snaps().snapshotAt(uint32(at)); err != nil {
		return sn, nil, err
	}
	then := &tx{view: view{r: t.r, gen: sn.gen, base: t.base}, vol: t.vol}
	unnamed, err = then.clones().unnamed(t.tx)
	return sn, unnamed, err
}

// unnamed lists the inodes of a snapshot that users don't see, or don't see completely:
// unlinked open files, and files with a tail not reaped yet. Such an inode is still in the live
// queues, or has changed since.
func (t clones) unnamed(live *tx) (all []meta.Ino, err error) {
	seen := map[meta.Ino]bool{}
	var inner error
	look := func(ino meta.Ino) bool {
		if seen[ino] {
			return true
		}
		in, err := t.load(ino)
		t.inodes = t.inodes[:0]
		if meta.KindOf(err) == meta.Stale {
			return true
		}
		if inner = err; err != nil {
			return false
		}
		if in.Nlink == 0 || in.reap {
			seen[ino] = true
			all = append(all, ino)
		}
		return len(all) <= maxUnnamed
	}
	scan := func(lo, hi []byte, length int) error {
		var inos []meta.Ino
		for more := true; more; {
			inos, more = inos[:0], false
			err := t.r.Scan(lo, hi, func(k, _ []byte) bool {
				if len(k) != length {
					inner = fail("clone", meta.Corrupt, fmt.Sprintf("key %x", k))
					return false
				}
				if more = len(inos) == checkPage; more {
					return false
				}
				inos = append(inos, meta.Ino(binary.BigEndian.Uint64(k[length-8:])))
				lo = append(bytes.Clone(k), 0)
				return true
			})
			if err = errors.Join(err, inner); err != nil {
				return err
			}
			for _, ino := range inos {
				if !look(ino) {
					break
				}
			}
			if inner != nil || len(all) > maxUnnamed {
				break
			}
		}
		return inner
	}
	since := binary.BigEndian.AppendUint32([]byte{prefixInoGen}, t.gen+1)
	for _, q := range []struct {
		lo, hi []byte
		length int
	}{{[]byte{prefixOrphan}, []byte{prefixOrphan + 1}, 17}, {[]byte{prefixReap}, []byte{prefixReap + 1}, 9}, {since, []byte{prefixInoGen + 1}, 13}} {
		if err := scan(q.lo, q.hi, q.length); err != nil {
			return nil, err
		}
	}
	if len(all) > maxUnnamed {
		return nil, fail("clone", meta.ResourceExceeded, fmt.Sprintf("more than %d files were unlinked and still open, or not yet reaped, when the snapshot was taken: clone a later one", maxUnnamed))
	}
	return all, nil
}

// sweepPrefixes are the prefixes of versioned keys, in order; a sweep examines the notes of
// buried versions before them.
var sweepPrefixes = []byte{prefixDentry, prefixExtent, prefixInode, prefixCookie, prefixXattr}

// sweepClone removes, in steps, versions in gaps and versions below the base's.
func (t clones) sweepClone(op *meta.SweepClone, res *meta.Result) error {
	b := t.vol.base
	if b == nil {
		res.EOF = true
		return nil
	}
	all, err := t.snaps().snapshots()
	if err != nil {
		return err
	}
	if op.Forget {
		for _, s := range all {
			if s.state != snapshotLive || len(b.gaps) > 0 {
				return fail("sweep clone", meta.Busy, s.name)
			}
		}
		t.vol.base = nil
		res.EOF = true
		return nil
	}
	limit := int(op.Max)
	if limit == 0 {
		limit = sweepBatch
	}
	from := op.From
	if len(from) == 0 {
		from = []byte{prefixBuried}
	}
	if len(b.gaps) == 0 {
		from = []byte{prefixXattr + 1}
	} else if !b.swept() {
		// A server whose copy of the state was made from another state of the origin has more
		// versions to remove than the owner finds here: the changed gap makes the server look
		// (see Unseen).
		t.vol.base = &base{gaps: slices.Clone(b.gaps)}
		t.vol.base.gaps[len(b.gaps)-1].hi--
	}
	for _, p := range append([]byte{prefixBuried}, sweepPrefixes...) {
		if from[0] > p {
			continue
		}
		if from[0] < p {
			from = []byte{p}
		}
		var next []byte
		var n int
		if p == prefixBuried {
			next, n, err = t.sweepNotes(from, limit)
		} else {
			next, n, err = t.sweepSome(from, []byte{p + 1}, limit, all)
		}
		if err != nil {
			return err
		}
		if next != nil {
			res.Data = next
			return nil
		}
		if limit -= n; limit <= 0 && p != prefixXattr {
			res.Data = []byte{p + 1}
			return nil
		}
	}
	if len(b.gaps) > 0 {
		t.vol.base = &base{}
	}
	res.EOF = true
	if len(all) > 0 && all[0].state == snapshotBase {
		res.Off = uint64(all[0].gen)
	}
	return nil
}

// sweepNotes examines at most limit notes of buried versions, and returns the number of
// examined notes and the key at which to continue. sweepNotes removes notes about versions that
// the clone began with if the version is a tombstone or absent: older programs wrote such
// notes, and a new copy of the state may lack the named version.
func (t clones) sweepNotes(lo []byte, limit int) (next []byte, n int, err error) {
	var keys [][]byte
	err = t.r.Scan(lo, []byte{prefixBuried + 1}, func(k, _ []byte) bool {
		if n == limit {
			next = bytes.Clone(k)
			return false
		}
		n++
		if len(k) > 5+genLen && t.base.below(^binary.BigEndian.Uint32(k[len(k)-genLen:])) {
			keys = append(keys, bytes.Clone(k))
		}
		return true
	})
	for _, k := range keys {
		v, have, gerr := t.r.Get(k[5:])
		if err = errors.Join(err, gerr); err != nil {
			return nil, n, err
		}
		if !have || isTombstone(v) {
			s := t.mark()
			t.buf = append(t.buf, k...)
			t.deleteAt(s)
		}
	}
	return next, n, err
}

// sweepSome examines about limit versions, whole keys at a time, and returns their number and
// the next key, nil at the end.
func (t clones) sweepSome(lo, hi []byte, limit int, all []snapshot) (next []byte, n int, err error) {
	keys, next, n, err := keysWithVersions(t.r, lo, hi, limit)
	if err != nil {
		return nil, n, err
	}
	for i := range keys {
		k := &keys[i]
		left, unseen := t.base.sees(k.l)
		for _, v := range unseen {
			s := t.mark()
			t.buf = putGen(append(t.buf, k.base...), v.gen)
			t.deleteAt(s)
		}
		if len(left) > 0 && len(unseen) > 0 {
			if err := t.snaps().dropTombs(k.base, left, all); err != nil {
				return nil, n, err
			}
		}
	}
	return next, n, nil
}

// versions are the versions of one key, the youngest first.
type versions struct {
	base []byte
	l    []version
}

// keysWithVersions reads about limit versions, whole keys at a time, and returns their number
// and the next key, nil at the end.
func keysWithVersions(r Reader, lo, hi []byte, limit int) (keys []versions, next []byte, n int, err error) {
	var inner error
	err = r.Scan(lo, hi, func(k, v []byte) bool {
		if len(k) < 1+8+genLen {
			inner = fail("sweep clone", meta.Corrupt, fmt.Sprintf("key %x", k))
			return false
		}
		b := k[:len(k)-genLen]
		if len(keys) == 0 || !bytes.Equal(keys[len(keys)-1].base, b) {
			if n >= limit {
				next = bytes.Clone(b)
				return false
			}
			keys = append(keys, versions{base: bytes.Clone(b)})
		}
		last := &keys[len(keys)-1]
		last.l = append(last.l, version{^binary.BigEndian.Uint32(k[len(k)-genLen:]), isTombstone(v)})
		n++
		return true
	})
	return keys, next, n, errors.Join(err, inner)
}

// sees divides the versions of a key, the youngest first, into versions that exist in the
// clone, and versions in gaps or below the base's.
func (b *base) sees(l []version) (left, unseen []version) {
	under := false
	for _, v := range l {
		if under || b.hides(v.gen) {
			unseen = append(unseen, v)
			continue
		}
		left = append(left, v)
		under = b.below(v.gen)
	}
	return left, unseen
}

// Unseen is for servers that replay a journal. Before the caller applies the effects of an
// entry to r, it must remove for good the keys that Unseen passes to remove, some at a time.
// Unseen passes no keys, unless the entry begins to sweep a clone. Then the keys name versions
// of the origin, in the server's copy of the clone's state, hidden from the clone. A copy made
// from another state of the origin has other hidden versions than the owner's copy, but the
// steps of the sweep name only the owner's: the other versions would become visible as soon as
// the gaps are gone. Errors: IO, Corrupt, and the errors of remove.
func Unseen(r Reader, effects []Effect, remove func(keys [][]byte) error) error {
	i := slices.IndexFunc(effects, func(e Effect) bool { return e.Kind == Put && len(e.Key) == 1 && e.Key[0] == prefixVolume })
	if i < 0 {
		return nil
	}
	var next volume
	if err := decodeVolume(effects[i].Value, &next); err != nil || next.base == nil || len(next.base.gaps) > 0 && !next.base.swept() {
		return err
	}
	t := tx{view: view{r: r}}
	b, have, err := r.Get(effects[i].Key)
	if err == nil && have {
		err = decodeVolume(b, &t.vol)
	}
	if t.base = t.vol.base; err != nil || !have || t.base == nil || len(t.base.gaps) == 0 {
		return err
	}
	if t.base.swept() && len(next.base.gaps) > 0 {
		return nil // examined when the sweep began; again at the end, because an older program may have run meanwhile
	}
	for _, p := range sweepPrefixes {
		for from := []byte{p}; from != nil; {
			keys, next, _, err := keysWithVersions(r, from, []byte{p + 1}, sweepBatch)
			if err != nil {
				return err
			}
			var gone [][]byte
			for _, k := range keys {
				left, unseen := t.base.sees(k.l)
				if n := len(left); n > 0 && left[n-1].tomb && t.base.below(left[n-1].gen) {
					unseen = append(unseen, left[n-1])
				}
				for _, v := range unseen {
					gone = append(gone, putGen(bytes.Clone(k.base), v.gen))
				}
			}
			if len(gone) > 0 {
				if err := remove(gone); err != nil {
					return err
				}
			}
			from = next
		}
	}
	return nil
}

// adoptExtents swaps places in records of any generation.
func (t clones) adoptExtents(op *meta.AdoptExtents, res *meta.Result) error {
	if len(op.Extents) > maxEdit {
		return fail("adopt extents", meta.ResourceExceeded, fmt.Sprintf("%d extents", len(op.Extents)))
	}
	for _, a := range op.Extents {
		e := a.Old
		e.Chunk, e.ChunkOff, e.OpenEnded = a.Copy, a.Off, false
		if a.Copy.IsZero() || !t.foreign(a.Old.Chunk) {
			return fail("adopt extents", meta.Invalid, fmt.Sprintf("%v in place of %v", a.Copy, a.Old.Chunk))
		}
		if err := t.content().checkNew(e); err != nil {
			return err
		}
		baseKey := appendExtentBase(nil, a.Ino, a.Old.End())
		key := putGen(bytes.Clone(baseKey), uint32(a.At))
		b, ok, err := t.r.Get(key)
		if err != nil {
			return err
		}
		if !ok || isTombstone(b) {
			continue
		}
		old, err := decodeExtent(b, a.Old.End())
		if err != nil {
			return err
		}
		if old != a.Old {
			continue
		}
		c, err := t.chunk(a.Copy)
		if err != nil {
			return err
		}
		// A superseded extent is counted among the bytes that only snapshots see.
		buried := false
		if err := t.r.Scan(baseKey, key, func(k, _ []byte) bool {
			buried = !t.base.hides(^binary.BigEndian.Uint32(k[len(k)-genLen:]))
			return !buried
		}); err != nil {
			return err
		}
		if buried {
			t.vol.buried += e.Len
		}
		c.Live += e.Len
		res.Off += e.Len
		s := t.mark()
		t.buf = append(t.buf, key...)
		v := len(t.buf)
		t.buf = appendExtent(t.buf, e)
		t.putAt(s, v)
	}
	if len(op.Extents) > 0 {
		t.tallyMoves()
	}
	// Indexes made earlier have the old places of the bytes.
	indexes, err := Indexes(t.r)
	if err != nil || len(op.Extents) == 0 {
		return err
	}
	for _, at := range slices.Sorted(maps.Keys(indexes)) {
		if err := t.dropIndex(uint32(at)); err != nil {
			return err
		}
	}
	return nil
}

// ForeignExtent is an extent in another volume's chunk.
type ForeignExtent struct {
	Ino meta.Ino
	At  meta.Generation // generation in which the extent was written
	meta.Extent
}

// ForeignExtents visits a clone's extents in chunks of other volumes, of every generation seen
// by the clone or a snapshot of the clone, until fn returns false.
func ForeignExtents(r Reader, fn func(e ForeignExtent) bool) error {
	t := tx{view: view{r: r}}
	if err := t.begin(); err != nil || t.vol.base == nil {
		return err
	}
	return allExtents(&t, func(ino meta.Ino, gen uint32, e meta.Extent) bool {
		return e.Chunk.IsZero() || !t.clones().foreign(e.Chunk) || fn(ForeignExtent{ino, meta.Generation(gen), e})
	})
}
