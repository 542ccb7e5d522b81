package server

import "penstock.io/penstock/meta"

// LossState is how a chunk stands of which no good replica is left.
type LossState string

// The states.
const (
	LossPending  LossState = "waits"    // a server or disk that may have it is out of reach, and was not given up
	LossDamaged  LossState = "damaged"  // replicas are left that serve only what verifies, or differ
	LossShort    LossState = "short"    // it was being written, and replicas have less than its writer was promised
	LossTotal    LossState = "lost"     // nobody has the bytes
	LossAccepted LossState = "accepted" // an operator accepted that
)

// LostChunk is a chunk of which no good replica is left.
type LostChunk struct {
	ID     meta.ChunkID `json:"-" yaml:"-"`
	Chunk  string       `json:"chunk" yaml:"chunk"` // ID in hex
	State  LossState    `json:"state" yaml:"state"`
	Live   uint64       `json:"live_bytes" yaml:"live_bytes"` // that files and snapshots refer to
	Length uint64       `json:"length" yaml:"length"`         // when accepted: what is left is below
	// Replicas says what became of each that the record names.
	Replicas []LostReplica `json:"replicas" yaml:"replicas"`
	Files    []LostFile    `json:"files" yaml:"files"`
	// More files are not listed.
	More uint64 `json:"more_files,omitempty" yaml:"more_files,omitempty"`
}

// LostReplica is what became of a replica.
type LostReplica struct {
	Server meta.ServerID `json:"node" yaml:"node"`
	Why    string        `json:"why" yaml:"why"`
}

// LostFile is a file with bytes in such a chunk.
type LostFile struct {
	Ino meta.Ino `json:"inode" yaml:"inode"`
	// Path in the volume; "" for a file that has no name now (it is open, or
	// snapshots alone have it), or lies so deep that its directory's path has
	// meta.MaxPath bytes or more.
	Path  string `json:"path" yaml:"path"`
	Bytes uint64 `json:"bytes" yaml:"bytes"` // in this chunk, of all generations
}

// lostChunks is a page of lost chunks, by ids. While more is not zero, the next begins behind
// after.
type lostChunks struct {
	chunks []LostChunk
	more   uint64 // not listed, at most so many
	after  string // an id in hex
}
