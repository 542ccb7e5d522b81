package replica

import (
	"slices"

	"penstock.io/penstock/meta"
)

// Action is an owner's decision about a replica reported by a server.
type Action uint8

const (
	// Keep: the replica is as journaled.
	Keep Action = iota
	// TellAt: freeze the replica at the record's fence, request the replica's checksum at the
	// record's length, and decide again.
	TellAt
	// Finish: order the final seal at the record's length, which cuts further bytes.
	Finish
	// Join: the journal does not name the replica, but the replica has the sealed bytes. After
	// its seal (Finish) the replica may become a journaled replica, instead of a new copy.
	Join
	// Discard: the replica is shorter, different, damaged or superfluous. Delete the replica
	// at the record's fence.
	Discard
	// Spare: the replica differs from the journal and serves no reads, but the chunk is short
	// of replicas. A pull may replace the replica.
	Spare
)

func (a Action) String() string {
	return [...]string{"keep", "tell", "finish", "join", "discard", "spare"}[a]
}

// Return decides about the replica on a server, as reported in a list or by a freeze (then
// a.At is the length of its checksum). rec is the chunk's record, from a journal read to its
// end. others is the number of other journaled replicas known to be whole. want: the chunk has
// fewer replicas than its policy demands.
//
// The replica of a server away during the seal may be longer than the seal, shorter or
// different: the owner cuts a longer replica, and discards a shorter or different replica. The
// replica serves no reads before that decision (Replica.Read).
func Return(rec meta.ChunkRecord, server meta.ServerID, a Answer, others int, want bool, off *Off) Action {
	member := slices.Contains(rec.Servers, server)
	if off.away() {
		if member || !want || a.State == Absent {
			return Keep
		}
		return Join
	}
	discard := func() Action {
		// While the chunk is short of replicas, even a bad replica may have the last copy of
		// some bytes; a pull replaces the bad replica in place.
		if others == 0 || want {
			return Spare
		}
		return Discard
	}
	switch rec.State {
	case meta.ChunkOpen:
		// The chunk's writer, or the seal, decides about the replica (rule 12).
		return Keep
	case meta.ChunkDeleting:
		return Discard
	}
	if rec.Gone() && !off.lost() {
		return Discard // accepting the loss promised the operator that the chunk never returns
	}
	same := a.Length == rec.Length && a.CRC == rec.CRC
	switch {
	case a.State == Absent || a.State == Deleted:
		return Keep // the server has nothing; repair counts the replica as missing
	case a.Damaged:
		return discard()
	case a.State == Sealed && same && member:
		return Keep
	case a.State == Sealed && same && want:
		return Join
	case a.State == Sealed, a.Length < rec.Length:
		return discard()
	case !member && !want:
		return discard()
	case a.At != rec.Length:
		return TellAt
	case a.CRC != rec.CRC:
		return discard()
	case member:
		return Finish
	}
	return Join
}
