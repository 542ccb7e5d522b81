package server

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/wire"
)

// sighting is what is known of a chunk server, connected or not.
type sighting struct {
	info       meta.ServerInfo
	generation uint64
	live       bool          // it has a stream
	last       time.Time     // of its last report, or when its stream ended
	noted      time.Time     // when its node was recorded
	ahead      time.Duration // its clock, of this server's: as of its last report, less what that took
}

// quiet is how long a server with a stream may be silent before it counts as
// out of reach: several times the interval of its reports.
const quiet = 10 * time.Second

// notedEvery is how long a node's record may be older than its last report.
const notedEvery = 2 * time.Second

// saw takes in a report; it is called for each. anew tells that what was listed
// of the server's replicas before may be wrong.
func (s *Server) saw(name string, r *wire.Report) (anew bool) {
	s.seenMu.Lock()
	defer s.seenMu.Unlock()
	x := s.seen[r.Info.ID]
	if x == nil {
		x = &sighting{}
		s.seen[r.Info.ID] = x
	}
	anew = !x.live || x.generation != r.Generation || !slices.EqualFunc(x.info.Disks, r.Info.Disks, func(a, b meta.DiskInfo) bool {
		return a.ID == b.ID && a.State == b.State
	}) || x.info.Topology != r.Info.Topology
	x.info, x.generation, x.live, x.last = r.Info, r.Generation, true, time.Now()
	if r.Now != 0 {
		x.ahead = time.Duration(r.Now - meta.Time(time.Now().UnixNano()))
	}
	if anew {
		s.mapIsOldLocked()
	}
	if time.Since(x.noted) < notedEvery {
		return anew
	}
	x.noted = time.Now()
	n := cluster.NodeOf(name, r.Info)
	if known := nodeIn(s.cfg.Cluster.Nodes(), n.ID); known != nil && known.Tells(&n) {
		return anew
	}
	s.wg.Go(func() {
		ctx, cancel := context.WithTimeout(s.ctx, 5*time.Second)
		defer cancel()
		if err := s.cfg.Cluster.ObserveNode(ctx, n, meta.Time(time.Now().UnixNano())); err != nil && s.ctx.Err() == nil {
			s.log.Warn("a node could not be recorded", "server", n.ID, "error", err)
		}
	})
	return anew
}

// unseen notes that a server's stream ended.
func (s *Server) unseen(id meta.ServerID) {
	s.seenMu.Lock()
	defer s.seenMu.Unlock()
	if x := s.seen[id]; x != nil {
		x.live, x.last = false, time.Now()
		s.mapIsOldLocked()
	}
}

func nodeIn(nodes []cluster.Node, id meta.ServerID) *cluster.Node {
	i, ok := slices.BinarySearchFunc(nodes, id, func(n cluster.Node, id meta.ServerID) int { return cmp.Compare(n.ID, id) })
	if !ok {
		return nil
	}
	return &nodes[i]
}

// sightings lists every chunk server that this process has seen, by id.
func (s *Server) sightings() []sighting {
	s.seenMu.Lock()
	defer s.seenMu.Unlock()
	all := make([]sighting, 0, len(s.seen))
	for _, x := range s.seen {
		all = append(all, *x)
	}
	slices.SortFunc(all, func(a, b sighting) int { return cmp.Compare(a.info.ID, b.info.ID) })
	return all
}

// mapAge is how long a map serves: a report changes little.
const mapAge = 200 * time.Millisecond

// servers gives the map that chunks are placed by: those that report, those
// that did, and those that the registry knows.
func (s *Server) servers() *placement.Map {
	return s.mapWith(func() *placement.Map { return s.makeMap(nil) })
}

// mapWith is servers with a way to make a map where there is none that serves.
func (s *Server) mapWith(make func() *placement.Map) *placement.Map {
	s.seenMu.Lock()
	m, made := s.placed, s.mapTurn
	if time.Since(s.placedAt) > mapAge {
		m = nil
	}
	s.seenMu.Unlock()
	if m == nil {
		m = make()
		s.seenMu.Lock()
		if s.mapTurn == made { // else somebody was seen meanwhile, perhaps not by this map
			s.placed, s.placedAt = m, time.Now()
		}
		s.seenMu.Unlock()
	}
	return m
}

// forgetMap has the next map made anew.
func (s *Server) forgetMap() {
	s.seenMu.Lock()
	defer s.seenMu.Unlock()
	s.mapIsOldLocked()
}

// mapIsOldLocked: one that is being made now does not serve for longer, either.
// seenMu is held.
func (s *Server) mapIsOldLocked() {
	s.placed = nil
	s.mapTurn++
}

// givenUp: all disks of a server are bad, and what one of them still serves is
// to be moved: the same as if the server were drained.
func givenUp(i *meta.ServerInfo) bool {
	serves := false
	for _, d := range i.Disks {
		switch d.State {
		case meta.DiskOK, meta.DiskFull:
			return false
		case meta.DiskFailing:
			serves = true
		}
	}
	return serves
}

// makeMap makes the map, as without a job that is running (nil: with all).
func (s *Server) makeMap(without *job) *placement.Map {
	nodes := s.cfg.Cluster.Nodes()
	load := s.repairs.loads()
	seenNow := s.sightings()
	told := make(map[meta.ServerID]time.Time, len(seenNow))
	for _, x := range seenNow {
		told[x.info.ID] = x.last
	}
	changes := make(map[meta.ServerID]*placement.Server, len(seenNow))
	for id := range told {
		changes[id] = &placement.Server{}
	}
	s.repairs.unreported(told, without, changes)
	for _, o := range s.owners() {
		o.stale.leaving(changes)
	}
	var all []placement.Server
	for _, x := range seenNow {
		p := placement.Server{ID: x.info.ID, Topology: x.info.Topology, Host: x.info.Host, Disks: roomOf(&x.info), Load: load[x.info.ID]}
		c := changes[x.info.ID]
		p.Leaving, p.Coming, p.Gone, p.Got = c.Leaving, c.Coming, c.Gone, c.Got
		node := nodeIn(nodes, x.info.ID)
		away := time.Since(x.last)
		switch {
		case x.live && away < quiet:
			if node != nil && node.State != cluster.NodeActive || givenUp(&x.info) {
				p.State = placement.Draining
			}
		case node != nil && node.State == cluster.NodeRemoved, away > s.cfg.RepairDelay:
			p.State = placement.Gone
		default:
			p.State = placement.Away
		}
		all = append(all, p)
	}
	seen := len(all)
	for _, n := range nodes {
		if slices.ContainsFunc(all[:seen], func(p placement.Server) bool { return p.ID == n.ID }) {
			continue
		}
		p := placement.Server{ID: n.ID, Topology: n.Topology, State: placement.Away}
		for _, d := range n.Disks {
			p.Disks = append(p.Disks, placement.Disk{Class: d.Class, Total: d.Total})
		}
		if n.State == cluster.NodeRemoved || time.Since(s.epoch) > s.cfg.RepairDelay {
			p.State = placement.Gone
		}
		all = append(all, p)
	}
	return placement.NewMap(all)
}

// roomOf is the room on a server's disks that take something.
func roomOf(i *meta.ServerInfo) (disks []placement.Disk) {
	if len(i.Disks) == 0 {
		return []placement.Disk{{Class: i.Class, Total: i.Total, Free: i.Free}}
	}
	for _, d := range i.Disks {
		switch d.State {
		case meta.DiskOK:
			disks = append(disks, placement.Disk{Class: d.Class, Total: d.Total, Free: d.Free})
		case meta.DiskFull:
			disks = append(disks, placement.Disk{Class: d.Class, Total: d.Total})
		}
	}
	return disks
}

// chance is placement's source of it.
type chance struct{}

func (chance) Uint64N(n uint64) uint64 { return rand.Uint64N(n) }

// place chooses replicas for n chunks, not on the servers that the writer could
// not reach, unless the others are too few: then its suspicion is put to the
// test. Errors: Unavailable, NoSpace.
func (s *Server) place(n int, p *meta.Policy, w placement.Writer, avoid []meta.ServerID) ([][]meta.ServerID, error) {
	m := s.servers()
	if s.cfg.Unsafe.NoLeast {
		any := *p
		any.MinReplicas, p = 1, &any
	}
	one := func(avoid []meta.ServerID) ([][]meta.ServerID, error) {
		out := make([][]meta.ServerID, n)
		for c := range out {
			var err error
			if out[c], err = m.Choose(chance{}, p, int(max(p.Replicas, 1)), w, nil, avoid); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	// Who failed long ago is the first to be tried again.
	for ; len(avoid) > 0; avoid = avoid[:len(avoid)-1] {
		if out, err := one(avoid); err == nil {
			return out, nil
		}
	}
	return one(nil)
}
