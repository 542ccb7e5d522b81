package server

import "penstock.io/penstock/meta"

// LossState is how a chunk stands of which no good replica is left.
type LossState string

// The states.
const (
	LossPending  LossState = "waits"    // a server or disk out of reach, and not given up, may have it
	LossDamaged  LossState = "damaged"  // the replicas left serve only verified bytes, or differ
	LossShort    LossState = "short"    // open: replicas have less than was promised to the writer
	LossTotal    LossState = "lost"     // nobody has the bytes
	LossAccepted LossState = "accepted" // an operator accepted the loss
)

// LostChunk is a chunk of which no good replica is left.
type LostChunk struct {
	ID     meta.ChunkID `json:"-" yaml:"-"`
	Chunk  string       `json:"chunk" yaml:"chunk"` // ID in hex
	State  LossState    `json:"state" yaml:"state"`
	Live   uint64       `json:"live_bytes" yaml:"live_bytes"` // bytes with references from files and snapshots
	Length uint64       `json:"length" yaml:"length"`         // when the loss was accepted: the bytes left are below
	// Replicas are the replicas named in the record, each with the reason of its loss.
	Replicas []LostReplica `json:"replicas" yaml:"replicas"`
	Files    []LostFile    `json:"files" yaml:"files"`
	// More files are not listed.
	More uint64 `json:"more_files,omitempty" yaml:"more_files,omitempty"`
}

// LostReplica is a replica with the reason of its loss.
type LostReplica struct {
	Server meta.ServerID `json:"node" yaml:"node"`
	Why    string        `json:"why" yaml:"why"`
}

// LostFile is a file with bytes in such a chunk.
type LostFile struct {
	Ino meta.Ino `json:"inode" yaml:"inode"`
	// Path in the volume; "" for a file without a name now (the file is open, or only in
	// snapshots), and for a file so deep that its directory's path has meta.MaxPath bytes or
	// more.
	Path  string `json:"path" yaml:"path"`
	Bytes uint64 `json:"bytes" yaml:"bytes"` // in this chunk, summed over all generations
}

// lostChunks is a page of lost chunks, by ids. While more is not zero, the next begins behind
// after.
type lostChunks struct {
	chunks []LostChunk
	more   uint64 // not listed, at most so many
	after  string // an id in hex
}
