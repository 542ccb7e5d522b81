package hold

import (
	"net"
	"os"
	"time"

	"penstock.io/penstock/fuse/kernel"
)

// record is the daemon's state of a mount.
type record struct {
	name           string
	device, memory *os.File
	number         uint64 // of the kernel's connection; 0: not known
	command        Command
	taken          int // number of take-overs; -1 before the first put

	// INVARIANT: server or successor is nil.
	server      *connection // to the process serving the mount
	successor   *connection // to the process that took the mount and does not serve yet
	waiting     []*waiter
	servedSince time.Time // of the last put
	yielded     bool      // the server was asked to go
	leaving     bool      // the server has announced its end
	// unservedSince is since when no process serves the mount, or only such as don't settle.
	unservedSince time.Time
	respawned     int // successors started since a server last settled
	starting      int // number of the successor being started; 0: none
	stillLooks    int // looks in a row at which the server was dying and could not end
	// aborted: the holder gave the mount up for its users. The memory keeps bytes not yet
	// durable for a process that will make the bytes durable.
	aborted bool
	dying   time.Time // when inspect first saw the server dying
}

// unserved reports whether a process may take over the mount.
func (m *record) unserved() bool { return m.server == nil && m.successor == nil }

// waiter is a process waiting for the answer to a take.
type waiter struct {
	conn    *connection
	replace bool
	until   time.Time
}

// connection is the daemon's connection to one process. The daemon's messages go through a
// queue, so that the daemon never waits for a process that doesn't read.
type connection struct {
	socket *net.UnixConn
	pid    int
	queue  chan message
}

// message is a queued packet, with its own descriptors.
type message struct {
	packet []byte
	fds    []*os.File
}

// maxQueued bounds the queued messages for a process. A process sends one request at a time.
const maxQueued = 8

// send queues a packet, with copies of the descriptors. If the queue is full, since the
// process doesn't read, or a descriptor can't be copied, send closes the connection. The
// caller holds the daemon's mu.
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

// writeQueued writes the queued messages until the queue is closed.
func (c *connection) writeQueued() {
	for o := range c.queue {
		if err := writePacket(c.socket, o.packet, o.fds...); err != nil {
			c.socket.Close()
		}
		closeAll(o.fds)
	}
}
