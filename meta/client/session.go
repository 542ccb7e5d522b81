// Package client implements a program's session with the metadata servers of a cluster:
// connections made again after they break, the owner of each volume, operations with
// exactly-once retries, the order of replies, grants and recalls, and the leases' clocks.
//
// A reply may arrive before its mutation is in the journal (an early reply). The session keeps
// every mutation, with the values assigned in the reply, until the server reports the mutation
// durable. If an owner lost the mutation, the session sends the mutation again.
//
// A session has one number in the whole cluster and a connection to each owner of a used
// volume. All other state is kept per volume: the session enters the volume at its owner. When
// the owner changes, the session enters only this volume again:
//
//	          Enter            Entered: known            claims, replays,
//	          at a server      claims wanted             Back, the rest
//	looking ----------> asked ------------------> known ----------------> up
//	   ^  ^               | NotOwner, silence       ^                      |
//	   |  '---------------'                         | Entered: not known   |
//	   |                                            | void it (Expired)    |
//	   '------------ Moved, NotOwner, connection lost ---------------------'
package client

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/task"
	"penstock.io/penstock/meta/wire"
)

// Handler receives the owners' decisions about leases. Calls for one volume come in the order
// of the owner's messages. The methods must not block.
type Handler interface {
	// Granted: the session holds lease g until a Recall. The session calls Granted before it
	// delivers the reply carrying the grant.
	Granted(v meta.VolumeID, g meta.Grant)
	// Recall asks the handler to lower a lease. The handler calls done once, from any
	// goroutine, when no reader can see data cached beyond r.Keep any more.
	Recall(r meta.Recall, done func())
	// Expired: the session ended in these volumes. All its leases there are void, and changes
	// not yet durable are lost. The session has begun anew in the volumes; each such call
	// begins a volume's next epoch (Session.DoBatch). No lease is granted before Expired
	// returns.
	Expired(volumes []meta.VolumeID, err error)
}

// Claimer is a Handler listing its leases and locks in a volume, for an owner that does not
// know them. The session holds mu during the call.
type Claimer interface {
	Claims(v meta.VolumeID) ([]meta.Grant, []meta.Lock)
}

// OrphanHandler is a Handler notified when an inode loses its last name while the session may
// hold a descriptor of the inode.
type OrphanHandler interface {
	Orphaned(v meta.VolumeID, ino meta.Ino)
}

// HoldHandler is a Handler that may keep a recalled lease for a limited time, rather than
// discard uncommittable bytes.
type HoldHandler interface {
	// RecallWithin is Recall for a recall with Within. held tells the owner that the handler
	// still holds the lease.
	RecallWithin(r meta.Recall, done func(held bool))
}

// GrowthHandler is a Handler that appends to files, and tells how long a file is without giving
// its lease back. For all other handlers, the session answers that the owner must recall.
type GrowthHandler interface {
	// Growth syncs what was appended to a file and calls done once. It is called like Recall,
	// and must not block.
	Growth(v meta.VolumeID, ino meta.Ino, done func(meta.Growth))
}

// LossHandler is a Handler that reports lost changes of an inode to the callers that sync the
// inode.
type LossHandler interface {
	// Lost: the session ended, and answered changes of these inodes may not be in the journal.
	// Expired follows.
	Lost(v meta.VolumeID, inos []meta.Ino, err error)
}

// LockHandler is a Handler recording locks for claims at another owner.
type LockHandler interface {
	// Locked: the owner set l or, if l.Type is LockUnlock, released the range of l. The
	// session calls Locked before it delivers the reply.
	Locked(v meta.VolumeID, l meta.Lock)
}

// Config describes the servers and the caller.
type Config struct {
	Addrs   []string // of some meta servers: "unix:/path" or "host:port"; the servers announce the others
	Name    string   // for people, in lists of sessions
	Role    wire.Role
	Handler Handler
	Logger  *slog.Logger
	// Creds are shown to servers reached over TCP; nil: Unix sockets only.
	Creds *peer.Credentials
	// Host, PID and Start identify this process, so that a server on the same machine notices
	// the death of the process at once. Dial sets all three if PID is zero.
	Host  string
	PID   uint32
	Start uint64
	// Session, unless zero, is the session of an ended process, continued by this process. The
	// ended process had entered the volumes in Joined. Generation is larger than the
	// Generation of every process that had the session before.
	Session    meta.SessionID
	Joined     []meta.VolumeID
	Generation uint32
	// Succeeded: another process may continue the session after this process. The session then
	// acknowledges a reply only when the kernel request behind the operation has ended, too;
	// see Begin.
	Succeeded bool
	// AnswerWait bounds the search for a server for an administrative request, and the wait
	// for the answer to a quick request (see quick). 0: only the caller's context bounds both.
	// AnswerWait is for commands run by people: the error names the server that does not
	// answer.
	AnswerWait time.Duration
	// Linger asks servers to keep the session for so long after its last renewal, unless other
	// sessions wait for its leases or locks: another process may continue the session. If
	// Linger is shorter than a lease, or 0, the session ends with its lease.
	Linger time.Duration
	// Streams: the client serves streams, and changes files with meta.FlagStream.
	Streams bool
}

// retained is a mutation with an early reply, sent again if the journal never got the
// mutation.
type retained struct {
	call wire.Call
	seq  meta.Seq
}

// request is a frame waiting for its answer.
type request struct {
	id       uint64 // id of the frame, new at each sending: a late answer to an older id is ignored
	msg      wire.Message
	volume   meta.VolumeID
	ofVolume bool  // false: the request concerns no volume and is bound to its connection
	conn     *conn // carries the request; nil: the volume is not up
	replay   bool  // sent again after its early reply; no caller waits
	resent   bool  // counted in volumeState.resent
	sent     bool  // to some server, at least once
	over     bool  // a lock request abandoned by its caller
	done     chan response
}

type response struct {
	t    wire.Type
	body wire.Message
	err  error
}

// volumeState is the session's knowledge of a volume's journal and owner.
type volumeState struct {
	conn    *conn // to the owner if the volume is up; nil: the session looks for the owner
	routing bool
	hint    string // address of the probable owner
	joined  bool   // an owner knows the session
	epoch   uint64 // 1 + number of expiries
	// refusedAt is the epoch that began at the last refusal; 1: no refusal yet.
	refusedAt uint64
	route     string // why the volume is not up, for people

	trouble *wire.Trouble // to be sent when the volume is up
	gaveUp  *wire.GaveUp  // likewise

	seen     meta.Seq // largest Seq in a reply
	durable  meta.Seq // largest TDurable
	retained []retained
	// replaying counts replays without an answer: at the new owner the journal entries may
	// have other numbers.
	replaying int
	// settling and settled follow durable once every request begun before has ended.
	settling meta.Seq
	settled  meta.Seq
	// resent counts unanswered requests that an earlier connection carried, too. Newer durable
	// notices may cover the answers to such requests, so the session acknowledges no more than
	// ackHold meanwhile.
	resent   int
	ackHold  meta.Seq
	cap      []byte
	capUntil time.Time
	capLife  time.Duration
	capFetch bool

	// unwanted are locks granted after their callers gave up.
	unwanted []meta.Lock

	held   uint64 // promised bytes of the volume's quota, not spent
	serial uint64 // of the last Reserve

	lease *volumeLease
}

// volumeLease is a volume's lease clock: the clock of the connection where the volume is up,
// else the end of the lease on the last connection. LeaseLeft reads it without the session's
// mutex.
type volumeLease struct {
	conn   atomic.Pointer[conn]
	frozen atomic.Int64
}

// Session is a program's session with a cluster, safe for concurrent use.
type Session struct {
	cfg Config
	log *slog.Logger
	id  meta.SessionID

	// Lock order: mu, then a Sender's own.
	mu       sync.Mutex
	cluster  string
	conns    map[string]*conn // by the server's own address
	alias    map[string]string
	attempts map[string]*attempt
	failed   map[string]time.Duration // time of an address's last failure
	deniedAt time.Duration            // since when servers refuse this identity; 0: no refusal
	metas    []wire.MetaServer
	foreign  map[meta.ChunkID]*foreignCap // chunks holding files of clones
	pending  map[uint64]*request
	nextReq  uint64
	volumes  map[meta.VolumeID]*volumeState
	servers  map[meta.ServerID]meta.ServerInfo
	gotSrv   chan struct{} // closed once servers is known
	closed   bool
	closeErr error

	leases      sync.Map // meta.VolumeID to *volumeLease
	incarnation uint64
	background  atomic.Uint64
	begun       begun
	born        time.Duration // on the clock of now

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     task.Group
}

// Dial opens a session. Dial tries the addresses until a server answers or ctx ends. Errors:
// Unavailable, Version, BadCapability, AccessDenied, Invalid.
func Dial(ctx context.Context, cfg Config) (*Session, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Role == 0 {
		cfg.Role = wire.RoleClient
	}
	cfg.identify()
	s := &Session{
		cfg: cfg, log: cfg.Logger,
		gotSrv:   make(chan struct{}),
		conns:    map[string]*conn{},
		alias:    map[string]string{},
		attempts: map[string]*attempt{},
		failed:   map[string]time.Duration{},
		pending:  map[uint64]*request{},
		volumes:  map[meta.VolumeID]*volumeState{},
		servers:  map[meta.ServerID]meta.ServerInfo{},
	}
	var b [16]byte
	rand.Read(b[:])
	s.incarnation = binary.LittleEndian.Uint64(b[:])
	s.born = now()
	s.id = meta.SessionID(binary.LittleEndian.Uint64(b[8:]) | 1)
	if cfg.Session != 0 {
		s.id = cfg.Session
		for _, v := range cfg.Joined {
			s.volume(v).joined = true
		}
	}
	// A server may still answer the predecessor: such an answer must not match a request of
	// this process.
	s.nextReq = uint64(cfg.Generation) << 40
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	if _, err := s.anyConn(ctx); err != nil {
		s.fail(err)
		s.wg.Wait()
		return nil, err
	}
	return s, nil
}

// identify fills in the identity of this process.
func (c *Config) identify() {
	if c.PID != 0 {
		return
	}
	if p, err := process.Self(); err == nil {
		c.Host, c.PID, c.Start = p.Space(), uint32(p.PID), p.Start
	}
}

// ID is the session's number in the whole cluster.
func (s *Session) ID() meta.SessionID { return s.id }

// Cluster is the id of the answering cluster.
func (s *Session) Cluster() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cluster
}

// LeaseLeft is how long the session's leases in a volume surely hold, on this process's
// monotonic clock, counted from the sending of the last renewal to the volume's owner, less a
// margin of an eighth. If LeaseLeft is zero or less, cached data may be stale.
func (s *Session) LeaseLeft(v meta.VolumeID) time.Duration {
	x, ok := s.leases.Load(v)
	if !ok {
		return 0
	}
	l := x.(*volumeLease)
	if c := l.conn.Load(); c != nil {
		return c.left()
	}
	return time.Duration(l.frozen.Load()) - process.Recent()
}

// addrs lists the addresses to ask; addresses that failed within the last second come last.
// The caller holds mu.
func (s *Session) addrs(first ...string) (l []string) {
	seen := map[string]bool{"": true}
	var late []string
	add := func(a string) {
		name := a
		if c, ok := s.alias[a]; ok {
			name = c
		}
		if seen[name] || seen[a] {
			return
		}
		seen[a], seen[name] = true, true
		if at, ok := s.failed[a]; ok && now()-at < time.Second {
			late = append(late, a)
			return
		}
		l = append(l, a)
	}
	for _, a := range first {
		add(a)
	}
	for _, m := range s.metas {
		add(m.Addr)
	}
	for _, a := range s.cfg.Addrs {
		add(a)
	}
	return append(l, late...)
}

// connWait is how long the session waits for one address before trying another; the attempt
// continues.
const connWait = 500 * time.Millisecond

// forConnection bounds a wait for a connection by connWait.
func forConnection(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, connWait, fmt.Errorf("no connection within %v", connWait))
}

// anyConn returns a connection to any server, an existing connection if possible.
func (s *Session) anyConn(ctx context.Context) (*conn, error) {
	wait := 10 * time.Millisecond
	for {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return nil, s.closeErr
		}
		for _, c := range s.conns {
			if c.left() > 0 {
				s.mu.Unlock()
				return c, nil
			}
		}
		all := s.addrs()
		s.mu.Unlock()
		var errs []error
		no := 0
		for _, a := range all {
			step, cancel := forConnection(ctx)
			c, err := s.connTo(step, a)
			cancel()
			if err == nil {
				return c, nil
			}
			if refused(err) {
				no++
			}
			errs = append(errs, fmt.Errorf("%s: %w", a, err))
		}
		if no > 0 && no == len(errs) {
			return nil, errs[0]
		}
		select {
		case <-ctx.Done():
			return nil, meta.E("dial metadata server", meta.Unavailable, strings.Join(all, ", "), errors.Join(errs...))
		case <-s.ctx.Done():
			return nil, context.Cause(s.ctx)
		case <-time.After(wait):
		}
		wait = min(wait*2, 500*time.Millisecond)
	}
}

// fail ends the session for good.
func (s *Session) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.closed, s.closeErr = true, err
	}
	s.cancel(err)
	for _, c := range s.conns {
		c.nc.Close()
	}
	for id, r := range s.pending {
		delete(s.pending, id)
		r.done <- response{err: err}
	}
}

func (s *Session) volume(v meta.VolumeID) *volumeState {
	vs := s.volumes[v]
	if vs == nil {
		vs = &volumeState{lease: &volumeLease{}, epoch: 1, refusedAt: 1, serial: uint64(s.cfg.Generation) << 32}
		s.volumes[v] = vs
		s.leases.Store(v, vs.lease)
	}
	return vs
}

func (s *Session) durable(c *conn, m *wire.Durable) {
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(m.Volume)
	if vs.conn != c {
		return
	}
	vs.durable = max(vs.durable, m.Seq)
	if s.cfg.Succeeded {
		s.settle()
	}
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

// answered books an answer: it retains mutations that may have to be sent again, passes grants
// to the handler, then delivers the answer to the waiting caller.
func (s *Session) answered(c *conn, t wire.Type, id uint64, m wire.Message) {
	s.mu.Lock()
	r := s.pending[id]
	if r == nil || r.conn != c {
		s.mu.Unlock()
		return
	}
	if st := statusOf(m); r.ofVolume && st != nil && st.Err == meta.NotOwner {
		// NotOwner is no answer: the session repeats the request at the present owner.
		r.conn = nil
		s.leave(r.volume, c, st.Subject)
		s.mu.Unlock()
		return
	}
	delete(s.pending, id)
	v := r.volume
	if r.resent {
		s.volume(v).resent--
		r.resent = false
	}
	var grants []meta.Grant
	var lock *wire.Lock
	unwanted := false
	switch a := m.(type) {
	case *wire.LockRe:
		l := r.msg.(*wire.Lock)
		vs := s.volume(v)
		switch {
		case a.Status.Err != meta.KindOK || l.Test || l.DropOwner:
		case r.over:
			vs.unwanted = append(vs.unwanted, l.Lock)
		default:
			lock = l
		}
		unwanted = len(vs.unwanted) > 0
	case *wire.Reserved:
		s.volume(v).held += a.Granted
		if !a.Metered && a.Status.Err == meta.KindOK {
			s.volume(v).held = 0
		}
	case *wire.Reply:
		if call, ok := r.msg.(*wire.Call); ok {
			s.volume(v).spent(call, a)
			s.retain(call, a)
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
				s.volume(v).spent(&b.Calls[i], &a.Replies[i])
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
		if l, ok := h.(LockHandler); ok && lock != nil {
			l.Locked(v, lock.Lock)
		}
	}
	if unwanted { // locks granted to other requests of the lock owner are booked by now
		s.mu.Lock()
		if s.volume(v).conn == c {
			s.giveBack(v)
		}
		s.mu.Unlock()
		c.send.Flush()
	}
	r.done <- response{t: t, body: m}
}

// retain keeps a successful mutation until it is durable, with the values assigned in its
// early reply (rule 3). The caller holds mu.
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
	call.Reserved, call.Draw = 0, false // the owner admits a replay without a promise
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

var requests = sync.Pool{New: func() any { return &request{done: make(chan response, 1)} }}

// patience selects the handling of a request whose ctx ends before the answer.
type patience uint8

const (
	left     patience = iota // the caller no longer waits for the answer
	canceled                 // the server is asked to cancel, and answers at once if it can
	settled                  // as canceled, yet the caller waits for the answer: the request may be executed already
)

// roundTrip sends a request to a volume's owner and waits for the answer.
func (s *Session) roundTrip(ctx context.Context, v meta.VolumeID, m wire.Message, how patience) (wire.Message, error) {
	return s.roundTripAfter(ctx, v, m, how, func(*volumeState) error { return nil })
}

// roundTripAfter is roundTrip with a function last, called under mu just before the request is
// queued. last completes the fields that must agree with the requests sent before and after,
// or refuses the request.
func (s *Session) roundTripAfter(ctx context.Context, v meta.VolumeID, m wire.Message, how patience, last func(*volumeState) error) (wire.Message, error) {
	r, err := s.post(v, m, last)
	if err != nil {
		return nil, err
	}
	return s.await(ctx, r, how, nil)
}

// post sends a request to a volume's owner, or queues the request until the owner is found;
// see roundTripAfter.
func (s *Session) post(v meta.VolumeID, m wire.Message, last func(*volumeState) error) (*request, error) {
	r := requests.Get().(*request)
	*r = request{msg: m, volume: v, ofVolume: true, done: r.done}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, s.closeErr
	}
	vs := s.volume(v)
	if err := last(vs); err != nil {
		s.mu.Unlock()
		r.msg = nil
		requests.Put(r)
		return nil, err
	}
	s.book(r)
	var snd *wire.Sender
	if vs.conn != nil {
		r.conn, r.sent = vs.conn, true
		snd = vs.conn.send
		s.put(r)
	} else {
		s.look(v)
	}
	s.mu.Unlock()
	if snd != nil {
		snd.Flush()
	}
	return r, nil
}

// ask sends a request without a volume to one server. Errors: Unavailable (the connection
// broke), Interrupted.
func (s *Session) ask(ctx context.Context, c *conn, m wire.Message) (wire.Message, error) {
	r := requests.Get().(*request)
	*r = request{msg: m, conn: c, sent: true, done: r.done}
	s.mu.Lock()
	if s.closed || s.conns[c.addr] != c {
		defer s.mu.Unlock()
		if s.closed {
			return nil, s.closeErr
		}
		return nil, meta.E("call", meta.Unavailable, c.addr, errLost)
	}
	s.book(r)
	s.put(r)
	s.mu.Unlock()
	c.send.Flush()
	return s.await(ctx, r, left, nil)
}

// book numbers a request and adds it to pending. The caller holds mu.
func (s *Session) book(r *request) {
	s.nextReq++
	r.id = s.nextReq
	s.pending[r.id] = r
}

// put queues a request on its connection. A request whose frame would be longer than
// wire.MaxFrame fails at once. The caller holds mu.
func (s *Session) put(r *request) {
	if err := r.conn.send.Enqueue(r.id, r.msg); err != nil {
		delete(s.pending, r.id)
		if r.resent {
			s.volume(r.volume).resent--
		}
		if r.replay {
			s.volume(r.volume).replaying--
		}
		r.done <- response{err: err}
	}
}

// killedWait is how long a caller waits for the server's immediate answer to a cancel.
const killedWait = time.Second

// await waits for the answer to a request; how selects the handling of an early end of ctx.
// over, unless nil, is called once, when no reply and no grant of the request can arrive any
// more.
func (s *Session) await(ctx context.Context, r *request, how patience, over func()) (wire.Message, error) {
	var res response
	select {
	case res = <-r.done:
	case <-ctx.Done():
		interrupted := func() error {
			return meta.E("call", meta.Interrupted, s.whyNot(r), context.Cause(ctx))
		}
		if how == left {
			s.abandon(r, over)
			return nil, interrupted()
		}
		s.mu.Lock()
		if !r.sent {
			if s.pending[r.id] == r {
				delete(s.pending, r.id)
				s.mu.Unlock()
				if over != nil {
					over()
				}
				return nil, interrupted()
			}
		}
		c := r.conn
		if c != nil {
			c.send.Enqueue(0, &wire.Cancel{Request: r.id})
		}
		s.mu.Unlock()
		if c != nil {
			c.send.Flush()
		}
		if how == settled {
			res = <-r.done // the end of the session is an answer, too
			break
		}
		select {
		case res = <-r.done:
		case <-time.After(killedWait):
			s.abandon(r, over)
			return nil, interrupted()
		}
	}
	if over != nil {
		over()
	}
	r.msg = nil
	requests.Put(r)
	return res.body, res.err
}

// whyNot explains for people why a request has no answer, if its volume is not up.
func (s *Session) whyNot(r *request) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if vs := s.volumes[r.volume]; r.ofVolume && vs != nil && vs.conn == nil {
		return vs.route
	}
	return ""
}

// abandon stops waiting for an answer. The session must still pass the answer's grants to the
// handler, so a pending entry stays; only then is called at the answer. For locks see
// locks.go.
func (s *Session) abandon(r *request, then func()) {
	s.mu.Lock()
	waits := s.pending[r.id] == r
	_, lock := taking(r.msg)
	switch {
	case !waits:
	case lock && !r.sent:
		delete(s.pending, r.id)
	default:
		n := *r
		n.done, n.over = make(chan response, 1), lock
		s.pending[r.id] = &n
		if then != nil {
			s.wg.Go(func() { // an answer comes at the latest when the session ends
				<-n.done
				then()
			})
		}
	}
	s.mu.Unlock()
	if !waits && then != nil {
		<-r.done // the answer is being delivered
		then()
	}
}

// Leave stops using the session without ending it: another process continues the session, or
// the session expires.
func (s *Session) Leave() {
	s.fail(meta.E("session", meta.Canceled, "left", nil))
	s.wg.Wait()
}

// Close ends the session in order: the servers make every answered change durable and drop the
// session's leases and locks.
func (s *Session) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	var conns []*conn
	for _, c := range s.conns {
		conns = append(conns, c)
	}
	s.mu.Unlock()
	var wg sync.WaitGroup
	errs := make([]error, len(conns))
	for i, c := range conns {
		wg.Go(func() { _, errs[i] = s.ask(ctx, c, &wire.Bye{}) })
	}
	wg.Wait()
	s.fail(meta.E("session", meta.Canceled, "closed", nil))
	s.wg.Wait()
	return errors.Join(errs...)
}
