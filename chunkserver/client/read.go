package client

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

const block = chunkserver.ChecksumBlock

// places orders a chunk's servers: those on this machine first.
func (c *Client) places(pl *meta.ChunkPlace) (local, all []meta.ServerID) {
	for _, id := range pl.Servers {
		if c.isLocal(id) {
			local = append(local, id)
		}
	}
	if len(local) == 0 || len(local) == len(pl.Servers) {
		return local, pl.Servers
	}
	all = append(all, local...)
	for _, id := range pl.Servers {
		if !c.isLocal(id) {
			all = append(all, id)
		}
	}
	return local, all
}

func (c *Client) isLocal(id meta.ServerID) bool {
	info, ok := c.cfg.Resolve(id)
	return ok && c.cfg.HostID != "" && info.Host == c.cfg.HostID && len(info.Addr) > 5 && info.Addr[:5] == "unix:"
}

// ReadAt fills p with the chunk's bytes from off on, verified against their
// checksums, from the nearest replica that can. Sealed and open chunks; of an
// open one only acknowledged bytes. Errors: NoSuchOffset (past the end),
// NoSuchChunk, Corrupt (no replica has good bytes, one has bad ones), Unavailable, BadCapability.
func (c *Client) ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error {
	if len(p) == 0 {
		return nil
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
	local, all := c.places(&pl)
	var worst error
	for _, id := range local {
		err := c.readLocal(ctx, id, &pl, p, off)
		if err == nil {
			return nil
		}
		worst = worse(worst, err)
	}
	for _, id := range all {
		if ctx.Err() != nil {
			return meta.E("read chunk", meta.Canceled, pl.ID.String(), ctx.Err())
		}
		err := c.readRemote(ctx, id, &pl, p, off)
		if err == nil {
			return nil
		}
		worst = worse(worst, err)
	}
	if worst == nil {
		return meta.E("read chunk", meta.Unavailable, pl.ID.String(), errors.New("no servers"))
	}
	return worst
}

// worse chooses the error that tells more: corruption before anything, an
// answer before none.
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
	// remoteMax is the most bytes one read request asks for; larger reads are
	// cut and go side by side.
	remoteMax = 1 << 20
	// rawFrom is the least read for which whole blocks are fetched and
	// verified here; smaller ones are verified and cut by the server.
	rawFrom = 32 << 10
	// remoteStreams bounds the requests under way for one ReadAt.
	remoteStreams = 4
)

func (c *Client) readRemote(ctx context.Context, id meta.ServerID, pl *meta.ChunkPlace, p []byte, off uint64) error {
	if len(p) <= remoteMax {
		return c.readPiece(ctx, id, pl, p, off)
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
			if err := c.readPiece(ctx, id, pl, part, at); err != nil {
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

func (c *Client) readPiece(ctx context.Context, id meta.ServerID, pl *meta.ChunkPlace, p []byte, off uint64) error {
	q := wire.Request{Cap: c.cfg.ReadCap(pl.ID.Volume), Chunk: pl.ID, Off: off, N: uint32(len(p))}
	end := off + uint64(len(p))
	if !pl.Sealed || len(p) < rawFrom || end > pl.Length {
		return c.ask(ctx, id, &q, &call{t: wire.Read, dst: p}, 0)
	}
	first := off / block * block
	last := min((end+block-1)/block*block, pl.Length)
	buf := p
	if first != off || last != end {
		buf = make([]byte, last-first)
	}
	q.Off, q.N = first, uint32(len(buf))
	if len(buf) > wire.MaxData {
		return c.ask(ctx, id, &wire.Request{Cap: q.Cap, Chunk: pl.ID, Off: off, N: uint32(len(p))}, &call{t: wire.Read, dst: p}, 0)
	}
	k := &call{t: wire.Read, dst: buf}
	if err := c.ask(ctx, id, &q, k, wire.FlagRaw); err != nil {
		return err
	}
	if k.flags&wire.FlagRaw != 0 {
		if err := verify(pl.ID, first, buf, k.answer.CRCs); err != nil {
			return err
		}
	}
	if first != off || last != end {
		copy(p, buf[off-first:])
	}
	return nil
}

// verify checks whole blocks that lie at off.
func verify(id meta.ChunkID, off uint64, p []byte, crcs []uint32) error {
	for i := 0; len(p) > 0; i++ {
		n := min(len(p), block)
		if i >= len(crcs) || chunkserver.CRC(p[:n]) != crcs[i] {
			return corrupt(id, off)
		}
		p, off = p[n:], off+uint64(n)
	}
	return nil
}

func corrupt(id meta.ChunkID, off uint64) error {
	return meta.E("read chunk", meta.Corrupt, id.String(), fmt.Errorf("block at %d", off))
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

// localFile finds a local server's file that ensure makes verified as needed.
func (c *Client) localFile(ctx context.Context, pl *meta.ChunkPlace, flags uint16, ensure func(*file) error) (*file, error) {
	local, _ := c.places(pl)
	var err error = meta.E("open chunk", meta.NotSupported, pl.ID.String(), errors.New("no replica on this machine"))
	for _, id := range local {
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

// File gives a read-only descriptor of the chunk's data file whose bytes
// [off, off+n) were verified; file offsets are chunk offsets. Read it with
// pread or splice only, never close it: call the returned function when done.
// Errors: NotSupported (no replica on this machine), and those of ReadAt.
func (c *Client) File(ctx context.Context, pl meta.ChunkPlace, off, n uint64) (*os.File, func(), error) {
	f, err := c.localFile(ctx, &pl, 0, func(f *file) error { return f.ensure(ctx, off, n) })
	if err != nil {
		return nil, nil, err
	}
	return f.os, f.unref, nil
}

// Backing gives a fresh descriptor, owned by the caller, of a sealed chunk
// whose every byte was verified, by the server, for FUSE passthrough. Errors: NotSupported
// (not local or not sealed), and those of ReadAt.
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
