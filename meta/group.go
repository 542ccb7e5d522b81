package meta

// Group is the record of a group snapshot: snapshots of several volumes at one moment. The
// record decides whether the snapshots are complete. The cluster keeps it under the group's
// name, which is also the name of each snapshot in its volume.
type Group struct {
	Version int    `json:"v" pb:"version"`
	Name    string `json:"name"`
	// ID is drawn for each attempt, even and not zero: the token of the snapshots.
	ID    uint64     `json:"id"`
	State GroupState `json:"state"`
	Began Time       `json:"began"`
	// Members are in the order of their volumes.
	Members []GroupMember `json:"members"`
	// Revision is the revision of the record in its store. A writer must have read the latest
	// revision.
	Revision int64 `json:"revision,omitempty"`
}

// GroupVersion is the only version of the record.
const GroupVersion = 1

// MaxGroup is the most volumes of a group.
const MaxGroup = 64

// GroupMember is the snapshot of one volume.
type GroupMember struct {
	Volume VolumeID `json:"volume"`
	// The fields below are set when the group is ready. At is the snapshot's generation, Created
	// its time; Inodes and Bytes count the contents of the volume at that time.
	At      Generation `json:"generation,omitempty"`
	Created Time       `json:"created,omitempty"`
	Inodes  uint64     `json:"inodes,omitempty"`
	Bytes   uint64     `json:"bytes,omitempty"`
	// Unanswered counts the files of which the snapshot has only the last synced state, and
	// UnansweredBy names some of the clients that hold them.
	Unanswered   uint64   `json:"unanswered,omitempty"`
	UnansweredBy []string `json:"unanswered_by,omitempty"`
}

// GroupState is the state of a group snapshot. A group without a record, because the record
// was removed or the cluster's records were lost, is not undecided: its snapshots are ordinary
// snapshots.
type GroupState string

const (
	GroupTaking  GroupState = "taking"  // undecided: the snapshots are invisible
	GroupReady   GroupState = "ready"   // complete: all snapshots show one moment
	GroupAborted GroupState = "aborted" // given up: existing snapshots of the group are deleted
)

// Volumes are the members' volumes.
func (g *Group) Volumes() []VolumeID {
	all := make([]VolumeID, len(g.Members))
	for i, m := range g.Members {
		all[i] = m.Volume
	}
	return all
}

// IsGroupID distinguishes the tokens of groups, which are even, from the tokens of single
// requests, which are odd.
func IsGroupID(token uint64) bool { return token != 0 && token%2 == 0 }
