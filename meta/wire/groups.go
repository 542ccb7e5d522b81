package wire

import "penstock.io/penstock/meta"

// Bodies and reports of the requests about group snapshots, as JSON.

// Changes of a group's record, in GroupRequest.
const (
	GroupBegin  = "begin"  // make the record, undecided
	GroupDecide = "decide" // set the group ready
	GroupAbort  = "abort"  // abort the group unless ready
	GroupForget = "forget" // delete the record unless the group is being taken
)

// GroupRequest is the body of AdminGroupPut. Volumes is always required, and lists the group's
// volumes in ascending order: the caller must have the right to administer each volume.
type GroupRequest struct {
	Do      string          `json:"do"`
	ID      uint64          `json:"id"`
	Volumes []meta.VolumeID `json:"volumes"`
	// Members, of GroupDecide: a member for each volume, in the order of Volumes.
	Members []meta.GroupMember `json:"members,omitempty"`
}

// Steps of a group at a volume, in GroupStep, in order.
const (
	GroupHold    = "hold"    // raise the barrier, and begin to recall leases
	GroupReady   = "ready"   // wait until a snapshot of the volume can be taken
	GroupTake    = "take"    // answer no changes from now on, and take the snapshot
	GroupRelease = "release" // answer changes again; fails if the volume answered changes since GroupTake
	GroupDelete  = "delete"  // of a ready or aborted group: end the hold, delete the snapshot
)

// GroupStep is the body of AdminGroupStep.
type GroupStep struct {
	Step   string `json:"step"`
	ID     uint64 `json:"id"`
	Strict bool   `json:"strict,omitempty"` // of GroupHold, as in SnapshotRequest
}
