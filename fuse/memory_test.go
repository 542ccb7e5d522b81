package fuse

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// memTree is a Tree in memory: just enough of a file system to see what the
// mount makes of the kernel's requests. Two volumes; the second hangs in the
// first as "junction".
type memTree struct {
	mu      sync.Mutex // of mounted volumes
	volumes map[meta.VolumeID]*memVolume
}

func newMemTree() *memTree {
	t := &memTree{volumes: make(map[meta.VolumeID]*memVolume)}
	for id := meta.VolumeID(1); id <= 2; id++ {
		t.volumes[id] = newMemVolume(t, id)
	}
	t.volumes[1].add(meta.RootIno, "junction", &memInode{junction: 2})
	return t
}

func (t *memTree) VolumeByID(_ context.Context, id meta.VolumeID) (Volume, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.volumes[id]; v != nil {
		return v, nil
	}
	return nil, meta.E("volume", meta.NoSuchVolume, "", nil)
}

type memInode struct {
	attr     meta.Attr
	names    []memName // of a directory, in order of cookies
	cookie   uint64
	target   string
	data     []byte
	xattrs   map[string][]byte
	junction meta.VolumeID
	backing  string // path, for passthrough
}

type memName struct {
	name   string
	ino    meta.Ino
	cookie uint64
}

type memVolume struct {
	tree   *memTree
	id     meta.VolumeID
	name   string
	of     meta.VolumeID // not 0: a view of this volume
	snap   meta.Snapshot
	snaps  []*memVolume // oldest first
	ended  atomic.Bool  // a view whose snapshot is gone
	turn   uint32
	policy meta.Policy
	valid  time.Duration

	mu     sync.Mutex
	inodes map[meta.Ino]*memInode
	next   meta.Ino
	opens  map[meta.Ino]int
	locks  []meta.Lock
	freed  chan struct{} // closed and replaced when a lock goes
	calls  map[string]int
	ops    map[meta.OpID]string
	// hooks run at the start of a method, without the lock.
	hooks map[string]func()
	fail  map[string]error
	hang  func(ctx context.Context) // in CreateOpen
}

func newMemVolume(t *memTree, id meta.VolumeID) *memVolume {
	v := &memVolume{
		tree: t, id: id, name: map[meta.VolumeID]string{1: "root", 2: "second"}[id], valid: time.Hour, inodes: make(map[meta.Ino]*memInode), next: meta.RootIno,
		opens: make(map[meta.Ino]int), freed: make(chan struct{}), calls: make(map[string]int), ops: make(map[meta.OpID]string),
		hooks: make(map[string]func()), fail: make(map[string]error),
	}
	now := meta.Time(time.Now().UnixNano())
	v.inodes[meta.RootIno] = &memInode{attr: meta.Attr{Ino: meta.RootIno, Mode: meta.TypeDir | 0o777, Nlink: 2, Parent: meta.RootIno, Atime: now, Mtime: now, Ctime: now, Btime: now}, cookie: 2}
	return v
}

// enter counts a call, runs its hook and takes the lock.
func (v *memVolume) enter(name string, call *penstock.Call) error {
	v.mu.Lock()
	hook, err := v.hooks[name], v.fail[name]
	if v.of != 0 && call != nil && name != "open" && name != "flush" {
		err = meta.E(name, meta.ReadOnly, "", nil)
	}
	v.calls[name]++
	if call != nil {
		v.ops[call.Op] = name
	}
	v.mu.Unlock()
	if hook != nil {
		hook()
	}
	v.mu.Lock()
	return err
}

func (v *memVolume) hook(name string, fn func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.hooks[name] = fn
}

func (v *memVolume) count(name string) int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.calls[name]
}

func (v *memVolume) add(parent meta.Ino, name string, n *memInode) meta.Ino {
	v.next++
	dir := v.inodes[parent]
	dir.cookie++
	n.attr.Ino = v.next
	if n.attr.Nlink == 0 {
		n.attr.Nlink = 1
	}
	if n.attr.IsDir() {
		n.attr.Parent, n.cookie = parent, 2
	}
	now := meta.Time(time.Now().UnixNano())
	n.attr.Atime, n.attr.Mtime, n.attr.Ctime, n.attr.Btime = now, now, now, now
	v.inodes[v.next] = n
	dir.names = append(dir.names, memName{name, v.next, dir.cookie})
	return v.next
}

func (v *memVolume) inode(ino meta.Ino) (*memInode, error) {
	if n := v.inodes[ino]; n != nil {
		return n, nil
	}
	return nil, meta.E("mem", meta.Stale, "", nil)
}

func (v *memVolume) entry(n *memInode) penstock.Entry {
	if n.junction != 0 {
		w := v.tree.volumes[n.junction]
		return penstock.Entry{Attr: w.inodes[meta.RootIno].attr, Volume: w.id, Valid: v.valid}
	}
	n.attr.Size = uint64(len(n.data) + len(n.target))
	n.attr.Blocks = n.attr.Size
	return penstock.Entry{Attr: n.attr, Volume: v.id, Valid: v.valid}
}

func (v *memVolume) find(parent meta.Ino, name string) (i int, n *memInode) {
	dir := v.inodes[parent]
	if dir == nil {
		return -1, nil
	}
	i = slices.IndexFunc(dir.names, func(d memName) bool { return d.name == name })
	if i < 0 {
		return i, nil
	}
	return i, v.inodes[dir.names[i].ino]
}

func (v *memVolume) Name() string        { return v.name }
func (v *memVolume) Policy() meta.Policy { return v.policy }

// snapshot keeps the volume's present state.
func (v *memVolume) snapshot(name string) *memVolume {
	s := newMemVolume(v.tree, viewOf(v.id, meta.Generation(len(v.snaps)+1)))
	s.name = v.name + "@" + name
	s.of, s.snap = v.id, meta.Snapshot{Name: name, At: meta.Generation(len(v.snaps) + 1), Created: meta.Time(time.Now().UnixNano())}
	for ino, n := range v.inodes {
		c := *n
		c.data, c.names = slices.Clone(n.data), slices.Clone(n.names)
		s.inodes[ino] = &c
	}
	v.snaps = append(v.snaps, s)
	v.tree.volumes[s.id] = s
	return s
}

func (v *memVolume) View() (meta.VolumeID, meta.Snapshot, bool) { return v.of, v.snap, v.of != 0 }

func (v *memVolume) ViewID(at meta.Generation) meta.VolumeID { return viewOf(v.id, at) }

func (v *memVolume) Ended() bool { return v.ended.Load() }

func (v *memVolume) Turn() uint32 { return v.turn }

// viewOf numbers the views of the few volumes here.
func viewOf(v meta.VolumeID, at meta.Generation) meta.VolumeID {
	return meta.MaxVolume + 100*v + meta.VolumeID(at)
}

func (v *memVolume) ReadSnapshots(context.Context) ([]meta.Snapshot, error) {
	defer v.mu.Unlock()
	v.enter("snapshots", nil)
	var l []meta.Snapshot
	for _, s := range v.snaps {
		l = append(l, s.snap)
	}
	return l, nil
}

func (v *memVolume) LookupSnapshot(ctx context.Context, name string) (penstock.Entry, error) {
	v.enter("lookupsnapshot", nil)
	snaps := slices.Clone(v.snaps)
	v.mu.Unlock()
	for _, s := range snaps {
		if s.snap.Name == name {
			return s.GetAttr(ctx, meta.RootIno)
		}
	}
	return penstock.Entry{}, meta.E("mem", meta.NoSuchSnapshot, name, nil)
}

func (v *memVolume) StatFS(context.Context) (meta.StatFS, error) {
	return meta.StatFS{UsedBytes: 1 << 20, UsedInodes: 3, QuotaBytes: 1 << 30, DiskTotal: 1 << 40, DiskFree: 1 << 39}, nil
}

func (v *memVolume) FsyncDir(ctx context.Context, _ meta.Ino) error { return v.SyncAll(ctx) }

func (v *memVolume) SyncAll(context.Context) error {
	err := v.enter("syncall", nil)
	v.mu.Unlock()
	return err
}

func (v *memVolume) Forget(meta.Ino) {
	v.enter("forget", nil)
	v.mu.Unlock()
}

func (v *memVolume) Lookup(_ context.Context, parent meta.Ino, name string) (penstock.Entry, error) {
	defer v.mu.Unlock()
	if err := v.enter("lookup", nil); err != nil {
		return penstock.Entry{}, err
	}
	_, n := v.find(parent, name)
	if n == nil {
		return penstock.Entry{Volume: v.id, Negative: true, Valid: v.valid}, nil
	}
	e := v.entry(n)
	if hook := v.hooks["lookup answered"]; hook != nil {
		v.mu.Unlock()
		hook()
		v.mu.Lock()
	}
	return e, nil
}

func (v *memVolume) Create(_ context.Context, call *penstock.Call, req meta.Create) (penstock.Entry, error) {
	defer v.mu.Unlock()
	if err := v.enter("create", call); err != nil {
		return penstock.Entry{}, err
	}
	return v.create(req)
}

func (v *memVolume) create(req meta.Create) (penstock.Entry, error) {
	if _, err := v.inode(req.Parent); err != nil {
		return penstock.Entry{}, err
	}
	if _, n := v.find(req.Parent, req.Name); n != nil {
		if req.Excl {
			return penstock.Entry{}, meta.E("create", meta.Exists, req.Name, nil)
		}
		return v.entry(n), nil
	}
	n := &memInode{attr: meta.Attr{Mode: req.Mode &^ (req.Umask & 0o777), UID: req.UID, GID: req.GID, Rdev: req.Rdev}, target: req.Target}
	v.add(req.Parent, req.Name, n)
	return v.entry(n), nil
}

func (v *memVolume) Link(_ context.Context, call *penstock.Call, ino, parent meta.Ino, name string) (penstock.Entry, error) {
	defer v.mu.Unlock()
	if err := v.enter("link", call); err != nil {
		return penstock.Entry{}, err
	}
	n, err := v.inode(ino)
	if err != nil {
		return penstock.Entry{}, err
	}
	dir := v.inodes[parent]
	dir.cookie++
	dir.names = append(dir.names, memName{name, ino, dir.cookie})
	n.attr.Nlink++
	return v.entry(n), nil
}

func (v *memVolume) Unlink(_ context.Context, call *penstock.Call, parent meta.Ino, name string, dir bool) error {
	defer v.mu.Unlock()
	if err := v.enter("unlink", call); err != nil {
		return err
	}
	i, n := v.find(parent, name)
	switch {
	case n == nil:
		return meta.E("unlink", meta.NotFound, name, nil)
	case dir && len(n.names) > 0:
		return meta.E("rmdir", meta.NotEmpty, name, nil)
	}
	d := v.inodes[parent]
	d.names = slices.Delete(d.names, i, i+1)
	n.attr.Nlink--
	if dir || n.attr.Nlink == 0 && v.opens[n.attr.Ino] == 0 {
		delete(v.inodes, n.attr.Ino)
	}
	return nil
}

func (v *memVolume) Rename(_ context.Context, call *penstock.Call, parent meta.Ino, name string, newParent meta.Ino, newName string, flags uint32) error {
	defer v.mu.Unlock()
	if err := v.enter("rename", call); err != nil {
		return err
	}
	i, n := v.find(parent, name)
	if n == nil {
		return meta.E("rename", meta.NotFound, name, nil)
	}
	if j, old := v.find(newParent, newName); old != nil {
		if flags&meta.RenameNoReplace != 0 {
			return meta.E("rename", meta.Exists, newName, nil)
		}
		d := v.inodes[newParent]
		d.names = slices.Delete(d.names, j, j+1)
		i, _ = v.find(parent, name)
	}
	from, to := v.inodes[parent], v.inodes[newParent]
	from.names = slices.Delete(from.names, i, i+1)
	to.cookie++
	to.names = append(to.names, memName{newName, n.attr.Ino, to.cookie})
	return nil
}

func (v *memVolume) ReadDir(_ context.Context, ino meta.Ino, at *penstock.DirCursor, max int, plus bool) ([]penstock.DirEntry, bool, error) {
	defer v.mu.Unlock()
	v.enter("readdir", nil)
	n, err := v.inode(ino)
	if err != nil {
		return nil, false, err
	}
	if at.Cookie == 0 || at.End == 0 {
		at.End = n.cookie + 1
	}
	i, found := slices.BinarySearchFunc(n.names, at.Cookie, func(d memName, c uint64) int { return int(int64(d.cookie) - int64(c)) })
	if found {
		i++
	}
	var list []penstock.DirEntry
	for _, d := range n.names[i:] {
		if d.cookie >= at.End {
			break
		}
		if len(list) == max {
			return list, false, nil
		}
		e := v.entry(v.inodes[d.ino])
		entry := penstock.DirEntry{Name: d.name, Ino: e.Attr.Ino, Volume: e.Volume, Type: e.Attr.Mode & meta.TypeMask, Cookie: d.cookie}
		if plus {
			entry.Entry = e
		}
		list = append(list, entry)
	}
	return list, true, nil
}

func (v *memVolume) GetAttr(_ context.Context, ino meta.Ino) (penstock.Entry, error) {
	defer v.mu.Unlock()
	v.enter("getattr", nil)
	n, err := v.inode(ino)
	if err != nil {
		return penstock.Entry{}, err
	}
	return v.entry(n), nil
}

func (v *memVolume) SetAttr(_ context.Context, call *penstock.Call, req meta.SetAttr) (penstock.Entry, error) {
	defer v.mu.Unlock()
	if err := v.enter("setattr", call); err != nil {
		return penstock.Entry{}, err
	}
	n, err := v.inode(req.Ino)
	if err != nil {
		return penstock.Entry{}, err
	}
	a := &n.attr
	if req.Mask&meta.SetMode != 0 {
		a.Mode = a.Mode&meta.TypeMask | req.Mode
	}
	if req.Mask&meta.SetUID != 0 {
		a.UID = req.UID
	}
	if req.Mask&meta.SetGID != 0 {
		a.GID = req.GID
	}
	if req.Mask&meta.SetSize != 0 {
		n.resize(int(req.Size))
	}
	if req.Mask&meta.SetMtime != 0 {
		a.Mtime = req.Mtime
	}
	if req.Mask&meta.SetAtime != 0 {
		a.Atime = req.Atime
	}
	if req.Mask&meta.SetKillPriv != 0 {
		a.Mode &^= meta.ModeSetUID | meta.ModeSetGID
	}
	return v.entry(n), nil
}

func (n *memInode) resize(size int) {
	if size <= len(n.data) {
		n.data = n.data[:size]
		return
	}
	n.data = append(n.data, make([]byte, size-len(n.data))...)
}

func (v *memVolume) ReadLink(_ context.Context, ino meta.Ino) (string, error) {
	defer v.mu.Unlock()
	v.enter("readlink", nil)
	n, err := v.inode(ino)
	if err != nil {
		return "", err
	}
	return n.target, nil
}

func (v *memVolume) GetXattr(_ context.Context, ino meta.Ino, name string) ([]byte, error) {
	defer v.mu.Unlock()
	v.enter("getxattr", nil)
	n, err := v.inode(ino)
	if err != nil {
		return nil, err
	}
	if value, ok := n.xattrs[name]; ok {
		return value, nil
	}
	return nil, meta.E("getxattr", meta.NoAttribute, name, nil)
}

func (v *memVolume) ListXattr(_ context.Context, ino meta.Ino) ([]string, error) {
	defer v.mu.Unlock()
	v.enter("listxattr", nil)
	n, err := v.inode(ino)
	if err != nil {
		return nil, err
	}
	var names []string
	for name := range n.xattrs {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

func (v *memVolume) SetXattr(_ context.Context, call *penstock.Call, req meta.SetXattr) error {
	defer v.mu.Unlock()
	if err := v.enter("setxattr", call); err != nil {
		return err
	}
	n, err := v.inode(req.Ino)
	if err != nil {
		return err
	}
	if n.xattrs == nil {
		n.xattrs = make(map[string][]byte)
	}
	n.xattrs[req.Name] = req.Value
	return nil
}

func (v *memVolume) RemoveXattr(_ context.Context, call *penstock.Call, ino meta.Ino, name string) error {
	defer v.mu.Unlock()
	if err := v.enter("removexattr", call); err != nil {
		return err
	}
	n, err := v.inode(ino)
	if err != nil {
		return err
	}
	if _, ok := n.xattrs[name]; !ok {
		return meta.E("removexattr", meta.NoAttribute, name, nil)
	}
	delete(n.xattrs, name)
	return nil
}

func (v *memVolume) open(n *memInode, flags uint32) penstock.OpenInfo {
	v.opens[n.attr.Ino]++
	if flags&uint32(os.O_TRUNC) != 0 {
		n.data = nil
	}
	return penstock.OpenInfo{Entry: v.entry(n), KeepCache: true, Sealed: n.backing != ""}
}

func (v *memVolume) CreateOpen(ctx context.Context, call *penstock.Call, req meta.Create, flags uint32) (penstock.OpenInfo, error) {
	defer v.mu.Unlock()
	if err := v.enter("createopen", call); err != nil {
		return penstock.OpenInfo{}, err
	}
	if hang := v.hang; hang != nil {
		v.mu.Unlock()
		hang(ctx)
		v.mu.Lock()
		return penstock.OpenInfo{}, meta.E("create", meta.Interrupted, req.Name, nil)
	}
	e, err := v.create(req)
	if err != nil {
		return penstock.OpenInfo{}, err
	}
	return v.open(v.inodes[e.Attr.Ino], flags), nil
}

func (v *memVolume) Tmpfile(_ context.Context, call *penstock.Call, req meta.Tmpfile, flags uint32) (penstock.OpenInfo, error) {
	defer v.mu.Unlock()
	if err := v.enter("tmpfile", call); err != nil {
		return penstock.OpenInfo{}, err
	}
	v.next++
	n := &memInode{attr: meta.Attr{Ino: v.next, Mode: req.Mode, UID: req.UID, GID: req.GID}}
	v.inodes[v.next] = n
	return v.open(n, flags), nil
}

func (v *memVolume) Open(_ context.Context, call *penstock.Call, ino meta.Ino, flags uint32) (penstock.OpenInfo, error) {
	defer v.mu.Unlock()
	if err := v.enter("open", call); err != nil {
		return penstock.OpenInfo{}, err
	}
	if v.of != 0 && writable(flags) {
		return penstock.OpenInfo{}, meta.E("open", meta.ReadOnly, "", nil)
	}
	n, err := v.inode(ino)
	if err != nil {
		return penstock.OpenInfo{}, err
	}
	return v.open(n, flags), nil
}

func (v *memVolume) Flush(_ context.Context, call *penstock.Call, ino meta.Ino, owner uint64) error {
	defer v.mu.Unlock()
	err := v.enter("flush", call)
	v.unlock(func(l meta.Lock) bool { return l.Ino == ino && l.Owner == owner && !l.Flock })
	return err
}

func (v *memVolume) Release(_ context.Context, ino meta.Ino, _ uint32) {
	defer v.mu.Unlock()
	v.enter("release", nil)
	v.opens[ino]--
	if n := v.inodes[ino]; n != nil && v.opens[ino] == 0 && n.attr.Nlink == 0 {
		delete(v.inodes, ino)
	}
}

func (v *memVolume) Backing(_ context.Context, ino meta.Ino) (*os.File, error) {
	v.enter("backing", nil)
	path := v.inodes[ino].backing
	v.mu.Unlock()
	return os.Open(path)
}

func (v *memVolume) Read(_ context.Context, ino meta.Ino, p []byte, off int64) (int, error) {
	defer v.mu.Unlock()
	if err := v.enter("read", nil); err != nil {
		return 0, err
	}
	n, err := v.inode(ino)
	if err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, meta.E("read", meta.Invalid, "", nil)
	}
	return copy(p, n.data[min(off, int64(len(n.data))):]), nil
}

func (v *memVolume) Epoch() uint64 { return 1 }

func (v *memVolume) WritePage(ctx context.Context, call *penstock.Call, ino meta.Ino, p []byte, off int64, _ uint64) error {
	e, err := v.GetAttr(ctx, ino)
	if err != nil || uint64(off) >= e.Attr.Size {
		return err
	}
	_, err = v.Write(ctx, call, ino, p[:min(uint64(len(p)), e.Attr.Size-uint64(off))], off, false, false)
	return err
}

func (v *memVolume) Write(_ context.Context, call *penstock.Call, ino meta.Ino, p []byte, off int64, atEnd, kill bool) (int, error) {
	defer v.mu.Unlock()
	if err := v.enter("write", call); err != nil {
		return 0, err
	}
	n, err := v.inode(ino)
	if err != nil {
		return 0, err
	}
	if atEnd {
		off = int64(len(n.data))
	}
	if end := int(off) + len(p); end > len(n.data) {
		n.resize(end)
	}
	copy(n.data[off:], p)
	if kill {
		n.attr.Mode &^= meta.ModeSetUID | meta.ModeSetGID
	}
	return len(p), nil
}

func (v *memVolume) Fsync(_ context.Context, ino meta.Ino, _ bool) error {
	err := v.enter("fsync", nil)
	v.mu.Unlock()
	return err
}

func (v *memVolume) Fallocate(_ context.Context, call *penstock.Call, req meta.Fallocate) error {
	defer v.mu.Unlock()
	v.enter("fallocate", call)
	n, err := v.inode(req.Ino)
	if err != nil {
		return err
	}
	if req.Mode&meta.FallocPunchHole != 0 {
		clear(n.data[min(req.Off, uint64(len(n.data))):min(req.Off+req.Len, uint64(len(n.data)))])
		return nil
	}
	if end := int(req.Off + req.Len); req.Mode&meta.FallocKeepSize == 0 && end > len(n.data) {
		n.resize(end)
	}
	return nil
}

func (v *memVolume) CopyRange(_ context.Context, call *penstock.Call, req meta.CopyRange) (uint64, error) {
	defer v.mu.Unlock()
	v.enter("copyrange", call)
	src, dst := v.inodes[req.Src], v.inodes[req.Dst]
	for _, s := range v.snaps {
		if s.snap.At == req.At {
			src = s.inodes[req.Src]
		}
	}
	part := src.data[min(req.SrcOff, uint64(len(src.data))):min(req.SrcOff+req.Len, uint64(len(src.data)))]
	if end := int(req.DstOff) + len(part); end > len(dst.data) {
		dst.resize(end)
	}
	return uint64(copy(dst.data[req.DstOff:], part)), nil
}

func (v *memVolume) Seek(_ context.Context, ino meta.Ino, off int64, whence uint32) (int64, error) {
	defer v.mu.Unlock()
	v.enter("seek", nil)
	n, err := v.inode(ino)
	switch {
	case err != nil:
		return 0, err
	case off >= int64(len(n.data)):
		return 0, meta.E("seek", meta.NoSuchOffset, "", nil)
	case whence == penstock.SeekHole:
		return int64(len(n.data)), nil
	}
	return off, nil
}

func conflict(a, b meta.Lock) bool {
	return a.Ino == b.Ino && a.Flock == b.Flock && a.Owner != b.Owner && a.Start <= b.End && b.Start <= a.End &&
		(a.Type == meta.LockWrite || b.Type == meta.LockWrite)
}

func (v *memVolume) unlock(match func(meta.Lock) bool) {
	v.locks = slices.DeleteFunc(v.locks, match)
	close(v.freed)
	v.freed = make(chan struct{})
}

func (v *memVolume) SetLock(ctx context.Context, l meta.Lock, wait bool) error {
	v.enter("setlock", nil)
	for {
		if l.Type == meta.LockUnlock {
			v.unlock(func(o meta.Lock) bool { return o.Ino == l.Ino && o.Owner == l.Owner && o.Flock == l.Flock })
			v.mu.Unlock()
			return nil
		}
		if !slices.ContainsFunc(v.locks, func(o meta.Lock) bool { return conflict(o, l) }) {
			v.locks = append(v.locks, l)
			v.mu.Unlock()
			return nil
		}
		freed := v.freed
		v.mu.Unlock()
		if !wait {
			return meta.E("lock", meta.WouldBlock, "", nil)
		}
		select {
		case <-freed:
		case <-ctx.Done():
			return meta.E("lock", meta.Interrupted, "", ctx.Err())
		}
		v.mu.Lock()
	}
}

func (v *memVolume) GetLock(_ context.Context, l meta.Lock) (meta.Lock, error) {
	v.enter("getlock", nil)
	defer v.mu.Unlock()
	for _, o := range v.locks {
		if conflict(o, l) {
			return o, nil
		}
	}
	l.Type = meta.LockUnlock
	return l, nil
}

// opCount tells how many distinct operation ids were seen for a method.
func (v *memVolume) opCount(prefix string) (n int) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, name := range v.ops {
		if strings.HasPrefix(name, prefix) {
			n++
		}
	}
	return n
}
