package meta

import "fmt"

// EventKind says how a name or a file changed.
type EventKind uint8

// The kinds of events. The numbers are part of the journal's format; a consumer skips unknown
// kinds.
const (
	EventCreated         EventKind = 1  // a new inode under its first name
	EventLinked          EventKind = 2  // a further name of an inode
	EventRemoved         EventKind = 3  // a name went; Last: the inode has no other
	EventRenamed         EventKind = 4  // a name moved; Replaced is the former inode of the new name
	EventExchanged       EventKind = 5  // two names changed places: Ino is under Name now, Replaced under From
	EventChanged         EventKind = 6  // contents, told when the writer closed the file
	EventAttributes      EventKind = 7  // mode, owner, extended attributes, ACLs; times alone are none
	EventAttached        EventKind = 8  // Volume hangs under the name
	EventDetached        EventKind = 9  // it does no more
	EventSnapshotTaken   EventKind = 10 // Name is the snapshot's
	EventSnapshotDeleted EventKind = 11
	EventQuota           EventKind = 12 // the use crossed an advisory quota: Name is "bytes" or "inodes"
)

var eventNames = [...]string{
	EventCreated: "created", EventLinked: "linked", EventRemoved: "removed", EventRenamed: "renamed",
	EventExchanged: "exchanged", EventChanged: "changed", EventAttributes: "attributes", EventAttached: "attached",
	EventDetached: "detached", EventSnapshotTaken: "snapshot-taken", EventSnapshotDeleted: "snapshot-deleted",
	EventQuota: "quota",
}

func (k EventKind) String() string {
	if int(k) < len(eventNames) && eventNames[k] != "" {
		return eventNames[k]
	}
	return fmt.Sprintf("kind-%d", uint8(k))
}

// Event is one change of a volume's namespace. The events of a volume are numbered without
// gaps from 1, in the order of the journal.
type Event struct {
	Seq  uint64
	Kind EventKind
	Time Time
	// Ino and Type (S_IFMT bits) are the inode that changed; zero for events about volumes and
	// snapshots.
	Ino  Ino `pb:"inode"`
	Type uint32
	// Parent and Name are the inode's name after the event or, of a removal, before it. For
	// changed and attributes, Name is one of the file's names at that time, and both are zero
	// if the file had several names and lost the newest.
	Parent Ino
	Name   string
	// FromParent and From are the former name, for renamed and exchanged.
	FromParent Ino
	From       string
	// Replaced is, for renamed, the inode that lost its name, or zero; for exchanged, the
	// other inode.
	Replaced Ino
	// Last: of removed, Ino has no other name; of renamed, Replaced has none.
	Last   bool
	Volume VolumeID // of attached and detached
	// Over, Used and Limit belong to quota: whether the use now counts as above the advisory
	// quota, the use at the time of the event, and the quota (zero: removed).
	Over        bool
	Used, Limit uint64
}

// Bounds of the number of events that a volume keeps for later consumers.
const (
	MinEvents     = 1_000
	MaxEvents     = 10_000_000
	DefaultEvents = 100_000
)

// EventLog says which events a volume keeps.
type EventLog struct {
	Keep  uint64 // at least so many are kept; 0: none, and none are made
	First uint64 // the oldest kept event; above Last when no event is kept
	Last  uint64 // the newest event so far; 0: no event yet
}

// RescanError tells a consumer that some events after Since are no longer kept, or that Since
// was never the number of an event. A consumer that reads the whole tree now, and then the
// events after Last, misses no change.
type RescanError struct {
	Since       uint64
	First, Last uint64 // the kept events
}

func (e *RescanError) Error() string {
	return fmt.Sprintf("not all events after %d are there, those from %d to %d are: look at the tree again, then go on after %d", e.Since, e.First, e.Last, e.Last)
}

// SetEvents switches the events of a volume on or off (Keep 0), or changes the number of
// events kept. After a pause the numbers continue with an unused number, so that consumers
// notice the gap. Errors: Invalid.
type SetEvents struct{ Keep uint64 }

// Closed tells that the session has no descriptor for writing on these files any more, and
// that all its writes are committed. The client sends Closed for files whose commit was
// answered with Result.Existed, by which the owner asks for it. Otherwise Closed does nothing.
type Closed struct{ Inos []Ino }

// TellQuota says which advisory quotas the volume exceeds, according to the cluster's table. A
// difference from the last TellQuota becomes an event; a repetition does not.
type TellQuota struct {
	Bytes, Inodes         uint64 // the quotas; zero: none
	BytesOver, InodesOver bool
}

func (*SetEvents) Code() OpCode { return OpSetEvents }
func (*Closed) Code() OpCode    { return OpClosed }
func (*TellQuota) Code() OpCode { return OpTellQuota }
