package meta

import "time"

// VolumeInfo describes a volume to administrators.
type VolumeInfo struct {
	ID     VolumeID    `json:"id"`
	Name   string      `json:"name"`
	Path   string      `json:"-" pb:"path"` // path of the junction, which may be no UTF-8; "" if the volume is not attached
	State  VolumeState `json:"state"`
	Policy Policy      `json:"policy"`
	// Open: the volume's usage is known. A volume without users is closed, and listing volumes
	// does not open the volume.
	Open       bool   `json:"open"`
	UsedBytes  uint64 `json:"used_bytes"`
	UsedInodes uint64 `json:"used_inodes"`

	Created      time.Time `json:"created,omitzero"`
	TrashSeconds uint64    `json:"trash_seconds,omitempty"` // how long the volume stays in the trash after its deletion
	Deleted      time.Time `json:"deleted,omitzero"`        // in the trash
	Until        time.Time `json:"until,omitzero"`
	// Compression is the compression of newly sealed chunks: none, s2 or zstd.
	Compression    string    `json:"compression,omitempty"`
	AdvisoryBytes  uint64    `json:"advisory_bytes,omitempty"`
	AdvisoryInodes uint64    `json:"advisory_inodes,omitempty"`
	BytesOver      time.Time `json:"bytes_over,omitzero"` // since when the usage counts as above the advisory quota
	InodesOver     time.Time `json:"inodes_over,omitzero"`
	// LabelsUnread is the reason why the labels could not be read: the volume may have labels.
	Labels       map[string]string `json:"labels,omitempty"`
	LabelsUnread string            `json:"labels_unread,omitempty"`
	// Origin is the snapshot that a clone still needs.
	Origin *VolumeOrigin `json:"origin,omitempty"`
}

// VolumeState is the state of a volume, as administrators see it.
type VolumeState string

// States of a volume. Sessions can use a volume that is ready, attaching or detaching.
const (
	VolumeReady     VolumeState = "ready"
	VolumeAttaching VolumeState = "attaching"
	VolumeDetaching VolumeState = "detaching"
	VolumeCreating  VolumeState = "creating"
	VolumeInTrash   VolumeState = "trash"
	VolumeDeleting  VolumeState = "deleting"
)

// Usable reports that sessions can use a volume of this state.
func (s VolumeState) Usable() bool {
	return s == VolumeReady || s == VolumeAttaching || s == VolumeDetaching
}

// VolumeOrigin is the snapshot from which a volume was cloned.
type VolumeOrigin struct {
	Volume   VolumeID `json:"volume"`
	Snapshot string   `json:"snapshot"`
	// Implied: the snapshot was taken for the clone, and is deleted with the clone.
	Implied bool `json:"implied,omitempty"`
}

// VolumeWords are the settings of a volume outside its policy. nil keeps a setting.
type VolumeWords struct {
	// TrashSeconds is how long the volume stays in the trash after its deletion.
	TrashSeconds *uint64 `json:"trash_seconds,omitempty"`
	// Compression of chunks sealed after the change: none, s2 or zstd.
	Compression *string `json:"compression,omitempty"`
	// Advisory quota, bytes and files; 0: none.
	AdvisoryBytes  *uint64 `json:"advisory_bytes,omitempty"`
	AdvisoryInodes *uint64 `json:"advisory_inodes,omitempty"`
	// Labels to set; a nil value removes a label.
	Labels map[string]*string `json:"labels,omitempty"`
	// Only, of a change, names the words of the policy to set, see PolicyWords; the rest of the
	// volume's policy stays unchanged. nil: all words.
	Only []string `json:"only,omitzero"`
	// Force: make the volume immutable also if a client can't commit its buffered bytes, which
	// are then lost; set the policy also if no server of the cluster can meet the policy.
	Force bool `json:"force,omitempty"`
}

// Empty reports that no setting is set.
func (w VolumeWords) Empty() bool {
	return w.TrashSeconds == nil && w.Compression == nil && w.AdvisoryBytes == nil && w.AdvisoryInodes == nil && len(w.Labels) == 0 && w.Only == nil && !w.Force
}
