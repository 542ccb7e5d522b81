// Package lease owns the leases of one volume: which session may cache what of which
// inode, which sessions were asked to give a lease back, and which operations wait for
// that. It is a pure machine in the owner's memory. Leases are not journaled: after a
// change of owner every session claims its own again.
//
// A lease on an inode is shared or exclusive (meta.LeaseMode). An operation that
// conflicts with leases of other sessions recalls them first:
//
//	Recall    begins a round: every session in the way gets a message
//	Block     keeps new leases away from the inode until the operation has run
//	Answer    a session gave its lease back, or says that it holds on to it
//	Drop      a session gave everything on the inode back: an answer, too
//
// A round ends when the last session has answered. The operation is then tried again;
// another round follows if this one did not ask for enough.
//
// While the barrier is up nobody gets an exclusive lease, and AskWriters takes back
// those that are out.
//
// The table reads no clock: the caller says what time it is. It sends nothing: the
// messages that are to be sent are results. Two waits are channels, which the table
// closes: the end of a round, and the end of a block.
package lease

import (
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// Table holds the leases of one volume. S names a session; its zero value is nobody, as
// whom the owner acts itself. A Table is not safe for use by several goroutines at once.
//
// A session that once had a lease on an inode stays its holder with LeaseNone until it
// drops the inode: it may have a descriptor of it, and counts when the last name goes.
type Table[S comparable] struct {
	Config

	// INVARIANT: no entry without holders, blocks and a round.
	inodes map[meta.Ino]*inode[S]
	// sessions are the sessions that are holders of some inode.
	// INVARIANT: no entry whose count is zero.
	sessions map[S]*standing
	// rounds are the rounds that some session has not answered, by number.
	// INVARIANT: each is the round of its inode, and has a session to wait for.
	rounds map[uint64]*round[S]
	// lastRound is the number of the last round that began.
	lastRound uint64
	// blocks is how often inodes are blocked.
	// INVARIANT: the sum of inode.blocks.
	blocks int
	// exclusive are the inodes on which some session has an exclusive lease.
	exclusive map[meta.Ino]struct{}
	// liveTree are, in a mirror's target, the sessions whose leases are of the live tree:
	// the session that fills it, and those that did before. All others have leases of
	// the snapshot that is shown, so that the two kinds never conflict.
	liveTree map[S]struct{}
	// barrier is up if it is not nil.
	barrier *barrier
}

// Config is how a table behaves.
type Config struct {
	// RefusalRest is for how long a session that could not give a lease back is not asked
	// again in the background: while it is asked its writers wait.
	RefusalRest time.Duration
	// Controls of tests.
	NoRecall bool // no lease is recalled, and leases are given in spite of others
	NoPutIn  bool // no session puts in what it still has of an inode
}

// standing is where a session stands.
type standing struct {
	// count is of how many inodes the session is a holder.
	count int
	// inodes are these, and some that the session has left since: a session that comes or
	// goes is looked for at its own inodes, however many inodes the table has.
	// INVARIANT: it lacks none of these. When a session comes to an inode, the list is at
	// most standingRoom longer than twice the count.
	inodes []meta.Ino
}

// standingRoom is how long standing.inodes may get, at the least, before it is cleared of
// inodes that the session has left.
const standingRoom = 64

// holder is a session that has, or had, a lease on an inode.
type holder[S comparable] struct {
	session S
	mode    meta.LeaseMode
	// wasExclusive: the session's exclusive lease was lowered to the shared one, which it
	// has had since without a break.
	// INVARIANT: mode is shared.
	wasExclusive bool
}

// inode is the leases on one inode.
type inode[S comparable] struct {
	// INVARIANT: no session twice; more is empty if first is nobody. Among sessions that
	// see the same tree, a session with an exclusive lease is the only one with a lease.
	first holder[S] // most inodes have one holder
	more  []holder[S]
	round *round[S] // nil: nobody is asked
	// blocks counts the operations that keep new leases away: they recalled leases here,
	// and have not run yet.
	blocks int
	// unblocked is closed when blocks falls to zero.
	// INVARIANT: nil if and only if blocks is zero.
	unblocked chan struct{}
	// refused is when a session that has the exclusive lease last said that it holds on
	// to it; zero: none did.
	refused time.Time
}

// round is one round of asking.
type round[S comparable] struct {
	ino meta.Ino
	// number tells the round from earlier ones: a late answer to an earlier round must
	// not pass for one to this, as the session may have a newer lease by now.
	number uint64
	since  time.Time
	keep   meta.LeaseMode // what a session may keep
	within time.Duration  // see meta.Recall
	// pending are the sessions that have not answered, in the order in which they were
	// asked.
	// INVARIANT: each is a holder with more than keep.
	pending []S
	over    chan struct{} // closed when pending is empty
	// awaited: an operation of a session waits for it, not only background work.
	awaited bool
}

// barrier holds exclusive leases off.
type barrier struct {
	// since is the last round before the barrier was put up: what is answered to it says
	// nothing of now.
	since uint64
	// refused are the inodes on whose lease a session holds on.
	refused map[meta.Ino]struct{}
}

// Message asks a session to lower its lease.
type Message[S comparable] struct {
	To    S
	Round uint64 // that the answer must name
	meta.Recall
}

// New makes an empty table.
func New[S comparable](c Config) *Table[S] {
	return &Table[S]{
		Config: c, inodes: map[meta.Ino]*inode[S]{}, sessions: map[S]*standing{}, rounds: map[uint64]*round[S]{},
		exclusive: map[meta.Ino]struct{}{}, liveTree: map[S]struct{}{},
	}
}

// each calls fn with the holders, in the order of the table.
func (n *inode[S]) each(fn func(h *holder[S])) {
	var nobody S
	if n.first.session != nobody {
		fn(&n.first)
	}
	for i := range n.more {
		fn(&n.more[i])
	}
}

// holder finds a session; nil: it is none of the holders.
func (n *inode[S]) holder(s S) (found *holder[S]) {
	n.each(func(h *holder[S]) {
		if h.session == s {
			found = h
		}
	})
	return found
}

// asked reports whether the session has not answered the round.
func (r *round[S]) asked(s S) bool { return r != nil && slices.Contains(r.pending, s) }

// sameTree reports whether leases of two sessions can conflict: they see the same tree.
// Nobody, the owner itself, sees every tree.
func (t *Table[S]) sameTree(a, b S) bool {
	var nobody S
	if len(t.liveTree) == 0 || a == nobody || b == nobody {
		return true
	}
	_, x := t.liveTree[a]
	_, y := t.liveTree[b]
	return x == y
}

// inWay reports whether a holder has more than keep and is in the way of a session.
func (t *Table[S]) inWay(h *holder[S], s S, keep meta.LeaseMode) bool {
	return h.session != s && h.mode > keep && t.sameTree(s, h.session)
}

// Grant gives a session a lease on an inode, or as much of it as other leases, blocks and
// the barrier leave. It returns what the session had before and has now. LeaseNone makes
// the session a holder that may have the inode open.
func (t *Table[S]) Grant(s S, ino meta.Ino, mode meta.LeaseMode) (had, has meta.LeaseMode) {
	if t.barrier != nil {
		mode = min(mode, meta.LeaseShared)
	}
	if n := t.inodes[ino]; n != nil && !t.NoRecall {
		if n.blocks > 0 {
			mode = meta.LeaseNone
		}
		n.each(func(h *holder[S]) {
			switch {
			case t.inWay(h, s, meta.LeaseShared):
				mode = meta.LeaseNone
			case t.inWay(h, s, meta.LeaseNone):
				mode = min(mode, meta.LeaseShared)
			}
		})
	}
	had = t.Mode(s, ino)
	return had, t.Claim(s, ino, mode)
}

// Claim gives a session a lease that cannot conflict with another: the session had it
// from the owner before. It returns what the session has now.
func (t *Table[S]) Claim(s S, ino meta.Ino, mode meta.LeaseMode) meta.LeaseMode {
	n := t.inode(ino)
	h := n.holder(s)
	if h == nil {
		var nobody S
		if n.first.session == nobody {
			n.first = holder[S]{session: s}
			h = &n.first
		} else {
			n.more = append(n.more, holder[S]{session: s})
			h = &n.more[len(n.more)-1]
		}
		t.come(s, ino)
	}
	if n.round.asked(s) {
		return min(h.mode, n.round.keep) // its lease is being taken away: it gets nothing new
	}
	if mode > h.mode {
		h.mode, h.wasExclusive = mode, false
		if mode == meta.LeaseExclusive {
			t.exclusive[ino] = struct{}{}
		}
	}
	return h.mode
}

// inode finds an inode, or adds it.
func (t *Table[S]) inode(ino meta.Ino) *inode[S] {
	n := t.inodes[ino]
	if n == nil {
		n = &inode[S]{}
		t.inodes[ino] = n
	}
	return n
}

// come notes that a session became a holder of an inode.
func (t *Table[S]) come(s S, ino meta.Ino) {
	at := t.sessions[s]
	if at == nil {
		at = &standing{}
		t.sessions[s] = at
	}
	at.count++
	at.inodes = append(at.inodes, ino)
	if len(at.inodes) > 2*at.count+standingRoom {
		slices.Sort(at.inodes)
		at.inodes = slices.Clone(slices.DeleteFunc(slices.Compact(at.inodes), func(ino meta.Ino) bool {
			n := t.inodes[ino]
			return n == nil || n.holder(s) == nil
		}))
	}
}

// Drop takes a session out of an inode's holders.
func (t *Table[S]) Drop(s S, ino meta.Ino) {
	n := t.inodes[ino]
	if n == nil {
		return
	}
	gone := false
	if last := len(n.more) - 1; n.first.session == s {
		gone = true
		n.first = holder[S]{}
		if last >= 0 {
			n.first, n.more = n.more[last], n.more[:last]
		}
	} else if i := slices.IndexFunc(n.more, func(h holder[S]) bool { return h.session == s }); i >= 0 {
		gone = true
		n.more[i] = n.more[last]
		n.more = n.more[:last]
	}
	if gone {
		at := t.sessions[s]
		if at.count--; at.count == 0 {
			delete(t.sessions, s)
			delete(t.liveTree, s)
		}
	}
	t.answered(ino, n, s)
}

// DropAll takes a session out of everything but the inodes that stay.
func (t *Table[S]) DropAll(s S, stays ...meta.Ino) {
	at := t.sessions[s]
	if at == nil {
		delete(t.liveTree, s)
		return
	}
	for _, ino := range at.inodes {
		if !slices.Contains(stays, ino) {
			t.Drop(s, ino)
		}
	}
}

// answered notes that a session has given back what it was asked for, or holds on to it:
// it is waited for no more.
func (t *Table[S]) answered(ino meta.Ino, n *inode[S], s S) {
	if _, was := t.exclusive[ino]; was && !n.heldExclusively() {
		delete(t.exclusive, ino)
		n.refused = time.Time{}
	}
	if r := n.round; r != nil {
		if i := slices.Index(r.pending, s); i >= 0 {
			r.pending = slices.Delete(r.pending, i, i+1)
		}
		if len(r.pending) == 0 {
			n.round = nil
			delete(t.rounds, r.number)
			close(r.over)
		}
	}
	t.tidy(ino, n)
}

func (n *inode[S]) heldExclusively() (yes bool) {
	n.each(func(h *holder[S]) { yes = yes || h.mode == meta.LeaseExclusive })
	return yes
}

// tidy forgets an inode of which nothing is to be known.
func (t *Table[S]) tidy(ino meta.Ino, n *inode[S]) {
	var nobody S
	if n.first.session == nobody && n.blocks == 0 && n.round == nil {
		delete(t.inodes, ino)
	}
}

// EnterLiveTree has a session's leases be of a mirror target's live tree.
func (t *Table[S]) EnterLiveTree(s S) { t.liveTree[s] = struct{}{} }

// OneTree has the leases of all sessions be of the same tree again. Nothing may be
// leased.
func (t *Table[S]) OneTree() { clear(t.liveTree) }
