package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/placement"
)

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

// clusterRepairStatus sums the repair status of all meta servers. It fails if any server does
// not answer.
func (r *repairs) clusterRepairStatus(ctx context.Context) (*RepairStatus, error) {
	sum, silent, err := r.allRepairStatus(ctx)
	for server, err := range silent { // in any order: one is enough
		return nil, meta.E("ask all metadata servers", meta.Unavailable, server, err)
	}
	return sum, err
}

// repairAskWait bounds the wait for the repair status of the other metadata servers.
const repairAskWait = 5 * time.Second

// allRepairStatus sums the repair status of all metadata servers. silent maps each server that
// did not answer to its error.
func (r *repairs) allRepairStatus(ctx context.Context) (sum *RepairStatus, silent map[string]error, err error) {
	if sum, err = r.RepairStatus(ctx, 0); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, repairAskWait)
	defer cancel()
	var mu sync.Mutex
	var asked sync.WaitGroup
	silent = map[string]error{}
	for _, m := range r.peers.others() {
		asked.Go(func() {
			var st RepairStatus
			c, err := r.api.peers.client(m.Addr, false)
			if err == nil {
				var answer *admin.GetRepairStatusResponse
				if answer, err = c.Nodes.GetRepairStatus(ctx, &admin.GetRepairStatusRequest{Server: m.Name}); err == nil {
					admin.Hear(&st, answer.Status)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				silent[m.Name] = err
				return
			}
			sum.Add(&st)
		})
	}
	asked.Wait()
	return sum, silent, nil
}
