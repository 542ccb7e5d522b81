// Package quota owns the account of one volume's quota of bytes: the bytes used, and the bytes
// promised to sessions. It is a pure machine in the owner's memory.
//
// Bytes accepted by write(2) must fit when they are committed, perhaps after close. So a
// session reserves bytes before it buffers them, and bytes promised to one session are
// unavailable to all other sessions:
//
//	used + promised <= limit
//
// The part of a promise that the session does not need lies idle. The account bounds the idle
// bytes; before a session is refused, a round asks all sessions for their idle bytes.
//
// The account reads no clock and sends nothing. The end of a round is a channel, which the
// account closes.
package quota

import (
	"errors"
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

// idleMost and idlePart bound the idle bytes of all sessions together: idleMost bytes, and a
// hundredth (1/idlePart) of the quota.
const (
	idleMost = 64 << 20
	idlePart = 100
)

// Account is the account of one volume. An Account is not safe for concurrent use.
type Account struct {
	// NoPromise is a control of tests: granted bytes are not added to a promise.
	NoPromise bool

	limit uint64 // bytes; zero: no quota, and the other fields are unused
	used  uint64 // bytes used, including operations with an early reply

	promises map[meta.SessionID]*promise
	// promised is the total of all promises.
	// INVARIANT: the sum of promise.bytes, and left.
	promised uint64
	// left is the total of the promises of ended sessions: the bytes stay promised until the
	// sessions' files are sealed.
	left uint64
	// idle is the total that may lie idle.
	// INVARIANT: the sum of promise.idle.
	idle uint64

	round     *Round // in progress; nil: none
	lastRound uint64
}

// promise is the promise to a session.
type promise struct {
	bytes uint64
	idle  uint64 // bytes which the session may leave unused
	// drawn is the bytes taken from the promise so far by unfinished commits of several
	// operations, by file.
	drawn map[meta.Ino]uint64
	// serial and granted belong to the last decided request; given is the serial of the last
	// request that gave bytes back.
	serial, granted, given uint64
	// waiting: the session waits for more bytes.
	// INVARIANT: nothing lies idle.
	waiting bool
}

// Round is one round of asking sessions for their idle bytes.
type Round struct {
	Number uint64
	// pending are the sessions that have not answered.
	// INVARIANT: not empty while the round is in progress.
	pending []meta.SessionID
	over    chan struct{}
}

// Over is closed when every session has answered, or the round was ended.
func (r *Round) Over() <-chan struct{} { return r.over }

// Pending is the number of sessions that have not answered.
func (r *Round) Pending() int { return len(r.pending) }

// Limit is the quota in bytes; 0: no quota.
func (a *Account) Limit() uint64 { return a.limit }

// Used is the number of bytes used.
func (a *Account) Used() uint64 { return a.used }

// Promised is the total of all promises in bytes, including ended sessions.
func (a *Account) Promised() uint64 { return a.promised }

// Idle is the total number of possibly idle bytes.
func (a *Account) Idle() uint64 { return a.idle }

// Left is the total of the promises of ended sessions in bytes.
func (a *Account) Left() uint64 { return a.left }

// SetUsed sets the number of bytes used.
func (a *Account) SetUsed(bytes uint64) { a.used = bytes }

// SetLimit sets the quota. A limit of 0 removes the quota, drops all promises and ends the
// round.
func (a *Account) SetLimit(limit uint64) {
	if a.limit > 0 && limit == 0 {
		a.promises, a.promised, a.left, a.idle = nil, 0, 0, 0
		a.EndRound(a.round)
	}
	a.limit = limit
}

// Free is the number of bytes neither used nor promised.
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

// setIdle sets the part of a promise that may lie idle.
func (a *Account) setIdle(p *promise, n uint64) { a.idle += n - p.idle; p.idle = n }

// Promise returns the unused bytes of a session's promise, and how many bytes may lie idle.
func (a *Account) Promise(id meta.SessionID) (bytes, idle uint64) {
	if p := a.promises[id]; p != nil {
		return p.bytes, p.idle
	}
	return 0, 0
}

// Askable reports whether a session may have idle bytes: the session has a promise and does
// not wait for more.
func (a *Account) Askable(id meta.SessionID) bool {
	p := a.promises[id]
	return p != nil && p.bytes > 0 && !p.waiting
}

// PromisedBeyond reports whether a session outside the set has a promise, or ended sessions
// left promises.
func (a *Account) PromisedBeyond(inside map[meta.SessionID]bool) bool {
	for id, p := range a.promises { // in any order: a question
		if p.bytes > 0 && !inside[id] {
			return true
		}
	}
	return a.left > 0
}

// Claim sets a session's promise to the bytes promised by the previous owner.
func (a *Account) Claim(id meta.SessionID, bytes uint64) {
	if a.limit == 0 {
		return
	}
	p := a.of(id)
	a.take(p, p.bytes)
	a.add(p, bytes)
}

// GiveBack books the bytes that a session gives back with a request, once per serial number.
func (a *Account) GiveBack(id meta.SessionID, serial, bytes uint64) {
	if p := a.of(id); serial > p.given {
		p.given = serial
		a.take(p, bytes)
	}
}

// Answer books that a session has no idle bytes as of a round.
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

// Round is the round in progress, or nil.
func (a *Account) Round() *Round { return a.round }

// NextRound is the number of the next round.
func (a *Account) NextRound() uint64 { return a.lastRound + 1 }

// BeginRound begins a round that waits for the asked sessions, and ends the round in progress:
// callers waiting for the old round check again. nil: asked is empty; the number is used up,
// and a round in progress continues.
func (a *Account) BeginRound(asked []meta.SessionID) *Round {
	a.lastRound++
	if len(asked) == 0 {
		return nil
	}
	a.EndRound(a.round)
	a.round = &Round{Number: a.lastRound, pending: slices.Clone(asked), over: make(chan struct{})}
	return a.round
}

// EndRound ends a round even if sessions have not answered; false: the round is not in
// progress.
func (a *Account) EndRound(r *Round) bool {
	if r == nil || a.round != r {
		return false
	}
	a.round = nil
	close(r.over)
	return true
}

// Decided reports whether a session's request with a serial number was decided before, and the
// bytes granted by the last decided request.
func (a *Account) Decided(id meta.SessionID, serial uint64) (granted uint64, yes bool) {
	p := a.of(id)
	return p.granted, serial <= p.serial
}

// Share sets how many bytes of a session's promise may lie idle. crowded: other sessions have
// more than their equal part, so the session gets less than its part.
func (a *Account) Share(id meta.SessionID) (crowded bool) {
	p := a.of(id)
	most := a.MostIdle()
	fair := most / uint64(max(1, len(a.promises)))
	a.setIdle(p, 0)
	a.setIdle(p, min(fair, most-min(most, a.idle)))
	return p.idle < fair
}

// MostIdle bounds the total number of idle bytes.
func (a *Account) MostIdle() uint64 { return min(idleMost, a.limit/idlePart) }

// Grant promises a session want bytes, which must be free, and some bytes ahead: near the
// limit only few, as another session would ask for the bytes at once.
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

// Wait books that a session waits for more than is free: no byte of its promise lies idle.
func (a *Account) Wait(id meta.SessionID) {
	if p := a.of(id); !p.waiting {
		p.waiting = true
		a.Answer(id, a.lastRound)
	}
}

// WaitNoMore books that a session stopped waiting.
func (a *Account) WaitNoMore(id meta.SessionID) {
	if p := a.promises[id]; p != nil {
		p.waiting = false
	}
}

// Inherit returns the unused part of the promises to the earlier processes of a session.
func (a *Account) Inherit(id meta.SessionID, serial uint64) (granted uint64) {
	p := a.of(id)
	if serial > p.serial {
		p.serial, p.granted = serial, p.bytes
		p.drawn = nil // the new process repeats half-done commits from the start
	}
	return p.granted
}

// Spend subtracts bytes from a session's promise: the operation of these bytes was executed.
func (a *Account) Spend(id meta.SessionID, bytes uint64) {
	if p := a.promises[id]; p != nil {
		a.take(p, bytes)
	}
}

// Cover returns how much of its growth an operation need not request. reserved is the
// session's reservation for the operation; draw: the session's whole promise is available to
// the operation.
func (a *Account) Cover(id meta.SessionID, reserved uint64, draw bool) uint64 {
	bytes, _ := a.Promise(id)
	if draw {
		return bytes
	}
	return min(reserved, bytes)
}

// Draw books an operation on a file that is not the last operation of the file's commit;
// before is the number of bytes used before the operation.
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

// ChargeWrite books the last operation of a file's commit: the earlier operations have taken
// the drawn bytes from the promise already.
func (a *Account) ChargeWrite(id meta.SessionID, ino meta.Ino, reserved uint64) {
	if p := a.promises[id]; p != nil {
		a.take(p, reserved-min(reserved, p.drawn[ino]))
		delete(p.drawn, ino)
	}
}

// Leave books the end of a session. The session's promise stays until FreeLeft.
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

// FreeLeft frees the promises of ended sessions. The caller has checked that no file of an
// ended session is open-ended.
func (a *Account) FreeLeft() {
	a.promised -= a.left
	a.left = 0
}

// Check reports every violated invariant.
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
