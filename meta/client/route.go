package client

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Bounds of the search for an owner.
const (
	lookMin   = 10 * time.Millisecond
	lookMax   = 250 * time.Millisecond
	lookHops  = 4               // redirections followed without a wait
	lookWarns = 2 * time.Second // between warnings about an owner that is not found
	// lookDenied is how long a session continues to ask unreachable servers after a server
	// refused the session's identity.
	lookDenied = 3 * time.Second
)

// look starts the search for a volume's owner. The caller holds mu.
func (s *Session) look(v meta.VolumeID) {
	vs := s.volume(v)
	if vs.routing || vs.conn != nil || s.closed {
		return
	}
	vs.routing = true
	s.wg.Go(func() { s.route(v) })
}

// leave notes that a volume is no longer served over c. The goroutine reading from c calls
// leave, so that the session has handled every earlier message of the owner. The caller holds
// mu.
func (s *Session) leave(v meta.VolumeID, c *conn, hint string) {
	vs := s.volumes[v]
	if vs == nil {
		return
	}
	for _, r := range s.pending {
		if r.ofVolume && r.volume == v && r.conn == c {
			r.conn = nil
		}
	}
	if vs.conn != c {
		return
	}
	// Leases hold as long as c's server granted: the next owner waits for that time or for our
	// claims.
	vs.lease.frozen.Store(c.until.Load())
	vs.lease.conn.Store(nil)
	vs.conn, vs.hint = nil, hint
	c.used = now()
	s.look(v)
}

// route looks for a volume's owner and enters the volume at the owner.
func (s *Session) route(v meta.VolumeID) {
	wait := lookMin
	var warned time.Duration
	began := now()
	for s.ctx.Err() == nil {
		err := s.enterSomewhere(v)
		if err == nil {
			level := slog.LevelDebug
			if now()-began > lookWarns {
				level = slog.LevelInfo
			}
			s.log.Log(s.ctx, level, "a volume's owner was found", "volume", v, "after", (now() - began).Round(time.Millisecond))
			return
		}
		if !final(err) && s.denied(err) {
			err = meta.E("find the owner", meta.AccessDenied, fmt.Sprintf("volume %d", v), err)
		}
		s.mu.Lock()
		vs := s.volume(v)
		said := vs.route == err.Error()
		vs.route = err.Error()
		s.mu.Unlock()
		s.log.Debug("a volume's owner is looked for", "volume", v, "since", (now() - began).Round(time.Millisecond), "error", err)
		if final(err) {
			if !said {
				s.log.Warn("a volume is refused to this client", "volume", v, "error", err)
			}
			s.mu.Lock()
			vs := s.volume(v)
			// The volume may have expired just before the refusal; expire it only once.
			was := errors.Is(err, meta.AccessDenied) && (vs.joined || vs.epoch > vs.refusedAt)
			if was {
				vs.refusedAt = vs.epoch + 1
			}
			s.mu.Unlock()
			if was {
				// The owner ended the session in this volume before it refused the session.
				// The mount must no longer show data cached under leases of the volume, nor
				// cached data that needs no lease.
				s.expire(v, err)
			}
			s.refuse(v, err)
			return
		}
		if now := now(); now-max(warned, began) > lookWarns {
			warned = now
			s.log.Warn("a volume's owner can't be reached, trying again", "volume", v, "since", (now - began).Round(time.Second), "error", err)
		}
		select {
		case <-time.After(wait/2 + rand.N(wait)):
		case <-s.ctx.Done():
		}
		wait = min(2*wait, lookMax)
	}
}

// final reports that continuing the search would not help.
func final(err error) bool {
	switch meta.KindOf(err) {
	case meta.NoSuchVolume, meta.AccessDenied, meta.NotPermitted, meta.Corrupt, meta.Version, meta.BadCapability:
		return true
	}
	return false
}

// denied reports that servers have refused this session's identity (the identity was evicted)
// for more than lookDenied, and that no server has accepted the identity since. Unreachable
// servers do not prolong the search: they would give the same answer.
func (s *Session) denied(err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !errors.Is(err, meta.AccessDenied) {
		return false
	}
	if s.deniedAt == 0 {
		s.deniedAt = now()
	}
	return now()-s.deniedAt > lookDenied
}

// enterSomewhere asks the servers in turn until one lets the session enter the volume.
func (s *Session) enterSomewhere(v meta.VolumeID) error {
	s.mu.Lock()
	all := s.addrs(s.volume(v).hint)
	s.mu.Unlock()
	var errs []error
	no := 0
	asked := map[string]bool{}
	hops := 0
	for len(all) > 0 {
		addr := all[0]
		all = all[1:]
		if asked[addr] {
			continue
		}
		asked[addr] = true
		next, told, err := s.enterAt(v, addr)
		if err == nil || told && final(err) {
			return err
		}
		errs = append(errs, fmt.Errorf("%s: %w", addr, err))
		if refused(err) {
			no++
		}
		if next != "" && !asked[next] && hops < lookHops {
			s.mu.Lock()
			at, bad := s.failed[next]
			bad = bad && now()-at < time.Second
			s.mu.Unlock()
			if !bad {
				hops++
				all = slices.Insert(all, 0, next)
			}
		}
	}
	if no > 0 && no == len(errs) {
		return errs[0]
	}
	return meta.E("find the owner", meta.Unavailable, fmt.Sprintf("volume %d", v), errors.Join(errs...))
}

// enterAt enters a volume at one server. told: err is the server's answer. next is the
// server's hint at the owner.
func (s *Session) enterAt(v meta.VolumeID, addr string) (next string, told bool, err error) {
	ctx, cancel := forConnection(s.ctx)
	c, err := s.connTo(ctx, addr)
	cancel()
	if err != nil {
		return "", false, err
	}
	for {
		s.mu.Lock()
		joined := s.volume(v).joined
		s.mu.Unlock()
		// No timeout: a server may need time to open the volume, and a silent server breaks
		// the connection.
		m, err := s.ask(s.ctx, c, &wire.Enter{Volume: v, Known: joined})
		if err != nil {
			return "", false, err
		}
		e, ok := m.(*wire.Entered)
		if !ok {
			return "", false, meta.E("enter volume", meta.Protocol, addr, nil)
		}
		if err := e.Status.Error(); err != nil {
			if e.Status.Err == meta.NotOwner {
				next = e.Status.Subject
			}
			return next, true, err
		}
		if e.Known {
			return "", false, s.up(v, c, e)
		}
		if !joined {
			return "", false, meta.E("enter volume", meta.Protocol, addr, errors.New("nothing was claimed, and it was refused"))
		}
		// And begin anew.
		s.expire(v, meta.E("session", meta.SessionExpired, s.cfg.Name, fmt.Errorf("in volume %d: its lease ran out before %s was reached", v, c.addr)))
	}
}

// expire drops everything that the session had in a volume. Pending requests fail with err.
func (s *Session) expire(v meta.VolumeID, err error) {
	s.mu.Lock()
	vs := s.volume(v)
	var lost []meta.Ino
	for i := range vs.retained {
		lost = appendChanged(lost, vs.retained[i].call.Op)
	}
	vs.lease.frozen.Store(0)
	vs.joined, vs.seen, vs.durable, vs.retained, vs.replaying, vs.resent, vs.ackHold = false, 0, 0, nil, 0, 0, 0
	vs.settling, vs.settled = 0, 0
	vs.held, vs.unwanted = 0, nil
	vs.epoch++ // under the same mu: every older request is answered here or refused later
	for id, r := range s.pending {
		if r.ofVolume && r.volume == v {
			delete(s.pending, id)
			if r.replay {
				lost = appendChanged(lost, r.msg.(*wire.Call).Op)
			}
			r.done <- response{err: err}
		}
	}
	s.mu.Unlock()
	s.log.Warn("the session expired: its leases are void, and unsynced bytes are lost", "volume", v, "why", err)
	if h, ok := s.cfg.Handler.(LossHandler); ok && len(lost) > 0 {
		slices.Sort(lost)
		h.Lost(v, slices.Compact(lost), err)
	}
	if s.cfg.Handler != nil {
		s.cfg.Handler.Expired([]meta.VolumeID{v}, err)
	}
}

// appendChanged appends the inodes named and changed by op.
func appendChanged(inos []meta.Ino, op meta.Op) []meta.Ino {
	switch op := op.(type) {
	case *meta.Create:
		return append(inos, op.Parent, op.Ino)
	case *meta.Tmpfile:
		return append(inos, op.Ino)
	case *meta.Link:
		return append(inos, op.Parent, op.Ino)
	case *meta.Unlink:
		return append(inos, op.Parent)
	case *meta.Rename:
		return append(inos, op.Parent, op.NewParent)
	case *meta.Junction:
		return append(inos, op.Parent)
	case *meta.SetAttr:
		if op.Mask&^(meta.SetAtime|meta.SetCtime) != 0 { // a change of only the access time does not count
			return append(inos, op.Ino)
		}
	case *meta.Write:
		return append(inos, op.Ino)
	case *meta.Fallocate:
		return append(inos, op.Ino)
	case *meta.CopyRange:
		return append(inos, op.Dst)
	case *meta.SetXattr:
		return append(inos, op.Ino)
	case *meta.RemoveXattr:
		return append(inos, op.Ino)
	}
	return inos
}

// refuse fails every request that waits for a volume which can't be entered.
func (s *Session) refuse(v meta.VolumeID, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(v)
	vs.routing = false
	for id, r := range s.pending {
		if r.ofVolume && r.volume == v && !r.replay {
			delete(s.pending, id)
			if r.resent {
				vs.resent--
			}
			r.done <- response{err: err}
		}
	}
}

// up queues, on the connection where the session entered the volume, every message that the
// owner may lack: claims if the owner wants claims, then mutations with an early reply in the
// order of their replies, then unanswered requests in the order in which they were made.
func (s *Session) up(v meta.VolumeID, c *conn, e *wire.Entered) error {
	s.mu.Lock()
	defer c.send.Flush()
	defer s.mu.Unlock()
	if s.closed || s.conns[c.addr] != c {
		return meta.E("enter volume", meta.Unavailable, c.addr, errLost)
	}
	vs := s.volume(v)
	if h, ok := s.cfg.Handler.(Claimer); ok && e.Known && e.Claim {
		leases, locks := h.Claims(v)
		for len(leases) > 0 || len(locks) > 0 {
			m := wire.Claim{Volume: v}
			n := min(len(leases), 4096)
			m.Leases, leases = leases[:n], leases[n:]
			k := min(len(locks), 4096)
			m.Locks, locks = locks[:k], locks[k:]
			c.send.Enqueue(0, &m)
		}
	}
	if !e.Metered {
		vs.held = 0
	}
	if e.Claim && vs.held > 0 {
		c.send.Enqueue(0, &wire.Reserve{Volume: v, Claim: true, Want: vs.held})
	}
	if h, ok := s.cfg.Handler.(QuotaHandler); ok {
		h.Metered(v, e.Metered, e.Overwrites, nil)
	}
	if h, ok := s.cfg.Handler.(PolicyHandler); ok {
		h.PolicySet(v, e.Policy)
	}
	// Replays first: mutations already answered, in the order of their answers, then replays
	// that an earlier connection carried and did not answer.
	var replays []*wire.Call
	if vs.resent == 0 {
		vs.ackHold = vs.durable
	}
	vs.replaying, vs.resent = 0, 0
	for i := range vs.retained {
		replays = append(replays, &vs.retained[i].call)
	}
	vs.retained = nil // the replies put the calls on the list again
	var asked []uint64
	for _, id := range slices.Sorted(maps.Keys(s.pending)) {
		switch r := s.pending[id]; {
		case !r.ofVolume || r.volume != v:
		case r.replay:
			replays = append(replays, r.msg.(*wire.Call))
			delete(s.pending, id)
		case r.over:
		default:
			asked = append(asked, id)
		}
	}
	for _, call := range replays {
		call.Replay = true
		r := &request{msg: call, volume: v, ofVolume: true, conn: c, replay: true, resent: true, sent: true, done: make(chan response, 1)}
		s.book(r)
		vs.replaying++
		vs.resent++
		s.put(r)
	}
	c.send.Enqueue(0, &wire.Back{Volume: v})
	if vs.trouble != nil {
		c.send.Enqueue(0, vs.trouble)
		vs.trouble = nil
	}
	if vs.gaveUp != nil {
		c.send.Enqueue(0, vs.gaveUp)
		vs.gaveUp = nil
	}
	s.giveBackAll(v, c, !e.Claim)
	// An operation that was never answered is no replay: no values were assigned to it in a
	// reply, and before every session is back the operation could take values assigned to
	// other sessions (rule 3). If the operation was executed nevertheless, the server
	// recognizes its operation id.
	for _, id := range asked {
		r := s.pending[id]
		delete(s.pending, id)
		s.book(r)
		if m, ok := r.msg.(*wire.Sync); ok { // the previous owner had other numbers
			r.msg = &wire.Sync{Volume: m.Volume, Seq: wire.SyncAll}
		}
		if m, ok := r.msg.(*wire.Reserve); ok && e.Claim {
			n := *m
			n.Give = 0 // the bytes were not claimed
			r.msg = &n
		}
		if r.sent && r.isOp() {
			r.resent = true
			vs.resent++
		}
		r.conn, r.sent = c, true
		s.put(r)
	}
	vs.conn, vs.routing, vs.joined, vs.hint, vs.route = c, false, true, "", ""
	vs.lease.conn.Store(c)
	return nil
}

// isOp reports that the request holds operations of a volume.
func (r *request) isOp() bool {
	switch r.msg.(type) {
	case *wire.Call, *wire.Batch:
		return true
	}
	return false
}
