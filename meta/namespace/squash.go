package namespace

import (
	"fmt"
	"strings"

	"penstock.io/penstock/meta"
)

// Squash restricts a caller whose root user is mapped to nobody. The caller must not create or
// change anything that gives a process on another machine another user's rights: device nodes,
// file capabilities and other attributes that only root sets, and set-id bits of users other
// than the caller. Nor may the caller give files away. The machine does not know which user of
// the caller makes a request, so the request may come from any such user. The zero value
// restricts nothing.
type Squash struct {
	On bool
	// One: the caller is exactly the user UID and the group GID; else any user but root.
	One      bool
	UID, GID uint32
}

func (q Squash) user(uid uint32) bool {
	if q.One {
		return uid == q.UID
	}
	return uid != 0
}

func (q Squash) group(gid uint32) bool {
	if q.One {
		return gid == q.GID
	}
	return gid != 0
}

// guards reports whether running a file gives a process the rights of a user other than the
// caller. When the caller changes the contents of such a file, the file loses this property.
func (q Squash) guards(in *inode) bool {
	return !in.IsDir() && (in.Mode&meta.ModeSetUID != 0 && !q.user(in.UID) || in.Mode&meta.ModeSetGID != 0 && !q.group(in.GID) || in.Flags&meta.FlagHasCaps != 0)
}

// squash returns the operation in the form that the caller may execute. Errors: NotPermitted.
func (t *tx) squash(op meta.Op) (meta.Op, error) {
	q := t.c.Squash
	switch o := op.(type) {
	case *meta.Create:
		switch typ := o.Mode & meta.TypeMask; {
		case typ == meta.TypeBlock, typ == meta.TypeChar && o.Rdev != 0: // a character device 0:0 is none
			return nil, squashed("mknod", "a device node")
		case typ != meta.TypeDir:
			c := *o
			c.Mode &^= t.othersBits(o.Parent, o.UID, o.GID)
			return &c, nil
		}
	case *meta.Tmpfile:
		c := *o
		c.Mode &^= t.othersBits(o.Parent, o.UID, o.GID)
		return &c, nil
	case *meta.SetAttr:
		return t.squashAttr(o)
	case *meta.SetXattr:
		return op, squashXattr("setxattr", o.Name)
	case *meta.RemoveXattr:
		return op, squashXattr("removexattr", o.Name)
	case *meta.Write:
		if len(o.Extents) > 0 || o.Inline || o.Size != 0 || o.CloseEnded {
			if in, err := t.inode(o.Ino); err == nil && q.guards(in) {
				c := *o
				c.Kill = true
				return &c, nil
			}
		}
	case *meta.Fallocate:
		return op, t.dropGuarded(o.Ino)
	case *meta.CopyRange:
		return op, t.dropGuarded(o.Dst)
	case *meta.ReplaceExtents:
		return op, t.dropGuarded(o.Ino)
	}
	return op, nil
}

func squashed(op, what string) error {
	return fail(op, meta.NotPermitted, what+": the client's root is squashed")
}

func squashXattr(op, name string) error {
	if strings.HasPrefix(name, "security.") || strings.HasPrefix(name, "trusted.") {
		return squashed(op, name)
	}
	return nil
}

// othersBits returns the set-id bits that a new file must not have.
func (t *tx) othersBits(parent meta.Ino, uid, gid uint32) (bits uint32) {
	if dir, err := t.load(parent); err == nil && dir.Mode&meta.ModeSetGID != 0 {
		gid = dir.GID
	}
	if !t.c.Squash.user(uid) {
		bits |= meta.ModeSetUID
	}
	if !t.c.Squash.group(gid) {
		bits |= meta.ModeSetGID
	}
	return bits
}

// squashAttr is squash for SetAttr.
func (t *tx) squashAttr(o *meta.SetAttr) (meta.Op, error) {
	q := t.c.Squash
	in, err := t.inode(o.Ino)
	if err != nil || o.ReadTime() {
		return o, nil // an error is the operation's to tell
	}
	gid := in.GID
	if o.Mask&meta.SetGID != 0 {
		gid = o.GID
	}
	gained := uint32(0)
	if o.Mask&meta.SetMode != 0 && !in.IsDir() {
		gained = o.Mode &^ in.Mode
	}
	switch {
	case o.Mask&meta.SetUID != 0 && o.UID != in.UID:
		return nil, squashed("chown", fmt.Sprintf("inode %d from user %d to %d", in.Ino, in.UID, o.UID))
	case gid != in.GID && !q.user(in.UID):
		return nil, squashed("chgrp", fmt.Sprintf("inode %d of user %d", in.Ino, in.UID))
	case gained&meta.ModeSetUID != 0 && !q.user(in.UID):
		return nil, squashed("chmod", fmt.Sprintf("set-user-id on inode %d of user %d", in.Ino, in.UID))
	case gained&meta.ModeSetGID != 0 && !q.group(gid):
		return nil, squashed("chmod", fmt.Sprintf("set-group-id on inode %d of group %d", in.Ino, gid))
	}
	if o.Mask&meta.SetSize != 0 && q.guards(in) || gid != in.GID {
		c := *o
		c.Mask |= meta.SetKillPriv
		return &c, nil
	}
	return o, nil
}

// dropGuarded removes, before a change of a file, the set-id bits and capabilities that guards
// found.
func (t *tx) dropGuarded(ino meta.Ino) error {
	in, err := t.inode(ino)
	if err != nil || !t.c.Squash.guards(in) {
		return nil // an error is the operation's to tell
	}
	return t.content().killPriv(in)
}
