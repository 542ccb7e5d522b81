package publish

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/table/delta"
)

// Config configures a Table. Zero values take the defaults.
type Config struct {
	Name   string  // name of the stream, for errors and the program's log
	Format string  // format of the values; default Bytes
	Fields []Field // fields of JSON values, a column for each; none: the column value has the values
	// KeepJoined is how long a file stays after its records were joined into another file;
	// default 10 minutes.
	KeepJoined time.Duration
	Now        func() time.Time // default time.Now
	Logger     *slog.Logger     // default slog.Default()
	Unsafe     Unsafe
}

// Unsafe switches mechanisms off, for positive controls.
type Unsafe struct {
	NoBase  bool // a file is committed whatever the table has of the partition
	NoFence bool // a file is committed after a sweep that may have removed the file
}

// Table publishes the logs of a stream's partitions. Its methods must not be called
// concurrently; other programs may publish the same stream.
type Table struct {
	cfg     Config
	files   Files
	columns *columns
	table   *delta.Table
	swept   map[int]time.Time // by partition: when sweep last searched for files
	clean   map[int]bool      // by partition: sweep found nothing, and no file was written since
}

// Open opens the table of a stream. A missing table is made by the first Publish. Errors:
// errors of delta.Open.
func Open(ctx context.Context, files Files, cfg Config) (*Table, error) {
	if cfg.Format == "" {
		cfg.Format = Bytes
	}
	if cfg.KeepJoined <= 0 {
		cfg.KeepJoined = 10 * time.Minute
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	table, err := delta.Open(ctx, logFiles{files})
	if err != nil {
		return nil, err
	}
	return &Table{cfg: cfg, files: files, columns: newColumns(cfg.Format, cfg.Fields), table: table, swept: map[int]time.Time{}, clean: map[int]bool{}}, nil
}

// app names a partition in the Delta log.
func app(partition int) string { return fmt.Sprintf("partition-%d", partition) }

// Published returns the offset up to which a partition is in the table, as of the last Publish.
func (t *Table) Published(partition int) int64 { return max(0, t.table.State().Done(app(partition))) }

// A file takes batches from a log, in reads of readBytes, until the batches have fileBytes.
const (
	fileBytes = 32 << 20
	readBytes = 4 << 20
)

// pending is a file before its commit.
type pending struct {
	span
	base     int64 // the offset up to which the partition was published when the file was begun
	fence    int64 // number of the last sweep when the file was begun
	rejected string
}

// Publish takes the records of the logs into the table, in at most one file for each partition.
// logs has the log of each partition that this program leads. more reports whether records are
// left for the next Publish. After an error, Publish can be repeated. Errors: Corrupt, errors
// of the logs and the files.
func (t *Table) Publish(ctx context.Context, logs map[int]Log) (more bool, err error) {
	if !t.Due(logs) {
		return false, nil
	}
	if err := t.table.Refresh(ctx); err != nil {
		return false, err
	}
	var files []pending
	for _, n := range slices.Sorted(maps.Keys(logs)) {
		f, left, err := t.write(ctx, n, logs[n])
		if err != nil {
			return false, err
		}
		if f != nil {
			files = append(files, *f)
		}
		more = more || left
	}
	if err := t.commit(ctx, files); err != nil {
		return false, err
	}
	for _, n := range slices.Sorted(maps.Keys(logs)) {
		if err := t.join(ctx, n); err != nil {
			return false, err
		}
		if err := t.sweep(ctx, n); err != nil {
			return false, err
		}
	}
	now := t.cfg.Now().UnixMilli()
	return more, t.table.Checkpoint(ctx, now, 2*t.cfg.KeepJoined.Milliseconds())
}

// Due reports whether a log has records that are not in the table, or sweep has work. Due reads
// no files.
func (t *Table) Due(logs map[int]Log) bool {
	for n, l := range logs {
		if _, high := l.Bounds(); high != t.Published(n) || t.sweepDue(n) {
			return true
		}
	}
	return false
}

// write writes a file of the records in a partition's log that are not in the table yet; f is
// nil without such records. more reports whether records are left.
func (t *Table) write(ctx context.Context, n int, l Log) (f *pending, more bool, err error) {
	start, high := l.Bounds()
	base := t.Published(n)
	if base > high {
		return nil, false, meta.E("publish", meta.Corrupt, t.cfg.Name, fmt.Errorf("partition %d ends at offset %d, and its table at %d", n, high, base))
	}
	if base == high {
		return nil, false, nil
	}
	if start > base {
		t.cfg.Logger.Warn("records are not in the stream's table: retention has removed them before", "stream", t.cfg.Name, "partition", n, "from", base, "to", start)
	}
	t.clean[n] = false
	b := newBuilder(t.columns, n, max(base, start))
	for size := 0; b.next < high && size < fileBytes; {
		if err := context.Cause(ctx); err != nil {
			return nil, false, err
		}
		p, err := l.Read(b.next, readBytes)
		if err != nil {
			return nil, false, err
		}
		if len(p) == 0 {
			break
		}
		if err := b.batches(p); err != nil {
			return nil, false, err
		}
		size += len(p)
	}
	f = &pending{base: base, fence: t.table.State().Done(sweepApp)}
	if b.rejects > 0 {
		f.rejected = rejectedDir(n) + b.name() + ".jsonl"
		if err := t.files.Create(ctx, f.rejected, b.rejected.Bytes()); err != nil {
			return nil, false, err
		}
		t.cfg.Logger.Warn("records do not fit the stream's table", "stream", t.cfg.Name, "partition", n, "records", b.rejects, "file", f.rejected)
	}
	p, err := b.finish()
	if err != nil {
		return nil, false, err
	}
	if b.rows > 0 {
		b.path = dataDir(n) + b.name() + parquetSuffix
		if err := t.files.Create(ctx, b.path, p); err != nil {
			return nil, false, err
		}
	}
	f.span = b.span
	return f, b.next < high, nil
}

const parquetSuffix = ".parquet"

func dataDir(partition int) string     { return fmt.Sprintf("data/p=%d/", partition) }
func rejectedDir(partition int) string { return fmt.Sprintf("rejected/p=%d/", partition) }

// name returns a name that no other file has.
func (s *span) name() string {
	var unique [6]byte
	if _, err := rand.Read(unique[:]); err != nil {
		panic("publish: no random numbers: " + err.Error())
	}
	return fmt.Sprintf("%020d-%020d-%s", s.first, s.next, hex.EncodeToString(unique[:]))
}

// commit takes files into the table. If another publisher has published a file's partition
// meanwhile, or a sweep came after the beginning of the file, commit removes the file.
func (t *Table) commit(ctx context.Context, files []pending) error {
	now := t.cfg.Now().UnixMilli()
	var stale []pending
	err := t.table.Commit(ctx, func(s *delta.State) ([]delta.Action, error) {
		stale = nil
		all := t.begin(s, now, "WRITE")
		head := len(all)
		for _, f := range files {
			published, swept := max(0, s.Done(app(f.partition))) != f.base, s.Done(sweepApp) != f.fence
			if published && !t.cfg.Unsafe.NoBase || swept && !t.cfg.Unsafe.NoFence {
				stale = append(stale, f)
				continue
			}
			all = append(all, delta.Action{Txn: &delta.Txn{App: app(f.partition), Version: f.next, Updated: now}})
			if f.rows > 0 {
				all = append(all, f.add(now, true))
			}
		}
		if len(all) == head {
			return nil, nil
		}
		return all, nil
	})
	if err != nil {
		return err
	}
	for _, f := range stale {
		for _, p := range []string{f.path, f.rejected} {
			if p == "" {
				continue
			}
			if err := t.files.Remove(ctx, p); err != nil && !errors.Is(err, meta.NotFound) {
				return err
			}
		}
	}
	return nil
}

// begin returns the first actions of a commit: time, operation and program of the commit, and
// in the table's first commit the schema.
func (t *Table) begin(s *delta.State, now int64, operation string) []delta.Action {
	all := []delta.Action{{CommitInfo: &delta.CommitInfo{Time: now, Operation: operation, Engine: "penstock"}}}
	if s.Version < 0 {
		all = append(all, delta.Begin(uuid(), now, t.columns.delta)...)
	}
	return all
}

// uuid returns a random UUID (RFC 9562, version 4).
func uuid() string {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		panic("publish: no random numbers: " + err.Error())
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	h := hex.EncodeToString(b[:])
	return strings.Join([]string{h[:8], h[8:12], h[12:16], h[16:20], h[20:]}, "-")
}
