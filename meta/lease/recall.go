package lease

import (
	"maps"
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// Recall asks every session but s with more than keep on an inode to lower its lease, for a
// waiting operation. It returns the channel to wait for and the messages to send; nil: no
// session is in the way. Sessions that have not answered the round count as in the way
// (InTheWay).
func (t *Table[S]) Recall(now time.Time, s S, ino meta.Ino, keep meta.LeaseMode) (over <-chan struct{}, send []Message[S]) {
	over, send = t.Ask(now, s, ino, keep, 0)
	if over != nil {
		t.inodes[ino].round.awaited = true
	}
	return over, send
}

// Ask is Recall for background work: InTheWay does not list the asked sessions, so background
// work must not wait for absent sessions. within, unless zero, is how long a session tries to
// give its lease back; after within, the session may refuse.
func (t *Table[S]) Ask(now time.Time, s S, ino meta.Ino, keep meta.LeaseMode, within time.Duration) (over <-chan struct{}, send []Message[S]) {
	n := t.inodes[ino]
	if n == nil || t.NoRecall {
		return nil, nil
	}
	if n.round != nil {
		// A round is in progress. If the round asks for too little, the caller starts another
		// round afterwards.
		n.each(func(h *holder[S]) {
			if t.inWay(h, s, keep) {
				over = n.round.over
			}
		})
		return over, nil
	}
	r := &round[S]{ino: ino, number: t.lastRound + 1, since: now, keep: keep, within: within}
	n.each(func(h *holder[S]) {
		if t.inWay(h, s, keep) {
			send = append(send, r.ask(h.session))
		}
	})
	if len(send) == 0 {
		return nil, nil
	}
	r.over = make(chan struct{})
	t.lastRound = r.number
	n.round, t.rounds[r.number] = r, r
	return r.over, send
}

// ask adds a session to the round.
func (r *round[S]) ask(s S) Message[S] {
	r.pending = append(r.pending, s)
	return r.message(s)
}

func (r *round[S]) message(s S) Message[S] {
	return Message[S]{To: s, Round: r.number, Recall: meta.Recall{Ino: r.ino, Keep: r.keep, Within: r.within}}
}

// RecallAll is Recall, by the owner itself, of every lease on every inode.
func (t *Table[S]) RecallAll(now time.Time) (over []<-chan struct{}, send []Message[S]) {
	if t.NoRecall {
		return nil, nil
	}
	var leased []meta.Ino
	for ino, n := range t.inodes {
		n.each(func(h *holder[S]) {
			if h.mode > meta.LeaseNone {
				leased = append(leased, ino)
			}
		})
	}
	slices.Sort(leased)
	for _, ino := range slices.Compact(leased) {
		var nobody S
		ch, ask := t.Recall(now, nobody, ino, meta.LeaseNone)
		if ch != nil {
			over = append(over, ch)
		}
		send = append(send, ask...)
	}
	return over, send
}

// PutIn reports whether a session may still commit its changes of an inode although an
// operation is waiting for the session to give the inode up. The commit must not wait for
// another session, else neither could proceed. So other sessions with a lease on the inode
// (possibly also the session of the waiting operation) are asked in the same round, which ends
// when all have answered.
func (t *Table[S]) PutIn(s S, ino meta.Ino) (yes bool, send []Message[S]) {
	n := t.inodes[ino]
	if n == nil || !n.round.asked(s) || n.round.keep != meta.LeaseNone || n.round.within != 0 || t.NoPutIn {
		return false, nil
	}
	n.each(func(h *holder[S]) {
		if t.inWay(h, s, meta.LeaseNone) && !n.round.asked(h.session) {
			send = append(send, n.round.ask(h.session))
		}
	})
	return true, send
}

// Answer books a session's answer to a round: the session has lowered its lease or, with
// holdsOn, keeps the lease, if the round permits refusal. Answer reports whether the answer
// counts.
func (t *Table[S]) Answer(now time.Time, s S, ino meta.Ino, number uint64, holdsOn bool) bool {
	n := t.inodes[ino]
	if n == nil || n.round == nil || n.round.number != number || holdsOn && n.round.within == 0 || !n.round.asked(s) {
		return false
	}
	if h, keep := n.holder(s), n.round.keep; !holdsOn && h.mode > keep {
		h.wasExclusive = h.mode == meta.LeaseExclusive && keep == meta.LeaseShared
		h.mode = keep
	}
	if holdsOn {
		if _, exclusive := t.exclusive[ino]; exclusive {
			n.refused = now
		}
		if t.barrier != nil && number > t.barrier.since {
			t.barrier.refused[ino] = struct{}{}
		}
	}
	t.answered(ino, n, s)
	return true
}

// Unanswered returns the messages that a session has not answered, to be sent again.
func (t *Table[S]) Unanswered(s S) (again []Message[S]) {
	for _, r := range t.inOrder() {
		if r.asked(s) {
			again = append(again, r.message(s))
		}
	}
	return again
}

// inOrder lists the rounds not answered by every session, oldest first.
func (t *Table[S]) inOrder() (all []*round[S]) {
	for _, number := range slices.Sorted(maps.Keys(t.rounds)) {
		all = append(all, t.rounds[number])
	}
	return all
}

// Stubborn lists the sessions that have not answered a round begun before a given time; a
// session may be listed several times.
func (t *Table[S]) Stubborn(before time.Time) (stubborn []S) {
	for _, r := range t.inOrder() {
		if r.since.Before(before) {
			stubborn = append(stubborn, r.pending...)
		}
	}
	return stubborn
}

// InTheWay lists the sessions whose answers waiting operations need; a session may be listed
// several times.
func (t *Table[S]) InTheWay() (all []S) {
	for _, r := range t.inOrder() {
		if r.awaited {
			all = append(all, r.pending...)
		}
	}
	return all
}

// Extend gives every session more time to answer.
func (t *Table[S]) Extend(by time.Duration) {
	for _, r := range t.rounds { // in any order: rounds are independent
		r.since = r.since.Add(by)
	}
}

// Blocker is a waiting operation that keeps new leases away from inodes.
type Blocker struct {
	inodes []meta.Ino
}

// Block keeps new leases away from an inode until Unblock.
func (t *Table[S]) Block(b *Blocker, ino meta.Ino) {
	if slices.Contains(b.inodes, ino) {
		return
	}
	n := t.inode(ino)
	n.blocks++
	t.blocks++
	if n.unblocked == nil {
		n.unblocked = make(chan struct{})
	}
	b.inodes = append(b.inodes, ino)
}

// Unblock ends all blocks of an operation.
func (t *Table[S]) Unblock(b *Blocker) {
	for _, ino := range b.inodes {
		t.unblock(ino)
	}
	b.inodes = nil
}

// UnblockInode ends an operation's block on one inode, so that the operation's own session can
// get a lease on the inode.
func (t *Table[S]) UnblockInode(b *Blocker, ino meta.Ino) {
	if i := slices.Index(b.inodes, ino); i >= 0 {
		b.inodes = slices.Delete(b.inodes, i, i+1)
		t.unblock(ino)
	}
}

func (t *Table[S]) unblock(ino meta.Ino) {
	n := t.inodes[ino]
	n.blocks--
	t.blocks--
	if n.blocks == 0 {
		close(n.unblocked)
		n.unblocked = nil
		t.tidy(ino, n)
	}
}

// Blocked returns the channel that an operation waits for before an inode may be leased again;
// nil: the inode may be leased now, or the operation itself blocks the inode.
func (t *Table[S]) Blocked(b *Blocker, ino meta.Ino) <-chan struct{} {
	n := t.inodes[ino]
	if n == nil || n.blocks == 0 || slices.Contains(b.inodes, ino) {
		return nil
	}
	return n.unblocked
}

// RaiseBarrier prevents exclusive leases until LowerBarrier.
func (t *Table[S]) RaiseBarrier() {
	t.barrier = &barrier{since: t.lastRound, refused: map[meta.Ino]struct{}{}}
}

// LowerBarrier ends the barrier.
func (t *Table[S]) LowerBarrier() { t.barrier = nil }

// AskWriters asks the sessions to lower every exclusive lease to shared, except leases refused
// since the barrier was raised. over has the channels to wait for. AskWriters also asks absent
// sessions, for the time of their return, but over omits inodes leased exclusively by an
// absent session.
func (t *Table[S]) AskWriters(now time.Time, within time.Duration, away func(S) bool) (over []<-chan struct{}, send []Message[S]) {
	for _, ino := range slices.Sorted(maps.Keys(t.exclusive)) {
		if t.barrier != nil {
			if _, refused := t.barrier.refused[ino]; refused {
				continue
			}
		}
		var nobody S
		ch, ask := t.Ask(now, nobody, ino, meta.LeaseShared, within)
		send = append(send, ask...)
		if ch != nil && !t.held(ino, meta.LeaseShared, away) {
			over = append(over, ch)
		}
	}
	return over, send
}
