package penstock

import (
	"context"
	"errors"
	"hash/maphash"
	"sync"

	"penstock.io/penstock/meta"
)

// nameLocks order this client's own changes of one name, so that two replies about a name are
// never handled in the wrong order. A request holds its name locks; the answer to a recall
// never takes a name lock.
type nameLocks struct {
	seed    maphash.Seed
	stripes [512]sync.Mutex
}

func (l *nameLocks) stripe(dir meta.Ino, name string) int {
	return int((maphash.String(l.seed, name) ^ uint64(dir)*0x9e3779b97f4a7c15) % uint64(len(l.stripes)))
}

func (l *nameLocks) lock(dir meta.Ino, name string) (unlock func()) {
	m := &l.stripes[l.stripe(dir, name)]
	m.Lock()
	return m.Unlock
}

func (l *nameLocks) lockTwo(dir1 meta.Ino, name1 string, dir2 meta.Ino, name2 string) (unlock func()) {
	i, j := l.stripe(dir1, name1), l.stripe(dir2, name2)
	if i == j {
		l.stripes[i].Lock()
		return l.stripes[i].Unlock
	}
	a, b := &l.stripes[min(i, j)], &l.stripes[max(i, j)]
	a.Lock()
	b.Lock()
	return func() { b.Unlock(); a.Unlock() }
}

// directories answers for the names in a volume's directories, and changes them.
type directories struct {
	v     *Volume
	locks *nameLocks // of a view, those of the live volume
}

// named returns e with a name that may be cached only if steady.
func (e Entry) named(steady bool) Entry {
	if !steady {
		e.Valid = 0
	}
	return e
}

// Create makes an inode of any type under a name without opening it: mknod,
// mkdir, symlink; see meta.Create. UID, GID and Umask come from req.
func (v *Volume) Create(ctx context.Context, call *Call, req meta.Create) (Entry, error) {
	return through(ctx, v, call, func(call *Call) (Entry, error) {
		res, stamp, steady, err := v.dirs.create(ctx, call, &req, meta.LeaseShared)
		if err != nil {
			return Entry{}, err
		}
		return v.learn(&res.Attr, stamp).named(steady), nil
	}, nil)
}

// create sends Create and records its effect on the directory.
func (ds *directories) create(ctx context.Context, call *Call, req *meta.Create, want meta.LeaseMode) (res *meta.Result, stamp stamp, steady bool, err error) {
	v := ds.v
	if err := ds.mayName("create", req.Parent, req.Name); err != nil {
		return nil, stamp, false, err
	}
	if len(req.Name) > meta.MaxName {
		return nil, stamp, false, meta.E("create", meta.NameTooLong, "", nil)
	}
	p := v.node(req.Parent)
	defer p.put()
	unlock := ds.locks.lock(req.Parent, req.Name)
	defer unlock()
	p.beginChange()
	res, stamp, err = v.owner.do(ctx, call, req, want)
	if err != nil {
		p.endChange(req.Name, dent{}, nil, stamp, err)
		return nil, stamp, false, err
	}
	steady = p.endChange(req.Name, dent{ino: res.Attr.Ino}, &res.ParentAttr, stamp, nil)
	if res.Attr.IsDir() && !res.Existed {
		if ch := v.c.table.peek(v.id, res.Attr.Ino); ch != nil {
			ch.mu.Lock()
			if ch.cacheableLocked(stamp) && ch.dirLocked().changes == 0 {
				ch.completeLocked() // nobody else can have put a name into the new directory
			}
			ch.mu.Unlock()
			ch.put()
		}
	}
	return res, stamp, steady, nil
}

// Link adds a name to an inode; see meta.Link.
func (v *Volume) Link(ctx context.Context, call *Call, ino, parent meta.Ino, name string) (Entry, error) {
	if err := v.dirs.mayName("link", parent, name); err != nil {
		return Entry{}, err
	}
	if len(name) > meta.MaxName {
		return Entry{}, meta.E("link", meta.NameTooLong, "", nil)
	}
	return through(ctx, v, call, func(call *Call) (Entry, error) { return v.dirs.linkName(ctx, call, ino, parent, name) }, nil)
}

func (ds *directories) linkName(ctx context.Context, call *Call, ino, parent meta.Ino, name string) (Entry, error) {
	p := ds.v.node(parent)
	defer p.put()
	unlock := ds.locks.lock(parent, name)
	defer unlock()
	p.beginChange()
	res, stamp, err := ds.link(ctx, call, &meta.Link{Ino: ino, Parent: parent, Name: name})
	if err != nil {
		p.endChange(name, dent{}, nil, stamp, err)
		return Entry{}, err
	}
	steady := p.endChange(name, dent{ino: ino}, &res.ParentAttr, stamp, nil)
	return ds.v.learn(&res.Attr, stamp).named(steady), nil
}

// Unlink removes a name, of an empty directory if dir; see meta.Unlink.
func (v *Volume) Unlink(ctx context.Context, call *Call, parent meta.Ino, name string, dir bool) error {
	if err := v.readOnly("unlink"); err != nil {
		return err
	}
	if len(name) > meta.MaxName {
		return meta.E("unlink", meta.NameTooLong, "", nil)
	}
	_, err := through(ctx, v, call, func(call *Call) (none, error) {
		return none{}, v.dirs.unlink(ctx, call, parent, name, dir)
	}, nil)
	return err
}

func (ds *directories) unlink(ctx context.Context, call *Call, parent meta.Ino, name string, dir bool) error {
	p := ds.v.node(parent)
	defer p.put()
	unlock := ds.locks.lock(parent, name)
	defer unlock()
	p.beginChange()
	res, stamp, err := ds.v.owner.do(ctx, call, &meta.Unlink{Parent: parent, Name: name, Dir: dir, Led: call.within()}, meta.LeaseShared)
	if err != nil {
		p.endChange(name, dent{}, nil, stamp, err)
		return err
	}
	p.endChange(name, dent{}, &res.ParentAttr, stamp, nil)
	ds.unlinked(&res.Attr, stamp)
	return nil
}

// unlinked records the attributes of an inode that lost a name. If it was the last name and
// the inode is not open here, the owner may forget the inode.
func (ds *directories) unlinked(a *meta.Attr, stamp stamp) {
	v := ds.v
	if a.Ino == 0 {
		return
	}
	in := v.c.table.peek(v.id, a.Ino)
	if in == nil {
		if a.Nlink == 0 && !v.holds.hold(a.Ino) {
			v.back.releaseOrphan(a.Ino)
		}
		return
	}
	defer in.put()
	in.mu.Lock()
	in.learnLocked(a, stamp)
	dead := a.Nlink == 0 && (in.file == nil || in.file.users.opens == 0)
	if a.Nlink == 0 && !dead {
		in.file.orphaned = true // the last close must know, with or without a lease
	}
	in.mu.Unlock()
	if dead {
		v.back.bury(in)
	}
}

// Rename moves a name, with the flags of renameat2(2). If the source replaces a file, its
// bytes are durable before the change of the name (rule 11).
func (v *Volume) Rename(ctx context.Context, call *Call, parent meta.Ino, name string, newParent meta.Ino, newName string, flags uint32) error {
	if err := v.dirs.mayName("rename", newParent, newName); err != nil {
		return err
	}
	if len(name) > meta.MaxName || len(newName) > meta.MaxName {
		return meta.E("rename", meta.NameTooLong, "", nil)
	}
	_, err := through(ctx, v, call, func(call *Call) (none, error) {
		return none{}, v.dirs.rename(ctx, call, parent, name, newParent, newName, flags)
	}, nil)
	return err
}

func (ds *directories) rename(ctx context.Context, call *Call, parent meta.Ino, name string, newParent meta.Ino, newName string, flags uint32) error {
	v := ds.v
	p, q := v.node(parent), v.node(newParent)
	defer p.put()
	defer q.put()
	unlock := ds.locks.lockTwo(parent, name, newParent, newName)
	defer unlock()
	p.mu.Lock()
	src, _ := p.lookLocked(name)
	p.mu.Unlock()
	q.mu.Lock()
	dst, known := q.lookLocked(newName)
	q.mu.Unlock()
	replaces := flags&(meta.RenameExchange|meta.RenameNoReplace) == 0 && !(known && dst.ino == 0)
	if replaces && src.vol == 0 {
		// The bytes first: they must not be lost when the old file is gone.
		var err error
		if src.ino != 0 {
			err = v.back.flushIfDirty(ctx, src.ino)
		} else { // the name is not cached, so nothing is known of the file's bytes
			var e Entry
			if e, err = v.Lookup(ctx, parent, name); err == nil && !e.Negative && e.Volume == v.id {
				err = v.back.flushIfDirty(ctx, e.Attr.Ino)
			}
		}
		if err != nil {
			return err
		}
	}
	op := &meta.Rename{Parent: parent, Name: name, NewParent: newParent, NewName: newName, Flags: flags, Led: call.within()}
	for try := 0; ; try++ {
		p.beginChange()
		q.beginChange()
		res, stamp, err := v.owner.do(ctx, call, op, meta.LeaseShared)
		if err != nil {
			p.endChange(name, dent{}, nil, stamp, err)
			q.endChange(newName, dent{}, nil, stamp, err)
			if errors.Is(err, meta.NotSynced) && try < 5 {
				if err := ds.flushName(ctx, parent, name); err != nil {
					return err
				}
				continue
			}
			return err
		}
		moved := dent{ino: res.Attr.Ino}
		if res.Volume != 0 {
			moved = dent{meta.RootIno, res.Volume}
		} else if src.vol != 0 {
			moved = src
		}
		after := &res.NewParentAttr
		if parent == newParent && after.Ino == 0 {
			after = &res.ParentAttr
		}
		switch {
		case parent == newParent && name == newName:
			p.endChange(name, moved, &res.ParentAttr, stamp, nil)
		case flags&meta.RenameExchange != 0:
			p.endChange(name, dent{ino: res.Attr2.Ino}, &res.ParentAttr, stamp, nil)
			q.endChange(newName, moved, after, stamp, nil)
			if res.Attr2.Ino == 0 || dst.vol != 0 {
				p.forgetName(name)
			}
		case src.ino != 0 && known && src == dst:
			// Two names of one file: rename(2) does nothing.
			p.endChange(name, src, &res.ParentAttr, stamp, nil)
			q.endChange(newName, dst, after, stamp, nil)
		case res.Attr2.Ino != 0 && res.Attr2.Ino == res.Attr.Ino:
			p.endChange(name, moved, &res.ParentAttr, stamp, nil)
			q.endChange(newName, moved, after, stamp, nil)
		default:
			p.endChange(name, dent{}, &res.ParentAttr, stamp, nil)
			q.endChange(newName, moved, after, stamp, nil)
			if !known && res.Attr2.Ino == 0 {
				// Both names may belong to one file; the next use asks the owner.
				p.forgetName(name)
			}
		}
		v.learn(&res.Attr, stamp)
		if flags&meta.RenameExchange != 0 {
			if res.Attr2.Ino != 0 {
				v.learn(&res.Attr2, stamp)
			}
		} else {
			ds.unlinked(&res.Attr2, stamp)
		}
		return nil
	}
}

// flushName flushes the file under a name.
func (ds *directories) flushName(ctx context.Context, parent meta.Ino, name string) error {
	v := ds.v
	e, err := v.Lookup(ctx, parent, name)
	if err != nil {
		return err
	}
	if e.Negative || e.Volume != v.id {
		return nil
	}
	return v.Fsync(ctx, e.Attr.Ino, true)
}

// ReadLink gives a symbolic link's target.
func (v *Volume) ReadLink(ctx context.Context, ino meta.Ino) (string, error) {
	in := v.node(ino)
	defer in.put()
	res, _, err := v.owner.do(ctx, nil, &meta.ReadLink{Ino: ino}, meta.LeaseShared)
	if err != nil {
		return "", err
	}
	v.atimes.touch(in)
	return string(res.Data), nil
}

// mayName refuses new names in a snapshot, and the name that would hide the volume's
// snapshots.
func (ds *directories) mayName(op string, parent meta.Ino, name string) error {
	if ds.v.view == nil && parent == meta.RootIno && name == SnapshotDir {
		return meta.E(op, meta.Exists, name, nil)
	}
	return ds.v.readOnly(op)
}
