package stream

import (
	"encoding/binary"
	"slices"

	"penstock.io/penstock/meta"
)

// User is what a gateway knows of a user beside the name: the ids by which modes and ACLs count.
type User struct {
	UID  uint32
	GIDs []uint32 // the first is the group of new files
}

// Permission has the permission bits of a directory, as in a mode.
type Permission uint16

// The permissions. Consuming a stream takes MayRead on the stream's directory, producing
// MayWrite.
const (
	MaySearch Permission = 1 << iota
	MayWrite
	MayRead
)

// text says for people what a permission is needed for.
func (w Permission) text() string {
	switch w {
	case MaySearch:
		return "search"
	case MayWrite:
		return "write"
	case MayRead:
		return "read"
	}
	return "write and search"
}

// Kinds of entries of an ACL in Linux's format: version:4 = 2, then per entry tag:2 perm:2 id:4,
// in the order of the tags.
const (
	aclXattr    = "system.posix_acl_access"
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

// member reports that the user is in a group.
func (u *User) member(gid uint32) bool { return slices.Contains(u.GIDs, gid) }

// permits reports whether a directory with some attributes and an ACL (empty: none) permits all of
// want to the user, by the rule of Linux (generic_permission). User 0 is permitted everything.
func (u *User) permits(a *meta.Attr, acl []byte, want Permission) bool {
	mode := Permission(a.Mode)
	has := func(bits Permission) bool { return bits&want == want }
	switch {
	case u.UID == 0:
		return true
	case u.UID == a.UID:
		return has(mode >> 6)
	case len(acl) > 0 && mode&0o070 != 0: // Linux asks no ACL whose mask is empty
		return u.permitsACL(a.GID, acl, want)
	case u.member(a.GID):
		return has(mode >> 3)
	}
	return has(mode)
}

// permitsACL applies an ACL to a user other than the owner. A malformed ACL permits nothing.
func (u *User) permitsACL(group uint32, acl []byte, want Permission) bool {
	if len(acl) < 4 || len(acl)%8 != 4 {
		return false
	}
	mask := Permission(0o7)
	var chosen Permission // the bits of the entry that decides
	found, masked, decided := false, true, false
	for b := acl[4:]; len(b) > 0; b = b[8:] {
		tag, bits, id := binary.LittleEndian.Uint16(b), Permission(binary.LittleEndian.Uint16(b[2:])), binary.LittleEndian.Uint32(b[4:])
		switch {
		case tag == aclMask:
			mask = bits
		case decided:
		case tag == aclUser && id == u.UID:
			chosen, decided = bits, true
		case tag == aclGroupObj && u.member(group), tag == aclGroup && u.member(id):
			if found = true; bits&want == want {
				chosen, decided = bits, true
			}
		case tag == aclOther && !found:
			chosen, decided, masked = bits, true, false
		}
	}
	if masked {
		chosen &= mask
	}
	return decided && chosen&want == want
}
