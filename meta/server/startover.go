package server

import (
	"context"
	"errors"
	"time"

	"penstock.io/penstock/meta"
)

// A server that lost its right to a volume (it was stopped for longer than its
// lease, the machine slept, etcd was away), or can't go on with one, starts
// over: it forgets its sessions, so that each comes back as after a restart,
// with its claims and with what was answered early and never journaled, and it
// takes its volumes again. Clients wait meanwhile; none is told of a failure.

// reopenWait bounds one try to take the volumes again.
const reopenWait = 30 * time.Second

// startOver breaks every session's connection before any of them can hear that
// something failed, and begins again in the background.
func (s *Server) startOver(cause error) {
	// Another caller returns no earlier than the connections are broken.
	s.breaking.Lock()
	defer s.breaking.Unlock()
	s.mu.Lock()
	if s.closing || s.restarting {
		s.mu.Unlock()
		return
	}
	s.restarting = true
	select {
	case <-s.ready:
		s.ready = make(chan struct{})
	default:
	}
	sessions := s.sessions
	s.sessions = map[meta.SessionID]*session{}
	s.mu.Unlock()
	s.log.Warn("starting over: sessions come back, volumes are taken again", "cause", cause)
	for _, sess := range sessions {
		sess.mu.Lock()
		sess.ended = true // nobody ends it in the journal
		if sess.conn != nil {
			sess.conn.Close()
		}
		sess.conn, sess.send = nil, nil
		sess.mu.Unlock()
	}
	s.wg.Go(func() {
		for _, sess := range sessions {
			sess.cancel(cause)
		}
		s.reopen(cause)
	})
}

// reopen takes all volumes again and lets clients in.
func (s *Server) reopen(cause error) {
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		err := s.reopenOnce(cause)
		if s.ctx.Err() != nil {
			return
		}
		if err == nil {
			break
		}
		s.log.Error("volumes can't be served yet, trying again", "error", err)
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return
		}
	}
	s.mu.Lock()
	s.restarting = false
	s.mu.Unlock()
	s.letIn()
	s.log.Info("started over")
	if s.anyLost() {
		s.startOver(cause) // lost in between, when that changed nothing
	}
}

func (s *Server) reopenOnce(cause error) error {
	for _, o := range s.owners() {
		o.cancel(cause)
		if err := o.closeStore(); err != nil {
			o.log.Warn("closing the store", "error", err)
		}
		s.forget(o)
	}
	ctx, cancel := context.WithTimeoutCause(s.ctx, reopenWait, errors.New("the volume can't be taken yet"))
	defer cancel()
	if err := s.openAll(ctx); err != nil {
		return err
	}
	if s.anyLost() {
		return errors.New("a volume was lost again")
	}
	return nil
}

func (s *Server) anyLost() bool {
	for _, o := range s.owners() {
		if o.ctx.Err() != nil {
			return true
		}
	}
	return false
}

// letIn opens the gate for clients.
func (s *Server) letIn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.restarting {
		return // reopen does it
	}
	select {
	case <-s.ready:
	default:
		close(s.ready)
	}
}

// forget takes an owner that serves no more off the list.
func (s *Server) forget(o *owner) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if op := s.volumes[o.vol]; op != nil && op.o == o {
		delete(s.volumes, o.vol)
	}
}
