package server

import (
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/lease"
	"penstock.io/penstock/meta/wire"
)

// The leases of a volume are a pure machine (meta/lease). This file gives the machine the time
// and the list of sessions that are away, and sends the machine's messages. The owner's mu
// guards the machine: callers of all functions below hold mu.

// refusalRest is for how long the owner's background work leaves a session alone after the
// session could not give a lease back.
const refusalRest = 30 * time.Second

// leaseMessage asks a session to give a lease back.
type leaseMessage = lease.Message[*session]

// newLeases makes the empty table of a volume.
func (s *Server) newLeases() *leases {
	t := lease.New[*session](lease.Config{RefusalRest: refusalRest, NoRecall: s.cfg.Unsafe.NoRecall, NoPutIn: s.cfg.Unsafe.NoPutIn})
	return &leases{Table: t, questions: map[meta.Ino]*growthQuestion{}}
}

// leases are the leases of a volume, the questions to sessions that keep theirs, and the
// leaders of files.
type leases struct {
	*lease.Table[*session]
	// questions are the last questions about files to which a session appends; see growth.go.
	questions map[meta.Ino]*growthQuestion
	asked     uint64 // number of the last question
	leaders   leaders
}

// DropAll drops a session's leases, except those on some inodes, and ends the questions to
// the session.
func (l *leases) DropAll(s *session, stays ...meta.Ino) {
	l.Table.DropAll(s, stays...)
	for _, q := range l.questions {
		if q.to == s {
			q.end()
		}
	}
}

// isAway reports whether a session only lingers. A recall sent to such a session may stay
// unanswered for long.
func isAway(s *session) bool { return s.away.Load() }

// sendRecalls queues the recalls for their sessions.
func (o *owner) sendRecalls(all []leaseMessage) {
	for _, m := range all {
		m.Recall.Volume = o.vol
		m.To.enqueue(m.Round, &wire.Recall{Recall: m.Recall})
	}
}

// recall takes the leases beyond keep on an inode back from all sessions but s, for an
// operation that waits. It returns the channel to wait for; nil: no such lease is held. A
// session that only lingers is ended by such a recall.
func (o *owner) recall(s *session, ino meta.Ino, keep meta.LeaseMode) <-chan struct{} {
	over, send := o.leases.Recall(time.Now(), s, ino, keep)
	o.sendRecalls(send)
	return over
}

// askInBackground is recall for the owner's background work. No session is ended by such a
// recall. After within, a session may answer that it keeps its lease.
func (o *owner) askInBackground(ino meta.Ino, keep meta.LeaseMode, within time.Duration) <-chan struct{} {
	over, send := o.leases.Ask(time.Now(), nil, ino, keep, within)
	o.sendRecalls(send)
	return over
}

// recallEverything recalls every lease on the volume, and returns the channels to wait for.
func (o *owner) recallEverything() []<-chan struct{} {
	over, send := o.leases.RecallAll(time.Now())
	o.sendRecalls(send)
	return over
}

// outOfReach reports whether the owner's background work cannot expect to get an inode soon: a
// session with a lease on the inode is away, or has refused to give the lease back.
func (o *owner) outOfReach(ino meta.Ino) bool {
	return o.leases.OutOfReach(time.Now(), ino, isAway)
}

// putsIn reports whether s is being asked to give ino up and may still write its cached data
// of ino. Such a write of s waits for no other session.
func (o *owner) putsIn(s *session, ino meta.Ino) bool {
	yes, send := o.leases.PutIn(s, ino)
	o.sendRecalls(send)
	return yes
}

// ticket is the state of an operation that waits.
type ticket struct {
	// leases prevents new leases on inodes while the operation waits for recalled leases.
	leases lease.Blocker
	// holders maps inodes of the operation to the sessions that have or had a lease on the
	// inode, in case the inode loses its last name.
	holders map[meta.Ino][]meta.SessionID
	room    roomSearch
	growth  growthWait
	// entry is the session's entry number when the call came; see owner.entered.
	entry uint64
	// led is the reply to a Lead that was executed and waits for the journal. The session may
	// acknowledge the entry before the next attempt, so that its kept replies lack this one.
	led *wire.Reply
}

// noteHolders adds the sessions that have or had a lease on an inode to k.
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

// give grants a lease, and lists the lease in the reply if s has no such lease yet, or may not
// know of it.
func (o *owner) give(s *session, ino meta.Ino, mode meta.LeaseMode, re *wire.Reply) {
	if had, has := o.leases.Grant(s, ino, mode); has > had || has > meta.LeaseNone && s.again.Load() {
		re.Grants = append(re.Grants, meta.Grant{Ino: ino, Mode: has})
	}
}
