package fuse

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// The holder: a small process that has the descriptors of mounts, so that they
// outlive whoever serves them.
//
// It speaks JSON in packets over a Unix socket (SOCK_SEQPACKET), with descriptors
// beside them, to processes of the same user (or root) only, which make sure of
// the same. A request and its answer are one packet each; the one thing that the
// holder says by itself is "yield", to a process that serves a mount which
// another one is to take over.
//
//	hello                   -> process of the holder, which sessions are bound to
//	put NAME + 2 fds        the sender serves NAME from now on
//	take NAME [replace]     -> 2 fds once nobody serves it, or found=false
//	show NAME               -> who serves it, and how that was started
//	list [NAME]             -> names behind NAME, and who serves them
//	leave NAME              the sender is about to end; answered, the mount is kept
//	drop NAME               it was unmounted
//	yield NAME              from the holder
//
// Who serves is known by its connection: it ends with the last thread of the
// process. So when it ends, nothing of the process writes to the device any more.
//
// Of each mount at most one process serves it (link) and at most one is about to
// (taker), never both: taking needs that nobody serves, and while somebody takes
// nobody else may put.

// Start is how a process that serves a mount was started, and how its successor
// is.
type Start struct {
	Path string   `json:"path"`
	Args []string `json:"args"` // with the name of the program
	Env  []string `json:"env"`
	Dir  string   `json:"dir"`
	OOM  int      `json:"oom,omitempty"` // its /proc/PID/oom_score_adj
}

// Held is a mount that a holder has, as it tells of it.
type Held struct {
	Name string `json:"name"`          // the mount point
	PID  int    `json:"pid,omitempty"` // of who serves it; 0: nobody
	// Awaited: nobody serves it yet, but somebody is about to, or may come back.
	Awaited bool  `json:"awaited,omitempty"`
	Taken   int   `json:"taken"` // how often it was taken over
	Start   Start `json:"start,omitzero"`
}

// heldMount is what a holder knows of a mount.
type heldMount struct {
	name           string
	device, memory *os.File
	connection     uint64 // the kernel's number of it; 0: not known
	start          Start
	taken          int // -1 before it is put

	// INVARIANT: link or taker is nil.
	link    *holdLink // of who serves it
	taker   *holdLink // of who is about to
	waiting []*holdTake
	since   time.Time // of the last put
	yielded bool      // who serves was asked to go
	leaving bool      // who serves said that it goes
	// down is since when nobody serves it, or only such as don't settle.
	down      time.Time
	respawned int // successors that were started since somebody settled
	starting  int // which of them has not come yet; 0: none
	looks     int // at who serves, that it was dying and could not end
	// aborted: it was given up for its users; what was written to it and is not durable
	// is kept for somebody who sees to that.
	aborted bool
	dying   time.Time // since when it was seen so; look's own
}

// free: it may be given to one who takes it over.
func (m *heldMount) free() bool { return m.link == nil && m.taker == nil }

type holdTake struct {
	link    *holdLink
	replace bool
	until   time.Time
}

// holdLink is a holder's connection to a process. What is said to it waits in a
// queue: nobody waits for a process that doesn't read.
type holdLink struct {
	conn *net.UnixConn
	pid  int
	out  chan holdOut
}

type holdOut struct {
	packet []byte
	fds    []*os.File // its own
}

// maxSaid is how much may wait for a process: it asks one thing at a time.
const maxSaid = 8

// say queues a packet, with copies of descriptors. A process that doesn't read,
// or gets no descriptors, is let go. Caller holds the holder's mu.
func (l *holdLink) say(p *holdPacket, fds ...*os.File) {
	o := holdOut{packet: p.encode()}
	for _, f := range fds {
		c, err := dupFile(int(f.Fd()))
		if err != nil {
			closeAll(o.fds)
			l.conn.Close()
			return
		}
		o.fds = append(o.fds, c)
	}
	select {
	case l.out <- o:
	default:
		closeAll(o.fds)
		l.conn.Close()
	}
}

// writer says what is queued until the queue is closed.
func (l *holdLink) writer() {
	for o := range l.out {
		if err := writePacket(l.conn, o.packet, o.fds...); err != nil {
			l.conn.Close()
		}
		closeAll(o.fds)
	}
}

// HolderConfig says how a holder behaves.
type HolderConfig struct {
	// Patience is how long a mount may be without anybody who serves it and settles.
	// Then it is given up, and who uses it gets errors. 0: 30 s.
	Patience time.Duration
	// Settle is how long a process must serve until it counts as one that can. Those
	// that end earlier are followed by others with growing pauses, while Patience
	// runs. 0: 5 s.
	Settle time.Duration
	// Respawn has the holder start a successor itself, as the predecessor was
	// started; else a supervisor does that.
	Respawn bool
	// Once ends the holder when it has no mount, and nobody is connected.
	Once   bool
	Logger *slog.Logger
	// Outlast is for how long a holder that is to end goes on while nobody else has
	// one of its mounts: until somebody serves it, or it has ended. 0: not at all.
	Outlast time.Duration
}

const (
	defaultPatience = 30 * time.Second
	defaultSettle   = 5 * time.Second
	yieldFor        = 30 * time.Second       // a process that was asked may take to go
	respawnPause    = 200 * time.Millisecond // more before each successor
	maxRespawnPause = 5 * time.Second
	acceptAgain     = 100 * time.Millisecond
	outlastLook     = 20 * time.Millisecond
	watchHeld       = 100 * time.Millisecond // between looks at who serves
	dyingLooks      = 5                      // half a second: a process with much memory takes its time
	dyingMost       = 20 * time.Second       // then it is not asked any more whether its threads run
)

// Holder serves one socket.
type Holder struct {
	cfg       HolderConfig
	self      process.Process // as sessions know it
	dyingMost time.Duration
	abort     func(connection uint64) (*os.File, error) // opens what aborts it

	mu     sync.Mutex
	mounts map[string]*heldMount
	links  map[*holdLink]bool
	ending bool          // see HolderConfig.Outlast
	starts int           // successors, so far
	over   chan struct{} // closed with Once, at the end of the last mount
	wg     sync.WaitGroup
	ctx    context.Context
}

// NewHolder makes a holder that holds nothing yet.
func NewHolder(cfg HolderConfig) (*Holder, error) {
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
	outliveNamespace(cfg.Logger)
	if !cfg.Once {
		// Another process may hold after this one, what the mounts' processes give it: that
		// this one ended says nothing of the sessions.
		self.PIDNS = ""
	}
	return &Holder{
		cfg: cfg, self: self, dyingMost: dyingMost, abort: openAbort, ctx: context.Background(),
		mounts: make(map[string]*heldMount), links: make(map[*holdLink]bool), over: make(chan struct{}),
	}, nil
}

// Serve holds until ctx ends and then for Outlast, or with Once until nothing is
// left. What it holds then ends with the process, unless somebody else has it, too.
func (h *Holder) Serve(ctx context.Context, l *net.UnixListener) error {
	stopping := ctx
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer h.wg.Wait()
	defer cancel()
	h.begin(ctx)
	h.wg.Go(func() {
		select {
		case <-stopping.Done():
			h.outlast(ctx)
			cancel()
		case <-ctx.Done():
		}
	})
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	go func() { // ends with Serve
		select {
		case <-h.over:
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		c, err := l.AcceptUnix()
		if err != nil && ctx.Err() == nil && passing(err) {
			h.cfg.Logger.Error("nobody can be heard", "err", err)
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
			h.mu.Lock()
			for link := range h.links {
				link.conn.Close()
			}
			h.mu.Unlock()
			return err
		}
		pid, err := trusted(c)
		if err != nil {
			h.cfg.Logger.Warn("refused", "err", err)
			c.Close()
			continue
		}
		h.join(c, pid)
	}
}

// outlast waits until somebody else has each mount, too. Who serves one has it, and
// gives it to the next holder.
func (h *Holder) outlast(ctx context.Context) {
	late := time.After(h.cfg.Outlast)
	t := time.NewTicker(outlastLook)
	defer t.Stop()
	for said := false; ; said = true {
		var alone []string
		h.mu.Lock()
		h.ending = true
		for name, m := range h.mounts {
			if m.link == nil || m.leaving {
				alone = append(alone, name)
			}
		}
		h.mu.Unlock()
		if len(alone) == 0 || h.cfg.Outlast == 0 {
			return
		}
		slices.Sort(alone)
		if !said {
			h.cfg.Logger.Warn("nobody else has some mounts: this holder goes on until somebody serves them", "mounts", alone, "within", h.cfg.Outlast)
		}
		select {
		case <-t.C:
		case <-late:
			h.cfg.Logger.Error("mounts end with their holder: nobody came to serve them", "mounts", alone)
			return
		case <-ctx.Done():
			return
		}
	}
}

// passing: accept(2) failed for want of something; mounts are not given up for that.
func passing(err error) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED}, func(e error) bool { return errors.Is(err, e) })
}

// begin starts what a holder does by itself, until ctx ends.
func (h *Holder) begin(ctx context.Context) {
	h.ctx = ctx
	h.wg.Go(func() { h.watch(ctx) })
}

// join talks with one process until it goes.
func (h *Holder) join(c *net.UnixConn, pid int) {
	roomy(c)
	link := &holdLink{conn: c, pid: pid, out: make(chan holdOut, maxSaid)}
	h.mu.Lock()
	h.links[link] = true
	h.mu.Unlock()
	h.wg.Go(link.writer)
	h.wg.Go(func() {
		h.talk(link)
		c.Close()
		h.mu.Lock()
		delete(h.links, link)
		h.left(link)
		close(link.out)
		h.endIfOver()
		h.mu.Unlock()
	})
}

// talk answers one process until it goes.
func (h *Holder) talk(link *holdLink) {
	for {
		p, fds, err := readPacket(link.conn)
		if err != nil {
			return
		}
		if p.Op == "put" && p.Connection == 0 { // it does not know
			p.Connection = connectionAt(p.Name)
		}
		h.mu.Lock()
		if err := h.answer(link, p, fds); err != nil {
			link.say(&holdPacket{Op: p.Op, Name: p.Name, Kind: meta.KindOf(err), Error: err.Error()})
		}
		h.mu.Unlock()
	}
}

// answer serves a request; an error is told. Caller holds mu.
func (h *Holder) answer(link *holdLink, p *holdPacket, fds []*os.File) error {
	m := h.mounts[p.Name]
	used := false
	defer func() {
		if !used {
			closeAll(fds)
		}
	}()
	if link.pid == 0 && (p.Op == "put" || p.Op == "take") {
		return meta.E("hold", meta.NotSupported, p.Name, errors.New("this holder can't see the process that asks, so it could not tell that it was killed: the holder must run in the machine's name space of processes (in a pod: hostPID: true)"))
	}
	switch p.Op {
	case "hello":
		if p.Version != HoldVersion {
			return meta.E("hold", meta.Version, "", fmt.Errorf("version %d, this holder speaks %d", p.Version, HoldVersion))
		}
		link.say(&holdPacket{Op: p.Op, Version: HoldVersion, Process: &h.self, Patience: h.cfg.Patience.Milliseconds()})
	case "put":
		if len(fds) != 2 || p.Name == "" || p.Start == nil {
			return meta.E("hold", meta.Protocol, p.Name, fmt.Errorf("%d descriptors, not 2", len(fds)))
		}
		if m != nil {
			for _, other := range []*holdLink{m.link, m.taker} {
				if other != nil && other != link {
					return meta.E("hold", meta.Busy, p.Name, fmt.Errorf("process %d serves it, or is about to", other.pid))
				}
			}
		}
		used = true
		h.put(link, p, fds)
	case "take":
		if m == nil {
			link.say(&holdPacket{Op: p.Op, Name: p.Name})
			return nil
		}
		if m.link != nil && !p.Replace {
			return busyServed(m)
		}
		m.waiting = append(m.waiting, &holdTake{link: link, replace: p.Replace, until: time.Now().Add(yieldFor)})
		if m.free() {
			h.next(m)
		}
		h.urge(m)
	case "list", "show":
		h.list(link, p)
	case "leave":
		if m != nil && m.link == link {
			m.leaving = true
		}
		link.say(&holdPacket{Op: p.Op, Name: p.Name, Found: m != nil})
	case "drop":
		if m != nil && (m.link == link || m.taker == link) {
			h.drop(m)
		}
		link.say(&holdPacket{Op: p.Op, Name: p.Name, Found: m != nil})
	default:
		return meta.E("hold", meta.NotSupported, p.Op, nil)
	}
	return nil
}

func busyServed(m *heldMount) error {
	return meta.E("take over mount", meta.Busy, m.name, fmt.Errorf("process %d serves it; use --replace", m.link.pid))
}

// put notes who serves a mount. Caller holds mu.
func (h *Holder) put(link *holdLink, p *holdPacket, fds []*os.File) {
	m := h.mounts[p.Name]
	if m == nil {
		m = &heldMount{name: p.Name, taken: -1}
		h.mounts[p.Name] = m
	}
	closeAll([]*os.File{m.device, m.memory})
	m.device, m.memory, m.connection, m.start = fds[0], fds[1], p.Connection, *p.Start
	m.taken++
	m.link, m.taker, m.starting, m.looks, m.yielded, m.leaving, m.since = link, nil, 0, 0, false, false, time.Now()
	m.aborted = false
	link.say(&holdPacket{Op: p.Op, Name: p.Name, Found: true})
	h.cfg.Logger.Info("held", "mount", p.Name, "pid", link.pid, "taken", m.taken)
	h.urge(m)
}

// urge tells those who wait for a mount that is served what becomes of it: who is
// to replace its server does so, others can't have it. Caller holds mu.
func (h *Holder) urge(m *heldMount) {
	if m.link == nil {
		return
	}
	for _, t := range slices.Clone(m.waiting) {
		if !t.replace {
			h.refuse(m, t, busyServed(m))
		} else if !m.yielded {
			m.yielded = true
			m.link.say(&holdPacket{Op: "yield", Name: m.name})
		}
	}
}

// list answers list and show. Caller holds mu.
func (h *Holder) list(link *holdLink, p *holdPacket) {
	ok := &holdPacket{Op: p.Op, Name: p.Name}
	room := maxList
	for _, name := range slices.Sorted(maps.Keys(h.mounts)) {
		if p.Op == "show" && name != p.Name || p.Op == "list" && name <= p.Name {
			continue
		}
		m := h.mounts[name]
		t := Held{Name: name, Awaited: m.link == nil && !m.free(), Taken: m.taken}
		if m.link != nil {
			t.PID = m.link.pid
		}
		if p.Op == "show" {
			t.Start = m.start
		} else if b, err := json.Marshal(t); err == nil {
			if room -= len(b); room < 0 && len(ok.Mounts) > 0 {
				ok.More = true
				break
			}
		}
		ok.Mounts = append(ok.Mounts, t)
	}
	ok.Found = len(ok.Mounts) > 0
	link.say(ok)
}

// refuse tells one who waits for a mount that it is not to be had. Caller holds mu.
func (h *Holder) refuse(m *heldMount, t *holdTake, err error) {
	m.waiting = slices.DeleteFunc(m.waiting, func(o *holdTake) bool { return o == t })
	t.link.say(&holdPacket{Op: "take", Name: m.name, Kind: meta.KindOf(err), Error: err.Error()})
}

// drop forgets a mount; those who wait for it may mount. Caller holds mu.
func (h *Holder) drop(m *heldMount) {
	closeAll(h.forget(m))
	h.endIfOver()
}

// forget gives what is to be closed of a mount that is held no more. Caller
// holds mu.
func (h *Holder) forget(m *heldMount) []*os.File {
	delete(h.mounts, m.name)
	for _, t := range m.waiting {
		t.link.say(&holdPacket{Op: "take", Name: m.name})
	}
	m.waiting = nil
	return []*os.File{m.device, m.memory}
}

// endIfOver ends a holder that holds once. Caller holds mu.
func (h *Holder) endIfOver() {
	if h.cfg.Once && len(h.mounts) == 0 && len(h.links) == 0 {
		select {
		case <-h.over:
		default:
			close(h.over)
		}
	}
}

// left notes that a process is gone. Caller holds mu.
func (h *Holder) left(link *holdLink) {
	for _, m := range h.mounts {
		m.waiting = slices.DeleteFunc(m.waiting, func(t *holdTake) bool { return t.link == link })
		if m.taker == link {
			m.taker = nil
			h.next(m)
		}
		if m.link == link {
			h.orphan(m)
		}
	}
}

// orphan has somebody else serve a mount. Caller holds mu.
func (h *Holder) orphan(m *heldMount) {
	h.cfg.Logger.Warn("nobody serves a mount", "mount", m.name, "pid", m.link.pid)
	// A process that ends again and again soon after it began, for what it is asked
	// perhaps, is as none.
	if m.yielded || m.down.IsZero() || time.Since(m.since) >= h.cfg.Settle {
		m.down, m.respawned = time.Now(), 0
	}
	m.link, m.looks, m.yielded, m.leaving = nil, 0, false, false
	h.next(m)
}

// next gives a mount to one who waits for it, or starts one. Caller holds mu.
func (h *Holder) next(m *heldMount) {
	if !m.free() {
		return
	}
	if len(m.waiting) > 0 {
		m.taker = m.waiting[0].link
		m.waiting = m.waiting[1:]
		m.taker.say(&holdPacket{Op: "take", Name: m.name, Found: true}, m.device, m.memory)
		return
	}
	if h.cfg.Respawn && m.start.Path != "" && h.ctx.Err() == nil && !h.ending && m.starting == 0 {
		pause := min(time.Duration(m.respawned)*respawnPause, maxRespawnPause)
		m.respawned++
		h.starts++
		m.starting = h.starts
		h.respawn(m, m.starting, pause)
	}
}

// respawn starts a successor after a pause. Caller holds mu.
func (h *Holder) respawn(m *heldMount, which int, pause time.Duration) {
	h.wg.Go(func() {
		select {
		case <-time.After(pause):
		case <-h.ctx.Done():
			return
		}
		h.mu.Lock()
		needed := h.mounts[m.name] == m && m.free()
		if !needed && m.starting == which { // who has it now may go: then another is started
			m.starting = 0
		}
		start := m.start
		h.mu.Unlock()
		if !needed {
			return
		}
		cmd := exec.Cmd{
			Path: start.Path, Args: start.Args, Env: append(slices.Clone(start.Env), TakeoverEnv+"=1", fmt.Sprint(OOMEnv, "=", start.OOM)), Dir: start.Dir,
			Stdout: os.Stdout, Stderr: os.Stderr, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
		}
		if err := cmd.Start(); err != nil {
			h.cfg.Logger.Error("no successor", "mount", m.name, "err", err)
			h.came(m, which)
			h.again(m)
			return
		}
		// Not as the holder, which is to be the last to go when memory is short. It sees
		// to that itself, before all else; an earlier version does not.
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", cmd.Process.Pid), []byte(strconv.Itoa(start.OOM)), 0); err != nil {
			h.cfg.Logger.Warn("a successor is killed for want of memory as this process is", "mount", m.name, "err", err)
		}
		go func() { // ends with the child, or with this process
			err := cmd.Wait()
			h.came(m, which)
			h.cfg.Logger.Info("a process that served ended", "mount", m.name, "pid", cmd.Process.Pid, "status", err)
			h.again(m)
		}()
	})
}

// came notes that the process that was started serves, or has ended.
func (h *Holder) came(m *heldMount, which int) {
	h.mu.Lock()
	if m.starting == which {
		m.starting = 0
	}
	h.mu.Unlock()
}

// again tries another successor if there is none.
func (h *Holder) again(m *heldMount) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mounts[m.name] == m {
		h.next(m)
	}
}

// TakeoverEnv is set for a process that the holder starts: it is to take over,
// and not to mount.
const TakeoverEnv = "PENSTOCK_TAKEOVER"

// OOMEnv is set for a process that is to be killed for want of memory sooner than
// who starts it: its /proc/self/oom_score_adj, which it sets first of all.
const OOMEnv = "PENSTOCK_OOM_SCORE_ADJ"

// watch looks at the mounts and at who serves them.
func (h *Holder) watch(ctx context.Context) {
	t := time.NewTicker(watchHeld)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		h.mu.Lock()
		all := slices.Collect(maps.Values(h.mounts))
		h.mu.Unlock()
		for _, m := range all {
			h.look(m)
		}
	}
}

// look gives up a mount that nobody serves for too long, and lets go on what a
// killed process can't leave: one of its threads may wait, in the kernel, for a
// page that a READ has locked, and the READ for the process. Then its connection
// to us stays; but the process runs no more, and its successor may begin.
//
// One of which a thread may run still is waited for: on a machine that is short of
// processors a thread that was killed half a second ago may not have had its turn, may
// read one more request and die with it. The kernel resends what was read before it is
// asked to; so that request's caller would wait for ever.
func (h *Holder) look(m *heldMount) {
	h.mu.Lock()
	link := m.link
	h.mu.Unlock()
	now := time.Now()
	gone := link != nil && h.cantEnd(m, link.pid, now)

	h.mu.Lock()
	if h.mounts[m.name] != m || m.link != link {
		h.mu.Unlock()
		return
	}
	for _, t := range slices.Clone(m.waiting) {
		if now.After(t.until) {
			h.refuse(m, t, meta.E("take over mount", meta.Busy, m.name, errors.New("who serves it did not go")))
		}
	}
	if gone {
		m.looks++
	} else {
		m.looks = 0
	}
	switch {
	case link != nil:
		if m.looks >= dyingLooks {
			h.cfg.Logger.Warn("a killed process can't end: its mount goes on without it", "mount", m.name, "pid", link.pid)
			h.orphan(m)
		}
	case now.Sub(m.down) > h.cfg.Patience && !m.aborted:
		h.cfg.Logger.Error("a mount is given up: nobody came to serve it for long", "mount", m.name)
		if m.taker != nil {
			m.taker.conn.Close() // it is to go, too
		}
		if files, bytes, err := UnsyncedIn(m.memory); bytes > 0 || err != nil {
			m.aborted = true
			h.cfg.Logger.Warn("what was written to it and is not durable is kept for a process that sees to that", "mount", m.name, "files", files, "bytes", bytes, "err", err)
			h.endUsers(m)
			break
		}
		files := h.forget(m)
		h.mu.Unlock()
		if err := h.end(m); err != nil {
			h.cfg.Logger.Error("a mount that nobody serves can't be ended", "mount", m.name, "err", err)
		}
		closeAll(files)
		h.mu.Lock()
		h.endIfOver()
	}
	h.mu.Unlock()
}

// endUsers ends a mount for whoever uses it, and keeps its memory. Caller holds mu, which
// is released meanwhile.
func (h *Holder) endUsers(m *heldMount) {
	device := m.device
	h.mu.Unlock()
	if err := h.end(m); err != nil {
		h.cfg.Logger.Error("a mount that nobody serves can't be ended", "mount", m.name, "err", err)
	}
	over, err := overDevice()
	h.mu.Lock()
	if err != nil || m.device != device {
		return
	}
	m.device = over
	device.Close()
}

// overDevice is what stands for the device of a mount that has ended: poll(2) says the
// same of it, and it keeps no connection to the kernel.
func overDevice() (*os.File, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, err
	}
	unix.Close(p[0])
	return os.NewFile(uintptr(p[1]), "over"), nil
}

// cantEnd tells whether a process was killed and none of its threads runs any more,
// or it has been dying for so long that it is taken for such. Only look calls it.
func (h *Holder) cantEnd(m *heldMount, pid int, now time.Time) bool {
	if !Dying(pid) {
		m.dying = time.Time{}
		return false
	}
	if m.dying.IsZero() {
		m.dying = now
	}
	return standsStill(pid) || now.Sub(m.dying) > h.dyingMost
}

// end aborts the connection of a mount that can't be served. What is mounted at
// its place now may be another, and its number another's: the number is the
// mount's as long as its device is connected.
func (h *Holder) end(m *heldMount) error {
	const op = "abort mount"
	if m.connection == 0 {
		return meta.E(op, meta.NotFound, m.name, errors.New("its number is not known; it ends when nobody has its device open any more"))
	}
	f, err := h.abort(m.connection)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it was unmounted
	}
	if err != nil { // in a pod, without a capability
		return meta.E(op, meta.IO, m.name, fmt.Errorf("%w; it ends when nobody has its device open any more", err))
	}
	defer f.Close()
	if ended(int(m.device.Fd())) {
		return nil
	}
	_, err = f.WriteString("1")
	return err
}

// connectionAt is the kernel's number of the connection of our mount at dir; 0:
// there is none.
func connectionAt(dir string) uint64 {
	info, err := mountedAt(dir)
	if err != nil || !ours(info) {
		return 0
	}
	return uint64(info.Major<<20 | info.Minor)
}
