package server

import (
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/lease"
	"penstock.io/penstock/meta/wire"
)

// The leases of a volume are a pure machine (meta/lease). Here it is told what time it
// is and which sessions are away, and its messages are sent. It is guarded by the owner's
// mu, which callers of everything here hold.

// refusalRest is for how long a session that could not give a lease back is not asked
// again in the background.
const refusalRest = 30 * time.Second

// leaseMessage asks a session for a lease.
type leaseMessage = lease.Message[*session]

// newLeases makes the empty table of a volume.
func (s *Server) newLeases() *lease.Table[*session] {
	return lease.New[*session](lease.Config{RefusalRest: refusalRest, NoRecall: s.cfg.Unsafe.NoRecall, NoPutIn: s.cfg.Unsafe.NoPutIn})
}

// isAway reports whether a session only lingers: whoever asks it for something may wait
// long.
func isAway(s *session) bool { return s.away.Load() }

// sendRecalls asks sessions for leases.
func (o *owner) sendRecalls(all []leaseMessage) {
	for _, m := range all {
		m.Recall.Volume = o.vol
		m.To.enqueue(m.Round, &wire.Recall{Recall: m.Recall})
	}
}

// recall takes back what sessions other than s have of an inode beyond keep, for an
// operation that waits for it, and gives what to wait for; nil: they have nothing. A
// session that only lingers ends for it.
func (o *owner) recall(s *session, ino meta.Ino, keep meta.LeaseMode) <-chan struct{} {
	over, send := o.leases.Recall(time.Now(), s, ino, keep)
	o.sendRecalls(send)
	return over
}

// askInBackground is recall for what the owner does by itself: no session ends for it,
// and each may answer after within that it holds on to its lease.
func (o *owner) askInBackground(ino meta.Ino, keep meta.LeaseMode, within time.Duration) <-chan struct{} {
	over, send := o.leases.Ask(time.Now(), nil, ino, keep, within)
	o.sendRecalls(send)
	return over
}

// recallEverything is recall of every lease on the volume.
func (o *owner) recallEverything() []<-chan struct{} {
	over, send := o.leases.RecallAll(time.Now())
	o.sendRecalls(send)
	return over
}

// outOfReach reports whether nobody knows when what the owner does in the background can
// have an inode: a session that has a lease on it is away, or holds on to it.
func (o *owner) outOfReach(ino meta.Ino) bool {
	return o.leases.OutOfReach(time.Now(), ino, isAway)
}

// putsIn reports whether s is being asked to give ino up, and may put in what it still
// has of it: it waits for nobody.
func (o *owner) putsIn(s *session, ino meta.Ino) bool {
	yes, send := o.leases.PutIn(s, ino)
	o.sendRecalls(send)
	return yes
}

// ticket is what is kept of an operation while it waits.
type ticket struct {
	// leases keeps new leases away from inodes while the operation waits for old ones.
	leases lease.Blocker
	// holders are the sessions that stood at the inode which lost its last name.
	holders map[meta.Ino][]meta.SessionID
	room    roomSearch
	// entry is that of the session when the call came; see owner.entered.
	entry uint64
}

// noteHolders remembers which sessions stand at an inode.
func (o *owner) noteHolders(ino meta.Ino, k *ticket) {
	for _, s := range o.leases.Holders(ino) {
		if k.holders == nil {
			k.holders = map[meta.Ino][]meta.SessionID{}
		}
		known := false
		for _, id := range k.holders[ino] {
			known = known || id == s.id
		}
		if !known {
			k.holders[ino] = append(k.holders[ino], s.id)
		}
	}
}

// give grants a lease and mentions it in the reply if that is news to s, or may be.
func (o *owner) give(s *session, ino meta.Ino, mode meta.LeaseMode, re *wire.Reply) {
	if had, has := o.leases.Grant(s, ino, mode); has > had || has > meta.LeaseNone && s.again.Load() {
		re.Grants = append(re.Grants, meta.Grant{Ino: ino, Mode: has})
	}
}
