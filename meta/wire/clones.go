package wire

import (
	"time"

	"penstock.io/penstock/meta"
)

// Bodies and reports of the requests about clones, as JSON.

// CloneRequest is AdminClone's body.
type CloneRequest struct {
	Snapshot string `json:"snapshot,omitempty"` // empty: one is taken for the clone
	// Token names the request, so that it may be sent again.
	Token uint64 `json:"token,omitempty"`
}

// CloneInfo is what one is told of a clone.
type CloneInfo struct {
	ID       meta.VolumeID `json:"id" yaml:"id"`
	Name     string        `json:"name" yaml:"name"`
	Origin   string        `json:"origin" yaml:"origin"` // the volume that it was cloned from
	Snapshot string        `json:"snapshot" yaml:"snapshot"`
	// Implied: the snapshot was taken for the clone, and goes with it.
	Implied bool      `json:"implied,omitempty" yaml:"implied,omitempty"`
	Created time.Time `json:"created" yaml:"created"`
}

// ChunkWhere is where a chunk lies. Of one that has no record Servers is empty.
type ChunkWhere struct {
	Chunk   string          `json:"chunk"` // 32 hex digits
	Servers []meta.ServerID `json:"servers,omitempty"`
	Sealed  bool            `json:"sealed,omitempty"`
	Length  uint64          `json:"length,omitempty"`
}

// PromoteRequest is AdminPromote's body; without one the rate stays as it is.
type PromoteRequest struct {
	// Rate bounds the bytes that are copied in a second; 0: as fast as it goes,
	// else at least MinPromoteRate.
	Rate *uint64 `json:"rate,omitempty"`
}

// MinPromoteRate is the lowest rate of a promotion, in bytes a second.
const MinPromoteRate = 64 << 10

// PromoteStatus answers AdminPromote.
type PromoteStatus struct {
	// Done: the volume needs no other.
	Done   bool   `json:"done" yaml:"done"`
	Copied uint64 `json:"copied_bytes" yaml:"copied_bytes"` // since its owner began
	Left   uint64 `json:"left_bytes" yaml:"left_bytes"`     // as far as is known
	// Rate is the bound that holds, in bytes a second; 0: none.
	Rate uint64 `json:"rate,omitempty" yaml:"rate,omitempty"`
}
