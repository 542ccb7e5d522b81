package namespace

import (
	"fmt"
	"strings"

	"penstock.io/penstock/meta"
)

// maxReadDir bounds one page of a directory.
const maxReadDir = 4096

func checkName(op, name string) error {
	switch {
	case len(name) > meta.MaxName:
		return fail(op, meta.NameTooLong, fmt.Sprintf("a name of %d bytes", len(name)))
	case name == "":
		return fail(op, meta.NotFound, "the empty name")
	case strings.IndexByte(name, '/') >= 0 || strings.IndexByte(name, 0) >= 0:
		return fail(op, meta.Invalid, name)
	}
	return nil
}

func isDots(name string) bool { return name == "." || name == ".." }

// directories are the operations on directories and names, within an operation on the namespace.
type directories struct{ *tx }

func (t *tx) dirs() directories { return directories{t} }

// parentDir reads a directory to change its entries. For a removed directory the error is
// NotFound, as on ext4 for a process in a removed working directory.
func (t directories) parentDir(op string, ino meta.Ino) (*inode, error) {
	in, err := t.inode(ino)
	if meta.KindOf(err) == meta.Stale || err == nil && in.Nlink == 0 {
		return nil, fail(op, meta.NotFound, fmt.Sprintf("directory %d was removed", ino))
	}
	if err != nil {
		return nil, err
	}
	if !in.IsDir() {
		return nil, fail(op, meta.NotDir, fmt.Sprintf("inode %d", ino))
	}
	return in, nil
}

// changedDir marks a directory whose entries changed.
func (t directories) changedDir(dir *inode, now meta.Time) {
	touch(dir)
	dir.Mtime, dir.Ctime = now, now
}

// ---- reads

func (t directories) lookup(op *meta.Lookup, res *meta.Result) error {
	if err := checkName("lookup", op.Name); err != nil {
		return err
	}
	if !isDots(op.Name) {
		e, ok, err := t.findEntry(op.Parent, op.Name)
		if err != nil {
			return err
		}
		if ok && e.vol != 0 {
			res.Volume = e.vol
			return nil
		}
		if ok {
			in, err := t.target(e)
			if err == nil {
				res.Attr = in.Attr
			}
			return err
		}
	}
	dir, err := t.inode(op.Parent)
	if err != nil {
		return err
	}
	if !dir.IsDir() {
		return fail("lookup", meta.NotDir, op.Name)
	}
	switch op.Name {
	case ".":
		res.Attr = dir.Attr
	case "..":
		up, err := t.inode(dir.Parent)
		if err != nil {
			return err
		}
		res.Attr = up.Attr
	default:
		return fail("lookup", meta.NotFound, op.Name)
	}
	return nil
}

// target reads the inode of an entry. A missing inode is damage.
func (t directories) target(e dentry) (*inode, error) {
	in, err := t.load(e.ino)
	if meta.KindOf(err) == meta.Stale {
		return nil, fail("directory entry", meta.Corrupt, fmt.Sprintf("inode %d has a name and no record", e.ino))
	}
	return in, err
}

func (t directories) readDir(op *meta.ReadDir, res *meta.Result) error {
	dir, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	if !dir.IsDir() {
		return fail("readdir", meta.NotDir, fmt.Sprintf("inode %d", op.Ino))
	}
	res.Attr = dir.Attr
	if t.c.At == 0 {
		res.Off = dir.next
	}
	limit := int(op.Max)
	if op.Max == 0 || op.Max > maxReadDir {
		limit = maxReadDir
	}
	res.EOF = true
	if op.Cookie+1 == 0 {
		return nil
	}
	lo := appendCookieBase(nil, op.Ino, op.Cookie+1)
	hi := after(lo[:9])
	err = t.scan(lo, hi, func(base, val []byte, _ uint32) (bool, error) {
		if len(res.Entries) == limit {
			res.EOF = false
			return false, nil
		}
		e, name, err := decodeCookie(val)
		if err == nil && len(base) != 17 {
			err = fail("readdir", meta.Corrupt, fmt.Sprintf("key %x", base))
		}
		if err != nil {
			return false, err
		}
		if res.Entries == nil {
			res.Entries = make([]meta.Dirent, 0, min(limit, 64))
		}
		ent := meta.Dirent{Name: string(name), Ino: e.ino, Type: e.typ, Cookie: cookieOf(base), Volume: e.vol}
		if e.vol != 0 {
			ent.Ino, ent.Type = meta.RootIno, meta.TypeDir
		}
		res.Entries = append(res.Entries, ent)
		return true, nil
	})
	if err != nil || !op.Plus {
		return err
	}
	attrs := make([]meta.Attr, len(res.Entries))
	var in inode
	for i := range res.Entries {
		e := &res.Entries[i]
		if e.Volume != 0 {
			continue
		}
		b, _, ok, err := t.get(appendInodeBase(t.scratch[:0], e.Ino))
		if err != nil {
			return err
		}
		if !ok {
			return fail("readdir", meta.Corrupt, fmt.Sprintf("inode %d has a name and no record", e.Ino))
		}
		in = inode{}
		if err := decodeInode(b, e.Ino, &in); err != nil {
			return err
		}
		attrs[i] = in.Attr
		e.Attr = &attrs[i]
	}
	return nil
}

func cookieOf(base []byte) uint64 {
	var c uint64
	for _, b := range base[9:17] {
		c = c<<8 | uint64(b)
	}
	return c
}

func (t directories) readLink(op *meta.ReadLink, res *meta.Result) error {
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	if in.Mode&meta.TypeMask != meta.TypeSymlink {
		return fail("readlink", meta.Invalid, fmt.Sprintf("inode %d", op.Ino))
	}
	res.Attr = in.Attr
	res.Data = append([]byte(nil), in.data...)
	return nil
}

// ---- making

func (t directories) create(op *meta.Create, res *meta.Result) error {
	dir, err := t.parentDir("create", op.Parent)
	if err != nil {
		return err
	}
	if err := checkName("create", op.Name); err != nil {
		return err
	}
	if isDots(op.Name) {
		return fail("create", meta.Exists, op.Name)
	}
	mode := op.Mode & (meta.TypeMask | meta.ModePerm)
	if mode&meta.TypeMask == 0 {
		mode |= meta.TypeRegular
	}
	e, ok, err := t.findEntry(op.Parent, op.Name)
	if err != nil {
		return err
	}
	if ok {
		if op.Excl || e.vol != 0 || e.typ != meta.TypeRegular || mode&meta.TypeMask != meta.TypeRegular {
			return fail("create", meta.Exists, op.Name)
		}
		in, err := t.target(e)
		if err != nil {
			return err
		}
		res.Attr, res.ParentAttr, res.Existed = in.Attr, dir.Attr, true
		return nil
	}
	if t.vol.policy.Immutable {
		return fail("create", meta.ReadOnly, op.Name)
	}
	if err := t.c.keepStream("create", dir); err != nil {
		return err
	}
	isDir := mode&meta.TypeMask == meta.TypeDir
	if isDir && dir.Nlink >= meta.MaxLinks {
		return fail("create", meta.TooManyLinks, op.Name)
	}
	now := t.c.Now
	if op.Time != 0 {
		now = op.Time
	}
	in, err := t.makeInode(dir, op.Ino, mode, op.Umask, op.UID, op.GID, now)
	if err != nil {
		return err
	}
	switch mode & meta.TypeMask {
	case meta.TypeDir:
		in.Nlink, in.Parent, in.next = 2, dir.Ino, firstCookie
		dir.Nlink++
	case meta.TypeSymlink:
		if op.Target == "" {
			return fail("symlink", meta.NotFound, "an empty target")
		}
		if len(op.Target) > meta.MaxSymlink {
			return fail("symlink", meta.NameTooLong, fmt.Sprintf("a target of %d bytes", len(op.Target)))
		}
		if strings.IndexByte(op.Target, 0) >= 0 {
			return fail("symlink", meta.Invalid, "a target with a zero byte")
		}
		in.Mode |= 0o777
		in.data = []byte(op.Target)
		in.Size = uint64(len(op.Target))
	case meta.TypeChar, meta.TypeBlock:
		in.Rdev = op.Rdev
	case meta.TypeRegular, meta.TypeFIFO, meta.TypeSocket:
	default:
		return fail("create", meta.Invalid, fmt.Sprintf("file type %#o", mode&meta.TypeMask))
	}
	t.changedDir(dir, now)
	if err := t.addName(dir, op.Name, in, 0); err != nil {
		return err
	}
	t.event(&meta.Event{Kind: meta.EventCreated, Ino: in.Ino, Type: in.Mode & meta.TypeMask, Parent: dir.Ino, Name: op.Name})
	res.Attr, res.ParentAttr = in.Attr, dir.Attr
	return nil
}

// addName links a name to an inode and notes the name's position in the inode, for finding a
// path of the inode. The caller writes the inode afterwards.
func (t directories) addName(dir *inode, name string, in *inode, cookie uint64) error {
	cookie, err := t.setEntry(dir, name, dentry{typ: in.Mode & meta.TypeMask, ino: in.Ino, cookie: cookie})
	in.home, in.homeAt = dir.Ino, cookie
	return err
}

// makeInode gives a new inode a number, an owner, a mode and ACLs.
func (t directories) makeInode(dir *inode, ino meta.Ino, mode, umask, uid, gid uint32, now meta.Time) (*inode, error) {
	under := uint32(0) // a number never used before
	if ino == 0 {
		ino = meta.Ino(t.vol.nextIno)
	} else if _, gen, used, err := t.get(appendInodeBase(t.scratch[:0], ino)); err != nil {
		return nil, err
	} else if under = gen; used {
		return nil, fail("create", meta.Again, fmt.Sprintf("inode number %d is in use", ino))
	}
	if ino > meta.LastIno {
		return nil, fail("create", meta.NoSpace, "inode numbers are used up")
	}
	t.vol.nextIno = max(t.vol.nextIno, uint64(ino)+1)
	t.vol.inodes++
	if dir.Mode&meta.ModeSetGID != 0 {
		gid = dir.GID
		if mode&meta.TypeMask == meta.TypeDir {
			mode |= meta.ModeSetGID
		}
	}
	in := t.newInode(ino, mode, uid, gid, now)
	if in.IsRegular() || in.IsDir() {
		in.Flags |= dir.Flags & meta.FlagStream
	}
	in.known, in.under = true, under
	if mode&meta.TypeMask == meta.TypeSymlink {
		return in, nil
	}
	inherited := false
	if dir.Flags&meta.FlagHasACL != 0 {
		var err error
		if inherited, err = t.xattrs().inheritACL(dir, in); err != nil {
			return nil, err
		}
	}
	if !inherited {
		in.Mode &^= umask & 0o777
	}
	return in, nil
}

func (t directories) tmpfile(op *meta.Tmpfile, res *meta.Result) error {
	dir, err := t.parentDir("tmpfile", op.Parent)
	if err != nil {
		return err
	}
	if ty := op.Mode & meta.TypeMask; ty != 0 && ty != meta.TypeRegular {
		return fail("tmpfile", meta.Invalid, fmt.Sprintf("file type %#o", ty))
	}
	if err := t.c.keepStream("tmpfile", dir); err != nil {
		return err
	}
	if t.c.Session == 0 {
		return fail("tmpfile", meta.Invalid, "no session to hold it")
	}
	now := t.c.Now
	if op.Time != 0 {
		now = op.Time
	}
	in, err := t.makeInode(dir, op.Ino, meta.TypeRegular|op.Mode&meta.ModePerm, op.Umask, op.UID, op.GID, now)
	if err != nil {
		return err
	}
	in.Nlink, in.holders, in.tmp = 0, 1, t.c.Session
	t.putOrphan(t.c.Session, in.Ino)
	res.Attr = in.Attr
	return nil
}

func (t directories) putOrphan(s meta.SessionID, ino meta.Ino) {
	m := t.mark()
	t.buf = appendOrphanKey(t.buf, s, ino)
	t.putMarker(m)
}

func (t directories) link(op *meta.Link, res *meta.Result) error {
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	dir, err := t.parentDir("link", op.Parent)
	if err != nil {
		return err
	}
	if err := checkName("link", op.Name); err != nil {
		return err
	}
	if isDots(op.Name) {
		return fail("link", meta.Exists, op.Name)
	}
	if _, ok, err := t.findEntry(op.Parent, op.Name); err != nil {
		return err
	} else if ok {
		return fail("link", meta.Exists, op.Name)
	}
	switch {
	case in.IsDir():
		return fail("link", meta.NotPermitted, "a directory")
	case in.Nlink == 0 && in.tmp == 0:
		return fail("link", meta.NotFound, fmt.Sprintf("the last name of inode %d is gone", op.Ino))
	case in.Nlink >= meta.MaxLinks:
		return fail("link", meta.TooManyLinks, op.Name)
	}
	if err := t.c.keepStream("link", dir); err != nil {
		return err
	}
	kind := meta.EventLinked
	if in.tmp != 0 {
		kind = meta.EventCreated
		s := t.mark()
		t.buf = appendOrphanKey(t.buf, in.tmp, in.Ino)
		t.deleteAt(s)
		in.tmp, in.holders = 0, 0
	}
	touch(in)
	in.Nlink++
	in.Ctime = t.c.Now
	t.changedDir(dir, t.c.Now)
	if err := t.addName(dir, op.Name, in, 0); err != nil {
		return err
	}
	t.event(&meta.Event{Kind: kind, Ino: in.Ino, Type: in.Mode & meta.TypeMask, Parent: dir.Ino, Name: op.Name})
	res.Attr, res.ParentAttr = in.Attr, dir.Attr
	return nil
}

// ---- removing

func (t directories) unlink(op *meta.Unlink, res *meta.Result) error {
	dir, err := t.parentDir("unlink", op.Parent)
	if err != nil {
		return err
	}
	if err := checkName("unlink", op.Name); err != nil {
		return err
	}
	if isDots(op.Name) {
		switch {
		case !op.Dir:
			return fail("unlink", meta.IsDir, op.Name)
		case op.Name == ".":
			return fail("rmdir", meta.Invalid, op.Name)
		default:
			return fail("rmdir", meta.NotEmpty, op.Name)
		}
	}
	e, ok, err := t.findEntry(op.Parent, op.Name)
	if err != nil {
		return err
	}
	if !ok {
		return fail("unlink", meta.NotFound, op.Name)
	}
	if e.vol != 0 {
		return fail("unlink", meta.Busy, op.Name)
	}
	in, err := t.target(e)
	if err != nil {
		return err
	}
	switch {
	case op.Dir && !in.IsDir():
		return fail("rmdir", meta.NotDir, op.Name)
	case !op.Dir && in.IsDir():
		return fail("unlink", meta.IsDir, op.Name)
	case op.Dir && in.Size != 0:
		return fail("rmdir", meta.NotEmpty, op.Name)
	}
	if err := t.dropEntry(dir, op.Name, e); err != nil {
		return err
	}
	if op.Dir {
		dir.Nlink--
	}
	t.changedDir(dir, t.c.Now)
	if err := t.loseName(in, op.Holders); err != nil {
		return err
	}
	t.event(&meta.Event{Kind: meta.EventRemoved, Ino: in.Ino, Type: in.Mode & meta.TypeMask, Parent: dir.Ino, Name: op.Name, Last: in.Nlink == 0})
	res.Attr, res.ParentAttr = in.Attr, dir.Attr
	return nil
}

// loseName removes one link of an inode, and both links of a directory. Without links, the
// inode becomes an orphan of the holders or, without holders, is removed.
func (t directories) loseName(in *inode, holders []meta.SessionID) error {
	touch(in)
	in.Ctime = t.c.Now
	if in.IsDir() {
		in.Nlink = 0
	} else {
		in.Nlink--
	}
	if in.Nlink > 0 {
		return nil
	}
	for i, s := range holders {
		if s == 0 || contains(holders[:i], s) {
			continue
		}
		t.putOrphan(s, in.Ino)
		in.holders++
	}
	if len(holders) == 0 && t.c.Session != 0 {
		t.putOrphan(t.c.Session, in.Ino)
		in.holders++
	}
	if in.holders == 0 {
		return t.extents().remove(in)
	}
	return nil
}

func contains(l []meta.SessionID, s meta.SessionID) bool {
	for _, v := range l {
		if v == s {
			return true
		}
	}
	return false
}

// ---- renaming

func (t directories) rename(op *meta.Rename, res *meta.Result) error {
	exchange, noReplace := op.Flags&meta.RenameExchange != 0, op.Flags&meta.RenameNoReplace != 0
	if op.Flags&^(meta.RenameExchange|meta.RenameNoReplace) != 0 || exchange && noReplace {
		return fail("rename", meta.Invalid, fmt.Sprintf("flags %#x", op.Flags))
	}
	from, err := t.parentDir("rename", op.Parent)
	if err != nil {
		return err
	}
	to, err := t.parentDir("rename", op.NewParent)
	if err != nil {
		return err
	}
	if isDots(op.Name) || isDots(op.NewName) {
		if noReplace && isDots(op.NewName) && !isDots(op.Name) {
			return fail("rename", meta.Exists, op.NewName)
		}
		return fail("rename", meta.Busy, op.Name+" to "+op.NewName)
	}
	if err := checkName("rename", op.Name); err != nil {
		return err
	}
	e, ok, err := t.findEntry(op.Parent, op.Name)
	if err != nil {
		return err
	}
	if !ok {
		return fail("rename", meta.NotFound, op.Name)
	}
	if err := checkName("rename", op.NewName); err != nil {
		return err
	}
	e2, replaces, err := t.findEntry(op.NewParent, op.NewName)
	if err != nil {
		return err
	}
	if replaces && noReplace {
		return fail("rename", meta.Exists, op.NewName)
	}
	if !replaces && exchange {
		return fail("rename", meta.NotFound, op.NewName)
	}
	if e.vol != 0 || replaces && e2.vol != 0 {
		return fail("rename", meta.Busy, "a volume is attached at "+op.Name+" or "+op.NewName)
	}
	in, err := t.target(e)
	if err != nil {
		return err
	}
	var old *inode
	if replaces {
		if old, err = t.target(e2); err != nil {
			return err
		}
	}
	if err := t.checkLoop(from, to, in, old, exchange); err != nil {
		return err
	}
	if in == old {
		res.Attr, res.ParentAttr, res.NewParentAttr = in.Attr, from.Attr, to.Attr
		return nil
	}
	if err := checkKinds(op, from, to, in, old, exchange); err != nil {
		return err
	}
	if err := t.c.keepStream("rename", to); err != nil {
		return err
	}
	if exchange {
		if err := t.c.keepStream("rename", from); err != nil {
			return err
		}
	}

	now := t.c.Now
	if exchange {
		if err := t.addName(from, op.Name, old, e.cookie); err != nil {
			return err
		}
		if err := t.addName(to, op.NewName, in, e2.cookie); err != nil {
			return err
		}
		moveDir(old, to, from)
		touch(old)
		old.Ctime = now
	} else {
		if err := t.dropEntry(from, op.Name, e); err != nil {
			return err
		}
		// A replaced name keeps the position, so readers of the directory always see the old or
		// the new entry.
		if err := t.addName(to, op.NewName, in, e2.cookie); err != nil {
			return err
		}
		if old != nil {
			if old.IsDir() {
				to.Nlink--
			}
			if err := t.loseName(old, op.Holders); err != nil {
				return err
			}
		}
	}
	moveDir(in, from, to)
	touch(in)
	in.Ctime = now
	t.changedDir(from, now)
	t.changedDir(to, now)
	ev := meta.Event{Kind: meta.EventRenamed, Ino: in.Ino, Type: in.Mode & meta.TypeMask, Parent: to.Ino, Name: op.NewName, FromParent: from.Ino, From: op.Name}
	if exchange {
		ev.Kind = meta.EventExchanged
	}
	if old != nil {
		ev.Replaced, ev.Last = old.Ino, old.Nlink == 0
	}
	t.event(&ev)
	res.Attr, res.ParentAttr, res.NewParentAttr = in.Attr, from.Attr, to.Attr
	if old != nil {
		res.Attr2 = old.Attr
	}
	return nil
}

// moveDir moves a directory's ".." and the link that ".." is.
func moveDir(in, from, to *inode) {
	if in.IsDir() && from != to {
		from.Nlink--
		to.Nlink++
		in.Parent = to.Ino
	}
}

// checkLoop refuses to move a directory below itself, and to replace an ancestor of the
// source, which is never empty. Both are possible only in moves between directories.
func (t directories) checkLoop(from, to, in, old *inode, exchange bool) error {
	if from == to {
		return nil
	}
	if in.IsDir() {
		if below, err := t.isBelow(to, in.Ino); err != nil {
			return err
		} else if below {
			return fail("rename", meta.Invalid, fmt.Sprintf("directory %d into itself", in.Ino))
		}
	}
	if old != nil && old.IsDir() {
		if below, err := t.isBelow(from, old.Ino); err != nil {
			return err
		} else if below && exchange {
			return fail("rename", meta.Invalid, fmt.Sprintf("directory %d into itself", old.Ino))
		} else if below {
			return fail("rename", meta.NotEmpty, fmt.Sprintf("directory %d holds the source", old.Ino))
		}
	}
	return nil
}

// isBelow reports whether dir is the directory top or lies below it.
func (t directories) isBelow(dir *inode, top meta.Ino) (bool, error) {
	at, up := dir.Ino, dir.Parent
	for steps := uint64(0); ; steps++ {
		if at == top {
			return true, nil
		}
		if at == meta.RootIno || at == up {
			return false, nil
		}
		if steps > t.vol.inodes {
			return false, fail("rename", meta.Corrupt, fmt.Sprintf("directory %d is its own ancestor", at))
		}
		b, _, ok, err := t.get(appendInodeBase(t.scratch[:0], up))
		if err != nil {
			return false, err
		}
		var in inode
		if !ok {
			return false, fail("rename", meta.Corrupt, fmt.Sprintf("parent %d of directory %d has no record", up, at))
		}
		if err := decodeInode(b, up, &in); err != nil {
			return false, err
		}
		at, up = up, in.Parent
	}
}

// checkKinds checks which kinds of inodes may replace each other.
func checkKinds(op *meta.Rename, from, to, in, old *inode, exchange bool) error {
	if old != nil && !exchange {
		switch {
		case in.IsDir() && !old.IsDir():
			return fail("rename", meta.NotDir, op.NewName)
		case !in.IsDir() && old.IsDir():
			return fail("rename", meta.IsDir, op.NewName)
		case old.IsDir() && old.Size != 0:
			return fail("rename", meta.NotEmpty, op.NewName)
		case old.IsRegular() && in.Flags&meta.FlagUnsynced != 0:
			return fail("rename", meta.NotSynced, op.Name)
		}
	}
	if from != to {
		oldDir := old != nil && old.IsDir()
		if in.IsDir() && !oldDir && to.Nlink >= meta.MaxLinks || exchange && oldDir && !in.IsDir() && from.Nlink >= meta.MaxLinks {
			return fail("rename", meta.TooManyLinks, op.NewName)
		}
	}
	return nil
}

// ---- junctions

func (t directories) junction(op *meta.Junction, res *meta.Result) error {
	dir, err := t.parentDir("junction", op.Parent)
	if err != nil {
		return err
	}
	if err := checkName("junction", op.Name); err != nil {
		return err
	}
	e, ok, err := t.findEntry(op.Parent, op.Name)
	if err != nil {
		return err
	}
	if op.Detach {
		if !ok {
			return fail("detach", meta.NotFound, op.Name)
		}
		if e.vol == 0 || op.Volume != 0 && e.vol != op.Volume {
			return fail("detach", meta.NotAttached, op.Name)
		}
		if err := t.dropEntry(dir, op.Name, e); err != nil {
			return err
		}
		dir.Nlink--
	} else {
		switch {
		case ok || isDots(op.Name):
			return fail("attach", meta.Exists, op.Name)
		case op.Volume == 0:
			return fail("attach", meta.Invalid, "volume 0")
		case dir.Nlink >= meta.MaxLinks:
			return fail("attach", meta.TooManyLinks, op.Name)
		}
		if _, err := t.setEntry(dir, op.Name, dentry{typ: meta.TypeDir, vol: op.Volume}); err != nil {
			return err
		}
		dir.Nlink++
	}
	t.changedDir(dir, t.c.Now)
	ev := meta.Event{Kind: meta.EventAttached, Parent: dir.Ino, Name: op.Name, Volume: op.Volume}
	if op.Detach {
		ev.Kind, ev.Volume = meta.EventDetached, e.vol
	}
	t.event(&ev)
	res.Attr, res.ParentAttr = dir.Attr, dir.Attr
	return nil
}
