package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/task"
)

// An inspection compares the chunk records of a volume with the replicas on the chunk servers.
// The owner lists the replicas of a server that is new, or whose replicas may have changed
// without a notice. Then the owner makes a plan for every record. Replicas may change while a
// list is read. So the owner asks the server about each chunk that seems wrong, before the
// finding counts. A list that failed proves nothing.

// listing records when a server was last listed, and in which generation.
type listing struct {
	generation uint64
	at         time.Time
}

// inspection is an owner's state between its inspections.
type inspection struct {
	k           *kernel
	checkpoints *checkpoints
	faults      *faults
	repairing   *repairing
	sealing     *sealing
	stale       *stale
	words       *words

	mu     sync.Mutex
	listed map[meta.ServerID]listing
	// again is the time of the last order to list all servers again. A listing begun before
	// again does not count.
	again time.Time
	// changed is again for single servers: since these times their replicas may have changed.
	changed map[meta.ServerID]time.Time
	// scanned: every live server was listed at least once.
	scanned bool
	whole   time.Time // when the last inspection began in which no list failed
	last    RepairStatus
	stored  map[meta.ServerID]StoredBytes // by server, from the server's last list
	tallied time.Time                     // when all servers were last listed for a request
}

// listAnew makes the next inspection list every server again, since the owner needs other
// facts from the lists.
func (in *inspection) listAnew() {
	in.mu.Lock()
	clear(in.listed)
	in.again = time.Now()
	in.mu.Unlock()
	in.k.tasks.inspection.Wake()
}

// newInspectionTask returns the task that inspects the volume and deletes stale replicas.
func newInspectionTask(o *owner) *task.Task {
	return task.New(task.Options{
		Name: "inspect chunks", Every: o.srv.cfg.RepairInterval,
		Gather: 50 * time.Millisecond, // handle several notices in one round
		Failed: "the inspection of the volume's chunks stopped, it is tried again", Log: o.log,
		Round: func(context.Context) (time.Duration, error) {
			err := o.inspection.lookAround()
			o.stale.deleteStale()
			return task.Idle, err
		},
	})
}

// lookAround runs an inspection.
func (in *inspection) lookAround() error {
	k := in.k
	began := time.Now()
	in.words.readAgain()
	m := k.srv.serverMap.servers()
	in.forgetStored(m)
	policy, err := k.policy()
	if err != nil {
		return err
	}
	lists := in.listServers(m, &policy)
	balance := m.Balance(&policy, k.srv.cfg.Balance)
	st, err := in.walk(m, &policy, lists, func(rec *meta.ChunkRecord, m *placement.Map) placement.Step {
		return in.plan(rec, &policy, m, balance, true)
	})
	if err != nil {
		return err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if lists.complete() {
		in.scanned, in.whole = true, began
	}
	in.last = st
	return nil
}

// lists are the results of an inspection's listings.
type lists struct {
	mu   sync.Mutex
	from map[meta.ServerID]bool // listed to the end
	seen map[meta.ChunkID]uint8 // number of servers of from that listed a replica named in the record
	due  int
}

func (l *lists) complete() bool { return len(l.from) == l.due }

// listServers lists the servers that are due. Replicas that no record names, or that differ
// from their record, are noted at once.
func (in *inspection) listServers(m *placement.Map, policy *meta.Policy) *lists {
	k := in.k
	l := &lists{seen: map[meta.ChunkID]uint8{}, from: map[meta.ServerID]bool{}}
	var wg sync.WaitGroup
	slots := make(chan struct{}, 8)
	in.mu.Lock()
	was := in.listed
	in.mu.Unlock()
	for _, x := range k.srv.serverMap.sightings() {
		s, ok := m.Server(x.info.ID)
		if !ok || s.State != placement.Live && s.State != placement.Draining {
			continue
		}
		in.mu.Lock()
		w, had := was[x.info.ID]
		in.mu.Unlock()
		if had && w.generation == x.generation && time.Since(w.at) < k.srv.cfg.ListInterval {
			continue
		}
		l.due++
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			began := time.Now()
			if err := in.listServer(l, &x, policy); err != nil {
				if k.ctx.Err() == nil {
					k.log.Warn("the replicas of a chunk server could not be listed: the owner concludes nothing from that", "server", x.info.ID, "error", err)
				}
				return
			}
			in.mu.Lock()
			if began.After(in.again) && began.After(in.changed[x.info.ID]) {
				in.listed[x.info.ID] = listing{x.generation, began}
			}
			in.mu.Unlock()
		})
	}
	wg.Wait()
	return l
}

// listServer lists a server's replicas, and counts in l the replicas that a record names. An
// incomplete list counts nothing there.
func (in *inspection) listServer(l *lists, x *sighting, policy *meta.Policy) error {
	k := in.k
	var sum StoredBytes
	var named []meta.ChunkID
	plain := toCompress{k: k, server: x.info.ID, alg: in.words.compression()}
	err := in.eachPage(k.ctx, x.info.ID, func(page []meta.ReplicaInfo) error {
		recs := make([]meta.ChunkRecord, len(page))
		missing := make([]bool, len(page))
		k.mu.Lock()
		if k.failed != nil {
			k.mu.Unlock()
			return k.failed
		}
		for i, c := range page {
			var err error
			recs[i], _, err = namespace.ReadChunk(k.view(), c.ID)
			if missing[i] = errors.Is(err, meta.NoSuchChunk); err != nil && !missing[i] {
				k.mu.Unlock()
				return err
			}
		}
		k.mu.Unlock()
		for i, c := range page {
			if in.listedOne(x, &c, &recs[i], missing[i], policy) {
				named = append(named, c.ID)
			}
			sum.add(&c)
			if !missing[i] && recs[i].State == meta.ChunkSealed {
				plain.add(&c)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	in.setStored(x.info.ID, sum)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.from[x.info.ID] = true
	for _, id := range named {
		l.seen[id]++
	}
	return nil
}

// eachPage lists a server's replicas of the volume, page by page.
func (in *inspection) eachPage(ctx context.Context, server meta.ServerID, page func([]meta.ReplicaInfo) error) error {
	return listReplicas(ctx, in.k.order, server, in.k.vol, page)
}

// listedOne compares a listed replica with its record, and notes the result. there: the record
// names the replica.
func (in *inspection) listedOne(x *sighting, c *meta.ReplicaInfo, rec *meta.ChunkRecord, missing bool, policy *meta.Policy) (there bool) {
	k := in.k
	server := x.info.ID
	if missing || !slices.Contains(rec.Servers, server) {
		if missing || rec.State != meta.ChunkOpen {
			in.stale.add(c.ID, server, c.Length, missing)
		}
		return false
	}
	leaves := "" // the disk to be emptied with the replica
	if emptying(x, c.Disk) {
		leaves = c.Disk
	}
	switch rec.State {
	case meta.ChunkSealed:
	case meta.ChunkOpen:
		in.listedOpen(server, c, leaves, otherClass(x, c.Disk, policy))
		return true
	default:
		return false // the chunk is being deleted
	}
	bad := c.Err != meta.KindOK || c.Length < rec.Length
	if !bad && c.State == meta.ChunkOpen {
		err := in.sealing.sealReplicas(k.ctx, rec, []meta.ServerID{server})[0]
		if bad = provesBad(meta.KindOf(err)); err != nil && !bad {
			return false
		}
	} else if !bad {
		bad = c.Length != rec.Length || rec.CRC != 0 && c.CRC != rec.CRC
	}
	switch {
	case bad:
		in.faults.note(c.ID, fault{server: server, state: placement.Bad, corrupt: c.Err == meta.Corrupt, disk: leaves})
	case leaves != "", otherClass(x, c.Disk, policy):
		in.faults.note(c.ID, fault{server: server, state: placement.Unfit, disk: leaves})
	case !in.faults.corrupt(c.ID, server):
		in.faults.clear(c.ID, server)
	default:
		in.faults.note(c.ID, fault{server: server, state: placement.Bad, disk: leaves})
	}
	return true
}

// emptying reports whether the disk is failing, so that its replicas must move elsewhere.
func emptying(x *sighting, disk string) bool {
	return slices.ContainsFunc(x.info.Disks, func(d meta.DiskInfo) bool { return d.ID == disk && d.State == meta.DiskFailing })
}

// otherClass: the disk is of another class than the policy wants.
func otherClass(x *sighting, disk string, policy *meta.Policy) bool {
	return policy.Class != "" && slices.ContainsFunc(x.info.Disks, func(d meta.DiskInfo) bool { return d.ID == disk && d.Class != policy.Class })
}

// confirmMissing handles a chunk missing from a complete list of a server in the chunk's
// record. It asks each such server about the chunk, and notes the replicas that are missing.
func (in *inspection) confirmMissing(rec *meta.ChunkRecord, l *lists) {
	k := in.k
	n := 0
	for _, id := range rec.Servers {
		if l.from[id] {
			n++
		}
	}
	if n == 0 || int(l.seen[rec.ID]) >= n || rec.State == meta.ChunkOpen && !in.written(rec) {
		return
	}
	ask := in.repairing.judge
	if rec.State == meta.ChunkOpen {
		ask = in.judgeOpen
	}
	for _, id := range rec.Servers {
		if !l.from[id] || in.faults.has(rec.ID, id) {
			continue
		}
		if state, err := ask(k.ctx, rec, id); err == nil && state == placement.Bad {
			k.log.Warn("a replica is not where the journal says", "chunk", rec.ID, "server", id)
			in.faults.set(rec.ID, id, placement.Bad, false)
		}
	}
}

// plan returns the next step for a chunk; with queue, it also queues the step. balance
// accounts for the moves that only even out how full servers are.
func (in *inspection) plan(rec *meta.ChunkRecord, policy *meta.Policy, m *placement.Map, balance *placement.Balance, queue bool) placement.Step {
	k := in.k
	replicas := in.faults.replicas(rec)
	if time.Since(k.srv.epoch) < k.srv.cfg.RepairDelay {
		// This process started just now: servers it does not know yet may still connect.
		for _, x := range replicas {
			if _, ok := m.Server(x.Server); !ok {
				return placement.Step{Reason: placement.UnderReplicate, Blocked: true}
			}
		}
	}
	st := m.Plan(chance{}, policy, replicas)
	if st.Reason == placement.None {
		if b, ok := balance.Move(chance{}, rec.Servers, rec.Length); ok {
			st = b
		}
	}
	if queue && (st.Work() || st.Live == 0 && mayAsk(m, replicas)) {
		k.srv.repairs.add(in.repairing, rec.ID, &st, rec.Length)
	}
	return st
}

// mayAsk reports whether a replica noted as bad is on a server that can be asked about the
// replica. If all replicas are noted as bad, as after a power cut of all servers with failed
// last reads, asking again is all that can be done for the chunk, and often enough.
func mayAsk(m *placement.Map, replicas []placement.Replica) bool {
	return slices.ContainsFunc(replicas, func(x placement.Replica) bool {
		s, ok := m.Server(x.Server)
		return ok && x.State == placement.Bad && (s.State == placement.Live || s.State == placement.Draining)
	})
}

// walkPage is how many records are read at a time.
const walkPage = 512

// walk visits every chunk's record and sums the states. planned returns the plan for a sealed
// chunk. With the lists of an inspection, walk also asks servers about chunks missing in their
// lists, and seals the open chunks that must end.
func (in *inspection) walk(m *placement.Map, policy *meta.Policy, lists *lists, planned func(*meta.ChunkRecord, *placement.Map) placement.Step) (RepairStatus, error) {
	k := in.k
	st := RepairStatus{Volumes: 1, Nodes: map[meta.ServerID]NodeChunks{}}
	var ending []openChunk
	err := in.walkRecords(func(rec *meta.ChunkRecord) {
		if lists != nil && (rec.State == meta.ChunkOpen || rec.State == meta.ChunkSealed) {
			in.confirmMissing(rec, lists)
		}
		switch rec.State {
		case meta.ChunkOpen:
			x := in.openChunk(rec, policy, m)
			if st.addOpen(&x); lists != nil && x.ends != "" && x.askable {
				x.rec = new(*rec) // the page is used again
				ending = append(ending, x)
			}
			in.faults.onDisks(rec, &st)
		case meta.ChunkDeleting:
			st.Deleting++
		case meta.ChunkSealed:
			if rec.Lost {
				st.AcceptedLost++
			}
			if !rec.Gone() {
				st.add(rec, planned(rec, m))
				in.faults.onDisks(rec, &st)
			}
		}
	})
	if err != nil && k.ctx.Err() == nil {
		return st, err
	}
	in.stale.count(&st)
	st.addBlobs(in.blobsOn())
	in.sealSome(ending)
	return st, k.ctx.Err()
}

// walkRecords visits all chunks' records, a page at a time.
func (in *inspection) walkRecords(each func(*meta.ChunkRecord)) error {
	k := in.k
	var from meta.ChunkID
	page := make([]meta.ChunkRecord, 0, walkPage)
	for k.ctx.Err() == nil {
		page = page[:0]
		k.mu.Lock()
		err := k.failed
		if err == nil {
			err = namespace.ChunksFrom(k.view(), from, func(c meta.ChunkRecord) bool {
				page = append(page, c)
				return len(page) < walkPage
			})
		}
		k.mu.Unlock()
		if err != nil {
			return err
		}
		for i := range page {
			each(&page[i])
		}
		if len(page) < walkPage {
			return nil
		}
		from = page[len(page)-1].ID
		from.Counter++
	}
	return k.ctx.Err()
}

// blobsOn counts the parts of the recorded checkpoint's files by server. A part on a server to
// be emptied does not count if enough other servers have the part: the next checkpoint puts
// the part elsewhere.
func (in *inspection) blobsOn() map[meta.ServerID]NodeChunks {
	k := in.k
	live, most := k.srv.serverMap.blobServers()
	k.mu.Lock()
	refs := in.checkpoints.blobs
	k.mu.Unlock()
	on := map[meta.ServerID]NodeChunks{}
	for _, r := range refs {
		needed := short(r, live, most)
		for _, p := range r.Parts {
			for _, id := range p.Servers {
				if !needed && !live[id] {
					continue
				}
				n := on[id]
				n.Chunks++
				n.Bytes += p.Length
				if needed {
					n.Needed++
				}
				on[id] = n
			}
		}
	}
	return on
}
