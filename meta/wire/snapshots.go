package wire

import (
	"slices"
	"time"

	"penstock.io/penstock/meta"
)

// Bodies and reports of the requests about snapshots, as JSON.

// States of a snapshot, in SnapshotInfo.
const (
	SnapshotReady    = "ready"
	SnapshotDeleting = "deleting"     // nobody can read it any more
	SnapshotRolling  = "rolling back" // the volume is being rolled back to it
	// SnapshotDropped: it was deleted (SnapshotRequest.Later), and goes with the last of
	// its clones. Until then it is read as before, keeps its name, and makes no more
	// clones. Programs that know nothing of this take it for one that can be read.
	SnapshotDropped = "kept for clones"
)

// SnapshotInfo is what one is told of a snapshot.
type SnapshotInfo struct {
	Name    string          `json:"name" yaml:"name"`
	At      meta.Generation `json:"generation" yaml:"generation"` // what Call.At takes
	Created time.Time       `json:"created" yaml:"created"`
	Inodes  uint64          `json:"inodes" yaml:"inodes"` // of the volume when it was taken
	Bytes   uint64          `json:"bytes" yaml:"bytes"`
	State   string          `json:"state" yaml:"state"`
	// Digest is missing until it was computed.
	Digest *DigestInfo `json:"digest,omitempty" yaml:"digest,omitempty"`
	// DigestError is why it was not, the last time that it was tried.
	DigestError string `json:"digest_error,omitempty" yaml:"digest_error,omitempty"`
	// DigestTrying: after DigestError it is being tried again now. Owners of older
	// versions don't tell.
	DigestTrying bool      `json:"digest_trying,omitempty" yaml:"digest_trying,omitempty"`
	Pins         []PinInfo `json:"pins,omitempty" yaml:"pins,omitempty"` // who keeps it from being deleted
	// Shown: the volume is a mirror's target, and this is what its readers see.
	Shown bool `json:"shown,omitempty" yaml:"shown,omitempty"`
	// MorePins are not listed: a volume's pins would take too many bytes.
	MorePins uint64 `json:"more_pins,omitempty" yaml:"more_pins,omitempty"`
	// Group is the id of the group that it belongs to, zero if to none: it is deleted with
	// that (AdminGroups tells which it is, of the snapshot's name).
	Group uint64 `json:"group,omitempty" yaml:"group,omitempty"`
	// Strict, in the answer to who has it taken: it was, see SnapshotRequest.
	Strict bool `json:"strict,omitempty" yaml:"strict,omitempty"`
	// Unanswered, in the answer to who has it taken, are the files that are in it only
	// as they were synced last: their clients did not commit what they had buffered
	// within a second. UnansweredBy names the clients, at most 8 of them.
	// The volume's owner of then tells it in lists, too, as long as it has the volume.
	Unanswered   uint64   `json:"unanswered,omitempty" yaml:"unanswered,omitempty"`
	UnansweredBy []string `json:"unanswered_by,omitempty" yaml:"unanswered_by,omitempty"`
}

// DigestInfo is what one is told of a snapshot's digest.
type DigestInfo struct {
	Digest string    `json:"digest" yaml:"digest"` // as package meta/digest writes it
	Made   time.Time `json:"made" yaml:"made"`
	Inodes uint64    `json:"inodes" yaml:"inodes"` // that it is over
	Bytes  uint64    `json:"bytes" yaml:"bytes"`   // of their files, holes included
	Read   uint64    `json:"read" yaml:"read"`     // that were not known from an earlier digest
}

// States of an index, in IndexAnswer.
const (
	IndexReady    = "ready"
	IndexBuilding = "building" // ask again later
	IndexNone     = "none"     // this server makes none, or none of this snapshot: Detail says why
)

// IndexAnswer answers AdminSnapshotIndex.
type IndexAnswer struct {
	At     meta.Generation `json:"generation"` // of the snapshot
	State  string          `json:"state"`
	Detail string          `json:"detail,omitempty"` // why it took more than one try so far, or is none
	// Of an index that is ready: the version of its form, its digest (package
	// meta/index), its length in bytes, and where it lies.
	Version uint8       `json:"version,omitempty"`
	Digest  []byte      `json:"digest,omitempty"`
	Length  uint64      `json:"length,omitempty"`
	Inodes  uint64      `json:"inodes,omitempty"`
	Parts   []IndexPart `json:"parts,omitempty"`
}

// IndexPart is the first Length bytes of a chunk.
type IndexPart struct {
	Chunk       []byte          `json:"chunk"` // its id, 16 bytes
	Length      uint64          `json:"length"`
	Servers     []meta.ServerID `json:"servers"`
	Sealed      bool            `json:"sealed,omitempty"`
	ChunkLength uint64          `json:"chunk_length,omitempty"` // if sealed
}

// PinInfo is what one is told of a pin.
type PinInfo struct {
	Holder string    `json:"holder" yaml:"holder"`
	By     string    `json:"by" yaml:"by"` // the identity that made it
	Made   time.Time `json:"made" yaml:"made"`
	Until  time.Time `json:"until" yaml:"until"` // on a clock that may be meta.ClockSkew away
}

// PinRequest is the body of AdminPin and AdminUnpin.
type PinRequest struct {
	Holder string        `json:"holder"`
	TTL    time.Duration `json:"ttl,omitempty"` // nanoseconds from now
	// At, if not zero, is the generation of the snapshot that is meant: another one
	// may have its name by now. A server that knows nothing of this passes it over.
	At meta.Generation `json:"generation,omitempty"`
}

// UnpinAnswer answers AdminUnpin.
type UnpinAnswer struct {
	Released bool `json:"released"` // there was such a pin
}

// SnapshotsRequest is the body of AdminSnapshots; it may be missing.
type SnapshotsRequest struct {
	// Digest is the name of a snapshot for whose digest somebody waits: it is computed
	// before others, and faster. A server that knows nothing of this passes it over.
	Digest string `json:"digest,omitempty"`
	// Unpaced: its bytes are read at no rate, for a mirror that copies at none. Of who
	// may take snapshots of the volume; of others, and by a server that knows nothing of
	// this, it is passed over.
	Unpaced bool `json:"unpaced,omitempty"`
	// Only is the name of snapshots of which is asked alone. A server that knows nothing of
	// this tells of all.
	Only string `json:"only,omitempty"`
	// Count asks what snapshots alone hold to the byte, if that can be counted in a moment. A
	// server that knows nothing of this passes it over.
	Count bool `json:"count,omitempty"`
}

// SnapshotList answers AdminSnapshots: oldest first.
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

// SnapshotUseRequest is the body of AdminSnapshotUse; it may be missing.
type SnapshotUseRequest struct {
	// Delete are the names of snapshots about which is asked what deleting all of them
	// would give back.
	Delete []string `json:"delete,omitempty"`
}

// SnapshotUse answers it: what a volume's snapshots hold, in bytes of files, before
// compression and however many replicas there are, as a quota counts. Every stored byte
// counts once, however many snapshots have it, and not at all if the volume has it as
// it is now: package meta/namespace, ReadHeld.
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
	Name  string          `json:"name" yaml:"name"`
	At    meta.Generation `json:"generation" yaml:"generation"`
	Bytes uint64          `json:"bytes" yaml:"bytes"` // of the volume when it was taken
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

// SnapshotRequest is the body of AdminSnapshotCreate, AdminSnapshotDelete and
// AdminSnapshotRollback.
type SnapshotRequest struct {
	// Token names the request, so that it may be sent again. Of AdminSnapshotRollback a
	// server of before it passes it over.
	Token uint64 `json:"token,omitempty"`
	// At, of AdminSnapshotDelete, if not zero, is the generation of the snapshot that is
	// meant: another one may have its name by now, and if it is gone that is no error. A
	// server that knows nothing of this passes it over.
	At meta.Generation `json:"generation,omitempty"`
	// Force: a volume that is in use is taken from its sessions.
	Force bool `json:"force,omitempty"`
	// Filler: only if the volume is a mirror's target and the session that asks is
	// the one that fills it. A server that knows nothing of this passes it over.
	Filler bool `json:"filler,omitempty"`
	// Strict: no snapshot is taken that would have files only as they were synced last
	// (Unavailable). A server that knows nothing of this does not say so in its answer, nor
	// does one that finds what an owner of before it took for this request.
	Strict bool `json:"strict,omitempty"`
	// Later, of AdminSnapshotDelete: one that clones need is not refused (Busy), but goes
	// with the last of them, and is SnapshotDropped until then. One that somebody pinned is
	// refused as ever. A server that knows nothing of this refuses both.
	Later bool `json:"later,omitempty"`
}

// DiffRequest is AdminSnapshotDiff's body.
type DiffRequest struct {
	From string `json:"from"`
	To   string `json:"to,omitempty"` // empty: the volume as it is now
	// Skip is how many changes were told already, Of the number that the first
	// answer gave for the comparison.
	Skip int    `json:"skip,omitempty"`
	Of   uint64 `json:"of,omitempty"`
	// Exact: also changes of times alone, and From of names that were added.
	Exact bool `json:"exact,omitempty"`
}

// DiffAnswer answers it. A comparison that the owner does not know any more is
// refused with Stale: begin again.
type DiffAnswer struct {
	Changes []DiffChange `json:"changes"`
	More    bool         `json:"more,omitempty"`
	Exact   bool         `json:"exact,omitempty"` // as it was asked for
	Of      uint64       `json:"of,omitempty"`
}

// DiffChange is a meta.Change whose names may be any bytes.
type DiffChange struct {
	Kind    meta.ChangeKind `json:"kind"`
	Path    []byte          `json:"path"`
	From    []byte          `json:"from,omitempty"`
	Ino     meta.Ino        `json:"ino,omitempty"`
	Type    uint32          `json:"type"`
	Content bool            `json:"content,omitempty"`
}
