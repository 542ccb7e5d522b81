package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// Order carries out what a volume's owner asks.
func (s *Server) Order(ctx context.Context, o meta.Order) meta.OrderResult {
	var i chunkserver.Info
	err := s.terms.admit(&o)
	if err != nil {
		return meta.OrderResult{Err: meta.KindOf(err), Detail: err.Error()}
	}
	switch o.Kind {
	case meta.OrderSeal:
		if i, err = s.Seal(ctx, o.Chunk, o.Fence, o.Final, o.Length); err == nil && o.Final {
			_ = s.compress(ctx, o.Chunk, o.Compress) // if it fails, the owner sees it in the next list
		}
	case meta.OrderDelete:
		s.pulls.cancel(ctx, o.Chunk) // a pulled copy must not appear after the deletion
		err = s.Delete(ctx, o.Chunk, o.Fence)
	case meta.OrderStat:
		i, err = s.Stat(ctx, o.Chunk)
	case meta.OrderKeys:
		s.SetKeys(o.Keys)
		s.evict(o.Evicted)
	case meta.OrderCopy:
		i, err = s.copyRanges(ctx, o)
	case meta.OrderGather:
		i, err = s.gather(ctx, o)
	case meta.OrderList:
		return s.list(ctx, o)
	case meta.OrderPull:
		if i, err = s.pull(ctx, o); err == nil {
			_ = s.compress(ctx, o.Chunk, o.Compress)
		}
	case meta.OrderCompress:
		err = s.compress(ctx, o.Chunk, o.Compress)
	case meta.OrderVerify:
		i, err = s.verify(ctx, o)
	case meta.OrderScrub:
		s.scrubNow(o.Rate)
	case meta.OrderDisk:
		err = s.orderDisk(o)
	default:
		err = meta.E("order", meta.NotSupported, "", fmt.Errorf("kind %d", o.Kind))
	}
	r := meta.OrderResult{State: i.State, Length: i.Length, Synced: i.Synced, CRC: i.CRC, Fence: i.Fence, Existing: !i.ID.IsZero(), Whole: i.Whole}
	if err != nil {
		r.Err, r.Detail = meta.KindOf(err), err.Error()
	}
	return r
}

// list carries out OrderList. It lists replicas by the last byte of the counter, which selects
// the replica's directory, then by id: to continue after a page, a disk reads only its
// remaining directories. A disk that can't be listed fails the order.
func (s *Server) list(ctx context.Context, o meta.Order) (r meta.OrderResult) {
	const op = "list replicas"
	fail := func(err error) meta.OrderResult {
		return meta.OrderResult{Err: meta.KindOf(err), Detail: err.Error()}
	}
	most := int(o.Max)
	if most == 0 || most > meta.MaxListed {
		most = meta.MaxListed
	}
	type found struct {
		id meta.ChunkID
		d  *disk
		st *store.Store
	}
	for dir := int(byte(o.After.Counter)); dir < 256; dir++ {
		var all []found
		for _, d := range s.disks.list() {
			st := d.serves()
			if st == nil {
				continue // the chunks of a retired disk are lost; a disk that returns changes the generation
			}
			ids, err := st.Dir(ctx, o.Volume, byte(dir))
			if meta.KindOf(err) == meta.IO {
				if ids, err = st.Dir(ctx, o.Volume, byte(dir)); meta.KindOf(err) == meta.IO && ctx.Err() == nil {
					// Otherwise the order would fail for ever, and nobody could tell what is
					// lost.
					d.mu.Lock()
					d.broken = err
					d.mu.Unlock()
				}
			}
			if err != nil {
				return fail(err)
			}
			for _, id := range ids {
				if dir > int(byte(o.After.Counter)) || id.Compare(o.After) > 0 || o.After.IsZero() {
					all = append(all, found{id, d, st})
				}
			}
		}
		// Of a chunk on two disks (a disk that is being emptied could not delete a moved
		// chunk), the replica that may stay counts.
		slices.SortFunc(all, func(a, b found) int { return cmp.Or(a.id.Compare(b.id), a.d.rank()-b.d.rank()) })
		all = slices.CompactFunc(all, func(a, b found) bool { return a.id == b.id })
		for _, f := range all {
			if err := ctx.Err(); err != nil {
				return fail(meta.E(op, meta.Canceled, "", err))
			}
			if len(r.Chunks) == most {
				r.More = true
				return r
			}
			i, err := f.st.Peek(f.id)
			x := meta.ReplicaInfo{ID: f.id, State: i.State, Length: i.Length, Synced: i.Synced, CRC: i.CRC, Fence: i.Fence,
				Disk: f.d.id, Form: i.Form, Stored: i.Stored, Dense: i.Dense}
			if f.d.cantRead(f.id) {
				x.Err = meta.Corrupt
			}
			switch k := meta.KindOf(err); k {
			case meta.KindOK:
			case meta.NoSuchChunk:
				if !f.st.Leftover(f.id) {
					continue // deleted meanwhile
				}
				x.State = meta.ChunkOpen
			case meta.Corrupt, meta.Version:
				x.Err = meta.Corrupt
			default:
				return fail(err)
			}
			r.Chunks = append(r.Chunks, x)
		}
	}
	return r
}

// copyRanges carries out OrderCopy: it appends ranges of a local chunk to another chunk, from
// offset o.Length on, in order, and syncs the other chunk. The read bytes are verified. A
// repetition appends only missing bytes.
func (s *Server) copyRanges(ctx context.Context, o meta.Order) (chunkserver.Info, error) {
	buf := make([]byte, 0, 1<<20)
	at := o.Length
	flush := func() error {
		if len(buf) == 0 {
			return nil
		}
		err := s.appendOn(ctx, o.Class, o.Chunk, o.Fence, at, buf, chunkserver.CRC(buf))
		at += uint64(len(buf))
		buf = buf[:0]
		return err
	}
	for _, r := range o.Ranges {
		for off, end := r.Off, r.Off+r.Len; off < end; {
			if len(buf) == cap(buf) {
				if err := flush(); err != nil {
					return chunkserver.Info{}, err
				}
			}
			n := min(uint64(cap(buf)-len(buf)), end-off)
			p := buf[len(buf) : len(buf)+int(n)]
			if err := s.Read(ctx, o.From, p, off); err != nil {
				return chunkserver.Info{}, err
			}
			buf = buf[:len(buf)+int(n)]
			off += n
		}
	}
	if err := flush(); err != nil {
		return chunkserver.Info{}, err
	}
	if _, err := s.Sync(ctx, o.Chunk, at); err != nil {
		return chunkserver.Info{}, err
	}
	return s.Stat(ctx, o.Chunk)
}

// compress schedules the compression of a chunk in its place. Errors: NoSuchChunk,
// NotSupported (an algorithm of later programs).
func (s *Server) compress(ctx context.Context, id meta.ChunkID, alg meta.Compression) error {
	if alg == meta.CompressNone {
		return nil
	}
	if !alg.Known() {
		return meta.E("compress chunk", meta.NotSupported, id.String(), errors.New(alg.String()))
	}
	st, err := s.find(ctx, id, false, "")
	if err != nil {
		return err
	}
	st.Compress(id, alg)
	return nil
}
