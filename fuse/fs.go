package fuse

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// unanswered answers ENOSYS to the requests that the other types don't answer.
type unanswered struct{ fuse.RawFileSystem }

// fileSystem answers the requests of one mount. It implements go-fuse's RawFileSystem, with a
// file per family of system calls. A family with state or rules of its own is a type, which
// fileSystem embeds and which uses fileSystem.
type fileSystem struct {
	unanswered
	nodes
	rights
	pages
	lockRequests
	attributeRequests
	draining

	incarnation uint64 // random: incarnation and request number name an operation for ever
	log         *slog.Logger
	// noOpen: everything below the root is immutable, or a snapshot, and the kernel
	// need not tell of opens (rule 19).
	noOpen bool
	// frozen: the volume is immutable or a snapshot, and never writable, whatever the mount's
	// options say.
	frozen bool
	dir    string // the mount point
	// noEpoch: the kernel can't drop names without locks (before 6.16), so no
	// name may be cached (rule 14).
	noEpoch bool
	// noPassthrough: fusermount3 mounted, so the process lacks the privilege for passthrough.
	noPassthrough bool

	// forgetting: the kernel is being told to forget a snapshot's name.
	forgetting atomic.Bool

	inumbers inumbers
	listings listings
	opens    opens
	quickly  quickly
	kept     openRecords
	texts    openTexts
	streams  streamFiles
	// count counts requests for the session; nil: nobody wants to know.
	count interface {
		Begin() uint32
		End(turn uint32)
	}
	back *writeback
	conn *conn
}

// holdsView reports whether the kernel knows an inode of an ended view. All inodes of a view
// lie below the view's root, and the kernel keeps the root while it has a path through the
// root, unless the mount begins below the root. holdsView makes the kernel forget unused
// paths. Afterwards the kernel keeps a path in use at that moment until the kernel lacks
// memory, like any cached path. If the kernel does not know the view, holdsView drops the
// view's Volume.
func (f *fileSystem) holdsView(id meta.VolumeID) bool {
	if id == f.rootVolume {
		return true
	}
	f.mu.RLock()
	v := f.volumes[id]
	f.mu.RUnlock()
	root := nodeOf(id, meta.RootIno)
	if v != nil && v.Ended() && f.conn.knows(root) {
		f.forgetName(v)
	}
	if f.conn.knows(root) {
		return true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if v := f.volumes[id]; v != nil && v.Ended() {
		delete(f.volumes, id)
	}
	return false
}

// forgetName makes the kernel forget the name of an ended snapshot, and the paths below the
// name, unless another snapshot now has the name. forgetName waits 100 ms at most, since a
// lookup in the snapshot directory delays the kernel while the owner does not answer.
func (f *fileSystem) forgetName(v Volume) {
	of, s, _ := v.View()
	f.mu.RLock()
	for _, other := range f.volumes {
		if o, t, ok := other.View(); ok && o == of && t.Name == s.Name && !other.Ended() {
			f.mu.RUnlock()
			return
		}
	}
	f.mu.RUnlock()
	if !f.forgetting.CompareAndSwap(false, true) {
		return // at the next look
	}
	done := make(chan struct{})
	go func() {
		f.conn.invalidateName(nodeOf(of, 0), s.Name)
		f.forgetting.Store(false)
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(100 * time.Millisecond):
	}
}

// compose gives the parts of the file system their way to the whole.
func (f *fileSystem) compose() {
	f.unanswered.RawFileSystem = fuse.NewDefaultRawFileSystem()
	f.rights.fileSystem, f.pages.fileSystem = f, f
	f.lockRequests.fileSystem, f.attributeRequests.fileSystem = f, f
	f.draining.fileSystem, f.quickly.fileSystem = f, f
}

// resent is the bit of a request's number set by the kernel when it sends the request again
// after a take-over. The bit is not part of the operation's name.
const resent = 1 << 63

// call returns the operation id and the caller of a request.
func (f *fileSystem) call(h *fuse.InHeader) *penstock.Call {
	return &penstock.Call{
		Op:  meta.OpID{Incarnation: f.incarnation, Unique: h.Unique &^ resent},
		UID: h.Uid, GID: h.Gid, PID: h.Pid, Resent: h.Unique&resent != 0,
	}
}

// request is the context of one request. Its cancel channel closes when the request is
// interrupted (see conn.interrupted) or the connection ends.
type request <-chan struct{}

func (r request) Deadline() (deadline time.Time, ok bool) { return time.Time{}, false }
func (r request) Done() <-chan struct{}                   { return r }
func (r request) Value(any) any                           { return nil }
func (r request) Err() error {
	select {
	case <-r:
		return context.Canceled
	default:
		return nil
	}
}

// quiet is a request without an update of the access time.
type quiet struct{ request }

func (q quiet) Value(key any) any {
	if _, ok := key.(penstock.NoAtime); ok {
		return true
	}
	return nil
}

// String names the file system for go-fuse.
func (f *fileSystem) String() string { return "penstock" }

// Forget handles the kernel's FORGET of an inode. Node ids are pure functions and the library
// bounds its own cache, but the removal of an inode without a name may wait for Forget.
func (f *fileSystem) Forget(node, _ uint64) {
	if isText(node) {
		f.texts.forget(node)
		return
	}
	if isStream(node) {
		return
	}
	id, ino := f.split(node)
	f.mu.RLock()
	v := f.volumes[id]
	f.mu.RUnlock()
	if v != nil && ino != 0 {
		v.Forget(ino)
	}
}

// Access is never asked: with default_permissions the kernel checks.
func (f *fileSystem) Access(_ <-chan struct{}, _ *fuse.AccessIn) fuse.Status { return fuse.ENOSYS }

// StatFs answers statfs(2) for the node's volume. A quota is shown as the size of the file
// system. A snapshot's size is its used bytes.
func (f *fileSystem) StatFs(cancel <-chan struct{}, in *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	ctx := request(cancel)
	id, _ := f.split(in.NodeId)
	v, err := f.volume(ctx, id)
	if err != nil {
		return f.status("statfs", in.NodeId, err)
	}
	s, err := v.StatFS(ctx)
	if err != nil {
		return f.status("statfs", in.NodeId, err)
	}
	total, free := s.DiskTotal, s.DiskFree
	if s.QuotaBytes > 0 {
		total = s.QuotaBytes
		free = min(free, s.QuotaBytes-min(s.UsedBytes, s.QuotaBytes))
	}
	inodes := uint64(meta.MaxIno)
	if s.QuotaInode > 0 {
		inodes = s.QuotaInode
	}
	if _, _, frozen := v.View(); frozen { // full, as a CD-ROM is
		total, free, inodes = (s.UsedBytes+meta.BlockSize-1)&^(meta.BlockSize-1), 0, s.UsedInodes
	}
	*out = fuse.StatfsOut{
		Blocks: total / meta.BlockSize, Bfree: free / meta.BlockSize, Bavail: free / meta.BlockSize,
		Files: inodes, Ffree: inodes - min(s.UsedInodes, inodes),
		Bsize: meta.BlockSize, Frsize: meta.BlockSize, NameLen: meta.MaxName,
	}
	return fuse.OK
}
