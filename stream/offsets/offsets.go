// Package offsets owns the offsets that a consumer group has committed in a stream: a file to
// which every commit is appended, and which is written anew when most of it is out of date.
// The file is a sequence of commits. Numbers are big-endian:
//
//	0  4  length of the rest, from byte 8 on
//	4  4  CRC32C of the rest
//	8  1  version, 1
//	9  4  partition
//	13 8  offset of the next record to consume; -1: the commit of the partition was removed
//	21 4  epoch of the leader of the record before; -1: not known
//	25 8  time of the commit, ms since 1970
//	33    the consumer's words about the commit
//
// A crash may cut the last commits; what was acknowledged is synced and stays.
package offsets

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/partition"
)

// Commit is the offset of a group in a partition.
type Commit struct {
	Partition int32
	Offset    int64
	Epoch     int32 // of the leader of the record before; -1: not known
	Time      int64 // of the commit, ms since 1970
	Metadata  string
}

// MaxMetadata bounds Commit.Metadata, in bytes.
const MaxMetadata = 4096

const (
	prefix     = 8
	fixed      = 25
	version    = 1
	compactMin = 64 << 10 // bytes of a file that is never written anew
	compactBy  = 8        // a file is written anew when it is so many times larger than needed
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// append adds the encoding of a commit.
func (c *Commit) append(dst []byte) []byte {
	start := len(dst)
	dst = append(dst, make([]byte, prefix)...)
	dst = append(dst, version)
	dst = binary.BigEndian.AppendUint32(dst, uint32(c.Partition))
	dst = binary.BigEndian.AppendUint64(dst, uint64(c.Offset))
	dst = binary.BigEndian.AppendUint32(dst, uint32(c.Epoch))
	dst = binary.BigEndian.AppendUint64(dst, uint64(c.Time))
	dst = append(dst, c.Metadata...)
	rest := dst[start+prefix:]
	binary.BigEndian.PutUint32(dst[start:], uint32(len(rest)))
	binary.BigEndian.PutUint32(dst[start+4:], crc32.Checksum(rest, castagnoli))
	return dst
}

// decode decodes the commits at the beginning of b, up to bytes that are no commit, and
// returns how many bytes the commits have. Errors: Version.
func decode(b []byte, fn func(Commit)) (n int, err error) {
	for len(b)-n >= prefix+fixed {
		p := b[n:]
		size := binary.BigEndian.Uint32(p)
		if size < fixed || size > fixed+MaxMetadata || int(size) > len(p)-prefix {
			break
		}
		rest := p[prefix : prefix+size]
		if crc32.Checksum(rest, castagnoli) != binary.BigEndian.Uint32(p[4:]) {
			break
		}
		if rest[0] != version {
			return n, meta.E("read offsets", meta.Version, "group", fmt.Errorf("version %d is not %d: use a newer program", rest[0], version))
		}
		fn(Commit{
			Partition: int32(binary.BigEndian.Uint32(rest[1:])), Offset: int64(binary.BigEndian.Uint64(rest[5:])),
			Epoch: int32(binary.BigEndian.Uint32(rest[13:])), Time: int64(binary.BigEndian.Uint64(rest[17:])), Metadata: string(rest[fixed:]),
		})
		n += prefix + int(size)
	}
	return n, nil
}

// Offsets are the committed offsets of a group in a stream.
type Offsets struct {
	// UnsafeNoWrite, a positive control, keeps commits in memory only. The caller sets the field
	// before the first commit.
	UnsafeNoWrite bool

	dir  partition.Dir
	name string
	ctx  context.Context
	log  *slog.Logger

	mu     sync.Mutex // held during writes: commits of a group are rare
	file   partition.File
	size   int64
	err    error // not nil: the file must be opened again
	closed bool
	of     map[int32]Commit
}

// Open opens the offsets of a group, and cuts what a crash left after the last whole commit.
func Open(ctx context.Context, dir partition.Dir, name string, l *slog.Logger) (*Offsets, error) {
	o := &Offsets{dir: dir, name: name, ctx: context.WithoutCancel(ctx), log: l}
	return o, o.open()
}

// Read reads the offsets of a group in a directory that nobody can write. Commits fail.
func Read(ctx context.Context, dir partition.Dir, name string) (*Offsets, error) {
	b, err := dir.ReadFile(ctx, name)
	if err != nil {
		return nil, err
	}
	o := &Offsets{dir: dir, name: name, ctx: context.WithoutCancel(ctx), closed: true, of: map[int32]Commit{}}
	_, err = decode(b, o.apply)
	return o, err
}

func (o *Offsets) open() error {
	f, err := o.dir.Open(o.ctx, o.name, true)
	if errors.Is(err, meta.NotFound) {
		if f, err = o.dir.Create(o.ctx, o.name); errors.Is(err, meta.Exists) { // another process was faster
			f, err = o.dir.Open(o.ctx, o.name, true)
		}
	}
	if err != nil {
		return err
	}
	b, err := io.ReadAll(io.NewSectionReader(f, 0, 1<<40))
	if err != nil {
		return errors.Join(err, f.Close())
	}
	o.of = map[int32]Commit{}
	n, err := decode(b, o.apply)
	if err == nil && n < len(b) {
		err = f.Truncate(int64(n))
	}
	if err = errors.Join(err, f.Sync()); err != nil {
		return errors.Join(err, f.Close())
	}
	o.file, o.size, o.err = f, int64(n), nil
	return nil
}

func (o *Offsets) apply(c Commit) {
	if c.Offset < 0 {
		delete(o.of, c.Partition)
		return
	}
	o.of[c.Partition] = c
}

// Commit makes commits durable. Errors: Invalid, and those of the directory. After an error,
// the commits may or may not hold.
func (o *Offsets) Commit(commits []Commit) error {
	var p []byte
	for _, c := range commits {
		if len(c.Metadata) > MaxMetadata || c.Partition < 0 {
			return meta.E("commit offsets", meta.Invalid, o.name, fmt.Errorf("partition %d has %d bytes of metadata", c.Partition, len(c.Metadata)))
		}
		p = c.append(p)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.closed {
		return meta.E("commit offsets", meta.Unavailable, o.name, errors.New("the offsets of the group were closed"))
	}
	if o.err != nil {
		if err := o.reopen(); err != nil {
			return err
		}
	}
	if o.UnsafeNoWrite {
		for _, c := range commits {
			o.apply(c)
		}
		return nil
	}
	_, err := o.file.WriteAt(p, o.size)
	if err == nil {
		err = o.file.Sync()
	}
	if err != nil {
		o.err = err
		return err
	}
	o.size += int64(len(p))
	for _, c := range commits {
		o.apply(c)
	}
	if err := o.compact(); err != nil {
		// The commits are durable. The next commit opens the file that has the name then.
		o.err = err
		o.log.Warn("the offsets of a group could not be written anew; the gateway opens the file again", "file", o.name, "error", err)
	}
	return nil
}

// reopen opens the file again after an error.
func (o *Offsets) reopen() error {
	if o.file != nil {
		if err := o.file.Close(); err != nil {
			o.log.Warn("the file with the offsets of a group could not be closed after an error; the gateway opens the file again", "file", o.name, "error", errors.Join(o.err, err))
		}
		o.file = nil
	}
	return o.open()
}

// compact writes the file anew if most of it is out of date. After an error the name may stand for the
// old or for the new file.
func (o *Offsets) compact() error {
	if o.size < compactMin {
		return nil
	}
	var p []byte
	for _, n := range slices.Sorted(maps.Keys(o.of)) {
		c := o.of[n]
		p = c.append(p)
	}
	if int64(len(p))*compactBy > o.size {
		return nil
	}
	if err := o.dir.Replace(o.ctx, o.name, p); err != nil {
		return err
	}
	return o.reopen()
}

// All returns the commits of all partitions, in the order of the partitions.
func (o *Offsets) All() []Commit {
	o.mu.Lock()
	defer o.mu.Unlock()
	var l []Commit
	for _, n := range slices.Sorted(maps.Keys(o.of)) {
		l = append(l, o.of[n])
	}
	return l
}

// Close ends the use of the offsets: no later Commit writes to the file.
func (o *Offsets) Close() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	if o.file == nil {
		return nil
	}
	err := o.file.Close()
	o.file = nil
	return err
}
