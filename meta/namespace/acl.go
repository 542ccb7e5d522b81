package namespace

import (
	"encoding/binary"
	"slices"

	"penstock.io/penstock/meta"
)

// POSIX.1e access control lists are stored as extended attributes in Linux's format, version
// 2, little-endian:
//
//	version:4 = 2, then per entry: tag:2 perm:2 id:4
//
// Entries come in the order of the tags below; users and groups without a name have the id
// 0xffffffff.
const (
	aclVersion = 2

	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

type aclEntry struct {
	tag, perm uint16
	id        uint32
}

type acl []aclEntry

// parseACL reads the kernel's form. An ACL without entries is nil. Errors:
// NotSupported for another version, else Invalid.
func parseACL(b []byte) (acl, error) {
	if len(b) == 0 {
		return nil, nil
	}
	if len(b) < 4 {
		return nil, fail("acl", meta.Invalid, "too short")
	}
	if binary.LittleEndian.Uint32(b) != aclVersion {
		return nil, fail("acl", meta.NotSupported, "unknown version")
	}
	b = b[4:]
	if len(b)%8 != 0 {
		return nil, fail("acl", meta.Invalid, "a part of an entry")
	}
	var a acl
	for ; len(b) > 0; b = b[8:] {
		a = append(a, aclEntry{binary.LittleEndian.Uint16(b), binary.LittleEndian.Uint16(b[2:]), binary.LittleEndian.Uint32(b[4:])})
	}
	if a == nil {
		return nil, nil
	}
	return a, a.check()
}

// check applies the rules of Linux's posix_acl_valid: an entry each for owner, group and
// others, in order, and a mask if users or groups are named.
func (a acl) check() error {
	bad := fail("acl", meta.Invalid, "entries missing or out of order")
	next, needMask := uint16(aclUserObj), false
	for _, e := range a {
		if e.perm&^7 != 0 {
			return fail("acl", meta.Invalid, "unknown permission")
		}
		switch e.tag {
		case aclUserObj:
			if next != aclUserObj {
				return bad
			}
			next = aclUser
		case aclUser:
			if next != aclUser || e.id == 1<<32-1 {
				return bad
			}
			needMask = true
		case aclGroupObj:
			if next != aclUser {
				return bad
			}
			next = aclGroup
		case aclGroup:
			if next != aclGroup || e.id == 1<<32-1 {
				return bad
			}
			needMask = true
		case aclMask:
			if next != aclGroup {
				return bad
			}
			next = aclOther
		case aclOther:
			if next != aclOther && (next != aclGroup || needMask) {
				return bad
			}
			next = 0
		default:
			return bad
		}
	}
	if next != 0 {
		return bad
	}
	return nil
}

func (a acl) bytes() []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, 4+8*len(a)), aclVersion)
	for _, e := range a {
		b = binary.LittleEndian.AppendUint16(b, e.tag)
		b = binary.LittleEndian.AppendUint16(b, e.perm)
		b = binary.LittleEndian.AppendUint32(b, e.id)
	}
	return b
}

// group returns the entry behind a mode's group bits: the mask, if the ACL has a mask, else the
// group's entry.
func (a acl) group() *aclEntry {
	var g *aclEntry
	for i := range a {
		if a[i].tag == aclMask || a[i].tag == aclGroupObj && g == nil {
			g = &a[i]
		}
	}
	return g
}

// mode returns the permission bits of the ACL, and whether the ACL is equivalent to them.
func (a acl) mode() (perm uint32, equal bool) {
	equal = true
	for _, e := range a {
		switch e.tag {
		case aclUserObj:
			perm |= uint32(e.perm) << 6
		case aclOther:
			perm |= uint32(e.perm)
		case aclGroupObj:
		default:
			equal = false
		}
	}
	return perm | uint32(a.group().perm)<<3, equal
}

// chmod makes the ACL agree with a mode.
func (a acl) chmod(mode uint32) {
	for i := range a {
		switch a[i].tag {
		case aclUserObj:
			a[i].perm = uint16(mode >> 6 & 7)
		case aclOther:
			a[i].perm = uint16(mode & 7)
		}
	}
	a.group().perm = uint16(mode >> 3 & 7)
}

// restrict limits each entry behind the mode's bits to the mode, and the mode to the ACL, as
// POSIX.1e requires for a new file. restrict returns the new permission bits.
func (a acl) restrict(mode uint32) uint32 {
	perm, _ := a.mode()
	perm &= mode
	a.chmod(perm)
	return perm & 0o777
}

// attributes are the operations on extended attributes and ACLs, within an operation on the namespace.
type attributes struct{ *tx }

func (t *tx) xattrs() attributes { return attributes{t} }

// setACL sets an ACL or, with an empty value, removes it, and returns whether anything
// changed.
func (t attributes) setACL(in *inode, op *meta.SetXattr) (changed bool, err error) {
	if in.Mode&meta.TypeMask == meta.TypeSymlink {
		return false, fail("set acl", meta.NotSupported, op.Name)
	}
	a, err := parseACL(op.Value)
	if err != nil {
		return false, err
	}
	if op.Name == xattrDefaultACL && !in.IsDir() {
		if a == nil {
			return false, nil
		}
		return false, fail("set acl", meta.AccessDenied, "a default ACL belongs to a directory")
	}
	if op.Name == xattrAccessACL && a != nil {
		perm, equal := a.mode()
		in.Mode = in.Mode&^0o777 | perm
		if op.KillSGID {
			in.Mode &^= meta.ModeSetGID
		}
		if equal {
			a = nil
		}
		changed = true
	}
	_, exists, err := t.xattr(in, op.Name)
	switch {
	case err != nil:
		return false, err
	case a == nil && exists:
		return true, t.dropXattr(in, op.Name)
	case a == nil:
		return changed, nil
	}
	if !exists {
		if err := t.checkXattrRoom(in, op.Name); err != nil {
			return false, err
		}
	}
	return true, t.putXattr(in, op.Name, a.bytes())
}

// readACL reads a stored ACL, which must be well formed.
func (t attributes) readACL(in *inode, name string) (acl, error) {
	b, ok, err := t.xattr(in, name)
	if err != nil || !ok {
		return nil, err
	}
	a, err := parseACL(slices.Clone(b))
	if err != nil || a == nil {
		return nil, meta.E("acl", meta.Corrupt, name, err)
	}
	return a, nil
}

// chmodACL keeps the access ACL in step with a changed mode.
func (t attributes) chmodACL(in *inode) error {
	a, err := t.readACL(in, xattrAccessACL)
	if err != nil || a == nil {
		return err
	}
	a.chmod(in.Mode)
	return t.putXattr(in, xattrAccessACL, a.bytes())
}

// inheritACL applies the directory's default ACL to a new inode. False: the directory has no
// default ACL, and the umask decides.
func (t attributes) inheritACL(dir, in *inode) (bool, error) {
	a, err := t.readACL(dir, xattrDefaultACL)
	if err != nil || a == nil {
		return false, err
	}
	if in.IsDir() {
		if err := t.putXattr(in, xattrDefaultACL, a.bytes()); err != nil {
			return false, err
		}
	}
	in.Mode = in.Mode&^0o777 | a.restrict(in.Mode)
	if _, equal := a.mode(); !equal {
		if err := t.putXattr(in, xattrAccessACL, a.bytes()); err != nil {
			return false, err
		}
	}
	return true, nil
}
