package fuse

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
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
// beside them, to processes of the same user (or root) only. A request and its
// answer are one packet each; the one thing that the holder says by itself is
// "yield", to a process that serves a mount which another one is to take over.
//
//	hello                   -> process of the holder, which sessions are bound to
//	put NAME + 2 fds        the sender serves NAME from now on
//	take NAME [replace]     -> 2 fds once nobody serves it, or found=false
//	show NAME, list         -> what is held, and who serves it
//	drop NAME               it was unmounted
//	stays NAME              the answer to yield of who can't go
//	yield NAME              from the holder
//
// Who serves is known by its connection: it ends with the last thread of the
// process. So when it ends, nothing of the process writes to the device any more.

// HoldVersion is the version of this protocol.
const HoldVersion = 1

// holdPacket is a request or an answer.
type holdPacket struct {
	Op      string           `json:"op"`
	Version int              `json:"version,omitempty"`
	Name    string           `json:"name,omitempty"`
	Replace bool             `json:"replace,omitempty"`
	Start   *Start           `json:"start,omitempty"`
	Process *process.Process `json:"process,omitempty"`
	Found   bool             `json:"found,omitempty"`
	Kind    meta.Kind        `json:"kind,omitempty"`
	Error   string           `json:"error,omitempty"`
	Mounts  []Held           `json:"mounts,omitempty"`
}

// Start is how a process that serves a mount was started, and how its successor
// is.
type Start struct {
	Path string   `json:"path"`
	Args []string `json:"args"` // with the name of the program
	Env  []string `json:"env"`
	Dir  string   `json:"dir"`
}

// Held is a mount that a holder has.
type Held struct {
	Name   string `json:"name"`          // the mount point
	PID    int    `json:"pid,omitempty"` // of who serves it; 0: nobody
	Taken  int    `json:"taken"`         // how often it was taken over
	Start  Start  `json:"start"`
	device *os.File
	memory *os.File

	link      *holdLink // of who serves it
	taker     *holdLink // of who is about to
	waiting   []*holdTake
	orphaned  time.Time
	respawned int
	starting  int // which successor was started, and has not come yet; 0: none
}

type holdTake struct {
	link *holdLink
	done bool
}

type holdLink struct {
	conn *net.UnixConn
	pid  int
	send sync.Mutex
}

// HolderConfig says how a holder behaves.
type HolderConfig struct {
	// Patience is how long a mount may be without anybody who serves it. Then it is
	// given up, and who uses it gets errors. 0: 30 s.
	Patience time.Duration
	// Respawn has the holder start a successor itself, as the predecessor was
	// started; else a supervisor does that.
	Respawn bool
	// Once ends the holder when it had a mount and has none any more.
	Once   bool
	Logger *slog.Logger
	// Store keeps the descriptors beyond the holder's own life; nil: nobody does.
	Store FDStore
}

// FDStore keeps descriptors under names, as systemd does for a service.
type FDStore interface {
	Store(name string, fds ...*os.File) error
	Remove(name string) error
}

const (
	defaultPatience = 30 * time.Second
	yieldFor        = 30 * time.Second // a process that was asked may take to go
	respawnPause    = 200 * time.Millisecond
	maxPacket       = 256 << 10
)

// Holder serves one socket.
type Holder struct {
	cfg  HolderConfig
	self process.Process

	mu     sync.Mutex
	mounts map[string]*Held
	links  map[*holdLink]bool
	had    bool
	starts int           // successors, so far
	over   chan struct{} // closed with Once, at the end of the last mount
	wg     sync.WaitGroup
	ctx    context.Context
}

// NewHolder makes a holder with what another one left, if anything: descriptors
// by name, the device and the memory of each mount.
func NewHolder(cfg HolderConfig, left map[string][]*os.File) (*Holder, error) {
	if cfg.Patience == 0 {
		cfg.Patience = defaultPatience
	}
	self, err := process.Self()
	if err != nil {
		return nil, err
	}
	if cfg.Store != nil {
		// Another process may hold after this one: that this one ended says nothing
		// of the sessions.
		self.PIDNS = ""
	}
	h := &Holder{cfg: cfg, self: self, mounts: make(map[string]*Held), links: make(map[*holdLink]bool), over: make(chan struct{})}
	for name, fds := range left {
		if len(fds) != 2 {
			return nil, meta.E("hold", meta.Corrupt, name, fmt.Errorf("%d descriptors, not 2", len(fds)))
		}
		h.mounts[name] = &Held{Name: name, device: fds[0], memory: fds[1], orphaned: time.Now()}
		h.had = true
	}
	return h, nil
}

// Serve holds until ctx ends, or with Once until nothing is left. What it holds
// then ends with the process, unless somebody else has it, too.
func (h *Holder) Serve(ctx context.Context, l *net.UnixListener) error {
	ctx, cancel := context.WithCancel(ctx)
	h.ctx = ctx
	defer h.wg.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	h.wg.Go(func() { h.watch(ctx) })
	go func() { // ends with Serve
		select {
		case <-h.over:
			cancel()
		case <-ctx.Done():
		}
	}()
	for {
		c, err := l.AcceptUnix()
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
		uid, pid, err := peerOf(c)
		if err != nil || uid != os.Geteuid() && uid != 0 {
			h.cfg.Logger.Warn("refused", "uid", uid, "err", err)
			c.Close()
			continue
		}
		link := &holdLink{conn: c, pid: pid}
		h.mu.Lock()
		h.links[link] = true
		h.mu.Unlock()
		h.wg.Go(func() {
			h.talk(link)
			c.Close()
			h.mu.Lock()
			delete(h.links, link)
			h.left(link)
			if len(h.links) == 0 {
				h.endIfOver()
			}
			h.mu.Unlock()
		})
	}
}

func peerOf(c *net.UnixConn) (uid, pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if cerr != nil || err != nil {
		return 0, 0, errors.Join(cerr, err)
	}
	return int(cred.Uid), int(cred.Pid), nil
}

// talk answers one process until it goes.
func (h *Holder) talk(link *holdLink) {
	for {
		p, fds, err := readPacket(link.conn)
		if err != nil {
			return
		}
		h.mu.Lock()
		err = h.answer(link, p, fds)
		h.mu.Unlock()
		if err != nil {
			_ = link.write(&holdPacket{Op: p.Op, Name: p.Name, Kind: meta.KindOf(err), Error: err.Error()})
		}
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
	ok := &holdPacket{Op: p.Op, Name: p.Name, Found: m != nil}
	switch p.Op {
	case "hello":
		if p.Version != HoldVersion {
			return meta.E("hold", meta.Version, "", fmt.Errorf("version %d, this holder speaks %d", p.Version, HoldVersion))
		}
		ok.Version, ok.Process = HoldVersion, &h.self
	case "put":
		if len(fds) != 2 || p.Name == "" || p.Start == nil {
			return meta.E("hold", meta.Protocol, p.Name, fmt.Errorf("%d descriptors, not 2", len(fds)))
		}
		if m != nil && m.link != nil && m.link != link {
			return meta.E("hold", meta.Busy, p.Name, fmt.Errorf("process %d serves it", m.PID))
		}
		if m == nil {
			m = &Held{Name: p.Name, Taken: -1}
			h.mounts[p.Name] = m
		}
		old := []*os.File{m.device, m.memory}
		m.device, m.memory, m.Start, m.link, m.PID, m.taker = fds[0], fds[1], *p.Start, link, link.pid, nil
		m.starting = 0
		m.Taken++
		used, h.had = true, true
		closeAll(old)
		if h.cfg.Store != nil {
			if err := h.cfg.Store.Store(p.Name, m.device, m.memory); err != nil {
				h.cfg.Logger.Error("not kept beyond this process", "mount", p.Name, "err", err)
			}
		}
		h.cfg.Logger.Info("held", "mount", p.Name, "pid", m.PID, "taken", m.Taken)
	case "take":
		if m == nil {
			break
		}
		if m.link == nil && m.taker == nil {
			m.taker = link
			return link.write(ok, m.device, m.memory)
		}
		if !p.Replace && m.link != nil {
			return meta.E("take over mount", meta.Busy, p.Name, fmt.Errorf("process %d serves it; use --replace", m.PID))
		}
		t := &holdTake{link: link}
		m.waiting = append(m.waiting, t)
		if m.link != nil {
			if err := m.link.write(&holdPacket{Op: "yield", Name: p.Name}); err != nil {
				h.cfg.Logger.Warn("who serves a mount can't be asked to go", "mount", p.Name, "err", err)
			}
		}
		time.AfterFunc(yieldFor, func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.refuse(m, t, errors.New("who serves it did not go"))
		})
		return nil
	case "stays":
		if m != nil && m.link == link {
			for _, t := range slices.Clone(m.waiting) {
				h.refuse(m, t, errors.New(p.Error))
			}
		}
		return nil
	case "list", "show":
		for _, m := range h.mounts {
			if p.Op == "list" || m.Name == p.Name {
				ok.Mounts = append(ok.Mounts, Held{Name: m.Name, PID: m.PID, Taken: m.Taken, Start: m.Start})
			}
		}
		slices.SortFunc(ok.Mounts, func(a, b Held) int { return strings.Compare(a.Name, b.Name) })
	case "drop":
		if m != nil && m.link == link {
			h.drop(m)
		}
	default:
		return meta.E("hold", meta.NotSupported, p.Op, nil)
	}
	return link.write(ok)
}

// refuse tells one who waits for a mount that it is not to be had. Caller holds mu.
func (h *Holder) refuse(m *Held, t *holdTake, why error) {
	if t.done {
		return
	}
	t.done = true
	m.waiting = slices.DeleteFunc(m.waiting, func(o *holdTake) bool { return o == t })
	err := meta.E("take over mount", meta.Busy, m.Name, why)
	_ = t.link.write(&holdPacket{Op: "take", Name: m.Name, Kind: meta.Busy, Error: err.Error()})
}

// drop forgets a mount. Caller holds mu.
func (h *Holder) drop(m *Held) {
	delete(h.mounts, m.Name)
	closeAll([]*os.File{m.device, m.memory})
	if h.cfg.Store != nil {
		if err := h.cfg.Store.Remove(m.Name); err != nil {
			h.cfg.Logger.Warn("still kept beyond this process", "mount", m.Name, "err", err)
		}
	}
	for _, t := range slices.Clone(m.waiting) {
		h.refuse(m, t, errors.New("it was unmounted"))
	}
	h.endIfOver()
}

// endIfOver ends a holder that holds once. Caller holds mu.
func (h *Holder) endIfOver() {
	if h.cfg.Once && len(h.mounts) == 0 {
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
func (h *Holder) orphan(m *Held) {
	h.cfg.Logger.Warn("nobody serves a mount", "mount", m.Name, "pid", m.PID)
	m.link, m.PID, m.orphaned, m.respawned = nil, 0, time.Now(), 0
	h.next(m)
}

// next gives a mount to one who waits for it, or starts one. Caller holds mu.
func (h *Holder) next(m *Held) {
	for len(m.waiting) > 0 {
		t := m.waiting[0]
		m.waiting = m.waiting[1:]
		t.done = true
		if t.link.write(&holdPacket{Op: "take", Name: m.Name, Found: true}, m.device, m.memory) == nil {
			m.taker = t.link
			return
		}
	}
	if h.cfg.Respawn && m.Start.Path != "" && h.ctx.Err() == nil && m.starting == 0 {
		m.respawned++
		h.starts++
		m.starting = h.starts
		h.respawn(m, m.starting, time.Duration(m.respawned-1)*respawnPause)
	}
}

// respawn starts a successor after a pause. Caller holds mu.
func (h *Holder) respawn(m *Held, which int, pause time.Duration) {
	h.wg.Go(func() {
		select {
		case <-time.After(pause):
		case <-h.ctx.Done():
			return
		}
		h.mu.Lock()
		needed := h.mounts[m.Name] == m && m.link == nil && m.taker == nil
		start := m.Start
		h.mu.Unlock()
		if !needed {
			h.came(m, which)
			return
		}
		cmd := exec.Cmd{
			Path: start.Path, Args: start.Args, Env: append(slices.Clone(start.Env), TakeoverEnv+"=1"), Dir: start.Dir,
			Stdout: os.Stdout, Stderr: os.Stderr, SysProcAttr: &syscall.SysProcAttr{Setsid: true},
		}
		if err := cmd.Start(); err != nil {
			h.cfg.Logger.Error("no successor", "mount", m.Name, "err", err)
			h.came(m, which)
			h.again(m)
			return
		}
		go func() { // ends with the child, or with this process
			err := cmd.Wait()
			h.came(m, which)
			h.cfg.Logger.Info("a process that served ended", "mount", m.Name, "pid", cmd.Process.Pid, "status", err)
			h.again(m)
		}()
	})
}

// came notes that the process that was started serves, or has ended.
func (h *Holder) came(m *Held, which int) {
	h.mu.Lock()
	if m.starting == which {
		m.starting = 0
	}
	h.mu.Unlock()
}

// again tries another successor if there is none.
func (h *Holder) again(m *Held) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.mounts[m.Name] == m && m.link == nil && m.taker == nil {
		h.next(m)
	}
}

// TakeoverEnv is set for a process that the holder starts: it is to take over,
// and not to mount.
const TakeoverEnv = "PENSTOCK_TAKEOVER"

// watchHeld is how often a holder looks at who serves.
const watchHeld = 100 * time.Millisecond

// watch gives up mounts that nobody serves for too long, and lets go on what a
// killed process can't leave: one of its threads may wait, in the kernel, for a
// page that a READ has locked, and the READ for the process. Then its connection
// to us stays; but the process runs no more, and its successor may begin.
func (h *Holder) watch(ctx context.Context) {
	t := time.NewTicker(watchHeld)
	defer t.Stop()
	looks := make(map[*holdLink]int)
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		h.mu.Lock()
		for _, m := range h.mounts {
			if m.link == nil {
				if time.Since(m.orphaned) > h.cfg.Patience && m.taker == nil {
					h.cfg.Logger.Error("a mount is given up: nobody came to serve it", "mount", m.Name)
					h.abort(m)
				}
				continue
			}
			status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", m.link.pid))
			if m.link.pid == 0 || err != nil || !dying(status) {
				delete(looks, m.link)
				continue
			}
			if looks[m.link]++; looks[m.link] >= dyingLooks {
				h.cfg.Logger.Warn("a killed process can't end: its mount goes on without it", "mount", m.Name, "pid", m.PID)
				delete(looks, m.link)
				h.orphan(m)
			}
		}
		h.mu.Unlock()
	}
}

const dyingLooks = 5 // half a second: a process with much memory takes its time

// abort ends a mount that can't be served. Caller holds mu.
func (h *Holder) abort(m *Held) {
	if info, err := mountedAt(m.Name); err == nil && ours(info) {
		if f, err := openAbort(uint64(info.Major<<20 | info.Minor)); err == nil {
			_, _ = f.WriteString("1")
			f.Close()
		}
	}
	h.drop(m)
}

func closeAll(l []*os.File) {
	for _, f := range l {
		if f != nil {
			f.Close()
		}
	}
}

// ---- packets

func (l *holdLink) write(p *holdPacket, fds ...*os.File) error {
	l.send.Lock()
	defer l.send.Unlock()
	l.conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
	return writePacket(l.conn, p, fds...)
}

func writePacket(c *net.UnixConn, p *holdPacket, fds ...*os.File) error {
	b, err := json.Marshal(p)
	if err != nil {
		panic("fuse: a packet is plain data: " + err.Error())
	}
	if len(b) > maxPacket {
		return meta.E("hold", meta.Invalid, p.Name, fmt.Errorf("a packet of %d bytes", len(b)))
	}
	var oob []byte
	if len(fds) > 0 {
		var n []int
		for _, f := range fds {
			n = append(n, int(f.Fd()))
		}
		oob = unix.UnixRights(n...)
	}
	_, _, err = c.WriteMsgUnix(b, oob, nil)
	return err
}

// readPacket reads one packet; the descriptors are the caller's.
func readPacket(c *net.UnixConn) (*holdPacket, []*os.File, error) {
	b, oob := make([]byte, maxPacket), make([]byte, unix.CmsgSpace(4*8))
	n, on, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return nil, nil, err
	}
	if n == 0 {
		return nil, nil, net.ErrClosed
	}
	fds, err := rightsOf(oob[:on])
	if err != nil {
		return nil, nil, err
	}
	p, err := decodePacket(b[:n])
	if err != nil {
		closeAll(fds)
		return nil, nil, err
	}
	return p, fds, nil
}

func decodePacket(b []byte) (*holdPacket, error) {
	p := new(holdPacket)
	if err := json.Unmarshal(b, p); err != nil {
		return nil, meta.E("hold", meta.Protocol, "", err)
	}
	return p, nil
}

func rightsOf(oob []byte) (l []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			closeAll(l)
			return nil, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			l = append(l, os.NewFile(uintptr(fd), "held"))
		}
	}
	return l, nil
}
