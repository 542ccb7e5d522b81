package stream

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// acl returns the ACL of a directory.
func (l *Login) acl(ctx context.Context, v *penstock.Volume, a *meta.Attr) ([]byte, error) {
	if a.Flags&meta.FlagHasACL == 0 {
		return nil, nil
	}
	id := directoryID{v.ID(), a.Ino}
	l.mu.Lock()
	known, ok := l.acls[id]
	l.mu.Unlock()
	if ok && known.change == a.Change {
		return known.acl, nil
	}
	b, err := v.GetXattr(ctx, a.Ino, aclXattr)
	if errors.Is(err, meta.NoAttribute) {
		return nil, nil // a directory with a default ACL only
	}
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.acls == nil || len(l.acls) >= maxACLs {
		l.acls = map[directoryID]knownACL{}
	}
	l.acls[id] = knownACL{a.Change, b}
	return b, nil
}

// check refuses what a directory does not permit to a user. Errors: AccessDenied.
func (l *Login) check(ctx context.Context, u *User, v *penstock.Volume, a *meta.Attr, name string, want Permission) error {
	acl, err := l.acl(ctx, v, a)
	if err != nil {
		return err
	}
	if !u.permits(a, acl, want) && !l.users.Unsafe.NoRights {
		return meta.E("check permissions", meta.AccessDenied, name, fmt.Errorf("the mode and ACL of the directory do not permit user %s (uid %d) to %s", l.Name, u.UID, want.text()))
	}
	return nil
}

// tree returns a tree whose paths go only through directories that the user may search.
func (l *Login) tree(t *penstock.Tree, u *User) *penstock.Tree {
	return t.As(u.UID, u.GIDs[0], func(ctx context.Context, v *penstock.Volume, dir *meta.Attr) error {
		return l.check(ctx, u, v, dir, "a directory on the way", MaySearch)
	})
}

// stat finds a directory as the user, and checks the user's permissions on the directory. want 0
// checks only the way. Errors: AccessDenied, and those of Tree.Stat.
func (l *Login) stat(ctx context.Context, t *penstock.Tree, p string, want Permission) (penstock.Entry, error) {
	if l == nil {
		return t.Stat(ctx, p)
	}
	u, err := l.User()
	if err != nil {
		return penstock.Entry{}, err
	}
	e, err := l.tree(t, &u).Stat(ctx, p)
	if err != nil || want == 0 || !e.Attr.IsDir() {
		return e, err
	}
	v, err := t.VolumeOf(ctx, &e)
	if err != nil {
		return e, err
	}
	return e, l.check(ctx, &u, v, &e.Attr, p, want)
}

// reach checks the user's permissions on a directory, and that the user may search the directories
// above in the volume. Errors: AccessDenied, NotDir, and those of Volume.GetAttr.
func (l *Login) reach(ctx context.Context, v *penstock.Volume, ino meta.Ino, want Permission) error {
	e, err := v.GetAttr(ctx, ino)
	if err != nil {
		return err
	}
	name := fmt.Sprintf("inode %d of volume %s", ino, v.Name())
	switch {
	case !e.Attr.IsDir():
		return meta.E("check permissions", meta.NotDir, name, nil)
	case e.Attr.Nlink == 0:
		return meta.E("check permissions", meta.NotFound, name, errors.New("the directory was removed"))
	case l == nil:
		return nil
	}
	u, err := l.in(ctx, v, want)
	if err == nil {
		err = l.check(ctx, &u, v, &e.Attr, name, want)
	}
	for at := ino; err == nil && at != meta.RootIno; {
		at = e.Attr.Parent
		if e, err = v.GetAttr(ctx, at); err == nil {
			err = l.check(ctx, &u, v, &e.Attr, "a directory on the way", MaySearch)
		}
	}
	return err
}

// creator returns the tree in which a user may make a stream at a path: the user needs write and
// search on the directory in which the first missing name of the path is made. Errors:
// AccessDenied.
func (l *Login) creator(ctx context.Context, t *penstock.Tree, p string) (*penstock.Tree, error) {
	if l == nil {
		return t, nil
	}
	u, err := l.User()
	if err != nil {
		return nil, err
	}
	at := p
	for {
		_, err = l.stat(ctx, t, at, MayWrite|MaySearch)
		if !errors.Is(err, meta.NotFound) || at == "/" {
			return l.tree(t, &u), err
		}
		at = path.Dir(at)
	}
}

// mayDelete checks what rm -r needs: write and search on the directory, and on the directory
// above, where a sticky bit leaves the right to the owners. Errors: AccessDenied.
func (l *Login) mayDelete(ctx context.Context, t *penstock.Tree, p string) error {
	if l == nil {
		return nil
	}
	const want = MayWrite | MaySearch
	e, err := l.stat(ctx, t, p, want)
	if err != nil {
		return err
	}
	above, err := l.stat(ctx, t, path.Dir(strings.TrimSuffix(p, "/")), want)
	if err != nil {
		return err
	}
	u, err := l.User()
	if err == nil && above.Attr.Mode&0o1000 != 0 && u.UID != 0 && u.UID != e.Attr.UID && u.UID != above.Attr.UID {
		err = meta.E("check permissions", meta.AccessDenied, p, errors.New("the directory above has the sticky bit: only the owner of the stream may delete it"))
	}
	return err
}
