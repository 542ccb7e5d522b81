package wire

// Bodies of the requests about volumes, as JSON.

// Once is the first part of the body of a request that the server executes once even if the
// client sends the request several times.
type Once struct {
	// Token identifies the request: random, never zero.
	Token uint64 `json:"token,omitempty"`
}

// VolumeCreation is the body of AdminCreateVolume.
type VolumeCreation struct {
	Once
	VolumeWords
}

// VolumeWords are the settings of a volume outside its policy: the body of AdminSetPolicy, and
// part of the body of AdminCreateVolume. nil keeps a setting.
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
	// Only, of AdminSetPolicy, names the words of the request's policy to set, see
	// meta.PolicyWords; the rest of the volume's policy stays unchanged. nil: all words.
	Only []string `json:"only,omitzero"`
	// Force: make the volume immutable also if a client can't commit its buffered bytes, which
	// are then lost; set the policy also if no server of the cluster can meet the policy.
	Force bool `json:"force,omitempty"`
}

// Empty reports that no setting is set.
func (w VolumeWords) Empty() bool {
	return w.TrashSeconds == nil && w.Compression == nil && w.AdvisoryBytes == nil && w.AdvisoryInodes == nil && len(w.Labels) == 0 && w.Only == nil && !w.Force
}

// VolumeDeletion is the body of AdminDeleteVolume. With an empty body the volume's trash time
// applies.
type VolumeDeletion struct {
	Once
	Now bool `json:"now,omitempty"` // past the trash
	// Name is the name required of the volume at the moment of its deletion; "": any.
	Name string `json:"name,omitempty"`
}
