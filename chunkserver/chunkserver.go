// Package chunkserver owns the words of the chunk protocol: what a chunk server
// promises of append, sync, seal, read and delete. The store, the wire frames,
// the server and the client live below it.
//
// A chunk is an append-only sequence of bytes, open while exactly one writer
// appends to it, then sealed and immutable for ever. A chunk server knows
// nothing of files.
package chunkserver

import (
	"context"

	"penstock.io/penstock/meta"
)

// ChecksumBlock is the number of bytes that one CRC32C (Castagnoli) covers.
const ChecksumBlock = 64 << 10

// MaxAppend is the largest append in one frame, in bytes.
const MaxAppend = 4 << 20

// Info is what a server knows of one chunk.
type Info struct {
	ID     meta.ChunkID
	State  meta.ChunkState
	Length uint64 // bytes appended and acknowledged
	Synced uint64 // bytes that are durable, at most Length; in the answer to a freeze, those that syncs answered for
	Fence  meta.Fence
	CRC    uint32 // when sealed, or as a freeze found it: CRC32C over the big-endian block checksums
	Whole  bool   // told by a freeze: every byte that was ever acknowledged here is

	// Of a store itself, not told in frames: how the chunk lies on the disk, what
	// its data takes there in bytes, and that compressing it was found to save nothing.
	Form   meta.Compression
	Stored uint64
	Dense  bool
}

// Service is what a chunk store does; the server's value is itself the
// in-process form, and a client has the same methods.
type Service interface {
	// Append adds p at off, which must be the chunk's length. The first append
	// (off 0) creates the chunk. A repeated append of bytes that are there
	// already is acknowledged if its checksum matches. crc is CRC32C of p.
	// Errors: WrongOffset, Fenced, Sealed, Corrupt (crc), NoSpace, IO.
	Append(ctx context.Context, id meta.ChunkID, fence meta.Fence, off uint64, p []byte, crc uint32) error
	// Sync makes the first upTo bytes durable and returns the synced mark. When
	// it returns, data, block checksums and mark are on stable storage.
	// After it failed once for a chunk, it never succeeds again for that chunk.
	// Errors: WrongOffset (upTo is past the end), IO, NoSuchChunk.
	Sync(ctx context.Context, id meta.ChunkID, upTo uint64) (synced uint64, err error)
	// Seal freezes the chunk against lower fences and, with final, ends it at
	// length for ever (cutting what lies beyond). Idempotent. Without final it
	// makes all that is here durable and tells what a seal could take (rule 5);
	// then CRC is that of the first length bytes, or of all if length is 0 or more than that.
	Seal(ctx context.Context, id meta.ChunkID, fence meta.Fence, final bool, length uint64) (Info, error)
	// Read fills p from off, verified against the block checksums.
	// Errors: NoSuchChunk, Corrupt, IO, NoSuchOffset (past the end).
	Read(ctx context.Context, id meta.ChunkID, p []byte, off uint64) error
	// Stat tells what is known of a chunk. Errors: NoSuchChunk.
	Stat(ctx context.Context, id meta.ChunkID) (Info, error)
	// Delete removes the chunk; deleting what is not there succeeds.
	Delete(ctx context.Context, id meta.ChunkID, fence meta.Fence) error
}
