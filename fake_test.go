package penstock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/btree"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/keep"
	"penstock.io/penstock/meta/namespace"
)

// world is the owner of one volume and a chunk server, in memory: the real machine of
// meta/namespace behind leases, recalls and replies in the order of decisions.
type world struct {
	t     testing.TB
	mu    sync.Mutex
	cond  *sync.Cond
	store *memStore
	seq   meta.Seq
	now   meta.Time
	next  meta.SessionID
	rng   *rand.Rand

	sessions map[meta.SessionID]*fakeSession
	leases   map[meta.Ino]map[*fakeSession]meta.LeaseMode
	recalls  map[meta.Ino]map[*fakeSession]uint64 // asked, not answered: the round
	round    uint64
	blocked  map[meta.Ino]int

	chunks map[meta.ChunkID]*fakeChunk
	calls  map[meta.OpCode]int
	// callsAt counts reads at snapshots; lists counts lists of snapshots.
	callsAt, lists int
	syncs          int
	// fail is asked before an operation runs.
	fail func(op meta.Op) error
	// unanswered is asked after an operation ran; an error takes the place of the answer.
	unanswered func(op meta.Op) error
	// failChunk is asked before an append or sync of a chunk.
	failChunk func(what string, id meta.ChunkID) error
	// syncTakes says how long a sync of a chunk takes, which is then under way; nil: no time.
	syncTakes func(id meta.ChunkID) time.Duration
	// chunkSyncs counts syncs of chunks.
	chunkSyncs int
	// failEnd is asked before a chunk is sealed.
	failEnd func(id meta.ChunkID) error
	// failRead is asked before a read of a chunk.
	failRead func() error
	// awaited: unreachable chunk servers count as starting anew.
	awaited bool
	// promised is the promise of a predecessor; asked and given count bytes of Reserve.
	promised, asked, given uint64
	// room returns the bytes granted of a request; nil: all.
	room func(want uint64) uint64
	// reserving and reserved run once: before a request for a promise is handled, and
	// before its answer is.
	reserving, reserved func()
	// away: nobody answers about promises.
	away bool
	// inherited runs after the owner's answer about a predecessor's promise, before the
	// successor handles the answer.
	inherited func(s *fakeSession)
	// succeeding runs before a successor takes the predecessor's state in.
	// killedResuming: the successor is killed before it leaves any state itself.
	succeeding     func(s *fakeSession)
	killedResuming bool
	// before runs when an operation is sent, before its decision; it may block.
	before func(op meta.Op)
	// delay makes waiters look at replies late, so that replies and recalls change their order.
	delay  time.Duration
	policy meta.Policy
	bad    []string
	// overtake, unless nil, is called between a request for the policy and its answer.
	overtake func()
}

type memItem struct{ k, v []byte }

type memStore struct{ t *btree.BTreeG[memItem] }

func (m *memStore) Get(k []byte) ([]byte, bool, error) {
	it, ok := m.t.Get(memItem{k: k})
	return it.v, ok, nil
}

func (m *memStore) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	m.t.AscendRange(memItem{k: lo}, memItem{k: hi}, func(it memItem) bool { return fn(it.k, it.v) })
	return nil
}

func (m *memStore) apply(l []namespace.Effect) {
	for _, e := range l {
		switch e.Kind {
		case namespace.Put:
			m.t.ReplaceOrInsert(memItem{bytes.Clone(e.Key), bytes.Clone(e.Value)})
		case namespace.Delete:
			m.t.Delete(memItem{k: e.Key})
		case namespace.DeleteRange:
			var gone []memItem
			m.t.AscendRange(memItem{k: e.Key}, memItem{k: e.Value}, func(it memItem) bool { gone = append(gone, it); return true })
			for _, it := range gone {
				m.t.Delete(it)
			}
		}
	}
}

func newWorld(t testing.TB, p meta.Policy) *world {
	w := &world{
		t: t, now: 1e18, next: 100, rng: rand.New(rand.NewSource(1)), policy: p,
		store:    &memStore{btree.NewG(32, func(a, b memItem) bool { return bytes.Compare(a.k, b.k) < 0 })},
		sessions: map[meta.SessionID]*fakeSession{},
		leases:   map[meta.Ino]map[*fakeSession]meta.LeaseMode{},
		recalls:  map[meta.Ino]map[*fakeSession]uint64{},
		blocked:  map[meta.Ino]int{},
		chunks:   map[meta.ChunkID]*fakeChunk{},
		calls:    map[meta.OpCode]int{},
	}
	w.cond = sync.NewCond(&w.mu)
	w.store.apply(namespace.Format(1, w.now, 0o755, 0, 0, p))
	return w
}

// check runs the volume's own checker and reports broken promises.
func (w *world) check() {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, b := range w.bad {
		w.t.Error(b)
	}
	for _, s := range w.sessions {
		if err := s.c.table.check(); err != nil {
			w.t.Errorf("session %d: %v", s.id, err)
		}
		for _, in := range s.c.table.all(func(in *inode) bool { return !in.vol.frozen() }) {
			in.mu.Lock()
			if mine := w.leases[in.ino][s]; in.lease > mine {
				w.t.Errorf("session %d believes in lease %v on inode %d, its owner in %v", s.id, in.lease, in.ino, mine)
			}
			in.mu.Unlock()
			in.put()
		}
	}
	rep, err := namespace.Check(w.store)
	if err != nil {
		w.t.Fatal(err)
	}
	if !rep.OK() {
		w.t.Fatalf("DATA: volume damaged: %+v", rep.Problems)
	}
}

// fakeSession is a metaSession whose events come from one goroutine, in the owner's
// order.
type fakeSession struct {
	w       *world
	id      meta.SessionID
	c       *Client
	events  chan func()
	done    chan struct{}
	left    time.Duration
	expired uint64 // how often
	// dropping is called before a drop arrives; drops counts the drops that arrived.
	dropping func()
	drops    int
	dropped  int // DropLocks
	// gone: the session's process was killed, and its requests are ignored.
	gone atomic.Bool
	heir bool // continues another process's session, and does not know all its leases
}

func (s *fakeSession) heard(op string) error {
	if s.gone.Load() {
		return meta.E(op, meta.Unavailable, "", errors.New("its process was killed"))
	}
	return nil
}

// fakeKept is the session of a client with a Config.Keep.
type fakeKept struct{ *fakeSession }

func (fakeKept) Begin() uint32 { return 0 }
func (fakeKept) End(uint32)    {}

func (s fakeKept) Inherit(ctx context.Context, _ meta.VolumeID) (metaclient.Promise, error) {
	s.w.mu.Lock()
	away := s.w.away
	s.w.mu.Unlock()
	if away {
		<-ctx.Done()
		return metaclient.Promise{}, context.Cause(ctx)
	}
	s.w.mu.Lock()
	p, then := metaclient.Promise{Granted: s.w.promised, Metered: true}, s.w.inherited
	s.w.mu.Unlock()
	if then != nil {
		then(s.fakeSession)
	}
	return p, nil
}

// SealChunk seals a predecessor's chunk at its synced length.
func (s fakeKept) SealChunk(_ context.Context, _ meta.VolumeID, id meta.ChunkID) (meta.ChunkRecord, error) {
	w := s.w
	w.mu.Lock()
	defer w.mu.Unlock()
	c := w.chunks[id]
	if c == nil {
		return meta.ChunkRecord{}, meta.E("seal", meta.NoSuchChunk, id.String(), nil)
	}
	if w.failEnd != nil {
		if err := w.failEnd(id); err != nil {
			return meta.ChunkRecord{}, err
		}
	}
	if !c.sealed {
		c.sealed, c.data = true, c.data[:c.synced]
	}
	res, _, err := w.runLocked(s.fakeSession, meta.OpID{}, &meta.SealChunk{Chunk: id, Length: uint64(len(c.data)), Fence: meta.Fence{Term: 1}, Servers: []meta.ServerID{1}}, meta.LeaseNone)
	if err != nil {
		return meta.ChunkRecord{}, err
	}
	return res.Chunks[0], nil
}

// succeed kills a client and returns its successor, with the client's state.
func (w *world) succeed(old *Client, cfg Config) *Client {
	w.t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	was := old.sess.(fakeKept).fakeSession
	was.gone.Store(true)
	old.cancel()
	left, err := keep.Left(old.cfg.Keep.FD())
	if err != nil {
		w.t.Fatal(err)
	}
	defer left.Close()
	records, err := left.Records()
	if err != nil {
		w.t.Fatal(err)
	}
	cfg.Left = left
	c := newClient(cfg)
	s := &fakeSession{w: w, id: was.id, c: c, heir: true, events: make(chan func(), 1<<16), done: make(chan struct{}), left: was.left, expired: was.expired}
	w.mu.Lock()
	w.sessions[s.id] = s
	for _, m := range w.leases {
		if mode, ok := m[was]; ok {
			delete(m, was)
			m[s] = mode
		}
	}
	w.mu.Unlock()
	c.attach(fakeKept{s}, &fakeChunks{w: w, s: s})
	go s.run()
	if then := w.succeeding; then != nil {
		w.succeeding = nil
		then(s)
	}
	if err := c.resume(context.Background(), records); err != nil {
		w.t.Fatal(err)
	}
	if w.killedResuming {
		s.gone.Store(true)
		c.cancel()
		return c
	}
	c.Resumed()
	return c
}

func (s *fakeSession) run() {
	defer close(s.done)
	for ev := range s.events {
		ev()
	}
}

// client makes a client of the world.
func (w *world) client(cfg Config) *Client {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c := newClient(cfg)
	s := &fakeSession{w: w, c: c, events: make(chan func(), 1<<16), done: make(chan struct{}), left: 8 * time.Second}
	w.mu.Lock()
	w.startLocked(s)
	w.mu.Unlock()
	if cfg.Keep != nil {
		c.attach(fakeKept{s}, &fakeChunks{w: w, s: s})
	} else {
		c.attach(s, &fakeChunks{w: w, s: s})
	}
	go s.run()
	return c
}

func (w *world) startLocked(s *fakeSession) {
	w.next++
	s.id = w.next
	w.sessions[s.id] = s
	_, eff, err := namespace.Execute(w.store, w.context(0, meta.OpID{}), &meta.SessionStart{Session: s.id, Name: "test"})
	if err != nil {
		w.t.Fatal(err)
	}
	w.store.apply(eff)
}

func (w *world) context(s meta.SessionID, id meta.OpID) namespace.Context {
	w.now += 1000
	w.seq++
	return namespace.Context{Now: max(w.now, meta.Time(time.Now().UnixNano())), Session: s, Term: 1, Volume: 1, Op: id, Seq: w.seq}
}

// conflictLocked recalls the other sessions' leases beyond keep and waits for the
// answers.
func (w *world) conflictLocked(s *fakeSession, ino meta.Ino, keep meta.LeaseMode) (waited bool) {
	for {
		busy := false
		for o, mode := range w.leases[ino] {
			if o == s || mode <= keep {
				continue
			}
			busy = true
			if w.recalls[ino] == nil {
				w.recalls[ino] = map[*fakeSession]uint64{}
			}
			if w.recalls[ino][o] > 0 {
				continue
			}
			w.round++
			round := w.round
			w.recalls[ino][o] = round
			o.events <- func() {
				o.c.Recall(meta.Recall{Volume: 1, Ino: ino, Keep: keep}, func() {
					w.mu.Lock()
					defer w.mu.Unlock()
					if w.recalls[ino][o] != round {
						return // the session dropped the inode meanwhile, and may have a new lease
					}
					delete(w.recalls[ino], o)
					if m, ok := w.leases[ino]; ok && m[o] > keep {
						m[o] = keep
					}
					w.cond.Broadcast()
				})
			}
		}
		if !busy {
			return waited
		}
		waited = true
		w.blocked[ino]++
		w.cond.Wait()
		w.blocked[ino]--
	}
}

func (w *world) giveLocked(s *fakeSession, ino meta.Ino, mode meta.LeaseMode, grants *[]meta.Grant) {
	if ino == 0 || mode == meta.LeaseNone || w.recalls[ino][s] > 0 {
		return
	}
	if w.blocked[ino] > 0 {
		return
	}
	for o, m := range w.leases[ino] {
		if o != s && (m == meta.LeaseExclusive || mode == meta.LeaseExclusive && m > meta.LeaseNone) {
			if m == meta.LeaseExclusive {
				return
			}
			mode = meta.LeaseShared
		}
	}
	if w.leases[ino] == nil {
		w.leases[ino] = map[*fakeSession]meta.LeaseMode{}
	}
	if w.leases[ino][s] < mode || s.heir {
		w.leases[ino][s] = max(mode, w.leases[ino][s])
		*grants = append(*grants, meta.Grant{Ino: ino, Mode: mode})
	}
}

// runLocked executes an operation as the owner does.
func (w *world) runLocked(s *fakeSession, id meta.OpID, op meta.Op, want meta.LeaseMode) (*meta.Result, []meta.Grant, error) {
	w.calls[op.Code()]++
	if w.fail != nil {
		if err := w.fail(op); err != nil {
			return nil, nil, err
		}
	}
	var grants []meta.Grant
	switch m := op.(type) {
	case *meta.Open:
		if want == meta.LeaseExclusive {
			if err := w.ledLocked(s, m.Ino); err != nil {
				return nil, nil, err
			}
		}
	case *meta.Write:
		if err := w.ledLocked(s, m.Ino); err != nil {
			return nil, nil, err
		}
	case *meta.Lead:
		if err := w.ledLocked(s, m.Ino); err != nil {
			return nil, nil, meta.E("lead", meta.Busy, "", err)
		}
	}
	if !op.Code().Mutates() {
		for {
			waited := false
			if inos, err := namespace.Needs(w.store, op); err == nil {
				for _, ino := range inos {
					keep := meta.LeaseShared
					if _, ok := op.(*meta.Open); ok && want == meta.LeaseExclusive {
						keep = meta.LeaseNone
					}
					waited = w.conflictLocked(s, ino, keep) || waited
				}
			}
			if !waited {
				break
			}
		}
		res, err := namespace.Query(w.store, w.context(s.id, id), op)
		if l, ok := op.(*meta.Lookup); ok && (err == nil || meta.KindOf(err) == meta.NotFound) {
			w.giveLocked(s, l.Parent, min(want, meta.LeaseShared), &grants)
		}
		if err != nil {
			return nil, grants, err
		}
		if _, ok := op.(*meta.StatFSOp); ok {
			res.StatFS.DiskTotal, res.StatFS.DiskFree = 1<<40, 1<<39
		}
		mode := min(want, meta.LeaseShared)
		if _, ok := op.(*meta.Open); ok {
			mode = want
		}
		w.giveLocked(s, res.Attr.Ino, mode, &grants)
		if o, ok := op.(*meta.Open); ok && want == meta.LeaseExclusive {
			for _, ino := range o.Also {
				if w.leases[ino][s] == meta.LeaseShared {
					w.giveLocked(s, ino, meta.LeaseExclusive, &grants)
				}
			}
		}
		for i := range res.Entries {
			e := &res.Entries[i]
			if e.Attr == nil {
				continue
			}
			for o, m := range w.leases[e.Ino] {
				if o != s && m == meta.LeaseExclusive {
					e.Attr = nil
					break
				}
			}
			if e.Attr != nil {
				w.giveLocked(s, e.Ino, meta.LeaseShared, &grants)
			}
		}
		return res, grants, nil
	}
	for {
		waited := false
		inos, err := namespace.Touched(w.store, op)
		if err != nil {
			return nil, nil, err
		}
		for _, ino := range inos {
			waited = w.conflictLocked(s, ino, meta.LeaseNone) || waited
		}
		if !waited {
			break
		}
	}
	if wr, ok := op.(*meta.Write); ok {
		w.checkWrite(wr)
	}
	switch m := op.(type) {
	case *meta.Lead:
		if err := w.sealEndLocked(m.Ino); err != nil {
			return nil, nil, err
		}
	case *meta.Unlink:
		n := *m
		n.Holders = []meta.SessionID{s.id}
		op = &n
	case *meta.Rename:
		n := *m
		n.Holders = []meta.SessionID{s.id}
		op = &n
	}
	res, eff, err := namespace.Execute(w.store, w.context(s.id, id), op)
	if err != nil {
		return nil, nil, err
	}
	w.store.apply(eff)
	if want > meta.LeaseNone {
		mode := meta.LeaseShared
		switch op.(type) {
		case *meta.Create, *meta.Tmpfile:
			if res.Attr.IsRegular() {
				mode = want
			}
		}
		w.giveLocked(s, res.ParentAttr.Ino, meta.LeaseShared, &grants)
		w.giveLocked(s, res.NewParentAttr.Ino, meta.LeaseShared, &grants)
		w.giveLocked(s, res.Attr.Ino, mode, &grants)
		w.giveLocked(s, res.Attr2.Ino, meta.LeaseShared, &grants)
	}
	return res, grants, nil
}

// checkWrite fails unless all bytes that a client commits as synced are synced.
func (w *world) checkWrite(op *meta.Write) {
	for _, e := range op.Extents {
		c := w.chunks[e.Chunk]
		if c == nil || c.synced < e.ChunkOff+e.Len {
			w.bad = append(w.bad, fmt.Sprintf("commit of inode %d: extent %+v is not synced", op.Ino, e))
		}
	}
}

func clone(r *meta.Result) *meta.Result {
	if r == nil {
		return nil
	}
	c := *r
	c.Data = bytes.Clone(r.Data)
	return &c
}

func (s *fakeSession) Do(ctx context.Context, v meta.VolumeID, epoch uint64, id meta.OpID, op meta.Op, want meta.LeaseMode, over func()) (*meta.Result, error) {
	s.w.mu.Lock()
	before := s.w.before
	ended := epoch != metaclient.AnyEpoch && epoch != 1+s.expired
	s.w.mu.Unlock()
	if ended {
		over()
		return nil, meta.E("call", meta.SessionExpired, "", nil)
	}
	if before == nil {
		defer over()
		return s.do(v, id, op, want)
	}
	type answer struct {
		res *meta.Result
		err error
	}
	ch := make(chan answer, 1)
	go func() { // the call is carried out, late or not, perhaps without a waiting caller
		before(op)
		res, err := s.do(v, id, op, want)
		over()
		ch <- answer{res, err}
	}()
	if op.Code().Mutates() {
		a := <-ch
		return a.res, a.err
	}
	select {
	case a := <-ch:
		return a.res, a.err
	case <-ctx.Done():
		return nil, meta.E("call", meta.Interrupted, "", context.Cause(ctx))
	}
}

func (s *fakeSession) do(v meta.VolumeID, id meta.OpID, op meta.Op, want meta.LeaseMode) (*meta.Result, error) {
	type answer struct {
		res *meta.Result
		err error
	}
	ch := make(chan answer, 1)
	w := s.w
	if err := s.heard("call"); err != nil {
		return nil, err
	}
	w.mu.Lock()
	res, grants, err := w.runLocked(s, id, op, want)
	if err == nil && w.unanswered != nil {
		err = w.unanswered(op)
	}
	if res == nil {
		res = &meta.Result{}
	}
	res = clone(res)
	res.Grants = grants
	s.events <- func() {
		for _, g := range grants {
			s.c.Granted(v, g)
		}
		ch <- answer{res, err}
	}
	var late time.Duration
	if w.delay > 0 {
		late = time.Duration(w.rng.Int63n(int64(w.delay)))
	}
	w.mu.Unlock()
	a := <-ch
	if late > 0 {
		time.Sleep(late)
	}
	return a.res, a.err
}

func (s *fakeSession) DoBatch(ctx context.Context, v meta.VolumeID, epoch uint64, ops []batchOp) ([]meta.Result, []error, error) {
	s.w.mu.Lock()
	before := s.w.before
	s.w.mu.Unlock()
	if before == nil {
		return s.doBatch(v, epoch, ops)
	}
	type answer struct {
		res  []meta.Result
		errs []error
		err  error
	}
	ch := make(chan answer, 1)
	ops = slices.Clone(ops)
	go func() { // the call is carried out, late or not, perhaps without a waiting caller
		for _, o := range ops {
			before(o.Op)
		}
		res, errs, err := s.doBatch(v, epoch, ops)
		ch <- answer{res, errs, err}
	}()
	select {
	case a := <-ch:
		return a.res, a.errs, a.err
	case <-ctx.Done():
		return nil, nil, meta.E("call", meta.Interrupted, "", context.Cause(ctx))
	}
}

func (s *fakeSession) doBatch(v meta.VolumeID, epoch uint64, ops []batchOp) ([]meta.Result, []error, error) {
	if err := s.heard("batch"); err != nil {
		return nil, nil, err
	}
	w := s.w
	w.mu.Lock()
	if epoch != metaclient.AnyEpoch && epoch != 1+s.expired {
		w.mu.Unlock()
		return nil, nil, meta.E("batch", meta.SessionExpired, "", nil)
	}
	res := make([]meta.Result, len(ops))
	errs := make([]error, len(ops))
	var all []meta.Grant
	for i, o := range ops {
		if o.At != 0 {
			r, err := w.queryAtLocked(s, o.At, o.Op)
			if errs[i] = err; r != nil {
				res[i] = *r
			}
			continue
		}
		r, g, err := w.runLocked(s, o.ID, o.Op, o.Want)
		if r != nil {
			res[i] = *clone(r)
		}
		res[i].Grants = g
		errs[i] = err
		all = append(all, g...)
	}
	ch := make(chan struct{})
	s.events <- func() {
		for _, g := range all {
			s.c.Granted(v, g)
		}
		close(ch)
	}
	w.mu.Unlock()
	<-ch
	return res, errs, nil
}

func (s *fakeSession) DoAt(_ context.Context, v meta.VolumeID, at meta.Generation, op meta.Op) (*meta.Result, error) {
	w := s.w
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.queryAtLocked(s, at, op)
}

// queryAtLocked answers a read at a snapshot.
func (w *world) queryAtLocked(s *fakeSession, at meta.Generation, op meta.Op) (*meta.Result, error) {
	w.callsAt++
	c := w.context(s.id, meta.OpID{})
	c.At = at
	res, err := namespace.Query(w.store, c, op)
	return clone(res), err
}

func (s *fakeSession) ListSnapshots(context.Context, meta.VolumeID) ([]meta.Snapshot, error) {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.w.lists++
	return namespace.Snapshots(s.w.store)
}

// take takes a snapshot of what clients have flushed.
func (w *world) take(name string) meta.Generation {
	w.t.Helper()
	return meta.Generation(w.run(&meta.TakeSnapshot{Name: name}).Off)
}

// run executes an operation as the owner itself.
func (w *world) run(op meta.Op) *meta.Result {
	w.t.Helper()
	w.mu.Lock()
	res, eff, err := namespace.Execute(w.store, w.context(0, meta.OpID{}), op)
	if err == nil {
		w.store.apply(eff)
	}
	w.mu.Unlock()
	if err != nil {
		w.t.Fatal(err)
	}
	return res
}

func (w *world) drop(at meta.Generation) {
	w.t.Helper()
	for !w.run(&meta.DropSnapshot{At: at}).EOF {
	}
}

func (s *fakeSession) Sync(context.Context, meta.VolumeID) error {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.w.syncs++
	return nil
}

func (s *fakeSession) AllocChunks(ctx context.Context, v meta.VolumeID, n int, own bool) ([]meta.ChunkGrant, error) {
	if err := s.heard("alloc"); err != nil {
		return nil, err
	}
	w := s.w
	w.mu.Lock()
	defer w.mu.Unlock()
	op := &meta.AllocChunks{N: uint32(n), Own: own, Fence: meta.Fence{Term: 1}}
	for range n {
		op.Servers = append(op.Servers, []meta.ServerID{1})
	}
	res, _, err := w.runLocked(s, meta.OpID{}, op, meta.LeaseNone)
	if err != nil {
		return nil, err
	}
	var g []meta.ChunkGrant
	for _, c := range res.Chunks {
		w.chunks[c.ID] = &fakeChunk{w: w, id: c.ID}
		g = append(g, meta.ChunkGrant{ID: c.ID, Fence: c.Fence, Servers: c.Servers, MaxLen: w.policy.MaxChunk})
	}
	return g, nil
}

func (s *fakeSession) EndChunk(ctx context.Context, v meta.VolumeID, id meta.ChunkID, need uint64) (meta.ChunkRecord, error) {
	if err := s.heard("end chunk"); err != nil {
		return meta.ChunkRecord{}, err
	}
	w := s.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failEnd != nil {
		if err := w.failEnd(id); err != nil {
			return meta.ChunkRecord{}, err
		}
	}
	c := w.chunks[id]
	c.sealed = true
	res, _, err := w.runLocked(s, meta.OpID{}, &meta.SealChunk{Chunk: id, Length: uint64(len(c.data)), Fence: meta.Fence{Term: 1}, Servers: []meta.ServerID{1}}, meta.LeaseNone)
	if err != nil {
		return meta.ChunkRecord{}, err
	}
	return res.Chunks[0], nil
}

func (s *fakeSession) Suspect(meta.VolumeID, []meta.ServerID) {}

func (s *fakeSession) Reserve(_ context.Context, _ meta.VolumeID, epoch, give, want, _ uint64, _ metaclient.Place) (metaclient.Promise, error) {
	s.w.mu.Lock()
	if then := s.w.reserving; then != nil {
		s.w.reserving = nil
		s.w.mu.Unlock()
		then()
		s.w.mu.Lock()
	}
	if epoch != metaclient.AnyEpoch && epoch != 1+s.expired {
		s.w.mu.Unlock()
		return metaclient.Promise{}, meta.E("reserve", meta.SessionExpired, "", nil)
	}
	s.w.asked += want
	s.w.given += give
	room, then := s.w.room, s.w.reserved
	s.w.reserved = nil
	s.w.mu.Unlock()
	if room != nil && want > 0 {
		want = room(want)
	}
	if then != nil {
		then()
	}
	return metaclient.Promise{Granted: want, Metered: true}, nil
}

func (s *fakeSession) SetLock(context.Context, meta.VolumeID, meta.Lock, bool) error { return nil }
func (s *fakeSession) DropLocks(context.Context, meta.VolumeID, meta.Lock) error {
	s.dropped++
	return nil
}
func (s *fakeSession) GetLock(_ context.Context, _ meta.VolumeID, l meta.Lock) (meta.Lock, error) {
	l.Type = meta.LockUnlock
	return l, nil
}

func (s *fakeSession) Drop(v meta.VolumeID, inos []meta.Ino) {
	if s.dropping != nil {
		s.dropping()
	}
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	s.drops++
	for _, ino := range inos {
		delete(s.w.leases[ino], s)
		if len(s.w.leases[ino]) == 0 {
			delete(s.w.leases, ino)
		}
		delete(s.w.recalls[ino], s)
	}
	s.w.cond.Broadcast()
}

func (s *fakeSession) LeaseLeft(meta.VolumeID) time.Duration { return s.left }

func (s *fakeSession) Volume(_ context.Context, id meta.VolumeID, name string) (volumeInfo, error) {
	if id != 1 && name != "root" {
		return volumeInfo{}, meta.E("open volume", meta.NoSuchVolume, name, nil)
	}
	s.w.mu.Lock()
	i, overtake := volumeInfo{1, "root", s.w.policy}, s.w.overtake
	s.w.mu.Unlock()
	if overtake != nil {
		overtake()
	}
	return i, nil
}

func (s *fakeSession) Close(context.Context) error {
	s.w.mu.Lock()
	s.w.endLocked(s)
	s.w.mu.Unlock()
	return nil
}

// endLocked ends a session: its leases and open chunks.
func (w *world) endLocked(s *fakeSession) {
	delete(w.sessions, s.id)
	for ino, m := range w.leases {
		delete(m, s)
		delete(w.recalls[ino], s)
	}
	_, eff, err := namespace.Execute(w.store, w.context(0, meta.OpID{}), &meta.SessionEnd{Session: s.id})
	if err != nil {
		w.t.Error(err)
		return
	}
	w.store.apply(eff)
	w.cond.Broadcast()
}

// expire ends the session as if its lease had run out, and begins another.
func (s *fakeSession) expire() { s.endUnheard()() }

// endUnheard is expire, of which the client learns when it calls tell.
func (s *fakeSession) endUnheard() (tell func()) {
	w := s.w
	w.mu.Lock()
	defer w.mu.Unlock()
	// Open chunks are sealed at their synced lengths.
	for id, c := range w.chunks {
		if !c.sealed {
			c.sealed = true
			c.data = c.data[:c.synced]
			_, eff, err := namespace.Execute(w.store, w.context(0, meta.OpID{}), &meta.SealChunk{Chunk: id, Length: c.synced, Fence: meta.Fence{Term: 1}, Servers: []meta.ServerID{1}})
			if err == nil {
				w.store.apply(eff)
			}
		}
	}
	w.endLocked(s)
	w.startLocked(s)
	s.expired++
	return func() {
		ch := make(chan struct{})
		s.events <- func() {
			s.c.Expired([]meta.VolumeID{1}, meta.E("session", meta.SessionExpired, "", nil))
			close(ch)
		}
		<-ch
	}
}

// ledLocked refuses content for a file from a session other than its leader.
func (w *world) ledLocked(s *fakeSession, ino meta.Ino) error {
	var leader meta.SessionID
	if err := namespace.Leaders(w.store, func(led meta.Ino, of meta.SessionID) {
		if led == ino {
			leader = of
		}
	}); err != nil {
		return err
	}
	if leader != 0 && leader != s.id {
		return meta.E("write", meta.NotPermitted, fmt.Sprint("inode ", ino), errors.New("another session leads the file"))
	}
	return nil
}

// sealEndLocked seals the chunk at the open end of a file at the synced length.
func (w *world) sealEndLocked(ino meta.Ino) error {
	var at []meta.ChunkID
	err := namespace.OpenEnded(w.store, func(of meta.Ino, c meta.ChunkRecord) bool {
		if of == ino {
			at = append(at, c.ID)
		}
		return true
	})
	for _, id := range at {
		c := w.chunks[id]
		c.sealed, c.data = true, c.data[:c.synced]
		_, eff, err := namespace.Execute(w.store, w.context(0, meta.OpID{}), &meta.SealChunk{Chunk: id, Length: c.synced, Fence: meta.Fence{Term: 1}, Servers: []meta.ServerID{1}})
		if err != nil {
			return err
		}
		w.store.apply(eff)
	}
	return err
}

// fakeChunk is one chunk in memory.
type fakeChunk struct {
	w      *world
	id     meta.ChunkID
	data   []byte
	synced uint64
	sealed bool
	broken error
}

type fakeChunks struct {
	w *world
	s *fakeSession
}

type fakeWriter struct {
	s *fakeSession
	c *fakeChunk
	n atomic.Uint64 // asked for under inodes' locks, which world.check takes under mu
	g meta.ChunkGrant
}

func (f *fakeChunks) NewWriter(g meta.ChunkGrant) chunkWriter {
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	return &fakeWriter{s: f.s, c: f.w.chunks[g.ID], g: g}
}

func (x *fakeWriter) Append(_ context.Context, p []byte) (uint64, error) {
	if err := x.s.heard("append"); err != nil {
		return 0, err
	}
	w := x.c.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if x.c.broken == nil && w.failChunk != nil {
		x.c.broken = w.failChunk("append", x.c.id)
	}
	if x.c.broken != nil {
		return 0, x.c.broken
	}
	if x.c.sealed {
		return 0, meta.E("append", meta.Sealed, x.c.id.String(), nil)
	}
	if x.g.MaxLen > 0 && x.n.Load()+uint64(len(p)) > x.g.MaxLen {
		return 0, meta.E("append", meta.FileTooBig, x.c.id.String(), nil)
	}
	off := x.n.Load()
	x.c.data = append(x.c.data, p...)
	x.n.Add(uint64(len(p)))
	return off, nil
}

func (x *fakeWriter) Sync(context.Context) error {
	if err := x.s.heard("sync"); err != nil {
		return err
	}
	w := x.c.w
	w.mu.Lock()
	defer w.mu.Unlock()
	w.chunkSyncs++
	n := x.n.Load()
	if w.syncTakes != nil {
		takes := w.syncTakes(x.c.id)
		w.mu.Unlock()
		time.Sleep(takes)
		w.mu.Lock()
	}
	if x.c.broken == nil && w.failChunk != nil {
		x.c.broken = w.failChunk("sync", x.c.id)
	}
	if x.c.broken != nil {
		return x.c.broken
	}
	if x.c.sealed {
		return meta.E("sync", meta.Sealed, x.c.id.String(), nil)
	}
	x.c.synced = max(x.c.synced, n)
	return nil
}

func (x *fakeWriter) Len() uint64  { return x.n.Load() }
func (x *fakeWriter) Close() error { return nil }

func (f *fakeChunks) ReadAt(_ context.Context, pl meta.ChunkPlace, p []byte, off uint64) error {
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	if f.w.failRead != nil {
		if err := f.w.failRead(); err != nil {
			return err
		}
	}
	c := f.w.chunks[pl.ID]
	if c == nil {
		return meta.E("read", meta.NoSuchChunk, pl.ID.String(), nil)
	}
	if off+uint64(len(p)) > uint64(len(c.data)) {
		return meta.E("read", meta.NoSuchOffset, pl.ID.String(), nil)
	}
	copy(p, c.data[off:])
	return nil
}

func (f *fakeChunks) File(context.Context, meta.ChunkPlace, uint64, uint64) (*os.File, func(), error) {
	return nil, nil, meta.E("open chunk", meta.NotSupported, "", nil)
}

func (f *fakeChunks) Backing(_ context.Context, pl meta.ChunkPlace) (*os.File, error) {
	return os.Open(os.DevNull)
}
func (f *fakeChunks) Prefetch(meta.ChunkPlace, uint64, uint64) {}
func (f *fakeChunks) Awaited([]meta.ServerID) bool {
	f.w.mu.Lock()
	defer f.w.mu.Unlock()
	return f.w.awaited
}
func (f *fakeChunks) Close() error { return nil }

func (x *fakeWriter) Within(context.Context, uint64) error { return nil }

func (x *fakeWriter) Failed() []meta.ServerID { return nil }

func (x *fakeWriter) Acked() uint64 { return x.Len() }
