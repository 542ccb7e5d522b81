// Package publish owns the published table of a stream: Parquet files with the records of the
// partitions' logs, and the Delta log that lists them (table/delta). Any program that reads
// Delta tables opens the stream's directory:
//
//	data/p=0/FIRST-NEXT-UNIQUE.parquet       records of partition 0 from offset FIRST to before NEXT
//	rejected/p=0/FIRST-NEXT-UNIQUE.jsonl     records of these offsets that are not in the table
//	_delta_log/                              which files are the table
//
// A commit takes files into the table together with the offset up to which each partition is
// published (a txn action; the application is "partition-0", the version is the offset). A
// publisher commits a file only if the partition is still published up to where the file
// begins, so each record is in the table once: over crashes, and also if two publishers work.
//
// Small files are joined. A joined file stays in its directory for the time of KeepJoined, for
// programs that read an earlier version; the Delta log tells at any time which files count.
package publish

import (
	"context"
	"time"
)

// Files is the directory of a stream. Names are paths relative to it. Directories are made
// when a file in them is. Errors are those of package meta.
type Files interface {
	// List returns the files of a directory, in any order; none if the directory is missing.
	List(ctx context.Context, dir string) ([]Info, error)
	// ReadFile reads a whole file. Errors: NotFound.
	ReadFile(ctx context.Context, name string) ([]byte, error)
	// Create makes a file with its bytes: the file is there whole or not at all, and durable
	// when Create returns. Errors: Exists (a file has the name). After another error the file
	// may be there or not.
	Create(ctx context.Context, name string, data []byte) error
	// Replace makes or replaces a file, as Create does.
	Replace(ctx context.Context, name string, data []byte) error
	// Remove removes a file. Errors: NotFound.
	Remove(ctx context.Context, name string) error
}

// Info describes a file.
type Info struct {
	Name    string // in its directory
	Created time.Time
}

// Log is the log of a partition. partition.Log is a Log.
type Log interface {
	// Bounds returns the offset of the first record, and the offset after the last durable one.
	Bounds() (start, high int64)
	// Read returns whole batches, the first of which has the record at an offset.
	Read(offset int64, most int) ([]byte, error)
}

// logFiles is the directory of the Delta log among the stream's Files.
type logFiles struct{ files Files }

const logDir = "_delta_log/"

func (l logFiles) List(ctx context.Context) (names []string, err error) {
	all, err := l.files.List(ctx, logDir)
	for _, f := range all {
		names = append(names, f.Name)
	}
	return names, err
}

func (l logFiles) ReadFile(ctx context.Context, name string) ([]byte, error) {
	return l.files.ReadFile(ctx, logDir+name)
}

func (l logFiles) Create(ctx context.Context, name string, data []byte) error {
	return l.files.Create(ctx, logDir+name, data)
}

func (l logFiles) Replace(ctx context.Context, name string, data []byte) error {
	return l.files.Replace(ctx, logDir+name, data)
}

func (l logFiles) Remove(ctx context.Context, name string) error {
	return l.files.Remove(ctx, logDir+name)
}
