package meta

import "time"

// LeaseMode is what a session may keep in memory about an inode.
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

// Grant is a lease given with a reply. Replies, grants and recalls of one
// session arrive in the order in which the owner decided them.
type Grant struct {
	Ino  Ino
	Mode LeaseMode
}

// Recall asks a session to lower its lease on an inode to Keep. The session
// answers when nothing it cached beyond that can be seen any more and what it
// buffered is committed.
type Recall struct {
	Volume VolumeID
	Ino    Ino
	Keep   LeaseMode
	// Within, unless zero, is for how long from its arrival the session is asked, in
	// whole milliseconds: who has not committed everything by then gives no byte up,
	// answers that it holds its lease still, and goes on as before.
	Within time.Duration
}

// LockType is the kind of an advisory lock.
type LockType uint8

const (
	LockUnlock LockType = iota
	LockRead
	LockWrite
)

// Lock is one advisory lock (fcntl byte ranges, or flock, which covers the
// whole file and lives in a name space of its own). Locks are kept in the
// owner's memory; sessions claim theirs again after a change of owner.
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

// OrderKind is what the owner asks of a chunk server.
type OrderKind uint8

const (
	OrderSeal     OrderKind = 1 + iota // freeze at Fence and tell the length; Length set: cut there and seal
	OrderDelete                        // remove the chunk; idempotent
	OrderStat                          // tell state, length, synced mark
	OrderKeys                          // replace the capability keys
	OrderCopy                          // append Ranges of the sealed chunk From to Chunk, in order, and sync
	OrderList                          // the replicas of Volume's chunks after After, at most Max; see OrderResult.Chunks
	OrderPull                          // copy the sealed chunk from the first of Sources that serves it, verified; idempotent
	OrderVerify                        // read all of the chunk and compare it with its checksums
	OrderScrub                         // begin to read everything now; the reports tell how far it is
	OrderDisk                          // Disk is given up for good (Retire), or may be replaced by an empty directory (Adopt)
	OrderCompress                      // have the sealed Chunk compressed soon, with Compress; idempotent, and nobody waits for it
	OrderGather                        // append Pieces of sealed chunks, wherever they lie, to Chunk from Length on, in order, and sync; idempotent
)

// Bounds of OrderGather.
const (
	MaxPieces  = 4096 // of one order
	MaxSources = 4096 // chunks that they are from
)

// CopySource is a sealed chunk, as the journal knows it, that pieces are copied
// from, and the servers that may have it, the nearest first. A replica of another
// length, or of another checksum where CRC is not zero, is none.
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
	After   ChunkID      // OrderList: the last one of the page before, or zero
	Max     uint32       // OrderList: at most MaxListed, which zero stands for
	CRC     uint32       // OrderPull, beside Chunk, Fence, Length: what the journal says of the sealed chunk
	Sources []ServerInfo // OrderPull: who may have it, the nearest first; OrderGather: all servers of Chunks, in any order
	Cap     []byte       // OrderPull, OrderGather: the right to read it there
	Class   string       // OrderPull, OrderCopy, OrderGather: of the disk to put it on; empty: any
	Rate    uint64       // OrderPull, OrderVerify, OrderScrub, OrderGather: bytes a second; zero: the server's own bound
	Disk    string       // OrderDisk: which
	Adopt   bool         // OrderDisk: rather than to retire it
	Evicted []string     // OrderKeys: whose connections end and are refused, as peer.ParseWorthless reads it
	// Compress: OrderCompress, and soon after it OrderSeal with Final and OrderPull.
	Compress Compression

	// Owner is the volume whose owner orders this, Term the owner's: who has
	// seen a later one refuses what changes anything (Fenced). Zero: this is
	// no owner's order about its volume.
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
	Length   uint64 // bytes that verify
	Synced   uint64 // bytes that are durable
	CRC      uint32
	Fence    Fence
	Existing bool // the chunk is on this server
	Whole    bool // the replica has every byte that it ever acknowledged
	// Chunks answer OrderList, in an order of the server's own. An answer with
	// Err unset is complete: between After and the last of Chunks, or, without
	// More, to the end, there is no other replica that this server could serve.
	Chunks []ReplicaInfo
	More   bool
}

// ReplicaInfo is what a chunk server knows of one of its replicas.
type ReplicaInfo struct {
	ID     ChunkID
	State  ChunkState
	Length uint64
	Synced uint64
	CRC    uint32 // when sealed
	Fence  Fence
	Disk   string // DiskInfo.ID
	// Err is Corrupt for a replica that doesn't verify. It serves nothing and
	// is kept until somebody orders its deletion or pulls it anew.
	Err Kind
	// Form is how it is stored, Stored what its data takes on the disk in bytes;
	// 0 of servers of before this was known. Dense: to compress it saves nothing.
	Form   Compression
	Stored uint64
	Dense  bool
}

// ReplicaEventKind is what happened to a replica or a disk.
type ReplicaEventKind uint8

const (
	EventCorrupt    ReplicaEventKind = 1 + iota // Chunk doesn't verify on Disk
	EventLost                                   // Chunk is on this server no more
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

// ReplicaEvent is news from a chunk server, in its reports until acknowledged.
// It only hurries: OrderList tells the same.
type ReplicaEvent struct {
	Seq    uint64 // counts up within a Generation
	Kind   ReplicaEventKind
	Chunk  ChunkID
	Disk   string
	Detail string // for people
}

// CapKey is a key that capabilities are signed with; the highest ID signs.
type CapKey struct {
	ID     uint32
	Secret []byte // 32 bytes
}
