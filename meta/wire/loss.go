package wire

import "penstock.io/penstock/meta"

// Bodies and reports of the requests about chunks that are lost, as JSON.

// States of a chunk of which no good replica is left, in LostChunk.
const (
	LossPending  = "waits"    // a server or disk that may have it is out of reach, and was not given up
	LossDamaged  = "damaged"  // replicas are left that serve only what verifies, or differ
	LossShort    = "short"    // it was being written, and replicas have less than its writer was promised
	LossTotal    = "lost"     // nobody has the bytes
	LossAccepted = "accepted" // an operator accepted that
)

// LostChunk is a chunk of which no good replica is left.
type LostChunk struct {
	ID     meta.ChunkID `json:"-" yaml:"-"`
	Chunk  string       `json:"chunk" yaml:"chunk"` // ID in hex
	State  string       `json:"state" yaml:"state"`
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

// LostRequest is the body of AdminLostChunks; without one the list begins with the
// first.
type LostRequest struct {
	After string `json:"after,omitempty"` // those with higher ids are wanted, in hex
}

// LostChunks answers AdminLostChunks and AdminAcceptLoss. A list comes in pages, by
// ids: while More is not zero, the next begins after After.
type LostChunks struct {
	Chunks []LostChunk `json:"chunks" yaml:"chunks"`
	More   uint64      `json:"more_chunks,omitempty" yaml:"more_chunks,omitempty"` // not listed, at most so many
	After  string      `json:"after,omitempty" yaml:"after,omitempty"`
}

// AcceptLoss is the body of AdminAcceptLoss.
type AcceptLoss struct {
	Chunks  []string `json:"chunks" yaml:"chunks"`   // ids in hex, at most 10,000
	Damaged bool     `json:"damaged" yaml:"damaged"` // give up what damaged replicas still serve, too
}
