package replica

import (
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

// Case is a chunk to seal, as journaled.
type Case struct {
	Servers []meta.ServerID // all replicas, in the order of the record
	// Committed: the journal's extents refer to bytes below this offset; for an open-ended
	// extent, its journaled end.
	Committed uint64
	// OpenEnded: a file ends at the chunk's future sealed length, so bytes beyond Committed
	// may have been promised by a sync of the replicas alone (rule 7).
	OpenEnded bool
	// Asked: the writer itself requests the seal. The writer has stopped, and will write the
	// bytes beyond Need to another chunk. The seal then takes at most the largest of Need,
	// Committed and the replicas' synced marks, so that more replicas have the bytes.
	Asked bool
	Need  uint64
	// AcceptLoss: an operator accepted the loss of bytes without any replica, and, of
	// differing replicas, the choice of the more likely replicas.
	AcceptLoss bool

	Off *Off
}

// Reach is the outcome of an order to a replica.
type Reach uint8

const (
	Unreachable Reach = iota // no answer, or the server's disk failed: the replica may come back
	Answered                 // frozen at the seal's fence; everything in the answer is durable
	Lost                     // an operator removed the server or the disk: the replica never comes back
	Superseded               // the replica has seen a higher fence: another server owns the volume
)

// Answer is a replica's answer to the freeze.
type Answer struct {
	Reach  Reach
	State  State  // Open or Sealed; Absent or Deleted count as a chunk without bytes and without a fence
	Length uint64 // bytes with right checksums
	Synced uint64 // the mark of its acknowledged syncs (Replica.Promised)
	// At and CRC: the checksum over the block checksums of the first At bytes, as computed by
	// chunkserver.SealCRC. A freeze reports the checksum at Length, or at the requested
	// length.
	At  uint64
	CRC uint32
	// Damaged: the replica has wrong checksums below its own synced mark. Such a replica is
	// corrupt, not short.
	Damaged bool
	// Whole: the replica has every byte that the replica ever acknowledged, since its server
	// had no power cut. So all bytes acknowledged by all replicas lie below its length.
	Whole bool
}

// AnswerOf translates the result of a freeze order that requested the checksum at length at
// (or at the replica's own length, if the replica is shorter or at is 0). err is the error of
// an order without an answer.
func AnswerOf(r meta.OrderResult, err error, at uint64) Answer {
	a := Answer{Reach: Answered, State: Open, Length: r.Length, Synced: r.Synced, At: r.Length, CRC: r.CRC, Whole: r.Whole}
	if at > 0 {
		a.At = min(at, r.Length)
	}
	kind := r.Err
	if err != nil {
		kind = meta.KindOf(err)
	}
	switch kind {
	case meta.KindOK:
		if r.State == meta.ChunkSealed {
			a.State, a.At = Sealed, r.Length
		}
	case meta.NoSuchChunk:
		return Answer{Reach: Answered}
	case meta.Fenced:
		return Answer{Reach: Superseded}
	case meta.Corrupt:
		a.Damaged = true
	default:
		return Answer{Reach: Unreachable}
	}
	return a
}

// Verdict is the kind of a Decision.
type Verdict uint8

const (
	// Wait: a replica without an answer may have promised bytes.
	Wait Verdict = iota
	// Take: journal Length, CRC and Servers, and only then cut the replicas at Length.
	Take
	// Tell: freeze the replicas Ask once more, to tell the checksum at Length.
	Tell
	// Yield: a replica has seen a higher fence, so this owner is deposed.
	Yield
	// Missing: every replica answered or is lost, and no replica has the promised bytes. Only
	// an operator can accept the loss.
	Missing
	// Conflict: replicas differ in bytes that must be equal. An operator must decide.
	Conflict
)

func (v Verdict) String() string {
	return [...]string{"wait", "take", "tell", "yield", "missing", "conflict"}[v]
}

// Decision is the next step of a seal.
type Decision struct {
	Verdict Verdict
	Length  uint64
	CRC     uint32
	Servers []meta.ServerID // Take: the replicas in service, in the order of the record
	Cut     []meta.ServerID // Take: servers of Servers with replicas longer than Length
	Discard []meta.ServerID // Take: answered, and are no replicas any more: shorter, different or damaged
	Away    []meta.ServerID // Take: servers without an answer; check their replicas later (Return)
	Ask     []meta.ServerID // Tell
	Lost    uint64          // Take with AcceptLoss: promised bytes that are lost
	Why     string          // unless Take: for people
}

// DecideSeal applies rule 5; answers[i] is the answer of c.Servers[i]. The length is never
// below the journal's committed length or any replica's synced mark, nor, as far as the
// replicas can tell, below the bytes acknowledged by all replicas. Without a better bound, the
// length is the length of the longest verified prefix. But the longest replica may be alone on
// a single disk, with bytes that were never promised, while the shorter replicas, discarded by
// such a seal, have all promised bytes. So DecideSeal uses a bound from the writer (Asked) if
// possible, or from a replica without losses (Whole).
func DecideSeal(c Case, answers []Answer) Decision {
	if len(answers) != len(c.Servers) {
		panic(fmt.Sprintf("%d answers of %d replicas: each server has one, reachable or not", len(answers), len(c.Servers)))
	}
	must, best := c.Committed, uint64(0)
	floor := ^uint64(0) // nothing beyond was acknowledged by all
	var good, sealed []int
	away := 0
	for i, a := range answers {
		switch a.Reach {
		case Superseded:
			return Decision{Verdict: Yield, Why: fmt.Sprintf("server %d has seen a higher fence", c.Servers[i])}
		case Unreachable:
			away++
			continue
		case Lost:
			continue
		}
		must = max(must, a.Synced)
		if a.Damaged || a.State == Absent || a.State == Deleted {
			continue // a replica without a fence, or with wrong bytes, can't serve
		}
		good = append(good, i)
		best = max(best, a.Length)
		if a.Whole {
			floor = min(floor, a.Length)
		}
		if a.State == Sealed {
			sealed = append(sealed, i)
		}
	}
	if c.Asked {
		floor = c.Need
	}
	if c.Off.longest() {
		floor = 0
	}
	if c.Off.bound() {
		must, floor = 0, c.shortest(answers, good)
	}
	lost := uint64(0)
	switch {
	case len(sealed) > 0:
		// An earlier seal had begun to cut, and the journal lost its entry (the volume was
		// restored from a checkpoint): a chunk has one sealed content.
		return c.adopt(answers, sealed, must)
	case best < must && c.AcceptLoss:
		must, lost = best, must-best
	case best < must && away > 0:
		return Decision{Verdict: Wait, Why: fmt.Sprintf("%d bytes verify, %d were promised, and %d replicas don't answer", best, must, away)}
	case best < must:
		return Decision{Verdict: Missing, Why: fmt.Sprintf("%d bytes verify, %d were promised, and all replicas answered", best, must)}
	case best == 0 && c.OpenEnded && away > 0 && !c.AcceptLoss && !c.Off.empty():
		// A wiped disk gives the same answer as a chunk without appends.
		return Decision{Verdict: Wait, Why: fmt.Sprintf("nobody who answers has any bytes, the file may end in others, and %d replicas don't answer", away)}
	}
	switch {
	case len(good) == 0 && away > 0:
		return Decision{Verdict: Wait, Why: "no replica answers"}
	case len(good) == 0 && must == 0 && !c.AcceptLoss && c.damaged(answers) > 0:
		return Decision{Verdict: Missing, Why: "every replica is damaged"}
	}
	d := c.take(answers, good, min(best, max(floor, must)), must)
	d.Lost = lost
	return d
}

func (c Case) damaged(answers []Answer) (n int) {
	for _, a := range answers {
		if a.Reach == Answered && a.Damaged {
			n++
		}
	}
	return n
}

func (c Case) shortest(answers []Answer, good []int) uint64 {
	n := ^uint64(0)
	for _, i := range good {
		n = min(n, answers[i].Length)
	}
	return n
}

// group has the replicas with the same checksum at a length.
type group struct {
	crc     uint32
	members []int
	synced  uint64
}

// take chooses replicas with the same target bytes.
func (c Case) take(answers []Answer, good []int, target, must uint64) Decision {
	groups, ask := c.groups(answers, good, target)
	if len(ask) > 0 {
		return Decision{Verdict: Tell, Length: target, Ask: ask, Why: "checksums at the length are needed"}
	}
	if len(groups) == 0 {
		// No replica has a fence: the chunk was never written, or lost with its disks, and no
		// bytes were promised, or an operator gave the promised bytes up.
		return Decision{Verdict: Take, Why: "no replica has any bytes"}
	}
	// Bytes acknowledged by all replicas are equal on all replicas. So where replicas differ,
	// some replicas never acknowledged a sync of the bytes. The replicas with the highest
	// acknowledged sync decide, then the majority.
	win, tie := groups[0], false
	for _, g := range groups[1:] {
		switch {
		case g.synced > win.synced, g.synced == win.synced && len(g.members) > len(win.members):
			win, tie = g, false
		case g.synced == win.synced && len(g.members) == len(win.members):
			tie = true
		}
	}
	if tie && target > must {
		return c.take(answers, good, must, must)
	}
	if len(groups) > 1 && 2*len(win.members) <= len(c.Servers) && !c.Off.tails() {
		rivals := c.Committed >= target || tie
		for _, g := range groups {
			rivals = rivals || g.crc != win.crc && g.synced >= target
		}
		if rivals && !c.AcceptLoss {
			return Decision{Verdict: Conflict, Length: target, Why: fmt.Sprintf("replicas differ within the %d bytes that were promised", target)}
		}
	}
	in := win.members
	if c.Off.tails() {
		in = nil
		for _, i := range good {
			if answers[i].Length >= target {
				in = append(in, i)
			}
		}
	}
	return c.result(answers, in, target, win.crc)
}

// groups groups the replicas with at least target bytes by the checksum at target. ask lists
// the servers whose checksum at target is unknown.
func (c Case) groups(answers []Answer, good []int, target uint64) (groups []group, ask []meta.ServerID) {
	for _, i := range good {
		a := answers[i]
		if a.Length < target {
			continue
		}
		if target == 0 {
			a.At, a.CRC = 0, 0
		}
		if a.At != target {
			if c.Off.tails() {
				a.CRC = answers[good[0]].CRC
			} else {
				ask = append(ask, c.Servers[i])
				continue
			}
		}
		k := slices.IndexFunc(groups, func(g group) bool { return g.crc == a.CRC })
		if k < 0 {
			k = len(groups)
			groups = append(groups, group{crc: a.CRC})
		}
		groups[k].members = append(groups[k].members, i)
		groups[k].synced = max(groups[k].synced, min(a.Synced, target))
	}
	return groups, ask
}

// adopt takes the content of an already sealed replica.
func (c Case) adopt(answers []Answer, sealed []int, must uint64) Decision {
	first := answers[sealed[0]]
	for _, i := range sealed[1:] {
		if a := answers[i]; a.Length != first.Length || a.CRC != first.CRC {
			return Decision{Verdict: Conflict, Why: errConflict.Error()}
		}
	}
	if first.Length < must && !c.AcceptLoss {
		return Decision{Verdict: Conflict, Length: first.Length, Why: fmt.Sprintf("sealed at %d, %d bytes were promised", first.Length, must)}
	}
	in := sealed
	var ask []meta.ServerID
	for i, a := range answers {
		if a.Reach != Answered || a.State != Open || a.Damaged || a.Length < first.Length {
			continue
		}
		if a.At != first.Length {
			ask = append(ask, c.Servers[i])
		} else if a.CRC == first.CRC {
			in = append(in, i)
		}
	}
	if len(ask) > 0 {
		return Decision{Verdict: Tell, Length: first.Length, Ask: ask, Why: "checksums at the sealed length are needed"}
	}
	slices.Sort(in)
	d := c.result(answers, in, first.Length, first.CRC)
	d.Lost = must - min(must, first.Length)
	return d
}

// result returns the decision Take for the replicas in, and the work for every other replica.
func (c Case) result(answers []Answer, in []int, length uint64, crc uint32) Decision {
	d := Decision{Verdict: Take, Length: length, CRC: crc}
	for i, a := range answers {
		switch id := c.Servers[i]; {
		case slices.Contains(in, i):
			d.Servers = append(d.Servers, id)
			if a.Length > length {
				d.Cut = append(d.Cut, id)
			}
		case a.Reach == Answered:
			d.Discard = append(d.Discard, id)
		case a.Reach == Unreachable:
			d.Away = append(d.Away, id)
		}
	}
	return d
}
