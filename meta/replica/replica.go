// Package replica owns the decisions of replication: a replica's reaction to an append, a
// sync, a seal, a delete, a copy and a crash (Replica); the bytes on which a writer may rely
// over several replicas (Writer); the length, checksum and replicas of a seal (DecideSeal);
// and the fate of a replica whose server was away (Return).
//
// Everything in the package is a value or a function of values: no goroutine, clock, chance,
// I/O or walk over a map. The shell, which has the bytes, calls a method to decide before each
// effect, does the effect, and reports the effect:
//
//	do, err := r.Append(fence, off, n)   // decide
//	...write the bytes and the record... // the shell
//	r.Appended(fence, n)                 // report
//
// chunkserver/store drives Replica, chunkserver/client follows Writer, and the owner of a
// volume (meta/server) seals by DecideSeal. The simulation in this package's tests drives all
// these machines at once.
package replica

import (
	"errors"
	"fmt"

	"penstock.io/penstock/meta"
)

// State is the state of a replica.
type State uint8

const (
	Absent  State = iota // nothing is known of the chunk here
	Open                 // may grow, unless its fence is above the writer's
	Sealed               // ends at Length for ever
	Deleted              // deleted, or never to exist: a late append must not create the chunk
)

func (s State) String() string {
	switch s {
	case Absent:
		return "absent"
	case Open:
		return "open"
	case Sealed:
		return "sealed"
	case Deleted:
		return "deleted"
	}
	return fmt.Sprintf("state %d", uint8(s))
}

// Off switches rules off, for positive controls: with any field set, the simulation must find
// the fault that the rule prevents. Nil: all rules are on.
type Off struct {
	Fence      bool // a replica takes appends and seals of any fence
	Compare    bool // a repeated append is acknowledged unread
	Offset     bool // a replica accepts appends that leave a gap or overlap
	KeepTail   bool // a recovering replica keeps bytes with wrong checksums
	Short      bool // a replica below its synced mark counts as short, not as corrupt
	Tomb       bool // a deleted chunk is forgotten at once
	OldDelete  bool // an order to delete is obeyed at any fence
	FreezeSync bool // a freeze reports a length before the bytes are durable
	AckAll     bool // an append counts when the first replica acknowledges it
	AckLate    bool // acknowledgements count after the writer gave up
	Longest    bool // a seal takes the shortest length rather than the longest
	Bound      bool // a seal goes below the committed or synced length
	Empty      bool // a replica without the chunk counts as proof that no bytes were written
	Tails      bool // a seal takes replicas with different tails
	Return     bool // a returning replica serves without a check
	Lost       bool // a chunk accepted as lost gets a replica back
}

func (o *Off) fence() bool      { return o != nil && o.Fence }
func (o *Off) compare() bool    { return o != nil && o.Compare }
func (o *Off) offset() bool     { return o != nil && o.Offset }
func (o *Off) keepTail() bool   { return o != nil && o.KeepTail }
func (o *Off) short() bool      { return o != nil && o.Short }
func (o *Off) tomb() bool       { return o != nil && o.Tomb }
func (o *Off) oldDelete() bool  { return o != nil && o.OldDelete }
func (o *Off) freezeSync() bool { return o != nil && o.FreezeSync }
func (o *Off) ackAll() bool     { return o != nil && o.AckAll }
func (o *Off) ackLate() bool    { return o != nil && o.AckLate }
func (o *Off) longest() bool    { return o != nil && o.Longest }
func (o *Off) bound() bool      { return o != nil && o.Bound }
func (o *Off) empty() bool      { return o != nil && o.Empty }
func (o *Off) tails() bool      { return o != nil && o.Tails }
func (o *Off) away() bool       { return o != nil && o.Return }
func (o *Off) lost() bool       { return o != nil && o.Lost }

// Replica is the state of a chunk on a server, as far as decisions depend on the state. The
// zero value is a chunk unknown to the server.
type Replica struct {
	State State
	Fence meta.Fence // the highest fence seen; of a deleted chunk, the fence of the deletion
	// INVARIANT: Promised <= Synced <= Length; sealed: all three are equal.
	Length uint64 // bytes of the replica
	Synced uint64 // durable bytes of Length, with a durable record of the mark
	// Promised is the highest mark with which a sync was answered, as far as known: a freeze
	// makes more bytes durable, which no writer was promised.
	Promised uint64
	CRC      uint32 // when sealed: chunkserver.SealCRC of the block checksums
	// Damaged: bytes below the synced mark, or below the seal, were found bad.
	Damaged bool
	// Ending: the final seal is being written to the disk; appends are refused.
	Ending bool

	Off *Off
}

// Check returns an error for a broken invariant. For tests.
func (r *Replica) Check() error {
	switch {
	case r.Synced > r.Length || r.Promised > r.Synced:
		return fmt.Errorf("synced %d of %d bytes, promised %d", r.Synced, r.Length, r.Promised)
	case r.State == Sealed && r.Promised != r.Length:
		return fmt.Errorf("sealed at %d, promised %d", r.Length, r.Promised)
	case (r.State == Absent || r.State == Deleted) && r.Length != 0:
		return fmt.Errorf("%v, with %d bytes", r.State, r.Length)
	case r.State == Absent && r.Fence != meta.Fence{}:
		return fmt.Errorf("absent, with fence %v", r.Fence)
	}
	return nil
}

// Do is the shell's work before the shell acknowledges.
type Do uint8

const (
	Nothing Do = iota // nothing to do: acknowledge
	Write             // do the effect, then report it to the replica
	Compare           // append: acknowledge if the bytes at the offset are the same, else say Differs
)

func refuse(op string, kind meta.Kind, format string, args ...any) error {
	return meta.E(op, kind, "", fmt.Errorf(format, args...))
}

// Append decides about n bytes at off from a writer of the given fence.
// Errors: NoSuchChunk (deleted), Fenced, Sealed, Corrupt (damaged), WrongOffset.
func (r *Replica) Append(fence meta.Fence, off, n uint64) (Do, error) {
	const op = "append"
	switch {
	case r.State == Deleted && !r.Off.tomb():
		return Nothing, refuse(op, meta.NoSuchChunk, "it was deleted")
	case fence.Less(r.Fence) && !r.Off.fence():
		return Nothing, refuse(op, meta.Fenced, "fence %v, the chunk has seen %v", fence, r.Fence)
	case r.State == Sealed, r.Ending:
		return Nothing, refuse(op, meta.Sealed, "at %d", r.Length)
	case r.Damaged:
		return Nothing, refuse(op, meta.Corrupt, "damaged below its synced length")
	case off+n <= r.Length:
		if r.Off.compare() {
			return Nothing, nil
		}
		return Compare, nil
	case off != r.Length && !r.Off.offset():
		// Refuse also an append overlapping the end: a writer repeating its stream cuts the
		// stream into the same pieces, so an overlapping append is another writer's.
		return Nothing, refuse(op, meta.WrongOffset, "%d bytes at %d, the chunk ends at %d", n, off, r.Length)
	}
	return Write, nil
}

// Differs returns the answer to a repeated append with other bytes than the stored bytes (rule
// 6).
func (r *Replica) Differs(off uint64) error {
	return refuse("append", meta.WrongOffset, "other bytes are at %d already; the chunk ends at %d", off, r.Length)
}

// Appended: n more bytes are here.
func (r *Replica) Appended(fence meta.Fence, n uint64) {
	r.State = Open
	if r.Fence.Less(fence) {
		r.Fence = fence
	}
	r.Length += n
}

// Sync decides about making the first upTo bytes durable, with a record of the mark. Errors:
// NoSuchChunk, WrongOffset, Corrupt (damaged).
func (r *Replica) Sync(upTo uint64) (Do, error) {
	const op = "sync"
	switch {
	case r.State == Absent, r.State == Deleted:
		return Nothing, refuse(op, meta.NoSuchChunk, "%v", r.State)
	case upTo > r.Length:
		return Nothing, refuse(op, meta.WrongOffset, "up to %d, the chunk ends at %d", upTo, r.Length)
	case r.Damaged:
		return Nothing, refuse(op, meta.Corrupt, "damaged below its synced length")
	case upTo <= r.Synced:
		return Nothing, nil
	}
	return Write, nil
}

// SyncedTo records that the mark is durable: at upTo or, after a seal cut the replica below
// upTo, at the seal's length.
func (r *Replica) SyncedTo(upTo uint64) { r.Synced = max(r.Synced, min(upTo, r.Length)) }

// Promise returns the mark with which a sync up to upTo may be answered once the mark is
// durable.
func (r *Replica) Promise(upTo uint64) uint64 {
	r.Promised = max(r.Promised, min(upTo, r.Synced))
	return r.Promised
}

// Freeze decides about a fence against older writers, the first half of a seal. Write: make
// the fence durable and call Frozen. With Write and with Nothing, make all bytes of the
// replica durable (Sync) before reporting a length, because the owner journals the length.
// Errors: NoSuchChunk (deleted), Fenced.
func (r *Replica) Freeze(fence meta.Fence) (Do, error) {
	const op = "freeze"
	switch {
	case r.State == Deleted:
		return Nothing, refuse(op, meta.NoSuchChunk, "it was deleted")
	case r.State == Sealed:
		return Nothing, nil
	case fence.Less(r.Fence) && !r.Off.fence():
		return Nothing, refuse(op, meta.Fenced, "fence %v, the chunk has seen %v", fence, r.Fence)
	case r.State == Open && fence == r.Fence:
		return Nothing, nil
	}
	return Write, nil
}

// Frozen records that the fence applies, although the fence may not be durable yet.
func (r *Replica) Frozen(fence meta.Fence) { r.State, r.Fence = Open, fence }

// Tells returns the length that must be durable before the answer to a freeze.
func (r *Replica) Tells() uint64 {
	if r.Off.freezeSync() {
		return r.Synced
	}
	return r.Length
}

// End decides about the seal at a journaled length. Write: freeze the replica, set Ending,
// make the first length bytes durable, and with the record of the seal call Ended. Errors:
// NoSuchChunk (deleted), Sealed (at another length), Fenced, WrongOffset (the replica is
// shorter), Corrupt (damaged).
func (r *Replica) End(fence meta.Fence, length uint64) (Do, error) {
	const op = "seal"
	switch {
	case r.State == Deleted:
		return Nothing, refuse(op, meta.NoSuchChunk, "it was deleted")
	case r.State == Sealed && length != r.Length:
		return Nothing, refuse(op, meta.Sealed, "at %d, not %d", r.Length, length)
	case r.State == Sealed:
		return Nothing, nil
	case fence.Less(r.Fence) && !r.Off.fence():
		return Nothing, refuse(op, meta.Fenced, "fence %v, the chunk has seen %v", fence, r.Fence)
	case r.Damaged:
		return Nothing, refuse(op, meta.Corrupt, "damaged below its synced length")
	case length > r.Length:
		return Nothing, refuse(op, meta.WrongOffset, "at %d, only %d bytes are here", length, r.Length)
	}
	return Write, nil
}

// Ended: the chunk ends at length for ever, and bytes beyond are cut.
func (r *Replica) Ended(length uint64, crc uint32) {
	r.State, r.Length, r.Synced, r.CRC, r.Ending = Sealed, length, length, crc, false
	r.Promised = length // by the journal
}

// Delete decides about an order to delete. Write: make the deletion durable and call Gone,
// even for an unknown chunk. Errors: Fenced (a later order, at a higher fence, put a replica
// here again).
func (r *Replica) Delete(fence meta.Fence) (Do, error) {
	switch {
	case r.State == Deleted && !r.Fence.Less(fence):
		return Nothing, nil
	case fence.Less(r.Fence) && !r.Off.oldDelete():
		return Nothing, refuse("delete", meta.Fenced, "fence %v, the chunk has seen %v", fence, r.Fence)
	}
	return Write, nil
}

// Gone: the chunk is deleted.
func (r *Replica) Gone(fence meta.Fence) {
	if fence.Less(r.Fence) {
		fence = r.Fence
	}
	*r = Replica{State: Deleted, Fence: fence, Off: r.Off}
	if r.Off.tomb() {
		*r = Replica{Off: r.Off}
	}
}

// Install decides about replacing the present replica by a sealed copy of (length, crc). The
// shell calls Install before fetching the bytes, and again before the bytes become visible.
// Write: then call Installed. A replica sealed with other contents is replaced only on an
// order of a higher fence: then the journal has the right contents, and a source has the
// bytes. Errors: Sealed (other contents are sealed under the same fence), Fenced.
func (r *Replica) Install(fence meta.Fence, length uint64, crc uint32) (Do, error) {
	const op = "install"
	switch {
	case fence.Less(r.Fence), r.State == Deleted && fence == r.Fence && fence != (meta.Fence{}):
		// A copy ordered before the replica was deleted or moved on.
		return Nothing, refuse(op, meta.Fenced, "fence %v, the chunk has seen %v", fence, r.Fence)
	case r.State == Sealed && !r.Damaged && fence == r.Fence && (r.Length != length || r.CRC != crc):
		return Nothing, refuse(op, meta.Sealed, "at %d with checksum %08x, not at %d with %08x", r.Length, r.CRC, length, crc)
	case r.State == Sealed && !r.Damaged && fence == r.Fence:
		return Nothing, nil
	}
	return Write, nil
}

// Installed: the sealed copy is here.
func (r *Replica) Installed(fence meta.Fence, length uint64, crc uint32) {
	*r = Replica{State: Sealed, Fence: fence, Length: length, Synced: length, Promised: length, CRC: crc, Off: r.Off}
}

// Read decides about n bytes at off for a reader that knows the chunk as sealed under the
// fence known; zero: as open. Errors: NoSuchChunk, NoSuchOffset, Fenced (the chunk was sealed
// while this server was away, and no owner has checked this replica since: rule 5).
func (r *Replica) Read(known meta.Fence, off, n uint64) error {
	const op = "read"
	switch {
	case r.State == Absent, r.State == Deleted:
		return refuse(op, meta.NoSuchChunk, "%v", r.State)
	case r.State != Sealed && r.Fence.Less(known) && !r.Off.away():
		return refuse(op, meta.Fenced, "the chunk was sealed under %v, this replica has seen %v", known, r.Fence)
	case off > r.Length || n > r.Length-off:
		return refuse(op, meta.NoSuchOffset, "%d bytes at %d, the chunk ends at %d", n, off, r.Length)
	}
	return nil
}

// Found is the state of a chunk after a crash: the durable records, and the length of the
// bytes with right checksums.
type Found struct {
	Fence    meta.Fence
	Appended uint64 // by the records of appends; bytes beyond were never acknowledged
	Synced   uint64 // by the last mark
	Verified uint64 // the longest prefix of bytes with right checksums
	Sealed   bool   // a record of a seal exists
	SealedAt uint64
	Damaged  bool // found damaged earlier: the checksums were adapted to the bytes
}

// Limit is where the chunk ends at most.
func (f Found) Limit() uint64 {
	if f.Sealed {
		return f.SealedAt
	}
	return max(f.Synced, f.Appended)
}

// Recovered returns the replica after a crash: the longest verified prefix, ending at the seal
// if the chunk is sealed. A replica shorter than the synced mark or the seal is damaged, and
// keeps its proper length, so that no caller takes the replica for a short replica. The caller
// sets CRC.
func Recovered(f Found, off *Off) Replica {
	limit, must := f.Limit(), f.Synced
	if f.Sealed {
		must = f.SealedAt
	}
	keep := min(f.Verified, limit)
	if off.keepTail() {
		keep = limit
	}
	r := Replica{State: Open, Fence: f.Fence, Length: keep, Damaged: f.Damaged, Off: off}
	if keep < must && !off.short() {
		r.Length, r.Damaged = must, true
	}
	if f.Sealed {
		r.State = Sealed
	}
	r.Synced, r.Promised = r.Length, r.Length
	if !f.Sealed {
		r.Promised = min(f.Synced, r.Length)
	}
	return r
}

var errConflict = errors.New("replicas hold different sealed contents")
