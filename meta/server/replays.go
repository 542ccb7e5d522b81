package server

import (
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// A client itself marks its replays (Call.Replay), and names the inode number from an early
// reply (Create.Ino, Tmpfile.Ino). Replays are exempt from quotas, and a number far ahead uses
// up the numbers below. So the owner accepts both claims only where the claims can be true:
// from a session already journaled when the owner took the volume, until the session has
// reported its return (rule 3). For every other repeated operation, the journal has the reply,
// and the owner answers with that reply.

// replayReach bounds how far above the journal's next inode number a number issued by the
// previous owner may lie: up to maxQueued bytes of effects may be missing in the journal, and
// an inode with its reply takes more than 64 bytes.
const replayReach = 2 * maxQueued / 64

// replays are the inode numbers that previous owners may have issued without a trace in the
// journal. The numbers lie on both sides of the journal's next number: an owner that stopped
// before every session was back has journaled the replays of some sessions. The journal has
// then passed the numbers of other sessions, and the successor gets the replays of the others.
// A number already in use is refused at creation.
type replays struct{ next meta.Ino }

// load reads the next inode number from the store, before the owner changes the store.
func (r *replays) load(st namespace.Reader) (err error) {
	r.next, err = namespace.NextIno(st)
	return err
}

// check refuses an inode number that no owner can have issued. Errors: NotPermitted.
func (r *replays) check(ino meta.Ino) error {
	if ino == 0 || ino > meta.RootIno && ino < r.next+replayReach && r.next < ino+replayReach {
		return nil
	}
	return meta.E("replay", meta.NotPermitted, fmt.Sprintf("inode %d", ino), errors.New("no owner gave that number to a session that it did not write into the journal"))
}

// checkReplay refuses impossible claims of a client about an operation without a reply in the
// journal. The caller holds mu. Errors: NotPermitted.
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
		return meta.E("create", meta.NotPermitted, fmt.Sprintf("inode %d", ino), errors.New("only replays name the number and time of their new inode"))
	}
	return nil
}
