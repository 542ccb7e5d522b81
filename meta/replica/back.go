package replica

import (
	"slices"

	"penstock.io/penstock/meta"
)

// Action is what the owner does about a replica that a server told of.
type Action uint8

const (
	// Keep it: it is what the journal says.
	Keep Action = iota
	// TellAt: freeze it at the record's fence and let it tell its checksum at
	// the record's length, then decide again.
	TellAt
	// Finish: order the final seal at the record's length; what lies beyond is cut.
	Finish
	// Join: it is no replica by the journal, but holds the sealed bytes: once
	// it is sealed (Finish) it may become one, rather than be copied anew.
	Join
	// Discard it: shorter, different, damaged or too many. Delete it at the record's fence.
	Discard
	// Spare it: it is not what the journal says and serves nothing, but the
	// chunk is short of replicas. A pull may replace it.
	Spare
)

func (a Action) String() string {
	return [...]string{"keep", "tell", "finish", "join", "discard", "spare"}[a]
}

// Return decides what becomes of the replica on a server, told of in a listing
// or by a freeze (then answer.At says where its checksum is of). rec is the chunk's record, read from a journal that
// is read to its end; others is the number of other replicas by the journal
// that are known to be whole. want says that the chunk has fewer replicas than
// it should.
//
// A replica whose server was away while the chunk was sealed is longer, shorter
// or different: longer is cut, shorter or different is discarded; it serves
// nobody before (Replica.Read).
func Return(rec meta.ChunkRecord, server meta.ServerID, a Answer, others int, want bool, off *Off) Action {
	member := slices.Contains(rec.Servers, server)
	if off.away() {
		if member || !want || a.State == Absent {
			return Keep
		}
		return Join
	}
	discard := func() Action {
		// As long as the chunk is short of replicas, even a bad one may be the
		// last that has some of the bytes; a pull replaces it in place.
		if others == 0 || want {
			return Spare
		}
		return Discard
	}
	switch rec.State {
	case meta.ChunkOpen:
		// Its writer, or the seal, knows what to do with it (rule 12).
		return Keep
	case meta.ChunkDeleting:
		return Discard
	}
	if rec.Gone() && !off.lost() {
		return Discard // who accepted its loss was told that it never comes back
	}
	same := a.Length == rec.Length && a.CRC == rec.CRC
	switch {
	case a.State == Absent || a.State == Deleted:
		return Keep // nothing is here; repair counts it as missing
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
