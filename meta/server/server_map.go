package server

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/wire"
)

// sighting is the last known state of a chunk server, connected or not.
type sighting struct {
	info       meta.ServerInfo
	generation uint64
	live       bool          // the server has a stream
	last       time.Time     // of its last report, or the end of its stream
	noted      time.Time     // of the last record of its node
	ahead      time.Duration // its clock minus this server's at the last report, less the report's travel time
}

// serverMap knows every chunk server, connected or not, and the map for the placement of chunks.
type serverMap struct {
	*process
	hosted  *hosted
	repairs *repairs

	// mu guards seen and the map built from seen; mu is the innermost lock.
	mu       sync.Mutex
	seen     map[meta.ServerID]*sighting
	placed   *placement.Map // nil: make a new map
	placedAt time.Time
	mapTurn  uint64 // counts the invalidations of maps
}

// quiet is how long a server with a stream may be silent before the server counts as
// unreachable: several report intervals.
const quiet = 10 * time.Second

// notedEvery is how long a node's record may lag behind its last report.
const notedEvery = 2 * time.Second

// saw takes in a chunk server's report; the caller passes every report. anew: earlier lists of
// the server's replicas may be wrong.
func (sm *serverMap) saw(name string, r *wire.Report) (anew bool) {
	sm.mu.Lock()
	defer sm.mu.Unlock()
	x := sm.seen[r.Info.ID]
	if x == nil {
		x = &sighting{}
		sm.seen[r.Info.ID] = x
	}
	anew = !x.live || x.generation != r.Generation || !slices.EqualFunc(x.info.Disks, r.Info.Disks, func(a, b meta.DiskInfo) bool {
		return a.ID == b.ID && a.State == b.State
	}) || x.info.Topology != r.Info.Topology
	x.info, x.generation, x.live, x.last = r.Info, r.Generation, true, time.Now()
	if r.Now != 0 {
		x.ahead = time.Duration(r.Now - meta.Time(time.Now().UnixNano()))
	}
	if anew {
		sm.mapIsOldLocked()
	}
	if time.Since(x.noted) < notedEvery {
		return anew
	}
	x.noted = time.Now()
	n := cluster.NodeOf(name, r.Info)
	if known := nodeIn(sm.cfg.Cluster.Nodes(), n.ID); known != nil && known.Tells(&n) {
		return anew
	}
	sm.wg.Go(func() {
		ctx, cancel := context.WithTimeout(sm.ctx, 5*time.Second)
		defer cancel()
		if err := sm.cfg.Cluster.ObserveNode(ctx, n, meta.Time(time.Now().UnixNano())); err != nil && sm.ctx.Err() == nil {
			sm.log.Warn("a node could not be recorded", "server", n.ID, "error", err)
		}
	})
	return anew
}

// unseen notes the end of a server's stream.
func (sm *serverMap) unseen(id meta.ServerID) {
	sm.mu.Lock()
	defer sm.mu.Unlock()
	if x := sm.seen[id]; x != nil {
		x.live, x.last = false, time.Now()
		sm.mapIsOldLocked()
	}
}

func nodeIn(nodes []cluster.Node, id meta.ServerID) *cluster.Node {
	i, ok := slices.BinarySearchFunc(nodes, id, func(n cluster.Node, id meta.ServerID) int { return cmp.Compare(n.ID, id) })
	if !ok {
		return nil
	}
	return &nodes[i]
}

// sightings lists every chunk server seen by this process, by ID.
func (sm *serverMap) sightings() []sighting {
	sm.mu.Lock()
	defer sm.mu.Unlock()
	all := make([]sighting, 0, len(sm.seen))
	for _, x := range sm.seen {
		all = append(all, *x)
	}
	slices.SortFunc(all, func(a, b sighting) int { return cmp.Compare(a.info.ID, b.info.ID) })
	return all
}

// mapAge is how long a map stays in use; a report changes little.
const mapAge = 200 * time.Millisecond

// servers returns the map for the placement of chunks: servers that report, servers that
// reported earlier, and servers known to the registry.
func (sm *serverMap) servers() *placement.Map {
	return sm.mapWith(func() *placement.Map { return sm.makeMap(nil) })
}

// mapWith returns the current map, or a new one from make if the current map is too old.
func (sm *serverMap) mapWith(make func() *placement.Map) *placement.Map {
	sm.mu.Lock()
	m, made := sm.placed, sm.mapTurn
	if time.Since(sm.placedAt) > mapAge {
		m = nil
	}
	sm.mu.Unlock()
	if m == nil {
		m = make()
		sm.mu.Lock()
		if sm.mapTurn == made { // else the map is out of date already
			sm.placed, sm.placedAt = m, time.Now()
		}
		sm.mu.Unlock()
	}
	return m
}

// forgetMap invalidates the map, so that the next use makes a new map.
func (sm *serverMap) forgetMap() {
	sm.mu.Lock()
	defer sm.mu.Unlock()
	sm.mapIsOldLocked()
}

// mapIsOldLocked invalidates the map, and any map being made now. The caller holds mu.
func (sm *serverMap) mapIsOldLocked() {
	sm.placed = nil
	sm.mapTurn++
}

// givenUp reports whether all disks of a server are bad and one still serves: the server's
// replicas are then moved as if the server were drained.
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

// makeMap makes the map. The running job without (nil: none) counts as not running.
func (sm *serverMap) makeMap(without *job) *placement.Map {
	nodes := sm.cfg.Cluster.Nodes()
	load := sm.repairs.loads()
	seenNow := sm.sightings()
	told := make(map[meta.ServerID]time.Time, len(seenNow))
	for _, x := range seenNow {
		told[x.info.ID] = x.last
	}
	changes := make(map[meta.ServerID]*placement.Server, len(seenNow))
	for id := range told {
		changes[id] = &placement.Server{}
	}
	sm.repairs.unreported(told, without, changes)
	for _, o := range sm.hosted.owners() {
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
		case node != nil && node.State == cluster.NodeRemoved, away > sm.cfg.RepairDelay:
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
		if n.State == cluster.NodeRemoved || time.Since(sm.epoch) > sm.cfg.RepairDelay {
			p.State = placement.Gone
		}
		all = append(all, p)
	}
	return placement.NewMap(all)
}

// roomOf returns the disks of a server that are healthy or full, with their room.
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

// chance is the source of randomness for placement.
type chance struct{}

func (chance) Uint64N(n uint64) uint64 { return rand.Uint64N(n) }

// place chooses replicas for n chunks, on none of the servers in avoid (servers reported as
// unreachable by the writer). If the other servers are too few, place tries avoided servers
// after all. Errors: Unavailable, NoSpace.
func (sm *serverMap) place(n int, p *meta.Policy, w placement.Writer, avoid []meta.ServerID) ([][]meta.ServerID, error) {
	m := sm.servers()
	if sm.cfg.Unsafe.NoLeast {
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
	// The server with the oldest failure is the first to be tried again.
	for ; len(avoid) > 0; avoid = avoid[:len(avoid)-1] {
		if out, err := one(avoid); err == nil {
			return out, nil
		}
	}
	return one(nil)
}

// standing tells how the chunk servers stand, by id.
func (sm *serverMap) standing() (all []serverStanding) {
	nodes := sm.cfg.Cluster.Nodes()
	for _, x := range sm.sightings() {
		st := serverStanding{id: x.info.ID, live: x.live}
		if n := nodeIn(nodes, x.info.ID); n != nil {
			st.node = n.State
		}
		for _, d := range x.info.Disks {
			if d.State != meta.DiskOK && d.State != meta.DiskFull {
				st.disks += d.ID + " "
			}
		}
		all = append(all, st)
	}
	return all
}

// serverStanding is the state of a chunk server. A change for the worse may leave chunks of a
// closed volume in need of repair.
type serverStanding struct {
	id    meta.ServerID
	live  bool
	node  cluster.NodeState
	disks string // ids of the disks that are neither OK nor full
}

// worse reports whether a server went, began to be emptied or removed, or has a newly failing
// disk. The chunks of closed volumes there may then need copies.
func worse(was, now []serverStanding) bool {
	for _, n := range now {
		i := slices.IndexFunc(was, func(w serverStanding) bool { return w.id == n.id })
		w := serverStanding{live: true, node: cluster.NodeActive}
		if i >= 0 {
			w = was[i]
		}
		if w.live && !n.live || n.node != w.node && n.node != cluster.NodeActive && n.node != "" || n.disks != w.disks && n.disks != "" {
			return true
		}
	}
	return false
}

// registered are the chunk servers that were not removed, live or not.
func (sm *serverMap) registered() *placement.Map {
	nodes := sm.cfg.Cluster.Nodes()
	var all []placement.Server
	for _, x := range sm.servers().Servers() {
		if n := nodeIn(nodes, x.ID); n == nil || n.State != cluster.NodeRemoved {
			all = append(all, x)
		}
	}
	return placement.NewMap(all)
}

// meetable refuses a policy that the registered chunk servers can't meet. Servers that are
// down count too, since they may come back, and so do servers that this process has not seen
// but the registry lists. While no chunk server is registered, no policy is refused. In a new
// cluster, a policy needing servers that are still starting is refused until they are
// registered. Errors: ResourceExceeded.
func (sm *serverMap) meetable(p *meta.Policy) error {
	if why := unmet(sm.registered(), p); why != "" {
		return meta.E("set policy", meta.ResourceExceeded, "", fmt.Errorf("nothing in the cluster can meet the policy: %s; add chunk servers, wait until those that are starting are listed by 'penstock node list', ask for less, or force it (--force)", why))
	}
	return nil
}

// failedDisk names a failed disk of a server that was not given up, or "": a chunk that the
// server does not find may be on that disk.
func (sm *serverMap) failedDisk(id meta.ServerID) string {
	for _, x := range sm.sightings() {
		for _, d := range x.info.Disks {
			if x.info.ID == id && d.State == meta.DiskFailed {
				return d.ID
			}
		}
	}
	return ""
}

// blobsShort counts the blobs with fewer live replicas than a new blob would get.
func (sm *serverMap) blobsShort(refs []meta.BlobRef) (n int) {
	live, most := sm.blobServers()
	for _, r := range refs {
		if short(r, live, most) {
			n++
		}
	}
	return n
}

// blobServers returns the servers where blobs may stay: connected, and not draining. most is
// how many replicas a blob stored now gets: fewer than the live servers if several servers
// share a host, or have no room. To demand more replicas than most would store the checkpoint
// again and again.
func (sm *serverMap) blobServers() (live map[meta.ServerID]bool, most int) {
	live = map[meta.ServerID]bool{}
	m := sm.servers()
	for _, x := range m.Servers() {
		if x.State == placement.Live {
			live[x.ID] = true
		}
	}
	fit, err := m.Choose(chance{}, &systemPolicy, blobReplicas, placement.Writer{}, nil, nil)
	if err != nil { // no server takes a blob: a single live replica is enough
		return live, min(1, len(live))
	}
	return live, len(fit)
}

// knownServers lists all chunk servers ever seen, as far as this server knows.
func (sm *serverMap) knownServers() (all []meta.ServerID) {
	for _, n := range sm.cfg.Cluster.Nodes() {
		all = append(all, n.ID)
	}
	for _, x := range sm.sightings() {
		all = append(all, x.info.ID)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// drainForecast makes the forecast from the policies of all volumes. Errors:
// Cluster.Volumes's.
func (sm *serverMap) drainForecast(ctx context.Context, id meta.ServerID) (DrainForecast, error) {
	f := DrainForecast{Node: id, Volumes: []VolumeForecast{}}
	now := sm.servers()
	then := now.With(id, placement.Draining)
	for _, x := range now.Servers() {
		for _, d := range x.Disks {
			switch {
			case x.ID == id:
				f.Used += d.Total - min(d.Free, d.Total)
			case x.State == placement.Live:
				f.Room += d.Free - min(d.Free, placement.Reserve(d.Total))
			}
		}
	}
	all, err := sm.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return f, err
	}
	for i := range all {
		v := &all[i]
		if v.State != cluster.VolumeActive && v.State != cluster.VolumeTrash {
			continue
		}
		x := VolumeForecast{Name: v.Name, Replicas: int(max(v.Policy.Replicas, 1)), Now: now.Most(&v.Policy, nil), Then: then.Most(&v.Policy, nil)}
		if x.Then < x.Now {
			f.Volumes = append(f.Volumes, x)
		}
	}
	slices.SortFunc(f.Volumes, func(a, b VolumeForecast) int { return cmp.Compare(a.Name, b.Name) })
	return f, nil
}
