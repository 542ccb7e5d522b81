package penstock

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// Tree names files by path, for Go programs without a mount. Paths are separated by slashes
// and begin at the root of one volume. Junctions lead into other volumes, symbolic links are
// followed, and .snapshot/NAME in a volume's root is a snapshot of the volume. The program
// acts as root: permissions restrict the users of mounts, not the program with a session.
type Tree struct {
	c    *Client
	root *Volume
	as   *treeUser // nil: the program itself
}

// treeUser is the user of Tree.As.
type treeUser struct {
	uid, gid uint32
	search   func(ctx context.Context, v *Volume, dir *meta.Attr) error
}

// As returns the tree for a program that serves a user. New files and directories belong to
// uid and gid. Before a path looks a name up in a directory, search is called with the directory
// and its volume; an error of search ends the resolution of the path, and is returned. The tree
// makes no other checks.
func (t *Tree) As(uid, gid uint32, search func(ctx context.Context, v *Volume, dir *meta.Attr) error) *Tree {
	return &Tree{c: t.c, root: t.root, as: &treeUser{uid, gid, search}}
}

// owner returns the owner and group of new files.
func (t *Tree) owner() (uid, gid uint32) {
	if t.as == nil {
		return 0, 0
	}
	return t.as.uid, t.as.gid
}

// maxLinks bounds the symbolic links in the resolution of a path (ELOOP).
const maxLinks = 40

// Tree gives the tree below a volume's root.
func (v *Volume) Tree() *Tree { return &Tree{c: v.c, root: v} }

// place is where a path led: an entry of a directory, or no entry yet.
type place struct {
	v    *Volume
	dir  meta.Ino // directory of the last name
	name string   // empty: the root of a volume
	e    Entry
}

// walk resolves a path. With follow, it follows a symbolic link at the end, too. A missing
// last name is not an error (place.e.Negative).
func (t *Tree) walk(ctx context.Context, op, path string, follow bool) (place, error) {
	if len(path) >= meta.MaxPath {
		return place{}, meta.E(op, meta.NameTooLong, path, nil)
	}
	type step struct {
		v   *Volume
		dir meta.Ino
	}
	at := step{t.root, meta.RootIno}
	above := []step{} // directories walked through, for ".."
	rest := strings.Split(path, "/")
	links := 0
	e, err := t.root.GetAttr(ctx, meta.RootIno)
	if err != nil {
		return place{}, err
	}
	p := place{v: t.root, dir: meta.RootIno, e: e}
	for len(rest) > 0 {
		name := rest[0]
		rest = rest[1:]
		if name == "" || name == "." {
			continue
		}
		if t.as != nil && p.e.Attr.IsDir() {
			if err := t.as.search(ctx, at.v, &p.e.Attr); err != nil {
				return place{}, meta.E(op, meta.KindOf(err), path, err)
			}
		}
		if name == ".." {
			if k := len(above); k > 0 {
				at, above = above[k-1], above[:k-1]
			}
			e, err := at.v.GetAttr(ctx, at.dir)
			if err != nil {
				return place{}, err
			}
			p = place{v: at.v, dir: at.dir, e: e}
			continue
		}
		if !p.e.Attr.IsDir() {
			return place{}, meta.E(op, meta.NotDir, path, nil)
		}
		e, err := at.v.Lookup(ctx, at.dir, name)
		if err != nil {
			return place{}, meta.E(op, meta.KindOf(err), path, err)
		}
		if e.Negative && name == SnapshotDir && at.dir == meta.RootIno && !at.v.frozen() {
			for len(rest) > 0 && (rest[0] == "" || rest[0] == ".") {
				rest = rest[1:]
			}
			if len(rest) > 0 {
				if e, err = at.v.LookupSnapshot(ctx, rest[0]); err != nil {
					return place{}, meta.E(op, snapshotKind(err), path, err)
				}
				// Without a name, so that no entry of the live root is used for the directory.
				name, rest = "", rest[1:]
			}
		}
		p = place{v: at.v, dir: at.dir, name: name, e: e}
		last := strings.Trim(strings.Join(rest, ""), "./") == "" && !contains(rest, "..")
		if e.Negative {
			if last && !contains(rest, ".") {
				return p, nil
			}
			return place{}, meta.E(op, meta.NotFound, path, nil)
		}
		switch {
		case e.Attr.Mode&meta.TypeMask == meta.TypeSymlink && (!last || follow || len(rest) > 0):
			if links++; links > maxLinks {
				return place{}, meta.E(op, meta.Loop, path, nil)
			}
			to, err := at.v.ReadLink(ctx, e.Attr.Ino)
			if err != nil {
				return place{}, err
			}
			if strings.HasPrefix(to, "/") {
				at, above = step{t.root, meta.RootIno}, above[:0]
			}
			e, err := at.v.GetAttr(ctx, at.dir)
			if err != nil {
				return place{}, err
			}
			p = place{v: at.v, dir: at.dir, e: e}
			rest = append(strings.Split(to, "/"), rest...)
		case e.Attr.IsDir():
			v := at.v
			if e.Volume != v.id {
				if v, err = t.c.VolumeByID(ctx, e.Volume); err != nil {
					return place{}, err
				}
				p.e = e
			}
			above = append(above, at)
			at = step{v, e.Attr.Ino}
		}
	}
	return p, nil
}

// snapshotKind returns NotFound for the name of a missing snapshot.
func snapshotKind(err error) meta.Kind {
	if k := meta.KindOf(err); k != meta.NoSuchSnapshot {
		return k
	}
	return meta.NotFound
}

func contains(l []string, s string) bool {
	for _, x := range l {
		if x == s {
			return true
		}
	}
	return false
}

// target returns the volume and inode of a place.
func (t *Tree) target(ctx context.Context, p place) (*Volume, meta.Ino, error) {
	if p.e.Volume == p.v.id {
		return p.v, p.e.Attr.Ino, nil
	}
	v, err := t.c.VolumeByID(ctx, p.e.Volume)
	return v, p.e.Attr.Ino, err
}

// find is walk for a path that must exist.
func (t *Tree) find(ctx context.Context, op, path string, follow bool) (*Volume, Entry, error) {
	p, err := t.walk(ctx, op, path, follow)
	if err != nil {
		return nil, Entry{}, err
	}
	if p.e.Negative {
		return nil, Entry{}, meta.E(op, meta.NotFound, path, nil)
	}
	v, _, err := t.target(ctx, p)
	return v, p.e, err
}

// Stat returns the Entry of a path, following symbolic links.
func (t *Tree) Stat(ctx context.Context, path string) (Entry, error) {
	_, e, err := t.find(ctx, "stat", path, true)
	return e, err
}

// VolumeOf returns the volume of an entry of the tree.
func (t *Tree) VolumeOf(ctx context.Context, e *Entry) (*Volume, error) {
	return t.c.VolumeByID(ctx, e.Volume)
}

// Lstat is Stat without following a symbolic link at the end.
func (t *Tree) Lstat(ctx context.Context, path string) (Entry, error) {
	_, e, err := t.find(ctx, "lstat", path, false)
	return e, err
}

// MkdirAll makes a directory and its missing parents.
func (t *Tree) MkdirAll(ctx context.Context, path string, mode uint32) error {
	parts := strings.Split(path, "/")
	for i := range parts {
		if parts[i] == "" {
			continue
		}
		p, err := t.walk(ctx, "mkdir", strings.Join(parts[:i+1], "/"), true)
		if err != nil {
			return err
		}
		if !p.e.Negative {
			if !p.e.Attr.IsDir() {
				return meta.E("mkdir", meta.NotDir, path, nil)
			}
			continue
		}
		uid, gid := t.owner()
		_, err = p.v.Create(ctx, nil, meta.Create{Parent: p.dir, Name: p.name, Mode: meta.TypeDir | mode&0o7777, UID: uid, GID: gid})
		if err != nil && !errors.Is(err, meta.Exists) {
			return err
		}
	}
	return nil
}

// MarkStream makes a file or directory one of a stream's: see meta.FlagStream. Errors:
// NotPermitted (Config.Streams is not set).
func (t *Tree) MarkStream(ctx context.Context, path string) error {
	v, e, err := t.find(ctx, "mark stream", path, true)
	if err != nil {
		return err
	}
	_, err = v.SetAttr(ctx, nil, meta.SetAttr{Ino: e.Attr.Ino, Mask: meta.SetStream})
	return err
}

// Remove removes a file or an empty directory.
func (t *Tree) Remove(ctx context.Context, path string) error {
	p, err := t.walk(ctx, "remove", path, false)
	if err != nil {
		return err
	}
	if p.e.Negative {
		return meta.E("remove", meta.NotFound, path, nil)
	}
	if p.name == "" {
		return meta.E("remove", meta.Busy, path, nil)
	}
	return p.v.Unlink(ctx, nil, p.dir, p.name, p.e.Attr.IsDir())
}

// Rename moves a file or directory, and replaces the target as rename(2) does.
func (t *Tree) Rename(ctx context.Context, from, to string) error {
	p, err := t.walk(ctx, "rename", from, false)
	if err != nil {
		return err
	}
	q, err := t.walk(ctx, "rename", to, false)
	if err != nil {
		return err
	}
	switch {
	case p.e.Negative:
		return meta.E("rename", meta.NotFound, from, nil)
	case p.name == "" || q.name == "":
		return meta.E("rename", meta.Busy, from, nil)
	case p.v != q.v:
		return meta.E("rename", meta.CrossVolume, to, nil)
	}
	return p.v.Rename(ctx, nil, p.dir, p.name, q.dir, q.name, 0)
}

// ReadDirAll lists a directory, with attributes.
func (t *Tree) ReadDirAll(ctx context.Context, path string) ([]DirEntry, error) {
	v, e, err := t.find(ctx, "readdir", path, true)
	if err != nil {
		return nil, err
	}
	var all []DirEntry
	for at := (DirCursor{}); ; {
		list, eof, err := v.ReadDir(ctx, e.Attr.Ino, &at, 0, true)
		if err != nil {
			return nil, err
		}
		all = append(all, list...)
		if eof || len(list) == 0 {
			return all, nil
		}
	}
}

// File is an open file of a Tree. Like os.File, it is safe for concurrent use.
type File struct {
	ctx   context.Context
	v     *Volume
	ino   meta.Ino
	name  string
	flags uint32

	mu     sync.Mutex
	off    int64
	closed bool
}

// OpenFile opens a file with the flags of package os (O_RDONLY, O_RDWR,
// O_APPEND, O_CREATE, O_EXCL, O_TRUNC). The context bounds the file's whole
// life. Errors: NotFound, Exists, IsDir, Loop and what Volume.Open gives.
func (t *Tree) OpenFile(ctx context.Context, path string, flag int, mode uint32) (*File, error) {
	p, err := t.walk(ctx, "open", path, flag&os.O_EXCL == 0)
	if err != nil {
		return nil, err
	}
	flags := uint32(flag) // package os has the numbers of open(2) on Linux
	f := &File{ctx: ctx, v: p.v, name: path, flags: flags}
	switch {
	case !p.e.Negative && flag&os.O_CREATE != 0 && flag&os.O_EXCL != 0:
		return nil, meta.E("open", meta.Exists, path, nil)
	case p.e.Negative && flag&os.O_CREATE == 0:
		return nil, meta.E("open", meta.NotFound, path, nil)
	case p.e.Negative:
		uid, gid := t.owner()
		req := meta.Create{Parent: p.dir, Name: p.name, Mode: meta.TypeRegular | mode&0o7777, Excl: flag&os.O_EXCL != 0, UID: uid, GID: gid}
		info, err := p.v.CreateOpen(ctx, nil, req, flags)
		if err != nil {
			return nil, err
		}
		f.ino = info.Entry.Attr.Ino
		return f, nil
	}
	if f.v, f.ino, err = t.target(ctx, p); err != nil {
		return nil, err
	}
	if p.e.Attr.IsDir() {
		return nil, meta.E("open", meta.IsDir, path, nil)
	}
	if _, err := f.v.Open(ctx, nil, f.ino, flags); err != nil {
		return nil, err
	}
	return f, nil
}

// ReadFile reads a whole file.
func (t *Tree) ReadFile(ctx context.Context, path string) ([]byte, error) {
	f, err := t.OpenFile(ctx, path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	e, err := f.v.GetAttr(ctx, f.ino)
	if err != nil {
		return nil, err
	}
	p := make([]byte, e.Attr.Size)
	n, err := io.ReadFull(f, p)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = nil // the file was truncated during the read
	}
	return p[:n], err
}

// WriteFile writes a whole file, as os.WriteFile does, and makes it durable.
func (t *Tree) WriteFile(ctx context.Context, path string, data []byte, mode uint32) error {
	f, err := t.OpenFile(ctx, path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	return errors.Join(err, f.Sync(), f.Close())
}

// Ino is the file's inode number.
func (f *File) Ino() meta.Ino { return f.ino }

// Read reads at the file's position. io.EOF at the end.
func (f *File) Read(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.ReadAt(p, f.off)
	f.off += int64(n)
	if n > 0 && errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// ReadAt fills p from off; io.EOF if the file ends before.
func (f *File) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.v.Read(f.ctx, f.ino, p, off)
	if err == nil && n < len(p) {
		err = io.EOF
	}
	return n, err
}

// Write writes at the file's position, or with O_APPEND at its end.
func (f *File) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.v.Write(f.ctx, nil, f.ino, p, f.off, f.flags&uint32(os.O_APPEND) != 0, false)
	f.off += int64(n)
	return n, err
}

// WriteAt writes at off.
func (f *File) WriteAt(p []byte, off int64) (int, error) {
	return f.v.Write(f.ctx, nil, f.ino, p, off, false, false)
}

// Seek sets the position of Read and Write.
func (f *File) Seek(off int64, whence int) (int64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch whence {
	case io.SeekCurrent:
		off += f.off
	case io.SeekEnd:
		e, err := f.v.GetAttr(f.ctx, f.ino)
		if err != nil {
			return 0, err
		}
		off += int64(e.Attr.Size)
	}
	if off < 0 {
		return 0, meta.E("seek", meta.Invalid, f.name, nil)
	}
	f.off = off
	return off, nil
}

// Truncate sets the size.
func (f *File) Truncate(size int64) error {
	if size < 0 {
		return meta.E("truncate", meta.Invalid, f.name, nil)
	}
	_, err := f.v.SetAttr(f.ctx, nil, meta.SetAttr{Ino: f.ino, Mask: meta.SetSize, Size: uint64(size)})
	return err
}

// Sync makes the file's bytes and name durable.
func (f *File) Sync() error { return f.v.Fsync(f.ctx, f.ino, false) }

// Close ends the use of the file and tells an error of an earlier write.
func (f *File) Close() error {
	f.mu.Lock()
	closed := f.closed
	f.closed = true
	f.mu.Unlock()
	if closed {
		return meta.E("close", meta.Invalid, f.name, fs.ErrClosed)
	}
	err := f.v.Flush(f.ctx, nil, f.ino, 0)
	f.v.Release(f.ctx, f.ino, f.flags)
	return err
}

// ModTime is the entry's modification time.
func (e Entry) ModTime() time.Time {
	sec, nsec := e.Attr.Mtime.Unix()
	return time.Unix(sec, int64(nsec))
}
