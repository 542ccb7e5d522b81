package penstock

import (
	"context"
	"errors"
	"os"

	"penstock.io/penstock/meta"
)

// openedLocked notes how a new opener, which f counts already, reads. The caller holds mu.
func (in *inode) openedLocked(f *file, info OpenInfo) {
	in.direct = info.DirectIO && (in.direct || f.users.opens == 1)
}

// Open counts an opener of a regular file and takes the lease for the flags of open(2);
// O_TRUNC truncates. Errors: IsDir, and NotPermitted (a sealed file, or a stream's, opened for
// writing).
func (v *Volume) Open(ctx context.Context, call *Call, ino meta.Ino, flags uint32) (OpenInfo, error) {
	in := v.node(ino)
	defer in.put()
	write := forWriting(flags)
	want := meta.LeaseShared
	if write {
		if err := v.readOnly("open"); err != nil {
			return OpenInfo{}, err
		}
		if in.keptByStream() { // before the file is taken from the gateway that writes it
			return OpenInfo{}, meta.E("open", meta.NotPermitted, v.subject(ino), nil)
		}
		v.settings.refresh(ctx)
		want = meta.LeaseExclusive
	}
	if err := v.back.sealNow(ctx, in); err != nil {
		return OpenInfo{}, err
	}
	f, sn, err := in.withMap(ctx, want)
	if err != nil {
		if !write || !errors.Is(err, meta.Busy) {
			return OpenInfo{}, err
		}
		in.mu.Lock() // contended: each write asks again
		f = in.fileLocked()
	}
	if a := &in.attr; in.attrOK {
		var bad meta.Kind
		switch {
		case a.IsDir():
			bad = meta.IsDir
		case write && (a.Flags&meta.FlagSealed != 0 || f.sealWant || in.keptByStreamLocked()):
			bad = meta.NotPermitted
		}
		if bad != 0 {
			in.mu.Unlock()
			return OpenInfo{}, meta.E("open", bad, v.subject(ino), nil)
		}
	}
	f.users.opens++
	if write {
		f.users.writers++
	}
	size := f.size
	info := in.openInfoLocked()
	in.openedLocked(f, info)
	if sn != nil && sn.followed {
		info.Entry.Attr = sn.attr
	}
	var head segment
	if sn == nil && !write {
		head = f.head()
	}
	in.mu.Unlock()
	v.reads.readAhead(head)
	if write && flags&flagTrunc != 0 {
		e, err := v.SetAttr(ctx, call, meta.SetAttr{Ino: ino, Mask: meta.SetSize | meta.SetMtimeNow, Size: 0})
		if err != nil {
			v.Release(ctx, ino, flags)
			return OpenInfo{}, err
		}
		info.Entry = e
		if size > 0 {
			info.KeepCache = false
		}
	}
	return info, nil
}

func (in *inode) openInfoLocked() OpenInfo {
	live := in.liveLocked() && in.attrOK
	info := OpenInfo{
		Entry:     in.entryLocked(nil, true),
		KeepCache: live && in.inval == 0 && !in.distrusted() && !in.loose,
		DirectIO:  !live,
		Sealed:    in.attr.Flags&meta.FlagSealed != 0 || in.vol.frozen(),
	}
	if live {
		in.loose = false // this open has the kernel drop the pages
	}
	if in.file != nil {
		info.Failures = in.file.toldBefore()
	}
	if !live {
		info.Entry = Entry{Volume: in.vol.id}
		info.Entry.Attr = in.attr
	}
	return info
}

// CreateOpen makes a regular file, or opens an existing file unless req.Excl, as Open does
// with these flags of open(2).
func (v *Volume) CreateOpen(ctx context.Context, call *Call, req meta.Create, flags uint32) (OpenInfo, error) {
	if req.Mode&meta.TypeMask == 0 {
		req.Mode |= meta.TypeRegular
	}
	return through(ctx, v, call, func(call *Call) (OpenInfo, error) { return v.dirs.createOpen(ctx, call, req, flags) }, func(info OpenInfo) {
		v.Release(v.c.ctx, info.Entry.Attr.Ino, flags)
	})
}

func (ds *directories) createOpen(ctx context.Context, call *Call, req meta.Create, flags uint32) (OpenInfo, error) {
	v := ds.v
	v.settings.refresh(ctx)
	res, stamp, steady, err := ds.create(ctx, call, &req, meta.LeaseExclusive)
	if err != nil {
		return OpenInfo{}, err
	}
	var info OpenInfo
	if res.Existed {
		v.learn(&res.Attr, stamp)
		info, err = v.Open(ctx, call, res.Attr.Ino, flags)
	} else {
		info = ds.opened(res, stamp, flags)
	}
	info.Entry = info.Entry.named(steady)
	return info, err
}

// opened counts the opener of a new file.
func (ds *directories) opened(res *meta.Result, stamp stamp, flags uint32) OpenInfo {
	in := ds.v.node(res.Attr.Ino)
	defer in.put()
	in.mu.Lock()
	defer in.mu.Unlock()
	f := in.fileLocked()
	f.users.opens++
	if forWriting(flags) {
		f.users.writers++
	}
	if in.learnLocked(&res.Attr, stamp) && !f.mapOK && f.mapGen == 0 {
		f.m, f.mapOK, f.size = extmap{}, true, 0
	}
	info := in.openInfoLocked()
	in.openedLocked(f, info)
	if info.DirectIO {
		info.Entry.Attr = res.Attr
	}
	return info
}

// Tmpfile makes and opens a regular file without a name (O_TMPFILE).
func (v *Volume) Tmpfile(ctx context.Context, call *Call, req meta.Tmpfile, flags uint32) (OpenInfo, error) {
	if err := v.readOnly("tmpfile"); err != nil {
		return OpenInfo{}, err
	}
	return through(ctx, v, call, func(call *Call) (OpenInfo, error) {
		res, stamp, err := v.owner.do(ctx, call, &req, meta.LeaseExclusive)
		if err != nil {
			return OpenInfo{}, err
		}
		info := v.dirs.opened(res, stamp, flags)
		in := v.node(res.Attr.Ino)
		defer in.put()
		in.mu.Lock()
		in.fileLocked().orphaned = true
		in.mu.Unlock()
		return info, nil
	}, func(info OpenInfo) {
		v.Release(v.c.ctx, info.Entry.Attr.Ino, flags)
	})
}

// Release undoes one successful Open, CreateOpen or Tmpfile with the same flags. Release does
// not fail: Flush and Fsync return errors of writes.
func (v *Volume) Release(ctx context.Context, ino meta.Ino, flags uint32) {
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	f := in.fileLocked()
	if f.users.opens == 0 {
		in.mu.Unlock()
		return // opened by a previous process of the mount
	}
	lastWriter := false
	if forWriting(flags) {
		f.users.writers--
		lastWriter = f.users.writers == 0
	}
	known, dead := in.attrOK && in.liveLocked(), in.deadLocked(f)
	last := in.releaseLocked(f, handleOf(ctx))
	settle := lastWriter && !dead && (f.own.chunk != nil || f.own.ended)
	if lastWriter && v.settings.policy.Load().SealOnClose && known && in.attr.Flags&meta.FlagSealed == 0 && !dead {
		f.sealWant, f.metaDirty = true, true
		settle = settle || f.own.chunk != nil
		v.back.listDirtyLocked(in)
	}
	if !dead {
		v.closed.closedLocked(in)
	}
	in.mu.Unlock()
	switch {
	case last && dead:
		v.back.bury(in)
		return
	}
	if settle {
		if v.settings.policy.Load().SealOnClose {
			v.back.settle(in)
		} else {
			in.pins.Add(1)
			v.c.spawn(func() {
				defer in.put()
				v.back.settle(in)
			})
		}
	}
}

// releaseLocked counts an opener less.
func (in *inode) releaseLocked(f *file, h Handle) (last bool) {
	f.users.opens--
	f.releaseHandle(h)
	return f.users.opens == 0
}

// Backing returns a descriptor for passthrough: a regular file of the local file system with
// exactly the sealed file's bytes at the same offsets. The caller closes it. Errors:
// NotSupported when there is none.
func (v *Volume) Backing(ctx context.Context, ino meta.Ino) (*os.File, error) {
	in := v.node(ino)
	defer in.put()
	none := meta.E("passthrough", meta.NotSupported, v.subject(ino), nil)
	f, sn, err := in.withMap(ctx, meta.LeaseShared)
	if err != nil {
		return nil, err
	}
	fixed := in.attr.Flags&meta.FlagSealed != 0 || v.settings.policy.Load().Immutable
	if sn != nil || !fixed || f.size == 0 || f.m.count() != 1 {
		in.mu.Unlock()
		return nil, none
	}
	s, size := f.m.pages[0][0], f.size
	in.mu.Unlock()
	if s.ref == nil || s.off != 0 || s.pos != 0 || s.n != size {
		return nil, none
	}
	pl := *s.ref.place.Load()
	if !pl.Sealed || pl.Length != size {
		return nil, none
	}
	return v.c.chunks.Backing(ctx, pl)
}
