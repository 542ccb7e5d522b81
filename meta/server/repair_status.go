package server

import (
	"slices"

	"penstock.io/penstock/meta"
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
