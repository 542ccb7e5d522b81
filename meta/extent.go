package meta

// Extent maps bytes of a file to bytes of a chunk. A zero Chunk is space that
// was preallocated and reads as zeros. Extents of an inode never overlap; what
// no extent covers is a hole.
//
// INVARIANT: an extent in the journal refers only to bytes that every replica
// has acknowledged.
type Extent struct {
	Off      uint64 // in the file, bytes
	Len      uint64 // bytes, at least 1
	Chunk    ChunkID
	ChunkOff uint64
	// OpenEnded: the extent reaches to the chunk's sealed length, whatever that
	// will be; Len is its length when it was journaled. At most one an inode,
	// always the last bytes, in a chunk of its own (rule 7).
	OpenEnded bool
}

// End is the file offset after the last byte.
func (e Extent) End() uint64 { return e.Off + e.Len }

// ChunkState is where a chunk stands in its life.
type ChunkState uint8

const (
	ChunkOpen     ChunkState = 1 + iota // handed out, held by its session; never judged an orphan (rule 12)
	ChunkSealed                         // immutable at Length
	ChunkDeleting                       // nothing refers to it; the order to delete may be given
)

// ChunkRecord is what the volume knows of one of its chunks.
type ChunkRecord struct {
	ID      ChunkID
	State   ChunkState
	Session SessionID // holder while open
	Fence   Fence
	Servers []ServerID // replicas, the writer's nearest first
	Length  uint64     // when sealed, bytes
	CRC     uint32     // when sealed: CRC32C over the block checksums (see docs/formats.md)
	// Live counts the bytes that extents of any generation refer to; an
	// open-ended extent counts zero until it is closed (rule 17).
	Live uint64
	// Own: the chunk belongs to one file from its offset 0 on; else it is packed.
	Own bool
	// Lost: an operator accepted that bytes which extents refer to are gone for
	// good: all of them if a sealed chunk has no Servers, else those at Length and
	// beyond. Reads of them fail (EIO) and never give zeros. Not sent to clients.
	Lost bool
}

// Gone reports that all of a chunk was accepted as lost: it has no replica, and
// gets none any more.
func (c *ChunkRecord) Gone() bool { return c.Lost && c.State == ChunkSealed && len(c.Servers) == 0 }

// ChunkGrant hands a chunk to a writer: where it lies and the signed right to
// append to it. The owner gives grants out only from journaled state (rule 4).
type ChunkGrant struct {
	ID      ChunkID
	Fence   Fence
	Servers []ServerID
	Cap     []byte // capability: append
	TTL     uint64 // milliseconds that Cap holds after it was asked for
	Asked   Time   // by the receiver's clock; not sent
	MaxLen  uint64 // bytes; the chunk server refuses appends beyond
}

// ChunkPlace tells a reader where a chunk lies.
type ChunkPlace struct {
	ID      ChunkID
	Servers []ServerID
	Sealed  bool
	Length  uint64 // when sealed
}

// ServerInfo is where a chunk server is reached and where it stands.
type ServerInfo struct {
	ID       ServerID
	Addr     string // "unix:/path" or "host:port"
	Local    string // "unix:/path" on its machine, for those whose Host is the same; empty: none beside Addr
	Topology string // /dc/rack/node
	Class    string // nvme, ssd, hdd
	Total    uint64 // bytes
	Free     uint64 // bytes
	Host     string // boot id of the machine: equal means descriptors can be passed
	Disks    []DiskInfo
}

// DiskState is how a disk of a chunk server stands.
type DiskState uint8

const (
	DiskOK      DiskState = 1 + iota
	DiskFull              // serves; takes nothing new
	DiskFailing           // serves, but answered too late for long, or was given up: to be emptied; takes nothing new
	DiskFailed            // serves nothing: an I/O error, not mounted, another cluster's
	DiskRemoved           // given up for good; its replicas count as lost
)

// String is the state in a word.
func (s DiskState) String() string {
	switch s {
	case DiskOK:
		return "ok"
	case DiskFull:
		return "full"
	case DiskFailing:
		return "failing"
	case DiskFailed:
		return "failed"
	case DiskRemoved:
		return "removed"
	}
	return "unknown"
}

// DiskInfo is one disk of a chunk server.
type DiskInfo struct {
	ID     string // 32 hexadecimal digits
	Path   string // on its server, for people
	Class  string // nvme, ssd, hdd
	Total  uint64 `pb:"total_bytes"`
	Free   uint64 `pb:"free_bytes"` // that appends may take
	State  DiskState
	Detail string // for people: why it isn't ok
	// Scrubbed tells how much of the current pass over everything is done, in
	// thousandths; ScrubEnd when the last pass ended.
	Scrubbed uint32 `pb:"scrubbed_thousandths"`
	ScrubEnd Time
}
