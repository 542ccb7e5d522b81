package client

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// BatchOp is an operation of a batch.
type BatchOp struct {
	ID   meta.OpID
	Op   meta.Op
	Want meta.LeaseMode
	At   meta.Generation // a read at a snapshot; zero: the live volume
	// Reserved, Draw: see wire.Call.
	Reserved uint64
	Draw     bool
}

// NextOp makes an operation id for work that no kernel request caused.
func (s *Session) NextOp() meta.OpID {
	return meta.OpID{Incarnation: s.incarnation, Unique: s.background.Add(1), Step: meta.BackgroundStep}
}

func (s *Session) ack(v meta.VolumeID) meta.Seq {
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(v)
	// The server sends replies before the durable notice covering them, so the session has
	// received every reply up to durable, except replies lost with a connection.
	ack := vs.durable
	if s.cfg.Succeeded {
		ack = vs.settled
	}
	if vs.resent > 0 {
		ack = min(ack, vs.ackHold)
	}
	return ack
}

// Do runs an operation. A mutation needs an id; Do makes one if id is zero. The reply may be
// early: Sync waits for the journal. want asks for a lease on the inodes of the result.
func (s *Session) Do(ctx context.Context, v meta.VolumeID, id meta.OpID, op meta.Op, want meta.LeaseMode) (*meta.Result, error) {
	return s.do(ctx, v, AnyEpoch, id, op, want, canceled, nil)
}

// DoThrough is Do for an operation sent in one epoch only (see DoBatch), and for a caller that
// must know the outcome of a change. If ctx ends before the reply to a mutation, DoThrough
// asks the owner to cancel the mutation and still waits for the answer; without an answer
// DoThrough returns only when the session ends. If ctx ends before the reply to a read,
// DoThrough returns at once. over, if not nil, is called once, when no reply and no grant of
// the operation can arrive any more: before DoThrough returns or, for a read that DoThrough
// did not wait for, later by a goroutine of the session. over must not block. Errors: as Do,
// and SessionExpired.
func (s *Session) DoThrough(ctx context.Context, v meta.VolumeID, epoch uint64, id meta.OpID, op meta.Op, want meta.LeaseMode, over func()) (*meta.Result, error) {
	how := canceled
	if op.Code().Mutates() {
		how = settled
	}
	return s.do(ctx, v, epoch, id, op, want, how, over)
}

func (s *Session) do(ctx context.Context, v meta.VolumeID, epoch uint64, id meta.OpID, op meta.Op, want meta.LeaseMode, how patience, over func()) (*meta.Result, error) {
	if op.Code().Mutates() && id.IsZero() {
		id = s.NextOp()
	}
	c := &wire.Call{Volume: v, ID: id, Want: want, Ack: s.ack(v), Op: op}
	r, err := s.post(v, c, func(vs *volumeState) error {
		if epoch != AnyEpoch && epoch != vs.epoch {
			return meta.E("call", meta.SessionExpired, s.cfg.Name, fmt.Errorf("in volume %d, since this was begun", v))
		}
		return nil
	})
	if err != nil {
		if over != nil {
			over()
		}
		return nil, err
	}
	m, err := s.await(ctx, r, how, over)
	if err != nil {
		return nil, err
	}
	re := m.(*wire.Reply)
	return &re.Result, re.Status.Error()
}

// DoAt runs a read at a snapshot; a zero at means the live volume. The read takes no lease.
// Errors: as of the operation; NoSuchSnapshot, ReadOnly (op is no read).
func (s *Session) DoAt(ctx context.Context, v meta.VolumeID, at meta.Generation, op meta.Op) (*meta.Result, error) {
	if op.Code().Mutates() {
		return nil, meta.E("call", meta.ReadOnly, "", errors.New("snapshots can't be changed"))
	}
	m, err := s.roundTrip(ctx, v, &wire.Call{Volume: v, Ack: s.ack(v), At: at, Op: op}, left)
	if err != nil {
		return nil, err
	}
	r := m.(*wire.Reply)
	return &r.Result, r.Status.Error()
}

// AnyEpoch means the volume's current epoch when the request is sent.
const AnyEpoch = 0

// MaxBatch is the largest number of operations in a batch.
const MaxBatch = 1024

// DoBatch runs operations of one volume in order. An operation runs also if the operation
// before failed. The third result is an error if the server gave no answer at all.
//
// The caller built the operations from state of one epoch of the session in the volume. The
// first epoch is 1; each Handler.Expired adds 1. Unless epoch is AnyEpoch, the session neither
// sends nor repeats the operations in another epoch: the caller's cached state was dropped
// when the epoch ended, and other sessions may have changed the same files. Errors:
// SessionExpired.
func (s *Session) DoBatch(ctx context.Context, v meta.VolumeID, epoch uint64, ops []BatchOp) ([]meta.Result, []error, error) {
	results := make([]meta.Result, 0, len(ops))
	errs := make([]error, 0, len(ops))
	for len(ops) > 0 {
		n := min(len(ops), MaxBatch)
		b := &wire.Batch{Calls: make([]wire.Call, n)}
		ack := s.ack(v)
		for i, o := range ops[:n] {
			if o.ID.IsZero() && o.Op.Code().Mutates() {
				o.ID = s.NextOp()
			}
			b.Calls[i] = wire.Call{Volume: v, ID: o.ID, Want: o.Want, Ack: ack, At: o.At, Reserved: o.Reserved, Draw: o.Draw, Op: o.Op}
		}
		ops = ops[n:]
		m, err := s.roundTripAfter(ctx, v, b, left, func(vs *volumeState) error {
			if epoch != AnyEpoch && epoch != vs.epoch {
				return meta.E("batch", meta.SessionExpired, s.cfg.Name, fmt.Errorf("in volume %d, since this was begun", v))
			}
			return nil
		})
		if err != nil {
			return results, errs, err
		}
		a, ok := m.(*wire.BatchRe)
		if !ok || len(a.Replies) != n {
			if re, isReply := m.(*wire.Reply); isReply && re.Status.Err != meta.KindOK {
				return results, errs, re.Status.Error()
			}
			return results, errs, meta.E("batch", meta.Protocol, "", nil)
		}
		for i := range a.Replies {
			results = append(results, a.Replies[i].Result)
			errs = append(errs, a.Replies[i].Status.Error())
		}
	}
	return results, errs, nil
}

// Sync returns when every reply received before on this volume is in the journal.
func (s *Session) Sync(ctx context.Context, v meta.VolumeID) error {
	s.mu.Lock()
	vs := s.volume(v)
	seen, durable := vs.seen, vs.durable
	if vs.replaying > 0 {
		seen = wire.SyncAll
	}
	s.mu.Unlock()
	if seen <= durable {
		return nil
	}
	ask := &wire.Sync{Volume: v}
	m, err := s.roundTripAfter(ctx, v, ask, left, func(vs *volumeState) error {
		// The volume may have another owner by now.
		if ask.Seq = vs.seen; vs.replaying > 0 {
			ask.Seq = wire.SyncAll
		}
		return nil
	})
	if err != nil {
		return err
	}
	return m.(*wire.Reply).Status.Error()
}

// Durable reports whether every reply received so far on the volume is known to be in the
// journal.
func (s *Session) Durable(v meta.VolumeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(v)
	return vs.seen <= vs.durable && vs.replaying == 0
}

// AllocChunks asks for n open chunks, journaled before the answer.
// Errors: NoSpace, QuotaExceeded, Unavailable (no chunk server).
func (s *Session) AllocChunks(ctx context.Context, v meta.VolumeID, n int, own bool) ([]meta.ChunkGrant, error) {
	asked := meta.Time(time.Now().UnixNano())
	m, err := s.roundTrip(ctx, v, &wire.Alloc{Volume: v, ID: s.NextOp(), N: uint32(n), Own: own}, left)
	if err != nil {
		return nil, err
	}
	g, ok := m.(*wire.Grants)
	if !ok {
		return nil, m.(*wire.Reply).Status.Error()
	}
	for i := range g.Grants {
		g.Grants[i].Asked = asked
	}
	return g.Grants, g.Status.Error()
}

// AppendCap renews the capability to append to a chunk of this session, and returns the
// capability and its lifetime. Errors: Sealed, NoSuchChunk, NotPermitted.
func (s *Session) AppendCap(ctx context.Context, id meta.ChunkID) ([]byte, time.Duration, error) {
	m, err := s.roundTrip(ctx, id.Volume, &wire.Caps{Volume: id.Volume, Chunk: id}, left)
	if err != nil {
		return nil, 0, err
	}
	r, ok := m.(*wire.CapsRe)
	if !ok {
		return nil, 0, m.(*wire.Reply).Status.Error()
	}
	return r.Cap, time.Duration(r.TTL) * time.Millisecond, r.Status.Error()
}

// Trouble reports to the owner the chunk servers that could not be reached and the replicas
// that failed verification. Trouble does not wait. The owner takes the report into account
// when it answers later requests.
func (s *Session) Trouble(v meta.VolumeID, away []meta.ServerID, bad []wire.BadReplica) {
	m := &wire.Trouble{Volume: v, Away: away, Bad: bad}
	s.mu.Lock()
	if vs := s.volume(v); vs.conn == nil {
		vs.trouble = m
	}
	s.mu.Unlock()
	s.tell(v, m)
}

// GaveUp reports to the owner how many files and bytes of non-durable writes an operator
// discarded. GaveUp does not wait. If the volume has no owner, the session sends the sum of
// such reports when it enters the volume at the next owner.
func (s *Session) GaveUp(v meta.VolumeID, files, bytes uint64) {
	m := &wire.GaveUp{Volume: v, Files: files, Bytes: bytes}
	s.mu.Lock()
	if vs := s.volume(v); vs.conn == nil {
		if was := vs.gaveUp; was != nil {
			m.Files, m.Bytes = m.Files+was.Files, m.Bytes+was.Bytes
		}
		vs.gaveUp = m
	}
	s.mu.Unlock()
	s.tell(v, m)
}

// tell sends a message without an answer to a volume's owner. If the volume is not up, tell
// drops the message: the next owner has no state for the message to act on.
func (s *Session) tell(v meta.VolumeID, m wire.Message) {
	s.mu.Lock()
	var snd *wire.Sender
	if vs := s.volumes[v]; vs != nil && vs.conn != nil {
		snd = vs.conn.send
		snd.Enqueue(0, m) // under mu: keeps the order with requests and claims
	}
	s.mu.Unlock()
	if snd != nil {
		snd.Flush()
	}
}

// SealChunk seals a chunk of this session on every server where sealing is possible, and
// returns the chunk's journaled record.
func (s *Session) SealChunk(ctx context.Context, v meta.VolumeID, id meta.ChunkID) (meta.ChunkRecord, error) {
	return s.sealChunk(ctx, v, wire.Seal{Chunk: id})
}

// EndChunk is SealChunk for a writer that has stopped: the seal may drop any bytes beyond
// need.
func (s *Session) EndChunk(ctx context.Context, v meta.VolumeID, id meta.ChunkID, need uint64) (meta.ChunkRecord, error) {
	return s.sealChunk(ctx, v, wire.Seal{Chunk: id, Asked: true, Need: need})
}

func (s *Session) sealChunk(ctx context.Context, v meta.VolumeID, q wire.Seal) (meta.ChunkRecord, error) {
	m, err := s.roundTrip(ctx, v, &q, left)
	if err != nil {
		return meta.ChunkRecord{}, err
	}
	r := m.(*wire.Reply)
	if err := r.Status.Error(); err != nil {
		return meta.ChunkRecord{}, err
	}
	return r.Result.Chunks[0], nil
}

// SetLock sets or releases a lock. With wait it returns when the lock is granted or ctx ends
// (Interrupted). Errors: WouldBlock, Deadlock.
func (s *Session) SetLock(ctx context.Context, v meta.VolumeID, l meta.Lock, wait bool) error {
	how := left
	if wait {
		how = canceled
	}
	m, err := s.roundTrip(ctx, v, &wire.Lock{Volume: v, Lock: l, Wait: wait}, how)
	if err != nil {
		return err
	}
	return m.(*wire.LockRe).Status.Error()
}

// DropLocks releases every lock of an owner on an inode, as close does.
func (s *Session) DropLocks(ctx context.Context, v meta.VolumeID, l meta.Lock) error {
	m, err := s.roundTrip(ctx, v, &wire.Lock{Volume: v, Lock: l, DropOwner: true}, left)
	if err != nil {
		return err
	}
	return m.(*wire.LockRe).Status.Error()
}

// GetLock returns a lock conflicting with l; Type is LockUnlock if no lock conflicts.
func (s *Session) GetLock(ctx context.Context, v meta.VolumeID, l meta.Lock) (meta.Lock, error) {
	m, err := s.roundTrip(ctx, v, &wire.Lock{Volume: v, Lock: l, Test: true}, left)
	if err != nil {
		return meta.Lock{}, err
	}
	r := m.(*wire.LockRe)
	return r.Conflict, r.Status.Error()
}

// Drop gives leases back. The caller must have dropped its cache of these inodes.
func (s *Session) Drop(v meta.VolumeID, inos []meta.Ino) {
	if len(inos) > 0 {
		s.tell(v, &wire.Drop{Volume: v, Inos: inos})
	}
}

// Resolve finds a chunk server. The first call may wait up to 2 s for the list of servers.
func (s *Session) Resolve(id meta.ServerID) (meta.ServerInfo, bool) {
	select {
	case <-s.gotSrv:
	case <-time.After(2 * time.Second):
	case <-s.ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.servers[id]
	return i, ok
}

// Servers lists the chunk servers.
func (s *Session) Servers() []meta.ServerInfo {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.SortedFunc(maps.Values(s.servers), func(a, b meta.ServerInfo) int { return cmp.Compare(a.ID, b.ID) })
}

// RenewCap returns a capability other than old, which a server did not accept.
func (s *Session) RenewCap(v meta.VolumeID, old []byte) []byte {
	s.mu.Lock()
	now := s.volume(v).cap
	s.mu.Unlock()
	if now != nil && !bytes.Equal(now, old) {
		return now
	}
	return s.fetchCap(v)
}

// ReadCap returns a capability to read the volume's chunks, renewed at half its life; nil if
// none could be obtained.
func (s *Session) ReadCap(v meta.VolumeID) []byte {
	s.mu.Lock()
	vs := s.volume(v)
	left := time.Until(vs.capUntil)
	if vs.cap != nil && left > 0 {
		c := vs.cap
		if left < vs.capLife/2 && !vs.capFetch {
			vs.capFetch = true
			s.wg.Go(func() { s.fetchCap(v) })
		}
		s.mu.Unlock()
		return c
	}
	s.mu.Unlock()
	return s.fetchCap(v)
}

func (s *Session) fetchCap(v meta.VolumeID) []byte {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Second)
	defer cancel()
	asked := time.Now()
	m, err := s.roundTrip(ctx, v, &wire.Caps{Volume: v}, left)
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(v)
	vs.capFetch = false
	if err != nil {
		s.log.Warn("the client got no capability to read a volume's chunks; it asks again", "volume", v, "error", err)
		return vs.cap
	}
	r, ok := m.(*wire.CapsRe)
	if !ok || r.Status.Err != meta.KindOK {
		s.log.Warn("the owner gave no capability to read a volume's chunks; the client asks again", "volume", v)
		return vs.cap
	}
	vs.cap, vs.capLife = r.Cap, time.Duration(r.TTL)*time.Millisecond
	vs.capUntil = asked.Add(vs.capLife)
	return vs.cap
}

// adminWait bounds the search for the server that must answer an administrative request: the
// owner of the volume may be changing.
const adminWait = 30 * time.Second

// Admin runs an administrative request at any server, or at the owner of the volume if the
// owner must answer. If the answer is lost, Admin sends the request again: a request that is
// not idempotent carries a wire.Once.
func (s *Session) Admin(ctx context.Context, a wire.Admin) (re *wire.AdminRe, err error) {
	at := ""
	ctx, over := s.within(ctx, &a, &at)
	defer func() { err = over(err) }()
	var next string
	wait := lookMin
	began := now()
	for hops := 0; ; {
		c, err := s.reach(ctx, func(ctx context.Context) (*conn, error) { return s.adminConn(ctx, a.Volume, next) })
		if err != nil {
			return nil, err
		}
		at = c.addr
		m, err := s.ask(ctx, c, &a)
		if errors.Is(err, errLost) && ctx.Err() == nil {
			next = ""
		} else if err != nil {
			return nil, err
		} else {
			r, ok := m.(*wire.AdminRe)
			if !ok {
				return nil, m.(*wire.Reply).Status.Error()
			}
			if r.Status.Err != meta.NotOwner {
				return r, r.Status.Error()
			}
			if now()-began > adminWait {
				return nil, r.Status.Error()
			}
			next, hops = r.Status.Subject, hops+1
			if hops < lookHops {
				continue
			}
		}
		hops = 0
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, meta.E("call", meta.Unavailable, "", context.Cause(ctx))
		}
		wait = min(2*wait, lookMax)
	}
}

// errNoAnswer is the cause when a request takes longer than Config.AnswerWait.
var errNoAnswer = errors.New("no answer in time")

// within bounds a quick administrative request by Config.AnswerWait. over wraps the request's
// error: if the bound expired, the error names the server that was asked last (*at).
func (s *Session) within(ctx context.Context, a *wire.Admin, at *string) (_ context.Context, over func(error) error) {
	wait := s.cfg.AnswerWait
	if wait == 0 || !quick(a) {
		return ctx, func(err error) error { return err }
	}
	ctx, cancel := context.WithTimeoutCause(ctx, wait, errNoAnswer)
	return ctx, func(err error) error {
		late := err != nil && errors.Is(context.Cause(ctx), errNoAnswer)
		cancel()
		if !late || *at == "" {
			return err
		}
		return meta.E("ask metadata server", meta.Unavailable, *at, fmt.Errorf("it has not answered within %v: it may be starting, or waiting for etcd or for a volume that is being taken over; ask again, or see what each server says with 'penstock cluster status'", wait))
	}
}

// askJSON runs an administrative request with a JSON body and decodes the JSON report.
func (s *Session) askJSON(ctx context.Context, a wire.Admin, body, to any) error {
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			panic("client: a request is plain data: " + err.Error())
		}
		a.Body = b
	}
	re, err := s.Admin(ctx, a)
	if err != nil || to == nil {
		return err
	}
	if err := json.Unmarshal(re.Report, to); err != nil {
		return meta.E("admin", meta.Protocol, "", err)
	}
	return nil
}

// once makes the token of a request; the request carries the same token each time it is sent.
func once() wire.Once { return wire.Once{Token: rand.Uint64() | 1} }

// reach bounds the search for a server by Config.AnswerWait, for every kind of request.
func (s *Session) reach(ctx context.Context, look func(context.Context) (*conn, error)) (*conn, error) {
	if wait := s.cfg.AnswerWait; wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, wait, errNoAnswer)
		defer cancel()
	}
	return look(ctx)
}

// quick reports that a healthy server answers the request at once: the request changes
// nothing, reads little and waits for no event.
func quick(a *wire.Admin) bool {
	switch a.Op {
	case wire.AdminVolumeByName, wire.AdminPathOf, wire.AdminViews:
		return true
	}
	return false
}

// MetaServers lists the live metadata servers, as of the last list received.
func (s *Session) MetaServers() []wire.MetaServer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.metas)
}

// AdminAt runs an administrative request at the server at addr, for reports that each server
// makes about itself.
func (s *Session) AdminAt(ctx context.Context, addr string, a wire.Admin) (re *wire.AdminRe, err error) {
	ctx, over := s.within(ctx, &a, &addr)
	defer func() { err = over(err) }()
	c, err := s.reach(ctx, func(ctx context.Context) (*conn, error) { return s.connTo(ctx, addr) })
	if err != nil {
		return nil, err
	}
	m, err := s.ask(ctx, c, &a)
	if err != nil {
		return nil, err
	}
	r, ok := m.(*wire.AdminRe)
	if !ok {
		return nil, m.(*wire.Reply).Status.Error()
	}
	return r, r.Status.Error()
}

// adminConn returns a connection to the server at addr or, without addr, to the owner of the
// volume. If neither has a connection, adminConn returns a connection to any server.
func (s *Session) adminConn(ctx context.Context, v meta.VolumeID, addr string) (*conn, error) {
	if addr != "" {
		step, cancel := forConnection(ctx)
		defer cancel()
		if c, err := s.connTo(step, addr); err == nil {
			return c, nil
		}
	}
	s.mu.Lock()
	if vs := s.volumes[v]; vs != nil && vs.conn != nil && addr == "" {
		defer s.mu.Unlock()
		return vs.conn, nil
	}
	s.mu.Unlock()
	return s.anyConn(ctx)
}
