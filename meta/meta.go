// Package meta defines the words of Penstock: identifiers, attributes, extents, the operations
// of the namespace and the promises of each, and the error kinds of the wire protocol. The
// package imports the standard library only; every other package speaks in these words.
package meta

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// VolumeID names a volume for ever. The cluster assigns ids from 1 upwards and never reuses
// them. An id fits into VolumeBits bits, so that a FUSE node id is a pure function of (volume,
// inode).
type VolumeID uint32

// RootVolume is the volume attached at "/".
const RootVolume VolumeID = 1

// Ino is an inode number, unique within its volume and never reused.
// Zero is no inode; RootIno is the volume's root directory.
type Ino uint64

// RootIno is the root directory of every volume.
const RootIno Ino = 1

// VolumeBits and InoBits are the widths of the volume and the inode in a FUSE node id: 2^20
// volumes of 2^44 inodes each. No volume has one of the highest Views numbers: a client shows
// snapshots under them. The highest MaxVolume inode numbers of a snapshot stand for junctions.
const (
	VolumeBits = 20
	InoBits    = 44
	MaxIno     = Ino(1)<<InoBits - 1
	LastIno    = MaxIno >> 2 // highest number that a volume gives to an inode: a mount shows other files above
	Views      = 1 << 18
	MaxVolume  = VolumeID(1)<<VolumeBits - 1 - Views
)

// MirrorLock is not the number of an inode. In the target volume of a mirror, only the session
// with the write lock (flock) on MirrorLock may change the volume.
const MirrorLock = MaxIno

// Generation counts the snapshots of a volume. A key of the state store ends with the
// generation in which the record was written. Generation and Term are unrelated.
type Generation uint32

// Term fences an owner: every change of a volume's owner increases the volume's term.
type Term uint64

// Seq numbers a volume's journal entries: dense, from 1.
type Seq uint64

// SessionID names a client's session with the owner of a volume: 64 random bits, never reused
// within a cluster. Zero stands for the owner itself.
type SessionID uint64

// ServerID names a chunk server for ever.
type ServerID uint64

// OpID identifies an operation, so that the owner recognises a retry. Its parts are the random
// incarnation of the mount (or of the library client), the number of the kernel's request
// without bit 63 (or the client's own count), and the step within the request. For background
// work the client uses a count of its own and sets BackgroundStep in Step.
type OpID struct {
	Incarnation uint64
	Unique      uint64
	Step        uint32
}

// BackgroundStep is the bit of OpID.Step that marks background work: operations without a
// request of the kernel.
const BackgroundStep = 1 << 31

// IsZero reports whether the operation carries no id, as reads do.
func (o OpID) IsZero() bool { return o == OpID{} }

// ChunkID names a chunk for ever. The id contains the volume that allocated the chunk and the
// term of the allocation, so that two owners never assign the same id. Only the owner of that
// volume counts, seals, repairs and deletes the chunk.
type ChunkID struct {
	Volume  VolumeID
	Term    uint32
	Counter uint64
}

// IsZero reports whether the id names no chunk: a hole, or preallocated zeros.
func (c ChunkID) IsZero() bool { return c == ChunkID{} }

// Compare orders ids: by volume, term, counter.
func (c ChunkID) Compare(d ChunkID) int {
	return cmp.Or(cmp.Compare(c.Volume, d.Volume), cmp.Compare(c.Term, d.Term), cmp.Compare(c.Counter, d.Counter))
}

// String returns the id as 32 hexadecimal digits. ParseChunkID is the inverse.
func (c ChunkID) String() string {
	b := c.Bytes()
	return hex.EncodeToString(b[:])
}

// Bytes is the 16-byte big-endian form: volume 4, term 4, counter 8.
func (c ChunkID) Bytes() (b [16]byte) {
	binary.BigEndian.PutUint32(b[0:], uint32(c.Volume))
	binary.BigEndian.PutUint32(b[4:], c.Term)
	binary.BigEndian.PutUint64(b[8:], c.Counter)
	return b
}

// ChunkIDFromBytes decodes the output of Bytes. The function panics if b is shorter than 16
// bytes.
func ChunkIDFromBytes(b []byte) ChunkID {
	return ChunkID{
		Volume:  VolumeID(binary.BigEndian.Uint32(b[0:])),
		Term:    binary.BigEndian.Uint32(b[4:]),
		Counter: binary.BigEndian.Uint64(b[8:]),
	}
}

// ParseChunkID decodes the output of String.
func ParseChunkID(s string) (ChunkID, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 16 {
		return ChunkID{}, fmt.Errorf("chunk id %q is not 32 hexadecimal digits", s)
	}
	return ChunkIDFromBytes(b), nil
}

// Fence is part of every append, seal and capability of a chunk: the owner's term and, within
// the term, the number of times that the chunk was fenced. Fences are compared in that order.
// A chunk server refuses a request with a lower fence than the highest one seen for the chunk.
type Fence struct {
	Term  Term
	Seals uint32
}

// Less orders fences.
func (f Fence) Less(g Fence) bool {
	return f.Term < g.Term || f.Term == g.Term && f.Seals < g.Seals
}

// Limits of POSIX, enforced alike by every layer.
const (
	MaxName     = 255       // bytes in one name
	MaxPath     = 4096      // bytes in one path, the final NUL included
	MaxSymlink  = 4095      // bytes in a symbolic link's target
	MaxXattrVal = 64 << 10  // bytes in one extended attribute's value
	MaxXattrs   = 64 << 10  // bytes of the list of attribute names of one inode
	MaxLinks    = 1<<32 - 2 // hard links to one inode
	MaxFileSize = 1<<63 - 1 // bytes
	InlineMax   = 4 << 10   // size of the largest file that an inode record may contain
	BlockSize   = 4 << 10   // st_blksize and the unit of statfs
)
