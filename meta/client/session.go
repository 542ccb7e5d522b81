// Package client owns a program's session with the metadata servers of a
// cluster: connections that are found again when they break, which server owns
// which volume, operations with exactly-once retries, the order of replies,
// grants and recalls, and the leases' clocks.
//
// What a reply answered may not be in the journal yet (an early reply). The
// session keeps every mutation, with the values that its reply assigned, until
// the server says that it is durable, and sends it again to an owner that
// lost it.
//
// A session has one number in the whole cluster and a connection to each server
// that owns a volume it uses. Everything else is the volume's: it is entered at
// its owner, and when the owner changes it is entered again, alone:
//
//	          Enter            Entered: known            claims, replays,
//	          at whom          claims wanted             Back, the rest
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
	"penstock.io/penstock/meta/wire"
)

// Handler hears what owners decide about leases. What it is told of one volume
// comes in the order in which its owner said it; its methods must not block.
type Handler interface {
	// Granted: the session holds this lease from now on, until a Recall. It is
	// called before the reply that carries the grant is delivered.
	Granted(v meta.VolumeID, g meta.Grant)
	// Recall asks to lower a lease; done is called once, from any goroutine,
	// when nothing cached beyond r.Keep can be seen any more.
	Recall(r meta.Recall, done func())
	// Expired: in these volumes the session is over and all its leases are void;
	// what was not durable is lost. It has begun anew there, and each such call
	// begins the volume's next epoch (Session.DoBatch). Nothing is granted before
	// Expired returns.
	Expired(volumes []meta.VolumeID, err error)
}

// Claimer is a Handler that can tell which leases and locks it holds in a
// volume, for an owner that does not know. The session holds its own lock
// meanwhile.
type Claimer interface {
	Claims(v meta.VolumeID) ([]meta.Grant, []meta.Lock)
}

// OrphanHandler is a Handler that wants to know when an inode of which the
// session may hold a descriptor lost its last name.
type OrphanHandler interface {
	Orphaned(v meta.VolumeID, ino meta.Ino)
}

// HoldHandler is a Handler that may hold on to a lease that it is asked for for a
// while only, rather than give up bytes that it can't commit.
type HoldHandler interface {
	// RecallWithin is Recall for one with Within: done tells whether the lease is
	// held still.
	RecallWithin(r meta.Recall, done func(held bool))
}

// LossHandler is a Handler that can tell whoever syncs an inode that changes of
// it are lost.
type LossHandler interface {
	// Lost: of these inodes changes were answered of which it is not known that
	// they are in the journal, and the session is over. Expired follows.
	Lost(v meta.VolumeID, inos []meta.Ino, err error)
}

// LockHandler is a Handler that keeps the locks it will claim.
type LockHandler interface {
	// Locked: the owner set l, or released its range when its type says so. It
	// is called before the reply is delivered.
	Locked(v meta.VolumeID, l meta.Lock)
}

// Config says where the servers are and who calls.
type Config struct {
	Addrs   []string // of some meta servers: "unix:/path" or "host:port"; the others are learnt
	Name    string   // for people, in lists of sessions
	Role    wire.Role
	Handler Handler
	Logger  *slog.Logger
	// Creds are shown to servers reached over TCP; nil: Unix sockets only.
	Creds *peer.Credentials
	// Identity of this process, so that a server on the same machine sees at
	// once that it died; filled in by Dial when empty.
	Host  string
	PID   uint32
	Start uint64
	// Session, unless zero, is a session to go on with in the place of a process
	// that ended: it had entered the volumes in Joined. Generation is above that
	// of every process that had the session before.
	Session    meta.SessionID
	Joined     []meta.VolumeID
	Generation uint32
	// Succeeded: another process may come after this one, so that replies are
	// acknowledged only when what asked for them is over, too; see Begin.
	Succeeded bool
	// AnswerWait bounds how long a server is looked for that takes an administrative
	// request, and how long the answer is waited for to one that a server answers at once
	// (see quick); 0: as long as the caller's context. For people, who would not know
	// what hangs.
	AnswerWait time.Duration
	// Linger asks servers to keep the session for so long after its last renewal,
	// unless others wait for what it holds: another process may go on with it.
	// Shorter than a lease, or 0: it ends with its lease.
	Linger time.Duration
}

// retained is a mutation that was answered early: it is sent again if the
// journal never got it.
type retained struct {
	call wire.Call
	seq  meta.Seq
}

// request is a frame that waits for its answer.
type request struct {
	id       uint64 // of its frame: a new one each time it is sent, so that an old answer is none
	msg      wire.Message
	volume   meta.VolumeID
	ofVolume bool  // else it concerns no volume, and is bound to its connection
	conn     *conn // where it was sent; nil: its volume is not up
	replay   bool  // sent again after its early reply; nobody waits
	resent   bool  // counted in its volume's resent
	sent     bool  // to some server, at least once
	over     bool  // it takes a lock, and was given up
	done     chan response
}

type response struct {
	t    wire.Type
	body wire.Message
	err  error
}

// volumeState is what the session knows of a volume's journal and owner.
type volumeState struct {
	conn    *conn // where the volume is up; nil: its owner is looked for
	routing bool
	hint    string // who may own it
	joined  bool   // an owner knows the session
	epoch   uint64 // 1 more than it has expired
	// refusedAt is the epoch that began when the session was refused last; 1: it never was.
	refusedAt uint64
	route     string // why it is not up, for people

	trouble *wire.Trouble // to be told when it is up
	gaveUp  *wire.GaveUp  // likewise

	seen     meta.Seq // largest Seq in a reply
	durable  meta.Seq // largest TDurable
	retained []retained
	// replaying counts replays without an answer: entries of an owner before
	// may have other numbers now.
	replaying int
	// settling and settled follow durable once what had begun before is over.
	settling meta.Seq
	settled  meta.Seq
	// resent counts requests without an answer that an earlier connection was
	// asked, too: their answers may lie before what newer notices cover, so
	// that meanwhile no more than ackHold is acknowledged.
	resent   int
	ackHold  meta.Seq
	cap      []byte
	capUntil time.Time
	capLife  time.Duration
	capFetch bool

	// unwanted are locks that were granted when nobody waited for them any more.
	unwanted []meta.Lock

	held   uint64 // promised of the volume's quota, and not spent
	serial uint64 // of the last Reserve

	lease *volumeLease
}

// volumeLease is a volume's lease clock: that of the connection where it is up,
// else what the last one had left. It is read without the session's lock.
type volumeLease struct {
	conn   atomic.Pointer[conn]
	frozen atomic.Int64
}

// Session is safe for concurrent use.
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
	failed   map[string]time.Duration // when an address did not answer
	deniedAt time.Duration            // since when servers refuse this identity; 0: they don't
	metas    []wire.MetaServer
	foreign  map[meta.ChunkID]*foreignCap // chunks that clones were seen to lie in
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
	wg     sync.WaitGroup
}

// Dial opens a session. It tries the addresses until one answers or ctx ends.
// Errors: Unavailable, Version, BadCapability, AccessDenied, Invalid.
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
	// An answer to the predecessor may still come: it must not pass for one to us.
	s.nextReq = uint64(cfg.Generation) << 40
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	if _, err := s.anyConn(ctx); err != nil {
		s.fail(err)
		s.wg.Wait()
		return nil, err
	}
	return s, nil
}

// identify fills in who this process is.
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

// Cluster is the id of the cluster that answered.
func (s *Session) Cluster() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cluster
}

// LeaseLeft is how long the session's leases in a volume surely hold, on this
// process's monotonic clock, counted from when the last renewal was sent to the
// volume's owner, less a margin of an eighth. Zero or less: nothing cached may
// be believed.
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

// addrs lists where to ask, those that failed lately at the end. Caller holds mu.
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

// connWait is how long one address may take before another is tried; the
// attempt goes on.
const connWait = 500 * time.Millisecond

// anyConn gives a connection to whichever server answers, rather one that is
// there.
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
			step, cancel := context.WithTimeout(ctx, connWait)
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

// answered books a reply: what may have to be sent again is kept, grants are
// told, then whoever waits gets it.
func (s *Session) answered(c *conn, t wire.Type, id uint64, m wire.Message) {
	s.mu.Lock()
	r := s.pending[id]
	if r == nil || r.conn != c {
		s.mu.Unlock()
		return
	}
	if st := statusOf(m); r.ofVolume && st != nil && st.Err == meta.NotOwner {
		// No answer: whoever owns the volume is asked again.
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
	if unwanted { // what was granted to others of that lock owner is booked
		s.mu.Lock()
		if s.volume(v).conn == c {
			s.giveBack(v)
		}
		s.mu.Unlock()
		c.send.Flush()
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
	call.Reserved, call.Draw = 0, false // a replay is admitted without
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

// patience says what becomes of a request whose ctx ends before it is answered.
type patience uint8

const (
	left     patience = iota // nobody waits for the answer any more
	canceled                 // the server is asked to give it up, which it answers at once if it can
	settled                  // so it is, and the answer is waited for: it may be done already
)

// roundTrip sends a request to a volume's owner and waits for its answer.
func (s *Session) roundTrip(ctx context.Context, v meta.VolumeID, m wire.Message, how patience) (wire.Message, error) {
	return s.roundTripAfter(ctx, v, m, how, func(*volumeState) error { return nil })
}

// roundTripAfter is roundTrip for a request to which last, under mu, puts what
// must agree with what is sent before and after it, unless it refuses the
// request.
func (s *Session) roundTripAfter(ctx context.Context, v meta.VolumeID, m wire.Message, how patience, last func(*volumeState) error) (wire.Message, error) {
	r, err := s.post(v, m, last)
	if err != nil {
		return nil, err
	}
	return s.await(ctx, r, how, nil)
}

// post sends a request to a volume's owner, or has it wait for one; see roundTripAfter.
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

// ask sends a request that concerns no volume to one server. Errors:
// Unavailable (the connection broke), Interrupted.
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

// book gives a request its number. Caller holds mu.
func (s *Session) book(r *request) {
	s.nextReq++
	r.id = s.nextReq
	s.pending[r.id] = r
}

// put sends a request on its connection; what the server there is too old for
// ends at once. Caller holds mu.
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

// killedWait is how long an answer is waited for that the server gives at once.
const killedWait = time.Second

// await waits for the answer to a request, as patiently as how says. over, unless nil, is
// called once, when nothing comes of the request any more.
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
			res = <-r.done // that the session ends is an answer, too
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

// whyNot says for people why a request has no answer, if its volume is not up.
func (s *Session) whyNot(r *request) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if vs := s.volumes[r.volume]; r.ofVolume && vs != nil && vs.conn == nil {
		return vs.route
	}
	return ""
}

// abandon stops waiting for an answer; its grants must still be told, so the entry
// stays, with nobody listening but then. For locks see locks.go.
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
			s.wg.Go(func() { // there is an answer at the latest when the session ends
				<-n.done
				then()
			})
		}
	}
	s.mu.Unlock()
	if !waits && then != nil {
		<-r.done // it is being answered
		then()
	}
}

// Leave lets go of the session without ending it: another process goes on with
// it, or it expires.
func (s *Session) Leave() {
	s.fail(meta.E("session", meta.Canceled, "left", nil))
	s.wg.Wait()
}

// Close ends the session in order: everything answered is made durable, the
// servers forget leases and locks.
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
