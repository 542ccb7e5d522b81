package namespace

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
)

//
// Snapshots. Taking a snapshot records the live generation and begins the next: later changes
// are written beside the snapshot's versions (tx.drop, tx.renew). A superseded version is
// buried with the youngest snapshot that sees the version. So when a snapshot is deleted, the
// snapshot's list has the versions that no other snapshot saw; the rest of the list moves to
// the previous snapshot.

// dropBatch is the default number of buried versions examined by one DropSnapshot.
const dropBatch = 1000

func checkSnapshotName(name string) error {
	if err := checkName("snapshot", name); err != nil {
		if meta.KindOf(err) == meta.NotFound {
			return fail("snapshot", meta.Invalid, "the empty name")
		}
		return err
	}
	if isDots(name) || strings.ContainsAny(name, "@:") { // a mount's source is VOLUME@SNAPSHOT:PATH
		return fail("snapshot", meta.Invalid, name)
	}
	return nil
}

// snapshots reads all snapshot records, oldest first.
func (t snapshots) snapshots() (l []snapshot, err error) {
	err = eachKey(t.r, []byte{prefixSnap}, 5, func(k, v []byte) (bool, error) {
		s, err := decodeSnapshot(v, binary.BigEndian.Uint32(k[1:]))
		l = append(l, s)
		return true, err
	})
	return l, err
}

// snapshotAt reads a readable snapshot.
func (t snapshots) snapshotAt(gen uint32) (snapshot, error) {
	missing := fail("snapshot", meta.NoSuchSnapshot, fmt.Sprintf("generation %d", gen))
	b, ok, err := t.r.Get(appendSnapKey(nil, gen))
	if err != nil {
		return snapshot{}, err
	}
	if !ok {
		return snapshot{}, missing
	}
	s, err := decodeSnapshot(b, gen)
	if err == nil && s.state != snapshotLive {
		err = missing
	}
	return s, err
}

// asOf returns a tx on the same state as of a snapshot. The returned tx has separate inodes,
// none of which is an inode of the live generation.
func (t snapshots) asOf(g meta.Generation) (*tx, error) {
	s, err := t.snapshotAt(uint32(g))
	if err != nil {
		return nil, err
	}
	q := &tx{view: view{r: t.r, gen: s.gen, base: t.base}, vol: t.vol, c: t.c}
	q.vol.bytes, q.vol.inodes, q.vol.tally = s.bytes, s.inodes, tally{}
	return q, nil
}

func (t snapshots) putSnapshot(sn *snapshot) {
	s := t.mark()
	t.buf = appendSnapKey(t.buf, sn.gen)
	v := len(t.buf)
	t.buf = appendSnapshot(t.buf, sn)
	t.putAt(s, v)
}

func (t snapshots) takeSnapshot(op *meta.TakeSnapshot, res *meta.Result) error {
	if err := checkSnapshotName(op.Name); err != nil {
		return err
	}
	have, err := t.snapshots()
	if err != nil {
		return err
	}
	if i := slices.IndexFunc(have, func(s snapshot) bool { return s.name == op.Name && s.state == snapshotLive }); i >= 0 {
		if op.Token != 0 && have[i].token == op.Token {
			res.Off = uint64(have[i].gen)
			return nil
		}
		return fail("take snapshot", meta.Exists, op.Name)
	}
	if n := len(have); n > meta.MaxSnapshots || n == meta.MaxSnapshots && have[0].state != snapshotBase {
		return fail("take snapshot", meta.ResourceExceeded, fmt.Sprintf("%d snapshots", len(have)))
	}
	if t.vol.gen == 1<<32-1 {
		return fail("take snapshot", meta.ResourceExceeded, "generations are used up")
	}
	if err := t.clones().roomForClones(); err != nil {
		return err
	}
	var open meta.Ino
	if err := OpenEnded(t.r, func(ino meta.Ino, _ meta.ChunkRecord) bool {
		open = ino
		return false
	}); err != nil {
		return err
	}
	if open != 0 {
		return fail("take snapshot", meta.Busy, fmt.Sprintf("inode %d has an open-ended extent", open))
	}
	t.putSnapshot(&snapshot{gen: t.vol.gen, state: snapshotLive, created: t.c.Now, inodes: t.vol.inodes, bytes: t.vol.bytes, token: op.Token, name: op.Name})
	res.Off = uint64(t.vol.gen)
	t.vol.lastSnap = t.vol.gen
	if t.vol.tally.mode != tallyOff {
		t.vol.tally.ref = t.vol.gen
	}
	t.vol.snaps++
	t.vol.gen++
	t.event(&meta.Event{Kind: meta.EventSnapshotTaken, Name: op.Name})
	return nil
}

// dropSnapshot does one step of the deletion. INVARIANT: until the list is empty and the record
// is gone, the snapshot counts when versions are superseded.
func (t snapshots) dropSnapshot(op *meta.DropSnapshot, res *meta.Result) error {
	all, err := t.snapshots()
	if err != nil {
		return err
	}
	at := slices.IndexFunc(all, func(s snapshot) bool { return s.gen == uint32(op.At) })
	if at < 0 {
		res.EOF = true
		return nil
	}
	if all[at].rolling {
		return fail("delete snapshot", meta.Busy, all[at].name)
	}
	if err := t.clones().mayDrop(&all[at]); err != nil {
		return err
	}
	if all[at].state == snapshotLive {
		if err := t.notShown(&all[at]); err != nil {
			return err
		}
		if err := t.unpinned(&all[at]); err != nil {
			return err
		}
		t.dropDigest(all[at].gen)
		if err := t.dropIndex(all[at].gen); err != nil {
			return err
		}
		t.event(&meta.Event{Kind: meta.EventSnapshotDeleted, Name: all[at].name})
	}
	asked := at
	if i := slices.IndexFunc(all, func(s snapshot) bool { return s.state == snapshotLeaving }); i >= 0 {
		at = i
	}
	if all[asked].state == snapshotLive && at != asked {
		all[asked].state = snapshotGone
		t.putSnapshot(&all[asked])
	}
	sn := all[at]
	if sn.state != snapshotLeaving {
		sn.state = snapshotLeaving
		t.tallyLeaves(all, at)
		t.putSnapshot(&sn)
	}
	limit := int(op.Max)
	if limit == 0 {
		limit = dropBatch
	}
	var before uint32
	if at > 0 {
		before = all[at-1].gen
	}
	keys, err := t.keysFrom(appendBuriedKey(nil, sn.gen, nil), limit)
	if err != nil {
		return err
	}
	freed := t.vol.buried
	for _, k := range keys {
		if err := t.unbury(k, before, all); err != nil {
			return err
		}
	}
	res.Off = freed - t.vol.buried
	if len(keys) == limit {
		return nil
	}
	first := 0
	if all[0].state == snapshotBase {
		first = 1
	}
	if at == first || at == 0 {
		// No comparison reaches back beyond the oldest snapshot.
		upTo := t.vol.gen
		if len(all) > at+1 {
			upTo = all[at+1].gen
		}
		n, err := t.forgetChanges(upTo, limit-len(keys))
		if err != nil || n == limit-len(keys) {
			return err
		}
	}
	s := t.mark()
	t.buf = appendSnapKey(t.buf, sn.gen)
	t.deleteAt(s)
	t.vol.snaps--
	if at == len(all)-1 {
		t.vol.lastSnap = before
	}
	res.EOF = at == asked
	return nil
}

// keysFrom lists at most limit keys with a prefix.
func (t snapshots) keysFrom(prefix []byte, limit int) (keys [][]byte, err error) {
	err = t.r.Scan(prefix, after(prefix), func(k, _ []byte) bool {
		if len(keys) < limit {
			keys = append(keys, bytes.Clone(k))
		}
		return len(keys) < limit
	})
	return keys, err
}

// forgetChanges removes at most limit notes of generations up to upTo.
func (t snapshots) forgetChanges(upTo uint32, limit int) (n int, err error) {
	for _, prefix := range []byte{prefixInoGen, prefixNameGen} {
		lo, hi := []byte{prefix}, binary.BigEndian.AppendUint32([]byte{prefix}, upTo)
		err := t.r.Scan(lo, after(hi), func(k, _ []byte) bool {
			if n < limit {
				s := t.mark()
				t.buf = append(t.buf, k...)
				t.deleteAt(s)
				n++
			}
			return n < limit
		})
		if err != nil || n == limit {
			return n, err
		}
	}
	return n, nil
}

// unbury handles one entry of the list of a snapshot under deletion. If the previous snapshot
// sees the version, the version moves to the previous snapshot's list; else unbury removes the
// version, together with a tombstone above that then covers nothing.
func (t snapshots) unbury(entry []byte, before uint32, all []snapshot) error {
	key := entry[5:]
	if len(key) < 1+8+genLen {
		return fail("delete snapshot", meta.Corrupt, fmt.Sprintf("key %x", entry))
	}
	s := t.mark()
	t.buf = append(t.buf, entry...)
	t.deleteAt(s)
	base := bytes.Clone(key[:len(key)-genLen])
	gen := ^binary.BigEndian.Uint32(key[len(key)-genLen:])
	if gen <= before {
		s := t.mark()
		t.buf = appendBuriedKey(t.buf, before, key)
		t.putMarker(s)
		return nil
	}
	// The versions around the entry, newest first.
	var newer []version
	older := false
	var val []byte
	err := t.r.Scan(base, after(base), func(k, v []byte) bool {
		g := ^binary.BigEndian.Uint32(k[len(k)-genLen:])
		switch {
		case t.base.hides(g):
		case g > gen:
			newer = append(newer, version{g, isTombstone(v)})
		case g == gen:
			val = bytes.Clone(v)
		default:
			older = !t.base.absent(g, v)
			return false
		}
		return true
	})
	if err != nil {
		return err
	}
	if val == nil {
		return fail("delete snapshot", meta.Corrupt, fmt.Sprintf("key %x is buried and not there", key))
	}
	s = t.mark()
	t.buf = append(t.buf, key...)
	t.deleteAt(s)
	if base[0] == prefixExtent && !isTombstone(val) {
		if err := t.uncountBuried(base, val); err != nil {
			return err
		}
	}
	if older {
		return nil
	}
	return t.dropTombs(base, newer, all)
}

// dropTombs removes the tombstones at the end of a list of a key's versions, newest first, when
// no version lies below any more.
func (t snapshots) dropTombs(base []byte, newer []version, all []snapshot) error {
	for i := len(newer) - 1; i >= 0 && newer[i].tomb; i-- {
		s := t.mark()
		t.buf = putGen(append(t.buf, base...), newer[i].gen)
		t.deleteAt(s)
		if i == 0 {
			break // the newest version: not buried
		}
		// The tombstone is buried with the youngest snapshot before the next version above.
		j, _ := slices.BinarySearchFunc(all, newer[i-1].gen, func(s snapshot, g uint32) int { return cmp.Compare(s.gen, g) })
		if j == 0 || all[j-1].gen < newer[i].gen {
			return fail("delete snapshot", meta.Corrupt, fmt.Sprintf("no snapshot sees %x of generation %d", base, newer[i].gen))
		}
		with := []uint32{all[j-1].gen}
		if j > 1 && all[j-1].state == snapshotLeaving && newer[i].gen <= all[j-2].gen {
			with = append(with, all[j-2].gen) // the tombstone may have moved to the list
		}
		for _, snap := range with {
			s = t.mark()
			t.buf = putGen(append(appendBuriedKey(t.buf, snap, nil), base...), newer[i].gen)
			t.deleteAt(s)
		}
	}
	return nil
}

// exhume removes the burial note of a version that is the newest again.
func (t snapshots) exhume(base []byte, gen uint32) error {
	with := []uint32{t.vol.lastSnap}
	all, err := t.snapshots()
	if err != nil {
		return err
	}
	if n := len(all); n > 1 && all[n-1].state == snapshotLeaving {
		with = append(with, all[n-2].gen)
	}
	for _, snap := range with {
		s := t.mark()
		t.buf = putGen(append(appendBuriedKey(t.buf, snap, nil), base...), gen)
		t.deleteAt(s)
	}
	return nil
}

// version is one version of a key.
type version struct {
	gen  uint32
	tomb bool
}

// uncountBuried subtracts the bytes of an extent without holders from the chunk's count.
func (t snapshots) uncountBuried(base, val []byte) error {
	e, err := decodeExtent(val, binary.BigEndian.Uint64(base[9:]))
	if err != nil || e.Chunk.IsZero() || t.clones().foreign(e.Chunk) {
		return err
	}
	c, err := t.chunk(e.Chunk)
	if err != nil {
		return err
	}
	if e.OpenEnded || c.Live < e.Len || t.vol.buried < e.Len {
		return fail("delete snapshot", meta.Corrupt, fmt.Sprintf("chunk %v counts %d live bytes, %d are buried, an extent holds %d", e.Chunk, c.Live, t.vol.buried, e.Len))
	}
	c.Live -= e.Len
	t.vol.buried -= e.Len
	return nil
}

// Snapshots lists a volume's snapshots, oldest first.
func Snapshots(r Reader) ([]meta.Snapshot, error) {
	t := tx{view: view{r: r}}
	all, err := t.snaps().snapshots()
	if err != nil {
		return nil, err
	}
	if len(all) > 0 && all[0].state == snapshotBase {
		all = all[1:]
	}
	l := make([]meta.Snapshot, len(all))
	for i, s := range all {
		l[i] = s.told()
	}
	return l, nil
}

// told returns the snapshot's description for users.
func (s *snapshot) told() meta.Snapshot {
	l := meta.Snapshot{Name: s.name, At: meta.Generation(s.gen), Created: s.created, Inodes: s.inodes, Bytes: s.bytes, Deleting: s.state != snapshotLive, Rolling: s.rolling}
	if meta.IsGroupID(s.token) {
		l.Group = s.token
	}
	return l
}

// Buried returns the bytes of chunks that only snapshots see.
func Buried(r Reader) (uint64, error) {
	t := tx{view: view{r: r}}
	err := t.begin()
	return t.vol.buried, err
}
