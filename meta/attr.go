package meta

import "time"

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

// Time is nanoseconds since 1970-01-01 UTC modulo 2^64. A Time stands for the congruent moment
// between FirstSecond (1901-12-13) and LastSecond (2446-05-10), the range of ext4: times up to
// 2262 are the plain count, and later times wrap to numbers below those of 1901. Unix
// converts.
type Time int64

// FirstSecond and LastSecond bound the range of Time, in seconds since 1970-01-01 UTC.
const (
	FirstSecond = -1 << 31
	LastSecond  = 1<<34 - 1<<31 - 1
)

// TimeOf makes a Time. A moment out of range becomes the nearest moment in range, as
// utimensat(2) says for file systems. nsec must be below 10^9.
func TimeOf(sec int64, nsec uint32) Time {
	switch {
	case sec < FirstSecond:
		sec, nsec = FirstSecond, 0
	case sec > LastSecond:
		sec, nsec = LastSecond, 0
	}
	return Time(uint64(sec)*1e9 + uint64(nsec))
}

// Unix splits a time into seconds and nanoseconds, 0 to 999,999,999.
func (t Time) Unix() (sec int64, nsec uint32) {
	since := uint64(t) + 1e9<<31 // nanoseconds after FirstSecond
	return int64(since/1e9) + FirstSecond, uint32(since % 1e9)
}

// Attr has the attributes of stat(2), and a few of Penstock's.
type Attr struct {
	Ino    Ino
	Mode   uint32 // type and permission bits, as st_mode
	Nlink  uint32
	UID    uint32
	GID    uint32
	Rdev   uint32 // as Linux encodes dev_t in 32 bits, for devices
	Flags  AttrFlags
	Size   uint64 // bytes; for a directory, the sum of its entries' name lengths
	Blocks uint64 // bytes of storage behind the extents and inline data
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

// atimeAge is the age at which a read renews the access time of an unchanged inode.
const atimeAge = Time(24 * time.Hour)

// AtimeOld reports whether a read at the time now renews the access time. The rule is that of
// Linux's mount option relatime.
func (a *Attr) AtimeOld(now Time) bool {
	return a.Atime <= a.Mtime || a.Atime <= a.Ctime || now-a.Atime >= atimeAge
}

// AttrFlags tell a client which requests it may omit.
type AttrFlags uint32

const (
	FlagHasXattrs AttrFlags = 1 << iota // the inode has extended attributes or ACLs
	FlagHasACL                          // the inode has an access or default ACL
	FlagSealed                          // seal-on-close: contents can't change any more
	FlagInline                          // the bytes lie in the inode record
	FlagOpenEnded                       // the last extent is open-ended: size is at least Size
	FlagUnsynced                        // some committed extent is not yet synced on its replicas
	FlagHasCaps                         // security.capability is set: writes must drop it
	FlagFollowed                        // in answers only: another session goes on appending; no lease comes with the answer
	// FlagStream: a stream's file or directory. Only sessions that serve streams change the
	// contents of the file, and add names to the directory. What is made in the directory has
	// the flag, too. The flag is never removed.
	FlagStream
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
	SetStream   // set FlagStream of a regular file or a directory; only from sessions that serve streams
)

// Dirent is one entry of a directory.
type Dirent struct {
	Name   string
	Ino    Ino
	Type   uint32 // S_IFMT bits
	Cookie uint64 // position after this entry: monotonic, stable while entries come and go; at least 3
	// Volume is the target of a junction, whose entry leads to the root of that volume; else
	// zero.
	Volume VolumeID
	Attr   *Attr // with ReadDir.Plus, else nil
}

// StatFS is the answer to statfs(2) for a volume. A quota of zero means none.
type StatFS struct {
	UsedBytes  uint64
	UsedInodes uint64
	QuotaBytes uint64
	QuotaInode uint64
	DiskTotal  uint64 // bytes on the disks of the volume's policy
	DiskFree   uint64
}
