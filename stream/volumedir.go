package stream

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/partition"
)

// volumeDir is a directory of a volume. The inode names the directory, so that a renamed stream
// keeps working.
type volumeDir struct {
	v   *penstock.Volume
	ino meta.Ino
}

// Modes of what a stream has. The files are read-only for mounts; the library acts as root.
const (
	dirMode  = 0o755
	fileMode = 0o444
)

// replaceSuffix marks an unfinished file that is to replace another one.
const replaceSuffix = ".new"

func (d volumeDir) List(ctx context.Context) ([]partition.Info, error) {
	var all []partition.Info
	for at := (penstock.DirCursor{}); ; {
		list, eof, err := d.v.ReadDir(ctx, d.ino, &at, 0, true)
		if err != nil {
			return nil, err
		}
		for _, e := range list {
			if e.Entry.Attr.Ino == 0 {
				if e.Entry, err = d.v.Lookup(ctx, d.ino, e.Name); err != nil {
					return nil, err
				}
			}
			if e.Type == meta.TypeRegular {
				all = append(all, partition.Info{Name: e.Name, Size: int64(e.Entry.Attr.Size), Created: timeOf(e.Entry.Attr.Btime)})
			}
		}
		if eof || len(list) == 0 {
			return all, nil
		}
	}
}

func timeOf(t meta.Time) time.Time {
	sec, nsec := t.Unix()
	return time.Unix(sec, int64(nsec))
}

// lookup finds a file. Errors: NotFound.
func (d volumeDir) lookup(ctx context.Context, name string) (penstock.Entry, error) {
	e, err := d.v.Lookup(ctx, d.ino, name)
	if err == nil && e.Negative {
		err = meta.E("open", meta.NotFound, name, nil)
	}
	return e, err
}

// sub returns a directory below. Errors: NotFound, NotDir.
func (d volumeDir) sub(ctx context.Context, name string) (volumeDir, error) {
	e, err := d.lookup(ctx, name)
	if err != nil {
		return d, err
	}
	if !e.Attr.IsDir() || e.Volume != d.v.ID() {
		return d, meta.E("open", meta.NotDir, name, nil)
	}
	return volumeDir{d.v, e.Attr.Ino}, nil
}

// makeSub is sub and makes a missing directory.
func (d volumeDir) makeSub(ctx context.Context, name string) (volumeDir, error) {
	sub, err := d.sub(ctx, name)
	if !errors.Is(err, meta.NotFound) {
		return sub, err
	}
	if _, err := d.v.Create(ctx, nil, meta.Create{Parent: d.ino, Name: name, Mode: meta.TypeDir | dirMode}); err != nil && !errors.Is(err, meta.Exists) {
		return d, err
	}
	if sub, err = d.sub(ctx, name); err != nil {
		return d, err
	}
	return sub, mark(ctx, d.v, sub.ino)
}

// mark keeps a file or directory of a stream from being written by clients that do not serve
// streams. What is made in a marked directory is marked.
func mark(ctx context.Context, v *penstock.Volume, ino meta.Ino) error {
	_, err := v.SetAttr(ctx, nil, meta.SetAttr{Ino: ino, Mask: meta.SetStream})
	return err
}

const writing = uint32(os.O_RDWR)

// open opens a file for reading.
func (d volumeDir) open(ctx context.Context, name string) (partition.File, error) {
	e, err := d.lookup(ctx, name)
	if err != nil {
		return nil, err
	}
	if _, err := d.v.Open(ctx, nil, e.Attr.Ino, 0); err != nil {
		return nil, err
	}
	return &volumeFile{ctx: ctx, v: d.v, ino: e.Attr.Ino}, nil
}

func (d volumeDir) ReadFile(ctx context.Context, name string) ([]byte, error) {
	e, err := d.lookup(ctx, name)
	if err != nil {
		return nil, err
	}
	if e.Attr.Mode&meta.TypeMask != meta.TypeRegular {
		return nil, meta.E("read", meta.Invalid, name, errors.New("it is no regular file"))
	}
	p := make([]byte, e.Attr.Size)
	n, err := d.v.Read(ctx, e.Attr.Ino, p, 0)
	return p[:n], err
}

// put writes a file under the name draft, which no other writer has, and renames it with flags of
// renameat2(2).
func (d volumeDir) put(ctx context.Context, name, draft string, data []byte, flags uint32) error {
	info, err := d.v.CreateOpen(ctx, nil, meta.Create{Parent: d.ino, Name: draft, Mode: meta.TypeRegular | fileMode}, writing|uint32(os.O_TRUNC))
	if err != nil {
		return err
	}
	f := &volumeFile{ctx: ctx, v: d.v, ino: info.Entry.Attr.Ino, flags: writing}
	_, err = f.WriteAt(data, 0)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := d.v.Rename(ctx, nil, d.ino, draft, d.ino, name, flags); err != nil {
		return err
	}
	return d.v.FsyncDir(ctx, d.ino)
}

func (d volumeDir) Remove(ctx context.Context, name string) error {
	return d.v.Unlink(ctx, nil, d.ino, name, false)
}

// volumeFile is an open file of a volumeDir.
type volumeFile struct {
	ctx   context.Context
	v     *penstock.Volume
	ino   meta.Ino
	flags uint32 // of open(2)
}

func (f *volumeFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.v.Read(f.ctx, f.ino, p, off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

func (f *volumeFile) WriteAt(p []byte, off int64) (int, error) {
	return f.v.Write(f.ctx, nil, f.ino, p, off, false, false)
}

func (f *volumeFile) Truncate(size int64) error {
	_, err := f.v.SetAttr(f.ctx, nil, meta.SetAttr{Ino: f.ino, Mask: meta.SetSize, Size: uint64(size)})
	return err
}

func (f *volumeFile) Sync() error { return f.v.Fsync(f.ctx, f.ino, true) }

func (f *volumeFile) Close() error {
	err := f.v.Flush(f.ctx, nil, f.ino, 0)
	f.v.Release(f.ctx, f.ino, f.flags)
	return err
}
