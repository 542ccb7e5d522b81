package namespace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

// view reads versioned keys as of one generation.
type view struct {
	r       Reader
	gen     uint32
	base    *base     // hides versions in its gaps; nil: hides nothing
	scratch [320]byte // keys for reading; longer than any
}

// get finds the newest version of base at or before the view's generation. gen is the
// generation of the version, also of a tombstone; zero: no version, or a tombstone in the state
// with which a clone began.
func (v *view) get(base []byte) (val []byte, gen uint32, ok bool, err error) {
	k := putGen(base, v.gen)
	if v.gen == firstGen {
		val, ok, err = v.r.Get(k)
		if ok {
			gen = firstGen
		}
		return val, gen, ok && !isTombstone(val), err
	}
	if base[0] == prefixInode {
		// While a directory is being filled, or a file is being written, the inode has a
		// version of the current generation: a point read finds the version at a fraction of
		// the cost of a scan. Names being read mostly have older versions, and names being made
		// have no versions.
		if val, ok, err = v.r.Get(k); ok || err != nil {
			return val, v.gen, ok && !isTombstone(val), err
		}
	}
	hi := after(base)
	err = v.r.Scan(k, hi, func(k, b []byte) bool {
		g := ^binary.BigEndian.Uint32(k[len(k)-genLen:])
		if v.base.hides(g) {
			return true
		}
		if !v.base.absent(g, b) {
			gen, val, ok = g, bytes.Clone(b), true
		}
		return false
	})
	return val, gen, ok && !isTombstone(val), err
}

func isTombstone(v []byte) bool { return len(v) == 1 && v[0] == tombstone }

// scan visits the versions, as the view sees them, of the keys lo <= k < hi (both without a
// generation). A damaged key length is an error, and never skipped.
func (v *view) scan(lo, hi []byte, fn func(base, val []byte, gen uint32) (more bool, err error)) error {
	return v.scanAll(lo, hi, fn, nil)
}

// scanAll is scan, and also visits tombstones that are the newest version.
func (v *view) scanAll(lo, hi []byte, fn func(base, val []byte, gen uint32) (more bool, err error), tomb func(base []byte, gen uint32)) error {
	var last []byte
	var inner error
	err := v.r.Scan(lo, hi, func(k, val []byte) bool {
		if len(k) < 1+8+genLen {
			inner = fail("scan", meta.Corrupt, fmt.Sprintf("key %x is too short", k))
			return false
		}
		base := k[:len(k)-genLen]
		gen := ^binary.BigEndian.Uint32(k[len(k)-genLen:])
		if gen > v.gen || v.base.hides(gen) {
			return true
		}
		if v.gen != firstGen {
			if last != nil && bytes.Equal(base, last) {
				return true // an older version
			}
			last = append(last[:0], base...)
		}
		if isTombstone(val) {
			if tomb != nil && !v.base.below(gen) {
				tomb(base, gen)
			}
			return true
		}
		var more bool
		more, inner = fn(base, val, gen)
		return more && inner == nil
	})
	if inner != nil {
		return inner
	}
	return err
}

// tx is one operation in progress: the records read, the changes, and the effects so far.
// Inodes and chunks are changed in memory and written by finish; all other changes become
// effects at once.
//
// The operations on a kind of record are methods of a type of their own, such as directories,
// which embeds the tx and adds no state.
type tx struct {
	view
	c      Context
	vol    volume
	was    volume
	inodes []*inode
	chunks []*chunk
	chunkI map[meta.ChunkID]int // used with many chunks only
	names  [2]foundName         // looked up last: an operation asks for two at most
	ends   foundEnds            // of the last scan of extents
	budget int                  // extents that the step may still remove

	buf     []byte // the effects' bytes
	effects []Effect
}

// begin reads the volume's record.
func (t *tx) begin() error {
	b, ok, err := t.r.Get(volumeKey)
	if err != nil {
		return err
	}
	if !ok {
		return fail("open volume", meta.NoSuchVolume, "the store holds no volume record")
	}
	if err := decodeVolume(b, &t.vol); err != nil {
		return err
	}
	t.was = t.vol
	t.gen, t.base = t.vol.gen, t.vol.base
	return nil
}

// finish turns changed inodes, chunks and counters into effects; metered
// enforces the quotas.
func (t *tx) finish(metered bool) error {
	for _, in := range t.inodes {
		if err := t.flushInode(in); err != nil {
			return err
		}
	}
	if metered {
		if err := t.checkQuota(); err != nil {
			return err
		}
	}
	for _, c := range t.chunks {
		t.flushChunk(c)
	}
	if t.vol != t.was {
		s := t.mark()
		t.buf = append(t.buf, prefixVolume)
		k := t.cut(s)
		t.buf = appendVolume(t.buf, &t.vol)
		t.effects = append(t.effects, Effect{Put, k, t.cut(s + len(k))})
	}
	return nil
}

// ---- effects

// mark and cut slice the arena in which keys and values are built. After the arena grows,
// earlier slices refer to the old memory, which does not change.
func (t *tx) mark() int {
	if t.buf == nil {
		t.buf = make([]byte, 0, 512)
		n := 8
		if t.gen != firstGen {
			n = 12 // with notes and buried versions
		}
		t.effects = make([]Effect, 0, n)
	}
	return len(t.buf)
}

func (t *tx) cut(from int) []byte { return t.buf[from:len(t.buf):len(t.buf)] }

// putAt adds an effect whose key begins at s and whose value begins at v.
func (t *tx) putAt(s, v int) {
	t.effects = append(t.effects, Effect{Put, t.buf[s:v:v], t.cut(v)})
}

func (t *tx) deleteAt(s int) {
	t.effects = append(t.effects, Effect{Kind: Delete, Key: t.cut(s)})
}

// putMarker adds an unversioned key without a value; the key begins at s.
func (t *tx) putMarker(s int) {
	t.effects = append(t.effects, Effect{Put, t.cut(s), marker})
}

// drop removes a versioned key whose base begins at s in the arena. drop leaves a tombstone if
// a snapshot sees the version below, and otherwise no version.
func (t *tx) drop(s int) error {
	if t.gen == firstGen {
		t.buf = putGen(t.buf, t.gen)
		t.deleteAt(s)
		return nil
	}
	h, err := t.history(t.buf[s:])
	if err != nil {
		return err
	}
	return t.dropOver(s, &h)
}

// dropFrom is drop for a caller that has read the key and found a version of generation gen.
func (t *tx) dropFrom(s int, gen uint32) error {
	if h := t.newest(gen); t.gen != firstGen && h.kept {
		return t.dropOver(s, &h)
	}
	return t.drop(s) // the version below decides, too
}

func (t *tx) dropOver(s int, h *history) error {
	base := t.cut(s)
	covered := h.kept && h.keptTomb
	switch {
	case !h.now && h.loose == 0 && (covered || !h.kept):
		return nil // the key is absent
	case covered:
		// The tombstone below becomes the newest version again.
		if err := t.snaps().exhume(base, h.keptGen); err != nil {
			return err
		}
	}
	if !covered || h.loose != 0 {
		t.supersede(base, h)
	}
	s = t.mark()
	t.buf = putGen(append(t.buf, base...), t.gen)
	switch {
	case h.kept && !covered:
		v := len(t.buf)
		t.buf = append(t.buf, tombstone)
		t.putAt(s, v)
	case h.now:
		t.deleteAt(s)
	default:
		t.buf = t.buf[:s]
	}
	return nil
}

// history describes the versions of a key before its first change in a generation.
type history struct {
	now      bool   // this generation has a version
	loose    uint32 // generation of a version that no snapshot sees; 0: none
	kept     bool   // a snapshot sees the newest of the rest,
	keptGen  uint32 // its generation,
	keptTomb bool   // as absent,
	// and so a clone began. No note is written about such a tombstone: another copy of the
	// clone's state may lack the tombstone.
	keptBelow bool
}

// history reads the relevant versions of a key. INVARIANT: among the versions of a key, at most
// one, the newest, is not seen by any snapshot: other such versions went with the deleted
// snapshots.
func (t *tx) history(base []byte) (h history, err error) {
	err = t.r.Scan(putGen(bytes.Clone(base), t.gen), after(base), func(k, v []byte) bool {
		gen := ^binary.BigEndian.Uint32(k[len(k)-genLen:])
		switch {
		case t.base.hides(gen):
			return true
		case gen == t.gen:
			h.now = true
			return true
		case gen > t.vol.lastSnap:
			h.loose = gen
			return true
		}
		h.kept, h.keptGen, h.keptTomb = true, gen, isTombstone(v)
		h.keptBelow = t.base.below(gen)
		return false
	})
	return h, err
}

// newest is the part of history that depends on the newest version alone.
func (t *tx) newest(gen uint32) (h history) {
	switch {
	case gen == 0:
	case gen == t.gen:
		h.now = true
	case gen > t.vol.lastSnap:
		h.loose = gen
	default:
		h.kept, h.keptGen = true, gen
	}
	return h
}

// supersede keeps a key's previous version for snapshots at the first change of the key in a
// generation: if the youngest snapshot sees the previous version, supersede buries the version
// with the snapshot; if no snapshot sees the version, supersede removes the version.
func (t *tx) supersede(base []byte, h *history) {
	if h.now {
		return
	}
	if h.loose != 0 {
		s := t.mark()
		t.buf = putGen(append(t.buf, base...), h.loose)
		t.deleteAt(s)
		return
	}
	if h.kept && !(h.keptTomb && h.keptBelow) {
		s := t.mark()
		t.buf = binary.BigEndian.AppendUint32(append(t.buf, prefixBuried), t.vol.lastSnap)
		t.buf = putGen(append(t.buf, base...), h.keptGen)
		t.putMarker(s)
	}
}

// renew prepares a versioned key for a new value. s is the start of the key's base in the
// arena, at whose end the base lies. renew returns the new start, which may differ.
func (t *tx) renew(s int) (int, error) {
	if t.gen == firstGen {
		return s, nil
	}
	h, err := t.history(t.buf[s:])
	if err != nil {
		return s, err
	}
	return t.renewOver(s, &h), nil
}

// renewFrom is renew for a caller that has read the key: gen is the generation of the newest
// version, also of a tombstone; zero: no version. renewFrom saves the second read of the key,
// which is most of the cost of a change in a volume with snapshots.
func (t *tx) renewFrom(s int, gen uint32) int {
	h := t.newest(gen)
	return t.renewOver(s, &h)
}

func (t *tx) renewOver(s int, h *history) int {
	if h.now || h.loose == 0 && !h.kept {
		return s // no effect precedes it
	}
	base := t.cut(s) // does not move: later parts are appended behind it, or elsewhere
	t.supersede(base, h)
	s = t.mark()
	t.buf = append(t.buf, base...)
	return s
}

// noteInode and noteName note a change for comparisons of snapshots.
func (t *tx) noteInode(ino meta.Ino) {
	if t.vol.lastSnap != 0 {
		s := t.mark()
		t.buf = appendInoGenKey(t.buf, t.gen, ino)
		t.putMarker(s)
	}
}

func (t *tx) noteName(dir meta.Ino, name string) {
	if t.vol.lastSnap != 0 {
		s := t.mark()
		t.buf = appendNameGenKey(t.buf, t.gen, dir, name)
		t.putMarker(s)
	}
}

// ---- inodes

// load reads an inode, including inodes that only wait to be reaped.
func (t *tx) load(ino meta.Ino) (*inode, error) {
	for _, in := range t.inodes {
		if in.Ino == ino {
			if in.gone {
				return nil, stale(ino)
			}
			return in, nil
		}
	}
	b, gen, ok, err := t.get(appendInodeBase(t.scratch[:0], ino))
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, stale(ino)
	}
	in := &inode{gen: gen, under: gen, known: t.gen == t.vol.gen}
	if err := decodeInode(b, ino, in); err != nil {
		return nil, err
	}
	in.wasInline = in.inline()
	t.inodes = append(t.inodes, in)
	return in, nil
}

// inode reads an inode that exists for users.
func (t *tx) inode(ino meta.Ino) (*inode, error) {
	in, err := t.load(ino)
	if err != nil {
		return nil, err
	}
	if in.dead() {
		return nil, stale(ino)
	}
	return in, nil
}

func stale(ino meta.Ino) error { return fail("inode", meta.Stale, fmt.Sprintf("inode %d", ino)) }

// touch marks an inode as visibly changed.
func touch(in *inode) {
	if !in.dirty {
		in.Change++
	}
	in.dirty = true
}

func (t *tx) newInode(ino meta.Ino, mode, uid, gid uint32, now meta.Time) *inode {
	in := &inode{dirty: true}
	in.Attr = meta.Attr{Ino: ino, Mode: mode, Nlink: 1, UID: uid, GID: gid, Change: 1, Atime: now, Mtime: now, Ctime: now, Btime: now}
	t.inodes = append(t.inodes, in)
	return in
}

func (t *tx) flushInode(in *inode) error {
	now := in.inline()
	if in.gone {
		now = nil
	}
	if in.gone || in.dirty {
		if err := t.tallyInline(in.Ino, in.wasInline, now); err != nil {
			return err
		}
		in.wasInline = now
	}
	if in.gone {
		t.vol.bytes -= in.wasB // the inode is gone
		t.vol.inodes--
		if in.gen != t.gen {
			t.noteInode(in.Ino)
		}
		s := t.mark()
		t.buf = appendInodeBase(t.buf, in.Ino)
		if in.known && in.under != 0 {
			return t.dropFrom(s, in.under)
		}
		return t.drop(s)
	}
	if !in.dirty {
		return nil
	}
	t.vol.bytes += in.Blocks - in.wasB // wraps around when the inode shrinks
	in.wasB = in.Blocks
	if in.gen != t.gen {
		t.noteInode(in.Ino)
	}
	s := t.mark()
	t.buf = appendInodeBase(t.buf, in.Ino)
	if in.gen != t.gen {
		if in.known {
			s = t.renewFrom(s, in.under)
		} else {
			var err error
			if s, err = t.renew(s); err != nil {
				return err
			}
		}
		in.gen, in.under, in.known = t.gen, t.gen, true
	}
	t.buf = putGen(t.buf, t.gen)
	v := len(t.buf)
	t.buf = appendInode(t.buf, in)
	t.putAt(s, v)
	in.dirty = false
	return nil
}

// release writes the changed inodes and forgets all inodes, so a list of thousands needs little
// memory. The caller must not use the inodes afterwards.
func (t *tx) release() error {
	for _, in := range t.inodes {
		if err := t.flushInode(in); err != nil {
			return err
		}
	}
	t.inodes = t.inodes[:0]
	return nil
}

// ---- entries

// foundName is findEntry's knowledge of the versions of a name.
type foundName struct {
	dir  meta.Ino
	name string
	gen  uint32 // of the newest version, also of a tombstone; 0: no version
	live bool   // the name exists
}

func (t *tx) findEntry(parent meta.Ino, name string) (dentry, bool, error) {
	b, gen, ok, err := t.get(appendDentryBase(t.scratch[:0], parent, name))
	if err != nil {
		return dentry{}, false, err
	}
	t.names[0], t.names[1] = foundName{parent, name, gen, ok}, t.names[0]
	if !ok {
		return dentry{}, false, nil
	}
	e, err := decodeDentry(b)
	return e, err == nil, err
}

// found returns findEntry's knowledge of a name, or nil. The knowledge stays right until the
// end of the operation, because the store does not change.
func (t *tx) found(dir meta.Ino, name string) *foundName {
	if t.gen != t.vol.gen {
		return nil
	}
	for i := range t.names {
		if f := &t.names[i]; f.dir == dir && f.name == name {
			return f
		}
	}
	return nil
}

// setEntry writes both records of an entry and returns the cookie. A zero e.cookie asks for a
// new cookie.
//
// INVARIANT: the newest versions of the two records of an entry, by name and by position, have
// the same generation, because setEntry writes both records, and both are dropped together. So
// the version of one record tells the version of the other record.
func (t *tx) setEntry(dir *inode, name string, e dentry) (cookie uint64, err error) {
	fresh := e.cookie == 0
	if fresh {
		e.cookie = dir.next
		dir.next++
		dir.Size += uint64(len(name))
	}
	t.noteName(dir.Ino, name)
	s := t.mark()
	t.buf = appendDentryBase(t.buf, dir.Ino, name)
	if f := t.found(dir.Ino, name); f != nil {
		s = t.renewFrom(s, f.gen)
	} else if s, err = t.renew(s); err != nil {
		return 0, err
	}
	t.buf = putGen(t.buf, t.gen)
	v := len(t.buf)
	t.buf = appendDentry(t.buf, e)
	t.putAt(s, v)
	s = t.mark()
	t.buf = appendCookieBase(t.buf, dir.Ino, e.cookie)
	if !fresh { // a fresh cookie has no older versions
		if s, err = t.renew(s); err != nil {
			return 0, err
		}
	}
	t.buf = putGen(t.buf, t.gen)
	v = len(t.buf)
	t.buf = appendCookie(t.buf, e, name)
	t.putAt(s, v)
	return e.cookie, nil
}

// dropEntry removes both records of the entry e, which the caller found under the name.
func (t *tx) dropEntry(dir *inode, name string, e dentry) error {
	dir.Size -= uint64(len(name))
	t.noteName(dir.Ino, name)
	drop := t.drop
	if f := t.found(dir.Ino, name); f != nil && f.live {
		drop = func(s int) error { return t.dropFrom(s, f.gen) }
	}
	s := t.mark()
	t.buf = appendDentryBase(t.buf, dir.Ino, name)
	if err := drop(s); err != nil {
		return err
	}
	s = t.mark()
	t.buf = appendCookieBase(t.buf, dir.Ino, e.cookie)
	return drop(s)
}

// ---- chunks

// chunk reads a chunk's record.
func (t *tx) chunk(id meta.ChunkID) (*chunk, error) {
	if t.chunkI != nil {
		if i, ok := t.chunkI[id]; ok {
			return t.chunks[i], nil
		}
	} else {
		for _, c := range t.chunks {
			if c.ID == id {
				return c, nil
			}
		}
	}
	b, ok, err := t.r.Get(appendChunkKey(t.scratch[:0], prefixChunk, id))
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fail("chunk", meta.NoSuchChunk, id.String())
	}
	c, err := decodeChunk(b, id)
	if err != nil {
		return nil, err
	}
	t.addChunk(c)
	return c, nil
}

func (t *tx) addChunk(c *chunk) {
	t.chunks = append(t.chunks, c)
	if t.chunkI == nil && len(t.chunks) > 16 {
		t.chunkI = make(map[meta.ChunkID]int, 64)
		for i, c := range t.chunks {
			t.chunkI[c.ID] = i
		}
	} else if t.chunkI != nil {
		t.chunkI[c.ID] = len(t.chunks) - 1
	}
}

// flushChunk writes a changed chunk and updates its indexes: the open chunks of sessions, and
// the queue of chunks without references.
func (t *tx) flushChunk(c *chunk) {
	if c.gone {
		s := t.mark()
		t.buf = appendChunkKey(t.buf, prefixChunk, c.ID)
		t.deleteAt(s)
		s = t.mark()
		t.buf = appendChunkKey(t.buf, prefixDelete, c.ID)
		t.deleteAt(s)
		return
	}
	if c.State == meta.ChunkSealed && c.Live == 0 {
		c.State = meta.ChunkDeleting
	}
	w, n := &c.was, &c.ChunkRecord
	if !c.fresh && w.State == n.State && w.Session == n.Session && w.Live == n.Live && w.Fence == n.Fence && c.wasO == c.owner &&
		w.Length == n.Length && w.CRC == n.CRC && w.Lost == n.Lost && slices.Equal(w.Servers, n.Servers) {
		return
	}
	wasOpen := !c.fresh && w.State == meta.ChunkOpen
	isOpen := n.State == meta.ChunkOpen
	if wasOpen && (!isOpen || w.Session != n.Session) {
		s := t.mark()
		t.buf = appendWriterKey(t.buf, w.Session, c.ID)
		t.deleteAt(s)
	}
	if isOpen && (!wasOpen || w.Session != n.Session) {
		s := t.mark()
		t.buf = appendWriterKey(t.buf, n.Session, c.ID)
		t.putMarker(s)
	}
	if n.State == meta.ChunkDeleting && w.State != meta.ChunkDeleting {
		s := t.mark()
		t.buf = appendChunkKey(t.buf, prefixDelete, c.ID)
		t.putMarker(s)
	}
	s := t.mark()
	t.buf = appendChunkKey(t.buf, prefixChunk, c.ID)
	v := len(t.buf)
	t.buf = appendChunk(t.buf, c)
	t.putAt(s, v)
}
