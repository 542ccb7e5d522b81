package meta

import "time"

// Mirror is the record of a mirror: source, target and progress. The target's cluster keeps
// the record under the target's volume id.
type Mirror struct {
	// Name is drawn when the mirror is created. It is the prefix of the mirror's snapshots and
	// the holder of its pins.
	Name    string       `json:"name"`
	Version int          `json:"v" pb:"version"`
	Target  VolumeID     `json:"target"`
	Source  MirrorSource `json:"source"`
	// State is the wanted state.
	State MirrorState `json:"state"`
	// Every is the time between the beginnings of two rounds; zero: rounds on request only.
	Every time.Duration `json:"every,omitempty"`
	// Rate bounds the bytes sent in a second; zero: unlimited.
	Rate uint64 `json:"rate,omitempty" pb:"rate_bytes"`
	// Keep is how many complete snapshots stay in the target, at least 1.
	Keep int `json:"keep"`
	// Asked counts the requested rounds. Heard is the value of Asked when the last round
	// began.
	Asked uint64 `json:"asked,omitempty"`
	Heard uint64 `json:"heard,omitempty"`
	// Round is the round under way. The record names the round's snapshot before it is taken.
	Round *MirrorRound `json:"round,omitempty"`
	// Last is the round that readers see. The next round begins with its snapshots.
	Last   *MirrorRound `json:"last,omitempty"`
	Rounds uint64       `json:"rounds,omitempty"` // completed rounds
	// Error is the error of the last failed attempt of a round, and Since the time of the
	// first.
	Error string    `json:"error,omitempty"`
	Since time.Time `json:"since,omitzero"`
	// Behind estimates the bytes that are missing in the target, as of Looked.
	Behind uint64    `json:"behind,omitempty" pb:"behind_bytes"`
	Looked time.Time `json:"looked,omitzero"`
	// Revision is the revision of the record in its store. A writer must have read the latest
	// revision.
	Revision int64 `json:"revision,omitempty"`
}

// MirrorVersion is the only version of the record.
const MirrorVersion = 1

// MirrorSource says where the source is. Addresses and Credentials are empty for
// a volume of the same cluster.
type MirrorSource struct {
	Meta        []string `json:"meta,omitempty"`        // addresses of metadata servers
	Credentials string   `json:"credentials,omitempty"` // directory with a certificate, on the machine that runs the copy
	Volume      string   `json:"volume"`                // name of the volume
	ID          VolumeID `json:"id"`
}

// MirrorState is the wanted state of a mirror.
type MirrorState string

const (
	MirrorRunning   MirrorState = "running"
	MirrorPaused    MirrorState = "paused"
	MirrorPromoting MirrorState = "promoting" // copying has ended; the target may already be an ordinary volume
	MirrorPromoted  MirrorState = "promoted"  // the target is a volume like others
)

// MirrorRound is one copy of a snapshot.
type MirrorRound struct {
	Snapshot string    `json:"snapshot"`       // name of the snapshot, in source and target
	Base     string    `json:"base,omitempty"` // the previous snapshot of the target; empty: none
	Taken    time.Time `json:"taken,omitzero"` // when the source was so
	Began    time.Time `json:"began,omitzero"`
	Copied   time.Time `json:"copied,omitzero"` // the target had everything
	Ended    time.Time `json:"ended,omitzero"`  // checked, and shown
	Digest   string    `json:"digest,omitempty"`
	Planned  uint64    `json:"planned,omitempty" pb:"planned_bytes"` // bytes to send, as far as known
	Sent     uint64    `json:"sent,omitempty" pb:"sent_bytes"`       // file bytes written to the target
	Inodes   uint64    `json:"inodes,omitempty"`                     // inodes written or changed
}
