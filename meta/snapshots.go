package meta

import (
	"slices"
	"time"
)

// SnapshotState says which uses of a snapshot are possible.
type SnapshotState string

// States of a snapshot.
const (
	SnapshotReady    SnapshotState = "ready"
	SnapshotDeleting SnapshotState = "deleting"     // the snapshot can't be read any more
	SnapshotRolling  SnapshotState = "rolling back" // the volume is being rolled back to the snapshot
	// SnapshotDropped: the snapshot was deleted though clones need it, and goes with the
	// last of these clones. Until then the snapshot can be read, keeps its name, and
	// takes no new clones.
	SnapshotDropped SnapshotState = "kept for clones"
)

// SnapshotInfo describes a snapshot to callers of the administrative API.
type SnapshotInfo struct {
	Name    string        `json:"name" yaml:"name"`
	At      Generation    `json:"generation" yaml:"generation"` // the value for Call.At
	Created time.Time     `json:"created" yaml:"created"`
	Inodes  uint64        `json:"inodes" yaml:"inodes"` // of the volume, at the moment of the snapshot
	Bytes   uint64        `json:"bytes" yaml:"bytes"`
	State   SnapshotState `json:"state" yaml:"state"`
	// Digest is nil until it has been computed.
	Digest *DigestInfo `json:"digest,omitempty" yaml:"digest,omitempty"`
	// DigestError is the error of the last attempt to compute the digest.
	DigestError string `json:"digest_error,omitempty" yaml:"digest_error,omitempty"`
	// DigestTrying: after DigestError, another attempt is under way.
	DigestTrying bool      `json:"digest_trying,omitempty" yaml:"digest_trying,omitempty"`
	Pins         []PinInfo `json:"pins,omitempty" yaml:"pins,omitempty"` // pins that keep the snapshot from deletion
	// Shown: the volume is a mirror's target, and its readers see this snapshot.
	Shown bool `json:"shown,omitempty" yaml:"shown,omitempty"`
	// MorePins are not listed: a volume's pins would take too many bytes.
	MorePins uint64 `json:"more_pins,omitempty" yaml:"more_pins,omitempty"`
	// Group is the id of the snapshot's group; zero: no group. The snapshot is deleted
	// with the group.
	Group uint64 `json:"group,omitempty" yaml:"group,omitempty"`
	// Strict: the caller asked for a complete snapshot only, and the snapshot is
	// complete.
	Strict bool `json:"strict,omitempty" yaml:"strict,omitempty"`
	// Unanswered counts the files that are in the snapshot only as of their last sync:
	// their clients did not commit their buffered bytes within a second. UnansweredBy
	// names the clients, at most 8. Only the owner that took the snapshot knows this, as
	// long as it owns the volume.
	Unanswered   uint64   `json:"unanswered,omitempty" yaml:"unanswered,omitempty"`
	UnansweredBy []string `json:"unanswered_by,omitempty" yaml:"unanswered_by,omitempty"`
}

// DigestInfo is the digest of a snapshot.
type DigestInfo struct {
	Digest string    `json:"digest" yaml:"digest"` // in the form of package meta/digest
	Made   time.Time `json:"made" yaml:"made"`
	Inodes uint64    `json:"inodes" yaml:"inodes"` // inodes that the digest covers
	Bytes  uint64    `json:"bytes" yaml:"bytes"`   // bytes of these files, holes included
	Read   uint64    `json:"read" yaml:"read"`     // bytes read because no earlier digest covers them
}

// PinInfo is a pin, which keeps a snapshot from being deleted.
type PinInfo struct {
	Holder string    `json:"holder" yaml:"holder"`
	By     string    `json:"by" yaml:"by"` // the identity that made the pin
	Made   time.Time `json:"made" yaml:"made"`
	Until  time.Time `json:"until" yaml:"until"` // on a clock that may differ by ClockSkew
}

// SnapshotList is a volume's snapshots, oldest first.
type SnapshotList struct {
	Snapshots []SnapshotInfo `json:"snapshots" yaml:"snapshots"`
	// Held, if Counted, is SnapshotUse.Alone: the bytes that only snapshots have.
	// Otherwise Held is the sum of the superseded extents in chunks, each counted whole:
	// the volume may still have some or all of these bytes, as after a rollback.
	Held    uint64 `json:"held_bytes" yaml:"held_bytes"`
	Counted bool   `json:"held_counted" yaml:"held_counted"`
	Keep    string `json:"keep,omitempty" yaml:"keep,omitempty"` // the schedule
	// Failing says why the scheduled snapshot that is due could not be taken.
	Failing *ScheduleFailing `json:"schedule_failing,omitempty" yaml:"schedule_failing,omitempty"`
	// Quota says how the bytes of snapshots count in the volume's quota; nil: they do not
	// count.
	Quota *SnapshotQuota `json:"quota,omitempty" yaml:"quota,omitempty"`
}

// SnapshotQuota has the bytes that only snapshots have, as a quota counts these bytes.
type SnapshotQuota struct {
	// InForce: the bytes count in the quota. Otherwise the bytes from before the policy
	// are still being counted.
	InForce bool   `json:"in_force" yaml:"in_force"`
	Bytes   uint64 `json:"bytes" yaml:"bytes"`
	// Falls: a snapshot was deleted, and the bytes that its deletion gives back are being
	// counted.
	Falls bool `json:"falls,omitempty" yaml:"falls,omitempty"`
}

// SnapshotUse counts the bytes that a volume's snapshots keep, in bytes of files, before
// compression and for one replica, as a quota counts. Every stored byte counts once,
// however many snapshots have it, and not at all if the volume has the byte now:
// meta/namespace, ReadHeld.
type SnapshotUse struct {
	Live  uint64 `json:"live_bytes" yaml:"live_bytes"`                       // of the volume as it is now
	Alone uint64 `json:"snapshots_alone_bytes" yaml:"snapshots_alone_bytes"` // bytes that only snapshots have
	Going uint64 `json:"deleting_bytes" yaml:"deleting_bytes"`               // part of Alone that is being freed
	// Freed is the part of Alone that a deletion of the requested snapshots would give
	// back.
	Freed     uint64          `json:"freed_bytes" yaml:"freed_bytes"`
	Snapshots []SnapshotUseOf `json:"snapshots" yaml:"snapshots"` // oldest first; without snapshots under deletion
}

// SnapshotUseOf is a snapshot's part.
type SnapshotUseOf struct {
	Name  string     `json:"name" yaml:"name"`
	At    Generation `json:"generation" yaml:"generation"`
	Bytes uint64     `json:"bytes" yaml:"bytes"` // of the volume, at the moment of the snapshot
	// Alone is the number of bytes that only this snapshot has: its deletion gives these
	// bytes back. The sum over all snapshots is less than SnapshotUse.Alone, since bytes
	// of several snapshots count in no single snapshot.
	Alone uint64 `json:"alone_bytes" yaml:"alone_bytes"`
}

// Named returns the index of the snapshot of a name, or -1. A snapshot under deletion has
// lost its name: Named finds a new snapshot of that name instead. A snapshot kept for
// clones keeps its name.
func (l *SnapshotList) Named(name string) int {
	return slices.IndexFunc(l.Snapshots, func(i SnapshotInfo) bool { return i.Name == name && i.State != SnapshotDeleting })
}

// ScheduleFailing describes a scheduled snapshot that is due and could not be taken.
type ScheduleFailing struct {
	Since time.Time `json:"since" yaml:"since"` // the first failed attempt
	Tries int       `json:"tries" yaml:"tries"` // since then
	Why   string    `json:"why" yaml:"why"`     // the error of the last attempt
	Next  time.Time `json:"next" yaml:"next"`   // the latest time of the next attempt
}
