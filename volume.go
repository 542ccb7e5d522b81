package penstock

import (
	"context"
	"os"

	"penstock.io/penstock/meta"
)

// Volume is one volume of the tree. Its methods may be called from many
// goroutines. They fail with *meta.Error; beside the kinds named at each, any
// may fail with Stale (the inode is gone), SessionExpired, Unavailable or IO.
type Volume struct {
	id meta.VolumeID
}

// ID is the volume's number, which never changes.
func (v *Volume) ID() meta.VolumeID { return v.id }

// Name is the volume's name as it was when it was opened here.
func (v *Volume) Name() string { panic("not yet") }

// Policy is the volume's policy as it was when it was opened here.
func (v *Volume) Policy() meta.Policy { panic("not yet") }

// ---- namespace

// Lookup finds a name in a directory. An absent name is no error:
// Entry.Negative. "." and ".." work. Errors: NotDir, NameTooLong.
func (v *Volume) Lookup(ctx context.Context, parent meta.Ino, name string) (Entry, error) { panic("not yet") }

// GetAttr gives an inode's attributes, with what this client has written and
// not committed yet.
func (v *Volume) GetAttr(ctx context.Context, ino meta.Ino) (Entry, error) { panic("not yet") }

// SetAttr changes the attributes that req.Mask names; see meta.SetAttr.
func (v *Volume) SetAttr(ctx context.Context, call *Call, req meta.SetAttr) (Entry, error) { panic("not yet") }

// Create makes an inode of any type under a name without opening it: mknod,
// mkdir, symlink; see meta.Create. UID, GID and Umask come from req.
func (v *Volume) Create(ctx context.Context, call *Call, req meta.Create) (Entry, error) { panic("not yet") }

// CreateOpen makes a regular file (or opens the one that is there, unless
// req.Excl) and opens it as Open with these open(2) flags would.
func (v *Volume) CreateOpen(ctx context.Context, call *Call, req meta.Create, flags uint32) (OpenInfo, error) { panic("not yet") }

// Tmpfile makes and opens a regular file without a name (O_TMPFILE).
func (v *Volume) Tmpfile(ctx context.Context, call *Call, req meta.Tmpfile, flags uint32) (OpenInfo, error) { panic("not yet") }

// Link adds a name to an inode; see meta.Link.
func (v *Volume) Link(ctx context.Context, call *Call, ino, parent meta.Ino, name string) (Entry, error) { panic("not yet") }

// Unlink removes a name, of an empty directory if dir; see meta.Unlink.
func (v *Volume) Unlink(ctx context.Context, call *Call, parent meta.Ino, name string, dir bool) error { panic("not yet") }

// Rename moves a name with the flags of renameat2(2). Bytes of the source
// that replace a file are durable before the name is (rule 11).
func (v *Volume) Rename(ctx context.Context, call *Call, parent meta.Ino, name string, newParent meta.Ino, newName string, flags uint32) error { panic("not yet") }

// ReadLink gives a symbolic link's target.
func (v *Volume) ReadLink(ctx context.Context, ino meta.Ino) (string, error) { panic("not yet") }

// ReadDir lists entries after cookie (0: from the start) in cookie order, at
// most max of them (0: a page of the server's choice), with attributes and a
// claim to cache them if plus. "." and ".." are not in the list. eof tells
// that nothing follows.
func (v *Volume) ReadDir(ctx context.Context, ino meta.Ino, cookie uint64, max int, plus bool) (list []DirEntry, eof bool, err error) { panic("not yet") }

// GetXattr reads an extended attribute. Errors: NoAttribute.
func (v *Volume) GetXattr(ctx context.Context, ino meta.Ino, name string) ([]byte, error) { panic("not yet") }

// ListXattr lists the names of extended attributes.
func (v *Volume) ListXattr(ctx context.Context, ino meta.Ino) ([]string, error) { panic("not yet") }

// SetXattr sets an extended attribute; see meta.SetXattr.
func (v *Volume) SetXattr(ctx context.Context, call *Call, req meta.SetXattr) error { panic("not yet") }

// RemoveXattr removes an extended attribute. Errors: NoAttribute.
func (v *Volume) RemoveXattr(ctx context.Context, call *Call, ino meta.Ino, name string) error { panic("not yet") }

// StatFS tells usage and limits, what is buffered here included.
func (v *Volume) StatFS(ctx context.Context) (meta.StatFS, error) { panic("not yet") }

// ---- files

// Open counts an opener of a regular file and takes the lease that the flags
// of open(2) ask for; O_TRUNC truncates. Errors: IsDir, and AccessDenied,
// TextBusy, NotPermitted (a sealed file opened for writing).
func (v *Volume) Open(ctx context.Context, call *Call, ino meta.Ino, flags uint32) (OpenInfo, error) { panic("not yet") }

// Release ends what one successful Open, CreateOpen or Tmpfile began, with
// the same flags. It does not fail: errors are told by Flush and Fsync.
func (v *Volume) Release(ctx context.Context, ino meta.Ino, flags uint32) { panic("not yet") }

// Read fills p from offset off, up to the end of the file; n < len(p) only
// there. Errors: Corrupt, IO.
func (v *Volume) Read(ctx context.Context, ino meta.Ino, p []byte, off int64) (n int, err error) { panic("not yet") }

// ReadFD gives a descriptor that holds the bytes [off, off+n) of the file at
// fdOff, for splicing, when they all lie in one local chunk and nothing of
// them is buffered here. ok false: use Read. n may come back smaller at the
// end of the file. The caller calls release when it has read.
func (v *Volume) ReadFD(ctx context.Context, ino meta.Ino, off int64, n int) (f *os.File, fdOff int64, got int, release func(), ok bool) { panic("not yet") }

// Write puts p at offset off, or, if atEnd, at the end of the file as it is
// when the bytes go in (O_APPEND). kill drops set-id bits and capabilities,
// as for a writer without CAP_FSETID. All of p or none is written. It waits
// while the process's write buffer is used up.
// Errors: NoSpace, QuotaExceeded, FileTooBig, and what an earlier write in
// the background failed with.
func (v *Volume) Write(ctx context.Context, call *Call, ino meta.Ino, p []byte, off int64, atEnd, kill bool) (n int, err error) { panic("not yet") }

// Flush is close(2) of one descriptor: it releases the POSIX locks of
// lockOwner and tells an error of an earlier write once. It syncs only on
// volumes with sync-on-close.
func (v *Volume) Flush(ctx context.Context, call *Call, ino meta.Ino, lockOwner uint64) error { panic("not yet") }

// Fsync makes the inode's bytes, and every namespace operation that this
// client was answered before, durable.
func (v *Volume) Fsync(ctx context.Context, ino meta.Ino, dataOnly bool) error { panic("not yet") }

// SyncAll makes everything that this client did on the volume durable: syncfs,
// and fsync of a directory.
func (v *Volume) SyncAll(ctx context.Context) error { panic("not yet") }

// Fallocate is fallocate(2); see meta.Fallocate.
func (v *Volume) Fallocate(ctx context.Context, call *Call, req meta.Fallocate) error { panic("not yet") }

// CopyRange copies between files of this volume by sharing extents, and tells
// how many bytes.
func (v *Volume) CopyRange(ctx context.Context, call *Call, req meta.CopyRange) (uint64, error) { panic("not yet") }

// Seek finds the next data (SeekData) or hole (SeekHole) at or after off.
// Errors: NoSuchOffset.
func (v *Volume) Seek(ctx context.Context, ino meta.Ino, off int64, whence uint32) (int64, error) { panic("not yet") }

// Backing gives a descriptor for passthrough: of a regular file of the local
// file system which holds exactly the sealed file's bytes at the same
// offsets. The caller closes it. Errors: NotSupported when there is none.
func (v *Volume) Backing(ctx context.Context, ino meta.Ino) (*os.File, error) { panic("not yet") }

// ---- locks

// SetLock takes, changes or (LockUnlock) gives up an advisory lock. With wait
// it waits until ctx ends (then: Interrupted). Errors: WouldBlock, Deadlock.
func (v *Volume) SetLock(ctx context.Context, l meta.Lock, wait bool) error { panic("not yet") }

// GetLock tells a lock that l would conflict with; Type LockUnlock if none.
func (v *Volume) GetLock(ctx context.Context, l meta.Lock) (meta.Lock, error) { panic("not yet") }
