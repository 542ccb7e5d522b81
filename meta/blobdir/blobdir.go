// Package blobdir is the implementation of meta.Blob that stores blobs as files of one folder
// on the owner's machine: for tests, and for a single machine.
//
// A blob is a file <hint>.<26 random letters> with the blob's bytes; the reference has length
// and CRC32C. A file <...>.tmp is an unfinished Put.
package blobdir

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Dir is a folder of blobs.
type Dir struct{ root *os.Root }

var _ meta.Blob = (*Dir)(nil)

// Open opens a folder, creates it if missing, and removes the remains of unfinished Puts. Only
// the caller may write in the folder. Errors: IO, AccessDenied.
func Open(dir string) (*Dir, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fail("open blobs", dir, err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fail("open blobs", dir, err)
	}
	left, err := filepath.Glob(filepath.Join(dir, "*.tmp"))
	for _, name := range left {
		err = errors.Join(err, root.Remove(filepath.Base(name)))
	}
	if err != nil {
		return nil, fail("open blobs", dir, errors.Join(err, root.Close()))
	}
	return &Dir{root}, nil
}

// Close lets the folder go.
func (d *Dir) Close() error { return d.root.Close() }

// Put is documented at meta.Blob: write, fsync, rename, fsync the folder.
func (d *Dir) Put(ctx context.Context, _ meta.BlobOwner, hint string, r io.Reader) (ref meta.BlobRef, err error) {
	const op = "store blob"
	name := strings.Map(func(c rune) rune {
		if c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '-' || c == '_' {
			return c
		}
		return '_'
	}, hint[:min(len(hint), 64)]) + "." + rand.Text()
	tmp := name + ".tmp"
	f, err := d.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return meta.BlobRef{}, fail(op, hint, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.root.RemoveAll(tmp))
		}
	}()
	sum := crc32.New(castagnoli)
	n, err := io.Copy(io.MultiWriter(f, sum), untilDone{ctx, r})
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return meta.BlobRef{}, fail(op, hint, err)
	}
	if err := d.root.Rename(tmp, name); err != nil {
		return meta.BlobRef{}, fail(op, hint, err)
	}
	if err := d.sync(); err != nil {
		return meta.BlobRef{}, fail(op, hint, err)
	}
	return meta.BlobRef{Name: name, Length: uint64(n), CRC: sum.Sum32()}, nil
}

func (d *Dir) sync() error {
	f, err := d.root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// untilDone stops reading when the context ends.
type untilDone struct {
	ctx context.Context
	r   io.Reader
}

func (u untilDone) Read(p []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, meta.E("store blob", meta.Canceled, "", context.Cause(u.ctx))
	}
	return u.r.Read(p)
}

// Get is documented at meta.Blob. Corruption shows at the end of the bytes.
func (d *Dir) Get(ctx context.Context, ref meta.BlobRef) (io.ReadCloser, error) {
	f, err := d.root.Open(ref.Name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, meta.E("read blob", meta.NotFound, ref.Name, err)
	}
	if err != nil {
		return nil, fail("read blob", ref.Name, err)
	}
	return &reader{f: f, ref: ref, sum: crc32.New(castagnoli)}, nil
}

// reader checks length and checksum while it reads: it returns the last byte only if both
// match.
type reader struct {
	f   *os.File
	ref meta.BlobRef
	n   uint64
	sum hash.Hash32
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.f.Read(p)
	r.n += uint64(n)
	r.sum.Write(p[:n])
	if err != nil && err != io.EOF {
		return n, fail("read blob", r.ref.Name, err)
	}
	if wrong := r.n > r.ref.Length || r.n == r.ref.Length && r.sum.Sum32() != r.ref.CRC || err == io.EOF && r.n < r.ref.Length; wrong {
		return 0, meta.E("read blob", meta.Corrupt, r.ref.Name, fmt.Errorf("%d bytes read, %d expected, checksum %08x, expected %08x", r.n, r.ref.Length, r.sum.Sum32(), r.ref.CRC))
	}
	return n, err
}

func (r *reader) Close() error { return r.f.Close() }

// Delete is documented at meta.Blob.
func (d *Dir) Delete(ctx context.Context, ref meta.BlobRef) error {
	if err := d.root.Remove(ref.Name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fail("delete blob", ref.Name, err)
	}
	return nil
}

// fail gives an error of the disk its kind.
func fail(op, subject string, err error) error {
	kind := meta.IO
	var e *meta.Error
	switch {
	case errors.As(err, &e):
		kind = e.Kind
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		kind = meta.NoSpace
	case errors.Is(err, os.ErrPermission):
		kind = meta.AccessDenied
	}
	return meta.E(op, kind, subject, err)
}
