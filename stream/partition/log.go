package partition

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// Config configures a Log. Zero values take the defaults.
type Config struct {
	Name   string // of the partition, for errors and the program's log
	Volume uint64 // number of the volume that counts the leaderships
	// Policy returns what holds at the moment: the log asks whenever the log needs to know, also
	// while the log is locked. nil: the defaults.
	Policy   func() Policy
	MaxBatch int // bytes of a batch; default DefaultMaxBatch
	// CompactKeys is the number of keys that a pass of the compaction remembers, default 500,000:
	// about 50 MB.
	CompactKeys int
	// ProducerExpiry is how long the state of a silent producer is kept; default 7 days.
	ProducerExpiry time.Duration
	Counters       *Counters        // count what the log does; default: others than those of any other log
	Now            func() time.Time // default time.Now
	UnsafeNoSync   bool             // a positive control: batches count as durable without a sync
	UnsafeCompact  UnsafeCompact
	Logger         *slog.Logger // default slog.Default()
}

// Policy says when a log begins a segment, and which records the log removes. A policy may change
// while the log is open. Zero values take the defaults.
type Policy struct {
	SegmentBytes int64         // a segment of the size is followed by the next; default 64 MiB
	SegmentAge   time.Duration // a segment of the age is followed by the next; default 24 h
	Retention    time.Duration // older records are removed, segment by segment; 0: none
	// RetentionBytes is the size from which the oldest segments are removed; 0: no bound.
	RetentionBytes int64
	// Compact removes the records of a key before the key's last record. A last record without a
	// value is removed when its segment is as old as TombstoneAge, default 24 h.
	Compact      bool
	TombstoneAge time.Duration
}

// policy returns the policy of the moment, with the defaults.
func (c *Config) policy() (p Policy) {
	if c.Policy != nil {
		p = c.Policy()
	}
	if p.SegmentBytes <= 0 {
		p.SegmentBytes = DefaultSegmentBytes
	}
	if p.SegmentAge <= 0 {
		p.SegmentAge = DefaultSegmentAge
	}
	if p.TombstoneAge <= 0 {
		p.TombstoneAge = DefaultTombstoneAge
	}
	return p
}

// The defaults of Policy.
const (
	DefaultSegmentBytes = 64 << 20
	DefaultSegmentAge   = 24 * time.Hour
	DefaultTombstoneAge = 24 * time.Hour
)

// DefaultMaxBatch is the default bound on the size of a batch, in bytes.
const DefaultMaxBatch = 8 << 20

func (c *Config) defaults() {
	if c.MaxBatch <= 0 {
		c.MaxBatch = DefaultMaxBatch
	}
	if c.CompactKeys <= 0 {
		c.CompactKeys = 500_000
	}
	if c.ProducerExpiry <= 0 {
		c.ProducerExpiry = 7 * 24 * time.Hour
	}
	if c.Counters == nil {
		c.Counters = new(Counters)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

// segment is a segment's file, and the batches up to the high watermark.
type segment struct {
	log.Segment
	size    int64 // of the file when the log was opened, or of the committed batches
	created time.Time
	file    File // nil: not opened yet
	scanned bool // Segment describes the batches; otherwise only First and Next are valid
}

// Log is a partition's log, opened by the partition's leader, or for reads only (OpenRead).
//
// INVARIANT: the segments follow each other without gaps; high is the end of the last segment;
// start is at most high, and never becomes less; all bytes below high are synced; pending has the batches from high to next, in order.
type Log struct {
	dir  Dir
	cfg  Config
	lead Leadership // nil: the log takes no batches, see OpenRead
	// epoch is Kafka's number of the leadership.
	epoch   int32
	ctx     context.Context // of the files; ends with Close
	stop    context.CancelFunc
	closing chan struct{}  // closed by Close
	once    sync.Once      // closes closing
	wg      sync.WaitGroup // of the goroutines that flush, and that wait for the leadership's end

	// compacting is held during a compaction; loading is held while older segments are scanned,
	// replaced or removed. Order: compacting, loading, mu.
	compacting sync.Mutex
	loading    sync.Mutex

	mu       sync.Mutex
	segments []*segment
	epochs   epochs
	start    int64         // records before this offset are deleted; see DeleteBefore
	high     int64         // offset after the last synced record
	next     int64         // offset of the next record to arrive
	durable  log.Producers // producers' state at high
	arrived  log.Producers // producers' state at next
	pending  []arrival
	flushing bool
	err      error // not nil: the log appends nothing any more
	watchers map[chan<- struct{}]struct{}
}

// arrival is a batch before the sync.
type arrival struct {
	batch log.Batch
	bytes []byte
	at    time.Time
}

// Epoch returns the epoch of the log's leader.
func (l *Log) Epoch() int32 { return l.epoch }

// Bounds returns the offset of the first record, and the high watermark: the offset after the
// last durable record.
func (l *Log) Bounds() (start, high int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.startLocked(), l.high
}

func (l *Log) startLocked() int64 {
	if len(l.segments) == 0 {
		return l.high
	}
	return max(l.segments[0].First, l.start)
}

// firstLocked returns the offset at which the first segment begins; the high watermark without one.
func (l *Log) firstLocked() int64 {
	if len(l.segments) == 0 {
		return l.high
	}
	return l.segments[0].First
}

// Size returns the bytes of all segments.
func (l *Log) Size() (size int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.segments {
		size += s.size
	}
	return size
}

// EpochEnd returns the greatest epoch up to an epoch that appended records, and the offset
// after the last record of the epoch; -1 and -1 without such an epoch.
func (l *Log) EpochEnd(epoch int32) (int32, int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.epochs.end(epoch, l.high)
}

// Err returns why the log appends nothing any more; nil if it does.
func (l *Log) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// Watched reports that somebody watches the log.
func (l *Log) Watched() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.watchers) > 0
}

// Watch sends to a channel, without waiting, whenever the high watermark has grown or the log
// has failed, until cancel is called.
func (l *Log) Watch(to chan<- struct{}) (cancel func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.watchers == nil {
		l.watchers = map[chan<- struct{}]struct{}{}
	}
	l.watchers[to] = struct{}{}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.watchers, to)
	}
}

func (l *Log) notifyLocked() {
	for to := range l.watchers {
		select {
		case to <- struct{}{}:
		default: // the watcher has a notice already
		}
	}
}

// errClosed is the error of a log after Close.
var errClosed = errors.New("the log was closed")

// Close ends the use of the log. Appends under way end first.
func (l *Log) Close() error {
	l.mu.Lock()
	l.failLocked(l.fail("close", meta.Unavailable, errClosed))
	l.mu.Unlock()
	l.once.Do(func() { close(l.closing) })
	l.wg.Wait()
	l.loading.Lock()
	defer l.loading.Unlock()
	l.mu.Lock()
	var errs []error
	for _, s := range l.segments {
		if s.file != nil {
			errs = append(errs, s.file.Close())
			s.file = nil
		}
	}
	l.mu.Unlock()
	l.stop()
	return errors.Join(errs...)
}

func (l *Log) fail(op string, kind meta.Kind, err error) error {
	return meta.E(op, kind, l.cfg.Name, err)
}

// failLocked ends the appends. The first reason stays.
func (l *Log) failLocked(err error) {
	if l.err == nil {
		l.err = err
	}
	l.notifyLocked()
}

// reader reads a file from the beginning.
func reader(f File) io.Reader { return io.NewSectionReader(f, 0, 1<<62) }

// scan describes the batches of a segment. seen is called for every batch.
func (l *Log) scan(f File, first int64, seen func(*log.Batch)) (s log.Segment, torn, err error) {
	s, torn, err = log.Scan(reader(f), first, l.cfg.MaxBatch, seen)
	if err != nil {
		return s, nil, l.fail("scan segment", meta.KindOf(err), fmt.Errorf("%s: %w", SegmentName(first), err))
	}
	return s, torn, nil
}
