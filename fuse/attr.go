package fuse

import (
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// preferredIO is st_blksize of regular files, in bytes. stdio and similar libraries use
// st_blksize as buffer size, and each flush of such a buffer is a request.
const preferredIO = 128 << 10

func blockSize(a *meta.Attr) uint32 {
	if a.IsRegular() {
		return preferredIO
	}
	return meta.BlockSize
}

// fillAttr renders attributes for the kernel.
func (f *fileSystem) fillAttr(v meta.VolumeID, a *meta.Attr, out *fuse.Attr) {
	out.Ino = f.inumbers.of(v, a.Ino)
	out.Size = a.Size
	out.Blocks = (a.Blocks + 511) / 512
	out.Mode = a.Mode
	out.Nlink = a.Nlink
	out.Uid, out.Gid = a.UID, a.GID
	out.Rdev = a.Rdev
	out.Blksize = blockSize(a)
	var sec int64
	sec, out.Atimensec = a.Atime.Unix()
	out.Atime = uint64(sec)
	sec, out.Mtimensec = a.Mtime.Unix()
	out.Mtime = uint64(sec)
	sec, out.Ctimensec = a.Ctime.Unix()
	out.Ctime = uint64(sec)
}

// fillEntry renders a name's inode; e is not negative.
func (f *fileSystem) fillEntry(e *penstock.Entry, out *fuse.EntryOut) {
	out.NodeId = f.nodeID(e.Volume, e.Attr.Ino)
	out.Generation = f.generation(e.Volume)
	f.fillAttr(e.Volume, &e.Attr, &out.Attr)
	if !f.mayFill(out.NodeId, &e.Attr) {
		out.SetAttrTimeout(e.Valid)
	}
	out.SetEntryTimeout(f.entryTimeout(e.Volume, e.Valid))
}

// generation returns the node generation, which distinguishes inodes with the same number. A
// volume never reuses an inode number. A view's volume number is reused after the view ends.
func (f *fileSystem) generation(id meta.VolumeID) uint64 {
	if id > meta.MaxVolume {
		if v, err := f.volume(request(nil), id); err == nil {
			return 1 + uint64(v.Turn())
		}
	}
	return 1
}

// entryTimeout is how long the kernel may believe a name. In a snapshot none
// changes.
func (f *fileSystem) entryTimeout(v meta.VolumeID, valid time.Duration) time.Duration {
	if f.noEpoch && !f.noOpen && v <= meta.MaxVolume {
		return 0
	}
	return valid
}

func (f *fileSystem) fillAttrOut(node uint64, e *penstock.Entry, out *fuse.AttrOut) {
	f.fillAttr(e.Volume, &e.Attr, &out.Attr)
	if !f.mayFill(node, &e.Attr) {
		out.SetTimeout(e.Valid)
	}
}

// GetAttr answers stat(2) and the kernel's own refreshes of attributes.
func (f *fileSystem) GetAttr(cancel <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	ctx := request(cancel)
	if dir := f.virtualAt(in.NodeId); dir != nil {
		return dir.getAttr(ctx, in.NodeId, out)
	}
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("getattr", in.NodeId, err)
	}
	e, err := v.GetAttr(ctx, ino)
	if err == nil && in.Flags()&fuse.FUSE_GETATTR_FH == 0 && f.mustFill(in.NodeId, &e.Attr) {
		f.fillHoles(ctx, v, in.NodeId, ino)
		e, err = v.GetAttr(ctx, ino)
	}
	if err != nil {
		return f.status("getattr", in.NodeId, err)
	}
	f.fillAttrOut(in.NodeId, &e, out)
	return fuse.OK
}

// Statx is asked only when the birth time is wanted.
func (f *fileSystem) Statx(cancel <-chan struct{}, in *fuse.StatxIn, out *fuse.StatxOut) fuse.Status {
	ctx := request(cancel)
	if dir := f.virtualAt(in.NodeId); dir != nil {
		return dir.statx(ctx, in.NodeId, out)
	}
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("statx", in.NodeId, err)
	}
	e, err := v.GetAttr(ctx, ino)
	if err == nil && f.mustFill(in.NodeId, &e.Attr) {
		f.fillHoles(ctx, v, in.NodeId, ino)
		e, err = v.GetAttr(ctx, ino)
	}
	if err != nil {
		return f.status("statx", in.NodeId, err)
	}
	if !f.mayFill(in.NodeId, &e.Attr) {
		out.SetTimeout(e.Valid)
	}
	f.fillStatx(e.Volume, &e.Attr, out)
	return fuse.OK
}

func (f *fileSystem) fillStatx(v meta.VolumeID, a *meta.Attr, out *fuse.StatxOut) {
	out.Mask = unix.STATX_BASIC_STATS | unix.STATX_BTIME
	out.Blksize = blockSize(a)
	out.Nlink = a.Nlink
	out.Statx.Uid, out.Statx.Gid = a.UID, a.GID
	out.Mode = uint16(a.Mode)
	out.Ino = f.inumbers.of(v, a.Ino)
	out.Size = a.Size
	out.Blocks = (a.Blocks + 511) / 512
	out.Atime, out.Btime, out.Ctime, out.Mtime = sxTime(a.Atime), sxTime(a.Btime), sxTime(a.Ctime), sxTime(a.Mtime)
	out.RdevMajor, out.RdevMinor = a.Rdev>>8&0xfff, a.Rdev&0xff|a.Rdev>>12&0xfff00
}

func sxTime(t meta.Time) fuse.SxTime {
	sec, nsec := t.Unix()
	return fuse.SxTime{Sec: uint64(sec), Nsec: nsec}
}

// SetAttr answers chmod, chown, truncate and utimensat.
//
// With FUSE_HANDLE_KILLPRIV_V2 SetAttr must drop set-id bits and capabilities: with every
// change of owner, and with a truncation if the kernel asks for it.
func (f *fileSystem) SetAttr(cancel <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	const truncates = fuse.FATTR_SIZE | fuse.FATTR_FH | fuse.FATTR_LOCKOWNER | fuse.FATTR_KILL_SUIDGID
	if isInput(in.NodeId) && in.Valid&fuse.FATTR_SIZE != 0 && in.Valid&^truncates == 0 {
		return f.streams.getAttr(request(cancel), in.NodeId, out) // a stream has no bytes to cut off
	}
	if isOwn(in.NodeId) {
		return fuse.EPERM
	}
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("setattr", in.NodeId, err)
	}
	if in.Valid&fuse.FATTR_SIZE != 0 {
		// Queued pages of mappings must be written before the truncation.
		if err := f.back.drain(in.NodeId); err != nil {
			return f.status("setattr", in.NodeId, err)
		}
	}
	req := setAttr(ino, in)
	if req.Mask&(meta.SetKillPriv|meta.SetSize) != 0 {
		old, err := v.GetAttr(ctx, ino)
		if err != nil {
			return f.status("setattr", in.NodeId, err)
		}
		if old.Attr.IsDir() {
			req.Mask &^= meta.SetKillPriv // a directory keeps its set-id bits
		}
		if req.Mask&meta.SetKillPriv != 0 {
			dropSetGID(&req, &old.Attr, &in.InHeader)
		} else if err := f.dropRightsOf(ctx, v, in.NodeId, &old.Attr, &in.InHeader, false); err != nil {
			return f.status("setattr", in.NodeId, err)
		}
		if req.Mask&meta.SetSize != 0 && req.Size > old.Attr.Size {
			f.opens.grow(in.NodeId, int64(old.Attr.Size))
		}
	}
	e, err := v.SetAttr(ctx, f.call(&in.InHeader), req)
	if err != nil {
		if req.Mask&meta.SetSize != 0 {
			f.opens.notGrown(in.NodeId)
		}
		return f.status("setattr", in.NodeId, err)
	}
	f.fillAttrOut(in.NodeId, &e, out)
	return fuse.OK
}

func setAttr(ino meta.Ino, in *fuse.SetAttrIn) meta.SetAttr {
	req := meta.SetAttr{Ino: ino}
	if mode, ok := in.GetMode(); ok {
		req.Mask |= meta.SetMode
		req.Mode = mode
	}
	if uid, ok := in.GetUID(); ok {
		req.Mask |= meta.SetUID | meta.SetKillPriv
		req.UID = uid
	}
	if gid, ok := in.GetGID(); ok {
		req.Mask |= meta.SetGID | meta.SetKillPriv
		req.GID = gid
	}
	if size, ok := in.GetSize(); ok {
		req.Mask |= meta.SetSize
		req.Size = size
	}
	if in.Valid&fuse.FATTR_KILL_SUIDGID != 0 || req.Mask == 0 && in.Valid == 0 {
		// An empty request is chown(path, -1, -1), which also drops set-id bits.
		req.Mask |= meta.SetKillPriv
	}
	switch {
	case in.Valid&fuse.FATTR_ATIME_NOW != 0:
		req.Mask |= meta.SetAtimeNow
	case in.Valid&fuse.FATTR_ATIME != 0:
		req.Mask |= meta.SetAtime
		req.Atime = meta.TimeOf(int64(in.Atime), in.Atimensec)
	}
	switch {
	case in.Valid&fuse.FATTR_MTIME_NOW != 0:
		req.Mask |= meta.SetMtimeNow
	case in.Valid&fuse.FATTR_MTIME != 0:
		req.Mask |= meta.SetMtime
		req.Mtime = meta.TimeOf(int64(in.Mtime), in.Mtimensec)
	}
	// The kernel sends the change time only with FUSE_WRITEBACK_CACHE, which initOptions does
	// not request. With FUSE_WRITEBACK_CACHE, utimensat(2) of an access time alone would look
	// like meta.SetAttr.ReadTime.
	if in.Valid&fuse.FATTR_CTIME != 0 {
		req.Mask |= meta.SetCtime
		req.Ctime = meta.TimeOf(int64(in.Ctime), in.Ctimensec)
	}
	return req
}
