package wire

import (
	"time"

	"penstock.io/penstock/meta"
)

// Bodies and reports of the requests about clones, as JSON.

// CloneRequest is the body of AdminClone.
type CloneRequest struct {
	Snapshot string `json:"snapshot,omitempty"` // empty: the owner takes a snapshot for the clone
	// Token identifies the request, so that the client may send the request again.
	Token uint64 `json:"token,omitempty"`
}

// CloneInfo describes a clone.
type CloneInfo struct {
	ID       meta.VolumeID `json:"id" yaml:"id"`
	Name     string        `json:"name" yaml:"name"`
	Origin   string        `json:"origin" yaml:"origin"` // source volume of the clone
	Snapshot string        `json:"snapshot" yaml:"snapshot"`
	// Implied: the snapshot was taken for the clone, and is deleted with the clone.
	Implied bool      `json:"implied,omitempty" yaml:"implied,omitempty"`
	Created time.Time `json:"created" yaml:"created"`
}

// ChunkWhere is the place of a chunk. Servers is empty if the chunk has no record.
type ChunkWhere struct {
	Chunk   string          `json:"chunk"` // 32 hex digits
	Servers []meta.ServerID `json:"servers,omitempty"`
	Sealed  bool            `json:"sealed,omitempty"`
	Length  uint64          `json:"length,omitempty"`
}

// PromoteRequest is the body of AdminPromote; an empty body keeps the rate.
type PromoteRequest struct {
	// Rate bounds the bytes copied per second: 0 is unlimited, any other value is at least
	// MinPromoteRate.
	Rate *uint64 `json:"rate,omitempty"`
}

// MinPromoteRate is the lowest rate of a promotion, in bytes per second.
const MinPromoteRate = 64 << 10

// PromoteStatus answers AdminPromote.
type PromoteStatus struct {
	// Done: the volume no longer needs another volume.
	Done   bool   `json:"done" yaml:"done"`
	Copied uint64 `json:"copied_bytes" yaml:"copied_bytes"` // since the present owner began
	Left   uint64 `json:"left_bytes" yaml:"left_bytes"`     // bytes, as far as known
	// Rate is the present bound in bytes per second; 0: none.
	Rate uint64 `json:"rate,omitempty" yaml:"rate,omitempty"`
}
