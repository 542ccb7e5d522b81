package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
)

// kernel is the part of an owner that the owner's guests use: the volume's state, the journal,
// and the owner's life. A guest reads the state with read, changes the state with do, gives
// orders to chunk servers with order, reads a frozen state with freezeState, and runs its task
// with runTask. A guest that must look at its own state and the volume's at the same time holds
// mu, and uses view and start.
type kernel struct {
	srv *Server
	vol meta.VolumeID
	log *slog.Logger
	own Ownership
	j   Journal
	st  Store
	// use counts what the volume uses, and promises of further use.
	use useAccount
	// lost sends the sessions to the next owner and ends the owner, whose volume was lost.
	lost func(cause error)

	mu    sync.Mutex
	ov    *overlay
	cache *cache
	// cur is the entry being filled. queue holds the closed entries waiting for the journal.
	cur     *entry
	queue   []*entry
	queued  int // bytes of the entries in queue
	durable meta.Seq
	waiters []waiter
	wake    chan struct{} // wakes the committer; capacity 1
	failed  error
	noSpace error // not nil: etcd refuses writes
	// stClosed: st must not be read any more.
	stClosed bool

	sessions map[meta.SessionID]*journaled
	// entered maps each session that has entered the volume to a number; a session that enters
	// again gets a new number. A call waiting while its session enters again is not executed.
	// entries is the last number given.
	entered map[*session]uint64
	entries uint64

	// recovered is closed when operations other than replays may run.
	recovered chan struct{}
	// wanted: a caller other than a session's replay waits for recovered.
	wanted atomic.Bool
	// leaving: the volume is being handed over, and new calls are not answered. leaving is
	// closed if the volume stays here after all.
	leaving chan struct{}
	closed  chan struct{} // not nil: no session may enter until closed is closed

	restored *cluster.Restoration // nil: the volume was never restored

	tasks tasks

	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     task.Group
}

// useAccount is told of the use of a volume, and knows the promises. The caller holds the
// kernel's mu.
type useAccount interface {
	// noteUse takes note of the volume's use after an operation.
	noteUse(bytes, inodes uint64)
	// Promised is the sum of the bytes promised to sessions and not yet used.
	Promised() uint64
}

// view returns the state as the owner itself sees it. The caller holds mu while it reads.
func (k *kernel) view() *view { return &view{k: k} }

// read calls fn with the state, under mu, unless the owner has ended. The caller does not hold
// mu.
func (k *kernel) read(fn func(v *view) error) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return k.failed
	}
	return fn(k.view())
}

func (k *kernel) now() meta.Time { return meta.Time(time.Now().UnixNano()) }

func (k *kernel) context(s meta.SessionID) namespace.Context {
	return namespace.Context{Now: k.now(), Session: s, Term: k.own.Term(), Volume: k.vol, Seq: k.cur.seq}
}

// policy reads the volume's policy.
func (k *kernel) policy() (meta.Policy, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return namespace.Policy(k.view())
}

// chunkRecord returns a chunk's current record, or nil if the record is gone.
func (k *kernel) chunkRecord(id meta.ChunkID) (now *meta.ChunkRecord, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	err = namespace.ChunksFrom(k.view(), id, func(c meta.ChunkRecord) bool {
		if c.ID == id {
			now = &c
		}
		return false
	})
	return now, err
}

// do runs an operation of the owner itself, unless refused by may, and waits until the journal
// has the operation. may, if not nil, is called under mu before the operation. The caller does
// not hold mu.
func (k *kernel) do(ctx context.Context, op meta.Op, may func() error) (*meta.Result, error) {
	k.mu.Lock()
	var err error
	if may != nil {
		err = may()
	}
	if err != nil {
		k.mu.Unlock()
		return nil, err
	}
	res, wait, err := k.start(op, 0)
	k.mu.Unlock()
	if err != nil {
		return nil, err
	}
	return res, k.await(ctx, wait)
}

// start is run, and also returns the channel that is closed when the operation is in the journal.
// The caller holds mu.
func (k *kernel) start(op meta.Op, as meta.SessionID) (*meta.Result, <-chan struct{}, error) {
	seq := k.cur.seq
	res, err := k.run(op, as)
	if err != nil {
		return nil, nil, err
	}
	return res, k.untilDurable(seq), nil
}

// run executes an operation of the owner itself and applies its effects. The caller holds mu.
func (k *kernel) run(op meta.Op, as meta.SessionID) (*meta.Result, error) {
	if k.failed != nil {
		return nil, k.failed
	}
	w := &view{k: k, session: as}
	res, effects, err := k.execute(op, as, meta.OpID{}, false, w)
	if err != nil {
		return nil, err
	}
	k.apply(effects, 0)
	return res, nil
}

// execute runs an operation of the owner or of a session, and returns the effects for apply. If
// the operation meets the truncated tail of a file, which still has to be reaped, execute reaps
// the tail and runs the operation again. The caller holds mu.
func (k *kernel) execute(op meta.Op, as meta.SessionID, id meta.OpID, replay bool, w *view) (*meta.Result, []namespace.Effect, error) {
	return k.executeFor(op, as, id, replay, 0, w)
}

// executeFor is execute for an operation with reserved bytes promised to the session.
func (k *kernel) executeFor(op meta.Op, as meta.SessionID, id meta.OpID, replay bool, reserved uint64, w *view) (*meta.Result, []namespace.Effect, error) {
	for range 1 << 20 {
		c := k.context(as)
		c.Op, c.Replay, c.Squash, c.NoStreams = id, replay, w.squash, w.noStreams
		c.Reserved, c.Held = reserved, k.use.Promised()-reserved
		res, effects, err := namespace.Execute(w, c, op)
		if err == nil || !errors.Is(err, meta.Again) {
			return res, effects, err
		}
		if rerr := k.reapOne(err); rerr != nil {
			return nil, nil, rerr
		}
	}
	return nil, nil, meta.E("execute", meta.Busy, "", errors.New("the reaping does not end"))
}

// reapOne removes a bounded part of the tail of the truncated file named by cause, the error
// of a blocked operation. Without progress reapOne returns cause. The caller holds mu.
func (k *kernel) reapOne(cause error) error {
	var e *meta.Error
	var ino meta.Ino
	if errors.As(cause, &e) {
		if n, ok := strings.CutPrefix(e.Subject, "inode "); ok {
			i, _ := strconv.ParseUint(n, 10, 64)
			ino = meta.Ino(i)
		}
	}
	if ino == 0 {
		return cause
	}
	w := k.view()
	res, effects, err := namespace.Execute(w, k.context(0), &meta.Reap{Ino: ino, Max: 4096})
	if err != nil {
		return err
	}
	if len(effects) == 0 && !res.EOF {
		return cause
	}
	k.apply(effects, 0)
	return nil
}

// apply adds the effects of an executed operation to the current entry and the overlay. Caller
// holds mu.
func (k *kernel) apply(effects []namespace.Effect, by meta.SessionID) {
	if bytes, inodes, ok := namespace.UsageAfter(effects); ok {
		k.use.noteUse(bytes, inodes)
	}
	first := len(k.cur.effects) == 0
	for _, ef := range effects {
		k.ov.add(k.cur, ef, by)
	}
	if k.cur.bytes >= maxEntryBytes {
		k.cut()
		first = true
	}
	if first && len(effects) > 0 {
		select {
		case k.wake <- struct{}{}:
		default:
		}
	}
}

// cut closes the current entry. The caller holds mu.
func (k *kernel) cut() {
	k.queue = append(k.queue, k.cur)
	k.queued += k.cur.bytes
	k.cur = &entry{seq: k.cur.seq + 1, sessions: map[*session]struct{}{}}
}

// full returns why the owner can't take an operation for want of space, or nil. The caller
// holds mu.
func (k *kernel) full(op meta.Op) error {
	if k.noSpace != nil {
		return k.noSpace
	}
	t := k.srv.room.tight.Load()
	if t == nil || !t.hard && frees(op) {
		return nil
	}
	return t.err
}

// untilDurable returns a channel that is closed when entry seq is in the journal, and wakes
// the committer to write the entry now. The caller holds mu.
func (k *kernel) untilDurable(seq meta.Seq) <-chan struct{} {
	// An operation without effects may leave the current entry empty. An empty entry is never
	// journaled, so waiting for its number would not end.
	if seq = min(seq, k.newest()); seq <= k.durable {
		return closedChan
	}
	k.hurry()
	for i := range k.waiters {
		if k.waiters[i].seq == seq {
			return k.waiters[i].ch
		}
	}
	ch := make(chan struct{})
	k.waiters = append(k.waiters, waiter{seq, ch})
	return ch
}

// newest is the last entry with effects: the current entry, or the entry before if the current
// entry is empty. The caller holds mu.
func (k *kernel) newest() meta.Seq {
	if len(k.cur.effects) == 0 {
		return k.cur.seq - 1
	}
	return k.cur.seq
}

// hurry makes the committer write the current entry now. The caller holds mu.
func (k *kernel) hurry() {
	k.cur.urgent = true
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// take returns the entry to journal next, or nil; the current entry stays open until gather
// closes it. The caller holds mu.
func (k *kernel) take() (e *entry, urgent bool) {
	if len(k.queue) > 0 {
		return k.queue[0], true // the entry is full
	}
	if len(k.cur.effects) == 0 {
		return nil, false
	}
	return k.cur, k.cur.urgent
}

// gather waits until the entry has a waiter or is full, or CommitDelay is over. It returns
// false if the owner ended.
func (k *kernel) gather(e *entry) bool {
	t := time.NewTimer(k.srv.cfg.CommitDelay)
	defer t.Stop()
	for {
		select {
		case <-k.wake:
			k.mu.Lock()
			ready := e.urgent || len(k.queue) > 0
			k.mu.Unlock()
			if ready {
				return true
			}
		case <-t.C:
			return true
		case <-k.ctx.Done():
			return false
		}
	}
}

// waitForSpace frees space in etcd and waits a moment; the caller then tries again. Until etcd
// takes writes again, the owner answers reads and refuses new mutations; a checkpoint permits
// the trimming of the journal.
func (k *kernel) waitForSpace(cause error) error {
	k.mu.Lock()
	if k.noSpace == nil {
		k.noSpace = meta.E("journal", meta.NoSpace, fmt.Sprintf("volume %d", k.vol), cause)
		k.log.Error("the journal has no space: the volume takes no changes until there is some", "error", cause)
	}
	k.mu.Unlock()
	if err := k.srv.cfg.Cluster.Relieve(k.ctx); err != nil {
		k.log.Warn("no space could be freed in etcd", "error", err)
	}
	select {
	case <-time.After(200 * time.Millisecond):
		return nil
	case <-k.ctx.Done():
		return context.Cause(k.ctx)
	}
}

// flush waits until the journal has every operation answered so far.
func (k *kernel) flush(ctx context.Context) error {
	k.mu.Lock()
	wait := k.untilDurable(k.newest())
	k.mu.Unlock()
	return k.await(ctx, wait)
}

// settled waits until every operation answered so far is in the store.
func (k *kernel) settled(ctx context.Context) error {
	if err := k.flush(ctx); err != nil {
		return err
	}
	return k.awaitApplied(ctx)
}

// awaitApplied waits until every journaled operation is in the store.
func (k *kernel) awaitApplied(ctx context.Context) error {
	k.mu.Lock()
	seq := k.durable
	k.mu.Unlock()
	for k.st.Applied().Seq < seq {
		select {
		case <-time.After(time.Millisecond):
		case <-k.ctx.Done():
			return k.gone()
		case <-ctx.Done():
			return meta.E("read the store", meta.Canceled, k.subject(), context.Cause(ctx))
		}
	}
	return nil
}

// freezeState returns the store's state, to be read while changes go on. The caller closes the
// view, then calls release. Scans end with ctx or with the owner.
func (k *kernel) freezeState(ctx context.Context, c *checking) (view frozenReader, release func(), err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.freezeLocked(ctx, c)
}

// freezeLocked is freezeState. The caller holds mu.
func (k *kernel) freezeLocked(ctx context.Context, c *checking) (view frozenReader, release func(), err error) {
	if k.ctx.Err() != nil || k.stClosed {
		return view, nil, k.gone()
	}
	k.wg.Hold() // keeps the store open
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(k.ctx, func() { cancel(context.Cause(k.ctx)) })
	return frozenReader{k.st.Freeze(), ctx, c}, func() { stop(); cancel(nil); k.wg.Release() }, nil
}

// freezeWhole is freezeState, but fails while the volume is being rolled back: the state then
// is neither the state before nor the state after. Errors: Busy, NotOwner.
func (k *kernel) freezeWhole(ctx context.Context) (frozenReader, func(), error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed != nil && k.ctx.Err() == nil {
		return frozenReader{}, nil, meta.E("compare", meta.Busy, k.subject(), errors.New("it is being rolled back"))
	}
	return k.freezeLocked(ctx, &checking{})
}

// await waits until ch is closed. Waiting for recovered makes the recovery end missing sessions
// sooner. Errors: Interrupted (ctx ended), NotOwner (the owner ended).
func (k *kernel) await(ctx context.Context, ch <-chan struct{}) error {
	if ch == k.recovered && ctx != k.ctx {
		k.wantRecovered()
	}
	return k.awaitIdly(ctx, ch)
}

// awaitIdly is await for status requests, which programs send all the time: an idle wait does
// not make the recovery end missing sessions any sooner.
func (k *kernel) awaitIdly(ctx context.Context, ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		return meta.E("call", meta.Interrupted, "", context.Cause(ctx))
	case <-k.ctx.Done():
		return k.gone()
	}
}

// wantRecovered notes that a caller waits for the volume, and returns the channel closed after
// the recovery.
func (k *kernel) wantRecovered() <-chan struct{} {
	k.wanted.Store(true)
	return k.recovered
}

// unwanted reports whether no caller waits for the volume.
func (k *kernel) unwanted() bool { return !k.wanted.Load() }

// has reports whether the session entered the volume and the owner still serves.
func (k *kernel) has(s *session) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.entered[s]
	return ok && k.failed == nil
}

// runTask runs a task until the owner ends. The task waits until the previous owner's sessions
// are back or over.
func (k *kernel) runTask(t *task.Task) {
	if k.await(k.ctx, k.recovered) == nil {
		t.Run(k.ctx)
	}
}

// goes runs f in a goroutine; the owner waits for f before closing its store. false: the owner
// has ended and f does not run.
func (k *kernel) goes(f func()) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ctx.Err() != nil || k.stClosed {
		return false
	}
	k.wg.Go(f)
	return true
}

// order is Order with the owner's term: a chunk server that knows of a successor refuses the
// order.
func (k *kernel) order(ctx context.Context, id meta.ServerID, or meta.Order) (meta.OrderResult, error) {
	or.Owner, or.Term = k.vol, k.own.Term()
	return k.srv.chunkServers.Order(ctx, id, or)
}

// quarantined reports whether chunks unknown to the journal must stay on the disks.
func (k *kernel) quarantined() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return isQuarantined(k.restored)
}

// outsideLease reports whether another server may own the volume by now (rule 2). Either the
// lease is renewed in a moment, or the volume is lost.
func (k *kernel) outsideLease() bool { return k.own.Left() <= 0 && !k.srv.cfg.Unsafe.NoLease }

func (k *kernel) subject() string { return fmt.Sprintf("volume %d", k.vol) }

// gone is the error after the owner stopped serving: NotOwner, with the address of the next
// owner if known. The caller retries there.
func (k *kernel) gone() error {
	cause := context.Cause(k.ctx)
	var to handedOver
	errors.As(cause, &to)
	return meta.E("volume", meta.NotOwner, to.addr, cause)
}

// part makes the owner stop serving: waiting requests fail with NotOwner, which names the next
// owner's address to, if known. It returns false if the owner parted before. The caller holds
// mu.
func (k *kernel) part(to string, cause error) bool {
	if k.failed != nil {
		return false
	}
	k.failed = meta.E("volume", meta.NotOwner, to, cause)
	k.waiters = nil // the end of ctx ends the waits
	return true
}

// lose ends the serving of a volume after an error of the fence, the journal or the store:
// this server can't go on. Operations not journaled are dropped with the overlay; clients send
// them to the next owner, and see no failure.
func (k *kernel) lose(cause error) {
	k.mu.Lock()
	first := k.part("", cause)
	k.mu.Unlock()
	if !first {
		return
	}
	k.log.Warn("the volume is served here no more", "error", cause)
	k.lost(cause)
}
