package meta

import "time"

// Mirror is the record of a mirror: what is copied to where, and how far that
// is. It is kept by the target's cluster, under the number of the target.
type Mirror struct {
	// Name is drawn when the mirror is made: its snapshots begin with it, its pins
	// are held under it.
	Name    string       `json:"name"`
	Version int          `json:"v"`
	Target  VolumeID     `json:"target"`
	Source  MirrorSource `json:"source"`
	// State is what is wanted.
	State MirrorState `json:"state"`
	// Every is how often a round begins; zero: when one is asked for.
	Every time.Duration `json:"every,omitempty"`
	// Rate bounds the bytes sent in a second; zero: as fast as it goes.
	Rate uint64 `json:"rate,omitempty"`
	// Keep is how many complete snapshots stay in the target, at least 1.
	Keep int `json:"keep"`
	// Asked counts the rounds that were asked for; Heard is what it was when the
	// last round began.
	Asked uint64 `json:"asked,omitempty"`
	Heard uint64 `json:"heard,omitempty"`
	// Round is the one under way. It names the snapshot before that is taken.
	Round *MirrorRound `json:"round,omitempty"`
	// Last is the one that readers see; its snapshots are what the next round
	// begins with.
	Last   *MirrorRound `json:"last,omitempty"`
	Rounds uint64       `json:"rounds,omitempty"` // that were completed
	// Error is why the last try of a round failed, and Since when it first did.
	Error string    `json:"error,omitempty"`
	Since time.Time `json:"since,omitzero"`
	// Behind estimates the bytes that the source has and the target has not, as of
	// Looked.
	Behind uint64    `json:"behind,omitempty"`
	Looked time.Time `json:"looked,omitzero"`
	// Revision is the record's at the store that keeps it: who writes it back must
	// have read the last one.
	Revision int64 `json:"revision,omitempty"`
}

// MirrorVersion is the only version of the record.
const MirrorVersion = 1

// MirrorSource says where the source is. Addresses and Credentials are empty for
// a volume of the same cluster.
type MirrorSource struct {
	Meta        []string `json:"meta,omitempty"`        // addresses of metadata servers
	Credentials string   `json:"credentials,omitempty"` // directory with a certificate, on the machine that copies
	Volume      string   `json:"volume"`                // its name
	ID          VolumeID `json:"id"`
}

// MirrorState is what is wanted of a mirror.
type MirrorState string

const (
	MirrorRunning   MirrorState = "running"
	MirrorPaused    MirrorState = "paused"
	MirrorPromoting MirrorState = "promoting" // nobody fills it any more; the target may be a volume like others
	MirrorPromoted  MirrorState = "promoted"  // the target is a volume like others
)

// MirrorRound is one copy of a snapshot.
type MirrorRound struct {
	Snapshot string    `json:"snapshot"`       // its name, in source and target
	Base     string    `json:"base,omitempty"` // the snapshot that the target had before; empty: none
	Taken    time.Time `json:"taken,omitzero"` // when the source was so
	Began    time.Time `json:"began,omitzero"`
	Copied   time.Time `json:"copied,omitzero"` // the target had everything
	Ended    time.Time `json:"ended,omitzero"`  // checked, and shown
	Digest   string    `json:"digest,omitempty"`
	Planned  uint64    `json:"planned,omitempty"` // bytes to be sent, as far as that is known
	Sent     uint64    `json:"sent,omitempty"`    // bytes of files that were written to the target
	Inodes   uint64    `json:"inodes,omitempty"`  // that were written or changed
}
