package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/placement"
)

// RepairStatus tells how the chunks of volumes stand. What several meta
// servers say adds up: each owner speaks for its own volumes.
type RepairStatus struct {
	Volumes   int `json:"volumes"`
	Unscanned int `json:"unscanned"` // of which not every server was listed yet

	Chunks   uint64 `json:"chunks"`                 // sealed
	Bytes    uint64 `json:"bytes" pb:"chunk_bytes"` // of them, each counted once
	Open     uint64 `json:"open"`
	Deleting uint64 `json:"deleting"`

	// Chunks, each counted once, by the worst that is wrong with it; also those that are
	// open and have promised bytes in them.
	Lost            uint64 `json:"lost"`       // no good replica can be reached
	Endangered      uint64 `json:"endangered"` // one, of more
	UnderReplicated uint64 `json:"under_replicated"`
	Corrupt         uint64 `json:"corrupt"`
	Misplaced       uint64 `json:"misplaced"`
	Draining        uint64 `json:"draining"`
	Surplus         uint64 `json:"surplus"`
	Blocked         uint64 `json:"blocked"` // of all those: nothing can be done now
	// Imbalanced chunks are where they may be, and one replica of each is to move
	// so that servers get about equally full. Each metadata server counts for its
	// own volumes as if no other moved anything.
	Imbalanced uint64 `json:"imbalanced"`
	// Away chunks have a replica on a server that is out of reach for a moment:
	// it is waited for before anything is done.
	Away uint64 `json:"away"`

	// Chunks of which, for the servers that are away, now no replica can be reached, or
	// only one of several: of Away, and not of those above.
	Unreachable   uint64 `json:"unreachable"`
	LastReachable uint64 `json:"last_reachable"`
	// ShortBytes are in chunks that are lost, endangered or under-replicated.
	ShortBytes uint64 `json:"short_bytes"`

	// AcceptedLost chunks, or parts of them, were accepted as lost by an operator. Those of
	// which nothing is left count nowhere else.
	AcceptedLost uint64 `json:"accepted_lost"`

	// Replicas that no record names, before they are deleted.
	Extra   uint64 `json:"extra"`
	Orphans uint64 `json:"orphans"`

	CopyBytes   uint64  `json:"copy_bytes"` // still to be copied
	Copying     int     `json:"copying"`
	Copied      uint64  `json:"copied"` // since the servers started
	CopiedBytes uint64  `json:"copied_bytes"`
	Failed      uint64  `json:"failed"`
	Rate        float64 `json:"rate"` // bytes a second, of late

	Nodes map[meta.ServerID]NodeChunks `json:"nodes"`
	// Disks is what journals say lies on disks that are to be emptied and still
	// serve, by their ids. Those on which nothing is needed any more are not in it.
	Disks map[string]DiskChunks `json:"disks,omitempty"`

	Stored StoredBytes `json:"stored,omitzero"` // of volumes that are or were compressed, and only if one volume was asked for
	// Unmet is why the registered chunk servers can't meet the policy, all there; only if
	// one volume was asked for.
	Unmet string `json:"unmet,omitempty"`
}

// DiskChunks are replicas on one disk.
type DiskChunks struct {
	Chunks uint64 `json:"chunks"`
	Bytes  uint64 `json:"bytes" pb:"chunk_bytes"`
}

// addDisk adds what more is on a disk.
func (r *RepairStatus) addDisk(id string, x DiskChunks) {
	if r.Disks == nil {
		r.Disks = map[string]DiskChunks{}
	}
	n := r.Disks[id]
	r.Disks[id] = DiskChunks{n.Chunks + x.Chunks, n.Bytes + x.Bytes}
}

// NodeChunks is what the journals say that one chunk server has.
type NodeChunks struct {
	Chunks uint64 `json:"chunks"`
	Bytes  uint64 `json:"bytes" pb:"chunk_bytes"`
	Open   uint64 `json:"open"`
	Needed uint64 `json:"needed"` // of Chunks: without this server the chunk had too few replicas
	// What is still to be moved off it, or off one of its disks, and onto it, for
	// whatever reason; bytes are of whole replicas.
	ToLeave       uint64 `json:"to_leave"`
	ToLeaveBytes  uint64 `json:"to_leave_bytes"`
	ToArrive      uint64 `json:"to_arrive"`
	ToArriveBytes uint64 `json:"to_arrive_bytes"`
}

// plus adds what another volume has there.
func (n NodeChunks) plus(x NodeChunks) NodeChunks {
	return NodeChunks{n.Chunks + x.Chunks, n.Bytes + x.Bytes, n.Open + x.Open, n.Needed + x.Needed,
		n.ToLeave + x.ToLeave, n.ToLeaveBytes + x.ToLeaveBytes, n.ToArrive + x.ToArrive, n.ToArriveBytes + x.ToArriveBytes}
}

// Full reports that every chunk is where its policy wants it and nothing is
// left over.
func (r *RepairStatus) Full() bool {
	return r.Unscanned == 0 && r.Degraded() == 0 && r.Away == 0 && r.Extra == 0 && r.Orphans == 0 && r.Deleting == 0
}

// Degraded counts the chunks that something is wrong with.
func (r *RepairStatus) Degraded() uint64 {
	return r.Lost + r.Endangered + r.UnderReplicated + r.Corrupt + r.Misplaced + r.Draining + r.Surplus
}

// Add adds what another owner, or another server, says.
func (r *RepairStatus) Add(x *RepairStatus) {
	r.Volumes += x.Volumes
	r.Unscanned += x.Unscanned
	for _, p := range [][2]*uint64{
		{&r.Chunks, &x.Chunks}, {&r.Bytes, &x.Bytes}, {&r.Open, &x.Open}, {&r.Deleting, &x.Deleting}, {&r.Lost, &x.Lost},
		{&r.Endangered, &x.Endangered}, {&r.UnderReplicated, &x.UnderReplicated}, {&r.Corrupt, &x.Corrupt}, {&r.Misplaced, &x.Misplaced},
		{&r.Draining, &x.Draining}, {&r.Surplus, &x.Surplus}, {&r.Blocked, &x.Blocked}, {&r.Imbalanced, &x.Imbalanced}, {&r.Away, &x.Away},
		{&r.Unreachable, &x.Unreachable}, {&r.LastReachable, &x.LastReachable}, {&r.ShortBytes, &x.ShortBytes}, {&r.AcceptedLost, &x.AcceptedLost}, {&r.Extra, &x.Extra}, {&r.Orphans, &x.Orphans},
		{&r.CopyBytes, &x.CopyBytes}, {&r.Copied, &x.Copied}, {&r.CopiedBytes, &x.CopiedBytes}, {&r.Failed, &x.Failed},
	} {
		*p[0] += *p[1]
	}
	r.Copying += x.Copying
	r.Rate += x.Rate
	r.Stored.plus(x.Stored)
	if r.Nodes == nil {
		r.Nodes = map[meta.ServerID]NodeChunks{}
	}
	for id, n := range x.Nodes {
		r.Nodes[id] = r.Nodes[id].plus(n)
	}
	for id, n := range x.Disks {
		r.addDisk(id, n)
	}
}

// add counts a sealed chunk.
func (r *RepairStatus) add(rec *meta.ChunkRecord, st placement.Step) {
	r.Chunks++
	r.Bytes += rec.Length
	for i, id := range rec.Servers {
		n := r.Nodes[id]
		n.Chunks++
		n.Bytes += rec.Length
		switch {
		case st.Reason <= placement.Imbalance, st.Reason == placement.Extra && i > 0:
		case !slices.Contains(st.Remove, id) || len(st.Add) > 0:
			n.Needed++
		}
		r.Nodes[id] = n
	}
	for _, id := range st.Add {
		n := r.Nodes[id]
		n.ToArrive++
		n.ToArriveBytes += rec.Length
		r.Nodes[id] = n
	}
	for _, id := range rec.Servers {
		if slices.Contains(st.Remove, id) || slices.Contains(st.Add, id) && slices.Contains(st.From, id) {
			n := r.Nodes[id]
			n.ToLeave++
			n.ToLeaveBytes += rec.Length
			r.Nodes[id] = n
		}
	}
	switch st.Reason {
	case placement.Imbalance:
		r.Imbalanced++
		return // nothing that is wanted is missing
	case placement.BadReplica:
		r.Corrupt++
	case placement.Misplaced:
		r.Misplaced++
	case placement.Evacuate:
		r.Draining++
	case placement.Extra:
		r.Surplus++
	}
	r.addShort(st.Reason, rec.Length)
	r.addReach(placement.Standing{Live: st.Live, Away: st.Away}, st.Want)
	if st.Blocked {
		r.Blocked++
	}
	if st.Away > 0 {
		r.Away++
	}
	r.CopyBytes += uint64(len(st.Add)) * rec.Length
}

func (r *RepairStatus) addBlobs(on map[meta.ServerID]NodeChunks) {
	for id, x := range on {
		r.Nodes[id] = r.Nodes[id].plus(x)
	}
}

// repairStatusWait bounds what RepairStatus waits for volumes that are being
// opened or recover: a chunk server that is just missing may hold them up.
const repairStatusWait = 2 * time.Second

// RepairStatus looks at every chunk of a volume, or with 0 of all volumes whose
// home is here, now. Volumes that can't be looked at in a moment count as
// unscanned.
func (s *Server) RepairStatus(ctx context.Context, v meta.VolumeID) (*RepairStatus, error) {
	sum := &RepairStatus{Nodes: map[meta.ServerID]NodeChunks{}}
	soon, cancel := context.WithTimeout(ctx, repairStatusWait)
	defer cancel()
	if v == 0 {
		// Those that nobody uses count, too.
		closed, err := s.openHome(soon)
		if err != nil {
			return nil, err
		}
		sum.Volumes, sum.Unscanned = closed, closed
	}
	owners := s.owners()
	if v != 0 {
		o, err := s.ownerFor(ctx, v)
		if err != nil {
			return nil, err
		}
		owners, soon = []*owner{o}, ctx
	}
	for _, o := range owners {
		var st RepairStatus
		err := o.awaitIdly(soon, o.recovered)
		if err == nil {
			st, err = o.status()
		}
		if err == nil && v != 0 {
			st.Stored = o.tally(ctx)
			sum.Unmet = o.unmet(s.registered())
		}
		switch {
		case err == nil:
			sum.Add(&st)
		case ctx.Err() == nil && (soon.Err() != nil || v == 0 && o.ctx.Err() != nil):
			sum.Volumes++ // it is not ready, or on its way elsewhere
			sum.Unscanned++
		default:
			return nil, err
		}
	}
	r := s.repairs
	sum.Copied, sum.CopiedBytes, sum.Failed, sum.Rate = r.copies.Load(), r.bytes.Load(), r.failures.Load(), r.rate()
	r.mu.Lock()
	sum.Copying = r.running
	r.mu.Unlock()
	return sum, nil
}

// status walks the records with what is known of replicas now.
func (o *owner) status() (RepairStatus, error) {
	policy, err := o.policy()
	if err != nil {
		return RepairStatus{}, err
	}
	m := o.srv.servers()
	balance := m.Balance(&policy, o.srv.cfg.Balance)
	st, err := o.walk(m, &policy, nil, func(rec *meta.ChunkRecord, m *placement.Map) placement.Step {
		return o.plan(rec, &policy, m, balance, false)
	})
	o.inspection.mu.Lock()
	defer o.inspection.mu.Unlock()
	if !o.inspection.scanned || !o.listedAll() {
		st.Unscanned = 1
	}
	return st, err
}

// listedAll: nothing waits to be listed. Caller holds inspection.mu.
func (o *owner) listedAll() bool {
	for _, x := range o.srv.sightings() {
		if l, ok := o.inspection.listed[x.info.ID]; x.live && (!ok || l.generation != x.generation) {
			return false
		}
	}
	return true
}

// NodeStatus is one chunk server as administrators see it.
type NodeStatus struct {
	ID       meta.ServerID
	Name     string
	Addr     string `pb:"address"`
	Topology string
	Class    string // of its first disk
	State    cluster.NodeState
	Live     bool
	// Connected: its disks are as it says they are now.
	Connected bool
	Gone      time.Duration // since it was heard; 0: it is live, or was not heard yet
	Total     uint64        `pb:"total_bytes"`
	Free      uint64        `pb:"free_bytes"`
	Disks     []meta.DiskInfo
	FirstSeen meta.Time
	Since     meta.Time // of State
}

// NodeList lists every chunk server that was ever seen.
func (s *Server) NodeList() []NodeStatus {
	var all []NodeStatus
	seen, linked := s.sightings(), s.liveServers()
	for _, n := range s.cfg.Cluster.Nodes() {
		st := NodeStatus{ID: n.ID, Name: n.Name, Addr: n.Addr, Topology: n.Topology, State: n.State, FirstSeen: n.FirstSeen, Since: n.Since, Disks: []meta.DiskInfo{}}
		for _, d := range n.Disks {
			st.Total += d.Total
			st.Disks = append(st.Disks, meta.DiskInfo{ID: d.ID, Class: d.Class, Total: d.Total})
		}
		for _, x := range seen {
			if x.info.ID != n.ID {
				continue
			}
			st.Live = x.live && time.Since(x.last) < quiet
			st.Total, st.Free, st.Disks = x.info.Total, x.info.Free, append([]meta.DiskInfo{}, x.info.Disks...)
			if !st.Live {
				st.Gone = time.Since(x.last).Round(time.Second)
			}
		}
		if i := slices.IndexFunc(linked, func(x meta.ServerInfo) bool { return x.ID == n.ID }); i >= 0 {
			x := &linked[i]
			st.Connected, st.Class, st.Total, st.Free, st.Disks = true, x.Class, x.Total, x.Free, slices.Clone(x.Disks)
		}
		all = append(all, st)
	}
	return all
}

// drainNode has a chunk server emptied. Errors: NotFound, Invalid (it was removed).
func (s *Server) drainNode(ctx context.Context, id meta.ServerID) error {
	if n := nodeIn(s.cfg.Cluster.Nodes(), id); n != nil && n.State == cluster.NodeRemoved {
		return meta.E("drain node", meta.Invalid, fmt.Sprint(id), errors.New("it was removed"))
	}
	return s.setNodeState(ctx, id, cluster.NodeDraining)
}

// removeNode gives a chunk server up for good; unless it is forced, only if nothing is on it
// any more. Errors: NotFound, Busy, Unavailable (not every metadata server tells).
func (s *Server) removeNode(ctx context.Context, id meta.ServerID, force bool) error {
	if !force {
		st, err := s.clusterRepairStatus(ctx)
		if err != nil {
			return err
		}
		if n := st.Nodes[id]; st.Unscanned > 0 || n.Chunks+n.Open > 0 {
			return meta.E("remove node", meta.Busy, fmt.Sprint(id), fmt.Errorf("%d chunks and %d open ones are still on it by the volumes' records, %d volumes are not yet looked through: drain it first", n.Chunks, n.Open, st.Unscanned))
		}
	}
	return s.setNodeState(ctx, id, cluster.NodeRemoved)
}

func (s *Server) setNodeState(ctx context.Context, id meta.ServerID, state cluster.NodeState) error {
	if _, err := s.cfg.Cluster.SetNodeState(ctx, id, state, meta.Time(time.Now().UnixNano())); err != nil {
		return err
	}
	s.forgetMap()
	s.kickRepair()
	return nil
}
