package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/task"
	"penstock.io/penstock/meta/wire"
)

// CapLife is the life of capabilities to read chunks and to append to chunks; clients renew
// capabilities at half of CapLife. CapLife, and the few seconds that a server's view of the
// cluster may be old, are less than the minute within which a revoked grant must be useless.
const CapLife = 45 * time.Second

// link is the stream of a connected chunk server.
type link struct {
	conn net.Conn
	who  peering.Identity
	send *wire.Sender

	mu     sync.Mutex
	report wire.Report
	next   uint64
	orders map[uint64]chan meta.OrderResult
	gone   chan struct{}
}

// chunkServers are the chunk servers connected to this server, and the keys that sign their
// capabilities.
type chunkServers struct {
	*process
	suspected suspicion

	mu      sync.Mutex
	links   map[meta.ServerID]*link
	keys    []meta.CapKey
	keysAt  time.Time // when keys arrived
	evicted []string  // identities; with keys, for chunk servers
}

// all lists the links of the connected chunk servers.
func (cs *chunkServers) all() []*link {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return slices.Collect(maps.Values(cs.links))
}

// certified returns the identity that a chunk server's capabilities are bound to, or "" if the
// chunk server is not connected or has no certificate.
func (cs *chunkServers) certified(id meta.ServerID) string {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if l := cs.links[id]; l != nil && l.who.Role != "" {
		return l.who.String()
	}
	return ""
}

// serveLink reads the reports of a chunk server, and the results of orders.
func (s *Server) serveLink(conn net.Conn, rd *wire.Reader, v uint8, name string, who peering.Identity) {
	l := &link{conn: conn, who: who, send: wire.NewSender(conn, v, nil), orders: map[uint64]chan meta.OrderResult{}, gone: make(chan struct{})}
	var id meta.ServerID
	var acked wire.Reported // the last event handled of its generation
	defer func() {
		close(l.gone)
		if s.chunkServers.strike(id, l) {
			s.serverMap.unseen(id)
			s.repairs.kickRepair()
		}
	}()
	for {
		t, req, body, err := rd.Next()
		if err == nil {
			err = maySend(who, t)
		}
		if err != nil {
			if s.ctx.Err() == nil && id != 0 {
				s.log.Warn("chunk server lost", "server", id, "error", err)
			}
			return
		}
		switch t {
		case wire.TReport:
			var r wire.Report
			if err := wire.Decode(body, &r); err != nil {
				s.log.Warn("chunk server dropped", "error", err)
				return
			}
			if id == 0 {
				ctx, cancel := context.WithTimeout(s.ctx, bindWait)
				err = s.chunkServers.bind(ctx, who, r.Info.ID)
				cancel()
			} else if id != r.Info.ID {
				err = meta.E("report", meta.Protocol, who.String(), fmt.Errorf("on one stream it says to be server %d and server %d", id, r.Info.ID))
			}
			if err != nil {
				s.log.Warn("a chunk server was refused: its certificate has another name", "name", name, "server", r.Info.ID, "error", err)
				return
			}
			l.mu.Lock()
			changed := l.report.Info.Addr != r.Info.Addr
			l.report = r
			l.mu.Unlock()
			anew := s.serverMap.saw(name, &r)
			if id == 0 {
				id = r.Info.ID
				s.chunkServers.suspected.lift(id)
				// The clock goes before the keys, so that the chunk server judges every
				// capability by this server's clock.
				l.send.Enqueue(0, &wire.Reported{Now: meta.Time(time.Now().UnixNano()), Stamp: r.Stamp})
				s.chunkServers.enlist(id, l, true)
				// The chunk server's own list of metadata servers may name few of them, or
				// have a single name for all. Later changes go to every link.
				l.send.Send(0, s.peers.metaList())
				s.log.Info("chunk server", "server", id, "address", r.Info.Addr, "free", r.Info.Free)
				for _, o := range s.hosted.owners() {
					o.tasks.collection.Wake()
				}
			} else {
				// A second stream of the same server may have replaced this stream, and ended.
				s.chunkServers.enlist(id, l, false)
			}
			if changed {
				s.tellServers()
			}
			if anew {
				s.repairs.relist(r.Info.ID)
			}
			if n := len(r.Events); n > 0 {
				for _, e := range r.Events {
					s.log.Warn("chunk server reports", "server", id, "event", e.Kind, "chunk", e.Chunk, "disk", e.Disk, "detail", e.Detail)
				}
				s.repairs.events(id, r.Events)
				acked = wire.Reported{Generation: r.Generation, Seq: r.Events[n-1].Seq}
			} else if acked.Generation != r.Generation {
				acked = wire.Reported{Generation: r.Generation}
			}
			// Every report is answered, also without events: the answer carries the clock that
			// capabilities are judged by.
			re := acked
			re.Now, re.Stamp = meta.Time(time.Now().UnixNano()), r.Stamp
			l.send.Send(0, &re)
		case wire.TOrderRe:
			var r wire.OrderRe
			if err := wire.Decode(body, &r); err != nil {
				s.log.Warn("chunk server dropped", "server", id, "error", err)
				return
			}
			l.mu.Lock()
			ch := l.orders[req]
			delete(l.orders, req)
			l.mu.Unlock()
			if ch != nil {
				ch <- r.Result
			}
		default:
			s.log.Warn("chunk server dropped", "server", id, "type", t)
			return
		}
	}
}

// bindWait bounds how long a chunk server's first report waits for etcd.
const bindWait = 5 * time.Second

// bind refuses a chunk server whose number is bound to another certificate. A chunk server
// without a certificate (a socket of this machine's administrator, --insecure) is not
// compared. Errors: Invalid, and those of Cluster.BindServer.
func (cs *chunkServers) bind(ctx context.Context, who peering.Identity, id meta.ServerID) error {
	if id == 0 {
		return meta.E("report", meta.Invalid, who.String(), errors.New("a chunk server has a number"))
	}
	if who.Role != peering.ChunkServer {
		return nil
	}
	return cs.cfg.Cluster.BindServer(ctx, id, who.String())
}

// enlist makes l the link of a chunk server, and sends the capability keys on l. Both happen
// under the lock under which takeKeys sends new keys to all links: a link enlisted during a
// rotation gets the new keys from enlist or from takeKeys, and never older keys after newer
// keys. Unless newest, l does not replace another link.
func (cs *chunkServers) enlist(id meta.ServerID, l *link, newest bool) {
	cs.mu.Lock()
	if !newest && cs.links[id] != nil {
		cs.mu.Unlock()
		return
	}
	l.send.Enqueue(0, &wire.Order{Order: meta.Order{Kind: meta.OrderKeys, Keys: slices.Clone(cs.keys), Evicted: cs.evicted}})
	cs.links[id] = l
	cs.mu.Unlock()
	l.send.Flush()
}

// liveServers lists the chunk servers with a stream, by id.
func (cs *chunkServers) liveServers() []meta.ServerInfo {
	links := cs.all()
	infos := make([]meta.ServerInfo, 0, len(links))
	for _, l := range links {
		l.mu.Lock()
		infos = append(infos, l.report.Info)
		l.mu.Unlock()
	}
	slices.SortFunc(infos, func(a, b meta.ServerInfo) int { return cmp.Compare(a.ID, b.ID) })
	return infos
}

// strike ends the enlistment of a chunk server's link; false: l is not the server's link.
func (cs *chunkServers) strike(id meta.ServerID, l *link) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.links[id] != l {
		return false
	}
	delete(cs.links, id)
	return true
}

// serverList returns the list of live chunk servers for clients, without disks.
func (cs *chunkServers) serverList() *wire.Servers {
	live := cs.liveServers()
	for i := range live {
		live[i].Disks = nil
	}
	return &wire.Servers{Servers: live}
}

// tellServers sends the list of chunk servers to every session.
func (s *Server) tellServers() {
	m := s.chunkServers.serverList()
	for _, sess := range s.clients.all() {
		sess.enqueue(0, m)
		sess.flush()
	}
}

func (cs *chunkServers) fillDisk(st *meta.StatFS) {
	for _, i := range cs.liveServers() {
		st.DiskTotal += i.Total
		st.DiskFree += i.Free
	}
}

// Order sends an order to a chunk server and waits for the result. Errors: Unavailable (no
// stream to the server, or no answer), and the result's error.
func (cs *chunkServers) Order(ctx context.Context, id meta.ServerID, o meta.Order) (meta.OrderResult, error) {
	cs.mu.Lock()
	l := cs.links[id]
	cs.mu.Unlock()
	if l == nil {
		return meta.OrderResult{}, meta.E("order", meta.Unavailable, fmt.Sprintf("chunk server %d", id), nil)
	}
	ch := make(chan meta.OrderResult, 1)
	l.mu.Lock()
	l.next++
	n := l.next
	l.orders[n] = ch
	l.mu.Unlock()
	defer func() {
		l.mu.Lock()
		delete(l.orders, n) // the server may not have answered
		l.mu.Unlock()
	}()
	if err := l.send.Send(n, &wire.Order{Order: o}); err != nil {
		return meta.OrderResult{}, meta.E("order", meta.Unavailable, fmt.Sprintf("chunk server %d", id), err)
	}
	select {
	case r := <-ch:
		if r.Err != meta.KindOK {
			return r, meta.E("order", r.Err, o.Chunk.String(), errors.New(r.Detail))
		}
		return r, nil
	case <-l.gone:
		return meta.OrderResult{}, meta.E("order", meta.Unavailable, fmt.Sprintf("chunk server %d", id), errors.New("its stream broke"))
	case <-ctx.Done():
		return meta.OrderResult{}, meta.E("order", meta.Unavailable, fmt.Sprintf("chunk server %d", id), context.Cause(ctx))
	}
}

// listPage is how many replicas are asked for, and looked up, at a time.
const listPage = 1024

// ordering is how a server is given an order: Server.Order or kernel.order.
type ordering func(ctx context.Context, id meta.ServerID, o meta.Order) (meta.OrderResult, error)

// listReplicas gives page a server's replicas of a volume, some at a time. Only without an
// error was the list complete. Errors: those of order and of page; Protocol (the server
// announces more replicas and lists none).
func listReplicas(ctx context.Context, order ordering, id meta.ServerID, v meta.VolumeID, page func([]meta.ReplicaInfo) error) error {
	or := meta.Order{Kind: meta.OrderList, Volume: v, Max: listPage}
	for {
		ctx, cancel := context.WithTimeout(ctx, orderPatience)
		r, err := order(ctx, id, or)
		cancel()
		if err != nil {
			return err
		}
		if err := page(r.Chunks); err != nil {
			return err
		}
		if !r.More {
			return nil
		}
		if len(r.Chunks) == 0 {
			return meta.E("list replicas", meta.Protocol, fmt.Sprintf("server %d", id), errors.New("the server announces more replicas and lists none"))
		}
		or.After = r.Chunks[len(r.Chunks)-1].ID
	}
}

// sign signs a capability valid from now for life, at most capability.MaxLife: the signing key
// is not valid for longer.
func (cs *chunkServers) sign(life time.Duration, c capability.Claims) []byte {
	c.Expiry = meta.Time(time.Now().Add(min(life, capability.MaxLife)).UnixNano())
	return capability.Sign(cs.signKey(), c)
}

func (cs *chunkServers) signKey() meta.CapKey {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	k := slices.Clone(cs.keys)
	slices.SortFunc(k, func(a, b meta.CapKey) int { return cmp.Compare(a.ID, b.ID) })
	if len(k) > 1 && time.Since(cs.keysAt) < keyHold {
		return k[len(k)-2]
	}
	return k[len(k)-1]
}

const (
	// keyHold is how long chunk servers know a new key before the key signs.
	keyHold = 10 * time.Second
	// DefaultKeyLook is the mean interval of the checks of the newest key's age.
	DefaultKeyLook = time.Minute
)

// keyLoop rotates the capability keys at the interval of the cluster's settings. All metadata
// servers run keyLoop; the first to find the newest key too old rotates.
func (cs *chunkServers) keyLoop() {
	for {
		// Spread the checks of the servers over time.
		wait := cs.cfg.KeyLook/2 + rand.N(cs.cfg.KeyLook)
		select {
		case <-time.After(wait):
		case <-cs.ctx.Done():
			return
		}
		every := cluster.DefaultKeyLife
		if v := cs.cfg.Cluster.View(); v != nil && v.Settings.KeyLife != 0 {
			every = max(v.Settings.KeyLife, cluster.MinKeyLife)
		}
		ctx, cancel := context.WithTimeout(cs.ctx, DefaultKeyLook)
		rotated, err := cs.cfg.Cluster.FreshCapKeys(ctx, every)
		cancel()
		switch {
		case err != nil && cs.ctx.Err() == nil:
			cs.log.Warn("the capability keys can't be read from etcd; the server tries again", "error", err)
		case rotated:
			cs.log.Info("this server rotated the capability keys", "after", every)
		}
	}
}

// bulkRights returns Plain if a volume's bytes may go over plain connections, else 0.
func (cs *chunkServers) bulkRights(v meta.VolumeID) capability.Rights {
	view := cs.cfg.Cluster.View()
	if view == nil || !view.Settings.PlainBulk {
		return 0
	}
	if row, ok := view.Volume(v); !ok || row.Policy.Encrypt {
		return 0
	}
	return capability.Plain
}

// readCap signs a capability to read a volume's chunks.
func (cs *chunkServers) readCap(v meta.VolumeID, sess *session) ([]byte, time.Duration, error) {
	t := cs.sign(CapLife, capability.Claims{
		Volume: v, Rights: capability.Read | cs.bulkRights(v), Client: sess.holder(),
	})
	return t, CapLife, nil
}

// maxAlloc bounds the chunks of an allocation request.
const maxAlloc = 64

// serveAlloc allocates chunks. It answers when the allocation is journaled (rule 4).
func (o *owner) serveAlloc(s *session, id uint64, m *wire.Alloc) {
	s.wg.Go(func() {
		grants, err := o.alloc(s, int(m.N), m.Own)
		s.enqueue(id, &wire.Grants{Status: wire.StatusOf(err), Grants: grants})
		s.flush()
	})
}

func (o *owner) alloc(s *session, n int, own bool) ([]meta.ChunkGrant, error) {
	if n < 1 || n > maxAlloc {
		return nil, meta.E("allocate chunks", meta.Invalid, fmt.Sprint(n), nil)
	}
	if err := o.await(s.ctx, o.recovered); err != nil {
		return nil, err
	}
	policy, servers, err := o.placeFor(s, n)
	if err != nil {
		return nil, err
	}
	res, wait, err := o.start(&meta.AllocChunks{N: uint32(n), Own: own, Servers: servers, Fence: meta.Fence{Term: o.own.Term()}}, s.id)
	o.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := o.await(s.ctx, wait); err != nil {
		return nil, err
	}
	limit := maxLen(policy, own)
	grants := make([]meta.ChunkGrant, len(res.Chunks))
	for i, c := range res.Chunks {
		grants[i] = meta.ChunkGrant{ID: c.ID, Fence: c.Fence, Servers: c.Servers, MaxLen: limit,
			Cap: o.appendCap(s, &c, policy), TTL: uint64(CapLife.Milliseconds())}
	}
	return grants, nil
}

// placeFor chooses the servers of n chunks by the volume's policy. If placeFor returns no
// error, it holds mu, the policy is still in force, and the session is in the journal.
func (o *owner) placeFor(s *session, n int) (meta.Policy, [][]meta.ServerID, error) {
	boot, _, _ := strings.Cut(s.host, " ") // the machine; see process.Space
	for {
		policy, err := o.policy()
		if err != nil {
			return policy, nil, err
		}
		servers, err := o.srv.serverMap.place(n, &policy, placement.Writer{Host: boot}, o.srv.chunkServers.suspected.of(s.id))
		if err != nil {
			if meta.KindOf(err) == meta.NoSpace {
				o.noChunkRoom()
			}
			return policy, nil, err
		}
		o.mu.Lock()
		for {
			err := cmp.Or(o.failed, o.full(&meta.AllocChunks{}))
			var wait <-chan struct{}
			if err == nil {
				wait, err = o.journalSession(s)
			}
			if err != nil {
				o.mu.Unlock()
				return policy, nil, err
			}
			if wait == nil {
				break
			}
			o.mu.Unlock()
			if err := o.await(s.ctx, wait); err != nil {
				return policy, nil, err
			}
			o.mu.Lock()
		}
		if now, err := namespace.Policy(o.view()); err == nil && now == policy {
			return policy, servers, nil
		}
		o.mu.Unlock() // a policy change ends the chunks that don't meet it; these would come too late for that
	}
}

// maxLen is the length of a volume's largest chunk. A file's own chunk holds only bytes of the
// file, each once. If the volume has a quota, the quota bounds such a chunk: the journal
// learns of the bytes at an open end only when the end is closed (rule 7).
func maxLen(p meta.Policy, own bool) uint64 {
	n := cmp.Or(p.MaxChunk, meta.DefaultChunk)
	if own && p.QuotaBytes > 0 {
		n = min(n, max(p.QuotaBytes, 1<<20))
	}
	return n
}

// appendCap signs a capability to append to a chunk.
func (o *owner) appendCap(s *session, c *meta.ChunkRecord, p meta.Policy) []byte {
	rights := capability.Append | capability.Read | o.srv.chunkServers.bulkRights(c.ID.Volume)
	return o.srv.chunkServers.sign(CapLife, capability.Claims{
		Volume: c.ID.Volume, Chunk: c.ID, Rights: rights, Fence: c.Fence, MaxLen: maxLen(p, c.Own),
		Client: s.holder(), Class: p.Class,
	})
}

// serveAppendCap renews the capability to append, as long as the session holds the chunk open.
// Errors: NoSuchChunk, Sealed.
func (o *owner) serveAppendCap(s *session, id uint64, chunk meta.ChunkID) {
	s.wg.Go(func() {
		re := &wire.CapsRe{}
		token, err := func() ([]byte, error) {
			if err := o.await(s.ctx, o.recovered); err != nil {
				return nil, err
			}
			policy, err := o.policy()
			if err != nil {
				return nil, err
			}
			o.mu.Lock()
			rec, _, err := namespace.ReadChunk(o.view(), chunk)
			o.mu.Unlock()
			if err == nil && (rec.State != meta.ChunkOpen || rec.Session != s.id) {
				err = meta.E("renew capability", meta.Sealed, chunk.String(), nil)
			}
			if err != nil {
				return nil, err
			}
			return o.appendCap(s, &rec, policy), nil
		}()
		re.Status, re.Cap, re.TTL = wire.StatusOf(err), token, uint64(CapLife.Milliseconds())
		s.enqueue(id, re)
		s.flush()
	})
}

// collection seals abandoned chunks, reaps the extents left by unlinks and truncations, and
// deletes chunks that nothing refers to.
type collection struct {
	k           *kernel
	checkpoints *checkpoints
	faults      *faults
	indexing    *indexing
	repairing   *repairing
	sealing     *sealing

	filling map[meta.ChunkID]bool // chunks that promotion or compaction has open: not abandoned
}

// abandoned lists the open chunks that no session, compaction or indexing holds. files counts
// the listed chunks with a file's open end, of unknown length. The caller holds the owner's mu.
func (cl *collection) abandoned() (ids []meta.ChunkID, files int, err error) {
	k := cl.k
	err = namespace.AllOpenChunks(k.view(), func(c meta.ChunkRecord, file meta.Ino) bool {
		if k.sessions[c.Session] == nil && !cl.filling[c.ID] && !cl.indexing.parts[c.ID] {
			ids = append(ids, c.ID)
			if file != 0 {
				files++
			}
		}
		return true
	})
	return ids, files, err
}

// sealAbandoned seals the abandoned chunks; failed: some could not be sealed yet.
func (cl *collection) sealAbandoned() (failed bool) {
	k := cl.k
	k.mu.Lock()
	ids, _, err := cl.abandoned()
	k.mu.Unlock()
	if err != nil {
		k.lose(err)
		return true
	}
	return cl.sealing.sealAll(ids)
}

// settleOpenEnded seals the abandoned chunks with a file's open end, before the owner serves
// requests. It tries again until all are sealed.
func (cl *collection) settleOpenEnded() error {
	k := cl.k
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		k.mu.Lock()
		_, files, err := cl.abandoned()
		k.mu.Unlock()
		if err != nil {
			k.lose(err)
			return err
		}
		if files == 0 {
			return nil
		}
		k.log.Info("some files end in chunks that their writer left open: the owner seals the chunks", "files", files)
		if !cl.sealAbandoned() {
			continue
		}
		select {
		case <-time.After(wait):
		case <-k.ctx.Done():
			return context.Cause(k.ctx)
		}
	}
}

// gcBatch bounds the chunks deleted in a batch.
const gcBatch = 128

// newCollectionTask returns the task of the collection.
func newCollectionTask(o *owner) *task.Task {
	return task.New(task.Options{
		Name: "collect garbage", Every: time.Second,
		Gather: 20 * time.Millisecond, // a burst of unlinks
		Round: func(ctx context.Context) (time.Duration, error) {
			o.collection.sealAbandoned()
			for ctx.Err() == nil && (o.collection.reapSome() || o.collection.deleteSome()) {
			}
			return task.Idle, nil
		},
	})
}

// reapSome removes a bounded number of extents of unlinked or truncated files.
func (cl *collection) reapSome() (more bool) {
	k := cl.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return false
	}
	var inos []meta.Ino
	if err := namespace.ReapQueue(k.view(), func(ino meta.Ino) bool {
		inos = append(inos, ino)
		return len(inos) < 8
	}); err != nil {
		k.log.Error("reaping", "error", err)
		return false
	}
	for _, ino := range inos {
		if _, err := k.run(&meta.Reap{Ino: ino, Max: 1024}, 0); err != nil {
			k.log.Error("reaping", "inode", ino, "error", err)
			return false
		}
	}
	return len(inos) > 0
}

// deleteSome orders the deletion of chunks whose journaled record says so, and drops the
// record when every replica is gone.
func (cl *collection) deleteSome() (more bool) {
	k := cl.k
	k.mu.Lock()
	if k.failed != nil {
		k.mu.Unlock()
		return false
	}
	seq := k.newest()
	chunks, err := cl.checkpoints.nextDeleted()
	if err != nil || len(chunks) == 0 {
		k.mu.Unlock()
		if err != nil {
			k.log.Error("collecting chunks", "error", err)
		}
		return false
	}
	wait := k.untilDurable(seq)
	k.mu.Unlock()
	if k.await(k.ctx, wait) != nil {
		return false
	}
	m := k.srv.serverMap.servers()
	var done atomic.Int64
	var wg sync.WaitGroup
	slots := make(chan struct{}, deletesAtOnce)
	for _, c := range chunks {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if !cl.deleteReplicas(&c, m) {
				if k.srv.cfg.KeepForCheckpoint {
					k.mu.Lock()
					cl.checkpoints.deletable = append(cl.checkpoints.deletable, c)
					k.mu.Unlock()
				}
				return
			}
			k.mu.Lock()
			defer k.mu.Unlock()
			if k.failed != nil {
				return
			}
			if _, err := k.run(&meta.DropChunk{Chunk: c.ID}, 0); err != nil {
				k.log.Error("dropping the record of a deleted chunk", "chunk", c.ID, "error", err)
				return
			}
			done.Add(1)
			k.srv.stats.deleted.Add(1)
		})
	}
	wg.Wait()
	return done.Load() == gcBatch
}

// deletesAtOnce bounds the chunks deleted in parallel.
const deletesAtOnce = 16

// deleteReplicas deletes a chunk on its servers, and reports whether all replicas are gone. It
// skips servers gone for long: a server that returns lists its chunks, and the replica is
// found to have no record.
func (cl *collection) deleteReplicas(c *meta.ChunkRecord, m *placement.Map) bool {
	k := cl.k
	ctx, cancel := context.WithTimeout(k.ctx, orderPatience)
	defer cancel()
	fence := cl.repairing.fresh(c.Fence) // copies may have later fences than the record
	for _, srv := range c.Servers {
		if s, known := m.Server(srv); known && s.State == placement.Gone || !known && time.Since(k.srv.epoch) > k.srv.cfg.RepairDelay {
			continue
		}
		_, err := k.order(ctx, srv, meta.Order{Kind: meta.OrderDelete, Chunk: c.ID, Fence: fence})
		if err != nil && !errors.Is(err, meta.NoSuchChunk) {
			return false
		}
		cl.faults.clear(c.ID, srv)
	}
	return true
}
