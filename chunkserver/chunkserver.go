// Package chunkserver defines the words of the chunk protocol: the promises of append, sync,
// seal, read and delete. The store, the wire frames, the server and the client are packages
// below.
//
// A chunk is an append-only sequence of bytes: open while exactly one writer appends to it,
// then sealed and immutable for ever. A chunk server knows nothing of files.
package chunkserver

import (
	"context"

	"penstock.io/penstock/meta"
)

// ChecksumBlock is the number of bytes that one CRC32C (Castagnoli) covers.
const ChecksumBlock = 64 << 10

// MaxAppend is the largest append in one frame, in bytes.
const MaxAppend = 4 << 20

// Info describes one chunk of a server.
type Info struct {
	ID     meta.ChunkID
	State  meta.ChunkState
	Length uint64 // bytes appended and acknowledged
	Synced uint64 // durable bytes, at most Length; in the answer to a freeze, bytes acknowledged by syncs
	Fence  meta.Fence
	CRC    uint32 // of a sealed chunk, or at a freeze: CRC32C over the big-endian block checksums
	Whole  bool   // at a freeze: the server has every byte that it ever acknowledged

	// Only from the store itself, not in frames: the compression of the chunk on the disk, the
	// stored size in bytes, and that compression was found to save nothing.
	Form   meta.Compression
	Stored uint64
	Dense  bool
}

// Service is the interface of a chunk store. The server's value is the in-process form; a
// client has the same methods.
type Service interface {
	// Append adds p at off, which must be the chunk's length. The first append (off 0) creates
	// the chunk. A repeated append of existing bytes is acknowledged if the checksum matches.
	// crc is CRC32C of p. Errors: WrongOffset, Fenced, Sealed, Corrupt (crc), NoSpace, IO.
	Append(ctx context.Context, id meta.ChunkID, fence meta.Fence, off uint64, p []byte, crc uint32) error
	// Sync makes the first upTo bytes durable and returns the synced mark. When it returns,
	// data, block checksums and mark are on stable storage. After one failure for a chunk,
	// Sync never succeeds again for this chunk. Errors: WrongOffset (upTo is past the end),
	// IO, NoSuchChunk.
	Sync(ctx context.Context, id meta.ChunkID, upTo uint64) (synced uint64, err error)
	// Seal freezes the chunk against lower fences and, with final, ends it at length for ever,
	// cutting further bytes. Idempotent. Without final, Seal makes all bytes of the chunk
	// durable and returns how much a seal could keep (rule 5); CRC is then the checksum of the
	// first length bytes, or of all bytes if length is 0 or larger than the chunk.
	Seal(ctx context.Context, id meta.ChunkID, fence meta.Fence, final bool, length uint64) (Info, error)
	// Read fills p from off, verified against the block checksums.
	// Errors: NoSuchChunk, Corrupt, IO, NoSuchOffset (past the end).
	Read(ctx context.Context, id meta.ChunkID, p []byte, off uint64) error
	// Stat describes a chunk. Errors: NoSuchChunk.
	Stat(ctx context.Context, id meta.ChunkID) (Info, error)
	// Delete removes the chunk. Deleting an absent chunk succeeds.
	Delete(ctx context.Context, id meta.ChunkID, fence meta.Fence) error
}
