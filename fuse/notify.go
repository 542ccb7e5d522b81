package fuse

import (
	"slices"
	"sync"
	"syscall"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Notifier passes a client's recalls on to the kernel, for all mounts of the
// client. It is made first and given to penstock.Dial and to New.
//
// # Why nothing here can wait for an operation in flight
//
//   - Attributes: the kernel only marks them; no lock of an inode is taken.
//   - Names: FUSE_NOTIFY_INVAL_ENTRY takes the directory's inode lock, which a
//     create in flight holds (measured: it waited until the create was
//     answered). So all names of the mount grow old at once, by
//     FUSE_NOTIFY_INC_EPOCH, which takes no lock and 0.7 us; each is looked up
//     again when it is used next.
//   - Pages: locked by READs, which the library answers under the old lease, and
//     by the writing back of mappings, which writeback.go answers at once.
//
// The names of snapshots that are gone are the exception: all that is locked is the
// directory of snapshots, and who drops those waits for a moment only (forgetName).
//
// # What is on its way
//
// An answer may have been made before the recall and reach the kernel after it;
// if the inode is new to the kernel, the notification finds nothing, and the
// answer brings old attributes with a long timeout. So each invalidation begins
// a new generation, and an answer from an older one loses its timeouts
// (conn.reply).
type Notifier struct {
	mu     sync.RWMutex
	mounts []*fileSystem
}

// NewNotifier makes a Notifier that no mount uses yet.
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

// InvalData drops pages, of all bytes from off if n <= 0, and attributes.
//
// The kernel waits for locked pages without listening to signals. If this
// process were killed while it waits for a READ, which then nobody answers,
// the thread would stay, with it the connection, and all who use the mount
// would hang until somebody aborts it (umount -f). So READs that are being
// answered are waited for here, and the kernel meets only those that came in
// the same moment.
func (n *Notifier) InvalData(v meta.VolumeID, ino meta.Ino, off, length int64) {
	n.each(func(f *fileSystem) {
		f.conn.newGeneration()
		node := f.nodeID(v, ino)
		f.opens.awaitPageReads(node)
		f.back.invalidate(node, func() { f.conn.invalidate(node, off, max(length, 0)) })
	})
}

// Holds asks the kernels whether they know an inode: the notification that
// drops its attributes tells.
func (n *Notifier) Holds(v meta.VolumeID, ino meta.Ino) (held bool) {
	n.each(func(f *fileSystem) {
		held = f.conn.knows(f.nodeID(v, ino)) || held
	})
	return held
}

// Prune has the kernels forget inodes that they only remember: paths that nobody uses,
// and what is cached of them. FORGET tells of each. Kernels before Linux 6.18 keep them
// until they lack memory.
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

// HoldsView asks the kernels whether they know an inode of a view that ended.
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

// invalidate drops pages of [off, off+n), to the end if n is zero, and
// attributes. It waits for READs and writing back in flight of those pages.
func (c *conn) invalidate(node uint64, off, n int64) { c.invalInode(node, off, n) }

// invalInode fails with ENOENT if the kernel doesn't know the inode.
func (c *conn) invalInode(node uint64, off, n int64) error {
	var b [24]byte
	order.PutUint64(b[0:], node)
	order.PutUint64(b[8:], uint64(off))
	order.PutUint64(b[16:], uint64(n))
	return c.notify(notifyInvalInode, b[:])
}

// invalidateName drops a name of a directory, and all paths through it that are not
// in use. It waits for lookups and listings of the directory in flight.
func (c *conn) invalidateName(dir uint64, name string) {
	b := make([]byte, 16, 16+len(name)+1)
	order.PutUint64(b[0:], dir)
	order.PutUint32(b[8:], uint32(len(name)))
	_ = c.notify(notifyInvalEntry, append(append(b, name...), 0)) // ENOENT: it has none
}

// prune has the kernel forget nodes that are not in use.
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

// notify writes one notification: the header of an answer to no request (unique
// is zero), then its body.
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
