package meta

// Extent maps bytes of a file to bytes of a chunk. With a zero Chunk, the space is
// preallocated and reads as zeros. Extents of an inode never overlap. A range without an
// extent is a hole.
//
// INVARIANT: an extent in the journal refers only to bytes that every replica has
// acknowledged.
type Extent struct {
	Off      uint64 // in the file, bytes
	Len      uint64 // bytes, at least 1
	Chunk    ChunkID
	ChunkOff uint64
	// OpenEnded: the extent reaches to the future sealed length of the chunk; Len is its
	// length at the time of the journal entry. An inode has at most one such extent: its last
	// bytes, in a chunk of its own (rule 7).
	OpenEnded bool
}

// End is the file offset after the last byte.
func (e Extent) End() uint64 { return e.Off + e.Len }

// ChunkState is the stage of a chunk's life.
type ChunkState uint8

const (
	ChunkOpen     ChunkState = 1 + iota // assigned to a session, or left by an ended one; never judged an orphan (rule 12)
	ChunkSealed                         // immutable at Length
	ChunkDeleting                       // without references; the owner may order servers to delete the chunk
)

// ChunkRecord is a volume's record of one of its chunks.
type ChunkRecord struct {
	ID      ChunkID
	State   ChunkState
	Session SessionID // holder while open
	Fence   Fence
	Servers []ServerID // replicas, the writer's nearest first
	Length  uint64     // when sealed, bytes
	CRC     uint32     // when sealed: CRC32C over the block checksums (see docs/formats.md)
	// Live counts the bytes that extents of any generation refer to. An open-ended extent
	// counts zero until it is closed (rule 17).
	Live uint64
	// Own: the chunk belongs to one file, from offset 0 on; else the chunk is packed.
	Own bool
	// Lost: an operator accepted that referenced bytes are gone for good: all bytes of a
	// sealed chunk without Servers, else the bytes from Length on. Reads of lost bytes fail
	// (EIO) and never return zeros. Clients do not get this field.
	Lost bool
}

// Gone reports that an operator accepted the loss of the whole chunk: no replica is left, and
// none will be made.
func (c *ChunkRecord) Gone() bool { return c.Lost && c.State == ChunkSealed && len(c.Servers) == 0 }

// ChunkGrant assigns a chunk to a writer: its servers, and the signed right to append. The
// owner sends grants only for journaled chunks (rule 4).
type ChunkGrant struct {
	ID      ChunkID
	Fence   Fence
	Servers []ServerID
	Cap     []byte // capability: append
	TTL     uint64 // lifetime of Cap in milliseconds, from the client's request on
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

// ServerInfo is the address and the location of a chunk server.
type ServerInfo struct {
	ID       ServerID
	Addr     string // "unix:/path" or "host:port"
	Local    string // "unix:/path" on the server's machine, for clients with the same Host; empty: Addr only
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
	Path   string // on the server, for people
	Class  string // nvme, ssd, hdd
	Total  uint64 `pb:"total_bytes"`
	Free   uint64 `pb:"free_bytes"` // available to appends
	State  DiskState
	Detail string // for people: the reason for a State other than ok
	// Scrubbed tells how much of the current pass over everything is done, in
	// thousandths; ScrubEnd when the last pass ended.
	Scrubbed uint32 `pb:"scrubbed_thousandths"`
	ScrubEnd Time
}
