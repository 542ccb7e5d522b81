package namespace

import (
	"penstock.io/penstock/meta"
)

// Touched lists the inodes that an operation would change, and the directories whose entries
// the operation would change: before the operation runs, other sessions must give up leases on
// the listed inodes. Touched looks up the names in the operation; a missing name, or an
// operation that must fail, adds nothing. The list is short and without duplicates.
func Touched(r Reader, op meta.Op) ([]meta.Ino, error) {
	t := &tx{view: view{r: r}}
	var l inoList
	switch op := op.(type) {
	case *meta.Create:
		// An existing name is opened, not changed: see Needs.
		return t.dirs().withAbsent(op.Parent, op.Name)
	case *meta.Link:
		l.add(op.Parent)
		l.add(op.Ino)
	case *meta.Unlink:
		l.add(op.Parent)
		err := t.dirs().addChild(&l, op.Parent, op.Name)
		return l, err
	case *meta.Rename:
		l.add(op.Parent)
		l.add(op.NewParent)
		if err := t.dirs().addChild(&l, op.Parent, op.Name); err != nil {
			return nil, err
		}
		err := t.dirs().addChild(&l, op.NewParent, op.NewName)
		return l, err
	case *meta.SetAttr:
		l.add(op.Ino)
	case *meta.Write:
		l.add(op.Ino)
	case *meta.Fallocate:
		l.add(op.Ino)
	case *meta.CopyRange:
		l.add(op.Dst)
	case *meta.SetXattr:
		l.add(op.Ino)
	case *meta.RemoveXattr:
		l.add(op.Ino)
	case *meta.ReplaceExtents:
		l.add(op.Ino)
	case *meta.Lead:
		l.add(op.Ino)
	case *meta.Junction:
		l.add(op.Parent)
	case *meta.SealChunk:
		if err := t.begin(); err != nil {
			return nil, err
		}
		c, err := t.chunk(op.Chunk)
		if meta.KindOf(err) == meta.NoSuchChunk {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		l.add(c.owner)
	}
	return l, nil
}

// Needs lists the inodes that an operation only reads. An exclusive lease, which lets another
// session change such an inode in memory, must be lowered to shared before the operation runs.
// For ReadDir with Plus, Needs lists only the directory; the owner checks the inodes of the
// answer against exclusive leases, and omits the attributes of inodes under such leases.
func Needs(r Reader, op meta.Op) ([]meta.Ino, error) {
	t := &tx{view: view{r: r}}
	var l inoList
	switch op := op.(type) {
	case *meta.Lookup:
		if isDots(op.Name) {
			l.add(op.Parent)
			return l, nil
		}
		err := t.dirs().addChild(&l, op.Parent, op.Name)
		return l, err
	case *meta.Create:
		err := t.dirs().addChild(&l, op.Parent, op.Name)
		return l, err
	case *meta.GetAttr:
		l.add(op.Ino)
	case *meta.ReadDir:
		l.add(op.Ino)
	case *meta.ReadLink:
		l.add(op.Ino)
	case *meta.GetXattr:
		l.add(op.Ino)
	case *meta.ListXattr:
		l.add(op.Ino)
	case *meta.Open:
		l.add(op.Ino)
	case *meta.Seek:
		l.add(op.Ino)
	case *meta.CopyRange:
		if op.At == 0 { // snapshots do not change
			l.add(op.Src)
		}
	}
	return l, nil
}

type inoList []meta.Ino

func (l *inoList) add(ino meta.Ino) {
	for _, have := range *l {
		if have == ino {
			return
		}
	}
	if ino != 0 {
		*l = append(*l, ino)
	}
}

func (t directories) addChild(l *inoList, parent meta.Ino, name string) error {
	e, ok, err := t.lookupLive(parent, name)
	if err == nil && ok {
		l.add(e.ino)
	}
	return err
}

func (t directories) withAbsent(parent meta.Ino, name string) ([]meta.Ino, error) {
	_, ok, err := t.lookupLive(parent, name)
	if err != nil || ok {
		return nil, err
	}
	return []meta.Ino{parent}, nil
}

// lookupLive finds an entry in the live generation.
func (t directories) lookupLive(parent meta.Ino, name string) (dentry, bool, error) {
	if len(name) > meta.MaxName {
		return dentry{}, false, nil
	}
	if t.gen == 0 {
		if err := t.begin(); err != nil {
			return dentry{}, false, err
		}
	}
	return t.findEntry(parent, name)
}
