package namespace

import (
	"fmt"

	"penstock.io/penstock/meta"
)

func (t *tx) setAttr(op *meta.SetAttr, res *meta.Result) error {
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	if op.ReadTime() {
		if in.AtimeOld(op.Atime) && op.Atime > in.Atime {
			touch(in)
			in.Atime = op.Atime
		}
		res.Attr = in.Attr
		return nil
	}
	now := t.c.Now
	mode, uid, gid := in.Mode, in.UID, in.GID
	if op.Mask != 0 {
		touch(in)
	}
	if op.Mask&meta.SetSize != 0 {
		size := in.Size
		if err := t.setSize(in, op.Size); err != nil {
			return err
		}
		in.Mtime = now
		if in.Size != size {
			if err := t.changing(in, res); err != nil {
				return err
			}
		}
	}
	if op.Mask&meta.SetStream != 0 {
		if err := t.c.markStream(in); err != nil {
			return err
		}
	}
	if op.Mask&meta.SetUID != 0 {
		in.UID = op.UID
	}
	if op.Mask&meta.SetGID != 0 {
		in.GID = op.GID
	}
	if op.Mask&meta.SetMode != 0 {
		in.Mode = in.Mode&meta.TypeMask | op.Mode&meta.ModePerm
		if in.Flags&meta.FlagHasACL != 0 {
			if err := t.xattrs().chmodACL(in); err != nil {
				return err
			}
		}
	}
	if op.Mask&meta.SetKillPriv != 0 {
		if err := t.content().killPriv(in); err != nil {
			return err
		}
	}
	switch {
	case op.Mask&meta.SetAtimeNow != 0:
		in.Atime = now
	case op.Mask&meta.SetAtime != 0:
		in.Atime = op.Atime
	}
	switch {
	case op.Mask&meta.SetMtimeNow != 0:
		in.Mtime = now
	case op.Mask&meta.SetMtime != 0:
		in.Mtime = op.Mtime
	}
	switch {
	case op.Mask&meta.SetCtime != 0:
		in.Ctime = op.Ctime
	case op.Mask != 0:
		in.Ctime = now
	}
	res.Attr = in.Attr
	if in.Mode != mode || in.UID != uid || in.GID != gid {
		return t.fileEvent(meta.EventAttributes, in)
	}
	return nil
}

// setSize truncates a file or extends it with a hole. Truncating to the present size drops
// preallocated space behind the end, as on ext4.
func (t *tx) setSize(in *inode, size uint64) error {
	switch {
	case in.IsDir():
		return fail("truncate", meta.IsDir, fmt.Sprintf("inode %d", in.Ino))
	case !in.IsRegular():
		return fail("truncate", meta.Invalid, fmt.Sprintf("inode %d is no regular file", in.Ino))
	case size > meta.MaxFileSize:
		return fail("truncate", meta.FileTooBig, fmt.Sprintf("size %d", size))
	case in.Flags&meta.FlagSealed != 0:
		return fail("truncate", meta.NotPermitted, fmt.Sprintf("inode %d was sealed when it was closed", in.Ino))
	}
	if err := t.c.keepStream("truncate", in); err != nil {
		return err
	}
	if err := in.checkClosed("truncate"); err != nil {
		return err
	}
	if size > in.Size {
		if err := in.checkReaped("truncate"); err != nil {
			return err
		}
	} else if err := t.extents().truncateTo(in, size); err != nil {
		return err
	}
	in.Size = size
	if size == 0 {
		in.Flags &^= meta.FlagUnsynced
	}
	return nil
}
