package replica

import (
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

// Case is a chunk that is to be sealed, as the journal knows it.
type Case struct {
	Servers []meta.ServerID // all replicas, in the order of the record
	// Committed: the journal's extents refer to bytes below this; of an
	// open-ended extent, to those it was journaled with.
	Committed uint64
	// OpenEnded: a file ends at the chunk's sealed length, whatever that will
	// be, so bytes beyond Committed may have been promised by a sync of the replicas alone (rule 7).
	OpenEnded bool
	// Asked: the writer itself asks for the seal, has stopped, and sends again
	// elsewhere whatever lies beyond Need. Then no longer length is taken than
	// it needs, so that more replicas have it.
	Asked bool
	Need  uint64
	// AcceptLoss: an operator said that what no replica has is to be lost, and
	// that of replicas that differ the likelier ones are to be taken.
	AcceptLoss bool

	Off *Off
}

// Reach is what came of asking one replica.
type Reach uint8

const (
	Unreachable Reach = iota // nobody answered, or the server's disk failed: it may come back
	Answered                 // frozen at the seal's fence, all that it tells is durable
	Lost                     // an operator removed the server or the disk: it never comes back
	Superseded               // it has seen a higher fence: somebody else owns the volume
)

// Answer is one replica's answer to the freeze.
type Answer struct {
	Reach  Reach
	State  State  // Open or Sealed; Absent or Deleted count as a chunk of no bytes that nobody froze
	Length uint64 // bytes that are there and verify
	Synced uint64 // the mark that its syncs answered with (Replica.Promised)
	// At and CRC: the checksum over the block checksums of the first At bytes,
	// as chunkserver.SealCRC gives it. A freeze tells it at Length, or where it is asked to.
	At  uint64
	CRC uint32
	// Damaged: it verifies below its own synced mark. Corrupt, not short.
	Damaged bool
	// Whole: it has every byte that it ever acknowledged, since no power was
	// lost under it. So whatever all replicas acknowledged lies below its length.
	Whole bool
}

// AnswerOf translates the result of an order to freeze that told the checksum
// at the length at, or at the replica's own if that is shorter or at is 0. An
// order that no answer came to has an err.
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

// Verdict says how a seal goes on.
type Verdict uint8

const (
	// Wait: what was promised may be on a replica that doesn't answer now.
	Wait Verdict = iota
	// Take: journal Length, CRC and Servers; only then cut the replicas there.
	Take
	// Tell: freeze the replicas Ask once more, to tell the checksum at Length.
	Tell
	// Yield: a higher fence was seen; this owner's time is over.
	Yield
	// Missing: every replica answered or is lost, and none has what was
	// promised; only an operator can accept that.
	Missing
	// Conflict: replicas hold different bytes where they must not. An operator.
	Conflict
)

func (v Verdict) String() string {
	return [...]string{"wait", "take", "tell", "yield", "missing", "conflict"}[v]
}

// Decision is what a seal does next.
type Decision struct {
	Verdict Verdict
	Length  uint64
	CRC     uint32
	Servers []meta.ServerID // Take: the replicas in service, in the order of the record
	Cut     []meta.ServerID // Take: of these, those longer than Length
	Discard []meta.ServerID // Take: answered, and are no replicas any more: shorter, different or damaged
	Away    []meta.ServerID // Take: did not answer; to be checked (Return) when they are back
	Ask     []meta.ServerID // Tell
	Lost    uint64          // Take with AcceptLoss: bytes that were promised and are gone
	Why     string          // unless Take: for people
}

// DecideSeal is rule 5: answers[i] is that of c.Servers[i]. The length is never
// below what the journal committed or any replica recorded as synced, nor, as
// far as replicas can tell, below what all of them acknowledged. Without a
// better bound that is the longest verified prefix. The longest alone may be on a
// single disk, though, with bytes that nobody was promised, while the shorter
// ones, thrown away, hold all that was: so a bound from the writer (Asked) or
// from a replica that lost nothing (Whole) is taken where there is one.
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
			continue // what holds no fence, or not its own bytes, can't be in service
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
		// An earlier seal got as far as its cut, and the journal that said so is
		// gone (restored from a checkpoint): a chunk has one sealed content.
		return c.adopt(answers, sealed, must)
	case best < must && c.AcceptLoss:
		must, lost = best, must-best
	case best < must && away > 0:
		return Decision{Verdict: Wait, Why: fmt.Sprintf("%d bytes verify, %d were promised, and %d replicas don't answer", best, must, away)}
	case best < must:
		return Decision{Verdict: Missing, Why: fmt.Sprintf("%d bytes verify, %d were promised, and all replicas answered", best, must)}
	case best == 0 && c.OpenEnded && away > 0 && !c.AcceptLoss && !c.Off.empty():
		// A wiped disk says the same as one that was never written to.
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

// group is replicas with the same checksum at one length.
type group struct {
	crc     uint32
	members []int
	synced  uint64
}

// take chooses the replicas that have target bytes, all the same.
func (c Case) take(answers []Answer, good []int, target, must uint64) Decision {
	groups, ask := c.groups(answers, good, target)
	if len(ask) > 0 {
		return Decision{Verdict: Tell, Length: target, Ask: ask, Why: "checksums at the length are needed"}
	}
	if len(groups) == 0 {
		// Nobody has a fence on it: never written, or lost with its disks, and
		// nothing was promised of it, or an operator gave it up.
		return Decision{Verdict: Take, Why: "no replica has any bytes"}
	}
	// Bytes that all replicas acknowledged are the same on all of them, so
	// where they differ at least some never synced them for anybody. Those that
	// did have the word, then the many.
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

// groups sorts the replicas that have target bytes by their checksum there.
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

// adopt takes the content that a replica is sealed with already.
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

// result names what becomes of every replica.
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
