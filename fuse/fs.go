package fuse

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// fileSystem answers the requests of one mount. It implements go-fuse's RawFileSystem, with a
// file per family of system calls.
type fileSystem struct {
	fuse.RawFileSystem // answers ENOSYS to every other request

	tree        Tree
	rootVolume  meta.VolumeID
	rootIno     meta.Ino
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

	abandoned abandonment
	noDrain   bool // see Options.UnsafeNoDrain

	mu      sync.RWMutex
	volumes map[meta.VolumeID]Volume
	// forgetting: the kernel is being told to forget a snapshot's name.
	forgetting atomic.Bool

	inumbers inumbers
	listings listings
	opens    opens
	// dropping counts the requests now dropping set-id bits or file capabilities.
	dropping atomic.Int32
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

// nodeID is the kernel's name of an inode. Programs see another number: inumber.
func (f *fileSystem) nodeID(v meta.VolumeID, ino meta.Ino) uint64 {
	if v == f.rootVolume && ino == f.rootIno {
		return fuse.FUSE_ROOT_ID
	}
	return nodeOf(v, ino)
}

// nodeOf is nodeID of an inode other than the mount's root.
func nodeOf(v meta.VolumeID, ino meta.Ino) uint64 { return uint64(v)<<meta.InoBits | uint64(ino) }

// split is the inverse of nodeID.
func (f *fileSystem) split(node uint64) (meta.VolumeID, meta.Ino) {
	if node == fuse.FUSE_ROOT_ID {
		return f.rootVolume, f.rootIno
	}
	return meta.VolumeID(node >> meta.InoBits), meta.Ino(node) & meta.MaxIno
}

// inode returns the volume and inode of a node. Errors: NoSuchVolume; ReadOnly for a directory
// of snapshots, NotPermitted for an unlisted file of a stream.
func (f *fileSystem) inode(ctx context.Context, node uint64) (Volume, meta.Ino, error) {
	id, ino := f.split(node)
	if ino == 0 && !isText(node) {
		// Requests that read a directory of snapshots call isSnapshots before.
		return nil, 0, meta.E("snapshots", meta.ReadOnly, penstock.SnapshotDir, nil)
	}
	if isStream(node) {
		return nil, 0, meta.E("stream", meta.NotPermitted, tailName, nil)
	}
	v, err := f.volume(ctx, id)
	return v, ino, err
}

func (f *fileSystem) volume(ctx context.Context, id meta.VolumeID) (Volume, error) {
	f.mu.RLock()
	old := f.volumes[id]
	f.mu.RUnlock()
	if old != nil && !old.Ended() {
		return old, nil
	}
	v, err := f.tree.VolumeByID(ctx, id)
	switch {
	case err != nil && old != nil:
		return old, nil // open files of the volume still need a close
	case err != nil:
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.volumes[id] = v
	return v, nil
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

// opened lists the volumes opened by the mount.
func (f *fileSystem) opened() []Volume {
	f.mu.RLock()
	defer f.mu.RUnlock()
	list := make([]Volume, 0, len(f.volumes))
	for _, v := range f.volumes {
		list = append(list, v)
	}
	return list
}

// syncAll is syncfs: everything written through the mount is durable afterwards.
func (f *fileSystem) syncAll(ctx context.Context) error {
	err := f.back.drainAll()
	for _, v := range f.allVolumes() {
		if e := v.SyncAll(ctx); e != nil && err == nil {
			err = e
		}
	}
	return err
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
