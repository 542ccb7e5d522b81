package fuse

import (
	"context"
	"errors"
	"fmt"
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
	conn    *net.UnixConn
	process process.Process
	patient time.Duration
	within  time.Duration // bounds the holder's answers; taking takes longer

	turn   chan struct{} // one request at a time
	answer chan held
	yield  chan string
	gone   chan struct{} // closed when the connection is
}

type held struct {
	p   *holdPacket
	fds []*os.File
}

const answerIn = 10 * time.Second

// DialHolder connects to the holder at a path, which must be of this user, or of
// root. Errors: Unavailable, NotPermitted, Version.
func DialHolder(path string) (*Hold, error) {
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, meta.E("reach holder", meta.Unavailable, path, err)
	}
	if _, err := trusted(c); err != nil {
		c.Close()
		return nil, meta.E("reach holder", meta.KindOf(err), path, err)
	}
	return greet(c, path, answerIn)
}

// greet begins a connection, which it takes over.
func greet(c *net.UnixConn, path string, within time.Duration) (*Hold, error) {
	roomy(c)
	h := &Hold{
		conn: c, within: within, turn: make(chan struct{}, 1),
		answer: make(chan held), yield: make(chan string, 1), gone: make(chan struct{}),
	}
	go h.read() // ends with the connection
	p, _, err := h.ask(&holdPacket{Op: "hello", Version: HoldVersion}, within)
	if err == nil && p.Process == nil {
		err = meta.E("reach holder", meta.Protocol, path, nil)
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	h.process, h.patient = *p.Process, time.Duration(p.Patience)*time.Millisecond
	return h, nil
}

func (h *Hold) read() {
	defer close(h.gone)
	defer h.conn.Close()
	for {
		p, fds, err := readPacket(h.conn)
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
		case <-time.After(h.within):
			closeAll(fds) // nobody asked
			return
		}
	}
}

// ask is one request and its answer. Where that doesn't come in time the
// connection ends: it would be taken for the next one's.
func (h *Hold) ask(p *holdPacket, within time.Duration, fds ...*os.File) (*holdPacket, []*os.File, error) {
	const op = "ask holder"
	h.turn <- struct{}{}
	defer func() { <-h.turn }()
	b := p.encode()
	if len(b) > maxPut {
		return nil, nil, meta.E(op, meta.Invalid, p.Name, fmt.Errorf("arguments and environment of this process take %d bytes, a holder keeps %d: start it with a smaller environment", len(b), maxPut))
	}
	if err := writePacket(h.conn, b, fds...); err != nil {
		h.conn.Close()
		return nil, nil, meta.E(op, meta.Unavailable, p.Op, err)
	}
	late := time.NewTimer(within)
	defer late.Stop()
	select {
	case a := <-h.answer:
		if a.p.Op != p.Op {
			closeAll(a.fds)
			h.conn.Close()
			return nil, nil, meta.E(op, meta.Protocol, p.Op, fmt.Errorf("the answer is to %q", a.p.Op))
		}
		if a.p.Error != "" {
			closeAll(a.fds)
			return nil, nil, meta.E(op, a.p.Kind, p.Name, errors.New(a.p.Error))
		}
		return a.p, a.fds, nil
	case <-h.gone:
		return nil, nil, meta.E(op, meta.Unavailable, p.Op, errors.New("it is gone"))
	case <-late.C:
		h.conn.Close()
		return nil, nil, meta.E(op, meta.Unavailable, p.Op, errors.New("it does not answer"))
	}
}

// Process is the holder: what a session is bound to that is to outlive those who
// serve.
func (h *Hold) Process() process.Process { return h.process }

// Patience is how long the holder keeps a mount that nobody serves; 0: it does not
// say (an earlier version).
func (h *Hold) Patience() time.Duration { return h.patient }

// Put hands a mount's device and memory to the holder, with the kernel's number
// of its connection (0: not known): this process serves it. Errors: Busy (another
// one does, or is about to), Invalid (start is too large), NotSupported (the
// holder can't see this process), Unavailable.
func (h *Hold) Put(name string, start Start, connection uint64, device, memory *os.File) error {
	_, _, err := h.ask(&holdPacket{Op: "put", Name: name, Start: &start, Connection: connection}, h.within, device, memory)
	return err
}

// Take gets a mount that nobody serves, with replace also one that somebody
// serves, who is asked to go. ok is false if it is not held at all.
// Errors: Busy (somebody serves it, and does not go), NotSupported (the holder
// can't see this process), Unavailable.
func (h *Hold) Take(name string, replace bool) (device, memory *os.File, ok bool, err error) {
	p, fds, err := h.ask(&holdPacket{Op: "take", Name: name, Replace: replace}, yieldFor+h.within)
	if err != nil || !p.Found {
		closeAll(fds)
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
	_, _, err := h.ask(&holdPacket{Op: "drop", Name: name}, h.within)
	return err
}

// Leave tells that this process, which serves a mount, is about to end: answered,
// the holder keeps the mount for another one, also if it is itself to end. Errors:
// Unavailable (the holder is gone).
func (h *Hold) Leave(name string) error {
	_, _, err := h.ask(&holdPacket{Op: "leave", Name: name}, h.within)
	if errors.Is(err, meta.NotSupported) {
		return nil // an earlier version: it keeps it as long as it lives
	}
	return err
}

// Show gives what is held under a name, with how its server was started; nothing
// if it is not held.
func (h *Hold) Show(name string) ([]Held, error) {
	p, _, err := h.ask(&holdPacket{Op: "show", Name: name}, h.within)
	if err != nil {
		return nil, err
	}
	return p.Mounts, nil
}

// List gives all that is held, by name, without how it was started.
func (h *Hold) List() (all []Held, err error) {
	for after := ""; ; {
		p, _, err := h.ask(&holdPacket{Op: "list", Name: after}, h.within)
		if err != nil {
			return nil, err
		}
		all = append(all, p.Mounts...)
		if !p.More || len(p.Mounts) == 0 {
			return all, nil
		}
		after = all[len(all)-1].Name
	}
}

// Close ends the connection: the holder takes the process for gone.
func (h *Hold) Close() {
	h.conn.Close()
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
	number uint64        // the kernel's, of the connection
	yields chan struct{} // closed when this process is to go
	lost   chan struct{} // closed when another one serves already
}

// taking gives a context that ends when the holder does not wait any longer for
// this process to serve what it took: then somebody else may have it. stop is to
// be called once it serves.
func (h *hold) taking(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	l := h.Hold
	go func() { // ends with stop at the latest
		select {
		case <-l.gone:
			cancel(meta.E("take over mount", meta.Unavailable, h.cfg.Dir, errors.New("the holder is gone, or did not wait any longer")))
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// put hands over, and looks after it from then on.
func (h *hold) put(name string, number uint64, device, memory int) (err error) {
	h.name, h.number = name, number
	h.yields, h.lost = make(chan struct{}), make(chan struct{})
	for i, fd := range []int{device, memory} {
		if h.fds[i], err = dupFile(fd); err != nil {
			return err
		}
	}
	if err := h.Put(name, h.cfg.Start, number, h.fds[0], h.fds[1]); err != nil {
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
		log, said := h.cfg.Client.Logger, ""
		say := func(what string, err error) { // once
			if what != said {
				said = what
				log.Warn(what, "dir", h.name, "err", err)
			}
		}
		for ; ; time.Sleep(redialEvery) {
			h.mu.Lock()
			closed := h.closed
			h.mu.Unlock()
			if closed || h.cfg.Redial == nil {
				return
			}
			ctx, cancel := context.WithTimeout(context.Background(), answerIn)
			next, err := h.cfg.Redial(ctx)
			cancel()
			if err != nil {
				say("the holder of this mount is gone; looking for its successor", err)
				continue
			}
			err = next.Put(h.name, h.cfg.Start, h.number, h.fds[0], h.fds[1])
			if errors.Is(err, meta.Busy) {
				// It had given us up. To go on would be to serve beside another.
				log.Error("a new holder has given this mount to another process", "dir", h.name, "err", err)
				next.Close()
				close(h.lost)
				return
			}
			if err != nil {
				say("a new holder does not hold this mount", err)
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
			log.Info("held again", "dir", h.name)
			break
		}
	}
}

func (k *Keeping) yield() <-chan struct{} { return k.hold.yields }

func (k *Keeping) lost() <-chan struct{} { return k.hold.lost }

// leave returns when a holder keeps the mount without this process; ctx ends it, and
// whatever else ends serving. Where the holder is gone it waits for the next one: with
// this process the mount would end.
func (k *Keeping) leave(ctx context.Context, ended <-chan struct{}) bool {
	for said := false; ; said = true {
		k.hold.mu.Lock()
		l := k.hold.Hold
		k.hold.mu.Unlock()
		err := l.Leave(k.hold.name)
		if err == nil {
			return true
		}
		if !said {
			k.hold.cfg.Client.Logger.Warn("this process is to leave its mount, and no holder has it: it goes on until one does", "dir", k.hold.name, "err", err)
		}
		select {
		case <-time.After(redialEvery):
		case <-k.yield():
			return true
		case <-k.lost():
			return true
		case <-ended:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

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
