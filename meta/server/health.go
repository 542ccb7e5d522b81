package server

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/placement"
)

// healthReport describes the health of this server and of the volumes with their home here.
type healthReport struct {
	*process
	clients   *clients
	enrolment *enrolment
	hosted    *hosted
	repairs   *repairs
	room      *diskRoom
	serverMap *serverMap
	standbys  *standbys
}

// VolumesHealth returns the reports on volumes here that need attention, ordered by volume id,
// with ids above after, up to meta.HealthListed of them. left is the number of further
// reports.
func (hr *healthReport) VolumesHealth(after meta.VolumeID) (page []meta.VolumeHealth, left int) {
	var h meta.ServerHealth
	hr.volumesHealth(&h, true)
	page = slices.DeleteFunc(h.Volumes, func(v meta.VolumeHealth) bool { return v.ID <= after })
	slices.SortFunc(page, func(a, b meta.VolumeHealth) int { return cmp.Compare(a.ID, b.ID) })
	left = bound(&page)
	return page, left
}

// Health returns what might be wrong, as far as this server knows. It takes a few seconds at
// most: a fact not found out by then is reported as unknown.
func (hr *healthReport) Health(ctx context.Context) *meta.ServerHealth {
	now := time.Now()
	h := &meta.ServerHealth{Name: hr.cfg.Name, Now: now}
	if c := hr.cfg.Creds; c != nil && !c.IsInsecure() {
		own := certHealth(c.Identity())
		h.Certificate = &own
	}
	var asked sync.WaitGroup
	asked.Go(func() { h.Etcd = hr.cfg.Cluster.Etcd(ctx) })
	if view := hr.cfg.Cluster.View(); view != nil {
		for _, m := range view.Members {
			if m.Role == peering.Meta && !m.Evicted {
				h.MetaServers = append(h.MetaServers, m.Name)
			}
		}
	}
	hr.nodesHealth(h)
	hr.room.roomHealth(h)
	hr.volumesHealth(h, false)
	standbys, _ := hr.standbys.status()
	for _, f := range standbys {
		if f.lags() {
			h.Standbys = append(h.Standbys, meta.StandbyHealth{Volume: f.Volume, Behind: f.Behind, Error: f.Error})
		}
	}
	h.Certificates = hr.enrolment.certs.ending(now)
	h.CutOff = append(hr.clients.lateClients(now), hr.clients.cutOff.since(now.Add(-cutOffTold))...)
	h.Chunks = hr.chunksHealth()
	asked.Wait()
	h.Left = bound(&h.Away) + bound(&h.BadDisks) + bound(&h.Clocks) + bound(&h.Volumes) + bound(&h.Standbys) + bound(&h.Certificates) + bound(&h.CutOff)
	return h
}

// bound shortens a list to meta.HealthListed items, and returns the number of items removed.
func bound[T any](l *[]T) (left int) {
	if left = len(*l) - meta.HealthListed; left > 0 {
		*l = (*l)[:meta.HealthListed]
	}
	return max(left, 0)
}

func certHealth(id peering.Identity) meta.CertHealth {
	return meta.CertHealth{Identity: id.String(), Begins: id.Begins, Ends: id.Expires}
}

// nodesHealth adds the state of chunk servers and their disks to h.
func (hr *healthReport) nodesHealth(h *meta.ServerHealth) {
	ahead := map[meta.ServerID]time.Duration{}
	for _, x := range hr.serverMap.sightings() {
		ahead[x.info.ID] = x.ahead
	}
	for _, n := range hr.repairs.NodeList() {
		if n.State == cluster.NodeRemoved {
			continue
		}
		h.Nodes++
		if !n.Live {
			away := meta.NodeHealth{ID: n.ID, Name: n.Name}
			if n.Gone > 0 {
				away.Gone = n.Gone.String()
			}
			h.Away = append(h.Away, away)
			continue
		}
		h.NodesLive++
		h.Total, h.Free = h.Total+n.Total, h.Free+n.Free
		if d := ahead[n.ID]; max(d, -d) > meta.ClockSkew {
			h.Clocks = append(h.Clocks, meta.ClockHealth{ID: n.ID, Name: n.Name, Ahead: d})
		}
		for _, d := range n.Disks {
			if d.State != meta.DiskOK || float64(d.Free) < meta.DiskLow*float64(d.Total) {
				h.BadDisks = append(h.BadDisks, meta.DiskHealth{Node: n.ID, ID: d.ID, Path: d.Path, State: d.State.String(), Detail: d.Detail, Total: d.Total, Free: d.Free})
			}
		}
	}
	// A failed disk comes before a nearly full disk.
	slices.SortStableFunc(h.BadDisks, func(a, b meta.DiskHealth) int {
		return cmp.Compare(diskRank(a.State), diskRank(b.State))
	})
}

func diskRank(state string) int {
	switch state {
	case meta.DiskOK.String():
		return 2
	case meta.DiskFull.String():
		return 1
	}
	return 0
}

// volumesHealth adds the volumes that are open here, and the volumes that no server could
// open, to h. With chunks, the reports include findings of the last inspection that can wait:
// see chunksHealth. A volume being handed over is left to its next owner.
func (hr *healthReport) volumesHealth(h *meta.ServerHealth, chunks bool) {
	high := func(used, limit uint64) bool { return limit > 0 && float64(used) >= meta.QuotaHigh*float64(limit) }
	best, all := hr.serverMap.servers().AtBest(), hr.serverMap.registered()
	given := hr.clients.abandoned.told(time.Now())
	for _, o := range hr.hosted.owners() {
		v := meta.VolumeHealth{ID: o.vol}
		o.mu.Lock()
		if o.failed != nil {
			o.mu.Unlock()
			continue
		}
		v.Name = o.words.name
		h.JournalFull = h.JournalFull || o.noSpace != nil
		select {
		case <-o.recovered:
		default:
			v.Recovering = true
		}
		if !v.Recovering {
			bytes, inodes, err := namespace.Counted(o.view())
			policy, perr := namespace.Policy(o.view())
			if err = cmp.Or(err, perr); err != nil {
				v.Failed = err.Error()
			}
			if high(bytes, policy.QuotaBytes) {
				v.UsedBytes, v.QuotaBytes = bytes, policy.QuotaBytes
			}
			if high(inodes, policy.QuotaInodes) {
				v.UsedInodes, v.QuotaInodes = inodes, policy.QuotaInodes
			}
			if f := o.schedule.going.failing(); f != nil {
				v.Undone, v.UndoneSince = f.Why, f.Since
			}
			v.Advisory = o.words.advisory.BytesOver != 0 || o.words.advisory.InodesOver != 0
			if len(best.Servers()) > 0 && v.Failed == "" {
				if _, err := best.Choose(chance{}, &policy, int(max(policy.Replicas, 1)), placement.Writer{}, nil, nil); err != nil {
					v.Unplaceable = err.Error()
				}
			}
			if v.Failed == "" {
				v.Unmet = unmet(all, &policy)
			}
		}
		o.mu.Unlock()
		o.inspection.mu.Lock()
		st := &o.inspection.last
		v.Lost, v.Unreachable, v.Endangered, v.LastReachable = st.Lost, st.Unreachable, st.Endangered, st.LastReachable
		if chunks {
			v.AcceptedLost, v.UnderReplicated, v.Corrupt, v.Away = st.AcceptedLost, st.UnderReplicated, st.Corrupt, st.Away
		}
		o.inspection.mu.Unlock()
		if of, ok := given[o.vol]; ok {
			of.tell(&v)
			delete(given, o.vol)
		}
		if v != (meta.VolumeHealth{ID: v.ID, Name: v.Name}) {
			h.Volumes = append(h.Volumes, v)
		}
	}
	h.Volumes = append(h.Volumes, hr.unservedHealth()...)
	if view := hr.cfg.Cluster.View(); view != nil {
		for id, of := range given { // of volumes that are closed, or served elsewhere by now
			if row, ok := view.Volume(id); ok {
				v := meta.VolumeHealth{ID: id, Name: row.Name}
				of.tell(&v)
				h.Volumes = append(h.Volumes, v)
			}
		}
	}
	slices.SortStableFunc(h.Volumes, func(a, b meta.VolumeHealth) int {
		return cmp.Or(cmp.Compare(volumeRank(&a), volumeRank(&b)), cmp.Compare(a.ID, b.ID))
	})
}

// unservedHealth returns the volumes that neither this server nor another server could open
// just now.
func (hr *healthReport) unservedHealth() (all []meta.VolumeHealth) {
	failed := hr.hosted.unable.unserved(time.Now())
	names := map[meta.VolumeID]string{}
	if view := hr.cfg.Cluster.View(); view != nil && len(failed) > 0 {
		for _, v := range view.Volumes {
			names[v.ID] = v.Name
		}
	}
	for id, why := range failed {
		if hr.hosted.opened(id) == nil {
			all = append(all, meta.VolumeHealth{ID: id, Name: cmp.Or(names[id], fmt.Sprint("volume ", id)), Failed: why.Error()})
		}
	}
	slices.SortFunc(all, func(a, b meta.VolumeHealth) int { return cmp.Compare(a.ID, b.ID) })
	return all
}

func volumeRank(v *meta.VolumeHealth) int {
	switch {
	case v.Failed != "" || v.Unplaceable != "" || v.Lost+v.Unreachable+v.Endangered+v.LastReachable > 0:
		return 0
	case v.Recovering:
		return 1
	}
	return 2
}

// chunksHealth sums the last inspections of the open volumes. Closed volumes have nothing to
// report: a volume is closed only when all its chunks are as they should be, and opened again
// when a chunk server goes (visitLoop). So frequent health requests keep no volume open.
func (hr *healthReport) chunksHealth() meta.ChunkHealth {
	var sum RepairStatus
	for _, o := range hr.hosted.owners() {
		o.mu.Lock()
		parted := o.failed != nil
		o.mu.Unlock()
		if parted {
			continue
		}
		o.inspection.mu.Lock()
		st := o.inspection.last
		if st.Volumes == 0 || !o.inspection.scanned || !o.listedAll() {
			st.Volumes, st.Unscanned = 1, 1
		}
		o.inspection.mu.Unlock()
		sum.Add(&st)
	}
	hr.repairs.mu.Lock()
	sum.Copying = hr.repairs.running
	hr.repairs.mu.Unlock()
	return meta.ChunkHealth{Volumes: sum.Volumes, Unscanned: sum.Unscanned, Chunks: sum.Chunks, Lost: sum.Lost, Endangered: sum.Endangered, UnderReplicated: sum.UnderReplicated,
		Corrupt: sum.Corrupt, Misplaced: sum.Misplaced, Draining: sum.Draining, Surplus: sum.Surplus, Blocked: sum.Blocked, Unreachable: sum.Unreachable, LastReachable: sum.LastReachable, ShortBytes: sum.ShortBytes, Copying: sum.Copying, CopyBytes: sum.CopyBytes}
}

// seenCerts holds the certificates of connected clients and servers, by identity. For each
// identity, it holds the certificate that expires last, among those shown to or signed by this
// server.
type seenCerts struct {
	mu   sync.Mutex
	m    map[string]*seenCert
	away int // of m, without a connection
}

type seenCert struct {
	health meta.CertHealth
	conns  int // connections of the identity to this server
}

// seenCertsMost bounds the certificates held of identities without a connection.
const seenCertsMost = 20_000

// shown records the certificate of a connection. The caller calls gone when the connection
// ends.
func (c *seenCerts) shown(id peering.Identity) (gone func()) {
	if id.Expires.IsZero() {
		return func() {}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.note(id)
	if x.conns++; x.conns == 1 {
		c.away--
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if x.conns--; x.conns == 0 {
			c.away++
		}
	}
}

// signed records a certificate signed by this server.
func (c *seenCerts) signed(id peering.Identity) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.note(id)
}

// note is called with mu held.
func (c *seenCerts) note(id peering.Identity) *seenCert {
	h := certHealth(id)
	x := c.m[h.Identity]
	if x == nil {
		if c.m == nil {
			c.m = map[string]*seenCert{}
		}
		if c.away >= seenCertsMost {
			maps.DeleteFunc(c.m, func(_ string, x *seenCert) bool { return x.conns == 0 })
			c.away = 0
		}
		x = &seenCert{}
		c.m[h.Identity] = x
		c.away++
	}
	if h.Ends.After(x.health.Ends) {
		x.health = h
	}
	return x
}

// ending lists the certificates of connected identities that expire soon, by expiry.
func (c *seenCerts) ending(now time.Time) (l []meta.CertHealth) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, x := range c.m {
		if x.conns > 0 && x.health.Soon(now) {
			l = append(l, x.health)
		}
	}
	slices.SortFunc(l, func(a, b meta.CertHealth) int {
		return cmp.Or(a.Ends.Compare(b.Ends), cmp.Compare(a.Identity, b.Identity))
	})
	return l
}

// of lists the certificates held of some identities.
func (c *seenCerts) of(identities []string) (l []meta.CertHealth) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, id := range identities {
		if x := c.m[id]; x != nil {
			l = append(l, x.health)
		}
	}
	return l
}

// cutOffTold is how long a cut-off client is reported. cutOffKept bounds the clients
// remembered.
const (
	cutOffTold = 15 * time.Minute
	cutOffKept = 1000
)

// cutOff are the clients whose sessions ended here without a good-bye while using a volume,
// and that did not come back. Ordered by time, the latest last.
type cutOff struct {
	mu sync.Mutex
	l  []meta.ClientHealth
}

func (c *cutOff) add(sess *session, why error) {
	h := meta.ClientHealth{Name: sess.name, Identity: sess.holder(), Why: why.Error(), At: time.Now()}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(sess.name)
	if len(c.l) == cutOffKept {
		c.l = slices.Delete(c.l, 0, 1)
	}
	c.l = append(c.l, h)
}

// back removes a client that has a session again.
func (c *cutOff) back(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forget(name)
}

// forget is called with mu held.
func (c *cutOff) forget(name string) {
	c.l = slices.DeleteFunc(c.l, func(h meta.ClientHealth) bool { return placeOf(h.Name) == placeOf(name) })
}

// placeOf is a client's name without the process id at its end. A mount made anew has another
// process id, but the same place.
func placeOf(name string) string {
	name, _, _ = strings.Cut(name, " (pid ")
	return name
}

// since lists the clients cut off after t, the latest first.
func (c *cutOff) since(t time.Time) (l []meta.ClientHealth) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range slices.Backward(c.l) {
		if h.At.After(t) {
			l = append(l, h)
		}
	}
	return l
}
