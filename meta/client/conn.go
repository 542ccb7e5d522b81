package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/wire"
)

// handshakeWait bounds dialling and the handshake: a stopped server process still accepts
// connections.
const handshakeWait = 3 * time.Second

// hello returns the dialler's description of itself.
func (c *Config) hello(id meta.SessionID, cluster string) wire.Hello {
	return wire.Hello{
		Min: wire.Version, Max: wire.Version, Role: c.Role, Session: id, Name: c.Name,
		Host: c.Host, PID: c.PID, Start: c.Start, Cluster: cluster, Resumed: c.Session != 0, TTL: uint64(c.Linger.Milliseconds()),
		Streams: c.Streams,
	}
}

// greet dials a server and does the handshake.
func (c *Config) greet(ctx context.Context, addr string, hello wire.Hello) (net.Conn, *wire.Reader, uint8, wire.Hello, error) {
	var ans wire.Hello
	ctx, cancel := context.WithTimeoutCause(ctx, handshakeWait, fmt.Errorf("no answer within %v", handshakeWait))
	defer cancel()
	nc, err := peer.Dial(ctx, addr, c.Creds, peer.Meta)
	if err != nil {
		return nil, nil, 0, ans, err
	}
	fail := func(err error) (net.Conn, *wire.Reader, uint8, wire.Hello, error) {
		nc.Close()
		return nil, nil, 0, ans, err
	}
	deadline, _ := ctx.Deadline()
	nc.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { nc.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := nc.Write(wire.Append(nil, wire.Version, 0, &hello)); err != nil {
		return fail(err)
	}
	rd := wire.NewReader(nc)
	t, _, body, err := rd.Next()
	if err != nil {
		if peer.Refused(err) {
			err = meta.E("handshake", meta.AccessDenied, addr, err)
		}
		return fail(err)
	}
	if t != wire.THello {
		return fail(meta.E("handshake", meta.Protocol, addr, fmt.Errorf("frame type %d in place of hello", t)))
	}
	if err := wire.Decode(body, &ans); err != nil {
		return fail(err)
	}
	if ans.Err != meta.KindOK {
		return fail(meta.E("handshake", ans.Err, addr, errors.New(ans.Detail)))
	}
	v, ok := wire.Negotiate(&ans)
	if !ok {
		return fail(meta.E("handshake", meta.Version, addr, fmt.Errorf("the server speaks protocol versions %d to %d, this program speaks version %d", ans.Min, ans.Max, wire.Version)))
	}
	if !stop() {
		return fail(context.Cause(ctx))
	}
	nc.SetDeadline(time.Time{})
	rd.Trust()
	return nc, rd, v, ans, nil
}

// refused reports that a server answering with err would give the same answer again.
func refused(err error) bool {
	switch meta.KindOf(err) {
	case meta.Version, meta.BadCapability, meta.AccessDenied, meta.Invalid:
		return true
	}
	return false
}

// conn is one connection to one server, with the lease granted by this server. A broken conn
// is never reused: the session dials a new conn.
type conn struct {
	s    *Session
	addr string // as announced by the server, else as dialled
	nc   net.Conn
	send *wire.Sender
	ttl  time.Duration
	gone chan struct{}

	until atomic.Int64 // end of the lease, on the clock of now
	heard atomic.Int64 // time of the last frame

	used time.Duration // last time a volume was served over the conn; Session.mu

	recalls int // recalls with answers possibly unsent; used by the reader only
}

// answersAtOnce bounds the answers to recalls that wait while the reader reads more recalls.
const answersAtOnce = 256

// now is the clock for leases.
func now() time.Duration { return process.Uptime() }

// renewed extends the lease to ttl after the time sent of the request, less an eighth.
func (c *conn) renewed(sent, ttl time.Duration) {
	until := int64(sent + ttl - ttl/8)
	for {
		old := c.until.Load()
		if old >= until || c.until.CompareAndSwap(old, until) {
			return
		}
	}
}

// left is the remaining time of the lease, surely granted.
func (c *conn) left() time.Duration { return time.Duration(c.until.Load()) - process.Recent() }

// attempt is a connection being made.
type attempt struct {
	done chan struct{}
	c    *conn
	err  error
}

// connTo returns a connection to a server, dialling if necessary. connTo stops waiting when
// ctx ends; the dialling attempt continues.
func (s *Session) connTo(ctx context.Context, addr string) (*conn, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, s.closeErr
	}
	if a, ok := s.alias[addr]; ok && s.conns[a] != nil {
		addr = a
	}
	if c := s.conns[addr]; c != nil {
		s.mu.Unlock()
		return c, nil
	}
	a := s.attempts[addr]
	if a == nil {
		a = &attempt{done: make(chan struct{})}
		s.attempts[addr] = a
		s.wg.Go(func() {
			a.c, a.err = s.dial(addr)
			s.mu.Lock()
			delete(s.attempts, addr)
			if a.err != nil {
				s.failed[addr] = now()
			} else {
				delete(s.failed, addr)
				s.deniedAt = 0
			}
			s.mu.Unlock()
			close(a.done)
		})
	}
	s.mu.Unlock()
	select {
	case <-a.done:
		return a.c, a.err
	case <-ctx.Done():
		return nil, meta.E("connect", meta.Unavailable, addr, context.Cause(ctx))
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
}

// dial makes a connection and starts the reader and the keepAlive goroutine.
func (s *Session) dial(addr string) (*conn, error) {
	s.mu.Lock()
	cluster := s.cluster
	s.mu.Unlock()
	sent := now()
	nc, rd, v, ans, err := s.cfg.greet(s.ctx, addr, s.cfg.hello(s.id, cluster))
	if err != nil {
		return nil, err
	}
	if ans.Session != s.id {
		nc.Close()
		return nil, meta.E("handshake", meta.Protocol, addr, errors.New("the server answered for another session"))
	}
	if s.cfg.Session != 0 && !ans.Resumed {
		nc.Close()
		return nil, meta.E("handshake", meta.Version, addr, errors.New("the server is too old to have another process go on with a session"))
	}
	c := &conn{s: s, addr: addr, nc: nc, send: wire.NewSender(nc, v, nil), ttl: time.Duration(ans.TTL) * time.Millisecond, gone: make(chan struct{})}
	if ans.Host != "" {
		c.addr = ans.Host
	}
	c.renewed(sent, c.ttl)
	c.heard.Store(int64(now()))
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		nc.Close()
		return nil, s.closeErr
	}
	s.cluster = ans.Cluster
	if c.addr != addr {
		s.alias[addr] = c.addr
	}
	old := s.conns[c.addr]
	s.conns[c.addr] = c
	c.used = now()
	s.wg.Go(func() { c.run(rd) })
	s.wg.Go(c.keepAlive)
	s.mu.Unlock()
	if old != nil {
		old.nc.Close() // the server closed old as well: a session has one connection per server
	}
	s.log.Debug("connected to a metadata server", "address", c.addr)
	return c, nil
}

// run reads until the connection breaks.
func (c *conn) run(rd *wire.Reader) {
	err := c.read(rd)
	c.nc.Close()
	close(c.gone)
	c.s.lost(c, err)
}

// errSilent and errOver end a connection to a server that can't be relied on.
var (
	errSilent = errors.New("the server is silent")
	errOver   = errors.New("the lease ran out")
	errLost   = errors.New("the connection to the server was lost")
)

// silence is how long a server may send nothing.
func (c *conn) silence() time.Duration { return max(c.ttl/2, 400*time.Millisecond) }

// quiet adds up how long a server has been silent. Time in which this process stood still does
// not count: frames that arrived meanwhile wait to be read.
type quiet struct {
	heard int64 // time of the last frame
	sum   time.Duration
}

// passed adds a turn to the sum and returns the sum. The turn should have taken every; took is
// longer if this process stood still.
func (q *quiet) passed(took, every time.Duration, heard int64) time.Duration {
	q.sum += min(took, every)
	if heard != q.heard {
		q.heard, q.sum = heard, 0
	}
	return q.sum
}

// keepAlive renews the lease. It closes the connection when the server has not answered for
// too long: another server may own the volumes by now.
func (c *conn) keepAlive() {
	every := max(c.ttl/8, 20*time.Millisecond)
	t := time.NewTicker(every)
	defer t.Stop()
	var q quiet
	for {
		sent := now()
		// The count is the sending time: the echo renews the lease from that time.
		c.send.Enqueue(0, &wire.KeepAlive{Count: uint64(sent)})
		go c.send.Flush() // a peer that does not read must not block keepAlive
		select {
		case <-c.gone:
			return
		case <-t.C:
		}
		var why error
		switch {
		case q.passed(now()-sent, every, c.heard.Load()) >= c.silence():
			why = errSilent
		case c.left() <= 0:
			why = errOver
		case c.s.idle(c):
			c.nc.Close()
			return
		}
		if why != nil {
			c.s.log.Warn("connection to a metadata server given up", "address", c.addr, "cause", why)
			c.nc.Close()
			return
		}
	}
}

// idleFor is how long a connection without a volume is kept.
const idleFor = time.Minute

// idle reports that no volume has been served over c for idleFor, and that the session has
// another connection for requests without a volume.
func (s *Session) idle(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, vs := range s.volumes {
		if vs.conn == c {
			c.used = now()
			return false
		}
	}
	return len(s.conns) > 1 && now()-c.used > idleFor
}

// answer returns an empty message for a frame type, or nil if the type is no answer.
func answer(t wire.Type) wire.Message {
	switch t {
	case wire.TReply:
		return new(wire.Reply)
	case wire.TBatchRe:
		return new(wire.BatchRe)
	case wire.TGrants:
		return new(wire.Grants)
	case wire.TLockRe:
		return new(wire.LockRe)
	case wire.TAdminRe:
		return new(wire.AdminRe)
	case wire.TCapsRe:
		return new(wire.CapsRe)
	case wire.TEntered:
		return new(wire.Entered)
	case wire.TReserved:
		return new(wire.Reserved)
	case wire.TBye:
		return new(wire.Bye)
	}
	return nil
}

// statusOf finds the status of an answer.
func statusOf(m wire.Message) *wire.Status {
	switch a := m.(type) {
	case *wire.Reply:
		return &a.Status
	case *wire.BatchRe:
		for i := range a.Replies {
			if a.Replies[i].Status.Err == meta.NotOwner {
				return &a.Replies[i].Status
			}
		}
	case *wire.Grants:
		return &a.Status
	case *wire.LockRe:
		return &a.Status
	case *wire.CapsRe:
		return &a.Status
	case *wire.Reserved:
		return &a.Status
	}
	return nil
}

func (c *conn) read(rd *wire.Reader) error {
	s := c.s
	for {
		if c.recalls > 0 && (rd.Buffered() == 0 || c.recalls >= answersAtOnce) {
			c.recalls = 0
			c.send.FlushSoon() // the server may be waiting for this reader: do not block on writing
		}
		t, id, body, err := rd.Next()
		if err != nil {
			return err
		}
		c.heard.Store(int64(now()))
		if t != wire.TKeepAlive && c.left() <= 0 {
			// The volumes' present owner waited for the end of our lease: an answer from the
			// previous owner may be stale (rule 2).
			return errOver
		}
		switch t {
		case wire.TRecall:
			var m wire.Recall
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.recall(c, id, &m)
		case wire.TGrowth:
			var m wire.Growth
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			askGrowth(s, c, id, &m)
		case wire.TPolicy:
			var m wire.Policy
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.policy(c, id, &m)
		case wire.TQuota:
			var m wire.Quota
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.quota(c, &m)
		case wire.TDurable:
			var m wire.Durable
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.durable(c, &m)
		case wire.TMoved:
			var m wire.Moved
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.mu.Lock()
			delete(s.failed, m.Addr) // the server announcing the move knows m.Addr to be alive
			s.leave(m.Volume, c, m.Addr)
			s.mu.Unlock()
		case wire.TKeepAlive:
			var m wire.KeepAlive
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			if c.left() <= 0 {
				return errOver
			}
			c.renewed(time.Duration(m.Count), time.Duration(m.TTL)*time.Millisecond)
		case wire.TMetas:
			var m wire.Metas
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.mu.Lock()
			s.metas = m.Servers
			s.mu.Unlock()
		case wire.TServers:
			var m wire.Servers
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.mu.Lock()
			// A chunk server missing from the list is not forgotten: a metadata server that
			// has just started does not know the servers that have not reported yet.
			for _, i := range m.Servers {
				s.servers[i.ID] = i
			}
			select {
			case <-s.gotSrv:
			default:
				close(s.gotSrv)
			}
			s.mu.Unlock()
		default:
			m := answer(t)
			if m == nil {
				return meta.E("read frame", meta.Protocol, "", fmt.Errorf("unexpected type %d", t))
			}
			if err := wire.Decode(body, m); err != nil {
				return err
			}
			s.answered(c, t, id, m)
		}
	}
}

// lost removes a broken connection. The session looks for the owners of the connection's
// volumes again; the requests of these volumes wait for the search.
func (s *Session) lost(c *conn, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conns[c.addr] == c {
		delete(s.conns, c.addr)
	}
	if !s.closed {
		s.log.Warn("connection to a metadata server lost", "address", c.addr, "error", err)
	}
	for v, vs := range s.volumes {
		if vs.conn == c {
			s.leave(v, c, c.addr)
		}
	}
	for id, r := range s.pending {
		if r.conn == c && !r.ofVolume {
			delete(s.pending, id)
			r.done <- response{err: meta.E("call", meta.Unavailable, c.addr, errLost)}
		}
	}
}

// askGrowth passes an owner's question on. The answer is sent on the connection of the question
// or not at all.
func askGrowth(s *Session, c *conn, id uint64, m *wire.Growth) {
	s.mu.Lock()
	vs := s.volumes[m.Volume]
	here := vs != nil && vs.conn == c
	s.mu.Unlock()
	if !here {
		return // c leads to a former owner
	}
	done := func(g meta.Growth) {
		c.send.Enqueue(id, &wire.GrowthRe{Volume: m.Volume, Ino: m.Ino, Growth: g})
		c.send.FlushSoon()
	}
	h, ok := s.cfg.Handler.(GrowthHandler)
	if !ok {
		done(meta.Growth{})
		return
	}
	h.Growth(m.Volume, m.Ino, done)
}

func (s *Session) recall(c *conn, id uint64, m *wire.Recall) {
	s.mu.Lock()
	vs := s.volumes[m.Recall.Volume]
	here := vs != nil && vs.conn == c
	s.mu.Unlock()
	if !here {
		return // c leads to a former owner; the present owner sends its own recall
	}
	h := s.cfg.Handler
	if m.Orphan {
		if o, ok := h.(OrphanHandler); ok {
			o.Orphaned(m.Recall.Volume, m.Recall.Ino)
		}
		return
	}
	// The answer is sent on the connection of the recall or not at all: another owner numbers
	// its rounds anew. An answer given at once is sent together with the answers to other
	// recalls that arrived in the same read.
	var reading, answered atomic.Bool
	done := func(held bool) {
		if answered.Swap(true) {
			return
		}
		c.send.Enqueue(id, &wire.Recalled{Volume: m.Recall.Volume, Ino: m.Recall.Ino, Held: held})
		if !reading.Load() {
			c.send.Flush()
		}
	}
	reading.Store(true)
	defer reading.Store(false)
	c.recalls++
	if h == nil {
		done(false)
		return
	}
	if hh, ok := h.(HoldHandler); ok && m.Recall.Within > 0 {
		hh.RecallWithin(m.Recall, done)
		return
	}
	h.Recall(m.Recall, func() { done(false) })
}
