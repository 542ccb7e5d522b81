package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// An unused volume is closed: a closed volume costs only a folder and some keys at etcd. But
// its chunks still need inspection. So the volume's home opens the volume regularly, and
// whenever the chunk servers got worse, lets the volume inspect its chunks, and closes it
// again.

const (
	visitEvery = 10 * time.Minute // at least between two visits of a closed volume: see between
	visitAgain = 10 * time.Second // after a failed visit
	visitPace  = 4                // volumes opened at each look
	visitLook  = 500 * time.Millisecond
)

// between is the time between two visits of a volume while the chunk servers stay the same. A
// round through all volumes takes at most a quarter of between.
func between(volumes int) time.Duration { return max(visitEvery, 4*visitRound(volumes)) }

// visitRound is how long the visits of so many volumes take.
func visitRound(volumes int) time.Duration { return time.Duration(volumes/visitPace) * visitLook }

// visits remember when closed volumes were looked after.
type visits struct {
	at map[meta.VolumeID]time.Time
	// not maps each volume that could not be opened to the time before which visit does not
	// try again.
	not map[meta.VolumeID]time.Time
	// finest is the shortest interval of each schedule, by the schedule's text; 0: none.
	finest map[string]time.Duration
	// seen is the state of the chunk servers at the last visit; see standing.
	seen []serverStanding
}

// serverStanding is the state of a chunk server. A change for the worse may leave chunks of a
// closed volume in need of repair.
type serverStanding struct {
	id    meta.ServerID
	live  bool
	node  cluster.NodeState
	disks string // ids of the disks that are neither OK nor full
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

// due lists the closed volumes of this home to visit now. Volumes with a snapshot due come
// first, unless they could not be opened; then the volumes unvisited for the longest time.
func (v *visits) due(hs *hosted, view *cluster.View, now time.Time) (ids []meta.VolumeID) {
	every := between(len(view.Volumes))
	wants := map[meta.VolumeID]bool{}
	for i := range view.Volumes {
		x := &view.Volumes[i]
		if x.State != cluster.VolumeActive && x.State != cluster.VolumeTrash || now.Before(v.not[x.ID]) || hs.opened(x.ID) != nil {
			continue
		}
		snapshot := x.State == cluster.VolumeActive && v.wantsSnapshot(x, now)
		if !snapshot && now.Sub(v.at[x.ID]) < every {
			continue
		}
		if _, mine := hs.home(x.ID); mine {
			ids = append(ids, x.ID)
			wants[x.ID] = snapshot && v.not[x.ID].IsZero()
		}
	}
	slices.SortStableFunc(ids, func(a, b meta.VolumeID) int {
		if wants[a] != wants[b] {
			return map[bool]int{true: -1, false: 1}[wants[a]]
		}
		return v.tried(a).Compare(v.tried(b))
	})
	return ids
}

// tried is the later of a volume's last visit and its time in not, so that volumes that could
// not be opened come last.
func (v *visits) tried(id meta.VolumeID) time.Time {
	at, not := v.at[id], v.not[id]
	if at.After(not) {
		return at
	}
	return not
}

// wantsSnapshot reports whether an interval of the volume's schedule began since the last
// visit.
func (v *visits) wantsSnapshot(x *cluster.Volume, now time.Time) bool {
	if x.Keep == "" {
		return false
	}
	every, known := v.finest[x.Keep]
	if !known {
		if rules, err := parseKeep(x.Keep); err == nil && len(rules) > 0 {
			every = finest(rules)
		}
		if v.finest == nil || len(v.finest) > 1000 {
			v.finest = map[string]time.Duration{}
		}
		v.finest[x.Keep] = every
	}
	return every > 0 && bucket(v.at[x.ID], every) < bucket(now, every)
}

// visit opens up to visitPace of the volumes that are due.
func (v *visits) visit(hs *hosted, view *cluster.View, now time.Time) {
	standing := hs.serverMap.standing()
	if worse(v.seen, standing) {
		clear(v.at)
		clear(v.not)
	}
	v.seen = standing
	pace := visitPace
	for _, id := range v.due(hs, view, now) {
		if pace == 0 {
			break
		}
		h, err := hs.cfg.Cluster.Holder(hs.ctx, id)
		if err != nil {
			pace-- // tried again with the next look
			continue
		}
		if h.Held || h.Name == "" {
			v.at[id] = now // served elsewhere, or never used
			continue
		}
		pace--
		state := cluster.VolumeActive
		if x, ok := view.Volume(id); ok {
			state = x.State // a volume in the trash has chunks, too
		}
		if _, err := hs.openAs(hs.ctx, id, state, ""); err == nil {
			v.at[id] = now
			delete(v.not, id)
		} else if hs.ctx.Err() == nil {
			v.not[id] = time.Now().Add(visitAgain) // the attempt may have taken long
			hs.log.Info("a volume could not be visited", "volume", id, "error", err)
		}
	}
}

// visitLoop visits closed volumes, and closes idle volumes.
func (hs *hosted) visitLoop() {
	v := visits{at: map[meta.VolumeID]time.Time{}, not: map[meta.VolumeID]time.Time{}}
	idle := map[*owner]time.Time{} // since when
	t := time.NewTicker(visitLook)
	defer t.Stop()
	for {
		select {
		case <-hs.ctx.Done():
			return
		case <-t.C:
		}
		view := hs.cfg.Cluster.View()
		if view == nil {
			continue
		}
		now := time.Now()
		v.visit(hs, view, now)
		for _, o := range hs.owners() {
			if !o.unused() {
				delete(idle, o)
				continue
			}
			if idle[o].IsZero() {
				idle[o] = now
			}
			if now.Sub(idle[o]) < hs.cfg.IdleClose || !o.checkpoints.mayRest() {
				continue
			}
			delete(idle, o)
			if st, err := o.status(); err != nil || !st.Full() {
				continue // some chunks need work
			}
			v.at[o.vol] = now
			ctx, cancel := context.WithTimeout(hs.ctx, 10*time.Second)
			if err := o.handOver(ctx, ""); err != nil && hs.ctx.Err() == nil {
				o.log.Info("an idle volume could not be closed", "error", err)
			}
			cancel()
		}
		for o := range idle {
			if o.ctx.Err() != nil {
				delete(idle, o)
			}
		}
	}
}

// unused: no session holds anything in the volume, and nothing is under way.
func (o *owner) unused() bool {
	select {
	case <-o.recovered:
	default:
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed != nil || o.leaving != nil || o.eventWaits.watchers > 0 || len(o.sessions) > 0 || len(o.entered) > 0 || len(o.cur.effects) > 0 || o.newest() > o.durable {
		return false
	}
	if o.snapshotWork() {
		return false
	}
	work := false
	some := func(meta.Ino) bool { work = true; return false }
	if namespace.ReapQueue(o.view(), some) != nil {
		return false
	}
	err := namespace.AllOpenChunks(o.view(), func(meta.ChunkRecord, meta.Ino) bool { work = true; return false })
	return err == nil && !work
}

// openHome opens the volumes in one of the states with their home here until ctx ends. closed
// is the number of volumes that could not be opened, without volumes that another server owns.
func (hs *hosted) openHome(ctx context.Context, states ...cluster.VolumeState) (closed int, err error) {
	all, err := hs.cfg.Cluster.Volumes(ctx)
	if err != nil {
		return 0, err
	}
	var wg sync.WaitGroup
	var not atomic.Int64
	slots := make(chan struct{}, homeWorkers)
	for _, v := range all {
		if _, mine := hs.home(v.ID); !mine || !slices.Contains(states, v.State) || hs.opened(v.ID) != nil {
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if ctx.Err() != nil {
				not.Add(1)
				return
			}
			_, err := hs.openAs(ctx, v.ID, v.State, "")
			if errors.Is(err, meta.NoSuchVolume) {
				// The volume was deleted meanwhile, or moved into the trash or out of it: then its
				// chunks still count.
				if x, rerr := hs.cfg.Cluster.Volume(ctx, v.ID); errors.Is(rerr, meta.NoSuchVolume) || rerr == nil && !slices.Contains(states, x.State) {
					return
				}
			}
			if err != nil && !errors.Is(err, meta.NotOwner) {
				not.Add(1)
				hs.log.Info("how a volume's chunks stand is not known yet", "volume", v.Name, "error", err)
			}
		})
	}
	wg.Wait()
	return int(not.Load()), nil
}

// others lists the live meta servers except this server.
func (ps *peers) others() (l []cluster.MetaServer) {
	view := ps.cfg.Cluster.View()
	if view == nil {
		return nil
	}
	for _, m := range view.MetaServers {
		if m.Name != ps.cfg.Name {
			l = append(l, m)
		}
	}
	return l
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

// usageElsewhere fills in the usage and policy of volumes owned by other servers.
func (ca *catalogue) usageElsewhere(ctx context.Context, all []meta.VolumeInfo) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	for _, m := range ca.peers.others() {
		c, err := ca.api.peers.client(m.Addr, false)
		if err != nil {
			ca.log.Info("a metadata server does not answer about its volumes", "server", m.Name, "error", err)
			continue
		}
		for theirs, err := range c.EachVolume(ctx, &admin.ListVolumesRequest{Server: m.Name}) {
			if err != nil {
				ca.log.Info("a metadata server does not answer about its volumes", "server", m.Name, "error", err)
				break
			}
			at, found := slices.BinarySearchFunc(all, theirs.ID, func(v meta.VolumeInfo, id meta.VolumeID) int { return cmp.Compare(v.ID, id) })
			if found {
				all[at].UsedBytes, all[at].UsedInodes, all[at].Policy, all[at].Open = theirs.UsedBytes, theirs.UsedInodes, theirs.Policy, true
			}
		}
	}
}

// pathElsewhere asks the owner of a volume for the path of a directory.
func (ps *peers) pathElsewhere(ctx context.Context, addr string, v meta.VolumeID, dir meta.Ino) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	re, err := ps.askPeer(ctx, addr, &wire.Admin{Op: wire.AdminPathOf, Volume: v, Ino: dir})
	if err == nil {
		err = re.Status.Error()
	}
	if err != nil {
		return nil, err
	}
	var names []string
	if err := json.Unmarshal(re.Report, &names); err != nil {
		return nil, meta.E("name a directory", meta.Protocol, fmt.Sprint(dir), err)
	}
	return names, nil
}
