package hold

import (
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// Client is a process's connection to the holder. As long as the connection is open the
// holder takes this process for the server of the mounts that it put.
type Client struct {
	conn     *net.UnixConn
	holder   process.Process
	patience time.Duration
	within   time.Duration // bounds the holder's answers; taking takes longer

	turn   chan struct{} // one request at a time
	answer chan answer
	yield  chan string
	gone   chan struct{} // closed when the connection is
}

// answer is a packet that came, with its descriptors.
type answer struct {
	p   *packet
	fds []*os.File
}

const answerIn = 10 * time.Second

// Dial connects to the holder at a path, which must be of this user, or of root.
// Errors: Unavailable, NotPermitted, Version.
func Dial(path string) (*Client, error) {
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
func greet(conn *net.UnixConn, path string, within time.Duration) (*Client, error) {
	roomy(conn)
	c := &Client{
		conn: conn, within: within, turn: make(chan struct{}, 1),
		answer: make(chan answer), yield: make(chan string, 1), gone: make(chan struct{}),
	}
	go c.read() // ends with the connection
	p, _, err := c.ask(&packet{Op: "hello", Version: Version}, within)
	if err == nil && p.Process == nil {
		err = meta.E("reach holder", meta.Protocol, path, nil)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	c.holder, c.patience = *p.Process, time.Duration(p.Patience)*time.Millisecond
	return c, nil
}

// read takes in what the holder says until the connection ends.
func (c *Client) read() {
	defer close(c.gone)
	defer c.conn.Close()
	for {
		p, fds, err := readPacket(c.conn)
		if err != nil {
			return
		}
		if p.Op == "yield" {
			select {
			case c.yield <- p.Name:
			default: // it is being done
			}
			continue
		}
		select {
		case c.answer <- answer{p, fds}:
		case <-time.After(c.within):
			closeAll(fds) // no request waits for an answer
			return
		}
	}
}

// ask makes a request and gives its answer. If the answer doesn't come in time the
// connection ends: else it would be taken for the answer to the next request.
func (c *Client) ask(p *packet, within time.Duration, fds ...*os.File) (*packet, []*os.File, error) {
	const op = "ask holder"
	c.turn <- struct{}{}
	defer func() { <-c.turn }()
	b := p.encode()
	if len(b) > maxPut {
		return nil, nil, meta.E(op, meta.Invalid, p.Name, fmt.Errorf("arguments and environment of this process take %d bytes, a holder keeps %d: start it with a smaller environment", len(b), maxPut))
	}
	if err := writePacket(c.conn, b, fds...); err != nil {
		c.conn.Close()
		return nil, nil, meta.E(op, meta.Unavailable, p.Op, err)
	}
	late := time.NewTimer(within)
	defer late.Stop()
	select {
	case a := <-c.answer:
		if a.p.Op != p.Op {
			closeAll(a.fds)
			c.conn.Close()
			return nil, nil, meta.E(op, meta.Protocol, p.Op, fmt.Errorf("the answer is to %q", a.p.Op))
		}
		if a.p.Error != "" {
			closeAll(a.fds)
			return nil, nil, meta.E(op, a.p.Kind, p.Name, errors.New(a.p.Error))
		}
		return a.p, a.fds, nil
	case <-c.gone:
		return nil, nil, meta.E(op, meta.Unavailable, p.Op, errors.New("it is gone"))
	case <-late.C:
		c.conn.Close()
		return nil, nil, meta.E(op, meta.Unavailable, p.Op, errors.New("it does not answer"))
	}
}

// Process is the holder's: a session that is to outlive the processes that serve is bound to
// it.
func (c *Client) Process() process.Process { return c.holder }

// Patience is how long the holder keeps a mount that no process serves.
func (c *Client) Patience() time.Duration { return c.patience }

// Put hands a mount's device and memory to the holder, with the kernel's number of its
// connection (0: not known): this process serves it. Errors: Busy (another process does, or
// is about to), Invalid (the command is too large), NotSupported (the holder can't see this
// process), Unavailable.
func (c *Client) Put(name string, command Command, number uint64, device, memory *os.File) error {
	_, _, err := c.ask(&packet{Op: "put", Name: name, Command: &command, Connection: number}, c.within, device, memory)
	return err
}

// Take gets a mount that no process serves; with replace also one that is served, whose
// server is asked to go. ok is false if the holder doesn't have it.
// Errors: Busy (its server does not go), NotSupported (the holder can't see this process),
// Unavailable.
func (c *Client) Take(name string, replace bool) (device, memory *os.File, ok bool, err error) {
	p, fds, err := c.ask(&packet{Op: "take", Name: name, Replace: replace}, yieldFor+c.within)
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
func (c *Client) Drop(name string) error {
	_, _, err := c.ask(&packet{Op: "drop", Name: name}, c.within)
	return err
}

// Leave tells that this process, which serves a mount, is about to end. Once that is answered
// the holder keeps the mount for another process, even if the holder is to end itself.
// Errors: Unavailable (the holder is gone).
func (c *Client) Leave(name string) error {
	_, _, err := c.ask(&packet{Op: "leave", Name: name}, c.within)
	return err
}

// Show gives the mount of a name with the command of its server; none if it is not held.
func (c *Client) Show(name string) ([]Mount, error) {
	p, _, err := c.ask(&packet{Op: "show", Name: name}, c.within)
	if err != nil {
		return nil, err
	}
	return p.Mounts, nil
}

// List gives all mounts, by name, without the commands of their servers.
func (c *Client) List() (all []Mount, err error) {
	for after := ""; ; {
		p, _, err := c.ask(&packet{Op: "list", Name: after}, c.within)
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

// Close ends the connection: the holder takes this process for gone.
func (c *Client) Close() {
	c.conn.Close()
	<-c.gone
}
