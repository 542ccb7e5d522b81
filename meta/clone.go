package meta

import "time"

// CloneInfo describes a clone.
type CloneInfo struct {
	ID       VolumeID `json:"id" yaml:"id"`
	Name     string   `json:"name" yaml:"name"`
	Origin   string   `json:"origin" yaml:"origin"` // source volume of the clone
	Snapshot string   `json:"snapshot" yaml:"snapshot"`
	// Implied: the snapshot was taken for the clone, and is deleted with the clone.
	Implied bool      `json:"implied,omitempty" yaml:"implied,omitempty"`
	Created time.Time `json:"created" yaml:"created"`
}

// MinPromoteRate is the lowest rate of a promotion, in bytes per second.
const MinPromoteRate = 64 << 10

// PromoteStatus is the progress of a promotion.
type PromoteStatus struct {
	// Done: the volume no longer needs another volume.
	Done   bool   `json:"done" yaml:"done"`
	Copied uint64 `json:"copied_bytes" yaml:"copied_bytes"` // since the present owner began
	Left   uint64 `json:"left_bytes" yaml:"left_bytes"`     // bytes, as far as known
	// Rate is the present bound in bytes per second; 0: none.
	Rate uint64 `json:"rate,omitempty" yaml:"rate,omitempty"`
}
