// Package store owns the on-disk format of one disk of a chunk server: create, append, sync,
// seal, read, verify, delete, scrub and recovery. The package knows no network. A Store is a
// chunkserver.Service.
//
//	DIR/format            the ids of the cluster and the disk; see format.go
//	DIR/lock              flock(2) of the process that has the store open
//	DIR/chunks/xx/ID.data the raw bytes at their offsets and nothing else, or
//	DIR/chunks/xx/ID.pack the bytes compressed; see pack.go
//	DIR/chunks/xx/ID.meta state, fence, length and block checksums as of the last checkpoint; see format.go
//	DIR/log/              the changes since the last checkpoint; see log.go
//	DIR/pull-ID           a copy of a chunk is coming in; see incoming.go
//	DIR/verified          the sealed chunks that were verified since the machine booted; see verified.go
//
// An append writes the bytes to the data file and a record of the checksums to the log, both
// into the page cache: an acknowledged append survives the end of the process. A sync makes the
// append survive the end of the machine. If few bytes are unsynced, the bytes go into a log
// record, and the sync costs a single fdatasync of the log, shared by all waiting syncs. The
// log's blocks were allocated and written before, so the fdatasync does not wait for the file
// system's journal. If many bytes are unsynced, the data file is synced first. A checkpoint
// syncs data files, writes .meta files and lets the log begin anew, in the background and on
// Close.
package store

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/replica"
)

// Options of Init and Open. The zero value has the default of each option except Cluster and
// Disk.
type Options struct {
	// Cluster and Disk are written by Init. Open refuses a directory with other ids; zero ids
	// are not compared.
	Cluster, Disk [16]byte
	// SegmentSize and Segments size the log when Init makes it: bytes (256 KiB to 1 GiB) and
	// count (4 to 4096). Zero: 6 segments of 16 MiB, smaller segments on disks below 4 GiB.
	SegmentSize, Segments uint32

	Logger *slog.Logger // nil: slog.Default()
	// Reserve is the number of bytes that appends leave free on the disk, so that seals,
	// deletes and checkpoints always have room; 0 means 2 % of the disk, at least 16 MiB and at
	// most 1 GiB.
	Reserve uint64
	// InlineMax is the most unsynced bytes that a sync writes into the log
	// rather than syncing the data file; 0 means 64 KiB, which is also the most.
	InlineMax int
	// CheckpointEvery is the longest time from a checkpoint to the next while the log has new
	// records; 0 means 30 s.
	CheckpointEvery time.Duration
	// Boot is the machine's boot id, at most 40 bytes. With Boot, the store remembers
	// verifications since the boot over restarts of the process; with an empty Boot, the store
	// does not.
	Boot string
	// Bad, if not nil, is called for chunks with wrong checksums (such a chunk is marked as
	// damaged, kept, and replaced by Receive) and for unreadable chunks. Bad may block for a
	// while.
	Bad func(id meta.ChunkID, err error)
	// Manual: no goroutine runs; tests call Checkpoint and Mark themselves.
	Manual bool
	// batch replaces batchFrom in tests.
	batch int

	// Positive controls: each breaks one promise, and tests must notice.
	UnsafeNoSync   bool // sync nothing
	UnsafeNoVerify bool // trust all bytes of the disk
	UnsafeNoFence  bool // let old fences append
}

const (
	inlineMax = 64 << 10
	// checkpointBytes bounds the bytes that recovery must read.
	checkpointBytes = 2 << 30
	// After each writebackStep bytes of a chunk the store asks the kernel to start write-back,
	// so that a later sync has little to do.
	writebackStep = 8 << 20
	maxHandles    = 1024
	maxDirty      = 2048 // chunks with records in the log: each may hold a descriptor
	maxTombs      = 1 << 16
	maxChecks     = 2 // parallel verifications for waiting callers
)

// Store is one open disk. Safe for concurrent use.
//
// Lock order: chunk.mu, then Store.mu, then the log's locks. chunk.mu is held during reads and
// writes of the chunk's file in the page cache, never during a sync.
type Store struct {
	o    Options
	d    Disk
	f    format
	log  *diskLog
	lock io.Closer
	slog *slog.Logger

	mu     sync.Mutex
	chunks map[meta.ChunkID]*chunk
	lru    list.List // of *chunk without pins, least recently used in front
	dirty  map[*chunk]struct{}
	tombs  map[meta.ChunkID]meta.Fence // chunks deleted a short while ago, which a late append must not recreate
	tombQ  []meta.ChunkID
	coming map[meta.ChunkID]struct{} // chunks being received

	shut    atomic.Bool                // nothing new begins
	failed  atomic.Pointer[meta.Error] // the disk's sticky error
	closed  atomic.Bool
	space   spaceCache
	stats   counters
	reserve uint64
	stop    chan struct{}
	off     *replica.Off // nil unless a control is on
	wg      sync.WaitGroup

	points   checkpoints
	packs    packer
	verified verifications
	bad      quarantine

	lastAppend atomic.Int64 // unix nanoseconds
	lastRead   atomic.Int64
}

type counters struct {
	appends, appendBytes, syncs, inlineSyncs, reads, readBytes, checkpoints, corrupt, seals, deletes, checked, received, packed atomic.Uint64
}

// Stats are counts since Open, and the state of the disk.
type Stats struct {
	Appends, AppendBytes uint64
	Syncs, InlineSyncs   uint64 // syncs requested; of these, syncs through the log alone
	LogSyncs             uint64 // fdatasyncs of the log: one may serve many syncs
	Reads, ReadBytes     uint64
	Seals, Deletes       uint64
	Received             uint64 // chunks copied from other servers
	Packed               uint64 // chunks compressed
	Checkpoints          uint64
	Checked              uint64 // bytes read for comparison with their checksums
	Corrupt              uint64 // blocks or chunks found bad
	Total, Free          uint64 // bytes of the disk; bytes available to appends
	Failed               string // the sticky error, empty while healthy
}

var _ chunkserver.Service = (*Store)(nil)

// Open opens the store on d and recovers it. Errors: NotFound (no format file; nothing is
// changed), Invalid (another cluster's or disk's), Version, DirectoryInUse, Corrupt, IO.
func Open(d Disk, o Options) (*Store, error) {
	const op = "open chunk store"
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.InlineMax <= 0 || o.InlineMax > inlineMax {
		o.InlineMax = inlineMax
	}
	if o.CheckpointEvery <= 0 {
		o.CheckpointEvery = 30 * time.Second
	}
	if o.batch == 0 {
		o.batch = batchFrom
	}
	f, err := readFormat(d, o)
	if err != nil {
		return nil, err
	}
	lock, err := d.Lock()
	if err != nil {
		if errors.Is(err, os.ErrExist) {
			return nil, meta.E(op, meta.DirectoryInUse, lockName, nil)
		}
		return nil, ioError(op, lockName, err)
	}
	if err := made(d); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	s := &Store{
		o: o, d: d, f: f, lock: lock, slog: o.Logger,
		chunks: map[meta.ChunkID]*chunk{}, dirty: map[*chunk]struct{}{}, tombs: map[meta.ChunkID]meta.Fence{}, coming: map[meta.ChunkID]struct{}{},
		stop: make(chan struct{}),
	}
	s.points.s, s.points.kick, s.points.done = s, make(chan struct{}, 1), make(chan struct{})
	s.packs.s, s.packs.waiting, s.packs.kick = s, map[meta.ChunkID]meta.Compression{}, make(chan struct{}, 1)
	s.verified.begin(s)
	s.bad.s = s
	if o.UnsafeNoFence {
		s.off = &replica.Off{Fence: true}
	}
	s.lastAppend.Store(time.Now().UnixNano()) // give other starting processes some time
	s.verified.load()
	if err := s.recover(); err != nil {
		if s.log != nil {
			s.log.close()
		}
		lock.Close()
		return nil, err
	}
	if s.reserve = o.Reserve; s.reserve == 0 {
		total, _, err := d.Space()
		if err != nil {
			s.log.close()
			lock.Close()
			return nil, ioError(op, "", err)
		}
		s.reserve = min(max(total/50, 16<<20), 1<<30)
	}
	if !o.Manual {
		s.bad.chunks = make(chan meta.ChunkID, maxBad)
		s.wg.Go(s.bad.run)
		s.wg.Go(s.points.run)
		s.wg.Go(s.verified.check)
		s.wg.Go(s.packs.run)
	}
	return s, nil
}

// ID is the disk's id.
func (s *Store) ID() [16]byte { return s.f.disk }

// Cluster returns the id of the disk's cluster.
func (s *Store) Cluster() [16]byte { return s.f.cluster }

// Close writes a checkpoint, so that the next Open has nothing to recover, and releases the
// disk.
func (s *Store) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	close(s.stop)
	s.wg.Wait()
	if !s.o.Manual {
		s.verified.checkLast()
	}
	s.shut.Store(true)
	if !s.drained() {
		return meta.E("close chunk store", meta.Busy, "", errors.New("operations on it don't end; its files stay open"))
	}
	err := s.Checkpoint()
	s.verified.save()
	s.release()
	return err
}

// Abandon gives up the disk as a crash of the process would, for tests.
func (s *Store) Abandon() {
	if s.closed.Swap(true) {
		return
	}
	close(s.stop)
	s.wg.Wait()
	s.shut.Store(true)
	if s.drained() {
		s.release()
	}
}

func (s *Store) release() {
	s.mu.Lock()
	for _, c := range s.chunks {
		c.mu.Lock()
		c.closeFile()
		s.packs.dropNext(c)
		c.mu.Unlock()
	}
	s.mu.Unlock()
	s.log.close()
	s.lock.Close()
}

// admit admits n bytes of appends: the disk is healthy and has space beyond the reserve, and
// the log has space, for which admit waits a while.
func (s *Store) admit(ctx context.Context, n int) error {
	if err := s.writable(); err != nil {
		return err
	}
	free, err := s.space.take(s.d, uint64(n), s.reserve)
	if err != nil {
		return ioError("append", "", err)
	}
	if free < s.reserve {
		return meta.E("append", meta.NoSpace, "", fmt.Errorf("%d bytes free, %d are kept in reserve", free, s.reserve))
	}
	if s.points.since.Add(int64(n)) > checkpointBytes {
		s.points.want()
	}
	for p := s.log.pressure(); p > 0; p = s.log.pressure() {
		if p == 1 {
			s.points.want()
			return nil
		}
		if s.o.Manual {
			if err := s.Checkpoint(); err != nil {
				return err
			}
			continue
		}
		s.points.doneMu.Lock()
		done := s.points.done
		s.points.doneMu.Unlock()
		s.points.want()
		select {
		case <-done:
		case <-ctx.Done():
			return meta.E("append", meta.Canceled, "", ctx.Err())
		case <-s.stop:
			return s.writable()
		}
		s.points.doneMu.Lock()
		err := s.points.err
		s.points.doneMu.Unlock()
		if err != nil {
			return err
		}
	}
	return nil
}

// Stats returns the counts and the state of the disk.
func (s *Store) Stats() Stats {
	s.log.smu.Lock()
	logSyncs := s.log.syncs
	s.log.smu.Unlock()
	st := Stats{
		Appends: s.stats.appends.Load(), AppendBytes: s.stats.appendBytes.Load(),
		Syncs: s.stats.syncs.Load(), InlineSyncs: s.stats.inlineSyncs.Load(), LogSyncs: logSyncs,
		Reads: s.stats.reads.Load(), ReadBytes: s.stats.readBytes.Load(),
		Seals: s.stats.seals.Load(), Deletes: s.stats.deletes.Load(), Received: s.stats.received.Load(), Packed: s.stats.packed.Load(),
		Checkpoints: s.stats.checkpoints.Load(), Checked: s.stats.checked.Load(), Corrupt: s.stats.corrupt.Load(),
	}
	if total, free, err := s.d.Space(); err == nil {
		st.Total, st.Free = total, free-min(free, s.reserve)
	}
	if e := s.failed.Load(); e != nil {
		st.Failed = e.Error()
	}
	return st
}

// drainWait bounds the time for which Close waits for running operations: on a hanging disk
// operations never end.
const drainWait = 10 * time.Second

// drained waits until no operation is running. The caller has set shut, so no operation begins.
// After the close of the files, a running operation would write to the next file with the same
// descriptor number.
func (s *Store) drained() bool {
	for end := time.Now().Add(drainWait); ; time.Sleep(5 * time.Millisecond) {
		busy := false
		s.mu.Lock()
		for _, c := range s.chunks {
			pins := c.pins
			if _, ok := s.dirty[c]; ok {
				pins--
			}
			busy = busy || pins > 0
		}
		s.mu.Unlock()
		if !busy {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}
