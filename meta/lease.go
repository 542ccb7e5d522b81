package meta

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
	OrderSeal   OrderKind = 1 + iota // freeze at Fence and tell the length; Length set: cut there and seal
	OrderDelete                      // remove the chunk; idempotent
	OrderStat                        // tell state, length, synced mark
	OrderKeys                        // replace the capability keys
	OrderCopy                        // append Ranges of the sealed chunk From to Chunk, in order, and sync
)

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
}

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
}

// CapKey is a key that capabilities are signed with; the highest ID signs.
type CapKey struct {
	ID     uint32
	Secret []byte // 32 bytes
}
