package placement

import (
	"slices"

	"penstock.io/penstock/meta"
)

// Balance evens out the fill of the servers on which a policy's data may lie. Balance records
// the proposed moves, so one walk over all chunks proposes as many moves as are useful and no
// more. For one goroutine.
//
// The fill of a server is the used space of the disks, minus Leaving, plus Coming. Where the
// reports are uncertain, the server counts as full as possible as a target of moves, and as
// empty as possible as a source. A move shows on the target's disk at once, but on the source's
// only when the old replica is deleted, a grace time later. Without the records, moves would go
// on for the grace time, and later chunks would move back.
type Balance struct {
	m         *Map
	p         *meta.Policy
	threshold float64
	total     []float64 // bytes by server; 0: does not take part
	low, high []float64 // used bytes, at least and at most
	mean      float64
	lowest    float64 // lower bound of all fills, after all recorded moves
}

// Balance considers the servers where the policy wants data, and the servers' disks of the
// policy's class. threshold is the difference of two fills, from 0 to 1, up to which nothing
// moves; zero or less: nothing ever moves.
func (m *Map) Balance(p *meta.Policy, threshold float64) *Balance {
	b := &Balance{m: m, p: p, threshold: threshold, lowest: 1, total: make([]float64, len(m.servers)),
		low: make([]float64, len(m.servers)), high: make([]float64, len(m.servers))}
	var used, total float64
	for i := range m.servers {
		s := &m.servers[i]
		if s.State != Live || !m.fits(i, p) {
			continue
		}
		t, f := s.room(p.Class)
		b.total[i] = float64(t)
		u := float64(t) - float64(f) - float64(s.Leaving) + float64(s.Coming)
		within := func(n float64) float64 { return min(max(n, 0), float64(t)) }
		b.low[i], b.high[i] = within(u-float64(s.Gone)), within(u+float64(s.Got))
		used, total = used+(b.low[i]+b.high[i])/2, total+b.total[i]
		if t > 0 {
			b.lowest = min(b.lowest, b.high[i]/b.total[i])
		}
	}
	if total > 0 {
		b.mean = used / total
	}
	return b
}

// Fill returns the used part of a server, 0 to 1; 0 if the server does not take part.
func (b *Balance) Fill(id meta.ServerID) float64 {
	if i, ok := b.m.index(id); ok && b.total[i] > 0 {
		return (b.low[i] + b.high[i]) / 2 / b.total[i]
	}
	return 0
}

// Move proposes to move one replica of a chunk of length bytes, about which Plan has nothing to
// do, from the fullest server of the chunk to a server whose fill is lower by more than the
// threshold, and stays at most as high as the source's fill.
func (b *Balance) Move(r Rand, servers []meta.ServerID, length uint64) (Step, bool) {
	if b.threshold <= 0 {
		return Step{}, false
	}
	m, n := b.m, float64(length)
	worst, from, fullest := -1, -1, b.mean
	for k, id := range servers {
		i, ok := m.index(id)
		if !ok || m.servers[i].State != Live {
			return Step{}, false
		}
		if b.total[i] > 0 && b.low[i]/b.total[i] > fullest {
			worst, from, fullest = k, i, b.low[i]/b.total[i]
		}
	}
	below := min(b.mean, fullest-b.threshold)
	if worst < 0 || b.lowest >= below {
		return Step{}, false
	}
	after := (b.low[from] - n) / b.total[from]
	// First try targets below the mean: a server that gave chunks until the server's fill
	// reached the mean must not get chunks back.
	within := func(most float64) *pool {
		return m.poolOf(b.p, func(i int) bool {
			return b.total[i] > 0 && b.high[i]/b.total[i] < below && (b.high[i]+n)/b.total[i] <= most &&
				!slices.Contains(servers, m.servers[i].ID)
		})
	}
	l := within(min(after, b.mean))
	if len(l.idx) == 0 {
		l = within(after)
	}
	if len(l.idx) == 0 {
		return Step{}, false
	}
	keep := slices.Delete(slices.Clone(servers), worst, worst+1)
	to := l.draw(r, b.p.Spread, m.taken(b.p.Spread, keep), b.p.Class)
	if to < 0 {
		return Step{}, false
	}
	b.low[from], b.high[from] = b.low[from]-n, b.high[from]-n
	b.low[to], b.high[to] = b.low[to]+n, b.high[to]+n
	return Step{Reason: Imbalance, Live: len(servers), Add: []meta.ServerID{m.servers[to].ID}, From: slices.Clone(servers),
		Keep: keep, Remove: servers[worst : worst+1 : worst+1]}, true
}
