package server

import (
	"slices"
	"sync"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/placement"
)

// fault is the state of a replica that needs attention.
type fault struct {
	server  meta.ServerID
	state   placement.ReplicaState
	corrupt bool // found by reading the bytes
	// disk is the disk to be emptied with the replica; empty: none.
	disk string
}

// faults are the faults of the replicas named in records.
type faults struct {
	mu sync.Mutex
	m  map[meta.ChunkID][]fault
}

// set notes a replica's fault for a caller that does not know the replica's disk: a disk noted
// before stays.
func (f *faults) set(id meta.ChunkID, server meta.ServerID, state placement.ReplicaState, corrupt bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	x := fault{server: server, state: state, corrupt: corrupt}
	for _, was := range f.m[id] {
		if was.server == server {
			x.disk = was.disk
		}
	}
	f.put(id, x)
}

// note notes a replica's fault with the disk to be emptied, if any: the replica may have moved
// to another disk since the last note.
func (f *faults) note(id meta.ChunkID, x fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.put(id, x)
}

// put is note. The caller holds the owner's mu.
func (f *faults) put(id meta.ChunkID, x fault) {
	if f.m == nil {
		f.m = map[meta.ChunkID][]fault{}
	}
	l := f.m[id]
	for i := range l {
		if l[i].server == x.server {
			l[i].state, l[i].corrupt, l[i].disk = x.state, l[i].corrupt || x.corrupt, x.disk
			return
		}
	}
	f.m[id] = append(l, x)
}

// sealed drops the faults of a chunk that was just sealed. Kept are faults with a disk to be
// emptied, and corrupt replicas in the chunk's record: until the next inspection lists the
// servers again, only these faults remember the corruption.
func (f *faults) sealed(rec *meta.ChunkRecord) {
	f.mu.Lock()
	defer f.mu.Unlock()
	over := func(x fault) bool { return x.disk == "" && !(x.corrupt && slices.Contains(rec.Servers, x.server)) }
	if l := slices.DeleteFunc(f.m[rec.ID], over); len(l) > 0 {
		f.m[rec.ID] = l
	} else {
		delete(f.m, rec.ID)
	}
}

// onDisks adds a chunk's replicas on disks to be emptied to st.
func (f *faults) onDisks(rec *meta.ChunkRecord, st *RepairStatus) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range f.m[rec.ID] {
		if x.disk != "" && slices.Contains(rec.Servers, x.server) {
			st.addDisk(x.disk, DiskChunks{Chunks: 1, Bytes: rec.Length})
		}
	}
}

func (f *faults) clear(id meta.ChunkID, server meta.ServerID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	l, ok := f.m[id]
	if !ok {
		return
	}
	if l = slices.DeleteFunc(l, func(x fault) bool { return x.server == server }); len(l) == 0 {
		delete(f.m, id)
	} else {
		f.m[id] = l
	}
}

func (f *faults) forget(id meta.ChunkID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.m, id)
}

func (f *faults) has(id meta.ChunkID, server meta.ServerID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.m[id], func(x fault) bool { return x.server == server })
}

func (f *faults) corrupt(id meta.ChunkID, server meta.ServerID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.m[id], func(x fault) bool { return x.server == server && x.corrupt })
}

// replicas are a record's, as far as is known.
func (f *faults) replicas(rec *meta.ChunkRecord) []placement.Replica {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := make([]placement.Replica, len(rec.Servers))
	for i, id := range rec.Servers {
		l[i].Server, l[i].Length = id, rec.Length
		for _, x := range f.m[rec.ID] {
			if x.server == id {
				l[i].State = x.state
			}
		}
	}
	return l
}
