package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

const block = chunkserver.ChecksumBlock

// local lists the descriptor-passing servers on this machine.
func (c *Client) local(servers []meta.ServerID) (ids []meta.ServerID) {
	for _, id := range servers {
		if c.isLocal(id) {
			ids = append(ids, id)
		}
	}
	return ids
}

func (c *Client) isLocal(id meta.ServerID) bool {
	info, ok := c.cfg.Resolve(id)
	if !ok || c.cfg.HostID == "" || info.Host != c.cfg.HostID {
		return false
	}
	return strings.HasPrefix(info.Addr, "unix:") || c.besides(&info) && c.peer(id).mayLocal()
}

// ReadAt fills p with the chunk's bytes from off on, verified against checksums, from the
// nearest replica that can serve the bytes. Of an open chunk, only acknowledged bytes can be
// read. Errors: NoSuchOffset (past the end), NoSuchChunk, Corrupt (no replica has good bytes,
// and at least one has bad bytes), IO (the bytes were accepted as lost), Unavailable,
// BadCapability.
func (c *Client) ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error {
	if len(p) == 0 {
		return nil
	}
	if pl.Sealed && len(pl.Servers) == 0 {
		return meta.E("read chunk", meta.IO, pl.ID.String(), errors.New("it has no replica: an operator accepted that it is lost"))
	}
	if pl.Sealed && off+uint64(len(p)) > pl.Length {
		return meta.E("read chunk", meta.NoSuchOffset, pl.ID.String(), fmt.Errorf("%d bytes at %d of %d", len(p), off, pl.Length))
	}
	if f := c.cached(pl.ID, pl.Sealed); f != nil {
		err := f.readAt(ctx, p, off)
		f.unref()
		if err == nil {
			return nil
		}
	}
	var worst error
	for _, id := range c.local(pl.Servers) {
		err := c.readLocal(ctx, id, &pl, p, off)
		if err == nil {
			return nil
		}
		c.tell(pl.ID, id, err)
		worst = worse(worst, err)
	}
	if len(pl.Servers) > 0 && c.readAhead(ctx, &pl, p, off) {
		return nil
	}
	err := c.readRemote(ctx, &pl, p, off)
	if err == nil {
		return nil
	}
	return worse(worst, err)
}

// tell reports a corrupt replica.
func (c *Client) tell(id meta.ChunkID, server meta.ServerID, err error) {
	if meta.KindOf(err) != meta.Corrupt || c.cfg.Corrupt == nil {
		return
	}
	bad, now := badReplica{id, server}, time.Now()
	c.toldMu.Lock()
	again := now.Sub(c.told[bad]) < tellEvery
	if !again {
		if len(c.told) >= maxTold || c.told == nil {
			c.told = map[badReplica]time.Time{}
		}
		c.told[bad] = now
	}
	c.toldMu.Unlock()
	if !again {
		c.slog.Error("a replica does not verify", "chunk", id.String(), "server", uint64(server), "err", err)
		c.cfg.Corrupt(id, server)
	}
}

type badReplica struct {
	id     meta.ChunkID
	server meta.ServerID
}

const (
	tellEvery = 10 * time.Second // the same replica
	maxTold   = 1024
)

// worse returns the more informative error: corruption first, and an answer before no answer.
func worse(a, b error) error {
	rank := func(err error) int {
		switch meta.KindOf(err) {
		case meta.KindOK:
			return 0
		case meta.NotSupported:
			return 1
		case meta.Unavailable, meta.Canceled:
			return 2
		case meta.Corrupt:
			return 4
		}
		return 3
	}
	if rank(b) > rank(a) {
		return b
	}
	return a
}

// ---- over the wire

const (
	// remoteMax bounds the bytes of one read request; larger reads are split into parallel
	// requests.
	remoteMax = 1 << 20
	// rawFrom is the least read for which whole blocks are fetched and verified here; for
	// smaller ones the server verifies and cuts.
	rawFrom = 32 << 10
	// remoteStreams bounds the parallel requests of one ReadAt.
	remoteStreams = 4
)

func (c *Client) readRemote(ctx context.Context, pl *meta.ChunkPlace, p []byte, off uint64) error {
	servers := c.order(pl.Servers)
	if len(p) <= remoteMax {
		return c.fetch(ctx, servers, pl, p, off)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	slots := make(chan struct{}, remoteStreams)
	for len(p) > 0 && ctx.Err() == nil {
		// Cut at multiples of remoteMax, so that pieces are whole blocks.
		n := min(len(p), int(remoteMax-off%remoteMax))
		slots <- struct{}{}
		part, at := p[:n], off
		wg.Go(func() {
			if err := c.fetch(ctx, servers, pl, part, at); err != nil {
				cancel(err)
			}
			<-slots
		})
		p, off = p[n:], off+uint64(n)
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// fetch reads one piece from the first server that can serve the piece. It asks the next
// server when a server fails and, within a budget, when a server takes longer than nearly all
// reads do.
func (c *Client) fetch(ctx context.Context, servers []meta.ServerID, pl *meta.ChunkPlace, p []byte, off uint64) error {
	switch len(servers) {
	case 0:
		return meta.E("read chunk", meta.Unavailable, pl.ID.String(), errors.New("no servers"))
	case 1:
		return c.readPiece(ctx, servers[0], pl, p, off)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		buf    []byte // nil: p itself
		second bool   // asked beside another
		err    error
	}
	results := make(chan result, len(servers))
	var wg sync.WaitGroup
	begun := time.Now()
	next, under := 0, 0
	ask := func(buf []byte, second bool) {
		id := servers[next]
		next++
		under++
		wg.Go(func() {
			to := buf
			if to == nil {
				to = p
			}
			err := c.readPiece(ctx, id, pl, to, off)
			if ctx.Err() == nil {
				c.tell(pl.ID, id, err)
			}
			results <- result{buf, second, err}
		})
	}
	ask(nil, false)
	inP := true // an attempt under way writes to p
	patience := time.NewTimer(c.lat.patience(len(p)))
	defer patience.Stop()
	var worst error
	for {
		select {
		case r := <-results:
			under--
			if r.buf == nil {
				inP = false
			}
			if r.err == nil {
				c.lat.took(len(p), time.Since(begun))
				if r.second {
					c.lat.won.Add(1)
				}
				if r.buf != nil {
					cancel()
					wg.Wait() // nobody may write to p any more
					copy(p, r.buf)
				}
				return nil
			}
			worst = worse(worst, r.err)
			if ctx.Err() != nil {
				wg.Wait()
				return meta.E("read chunk", meta.Canceled, pl.ID.String(), ctx.Err())
			}
			if next < len(servers) {
				var buf []byte
				if inP {
					buf = make([]byte, len(p))
				}
				inP = inP || buf == nil
				ask(buf, false)
			} else if under == 0 {
				return worst
			}
		case <-patience.C:
			if next < len(servers) && c.lat.may() {
				c.lat.hedged.Add(1)
				var buf []byte
				if inP {
					buf = make([]byte, len(p))
				}
				inP = inP || buf == nil
				ask(buf, true)
			} else if next < len(servers) {
				patience.Reset(c.lat.patience(len(p))) // reads by other callers allow more second requests
			}
		case <-ctx.Done():
			wg.Wait()
			return meta.E("read chunk", meta.Canceled, pl.ID.String(), ctx.Err())
		}
	}
}

// bufPool holds buffers for reads of partial blocks.
var bufPool = sync.Pool{New: func() any { b := make([]byte, remoteMax+2*block); return &b }}

// readPiece reads from one server. If the server refuses the capability, readPiece renews the
// capability: such a refusal is no failure of the replica (rule 18).
func (c *Client) readPiece(ctx context.Context, id meta.ServerID, pl *meta.ChunkPlace, p []byte, off uint64) error {
	token := c.readCap(pl.ID)
	err := c.readWith(ctx, token, id, pl, p, off)
	if meta.KindOf(err) == meta.BadCapability && c.cfg.Renew != nil && ctx.Err() == nil {
		err = c.readWith(ctx, c.cfg.Renew(pl.ID, token), id, pl, p, off)
	}
	return err
}

func (c *Client) readWith(ctx context.Context, token []byte, id meta.ServerID, pl *meta.ChunkPlace, p []byte, off uint64) error {
	q := wire.Request{Cap: token, Chunk: pl.ID, Off: off, N: uint32(len(p))}
	end := off + uint64(len(p))
	if !pl.Sealed || len(p) < rawFrom || end > pl.Length {
		return c.ask(ctx, id, &q, &call{t: wire.Read, dst: p}, 0)
	}
	first := off / block * block
	last := min((end+block-1)/block*block, pl.Length)
	buf := p
	if first != off || last != end {
		scratch := bufPool.Get().(*[]byte)
		defer bufPool.Put(scratch)
		buf = (*scratch)[:last-first]
	}
	q.Off, q.N = first, uint32(len(buf))
	k := &call{t: wire.Read, dst: buf}
	if err := c.ask(ctx, id, &q, k, wire.FlagRaw); err != nil {
		return err
	}
	if k.bad && !c.cfg.UnsafeNoVerify {
		// Let the server compare: the server marks and reports bad bytes on its disk. Good
		// bytes changed on the way, and the server sends the bytes again.
		q.Off, q.N = off, uint32(len(p))
		return c.ask(ctx, id, &q, &call{t: wire.Read, dst: p}, 0)
	}
	if first != off || last != end {
		copy(p, buf[off-first:])
	}
	return nil
}

// ---- on this machine

func (c *Client) readLocal(ctx context.Context, id meta.ServerID, pl *meta.ChunkPlace, p []byte, off uint64) error {
	f, err := c.file(ctx, id, pl, 0)
	if err != nil {
		return err
	}
	defer f.unref()
	return f.readAt(ctx, p, off)
}

// localFile finds a local server's file and calls ensure, which verifies the needed bytes.
func (c *Client) localFile(ctx context.Context, pl *meta.ChunkPlace, flags uint16, ensure func(*file) error) (*file, error) {
	var err error = meta.E("open chunk", meta.NotSupported, pl.ID.String(), errors.New("no replica on this machine"))
	for _, id := range c.local(pl.Servers) {
		f, ferr := c.file(ctx, id, pl, flags)
		if ferr == nil {
			if ferr = ensure(f); ferr == nil {
				return f, nil
			}
			f.unref()
		}
		err = worse(err, ferr)
	}
	return nil, err
}

// File returns a read-only descriptor of the chunk's data file with verified bytes [off,
// off+n); file offsets are chunk offsets. The caller reads only with pread or splice, never
// closes the descriptor, and calls the returned function when done. Errors: NotSupported (no
// replica on this machine), and those of ReadAt.
func (c *Client) File(ctx context.Context, pl meta.ChunkPlace, off, n uint64) (*os.File, func(), error) {
	f, err := c.localFile(ctx, &pl, 0, func(f *file) error { return f.ensure(ctx, off, n) })
	if err != nil {
		return nil, nil, err
	}
	return f.os, f.unref, nil
}

// Backing returns a new descriptor of a sealed chunk, owned by the caller, after the server
// has verified every byte, for FUSE passthrough. Errors: NotSupported (not local or not
// sealed), and those of ReadAt.
func (c *Client) Backing(ctx context.Context, pl meta.ChunkPlace) (*os.File, error) {
	if !pl.Sealed {
		return nil, meta.E("open chunk", meta.NotSupported, pl.ID.String(), errors.New("not sealed"))
	}
	f, err := c.localFile(ctx, &pl, wire.FlagVerify, func(f *file) error { return f.whole(ctx, pl.Length) })
	if err != nil {
		return nil, err
	}
	defer f.unref()
	fd, err := unix.FcntlInt(uintptr(f.fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, meta.E("open chunk", meta.IO, pl.ID.String(), err)
	}
	return os.NewFile(uintptr(fd), pl.ID.String()), nil
}

// Prefetch hints that [off, off+n) will be read soon. It does not block.
func (c *Client) Prefetch(pl meta.ChunkPlace, off, n uint64) {
	f := c.cached(pl.ID, false)
	if f == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		f.unref()
		return
	}
	select {
	case c.ahead <- struct{}{}:
		c.wg.Go(func() {
			_ = unix.Fadvise(f.fd, int64(off), int64(n), unix.FADV_WILLNEED)
			f.unref()
			<-c.ahead
		})
	default:
		f.unref() // enough is under way
	}
}

// order sorts a chunk's servers: first by whether they answered last time, then by distance,
// then by load.
func (c *Client) order(servers []meta.ServerID) []meta.ServerID {
	if len(servers) < 2 {
		return servers
	}
	type cand struct {
		id         meta.ServerID
		bad        bool
		away, busy int
	}
	cands := make([]cand, len(servers))
	for i, id := range servers {
		k := cand{id: id, away: farAway}
		if info, ok := c.cfg.Resolve(id); ok {
			k.away = c.distance(&info)
		} else {
			k.bad = true
		}
		p := c.peer(id)
		k.bad = k.bad || p.suspect()
		k.busy = p.busy()
		cands[i] = k
	}
	slices.SortStableFunc(cands, func(a, b cand) int {
		switch {
		case a.bad != b.bad:
			if a.bad {
				return 1
			}
			return -1
		case a.away != b.away:
			return a.away - b.away
		}
		return a.busy - b.busy
	})
	out := make([]meta.ServerID, len(cands))
	for i, k := range cands {
		out[i] = k.id
	}
	return out
}
