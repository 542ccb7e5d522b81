package lease

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// Len is the number of inodes in the table.
func (t *Table[S]) Len() int { return len(t.inodes) }

// Exclusive is the number of inodes leased exclusively.
func (t *Table[S]) Exclusive() int { return len(t.exclusive) }

// Waits returns the number of rounds begun so far, of rounds not answered by every session,
// and of blocks.
func (t *Table[S]) Waits() (began uint64, unanswered, blocks int) {
	return t.lastRound, len(t.rounds), t.blocks
}

// Count is the number of inodes held by a session.
func (t *Table[S]) Count(s S) int {
	if at := t.sessions[s]; at != nil {
		return at.count
	}
	return 0
}

// Alone reports whether no session but s holds an inode, so that no operation of s can
// conflict with a lease.
func (t *Table[S]) Alone(s S) bool {
	return len(t.sessions) == 0 || len(t.sessions) == 1 && t.sessions[s] != nil
}

// Mode is the mode of a session's lease on an inode.
func (t *Table[S]) Mode(s S, ino meta.Ino) meta.LeaseMode {
	if n := t.inodes[ino]; n != nil {
		if h := n.holder(s); h != nil {
			return h.mode
		}
	}
	return meta.LeaseNone
}

// WasExclusive reports whether a session's shared lease on an inode is the rest of an
// exclusive lease.
func (t *Table[S]) WasExclusive(s S, ino meta.Ino) bool {
	n := t.inodes[ino]
	if n == nil {
		return false
	}
	h := n.holder(s)
	return h != nil && h.wasExclusive
}

// ExclusiveElsewhere reports whether a session other than s, seeing the same tree, has an
// exclusive lease on an inode.
func (t *Table[S]) ExclusiveElsewhere(s S, ino meta.Ino) (yes bool) {
	if n := t.inodes[ino]; n != nil {
		n.each(func(h *holder[S]) { yes = yes || t.inWay(h, s, meta.LeaseShared) })
	}
	return yes
}

// HeldExclusively reports whether a session has an exclusive lease on an inode.
func (t *Table[S]) HeldExclusively(ino meta.Ino) bool {
	_, yes := t.exclusive[ino]
	return yes
}

// Holders lists the sessions with a lease on an inode, now or earlier.
func (t *Table[S]) Holders(ino meta.Ino) (all []S) {
	if n := t.inodes[ino]; n != nil {
		n.each(func(h *holder[S]) { all = append(all, h.session) })
	}
	return all
}

// Writers calls yield with every inode leased exclusively and the session of the lease, in the
// order of inodes, until yield returns false.
func (t *Table[S]) Writers(yield func(meta.Ino, S) bool) {
	for _, ino := range slices.Sorted(maps.Keys(t.exclusive)) {
		goOn := true
		t.inodes[ino].each(func(h *holder[S]) {
			if goOn && h.mode == meta.LeaseExclusive {
				goOn = yield(ino, h.session)
			}
		})
		if !goOn {
			return
		}
	}
}

// held reports whether a session satisfying is has more than keep on an inode.
func (t *Table[S]) held(ino meta.Ino, keep meta.LeaseMode, is func(S) bool) (yes bool) {
	if n := t.inodes[ino]; n != nil {
		n.each(func(h *holder[S]) { yes = yes || h.mode > keep && is(h.session) })
	}
	return yes
}

// Refused reports whether a session refused, less than RefusalRest ago, to give back an inode
// that is still leased exclusively.
func (t *Table[S]) Refused(now time.Time, ino meta.Ino) bool {
	n := t.inodes[ino]
	return n != nil && !n.refused.IsZero() && now.Sub(n.refused) < t.RefusalRest
}

// OutOfReach reports whether background work cannot expect to get an inode soon: a session
// with a lease on the inode is away, or has refused to give the inode back.
func (t *Table[S]) OutOfReach(now time.Time, ino meta.Ino, away func(S) bool) bool {
	return t.Refused(now, ino) || t.held(ino, meta.LeaseNone, away)
}

// AllOutOfReach returns the inodes out of reach.
func (t *Table[S]) AllOutOfReach(now time.Time, away func(S) bool) map[meta.Ino]bool {
	beyond := map[meta.Ino]bool{}
	for ino := range t.inodes { // in any order: a set
		if t.OutOfReach(now, ino, away) {
			beyond[ino] = true
		}
	}
	return beyond
}

// Check reports every violated invariant.
func (t *Table[S]) Check() error {
	var found []error
	bad := func(format string, a ...any) { found = append(found, fmt.Errorf(format, a...)) }
	blocks, rounds, exclusive := 0, 0, 0
	count := map[S]int{}
	for ino, n := range t.inodes {
		t.checkInode(ino, n, bad)
		blocks += n.blocks
		if n.round != nil {
			rounds++
		}
		if n.heldExclusively() {
			exclusive++
		}
		n.each(func(h *holder[S]) { count[h.session]++ })
	}
	if blocks != t.blocks {
		bad("%d blocks are counted, there are %d", t.blocks, blocks)
	}
	if rounds != len(t.rounds) {
		bad("%d rounds are unanswered, inodes have %d", len(t.rounds), rounds)
	}
	if exclusive != len(t.exclusive) {
		bad("%d inodes are noted as leased exclusively, %d are", len(t.exclusive), exclusive)
	}
	if len(count) != len(t.sessions) {
		bad("%d sessions are noted, %d are holders", len(t.sessions), len(count))
	}
	for s, at := range t.sessions {
		if at.count != count[s] || at.count == 0 {
			bad("session %v: it is noted as a holder of %d inodes, and is one of %d", s, at.count, count[s])
		}
	}
	return errors.Join(found...)
}

func (t *Table[S]) checkInode(ino meta.Ino, n *inode[S], bad func(format string, a ...any)) {
	var nobody S
	if n.first.session == nobody && (len(n.more) > 0 || n.blocks == 0 && n.round == nil) {
		bad("inode %d: nobody is its first holder, %d are others", ino, len(n.more))
	}
	if n.blocks < 0 || (n.blocks > 0) != (n.unblocked != nil) {
		bad("inode %d: blocked %d times, and waited for: %v", ino, n.blocks, n.unblocked != nil)
	}
	if _, noted := t.exclusive[ino]; noted != n.heldExclusively() {
		bad("inode %d: leased exclusively: %v, noted: %v", ino, n.heldExclusively(), noted)
	}
	if !n.refused.IsZero() && !n.heldExclusively() {
		bad("inode %d: nobody holds on to it", ino)
	}
	t.checkHolders(ino, n, bad)
	r := n.round
	if r == nil {
		return
	}
	if t.rounds[r.number] != r || r.ino != ino || r.number > t.lastRound || len(r.pending) == 0 {
		bad("inode %d: round %d (of inode %d, of %d so far) waits for %d sessions", ino, r.number, r.ino, t.lastRound, len(r.pending))
	}
	for i, s := range r.pending {
		if h := n.holder(s); h == nil || h.mode <= r.keep || slices.Contains(r.pending[:i], s) {
			bad("inode %d: round %d waits for session %v, which has no more than it may keep", ino, r.number, s)
		}
	}
}

func (t *Table[S]) checkHolders(ino meta.Ino, n *inode[S], bad func(format string, a ...any)) {
	seen := map[S]bool{}
	leased, exclusive := 0, 0
	n.each(func(h *holder[S]) {
		if seen[h.session] {
			bad("inode %d: session %v is a holder twice", ino, h.session)
		}
		seen[h.session] = true
		if at := t.sessions[h.session]; at == nil || !slices.Contains(at.inodes, ino) {
			bad("inode %d: it is not noted that session %v is a holder", ino, h.session)
		}
		if h.wasExclusive && h.mode != meta.LeaseShared {
			bad("inode %d: session %v has %v left of an exclusive lease", ino, h.session, h.mode)
		}
		if h.mode > meta.LeaseNone {
			leased++
		}
		if h.mode == meta.LeaseExclusive {
			exclusive++
		}
	})
	// With two trees a session may have leases from before it entered the other tree.
	if exclusive > 0 && leased > 1 && !t.NoRecall && len(t.liveTree) == 0 {
		bad("inode %d: %d sessions have leases, %d of them an exclusive one", ino, leased, exclusive)
	}
}
