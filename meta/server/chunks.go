package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// CapLife is how long capabilities hold; clients renew at half of it.
const CapLife = 2 * time.Minute

// appendLife is how long the right to append to one chunk holds.
const appendLife = 24 * time.Hour

// link is a chunk server's standing stream.
type link struct {
	conn net.Conn
	send *wire.Sender

	mu     sync.Mutex
	report wire.Report
	next   uint64
	orders map[uint64]chan meta.OrderResult
	gone   chan struct{}
}

// serveLink reads a chunk server's reports and the results of its orders.
func (s *Server) serveLink(conn net.Conn, rd *wire.Reader) {
	l := &link{conn: conn, send: wire.NewSender(conn, nil), orders: map[uint64]chan meta.OrderResult{}, gone: make(chan struct{})}
	var id meta.ServerID
	defer func() {
		close(l.gone)
		s.mu.Lock()
		if id != 0 && s.links[id] == l {
			delete(s.links, id)
		}
		s.mu.Unlock()
	}()
	for {
		t, req, body, err := rd.Next()
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
			l.mu.Lock()
			changed := l.report.Info.Addr != r.Info.Addr
			l.report = r
			l.mu.Unlock()
			if id == 0 {
				id = r.Info.ID
				l.send.Send(0, &wire.Order{Order: meta.Order{Kind: meta.OrderKeys, Keys: s.capKeys()}})
				s.mu.Lock()
				s.links[id] = l
				s.mu.Unlock()
				s.log.Info("chunk server", "server", id, "address", r.Info.Addr, "free", r.Info.Free)
				for _, o := range s.owners() {
					o.kickGC()
				}
			}
			if changed {
				s.tellServers()
			}
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

func (s *Server) capKeys() []meta.CapKey {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.keys)
}

// liveServers lists the chunk servers with a stream, by id.
func (s *Server) liveServers() []meta.ServerInfo {
	s.mu.Lock()
	links := make([]*link, 0, len(s.links))
	for _, l := range s.links {
		links = append(links, l)
	}
	s.mu.Unlock()
	infos := make([]meta.ServerInfo, 0, len(links))
	for _, l := range links {
		l.mu.Lock()
		infos = append(infos, l.report.Info)
		l.mu.Unlock()
	}
	slices.SortFunc(infos, func(a, b meta.ServerInfo) int { return int(int64(a.ID) - int64(b.ID)) })
	return infos
}

func (s *Server) serverList() *wire.Servers { return &wire.Servers{Servers: s.liveServers()} }

// tellServers sends every session the list.
func (s *Server) tellServers() {
	m := s.serverList()
	s.mu.Lock()
	all := make([]*session, 0, len(s.sessions))
	for _, sess := range s.sessions {
		all = append(all, sess)
	}
	s.mu.Unlock()
	for _, sess := range all {
		sess.enqueue(0, m)
		sess.flush()
	}
}

func (s *Server) fillDisk(st *meta.StatFS) {
	for _, i := range s.liveServers() {
		st.DiskTotal += i.Total
		st.DiskFree += i.Free
	}
}

// Order sends a chunk server an order and waits for the result.
// Errors: Unavailable (no stream to it), and what the order came to.
func (s *Server) Order(ctx context.Context, id meta.ServerID, o meta.Order) (meta.OrderResult, error) {
	s.mu.Lock()
	l := s.links[id]
	s.mu.Unlock()
	if l == nil {
		return meta.OrderResult{}, meta.E("order", meta.Unavailable, fmt.Sprintf("chunk server %d", id), nil)
	}
	ch := make(chan meta.OrderResult, 1)
	l.mu.Lock()
	l.next++
	n := l.next
	l.orders[n] = ch
	l.mu.Unlock()
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

// reserve is the free space below which a server gets no new chunks: a
// fiftieth of the disk, at most 1 GiB, so that what was promised can be kept.
func reserve(i meta.ServerInfo) uint64 { return min(i.Total/50, 1<<30) }

// place chooses replicas for n chunks. Errors: Unavailable, NoSpace.
func (s *Server) place(n, replicas int, host string) ([][]meta.ServerID, error) {
	live := s.liveServers()
	if len(live) == 0 {
		return nil, meta.E("place chunk", meta.Unavailable, "", errors.New("no chunk server is connected"))
	}
	room := slices.DeleteFunc(live, func(i meta.ServerInfo) bool { return i.Free <= reserve(i) })
	if len(room) < replicas {
		return nil, meta.E("place chunk", meta.NoSpace, "", fmt.Errorf("%d servers have room, %d are needed", len(room), replicas))
	}
	out := make([][]meta.ServerID, n)
	for c := range out {
		left := slices.Clone(room)
		for range replicas {
			// The better of two drawn at random, the writer's own host first.
			i := rand.IntN(len(left))
			if j := rand.IntN(len(left)); left[j].Free > left[i].Free {
				i = j
			}
			if len(out[c]) == 0 {
				if h := slices.IndexFunc(left, func(x meta.ServerInfo) bool { return x.Host == host && host != "" }); h >= 0 {
					i = h
				}
			}
			out[c] = append(out[c], left[i].ID)
			left = slices.Delete(left, i, i+1)
		}
	}
	return out, nil
}

func (s *Server) signKey() meta.CapKey {
	s.mu.Lock()
	defer s.mu.Unlock()
	best := s.keys[0]
	for _, k := range s.keys {
		if k.ID > best.ID {
			best = k
		}
	}
	return best
}

// readCap signs the right to read a volume's chunks.
func (s *Server) readCap(v meta.VolumeID, sess *session) ([]byte, time.Duration, error) {
	t := capability.Sign(s.signKey(), capability.Claims{
		Volume: v, Rights: capability.Read, Client: sess.name, Expiry: meta.Time(time.Now().Add(CapLife).UnixNano()),
	})
	return t, CapLife, nil
}

// maxAlloc bounds the chunks of one request.
const maxAlloc = 64

// serveAlloc hands out chunks, from journaled state only (rule 4).
func (o *owner) serveAlloc(s *session, id uint64, m *wire.Alloc) {
	s.wg.Go(func() {
		grants, err := o.alloc(s, int(m.N), m.Own)
		s.enqueue(id, &wire.Grants{Status: wire.StatusOf(err), Grants: grants})
		s.flush()
	})
}

func (o *owner) await(ctx context.Context, ch <-chan struct{}) error {
	select {
	case <-ch:
		return nil
	case <-ctx.Done():
		return meta.E("call", meta.Interrupted, "", context.Cause(ctx))
	case <-o.ctx.Done():
		return o.gone()
	}
}

func (o *owner) alloc(s *session, n int, own bool) ([]meta.ChunkGrant, error) {
	if n < 1 || n > maxAlloc {
		return nil, meta.E("allocate chunks", meta.Invalid, fmt.Sprint(n), nil)
	}
	if err := o.await(s.ctx, o.recovered); err != nil {
		return nil, err
	}
	policy, err := o.policy()
	if err != nil {
		return nil, err
	}
	boot, _, _ := strings.Cut(s.host, " ") // the machine; see client.PIDSpace
	servers, err := o.srv.place(n, int(max(policy.Replicas, 1)), boot)
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	for {
		if err := cmp.Or(o.failed, o.full(&meta.AllocChunks{})); err != nil {
			o.mu.Unlock()
			return nil, err
		}
		wait, err := o.journalSession(s)
		if err != nil {
			o.mu.Unlock()
			return nil, err
		}
		if wait == nil {
			break
		}
		o.mu.Unlock()
		if err := o.await(s.ctx, wait); err != nil {
			return nil, err
		}
		o.mu.Lock()
	}
	seq := o.cur.seq
	res, err := o.run(&meta.AllocChunks{N: uint32(n), Own: own, Servers: servers, Fence: meta.Fence{Term: o.own.Term()}}, s.id)
	if err != nil {
		o.mu.Unlock()
		return nil, err
	}
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err := o.await(s.ctx, wait); err != nil {
		return nil, err
	}
	limit := policy.MaxChunk
	if limit == 0 {
		limit = 1 << 30
	}
	key := o.srv.signKey()
	grants := make([]meta.ChunkGrant, len(res.Chunks))
	for i, c := range res.Chunks {
		grants[i] = meta.ChunkGrant{ID: c.ID, Fence: c.Fence, Servers: c.Servers, MaxLen: limit,
			Cap: capability.Sign(key, capability.Claims{
				Volume: c.ID.Volume, Chunk: c.ID, Rights: capability.Append | capability.Read, Fence: c.Fence, MaxLen: limit,
				Client: s.name, Expiry: meta.Time(time.Now().Add(appendLife).UnixNano()),
			})}
	}
	return grants, nil
}

func (o *owner) policy() (meta.Policy, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return namespace.Policy(&view{o: o})
}

func (o *owner) serveSeal(s *session, id uint64, chunk meta.ChunkID) {
	s.wg.Go(func() {
		rec, err := o.seal(s.ctx, chunk)
		re := &wire.Reply{Status: wire.StatusOf(err)}
		if err == nil {
			re.Result.Chunks = []meta.ChunkRecord{rec}
		}
		s.enqueue(id, re)
		s.flush()
	})
}

// seal ends a chunk (rule 5): freeze the reachable replicas at a higher fence,
// take the longest length that verifies on any of them, journal it, and only
// then cut the replicas there. It waits while no replica can tell.
func (o *owner) seal(ctx context.Context, id meta.ChunkID) (meta.ChunkRecord, error) {
	o.mu.Lock()
	rec, _, err := namespace.ReadChunk(&view{o: o}, id)
	o.mu.Unlock()
	if err != nil {
		return rec, err
	}
	if rec.State != meta.ChunkOpen {
		return rec, nil
	}
	fence := meta.Fence{Term: o.own.Term(), Seals: rec.Fence.Seals + 1}
	if rec.Fence.Term != fence.Term {
		fence.Seals = 1
	}
	var best meta.OrderResult
	var have []meta.ServerID
	var unreachable []error
	var synced uint64
	for _, srv := range rec.Servers {
		r, err := o.srv.Order(ctx, srv, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: fence})
		switch {
		case errors.Is(err, meta.NoSuchChunk):
			// Handed out and never written there: nothing to take.
		case err != nil:
			unreachable = append(unreachable, err)
		default:
			synced = max(synced, r.Synced)
			if len(have) == 0 || r.Length > best.Length {
				best = r
			}
			have = append(have, srv)
		}
	}
	if len(unreachable) == len(rec.Servers) {
		return rec, meta.E("seal", meta.Unavailable, id.String(), errors.Join(unreachable...))
	}
	if best.Length < synced {
		return rec, meta.E("seal", meta.Corrupt, id.String(), fmt.Errorf("%d bytes verify, %d were synced", best.Length, synced))
	}
	if len(have) == 0 {
		have = rec.Servers
	}
	o.mu.Lock()
	seq := o.cur.seq
	_, err = o.run(&meta.SealChunk{Chunk: id, Length: best.Length, CRC: best.CRC, Fence: fence, Servers: have}, 0)
	if err != nil {
		o.mu.Unlock()
		return rec, err
	}
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if err := o.await(ctx, wait); err != nil {
		return rec, err
	}
	if best.Existing {
		for _, srv := range have {
			if _, err := o.srv.Order(ctx, srv, meta.Order{Kind: meta.OrderSeal, Chunk: id, Fence: fence, Final: true, Length: best.Length}); err != nil {
				return rec, err
			}
		}
	}
	o.srv.stats.sealed.Add(1)
	o.kickGC()
	o.mu.Lock()
	defer o.mu.Unlock()
	rec, _, err = namespace.ReadChunk(&view{o: o}, id)
	if errors.Is(err, meta.NoSuchChunk) {
		// Nothing referred to it: it is on its way out.
		return meta.ChunkRecord{ID: id, State: meta.ChunkDeleting, Length: best.Length, CRC: best.CRC, Fence: fence, Servers: have}, nil
	}
	return rec, err
}

// abandoned lists the open chunks that no session holds, and how many of them
// a file ends in, its length not yet known. Caller holds mu.
func (o *owner) abandoned() (ids []meta.ChunkID, files int, err error) {
	err = namespace.AllOpenChunks(&view{o: o}, func(c meta.ChunkRecord, file meta.Ino) bool {
		if o.sessions[c.Session] == nil {
			ids = append(ids, c.ID)
			if file != 0 {
				files++
			}
		}
		return true
	})
	return ids, files, err
}

// sealAbandoned seals what sessions left open; failed tells that some could
// not be sealed yet.
func (o *owner) sealAbandoned() (failed bool) {
	o.mu.Lock()
	ids, _, err := o.abandoned()
	o.mu.Unlock()
	if err != nil {
		o.lose(err)
		return true
	}
	for _, id := range ids {
		if _, err := o.seal(o.ctx, id); err != nil && o.ctx.Err() == nil {
			failed = true
			if errors.Is(err, meta.Unavailable) {
				o.log.Warn("a chunk that its writer left open can't be sealed yet", "chunk", id, "error", err)
			} else {
				o.log.Error("a chunk that its writer left open can't be sealed", "chunk", id, "error", err)
			}
		}
	}
	return failed
}

// settleOpenEnded seals, before anything is served, the chunks that files end
// in and that nobody holds any more.
func (o *owner) settleOpenEnded() error {
	for wait := 20 * time.Millisecond; ; wait = min(2*wait, 5*time.Second) {
		o.mu.Lock()
		_, files, err := o.abandoned()
		o.mu.Unlock()
		if err != nil {
			o.lose(err)
			return err
		}
		if files == 0 {
			return nil
		}
		o.log.Info("files end in chunks that their writer left open: sealing", "files", files)
		if !o.sealAbandoned() {
			continue
		}
		select {
		case <-time.After(wait):
		case <-o.ctx.Done():
			return context.Cause(o.ctx)
		}
	}
}

func (o *owner) kickGC() {
	select {
	case o.gcWake <- struct{}{}:
	default:
	}
}

// gcBatch bounds the chunks deleted, and inodes reaped, before others run.
const gcBatch = 128

// gcLoop reaps what unlinks and truncations left, deletes chunks that nothing
// refers to, and compacts.
func (o *owner) gcLoop() {
	if o.await(o.ctx, o.recovered) != nil {
		return
	}
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		o.sealAbandoned()
		for o.ctx.Err() == nil && (o.reapSome() || o.deleteSome() || o.compactSome()) {
		}
		select {
		case <-t.C:
		case <-o.gcWake:
			// Let a burst of unlinks gather.
			select {
			case <-time.After(20 * time.Millisecond):
			case <-o.ctx.Done():
			}
		case <-o.ctx.Done():
			return
		}
	}
}

// reapSome removes a bounded number of extents of unlinked or truncated files.
func (o *owner) reapSome() (more bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.failed != nil {
		return false
	}
	var inos []meta.Ino
	if err := namespace.ReapQueue(&view{o: o}, func(ino meta.Ino) bool {
		inos = append(inos, ino)
		return len(inos) < 8
	}); err != nil {
		o.log.Error("reaping", "error", err)
		return false
	}
	for _, ino := range inos {
		if _, err := o.run(&meta.Reap{Ino: ino, Max: 1024}, 0); err != nil {
			o.log.Error("reaping", "inode", ino, "error", err)
			return false
		}
	}
	return len(inos) > 0
}

// deleteSome orders the deletion of chunks whose record says so in the
// journal, and drops the record when every replica is gone.
func (o *owner) deleteSome() (more bool) {
	var chunks []meta.ChunkRecord
	o.mu.Lock()
	if o.failed != nil {
		o.mu.Unlock()
		return false
	}
	seq := o.newest()
	err := namespace.DeletingChunks(&view{o: o}, func(c meta.ChunkRecord) bool {
		chunks = append(chunks, c)
		return len(chunks) < gcBatch
	})
	if err != nil || len(chunks) == 0 {
		o.mu.Unlock()
		if err != nil {
			o.log.Error("collecting chunks", "error", err)
		}
		return false
	}
	wait := o.untilDurable(seq)
	o.mu.Unlock()
	if o.await(o.ctx, wait) != nil {
		return false
	}
	done := 0
	for _, c := range chunks {
		ok := true
		for _, srv := range c.Servers {
			if _, err := o.srv.Order(o.ctx, srv, meta.Order{Kind: meta.OrderDelete, Chunk: c.ID, Fence: c.Fence}); err != nil {
				ok = false
				break
			}
		}
		if !ok {
			continue
		}
		o.mu.Lock()
		if o.failed == nil {
			if _, err := o.run(&meta.DropChunk{Chunk: c.ID}, 0); err != nil {
				o.log.Error("dropping the record of a deleted chunk", "chunk", c.ID, "error", err)
			} else {
				done++
				o.srv.stats.deleted.Add(1)
			}
		}
		o.mu.Unlock()
	}
	return done == gcBatch
}
