package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/task"
	"penstock.io/penstock/meta/wire"
)

// maxAlloc bounds the chunks of an allocation request.
const maxAlloc = 64

// serveAlloc allocates chunks. It answers when the allocation is journaled (rule 4).
func (o *owner) serveAlloc(s *session, id uint64, m *wire.Alloc) {
	s.wg.Go(func() {
		grants, err := o.alloc(s, int(m.N), m.Own)
		s.enqueue(id, &wire.Grants{Status: wire.StatusOf(err), Grants: grants})
		s.flush()
	})
}

func (o *owner) alloc(s *session, n int, own bool) ([]meta.ChunkGrant, error) {
	if n < 1 || n > maxAlloc {
		return nil, meta.E("allocate chunks", meta.Invalid, fmt.Sprint(n), nil)
	}
	if err := o.await(s.ctx, o.recovered); err != nil {
		return nil, err
	}
	policy, servers, err := o.placeFor(s, n)
	if err != nil {
		return nil, err
	}
	res, wait, err := o.start(&meta.AllocChunks{N: uint32(n), Own: own, Servers: servers, Fence: meta.Fence{Term: o.own.Term()}}, s.id)
	o.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := o.await(s.ctx, wait); err != nil {
		return nil, err
	}
	limit := maxLen(policy, own)
	grants := make([]meta.ChunkGrant, len(res.Chunks))
	for i, c := range res.Chunks {
		grants[i] = meta.ChunkGrant{ID: c.ID, Fence: c.Fence, Servers: c.Servers, MaxLen: limit,
			Cap: o.appendCap(s, &c, policy), TTL: uint64(CapLife.Milliseconds())}
	}
	return grants, nil
}

// placeFor chooses the servers of n chunks by the volume's policy. If placeFor returns no
// error, it holds mu, the policy is still in force, and the session is in the journal.
func (o *owner) placeFor(s *session, n int) (meta.Policy, [][]meta.ServerID, error) {
	boot, _, _ := strings.Cut(s.host, " ") // the machine; see process.Space
	for {
		policy, err := o.policy()
		if err != nil {
			return policy, nil, err
		}
		servers, err := o.srv.serverMap.place(n, &policy, placement.Writer{Host: boot}, o.srv.chunkServers.suspected.of(s.id))
		if err != nil {
			if meta.KindOf(err) == meta.NoSpace {
				o.late.noChunkRoom()
			}
			return policy, nil, err
		}
		o.mu.Lock()
		for {
			err := cmp.Or(o.failed, o.full(&meta.AllocChunks{}))
			var wait <-chan struct{}
			if err == nil {
				wait, err = o.journalSession(s)
			}
			if err != nil {
				o.mu.Unlock()
				return policy, nil, err
			}
			if wait == nil {
				break
			}
			o.mu.Unlock()
			if err := o.await(s.ctx, wait); err != nil {
				return policy, nil, err
			}
			o.mu.Lock()
		}
		if now, err := namespace.Policy(o.view()); err == nil && now == policy {
			return policy, servers, nil
		}
		o.mu.Unlock() // a policy change ends the chunks that don't meet it; these would come too late for that
	}
}

// maxLen is the length of a volume's largest chunk. A file's own chunk holds only bytes of the
// file, each once. If the volume has a quota, the quota bounds such a chunk: the journal
// learns of the bytes at an open end only when the end is closed (rule 7).
func maxLen(p meta.Policy, own bool) uint64 {
	n := cmp.Or(p.MaxChunk, meta.DefaultChunk)
	if own && p.QuotaBytes > 0 {
		n = min(n, max(p.QuotaBytes, 1<<20))
	}
	return n
}

// appendCap signs a capability to append to a chunk.
func (o *owner) appendCap(s *session, c *meta.ChunkRecord, p meta.Policy) []byte {
	rights := capability.Append | capability.Read | o.srv.chunkServers.bulkRights(c.ID.Volume)
	return o.srv.chunkServers.sign(CapLife, capability.Claims{
		Volume: c.ID.Volume, Chunk: c.ID, Rights: rights, Fence: c.Fence, MaxLen: maxLen(p, c.Own),
		Client: s.holder(), Class: p.Class,
	})
}

// serveAppendCap renews the capability to append, as long as the session holds the chunk open.
// Errors: NoSuchChunk, Sealed.
func (o *owner) serveAppendCap(s *session, id uint64, chunk meta.ChunkID) {
	s.wg.Go(func() {
		re := &wire.CapsRe{}
		token, err := func() ([]byte, error) {
			if err := o.await(s.ctx, o.recovered); err != nil {
				return nil, err
			}
			policy, err := o.policy()
			if err != nil {
				return nil, err
			}
			o.mu.Lock()
			rec, _, err := namespace.ReadChunk(o.view(), chunk)
			o.mu.Unlock()
			if err == nil && (rec.State != meta.ChunkOpen || rec.Session != s.id) {
				err = meta.E("renew capability", meta.Sealed, chunk.String(), nil)
			}
			if err != nil {
				return nil, err
			}
			return o.appendCap(s, &rec, policy), nil
		}()
		re.Status, re.Cap, re.TTL = wire.StatusOf(err), token, uint64(CapLife.Milliseconds())
		s.enqueue(id, re)
		s.flush()
	})
}

// collection seals abandoned chunks, reaps the extents left by unlinks and truncations, and
// deletes chunks that nothing refers to.
type collection struct {
	k           *kernel
	checkpoints *checkpoints
	faults      *faults
	indexing    *indexing
	repairing   *repairing
	sealing     *sealing

	filling map[meta.ChunkID]bool // chunks that promotion or compaction has open: not abandoned
}

// abandoned lists the open chunks that no session, compaction or indexing holds. files counts
// the listed chunks with a file's open end, of unknown length. The caller holds the owner's mu.
func (cl *collection) abandoned() (ids []meta.ChunkID, files int, err error) {
	k := cl.k
	err = namespace.AllOpenChunks(k.view(), func(c meta.ChunkRecord, file meta.Ino) bool {
		if k.sessions[c.Session] == nil && !cl.filling[c.ID] && !cl.indexing.parts[c.ID] {
			ids = append(ids, c.ID)
			if file != 0 {
				files++
			}
		}
		return true
	})
	return ids, files, err
}

// sealAbandoned seals the abandoned chunks; failed: some could not be sealed yet.
func (cl *collection) sealAbandoned() (failed bool) {
	k := cl.k
	k.mu.Lock()
	ids, _, err := cl.abandoned()
	k.mu.Unlock()
	if err != nil {
		k.lose(err)
		return true
	}
	return cl.sealing.sealAll(ids)
}

// settleOpenEnded seals the abandoned chunks with a file's open end, before the owner serves
// requests. It tries again until all are sealed.
func (cl *collection) settleOpenEnded() error {
	k := cl.k
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		k.mu.Lock()
		_, files, err := cl.abandoned()
		k.mu.Unlock()
		if err != nil {
			k.lose(err)
			return err
		}
		if files == 0 {
			return nil
		}
		k.log.Info("some files end in chunks that their writer left open: the owner seals the chunks", "files", files)
		if !cl.sealAbandoned() {
			continue
		}
		select {
		case <-time.After(wait):
		case <-k.ctx.Done():
			return context.Cause(k.ctx)
		}
	}
}

// gcBatch bounds the chunks deleted in a batch.
const gcBatch = 128

// newCollectionTask returns the task of the collection.
func newCollectionTask(o *owner) *task.Task {
	return task.New(task.Options{
		Name: "collect garbage", Every: time.Second,
		Gather: 20 * time.Millisecond, // a burst of unlinks
		Round: func(ctx context.Context) (time.Duration, error) {
			o.collection.sealAbandoned()
			for ctx.Err() == nil && (o.collection.reapSome() || o.collection.deleteSome()) {
			}
			return task.Idle, nil
		},
	})
}

// reapSome removes a bounded number of extents of unlinked or truncated files.
func (cl *collection) reapSome() (more bool) {
	k := cl.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return false
	}
	var inos []meta.Ino
	if err := namespace.ReapQueue(k.view(), func(ino meta.Ino) bool {
		inos = append(inos, ino)
		return len(inos) < 8
	}); err != nil {
		k.log.Error("files whose bytes are to be removed can't be read; the owner tries again", "error", err)
		return false
	}
	for _, ino := range inos {
		if _, err := k.run(&meta.Reap{Ino: ino, Max: 1024}, 0); err != nil {
			k.log.Error("the bytes of a removed file could not be removed; the owner tries again", "inode", ino, "error", err)
			return false
		}
	}
	return len(inos) > 0
}

// deleteSome orders the deletion of chunks whose journaled record says so, and drops the
// record when every replica is gone.
func (cl *collection) deleteSome() (more bool) {
	k := cl.k
	k.mu.Lock()
	if k.failed != nil {
		k.mu.Unlock()
		return false
	}
	seq := k.newest()
	chunks, err := cl.checkpoints.nextDeleted()
	if err != nil || len(chunks) == 0 {
		k.mu.Unlock()
		if err != nil {
			k.log.Error("chunks to be deleted can't be read; the owner tries again", "error", err)
		}
		return false
	}
	wait := k.untilDurable(seq)
	k.mu.Unlock()
	if k.await(k.ctx, wait) != nil {
		return false
	}
	m := k.srv.serverMap.servers()
	var done atomic.Int64
	var wg sync.WaitGroup
	slots := make(chan struct{}, deletesAtOnce)
	for _, c := range chunks {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if !cl.deleteReplicas(&c, m) {
				if k.srv.cfg.KeepForCheckpoint {
					k.mu.Lock()
					cl.checkpoints.deletable = append(cl.checkpoints.deletable, c)
					k.mu.Unlock()
				}
				return
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			if k.failed != nil {
				return
			}
			if _, err := k.run(&meta.DropChunk{Chunk: c.ID}, 0); err != nil {
				k.log.Error("the record of a deleted chunk could not be removed; the owner tries again", "chunk", c.ID, "error", err)
				return
			}
			done.Add(1)
			k.srv.stats.deleted.Add(1)
		})
	}
	wg.Wait()
	return done.Load() == gcBatch
}

// deletesAtOnce bounds the chunks deleted in parallel.
const deletesAtOnce = 16

// deleteReplicas deletes a chunk on its servers, and reports whether all replicas are gone. It
// skips servers gone for long: a server that returns lists its chunks, and the replica is
// found to have no record.
func (cl *collection) deleteReplicas(c *meta.ChunkRecord, m *placement.Map) bool {
	k := cl.k
	ctx, cancel := context.WithTimeout(k.ctx, orderPatience)
	defer cancel()
	fence := cl.repairing.fresh(c.Fence) // copies may have later fences than the record
	for _, srv := range c.Servers {
		if s, known := m.Server(srv); known && s.State == placement.Gone || !known && time.Since(k.srv.epoch) > k.srv.cfg.RepairDelay {
			continue
		}
		_, err := k.order(ctx, srv, meta.Order{Kind: meta.OrderDelete, Chunk: c.ID, Fence: fence})
		if err != nil && !errors.Is(err, meta.NoSuchChunk) {
			return false
		}
		cl.faults.clear(c.ID, srv)
	}
	return true
}
