// Package lock is the state machine of one volume's advisory locks: fcntl(2) byte ranges and
// flock(2), across all sessions, with the waiting requests. The machine is pure, in the owner's
// memory. Locks are not journaled: after a change of owner every session claims all of its
// locks again, before any other operation runs.
//
// The rules are Linux's. The two kinds of locks don't see each other. Waiting requests don't
// delay others: a lock that fits is granted, even while others wait. Converting a flock from
// one type to the other releases the old lock first, so a refused conversion loses the old lock
// (flock(2) says so). Deadlocks are detected among the fcntl locks of the whole volume; flocks
// can deadlock, as on Linux.
package lock

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"penstock.io/penstock/meta"
)

// MaxPerFile bounds the locks and the waiting requests of an inode.
const MaxPerFile = 1 << 16

// maxOffset is the last byte of the longest possible lock.
const maxOffset = 1<<63 - 1

// Ticket identifies a waiting request; the caller chooses the ticket. Zero: the caller does not
// wait.
type Ticket uint64

// Answer is the result of a request, including the effects on other requests.
type Answer struct {
	Granted  bool
	Conflict meta.Lock // if not granted: a conflicting lock
	Woken    []Ticket  // waiting requests granted now, in the order of granting
}

// Table holds the locks of one volume. A Table is not safe for concurrent use.
type Table struct {
	files map[meta.Ino]*file
	// waiting finds a request's inode.
	waiting map[Ticket]meta.Ino
	// sessions counts the locks and requests of each session, by inode. INVARIANT: no count is
	// zero.
	sessions map[meta.SessionID]map[meta.Ino]int
}

// owner is a lock owner: two locks of the same owner never conflict.
type owner struct {
	session meta.SessionID
	id      uint64
}

func ownerOf(l *meta.Lock) owner { return owner{l.Session, l.Owner} }

type request struct {
	meta.Lock
	ticket Ticket
}

type file struct {
	// INVARIANT: sorted by Start; two ranges of an owner don't overlap, and two of the same
	// type don't touch.
	ranges []meta.Lock
	// INVARIANT: an owner has at most one entry; all entries are LockRead, or a single
	// LockWrite is the only entry.
	flocks []meta.Lock
	queue  []request // oldest first; each in conflict with a held lock
}

// New makes an empty table.
func New() *Table {
	return &Table{files: map[meta.Ino]*file{}, waiting: map[Ticket]meta.Ino{}, sessions: map[meta.SessionID]map[meta.Ino]int{}}
}

// Set takes, changes or gives up a lock. With a ticket, a request in conflict
// waits: the answer is neither granted nor an error, and some later Answer
// wakes the ticket. Errors: WouldBlock (no ticket; Answer.Conflict says why),
// Deadlock, Invalid, ResourceExceeded.
func (t *Table) Set(l meta.Lock, wait Ticket) (Answer, error) {
	if l.Flock {
		l.Start, l.End = 0, maxOffset
	}
	if l.Type > meta.LockWrite || l.Start > l.End || l.End > maxOffset {
		return Answer{}, meta.E("lock", meta.Invalid, fmt.Sprintf("type %d, bytes %d to %d", l.Type, l.Start, l.End), nil)
	}
	if _, used := t.waiting[wait]; wait != 0 && used {
		return Answer{}, meta.E("lock", meta.Invalid, fmt.Sprintf("ticket %d waits already", wait), nil)
	}
	f := t.files[l.Ino]
	if f == nil {
		if l.Type == meta.LockUnlock {
			return Answer{Granted: true}, nil
		}
		f = &file{}
		t.files[l.Ino] = f
	}
	if l.Type != meta.LockUnlock && len(f.ranges)+len(f.flocks)+len(f.queue) >= MaxPerFile {
		return Answer{}, meta.E("lock", meta.ResourceExceeded, fmt.Sprintf("%d locks on inode %d", MaxPerFile, l.Ino), nil)
	}
	var a Answer
	var err error
	gaveUp := false
	if l.Flock {
		if i := f.flockOf(&l); i >= 0 {
			if f.flocks[i].Type == l.Type {
				return Answer{Granted: true}, nil
			}
			f.flocks = slices.Delete(f.flocks, i, i+1)
			t.count(l.Session, l.Ino, -1)
			gaveUp = true
		}
	}
	switch c := f.conflict(&l); {
	case c == nil:
		before := f.strength(&l)
		t.put(f, l)
		a.Granted = true
		gaveUp = gaveUp || before
	case wait == 0:
		a.Conflict = *c
		err = meta.E("lock", meta.WouldBlock, fmt.Sprintf("inode %d", l.Ino), nil)
	case !l.Flock && t.deadlock(&l):
		a.Conflict = *c
		err = meta.E("lock", meta.Deadlock, fmt.Sprintf("inode %d", l.Ino), nil)
	default:
		a.Conflict = *c
		f.queue = append(f.queue, request{l, wait})
		t.waiting[wait] = l.Ino
		t.count(l.Session, l.Ino, 1)
	}
	if gaveUp {
		a.Woken = t.wake(f)
	}
	t.tidy(l.Ino, f)
	return a, err
}

// Get reports whether a lock could be taken and, if not, returns the first conflicting lock,
// as F_GETLK does.
func (t *Table) Get(l meta.Lock) (meta.Lock, bool) {
	if f := t.files[l.Ino]; f != nil {
		if c := f.conflict(&l); c != nil {
			return *c, true
		}
	}
	return meta.Lock{}, false
}

// Cancel removes a waiting request. False: no such request waits; the request was granted, or
// never waited.
func (t *Table) Cancel(w Ticket) bool {
	ino, ok := t.waiting[w]
	if !ok {
		return false
	}
	f := t.files[ino]
	i := slices.IndexFunc(f.queue, func(r request) bool { return r.ticket == w })
	t.count(f.queue[i].Session, ino, -1)
	f.queue = slices.Delete(f.queue, i, i+1)
	delete(t.waiting, w)
	t.tidy(ino, f)
	return true
}

// DropOwner releases all locks of an owner on an inode, of the kind flock says, as close(2)
// does.
func (t *Table) DropOwner(ino meta.Ino, s meta.SessionID, id uint64, flock bool) (woken []Ticket) {
	// Unlocking is never in conflict and needs no room: no error is possible.
	a, err := t.Set(meta.Lock{Ino: ino, Session: s, Owner: id, Type: meta.LockUnlock, End: maxOffset, Flock: flock}, 0)
	if err != nil {
		panic(fmt.Sprintf("lock: unlocking inode %d for session %x owner %x failed: %v", ino, uint64(s), id, err))
	}
	return a.Woken
}

// DropSession releases all locks of a session. canceled are the session's own waiting
// requests.
func (t *Table) DropSession(s meta.SessionID) (woken, canceled []Ticket) {
	inos := make([]meta.Ino, 0, len(t.sessions[s]))
	for ino := range t.sessions[s] {
		inos = append(inos, ino)
	}
	slices.Sort(inos) // the map's order must not show
	delete(t.sessions, s)
	mine := func(l meta.Lock) bool { return l.Session == s }
	for _, ino := range inos {
		f := t.files[ino]
		f.ranges = slices.DeleteFunc(f.ranges, mine)
		f.flocks = slices.DeleteFunc(f.flocks, mine)
		f.queue = slices.DeleteFunc(f.queue, func(r request) bool {
			if r.Session != s {
				return false
			}
			canceled = append(canceled, r.ticket)
			delete(t.waiting, r.ticket)
			return true
		})
		woken = append(woken, t.wake(f)...)
		t.tidy(ino, f)
	}
	return woken, canceled
}

// All returns every lock, sorted by inode, kind and start.
func (t *Table) All() []meta.Lock {
	inos := make([]meta.Ino, 0, len(t.files))
	for ino := range t.files {
		inos = append(inos, ino)
	}
	slices.Sort(inos)
	var l []meta.Lock
	for _, ino := range inos {
		l = append(append(l, t.files[ino].ranges...), t.files[ino].flocks...)
	}
	return l
}

// Holdups returns the sessions with locks that conflict with waiting requests: for each request
// the session of the first such lock. When the session is gone, other sessions may be in the
// way.
func (t *Table) Holdups() []meta.SessionID {
	found := map[meta.SessionID]struct{}{}
	for ticket, ino := range t.waiting {
		f := t.files[ino]
		for i := range f.queue {
			if r := &f.queue[i]; r.ticket == ticket {
				found[f.conflict(&r.Lock).Session] = struct{}{}
			}
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// ---- one file

// conflict returns the first lock in conflict with a request.
func (f *file) conflict(l *meta.Lock) *meta.Lock {
	if l.Type == meta.LockUnlock {
		return nil
	}
	held := f.ranges
	if l.Flock {
		held = f.flocks
	}
	for i := range held {
		h := &held[i]
		if !l.Flock && h.Start > l.End {
			break
		}
		if (h.Type == meta.LockWrite || l.Type == meta.LockWrite) && ownerOf(h) != ownerOf(l) && (l.Flock || h.End >= l.Start) {
			return h
		}
	}
	return nil
}

func (f *file) flockOf(l *meta.Lock) int {
	return slices.IndexFunc(f.flocks, func(h meta.Lock) bool { return ownerOf(&h) == ownerOf(l) })
}

// strength reports whether setting l weakens a lock of the owner of l, so other requests may
// fit now.
func (f *file) strength(l *meta.Lock) bool {
	for i := range f.ranges {
		h := &f.ranges[i]
		if !l.Flock && ownerOf(h) == ownerOf(l) && h.Type > l.Type && h.Start <= l.End && h.End >= l.Start {
			return true
		}
	}
	return false
}

// put records a lock without conflicts, or an unlock.
func (t *Table) put(f *file, l meta.Lock) {
	if l.Flock {
		if l.Type != meta.LockUnlock {
			f.flocks = append(f.flocks, l)
			t.count(l.Session, l.Ino, 1)
		}
		return
	}
	was := len(f.ranges)
	out := make([]meta.Lock, 0, was+2)
	var right []meta.Lock // the remainder behind l, which may begin before other ranges
	for _, h := range f.ranges {
		if ownerOf(&h) != ownerOf(&l) {
			out = append(out, h)
			continue
		}
		touches := h.Start <= l.End+1 && l.Start <= h.End+1 // no overflow: at most 1<<63
		if touches && h.Type == l.Type {
			l.Start, l.End = min(l.Start, h.Start), max(l.End, h.End)
			continue
		}
		if h.End < l.Start || h.Start > l.End {
			out = append(out, h)
			continue
		}
		if h.Start < l.Start {
			left := h
			left.End = l.Start - 1
			out = append(out, left)
		}
		if h.End > l.End {
			h.Start = l.End + 1
			right = append(right, h)
		}
	}
	out = append(out, right...)
	if l.Type != meta.LockUnlock {
		out = append(out, l)
	}
	slices.SortStableFunc(out, func(a, b meta.Lock) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Session, b.Session), cmp.Compare(a.Owner, b.Owner))
	})
	f.ranges = out
	t.count(l.Session, l.Ino, len(out)-was)
}

// wake grants the waiting requests without a conflict, oldest first.
func (t *Table) wake(f *file) (woken []Ticket) {
	for again := true; again; {
		again = false
		for i := range f.queue {
			r := f.queue[i]
			if f.conflict(&r.Lock) != nil {
				continue
			}
			f.queue = slices.Delete(f.queue, i, i+1)
			delete(t.waiting, r.ticket)
			t.count(r.Session, r.Ino, -1)
			if r.Flock {
				// The owner may have got a flock by another request meanwhile.
				if j := f.flockOf(&r.Lock); j >= 0 {
					f.flocks = slices.Delete(f.flocks, j, j+1)
					t.count(r.Session, r.Ino, -1)
				}
			}
			t.put(f, r.Lock)
			woken = append(woken, r.ticket)
			again = true // the grant may weaken a lock of the owner
			break
		}
	}
	return woken
}

// deadlock reports whether a wait for l would close a circle of waiting owners.
func (t *Table) deadlock(l *meta.Lock) bool {
	start := ownerOf(l)
	seen := map[owner]bool{}
	var reaches func(l *meta.Lock) bool
	reaches = func(l *meta.Lock) bool {
		f := t.files[l.Ino]
		for i := range f.ranges {
			h := &f.ranges[i]
			o := ownerOf(h)
			if o == ownerOf(l) || h.Start > l.End || h.End < l.Start || h.Type != meta.LockWrite && l.Type != meta.LockWrite {
				continue
			}
			if o == start {
				return true
			}
			if seen[o] {
				continue
			}
			seen[o] = true
			for _, w := range t.waitsOf(o) {
				if reaches(&w) {
					return true
				}
			}
		}
		return false
	}
	return reaches(l)
}

// waitsOf returns the range requests for which an owner waits. Several can wait at once: the
// threads of a process share an owner.
func (t *Table) waitsOf(o owner) (l []meta.Lock) {
	inos := make([]meta.Ino, 0, len(t.sessions[o.session]))
	for ino := range t.sessions[o.session] {
		inos = append(inos, ino)
	}
	slices.Sort(inos)
	for _, ino := range inos {
		for _, r := range t.files[ino].queue {
			if !r.Flock && ownerOf(&r.Lock) == o {
				l = append(l, r.Lock)
			}
		}
	}
	return l
}

// ---- bookkeeping

func (t *Table) count(s meta.SessionID, ino meta.Ino, n int) {
	m := t.sessions[s]
	if m == nil {
		m = map[meta.Ino]int{}
		t.sessions[s] = m
	}
	m[ino] += n
	if m[ino] == 0 {
		delete(m, ino)
	}
	if len(m) == 0 {
		delete(t.sessions, s)
	}
}

func (t *Table) tidy(ino meta.Ino, f *file) {
	if len(f.ranges)+len(f.flocks)+len(f.queue) == 0 {
		delete(t.files, ino)
	}
}

// Check verifies the invariants.
func (t *Table) Check() error {
	counts := map[meta.SessionID]map[meta.Ino]int{}
	add := func(l *meta.Lock) {
		if counts[l.Session] == nil {
			counts[l.Session] = map[meta.Ino]int{}
		}
		counts[l.Session][l.Ino]++
	}
	waiting := 0
	for ino, f := range t.files {
		for i := range f.ranges {
			a := &f.ranges[i]
			add(a)
			if i > 0 && f.ranges[i-1].Start > a.Start {
				return fmt.Errorf("inode %d: ranges out of order: %+v", ino, f.ranges)
			}
			for j := range i {
				b := &f.ranges[j]
				over := a.Start <= b.End && b.Start <= a.End
				same := ownerOf(a) == ownerOf(b)
				if over && (same || a.Type == meta.LockWrite || b.Type == meta.LockWrite) || same && a.Type == b.Type && b.End+1 == a.Start {
					return fmt.Errorf("inode %d: %+v beside %+v", ino, *b, *a)
				}
			}
		}
		for i := range f.flocks {
			a := &f.flocks[i]
			add(a)
			for j := range i {
				if b := &f.flocks[j]; ownerOf(a) == ownerOf(b) || a.Type == meta.LockWrite || b.Type == meta.LockWrite {
					return fmt.Errorf("inode %d: flock %+v beside %+v", ino, *b, *a)
				}
			}
		}
		for i := range f.queue {
			r := &f.queue[i]
			add(&r.Lock)
			waiting++
			if t.waiting[r.ticket] != ino {
				return fmt.Errorf("inode %d: ticket %d is filed under %d", ino, r.ticket, t.waiting[r.ticket])
			}
			if f.conflict(&r.Lock) == nil {
				return fmt.Errorf("inode %d: %+v waits for nothing", ino, *r)
			}
		}
	}
	if waiting != len(t.waiting) {
		return fmt.Errorf("%d requests wait, %d are filed", waiting, len(t.waiting))
	}
	if len(counts) != len(t.sessions) {
		return fmt.Errorf("%d sessions hold something, %d are counted", len(counts), len(t.sessions))
	}
	for s, m := range counts {
		for ino, n := range m {
			if t.sessions[s][ino] != n || len(t.sessions[s]) != len(m) {
				return fmt.Errorf("session %x has %d on inode %d, counted %d", uint64(s), n, ino, t.sessions[s][ino])
			}
		}
	}
	return nil
}
