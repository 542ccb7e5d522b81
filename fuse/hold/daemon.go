package hold

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// Config says how a holder behaves.
type Config struct {
	// Patience is how long a mount may be without a process that serves it and settles.
	// Then it is given up, and its users get errors. 0: 30 s.
	Patience time.Duration
	// Settle is how long a process must serve until it counts as one that can. Those
	// that end earlier are followed by others with growing pauses, while Patience
	// runs. 0: 5 s.
	Settle time.Duration
	// Respawn has the holder start a successor itself, as the predecessor was
	// started; else a supervisor does that.
	Respawn bool
	// Once ends the holder when it has no mount, and no process is connected.
	Once   bool
	Logger *slog.Logger
	// Outlast is for how long a holder that is to end goes on while no other process has
	// one of its mounts: until a process serves it, or it has ended. 0: not at all.
	Outlast time.Duration
}

const (
	defaultPatience = 30 * time.Second
	defaultSettle   = 5 * time.Second
	yieldFor        = 30 * time.Second       // a process that was asked may take to go
	respawnPause    = 200 * time.Millisecond // more before each successor
	maxRespawnPause = 5 * time.Second
	lastAnswers     = 2 * time.Second // a process may take to read them when the daemon ends
	acceptAgain     = 100 * time.Millisecond
	outlastLook     = 20 * time.Millisecond
	inspectEvery    = 100 * time.Millisecond // between looks at a mount and its server
	dyingLooks      = 5                      // half a second: a process with much memory takes its time
	dyingMost       = 20 * time.Second       // then it is not asked any more whether its threads run
)

// Daemon is the holder: it serves one socket.
type Daemon struct {
	cfg       Config
	self      process.Process // as sessions know it
	dyingMost time.Duration
	openAbort func(connection uint64) (*os.File, error) // opens what aborts it

	mu          sync.Mutex
	mounts      map[string]*record
	connections map[*connection]bool
	ending      bool          // see Config.Outlast
	starts      int           // successors, so far
	over        chan struct{} // closed with Once, at the end of the last mount
	wg          sync.WaitGroup
	ctx         context.Context
}

// NewDaemon makes a holder that holds nothing yet.
func NewDaemon(cfg Config) (*Daemon, error) {
	if cfg.Patience == 0 {
		cfg.Patience = defaultPatience
	}
	if cfg.Settle == 0 {
		cfg.Settle = defaultSettle
	}
	self, err := process.Self()
	if err != nil {
		return nil, err
	}
	kernel.OutliveNamespace(cfg.Logger)
	if !cfg.Once {
		// Another process may hold after this one, what the mounts' processes give it: that
		// this one ended says nothing of the sessions.
		self.PIDNS = ""
	}
	return &Daemon{
		cfg: cfg, self: self, dyingMost: dyingMost, openAbort: kernel.OpenAbort, ctx: context.Background(),
		mounts: make(map[string]*record), connections: make(map[*connection]bool), over: make(chan struct{}),
	}, nil
}

// Serve holds until ctx ends and then for Outlast, or with Once until nothing is
// left. A mount ends with the daemon then, unless another process has it, too.
func (d *Daemon) Serve(ctx context.Context, l *net.UnixListener) error {
	stopping := ctx
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer d.wg.Wait()
	defer cancel()
	d.start(ctx)
	d.wg.Go(func() {
		select {
		case <-stopping.Done():
			d.outlast(ctx)
			cancel()
		case <-ctx.Done():
		}
	})
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	go func() { // ends with Serve
		select {
		case <-d.over:
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		c, err := l.AcceptUnix()
		if err != nil && ctx.Err() == nil && temporary(err) {
			d.cfg.Logger.Error("nobody can be heard", "err", err)
			select {
			case <-time.After(acceptAgain):
			case <-ctx.Done():
			}
			continue
		}
		if err != nil {
			if ctx.Err() != nil {
				err = nil
			}
			cancel()
			d.mu.Lock()
			for conn := range d.connections {
				_ = conn.socket.CloseRead() // the answers that are queued are still written
			}
			d.mu.Unlock()
			return err
		}
		pid, err := trusted(c)
		if err != nil {
			d.cfg.Logger.Warn("refused", "err", err)
			c.Close()
			continue
		}
		d.accept(c, pid)
	}
}

// outlast waits until another process has each mount, too. A process that serves one has it,
// and gives it to the next holder.
func (d *Daemon) outlast(ctx context.Context) {
	late := time.After(d.cfg.Outlast)
	t := time.NewTicker(outlastLook)
	defer t.Stop()
	for said := false; ; said = true {
		var alone []string
		d.mu.Lock()
		d.ending = true
		for name, m := range d.mounts {
			if m.server == nil || m.leaving {
				alone = append(alone, name)
			}
		}
		d.mu.Unlock()
		if len(alone) == 0 || d.cfg.Outlast == 0 {
			return
		}
		slices.Sort(alone)
		if !said {
			d.cfg.Logger.Warn("nobody else has some mounts: this holder goes on until somebody serves them", "mounts", alone, "within", d.cfg.Outlast)
		}
		select {
		case <-t.C:
		case <-late:
			d.cfg.Logger.Error("mounts end with their holder: nobody came to serve them", "mounts", alone)
			return
		case <-ctx.Done():
			return
		}
	}
}

// temporary: accept(2) failed for want of something; mounts are not given up for that.
func temporary(err error) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED}, func(e error) bool { return errors.Is(err, e) })
}

// start starts what the daemon does by itself, until ctx ends.
func (d *Daemon) start(ctx context.Context) {
	d.ctx = ctx
	d.wg.Go(func() { d.watch(ctx) })
}

// accept answers one process until it goes.
func (d *Daemon) accept(c *net.UnixConn, pid int) {
	roomy(c)
	conn := &connection{socket: c, pid: pid, queue: make(chan message, maxQueued)}
	d.mu.Lock()
	d.connections[conn] = true
	d.mu.Unlock()
	written := make(chan struct{})
	d.wg.Go(func() {
		defer close(written)
		conn.writeQueued()
	})
	d.wg.Go(func() {
		d.serveRequests(conn)
		if d.ctx.Err() == nil {
			c.Close()
		}
		d.mu.Lock()
		delete(d.connections, conn)
		d.disconnected(conn)
		close(conn.queue)
		d.endIfOver()
		d.mu.Unlock()
		// A daemon that ends because a process serves now first writes its answer to that
		// process: without the answer the process takes its put for failed and ends, and the
		// mount ends with both. A process that reads nothing is not waited for.
		_ = c.SetWriteDeadline(time.Now().Add(lastAnswers))
		<-written
		c.Close()
	})
}

// serveRequests answers the requests of one process until its connection ends.
func (d *Daemon) serveRequests(conn *connection) {
	for {
		p, fds, err := readPacket(conn.socket)
		if err != nil {
			return
		}
		if p.Op == "put" && p.Connection == 0 { // it does not know
			p.Connection = kernel.ConnectionAt(p.Name)
		}
		d.mu.Lock()
		if err := d.answer(conn, p, fds); err != nil {
			conn.send(&packet{Op: p.Op, Name: p.Name, Kind: meta.KindOf(err), Error: err.Error()})
		}
		d.mu.Unlock()
	}
}

// answer serves a request; an error is told. Caller holds mu.
func (d *Daemon) answer(conn *connection, p *packet, fds []*os.File) error {
	m := d.mounts[p.Name]
	used := false
	defer func() {
		if !used {
			closeAll(fds)
		}
	}()
	if conn.pid == 0 && (p.Op == "put" || p.Op == "take") {
		return meta.E("hold", meta.NotSupported, p.Name, errors.New("this holder can't see the process that asks, so it could not tell that it was killed: the holder must run in the machine's name space of processes (in a pod: hostPID: true)"))
	}
	switch p.Op {
	case "hello":
		if p.Version != Version {
			return meta.E("hold", meta.Version, "", fmt.Errorf("version %d, this holder speaks %d", p.Version, Version))
		}
		conn.send(&packet{Op: p.Op, Version: Version, Process: &d.self, Patience: d.cfg.Patience.Milliseconds()})
	case "put":
		if len(fds) != 2 || p.Name == "" || p.Command == nil {
			return meta.E("hold", meta.Protocol, p.Name, fmt.Errorf("%d descriptors, not 2", len(fds)))
		}
		if m != nil {
			for _, other := range []*connection{m.server, m.successor} {
				if other != nil && other != conn {
					return meta.E("hold", meta.Busy, p.Name, fmt.Errorf("process %d serves it, or is about to", other.pid))
				}
			}
		}
		used = true
		d.put(conn, p, fds)
	case "take":
		if m == nil {
			conn.send(&packet{Op: p.Op, Name: p.Name})
			return nil
		}
		if m.server != nil && !p.Replace {
			return busyServed(m)
		}
		m.waiting = append(m.waiting, &waiter{conn: conn, replace: p.Replace, until: time.Now().Add(yieldFor)})
		if m.unserved() {
			d.handOver(m)
		}
		d.answerWaiters(m)
	case "list", "show":
		d.list(conn, p)
	case "leave":
		if m != nil && m.server == conn {
			m.leaving = true
		}
		conn.send(&packet{Op: p.Op, Name: p.Name, Found: m != nil})
	case "drop":
		if m != nil && (m.server == conn || m.successor == conn) {
			d.drop(m)
		}
		conn.send(&packet{Op: p.Op, Name: p.Name, Found: m != nil})
	default:
		return meta.E("hold", meta.NotSupported, p.Op, nil)
	}
	return nil
}

func busyServed(m *record) error {
	return meta.E("take over mount", meta.Busy, m.name, fmt.Errorf("process %d serves it; use --replace", m.server.pid))
}

// put notes that a process serves a mount. Caller holds mu.
func (d *Daemon) put(conn *connection, p *packet, fds []*os.File) {
	m := d.mounts[p.Name]
	if m == nil {
		m = &record{name: p.Name, taken: -1}
		d.mounts[p.Name] = m
	}
	closeAll([]*os.File{m.device, m.memory})
	m.device, m.memory, m.number, m.command = fds[0], fds[1], p.Connection, *p.Command
	m.taken++
	m.server, m.successor, m.starting, m.stillLooks, m.yielded, m.leaving, m.servedSince = conn, nil, 0, 0, false, false, time.Now()
	m.aborted = false
	conn.send(&packet{Op: p.Op, Name: p.Name, Found: true})
	d.cfg.Logger.Info("held", "mount", p.Name, "pid", conn.pid, "taken", m.taken)
	d.answerWaiters(m)
}

// answerWaiters tells the processes that wait for a mount that is served what becomes of it:
// one that replaces the server has the server asked to go, others are refused. Caller holds mu.
func (d *Daemon) answerWaiters(m *record) {
	if m.server == nil {
		return
	}
	for _, t := range slices.Clone(m.waiting) {
		if !t.replace {
			d.refuse(m, t, busyServed(m))
		} else if !m.yielded {
			m.yielded = true
			m.server.send(&packet{Op: "yield", Name: m.name})
		}
	}
}

// list answers list and show. Caller holds mu.
func (d *Daemon) list(conn *connection, p *packet) {
	ok := &packet{Op: p.Op, Name: p.Name}
	room := maxList
	for _, name := range slices.Sorted(maps.Keys(d.mounts)) {
		if p.Op == "show" && name != p.Name || p.Op == "list" && name <= p.Name {
			continue
		}
		m := d.mounts[name]
		t := Mount{Name: name, Awaited: m.server == nil && !m.unserved(), Taken: m.taken}
		if m.server != nil {
			t.PID = m.server.pid
		}
		if p.Op == "show" {
			t.Command = m.command
		} else if b, err := json.Marshal(t); err == nil {
			if room -= len(b); room < 0 && len(ok.Mounts) > 0 {
				ok.More = true
				break
			}
		}
		ok.Mounts = append(ok.Mounts, t)
	}
	ok.Found = len(ok.Mounts) > 0
	conn.send(ok)
}

// refuse tells a waiting process that it can't have the mount. Caller holds mu.
func (d *Daemon) refuse(m *record, t *waiter, err error) {
	m.waiting = slices.DeleteFunc(m.waiting, func(o *waiter) bool { return o == t })
	t.conn.send(&packet{Op: "take", Name: m.name, Kind: meta.KindOf(err), Error: err.Error()})
}

// drop forgets a mount; the processes that wait for it may mount. Caller holds mu.
func (d *Daemon) drop(m *record) {
	closeAll(d.forget(m))
	d.endIfOver()
}

// forget gives what is to be closed of a mount that is held no more. Caller
// holds mu.
func (d *Daemon) forget(m *record) []*os.File {
	delete(d.mounts, m.name)
	for _, t := range m.waiting {
		t.conn.send(&packet{Op: "take", Name: m.name})
	}
	m.waiting = nil
	return []*os.File{m.device, m.memory}
}

// endIfOver ends a holder that holds once. Caller holds mu.
func (d *Daemon) endIfOver() {
	if d.cfg.Once && len(d.mounts) == 0 && len(d.connections) == 0 {
		select {
		case <-d.over:
		default:
			close(d.over)
		}
	}
}

// disconnected notes that a process is gone. Caller holds mu.
func (d *Daemon) disconnected(conn *connection) {
	for _, m := range d.mounts {
		m.waiting = slices.DeleteFunc(m.waiting, func(t *waiter) bool { return t.conn == conn })
		if m.successor == conn {
			m.successor = nil
			d.handOver(m)
		}
		if m.server == conn {
			d.lostServer(m)
		}
	}
}
