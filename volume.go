package penstock

import (
	"context"
	"fmt"
	"sync/atomic"

	"penstock.io/penstock/meta"
)

// Volume is one volume of the tree, live or as of a snapshot. Its methods may be called from
// many goroutines. Errors are of type *meta.Error. Besides the kinds in its comment, a method
// may fail with Stale (the inode is gone), SessionExpired, Unavailable or IO.
type Volume struct {
	c    *Client
	id   meta.VolumeID
	name string
	view *view // nil: the volume is live

	// The guests of the volume: types with the state and the methods of one task each.

	owner    requests
	settings settings

	// What may be believed.
	dirs      directories
	opens     openAhead
	reads     fileReads
	atimes    atimeList
	locks     heldLocks
	holds     holds
	snapshots snapshotNames
	index     viewIndex

	// Bytes, and their way to durability.
	buffers fileBuffers
	chunks  openChunks
	back    writeBack
	changes inodeChanges
	space   space
	meter   meter

	leaderships leaderships
	barred      barred

	orphans orphanList
	lost    lostNames
	closed  closedList
	// distrust: the kernel may have cached stale data under a predecessor's leases, of unknown
	// inodes.
	distrust atomic.Bool
}

// lodge tells the volume's guests whose guests they are. names are the locks of the volume's
// names.
func (v *Volume) lodge(names *nameLocks) {
	v.owner.v, v.settings.v = v, v
	if v.view != nil {
		v.view.v = v
	}
	v.dirs = directories{v: v, locks: names}
	v.opens.v, v.reads.v, v.atimes.v, v.locks.v, v.holds.v, v.snapshots.v = v, v, v, v, v, v
	v.index.v, v.buffers.v, v.chunks.v, v.changes.v, v.meter.v, v.closed.v = v, v, v, v, v, v
	v.back = writeBack{v: v, dirty: make(map[*inode]struct{}), kicked: make(chan struct{}, 1)}
}

// ID is the volume's number, which never changes; of a view, see ViewID.
func (v *Volume) ID() meta.VolumeID { return v.id }

// Name returns the volume's name at the time of opening; of a view, VOLUME@SNAPSHOT.
func (v *Volume) Name() string { return v.name }

func (v *Volume) subject(ino meta.Ino) string { return fmt.Sprintf("%s:%d", v.name, ino) }

// ---- attributes

// inodeChanges changes attributes, and the places of a file's bytes, by single operations.
type inodeChanges struct{ v *Volume }

// SetAttr changes the attributes named by req.Mask (see meta.SetAttr).
func (v *Volume) SetAttr(ctx context.Context, call *Call, req meta.SetAttr) (Entry, error) {
	if err := v.readOnly("setattr"); err != nil {
		return Entry{}, err
	}
	return through(ctx, v, call, func(call *Call) (Entry, error) {
		in := v.node(req.Ino)
		defer in.put()
		if req.Mask&meta.SetSize != 0 {
			return v.changes.truncate(ctx, call, in, &req)
		}
		return v.changes.setAttr(ctx, call, in, &req)
	}, nil)
}

// setAttr is SetAttr of anything but the size.
func (ch *inodeChanges) setAttr(ctx context.Context, call *Call, in *inode, req *meta.SetAttr) (Entry, error) {
	// A commit under way carries the times of earlier writes. If the commit reached the owner
	// after this change, the commit would undo the change.
	in.mu.Lock()
	var f *file
	if in.file != nil {
		var err error
		if f, err = in.take(ctx, turnCommit); err != nil {
			in.mu.Unlock()
			return Entry{}, err
		}
	}
	in.mu.Unlock()
	res, stamp, err := ch.v.owner.do(ctx, call, req, meta.LeaseShared)
	in.mu.Lock()
	defer in.mu.Unlock()
	if f != nil {
		defer f.turns.leave(turnCommit)
	}
	if err != nil {
		return Entry{}, err
	}
	in.tookTimes(req, &res.Attr)
	return in.entryLocked(&res.Attr, in.learnLocked(&res.Attr, stamp)), nil
}

// tookTimes makes explicitly set times override the times of uncommitted writes.
func (in *inode) tookTimes(req *meta.SetAttr, a *meta.Attr) {
	f := in.file
	if f == nil {
		return
	}
	if req.Mask&(meta.SetAtime|meta.SetAtimeNow) != 0 {
		f.atimeDirty = false
	}
	if f.mtime == 0 {
		return
	}
	if req.Mask&(meta.SetMtime|meta.SetMtimeNow) != 0 {
		f.mtime = a.Mtime
	}
	f.ctime = max(f.ctime, a.Ctime)
}

// truncate sets the size of a file. Meanwhile no other truncate, no flush and no write of the
// file runs.
func (ch *inodeChanges) truncate(ctx context.Context, call *Call, in *inode, req *meta.SetAttr) (Entry, error) {
	v := ch.v
	if req.Size > meta.MaxFileSize {
		return Entry{}, meta.E("truncate", meta.FileTooBig, v.subject(in.ino), nil)
	}
	var e Entry
	err := v.back.alone(ctx, in, req.Size > 0, func() error {
		again := func() {}
		if req.Size == 0 {
			// If the process were killed, its successor would commit the bytes and only then
			// learn that the truncation came earlier.
			again = v.c.kept.forgetAll(in)
		}
		res, stamp, err := v.owner.do(ctx, call, req, meta.LeaseShared)
		in.mu.Lock()
		defer in.mu.Unlock()
		f := in.fileLocked()
		f.mapGen++
		if err != nil {
			again()
			if undecided(err) && f.uncommitted == 0 {
				f.m, f.mapOK = extmap{}, false
			}
			return err
		}
		cached := in.learnLocked(&res.Attr, stamp)
		v.closed.askedLocked(f, res)
		defer v.closed.closedLocked(in)
		in.tookTimes(req, &res.Attr)
		f.m.replace(req.Size, 1<<63, nil, v.buffers.freeBlobOf(f))
		if f.mapOK {
			f.size = req.Size
		}
		f.puts++ // a commit under way has the old size
		if f.uncommitted == 0 {
			f.mtime, f.ctime, f.metaDirty = 0, 0, false
			v.back.unlistLocked(in)
		}
		v.meter.unneededLocked(f)
		if !cached && f.uncommitted == 0 {
			f.m, f.mapOK = extmap{}, false
		}
		e = in.entryLocked(&res.Attr, cached)
		return nil
	})
	return e, err
}

// ---- extended attributes

// GetXattr reads an extended attribute. Errors: NoAttribute.
func (v *Volume) GetXattr(ctx context.Context, ino meta.Ino, name string) ([]byte, error) {
	if v.view.isStub(ino) || v.changes.bare(ino) {
		return nil, meta.E("getxattr", meta.NoAttribute, name, nil)
	}
	res, _, err := v.owner.do(ctx, nil, &meta.GetXattr{Ino: ino, Name: name}, meta.LeaseNone)
	if err != nil {
		return nil, err
	}
	return res.Data, nil
}

// bare reports that the inode is known to have no extended attributes.
func (ch *inodeChanges) bare(ino meta.Ino) bool {
	in := ch.v.c.table.peek(ch.v.id, ino)
	if in == nil {
		return false
	}
	defer in.put()
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.attrOK && in.liveLocked() && in.attr.Flags&(meta.FlagHasXattrs|meta.FlagHasACL|meta.FlagHasCaps) == 0
}

// ListXattr lists the names of extended attributes.
func (v *Volume) ListXattr(ctx context.Context, ino meta.Ino) ([]string, error) {
	if v.view.isStub(ino) || v.changes.bare(ino) {
		return nil, nil
	}
	res, _, err := v.owner.do(ctx, nil, &meta.ListXattr{Ino: ino}, meta.LeaseNone)
	if err != nil {
		return nil, err
	}
	var names []string
	for b := res.Data; len(b) > 0; {
		i := 0
		for i < len(b) && b[i] != 0 {
			i++
		}
		names = append(names, string(b[:i]))
		b = b[min(i+1, len(b)):]
	}
	return names, nil
}

// SetXattr sets an extended attribute; see meta.SetXattr.
func (v *Volume) SetXattr(ctx context.Context, call *Call, req meta.SetXattr) error {
	return v.changes.change(ctx, call, req.Ino, &req)
}

// RemoveXattr removes an extended attribute. Errors: NoAttribute.
func (v *Volume) RemoveXattr(ctx context.Context, call *Call, ino meta.Ino, name string) error {
	return v.changes.change(ctx, call, ino, &meta.RemoveXattr{Ino: ino, Name: name})
}

func (ch *inodeChanges) change(ctx context.Context, call *Call, ino meta.Ino, op meta.Op) error {
	v := ch.v
	if err := v.readOnly("change"); err != nil {
		return err
	}
	_, err := through(ctx, v, call, func(call *Call) (none, error) {
		in := v.node(ino)
		defer in.put()
		res, stamp, err := v.owner.do(ctx, call, op, meta.LeaseShared)
		if err != nil {
			return none{}, err
		}
		in.mu.Lock()
		in.learnLocked(&res.Attr, stamp)
		in.mu.Unlock()
		return none{}, nil
	}, nil)
	return err
}

// ---- ranges

// Fallocate is fallocate(2); see meta.Fallocate.
func (v *Volume) Fallocate(ctx context.Context, call *Call, req meta.Fallocate) error {
	if err := v.readOnly("fallocate"); err != nil {
		return err
	}
	if req.Mode&(meta.FallocPunchHole|meta.FallocCollapse) == 0 {
		if err := v.space.take(ctx, v, int64(min(req.Len, 1<<62))); err != nil {
			return err
		}
	}
	_, err := through(ctx, v, call, func(call *Call) (none, error) {
		in := v.node(req.Ino)
		defer in.put()
		return none{}, v.back.alone(ctx, in, true, func() error {
			return v.changes.changeMap(ctx, call, in, &req)
		})
	}, nil)
	return err
}

// changeMap sends an operation that changes the place of a file's bytes. The caller holds both
// turns, and nothing is buffered. The map is fetched again afterwards.
func (ch *inodeChanges) changeMap(ctx context.Context, call *Call, in *inode, op meta.Op) error {
	v := ch.v
	res, stamp, err := v.owner.do(ctx, call, op, meta.LeaseShared)
	in.mu.Lock()
	defer in.mu.Unlock()
	if f := in.fileLocked(); f.uncommitted == 0 {
		f.m, f.mapOK = extmap{}, false
		f.mapGen++
		f.mtime, f.ctime, f.metaDirty = 0, 0, false
	}
	if err != nil {
		return err
	}
	in.learnLocked(&res.Attr, stamp)
	v.closed.askedLocked(in.fileLocked(), res)
	v.closed.closedLocked(in)
	return nil
}

// CopyRange copies between files of this volume by sharing extents, and returns the number of
// bytes copied. With req.At, the source is a snapshot of the volume. Errors: as
// meta.CopyRange; NotSupported (inline bytes: copy the bytes), ReadOnly.
func (v *Volume) CopyRange(ctx context.Context, call *Call, req meta.CopyRange) (uint64, error) {
	if err := v.readOnly("copy range"); err != nil {
		return 0, err
	}
	return through(ctx, v, call, func(call *Call) (uint64, error) { return v.changes.copyRange(ctx, call, req) }, nil)
}

func (ch *inodeChanges) copyRange(ctx context.Context, call *Call, req meta.CopyRange) (uint64, error) {
	v := ch.v
	dst := v.node(req.Dst)
	defer dst.put()
	if req.At == 0 && req.Src != req.Dst {
		src := v.node(req.Src)
		defer src.put()
		// flushClose also closes the open end: extents are shared with explicit lengths.
		if err := v.back.flushOne(ctx, src, flushClose); err != nil {
			return 0, err
		}
	}
	var n uint64
	err := v.back.alone(ctx, dst, true, func() error {
		res, stamp, err := v.owner.do(ctx, call, &req, meta.LeaseShared)
		dst.mu.Lock()
		defer dst.mu.Unlock()
		if f := dst.fileLocked(); f.uncommitted == 0 {
			f.m, f.mapOK = extmap{}, false
			f.mapGen++
			f.mtime, f.ctime, f.metaDirty = 0, 0, false
		}
		if err != nil {
			return err
		}
		v.closed.askedLocked(dst.fileLocked(), res)
		v.closed.closedLocked(dst)
		n = res.Off
		for _, a := range []*meta.Attr{&res.Attr, &res.Attr2} {
			if a.Ino == dst.ino {
				dst.learnLocked(a, stamp)
			}
		}
		return nil
	})
	return n, err
}

// Seek finds the next data (SeekData) or hole (SeekHole) at or after off.
// Errors: NoSuchOffset.
func (v *Volume) Seek(ctx context.Context, ino meta.Ino, off int64, whence uint32) (int64, error) {
	if off < 0 {
		return 0, meta.E("seek", meta.NoSuchOffset, v.subject(ino), nil)
	}
	in := v.node(ino)
	defer in.put()
	f, sn, err := in.withMap(ctx, meta.LeaseShared)
	if err != nil {
		return 0, err
	}
	defer in.mu.Unlock()
	m, size := &f.m, f.size
	if sn != nil {
		m, size = &sn.m, sn.size
	}
	at := uint64(off)
	if at >= size {
		return 0, meta.E("seek", meta.NoSuchOffset, v.subject(ino), nil)
	}
	hole := whence == SeekHole
	found := false
	m.each(at, size, func(s *segment) bool {
		data := s.b != nil || s.ref != nil // preallocated zeros count as a hole
		switch {
		case hole && (s.off > at || !data):
			found = true
		case hole:
			at = s.end()
		case data:
			at, found = max(at, s.off), true
		}
		return !found
	})
	if found || hole {
		return int64(min(at, size)), nil
	}
	return 0, meta.E("seek", meta.NoSuchOffset, v.subject(ino), nil)
}

// ---- durability

// Flush is close(2) of one descriptor. It releases the POSIX locks of lockOwner and returns
// the error of a failure to make the file's bytes durable that the handle has not reported
// (failures.go; ctx may name the Handle). It syncs only on volumes with sync-on-close.
func (v *Volume) Flush(ctx context.Context, call *Call, ino meta.Ino, lockOwner uint64) error {
	unlock := v.locks.close(ctx, ino, lockOwner, call != nil && call.Resent)
	in := v.c.table.peek(v.id, ino)
	if in == nil {
		return unlock
	}
	defer in.put()
	in.mu.Lock()
	f := in.file
	if f == nil {
		in.mu.Unlock()
		return unlock
	}
	err := f.toldByClose(handleOf(ctx))
	if err == nil {
		err = unlock
	}
	syncNow := v.settings.policy.Load().SyncOnClose && (f.uncommitted > 0 || f.metaDirty || f.own.ended ||
		f.users.writers > 0 && v.owner.durable.Load() < v.owner.mutations.Load()) // it is committed, or made, and not journaled yet
	in.mu.Unlock()
	if syncNow {
		if e := v.Fsync(ctx, ino, false); err == nil {
			err = e
		}
	}
	return err
}

// Fsync makes durable the inode's bytes, and every namespace operation of this client answered
// before the call. ctx may name the Handle.
func (v *Volume) Fsync(ctx context.Context, ino meta.Ino, dataOnly bool) error {
	in := v.node(ino)
	defer in.put()
	h := handleOf(ctx)
	if err := v.back.flushOne(ctx, in, flushFsync); err != nil {
		if !passing(err) && meta.KindOf(err) != meta.Interrupted {
			in.mu.Lock()
			in.fileLocked().syncFailed(h, err)
			in.mu.Unlock()
		}
		return err
	}
	if err := v.owner.sync(ctx); err != nil {
		return err // the next fsync returns the other pending errors
	}
	in.mu.Lock()
	var err error
	if in.file != nil {
		err = in.file.toldBySync(h)
	}
	in.mu.Unlock()
	if e := v.lost.taken(ino); err == nil {
		err = e
	}
	return err
}

// SyncAll makes all changes of this client on the volume durable, as syncfs(2) does. Errors:
// IO when unsynced bytes or names are lost; only one call returns each loss.
func (v *Volume) SyncAll(ctx context.Context) error {
	err := v.back.syncAll(ctx)
	if e := v.lost.takenAll(); err == nil {
		err = e
	}
	return err
}

// FsyncDir makes all changes of this client on the volume durable, including the names of a
// directory. Errors: those of SyncAll, of this directory.
func (v *Volume) FsyncDir(ctx context.Context, ino meta.Ino) error {
	err := v.back.syncAll(ctx)
	if e := v.lost.taken(ino); err == nil {
		err = e
	}
	return err
}

// ---- usage

// StatFS tells usage and limits, what is buffered here included.
func (v *Volume) StatFS(ctx context.Context) (meta.StatFS, error) {
	res, _, err := v.owner.do(ctx, nil, &meta.StatFSOp{}, meta.LeaseNone)
	if err != nil {
		return meta.StatFS{}, err
	}
	st := res.StatFS
	if d := v.back.dirtyBytes.Load(); d > 0 {
		st.UsedBytes += uint64(d)
		st.DiskFree -= min(st.DiskFree, uint64(d))
	}
	return st, nil
}
