package placement

import (
	"slices"

	"penstock.io/penstock/meta"
)

// ReplicaState is the known state of a replica.
type ReplicaState uint8

const (
	// Good: on the server, sealed as journaled, as far as known.
	Good ReplicaState = iota
	// Bad: corrupt, too short, sealed otherwise, or absent. The server can copy the replica
	// again.
	Bad
	// Unfit: good, but on a disk of another class, or a failing disk. The replica moves to
	// another disk of the same server with room, or else to another server.
	Unfit
)

// Replica is a replica in a chunk's record.
type Replica struct {
	Server meta.ServerID
	State  ReplicaState
	Length uint64 // bytes; 0: not known
}

// Reason is why something is to be done about a chunk, the most urgent last.
type Reason uint8

const (
	None           Reason = iota
	Imbalance             // to even out how full servers are
	Extra                 // more replicas than the policy wants
	Evacuate              // a replica on a draining server, or on a failing disk
	Misplaced             // a replica is on a server where the policy does not want data
	BadReplica            // a replica has wrong or missing bytes
	UnderReplicate        // fewer replicas than the policy wants
	Endangered            // one replica is left
	Lost                  // none: nothing can be done now
)

var reasons = [...]string{"none", "imbalance", "extra", "evacuate", "misplaced", "bad replica", "under-replicated", "endangered", "lost"}

func (r Reason) String() string { return reasons[r] }

// Step is the work for a chunk: copy the chunk from any of From to each of Add, then make Keep
// and Add the chunk's replicas, then, later, delete the chunk's copies on Remove.
type Step struct {
	Reason Reason
	Want   int // replicas, by the policy
	Live   int // good, reachable replicas
	Away   int // replicas out of reach at present, which still count
	Add    []meta.ServerID
	From   []meta.ServerID
	Keep   []meta.ServerID // of the record, in the same order
	Remove []meta.ServerID
	// Blocked: the policy is not met, and nothing can be done at present.
	Blocked bool
}

// Urgency orders steps: the greater, the sooner.
func (s *Step) Urgency() int { return int(s.Reason)<<8 - min(s.Live, 255) }

// Work reports whether anything is left to do.
func (s *Step) Work() bool { return len(s.Add) > 0 || len(s.Remove) > 0 }

// Plan examines one sealed chunk. The returned step is safe to take, and to stop at any point.
// Repeated steps lead to a chunk that meets the policy, or is as near to the policy as the
// servers allow, and then to empty steps. replicas are in the order of the chunk's record.
func (m *Map) Plan(r Rand, p *meta.Policy, replicas []Replica) Step {
	want := int(max(p.Replicas, 1))
	const (
		gone  = iota // is not, or must be made again
		bad          // like a missing replica, but the server can copy the replica again
		unfit        // a source that must move
		away         // counts, can't be asked
		good
	)
	kind := make([]int, len(replicas))
	at := make([]int, len(replicas))
	st := Step{Want: want}
	misplaced, evacuate, wrong := false, false, false
	for k, x := range replicas {
		i, ok := m.index(x.Server)
		at[k] = i
		switch {
		case !ok || m.servers[i].State == Gone:
			kind[k], at[k] = gone, -1
		case m.servers[i].State == Away:
			kind[k] = away
			if x.State == Bad {
				kind[k] = gone
			} else {
				st.Away++
			}
		case x.State == Bad:
			kind[k], wrong = bad, true
		case m.servers[i].State == Draining || x.State == Unfit:
			kind[k], evacuate = unfit, true
		case !m.fits(i, p):
			kind[k], misplaced = unfit, true
		default:
			kind[k] = good
		}
		if kind[k] == unfit || kind[k] == good {
			st.From = append(st.From, x.Server)
		}
	}
	st.Live = len(st.From)
	// The replicas that may stay, at most one in a failure domain: good replicas before
	// replicas on servers that are away.
	var taken []int32
	stay := make([]bool, len(replicas))
	fit, extra := 0, false
	for _, k := range []int{good, away} {
		for j := range replicas {
			if kind[j] != k {
				continue
			}
			if k == away && (!m.fits(at[j], p) || replicas[j].State == Unfit) {
				misplaced = true
				continue
			}
			d := m.domain[p.Spread][at[j]]
			switch {
			case slices.Contains(taken, d):
				misplaced = true
			case fit == want:
				extra = true
			default:
				taken, stay[j] = append(taken, d), true
				fit++
			}
		}
	}
	have := func() (l []meta.ServerID) {
		for j, x := range replicas {
			if stay[j] {
				l = append(l, x.Server)
			}
		}
		return l
	}
	counted := 0 // existing replicas
	for j := range replicas {
		if kind[j] >= unfit {
			counted++
		}
	}
	switch {
	case counted < max(want, 1):
		st.Reason = ShortReason(counted, want)
	case wrong:
		st.Reason = BadReplica
	case misplaced:
		st.Reason = Misplaced
	case evacuate:
		st.Reason = Evacuate
	case extra || len(replicas) > want:
		st.Reason = Extra
	}
	if fit == want && len(replicas) == want {
		st.Reason, st.From = None, nil
		return st
	}
	if st.Live == 0 {
		st.From, st.Blocked = nil, true
		for _, x := range replicas {
			st.Keep = append(st.Keep, x.Server)
		}
		return st
	}
	// A bad replica is copied again on the same server, if the policy allows the server, and a
	// replica on a disk to be emptied moves to another disk of the same server: then nothing
	// else moves.
	refill := make([]bool, len(replicas))
	for j, x := range replicas {
		if kind[j] != bad && (kind[j] != unfit || x.State != Unfit) || fit == want {
			continue
		}
		i := at[j]
		d := m.domain[p.Spread][i]
		s := &m.servers[i]
		room := s.usable(p.Class) > 0
		if kind[j] == unfit {
			room = s.fitsOn(p.Class, x.Length)
		}
		if s.State == Live && m.fits(i, p) && room && !slices.Contains(taken, d) {
			refill[j], stay[j] = true, true
			taken = append(taken, d)
			fit++
			st.Add = append(st.Add, replicas[j].Server)
		}
	}
	var avoid []meta.ServerID // no server of the record gets a second replica
	for _, x := range replicas {
		avoid = append(avoid, x.Server)
	}
	if fit < want {
		more := m.choose(r, p, p.Spread, want-fit, Writer{}, have(), avoid)
		fit += len(more)
		st.Add = append(st.Add, more...)
	}
	if fit == want {
		// Complete: all other replicas may go, except reachable replicas in favour of
		// unreachable ones.
		waits := false
		for j := range replicas {
			waits = waits || stay[j] && kind[j] == away
		}
		for j, x := range replicas {
			switch {
			case refill[j]:
			case stay[j], waits && (kind[j] == unfit || kind[j] == good):
				st.Keep = append(st.Keep, x.Server)
			default:
				st.Remove = append(st.Remove, x.Server)
			}
		}
		st.Blocked = !st.Work()
		return st
	}
	// The policy can't be met now. Make at least as many copies as the policy wants, in domains
	// as far apart as possible, and remove no copy.
	total := counted + len(st.Add)
	held := slices.Clone(st.Add)
	for j, x := range replicas {
		if kind[j] >= unfit {
			held = append(held, x.Server)
		}
	}
	for level := p.Spread; total < want; level-- {
		more := m.choose(r, p, level, want-total, Writer{}, held, avoid)
		total += len(more)
		st.Add = append(st.Add, more...)
		held = append(held, more...)
		if level == meta.SpreadHost {
			break
		}
	}
	for j, x := range replicas {
		if !refill[j] {
			st.Keep = append(st.Keep, x.Server)
		}
	}
	st.Blocked = len(st.Add) == 0
	return st
}
