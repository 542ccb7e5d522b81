package server

import (
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// A client says by itself which of its operations are replays (Call.Replay), and which
// inode number an early reply gave it (Create.Ino, Tmpfile.Ino). Replays are exempt from
// quotas, and a number that is far ahead uses up those below it. So the owner believes
// both only where they can be true: of a session that the journal knew when the owner
// took the volume, until the session said that it is back (rule 3). Whatever else is
// sent again has its reply in the journal, and is answered from there.

// replayReach is how far above the journal's next inode number one may lie that the
// owner before gave out: maxQueued bytes of effects may not be in the journal yet, and
// an inode takes more than 64 of them, its reply included.
const replayReach = 2 * maxQueued / 64

// replays are the numbers that the owners before may have given out without a trace. They
// lie on both sides of the journal's next number: an owner that did not live until every
// session was back has journaled the replays of some, and so gone past the numbers of
// others, who replay them to its successor. One that is in use is refused when it is taken.
type replays struct{ next meta.Ino }

// load reads the store as the owner found it.
func (r *replays) load(st namespace.Reader) (err error) {
	r.next, err = namespace.NextIno(st)
	return err
}

// check refuses a number that no owner can have given out.
func (r *replays) check(ino meta.Ino) error {
	if ino == 0 || ino > meta.RootIno && ino < r.next+replayReach && r.next < ino+replayReach {
		return nil
	}
	return meta.E("replay", meta.NotPermitted, fmt.Sprintf("inode %d", ino), errors.New("no owner gave that number to a session that it did not write into the journal"))
}

// checkReplay refuses what a client may not claim about an operation that the journal
// knows nothing of. The caller holds mu. Errors: NotPermitted.
func (o *owner) checkReplay(s *session, c *wire.Call) error {
	if o.srv.cfg.Unsafe.NoReplayCheck {
		return nil
	}
	var ino meta.Ino
	var when meta.Time
	switch op := c.Op.(type) {
	case *meta.Create:
		ino, when = op.Ino, op.Time
	case *meta.Tmpfile:
		ino, when = op.Ino, op.Time
	}
	if c.Replay {
		if _, awaited := o.awaited[s.id]; !awaited {
			return meta.E("replay", meta.NotPermitted, s.name, errors.New("an owner takes replays of a session from when it took the volume until the session is back, and the journal has none of this operation"))
		}
		return o.replays.check(ino)
	}
	if ino != 0 || when != 0 {
		return meta.E("create", meta.NotPermitted, fmt.Sprintf("inode %d", ino), errors.New("only replays name the number and time of what they make"))
	}
	return nil
}
