package wire

import "penstock.io/penstock/meta"

// Bodies and reports of the requests about group snapshots, as JSON.

// What is to become of a group's record, in GroupRequest.
const (
	GroupBegin  = "begin"  // it is made, undecided
	GroupDecide = "decide" // it is ready
	GroupAbort  = "abort"  // it is aborted, unless it is ready
	GroupForget = "forget" // the record goes, of one that is not being taken
)

// GroupRequest is the body of AdminGroupPut. Volumes are needed always, and are the
// group's, ascending: who asks must be allowed to administer each.
type GroupRequest struct {
	Do      string          `json:"do"`
	ID      uint64          `json:"id"`
	Volumes []meta.VolumeID `json:"volumes"`
	// Members, of GroupDecide: one for each volume, in this order.
	Members []meta.GroupMember `json:"members,omitempty"`
}

// Steps of a group at one of its volumes, in GroupStep, in their order.
const (
	GroupHold    = "hold"    // put the barrier up, and begin to take leases back
	GroupReady   = "ready"   // wait until the volume could be snapshot
	GroupTake    = "take"    // answer no changes from now on, and take the snapshot
	GroupRelease = "release" // go on; it fails if changes were answered since
	GroupDelete  = "delete"  // of a group that is ready or aborted: end the hold, delete the snapshot
)

// GroupStep is the body of AdminGroupStep.
type GroupStep struct {
	Step   string `json:"step"`
	ID     uint64 `json:"id"`
	Strict bool   `json:"strict,omitempty"` // of GroupHold, as in SnapshotRequest
}
