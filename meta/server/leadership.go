package server

import (
	"errors"
	"fmt"
	"math"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
)

// Leadership of files (rule 25). The journal has the leader and the epoch of each file
// (meta/namespace). The owner keeps the leaders' sessions in memory, too, and refuses content
// from every other session.
//
// Before a session begins to lead, the owner takes the leases on the file back from all other
// sessions, and seals the chunk at the file's open end: the chunk servers then refuse whatever
// the writer before still appends, alive or not. A leader that is cut off believes in itself
// only while its lease stands, and the owner ends a session after that.

// leaders maps each file with a leader to the session of its leader. The owner's mu guards
// leaders.
type leaders struct {
	of map[meta.Ino]meta.SessionID
	// off: nothing is refused, and nothing sealed. Only the controls of tests set off.
	off bool
}

// load reads the leaders from the journaled state and the entries under way.
func (l *leaders) load(r namespace.Reader, off bool) error {
	l.of, l.off = map[meta.Ino]meta.SessionID{}, off
	return namespace.Leaders(r, func(ino meta.Ino, s meta.SessionID) { l.of[ino] = s })
}

func (l *leaders) begin(ino meta.Ino, s meta.SessionID) { l.of[ino] = s }

// ended forgets the leader of a file if no record of it is left.
func (l *leaders) ended(r namespace.Reader, ino meta.Ino) {
	if _, err := namespace.Query(r, namespace.Context{}, &meta.Leader{Ino: ino}); errors.Is(err, meta.NotFound) {
		delete(l.of, ino)
	}
}

// end forgets the leaderships of a session.
func (l *leaders) end(s meta.SessionID) {
	for ino, of := range l.of {
		if of == s {
			delete(l.of, ino)
		}
	}
}

// check refuses content for a file from a session other than its leader, and the right to
// write the file. Errors: NotPermitted.
func (l *leaders) check(s *session, op meta.Op) error {
	if len(l.of) == 0 || l.off {
		return nil
	}
	var ino meta.Ino
	switch m := op.(type) {
	case *meta.Open:
		ino = m.Ino
	case *meta.Write:
		ino = m.Ino
	case *meta.Fallocate:
		ino = m.Ino
	case *meta.CopyRange:
		ino = m.Dst
	case *meta.SetAttr:
		if m.Mask&meta.SetSize != 0 {
			ino = m.Ino
		}
	}
	if of := l.of[ino]; of == 0 || of == s.id {
		return nil
	}
	return meta.E("write", meta.NotPermitted, fmt.Sprintf("inode %d", ino), errors.New("another client leads the file, and its leader alone may write it"))
}

// admit refuses an operation on a file that another session leads, before the operation takes
// a lease from the leader: content, or another leadership. A leader that is late is marked to
// end, because another session wants to lead. The caller holds mu. Errors: Busy, NotPermitted.
func (l *leaders) admit(o *owner, s *session, op meta.Op) error {
	m, ok := op.(*meta.Lead)
	if !ok {
		return l.check(s, op)
	}
	if of := l.of[m.Ino]; of != 0 && of != s.id {
		o.refusedFor(of)
		return meta.E("lead", meta.Busy, fmt.Sprintf("inode %d", m.Ino), errors.New("another session leads the file"))
	}
	return nil
}

// seal seals the chunk at the open end of a file that a session is to lead, and returns the
// channel to wait for before the next attempt; nil: the file has no open end, or the operation
// will return the error. No session has a lease on the file any more. The caller holds mu.
func (l *leaders) seal(o *owner, ino meta.Ino) <-chan struct{} {
	w := o.view()
	now, err := namespace.Query(w, namespace.Context{}, &meta.GetAttr{Ino: ino})
	if err != nil || now.Attr.Flags&meta.FlagOpenEnded == 0 || l.off {
		return nil
	}
	var id meta.ChunkID
	err = namespace.FileExtents(w, ino, max(now.Attr.Size, 1)-1, math.MaxUint64, func(e meta.Extent, _ bool) bool {
		if e.OpenEnded {
			id = e.Chunk
		}
		return !e.OpenEnded
	})
	if err != nil || id.IsZero() {
		return nil
	}
	sealed := make(chan struct{})
	o.wg.Go(func() {
		defer close(sealed)
		if _, err := o.sealing.seal(o.ctx, id, nil); err != nil && o.ctx.Err() == nil {
			o.log.Warn("the open end of a file can't be sealed for a new leader yet; the owner tries again", "inode", ino, "chunk", id, "error", err)
			o.await(o.ctx, soon())
		}
	})
	return sealed
}
