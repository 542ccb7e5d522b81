package penstock

import (
	"context"

	"penstock.io/penstock/meta"
)

// inodeChanges changes attributes, and the places of a file's bytes, by single operations.
type inodeChanges struct{ v *Volume }

// link sends Link and waits for the answer even if the caller is killed. A file without a name
// (O_TMPFILE) may get its first name. The client must then not treat the file as one deleted,
// with its bytes, by its last close.
func (ds *directories) link(ctx context.Context, call *Call, op *meta.Link) (*meta.Result, stamp, error) {
	v := ds.v
	in := v.c.table.peek(v.id, op.Ino)
	if in == nil {
		return v.owner.do(ctx, call, op, meta.LeaseShared)
	}
	defer in.put()
	in.mu.Lock()
	f := in.file
	if f == nil || !f.orphaned && (!in.attrOK || in.attr.Nlink > 0) {
		in.mu.Unlock()
		return v.owner.do(ctx, call, op, meta.LeaseShared)
	}
	f.users.linking++
	in.mu.Unlock()
	res, stamp, err := v.owner.do(v.c.ctx, call, op, meta.LeaseShared)
	ds.linked(in, res, stamp, err)
	if ctx.Err() != nil && err == nil && call != nil {
		call.late = append(call.late, res)
	}
	return res, stamp, err
}

// linked takes in how a Link of a file without a name ended.
func (ds *directories) linked(in *inode, res *meta.Result, stamp stamp, err error) {
	v := ds.v
	in.mu.Lock()
	f := in.fileLocked()
	f.users.linking = max(f.users.linking-1, 0)
	seal := false
	switch {
	case err == nil:
		in.learnLocked(&res.Attr, stamp)
		f.orphaned = false
		v.holds.remove(in.ino)
		// At its last close the file had no name.
		if seal = f.users.opens == 0 && v.settings.policy.Load().SealOnClose && res.Attr.Flags&meta.FlagSealed == 0; seal {
			f.sealWant, f.metaDirty = true, true
			v.back.listDirtyLocked(in)
		}
	case undecided(err):
		in.attrOK, f.orphaned = false, false
	}
	dead := f.users.opens == 0 && in.deadLocked(f)
	in.mu.Unlock()
	switch {
	case dead: // the file was closed meanwhile
		v.back.bury(in)
	case seal:
		v.back.settle(in)
	}
}

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

// killPriv drops set-id bits and capabilities before an unprivileged write.
func (ch *inodeChanges) killPriv(ctx context.Context, call *Call, in *inode) error {
	in.mu.Lock()
	known, a := in.attrOK && in.liveLocked(), in.attr
	in.mu.Unlock()
	if !known {
		e, err := ch.v.GetAttr(ctx, in.ino)
		if err != nil {
			return err
		}
		a = e.Attr
	}
	const groupExec = 0o010
	if a.Mode&meta.ModeSetUID == 0 && (a.Mode&meta.ModeSetGID == 0 || a.Mode&groupExec == 0) && a.Flags&meta.FlagHasCaps == 0 {
		return nil
	}
	_, err := ch.v.SetAttr(ctx, call, meta.SetAttr{Ino: in.ino, Mask: meta.SetKillPriv})
	return err
}
