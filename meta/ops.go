package meta

import "time"

// Op is an operation on one volume's namespace. Mutations are executed by the
// pure machine in meta/namespace; reads are answered from the same store. Each
// operation is a pointer to one of the structs below; Code names it on the
// wire.
type Op interface {
	Code() OpCode
}

// OpCode numbers operations on the wire and in reply records. Codes below
// firstMutation read; the others change the namespace and carry an OpID.
type OpCode uint8

const (
	OpLookup OpCode = 1 + iota
	OpGetAttr
	OpReadDir
	OpReadLink
	OpGetXattr
	OpListXattr
	OpOpen
	OpStatFS
	OpSeek
)

const (
	OpCreate OpCode = 64 + iota
	OpTmpfile
	OpLink
	OpUnlink
	OpRename
	OpSetAttr
	OpWrite
	OpFallocate
	OpCopyRange
	OpSetXattr
	OpRemoveXattr
	OpReleaseOrphans
	OpAllocChunks
	OpSealChunk
	OpDropChunk
	OpSessionStart
	OpSessionEnd
	OpReplaceExtents
	OpJunction
	OpSetPolicy
	OpReap
	OpTakeSnapshot
	OpDropSnapshot
	OpRollback
	OpSetReplicas
	OpPinClone
	OpSweepClone
	OpAdoptExtents
	OpPinSnapshot
	OpUnpinSnapshot
	OpSetDigest
	OpSetIndex
	OpSetEvents
	OpClosed
	OpSetMirror
	OpTellQuota
	OpCountSnapshots
)

// Mutates reports whether the operation changes the namespace.
func (c OpCode) Mutates() bool { return c >= OpCreate }

// ---- reads

// Lookup finds one name. Errors: NotFound, NotDir, NameTooLong, Stale.
// "." and ".." work, too. Result: Attr, and Volume for a junction.
type Lookup struct {
	Parent Ino
	Name   string
}

// GetAttr reads an inode's attributes. Errors: Stale.
type GetAttr struct{ Ino Ino }

// ReadDir lists entries whose cookie is greater than Cookie, in cookie order,
// at most Max of them (bounded by the server at 4,096). "." and ".." are not
// in the list. With Plus each entry carries attributes. Cookies only grow: every name
// that is added gets a higher one than all before it, also where a rename adds it.
// Result: Entries, EOF, Attr of the directory, and in Off the cookie that the next
// name will get (zero in a snapshot, to which none is added). A listing that leaves out
// what has that cookie or a higher one ends, whatever is added meanwhile.
type ReadDir struct {
	Ino    Ino
	Cookie uint64
	Max    uint32
	Plus   bool
}

// ReadLink reads a symbolic link's target into Result.Data. Errors: Invalid.
type ReadLink struct{ Ino Ino }

// GetXattr reads one extended attribute into Result.Data. Errors: NoAttribute.
// ACLs are read under their system.posix_acl_* names in the kernel's format.
type GetXattr struct {
	Ino  Ino
	Name string
}

// ListXattr lists the names, each ended by a NUL, into Result.Data.
type ListXattr struct{ Ino Ino }

// Open reads attributes and the extents that overlap [Off, Off+Len), at most
// 4,096 of them (Result.EOF tells whether that was all), or the inline data,
// with the places of all their chunks. Len zero means to the end.
//
// Also are other files that the session held exclusively until the barrier of a snapshot
// took that back, at most MaxAlso. With the exclusive lease on Ino it gets theirs again,
// unless somebody would have to give something up for that.
type Open struct {
	Ino  Ino
	Off  uint64
	Len  uint64
	Also []Ino
}

// MaxAlso bounds Open.Also; what is beyond it is not looked at.
const MaxAlso = 256

// StatFSOp reads the volume's usage. Result: StatFS.
type StatFSOp struct{}

// Seek finds the next data (Hole false) or hole at or after Off: Result.Off.
// Errors: NoSuchOffset.
type Seek struct {
	Ino  Ino
	Off  uint64
	Hole bool
}

// ---- mutations

// Create makes a new inode of any type under a name: file, directory, symbolic
// link, fifo, socket, device. If the name exists and Excl is false and both
// are regular files, the existing inode is the result (Existed true).
// The parent's default ACL, or else Umask, decides the mode (POSIX.1e);
// a parent with the set-group-id bit gives its group, to directories its bit.
// Errors: Exists, NotFound (the parent was removed), NotDir, NameTooLong,
// NoSpace, QuotaExceeded, TooManyLinks, ReadOnly.
type Create struct {
	Parent Ino
	Name   string
	Mode   uint32 // type and permissions
	Umask  uint32
	UID    uint32
	GID    uint32
	Rdev   uint32
	Target string // of a symbolic link
	Excl   bool
	// Ino is zero, or the number that an early reply already gave (replay).
	Ino Ino
	// Time is zero, or the time that an early reply already gave (replay).
	Time Time
}

// Tmpfile makes a regular file with no name, held by the session as an orphan
// until it is linked or released (O_TMPFILE).
type Tmpfile struct {
	Parent Ino
	Mode   uint32
	Umask  uint32
	UID    uint32
	GID    uint32
	Ino    Ino
	Time   Time
}

// Link adds a name to an inode that is no directory. Errors: Exists,
// NotPermitted (a directory), TooManyLinks, Stale.
type Link struct {
	Ino    Ino
	Parent Ino
	Name   string
}

// Unlink removes a name (Dir: of an empty directory, as rmdir; else of
// anything that is no directory). When the last name goes, the inode becomes
// an orphan of every session in Holders, or of the calling session if there
// are none; ReleaseOrphans removes it. Result: Attr of the inode after the
// change (Nlink tells), ParentAttr.
// Errors: NotFound, IsDir, NotDir, NotEmpty, Busy (a junction), Invalid.
type Unlink struct {
	Parent  Ino
	Name    string
	Dir     bool
	Holders []SessionID // filled by the owner, not the client
}

// Rename flags, as renameat2(2).
const (
	RenameNoReplace uint32 = 1
	RenameExchange  uint32 = 2
)

// Rename moves a name, replacing the target where POSIX allows. Result: Attr
// of the moved inode, Attr2 of the replaced (or exchanged) one if there was
// one, ParentAttr, NewParentAttr. Errors as renameat2(2), and NotSynced when
// the source has unsynced bytes and a regular file would be replaced (rule 11).
type Rename struct {
	Parent    Ino
	Name      string
	NewParent Ino
	NewName   string
	Flags     uint32
	Holders   []SessionID // as Unlink
}

// SetAttr changes the attributes that Mask names. Changing the size drops
// extents beyond it and is a truncate or extension with a hole. Mode changes
// keep an access ACL's mask in step. Errors: Stale, Invalid, IsDir, FileTooBig.
type SetAttr struct {
	Ino   Ino
	Mask  SetMask
	Mode  uint32
	UID   uint32
	GID   uint32
	Size  uint64
	Atime Time
	Mtime Time
	Ctime Time
}

// ReadTime reports that it tells only when a file was read, as clients do some time
// after it was. The ctime stays, and so does an access time that is not old: see
// Attr.AtimeOld.
func (s *SetAttr) ReadTime() bool { return s.Mask == SetAtime|SetCtime }

// Write commits what a client wrote: Extents replace what they overlap, Data
// (inline, whole file) replaces everything, the size grows to at least Size.
// Several files' commits may travel in one batch of operations.
type Write struct {
	Ino     Ino
	Extents []Extent
	Inline  bool // Data is the whole content; at most InlineMax bytes
	Data    []byte
	Size    uint64 // the file is at least this long afterwards
	Mtime   Time   // zero: now
	Synced  bool   // the extents' bytes are durable on every replica
	Kill    bool   // drop set-id bits and capabilities, as write(2) by the unprivileged does
	// CloseEnded: the open-ended extent, if any, ends at its length here.
	CloseEnded bool
	// Seal: seal-on-close; contents can't change any more.
	Seal bool
	// Lazy: only marks everything committed before as synced.
	MarkSynced bool
}

// Fallocate modes, as fallocate(2).
const (
	FallocKeepSize  uint32 = 0x01
	FallocPunchHole uint32 = 0x02
	FallocCollapse  uint32 = 0x08
	FallocZeroRange uint32 = 0x10
	FallocInsert    uint32 = 0x20
	FallocUnshare   uint32 = 0x40
)

// Fallocate preallocates, punches, zeroes, collapses or inserts a range.
type Fallocate struct {
	Ino  Ino
	Mode uint32
	Off  uint64
	Len  uint64
}

// CopyRange makes bytes of Dst share the extents of Src, within one volume;
// the caller has flushed both. Result.Off is the number of bytes copied. With At,
// Src is what that snapshot of the volume shows, and may be Dst as it was then.
// Errors: FileTooBig, Invalid (the ranges overlap), NotSupported (inline bytes),
// NoSuchSnapshot.
type CopyRange struct {
	Src    Ino
	SrcOff uint64
	Dst    Ino
	DstOff uint64
	Len    uint64
	At     Generation // zero: the live volume
}

// Flags of SetXattr, as setxattr(2).
const (
	XattrCreate  uint32 = 1
	XattrReplace uint32 = 2
)

// SetXattr sets an extended attribute. system.posix_acl_access also sets the
// mode's permission bits, and is dropped when it says no more than a mode.
// KillSGID: the caller may not keep the set-group-id bit.
// Errors: Exists, NoAttribute, Range, NoSpace, NotSupported, Invalid.
type SetXattr struct {
	Ino      Ino
	Name     string
	Value    []byte
	Flags    uint32
	KillSGID bool
}

// RemoveXattr removes an extended attribute. Errors: NoAttribute.
type RemoveXattr struct {
	Ino  Ino
	Name string
}

// ReleaseOrphans says that the session holds these unlinked inodes open no
// more; each goes away when no session holds it.
type ReleaseOrphans struct{ Inos []Ino }

// AllocChunks records N new open chunks held by the session. Servers are
// chosen by the owner before execution. Result.Chunks are their records.
type AllocChunks struct {
	N       uint32
	Own     bool
	Servers [][]ServerID // filled by the owner
	Fence   Fence        // filled by the owner
}

// SealChunk records a chunk as sealed at a length (rule 5); its session no
// longer holds it, and if nothing refers to it, it is queued for deletion.
type SealChunk struct {
	Chunk   ChunkID
	Length  uint64
	CRC     uint32
	Fence   Fence
	Servers []ServerID // the replicas that were sealed
	Lost    bool       // bytes that extents refer to are gone, as an operator accepted
}

// DropChunk removes the record of a chunk in state ChunkDeleting after every
// replica was deleted.
type DropChunk struct{ Chunk ChunkID }

// SessionStart journals a session; SessionEnd ends it: its orphans and reply
// records go, its open chunks stay ChunkOpen without a holder until sealed.
type SessionStart struct {
	Session SessionID
	Name    string // for people: host, process, mount point
	Host    string // boot id
	PID     uint32
	Start   uint64 // the process's start time in clock ticks, to tell a reused PID
}

// SessionEnd ends a journaled session, in steps: until Result.EOF it is run
// again with From set to Result.Off, so that a step need not look through what
// the steps before it deleted.
type SessionEnd struct {
	Session SessionID
	From    Ino // orphans from this number on; zero in the first step
}

// ReplaceExtents swaps where bytes lie, not what they are: compaction's
// compare-and-swap. Each Old extent must still be mapped exactly or as part of
// a larger one, else nothing changes and the error is Again.
type ReplaceExtents struct {
	Ino Ino
	Old []Extent
	New []Extent
}

// SetReplicas changes on which servers a sealed chunk lies, if that is still
// what Expect says: repair's compare-and-swap. A server is added only after its
// copy was made and verified, and a copy is deleted only after the journal says
// that it is none any more. Errors: Again (the record has other replicas), Busy
// (the chunk is open), NoSuchChunk (it is gone, or about to be deleted), Invalid.
type SetReplicas struct {
	Chunk   ChunkID
	Expect  []ServerID
	Servers []ServerID
	// Fence, if it is above the chunk's, is the chunk's from now on: that of the
	// order that the change rests on. An older order to delete, come late, is then
	// refused by who has a copy since.
	Fence Fence
	// Lost: an operator accepted that no replica is left. There are no Servers then,
	// and never will be.
	Lost bool
}

// Junction attaches Volume under a name (Detach: takes it away). Errors:
// Exists, NotFound, NotAttached.
type Junction struct {
	Parent Ino
	Name   string
	Volume VolumeID
	Detach bool
}

// SetPolicy replaces the volume's policy.
type SetPolicy struct{ Policy Policy }

// Reap removes what is left of one unlinked inode or a truncated tail, a
// bounded amount at a time. Result.EOF tells that all is gone.
type Reap struct {
	Ino Ino
	Max uint32
}

// TakeSnapshot keeps the volume as it is now under a name: one journal entry
// whatever the volume's size. The caller has closed all open-ended extents and
// flushed what sessions buffer (rule 8). Result.Off is the snapshot's
// Generation. One that is there under the same Token, if that is not zero, is
// the result, since the request came twice. Errors: Exists, Invalid and
// NameTooLong (the name), Busy (a file has an open-ended extent),
// ResourceExceeded (MaxSnapshots).
type TakeSnapshot struct {
	Name  string
	Token uint64
}

// PinSnapshot keeps a snapshot from being deleted for a holder, for TTL from now
// at least: a pin that lasts longer already stays as it is. By is who asked
// first. What pins of the snapshot have run out go. Result.Off is the Time at
// which the pin ends. Errors: NoSuchSnapshot, Invalid and NameTooLong (holder,
// TTL), ResourceExceeded (MaxPins).
type PinSnapshot struct {
	At     Generation
	Holder string // text of 1 to 255 bytes
	By     string
	TTL    time.Duration // a nanosecond to MaxPinTTL
}

// UnpinSnapshot gives a holder's pin up; Result.Existed tells that there was one.
type UnpinSnapshot struct {
	At     Generation
	Holder string
}

// SetDigest records what a snapshot's content is called (package meta/digest).
// One that is recorded stays. Errors: NoSuchSnapshot.
type SetDigest struct {
	At     Generation
	Digest SnapshotDigest
}

// SetMirror makes the volume the target of a mirror, whose readers are shown the
// snapshot Shown, or shows them another one; with zero it is a volume like others
// again. The snapshot that is shown can't be deleted. Errors: NoSuchSnapshot.
type SetMirror struct{ Shown Generation }

// SnapshotDigest is a recorded digest.
type SnapshotDigest struct {
	Version uint8 // of the digest's form
	Sum     [32]byte
	Made    Time
	Inodes  uint64 // that it is over
	Bytes   uint64 // in their files, holes included
	Read    uint64 // of these, bytes that were not known from an earlier digest
}

// SetIndex records where the index of a snapshot lies (package meta/index), in
// chunks of its own that it counts in full; they go with it. One that is recorded
// stays, unless the new one has a higher version; Result.Existed tells that it
// stayed. Without parts whatever is recorded goes, also that of a snapshot which
// is not there any more. Errors: NoSuchSnapshot, Invalid, and those of a write
// to the chunks.
type SetIndex struct {
	At    Generation
	Index SnapshotIndex
}

// SnapshotIndex is a recorded index.
type SnapshotIndex struct {
	Version uint8    // of its form
	Sum     [32]byte // its digest
	Length  uint64   // bytes, those of its parts
	Inodes  uint64   // that it tells of
	Made    Time
	Parts   []IndexPart // in order; at most MaxIndexParts
}

// MaxIndexParts bounds the parts of an index.
const MaxIndexParts = 1024

// IndexPart is the first Length bytes of a chunk.
type IndexPart struct {
	Chunk  ChunkID
	Length uint64
}

// Bounds of pins.
const (
	MaxPins   = 1024 // of one snapshot
	MaxPinTTL = 366 * 24 * time.Hour
	// ClockSkew is how far the clocks of two machines may be apart. A pin may be
	// made by one owner's clock and judged by another's, so it holds for that much
	// longer.
	ClockSkew = 5 * time.Minute
)

// Pin is a holder's word that a snapshot is in use.
type Pin struct {
	Snapshot Generation
	Holder   string
	By       string // the identity that made it
	Made     Time
	Until    Time
}

// Over tells whether the pin surely ended, on a clock that may be ClockSkew away
// from the one that it was made by.
func (p *Pin) Over(now Time) bool { return now > p.Until+Time(ClockSkew) }

// DropSnapshot deletes a snapshot in steps, each of at most Max superseded
// versions (0: 1,000): it is run again until Result.EOF, which it also gives for
// one that is not there. From the first step on nobody can read the snapshot.
// One is worked off at a time: a step may work for one that was deleted before.
// What the snapshot alone saw goes; Result.Off is the bytes of chunks that this
// step freed. Errors: Busy (the volume is being rolled back to it, or somebody
// pinned it: the text says who, and until when).
type DropSnapshot struct {
	At  Generation
	Max uint32
}

// CountSnapshots says to a volume whose quota has what snapshots alone hold in it
// what that is: Add to what was counted since a count of all began. Whoever counts
// makes it (package meta/namespace, Recounted). Errors: Again (a snapshot was deleted
// since, so it is to be counted anew).
type CountSnapshots struct {
	Epoch uint64
	Add   int64
}

// PinClone notes that a volume was cloned from a snapshot, which then can't be
// deleted; Drop takes the note back. Neither is an error when it was done
// before. Errors: NoSuchSnapshot (not with Drop), ResourceExceeded (MaxClones).
type PinClone struct {
	At    Generation
	Clone VolumeID
	Drop  bool
}

// SweepClone is a step of making a clone independent: what it can't see of its
// origin's state is removed, until Result.EOF; then what it sees of the
// snapshot that it began with, and changed since, may be dropped (DropSnapshot
// of Result.Off, which is zero when that is gone), and at last, with Forget, it
// is a volume like others: no extent may lie in another volume's chunk then.
// The next step's From is Result.Data. Errors: Busy (Forget comes too early).
type SweepClone struct {
	From   []byte
	Max    uint32 // versions looked at in one step; 0: 1,000
	Forget bool
}

// AdoptExtents puts copies in the place of extents in other volumes' chunks,
// in the generations in which they were written: nobody can tell. What was
// superseded meanwhile is passed over. Result.Off is the bytes that were taken
// over. Errors: CrossVolume, NoSuchChunk, Sealed (the place of a copy).
type AdoptExtents struct {
	Extents []Adopted
}

// Adopted is an extent, and where its bytes were copied to.
type Adopted struct {
	Ino  Ino
	At   Generation // in which it was written
	Old  Extent
	Copy ChunkID
	Off  uint64 // in Copy
}

// Rollback makes the live volume what a snapshot is, in steps: until Result.EOF
// it is run again with From set to Result.Data. In between the volume is neither
// one nor the other: the owner lets nobody look, and a new owner begins anew (a
// step that has nothing to do changes nothing): Snapshot.Rolling tells it until
// the last step. Errors: NoSuchSnapshot, Busy
// (sessions write, or hold unlinked files).
type Rollback struct {
	To   Generation
	From []byte
	Max  uint32 // notes of changes in one step; 0: 256
}

// MaxClones is how many clones a snapshot may have.
const MaxClones = 1024

// MaxSnapshots is how many snapshots a volume may have.
const MaxSnapshots = 4096

// Snapshot describes one.
type Snapshot struct {
	Name     string
	At       Generation // what Query's Context.At takes
	Created  Time
	Inodes   uint64 // the volume's counters when it was taken
	Bytes    uint64
	Deleting bool
	Rolling  bool // the volume is being rolled back to it
	// Group is that of the group that it was taken for, zero if for none.
	Group uint64
}

// ChangeKind says what became of a path between two snapshots.
type ChangeKind uint8

const (
	PathAdded ChangeKind = 1 + iota
	PathRemoved
	PathRenamed
	PathChanged
)

// Change is one difference between two states of a volume. A renamed directory
// is one change, whatever lies in it; what changed inside is told under its new
// path.
type Change struct {
	Kind ChangeKind
	Path string // from the volume's root, without a slash in front; of PathRemoved, the old one
	From string // of PathRenamed: the old path; of PathAdded in an exact comparison: one that the inode had
	Ino  Ino    // zero for a junction
	Type uint32 // TypeDir, TypeRegular, ...
	// Content: of PathChanged, the bytes or the target may differ; otherwise only
	// mode, owner or extended attributes do, or in an exact comparison times.
	Content bool
}

func (*Lookup) Code() OpCode         { return OpLookup }
func (*GetAttr) Code() OpCode        { return OpGetAttr }
func (*ReadDir) Code() OpCode        { return OpReadDir }
func (*ReadLink) Code() OpCode       { return OpReadLink }
func (*GetXattr) Code() OpCode       { return OpGetXattr }
func (*ListXattr) Code() OpCode      { return OpListXattr }
func (*Open) Code() OpCode           { return OpOpen }
func (*StatFSOp) Code() OpCode       { return OpStatFS }
func (*Seek) Code() OpCode           { return OpSeek }
func (*Create) Code() OpCode         { return OpCreate }
func (*Tmpfile) Code() OpCode        { return OpTmpfile }
func (*Link) Code() OpCode           { return OpLink }
func (*Unlink) Code() OpCode         { return OpUnlink }
func (*Rename) Code() OpCode         { return OpRename }
func (*SetAttr) Code() OpCode        { return OpSetAttr }
func (*Write) Code() OpCode          { return OpWrite }
func (*Fallocate) Code() OpCode      { return OpFallocate }
func (*CopyRange) Code() OpCode      { return OpCopyRange }
func (*SetXattr) Code() OpCode       { return OpSetXattr }
func (*RemoveXattr) Code() OpCode    { return OpRemoveXattr }
func (*ReleaseOrphans) Code() OpCode { return OpReleaseOrphans }
func (*AllocChunks) Code() OpCode    { return OpAllocChunks }
func (*SealChunk) Code() OpCode      { return OpSealChunk }
func (*DropChunk) Code() OpCode      { return OpDropChunk }
func (*SessionStart) Code() OpCode   { return OpSessionStart }
func (*SessionEnd) Code() OpCode     { return OpSessionEnd }
func (*ReplaceExtents) Code() OpCode { return OpReplaceExtents }
func (*Junction) Code() OpCode       { return OpJunction }
func (*SetPolicy) Code() OpCode      { return OpSetPolicy }
func (*Reap) Code() OpCode           { return OpReap }
func (*TakeSnapshot) Code() OpCode   { return OpTakeSnapshot }
func (*DropSnapshot) Code() OpCode   { return OpDropSnapshot }
func (*CountSnapshots) Code() OpCode { return OpCountSnapshots }
func (*Rollback) Code() OpCode       { return OpRollback }
func (*PinSnapshot) Code() OpCode    { return OpPinSnapshot }
func (*UnpinSnapshot) Code() OpCode  { return OpUnpinSnapshot }
func (*SetDigest) Code() OpCode      { return OpSetDigest }
func (*SetIndex) Code() OpCode       { return OpSetIndex }
func (*SetMirror) Code() OpCode      { return OpSetMirror }
func (*SetReplicas) Code() OpCode    { return OpSetReplicas }
func (*PinClone) Code() OpCode       { return OpPinClone }
func (*SweepClone) Code() OpCode     { return OpSweepClone }
func (*AdoptExtents) Code() OpCode   { return OpAdoptExtents }

// Result is the answer to any operation; which fields are set is said at the
// operation. Every result of an operation that names an inode has Attr.
type Result struct {
	Attr          Attr
	Attr2         Attr // Ino is zero when there is no second inode
	ParentAttr    Attr // after the change; Ino zero when not set
	NewParentAttr Attr
	Volume        VolumeID // Lookup of a junction
	Existed       bool     // Create found the name; Write, Fallocate, CopyRange: tell with Closed
	Entries       []Dirent
	EOF           bool
	Data          []byte
	Extents       []Extent
	Places        []ChunkPlace
	Chunks        []ChunkRecord
	Off           uint64
	StatFS        StatFS
	// Grants are the leases that came with this answer. The session sets them;
	// they are no part of the answer's record.
	Grants []Grant
}
