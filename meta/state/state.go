// Package state is the local store of one volume's namespace: an ordered key-value store
// (Pebble) in a directory of a metadata server. The journal makes it durable. The store has no
// log of its own: the position of each applied entry is written in one batch with the entry's
// effects, and after a crash the store is at the position of an earlier entry, from which the
// journal is replayed.
//
// A state directory:
//
//	FORMAT     one line: penstock-state <version> volume <8 hex> id <26 letters> crc <8 hex>
//	           the checksum is CRC32C of the text before " crc"
//	store/     Pebble's files: *.sst never change once written, MANIFEST-* grows
//
// Keys with first byte 0x00 belong to this package, all others to the namespace:
//
//	00 01      the position applied: sequence 8, hash 16, CRC32C of both 4, big-endian
//
// Every block of a table file has Pebble's CRC32C. Reading a block with a wrong checksum is an
// error of kind Corrupt, after which the caller rebuilds the directory from a checkpoint and
// the journal.
package state

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/bloom"
	"github.com/cockroachdb/pebble/v2/sstable"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

// Sizes of one store's parts.
const (
	memTable  = 16 << 20 // Pebble starts at 256 KiB and doubles: an idle volume stays small
	tableFile = 8 << 20  // in level 0; doubles with each level
	blockSize = 8 << 10
	// indexBlock is so large that a table file has one index block: a point read then has one
	// level less.
	indexBlock = 256 << 10
	bloomBits  = 10
)

var appliedKey = []byte{0x00, 0x01}

// Shared has the common resources of the stores of one process: the block cache, which is
// enlarged by the memory tables (memory.go), and the open table files.
type Shared struct {
	cache *pebble.Cache
	files *pebble.FileCache
	log   *slog.Logger

	// For tests: a small memory table is flushed often, and the tests' own file system can
	// lose power.
	memTable uint64
	fs       vfs.FS
}

// NewShared makes a block cache of cacheBytes and a cache of openFiles open table files. log
// receives the stores' warnings and errors; nil discards them.
func NewShared(cacheBytes int64, openFiles int, log *slog.Logger) *Shared {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Shared{
		cache: pebble.NewCache(cacheBytes), files: pebble.NewFileCache(1, openFiles), log: log,
		memTable: memTable, fs: vfs.Default,
	}
}

// Close gives the caches back once every store is closed.
func (s *Shared) Close() {
	s.files.Unref()
	s.cache.Unref()
}

// options are Pebble's for a store.
func (s *Shared) options(dir string) *pebble.Options {
	log := s.log.With("store", dir)
	o := &pebble.Options{
		Cache:                       s.cache,
		FileCache:                   s.files,
		DisableWAL:                  true,
		FormatMajorVersion:          pebble.FormatTableFormatV6,
		MemTableSize:                s.memTable,
		FS:                          s.fs,
		MemTableStopWritesThreshold: 4,
		L0CompactionThreshold:       4,
		L0StopWritesThreshold:       24,
		LBaseMaxBytes:               64 << 20,
		CompactionConcurrencyRange:  func() (int, int) { return 1, 2 },
		Logger:                      logger{log, dir},
		EventListener: &pebble.EventListener{
			BackgroundError: func(err error) { log.Error("store's background work failed", "err", err) },
			DataCorruption:  func(i pebble.DataCorruptionInfo) { log.Error("store is corrupt", "file", i.Path, "err", i.Details) },
		},
	}
	o.TargetFileSizes[0] = tableFile
	for i := range o.Levels {
		l := &o.Levels[i]
		l.BlockSize = blockSize
		l.IndexBlockSize = indexBlock
		l.FilterPolicy = bloom.FilterPolicy(bloomBits)
		// The upper levels are read and rewritten all the time and have a tenth of the bytes:
		// plain there, snappy in the two lowest.
		profile := sstable.NoCompression
		if i >= len(o.Levels)-2 {
			profile = sstable.SnappyCompression
		}
		l.Compression = func() *sstable.CompressionProfile { return profile }
	}
	return o
}

// Store is the state of one volume. Its methods may be called from any goroutine; Apply from
// one at a time.
type Store struct {
	dir    string
	db     *pebble.DB
	memory *memory

	mu      sync.Mutex // orders Apply and the position
	applied journal.Position

	sumsMu sync.Mutex
	sums   map[string]fileSum // of table files that this Store has seen; see Checkpoint
}

// Create makes an empty store. Errors: Exists (the directory is not empty), IO,
// NoSpace.
func Create(dir string, v meta.VolumeID, shared *Shared) (*Store, error) {
	names, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, ioError("create state", dir, err)
	}
	if len(names) > 0 {
		return nil, meta.E("create state", meta.Exists, dir, nil)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, ioError("create state", dir, err)
	}
	if err := writeFormat(dir, v); err != nil {
		return nil, err
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
		return nil, ioError("create state", dir, err)
	}
	return open(dir, shared, create)
}

// Open opens the store of a volume. It writes nothing before it has checked the format.
// Errors: NotFound (no directory, or an empty one: create or restore it), Corrupt (remove the
// directory, restore a checkpoint, replay the journal), Version (written by a newer program),
// IO, NoSpace.
func Open(dir string, v meta.VolumeID, shared *Shared) (*Store, error) {
	if err := checkFormat(dir, v); err != nil {
		return nil, err
	}
	return open(dir, shared, existing)
}

// How open finds the store.
type how int

const (
	create how = iota
	existing
	readOnly
	atRest // to be changed a little and closed: nothing is compacted
)

func open(dir string, shared *Shared, h how) (*Store, error) {
	const op = "open state"
	o := shared.options(dir)
	o.ReadOnly = h == readOnly
	c := newCompactions()
	o.Experimental.CompactionScheduler = c
	if h == atRest {
		o.L0StopWritesThreshold = math.MaxInt // no compaction would end the stop
	} else {
		o.EventListener.FlushBegin = func(i pebble.FlushInfo) {
			if i.InputBytes > 0 { // opening flushes nothing
				c.allow()
			}
		}
		o.EventListener.WriteStallBegin = func(pebble.WriteStallBeginInfo) { c.allow() }
	}
	mem := &memory{cache: shared.cache}
	o.EventListener.FlushEnd = func(pebble.FlushInfo) { mem.flushed() }
	o.ErrorIfNotExists = h != create // else Pebble would make an empty store where files are missing
	db, err := pebble.Open(filepath.Join(dir, storeDir), o)
	if err != nil {
		c.Unregister()
		if h != create && !fromSystem(err) {
			return nil, meta.E(op, meta.Corrupt, dir, err)
		}
		return nil, ioError(op, dir, err)
	}
	mem.mu.Lock()
	mem.db = db
	mem.count()
	mem.mu.Unlock()
	s := &Store{dir: dir, db: db, memory: mem, sums: map[string]fileSum{}}
	if s.applied, err = s.readApplied(); err != nil {
		return nil, errors.Join(err, s.closeDB())
	}
	return s, nil
}

// fromSystem reports that the operating system refused something (no space, no permission, a
// failing disk), which says nothing about the contents of files. Every other reason for which
// Pebble can't open a store lies in the files: one is missing, truncated, or not as in the
// manifest, and Pebble marks only some of these as corruption.
func fromSystem(err error) bool {
	var no unix.Errno
	return errors.As(err, &no) && !errors.Is(err, os.ErrNotExist)
}

func (s *Store) readApplied() (journal.Position, error) {
	b, ok, err := s.Get(appliedKey)
	if err != nil || !ok {
		return journal.Position{}, err
	}
	if len(b) != 28 || crc32.Checksum(b[:24], castagnoli) != binary.BigEndian.Uint32(b[24:]) {
		return journal.Position{}, meta.E("open state", meta.Corrupt, s.dir, errors.New("the applied position"))
	}
	return journal.Position{Seq: meta.Seq(binary.BigEndian.Uint64(b)), Hash: journal.Hash(b[8:24])}, nil
}

func encodeApplied(p journal.Position) []byte {
	b := make([]byte, 0, 28)
	b = binary.BigEndian.AppendUint64(b, uint64(p.Seq))
	b = append(b, p.Hash[:]...)
	return binary.BigEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
}

// ioError gives an error of the disk or of Pebble its kind; nil for nil.
func ioError(op, subject string, err error) error {
	if err == nil {
		return nil
	}
	kind := meta.IO
	var e *meta.Error
	switch {
	case errors.As(err, &e):
		kind = e.Kind
	case pebble.IsCorruptionError(err):
		kind = meta.Corrupt
	case isNoSpace(err):
		kind = meta.NoSpace
	case errors.Is(err, os.ErrPermission):
		kind = meta.AccessDenied
	}
	return meta.E(op, kind, subject, err)
}

// Get gives the value of a key. The value is the caller's.
// Errors: Corrupt, IO.
func (s *Store) Get(key []byte) (val []byte, ok bool, err error) { return s.get(s.db, key) }

func (s *Store) get(r pebble.Reader, key []byte) (val []byte, ok bool, err error) {
	v, closer, err := r.Get(key)
	if err == pebble.ErrNotFound {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, ioError("read state", s.dir, err)
	}
	val = append(make([]byte, 0, len(v)), v...)
	if err := closer.Close(); err != nil {
		return nil, false, ioError("read state", s.dir, err)
	}
	return val, true, nil
}

// Scan calls fn for the keys lo <= k < hi in ascending order, until fn is
// false. k and v are valid only inside fn. Errors: Corrupt, IO.
func (s *Store) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	return s.scan(s.db, lo, hi, fn)
}

func (s *Store) scan(r pebble.Reader, lo, hi []byte, fn func(k, v []byte) bool) error {
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lo, UpperBound: hi})
	if err != nil {
		return ioError("scan state", s.dir, err)
	}
	var verr error
	for ok := it.First(); ok; ok = it.Next() {
		var v []byte
		if v, verr = it.ValueAndErr(); verr != nil || !fn(it.Key(), v) {
			break
		}
	}
	return ioError("scan state", s.dir, errors.Join(verr, it.Close()))
}

// Frozen is the store as of one entry, for reading while the store changes. The caller must
// close it before the store.
type Frozen struct {
	s    *Store
	snap *pebble.Snapshot
}

// Freeze returns the present state of the store.
func (s *Store) Freeze() *Frozen { return &Frozen{s, s.db.NewSnapshot()} }

// Get is Store.Get.
func (f *Frozen) Get(key []byte) (val []byte, ok bool, err error) { return f.s.get(f.snap, key) }

// Scan is Store.Scan.
func (f *Frozen) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	return f.s.scan(f.snap, lo, hi, fn)
}

// Close releases the frozen state.
func (f *Frozen) Close() error { return ioError("close frozen state", f.s.dir, f.snap.Close()) }

// Batch collects the effects of one entry. Keys and values are copied. A key
// whose first byte is 0x00 is a bug and panics.
type Batch interface {
	Put(key, value []byte)
	Delete(key []byte)
	DeleteRange(lo, hi []byte) // lo <= key < hi
}

type batch struct {
	b   *pebble.Batch
	err error
}

func own(key []byte) {
	if len(key) == 0 || key[0] == 0 {
		panic(fmt.Sprintf("state: key %x is not the namespace's", key))
	}
}

func (b *batch) keep(err error) { b.err = errors.Join(b.err, err) }

func (b *batch) Put(k, v []byte) { own(k); b.keep(b.b.Set(k, v, nil)) }

func (b *batch) Delete(k []byte) { own(k); b.keep(b.b.Delete(k, nil)) }

func (b *batch) DeleteRange(lo, hi []byte) { own(lo); b.keep(b.b.DeleteRange(lo, hi, nil)) }

// Apply applies the effects of a committed journal entry, with its position, all or nothing.
// The entry must follow the last applied one. The effects are durable only after Flush.
// Errors: IO, Corrupt; after an error the store is unchanged.
func (s *Store) Apply(at journal.Position, effects func(Batch) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at.Seq != s.applied.Seq+1 {
		panic(fmt.Sprintf("state: entry %d applied after entry %d of %s", at.Seq, s.applied.Seq, s.dir))
	}
	b := &batch{b: s.db.NewBatch()}
	err := effects(b)
	b.keep(b.b.Set(appliedKey, encodeApplied(at), nil))
	if err == nil {
		err = b.err
	}
	n := b.b.Len()
	if err == nil {
		err = b.b.Commit(pebble.NoSync)
	}
	if err = errors.Join(err, b.b.Close()); err != nil {
		return ioError("apply to state", s.dir, err)
	}
	s.memory.wrote(n)
	s.applied = at
	return nil
}

// Remove removes invisible keys that no entry's effects name. The removal is durable before
// later applied entries. Errors: IO.
func (s *Store) Remove(keys [][]byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := &batch{b: s.db.NewBatch()}
	for _, k := range keys {
		b.Delete(k)
	}
	err := b.err
	if err == nil {
		err = b.b.Commit(pebble.NoSync)
	}
	return ioError("remove from state", s.dir, errors.Join(err, b.b.Close()))
}

// Applied is the position of the last applied entry; zero for an empty store.
func (s *Store) Applied() journal.Position {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.applied
}

// Rebase turns the copy of a store, which Copy left in dir, into the state directory of
// another volume without applied entries: the beginning of that volume's history. Errors: IO,
// NoSpace, Corrupt.
func Rebase(dir string, v meta.VolumeID, shared *Shared) error {
	s, err := open(dir, shared, atRest)
	if err != nil {
		return err
	}
	if err = s.db.Set(appliedKey, encodeApplied(journal.Position{}), pebble.NoSync); err == nil {
		err = s.db.Flush()
	}
	if err = errors.Join(ioError("rebase state", dir, err), s.closeDB()); err != nil {
		return err
	}
	return writeFormat(dir, v)
}

// Flush makes everything applied before durable. Errors: IO, NoSpace.
func (s *Store) Flush() error {
	if s.Applied().Seq == 0 {
		return nil
	}
	return ioError("flush state", s.dir, s.db.Flush())
}

// Size returns the bytes of the store's files and memory tables.
func (s *Store) Size() int64 {
	m := s.db.Metrics()
	return int64(m.DiskSpaceUsage()) + int64(m.MemTable.Size)
}

// Close flushes and closes the store.
func (s *Store) Close() error {
	return errors.Join(s.Flush(), s.closeDB())
}

func (s *Store) closeDB() error { return ioError("close state", s.dir, s.memory.close(s.db.Close)) }
