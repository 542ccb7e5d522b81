package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
)

// perPool bounds the connections to one server for each of the two uses:
// appends, whose bytes would delay others' small requests, and all the rest.
const perPool = 4

// peer is one chunk server.
type peer struct {
	c  *Client
	id meta.ServerID

	dialing sync.Mutex // held while connecting: one at a time; taken before mu
	mu      sync.Mutex
	addr    string
	pools   [2][]*link
	down    time.Time // connecting failed; not again before
	downErr error
}

const (
	forOthers = iota
	forAppends
)

// link is one connection.
type link struct {
	*wire.Conn
	p     *peer
	ring  *ring // of a local connection that appends, else nil
	users atomic.Int32
	heard atomic.Int64 // unix nanoseconds of the last frame or of the first request after silence

	mu      sync.Mutex
	next    uint64
	pending map[uint64]*call
	err     error
}

// call is a request that waits for its answer.
type call struct {
	t      wire.Type
	dst    []byte // where a read's data go
	data   []byte // a local reply's data
	answer wire.Answer
	flags  uint16
	fd     int // with FlagDescriptor
	err    error
	done   chan struct{}             // closed at the end, unless notify is set
	notify func(*wire.Answer, error) // called by the reader's goroutine
}

func (c *Client) peer(id meta.ServerID) *peer {
	c.mu.Lock()
	defer c.mu.Unlock()
	p := c.peers[id]
	if p == nil {
		p = &peer{c: c, id: id}
		c.peers[id] = p
	}
	return p
}

// link gives the least busy connection of a pool, making one if all are busy
// and there may be more.
func (p *peer) link(ctx context.Context, pool int) (*link, error) {
	if l := p.idle(pool, false); l != nil {
		return l, nil
	}
	p.dialing.Lock()
	defer p.dialing.Unlock()
	if l := p.idle(pool, false); l != nil {
		return l, nil
	}
	l, err := p.dial(ctx, pool)
	if err != nil {
		if l := p.idle(pool, true); l != nil {
			return l, nil
		}
		return nil, err
	}
	return l, nil
}

func (p *peer) idle(pool int, any bool) *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	var best *link
	for _, l := range p.pools[pool] {
		if best == nil || l.users.Load() < best.users.Load() {
			best = l
		}
	}
	if best != nil && (any || best.users.Load() == 0 || len(p.pools[pool]) >= perPool) {
		best.users.Add(1)
		return best
	}
	return nil
}

func (l *link) release() { l.users.Add(-1) }

// dial connects and greets.
func (p *peer) dial(ctx context.Context, pool int) (*link, error) {
	const op = "connect to chunk server"
	c := p.c
	subject := fmt.Sprint(uint64(p.id))
	info, ok := c.cfg.Resolve(p.id)
	if !ok {
		return nil, meta.E(op, meta.Unavailable, subject, errors.New("no such server is known"))
	}
	p.mu.Lock()
	wait, werr := p.addr == info.Addr && time.Now().Before(p.down), p.downErr
	p.addr = info.Addr
	p.mu.Unlock()
	if wait {
		return nil, werr
	}
	l, err := p.connect(ctx, info, pool)
	if err != nil {
		if meta.KindOf(err) != meta.Version {
			err = meta.E(op, meta.Unavailable, subject+" at "+info.Addr, err)
		}
		if ctx.Err() == nil {
			p.mu.Lock()
			p.down, p.downErr = time.Now().Add(200*time.Millisecond), err
			p.mu.Unlock()
		}
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		l.Close()
		return nil, meta.E(op, meta.Canceled, subject, nil)
	}
	l.users.Add(1)
	p.mu.Lock()
	p.pools[pool] = append(p.pools[pool], l)
	p.mu.Unlock()
	c.wg.Go(l.read)
	return l, nil
}

func (p *peer) connect(ctx context.Context, info meta.ServerInfo, pool int) (*link, error) {
	ctx, cancel := context.WithTimeout(ctx, p.c.cfg.dialTimeout())
	defer cancel()
	network, addr := "tcp", info.Addr
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		network, addr = "unix", path
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	w, err := wire.NewConn(nc, p.c.cfg.Congestion)
	if err != nil {
		nc.Close()
		return nil, err
	}
	l := &link{Conn: w, p: p, pending: map[uint64]*call{}}
	deadline, _ := ctx.Deadline()
	_ = nc.SetDeadline(deadline)
	if err := l.greet(info, pool); err != nil {
		nc.Close()
		return nil, err
	}
	_ = nc.SetDeadline(time.Time{})
	if pool == forAppends {
		l.Block()
	}
	return l, nil
}

// greet exchanges hellos, before the reader runs, and shares a ring where that
// works.
func (l *link) greet(info meta.ServerInfo, pool int) error {
	q := wire.Request{Speaks: wire.Version, Name: l.p.c.cfg.Name}
	a, err := l.exchange(wire.Hello, q.AppendFrame(nil, wire.Hello, 0, 1, 0, 0), -1)
	if err == nil {
		err = a.Err("hello", info.Addr)
	}
	if err != nil {
		return err
	}
	if a.Server != l.p.id {
		return meta.E("hello", meta.Unavailable, info.Addr, fmt.Errorf("server %d answers, not %d", a.Server, l.p.id))
	}
	if pool != forAppends || !l.Local() || l.p.c.cfg.NoShare {
		return nil
	}
	r, err := newRing(ringSize)
	if err != nil {
		return nil // the socket carries the bytes, then
	}
	q = wire.Request{Off: ringSize}
	a, err = l.exchange(wire.Share, q.AppendFrame(nil, wire.Share, 0, 2, 0, 0), r.fd)
	if err != nil {
		r.close()
		return err
	}
	if a.Kind != meta.KindOK {
		r.close()
		return nil
	}
	l.ring = r
	return nil
}

func (l *link) exchange(t wire.Type, frame []byte, fd int) (wire.Answer, error) {
	var err error
	if fd >= 0 {
		err = l.SendDescriptor(frame, nil, fd)
	} else {
		err = l.Send(frame, nil)
	}
	if err != nil {
		return wire.Answer{}, err
	}
	h, body, err := l.Next()
	if err != nil {
		return wire.Answer{}, err
	}
	a, err := wire.DecodeAnswer(h.Type&^wire.Reply, h.Flags, body)
	if err == nil && h.Type != t|wire.Reply {
		if err = a.Err("hello", ""); err == nil {
			err = meta.E("hello", meta.Protocol, "", fmt.Errorf("answer of type %d", h.Type))
		}
	}
	return a, err
}

// start registers a call and gives its request id.
func (l *link) start(k *call) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return 0, l.err
	}
	if len(l.pending) == 0 {
		l.heard.Store(time.Now().UnixNano())
	}
	l.next++
	l.pending[l.next] = k
	return l.next, nil
}

// do sends a request and waits for its answer; the answer's own error is in
// call.err, too.
func (l *link) do(ctx context.Context, q *wire.Request, k *call, flags uint16) error {
	k.done, k.fd = make(chan struct{}), -1
	id, err := l.start(k)
	if err != nil {
		return err
	}
	if err := l.Send(q.AppendFrame(nil, k.t, flags, id, 0, 0), nil); err != nil {
		l.Close() // its reader tells all who wait
	}
	select {
	case <-k.done:
	case <-ctx.Done():
		l.mu.Lock()
		_, waiting := l.pending[id]
		delete(l.pending, id)
		l.mu.Unlock()
		if waiting {
			return meta.E("chunk request", meta.Canceled, q.Chunk.String(), ctx.Err())
		}
		<-k.done // the reader is at it: the buffer is its own until then
	}
	return k.err
}

// fail ends the connection and all calls.
func (l *link) fail(err error) {
	l.mu.Lock()
	if l.err == nil {
		l.err = meta.E("chunk request", meta.Unavailable, fmt.Sprintf("server %d", uint64(l.p.id)), err)
	}
	err = l.err
	calls := l.pending
	l.pending = nil
	l.mu.Unlock()
	l.Close()
	l.p.drop(l)
	for _, k := range calls {
		k.finish(nil, err)
	}
}

func (p *peer) drop(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range p.pools {
		for j, m := range p.pools[i] {
			if m == l {
				p.pools[i] = append(p.pools[i][:j:j], p.pools[i][j+1:]...)
				return
			}
		}
	}
}

func (k *call) finish(a *wire.Answer, err error) {
	if k.notify != nil {
		k.notify(a, err)
		return
	}
	k.err = err
	close(k.done)
}

// read hands answers to their calls until the connection ends.
func (l *link) read() {
	err := l.loop()
	l.fail(err)
	l.DropDescriptors()
	if l.ring != nil {
		l.ring.close()
	}
}

func (l *link) loop() error {
	for {
		h, body, err := l.Next()
		if err != nil {
			return err
		}
		l.heard.Store(time.Now().UnixNano())
		if h.Type&wire.Reply == 0 {
			return meta.E("chunk answer", meta.Protocol, "", fmt.Errorf("type %d", h.Type))
		}
		t := h.Type &^ wire.Reply
		a, err := wire.DecodeAnswer(t, h.Flags, body)
		if err != nil {
			return err
		}
		l.mu.Lock()
		k := l.pending[h.ID]
		delete(l.pending, h.ID)
		l.mu.Unlock()
		if h.Flags&wire.FlagDescriptor != 0 {
			fd, err := l.Descriptor()
			if err != nil {
				return err
			}
			if k == nil || k.t != wire.Local {
				closeFD(fd)
			} else {
				k.fd = fd
			}
		}
		if k == nil {
			if err := l.Skip(int(h.Data)); err != nil {
				return err
			}
			continue
		}
		if k.t != t {
			err := meta.E("chunk answer", meta.Protocol, "", fmt.Errorf("type %d answers type %d", t, k.t))
			k.finish(nil, err)
			return err
		}
		k.answer, k.flags = a, h.Flags
		if err := l.payload(h, k); err != nil {
			k.finish(nil, err)
			return err
		}
		k.finish(&k.answer, a.Err("chunk "+names[t], ""))
	}
}

var names = map[wire.Type]string{wire.Append: "append", wire.Sync: "sync", wire.Read: "read", wire.Local: "open",
	wire.Stat: "stat", wire.Seal: "seal", wire.Delete: "delete"}

// payload reads the data of an answer to where the call wants them.
func (l *link) payload(h wire.Header, k *call) error {
	if h.Data == 0 {
		return nil
	}
	p := k.dst
	switch {
	case k.t == wire.Read && int(h.Data) == len(p):
	case k.t == wire.Local && h.Data <= 4*wire.MaxLocal+wire.MaxLocal/8:
		k.data = make([]byte, h.Data)
		p = k.data
	default:
		return meta.E("chunk answer", meta.Protocol, "", fmt.Errorf("%d bytes of data for %d", h.Data, len(p)))
	}
	if err := l.Data(p); err != nil {
		return err
	}
	if h.Flags&wire.FlagRaw == 0 && chunkserver.CRC(p) != h.DataCRC {
		return meta.E("chunk answer", meta.Corrupt, "", errors.New("the bytes changed on the way"))
	}
	return nil
}

// watch finds connections that fell silent with requests under way: it asks
// for a sign of life, and gives up on those that give none in time.
func (l *link) watch(now time.Time, limit time.Duration) {
	l.mu.Lock()
	busy := len(l.pending) > 0 && l.err == nil
	l.mu.Unlock()
	silent := now.Sub(time.Unix(0, l.heard.Load()))
	switch {
	case !busy:
	case silent > limit:
		l.fail(fmt.Errorf("no sign of life for %v", silent))
	case silent > limit/4:
		if id, err := l.start(&call{t: wire.Ping, notify: func(*wire.Answer, error) {}}); err == nil {
			q := wire.Request{}
			// In its own goroutine: the connection may take nothing any more.
			l.p.c.wg.Go(func() { _ = l.Send(q.AppendFrame(nil, wire.Ping, 0, id, 0, 0), nil) })
		}
	}
}
