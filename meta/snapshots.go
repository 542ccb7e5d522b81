package meta

import (
	"slices"
	"time"
)

// SnapshotState says what may be done with a snapshot.
type SnapshotState string

// States of a snapshot.
const (
	SnapshotReady    SnapshotState = "ready"
	SnapshotDeleting SnapshotState = "deleting"     // nobody can read it any more
	SnapshotRolling  SnapshotState = "rolling back" // the volume is being rolled back to it
	// SnapshotDropped: it was deleted though clones need it, and goes with the last of them.
	// Until then it is read as before, keeps its name, and no more clones are made of it.
	SnapshotDropped SnapshotState = "kept for clones"
)

// SnapshotInfo is what callers of the administrative API are told of a snapshot.
type SnapshotInfo struct {
	Name    string        `json:"name" yaml:"name"`
	At      Generation    `json:"generation" yaml:"generation"` // what Call.At takes
	Created time.Time     `json:"created" yaml:"created"`
	Inodes  uint64        `json:"inodes" yaml:"inodes"` // of the volume when it was taken
	Bytes   uint64        `json:"bytes" yaml:"bytes"`
	State   SnapshotState `json:"state" yaml:"state"`
	// Digest is missing until it was computed.
	Digest *DigestInfo `json:"digest,omitempty" yaml:"digest,omitempty"`
	// DigestError is why it was not, the last time that it was tried.
	DigestError string `json:"digest_error,omitempty" yaml:"digest_error,omitempty"`
	// DigestTrying: after DigestError it is being tried again now.
	DigestTrying bool      `json:"digest_trying,omitempty" yaml:"digest_trying,omitempty"`
	Pins         []PinInfo `json:"pins,omitempty" yaml:"pins,omitempty"` // who keeps it from being deleted
	// Shown: the volume is a mirror's target, and this is what its readers see.
	Shown bool `json:"shown,omitempty" yaml:"shown,omitempty"`
	// MorePins are not listed: a volume's pins would take too many bytes.
	MorePins uint64 `json:"more_pins,omitempty" yaml:"more_pins,omitempty"`
	// Group is the id of the group that it belongs to, zero if to none: it is deleted with
	// the group.
	Group uint64 `json:"group,omitempty" yaml:"group,omitempty"`
	// Strict: the caller who had it taken asked for nothing but a whole one, and it is.
	Strict bool `json:"strict,omitempty" yaml:"strict,omitempty"`
	// Unanswered are the files that are in it only as they were synced last: their clients
	// did not commit what they had buffered within a second. UnansweredBy names the
	// clients, at most 8 of them. The owner that took it knows, as long as it has the volume.
	Unanswered   uint64   `json:"unanswered,omitempty" yaml:"unanswered,omitempty"`
	UnansweredBy []string `json:"unanswered_by,omitempty" yaml:"unanswered_by,omitempty"`
}

// DigestInfo is the digest of a snapshot.
type DigestInfo struct {
	Digest string    `json:"digest" yaml:"digest"` // as package meta/digest writes it
	Made   time.Time `json:"made" yaml:"made"`
	Inodes uint64    `json:"inodes" yaml:"inodes"` // that it is over
	Bytes  uint64    `json:"bytes" yaml:"bytes"`   // of their files, holes included
	Read   uint64    `json:"read" yaml:"read"`     // that were not known from an earlier digest
}

// PinInfo is a pin, which keeps a snapshot from being deleted.
type PinInfo struct {
	Holder string    `json:"holder" yaml:"holder"`
	By     string    `json:"by" yaml:"by"` // the identity that made it
	Made   time.Time `json:"made" yaml:"made"`
	Until  time.Time `json:"until" yaml:"until"` // on a clock that may be ClockSkew away
}

// SnapshotList is a volume's snapshots, oldest first.
type SnapshotList struct {
	Snapshots []SnapshotInfo `json:"snapshots" yaml:"snapshots"`
	// Held, if Counted, is what snapshots alone hold: SnapshotUse.Alone. Else it is the sum of
	// the superseded extents in chunks, each as a whole: the volume may still have bytes of
	// them, or all, as after a rollback.
	Held    uint64 `json:"held_bytes" yaml:"held_bytes"`
	Counted bool   `json:"held_counted" yaml:"held_counted"`
	Keep    string `json:"keep,omitempty" yaml:"keep,omitempty"` // the schedule
	// Failing is why the snapshot that is due by schedule could not be taken.
	Failing *ScheduleFailing `json:"schedule_failing,omitempty" yaml:"schedule_failing,omitempty"`
	// Quota is what of them counts in the volume's quota; nil: its policy has it that
	// nothing does.
	Quota *SnapshotQuota `json:"quota,omitempty" yaml:"quota,omitempty"`
}

// SnapshotQuota is what snapshots alone hold, as a quota counts it.
type SnapshotQuota struct {
	// InForce: it counts. Else what there was before the policy is being counted.
	InForce bool   `json:"in_force" yaml:"in_force"`
	Bytes   uint64 `json:"bytes" yaml:"bytes"`
	// Falls: a snapshot was deleted, and what that gives back is being counted.
	Falls bool `json:"falls,omitempty" yaml:"falls,omitempty"`
}

// SnapshotUse is what a volume's snapshots hold, in bytes of files, before
// compression and however many replicas there are, as a quota counts. Every stored byte
// counts once, however many snapshots have it, and not at all if the volume has it as
// it is now: meta/namespace, ReadHeld.
type SnapshotUse struct {
	Live  uint64 `json:"live_bytes" yaml:"live_bytes"`                       // of the volume as it is now
	Alone uint64 `json:"snapshots_alone_bytes" yaml:"snapshots_alone_bytes"` // what snapshots alone hold
	Going uint64 `json:"deleting_bytes" yaml:"deleting_bytes"`               // of that: is being freed
	// Freed is of Alone: what deleting those that were asked about would give back.
	Freed     uint64          `json:"freed_bytes" yaml:"freed_bytes"`
	Snapshots []SnapshotUseOf `json:"snapshots" yaml:"snapshots"` // oldest first; without those that are being deleted
}

// SnapshotUseOf is a snapshot's part.
type SnapshotUseOf struct {
	Name  string     `json:"name" yaml:"name"`
	At    Generation `json:"generation" yaml:"generation"`
	Bytes uint64     `json:"bytes" yaml:"bytes"` // of the volume when it was taken
	// Alone is what nobody else holds: deleting this one gives it back. The sum over all
	// is less than what they hold together, since what several have is in none.
	Alone uint64 `json:"alone_bytes" yaml:"alone_bytes"`
}

// Named is where the snapshot of a name is in the list, -1 if there is none. One that is
// being deleted gives its name free: a new one may stand beside it, and is meant. One that
// is kept for clones keeps its name, too.
func (l *SnapshotList) Named(name string) int {
	return slices.IndexFunc(l.Snapshots, func(i SnapshotInfo) bool { return i.Name == name && i.State != SnapshotDeleting })
}

// ScheduleFailing tells of a snapshot that is due and could not be taken.
type ScheduleFailing struct {
	Since time.Time `json:"since" yaml:"since"` // when it could not for the first time
	Tries int       `json:"tries" yaml:"tries"` // since then
	Why   string    `json:"why" yaml:"why"`     // at the last one
	Next  time.Time `json:"next" yaml:"next"`   // when it is tried again, at the latest
}
