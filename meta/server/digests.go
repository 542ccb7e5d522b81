package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/time/rate"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/digest"
	"penstock.io/penstock/meta/digest/known"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// Digests of snapshots are computed by the owner of the volume, in the
// background, one at a time in a process. It reads the namespace from its own
// store, between other requests, and bytes as any reader does. What blocks are
// called is remembered on this server's disk, by the places of their bytes: what
// an earlier snapshot shares, and what was read before an interruption, is not
// read again.

// ChunkReader reads the bytes of chunks, verified.
type ChunkReader interface {
	ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error
}

const (
	// DefaultDigestRate is how many bytes a second digests read.
	DefaultDigestRate = 64 << 20
	// askCost is what a question about the namespace counts as, in bytes: a
	// digest asks some 16,000 a second at most.
	askCost = 4 << 10
	// digestRetry and digestRetryMost are the times between two tries.
	digestRetry     = 5 * time.Second
	digestRetryMost = 5 * time.Minute
)

// digests is what a server has for them.
type digests struct {
	slot  chan struct{} // capacity 1: held while one is computed
	limit *rate.Limiter
}

func newDigests(bytes uint64) digests {
	return digests{make(chan struct{}, 1), rate.NewLimiter(rate.Limit(bytes), 2*digest.BlockSize)}
}

// digestDir is where a volume's known blocks are.
func (s *Server) digestDir(v meta.VolumeID) string {
	return filepath.Join(s.cfg.DigestDir, fmt.Sprintf("volume-%d", v))
}

func (o *owner) kickDigests() {
	select {
	case o.digestWake <- struct{}{}:
	default:
	}
}

// digestLoop computes what is missing.
func (o *owner) digestLoop() {
	s := o.srv
	if s.cfg.Chunks == nil || s.cfg.DigestDir == "" || o.await(o.ctx, o.recovered) != nil {
		return
	}
	wait := digestRetry
	for o.ctx.Err() == nil {
		sn, missing, err := o.undigested()
		if err == nil && missing {
			select {
			case s.digests.slot <- struct{}{}:
				err = o.digest(sn)
				<-s.digests.slot
			case <-o.ctx.Done():
				return
			}
			if err == nil {
				wait = digestRetry
				continue
			}
		}
		var retry <-chan time.Time
		if err != nil && o.ctx.Err() == nil && !errors.Is(err, meta.NoSuchSnapshot) {
			o.log.Info("no digest of a snapshot yet; it is tried again", "name", sn.Name, "in", wait, "error", err)
			retry = time.After(wait)
			wait = min(2*wait, digestRetryMost)
		}
		select {
		case <-retry:
		case <-o.digestWake:
		case <-o.ctx.Done():
		}
	}
}

// undigested is the newest snapshot without a digest.
func (o *owner) undigested() (sn meta.Snapshot, missing bool, err error) {
	all, err := o.snapshots()
	if err != nil {
		return sn, false, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	have, err := namespace.Digests(&view{o: o})
	for _, s := range all {
		if _, ok := have[s.At]; !ok && !s.Deleting {
			sn, missing = s, true
		}
	}
	return sn, missing, err
}

// digest computes and records one.
func (o *owner) digest(sn meta.Snapshot) error {
	began := time.Now()
	working := func(yes bool) {
		o.mu.Lock()
		o.digesting = yes
		o.mu.Unlock()
	}
	working(true)
	defer working(false)
	blocks, err := known.Open(o.srv.digestDir(o.vol))
	if err != nil {
		return err
	}
	src := digest.Asked{
		Ask: func(ctx context.Context, op meta.Op) (*meta.Result, error) { return o.askAt(ctx, sn.At, op) },
		Read: func(ctx context.Context, ino meta.Ino, p []byte, off uint64) error {
			return o.readAt(ctx, sn.At, ino, p, off)
		},
	}
	sum, p, err := digest.Walk(o.ctx, src, blocks, nil)
	if err != nil {
		return errors.Join(err, blocks.Close())
	}
	o.mu.Lock()
	seq := o.cur.seq
	op := &meta.SetDigest{At: sn.At, Digest: meta.SnapshotDigest{Version: digest.Version, Sum: sum, Made: o.now(), Inodes: p.Inodes, Bytes: p.Bytes, Read: p.Read}}
	_, err = o.run(op, 0)
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err != nil {
		return errors.Join(err, blocks.Close())
	}
	if err := blocks.Finish(); err != nil {
		o.log.Warn("blocks that were read are not remembered", "error", err)
	}
	o.log.Info("digest of a snapshot", "name", sn.Name, "digest", sum.String(), "inodes", p.Inodes, "bytes", p.Bytes, "read", p.Read, "took", time.Since(began).Round(time.Millisecond))
	return o.await(o.ctx, wait)
}

// askAt reads the namespace at a snapshot, at the rate of digests.
func (o *owner) askAt(ctx context.Context, at meta.Generation, op meta.Op) (*meta.Result, error) {
	if err := o.srv.digests.limit.WaitN(ctx, askCost); err != nil {
		return nil, o.gone()
	}
	for {
		res, wait, err := o.tryAt(at, op)
		if err != nil || wait == nil {
			return res, err
		}
		if err := o.await(ctx, wait); err != nil {
			return nil, err
		}
	}
}

// tryAt reads, or says what to wait for first: the places of a clone's chunks in
// other volumes.
func (o *owner) tryAt(at meta.Generation, op meta.Op) (*meta.Result, <-chan struct{}, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed != nil {
		return nil, nil, o.failed
	}
	q := o.context(0)
	q.At = at
	res, err := namespace.Query(&view{o: o}, q, op)
	if err != nil {
		return nil, nil, err
	}
	wait, err := o.fillPlaces(res)
	return res, wait, err
}

// readAt reads the bytes of a file at a snapshot.
func (o *owner) readAt(ctx context.Context, at meta.Generation, ino meta.Ino, p []byte, off uint64) error {
	if err := o.srv.digests.limit.WaitN(ctx, len(p)); err != nil {
		return o.gone()
	}
	clear(p)
	end := off + uint64(len(p))
	for at0 := off; at0 < end; {
		res, err := o.askAt(ctx, at, &meta.Open{Ino: ino, Off: at0, Len: end - at0})
		if err != nil {
			return err
		}
		if off < uint64(len(res.Data)) {
			copy(p, res.Data[off:])
		}
		places := map[meta.ChunkID]meta.ChunkPlace{}
		for _, pl := range res.Places {
			places[pl.ID] = pl
		}
		for _, e := range res.Extents {
			lo, hi := max(e.Off, off), min(e.End(), end)
			if e.Chunk.IsZero() || lo >= hi {
				continue
			}
			pl, ok := places[e.Chunk]
			if !ok {
				return meta.E("digest", meta.Unavailable, o.subject(), fmt.Errorf("nobody says where chunk %v lies", e.Chunk))
			}
			if err := o.srv.cfg.Chunks.ReadAt(ctx, pl, p[lo-off:hi-off], e.ChunkOff+lo-e.Off); err != nil {
				return err
			}
		}
		if res.EOF || len(res.Extents) == 0 {
			break
		}
		at0 = res.Extents[len(res.Extents)-1].End()
	}
	return nil
}

// forgetDigests removes what is remembered of a volume that is gone.
func (s *Server) forgetDigests(v meta.VolumeID) {
	if s.cfg.DigestDir == "" {
		return
	}
	if err := os.RemoveAll(s.digestDir(v)); err != nil {
		s.log.Warn("known blocks of a deleted volume", "volume", v, "error", err)
	}
}

// listDigests adds digests to the snapshots that they are of. Caller holds mu.
func (o *owner) listDigests(l []wire.SnapshotInfo) error {
	all, err := namespace.Digests(&view{o: o})
	for i := range l {
		if d, ok := all[l[i].At]; ok {
			l[i].Digest = &wire.DigestInfo{Digest: digest.Sum(d.Sum).String(), Made: time.Unix(0, int64(d.Made)).UTC(), Inodes: d.Inodes, Bytes: d.Bytes, Read: d.Read}
		}
	}
	return err
}
