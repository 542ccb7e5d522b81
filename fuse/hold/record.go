package hold

import (
	"net"
	"os"
	"time"

	"penstock.io/penstock/fuse/kernel"
)

// record is what the daemon knows of a mount.
type record struct {
	name           string
	device, memory *os.File
	number         uint64 // of the kernel's connection; 0: not known
	command        Command
	taken          int // -1 before it is put

	// INVARIANT: server or successor is nil.
	server      *connection // of the process that serves the mount
	successor   *connection // of the process that has taken it and does not serve yet
	waiting     []*waiter
	servedSince time.Time // of the last put
	yielded     bool      // the server was asked to go
	leaving     bool      // the server said that it goes
	// unservedSince is since when no process serves the mount, or only such as don't settle.
	unservedSince time.Time
	respawned     int // successors that were started since one settled
	starting      int // which of them has not come yet; 0: none
	stillLooks    int // looks in a row at which the server was dying and could not end
	// aborted: the mount was given up for its users. Bytes that were written to it and are
	// not durable are kept for a process that sees to them.
	aborted bool
	dying   time.Time // since when inspect has seen the server so
}

// unserved: the mount may be given to a process that takes it over.
func (m *record) unserved() bool { return m.server == nil && m.successor == nil }

// waiter is a process that asked to take a mount, and has no answer yet.
type waiter struct {
	conn    *connection
	replace bool
	until   time.Time
}

// connection is the daemon's connection to one process. What the daemon has to say stands in
// a queue: it never waits for a process that doesn't read.
type connection struct {
	socket *net.UnixConn
	pid    int
	queue  chan message
}

// message is a packet in the queue, with descriptors of its own.
type message struct {
	packet []byte
	fds    []*os.File
}

// maxQueued is how many messages may wait for a process, which asks one thing at a time.
const maxQueued = 8

// send queues a packet, with copies of descriptors. The connection to a process that doesn't
// read, or whose descriptors can't be copied, is closed. Caller holds the daemon's mu.
func (c *connection) send(p *packet, fds ...*os.File) {
	o := message{packet: p.encode()}
	for _, f := range fds {
		fd, err := kernel.DupFile(int(f.Fd()))
		if err != nil {
			closeAll(o.fds)
			c.socket.Close()
			return
		}
		o.fds = append(o.fds, fd)
	}
	select {
	case c.queue <- o:
	default:
		closeAll(o.fds)
		c.socket.Close()
	}
}

// writeQueued writes what is queued until the queue is closed.
func (c *connection) writeQueued() {
	for o := range c.queue {
		if err := writePacket(c.socket, o.packet, o.fds...); err != nil {
			c.socket.Close()
		}
		closeAll(o.fds)
	}
}
