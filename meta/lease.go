package meta

import "time"

// LeaseMode says what a session may cache of an inode.
type LeaseMode uint8

const (
	LeaseNone LeaseMode = iota
	// LeaseShared: attributes, xattrs, entries (present and absent) and data
	// may be cached; others may hold the same.
	LeaseShared
	// LeaseExclusive (regular files): the holder alone; size, times and data
	// may be changed in memory and committed later.
	LeaseExclusive
)

// Grant is a lease sent with a reply. Replies, grants and recalls reach a session in the order
// in which the owner decided them.
type Grant struct {
	Ino  Ino
	Mode LeaseMode
}

// Recall asks a session to lower its lease on an inode to Keep. The session answers when
// nothing cached beyond Keep is visible any more and its buffered bytes are committed.
type Recall struct {
	Volume VolumeID
	Ino    Ino
	Keep   LeaseMode
	// Within bounds the time for the answer, in whole milliseconds from the arrival; zero: no
	// bound. A session that has not committed everything in time loses no byte: it answers
	// that it keeps its lease, and goes on.
	Within time.Duration
}

// Growth is a writer's answer about a file to which it appends under an exclusive lease, with
// the last extent open-ended: so much of the file is synced in the extent's chunk.
type Growth struct {
	// OK: the rest is valid. Otherwise the lease must be recalled.
	OK bool
	// Size covers every write that had returned when the question came.
	Size         uint64
	Mtime, Ctime Time
	// Change is the file's Attr.Change that the writer knew. Growth adds to these attributes
	// only.
	Change uint64
}

// LockType is the kind of an advisory lock.
type LockType uint8

const (
	LockUnlock LockType = iota
	LockRead
	LockWrite
)

// Lock is one advisory lock: a byte range of fcntl(2), or flock(2), which covers the whole
// file and is independent of fcntl locks. The owner keeps locks in memory; after a change of
// owner, sessions claim their locks again.
type Lock struct {
	Ino     Ino
	Session SessionID // filled by the owner
	Owner   uint64    // the kernel's lock owner
	PID     uint32
	Type    LockType
	Start   uint64
	End     uint64 // inclusive; 1<<63-1 means to the end of the file
	Flock   bool
}

// OrderKind is the kind of an owner's order to a chunk server.
type OrderKind uint8

const (
	OrderSeal     OrderKind = 1 + iota // freeze at Fence and report the length; with Length, cut there and seal
	OrderDelete                        // remove the chunk; idempotent
	OrderStat                          // tell state, length, synced mark
	OrderKeys                          // replace the capability keys
	OrderCopy                          // append Ranges of the sealed chunk From to Chunk, in order, and sync
	OrderList                          // the replicas of Volume's chunks after After, at most Max; see OrderResult.Chunks
	OrderPull                          // copy the sealed chunk, verified, from the first of Sources that serves it; idempotent
	OrderVerify                        // read all of the chunk and compare it with its checksums
	OrderScrub                         // begin to read everything now; the reports tell the progress
	OrderDisk                          // Disk is given up for good (Retire), or may be replaced by an empty directory (Adopt)
	OrderCompress                      // compress the sealed Chunk soon, with Compress; idempotent, nobody waits for the result
	OrderGather                        // append Pieces of sealed chunks on any servers to Chunk from Length on, in order, and sync; idempotent
)

// Bounds of OrderGather.
const (
	MaxPieces  = 4096 // of one order
	MaxSources = 4096 // source chunks of one order
)

// CopySource is a sealed chunk, as journaled, from which pieces are copied, and the servers
// that may have the chunk, the nearest first. A replica with another length, or with another
// checksum where CRC is not zero, is not used.
type CopySource struct {
	Chunk   ChunkID
	Length  uint64
	CRC     uint32
	Servers []ServerID
}

// CopyPiece is a range of an order's Chunks[Chunk], in bytes.
type CopyPiece struct {
	Chunk    uint32
	Off, Len uint64
}

// CopyRun is one range of a chunk, in bytes.
type CopyRun struct{ Off, Len uint64 }

// Order is pushed on a chunk server's standing stream.
type Order struct {
	Kind  OrderKind
	Chunk ChunkID
	Fence Fence
	// Final: with OrderSeal, the journaled Length; otherwise only freeze.
	Final  bool
	Length uint64
	Keys   []CapKey
	From   ChunkID   // OrderCopy
	Ranges []CopyRun // OrderCopy

	Volume  VolumeID     // OrderList
	After   ChunkID      // OrderList: the last chunk of the previous page, or zero
	Max     uint32       // OrderList: at most MaxListed, which zero stands for
	CRC     uint32       // OrderPull, beside Chunk, Fence, Length: the journaled checksum of the sealed chunk
	Sources []ServerInfo // OrderPull: servers that may have the chunk, the nearest first; OrderGather: all servers of Chunks, in any order
	Cap     []byte       // OrderPull, OrderGather: the right to read the sources
	Class   string       // OrderPull, OrderCopy, OrderGather: class of the target disk; empty: any
	Rate    uint64       // OrderPull, OrderVerify, OrderScrub, OrderGather: bytes a second; zero: the server's own bound
	Disk    string       // OrderDisk: which
	Adopt   bool         // OrderDisk: adopt the disk, instead of retiring it
	Evicted []string     // OrderKeys: peers whose connections are closed and refused; peer.ParseWorthless parses them
	// Compress: OrderCompress, and soon after it OrderSeal with Final and OrderPull.
	Compress Compression

	// Owner is the volume whose owner sends the order, and Term the owner's term. A server
	// that has seen a later term refuses orders with effects (Fenced). Zero: the order is not
	// about the sender's volume.
	Owner VolumeID
	Term  Term

	Chunks []CopySource // OrderGather
	Pieces []CopyPiece  // OrderGather
}

// MaxListed bounds the replicas in one answer to OrderList.
const MaxListed = 4096

// OrderResult answers an Order.
type OrderResult struct {
	Err      Kind
	Detail   string // for people
	State    ChunkState
	Length   uint64 // bytes with correct checksums
	Synced   uint64 // durable bytes
	CRC      uint32
	Fence    Fence
	Existing bool // the chunk is on this server
	Whole    bool // the replica has every byte that the server ever acknowledged
	// Chunks answers OrderList, in the server's own order. An answer with Err unset is
	// complete: the server could serve no other replica between After and the last of Chunks
	// or, without More, after After.
	Chunks []ReplicaInfo
	More   bool
}

// ReplicaInfo is a chunk server's knowledge of one of its replicas.
type ReplicaInfo struct {
	ID     ChunkID
	State  ChunkState
	Length uint64
	Synced uint64
	CRC    uint32 // when sealed
	Fence  Fence
	Disk   string // DiskInfo.ID
	// Err is Corrupt for a replica with wrong checksums. The server does not serve such a
	// replica, and keeps it until an owner orders its deletion or a new copy.
	Err Kind
	// Form is the compression of the stored replica and Stored its size on the disk in bytes
	// (0: unknown). Dense: compression would save nothing.
	Form   Compression
	Stored uint64
	Dense  bool
}

// ReplicaEventKind says how a replica or a disk changed.
type ReplicaEventKind uint8

const (
	EventCorrupt    ReplicaEventKind = 1 + iota // Chunk doesn't verify on Disk
	EventLost                                   // Chunk is no longer on this server
	EventDiskFailed                             // every replica on Disk is lost, or may be soon: see DiskInfo.State
	EventDiskBack                               // Disk serves (again)
)

// String is the kind in a few words.
func (k ReplicaEventKind) String() string {
	switch k {
	case EventCorrupt:
		return "replica corrupt"
	case EventLost:
		return "replica lost"
	case EventDiskFailed:
		return "disk failed"
	case EventDiskBack:
		return "disk serves"
	}
	return "unknown"
}

// ReplicaEvent is news in the reports of a chunk server, repeated until acknowledged. Events
// only make the owner react sooner: OrderList tells the same.
type ReplicaEvent struct {
	Seq    uint64 // counts up within a Generation
	Kind   ReplicaEventKind
	Chunk  ChunkID
	Disk   string
	Detail string // for people
}

// CapKey is a signing key of capabilities. Metadata servers sign with the key of the highest
// ID.
type CapKey struct {
	ID     uint32
	Secret []byte // 32 bytes
}
