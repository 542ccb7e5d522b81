package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// Usage returns the size of a volume: the sum of all inodes' Blocks, and the number of inodes,
// including orphans.
func Usage(r Reader) (bytes, inodes uint64, err error) {
	t := tx{view: view{r: r}}
	err = t.begin()
	return t.vol.bytes, t.vol.inodes, err
}

// Counted is Usage plus the bytes that only snapshots hold, if the policy counts such bytes in
// the quota and the count is done.
func Counted(r Reader) (bytes, inodes uint64, err error) {
	t := tx{view: view{r: r}}
	err = t.begin()
	return t.vol.holds(), t.vol.inodes, err
}

// NextIno is the number of the next new inode.
func NextIno(r Reader) (meta.Ino, error) {
	t := tx{view: view{r: r}}
	err := t.begin()
	return meta.Ino(t.vol.nextIno), err
}

// UsageAfter returns the value of Counted after the effects of an operation, or changed false
// if the effects don't change the value.
func UsageAfter(effects []Effect) (bytes, inodes uint64, changed bool) {
	for i := len(effects) - 1; i >= 0; i-- {
		e := &effects[i]
		if e.Kind != Put || len(e.Key) != 1 || e.Key[0] != prefixVolume {
			continue
		}
		var v volume
		if err := decodeVolume(e.Value, &v); err != nil {
			panic("namespace: an operation wrote a volume record that can't be read: " + err.Error())
		}
		return v.holds(), v.inodes, true
	}
	return 0, 0, false
}

// Policy reads a volume's policy.
func Policy(r Reader) (meta.Policy, error) {
	t := tx{view: view{r: r}}
	err := t.begin()
	return t.vol.policy, err
}

// eachKey visits unversioned keys of one length.
func eachKey(r Reader, prefix []byte, length int, fn func(k, v []byte) (bool, error)) error {
	var inner error
	err := r.Scan(prefix, after(prefix), func(k, v []byte) bool {
		if len(k) != length {
			inner = fail("scan", meta.Corrupt, fmt.Sprintf("key %x", k))
			return false
		}
		var more bool
		more, inner = fn(k, v)
		return more && inner == nil
	})
	if inner != nil {
		return inner
	}
	return err
}

// Chunks visits all chunks in the order of ids until fn returns false.
func Chunks(r Reader, fn func(c meta.ChunkRecord) bool) error {
	return ChunksFrom(r, meta.ChunkID{}, fn)
}

// ChunksFrom is Chunks from an id on, so a long walk can be done in steps.
func ChunksFrom(r Reader, from meta.ChunkID, fn func(c meta.ChunkRecord) bool) error {
	lo := appendChunkKey(nil, prefixChunk, from)
	var inner error
	err := r.Scan(lo, []byte{prefixChunk + 1}, func(k, v []byte) bool {
		if len(k) != 17 {
			inner = fail("scan", meta.Corrupt, fmt.Sprintf("key %x", k))
			return false
		}
		var c *chunk
		if c, inner = decodeChunk(v, meta.ChunkIDFromBytes(k[1:])); inner != nil {
			return false
		}
		return fn(c.ChunkRecord)
	})
	if inner != nil {
		return inner
	}
	return err
}

// ReadChunk reads the record of a chunk, and the inode with an open-ended extent in the chunk
// (0: none). Errors: NoSuchChunk.
func ReadChunk(r Reader, id meta.ChunkID) (meta.ChunkRecord, meta.Ino, error) {
	t := tx{view: view{r: r}}
	c, err := t.chunk(id)
	if err != nil {
		return meta.ChunkRecord{}, 0, err
	}
	return c.ChunkRecord, c.owner, nil
}

// DeletingChunks visits the chunks without references.
func DeletingChunks(r Reader, fn func(c meta.ChunkRecord) bool) error {
	t := tx{view: view{r: r}}
	return eachKey(r, []byte{prefixDelete}, 17, func(k, _ []byte) (bool, error) {
		c, err := t.chunk(meta.ChunkIDFromBytes(k[1:]))
		t.chunks, t.chunkI = t.chunks[:0], nil
		if err != nil {
			return false, err
		}
		return fn(c.ChunkRecord), nil
	})
}

// OpenChunks visits the open chunks of a session. Session 0 has the chunks whose writer is
// gone.
func OpenChunks(r Reader, s meta.SessionID, fn func(c meta.ChunkRecord, openEnded meta.Ino) bool) error {
	return openChunks(r, binary.BigEndian.AppendUint64([]byte{prefixWriter}, uint64(s)), fn)
}

// AllOpenChunks visits the open chunks of every session.
func AllOpenChunks(r Reader, fn func(c meta.ChunkRecord, openEnded meta.Ino) bool) error {
	return openChunks(r, []byte{prefixWriter}, fn)
}

func openChunks(r Reader, prefix []byte, fn func(c meta.ChunkRecord, openEnded meta.Ino) bool) error {
	t := tx{view: view{r: r}}
	return eachKey(r, prefix, 25, func(k, _ []byte) (bool, error) {
		c, err := t.chunk(meta.ChunkIDFromBytes(k[9:]))
		t.chunks, t.chunkI = t.chunks[:0], nil
		if err != nil {
			return false, err
		}
		return fn(c.ChunkRecord, c.owner), nil
	})
}

// OpenEnded visits the inodes with an open-ended extent, each with the extent's chunk. The
// cost depends on the number of open chunks, not on the size of the volume.
func OpenEnded(r Reader, fn func(ino meta.Ino, c meta.ChunkRecord) bool) error {
	return AllOpenChunks(r, func(c meta.ChunkRecord, ino meta.Ino) bool {
		if ino == 0 {
			return true
		}
		return fn(ino, c)
	})
}

// Sessions visits the journaled sessions. An ended session still has records until the caller
// has run SessionEnd to EOF.
func Sessions(r Reader, fn func(s meta.SessionStart, ended bool) bool) error {
	return eachKey(r, []byte{prefixSession}, 9, func(k, v []byte) (bool, error) {
		s, err := decodeSession(v)
		if err != nil {
			return false, err
		}
		return fn(meta.SessionStart{Session: meta.SessionID(binary.BigEndian.Uint64(k[1:])), Name: s.name, Host: s.host, PID: s.pid, Start: s.start},
			s.state == sessionEnded), nil
	})
}

// Orphans visits the unlinked inodes held by a session.
func Orphans(r Reader, s meta.SessionID, fn func(ino meta.Ino) bool) error {
	return eachKey(r, binary.BigEndian.AppendUint64([]byte{prefixOrphan}, uint64(s)), 17, func(k, _ []byte) (bool, error) {
		return fn(meta.Ino(binary.BigEndian.Uint64(k[9:]))), nil
	})
}

// ReapQueue visits the inodes for which Reap has something left to do.
func ReapQueue(r Reader, fn func(ino meta.Ino) bool) error {
	return eachKey(r, []byte{prefixReap}, 9, func(k, _ []byte) (bool, error) {
		return fn(meta.Ino(binary.BigEndian.Uint64(k[1:]))), nil
	})
}

// Replies visits the reply records of a session, oldest entry first; with session 0, of all
// sessions. DecodeReply decodes them.
func Replies(r Reader, s meta.SessionID, fn func(key, val []byte) bool) error {
	prefix := []byte{prefixReply}
	if s != 0 {
		prefix = binary.BigEndian.AppendUint64(prefix, uint64(s))
	}
	return eachKey(r, prefix, 37, func(k, v []byte) (bool, error) { return fn(k, v), nil })
}

// SkipInodes returns the effects that skip n inode numbers: the numbers that were perhaps given
// out after the state from which a restored volume continues. As many numbers of events are
// skipped, so consumers notice the gap.
func SkipInodes(r Reader, n uint64) ([]Effect, error) {
	t := tx{view: view{r: r}}
	if err := t.begin(); err != nil {
		return nil, err
	}
	t.vol.nextIno += n
	t.cutEvents(n)
	return append(t.effects, Effect{Kind: Put, Key: volumeKey, Value: appendVolume(nil, &t.vol)}), nil
}

// LastChunk returns the counter of the last allocated chunk.
func LastChunk(r Reader) (uint64, error) {
	t := tx{view: view{r: r}}
	err := t.begin()
	return t.vol.chunks, err
}
