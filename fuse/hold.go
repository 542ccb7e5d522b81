package fuse

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// Hold is a process's connection to a holder. As long as it is open the holder
// takes the process for the one that serves what it put.
type Hold struct {
	link    *holdLink
	process process.Process

	mu     sync.Mutex // one request at a time
	answer chan held
	yield  chan string
	gone   chan struct{}
}

type held struct {
	p   *holdPacket
	fds []*os.File
}

// answerIn bounds the holder's answers; taking takes longer.
const answerIn = 10 * time.Second

// DialHolder connects to the holder at a path. Errors: Unavailable, Version.
func DialHolder(path string) (*Hold, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, meta.E("reach holder", meta.Unavailable, path, err)
	}
	h := &Hold{link: &holdLink{conn: c}, answer: make(chan held), yield: make(chan string, 1), gone: make(chan struct{})}
	go h.read() // ends with the connection
	p, _, err := h.ask(&holdPacket{Op: "hello", Version: HoldVersion}, answerIn)
	if err == nil && p.Process == nil {
		err = meta.E("reach holder", meta.Protocol, path, nil)
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	h.process = *p.Process
	return h, nil
}

func (h *Hold) read() {
	defer close(h.gone)
	for {
		p, fds, err := readPacket(h.link.conn)
		if err != nil {
			return
		}
		if p.Op == "yield" {
			select {
			case h.yield <- p.Name:
			default: // it is being done
			}
			continue
		}
		select {
		case h.answer <- held{p, fds}:
		case <-time.After(answerIn):
			closeAll(fds) // nobody waits any more
		}
	}
}

func (h *Hold) ask(p *holdPacket, within time.Duration, fds ...*os.File) (*holdPacket, []*os.File, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.link.write(p, fds...); err != nil {
		return nil, nil, meta.E("ask holder", meta.Unavailable, p.Op, err)
	}
	select {
	case a := <-h.answer:
		if a.p.Error != "" {
			closeAll(a.fds)
			return nil, nil, meta.E("ask holder", a.p.Kind, p.Name, errors.New(a.p.Error))
		}
		return a.p, a.fds, nil
	case <-h.gone:
		return nil, nil, meta.E("ask holder", meta.Unavailable, p.Op, errors.New("it is gone"))
	case <-time.After(within):
		return nil, nil, meta.E("ask holder", meta.Unavailable, p.Op, errors.New("it does not answer"))
	}
}

// Process is the holder: what a session is bound to that is to outlive those who
// serve.
func (h *Hold) Process() process.Process { return h.process }

// Put hands a mount's device and memory to the holder: this process serves it.
func (h *Hold) Put(name string, start Start, device, memory *os.File) error {
	_, _, err := h.ask(&holdPacket{Op: "put", Name: name, Start: &start}, answerIn, device, memory)
	return err
}

// Take gets a mount that nobody serves, with replace also one that somebody
// serves, who is asked to go. ok is false if it is not held at all.
// Errors: Busy (somebody serves it, and does not go), Unavailable.
func (h *Hold) Take(name string, replace bool) (device, memory *os.File, ok bool, err error) {
	p, fds, err := h.ask(&holdPacket{Op: "take", Name: name, Replace: replace}, yieldFor+answerIn)
	if err != nil || !p.Found {
		return nil, nil, false, err
	}
	if len(fds) != 2 {
		closeAll(fds)
		return nil, nil, false, meta.E("take over mount", meta.Protocol, name, nil)
	}
	return fds[0], fds[1], true, nil
}

// Drop tells that a mount has ended.
func (h *Hold) Drop(name string) error {
	_, _, err := h.ask(&holdPacket{Op: "drop", Name: name}, answerIn)
	return err
}

// List lists what is held; name "": all.
func (h *Hold) List(name string) ([]Held, error) {
	op := "show"
	if name == "" {
		op = "list"
	}
	p, _, err := h.ask(&holdPacket{Op: op, Name: name}, answerIn)
	if err != nil {
		return nil, err
	}
	return p.Mounts, nil
}

// Stays answers a yield: this process goes on serving.
func (h *Hold) Stays(name string, why error) error {
	return h.link.write(&holdPacket{Op: "stays", Name: name, Error: why.Error()})
}

// Close ends the connection: the holder takes the process for gone.
func (h *Hold) Close() {
	h.link.conn.Close()
	<-h.gone
}

// ErrYielded is what Serve returns when another process serves the mount now, or
// a holder has it for one that comes: nothing was unmounted.
var ErrYielded = errors.New("the mount goes on without this process")

// ErrLeft is with ErrYielded if nobody serves the mount yet.
var ErrLeft = errors.New("its holder waits for a process that serves it")

// yieldSync bounds what is made durable before a process goes; the rest is put
// back by its successor.
const yieldSync = 5 * time.Second

// yielding makes things durable before this process goes.
func (m *Mount) yielding(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), yieldSync)
	defer cancel()
	if err := m.syncWithin(ctx); err != nil {
		m.log.Warn("not everything is durable yet: the successor puts it back", "err", err)
	}
}

// hold is a process's side of one mount at its holder, also when the holder is
// replaced by another.
type hold struct {
	cfg *ServeConfig

	mu     sync.Mutex
	*Hold         // the present one
	name   string // of what was put; "": nothing
	fds    [2]*os.File
	closed bool
	yields chan struct{} // closed when this process is to go
}

// put hands over, and looks after it from then on.
func (h *hold) put(name string, device, memory int) (err error) {
	h.name, h.yields = name, make(chan struct{})
	for i, fd := range []int{device, memory} {
		if h.fds[i], err = dupFile(fd); err != nil {
			return err
		}
	}
	if err := h.Put(name, h.cfg.Start, h.fds[0], h.fds[1]); err != nil {
		return err
	}
	go h.watch(h.Hold) // ends with Close, or the process
	return nil
}

// redialEvery is how often a holder is looked for that is gone.
const redialEvery = 100 * time.Millisecond

func (h *hold) watch(l *Hold) {
	for {
		select {
		case <-l.yield:
			close(h.yields)
			return
		case <-l.gone:
		}
		for said := false; ; time.Sleep(redialEvery) {
			h.mu.Lock()
			closed := h.closed
			h.mu.Unlock()
			if closed || h.cfg.Redial == nil {
				return
			}
			if !said {
				said = true
				h.cfg.Client.Logger.Warn("the holder of this mount is gone; looking for its successor", "dir", h.name)
			}
			ctx, cancel := context.WithTimeout(context.Background(), answerIn)
			next, err := h.cfg.Redial(ctx)
			cancel()
			if err != nil {
				continue
			}
			if err := next.Put(h.name, h.cfg.Start, h.fds[0], h.fds[1]); err != nil {
				h.cfg.Client.Logger.Error("a new holder does not hold", "dir", h.name, "err", err)
				next.Close()
				continue
			}
			h.mu.Lock()
			h.Hold, l = next, next
			closed = h.closed
			h.mu.Unlock()
			if closed {
				next.Close()
				return
			}
			h.cfg.Client.Logger.Info("held again", "dir", h.name)
			break
		}
	}
}

func (k *Keeping) yield() <-chan struct{} { return k.hold.yields }

// drop tells the holder that the mount has ended.
func (k *Keeping) drop() error {
	k.hold.mu.Lock()
	l := k.hold.Hold
	k.hold.closed = true // a holder may end with its last mount
	k.hold.mu.Unlock()
	return l.Drop(k.hold.name)
}

// Close ends it.
func (h *hold) Close() {
	h.mu.Lock()
	h.closed = true
	l := h.Hold
	h.mu.Unlock()
	l.Close()
	closeAll(h.fds[:])
}
