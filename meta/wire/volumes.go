package wire

import (
	"time"

	"penstock.io/penstock/meta"
)

// Bodies and reports of the requests about volumes, as JSON.

// Once begins the bodies of requests that are to be done once, however often they
// are sent.
type Once struct {
	// Token names the request: random, and never zero.
	Token uint64 `json:"token,omitempty"`
}

// VolumeCreation is the body of AdminCreateVolume.
type VolumeCreation struct {
	Once
	VolumeWords
}

// VolumeWords are what a volume's row says beside the policy: the body of
// AdminSetPolicy, and part of AdminCreateVolume's. nil: as it is.
type VolumeWords struct {
	// TrashSeconds is how long it stays in the trash once it is deleted.
	TrashSeconds *uint64 `json:"trash_seconds,omitempty"`
	// Compression of chunks that are sealed from then on: none, s2 or zstd.
	Compression *string `json:"compression,omitempty"`
	// Advisory quota, bytes and files; 0: none.
	AdvisoryBytes  *uint64 `json:"advisory_bytes,omitempty"`
	AdvisoryInodes *uint64 `json:"advisory_inodes,omitempty"`
	// Labels to set, or with nil to remove.
	Labels map[string]*string `json:"labels,omitempty"`
	// Only names the words of the request's policy that count, see
	// meta.PolicyWords: the rest of the volume's policy stays as it is then. nil: all
	// of them. Of AdminSetPolicy.
	Only []string `json:"only,omitzero"`
	// Force: a volume becomes immutable also if a client can't commit what it holds, which
	// is lost then, and gets a policy also if nothing in the cluster can meet it.
	Force bool `json:"force,omitempty"`
}

// Empty tells whether they say nothing.
func (w VolumeWords) Empty() bool {
	return w.TrashSeconds == nil && w.Compression == nil && w.AdvisoryBytes == nil && w.AdvisoryInodes == nil && len(w.Labels) == 0 && w.Only == nil && !w.Force
}

// VolumeDeletion is the body of AdminDeleteVolume; without one the volume's
// trash time holds.
type VolumeDeletion struct {
	Once
	Now bool `json:"now,omitempty"` // past the trash
	// Name that the volume must have at the moment at which it is condemned; "": any.
	Name string `json:"name,omitempty"`
}

// VolumeQuestion is the body of AdminVolumeByName; without one all is told.
type VolumeQuestion struct {
	Plain bool `json:"plain,omitempty"` // without labels: whoever uses a volume needs none
}

// States of a volume, in VolumeDetail.
const (
	VolumeReady     = "ready"
	VolumeAttaching = "attaching"
	VolumeDetaching = "detaching"
	VolumeInTrash   = "trash"
	VolumeDeleting  = "deleting"
)

// VolumeDetail is what VolumeInfo has no room for. The report of AdminVolumes,
// AdminVolumeByName and what changes a volume is a list of them, one for each
// VolumeInfo, in the same order.
type VolumeDetail struct {
	ID           meta.VolumeID `json:"id"`
	State        string        `json:"state"`
	Created      time.Time     `json:"created,omitzero"`
	TrashSeconds uint64        `json:"trash_seconds,omitempty"`
	Deleted      time.Time     `json:"deleted,omitzero"` // in the trash
	Until        time.Time     `json:"until,omitzero"`
	// Open: its usage is known. A volume that nobody uses is closed, and a list
	// of many does not open it.
	Open bool `json:"open"`
	// Compression names how chunks are stored.
	Compression    string    `json:"compression,omitempty"`
	AdvisoryBytes  uint64    `json:"advisory_bytes,omitempty"`
	AdvisoryInodes uint64    `json:"advisory_inodes,omitempty"`
	BytesOver      time.Time `json:"bytes_over,omitzero"` // since when it counts as above its advisory quota
	InodesOver     time.Time `json:"inodes_over,omitzero"`
	// LabelsUnread is why the labels can't be told: the volume may have some.
	Labels       map[string]string `json:"labels,omitempty"`
	LabelsUnread string            `json:"labels_unread,omitempty"`
	// Origin is that of a clone which still needs it.
	Origin *VolumeOrigin `json:"origin,omitempty"`
}

// VolumeOrigin is the snapshot that a volume is a clone of.
type VolumeOrigin struct {
	Volume   meta.VolumeID `json:"volume"`
	Snapshot string        `json:"snapshot"`
	// Implied: the snapshot was taken for the clone, and goes with it.
	Implied bool `json:"implied,omitempty"`
}
