package client

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// BatchOp is one operation of a batch.
type BatchOp struct {
	ID   meta.OpID
	Op   meta.Op
	Want meta.LeaseMode
}

// NextOp makes an operation id for work that no kernel request asked for.
func (s *Session) NextOp() meta.OpID {
	return meta.OpID{Incarnation: s.incarnation, Unique: s.background.Add(1), Step: meta.BackgroundStep}
}

func (s *Session) ack(v meta.VolumeID) meta.Seq {
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(v)
	// Replies come in wire order before the durable notice that covers them,
	// so everything up to durable was received; but not those that went down
	// with a connection.
	if vs.resent > 0 {
		return vs.ackHold
	}
	return vs.durable
}

// Do runs one operation. Mutations need an id; a zero one is made. The reply
// may be early: Sync waits for the journal. Want asks for a lease on the
// inodes of the result.
func (s *Session) Do(ctx context.Context, v meta.VolumeID, id meta.OpID, op meta.Op, want meta.LeaseMode) (*meta.Result, error) {
	if op.Code().Mutates() && id.IsZero() {
		id = s.NextOp()
	}
	c := &wire.Call{Volume: v, ID: id, Want: want, Ack: s.ack(v), Op: op}
	m, err := s.roundTrip(ctx, c, true)
	if err != nil {
		return nil, err
	}
	r := m.(*wire.Reply)
	if r.Status.Err != meta.KindOK {
		return &r.Result, r.Status.Error()
	}
	return &r.Result, nil
}

// MaxBatch is the largest number of operations in one batch.
const MaxBatch = 1024

// DoBatch runs operations of one volume in order, each whether or not the one
// before succeeded. The third value is set when there is no answer at all.
func (s *Session) DoBatch(ctx context.Context, v meta.VolumeID, ops []BatchOp) ([]meta.Result, []error, error) {
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
			b.Calls[i] = wire.Call{Volume: v, ID: o.ID, Want: o.Want, Ack: ack, Op: o.Op}
		}
		ops = ops[n:]
		m, err := s.roundTrip(ctx, b, false)
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

// Sync returns when everything answered before on this volume is in the
// journal.
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
	m, err := s.roundTrip(ctx, &wire.Sync{Volume: v, Seq: seen}, false)
	if err != nil {
		return err
	}
	return m.(*wire.Reply).Status.Error()
}

// Durable reports whether everything answered so far on the volume is known to
// be in the journal.
func (s *Session) Durable(v meta.VolumeID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(v)
	return vs.seen <= vs.durable && vs.replaying == 0
}

// AllocChunks asks for n open chunks, journaled before the answer.
// Errors: NoSpace, QuotaExceeded, Unavailable (no chunk server).
func (s *Session) AllocChunks(ctx context.Context, v meta.VolumeID, n int, own bool) ([]meta.ChunkGrant, error) {
	m, err := s.roundTrip(ctx, &wire.Alloc{Volume: v, ID: s.NextOp(), N: uint32(n), Own: own}, false)
	if err != nil {
		return nil, err
	}
	g, ok := m.(*wire.Grants)
	if !ok {
		return nil, m.(*wire.Reply).Status.Error()
	}
	return g.Grants, g.Status.Error()
}

// SealChunk ends a chunk of this session; the answer is its journaled record.
func (s *Session) SealChunk(ctx context.Context, v meta.VolumeID, id meta.ChunkID) (meta.ChunkRecord, error) {
	m, err := s.roundTrip(ctx, &wire.Seal{Chunk: id}, false)
	if err != nil {
		return meta.ChunkRecord{}, err
	}
	r := m.(*wire.Reply)
	if err := r.Status.Error(); err != nil {
		return meta.ChunkRecord{}, err
	}
	return r.Result.Chunks[0], nil
}

// SetLock sets or releases a lock; with wait it returns when the lock is
// granted or ctx ends (Interrupted). Errors: WouldBlock, Deadlock.
func (s *Session) SetLock(ctx context.Context, v meta.VolumeID, l meta.Lock, wait bool) error {
	m, err := s.roundTrip(ctx, &wire.Lock{Volume: v, Lock: l, Wait: wait}, wait)
	if err != nil {
		return err
	}
	return m.(*wire.LockRe).Status.Error()
}

// DropLocks releases every lock of an owner on an inode, as close does.
func (s *Session) DropLocks(ctx context.Context, v meta.VolumeID, l meta.Lock) error {
	m, err := s.roundTrip(ctx, &wire.Lock{Volume: v, Lock: l, DropOwner: true}, false)
	if err != nil {
		return err
	}
	return m.(*wire.LockRe).Status.Error()
}

// GetLock tells which lock would conflict; its Type is LockUnlock when none.
func (s *Session) GetLock(ctx context.Context, v meta.VolumeID, l meta.Lock) (meta.Lock, error) {
	m, err := s.roundTrip(ctx, &wire.Lock{Volume: v, Lock: l, Test: true}, false)
	if err != nil {
		return meta.Lock{}, err
	}
	r := m.(*wire.LockRe)
	return r.Conflict, r.Status.Error()
}

// Drop gives leases back; the caller caches nothing of these inodes any more.
func (s *Session) Drop(v meta.VolumeID, inos []meta.Ino) {
	s.mu.Lock()
	snd := s.send
	s.mu.Unlock()
	if snd != nil && len(inos) > 0 {
		snd.Send(0, &wire.Drop{Volume: v, Inos: inos})
	}
}

// Resolve finds a chunk server. The first call may wait a moment for the list.
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

// ReadCap gives a capability to read the volume's chunks, renewed at half its
// life; nil when none could be had.
func (s *Session) ReadCap(v meta.VolumeID) []byte {
	s.mu.Lock()
	vs := s.volume(v)
	left := time.Until(vs.capUntil)
	if vs.cap != nil && left > 0 {
		c := vs.cap
		if left < capLife/2 && !vs.capFetch {
			vs.capFetch = true
			s.wg.Go(func() { s.fetchCap(v) })
		}
		s.mu.Unlock()
		return c
	}
	s.mu.Unlock()
	return s.fetchCap(v)
}

const capLife = 2 * time.Minute

func (s *Session) fetchCap(v meta.VolumeID) []byte {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Second)
	defer cancel()
	asked := time.Now()
	m, err := s.roundTrip(ctx, &wire.Caps{Volume: v}, false)
	s.mu.Lock()
	defer s.mu.Unlock()
	vs := s.volume(v)
	vs.capFetch = false
	if err != nil {
		s.log.Warn("no capability to read", "volume", v, "error", err)
		return vs.cap
	}
	r, ok := m.(*wire.CapsRe)
	if !ok || r.Status.Err != meta.KindOK {
		s.log.Warn("no capability to read", "volume", v)
		return vs.cap
	}
	vs.cap, vs.capUntil = r.Cap, asked.Add(time.Duration(r.TTL)*time.Millisecond)
	return vs.cap
}

// Admin runs an administrative request.
func (s *Session) Admin(ctx context.Context, a wire.Admin) (*wire.AdminRe, error) {
	m, err := s.roundTrip(ctx, &a, false)
	if err != nil {
		return nil, err
	}
	r, ok := m.(*wire.AdminRe)
	if !ok {
		return nil, m.(*wire.Reply).Status.Error()
	}
	return r, r.Status.Error()
}
