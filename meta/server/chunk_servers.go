package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

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

// serverList returns the list of live chunk servers for clients, without disks.
func (cs *chunkServers) serverList() *wire.Servers {
	live := cs.liveServers()
	for i := range live {
		live[i].Disks = nil
	}
	return &wire.Servers{Servers: live}
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

// AwaitServers waits until n chunk servers are connected, or, for n = 0, until some chunk
// server is connected and the number has not changed for quiet. Errors: Unavailable.
func (cs *chunkServers) AwaitServers(ctx context.Context, n int, quiet time.Duration) error {
	last, since := 0, time.Now()
	for {
		if now := len(cs.liveServers()); now != last {
			last, since = now, time.Now()
		}
		if n > 0 && last >= n || n == 0 && last > 0 && time.Since(since) >= quiet {
			return nil
		}
		select {
		case <-ctx.Done():
			return meta.E("wait for chunk servers", meta.Unavailable, fmt.Sprintf("%d of %d are connected", last, n), context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// AwaitServer waits until at least one of the chunk servers is connected. Errors: Unavailable,
// Canceled.
func (cs *chunkServers) AwaitServer(ctx context.Context, any []meta.ServerID) error {
	for {
		for _, id := range any {
			if _, ok := cs.Resolve(id); ok {
				return nil
			}
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return meta.E("wait for chunk server", meta.Unavailable, fmt.Sprint(any), context.Cause(ctx))
		case <-cs.ctx.Done():
			return meta.E("wait for chunk server", meta.Canceled, fmt.Sprint(any), context.Cause(cs.ctx))
		}
	}
}

// Resolve finds a connected chunk server.
func (cs *chunkServers) Resolve(id meta.ServerID) (meta.ServerInfo, bool) {
	cs.mu.Lock()
	l := cs.links[id]
	cs.mu.Unlock()
	if l == nil {
		return meta.ServerInfo{}, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.report.Info, true
}

// listChunks calls each for all chunks of a volume on a server, or returns an error.
func (cs *chunkServers) listChunks(id meta.ServerID, v meta.VolumeID, each func(meta.ChunkID)) error {
	return listReplicas(cs.ctx, cs.Order, id, v, func(page []meta.ReplicaInfo) error {
		for i := range page {
			each(page[i].ID)
		}
		return nil
	})
}

// scrub orders chunk server only, or all connected chunk servers if only is 0, to read and
// verify all replicas.
func (cs *chunkServers) scrub(ctx context.Context, only meta.ServerID) error {
	asked := 0
	var errs []error
	for _, i := range cs.liveServers() {
		if only != 0 && i.ID != only {
			continue
		}
		asked++
		if _, err := cs.Order(ctx, i.ID, meta.Order{Kind: meta.OrderScrub}); err != nil {
			errs = append(errs, err)
		}
	}
	if asked == 0 {
		return meta.E("scrub", meta.Unavailable, fmt.Sprintf("chunk server %d", only), errors.New("it is not connected"))
	}
	return errors.Join(errs...)
}

// neverBack reports whether an operator removed the chunk server, and the chunk server is not
// connected.
func (cs *chunkServers) neverBack(id meta.ServerID) bool {
	cs.mu.Lock()
	_, here := cs.links[id]
	cs.mu.Unlock()
	n := nodeIn(cs.cfg.Cluster.Nodes(), id)
	return !here && n != nil && n.State == cluster.NodeRemoved
}
