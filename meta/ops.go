package meta

import "time"

// Op is an operation on the namespace of one volume. The pure machine in meta/namespace
// executes mutations and answers reads from the same store. Each operation is a pointer to one
// of the structs below; Code is the operation's number on the wire.
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
	OpLeader
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
	OpLead
	OpEndLead
)

// Mutates reports whether the operation changes the namespace.
func (c OpCode) Mutates() bool { return c >= OpCreate }

// ---- reads

// Lookup finds a name in a directory; "." and ".." are valid names. Result: Attr, and Volume
// for a junction. Errors: NotFound, NotDir, NameTooLong, Stale.
type Lookup struct {
	Parent Ino
	Name   string
}

// GetAttr reads an inode's attributes. Errors: Stale.
type GetAttr struct{ Ino Ino }

// ReadDir lists the entries whose cookie is greater than Cookie, in the order of cookies, at
// most Max of them (the server's bound is 4,096), without "." and "..". With Plus, each entry
// has attributes. A new name, also a name added by a rename, gets a higher cookie than all
// names before.
//
// Result: Entries; EOF; Attr of the directory; Off, the cookie that the next new name will get
// (zero in a snapshot, where no name is ever added). A listing ends, whatever is added
// meanwhile, if the caller leaves out the entries with cookies of Off and above.
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

// Open reads the attributes of a file and the extents that overlap [Off, Off+Len), at most
// 4,096 (Result.EOF: no more extents follow), or the inline data, with the places of all their
// chunks. A Len of zero means to the end of the file.
//
// Also lists at most MaxAlso other files whose exclusive leases the session gave back for the
// barrier of a snapshot. Together with the exclusive lease on Ino, the owner grants these
// leases again, unless another session would have to give up a lease for that.
//
// With Cached the bytes will lie in a cache, so the answer must come with a lease. Otherwise
// the answer may have FlagFollowed: it is good for one read.
type Open struct {
	Ino    Ino
	Off    uint64
	Len    uint64
	Also   []Ino
	Cached bool
}

// MaxAlso bounds Open.Also. The owner ignores further entries.
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

// Create makes an inode of any type under a name: file, directory, symbolic link, fifo,
// socket, device. If the name exists, Excl is false and both are regular files, the result is
// the existing inode (Existed is true). The parent's default ACL or, without one, Umask
// determines the mode (POSIX.1e). A parent with the set-group-id bit passes on its group and,
// to directories, the bit. Errors: Exists, NotFound (the parent was removed), NotDir,
// NameTooLong, NoSpace, QuotaExceeded, TooManyLinks, ReadOnly.
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
	// Ino is zero or, in a replay, the inode number of the first reply.
	Ino Ino
	// Time is zero or, in a replay, the time of the first reply.
	Time Time
	Led  Led
}

// Tmpfile makes a regular file without a name (O_TMPFILE). The session holds the inode as an
// orphan until the file is linked or released.
type Tmpfile struct {
	Parent Ino
	Mode   uint32
	Umask  uint32
	UID    uint32
	GID    uint32
	Ino    Ino
	Time   Time
}

// Link adds a name to an inode other than a directory. Errors: Exists, NotPermitted (the inode
// is a directory), TooManyLinks, Stale.
type Link struct {
	Ino    Ino
	Parent Ino
	Name   string
}

// Unlink removes a name: with Dir the name of an empty directory, as rmdir(2), else the name
// of any other inode. When the last name goes, the inode becomes an orphan of every session in
// Holders or, if Holders is empty, of the calling session; ReleaseOrphans removes the orphan.
// Result: Attr of the inode after the change (see Nlink), ParentAttr. Errors: NotFound, IsDir,
// NotDir, NotEmpty, Busy (a junction), Invalid.
type Unlink struct {
	Parent  Ino
	Name    string
	Dir     bool
	Holders []SessionID // filled by the owner, not the client
	Led     Led
}

// Rename flags, as renameat2(2).
const (
	RenameNoReplace uint32 = 1
	RenameExchange  uint32 = 2
)

// Rename moves a name and replaces the target where POSIX allows. Result: Attr of the moved
// inode, Attr2 of the replaced or exchanged inode if any, ParentAttr, NewParentAttr. Errors:
// as renameat2(2), and NotSynced when the source has unsynced bytes and a regular file would
// be replaced (rule 11).
type Rename struct {
	Parent    Ino
	Name      string
	NewParent Ino
	NewName   string
	Flags     uint32
	Holders   []SessionID // as Unlink
	Led       Led
}

// SetAttr changes the attributes named by Mask. A smaller size drops the extents beyond the
// new end; a larger size extends the file with a hole. A change of the mode keeps the mask of
// an access ACL in step. Errors: Stale, Invalid, IsDir, FileTooBig.
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
	Led   Led
}

// ReadTime reports whether the operation only records when a file was read; clients send such
// operations some time after the read. The ctime stays, and a recent access time stays, too
// (see Attr.AtimeOld).
func (s *SetAttr) ReadTime() bool { return s.Mask == SetAtime|SetCtime }

// Write commits bytes that a client wrote: Extents replace the extents that they overlap, Data
// (inline) replaces the whole file, and the size grows to at least Size. One batch of
// operations may carry the commits of several files.
type Write struct {
	Ino     Ino
	Extents []Extent
	Inline  bool // Data is the whole content; at most InlineMax bytes
	Data    []byte
	Size    uint64 // the least size of the file afterwards
	Mtime   Time   // zero: now
	Synced  bool   // the extents' bytes are durable on every replica
	Kill    bool   // drop set-id bits and capabilities, as write(2) by the unprivileged does
	// CloseEnded ends the open-ended extent, if any, at its present length.
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

// CopyRange makes a range of Dst share the extents of Src, in the same volume. The caller has
// flushed both files. With At, the source is Src as the snapshot At shows it, which may be an
// earlier state of Dst. Result.Off is the number of bytes copied. Errors: FileTooBig, Invalid
// (the ranges overlap), NotSupported (inline bytes), NoSuchSnapshot.
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

// SetXattr sets an extended attribute. system.posix_acl_access also sets the permission bits
// of the mode; an ACL that is equivalent to a mode is not stored. With KillSGID, the caller
// may not keep the set-group-id bit. Errors: Exists, NoAttribute, Range, NoSpace,
// NotSupported, Invalid.
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

// ReleaseOrphans tells that the session no longer holds these unlinked inodes open. An orphan
// is removed when no session holds the inode.
type ReleaseOrphans struct{ Inos []Ino }

// AllocChunks records N new open chunks, held by the session. The owner chooses the servers
// before the execution. Result.Chunks has the new records.
type AllocChunks struct {
	N       uint32
	Own     bool
	Servers [][]ServerID // filled by the owner
	Fence   Fence        // filled by the owner
}

// SealChunk records a chunk as sealed at a length (rule 5). The session no longer holds the
// chunk. A chunk without references is queued for deletion.
type SealChunk struct {
	Chunk   ChunkID
	Length  uint64
	CRC     uint32
	Fence   Fence
	Servers []ServerID // the sealed replicas
	Lost    bool       // an operator accepted the loss of bytes that extents refer to
}

// DropChunk removes the record of a chunk in state ChunkDeleting after every
// replica was deleted.
type DropChunk struct{ Chunk ChunkID }

// SessionStart records a session in the journal. SessionEnd ends a session: orphans and reply
// records of the session go; its open chunks stay ChunkOpen, without a holder, until they are
// sealed.
type SessionStart struct {
	Session SessionID
	Name    string // for people: host, process, mount point
	Host    string // boot id
	PID     uint32
	Start   uint64 // the process's start time in clock ticks, to tell a reused PID
}

// SessionEnd ends a journaled session, in steps. Until Result.EOF is true, the caller runs the
// operation again with From set to Result.Off, so that a step passes over the records which
// earlier steps deleted.
type SessionEnd struct {
	Session SessionID
	From    Ino // the first orphan of this step; zero in the first step
}

// ReplaceExtents moves bytes to other extents without changing the bytes: the compare-and-swap
// of compaction. Each Old extent must still be mapped, exactly or as part of a larger extent;
// else nothing changes and the error is Again.
type ReplaceExtents struct {
	Ino Ino
	Old []Extent
	New []Extent
}

// SetReplicas changes the servers of a sealed chunk if the record still has the servers in
// Expect: the compare-and-swap of repair. A server is added only after its copy was made and
// verified. A copy is deleted only after the journal no longer has its server as a replica.
// Errors: Again (the record has other replicas), Busy (the chunk is open), NoSuchChunk (the
// chunk is gone or about to be deleted), Invalid.
type SetReplicas struct {
	Chunk   ChunkID
	Expect  []ServerID
	Servers []ServerID
	// Fence becomes the fence of the chunk if it is above the chunk's: the fence of the order
	// on which this change rests. Servers with newer copies then refuse a late order to delete
	// with an older fence.
	Fence Fence
	// Lost: an operator accepted that no replica is left. Servers is then empty for ever.
	Lost bool
}

// Junction attaches Volume under a name; with Detach, the junction is removed. Errors: Exists,
// NotFound, NotAttached.
type Junction struct {
	Parent Ino
	Name   string
	Volume VolumeID
	Detach bool
}

// SetPolicy replaces the volume's policy.
type SetPolicy struct{ Policy Policy }

// Reap removes the remains of one unlinked inode or of a truncated tail, a bounded amount in
// each call. Result.EOF: nothing remains.
type Reap struct {
	Ino Ino
	Max uint32
}

// TakeSnapshot keeps the present state of the volume under a name: one journal entry, whatever
// the size of the volume. The caller has closed all open-ended extents and flushed the buffers
// of all sessions (rule 8). Result.Off is the snapshot's Generation. If Token is not zero and
// a snapshot with the same Token exists, the request was sent twice, and the existing snapshot
// is the result. Errors: Exists, Invalid and NameTooLong (the name), Busy (a file has an
// open-ended extent), ResourceExceeded (MaxSnapshots).
type TakeSnapshot struct {
	Name  string
	Token uint64
}

// PinSnapshot protects a snapshot from deletion on behalf of a holder, for at least TTL from
// now; a pin that ends later stays as it is. By is the identity of the first caller. The
// operation also removes expired pins of the snapshot. Result.Off is the Time at which the pin
// ends. Errors: NoSuchSnapshot, Invalid and NameTooLong (holder, TTL), ResourceExceeded
// (MaxPins).
type PinSnapshot struct {
	At     Generation
	Holder string // text of 1 to 255 bytes
	By     string
	TTL    time.Duration // a nanosecond to MaxPinTTL
}

// UnpinSnapshot removes the pin of a holder. Result.Existed: the pin existed.
type UnpinSnapshot struct {
	At     Generation
	Holder string
}

// SetDigest records the digest of a snapshot's content (package meta/digest). A digest that is
// already recorded stays. Errors: NoSuchSnapshot.
type SetDigest struct {
	At     Generation
	Digest SnapshotDigest
}

// SetMirror makes the volume the target of a mirror: readers see the snapshot Shown, which
// can't be deleted while it is shown. With zero, the volume becomes an ordinary volume again.
// Errors: NoSuchSnapshot.
type SetMirror struct{ Shown Generation }

// SnapshotDigest is a recorded digest.
type SnapshotDigest struct {
	Version uint8 // of the digest's form
	Sum     [32]byte
	Made    Time
	Inodes  uint64 // covered by the digest
	Bytes   uint64 // of the files, holes included
	Read    uint64 // of Bytes, the bytes without a known earlier digest
}

// SetIndex records the place of a snapshot's index (package meta/index). The index has chunks
// of its own, which are deleted with it. A recorded index stays, unless the new index has a
// higher version; Result.Existed then tells that the recorded index stayed. Without Parts, the
// recorded index is removed, also the index of a deleted snapshot. Errors: NoSuchSnapshot,
// Invalid, and the errors of a write to the chunks.
type SetIndex struct {
	At    Generation
	Index SnapshotIndex
}

// SnapshotIndex is a recorded index.
type SnapshotIndex struct {
	Version uint8    // of the format
	Sum     [32]byte // digest of the index
	Length  uint64   // bytes of all parts
	Inodes  uint64   // in the index
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
	// ClockSkew is the largest tolerated difference between the clocks of two machines. One
	// owner's clock may set a pin and another owner's clock judge it, so a pin holds for
	// ClockSkew longer than it says.
	ClockSkew = 5 * time.Minute
)

// Pin records that a holder uses a snapshot.
type Pin struct {
	Snapshot Generation
	Holder   string
	By       string // identity of the caller that made the pin
	Made     Time
	Until    Time
}

// Over reports whether the pin has surely ended, even if the clock behind now is ClockSkew
// ahead of the clock behind Until.
func (p *Pin) Over(now Time) bool { return now > p.Until+Time(ClockSkew) }

// DropSnapshot deletes a snapshot in steps, each of at most Max superseded versions (0:
// 1,000). The caller repeats the operation until Result.EOF, which is also the answer for a
// snapshot that does not exist. After the first step nobody can read the snapshot. Deleted
// snapshots are worked off in order, so a step may work for another snapshot that was deleted
// earlier. Each step removes versions that only the snapshot saw; Result.Off is the number of
// chunk bytes that the step freed. Errors: Busy (a rollback to the snapshot is under way, or
// the snapshot is pinned: the text names the holder and the end of the pin).
type DropSnapshot struct {
	At  Generation
	Max uint32
}

// CountSnapshots corrects the count of bytes that only snapshots hold, in a volume with a quota for
// them: Add is the correction of the sum in the volume's record. The counting task of the owner
// sends it (package meta/namespace, Recounted). Errors: Again (a snapshot was deleted since the
// count began; count anew).
type CountSnapshots struct {
	Epoch uint64
	Add   int64
}

// PinClone notes that a volume was cloned from a snapshot, so that the snapshot can't be
// deleted; Drop removes the note. Both are idempotent. Errors: NoSuchSnapshot (not with Drop),
// ResourceExceeded (MaxClones).
type PinClone struct {
	At    Generation
	Clone VolumeID
	Drop  bool
}

// SweepClone is a step of making a clone independent of its origin. Steps with From set to the
// previous Result.Data remove the parts of the origin's state that the clone can't see, until
// Result.EOF. Then the caller may drop the origin's snapshot (DropSnapshot of Result.Off,
// which is zero when the snapshot is gone). Finally, with Forget, the clone becomes an
// ordinary volume; no extent may then lie in a chunk of another volume. Errors: Busy (Forget
// comes too early).
type SweepClone struct {
	From   []byte
	Max    uint32 // versions examined in one step; 0: 1,000
	Forget bool
}

// AdoptExtents replaces extents in chunks of other volumes by copies, in the generations in
// which the extents were written, so that no reader notices. Extents that were superseded
// meanwhile are skipped. Result.Off is the number of bytes replaced. Errors: CrossVolume,
// NoSuchChunk, Sealed (the chunk of a copy).
type AdoptExtents struct {
	Extents []Adopted
}

// Adopted is an extent and the place of its copy.
type Adopted struct {
	Ino  Ino
	At   Generation // generation in which the extent was written
	Old  Extent
	Copy ChunkID
	Off  uint64 // in Copy
}

// Rollback turns the live volume into the state of a snapshot, in steps: the caller repeats
// the operation with From set to Result.Data until Result.EOF. Between the steps the volume is
// in neither state, so the owner answers no reads. Snapshot.Rolling is true until the last
// step. A new owner starts from the beginning; a repeated step changes nothing. Errors:
// NoSuchSnapshot, Busy (sessions write, or hold unlinked files).
type Rollback struct {
	To   Generation
	From []byte
	Max  uint32 // changes undone in one step; 0: 256
}

// MaxClones is how many clones a snapshot may have.
const MaxClones = 1024

// MaxSnapshots is how many snapshots a volume may have.
const MaxSnapshots = 4096

// Snapshot describes a snapshot of a volume.
type Snapshot struct {
	Name     string
	At       Generation // the snapshot's value for Context.At of a query
	Created  Time
	Inodes   uint64 // of the volume, when the snapshot was taken
	Bytes    uint64
	Deleting bool
	Rolling  bool // a rollback of the volume to this snapshot is under way
	// Group is the id of the group snapshot that the snapshot belongs to, or zero.
	Group uint64
}

// ChangeKind says how a path differs between two snapshots.
type ChangeKind uint8

const (
	PathAdded ChangeKind = 1 + iota
	PathRemoved
	PathRenamed
	PathChanged
)

// Change is one difference between two states of a volume. A renamed directory is one change,
// whatever it contains; changes inside have the new path.
type Change struct {
	Kind ChangeKind
	Path string // from the volume's root, without a leading slash; the old path for PathRemoved
	From string // of PathRenamed: the old path; of PathAdded in an exact comparison: a former path of the inode
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

// Result is the answer to any operation. The comment of the operation lists the fields that
// are set. Every operation on an inode sets Attr.
type Result struct {
	Attr          Attr
	Attr2         Attr // Ino is zero without a second inode
	ParentAttr    Attr // after the change; Ino zero when not set
	NewParentAttr Attr
	Volume        VolumeID // Lookup of a junction
	Existed       bool     // Create: the name existed; Write, Fallocate, CopyRange: the owner asks for Closed
	Entries       []Dirent
	EOF           bool
	Data          []byte
	Extents       []Extent
	Places        []ChunkPlace
	Chunks        []ChunkRecord
	Off           uint64
	StatFS        StatFS
	// Grants are the leases that the owner granted with this answer. The session sets them;
	// the owner's record of the answer does not contain them.
	Grants []Grant
}
