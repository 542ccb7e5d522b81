package meta

import (
	"context"
	"encoding/binary"
	"io"
)

// Blob stores immutable files beside the namespace: the table files of checkpoints. One
// implementation stores blobs as chunks, whose ids and servers are part of the reference and
// never of the volume that the blobs restore. The other implementation stores files in a
// folder.
type Blob interface {
	// Put stores the bytes of r and returns when they are durable. name is a hint for people.
	// Errors: NoSpace, IO, Unavailable.
	Put(ctx context.Context, of BlobOwner, name string, r io.Reader) (BlobRef, error)
	// Get reads a blob. The reader fails with Corrupt at bytes that do not match the
	// reference. Errors: NotFound, Corrupt, IO, Unavailable.
	Get(ctx context.Context, ref BlobRef) (io.ReadCloser, error)
	// Delete removes a blob. Deleting an absent blob succeeds.
	Delete(ctx context.Context, ref BlobRef) error
}

// BlobOwner names the user of a blob. The implementation with chunks writes the user into the
// chunk ids, so that an inspection recognises a leaked chunk: a chunk without a reference.
type BlobOwner struct {
	Volume VolumeID
	Term   Term
}

// BlobRef locates a blob and identifies its bytes. The zero value refers to no blob.
type BlobRef struct {
	Name   string // the blob's name in a folder; with chunks, a hint for people
	Length uint64 // bytes
	CRC    uint32 // CRC32C of all bytes
	Parts  []BlobPart
}

// BlobPart is one sealed chunk of a blob. The bytes of a blob are the bytes of its parts, in
// order.
type BlobPart struct {
	Chunk   ChunkID
	Length  uint64
	Servers []ServerID
}

// IsZero reports whether the reference names no blob.
func (r BlobRef) IsZero() bool {
	return r.Name == "" && r.Length == 0 && r.CRC == 0 && len(r.Parts) == 0
}

// Bounds of a reference. AppendBinary refuses a larger reference, DecodeBlobRef calls it
// invalid.
const (
	maxBlobName    = 1 << 10
	maxBlobParts   = 1 << 16
	maxPartServers = 64
)

// AppendBinary appends the encoding of the reference, which DecodeBlobRef decodes:
//
//	uvarint length of name | name | uvarint length | crc 4, big-endian |
//	uvarint parts | parts * ( chunk id 16 | uvarint length |
//	uvarint servers | servers * uvarint id )
//
// The encoding has no checksum of its own: the record around the reference has one.
func (r BlobRef) AppendBinary(dst []byte) ([]byte, error) {
	if len(r.Name) > maxBlobName || len(r.Parts) > maxBlobParts {
		return dst, E("encode blob reference", ResourceExceeded, r.Name, nil)
	}
	dst = binary.AppendUvarint(dst, uint64(len(r.Name)))
	dst = append(dst, r.Name...)
	dst = binary.AppendUvarint(dst, r.Length)
	dst = binary.BigEndian.AppendUint32(dst, r.CRC)
	dst = binary.AppendUvarint(dst, uint64(len(r.Parts)))
	for _, p := range r.Parts {
		if len(p.Servers) > maxPartServers {
			return dst, E("encode blob reference", ResourceExceeded, p.Chunk.String(), nil)
		}
		id := p.Chunk.Bytes()
		dst = append(dst, id[:]...)
		dst = binary.AppendUvarint(dst, p.Length)
		dst = binary.AppendUvarint(dst, uint64(len(p.Servers)))
		for _, s := range p.Servers {
			dst = binary.AppendUvarint(dst, uint64(s))
		}
	}
	return dst, nil
}

// DecodeBlobRef decodes a reference at the front of b and returns the rest of b. Errors:
// Protocol.
func DecodeBlobRef(b []byte) (ref BlobRef, rest []byte, err error) {
	bad := E("decode blob reference", Protocol, "", nil)
	n, b, ok := takeUvarint(b, maxBlobName)
	if !ok || uint64(len(b)) < n {
		return BlobRef{}, nil, bad
	}
	ref.Name, b = string(b[:n]), b[n:]
	if ref.Length, b, ok = takeUvarint(b, 1<<63); !ok || len(b) < 4 {
		return BlobRef{}, nil, bad
	}
	ref.CRC, b = binary.BigEndian.Uint32(b), b[4:]
	// A part takes at least 18 bytes, so a false number of parts can't allocate much.
	if n, b, ok = takeUvarint(b, min(maxBlobParts, uint64(len(b))/18)); !ok {
		return BlobRef{}, nil, bad
	}
	if n > 0 {
		ref.Parts = make([]BlobPart, 0, n)
	}
	for range n {
		var p BlobPart
		if len(b) < 16 {
			return BlobRef{}, nil, bad
		}
		p.Chunk, b = ChunkIDFromBytes(b), b[16:]
		if p.Length, b, ok = takeUvarint(b, 1<<63); !ok {
			return BlobRef{}, nil, bad
		}
		var servers uint64
		if servers, b, ok = takeUvarint(b, min(maxPartServers, uint64(len(b)))); !ok {
			return BlobRef{}, nil, bad
		}
		for range servers {
			var s uint64
			if s, b, ok = takeUvarint(b, 1<<64-1); !ok {
				return BlobRef{}, nil, bad
			}
			p.Servers = append(p.Servers, ServerID(s))
		}
		ref.Parts = append(ref.Parts, p)
	}
	return ref, b, nil
}

// takeUvarint reads a number of at most limit from the front of b.
func takeUvarint(b []byte, limit uint64) (uint64, []byte, bool) {
	v, n := binary.Uvarint(b)
	if n <= 0 || v > limit {
		return 0, nil, false
	}
	return v, b[n:], true
}
