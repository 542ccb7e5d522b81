package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/index"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/task"
)

// The volume's owner makes the index of a snapshot after the first request for the index, in
// the background, one index at a time per process. The owner reads a frozen copy of its store,
// so calls go on meanwhile. The index is written into chunks of the volume. From then on the
// snapshot's record refers to the chunks: they are placed, repaired, counted and deleted like
// the chunks of files.

// ChunkWriter writes chunks as clients do.
type ChunkWriter interface {
	// Write appends the bytes of r to a chunk, and returns once all n bytes are synced on
	// every replica. The chunk stays open.
	Write(ctx context.Context, g meta.ChunkGrant, r io.Reader) (n uint64, err error)
}

const (
	// indexPart is the largest part of an index, in bytes: a chunk each.
	indexPart = 256 << 20
	// indexRate is how many inodes a second are read for indexes.
	indexRate = 64_000
	// indexAgain is for how long an index that was too large is not tried again.
	indexAgain = 24 * time.Hour
	// indexPage is how many inodes are listed at a time.
	indexPage = 1024
)

// indexing is an owner's state for making indexes.
type indexing struct {
	k         *kernel
	digesting *digesting
	reading   *snapshotReading
	sealing   *sealing
	snapshots *snapshots

	mu     sync.Mutex
	wanted map[meta.Generation]*retry // requested, and not yet made

	// Guarded by the owner's mu:
	busy  bool
	parts map[meta.ChunkID]bool // being filled
}

// making is a server's state for making indexes.
type making struct {
	slot  chan struct{} // capacity 1: held while an index is made
	limit *rate.Limiter // of inodes
}

// tooLarge reports whether a retry of an index will fail too: a snapshot's content never
// changes, though the volume's policy may.
func tooLarge(err error) bool { return errors.Is(err, meta.ResourceExceeded) }

// index returns the index of a snapshot, or, if there is none, requests it from the task and
// returns its state. Errors: NoSuchSnapshot.
func (ix *indexing) index(ctx context.Context, name string) (*admin.SnapshotIndex, error) {
	k := ix.k
	if err := k.await(ctx, k.recovered); err != nil {
		return nil, err
	}
	sn, err := ix.snapshots.find(name)
	if err != nil {
		return nil, err
	}
	a, wait, err := ix.indexOf(sn.At)
	if err != nil {
		return nil, err
	}
	if a == nil {
		if k.srv.cfg.ChunkWriter == nil {
			return &admin.SnapshotIndex{Generation: uint64(sn.At), State: admin.IndexState_INDEX_NONE}, nil
		}
		a = &admin.SnapshotIndex{Generation: uint64(sn.At), State: admin.IndexState_INDEX_BUILDING}
		x := ix
		x.mu.Lock()
		w := x.wanted[sn.At]
		if w == nil {
			if x.wanted == nil {
				x.wanted = map[meta.Generation]*retry{}
			}
			w = &retry{}
			x.wanted[sn.At] = w
		}
		if w.err != nil {
			a.Detail = w.err.Error()
			if tooLarge(w.err) {
				a.State = admin.IndexState_INDEX_NONE
			}
		}
		x.mu.Unlock()
		k.tasks.indexes.Wake()
		return a, nil
	}
	return a, k.await(ctx, wait)
}

// indexOf returns a snapshot's recorded index, and the channel to wait for until the record is
// durable. nil: no index of this program's version or a newer version is recorded.
func (ix *indexing) indexOf(at meta.Generation) (a *admin.SnapshotIndex, wait <-chan struct{}, err error) {
	k := ix.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return nil, nil, k.failed
	}
	all, err := namespace.Indexes(k.view())
	x, ok := all[at]
	if err != nil || !ok || x.Version < index.Version {
		return nil, nil, err
	}
	a = &admin.SnapshotIndex{Generation: uint64(at), State: admin.IndexState_INDEX_READY, Version: uint32(x.Version), Digest: x.Sum[:], Length: x.Length, Inodes: x.Inodes}
	for _, p := range x.Parts {
		c, _, err := namespace.ReadChunk(k.view(), p.Chunk)
		if err != nil {
			return nil, nil, err
		}
		if c.Lost { // an operator said so: another index is made
			_, err := k.run(&meta.SetIndex{At: at}, 0)
			return nil, nil, err
		}
		id := p.Chunk.Bytes()
		part := &admin.IndexPart{Chunk: id[:], Length: p.Length, Sealed: c.State != meta.ChunkOpen, ChunkLength: c.Length}
		for _, server := range c.Servers {
			part.Servers = append(part.Servers, uint64(server))
		}
		a.Parts = append(a.Parts, part)
	}
	return a, k.untilDurable(k.newest()), nil
}

// newIndexTask returns the task that makes the requested indexes.
func newIndexTask(o *owner) *task.Task {
	x := &o.indexing
	return task.New(task.Options{
		Name: "make indexes",
		Begin: func() {
			if err := o.indexing.dropLeftIndexes(); err != nil && o.ctx.Err() == nil {
				o.log.Warn("the indexes of deleted snapshots could not be looked for", "error", err)
			}
		},
		Round: func(ctx context.Context) (time.Duration, error) {
			x.mu.Lock()
			wanted := slices.Sorted(maps.Keys(x.wanted))
			x.mu.Unlock()
			var failed error
			for _, at := range wanted {
				x.mu.Lock()
				until := time.Until(x.wanted[at].due)
				x.mu.Unlock()
				if until > 0 {
					continue // a repeated request does not shorten the wait
				}
				select {
				case o.srv.indexes.slot <- struct{}{}:
				case <-ctx.Done():
					return task.Idle, nil
				}
				err := o.indexing.makeIndex(at)
				<-o.srv.indexes.slot
				if ctx.Err() != nil {
					return task.Idle, nil
				}
				x.mu.Lock()
				if err == nil || errors.Is(err, meta.NoSuchSnapshot) {
					delete(x.wanted, at)
				} else {
					w := x.wanted[at]
					if w.failed(err, time.Now()); tooLarge(err) {
						w.due = w.due.Add(indexAgain)
					}
					failed = errors.Join(failed, err)
					o.log.Warn("the index of a snapshot could not be made; the owner tries again", "generation", at, "again", time.Until(w.due).Round(time.Second), "error", err)
				}
				x.mu.Unlock()
			}
			x.mu.Lock()
			defer x.mu.Unlock()
			first := digestRetryMost
			for _, w := range x.wanted {
				first = min(first, time.Until(w.due))
			}
			return max(first, 0), failed
		},
	})
}

// dropLeftIndexes removes the index records of deleted snapshots. A program version without
// indexes leaves such records when it deletes a snapshot.
func (ix *indexing) dropLeftIndexes() error {
	k := ix.k
	all, err := ix.snapshots.list()
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	have, err := namespace.Indexes(k.view())
	if err != nil {
		return err
	}
	for _, at := range slices.Sorted(maps.Keys(have)) {
		if slices.ContainsFunc(all, func(s meta.Snapshot) bool { return s.At == at && !s.Deleting }) {
			continue
		}
		if _, err := k.run(&meta.SetIndex{At: at}, 0); err != nil {
			return err
		}
	}
	return nil
}

// makeIndex makes and records the index of a snapshot.
func (ix *indexing) makeIndex(at meta.Generation) (err error) {
	k := ix.k
	began := time.Now()
	if a, _, err := ix.indexOf(at); err != nil || a != nil {
		return err
	}
	busy := func(yes bool) {
		k.mu.Lock()
		ix.busy = yes
		if !yes {
			ix.parts = nil // the collector seals the parts that are still open
		}
		k.mu.Unlock()
	}
	busy(true)
	defer busy(false)
	dir, err := os.MkdirTemp(k.srv.cfg.ScratchDir, "index-")
	if err != nil {
		return meta.E("make index", meta.IO, k.srv.cfg.ScratchDir, err)
	}
	defer os.RemoveAll(dir)
	file, record, err := ix.buildIndex(at, dir)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := ix.putIndex(file, &record); err != nil {
		return err
	}
	if _, err = k.do(k.ctx, &meta.SetIndex{At: at, Index: record}, nil); err != nil {
		return err
	}
	for _, p := range record.Parts {
		if _, err := ix.sealing.seal(k.ctx, p.Chunk, &p.Length); err != nil && k.ctx.Err() == nil {
			k.log.Info("a chunk of an index is sealed later", "chunk", p.Chunk, "error", err)
		}
	}
	k.log.Info("the index of a snapshot was made", "generation", at, "inodes", record.Inodes, "bytes", record.Length, "took", time.Since(began).Round(time.Millisecond))
	return nil
}

// buildIndex makes the index in a file of a folder.
func (ix *indexing) buildIndex(at meta.Generation, dir string) (file *os.File, record meta.SnapshotIndex, err error) {
	k := ix.k
	if err := k.settled(k.ctx); err != nil {
		return nil, record, err
	}
	k.mu.Lock()
	if k.ctx.Err() != nil || k.stClosed {
		k.mu.Unlock()
		return nil, record, k.gone()
	}
	k.wg.Hold() // the store stays open meanwhile
	defer k.wg.Release()
	frozen := k.st.Freeze()
	k.mu.Unlock()
	defer frozen.Close()
	temp := func() (*os.File, error) {
		f, err := os.CreateTemp(dir, "")
		if err != nil {
			return nil, meta.E("make index", meta.IO, dir, err)
		}
		return f, nil
	}
	var spools []*os.File
	defer func() {
		for _, f := range spools {
			f.Close()
		}
	}()
	stat, err := namespace.Query(frozen, namespace.Context{At: at}, &meta.StatFSOp{})
	if err != nil {
		return nil, record, err
	}
	b, err := index.NewBuilder(index.Head{Volume: k.vol, At: at, UsedBytes: stat.StatFS.UsedBytes, UsedInodes: stat.StatFS.UsedInodes}, func() (index.Spool, error) {
		f, err := temp()
		if err == nil {
			spools = append(spools, f)
		}
		return f, err
	})
	if err != nil {
		return nil, record, err
	}
	f := feeder{r: frozen, at: at, b: b, foreign: func(ino meta.Ino, e meta.Extent) ([]meta.ChunkPlace, error) {
		res, err := ix.reading.ask(k.ctx, at, &meta.Open{Ino: ino, Off: e.Off, Len: e.Len}, func() {})
		if err != nil {
			return nil, err
		}
		return res.Places, nil
	}, pace: func() error { return ix.digesting.pace(k.srv.indexes.limit, 1) }}
	if err := f.feed(); err != nil {
		return nil, record, err
	}
	if file, err = temp(); err != nil {
		return nil, record, err
	}
	length, sum, err := b.Finish(file)
	if err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil {
		file.Close()
		return nil, record, err
	}
	return file, meta.SnapshotIndex{Version: index.Version, Sum: sum, Length: length, Inodes: f.inodes, Made: k.now()}, nil
}

// feeder gives a builder all inodes of a snapshot.
type feeder struct {
	r       namespace.Reader
	at      meta.Generation
	b       *index.Builder
	foreign func(ino meta.Ino, e meta.Extent) ([]meta.ChunkPlace, error) // of extents in other volumes' chunks
	pace    func() error                                                 // before each inode
	inodes  uint64
}

func (f *feeder) feed() error {
	page := make([]meta.Attr, 0, indexPage)
	for from := meta.RootIno; ; from = page[len(page)-1].Ino + 1 {
		page = page[:0]
		err := namespace.InodesAt(f.r, f.at, from, func(a *meta.Attr) bool {
			page = append(page, *a)
			return len(page) < indexPage
		})
		if err != nil || len(page) == 0 {
			return err
		}
		for i := range page {
			if err := f.pace(); err != nil {
				return err
			}
			if err := f.inode(&page[i]); err != nil {
				return err
			}
			f.inodes++
		}
	}
}

func (f *feeder) ask(op meta.Op) (*meta.Result, error) {
	return namespace.Query(f.r, namespace.Context{At: f.at}, op)
}

func (f *feeder) inode(a *meta.Attr) error {
	n := &index.Node{Attr: *a}
	var err error
	switch a.Mode & meta.TypeMask {
	case meta.TypeDir:
		err = f.entries(n)
	case meta.TypeRegular:
		if a.Blocks != 0 {
			err = f.extents(n)
		}
	case meta.TypeSymlink:
		var res *meta.Result
		if res, err = f.ask(&meta.ReadLink{Ino: a.Ino}); err == nil {
			n.Data = res.Data
		}
	}
	if err == nil && a.Flags&meta.FlagHasXattrs != 0 {
		err = f.xattrs(n)
	}
	if err != nil {
		return err
	}
	return f.b.Add(n)
}

func (f *feeder) entries(n *index.Node) error {
	for op := (&meta.ReadDir{Ino: n.Attr.Ino}); ; {
		res, err := f.ask(op)
		if err != nil {
			return err
		}
		n.Entries = append(n.Entries, res.Entries...)
		if res.EOF || len(res.Entries) == 0 {
			return nil
		}
		op.Cookie = res.Entries[len(res.Entries)-1].Cookie
	}
}

func (f *feeder) xattrs(n *index.Node) error {
	names, err := f.ask(&meta.ListXattr{Ino: n.Attr.Ino})
	if err != nil {
		return err
	}
	for name := range bytes.SplitSeq(bytes.TrimSuffix(names.Data, []byte{0}), []byte{0}) {
		res, err := f.ask(&meta.GetXattr{Ino: n.Attr.Ino, Name: string(name)})
		if err != nil {
			return err
		}
		n.Xattrs = append(n.Xattrs, index.Xattr{Name: string(name), Value: res.Data})
	}
	return nil
}

func (f *feeder) extents(n *index.Node) error {
	for op := (&meta.Open{Ino: n.Attr.Ino}); ; {
		res, err := f.ask(op)
		if err != nil {
			return err
		}
		if op.Off == 0 {
			n.Data = res.Data
		}
		for _, pl := range res.Places {
			if err := f.b.Place(pl); err != nil {
				return err
			}
		}
		for _, e := range res.Extents {
			if e.Chunk.IsZero() || f.b.Knows(e.Chunk) {
				continue
			}
			places, err := f.foreign(n.Attr.Ino, e)
			if err != nil {
				return err
			}
			for _, pl := range places {
				if err := f.b.Place(pl); err != nil {
					return err
				}
			}
		}
		n.Extents = append(n.Extents, res.Extents...)
		if res.EOF || len(res.Extents) == 0 {
			return nil
		}
		op.Off = res.Extents[len(res.Extents)-1].End()
	}
}

// putIndex writes an index into chunks, which stay open.
func (ix *indexing) putIndex(file io.Reader, record *meta.SnapshotIndex) error {
	policy, err := ix.k.policy()
	if err != nil {
		return err
	}
	for left := record.Length; left > 0; {
		n := min(left, indexPart, maxLen(policy, false))
		if len(record.Parts) == meta.MaxIndexParts {
			return meta.E("make index", meta.ResourceExceeded, ix.k.subject(), fmt.Errorf("its %d bytes do not fit into %d chunks of at most %d (the volume's --max-chunk): metadata servers answer", record.Length, len(record.Parts), n))
		}
		id, err := ix.putPart(&policy, io.LimitReader(file, int64(n)), n)
		if err != nil {
			return err
		}
		record.Parts = append(record.Parts, meta.IndexPart{Chunk: id, Length: n})
		left -= n
	}
	return nil
}

func (ix *indexing) putPart(policy *meta.Policy, r io.Reader, n uint64) (id meta.ChunkID, err error) {
	k := ix.k
	servers, err := k.srv.serverMap.place(1, policy, placement.Writer{}, nil)
	if err != nil {
		return id, err
	}
	fence := meta.Fence{Term: k.own.Term()}
	op := &meta.AllocChunks{N: 1, Servers: servers, Fence: fence}
	k.mu.Lock()
	if err = k.failed; err == nil {
		err = k.full(op)
	}
	if err != nil {
		k.mu.Unlock()
		return id, err
	}
	res, wait, err := k.start(op, 0)
	if err != nil {
		k.mu.Unlock()
		return id, err
	}
	id = res.Chunks[0].ID
	if ix.parts == nil {
		ix.parts = map[meta.ChunkID]bool{}
	}
	ix.parts[id] = true
	k.mu.Unlock()
	if err := k.await(k.ctx, wait); err != nil {
		return id, err
	}
	rights := capability.Append | capability.Read | k.srv.chunkServers.bulkRights(k.vol)
	grant := meta.ChunkGrant{ID: id, Fence: fence, Servers: servers[0], MaxLen: n, Cap: k.srv.chunkServers.sign(capability.MaxLife, capability.Claims{
		Volume: k.vol, Chunk: id, Rights: rights, Fence: fence, MaxLen: n,
		Client: k.srv.cfg.Identity, Class: policy.Class,
	})}
	wrote, err := k.srv.cfg.ChunkWriter.Write(k.ctx, grant, r)
	if err == nil && wrote != n {
		err = meta.E("make index", meta.IO, id.String(), fmt.Errorf("%d bytes were written, not %d", wrote, n))
	}
	return id, err
}
