// Package partition owns the log of a partition of a stream: the segments on disk, appends
// with a shared sync, recovery after a crash, reads up to the high watermark, and retention.
// Package stream/log defines batches, and decides which batch a producer may append.
//
// A partition is a directory:
//
//	00000000000000000000.seg   record batches; named after the offset of the first record
//	00000000000000004711.seg   only the last segment grows
//	00000000000000000815.start an empty file: records before this offset are deleted
//	producers                  state of the producers where the last segment begins
//	compacted                  how far a compaction by key has come
//	epochs                     the leaders so far, and the offset where each leader began
//	leader                     an empty file, which the leader of the partition leads
//
// An append is acknowledged when the segment was synced. All batches arriving during a
// sync are written and synced together by the next sync: many producers share a sync.
package partition

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// Dir is the directory of a partition. Errors are those of package meta: NotFound for a
// missing file, Exists for the creation of an existing file.
type Dir interface {
	// List returns the files, in any order.
	List(ctx context.Context) ([]Info, error)
	// Open opens a file for reading; with write, for writing, too: nobody else can then write
	// to the file any more.
	Open(ctx context.Context, name string, write bool) (File, error)
	// Create makes an empty file for writing, as Open. File.Sync makes the name durable, too.
	Create(ctx context.Context, name string) (File, error)
	// ReadFile reads a whole small file.
	ReadFile(ctx context.Context, name string) ([]byte, error)
	// Replace replaces a whole small file. After a crash the file has the old or the new
	// bytes; after the return, the new ones.
	Replace(ctx context.Context, name string, data []byte) error
	// Remove removes a file. An opened file stays readable, or reads fail with Stale.
	Remove(ctx context.Context, name string) error
}

// Info describes a file of a Dir.
type Info struct {
	Name    string
	Size    int64
	Created time.Time
}

// File is an open file of a Dir. The methods may be called concurrently.
type File interface {
	io.ReaderAt
	io.WriterAt
	Truncate(size int64) error
	// Sync makes durable all earlier writes, and the file's name.
	Sync() error
	Close() error
}

// Names of the files of a partition.
const (
	segmentSuffix = ".seg"
	startSuffix   = ".start"
	producersFile = "producers"
	epochsFile    = "epochs"
	compactedFile = "compacted"
)

// SegmentName names the segment that begins at an offset.
func SegmentName(first int64) string { return fmt.Sprintf("%020d%s", first, segmentSuffix) }

// FirstOf parses the name of a segment; ok is false for other files.
func FirstOf(name string) (first int64, ok bool) { return offsetOf(name, segmentSuffix) }

// startName names the file that says where a log begins.
func startName(offset int64) string { return fmt.Sprintf("%020d%s", offset, startSuffix) }

// startOf parses the name of a file that says where a log begins; ok is false for other files.
func startOf(name string) (offset int64, ok bool) { return offsetOf(name, startSuffix) }

// offsetOf parses a name of 20 digits and a suffix.
func offsetOf(name, suffix string) (offset int64, ok bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	if !ok || len(digits) != 20 {
		return 0, false
	}
	offset, err := strconv.ParseInt(digits, 10, 64)
	return offset, err == nil && offset >= 0 && fmt.Sprintf("%020d", offset) == digits
}
