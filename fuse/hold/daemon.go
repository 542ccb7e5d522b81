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
	// Patience is how long a mount may be without a server that settles. Then the holder gives
	// the mount up, and the mount's users get errors. 0: 30 s.
	Patience time.Duration
	// Settle is how long a process must serve to count as able to serve. After servers that
	// end earlier, the holder starts others with growing pauses, until Patience has passed. 0:
	// 5 s.
	Settle time.Duration
	// Respawn makes the holder start a successor itself, with the predecessor's command.
	// Without Respawn a supervisor starts the successor.
	Respawn bool
	// Once ends the holder when the holder has no mount and no connection.
	Once   bool
	Logger *slog.Logger
	// Outlast is how long an ending holder goes on while a mount has no server, or a leaving
	// server. The holder ends as soon as each mount is served or has ended. 0: the holder ends
	// at once.
	Outlast time.Duration
}

const (
	defaultPatience = 30 * time.Second
	defaultSettle   = 5 * time.Second
	yieldFor        = 30 * time.Second       // time for a process to go after a request to yield
	respawnPause    = 200 * time.Millisecond // more before each successor
	maxRespawnPause = 5 * time.Second
	lastAnswers     = 2 * time.Second // time for a process to read last answers of an ending daemon
	acceptAgain     = 100 * time.Millisecond
	outlastLook     = 20 * time.Millisecond
	inspectEvery    = 100 * time.Millisecond // between two inspections of a mount and the mount's server
	dyingLooks      = 5                      // half a second: a process with much memory ends slowly
	dyingMost       = 20 * time.Second       // afterwards cantEnd no longer checks the threads
)

// Daemon is the holder. A Daemon serves one socket.
type Daemon struct {
	cfg       Config
	self      process.Process // the process to which sessions are bound
	dyingMost time.Duration
	openAbort func(connection uint64) (*os.File, error) // opens the connection's abort file

	mu          sync.Mutex
	mounts      map[string]*record
	connections map[*connection]bool
	ending      bool          // see Config.Outlast
	starts      int           // successors, so far
	over        chan struct{} // closed with Once, at the end of the last mount
	wg          sync.WaitGroup
	ctx         context.Context
}

// NewDaemon makes a holder without mounts.
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
		// After this holder another process may hold the mounts, received from the mounts'
		// servers. So the end of this holder must not end the sessions.
		self.PIDNS = ""
	}
	return &Daemon{
		cfg: cfg, self: self, dyingMost: dyingMost, openAbort: kernel.OpenAbort, ctx: context.Background(),
		mounts: make(map[string]*record), connections: make(map[*connection]bool), over: make(chan struct{}),
	}, nil
}

// Serve holds mounts until ctx ends and then for Outlast at most; with Once it also returns
// when no mount and no connection is left. A mount then ends with the daemon, unless another
// process has the mount's device, too.
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
			d.cfg.Logger.Error("the holder's socket fails: no process can connect", "err", err)
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
				_ = conn.socket.CloseRead() // the queued answers are still written
			}
			d.mu.Unlock()
			return err
		}
		pid, err := trusted(c)
		if err != nil {
			d.cfg.Logger.Warn("the holder refused a connection", "err", err)
			c.Close()
			continue
		}
		d.accept(c, pid)
	}
}

// outlast waits until each mount has a server that stays, for Outlast at most. A server has
// the mount's descriptors, too, and gives the descriptors to the next holder.
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
			d.cfg.Logger.Warn("no other holder has some mounts: this holder goes on until processes serve them", "mounts", alone, "within", d.cfg.Outlast)
		}
		select {
		case <-t.C:
		case <-late:
			d.cfg.Logger.Error("mounts end with this holder: no process came to serve them", "mounts", alone)
			return
		case <-ctx.Done():
			return
		}
	}
}

// temporary reports whether accept(2) failed for lack of a resource, or for one aborted
// connection. Such an error does not end Serve.
func temporary(err error) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED}, func(e error) bool { return errors.Is(err, e) })
}

// start starts the inspection of mounts, until ctx ends.
func (d *Daemon) start(ctx context.Context) {
	d.ctx = ctx
	d.wg.Go(func() { d.watch(ctx) })
}

// accept starts answering one process, until the process disconnects.
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
		// The daemon may end because a process has just put its mount. The daemon first writes
		// the answer to that put: without the answer the process would take the put for failed
		// and end, and the mount would end with both. lastAnswers bounds the wait for a
		// process that does not read.
		_ = c.SetWriteDeadline(time.Now().Add(lastAnswers))
		<-written
		c.Close()
	})
}

// serveRequests answers the requests of one process until the connection ends.
func (d *Daemon) serveRequests(conn *connection) {
	for {
		p, fds, err := readPacket(conn.socket)
		if err != nil {
			return
		}
		if p.Op == "put" && p.Connection == 0 { // the sender does not know the number
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

// put records conn as the server of a mount. The caller holds mu.
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
	d.cfg.Logger.Info("the holder has a mount", "mount", p.Name, "pid", conn.pid, "taken", m.taken)
	d.answerWaiters(m)
}

// answerWaiters handles the processes waiting for a mount that has a server. For a process
// that replaces, the daemon asks the server to go; any other process is refused. The caller
// holds mu.
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

// refuse answers a waiting process with an error. The caller holds mu.
func (d *Daemon) refuse(m *record, t *waiter, err error) {
	m.waiting = slices.DeleteFunc(m.waiting, func(o *waiter) bool { return o == t })
	t.conn.send(&packet{Op: "take", Name: m.name, Kind: meta.KindOf(err), Error: err.Error()})
}

// drop forgets a mount; the processes waiting for the mount may mount. The caller holds mu.
func (d *Daemon) drop(m *record) {
	closeAll(d.forget(m))
	d.endIfOver()
}

// forget removes a mount and returns the mount's files for closing. The caller holds mu.
func (d *Daemon) forget(m *record) []*os.File {
	delete(d.mounts, m.name)
	for _, t := range m.waiting {
		t.conn.send(&packet{Op: "take", Name: m.name})
	}
	m.waiting = nil
	return []*os.File{m.device, m.memory}
}

// endIfOver ends a daemon with Once when no mount and no connection is left. The caller holds
// mu.
func (d *Daemon) endIfOver() {
	if d.cfg.Once && len(d.mounts) == 0 && len(d.connections) == 0 {
		select {
		case <-d.over:
		default:
			close(d.over)
		}
	}
}

// disconnected handles the end of a process's connection. The caller holds mu.
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
