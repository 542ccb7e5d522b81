package meta

import "fmt"

// EventKind says what became of a name or a file.
type EventKind uint8

// The kinds of events. The numbers are part of the journal's format; a consumer
// passes over those that it does not know.
const (
	EventCreated         EventKind = 1  // a new inode under its first name
	EventLinked          EventKind = 2  // one more name of an inode that has others
	EventRemoved         EventKind = 3  // a name went; Last: the inode has no other
	EventRenamed         EventKind = 4  // a name moved; what was there before is in Replaced
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

// Event is one change of a volume's namespace. Events are numbered without gaps
// from 1 on, in the order of the journal.
type Event struct {
	Seq  uint64
	Kind EventKind
	Time Time
	// Ino and Type (S_IFMT bits) are what the event is about; zero for volumes
	// and snapshots.
	Ino  Ino
	Type uint32
	// Parent and Name are where it is after the event, or was before it went. Of
	// changed and attributes, they are one of the file's names then, and zero if
	// it had several and lost the one that it got last.
	Parent Ino
	Name   string
	// FromParent and From, of renamed and exchanged: where it was.
	FromParent Ino
	From       string
	// Replaced, of renamed: the inode that lost its name, or zero; of exchanged:
	// the other one.
	Replaced Ino
	// Last: of removed, Ino has no other name; of renamed, Replaced has none.
	Last   bool
	Volume VolumeID // of attached and detached
	// Over, Used and Limit, of quota: whether the use counts as above the advisory
	// quota now, what it was then, and the quota; zero: it was taken away.
	Over        bool
	Used, Limit uint64
}

// Bounds of how many events a volume keeps for those who come later.
const (
	MinEvents     = 1_000
	MaxEvents     = 10_000_000
	DefaultEvents = 100_000
)

// EventLog says which events a volume keeps.
type EventLog struct {
	Keep  uint64 // at least so many are kept; 0: none, and none are made
	First uint64 // the oldest that is there; above Last when there is none
	Last  uint64 // the newest that there was; 0: none ever
}

// RescanError tells a consumer of events that some of those after Since are not
// kept any more, or that there never was such a number. Who looks at the tree now,
// and then goes on after Last, misses nothing.
type RescanError struct {
	Since       uint64
	First, Last uint64 // those that are there
}

func (e *RescanError) Error() string {
	return fmt.Sprintf("not all events after %d are there, those from %d to %d are: look at the tree again, then go on after %d", e.Since, e.First, e.Last, e.Last)
}

// SetEvents switches a volume's events on, off (Keep 0), or changes how many are
// kept. What is switched on again begins with a number that was not used, so
// that who was following hears that it missed something. Errors: Invalid.
type SetEvents struct{ Keep uint64 }

// Closed says that no descriptor of the session writes these files any more, and
// that what was written is committed: those of which a commit was answered with
// Result.Existed, which asks for it. It does nothing where nobody asked.
type Closed struct{ Inos []Ino }

// TellQuota says which advisory quotas the use of the volume counts as above, as
// its row in the cluster's table does. What differs from what was said last
// becomes an event; said again it is none.
type TellQuota struct {
	Bytes, Inodes         uint64 // the quotas; zero: none
	BytesOver, InodesOver bool
}

func (*SetEvents) Code() OpCode { return OpSetEvents }
func (*Closed) Code() OpCode    { return OpClosed }
func (*TellQuota) Code() OpCode { return OpTellQuota }
