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

// Client is a process's connection to the holder. While the connection is open, the holder
// takes this process for the server of each mount put through the connection.
type Client struct {
	conn     *net.UnixConn
	holder   process.Process
	patience time.Duration
	within   time.Duration // bounds the holder's answers; taking takes longer

	turn   chan struct{} // holds a token during a request
	answer chan answer
	yield  chan string
	gone   chan struct{} // closed when the connection is
}

// answer is a received packet with its descriptors.
type answer struct {
	p   *packet
	fds []*os.File
}

const answerIn = 10 * time.Second

// Dial connects to the holder at a path. The holder must run as this process's user, or as
// root. Errors: Unavailable, NotPermitted, Version.
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

// greet makes a Client from conn and exchanges hello. The Client owns conn.
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

// read passes on the holder's packets until the connection ends.
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
			default: // an earlier yield is pending
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

// ask sends a request and returns the answer. If the answer is late, ask closes the
// connection, since the late answer would be taken for the answer to the next request.
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

// Process returns the holder's process. A session bound to the holder's process outlives the
// processes serving the mount.
func (c *Client) Process() process.Process { return c.holder }

// Patience returns how long the holder keeps a mount without a server.
func (c *Client) Patience() time.Duration { return c.patience }

// Put hands a mount's device and memory to the holder, with the kernel's number of the mount's
// connection (0: unknown). The holder takes this process for the mount's server. Errors: Busy
// (another process serves the mount, or has taken it), Invalid (the command is too large),
// NotSupported (the holder can't see this process), Unavailable.
func (c *Client) Put(name string, command Command, number uint64, device, memory *os.File) error {
	_, _, err := c.ask(&packet{Op: "put", Name: name, Command: &command, Connection: number}, c.within, device, memory)
	return err
}

// Take gets a mount without a server. With replace, Take also gets a mount with a server,
// after asking the server to go. ok is false if the holder doesn't have the mount. Errors:
// Busy (the server does not go), NotSupported (the holder can't see this process),
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

// Drop notifies the holder that a mount has ended.
func (c *Client) Drop(name string) error {
	_, _, err := c.ask(&packet{Op: "drop", Name: name}, c.within)
	return err
}

// Leave notifies the holder that this process, the server of a mount, is about to end. After
// the answer the holder keeps the mount for another process, even while the holder itself is
// ending. Errors: Unavailable (the holder is gone).
func (c *Client) Leave(name string) error {
	_, _, err := c.ask(&packet{Op: "leave", Name: name}, c.within)
	return err
}

// Show returns the named mount with the command of the mount's server; empty if the holder
// doesn't have the mount.
func (c *Client) Show(name string) ([]Mount, error) {
	p, _, err := c.ask(&packet{Op: "show", Name: name}, c.within)
	if err != nil {
		return nil, err
	}
	return p.Mounts, nil
}

// List returns all mounts, by name, without the commands of the servers.
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

// Close ends the connection. The holder then takes this process for gone.
func (c *Client) Close() {
	c.conn.Close()
	<-c.gone
}
