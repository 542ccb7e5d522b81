package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// clients are the sessions of this server's clients.
type clients struct {
	*process
	srv       *Server // of the sessions
	hosted    *hosted
	paces     paces
	cutOff    cutOff
	abandoned abandonedBytes

	mu       sync.Mutex
	sessions map[meta.SessionID]*session
	latest   map[string]*session // by place: the session begun last
}

// all lists the sessions.
func (cl *clients) all() []*session {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	return slices.Collect(maps.Values(cl.sessions))
}

func (cl *clients) session(id meta.SessionID) *session {
	cl.mu.Lock()
	defer cl.mu.Unlock()
	return cl.sessions[id]
}

// maxLinger bounds how long a silent client may ask the server to keep its session: meanwhile
// the session's locks and open files, and the space of files referenced by the session alone,
// stay bound.
const maxLinger = 15 * time.Minute

// admit finds the session that a client resumes, or makes a session under the client's number.
// Each volume decides, when the client enters, whether the session is still valid there.
// Errors: AccessDenied for a session of another identity, Unavailable.
func (cl *clients) admit(h *wire.Hello, who peering.Identity) (*session, error) {
	wait := time.NewTimer(4 * time.Second)
	defer wait.Stop()
	for {
		cl.mu.Lock()
		if cl.stops() {
			cl.mu.Unlock()
			return nil, meta.E("hello", meta.Unavailable, cl.cfg.Name, errStopping)
		}
		old := cl.sessions[h.Session]
		if old == nil {
			id := h.Session
			for id == 0 {
				var b [8]byte
				rand.Read(b[:])
				id = meta.SessionID(binary.LittleEndian.Uint64(b[:]))
			}
			sess := &session{pace: cl.paces.of(who),
				srv: cl.srv, id: id, who: who, role: h.Role, name: h.Name, host: h.Host, pid: h.PID, start: h.Start, streams: h.Streams,
				cancels: map[uint64]context.CancelCauseFunc{}, ordered: queues{}, late: queues{}, gone: make(chan struct{}),
			}
			sess.ctx, sess.cancel = context.WithCancelCause(cl.ctx)
			sess.touch()
			cl.sessions[id] = sess
			if before := cl.latest[placeOf(sess.name)]; before != nil {
				before.followed.Store(int64(time.Since(cl.epoch)))
			}
			cl.latest[placeOf(sess.name)] = sess
			cl.mu.Unlock()
			cl.cutOff.back(sess.name)
			return sess, nil
		}
		cl.mu.Unlock()
		if !old.ended.Load() {
			if !old.who.Same(who) {
				return nil, meta.E("hello", meta.AccessDenied, who.String(), errors.New("the session is another's"))
			}
			return old, nil
		}
		// The session begins anew after the old one has ended in every volume.
		select {
		case <-old.gone:
		case <-wait.C:
			return nil, meta.E("hello", meta.Unavailable, cl.cfg.Name, errors.New("the session is being ended"))
		case <-cl.ctx.Done():
			return nil, meta.E("hello", meta.Unavailable, cl.cfg.Name, context.Cause(cl.ctx))
		}
	}
}

// expireLoop ends sessions without a keep-alive: after keptFor, or, once the lease has run
// out, if another caller needs what the session holds, if the session's process ended, or if
// the server has too many late sessions. expireLoop also ends sessions that leave a recall
// unanswered.
func (cl *clients) expireLoop() {
	every := cl.cfg.SessionTTL / 16
	t := time.NewTicker(every)
	defer t.Stop()
	last := time.Now()
	for {
		select {
		case <-cl.ctx.Done():
			return
		case <-t.C:
		}
		// No client could renew while this process stood still, so that time does not count.
		// Waiting longer for a session is always safe.
		stood := time.Since(last) - every
		last = time.Now()
		cl.mu.Lock()
		if stood > 2*every {
			cl.log.Warn("this process stood still: it extends the leases of its sessions", "for", stood)
		}
		if stood > every/2 { // or the machine is overloaded
			for _, sess := range cl.sessions {
				sess.renewed.Add(int64(stood))
			}
		}
		var over, late []*session
		for _, sess := range cl.sessions {
			switch idle := sess.idle(); {
			case idle <= cl.cfg.SessionTTL:
				sess.heard()
			case idle > sess.keptFor():
				over = append(over, sess)
			default:
				was := sess.away.Load()
				if !sess.lapse() {
					continue
				}
				late = append(late, sess)
				if !was {
					cl.log.Info("a session is late: the server keeps it until another session needs one of its leases or locks", "session", sess.name, "idle", idle.Round(time.Second))
				}
			}
		}
		cl.mu.Unlock()
		end := func(all []*session, why string) {
			for _, sess := range all {
				cl.stats.expired.Add(1)
				cl.endSession(sess, errors.New(why))
			}
		}
		end(over, "its lease ran out")
		end(cl.awaitedBy(late), "its lease ran out, and somebody needs what it holds")
		end(cl.deadAmong(late), "its process is gone")
		end(cl.tooMany(late), "its lease ran out, and too many others' did")
		cl.endStubborn(max(stood, 0))
	}
}

// awaitedBy returns the late sessions that hold up another session, or because of which
// another session was refused.
func (cl *clients) awaitedBy(late []*session) (awaited []*session) {
	if len(late) == 0 {
		return nil
	}
	inTheWay := map[meta.SessionID]bool{}
	for _, o := range cl.hosted.owners() {
		o.mu.Lock()
		for _, sess := range o.leases.InTheWay() {
			inTheWay[sess.id] = true
		}
		for _, id := range o.locks.Holdups() {
			inTheWay[id] = true
		}
		for id, entered := range o.awaited { // the owner serves nobody before these sessions claim
			inTheWay[id] = inTheWay[id] || entered
		}
		o.mu.Unlock()
	}
	for _, sess := range late {
		// The session may have come back meanwhile.
		if (inTheWay[sess.id] || sess.wanted.Load()) && sess.idle() > cl.cfg.SessionTTL {
			awaited = append(awaited, sess)
		}
	}
	return awaited
}

// recallTTLs is how many session TTLs a renewing client may leave a recall unanswered, for
// instance because the client can't save its buffered data. Then the owner ends the session.
const recallTTLs = 4

// endStubborn ends sessions that renew but answer no recall: other sessions must not wait
// forever. stood extends all deadlines. awaitedBy handles silent sessions; a session that came
// back has the full time again.
func (cl *clients) endStubborn(stood time.Duration) {
	patience := recallTTLs * cl.cfg.SessionTTL
	for _, o := range cl.hosted.owners() {
		o.mu.Lock()
		o.leases.Extend(stood)
		late := o.leases.Stubborn(time.Now().Add(-patience))
		o.mu.Unlock()
		for _, sess := range late {
			if sess.away.Load() || time.Since(cl.epoch)-time.Duration(sess.returned.Load()) < patience {
				continue
			}
			cl.stats.expired.Add(1)
			cl.endSession(sess, errors.New("it left a recall unanswered"))
		}
	}
}

// endSession voids a session: the server drops its leases and locks, and the journal of each
// volume entered here releases the session's files.
func (cl *clients) endSession(sess *session, why error) {
	if sess.ended.Swap(true) {
		return
	}
	cl.log.Info("session ended", "session", sess.name, "why", why)
	used := false
	for _, o := range cl.hosted.owners() {
		used = used || o.has(sess)
		o.endSession(sess.id, sess)
	}
	// A client that uses nothing of this server is not reported as cut off. A client mounted
	// anew since its last sign of life is back already.
	if used && sess.role == wire.RoleClient && !errors.Is(why, errLeft) && sess.followed.Load() <= max(sess.renewed.Load(), 0) {
		cl.cutOff.add(sess, why)
	}
	cl.mu.Lock()
	if cl.sessions[sess.id] == sess {
		delete(cl.sessions, sess.id)
	}
	if place := placeOf(sess.name); cl.latest[place] == sess {
		delete(cl.latest, place)
	}
	cl.mu.Unlock()
	close(sess.gone)
	sess.cancel(why)
	if !errors.Is(why, errLeft) {
		// A living client connects again, and learns of the loss.
		sess.mu.Lock()
		if sess.conn != nil {
			sess.conn.Close()
		}
		sess.mu.Unlock()
	}
}

// lateClients lists, for the health report, the clients that use a volume here and have been
// late for a while, the latest heard first.
func (cl *clients) lateClients(now time.Time) (l []meta.ClientHealth) {
	cl.mu.Lock()
	var late []*session
	for _, sess := range cl.sessions {
		if idle := sess.idle(); sess.role == wire.RoleClient && sess.away.Load() && idle > 2*cl.cfg.SessionTTL && idle < cutOffTold {
			late = append(late, sess)
		}
	}
	cl.mu.Unlock()
	owners := cl.hosted.owners()
	for _, sess := range late {
		if slices.ContainsFunc(owners, func(o *owner) bool { return o.has(sess) }) {
			l = append(l, meta.ClientHealth{Name: sess.name, Identity: sess.holder(), At: now.Add(-sess.idle()), Kept: true,
				Why: "it is not heard of; its session is kept until somebody needs what it holds"})
		}
	}
	slices.SortFunc(l, func(a, b meta.ClientHealth) int { return b.At.Compare(a.At) })
	return l
}

// deadAmong returns the late sessions whose process certainly ended.
func (cl *clients) deadAmong(late []*session) (dead []*session) {
	if cl.cfg.Dead == nil {
		return nil
	}
	for _, sess := range late {
		if cl.cfg.Dead(sess.host, sess.pid, sess.start) {
			dead = append(dead, sess)
		}
	}
	return dead
}

// tooMany returns the late sessions beyond maxLate or maxLateLeases: the sessions late for the
// longest time.
func (cl *clients) tooMany(late []*session) []*session {
	leases := map[*session]int{}
	sum := 0
	for _, o := range cl.hosted.owners() {
		o.mu.Lock()
		for _, sess := range late {
			leases[sess] += o.leases.Count(sess)
			sum += o.leases.Count(sess)
		}
		o.mu.Unlock()
	}
	if len(late) <= maxLate && sum <= maxLateLeases {
		return nil
	}
	late = slices.Clone(late)
	slices.SortFunc(late, func(a, b *session) int { return cmp.Compare(b.idle(), a.idle()) })
	n := 0
	for ; len(late)-n > maxLate || sum > maxLateLeases; n++ {
		sum -= leases[late[n]]
	}
	return late[:n]
}
