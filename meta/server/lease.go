package server

import (
	"maps"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// leaseTable is who may cache what of one volume. Guarded by the owner's mu.
//
// A session that once had a lease stays in the table with LeaseNone until it
// drops the inode: it may hold a descriptor, so that it counts as a holder
// when the last name goes.
type leaseTable struct {
	m     map[meta.Ino]*leases
	count map[*session]int // inodes that each session stands at
	// at are these, and some that it has left: who comes and goes is looked for at its own
	// inodes, however many others stand at.
	// INVARIANT: it lacks none; when one comes, at most standRoom and as many again as it
	// stands at are too many.
	at      map[*session][]meta.Ino
	blocked int                  // tickets in all
	unsafe  bool                 // nothing is recalled (Unsafe.NoRecall)
	late    bool                 // who is asked to give up puts nothing in (Unsafe.NoPutIn)
	rounds  uint64               // of asking, so far
	asking  map[*recall]struct{} // rounds that are out
	// writable are the inodes that somebody holds exclusively.
	writable map[meta.Ino]struct{}
	// heldOn is when the holder of some of these last said that it can't commit what it
	// buffered; see holdsOn.
	heldOn map[meta.Ino]time.Time
	// inside are, in a mirror's target, the sessions that may have leases of the live
	// tree: the one that fills it, and those that did. All others have leases of the
	// snapshot that is shown, so that neither bears on the other.
	inside map[*session]struct{}
}

// apart reports that what one session holds does not bear on another. nil bears on
// all.
func (t *leaseTable) apart(a, b *session) bool {
	if len(t.inside) == 0 || a == nil || b == nil {
		return false
	}
	_, x := t.inside[a]
	_, y := t.inside[b]
	return x != y
}

type holder struct {
	s    *session
	mode meta.LeaseMode
	// gave: its exclusive lease was lowered to the shared one, which it has had since
	// without a break.
	gave bool
}

// leases of one inode.
type leases struct {
	first  holder // most inodes have one holder
	more   []holder
	recall *recall
	// blocked counts operations that recalled leases here and have not run
	// yet: until then nobody gets a new one (grants queue behind a waiting
	// conflicting operation). free is closed when it falls to zero.
	blocked int
	free    chan struct{}
}

// recall is one round of asking; done is closed when everybody answered.
type recall struct {
	ino meta.Ino
	// round numbers it: a repeated answer to an earlier round must not pass for
	// one to this, since the session may have a newer lease by now.
	round   uint64
	since   time.Time
	keep    meta.LeaseMode
	within  time.Duration // see meta.Recall
	pending map[*session]struct{}
	done    chan struct{}
	// wanted: somebody waits for it, not only what the owner does in the background.
	wanted bool
}

func newLeaseTable() leaseTable {
	return leaseTable{m: map[meta.Ino]*leases{}, count: map[*session]int{}, at: map[*session][]meta.Ino{}, asking: map[*recall]struct{}{}, writable: map[meta.Ino]struct{}{}, heldOn: map[meta.Ino]time.Time{}, inside: map[*session]struct{}{}}
}

// alone reports whether no session but s has any lease, so that an operation
// of s can't conflict with anything.
func (t *leaseTable) alone(s *session) bool {
	return len(t.count) == 0 || len(t.count) == 1 && t.count[s] > 0
}

func (l *leases) each(fn func(h *holder)) {
	if l.first.s != nil {
		fn(&l.first)
	}
	for i := range l.more {
		fn(&l.more[i])
	}
}

func (l *leases) of(s *session) *holder {
	var found *holder
	l.each(func(h *holder) {
		if h.s == s {
			found = h
		}
	})
	return found
}

// grant gives s a lease on ino and returns what s now has. Nobody else's lease
// may conflict: the caller has recalled those. LeaseNone only books s as one
// that may have the inode open.
func (t *leaseTable) grant(s *session, ino meta.Ino, mode meta.LeaseMode) meta.LeaseMode {
	l := t.m[ino]
	if l == nil {
		l = &leases{}
		t.m[ino] = l
	}
	h := l.of(s)
	if h == nil {
		if l.first.s == nil {
			l.first = holder{s: s}
			h = &l.first
		} else {
			l.more = append(l.more, holder{s: s})
			h = &l.more[len(l.more)-1]
		}
		t.stand(s, ino)
	}
	if l.recall != nil {
		if _, asked := l.recall.pending[s]; asked {
			return min(h.mode, l.recall.keep) // it is being taken away: nothing new
		}
	}
	if mode > h.mode {
		h.mode, h.gave = mode, false
		if mode == meta.LeaseExclusive {
			t.writable[ino] = struct{}{}
		}
	}
	return h.mode
}

// standRoom is how many inodes of a session, at the least, are not looked through for
// such as it has left.
const standRoom = 64

// stand notes that s has come to ino.
func (t *leaseTable) stand(s *session, ino meta.Ino) {
	t.count[s]++
	at := append(t.at[s], ino)
	if len(at) > 2*t.count[s]+standRoom {
		slices.Sort(at)
		at = slices.Clone(slices.DeleteFunc(slices.Compact(at), func(ino meta.Ino) bool { return !t.stands(s, ino) }))
	}
	t.at[s] = at
}

// stands reports whether s is one of an inode's holders.
func (t *leaseTable) stands(s *session, ino meta.Ino) bool {
	l := t.m[ino]
	return l != nil && l.of(s) != nil
}

// exclusive reports whether anybody holds ino exclusively.
func (t *leaseTable) exclusive(ino meta.Ino) (yes bool) {
	if l := t.m[ino]; l != nil {
		l.each(func(h *holder) { yes = yes || h.mode == meta.LeaseExclusive })
	}
	return yes
}

// mode tells what s has.
func (t *leaseTable) mode(s *session, ino meta.Ino) meta.LeaseMode {
	if l := t.m[ino]; l != nil {
		if h := l.of(s); h != nil {
			return h.mode
		}
	}
	return meta.LeaseNone
}

// gave reports whether s has of ino what was left to it of an exclusive lease.
func (t *leaseTable) gave(s *session, ino meta.Ino) bool {
	l := t.m[ino]
	if l == nil {
		return false
	}
	h := l.of(s)
	return h != nil && h.gave
}

// drop takes s out of an inode's holders.
func (t *leaseTable) drop(s *session, ino meta.Ino) {
	l := t.m[ino]
	if l == nil {
		return
	}
	gone := false
	if l.first.s == s {
		gone = true
		l.first = holder{}
		if n := len(l.more); n > 0 {
			l.first, l.more = l.more[n-1], l.more[:n-1]
		}
	} else {
		for i := range l.more {
			if l.more[i].s == s {
				l.more[i] = l.more[len(l.more)-1]
				l.more = l.more[:len(l.more)-1]
				gone = true
				break
			}
		}
	}
	if gone {
		if t.count[s]--; t.count[s] == 0 {
			delete(t.count, s)
			delete(t.at, s)
			delete(t.inside, s)
		}
	}
	t.lowered(ino)
	t.answered(l, s)
	t.tidy(ino, l)
}

// lowered notes that somebody gave something of ino back.
func (t *leaseTable) lowered(ino meta.Ino) {
	if _, was := t.writable[ino]; was && !t.exclusive(ino) {
		delete(t.writable, ino)
		delete(t.heldOn, ino)
	}
}

// dropAll takes s out of everything.
func (t *leaseTable) dropAll(s *session) {
	t.dropAllBut(s, func(meta.Ino) bool { return false })
}

// dropAllBut takes s out of everything but the inodes that stay.
func (t *leaseTable) dropAllBut(s *session, stays func(meta.Ino) bool) {
	if t.count[s] == 0 {
		delete(t.inside, s)
		return
	}
	for _, ino := range t.at[s] {
		if !stays(ino) {
			t.drop(s, ino)
		}
	}
}

// asked gives the rounds that are out and that s has not answered.
func (t *leaseTable) asked(s *session, each func(r *recall)) {
	for r := range t.asking {
		if _, asked := r.pending[s]; asked {
			each(r)
		}
	}
}

func (t *leaseTable) tidy(ino meta.Ino, l *leases) {
	if l.first.s == nil && l.blocked == 0 && l.recall == nil {
		delete(t.m, ino)
	}
}

func (t *leaseTable) answered(l *leases, s *session) {
	r := l.recall
	if r == nil {
		return
	}
	delete(r.pending, s)
	if len(r.pending) == 0 {
		l.recall = nil
		delete(t.asking, r)
		close(r.done)
	}
}

// unanswered lists the sessions that leave a recall of before a moment
// unanswered.
func (t *leaseTable) unanswered(before time.Time) (late []*session) {
	for r := range t.asking {
		if r.since.Before(before) {
			for s := range r.pending {
				late = append(late, s)
			}
		}
	}
	return late
}

// inTheWay lists the sessions that somebody waits for.
func (t *leaseTable) inTheWay() (all []*session) {
	for r := range t.asking {
		if r.wanted {
			all = slices.AppendSeq(all, maps.Keys(r.pending))
		}
	}
	return all
}

// away reports whether a session that only lingers has more than keep on ino: who
// asks for it may wait long.
func (t *leaseTable) away(ino meta.Ino, keep meta.LeaseMode) (yes bool) {
	if l := t.m[ino]; l != nil {
		l.each(func(h *holder) { yes = yes || h.mode > keep && h.s.away.Load() })
	}
	return yes
}

// heldRest is for how long who holds on to a lease is not asked again in the background:
// while it is asked its writers wait.
const heldRest = 30 * time.Second

// holdsOn reports whether a session said a while ago that it can't give ino back now,
// and has it still.
func (t *leaseTable) holdsOn(ino meta.Ino) bool {
	at, ok := t.heldOn[ino]
	return ok && time.Since(at) < heldRest
}

// outOfReach reports whether nobody knows when ino can be had for what the owner does
// in the background: a session that has it is away, or holds on to it.
func (t *leaseTable) outOfReach(ino meta.Ino) bool {
	return t.away(ino, meta.LeaseNone) || t.holdsOn(ino)
}

// extend gives every recall that is out more time.
func (t *leaseTable) extend(by time.Duration) {
	for r := range t.asking {
		r.since = r.since.Add(by)
	}
}

// recalled books a session's answer to a round of recalling: it holds what it has
// still (only if it may, else that is no answer), or has no more than was asked. It
// tells whether the answer counts.
func (t *leaseTable) recalled(s *session, ino meta.Ino, round uint64, held bool) bool {
	l := t.m[ino]
	if l == nil || l.recall == nil || l.recall.round != round || held && l.recall.within == 0 {
		return false
	}
	if _, asked := l.recall.pending[s]; !asked {
		return false
	}
	if h, keep := l.of(s), l.recall.keep; h != nil && !held && h.mode > keep {
		h.gave = h.mode == meta.LeaseExclusive && keep == meta.LeaseShared
		h.mode = keep
	}
	if _, exclusive := t.writable[ino]; held && exclusive {
		t.heldOn[ino] = time.Now()
	}
	t.lowered(ino)
	t.answered(l, s)
	t.tidy(ino, l)
	return true
}

// conflict asks every session but s that has more than keep on ino to give it
// up, and returns what to wait for, nil when nobody has. A session that only
// lingers, and has some, ends then.
func (t *leaseTable) conflict(v meta.VolumeID, s *session, ino meta.Ino, keep meta.LeaseMode) <-chan struct{} {
	ch := t.ask(v, s, ino, keep, 0)
	if ch != nil {
		t.m[ino].recall.wanted = true
	}
	return ch
}

// ask is conflict for what the owner does in the background: no session ends for
// it, so that it must not wait for those that are away. within, unless zero, is for
// how long a session tries: then it may answer that it holds what it has.
func (t *leaseTable) ask(v meta.VolumeID, s *session, ino meta.Ino, keep meta.LeaseMode, within time.Duration) <-chan struct{} {
	l := t.m[ino]
	if l == nil || t.unsafe {
		return nil
	}
	if l.recall != nil {
		// A round is under way. If it is not enough for us, another follows.
		needed := false
		l.each(func(h *holder) { needed = needed || h.s != s && h.mode > keep && !t.apart(s, h.s) })
		if needed {
			return l.recall.done
		}
		return nil
	}
	var r *recall
	l.each(func(h *holder) {
		if h.s == s || h.mode <= keep || t.apart(s, h.s) {
			return
		}
		if r == nil {
			t.rounds++
			r = &recall{ino: ino, round: t.rounds, keep: keep, within: within, since: time.Now(), pending: map[*session]struct{}{}, done: make(chan struct{})}
		}
		r.pending[h.s] = struct{}{}
		h.s.enqueue(r.round, r.message(v))
	})
	if r == nil {
		return nil
	}
	l.recall = r
	t.asking[r] = struct{}{}
	return r.done
}

// putsIn reports whether s is being asked to give ino up, so that it may put in what it
// still has of it: it waits for nobody, or nobody would get anywhere. Whoever else caches
// the inode, as the session for which it is taken back may, is asked in the same round, which
// ends when all have answered.
func (t *leaseTable) putsIn(v meta.VolumeID, s *session, ino meta.Ino) bool {
	l := t.m[ino]
	if l == nil || l.recall == nil || l.recall.keep != meta.LeaseNone || l.recall.within != 0 || t.late {
		return false
	}
	r := l.recall
	if _, asked := r.pending[s]; !asked {
		return false
	}
	l.each(func(h *holder) {
		if _, asked := r.pending[h.s]; asked || h.mode == meta.LeaseNone || t.apart(s, h.s) {
			return
		}
		r.pending[h.s] = struct{}{}
		h.s.enqueue(r.round, r.message(v))
	})
	return true
}

func (r *recall) message(v meta.VolumeID) *wire.Recall {
	return &wire.Recall{Recall: meta.Recall{Volume: v, Ino: r.ino, Keep: r.keep, Within: r.within}}
}

// ticket keeps new leases away from inodes while an operation that recalled
// the old ones waits.
type ticket struct {
	inos []meta.Ino
	// holders are the sessions that stood at the inode which lost its last name.
	holders map[meta.Ino][]meta.SessionID
	room    roomSearch
	// entry is that of the session when the call came; see owner.entered.
	entry uint64
}

func (t *leaseTable) block(k *ticket, ino meta.Ino) {
	for _, i := range k.inos {
		if i == ino {
			return
		}
	}
	l := t.m[ino]
	if l == nil {
		l = &leases{}
		t.m[ino] = l
	}
	l.blocked++
	t.blocked++
	if l.free == nil {
		l.free = make(chan struct{})
	}
	k.inos = append(k.inos, ino)
}

func (t *leaseTable) unblock(k *ticket) {
	for _, ino := range k.inos {
		l := t.m[ino]
		l.blocked--
		t.blocked--
		if l.blocked == 0 {
			close(l.free)
			l.free = nil
			t.tidy(ino, l)
		}
	}
	k.inos = nil
}

// free returns what to wait for before ino may be leased again, nil when it may.
func (t *leaseTable) free(k *ticket, ino meta.Ino) <-chan struct{} {
	l := t.m[ino]
	if l == nil || l.blocked == 0 {
		return nil
	}
	for _, i := range k.inos {
		if i == ino {
			return nil // we are the one who waits
		}
	}
	return l.free
}
