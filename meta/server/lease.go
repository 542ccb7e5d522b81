package server

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/lease"
	"penstock.io/penstock/meta/namespace"
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
func newLeases(k *kernel) *leases {
	u := k.srv.cfg.Unsafe
	t := lease.New[*session](lease.Config{RefusalRest: refusalRest, NoRecall: u.NoRecall, NoPutIn: u.NoPutIn})
	return &leases{Table: t, k: k, questions: map[meta.Ino]*growthQuestion{}}
}

// leases are the leases of a volume, the questions to sessions that keep theirs, and the
// leaders of files.
type leases struct {
	*lease.Table[*session]
	k *kernel

	// questions are the last questions about files to which a session appends; see growth.go.
	questions map[meta.Ino]*growthQuestion
	asked     uint64 // number of the last question
	leaders   leaders
	barrier   *barrier // not nil: a snapshot is being taken, or writing ends
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
func (l *leases) sendRecalls(all []leaseMessage) {
	for _, m := range all {
		m.Recall.Volume = l.k.vol
		m.To.enqueue(m.Round, &wire.Recall{Recall: m.Recall})
	}
}

// recall takes the leases beyond keep on an inode back from all sessions but s, for an
// operation that waits. It returns the channel to wait for; nil: no such lease is held. A
// session that only lingers is ended by such a recall.
func (l *leases) recall(s *session, ino meta.Ino, keep meta.LeaseMode) <-chan struct{} {
	over, send := l.Recall(time.Now(), s, ino, keep)
	l.sendRecalls(send)
	return over
}

// askInBackground is recall for the owner's background work. No session is ended by such a
// recall. After within, a session may answer that it keeps its lease.
func (l *leases) askInBackground(ino meta.Ino, keep meta.LeaseMode, within time.Duration) <-chan struct{} {
	over, send := l.Ask(time.Now(), nil, ino, keep, within)
	l.sendRecalls(send)
	return over
}

// recallEverything recalls every lease on the volume, and returns the channels to wait for.
func (l *leases) recallEverything() []<-chan struct{} {
	over, send := l.RecallAll(time.Now())
	l.sendRecalls(send)
	return over
}

// outOfReach reports whether the owner's background work cannot expect to get an inode soon: a
// session with a lease on the inode is away, or has refused to give the lease back.
func (l *leases) outOfReach(ino meta.Ino) bool {
	return l.OutOfReach(time.Now(), ino, isAway)
}

// putsIn reports whether s is being asked to give ino up and may still write its cached data
// of ino. Such a write of s waits for no other session.
func (l *leases) putsIn(s *session, ino meta.Ino) bool {
	yes, send := l.PutIn(s, ino)
	l.sendRecalls(send)
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
	// entry is the session's entry number when the call came; see kernel.entered.
	entry uint64
	// led is the reply to a Lead that was executed and waits for the journal. The session may
	// acknowledge the entry before the next attempt, so that its kept replies lack this one.
	led *wire.Reply
}

// noteHolders adds the sessions that have or had a lease on an inode to k.
func (l *leases) noteHolders(ino meta.Ino, k *ticket) {
	for _, s := range l.Holders(ino) {
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
func (l *leases) give(s *session, ino meta.Ino, mode meta.LeaseMode, re *wire.Reply) {
	if had, has := l.Grant(s, ino, mode); has > had || has > meta.LeaseNone && s.again.Load() {
		re.Grants = append(re.Grants, meta.Grant{Ino: ino, Mode: has})
	}
}

// recallFor recalls the leases of other sessions on the inodes that op will change. If op
// changes read times only, other sessions keep shared leases, although such a session may then
// report an older read time from its cache. recallFor also returns the inode whose last name op
// may remove, and notes in k the sessions holding a lease on the inode. The caller holds the
// owner's mu.
func (l *leases) recallFor(s *session, op meta.Op, k *ticket, w *view) (wait <-chan struct{}, orphaned meta.Ino, err error) {
	inos, err := namespace.Touched(w, op)
	if err != nil {
		return nil, 0, err
	}
	keep := meta.LeaseNone
	if m, ok := op.(*meta.SetAttr); ok && m.ReadTime() {
		keep = meta.LeaseShared
	}
	_, write := op.(*meta.Write)
	for _, ino := range inos {
		if write && l.putsIn(s, ino) {
			continue
		}
		if ch := l.recall(s, ino, keep); ch != nil {
			l.Block(&k.leases, ino)
			l.noteHolders(ino, k)
			wait = ch
		}
	}
	if wait != nil {
		return wait, 0, nil
	}
	var dir meta.Ino
	var name string
	switch m := op.(type) {
	case *meta.Unlink:
		dir, name = m.Parent, m.Name
	case *meta.Rename:
		dir, name = m.NewParent, m.NewName
	default:
		return nil, 0, nil
	}
	r, err := namespace.Query(w, l.k.context(s.id), &meta.Lookup{Parent: dir, Name: name})
	if err != nil {
		return nil, 0, nil // the operation itself returns the error
	}
	l.noteHolders(r.Attr.Ino, k)
	return nil, r.Attr.Ino, nil
}

// grantFor grants leases on the inodes in a mutation's reply. The caller holds the owner's mu.
func (l *leases) grantFor(s *session, c *wire.Call, res *meta.Result, re *wire.Reply) {
	if c.Want == meta.LeaseNone {
		return
	}
	mode := meta.LeaseShared
	switch c.Op.(type) {
	case *meta.Create, *meta.Tmpfile:
		if c.Want == meta.LeaseExclusive && res.Attr.IsRegular() && l.leaders.check(s, &meta.Open{Ino: res.Attr.Ino}) == nil {
			mode = meta.LeaseExclusive
		}
	}
	for _, a := range []*meta.Attr{&res.ParentAttr, &res.NewParentAttr} {
		if a.Ino != 0 {
			l.give(s, a.Ino, meta.LeaseShared, re)
		}
	}
	if res.Attr.Ino != 0 {
		l.give(s, res.Attr.Ino, mode, re)
	}
	if res.Attr2.Ino != 0 {
		l.give(s, res.Attr2.Ino, meta.LeaseShared, re)
	}
}

// grantNames grants a shared lease on the directory of a Lookup that found no entry, or of a
// Create that found the name taken. So the client may cache the answer. The caller holds the
// owner's mu.
func (l *leases) grantNames(s *session, op meta.Op, re *wire.Reply) {
	switch m := op.(type) {
	case *meta.Lookup:
		l.give(s, m.Parent, meta.LeaseShared, re)
	case *meta.Create:
		l.give(s, m.Parent, meta.LeaseShared, re)
	}
}

// giveAgain gives a session the exclusive leases recalled by a barrier, unless another session
// would have to give something up. Changes to such a file by other sessions since, durable or
// not, need no check: another session would first have recalled the rest of this session's
// lease. The caller holds the owner's mu.
func (l *leases) giveAgain(s *session, inos []meta.Ino, re *wire.Reply) {
	for _, ino := range inos[:min(len(inos), meta.MaxAlso)] {
		if l.WasExclusive(s, ino) && l.leaders.check(s, &meta.Open{Ino: ino}) == nil {
			l.give(s, ino, meta.LeaseExclusive, re)
		}
	}
}

// durably runs an operation of the owner, and waits until the operation is journaled.
func (l *leases) durably(ctx context.Context, op meta.Op) error {
	k := l.k
	if err := k.await(ctx, k.recovered); err != nil {
		return err
	}
	t := &ticket{}
	k.mu.Lock()
	defer func() { l.Unblock(&t.leases); k.mu.Unlock() }()
	for {
		if k.failed != nil {
			return k.failed
		}
		wait := l.frozen()
		var err error
		if wait == nil {
			wait, _, err = l.recallFor(nil, op, t, k.view())
		}
		if err != nil {
			return err
		}
		if wait == nil {
			break
		}
		k.mu.Unlock()
		err = k.await(ctx, wait)
		k.mu.Lock()
		if err != nil {
			return err
		}
	}
	_, wait, err := k.start(op, 0)
	if err != nil {
		return err
	}
	k.mu.Unlock()
	err = k.await(ctx, wait)
	k.mu.Lock()
	return err
}

// recallAll takes back every lease on the volume, and runs do under the owner's mu while nothing
// is leased.
func (l *leases) recallAll(ctx context.Context, do func() error) error {
	k := l.k
	for {
		k.mu.Lock()
		all := l.recallEverything()
		if len(all) == 0 {
			defer k.mu.Unlock()
			return do()
		}
		k.mu.Unlock()
		for _, answered := range all {
			if err := k.await(ctx, answered); err != nil {
				return err
			}
		}
	}
}
