// Package quota owns the account of one volume's quota of bytes: what is used, and what
// was promised to sessions. It is a pure machine in the owner's memory.
//
// What write(2) took must fit when it is committed, perhaps after close. So a session
// reserves bytes before it buffers them, and what was promised to one session is out of
// reach for all others:
//
//	used + promised <= limit
//
// A promise that a session has and does not need lies idle. How much may lie idle is
// bounded, and before any session is refused a round asks all sessions for what does.
//
// The account reads no clock and sends nothing. The end of a round is a channel, which
// the account closes.
package quota

import (
	"errors"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

// idleMost and idlePart bound what all sessions together may leave idle: so many bytes,
// and that part of the quota.
const (
	idleMost = 64 << 20
	idlePart = 100
)

// Account is the account of one volume. It is not safe for use by several goroutines at
// once.
type Account struct {
	// NoPromise is a control of tests: what is granted is promised to nobody.
	NoPromise bool

	limit uint64 // bytes; zero: there is no quota, and the rest is unused
	used  uint64 // bytes that count, early replies included

	promises map[meta.SessionID]*promise
	// promised is what all promises have.
	// INVARIANT: the sum of promise.bytes, and left.
	promised uint64
	// left is what sessions had that ended: it is promised until their files are sealed.
	left uint64
	// idle is what may lie idle in all.
	// INVARIANT: the sum of promise.idle.
	idle uint64

	round     *Round // under way; nil: none
	lastRound uint64
}

// promise is what a session was promised.
type promise struct {
	bytes uint64
	idle  uint64 // the session may leave so much of it unused
	// drawn is what commits of several operations have taken of the promise so far, by file.
	drawn map[meta.Ino]uint64
	// serial and granted are of the last request that was decided; given is the serial of
	// the last request that gave something back.
	serial, granted, given uint64
	// waiting: the session asks for more.
	// INVARIANT: nothing lies idle.
	waiting bool
}

// Round is one round of asking sessions for what lies idle.
type Round struct {
	Number uint64
	// pending are the sessions that have not answered.
	// INVARIANT: while the round is under way, there are some.
	pending []meta.SessionID
	over    chan struct{}
}

// Over is closed when every session has answered, or the round was ended.
func (r *Round) Over() <-chan struct{} { return r.over }

// Pending is how many sessions have not answered.
func (r *Round) Pending() int { return len(r.pending) }

// Limit is the quota; 0: there is none.
func (a *Account) Limit() uint64 { return a.limit }

// Used is what counts.
func (a *Account) Used() uint64 { return a.used }

// Promised is what all sessions were promised, ended sessions included.
func (a *Account) Promised() uint64 { return a.promised }

// Idle is what may lie idle in all.
func (a *Account) Idle() uint64 { return a.idle }

// Left is what ended sessions left behind.
func (a *Account) Left() uint64 { return a.left }

// SetUsed says what counts now.
func (a *Account) SetUsed(bytes uint64) { a.used = bytes }

// SetLimit sets the quota. Promises are forgotten when it goes.
func (a *Account) SetLimit(limit uint64) {
	if a.limit > 0 && limit == 0 {
		a.promises, a.promised, a.left, a.idle = nil, 0, 0, 0
		a.EndRound(a.round)
	}
	a.limit = limit
}

// Free is what can be promised still.
func (a *Account) Free() uint64 {
	free := a.limit - min(a.limit, a.used)
	return free - min(free, a.promised)
}

func (a *Account) of(id meta.SessionID) *promise {
	p := a.promises[id]
	if p == nil {
		if a.promises == nil {
			a.promises = map[meta.SessionID]*promise{}
		}
		p = &promise{}
		a.promises[id] = p
	}
	return p
}

func (a *Account) add(p *promise, n uint64)  { p.bytes += n; a.promised += n }
func (a *Account) take(p *promise, n uint64) { n = min(n, p.bytes); p.bytes -= n; a.promised -= n }

// setIdle sets what of a promise may lie idle.
func (a *Account) setIdle(p *promise, n uint64) { a.idle += n - p.idle; p.idle = n }

// Promise is what a session was promised and has not used, and what of it may lie idle.
func (a *Account) Promise(id meta.SessionID) (bytes, idle uint64) {
	if p := a.promises[id]; p != nil {
		return p.bytes, p.idle
	}
	return 0, 0
}

// Askable reports whether a session may have something idle: it was promised some, and
// does not wait for more.
func (a *Account) Askable(id meta.SessionID) bool {
	p := a.promises[id]
	return p != nil && p.bytes > 0 && !p.waiting
}

// PromisedBeyond reports whether sessions other than those in the volume have a promise,
// or left one behind.
func (a *Account) PromisedBeyond(inside map[meta.SessionID]bool) bool {
	for id, p := range a.promises { // in any order: a question
		if p.bytes > 0 && !inside[id] {
			return true
		}
	}
	return a.left > 0
}

// Claim gives a session what the owner before had promised it.
func (a *Account) Claim(id meta.SessionID, bytes uint64) {
	if a.limit == 0 {
		return
	}
	p := a.of(id)
	a.take(p, p.bytes)
	a.add(p, bytes)
}

// GiveBack books what a session gives back with a request, once for a serial number.
func (a *Account) GiveBack(id meta.SessionID, serial, bytes uint64) {
	if p := a.of(id); serial > p.given {
		p.given = serial
		a.take(p, bytes)
	}
}

// Answer books that a session has nothing idle as of a round.
func (a *Account) Answer(id meta.SessionID, round uint64) {
	a.setIdle(a.of(id), 0)
	a.answered(id, round)
}

func (a *Account) answered(id meta.SessionID, round uint64) {
	r := a.round
	if r == nil || r.Number > round {
		return
	}
	if i := slices.Index(r.pending, id); i >= 0 {
		r.pending = slices.Delete(r.pending, i, i+1)
	}
	if len(r.pending) == 0 {
		a.EndRound(r)
	}
}

// Round is the round that is under way; nil: none is.
func (a *Account) Round() *Round { return a.round }

// NextRound is the number that the next round has.
func (a *Account) NextRound() uint64 { return a.lastRound + 1 }

// BeginRound begins a round that waits for some sessions, and ends the one that is under
// way: whoever waits for that looks again. nil: there are no sessions to wait for, and the
// number is used up.
func (a *Account) BeginRound(asked []meta.SessionID) *Round {
	a.lastRound++
	if len(asked) == 0 {
		return nil
	}
	a.EndRound(a.round)
	a.round = &Round{Number: a.lastRound, pending: slices.Clone(asked), over: make(chan struct{})}
	return a.round
}

// EndRound ends a round, though some have not answered; false: it is not under way.
func (a *Account) EndRound(r *Round) bool {
	if r == nil || a.round != r {
		return false
	}
	a.round = nil
	close(r.over)
	return true
}

// Decided is what a session was granted by the request with a serial number, if that was
// decided before.
func (a *Account) Decided(id meta.SessionID, serial uint64) (granted uint64, yes bool) {
	p := a.of(id)
	return p.granted, serial <= p.serial
}

// Share sets how much of a session's promise may lie idle, and tells whether other
// sessions have more than their part.
func (a *Account) Share(id meta.SessionID) (crowded bool) {
	p := a.of(id)
	most := a.MostIdle()
	fair := most / uint64(max(1, len(a.promises)))
	a.setIdle(p, 0)
	a.setIdle(p, min(fair, most-min(most, a.idle)))
	return p.idle < fair
}

// MostIdle bounds what may lie idle in all.
func (a *Account) MostIdle() uint64 { return min(idleMost, a.limit/idlePart) }

// Grant promises a session what it wants, which must be free, and something ahead: near
// the limit not much, as another session would ask for it at once.
func (a *Account) Grant(id meta.SessionID, serial, want uint64) (granted uint64) {
	return a.GrantExactly(id, serial, want+min(a.of(id).idle, (a.Free()-want)/8))
}

// GrantExactly promises a session some bytes, which must be free.
func (a *Account) GrantExactly(id meta.SessionID, serial, bytes uint64) (granted uint64) {
	p := a.of(id)
	p.waiting = false
	p.serial, p.granted = serial, bytes
	if !a.NoPromise {
		a.add(p, bytes)
	}
	return bytes
}

// Wait books that a session waits for more than is free: nothing that it has lies idle.
func (a *Account) Wait(id meta.SessionID) {
	if p := a.of(id); !p.waiting {
		p.waiting = true
		a.Answer(id, a.lastRound)
	}
}

// WaitNoMore books that a session does not wait any more.
func (a *Account) WaitNoMore(id meta.SessionID) {
	if p := a.promises[id]; p != nil {
		p.waiting = false
	}
}

// Inherit is what the processes of a session before this one were promised and have not
// used.
func (a *Account) Inherit(id meta.SessionID, serial uint64) (granted uint64) {
	p := a.of(id)
	if serial > p.serial {
		p.serial, p.granted = serial, p.bytes
		p.drawn = nil // what was half committed is committed anew
	}
	return p.granted
}

// Spend ends some bytes of a session's promise: the operation that they were for was
// executed.
func (a *Account) Spend(id meta.SessionID, bytes uint64) {
	if p := a.promises[id]; p != nil {
		a.take(p, bytes)
	}
}

// Cover is how much of its growth an operation need not ask for. reserved is what the
// session says of it; draw: all that the session was promised is for it.
func (a *Account) Cover(id meta.SessionID, reserved uint64, draw bool) uint64 {
	bytes, _ := a.Promise(id)
	if draw {
		return bytes
	}
	return min(reserved, bytes)
}

// Draw books an operation on a file that is not the last of its commit; before is what
// was used before it.
func (a *Account) Draw(id meta.SessionID, ino meta.Ino, before uint64) {
	p := a.promises[id]
	if p == nil || a.used <= before {
		return
	}
	if p.drawn == nil {
		p.drawn = map[meta.Ino]uint64{}
	}
	n := min(a.used-before, p.bytes)
	p.drawn[ino] += n
	a.take(p, n)
}

// ChargeWrite books the last operation of a commit of a file: what the operations before
// it have drawn is over already.
func (a *Account) ChargeWrite(id meta.SessionID, ino meta.Ino, reserved uint64) {
	if p := a.promises[id]; p != nil {
		a.take(p, reserved-min(reserved, p.drawn[ino]))
		delete(p.drawn, ino)
	}
}

// Leave books that a session ended: what it was promised stays until FreeLeft.
func (a *Account) Leave(id meta.SessionID) {
	p := a.promises[id]
	if p == nil {
		return
	}
	delete(a.promises, id)
	a.idle -= p.idle
	a.left += p.bytes
	a.answered(id, ^uint64(0))
}

// FreeLeft frees what ended sessions left: no file of theirs is open-ended.
func (a *Account) FreeLeft() {
	a.promised -= a.left
	a.left = 0
}

// Check reports every invariant that does not hold.
func (a *Account) Check() error {
	var found []error
	bad := func(format string, v ...any) { found = append(found, fmt.Errorf(format, v...)) }
	promised, idle := a.left, uint64(0)
	for id, p := range a.promises {
		promised += p.bytes
		idle += p.idle
		if p.waiting && p.idle > 0 {
			bad("session %d waits for more, and %d bytes may lie idle", id, p.idle)
		}
	}
	if promised != a.promised {
		bad("%d bytes are promised, and counted as %d", promised, a.promised)
	}
	if idle != a.idle {
		bad("%d bytes may lie idle, and are counted as %d", idle, a.idle)
	}
	if r := a.round; r != nil && (len(r.pending) == 0 || r.Number > a.lastRound) {
		bad("round %d of %d waits for %d sessions", r.Number, a.lastRound, len(r.pending))
	}
	return errors.Join(found...)
}
