// Package client owns a program's session with a metadata server: one
// connection that is found again when it breaks, operations with exactly-once
// retries, the order of replies, grants and recalls, and the lease's clock.
//
// What a reply answered may not be in the journal yet (an early reply). The
// session keeps every mutation, with the values that its reply assigned, until
// the server says that it is durable, and sends it again to a server that
// lost it.
package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Handler hears what the server decides about leases. Its methods are called
// in wire order from the session's one reading goroutine and must not block.
type Handler interface {
	// Granted: the session holds this lease from now on, until a Recall. It is
	// called before the reply that carries the grant is delivered.
	Granted(v meta.VolumeID, g meta.Grant)
	// Recall asks to lower a lease; done is called once, from any goroutine,
	// when nothing cached beyond r.Keep can be seen any more.
	Recall(r meta.Recall, done func())
	// Expired: the session is over and all its leases are void; what was not
	// durable is lost. A new session has begun.
	Expired(err error)
}

// Claimer is a Handler that can tell which leases and locks it holds, for a
// server that was restarted.
type Claimer interface {
	Claims(yield func(v meta.VolumeID, leases []meta.Grant, locks []meta.Lock))
}

// OrphanHandler is a Handler that wants to know when an inode of which the
// session may hold a descriptor lost its last name.
type OrphanHandler interface {
	Orphaned(v meta.VolumeID, ino meta.Ino)
}

// Config says where the server is and who calls.
type Config struct {
	Addrs   []string // "unix:/path" or "host:port", tried in order
	Name    string   // for people, in lists of sessions
	Role    wire.Role
	Handler Handler
	Logger  *slog.Logger
	// Identity of this process, so that a server on the same machine sees at
	// once that it died; filled in by Dial when empty.
	Host  string
	PID   uint32
	Start uint64
}

// retained is a mutation that was answered early: it is sent again if the
// journal never got it.
type retained struct {
	call wire.Call
	seq  meta.Seq
}

// request is a frame that waits for its answer.
type request struct {
	msg    wire.Message
	replay bool // sent again after its early reply; nobody waits
	resent bool // counted in its volume's resent
	done   chan response
}

type response struct {
	t    wire.Type
	body wire.Message
	err  error
}

// volumeState is what the session knows of a volume's journal.
type volumeState struct {
	seen     meta.Seq // largest Seq in a reply
	durable  meta.Seq // largest TDurable
	retained []retained
	// replaying counts replays without an answer: entries of an owner before
	// may have other numbers now.
	replaying int
	// resent counts requests without an answer that an earlier connection was
	// asked, too: their answers may lie before what newer notices cover, so
	// that meanwhile no more than ackHold is acknowledged.
	resent   int
	ackHold  meta.Seq
	cap      []byte
	capUntil time.Time
	capFetch bool
}

// Session is safe for concurrent use.
type Session struct {
	cfg Config
	log *slog.Logger

	// Lock order: mu, then a Sender's own.
	mu       sync.Mutex
	id       meta.SessionID
	cluster  string
	conn     net.Conn
	send     *wire.Sender  // nil while disconnected
	ready    chan struct{} // closed while connected
	pending  map[uint64]*request
	nextReq  uint64
	volumes  map[meta.VolumeID]*volumeState
	servers  map[meta.ServerID]meta.ServerInfo
	gotSrv   chan struct{} // closed once servers is known
	ttl      time.Duration
	closed   bool
	closeErr error

	incarnation uint64
	background  atomic.Uint64
	leaseUntil  atomic.Int64 // monotonic nanoseconds since epoch0
	epoch0      time.Time

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

// Dial opens a session. It tries the addresses until one answers or ctx ends.
// Errors: Unavailable, Version, BadCapability.
func Dial(ctx context.Context, cfg Config) (*Session, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Role == 0 {
		cfg.Role = wire.RoleClient
	}
	if cfg.PID == 0 {
		cfg.Host, cfg.PID, cfg.Start = self()
	}
	s := &Session{
		cfg: cfg, log: cfg.Logger,
		ready:   make(chan struct{}),
		gotSrv:  make(chan struct{}),
		pending: map[uint64]*request{},
		volumes: map[meta.VolumeID]*volumeState{},
		servers: map[meta.ServerID]meta.ServerInfo{},
		epoch0:  time.Now(),
	}
	var b [8]byte
	rand.Read(b[:])
	s.incarnation = binary.LittleEndian.Uint64(b[:])
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	rd, err := s.connect(ctx)
	if err != nil {
		s.cancel(err)
		return nil, err
	}
	s.wg.Go(func() { s.run(rd) })
	s.wg.Go(s.keepAlive)
	return s, nil
}

// ID is the session's number; it changes when the session expired.
func (s *Session) ID() meta.SessionID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.id
}

// Cluster is the id of the cluster that answered.
func (s *Session) Cluster() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cluster
}

// LeaseLeft is how long the session's leases surely hold, on this process's
// monotonic clock, counted from when the last renewal was sent, less a margin
// of an eighth. Zero or less: nothing cached may be believed.
func (s *Session) LeaseLeft() time.Duration {
	return time.Duration(s.leaseUntil.Load()) - time.Since(s.epoch0)
}

func (s *Session) renewed(sent time.Time, ttl time.Duration) {
	until := int64(sent.Sub(s.epoch0) + ttl - ttl/8)
	for {
		old := s.leaseUntil.Load()
		if old >= until || s.leaseUntil.CompareAndSwap(old, until) {
			return
		}
	}
}

func dialAddr(ctx context.Context, addr string) (net.Conn, error) {
	var d net.Dialer
	if p, ok := strings.CutPrefix(addr, "unix:"); ok {
		return d.DialContext(ctx, "unix", p)
	}
	return d.DialContext(ctx, "tcp", addr)
}

// connect dials until one address answers and does the handshake.
func (s *Session) connect(ctx context.Context) (*wire.Reader, error) {
	wait := 10 * time.Millisecond
	for {
		var errs []error
		for _, a := range s.cfg.Addrs {
			rd, err := s.handshake(ctx, a)
			if err == nil {
				return rd, nil
			}
			if k := meta.KindOf(err); k == meta.Version || k == meta.BadCapability || k == meta.AccessDenied {
				return nil, err
			}
			errs = append(errs, fmt.Errorf("%s: %w", a, err))
		}
		select {
		case <-ctx.Done():
			return nil, meta.E("dial metadata server", meta.Unavailable, strings.Join(s.cfg.Addrs, ", "), errors.Join(errs...))
		case <-time.After(wait):
		}
		wait = min(wait*2, 500*time.Millisecond)
	}
}

func (s *Session) handshake(ctx context.Context, addr string) (*wire.Reader, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := dialAddr(ctx, addr)
	if err != nil {
		return nil, err
	}
	deadline, _ := ctx.Deadline()
	conn.SetDeadline(deadline)
	s.mu.Lock()
	id, cluster := s.id, s.cluster
	s.mu.Unlock()
	sent := time.Now()
	hello := wire.Hello{
		Min: wire.MinVersion, Max: wire.Version, Role: s.cfg.Role, Session: id, Name: s.cfg.Name,
		Host: s.cfg.Host, PID: s.cfg.PID, Start: s.cfg.Start, Cluster: cluster,
	}
	fail := func(err error) (*wire.Reader, error) { conn.Close(); return nil, err }
	if _, err := conn.Write(wire.Append(nil, 0, &hello)); err != nil {
		return fail(err)
	}
	rd := wire.NewReader(conn)
	t, _, body, err := rd.Next()
	if err != nil {
		return fail(err)
	}
	var ans wire.Hello
	if t != wire.THello {
		return fail(meta.E("handshake", meta.Protocol, addr, fmt.Errorf("frame type %d in place of hello", t)))
	}
	if err := wire.Decode(body, &ans); err != nil {
		return fail(err)
	}
	if ans.Err != meta.KindOK {
		return fail(meta.E("handshake", ans.Err, addr, errors.New(ans.Detail)))
	}
	conn.SetDeadline(time.Time{})
	rd.Trust()
	ttl := time.Duration(ans.TTL) * time.Millisecond

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fail(meta.E("handshake", meta.Canceled, addr, nil))
	}
	expired := s.id != 0 && ans.Session != s.id
	s.id, s.cluster, s.ttl, s.conn = ans.Session, ans.Cluster, ttl, conn
	s.send = wire.NewSender(conn, nil)
	s.renewed(sent, ttl)
	if expired {
		s.expire()
	} else {
		s.resume(ans.Resumed)
	}
	// The first keep-alive says that claims and replays are complete.
	if s.cfg.Role != wire.RoleChunkServer {
		s.send.Enqueue(0, &wire.KeepAlive{Count: uint64(time.Since(s.epoch0))})
	}
	close(s.ready)
	s.send.Flush()
	return rd, nil
}

// expire gives up everything that belonged to the old session. Caller holds mu.
func (s *Session) expire() {
	err := meta.E("session", meta.SessionExpired, s.cfg.Name, nil)
	for id, r := range s.pending {
		delete(s.pending, id)
		r.done <- response{err: err}
	}
	s.volumes = map[meta.VolumeID]*volumeState{}
	s.log.Warn("the session expired: leases are void, what was not synced is lost")
	if s.cfg.Handler != nil {
		s.cfg.Handler.Expired(err)
	}
}

// resume queues, on a new connection of the same session, what the server may
// have lost: claims when it has no memory of us, then early-replied mutations
// in the order of their replies, then requests without an answer in the order
// in which they were asked. Caller holds mu.
func (s *Session) resume(known bool) {
	if c, ok := s.cfg.Handler.(Claimer); ok && !known {
		c.Claims(func(v meta.VolumeID, leases []meta.Grant, locks []meta.Lock) {
			for len(leases) > 0 || len(locks) > 0 {
				m := wire.Claim{Volume: v}
				n := min(len(leases), 4096)
				m.Leases, leases = leases[:n], leases[n:]
				k := min(len(locks), 4096)
				m.Locks, locks = locks[:k], locks[k:]
				s.send.Enqueue(0, &m)
			}
		})
	}
	// Replays first: what was answered, in the order of the answers, then what
	// an earlier connection was asked again and did not answer.
	vols := slices.Sorted(maps.Keys(s.volumes))
	var replays []*wire.Call
	for _, v := range vols {
		vs := s.volumes[v]
		if vs.resent == 0 {
			vs.ackHold = vs.durable
		}
		vs.replaying, vs.resent = 0, 0
		for i := range vs.retained {
			replays = append(replays, &vs.retained[i].call)
		}
		vs.retained = nil // their replies put them on the list again
	}
	ids := slices.Sorted(maps.Keys(s.pending))
	asked := ids[:0]
	for _, id := range ids {
		if r := s.pending[id]; r.replay {
			replays = append(replays, r.msg.(*wire.Call))
			delete(s.pending, id)
		} else {
			asked = append(asked, id)
		}
	}
	for _, c := range replays {
		c.Replay = true
		s.nextReq++
		s.pending[s.nextReq] = &request{msg: c, replay: true, resent: true, done: make(chan response, 1)}
		s.volume(c.Volume).replaying++
		s.volume(c.Volume).resent++
		s.send.Enqueue(s.nextReq, c)
	}
	// What was never answered is no replay: it was given nothing, and before
	// every session is back it could take what others were given (rule 3). If
	// it was executed after all, its operation id tells.
	for _, id := range asked {
		r := s.pending[id]
		if m, ok := r.msg.(*wire.Sync); ok {
			r.msg = &wire.Sync{Volume: m.Volume, Seq: wire.SyncAll}
		}
		if v, ok := r.volume(); ok {
			r.resent = true
			s.volume(v).resent++
		}
		s.send.Enqueue(id, r.msg)
	}
}

// volume names the volume whose operations a request holds.
func (r *request) volume() (meta.VolumeID, bool) {
	switch m := r.msg.(type) {
	case *wire.Call:
		return m.Volume, true
	case *wire.Batch:
		return m.Calls[0].Volume, true
	}
	return 0, false
}

// run reads until the session is closed, and connects again when it breaks.
func (s *Session) run(rd *wire.Reader) {
	for {
		err := s.read(rd)
		s.mu.Lock()
		s.conn.Close()
		s.send = nil
		s.ready = make(chan struct{})
		closed := s.closed
		s.mu.Unlock()
		if closed || s.ctx.Err() != nil {
			return
		}
		s.log.Warn("connection to the metadata server lost, trying again", "error", err)
		if rd, err = s.connect(s.ctx); err != nil {
			s.fail(err)
			return
		}
		s.log.Info("connected to the metadata server again")
	}
}

// fail ends the session for good.
func (s *Session) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed, s.closeErr = true, err
		s.cancel(err)
	}
	for id, r := range s.pending {
		delete(s.pending, id)
		r.done <- response{err: err}
	}
}

// answer makes the empty message that a frame type carries.
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
	case wire.TBye:
		return new(wire.Bye)
	}
	return nil
}

func (s *Session) read(rd *wire.Reader) error {
	for {
		t, id, body, err := rd.Next()
		if err != nil {
			return err
		}
		switch t {
		case wire.TRecall:
			var m wire.Recall
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.recall(id, &m)
		case wire.TDurable:
			var m wire.Durable
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.durable(&m)
		case wire.TKeepAlive:
			var m wire.KeepAlive
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.renewed(s.epoch0.Add(time.Duration(m.Count)), s.ttl)
		case wire.TServers:
			var m wire.Servers
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			s.mu.Lock()
			clear(s.servers)
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
			s.answered(t, id, m)
		}
	}
}

func (s *Session) recall(id uint64, m *wire.Recall) {
	h := s.cfg.Handler
	if m.Orphan {
		if o, ok := h.(OrphanHandler); ok {
			o.Orphaned(m.Recall.Volume, m.Recall.Ino)
		}
		return
	}
	var once sync.Once
	done := func() {
		once.Do(func() {
			s.mu.Lock()
			snd := s.send
			s.mu.Unlock()
			if snd != nil {
				snd.Send(id, &wire.Recalled{Volume: m.Recall.Volume, Ino: m.Recall.Ino})
			}
		})
	}
	if h == nil {
		done()
		return
	}
	h.Recall(m.Recall, done)
}

func (s *Session) volume(v meta.VolumeID) *volumeState {
	vs := s.volumes[v]
	if vs == nil {
		vs = &volumeState{}
		s.volumes[v] = vs
	}
	return vs
}

func (s *Session) durable(m *wire.Durable) {
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(m.Volume)
	vs.durable = max(vs.durable, m.Seq)
	n := 0
	for n < len(vs.retained) && vs.retained[n].seq <= m.Seq {
		vs.retained[n] = retained{}
		n++
	}
	vs.retained = vs.retained[n:]
	if len(vs.retained) == 0 {
		vs.retained = nil
	}
}

// answered books a reply: what may have to be sent again is kept, grants are
// told, then whoever waits gets it.
func (s *Session) answered(t wire.Type, id uint64, m wire.Message) {
	s.mu.Lock()
	r := s.pending[id]
	delete(s.pending, id)
	if r == nil {
		s.mu.Unlock()
		return
	}
	if r.resent {
		if v, ok := r.volume(); ok {
			s.volume(v).resent--
		}
		r.resent = false
	}
	var v meta.VolumeID
	var grants []meta.Grant
	switch a := m.(type) {
	case *wire.Reply:
		if c, ok := r.msg.(*wire.Call); ok {
			v = c.Volume
			s.retain(c, a)
			if r.replay {
				s.volume(v).replaying--
			}
		}
		grants = a.Grants
		a.Result.Grants = grants
	case *wire.BatchRe:
		b := r.msg.(*wire.Batch)
		for i := range a.Replies {
			if i < len(b.Calls) {
				v = b.Calls[i].Volume
				s.retain(&b.Calls[i], &a.Replies[i])
			}
			grants = append(grants, a.Replies[i].Grants...)
			a.Replies[i].Result.Grants = a.Replies[i].Grants
		}
	}
	s.mu.Unlock()
	if h := s.cfg.Handler; h != nil {
		for _, g := range grants {
			h.Granted(v, g)
		}
	}
	r.done <- response{t: t, body: m}
}

// retain keeps a successful mutation until it is durable, with the values that
// its early reply assigned (rule 3). Caller holds mu.
func (s *Session) retain(c *wire.Call, a *wire.Reply) {
	if a.Seq == 0 || a.Status.Err != meta.KindOK {
		return
	}
	vs := s.volume(c.Volume)
	vs.seen = max(vs.seen, a.Seq)
	if a.Seq <= vs.durable {
		return
	}
	call := *c
	switch o := c.Op.(type) {
	case *meta.Create:
		if !a.Result.Existed {
			n := *o
			n.Ino, n.Time = a.Result.Attr.Ino, a.Result.Attr.Btime
			call.Op = &n
		}
	case *meta.Tmpfile:
		n := *o
		n.Ino, n.Time = a.Result.Attr.Ino, a.Result.Attr.Btime
		call.Op = &n
	}
	vs.retained = append(vs.retained, retained{call: call, seq: a.Seq})
}

func (s *Session) keepAlive() {
	for {
		s.mu.Lock()
		snd, ttl := s.send, s.ttl
		s.mu.Unlock()
		if snd != nil {
			// The count is the time of sending: an echo renews from there.
			snd.Send(0, &wire.KeepAlive{Count: uint64(time.Since(s.epoch0))})
		}
		select {
		case <-s.ctx.Done():
			return
		case <-time.After(max(ttl/4, 50*time.Millisecond)):
		}
	}
}

var requests = sync.Pool{New: func() any { return &request{done: make(chan response, 1)} }}

// roundTrip sends a request and waits for its answer. When ctx ends first the
// server is told, and the answer is still awaited if it must be (mustWait).
func (s *Session) roundTrip(ctx context.Context, m wire.Message, cancelable bool) (wire.Message, error) {
	r := requests.Get().(*request)
	r.msg, r.resent = m, false
	var id uint64
	for {
		s.mu.Lock()
		if s.closed {
			err := s.closeErr
			s.mu.Unlock()
			return nil, err
		}
		if s.send != nil {
			s.nextReq++
			id = s.nextReq
			s.pending[id] = r
			snd := s.send
			snd.Enqueue(id, m)
			s.mu.Unlock()
			snd.Flush()
			break
		}
		ready := s.ready
		s.mu.Unlock()
		select {
		case <-ready:
		case <-ctx.Done():
			return nil, meta.E("call", meta.Interrupted, "", context.Cause(ctx))
		case <-s.ctx.Done():
			return nil, context.Cause(s.ctx)
		}
	}
	var res response
	select {
	case res = <-r.done:
	case <-ctx.Done():
		if cancelable {
			s.mu.Lock()
			if s.send != nil {
				s.send.Enqueue(0, &wire.Cancel{Request: id})
			}
			snd := s.send
			s.mu.Unlock()
			if snd != nil {
				snd.Flush()
			}
			// The server answers a canceled request at once.
			select {
			case res = <-r.done:
			case <-time.After(time.Second):
				s.abandon(id)
				return nil, meta.E("call", meta.Interrupted, "", context.Cause(ctx))
			}
		} else {
			s.abandon(id)
			return nil, meta.E("call", meta.Interrupted, "", context.Cause(ctx))
		}
	}
	r.msg = nil
	requests.Put(r)
	return res.body, res.err
}

// abandon stops waiting for a read; its reply's grants must still be told, so
// the entry stays, with nobody listening.
func (s *Session) abandon(id uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.pending[id]; r != nil {
		s.pending[id] = &request{msg: r.msg, replay: r.replay, resent: r.resent, done: make(chan response, 1)}
	}
}

// Close ends the session in order: everything answered is made durable, the
// server forgets leases and locks.
func (s *Session) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	connected := s.send != nil
	s.mu.Unlock()
	var err error
	if connected {
		_, err = s.roundTrip(ctx, &wire.Bye{}, false)
	}
	s.mu.Lock()
	s.closed, s.closeErr = true, meta.E("session", meta.Canceled, "closed", nil)
	if s.conn != nil {
		s.conn.Close()
	}
	s.cancel(s.closeErr)
	s.mu.Unlock()
	s.wg.Wait()
	s.fail(s.closeErr)
	return err
}
