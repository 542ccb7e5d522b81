// Package meta owns the words of Penstock: identifiers, attributes, extents,
// the operations of the namespace with what each promises, and the error kinds
// that travel the wire. It imports the standard library only; every other
// package speaks in these words.
package meta

import (
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// VolumeID names a volume for ever. Ids are given out by the cluster from 1
// upwards, never reused, and fit VolumeBits bits so that a FUSE node id can be
// a pure function of (volume, inode).
type VolumeID uint32

// RootVolume is the volume attached at "/".
const RootVolume VolumeID = 1

// Ino is an inode number, unique within its volume and never reused.
// Zero is no inode; RootIno is the volume's root directory.
type Ino uint64

// RootIno is the root directory of every volume.
const RootIno Ino = 1

// VolumeBits and InoBits are the widths that a FUSE node id gives to the
// volume and the inode: 2^20 numbers, 2^44 inodes each. The highest Views of the
// numbers are no volume's: a client shows snapshots under them, and a snapshot's
// highest MaxVolume inodes stand for junctions.
const (
	VolumeBits = 20
	InoBits    = 44
	MaxIno     = Ino(1)<<InoBits - 1
	Views      = 1 << 18
	MaxVolume  = VolumeID(1)<<VolumeBits - 1 - Views
)

// MirrorLock is no inode: who holds the lock on it (flock, for writing) in a
// mirror's target is the one session that changes it.
const MirrorLock = MaxIno

// Generation counts snapshots of a volume; keys end with the generation they
// were written in. It never mixes with Term.
type Generation uint32

// Term fences an owner: it grows with every change of a volume's owner.
type Term uint64

// Seq numbers a volume's journal entries: dense, from 1.
type Seq uint64

// SessionID names a client's session with a volume's owner. Never reused
// within a cluster (it is drawn at random, 64 bits). Zero is the owner itself.
type SessionID uint64

// ServerID names a chunk server for ever.
type ServerID uint64

// OpID makes a retried operation recognisable: the random incarnation of the
// mount (or library client), the kernel's request number without bit 63 (or
// the client's own count), and the step within that request. Background work
// of a client uses its own count with BackgroundStep set in Step.
type OpID struct {
	Incarnation uint64
	Unique      uint64
	Step        uint32
}

// BackgroundStep is the bit in OpID.Step that marks operations which no kernel
// request asked for.
const BackgroundStep = 1 << 31

// IsZero reports whether the operation carries no id, as reads do.
func (o OpID) IsZero() bool { return o == OpID{} }

// ChunkID names a chunk for ever. It holds the volume that allocated it (which
// alone counts, seals, repairs and deletes it) and the term it was handed out
// in, so that two owners can never hand out the same one.
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

// String renders the id as 32 hexadecimal digits; ParseChunkID reads it back.
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

// ChunkIDFromBytes decodes the form that Bytes makes. It panics unless b holds
// at least 16 bytes.
func ChunkIDFromBytes(b []byte) ChunkID {
	return ChunkID{
		Volume:  VolumeID(binary.BigEndian.Uint32(b[0:])),
		Term:    binary.BigEndian.Uint32(b[4:]),
		Counter: binary.BigEndian.Uint64(b[8:]),
	}
}

// ParseChunkID reads the form that String makes.
func ParseChunkID(s string) (ChunkID, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != 16 {
		return ChunkID{}, fmt.Errorf("chunk id %q is not 32 hexadecimal digits", s)
	}
	return ChunkIDFromBytes(b), nil
}

// Fence stands on every append, seal and capability of a chunk: the owner's
// term, then the number of times the chunk was fenced within it. Compared in
// that order; a chunk server refuses whatever carries a lower fence than the
// chunk has seen.
type Fence struct {
	Term  Term
	Seals uint32
}

// Less orders fences.
func (f Fence) Less(g Fence) bool {
	return f.Term < g.Term || f.Term == g.Term && f.Seals < g.Seals
}

// Limits that POSIX names and that every layer enforces alike.
const (
	MaxName     = 255       // bytes in one name
	MaxPath     = 4096      // bytes in one path, the final NUL included
	MaxSymlink  = 4095      // bytes in a symbolic link's target
	MaxXattrVal = 64 << 10  // bytes in one extended attribute's value
	MaxXattrs   = 64 << 10  // bytes that the names of one inode's attributes may take in a list
	MaxLinks    = 1<<32 - 2 // hard links to one inode
	MaxFileSize = 1<<63 - 1 // bytes
	InlineMax   = 4 << 10   // largest file whose bytes may lie in the inode record
	BlockSize   = 4 << 10   // st_blksize and the unit of statfs
)
