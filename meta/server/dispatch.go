package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// withOwner runs fn with the owner of a volume that the session entered here. Otherwise
// withOwner refuses the request and the client looks for the owner: the volume has moved, or
// the client's entry is out of date.
func (s *session) withOwner(id uint64, v meta.VolumeID, fn func(*owner)) {
	if o := s.srv.hosted.opened(v); o != nil && o.has(s) {
		fn(o)
		return
	}
	s.refuse(id, s.srv.hosted.elsewhere(v))
}

// handle serves one frame, or refuses the frame.
func (s *session) handle(t wire.Type, id uint64, body wire.Body) (done bool, err error) {
	if err := maySend(s.who, t); err != nil {
		return false, err
	}
	done, err = s.serve(t, id, body)
	var no *refusal
	if errors.As(err, &no) {
		s.srv.stats.refused.Add(1)
		if no.answer != nil {
			s.enqueue(id, no.answer)
		}
		return false, nil
	}
	return done, err
}

func (s *session) serve(t wire.Type, id uint64, body wire.Body) (done bool, err error) {
	switch t {
	case wire.TCall:
		c := new(wire.Call)
		if err := s.take(body, c); err != nil {
			return false, err
		}
		s.srv.stats.calls.Add(1)
		if c.Replay {
			s.inOrder(c.Volume, func() {
				s.withOwner(id, c.Volume, func(o *owner) { o.serve(s, id, c, true) })
				s.flush()
			})
			return false, nil
		}
		s.withOwner(id, c.Volume, func(o *owner) { o.serve(s, id, c, false) })
	case wire.TBatch:
		b := new(wire.Batch)
		if err := s.take(body, b); err != nil {
			return false, err
		}
		if len(b.Calls) == 0 {
			s.enqueue(id, &wire.BatchRe{})
			return false, nil
		}
		for i := range b.Calls {
			if b.Calls[i].Volume != b.Calls[0].Volume {
				return false, meta.E("batch", meta.Protocol, "", errors.New("several volumes in one batch"))
			}
		}
		s.srv.stats.calls.Add(uint64(len(b.Calls)))
		s.calls = len(b.Calls)
		s.withOwner(id, b.Calls[0].Volume, func(o *owner) { o.serveBatch(s, id, b) })
	case wire.TSync:
		m := new(wire.Sync)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.inOrder(m.Volume, func() { // after earlier replays: their changes are in no entry yet
			s.withOwner(id, m.Volume, func(o *owner) { o.serveSync(s, id, m) })
			s.flush()
		})
	case wire.TRecalled:
		var m wire.Recalled
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.hosted.opened(m.Volume); o != nil {
			o.mu.Lock()
			o.leases.Answer(time.Now(), s, m.Ino, id, m.Held)
			o.mu.Unlock()
		}
	case wire.TGrowthRe:
		var m wire.GrowthRe
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.hosted.opened(m.Volume); o != nil {
			o.mu.Lock()
			o.leases.answerGrowth(s, id, &m)
			o.mu.Unlock()
		}
	case wire.TPolicyTaken:
		var m wire.PolicyTaken
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.hosted.opened(m.Volume); o != nil {
			o.mu.Lock()
			o.told.answered(s, id)
			o.mu.Unlock()
		}
	case wire.TDrop:
		var m wire.Drop
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		if o := s.srv.hosted.opened(m.Volume); o != nil {
			o.mu.Lock()
			for _, i := range m.Inos {
				o.leases.Drop(s, i)
			}
			o.mu.Unlock()
		}
	case wire.TKeepAlive:
		var m wire.KeepAlive
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		s.touch()
		// Beyond this server's lease at etcd another server may own the volumes (rule 2).
		if grant := s.srv.hosted.grant(); grant > 0 {
			m.TTL = uint64(grant.Milliseconds())
			s.enqueue(id, &m)
		}
	case wire.TEnter:
		m := new(wire.Enter)
		err := s.take(body, m)
		var no *refusal
		if err != nil && !errors.As(err, &no) {
			return false, err
		}
		s.wg.Go(func() {
			e := &wire.Entered{}
			if no != nil {
				if err := s.refusedStill(m, no.cause); err != nil {
					s.srv.stats.refused.Add(1)
					e.Status = wire.StatusOf(err)
					s.enqueue(id, e)
					s.flush()
					return
				}
			}
			if o, err := s.srv.hosted.ownerFor(s.ctx, m.Volume); err != nil {
				e.Status = wire.StatusOf(err)
				s.enqueue(id, e)
			} else {
				o.serveEnter(s, id, m)
			}
			s.flush()
		})
	case wire.TBack:
		m := new(wire.Back)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		o := s.srv.hosted.opened(m.Volume) // not the next owner, which lacks the session's replays
		s.inOrder(m.Volume, func() {
			if o != nil {
				o.back(s)
			}
			s.flush()
		})
	case wire.TAlloc:
		m := new(wire.Alloc)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.serveAlloc(s, id, m) })
	case wire.TSeal:
		m := new(wire.Seal)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Chunk.Volume, func(o *owner) { o.sealing.serveSeal(s, id, m) })
	case wire.TTrouble:
		var m wire.Trouble
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		s.srv.repairs.trouble(s, &m)
	case wire.TGaveUp:
		var m wire.GaveUp
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		s.srv.clients.gaveUp(s, &m)
	case wire.TLock:
		m := new(wire.Lock)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.serveLock(s, id, m) })
	case wire.TCancel:
		var m wire.Cancel
		if err := s.take(body, &m); err != nil {
			return false, err
		}
		s.mu.Lock()
		if cancel := s.cancels[m.Request]; cancel != nil {
			cancel(errCanceled)
		}
		s.mu.Unlock()
	case wire.TClaim:
		m := new(wire.Claim)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		if o := s.srv.hosted.opened(m.Volume); o != nil {
			o.serveClaim(s, m)
		}
	case wire.TReserve:
		m := new(wire.Reserve)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		if m.Claim {
			if o := s.srv.hosted.opened(m.Volume); o != nil {
				o.quota.claimPromise(s, m.Want)
			}
			break
		}
		s.withOwner(id, m.Volume, func(o *owner) { o.quota.serveReserve(s, id, m) })
	case wire.TCaps:
		m := new(wire.Caps)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		if !m.Chunk.IsZero() {
			s.withOwner(id, m.Volume, func(o *owner) {
				if m.Chunk.Volume != m.Volume {
					o.foreign.serveForeignCap(s, id, m.Chunk)
					return
				}
				o.serveAppendCap(s, id, m.Chunk)
			})
			break
		}
		re := &wire.CapsRe{}
		token, ttl, err := s.srv.chunkServers.readCap(m.Volume, s)
		re.Status, re.Cap, re.TTL = wire.StatusOf(err), token, uint64(ttl.Milliseconds())
		s.enqueue(id, re)
	case wire.TAdmin:
		m := new(wire.Admin)
		if err := s.take(body, m); err != nil {
			return false, err
		}
		s.wg.Go(func() {
			re := s.srv.adminFrames.admin(s.ctx, s, m)
			s.enqueue(id, re)
			s.flush()
		})
	case wire.TBye:
		s.wg.Go(func() {
			var used []*owner
			for _, o := range s.srv.hosted.owners() {
				if o.has(s) {
					used = append(used, o)
				}
			}
			s.srv.clients.endSession(s, errLeft)
			// The next owners of the volumes shall not wait for this session.
			for _, o := range used {
				ctx, cancel := context.WithTimeout(o.ctx, byeWait)
				if err := o.flush(ctx); err != nil {
					o.log.Debug("a session's end is not in the journal yet", "error", err)
				}
				cancel()
			}
			s.mu.Lock()
			snd := s.send
			s.mu.Unlock()
			if snd != nil {
				snd.Send(id, &wire.Bye{})
			}
		})
	default:
		return false, meta.E("read frame", meta.Protocol, s.name, fmt.Errorf("frame type %d from a client", t))
	}
	return false, nil
}

func (s *session) refuse(id uint64, err error) {
	s.enqueue(id, &wire.Reply{Status: wire.StatusOf(err)})
}
