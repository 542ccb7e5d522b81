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

// RepairStatus is the state of the chunks of volumes. The reports of several meta servers can
// be added: each owner reports only its own volumes.
type RepairStatus struct {
	Volumes   int `json:"volumes"`
	Unscanned int `json:"unscanned"` // of which not every server was listed yet

	Chunks   uint64 `json:"chunks"`                 // sealed
	Bytes    uint64 `json:"bytes" pb:"chunk_bytes"` // of sealed chunks, without their replicas
	Open     uint64 `json:"open"`
	Deleting uint64 `json:"deleting"`

	// Chunks with faults, each counted once, by its worst fault. Open chunks with promised
	// bytes count, too.
	Lost            uint64 `json:"lost"`       // no good replica can be reached
	Endangered      uint64 `json:"endangered"` // one good replica, and more are wanted
	UnderReplicated uint64 `json:"under_replicated"`
	Corrupt         uint64 `json:"corrupt"`
	Misplaced       uint64 `json:"misplaced"`
	Draining        uint64 `json:"draining"`
	Surplus         uint64 `json:"surplus"`
	Blocked         uint64 `json:"blocked"` // of all above: no repair is possible now
	// Imbalanced chunks are at permitted places, and a replica of each is to move so that
	// servers become about equally full. Each metadata server counts its own volumes as if no
	// other server moved chunks.
	Imbalanced uint64 `json:"imbalanced"`
	// Away chunks have a replica on a server that is out of reach for a short time: repair
	// waits for the server.
	Away uint64 `json:"away"`

	// Chunks of Away, not counted above: because of the servers away, no replica can be
	// reached now, or only the last of several.
	Unreachable   uint64 `json:"unreachable"`
	LastReachable uint64 `json:"last_reachable"`
	// ShortBytes are the bytes of lost, endangered and under-replicated chunks.
	ShortBytes uint64 `json:"short_bytes"`

	// AcceptedLost are the chunks of which an operator accepted the loss, of all or part of
	// their bytes. A chunk with nothing left counts nowhere else.
	AcceptedLost uint64 `json:"accepted_lost"`

	// Replicas without a record, until they are deleted.
	Extra   uint64 `json:"extra"`
	Orphans uint64 `json:"orphans"`

	CopyBytes   uint64  `json:"copy_bytes"` // still to be copied
	Copying     int     `json:"copying"`
	Copied      uint64  `json:"copied"` // since the servers started
	CopiedBytes uint64  `json:"copied_bytes"`
	Failed      uint64  `json:"failed"`
	Rate        float64 `json:"rate"` // bytes a second, of late

	Nodes map[meta.ServerID]NodeChunks `json:"nodes"`
	// Disks are the disks to be emptied that still serve, by id, with the chunks on them by
	// the journals' records. A disk that is no longer needed is not listed.
	Disks map[string]DiskChunks `json:"disks,omitempty"`

	Stored StoredBytes `json:"stored,omitzero"` // only for a request about a single volume that is or was compressed
	// Unmet is why the registered chunk servers can't meet the policy even if all are live;
	// only for a request about a single volume.
	Unmet string `json:"unmet,omitempty"`
}

// DiskChunks are the replicas on a disk.
type DiskChunks struct {
	Chunks uint64 `json:"chunks"`
	Bytes  uint64 `json:"bytes" pb:"chunk_bytes"`
}

// addDisk adds replicas to the count of a disk.
func (r *RepairStatus) addDisk(id string, x DiskChunks) {
	if r.Disks == nil {
		r.Disks = map[string]DiskChunks{}
	}
	n := r.Disks[id]
	r.Disks[id] = DiskChunks{n.Chunks + x.Chunks, n.Bytes + x.Bytes}
}

// NodeChunks are the replicas of a chunk server by the journals' records.
type NodeChunks struct {
	Chunks uint64 `json:"chunks"`
	Bytes  uint64 `json:"bytes" pb:"chunk_bytes"`
	Open   uint64 `json:"open"`
	Needed uint64 `json:"needed"` // of Chunks: without this server the chunk would have too few replicas
	// Replicas still to be moved off the server or a disk of the server, and onto the server,
	// for any reason. Bytes are of whole replicas.
	ToLeave       uint64 `json:"to_leave"`
	ToLeaveBytes  uint64 `json:"to_leave_bytes"`
	ToArrive      uint64 `json:"to_arrive"`
	ToArriveBytes uint64 `json:"to_arrive_bytes"`
}

// plus adds the counts of another volume on the same server.
func (n NodeChunks) plus(x NodeChunks) NodeChunks {
	return NodeChunks{n.Chunks + x.Chunks, n.Bytes + x.Bytes, n.Open + x.Open, n.Needed + x.Needed,
		n.ToLeave + x.ToLeave, n.ToLeaveBytes + x.ToLeaveBytes, n.ToArrive + x.ToArrive, n.ToArriveBytes + x.ToArriveBytes}
}

// Full reports that every chunk is where its policy wants it, and no replica is left over.
func (r *RepairStatus) Full() bool {
	return r.Unscanned == 0 && r.Degraded() == 0 && r.Away == 0 && r.Extra == 0 && r.Orphans == 0 && r.Deleting == 0
}

// Degraded counts the chunks with a fault.
func (r *RepairStatus) Degraded() uint64 {
	return r.Lost + r.Endangered + r.UnderReplicated + r.Corrupt + r.Misplaced + r.Draining + r.Surplus
}

// Add adds the report of another owner or server.
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
		return // no wanted replica is missing
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

// repairStatusWait bounds how long RepairStatus waits for volumes that are being opened or
// recover: a chunk server missing since a moment ago may hold such a volume up.
const repairStatusWait = 2 * time.Second

// RepairStatus reads every chunk record of a volume, or with v 0 of all volumes with their
// home here. Volumes that do not become ready within repairStatusWait count as unscanned.
func (r *repairs) RepairStatus(ctx context.Context, v meta.VolumeID) (*RepairStatus, error) {
	sum := &RepairStatus{Nodes: map[meta.ServerID]NodeChunks{}}
	soon, cancel := context.WithTimeout(ctx, repairStatusWait)
	defer cancel()
	if v == 0 {
		// Closed volumes count, too, and volumes in the trash: they can be undeleted.
		closed, err := r.hosted.openHome(soon, cluster.VolumeActive, cluster.VolumeTrash)
		if err != nil {
			return nil, err
		}
		sum.Volumes, sum.Unscanned = closed, closed
	}
	owners := r.hosted.owners()
	if v != 0 {
		o, err := r.hosted.ownerFor(ctx, v)
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
			sum.Unmet = o.unmet(r.serverMap.registered())
		}
		switch {
		case err == nil:
			sum.Add(&st)
		case ctx.Err() == nil && (soon.Err() != nil || v == 0 && o.ctx.Err() != nil):
			sum.Volumes++ // the volume is not ready, or moves to another server
			sum.Unscanned++
		default:
			return nil, err
		}
	}
	sum.Copied, sum.CopiedBytes, sum.Failed, sum.Rate = r.copies.Load(), r.bytes.Load(), r.failures.Load(), r.rate()
	r.mu.Lock()
	sum.Copying = r.running
	r.mu.Unlock()
	return sum, nil
}

// status walks the records with the present faults of replicas.
func (o *owner) status() (RepairStatus, error) {
	policy, err := o.policy()
	if err != nil {
		return RepairStatus{}, err
	}
	m := o.srv.serverMap.servers()
	balance := m.Balance(&policy, o.srv.cfg.Balance)
	st, err := o.inspection.walk(m, &policy, nil, func(rec *meta.ChunkRecord, m *placement.Map) placement.Step {
		return o.inspection.plan(rec, &policy, m, balance, false)
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
	for _, x := range o.srv.serverMap.sightings() {
		if l, ok := o.inspection.listed[x.info.ID]; x.live && (!ok || l.generation != x.generation) {
			return false
		}
	}
	return true
}

// NodeStatus is a chunk server as shown to administrators.
type NodeStatus struct {
	ID       meta.ServerID
	Name     string
	Addr     string `pb:"address"`
	Topology string
	Class    string // of the server's first disk
	State    cluster.NodeState
	Live     bool
	// Connected: Disks are as the server reports them now.
	Connected bool
	Gone      time.Duration // since the last report; 0: live, or not heard by this process yet
	Total     uint64        `pb:"total_bytes"`
	Free      uint64        `pb:"free_bytes"`
	Disks     []meta.DiskInfo
	FirstSeen meta.Time
	Since     meta.Time // of State
}

// NodeList lists all chunk servers ever seen.
func (r *repairs) NodeList() []NodeStatus {
	var all []NodeStatus
	seen, linked := r.serverMap.sightings(), r.chunkServers.liveServers()
	for _, n := range r.cfg.Cluster.Nodes() {
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

// drainNode begins to empty a chunk server. Errors: NotFound, Invalid (the server was
// removed).
func (r *repairs) drainNode(ctx context.Context, id meta.ServerID) error {
	if n := nodeIn(r.cfg.Cluster.Nodes(), id); n != nil && n.State == cluster.NodeRemoved {
		return meta.E("drain node", meta.Invalid, fmt.Sprint(id), errors.New("it was removed"))
	}
	return r.setNodeState(ctx, id, cluster.NodeDraining)
}

// removeNode removes a chunk server for good; unless forced, only if no replicas are on the
// server any more. Errors: NotFound, Busy, Unavailable (a metadata server did not answer).
func (r *repairs) removeNode(ctx context.Context, id meta.ServerID, force bool) error {
	if !force {
		st, err := r.clusterRepairStatus(ctx)
		if err != nil {
			return err
		}
		if n := st.Nodes[id]; st.Unscanned > 0 || n.Chunks+n.Open > 0 {
			return meta.E("remove node", meta.Busy, fmt.Sprint(id), fmt.Errorf("%d chunks and %d open ones are still on it by the volumes' records, %d volumes are not yet looked through: drain it first", n.Chunks, n.Open, st.Unscanned))
		}
	}
	return r.setNodeState(ctx, id, cluster.NodeRemoved)
}

func (r *repairs) setNodeState(ctx context.Context, id meta.ServerID, state cluster.NodeState) error {
	if _, err := r.cfg.Cluster.SetNodeState(ctx, id, state, meta.Time(time.Now().UnixNano())); err != nil {
		return err
	}
	r.serverMap.forgetMap()
	r.kickRepair()
	return nil
}
