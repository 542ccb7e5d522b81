package namespace

import (
	"encoding/binary"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

const (
	// endBatch is the number of a session's orphans and chunks that one SessionEnd handles.
	endBatch = 256
	// maxRelease bounds the inodes of one ReleaseOrphans.
	maxRelease = 8192
)

// sessions are the operations on sessions and their orphans, within an operation on the namespace.
type sessions struct{ *tx }

func (t *tx) sessions() sessions { return sessions{t} }

func (t sessions) sessionStart(op *meta.SessionStart) error {
	if op.Session == 0 {
		return fail("session start", meta.Invalid, "session 0 is the owner")
	}
	want := session{state: sessionLive, pid: op.PID, start: op.Start, name: op.Name, host: op.Host}
	b, ok, err := t.r.Get(appendSessionKey(t.scratch[:0], op.Session))
	if err != nil {
		return err
	}
	if ok {
		s, err := decodeSession(b)
		switch {
		case err != nil:
			return err
		case s.state == sessionEnded:
			return fail("session start", meta.SessionExpired, fmt.Sprintf("session %x", uint64(op.Session)))
		case s == want:
			return nil
		}
	}
	t.putSession(op.Session, &want)
	return nil
}

func (t sessions) putSession(id meta.SessionID, s *session) {
	m := t.mark()
	t.buf = appendSessionKey(t.buf, id)
	v := len(t.buf)
	t.buf = appendSession(t.buf, s)
	t.putAt(m, v)
}

// sessionEnd runs in steps, so that the end of a session with a million orphans is not one
// journal entry: the first step marks the session as ended, each step releases some orphans
// and chunks, and the last (Result.EOF) removes the record.
func (t sessions) sessionEnd(op *meta.SessionEnd, res *meta.Result) error {
	b, ok, err := t.r.Get(appendSessionKey(t.scratch[:0], op.Session))
	if err != nil {
		return err
	}
	if !ok {
		res.EOF = true
		return nil
	}
	s, err := decodeSession(b)
	if err != nil {
		return err
	}
	if s.state != sessionEnded {
		s.state = sessionEnded
		t.putSession(op.Session, &s)
	}
	var inos []meta.Ino
	more := false
	lo := appendOrphanKey(nil, op.Session, op.From)
	err = t.r.Scan(lo, after(lo[:9]), func(k, _ []byte) bool {
		if len(inos) == endBatch {
			more = true
			return false
		}
		if len(k) == 17 {
			inos = append(inos, meta.Ino(binary.BigEndian.Uint64(k[9:])))
		}
		return true
	})
	if err != nil {
		return err
	}
	for _, ino := range inos {
		if err := t.dropOrphan(op.Session, ino); err != nil {
			return err
		}
		res.Off = uint64(ino) + 1
	}
	if more {
		return nil
	}
	if res.Off = 0; op.From != 0 {
		return nil // once more from the beginning, to be sure
	}
	if more, err = t.endChanges(op.Session); more || err != nil {
		return err
	}
	var open []meta.ChunkID
	lo = appendWriterKey(nil, op.Session, meta.ChunkID{})
	err = t.r.Scan(lo, after(lo[:9]), func(k, _ []byte) bool {
		if len(open) == endBatch {
			more = true
			return false
		}
		if len(k) == 25 {
			open = append(open, meta.ChunkIDFromBytes(k[9:]))
		}
		return true
	})
	if err != nil {
		return err
	}
	for _, id := range open {
		c, err := t.chunk(id)
		if err != nil {
			return err
		}
		c.Session = 0
	}
	if more {
		return nil
	}
	if more, err = t.leaderships().end(op.Session); more || err != nil {
		return err
	}
	res.EOF = true
	m := t.mark()
	t.buf = appendSessionKey(t.buf, op.Session)
	t.deleteAt(m)
	lo = binary.BigEndian.AppendUint64([]byte{prefixReply}, uint64(op.Session))
	t.effects = append(t.effects, Effect{DeleteRange, lo, after(lo)})
	return nil
}

func (t sessions) releaseOrphans(op *meta.ReleaseOrphans) error {
	if len(op.Inos) > maxRelease {
		return fail("release orphans", meta.ResourceExceeded, fmt.Sprintf("%d inodes, at most %d go at once", len(op.Inos), maxRelease))
	}
	inos := slices.Clone(op.Inos)
	slices.Sort(inos)
	for _, ino := range slices.Compact(inos) {
		if err := t.dropOrphan(t.c.Session, ino); err != nil {
			return err
		}
	}
	return nil
}

// dropOrphan ends a session's hold on an unlinked inode. The end of the last hold removes the
// inode.
func (t sessions) dropOrphan(s meta.SessionID, ino meta.Ino) error {
	_, ok, err := t.r.Get(appendOrphanKey(t.scratch[:0], s, ino))
	if err != nil || !ok {
		return err
	}
	m := t.mark()
	t.buf = appendOrphanKey(t.buf, s, ino)
	t.deleteAt(m)
	if err := t.changed(s, ino, false); err != nil {
		return err
	}
	in, err := t.load(ino)
	if err != nil {
		return err
	}
	if in.Nlink != 0 || in.holders == 0 {
		return fail("release orphan", meta.Corrupt, fmt.Sprintf("inode %d has %d links and %d holders", ino, in.Nlink, in.holders))
	}
	in.holders--
	in.dirty = true
	if in.tmp == s {
		in.tmp = 0
	}
	if in.holders == 0 {
		if err := t.extents().remove(in); err != nil {
			return err
		}
	}
	return t.release()
}
