package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// frameMax bounds the bytes of one append frame: enough to make the frame's own cost
// negligible, few enough to stay in the processor's cache from one copy to the next.
const frameMax = 512 << 10

// Writer appends to all replicas of one chunk. Its methods may be called from several
// goroutines; appends take effect in the order of the calls.
type Writer struct {
	c    *Client
	g    meta.ChunkGrant
	name string

	// sending is held while frames are written to the connections: it orders appends. Taken
	// before mu.
	sending sync.Mutex

	mu     sync.Mutex
	cond   sync.Cond
	length uint64
	reps   []*replica // empty until the first append
	err    error
	failed []meta.ServerID // the servers that caused err
	// token is the capability. Half of the capability's life is over at half, all at until.
	token       []byte
	half, until time.Time
	renewing    bool
	closed      bool
}

// replica is the progress of one copy of the chunk. INVARIANT: synced <= acked <=
// Writer.length; synced <= asked.
type replica struct {
	id     meta.ServerID
	l      *link // nil with svc
	svc    chunkserver.Service
	acked  uint64
	synced uint64
	asked  uint64 // a sync up to here is under way or done
}

func (r *replica) release() {
	if r.l != nil {
		r.l.release()
	}
}

// NewWriter starts appending to a fresh chunk; nothing is sent before the
// first Append.
func (c *Client) NewWriter(g meta.ChunkGrant) *Writer {
	w := &Writer{c: c, g: g, name: g.ID.String(), token: g.Cap}
	if g.TTL > 0 && c.cfg.AppendCap != nil {
		w.lifeLocked(time.Unix(0, int64(g.Asked)), time.Duration(g.TTL)*time.Millisecond)
	}
	w.cond.L = &w.mu
	return w
}

// ID returns the id of the chunk.
func (w *Writer) ID() meta.ChunkID { return w.g.ID }

// Append appends p and returns its offset in the chunk. The caller may reuse p when Append
// returns; the bytes are on the replicas only after Wait, and durable only after Sync. Append
// blocks while more than the window is unacknowledged. After an error the writer is broken and
// the chunk must be sealed, except after FileTooBig (p would exceed the grant's MaxLen;
// nothing was appended) and Canceled (part of p may have been appended; the next offset
// tells).
func (w *Writer) Append(ctx context.Context, p []byte) (off uint64, err error) {
	const op = "append"
	w.sending.Lock()
	defer w.sending.Unlock()
	token, err := w.fresh(ctx)
	if err != nil {
		return 0, err
	}
	if err := w.open(ctx, token); err != nil {
		return 0, err
	}
	w.mu.Lock()
	off = w.length
	w.mu.Unlock()
	if w.g.MaxLen != 0 && off+uint64(len(p)) > w.g.MaxLen {
		return 0, meta.E(op, meta.FileTooBig, w.name, fmt.Errorf("%d bytes at %d, at most %d", len(p), off, w.g.MaxLen))
	}
	for at := off; len(p) > 0; {
		n := min(len(p), frameMax)
		if err := w.room(ctx, uint64(n)); err != nil {
			return 0, err
		}
		w.send(at, p[:n])
		at += uint64(n)
		p = p[n:]
	}
	return off, w.Err()
}

// open connects to all replicas, the first time.
func (w *Writer) open(ctx context.Context, token []byte) error {
	w.mu.Lock()
	err, have, closed := w.err, len(w.reps) > 0, w.closed
	w.mu.Unlock()
	switch {
	case err != nil:
		return err
	case closed:
		return meta.E("append", meta.Canceled, w.name, errors.New("the writer is closed"))
	case have:
		return nil
	case len(w.g.Servers) == 0:
		return w.fail(meta.E("append", meta.Invalid, w.name, errors.New("a grant without servers")))
	}
	// In parallel: a server without an answer costs its time once.
	reps := make([]*replica, len(w.g.Servers))
	errs := make([]error, len(reps))
	var wg sync.WaitGroup
	for i, id := range w.g.Servers {
		r := &replica{id: id}
		if r.svc = w.c.cfg.Direct(id); r.svc != nil {
			reps[i] = r
			continue
		}
		wg.Go(func() {
			if r.l, errs[i] = w.c.peer(id).link(ctx, w.c.pool(forAppends, token)); errs[i] == nil {
				reps[i] = r
			}
		})
	}
	wg.Wait()
	if err := cmp.Or(errs...); err != nil {
		for _, r := range reps {
			if r != nil {
				r.release()
			}
		}
		if ctx.Err() != nil {
			return meta.E("append", meta.Canceled, w.name, ctx.Err())
		}
		for i, err := range errs {
			if err != nil {
				w.blame(w.g.Servers[i], err)
			}
		}
		return w.Err()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		for _, r := range reps {
			r.release()
		}
		return meta.E("append", meta.Canceled, w.name, errors.New("the writer is closed"))
	}
	w.reps = reps
	return nil
}

// lifeLocked notes how long the token holds.
func (w *Writer) lifeLocked(asked time.Time, ttl time.Duration) {
	w.half, w.until = asked.Add(ttl/2), asked.Add(ttl)
}

func (w *Writer) capability() []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.token
}

// fresh returns the capability. After half of the capability's life, fresh renews the
// capability in the background; an append after the capability's end waits for the renewal.
func (w *Writer) fresh(ctx context.Context) ([]byte, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	if w.half.IsZero() || now.Before(w.half) || w.closed {
		return w.token, nil
	}
	if !w.renewing {
		w.c.mu.Lock()
		if w.renewing = !w.c.closed; w.renewing {
			w.c.wg.Go(w.renew)
		}
		w.c.mu.Unlock()
	}
	if now.Before(w.until) {
		return w.token, nil
	}
	err := w.wait(ctx, func() bool { return !w.renewing })
	if meta.KindOf(err) == meta.Canceled {
		return nil, err
	}
	return w.token, nil
}

const (
	renewWait  = 5 * time.Second
	renewAgain = time.Second // after a failure
)

func (w *Writer) renew() {
	ctx, cancel := context.WithTimeout(w.c.ctx, renewWait)
	defer cancel()
	asked := time.Now()
	token, ttl, err := w.c.cfg.AppendCap(ctx, w.g.ID)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.renewing = false
	if err != nil {
		// The present capability may be valid for a while; after that, servers refuse it.
		w.half = time.Now().Add(renewAgain)
	} else {
		w.token = token
		w.lifeLocked(asked, ttl)
	}
	w.cond.Broadcast()
}

// room waits until n more bytes fit the window.
func (w *Writer) room(ctx context.Context, n uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.wait(ctx, func() bool { return w.length+n-w.ackedLocked() <= uint64(w.c.cfg.Window) })
}

// wait waits for a condition, the writer's failure, or ctx. w.mu is held.
func (w *Writer) wait(ctx context.Context, ok func() bool) error {
	if w.err == nil && ok() {
		return nil
	}
	reps := w.reps
	w.mu.Unlock() // a full socket must not keep answers from being taken
	for _, r := range reps {
		if r.l != nil {
			_ = r.l.Flush() // the connection's reader reports errors
		}
	}
	w.mu.Lock()
	defer context.AfterFunc(ctx, func() {
		w.mu.Lock()
		w.cond.Broadcast()
		w.mu.Unlock()
	})()
	for w.err == nil && !ok() {
		if ctx.Err() != nil {
			return meta.E("append", meta.Canceled, w.name, ctx.Err())
		}
		w.cond.Wait()
	}
	return w.err
}

// send sends one frame to every replica.
func (w *Writer) send(off uint64, p []byte) {
	end := off + uint64(len(p))
	w.mu.Lock()
	w.length = end
	w.mu.Unlock()
	var crc uint32
	for _, r := range w.reps {
		if r.l == nil || r.l.ring == nil || len(p) < shareFrom {
			crc = chunkserver.CRC(p)
			break
		}
	}
	if len(w.reps) == 1 || len(p) < shareFrom { // small frames don't wait for the socket
		for _, r := range w.reps {
			w.sendTo(r, off, end, p, crc)
		}
		return
	}
	// In parallel, to wait only for the slowest replica's socket.
	var wg sync.WaitGroup
	for _, r := range w.reps {
		wg.Go(func() { w.sendTo(r, off, end, p, crc) })
	}
	wg.Wait()
}

func (w *Writer) sendTo(r *replica, off, end uint64, p []byte, crc uint32) {
	if r.svc != nil {
		err := r.svc.Append(context.Background(), w.g.ID, w.g.Fence, off, p, crc)
		w.mu.Lock()
		if err == nil {
			r.acked = max(r.acked, end)
		} else {
			w.failLocked(r.id, err)
		}
		w.cond.Broadcast()
		w.mu.Unlock()
		return
	}
	q := wire.Request{Cap: w.capability(), Chunk: w.g.ID, Fence: w.g.Fence, Off: off}
	k := &call{t: wire.Append}
	var ringEnd uint64
	k.notify = func(_ *wire.Answer, err error) {
		if ringEnd != 0 {
			r.l.ring.give(ringEnd)
		}
		w.mu.Lock()
		if err == nil {
			r.acked = max(r.acked, end) // answers to appends come in order
		} else {
			w.failLocked(r.id, err)
		}
		w.cond.Broadcast()
		w.mu.Unlock()
	}
	if g := r.l.ring; g != nil && len(p) >= shareFrom {
		g.mu.Lock()
		defer g.mu.Unlock()
		if mem, pos, e := g.take(len(p)); mem != nil {
			ringEnd = e
			q.Pos, q.N, q.CRC = pos, uint32(len(p)), copyCRC(mem, p)
			w.put(r, &q, k, wire.FlagShared, nil, 0)
			return
		}
		crc = chunkserver.CRC(p)
	}
	w.put(r, &q, k, 0, p, crc)
}

// copyCRC copies p to dst and returns its checksum, in steps that stay in the processor's
// cache between copying and summing.
func copyCRC(dst, p []byte) (crc uint32) {
	for len(p) > 0 {
		n := copy(dst[:min(len(p), 32<<10)], p)
		crc = chunkserver.UpdateCRC(crc, dst[:n])
		dst, p = dst[n:], p[n:]
	}
	return crc
}

// shareFrom is the least number of bytes for which the ring is worthwhile: fewer travel with
// the frame in one system call anyway.
const shareFrom = 16 << 10

func (w *Writer) put(r *replica, q *wire.Request, k *call, flags uint16, p []byte, crc uint32) {
	l := r.l
	id, err := l.start(k)
	if err != nil {
		// Not through notify, which takes the ring's lock: the calling goroutine may hold the
		// lock.
		w.blame(r.id, err)
		return
	}
	var frame [512]byte
	b := q.AppendFrame(frame[:0], k.t, flags, id, len(p), crc)
	if k.t == wire.Append && len(p) < shareFrom && flags == 0 {
		// Usually a sync follows at once: send both with one system call.
		err = l.SendSoon(b, p)
	} else {
		err = l.Send(b, p)
	}
	if err != nil {
		l.Close() // the connection's reader ends all calls
	}
}

// fail is blame for errors that no server caused.
func (w *Writer) fail(err error) error {
	w.blame(0, err)
	return w.Err()
}

func (w *Writer) blame(id meta.ServerID, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failLocked(id, err)
	w.cond.Broadcast()
}

// failLocked ends the writer. If the owner sealed the chunk, or a capability expired, the
// replica that reports this has not failed (rule 18).
func (w *Writer) failLocked(id meta.ServerID, err error) {
	kind := meta.KindOf(err)
	if w.err == nil {
		w.err = meta.E("append to chunk", kind, w.name, err)
	}
	switch kind {
	case meta.Unavailable, meta.IO, meta.NoSpace, meta.Corrupt, meta.WrongOffset, meta.NoSuchChunk, meta.Protocol, meta.Version:
		if id != 0 && !slices.Contains(w.failed, id) {
			w.failed = append(w.failed, id)
		}
	}
}

// Failed lists the servers whose failure ended the writer.
func (w *Writer) Failed() []meta.ServerID {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.failed)
}

func (w *Writer) ackedLocked() uint64 {
	acked := w.length
	for _, r := range w.reps {
		acked = min(acked, r.acked)
	}
	return acked
}

func (w *Writer) syncedLocked() uint64 {
	synced := w.length
	for _, r := range w.reps {
		synced = min(synced, r.synced)
	}
	return synced
}

// Wait returns when every replica has acknowledged all bytes appended before
// the call.
func (w *Writer) Wait(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	upTo := w.length
	return w.wait(ctx, func() bool { return w.ackedLocked() >= upTo })
}

// Within returns when at most n of the bytes appended before the call are not
// acknowledged by every replica.
func (w *Writer) Within(ctx context.Context, n uint64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	upTo := w.length - min(n, w.length)
	return w.wait(ctx, func() bool { return w.ackedLocked() >= upTo })
}

// Sync returns when all bytes appended before the call are durable on every replica. The
// request follows the appends at once, without waiting for their answers; several callers
// share one request.
func (w *Writer) Sync(ctx context.Context) error {
	if _, err := w.fresh(ctx); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	upTo := w.length
	var direct *replica
	for _, r := range w.reps {
		if w.err == nil && r.synced < upTo && r.asked < upTo {
			r.asked = upTo
			if r.svc != nil {
				direct = r // called after the other requests: a direct sync blocks this goroutine
				continue
			}
			w.mu.Unlock()
			w.ask(r, upTo)
			w.mu.Lock()
		}
	}
	if direct != nil {
		w.mu.Unlock()
		// Appends under way belong to the sync: their lock is free once the frames are sent.
		w.sending.Lock()
		svc := direct.svc
		w.sending.Unlock()
		synced, err := svc.Sync(context.Background(), w.g.ID, upTo)
		w.mu.Lock()
		if err == nil {
			w.syncedToLocked(direct, upTo, synced)
		} else {
			w.failLocked(direct.id, err)
		}
		w.cond.Broadcast()
	}
	return w.wait(ctx, func() bool { return w.syncedLocked() >= upTo })
}

// syncedToLocked handles a replica's answer to a sync. Its mark is below the requested length
// if a seal cut the chunk meanwhile: the bytes beyond will never exist, so no caller must wait
// for them.
func (w *Writer) syncedToLocked(r *replica, upTo, mark uint64) {
	r.synced = max(r.synced, min(mark, w.length))
	r.acked = max(r.acked, min(upTo, mark))
	if mark < upTo {
		w.failLocked(r.id, meta.E("sync", meta.Sealed, w.name, fmt.Errorf("it ends at %d, before %d", mark, upTo)))
	}
}

func (w *Writer) ask(r *replica, upTo uint64) {
	// After the covered appends, which hold sending until they are sent.
	w.sending.Lock()
	defer w.sending.Unlock()
	q := wire.Request{Cap: w.capability(), Chunk: w.g.ID, Off: upTo}
	w.put(r, &q, &call{t: wire.Sync, notify: func(a *wire.Answer, err error) {
		w.mu.Lock()
		if err == nil {
			w.syncedToLocked(r, upTo, a.Synced)
		} else {
			w.failLocked(r.id, err)
		}
		w.cond.Broadcast()
		w.mu.Unlock()
	}}, 0, nil, 0)
}

// Len is the number of bytes appended so far, acknowledged or not.
func (w *Writer) Len() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.length
}

// Acked returns the number of bytes from the chunk's start that every replica has
// acknowledged.
func (w *Writer) Acked() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ackedLocked()
}

// Synced returns the number of bytes that are durable on every replica.
func (w *Writer) Synced() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.syncedLocked()
}

// Err is the sticky error, or nil.
func (w *Writer) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// Close releases the writer's resources. It neither waits nor syncs nor seals.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	for _, r := range w.reps {
		r.release() // frames delayed by SendSoon are sent all the same
	}
	return nil
}
