package client

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/wire"
)

// LinkConfig configures a chunk server's standing streams to the metadata servers.
type LinkConfig struct {
	Addrs  []string // of some meta servers; the servers announce the others
	Name   string
	Logger *slog.Logger
	Creds  *peer.Credentials  // as in Config
	Report func() wire.Report // identity, fill level, Generation and clock of the server
	// Events returns at most max events of the current Generation after the acknowledged event
	// number, oldest first. nil: the server never has events.
	Events func(after uint64, max int) []meta.ReplicaEvent
	// More returns a channel that closes at the next event; nil: events wait for the next
	// report.
	More  func() <-chan struct{}
	Order func(context.Context, meta.Order) meta.OrderResult // carries out an order
	// Clock, if not nil, receives a metadata server's clock time, and the time of the request
	// on process.Uptime.
	Clock func(server string, asked time.Duration, theirs meta.Time)
	// Connected, if not nil, is called with true when a stream is up and with false when the
	// stream broke.
	Connected func(bool)
	Interval  time.Duration // between reports; default 2 s
}

// maxOrders bounds the short orders carried out at once, maxLong the long orders carried out
// at once, and maxWaiting all long orders, waiting or running.
const (
	maxOrders  = 16
	maxLong    = 4
	maxWaiting = 1024
)

// takesLong reports that an order copies, reads or lists so much that other orders, above all
// seals, must not wait behind it.
func takesLong(k meta.OrderKind) bool {
	switch k {
	case meta.OrderPull, meta.OrderVerify, meta.OrderCopy, meta.OrderList, meta.OrderDisk, meta.OrderGather:
		return true
	}
	return false
}

// links are the streams of a chunk server: one to each metadata server.
type links struct {
	cfg LinkConfig
	wg  sync.WaitGroup

	slots, long chan struct{} // orders being carried out
	waiting     atomic.Int32  // long orders, waiting or running
	forget      time.Duration // forgetMeta

	mu    sync.Mutex
	tried map[string]bool     // addresses with a goroutine
	up    map[string]net.Conn // by the server's own address
	// metas maps each learnt address to the time since which the latest list omits the
	// address; zero: the list names the address. A server sends a list only when the list
	// changed.
	metas map[string]time.Time
	err   error // refusal by a server at a configured address
	stop  context.CancelFunc
}

const (
	// forgetMeta is how long the chunk server tries an address that no list names any more.
	forgetMeta = time.Minute
	// servedLook is how often the chunk server dials an address again if the address led to a
	// metadata server with a stream under another address: the address may lead elsewhere by
	// then.
	servedLook = time.Minute
)

// RunLink keeps a stream to every metadata server until ctx ends, connecting again when a
// stream breaks. RunLink returns an error only when a server at one of cfg.Addrs refuses this
// chunk server for good.
func RunLink(ctx context.Context, cfg LinkConfig) error {
	if cfg.Interval == 0 {
		cfg.Interval = 2 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return newLinks(cfg).keepAll(ctx)
}

func newLinks(cfg LinkConfig) *links {
	return &links{
		cfg: cfg, slots: make(chan struct{}, maxOrders), long: make(chan struct{}, maxLong), forget: forgetMeta,
		tried: map[string]bool{}, up: map[string]net.Conn{}, metas: map[string]time.Time{},
	}
}

func (l *links) keepAll(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l.mu.Lock()
	l.stop = cancel
	for _, a := range l.cfg.Addrs {
		l.startLocked(ctx, a, true)
	}
	l.mu.Unlock()
	<-ctx.Done()
	l.wg.Wait()
	return l.err
}

// startLocked starts a goroutine keeping a stream to an address, unless the address has a
// goroutine. The caller holds mu.
func (l *links) startLocked(ctx context.Context, addr string, always bool) {
	if l.tried[addr] || ctx.Err() != nil {
		return
	}
	l.tried[addr] = true
	l.wg.Go(func() { l.keep(ctx, addr, always) })
}

// learn takes in a list of metadata servers. learn keeps every server under the server's own
// address even if a stream to the server stands under another address: after that stream
// breaks, the other address may lead elsewhere.
func (l *links) learn(ctx context.Context, m *wire.Metas) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for addr, since := range l.metas {
		if since.IsZero() {
			l.metas[addr] = time.Now()
		}
	}
	for _, s := range m.Servers {
		l.metas[s.Addr] = time.Time{}
		l.startLocked(ctx, s.Addr, false)
	}
}

// forgotten reports that no list has named a learnt address for l.forget, and forgets the
// address. A later list naming the address starts a new goroutine.
func (l *links) forgotten(addr string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	since := l.metas[addr]
	if since.IsZero() || time.Since(since) <= l.forget {
		return false
	}
	delete(l.metas, addr)
	delete(l.tried, addr)
	return true
}

// keep connects to an address again and again: a configured address (always) until ctx ends, a
// learnt address until the address is forgotten. An address that does not answer gets a line in the log
// at first and then every minute.
func (l *links) keep(ctx context.Context, addr string, always bool) {
	cfg := &l.cfg
	wait := 50 * time.Millisecond
	var logged time.Time
	for ctx.Err() == nil {
		began := time.Now()
		err := l.run(ctx, addr)
		if ctx.Err() != nil {
			return
		}
		if refused(err) && meta.KindOf(err) != meta.AccessDenied { // a certificate may be renewed
			// An address learnt from a server may be wrong; a configured address may not.
			if always {
				l.mu.Lock()
				l.err = err
				l.mu.Unlock()
				l.stop()
				return
			}
			cfg.Logger.Warn("a metadata server refuses this chunk server", "address", addr, "error", err)
			wait = 5 * time.Second
		} else if err != nil && (time.Since(began) > time.Minute || time.Since(logged) > time.Minute) {
			cfg.Logger.Warn("the chunk server has no connection to a metadata server, and tries again", "address", addr, "error", err)
			logged = time.Now()
		}
		if !always && l.forgotten(addr) {
			return
		}
		if time.Since(began) > time.Second {
			wait = 50 * time.Millisecond
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, time.Second)
	}
}

// take notes nc as the only stream to a server. false: a stream under another address exists
// already.
func (l *links) take(addr string, nc net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.up[addr] != nil {
		return false
	}
	l.up[addr] = nc
	return true
}

// stands reports that a stream to the server at addr is up.
func (l *links) stands(addr string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.up[addr] != nil
}

func (l *links) run(ctx context.Context, addr string) error {
	cfg := &l.cfg
	self := Config{Name: cfg.Name, Role: wire.RoleChunkServer, Creds: cfg.Creds}
	self.identify()
	if l.stands(addr) {
		return waitFor(ctx, time.Second)
	}
	nc, rd, v, ans, err := self.greet(ctx, addr, self.hello(0, ""))
	if err != nil {
		return err
	}
	defer nc.Close()
	name := addr
	if ans.Host != "" {
		name = ans.Host
	}
	if !l.take(name, nc) {
		nc.Close()
		for until := time.Now().Add(servedLook); l.stands(name) && time.Now().Before(until); {
			if err := waitFor(ctx, time.Second); err != nil {
				return err
			}
		}
		return nil
	}
	defer func() {
		l.mu.Lock()
		delete(l.up, name)
		l.mu.Unlock()
	}()
	send := wire.NewSender(nc, v, nil)
	if cfg.Connected != nil {
		cfg.Connected(true)
		defer cfg.Connected(false)
	}
	// Streams to servers learnt on this stream may outlive the stream.
	others := ctx
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	defer stop()
	var ack atomic.Pointer[wire.Reported]
	kick := make(chan struct{}, 1)
	more := func() <-chan struct{} { return nil }
	if cfg.More != nil {
		more = cfg.More
	}
	wg.Go(func() {
		for {
			next := more()
			r := cfg.Report()
			if cfg.Events != nil {
				var seen uint64
				if a := ack.Load(); a != nil && a.Generation == r.Generation {
					seen = a.Seq
				}
				r.Events = cfg.Events(seen, wire.MaxEvents)
			}
			r.Stamp = uint64(process.Uptime())
			if send.Send(0, &r) != nil {
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-kick: // more events wait
			case <-next:
			case <-time.After(cfg.Interval):
			}
		}
	})
	for {
		t, id, body, err := rd.Next()
		if err != nil {
			return err
		}
		switch t {
		case wire.TReported:
			m := new(wire.Reported)
			if err := wire.Decode(body, m); err != nil {
				return err
			}
			ack.Store(m)
			if cfg.Clock != nil && m.Now != 0 {
				cfg.Clock(name, time.Duration(m.Stamp), m.Now)
			}
			if cfg.Events != nil && len(cfg.Events(m.Seq, 1)) > 0 {
				select {
				case kick <- struct{}{}:
				default:
				}
			}
		case wire.TMetas:
			m := new(wire.Metas)
			if err := wire.Decode(body, m); err != nil {
				return err
			}
			l.learn(others, m)
		case wire.TOrder:
			var m wire.Order
			if err := wire.Decode(body, &m); err != nil {
				return err
			}
			if m.Order.Kind == meta.OrderKeys {
				// Carry out a keys order before reading on: later orders may depend on the
				// keys.
				answerOrder(send, id, cfg.Order(ctx, m.Order))
				continue
			}
			if takesLong(m.Order.Kind) {
				if l.waiting.Add(1) > maxWaiting {
					l.waiting.Add(-1)
					answerOrder(send, id, meta.OrderResult{Err: meta.ResourceExceeded, Detail: "too many orders wait for their turn"})
					continue
				}
				wg.Go(func() {
					defer l.waiting.Add(-1)
					select {
					case l.long <- struct{}{}:
					case <-ctx.Done():
						return
					}
					defer func() { <-l.long }()
					answerOrder(send, id, cfg.Order(ctx, m.Order))
				})
				continue
			}
			l.slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-l.slots }()
				answerOrder(send, id, cfg.Order(ctx, m.Order))
			})
		}
	}
}

// answerOrder sends the result of an order. If the result does not fit into a frame,
// answerOrder reports that the order failed.
func answerOrder(send *wire.Sender, id uint64, r meta.OrderResult) {
	if err := send.Send(id, &wire.OrderRe{Result: r}); errors.Is(err, meta.ResourceExceeded) {
		send.Send(id, &wire.OrderRe{Result: meta.OrderResult{Err: meta.ResourceExceeded, Detail: err.Error()}})
	}
}

// waitFor sleeps.
func waitFor(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
