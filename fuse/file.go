package fuse

import (
	"slices"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Open opens a regular file. A handle for writing bypasses the page cache. A handle for
// reading uses the page cache, or a backing file read by the kernel itself.
func (f *fileSystem) Open(cancel <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if isText(in.NodeId) {
		if writable(in.Flags) {
			return fuse.EPERM
		}
		out.Fh, out.OpenFlags = f.opens.handle(modeVirtual|modeNoFlush), fuse.FOPEN_DIRECT_IO|fuse.FOPEN_NOFLUSH
		return fuse.OK
	}
	if f.noOpen {
		return fuse.ENOSYS
	}
	f.undoOpen(&in.InHeader)
	ctx := request(cancel)
	if isStream(in.NodeId) {
		return f.streams.open(ctx, in, out)
	}
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("open", in.NodeId, err)
	}
	if in.Flags&syscall.O_TRUNC != 0 {
		if err := f.back.drain(in.NodeId); err != nil {
			return f.status("open", in.NodeId, err)
		}
	}
	info, err := v.Open(ctx, f.call(&in.InHeader), ino, in.Flags&^syscall.O_TRUNC)
	if err != nil {
		return f.status("open", in.NodeId, err)
	}
	if in.Flags&syscall.O_TRUNC != 0 {
		// The library's Open does not truncate: Linux truncates with O_TRUNC even when the
		// file is opened only for reading, and the truncation may have to drop set-id bits.
		call := f.call(&in.InHeader)
		call.Op.Step = 2 * secondStep
		err = f.dropRightsOf(ctx, v, in.NodeId, &info.Entry.Attr, &in.InHeader, in.Mode&fuse.OPEN_KILL_SUIDGID != 0)
		if err == nil {
			info.Entry, err = v.SetAttr(ctx, call, meta.SetAttr{Ino: ino, Mask: meta.SetSize})
		}
		if err != nil {
			v.Release(ctx, ino, in.Flags)
			return f.status("open", in.NodeId, err)
		}
	}
	f.opened1(ctx, v, in.NodeId, ino, in.Flags, &info, out)
	f.kept.opened(in.NodeId, out.Fh, in.Flags, out.BackingID, in.Unique)
	return fuse.OK
}

// secondStep keeps the operations of one request apart: the operations of the library's first
// call count from zero.
const secondStep = 1 << 16

// Create makes and opens a regular file.
func (f *fileSystem) Create(cancel <-chan struct{}, in *fuse.CreateIn, name string, out *fuse.CreateOut) fuse.Status {
	if isOwn(in.NodeId) {
		return fuse.EPERM
	}
	f.undoOpen(&in.InHeader)
	ctx := request(cancel)
	v, parent, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("create", in.NodeId, err)
	}
	info, err := v.CreateOpen(ctx, f.call(&in.InHeader), meta.Create{
		Parent: parent, Name: name, Mode: meta.TypeRegular | in.Mode&meta.ModePerm, Umask: in.Umask,
		UID: in.Uid, GID: in.Gid, Excl: in.Flags&syscall.O_EXCL != 0,
	}, in.Flags)
	if err != nil {
		return f.status("create", in.NodeId, err)
	}
	f.created(ctx, v, in, &info, out)
	return fuse.OK
}

// Tmpfile makes and opens a regular file without a name.
func (f *fileSystem) Tmpfile(cancel <-chan struct{}, in *fuse.CreateIn, out *fuse.CreateOut) fuse.Status {
	if isOwn(in.NodeId) {
		return fuse.EPERM
	}
	f.undoOpen(&in.InHeader)
	ctx := request(cancel)
	v, parent, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("tmpfile", in.NodeId, err)
	}
	info, err := v.Tmpfile(ctx, f.call(&in.InHeader), meta.Tmpfile{
		Parent: parent, Mode: meta.TypeRegular | in.Mode&meta.ModePerm, Umask: in.Umask, UID: in.Uid, GID: in.Gid,
	}, in.Flags)
	if err != nil {
		return f.status("tmpfile", in.NodeId, err)
	}
	f.created(ctx, v, in, &info, out)
	return fuse.OK
}

func (f *fileSystem) created(ctx request, v Volume, in *fuse.CreateIn, info *penstock.OpenInfo, out *fuse.CreateOut) {
	f.fillEntry(&info.Entry, &out.EntryOut)
	f.opened1(ctx, v, out.NodeId, info.Entry.Attr.Ino, in.Flags, info, &out.OpenOut)
	f.kept.opened(out.NodeId, out.Fh, in.Flags, out.BackingID, in.Unique)
}

// opened1 chooses how a new handle reads and writes (direct, passthrough or page cache) and
// fills out.
func (f *fileSystem) opened1(ctx request, v Volume, node uint64, ino meta.Ino, flags uint32, info *penstock.OpenInfo, out *fuse.OpenOut) {
	switch {
	case writable(flags):
		out.Fh = f.opens.handle(modeWrite)
		out.OpenFlags = fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES
	case info.Sealed && f.openThrough(ctx, v, node, ino, out):
		return
	default:
		f.openCached(node, info, out)
		return
	}
	f.opens.with(node, true, func(n *openNode) { n.opened(out.Fh, info) })
}

// openCached opens for reading through the page cache, or without any if no
// lease could be had.
func (f *fileSystem) openCached(node uint64, info *penstock.OpenInfo, out *fuse.OpenOut) {
	f.opens.with(node, true, func(n *openNode) {
		mode := modeCached
		switch {
		case n.through > 0:
			// After info was made, the file was sealed and another open chose passthrough.
			// From then on the kernel allows no other mode for the inode.
			mode = modePassthrough
			out.OpenFlags, out.BackingID = fuse.FOPEN_PASSTHROUGH, n.backing
		case info.DirectIO:
			out.OpenFlags = fuse.FOPEN_DIRECT_IO
		case info.KeepCache:
			out.OpenFlags = fuse.FOPEN_KEEP_CACHE
		}
		if n.writers == 0 && len(n.lockers) == 0 {
			mode |= modeNoFlush
			out.OpenFlags |= fuse.FOPEN_NOFLUSH
		}
		out.Fh = f.opens.handle(mode)
		n.opened(out.Fh, info)
	})
}

// Release ends one open. No caller waits for Release, since Flush and Fsync have already
// returned the errors.
func (f *fileSystem) Release(cancel <-chan struct{}, in *fuse.ReleaseIn) {
	if isStream(in.NodeId) {
		f.streams.release(in.Fh)
	}
	if isOwn(in.NodeId) {
		return
	}
	ctx := request(nil)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		f.status("release", in.NodeId, err)
		return
	}
	if in.Unique&resent != 0 && !f.kept.known(in.Fh) {
		return // the predecessor released, but was killed before the answer
	}
	f.releaseLocks(ctx, v, ino, in)
	var backing int32
	by := f.opens.through(ctx, in.NodeId, in.Fh)
	f.opens.with(in.NodeId, false, func(n *openNode) {
		n.count(modeOf(in.Fh), -1)
		delete(n.failures, in.Fh)
		if n.through == 0 {
			backing, n.backing = n.backing, 0
		}
	})
	if backing != 0 {
		f.conn.closeBacking(backing)
	}
	v.Release(by, ino, in.Flags)
	f.kept.released(in.Fh)
}

func (f *fileSystem) unlock(ctx request, v Volume, node uint64, l meta.Lock) {
	l.Type = meta.LockUnlock
	f.status("unlock", node, v.SetLock(ctx, l, false))
}

// Flush answers close(2) of one descriptor. It gives up the caller's POSIX locks and returns
// an error of an earlier background write.
func (f *fileSystem) Flush(cancel <-chan struct{}, in *fuse.FlushIn) fuse.Status {
	if f.noOpen {
		return fuse.ENOSYS
	}
	if isInput(in.NodeId) {
		return f.status("flush", in.NodeId, f.streams.flushInput(in))
	}
	if isOwn(in.NodeId) {
		return fuse.OK
	}
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("flush", in.NodeId, err)
	}
	f.opens.flushed(&f.kept, in.NodeId, in.LockOwner)
	err = f.back.drain(in.NodeId)
	if e := v.Flush(f.opens.through(ctx, in.NodeId, in.Fh), f.call(&in.InHeader), ino, in.LockOwner); e != nil {
		err = e
	}
	return f.status("flush", in.NodeId, err)
}

// Fsync answers fsync(2), fdatasync(2) and msync(2).
func (f *fileSystem) Fsync(cancel <-chan struct{}, in *fuse.FsyncIn) fuse.Status {
	const dataSync = 1
	ctx := request(cancel)
	if isInput(in.NodeId) {
		return f.status("fsync", in.NodeId, f.streams.fsyncInput(ctx, in.Fh))
	}
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("fsync", in.NodeId, err)
	}
	err = f.back.drain(in.NodeId)
	if e := v.Fsync(f.opens.through(ctx, in.NodeId, in.Fh), ino, in.FsyncFlags&dataSync != 0); e != nil {
		err = e
	}
	return f.status("fsync", in.NodeId, err)
}

// filled is the length of a READ's bytes, already in place in the kernel's answer.
type filled int

func (n filled) Bytes(buf []byte) ([]byte, fuse.Status) { return buf[:n], fuse.OK }
func (n filled) Size() int                              { return int(n) }
func (n filled) Done()                                  {}
func (n filled) Readv(dst [][]byte) (int, fuse.Status)  { return int(n), fuse.OK }

// Read reads into buf, which is part of the answer.
func (f *fileSystem) Read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	n, st := f.read(cancel, in, buf)
	return filled(n), st
}

func (f *fileSystem) read(cancel <-chan struct{}, in *fuse.ReadIn, buf []byte) (int, fuse.Status) {
	if isText(in.NodeId) {
		return f.readText(in.NodeId, buf, int64(in.Offset)), fuse.OK
	}
	ctx := request(cancel)
	if isInput(in.NodeId) {
		return 0, fuse.EACCES
	}
	if isStream(in.NodeId) {
		n, err := f.streams.read(ctx, in, buf)
		return n, f.status("read", in.NodeId, err)
	}
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return 0, f.status("read", in.NodeId, err)
	}
	if in.ReadFlags&fuse.READ_LOCKOWNER == 0 {
		// A READ without a lock owner fills the kernel's page cache.
		if f.opens.pageRead(in.NodeId, in.Fh, int64(in.Offset), int64(len(buf))) {
			// The kernel's count of blocks may become wrong without a request.
			f.conn.newGeneration()
			f.conn.invalidateAttr(in.NodeId)
		}
		defer f.opens.pageReadEnds(in.NodeId)
	}
	pages := f.back.pending(in.NodeId)
	var n int
	if in.Flags&unix.O_NOATIME != 0 {
		n, err = v.Read(quiet{ctx}, ino, buf, int64(in.Offset))
	} else {
		n, err = v.Read(ctx, ino, buf, int64(in.Offset))
	}
	if err != nil {
		return 0, f.status("read", in.NodeId, err)
	}
	if pages != nil {
		overlay(pages, buf[:n], int64(in.Offset))
	}
	return n, fuse.OK
}

// Writev answers WRITE for go-fuse.
func (f *fileSystem) Writev(cancel <-chan struct{}, in *fuse.WriteIn, data [][]byte) (uint32, fuse.Status) {
	if len(data) == 1 {
		return f.write(cancel, in, data[0])
	}
	return f.write(cancel, in, slices.Concat(data...))
}

// write answers write(2), and the writing back of shared mappings.
func (f *fileSystem) write(cancel <-chan struct{}, in *fuse.WriteIn, p []byte) (uint32, fuse.Status) {
	ctx := request(cancel)
	if isInput(in.NodeId) {
		n, err := f.streams.writeInput(ctx, in, p)
		return n, f.status("write", in.NodeId, err)
	}
	if isOwn(in.NodeId) {
		return 0, fuse.EPERM
	}
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return 0, f.status("write", in.NodeId, err)
	}
	call := f.call(&in.InHeader)
	kill := in.WriteFlags&fuse.WRITE_KILL_SUIDGID != 0
	off := int64(in.Offset)
	if in.WriteFlags&fuse.WRITE_CACHE != 0 {
		f.takePage(v, call, in.NodeId, ino, p, off)
		return uint32(len(p)), fuse.OK
	}
	atEnd := in.Flags&syscall.O_APPEND != 0
	to := off + int64(len(p))
	if atEnd {
		to = toEnd
	}
	defer f.opens.endAround(in.NodeId, f.opens.beginAround(in.NodeId, off, to))
	if !atEnd {
		if err := dropTail(ctx, f, v, in.NodeId, off); err != nil {
			return 0, f.status("write", in.NodeId, err)
		}
	}
	if f.back.queued.Load() > 0 {
		if err := f.back.drain(in.NodeId); err != nil {
			return 0, f.status("write", in.NodeId, err)
		}
	}
	if err := f.dropRights(ctx, v, in.NodeId, ino, &in.InHeader, kill); err != nil {
		return 0, f.status("write", in.NodeId, err)
	}
	n, err := v.Write(ctx, call, ino, p, off, atEnd, kill)
	if err != nil {
		return 0, f.status("write", in.NodeId, err)
	}
	f.wroteAround(ctx, v, in.NodeId, ino, off, int64(n), atEnd)
	if in.Flags&syscall.O_DSYNC != 0 {
		// Around the page cache the kernel leaves O_SYNC and O_DSYNC to us.
		const onlySync = syscall.O_SYNC &^ syscall.O_DSYNC
		if err := v.Fsync(f.opens.through(ctx, in.NodeId, in.Fh), ino, in.Flags&onlySync == 0); err != nil {
			return 0, f.status("write", in.NodeId, err)
		}
	}
	return uint32(n), fuse.OK
}

// wroteAround drops pages of [off, off+n) that a READ may have filled with older bytes, after
// the kernel dropped its pages and before the write took effect.
func (f *fileSystem) wroteAround(ctx request, v Volume, node uint64, ino meta.Ino, off, n int64, atEnd bool) {
	if !f.opens.pagesMayExist(node) {
		return
	}
	if atEnd {
		e, err := v.GetAttr(ctx, ino)
		if err != nil {
			off, n = 0, 0
		} else {
			off = min(off, int64(e.Attr.Size)-n)
			n = int64(e.Attr.Size) - off
		}
	}
	f.conn.invalidate(node, off, n)
}

// Fallocate answers fallocate(2); the kernel lets keep-size, punch-hole and
// zero-range through.
func (f *fileSystem) Fallocate(cancel <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("fallocate", in.NodeId, err)
	}
	if in.Mode&^meta.FallocKeepSize != 0 {
		defer f.opens.endAround(in.NodeId, f.opens.beginAround(in.NodeId, int64(in.Offset), int64(in.Offset+in.Length)))
	}
	if err = dropTail(ctx, f, v, in.NodeId, int64(in.Offset)); err == nil {
		err = f.back.drain(in.NodeId)
	}
	if err == nil {
		err = f.dropRightsUnlessRoot(ctx, v, in.NodeId, ino, &in.InHeader)
	}
	if err == nil {
		err = v.Fallocate(ctx, f.call(&in.InHeader), meta.Fallocate{Ino: ino, Mode: in.Mode, Off: in.Offset, Len: in.Length})
	}
	if err == nil {
		f.wroteAround(ctx, v, in.NodeId, ino, int64(in.Offset), int64(in.Length), false)
	}
	return f.status("fallocate", in.NodeId, err)
}

// Lseek answers SEEK_DATA and SEEK_HOLE.
func (f *fileSystem) Lseek(cancel <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	if in.Whence != penstock.SeekData && in.Whence != penstock.SeekHole {
		return fuse.EINVAL
	}
	ctx := request(cancel)
	v, ino, err := f.inode(ctx, in.NodeId)
	if err != nil {
		return f.status("lseek", in.NodeId, err)
	}
	var off int64
	if f.opens.mayBeDirty(in.NodeId) {
		f.fillHoles(ctx, v, in.NodeId, ino)
	}
	if err = f.back.drain(in.NodeId); err == nil {
		off, err = v.Seek(ctx, ino, int64(in.Offset), in.Whence)
	}
	out.Offset = uint64(off)
	return f.status("lseek", in.NodeId, err)
}

// maxCopy bounds one copy, in bytes: the answer counts in 32 bits, and page-aligned parts can
// share extents.
const maxCopy = 1 << 30

// CopyFileRange answers copy_file_range(2) within a volume, or from a volume's snapshot to the
// volume. Between other volumes it returns EXDEV, and the kernel copies the bytes itself. A
// snapshot that is gone also returns EXDEV; the kernel's reads then return the error.
func (f *fileSystem) CopyFileRange(cancel <-chan struct{}, in *fuse.CopyFileRangeIn) (uint32, fuse.Status) {
	src, srcIno := f.split(in.NodeId)
	dst, dstIno := f.split(in.NodeIdOut)
	ctx := request(cancel)
	if isStream(in.NodeId) || isStream(in.NodeIdOut) {
		return 0, fuse.EXDEV
	}
	var at meta.Generation
	if src != dst {
		v, err := f.volume(ctx, src)
		if err != nil {
			return 0, f.status("copy_file_range", in.NodeId, err)
		}
		of, s, ok := v.View()
		if !ok || of != dst {
			return 0, fuse.EXDEV
		}
		at = s.At
	}
	v, err := f.volume(ctx, dst)
	if err != nil {
		return 0, f.status("copy_file_range", in.NodeIdOut, err)
	}
	defer f.opens.endAround(in.NodeIdOut, f.opens.beginAround(in.NodeIdOut, int64(in.OffOut), int64(in.OffOut+min(in.Len, maxCopy))))
	if err := dropTail(ctx, f, v, in.NodeIdOut, int64(in.OffOut)); err != nil {
		return 0, f.status("copy_file_range", in.NodeIdOut, err)
	}
	for _, node := range []uint64{in.NodeId, in.NodeIdOut} {
		if err := f.back.drain(node); err != nil {
			return 0, f.status("copy_file_range", node, err)
		}
	}
	if err := f.dropRightsUnlessRoot(ctx, v, in.NodeIdOut, dstIno, &in.InHeader); err != nil {
		return 0, f.status("copy_file_range", in.NodeIdOut, err)
	}
	n, err := v.CopyRange(ctx, f.call(&in.InHeader), meta.CopyRange{
		Src: srcIno, SrcOff: in.OffIn, Dst: dstIno, DstOff: in.OffOut, Len: min(in.Len, maxCopy), At: at,
	})
	if meta.KindOf(err) == meta.NoSuchSnapshot {
		return 0, fuse.EXDEV
	}
	if err != nil {
		return 0, f.status("copy_file_range", in.NodeId, err)
	}
	f.wroteAround(ctx, v, in.NodeIdOut, dstIno, int64(in.OffOut), int64(n), false)
	return uint32(n), fuse.OK
}
