// Package lease owns the leases of one volume: which session may cache which part of an inode,
// which sessions were asked to give a lease back, and which operations wait for the answers.
// The package is a pure machine in the owner's memory. Leases are not journaled: after a
// change of owner every session claims its own leases again.
//
// A lease on an inode is shared or exclusive (meta.LeaseMode). An operation that conflicts
// with leases of other sessions recalls the leases first:
//
//	Recall    begins a round: every session in the way gets a message
//	Block     keeps new leases away from the inode until the operation has run
//	Answer    a session gave its lease back, or reports that it keeps the lease
//	Drop      a session gave back everything on the inode: Drop is an answer, too
//
// A round ends when the last session has answered. The operation is then tried again; if the
// round asked for too little, another round follows.
//
// While the barrier is up no session gets an exclusive lease, and AskWriters recalls the
// exclusive leases granted before.
//
// The table reads no clock: the caller passes the time. The table sends nothing: it returns
// the messages for the caller to send. The table closes two kinds of channels for waiting
// operations: at the end of a round, and at the end of a block.
package lease

import (
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// Table holds the leases of one volume. S identifies a session; the zero value of S means
// nobody, under which the owner itself acts. A Table is not safe for concurrent use.
//
// A session that had a lease on an inode stays the inode's holder, with LeaseNone, until the
// session drops the inode: the session may have a descriptor, and counts as a holder when the
// inode loses its last name.
type Table[S comparable] struct {
	Config

	// INVARIANT: no entry without holders, blocks and a round.
	inodes map[meta.Ino]*inode[S]
	// sessions are the sessions holding at least one inode.
	// INVARIANT: no entry whose count is zero.
	sessions map[S]*standing
	// rounds are the rounds not answered by every session, by number.
	// INVARIANT: each is the round of its inode, and has a session to wait for.
	rounds map[uint64]*round[S]
	// lastRound is the number of the latest round.
	lastRound uint64
	// blocks counts the blocks of all inodes.
	// INVARIANT: the sum of inode.blocks.
	blocks int
	// exclusive are the inodes leased exclusively.
	exclusive map[meta.Ino]struct{}
	// liveTree lists, in a mirror's target, the sessions with leases of the live tree: the
	// session filling the target, and its predecessors. All other sessions have leases of the
	// shown snapshot, so leases of the two kinds never conflict.
	liveTree map[S]struct{}
	// barrier is up if not nil.
	barrier *barrier
}

// Config configures a table.
type Config struct {
	// RefusalRest is the time during which background work does not ask a session again for a
	// lease that the session could not give back: a recall makes the session's writers wait.
	RefusalRest time.Duration
	// Controls of tests.
	NoRecall bool // recall no lease, and grant leases despite conflicts
	NoPutIn  bool // PutIn always reports false
}

// standing lists the inodes of a session.
type standing struct {
	// count is the number of inodes held by the session.
	count int
	// inodes lists the inodes held, and some inodes that the session has dropped since. The
	// list makes the inodes of a session cheap to find, however large the table is.
	// INVARIANT: it lacks no inode held. When a session comes to an inode, the list is at
	// most standingRoom longer than twice the count.
	inodes []meta.Ino
}

// standingRoom is the slack of standing.inodes: come removes dropped inodes from the list when
// its length exceeds twice the count plus standingRoom.
const standingRoom = 64

// holder is a session with a lease on an inode, now or earlier.
type holder[S comparable] struct {
	session S
	mode    meta.LeaseMode
	// wasExclusive: the session's exclusive lease was lowered to a shared lease, and the
	// session has held the shared lease without a break since.
	// INVARIANT: mode is shared.
	wasExclusive bool
}

// inode holds the leases on an inode.
type inode[S comparable] struct {
	// INVARIANT: no session twice; more is empty if first is nobody. Among sessions that see
	// the same tree, a session with an exclusive lease is the only session with a lease.
	first holder[S] // most inodes have a single holder
	more  []holder[S]
	round *round[S] // nil: no recall in progress
	// blocks counts the operations that keep new leases away: operations that recalled leases
	// of the inode and have not run yet.
	blocks int
	// unblocked is closed when blocks falls to zero.
	// INVARIANT: nil if and only if blocks is zero.
	unblocked chan struct{}
	// refused is the time at which the session with the exclusive lease last reported that it
	// keeps the lease; zero: no such report.
	refused time.Time
}

// round is a set of recalls on an inode, sent for one purpose.
type round[S comparable] struct {
	ino meta.Ino
	// number distinguishes the round from earlier rounds: a late answer to an earlier round
	// must not count as an answer to this round, as the session may have a newer lease by now.
	number uint64
	since  time.Time
	keep   meta.LeaseMode // mode that a session may keep
	within time.Duration  // see meta.Recall
	// pending are the sessions that have not answered, in the order of the recalls.
	// INVARIANT: each is a holder with more than keep.
	pending []S
	over    chan struct{} // closed when pending is empty
	// awaited: an operation of a session waits for the round, not only background work.
	awaited bool
}

// barrier prevents exclusive leases.
type barrier struct {
	// since is the number of the last round before the barrier was raised: an answer to such a
	// round does not describe the time after.
	since uint64
	// refused are the inodes whose exclusive lease a session has refused to give back.
	refused map[meta.Ino]struct{}
}

// Message is a request to a session to lower its lease.
type Message[S comparable] struct {
	To    S
	Round uint64 // the answer must repeat the number
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

// holder finds a session among the holders; nil: the session is no holder.
func (n *inode[S]) holder(s S) (found *holder[S]) {
	n.each(func(h *holder[S]) {
		if h.session == s {
			found = h
		}
	})
	return found
}

// asked reports whether the round still waits for the session.
func (r *round[S]) asked(s S) bool { return r != nil && slices.Contains(r.pending, s) }

// sameTree reports whether leases of two sessions can conflict: the sessions see the same
// tree. Nobody (the owner itself) sees every tree.
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

// Grant grants a session a lease on an inode: mode, or the lower mode permitted by other
// leases, blocks and the barrier. It returns the session's modes before and after. LeaseNone
// makes the session a holder that may have the inode open.
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

// Claim grants a session a lease that cannot conflict with other leases: the session had the
// lease from the previous owner. It returns the session's mode after the claim.
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
		return min(h.mode, n.round.keep) // a recall is pending: no higher mode
	}
	if mode > h.mode {
		h.mode, h.wasExclusive = mode, false
		if mode == meta.LeaseExclusive {
			t.exclusive[ino] = struct{}{}
		}
	}
	return h.mode
}

// inode finds an inode, or adds the inode to the table.
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

// Drop removes a session from an inode's holders, and books the removal as an answer.
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

// DropAll removes a session from the holders of every inode not listed in stays.
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

// answered notes that a session answered the inode's round: the session gave its lease back,
// or refused. The round no longer waits for the session.
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

// tidy removes an inode without holders, blocks and a round from the table.
func (t *Table[S]) tidy(ino meta.Ino, n *inode[S]) {
	var nobody S
	if n.first.session == nobody && n.blocks == 0 && n.round == nil {
		delete(t.inodes, ino)
	}
}

// EnterLiveTree marks a session: its leases belong to the live tree of a mirror's target.
func (t *Table[S]) EnterLiveTree(s S) { t.liveTree[s] = struct{}{} }

// OneTree makes the leases of all sessions belong to the same tree again. No inode may be
// leased.
func (t *Table[S]) OneTree() { clear(t.liveTree) }
