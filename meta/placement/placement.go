// Package placement chooses servers: for the replicas of a new chunk, and for repairs of a
// chunk whose replicas are not where its volume's policy wants them. The package is pure: the
// cluster is a Map, chance is an argument, and the same input gives the same choice.
//
// A server has a place in the topology, a path like /dc1/rack3/node7. Failure domains are the
// prefixes of the path: the node is the whole path, the rack is the path without the last part,
// the data centre is the first part. Every server without a place is a separate node in a
// single unknown rack and centre, so a spread over racks never rests on unknown racks.
package placement

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
)

// Rand gives chance: a number in [0, n).
type Rand interface{ Uint64N(n uint64) uint64 }

// Server is a chunk server, in the form for placement.
type Server struct {
	ID       meta.ServerID
	Topology string
	Host     string // boot id of the machine
	Disks    []Disk
	State    State
	Load     uint32 // copies to the server under way, and the like: less is better
	// Leaving counts bytes of replicas without a record: the bytes count as used in Disks, and
	// will be freed. Coming counts bytes that were copied here and are missing in Disks. Gone
	// and Got count bytes deleted and copied just now, which Disks may or may not include. Only
	// Balance uses these fields.
	Leaving, Coming, Gone, Got uint64
}

// Disk is the space of a class on a server.
type Disk struct {
	Class       string
	Total, Free uint64 // bytes
}

// State is how far a server may be counted on.
type State uint8

const (
	// Live: reachable, may get chunks.
	Live State = iota
	// Away: out of reach, but not for long yet. The server's replicas count; the server gets
	// none and is no source.
	Away
	// Draining: serves and is a source, and should be emptied.
	Draining
	// Gone: out of reach for so long that the server's replicas must be made again.
	Gone
)

// Map is the cluster, in the form for placement; a Map is immutable.
type Map struct {
	servers []Server // by id
	// domain[level][i] numbers the failure domain of servers[i].
	domain [3][]int32
}

// NewMap makes a map. The servers' ids are unique.
func NewMap(servers []Server) *Map {
	m := &Map{servers: slices.Clone(servers)}
	slices.SortFunc(m.servers, func(a, b Server) int { return cmp.Compare(a.ID, b.ID) })
	for level := range m.domain {
		m.domain[level] = make([]int32, len(m.servers))
		numbers := map[string]int32{}
		for i, s := range m.servers {
			name := Domain(s.Topology, meta.Spread(level))
			if name == "" && meta.Spread(level) == meta.SpreadHost {
				name = fmt.Sprintf("server %d", s.ID)
			}
			n, ok := numbers[name]
			if !ok {
				n = int32(len(numbers))
				numbers[name] = n
			}
			m.domain[level][i] = n
		}
	}
	return m
}

// Domain is the failure domain of a place at a level; "" when the place doesn't
// tell.
func Domain(topology string, level meta.Spread) string {
	at := strings.Trim(topology, "/")
	if at == "" {
		return ""
	}
	switch level {
	case meta.SpreadRack:
		i := strings.LastIndexByte(at, '/')
		return at[:max(i, 0)]
	case meta.SpreadDC:
		first, _, deeper := strings.Cut(at, "/")
		if !deeper {
			return ""
		}
		return first
	}
	return at
}

// Within reports whether a place lies in a subtree.
func Within(topology, subtree string) bool {
	sub := strings.Trim(subtree, "/")
	at := strings.Trim(topology, "/")
	return sub == "" || at == sub || strings.HasPrefix(at, sub+"/")
}

// room adds up the disks of a class, of all with "".
func (s *Server) room(class string) (total, free uint64) {
	for _, d := range s.Disks {
		if class == "" || d.Class == class {
			total, free = total+d.Total, free+d.Free
		}
	}
	return total, free
}

// Reserve returns the free space below which a disk gets no new chunks: a fiftieth of the disk,
// at most 1 GiB, so promises to writers can be kept.
func Reserve(total uint64) uint64 { return min(total/50, 1<<30) }

// fitsOn reports whether one disk of a class has room for n bytes, and space beyond the
// reserve afterwards.
func (s *Server) fitsOn(class string, n uint64) bool {
	return slices.ContainsFunc(s.Disks, func(d Disk) bool {
		return (class == "" || d.Class == class) && d.Free > Reserve(d.Total) && d.Free-Reserve(d.Total) > n
	})
}

// usable returns the free space on the disks of a class beyond their reserves.
func (s *Server) usable(class string) (free uint64) {
	for _, d := range s.Disks {
		if (class == "" || d.Class == class) && d.Free > Reserve(d.Total) {
			free += d.Free
		}
	}
	return free
}

func (m *Map) index(id meta.ServerID) (int, bool) {
	return slices.BinarySearchFunc(m.servers, id, func(s Server, id meta.ServerID) int { return cmp.Compare(s.ID, id) })
}

// Server finds a server.
func (m *Map) Server(id meta.ServerID) (Server, bool) {
	i, ok := m.index(id)
	if !ok {
		return Server{}, false
	}
	return m.servers[i], true
}

// Servers lists all, by id.
func (m *Map) Servers() []Server { return m.servers }

// fits reports whether a server is where the policy wants data, apart from the places of other
// replicas.
func (m *Map) fits(i int, p *meta.Policy) bool {
	s := &m.servers[i]
	if !Within(s.Topology, p.Topology) {
		return false
	}
	if p.Class == "" {
		return true
	}
	total, _ := s.room(p.Class)
	return total > 0
}

// Outside reports whether any of the servers is not where the policy wants data.
func (m *Map) Outside(p *meta.Policy, on []meta.ServerID) bool {
	return slices.ContainsFunc(on, func(id meta.ServerID) bool {
		i, ok := m.index(id)
		return ok && !m.fits(i, p)
	})
}

// Elsewhere reports whether the appending to an open chunk should end and continue elsewhere: a
// server of the chunk is not where the policy wants data, and a server with room is. The spread
// and the number of replicas matter only when the chunk is sealed.
func (m *Map) Elsewhere(p *meta.Policy, on []meta.ServerID) bool {
	if !m.Outside(p, on) {
		return false
	}
	for i := range m.servers {
		if s := &m.servers[i]; s.State == Live && m.fits(i, p) && s.usable(p.Class) > 0 {
			return true
		}
	}
	return false
}

// Writer is the place of a chunk's writer.
type Writer struct {
	Host     string // boot id
	Topology string
}

// pool has the servers that may get a replica, with the sums of the weights.
type pool struct {
	m    *Map
	idx  []int
	sums []uint64 // sums[k]: of the weights of idx[0..k]
}

// weight returns the weight of a server in a draw, in MiB, so the sum over any cluster fits.
func weight(free uint64) uint64 { return max(free>>20, 1) }

func (m *Map) pool(p *meta.Policy, avoid []meta.ServerID) *pool {
	return m.poolOf(p, func(i int) bool {
		s := &m.servers[i]
		return s.State == Live && !slices.Contains(avoid, s.ID) && m.fits(i, p)
	})
}

// poolOf returns the pool of the servers with room for which may is true.
func (m *Map) poolOf(p *meta.Policy, may func(i int) bool) *pool {
	l := &pool{m: m}
	var sum uint64
	for i := range m.servers {
		s := &m.servers[i]
		if !may(i) {
			continue
		}
		free := s.usable(p.Class)
		if free == 0 {
			continue
		}
		sum += weight(free)
		l.idx, l.sums = append(l.idx, i), append(l.sums, sum)
	}
	return l
}

// draw draws two servers, weighted by free space, among the servers in domains of the level
// that are not taken, and returns the better server; -1: no such server.
func (l *pool) draw(r Rand, level meta.Spread, taken []int32, class string) int {
	if len(l.idx) == 0 {
		return -1
	}
	free := func(i int) bool { return !slices.Contains(taken, l.m.domain[level][i]) }
	one := func() int {
		for range 16 {
			x := r.Uint64N(l.sums[len(l.sums)-1])
			k, _ := slices.BinarySearch(l.sums, x+1)
			if i := l.idx[k]; free(i) {
				return i
			}
		}
		// Most domains are taken: list the others.
		var left []int
		var sums []uint64
		var sum uint64
		for _, i := range l.idx {
			if free(i) {
				sum += weight(l.m.servers[i].usable(class))
				left, sums = append(left, i), append(sums, sum)
			}
		}
		if len(left) == 0 {
			return -1
		}
		k, _ := slices.BinarySearch(sums, r.Uint64N(sum)+1)
		return left[k]
	}
	a := one()
	if a < 0 {
		return a
	}
	if b := one(); l.m.better(b, a, class) {
		return b
	}
	return a
}

// better prefers the server with less work for the server's space.
func (m *Map) better(a, b int, class string) bool {
	x, y := &m.servers[a], &m.servers[b]
	xt, xf := x.room(class)
	yt, yf := y.room(class)
	return float64(xf)/float64(max(xt, 1))/float64(1+x.Load) > float64(yf)/float64(max(yt, 1))/float64(1+y.Load)
}

// AtBest returns the map with all servers in use connected and empty: a policy beyond the
// returned map waits for new servers, not for old servers. Servers that are gone or draining
// are left out.
func (m *Map) AtBest() *Map {
	var all []Server
	for _, s := range m.servers {
		if s.State != Live && s.State != Away {
			continue
		}
		s.State, s.Disks = Live, slices.Clone(s.Disks)
		for i := range s.Disks {
			s.Disks[i].Free = s.Disks[i].Total
		}
		all = append(all, s)
	}
	return NewMap(all)
}

// Choose picks n servers for new replicas. have are the servers of replicas that stay; Choose
// picks servers besides have, and never a server in avoid. When have is empty and the policy
// says so, the first picked server is the writer's. With fewer failure domains than n, Choose
// still returns the servers found in separate domains if they and have are at least p.Least()
// servers, and adds the servers that narrower spreads allow. Errors: NoSpace (the fitting
// servers are full, or the failure domains are too few), Unavailable (the fitting servers are
// out of reach: a later attempt may succeed).
func (m *Map) Choose(r Rand, p *meta.Policy, n int, w Writer, have, avoid []meta.ServerID) ([]meta.ServerID, error) {
	got := m.choose(r, p, p.Spread, n, w, have, avoid)
	if len(got) == n {
		return got, nil
	}
	if len(got)+len(have) >= int(p.Least()) {
		return m.widen(r, p, n, w, have, avoid, got), nil
	}
	return nil, m.refuse(p, n, have, avoid, got)
}

// widen adds to got the servers that narrower spreads allow.
func (m *Map) widen(r Rand, p *meta.Policy, n int, w Writer, have, avoid, got []meta.ServerID) []meta.ServerID {
	for level := p.Spread; level > meta.SpreadHost && len(got) < n; {
		level--
		held := slices.Concat(have, got)
		got = append(got, m.choose(r, p, level, n-len(got), w, held, avoid)...)
	}
	return got
}

// choose picks up to n servers in distinct domains of a level.
func (m *Map) choose(r Rand, p *meta.Policy, level meta.Spread, n int, w Writer, have, avoid []meta.ServerID) (got []meta.ServerID) {
	l := m.pool(p, avoid)
	taken := m.taken(level, have)
	if len(have) == 0 && n > 0 && p.LocalFirst {
		if i := l.local(w); i >= 0 {
			got = append(got, m.servers[i].ID)
			taken = append(taken, m.domain[level][i])
		}
	}
	for len(got) < n {
		i := l.draw(r, level, taken, p.Class)
		if i < 0 {
			break
		}
		got = append(got, m.servers[i].ID)
		taken = append(taken, m.domain[level][i])
	}
	return got
}

// taken returns the domains of servers at a level.
func (m *Map) taken(level meta.Spread, servers []meta.ServerID) (taken []int32) {
	for _, id := range servers {
		if i, ok := m.index(id); ok {
			taken = append(taken, m.domain[level][i])
		}
	}
	return taken
}

// local returns the server on the writer's machine with the most room, or else a server at the
// writer's place in the topology, or else -1.
func (l *pool) local(w Writer) int {
	best, host := -1, false
	for _, i := range l.idx {
		s := &l.m.servers[i]
		same := w.Host != "" && s.Host == w.Host
		if !same && (w.Topology == "" || s.Topology != w.Topology) {
			continue
		}
		if best < 0 || same && !host || same == host && l.m.better(i, best, "") {
			best, host = i, same
		}
	}
	return best
}

// refuse says why a policy can't be met.
func (m *Map) refuse(p *meta.Policy, n int, have, avoid, got []meta.ServerID) error {
	var there, full, away, leaving, avoided int
	for i := range m.servers {
		s := &m.servers[i]
		if !m.fits(i, p) || slices.Contains(have, s.ID) {
			continue
		}
		there++
		switch {
		case s.State == Away || s.State == Gone:
			away++
		case s.State == Draining:
			leaving++
		case slices.Contains(avoid, s.ID):
			avoided++
		case s.usable(p.Class) == 0:
			full++
		}
	}
	where := ""
	if p.Class != "" {
		where += " with disks of class " + p.Class
	}
	if strings.Trim(p.Topology, "/") != "" {
		where += " below " + p.Topology
	}
	kind := meta.NoSpace
	if away+avoided > 0 || len(m.servers) == 0 {
		kind = meta.Unavailable
	}
	domains := domainsOf(p.Spread)
	least := ""
	if l := int(p.Least()) - len(have); l > 0 && l < n {
		least = fmt.Sprintf(" (%d are the least)", l)
	}
	text := fmt.Sprintf("%d of %d servers%s have room, each in a failure domain of its own (%s)%s: of %d others there, %d are full, %d out of reach, %d draining",
		len(got), n, least, domains, where, there-len(got), full, away+avoided, leaving)
	if len(m.servers) == 0 {
		text = "no chunk server is connected"
	}
	return meta.E("place chunk", kind, "", errors.New(text))
}

// distance counts the parts in which two places differ, from the node up: 0 on one machine.
func distance(a, b *Server) int {
	if a.Host != "" && a.Host == b.Host && a.Topology == b.Topology {
		return 0
	}
	for level := meta.SpreadHost; level <= meta.SpreadDC; level++ {
		x := Domain(a.Topology, level)
		if x != "" && x == Domain(b.Topology, level) {
			return 1 + int(level)
		}
	}
	return 2 + int(meta.SpreadDC)
}

// Nearest sorts servers by their distance from to, and servers at an equal distance by load.
func (m *Map) Nearest(to meta.ServerID, among []meta.ServerID) []meta.ServerID {
	t, ok := m.Server(to)
	if !ok {
		return slices.Clone(among)
	}
	out := slices.Clone(among)
	slices.SortStableFunc(out, func(a, b meta.ServerID) int {
		x, okX := m.Server(a)
		y, okY := m.Server(b)
		if !okX || !okY {
			return 0
		}
		return cmp.Or(cmp.Compare(distance(&x, &t), distance(&y, &t)), cmp.Compare(x.Load, y.Load))
	})
	return out
}
