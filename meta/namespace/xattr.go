package namespace

import (
	"bytes"
	"fmt"
	"strings"

	"penstock.io/penstock/meta"
)

const (
	xattrCaps       = "security.capability"
	xattrAccessACL  = "system.posix_acl_access"
	xattrDefaultACL = "system.posix_acl_default"
)

func isACL(name string) bool { return name == xattrAccessACL || name == xattrDefaultACL }

// checkXattrName holds the kernel's and ext4's rules about names.
func checkXattrName(in *inode, name string, change bool) error {
	switch {
	case name == "" || len(name) > meta.MaxName:
		return fail("xattr", meta.Range, fmt.Sprintf("a name of %d bytes", len(name)))
	case strings.IndexByte(name, 0) >= 0:
		return fail("xattr", meta.Invalid, name)
	case isACL(name):
		return nil
	}
	for _, space := range [...]string{"user.", "trusted.", "security."} {
		if rest, ok := strings.CutPrefix(name, space); ok {
			switch {
			case rest == "":
				return fail("xattr", meta.Invalid, name)
			case space == "user." && !in.IsRegular() && !in.IsDir() && change:
				return fail("xattr", meta.NotPermitted, name)
			case space == "user." && !in.IsRegular() && !in.IsDir():
				return fail("xattr", meta.NoAttribute, name)
			}
			return nil
		}
	}
	return fail("xattr", meta.NotSupported, name)
}

// xattr reads an attribute's value; the value may alias the store.
func (t attributes) xattr(in *inode, name string) (val []byte, ok bool, err error) {
	if in.Flags&meta.FlagHasXattrs == 0 {
		return nil, false, nil
	}
	b, _, ok, err := t.get(appendXattrBase(t.scratch[:0], in.Ino, name))
	if err != nil || !ok {
		return nil, false, err
	}
	val, err = decodeXattr(b)
	return val, err == nil, err
}

func (t attributes) getXattr(op *meta.GetXattr, res *meta.Result) error {
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	if err := checkXattrName(in, op.Name, false); err != nil {
		return err
	}
	v, ok, err := t.xattr(in, op.Name)
	if err != nil {
		return err
	}
	if !ok {
		return fail("getxattr", meta.NoAttribute, op.Name)
	}
	res.Attr = in.Attr
	res.Data = append([]byte{}, v...)
	return nil
}

// eachXattr visits an inode's attributes in the order of names.
func (t attributes) eachXattr(in *inode, fn func(name string, val []byte) bool) error {
	if in.Flags&meta.FlagHasXattrs == 0 {
		return nil
	}
	lo := appendXattrBase(nil, in.Ino, "")[:9]
	return t.scan(lo, after(lo), func(base, val []byte, _ uint32) (bool, error) {
		v, err := decodeXattr(val)
		if err == nil && (len(base) < 11 || base[len(base)-1] != 0) {
			err = fail("xattr", meta.Corrupt, fmt.Sprintf("key %x", base))
		}
		if err != nil {
			return false, err
		}
		return fn(string(base[9:len(base)-1]), v), nil
	})
}

func (t attributes) listXattr(op *meta.ListXattr, res *meta.Result) error {
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	res.Attr = in.Attr
	return t.eachXattr(in, func(name string, _ []byte) bool {
		res.Data = append(append(res.Data, name...), 0)
		return true
	})
}

func (t attributes) setXattr(op *meta.SetXattr, res *meta.Result) error {
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	if err := checkXattrName(in, op.Name, true); err != nil {
		return err
	}
	if op.Flags&^(meta.XattrCreate|meta.XattrReplace) != 0 {
		return fail("setxattr", meta.Invalid, fmt.Sprintf("flags %#x", op.Flags))
	}
	if len(op.Value) > meta.MaxXattrVal {
		return fail("setxattr", meta.TooBig, fmt.Sprintf("a value of %d bytes", len(op.Value)))
	}
	var changed bool
	if isACL(op.Name) {
		changed, err = t.setACL(in, op)
	} else {
		changed, err = t.setPlainXattr(in, op)
	}
	if err != nil {
		return err
	}
	if changed {
		touch(in)
		in.Ctime = t.c.Now
		if err := t.fileEvent(meta.EventAttributes, in); err != nil {
			return err
		}
	}
	res.Attr = in.Attr
	return nil
}

// setPlainXattr sets an attribute and returns whether its value changed: setting the present
// value leaves the inode's times unchanged, as on ext4.
func (t attributes) setPlainXattr(in *inode, op *meta.SetXattr) (changed bool, err error) {
	old, exists, err := t.xattr(in, op.Name)
	switch {
	case err != nil:
		return false, err
	case exists && op.Flags&meta.XattrCreate != 0:
		return false, fail("setxattr", meta.Exists, op.Name)
	case !exists && op.Flags&meta.XattrReplace != 0:
		return false, fail("setxattr", meta.NoAttribute, op.Name)
	case exists && bytes.Equal(old, op.Value):
		return false, nil
	}
	if !exists {
		if err := t.checkXattrRoom(in, op.Name); err != nil {
			return false, err
		}
	}
	return true, t.putXattr(in, op.Name, op.Value)
}

// checkXattrRoom keeps the list of names within the bound of listxattr(2).
func (t attributes) checkXattrRoom(in *inode, name string) error {
	n := len(name) + 1
	err := t.eachXattr(in, func(name string, _ []byte) bool {
		n += len(name) + 1
		return true
	})
	if err == nil && n > meta.MaxXattrs {
		err = fail("setxattr", meta.NoSpace, fmt.Sprintf("names of %d bytes", n))
	}
	return err
}

func (t attributes) putXattr(in *inode, name string, val []byte) error {
	s := t.mark()
	t.buf = appendXattrBase(t.buf, in.Ino, name)
	s, err := t.renew(s)
	if err != nil {
		return err
	}
	t.buf = putGen(t.buf, t.gen)
	v := len(t.buf)
	t.buf = append(append(t.buf, xattrV1), val...)
	t.putAt(s, v)
	in.Flags |= meta.FlagHasXattrs
	switch {
	case isACL(name):
		in.Flags |= meta.FlagHasACL
	case name == xattrCaps:
		in.Flags |= meta.FlagHasCaps
	}
	return nil
}

func (t attributes) removeXattr(op *meta.RemoveXattr, res *meta.Result) error {
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	if err := checkXattrName(in, op.Name, true); err != nil {
		return err
	}
	_, ok, err := t.xattr(in, op.Name)
	if err != nil {
		return err
	}
	if ok {
		if err := t.dropXattr(in, op.Name); err != nil {
			return err
		}
		touch(in)
		in.Ctime = t.c.Now
		if err := t.fileEvent(meta.EventAttributes, in); err != nil {
			return err
		}
	} else if !isACL(op.Name) { // removing an absent ACL succeeds, as on ext4
		return fail("removexattr", meta.NoAttribute, op.Name)
	}
	res.Attr = in.Attr
	return nil
}

// dropXattr removes an existing attribute, and updates the inode's flags.
func (t attributes) dropXattr(in *inode, name string) error {
	s := t.mark()
	t.buf = appendXattrBase(t.buf, in.Ino, name)
	if err := t.drop(s); err != nil {
		return err
	}
	var left meta.AttrFlags
	err := t.eachXattr(in, func(other string, _ []byte) bool {
		switch {
		case other == name:
			return true
		case isACL(other):
			left |= meta.FlagHasACL
		case other == xattrCaps:
			left |= meta.FlagHasCaps
		}
		left |= meta.FlagHasXattrs
		return true
	})
	in.Flags = in.Flags&^(meta.FlagHasXattrs|meta.FlagHasACL|meta.FlagHasCaps) | left
	return err
}

// dropXattrs removes all attributes of an inode that is being removed, and returns the number
// of removed attributes.
func (t attributes) dropXattrs(in *inode) (int, error) {
	var names []string
	err := t.eachXattr(in, func(name string, _ []byte) bool {
		names = append(names, name)
		return true
	})
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		s := t.mark()
		t.buf = appendXattrBase(t.buf, in.Ino, name)
		if err := t.drop(s); err != nil {
			return 0, err
		}
	}
	in.Flags &^= meta.FlagHasXattrs | meta.FlagHasACL | meta.FlagHasCaps
	return len(names), nil
}
