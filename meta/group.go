package meta

// Group is the record of snapshots of several volumes that show one moment: the
// decision whether they do. It is kept by the cluster, under its name, which each of
// the snapshots has in its volume.
type Group struct {
	Version int    `json:"v"`
	Name    string `json:"name"`
	// ID is drawn for each try, even and not zero: the token of its snapshots.
	ID    uint64     `json:"id"`
	State GroupState `json:"state"`
	Began Time       `json:"began"`
	// Members are in the order of their volumes.
	Members []GroupMember `json:"members"`
	// Revision is the record's at the store that keeps it: who writes it back must
	// have read the last one.
	Revision int64 `json:"revision,omitempty"`
}

// GroupVersion is the only version of the record.
const GroupVersion = 1

// MaxGroup is the most volumes of a group.
const MaxGroup = 64

// GroupMember is the snapshot of one volume.
type GroupMember struct {
	Volume VolumeID `json:"volume"`
	// The rest is told once the group is ready: what the snapshot is called by reads,
	// when it was taken, and what the volume held then.
	At      Generation `json:"generation,omitempty"`
	Created Time       `json:"created,omitempty"`
	Inodes  uint64     `json:"inodes,omitempty"`
	Bytes   uint64     `json:"bytes,omitempty"`
	// Unanswered are the files that are in it only as they were synced last, and
	// UnansweredBy some of the clients that hold them.
	Unanswered   uint64   `json:"unanswered,omitempty"`
	UnansweredBy []string `json:"unanswered_by,omitempty"`
}

// GroupState says what is known of a group. One that has no record, since it was
// removed, or since the cluster's records were lost, is not undecided: its snapshots are
// like others then.
type GroupState string

const (
	GroupTaking  GroupState = "taking"  // undecided: nobody is shown its snapshots
	GroupReady   GroupState = "ready"   // they are there, of one moment
	GroupAborted GroupState = "aborted" // there are not to be any: those that are there go
)

// Volumes are the members' volumes.
func (g *Group) Volumes() []VolumeID {
	all := make([]VolumeID, len(g.Members))
	for i, m := range g.Members {
		all[i] = m.Volume
	}
	return all
}

// IsGroupID tells the tokens of groups from those of single requests, which are odd.
func IsGroupID(token uint64) bool { return token != 0 && token%2 == 0 }
