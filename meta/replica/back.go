package replica

import (
	"slices"

	"penstock.io/penstock/meta"
)

// Action is an owner's decision about a replica that a server reported.
type Action uint8

const (
	// Keep: the replica is as journaled.
	Keep Action = iota
	// TellAt: freeze the replica at the record's fence, ask for its checksum at the record's
	// length, and decide again.
	TellAt
	// Finish: order the final seal at the record's length, which cuts further bytes.
	Finish
	// Join: the journal does not name the replica, but it has the sealed bytes. When it is
	// sealed (Finish) it may become a replica, instead of a new copy.
	Join
	// Discard: shorter, different, damaged or superfluous. Delete it at the record's fence.
	Discard
	// Spare: the replica differs from the journal and serves nothing, but the chunk is short
	// of replicas. A pull may replace it.
	Spare
)

func (a Action) String() string {
	return [...]string{"keep", "tell", "finish", "join", "discard", "spare"}[a]
}

// Return decides about the replica on a server, as reported in a list or by a freeze (then
// answer.At is the length of its checksum). rec is the chunk's record, from a journal that was
// read to its end. others is the number of other journaled replicas that are known to be
// whole. want: the chunk has fewer replicas than it should have.
//
// A replica whose server was away during the seal is longer, shorter or different: a longer
// one is cut, a shorter or different one is discarded. It serves no reads before that
// (Replica.Read).
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
		// some bytes; a pull replaces it in place.
		if others == 0 || want {
			return Spare
		}
		return Discard
	}
	switch rec.State {
	case meta.ChunkOpen:
		// Its writer, or the seal, decides about it (rule 12).
		return Keep
	case meta.ChunkDeleting:
		return Discard
	}
	if rec.Gone() && !off.lost() {
		return Discard // the operator that accepted its loss was told that it never returns
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
