package fuse

import (
	"slices"
	"sync"
	"syscall"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Notifier passes a client's recalls on to the kernel, for all mounts of the client. The
// caller makes the Notifier first and gives it to penstock.Dial and to New.
//
// # Why no notification waits for an operation in flight
//
//   - Attributes: the kernel only marks attributes as stale and takes no inode lock.
//   - Names: FUSE_NOTIFY_INVAL_ENTRY takes the directory's inode lock, held by a create in
//     flight (measured: the notification waited until the create was answered). So
//     FUSE_NOTIFY_INC_EPOCH makes all names of the mount stale at once, without a lock and in
//     0.7 us; the kernel looks up each name again at its next use.
//   - Pages: locked by READs, which the library answers under the old lease, and by the
//     writing back of mappings, which writeback.go answers at once.
//
// The names of ended snapshots are the exception: dropping such a name locks only the
// directory of snapshots, and forgetName waits for 100 ms at most.
//
// # Answers in preparation
//
// An answer made before the recall may reach the kernel after the notification. If the inode
// is new to the kernel, the notification finds no inode, and the answer brings old attributes
// with a long timeout. So each invalidation begins a new generation, and an answer from an
// older generation loses its timeouts (conn.reply).
type Notifier struct {
	mu     sync.RWMutex
	mounts []*fileSystem
}

// NewNotifier makes a Notifier without mounts.
func NewNotifier() *Notifier { return new(Notifier) }

var (
	_ penstock.Notifier   = (*Notifier)(nil)
	_ penstock.Pruner     = (*Notifier)(nil)
	_ penstock.ViewHolder = (*Notifier)(nil)
)

func (n *Notifier) add(f *fileSystem) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mounts = append(n.mounts, f)
}

func (n *Notifier) remove(f *fileSystem) {
	n.mu.Lock()
	defer n.mu.Unlock()
	var rest []*fileSystem
	for _, m := range n.mounts {
		if m != f {
			rest = append(rest, m)
		}
	}
	n.mounts = rest
}

// each runs fn for every mount, without the lock: fn may wait for the kernel.
func (n *Notifier) each(fn func(*fileSystem)) {
	n.mu.RLock()
	list := n.mounts
	n.mu.RUnlock()
	for _, f := range list {
		fn(f)
	}
}

// InvalAttr drops the attributes of an inode.
func (n *Notifier) InvalAttr(v meta.VolumeID, ino meta.Ino) {
	n.each(func(f *fileSystem) {
		f.conn.newGeneration()
		f.conn.invalidateAttr(f.nodeID(v, ino))
	})
}

// InvalData drops attributes and the pages of [off, off+length); all pages from off if length
// <= 0.
//
// The kernel waits for locked pages and ignores signals meanwhile. If this process were killed
// during such a wait for a READ, no process would answer the READ. Then the waiting thread
// would stay, and keep the connection open, and all users of the mount would hang until an
// operator aborts the connection (umount -f). So InvalData first waits for unanswered READs;
// the kernel then waits only for READs of the same moment.
func (n *Notifier) InvalData(v meta.VolumeID, ino meta.Ino, off, length int64) {
	n.each(func(f *fileSystem) {
		f.conn.newGeneration()
		node := f.nodeID(v, ino)
		f.opens.awaitPageReads(node)
		f.back.invalidate(node, func() { f.conn.invalidate(node, off, max(length, 0)) })
	})
}

// Holds reports whether a mount's kernel connection knows an inode, by the result of an
// attribute notification. The notification drops the attributes.
func (n *Notifier) Holds(v meta.VolumeID, ino meta.Ino) (held bool) {
	n.each(func(f *fileSystem) {
		held = f.conn.knows(f.nodeID(v, ino)) || held
	})
	return held
}

// Prune makes the kernel forget unused inodes, with their paths and cached pages. The kernel
// sends FORGET for each. Kernels before Linux 6.18 keep the inodes until memory runs short.
func (n *Notifier) Prune(v meta.VolumeID, inos []meta.Ino) {
	n.each(func(f *fileSystem) {
		if f.conn.minor < minorPrune {
			return
		}
		for some := range slices.Chunk(inos, prunedAtOnce) {
			nodes := make([]uint64, len(some))
			for i, ino := range some {
				nodes[i] = f.nodeID(v, ino)
			}
			f.conn.prune(nodes)
		}
	})
}

// HoldsView reports whether the kernel knows an inode of an ended view.
func (n *Notifier) HoldsView(v meta.VolumeID) (held bool) {
	n.each(func(f *fileSystem) { held = f.holdsView(v) || held })
	return held
}

// InvalEntries drops the names of a directory, and every other directory's.
func (n *Notifier) InvalEntries(v meta.VolumeID, dir meta.Ino) {
	n.each(func(f *fileSystem) {
		f.conn.newGeneration()
		if !f.noEpoch {
			f.conn.notify(notifyIncEpoch, nil)
		}
		f.conn.invalidateAttr(f.nodeID(v, dir))
	})
}

// Codes of notifications, as in linux/fuse.h.
const (
	notifyInvalInode = 2
	notifyInvalEntry = 3
	notifyIncEpoch   = 8
	notifyPrune      = 9
)

// prunedAtOnce bounds the nodes of one notification.
const prunedAtOnce = 512

// invalidateAttr drops attributes only.
func (c *conn) invalidateAttr(node uint64) { c.invalInode(node, -1, 0) }

// invalidate drops attributes and the pages of [off, off+n), to the end if n is zero.
// invalidate waits for READs and writing back of these pages.
func (c *conn) invalidate(node uint64, off, n int64) { c.invalInode(node, off, n) }

// invalInode fails with ENOENT if the kernel doesn't know the inode.
func (c *conn) invalInode(node uint64, off, n int64) error {
	var b [24]byte
	order.PutUint64(b[0:], node)
	order.PutUint64(b[8:], uint64(off))
	order.PutUint64(b[16:], uint64(n))
	return c.notify(notifyInvalInode, b[:])
}

// invalidateName drops a name of a directory, and all unused paths through the name.
// invalidateName waits for lookups and listings of the directory.
func (c *conn) invalidateName(dir uint64, name string) {
	b := make([]byte, 16, 16+len(name)+1)
	order.PutUint64(b[0:], dir)
	order.PutUint32(b[8:], uint32(len(name)))
	_ = c.notify(notifyInvalEntry, append(append(b, name...), 0)) // ENOENT: unknown name
}

// prune makes the kernel forget unused nodes.
//
//	count 4 | padding 4 | spare 8 | nodes 8 each
func (c *conn) prune(nodes []uint64) {
	b := make([]byte, 16+8*len(nodes))
	order.PutUint32(b, uint32(len(nodes)))
	for i, node := range nodes {
		order.PutUint64(b[16+8*i:], node)
	}
	_ = c.notify(notifyPrune, b)
}

// knows reports whether the kernel may know an inode.
func (c *conn) knows(node uint64) bool {
	switch c.invalInode(node, -1, 0) {
	case syscall.ENOENT, syscall.ENODEV, syscall.ENOTCONN, syscall.EBADF:
		return false
	}
	return true
}

// notify writes one notification: the header of an answer with unique zero, then the body.
//
//	length 4 | code 4 | unique 8 | body
func (c *conn) notify(code int32, body []byte) error {
	b := make([]byte, outHeaderSize+len(body))
	order.PutUint32(b, uint32(len(b)))
	order.PutUint32(b[4:], uint32(code))
	copy(b[outHeaderSize:], body)
	err := c.write(b)
	switch err {
	case nil, syscall.ENOENT, syscall.ENODEV, syscall.ENOTCONN, syscall.EBADF:
		// The kernel doesn't know the inode, or the mount is gone.
	default:
		c.log.Error("notification refused by the kernel", "code", code, "err", err)
	}
	return err
}
