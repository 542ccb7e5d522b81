package meta

// File types, as the S_IFMT bits of Linux's st_mode.
const (
	TypeMask    uint32 = 0o170000
	TypeSocket  uint32 = 0o140000
	TypeSymlink uint32 = 0o120000
	TypeRegular uint32 = 0o100000
	TypeBlock   uint32 = 0o060000
	TypeDir     uint32 = 0o040000
	TypeChar    uint32 = 0o020000
	TypeFIFO    uint32 = 0o010000
)

// Mode bits beside the nine permissions.
const (
	ModeSetUID uint32 = 0o4000
	ModeSetGID uint32 = 0o2000
	ModeSticky uint32 = 0o1000
	ModePerm   uint32 = 0o7777
)

// Time is nanoseconds since 1970-01-01 UTC; negative before it.
type Time int64

// Attr is what stat(2) tells, and a little more.
type Attr struct {
	Ino    Ino
	Mode   uint32 // type and permission bits, as st_mode
	Nlink  uint32
	UID    uint32
	GID    uint32
	Rdev   uint32 // as Linux encodes dev_t in 32 bits, for devices
	Flags  AttrFlags
	Size   uint64 // bytes; for a directory, the sum of its entries' name lengths
	Blocks uint64 // bytes of storage that extents and inline data refer to
	Atime  Time
	Mtime  Time
	Ctime  Time
	Btime  Time
	// Change grows by at least one with every change of the inode: its
	// attributes, its bytes, or, for a directory, its entries.
	Change uint64
	// Parent is the directory that holds a directory (itself for the root);
	// zero for other types.
	Parent Ino
}

// IsDir reports whether the inode is a directory.
func (a *Attr) IsDir() bool { return a.Mode&TypeMask == TypeDir }

// IsRegular reports whether the inode is a regular file.
func (a *Attr) IsRegular() bool { return a.Mode&TypeMask == TypeRegular }

// AttrFlags say what a client may leave unasked.
type AttrFlags uint32

const (
	FlagHasXattrs AttrFlags = 1 << iota // the inode has extended attributes or ACLs
	FlagHasACL                          // the inode has an access or default ACL
	FlagSealed                          // seal-on-close: contents can't change any more
	FlagInline                          // the bytes lie in the inode record
	FlagOpenEnded                       // the last extent is open-ended: size is at least Size
	FlagUnsynced                        // some committed extent is not yet synced on its replicas
	FlagHasCaps                         // security.capability is set: writes must drop it
)

// SetMask says which fields of SetAttr apply.
type SetMask uint32

const (
	SetMode SetMask = 1 << iota
	SetUID
	SetGID
	SetSize
	SetAtime
	SetMtime
	SetAtimeNow
	SetMtimeNow
	SetCtime
	SetKillPriv // drop set-user-id, set-group-id (where group-executable) and security.capability
)

// Dirent is one entry of a directory.
type Dirent struct {
	Name   string
	Ino    Ino
	Type   uint32 // S_IFMT bits
	Cookie uint64 // position after this entry: monotonic, stable while entries come and go; at least 3
	// Volume is not zero for a junction: the entry leads to that volume's root.
	Volume VolumeID
	Attr   *Attr // with ReadDir.Plus, else nil
}

// StatFS is what statfs(2) tells of a volume. Quotas of zero mean none.
type StatFS struct {
	UsedBytes  uint64
	UsedInodes uint64
	QuotaBytes uint64
	QuotaInode uint64
	DiskTotal  uint64 // bytes on the disks that the volume may use
	DiskFree   uint64
}
