package fuse

import (
	"math"
	"slices"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// What the kernel's dirty pages of shared mappings must not do.
//
// The kernel tells of no mapping and of no store into one. What it must tell of is the
// READ that fills a page before a program can store into it. So a node may have dirty
// pages while it is open for writing, if a page of it was filled since it is; with its
// last RELEASE nothing is mapped any more, and all was written back.
//
//   - A lease is given back when these pages were written back (Launder, called by the
//     library).
//   - A write(2) goes around the page cache. If a page is filled before its bytes are in
//     the file, and stored into, the page comes back with old bytes beside the new one.
//     So while a write is under way, and until the kernel has dropped the pages that lie
//     there, of a page that is written back only the other bytes are taken.
//   - stat(2) and SEEK_DATA tell of bytes in holes, which the kernel writes back first.

var _ penstock.Launderer = (*Notifier)(nil)

// MayBeDirty reports whether the kernels may have dirty pages of an inode.
func (n *Notifier) MayBeDirty(v meta.VolumeID, ino meta.Ino) (yes bool) {
	n.each(func(f *fileSystem) {
		node := f.nodeID(v, ino)
		yes = yes || f.opens.mayBeDirty(node) || f.back.has(node)
	})
	return yes
}

// Launder has the kernels write back and drop an inode's pages, and waits until
// these are in the file.
func (n *Notifier) Launder(v meta.VolumeID, ino meta.Ino) {
	n.InvalData(v, ino, 0, 0)
	n.Settle(v, ino)
}

// Settle waits until the pages that were written back by now are in the file.
func (n *Notifier) Settle(v meta.VolumeID, ino meta.Ino) {
	n.each(func(f *fileSystem) { f.back.settle(f.nodeID(v, ino)) })
}

// mayBeDirty reports whether the kernel may have dirty pages of a node.
func (o *opens) mayBeDirty(node uint64) (yes bool) {
	o.with(node, false, func(n *openNode) { yes = n.mayBeDirty() })
	return yes
}

func (n *openNode) mayBeDirty() bool { return n.writers > 0 && (n.filled || n.mapped) }

// fills notes that a page is being filled, and reports whether the node may have dirty
// pages from now on.
func (n *openNode) fills() (first bool) {
	first = n.writers > 0 && !n.filled
	n.filled = n.filled || first
	return first
}

// around is a change of a file's bytes that goes around the page cache.
type around struct {
	id uint64
	span
}

// beginAround notes such a change of [from, to).
func (o *opens) beginAround(node uint64, from, to int64) (id uint64) {
	id = o.next.Add(1)
	o.with(node, false, func(n *openNode) { n.around = append(n.around, around{id, span{from, to}}) })
	return id
}

// endAround ends it: the kernel has no older pages there any more.
func (o *opens) endAround(node, id uint64) {
	o.with(node, false, func(n *openNode) {
		n.around = slices.DeleteFunc(n.around, func(a around) bool { return a.id == id })
	})
}

// besides gives the parts of [off, off+length) that no change under way goes around.
func (o *opens) besides(node uint64, off, length int64) []span {
	parts := []span{{off, off + length}}
	o.with(node, false, func(n *openNode) {
		for _, a := range n.around {
			var rest []span
			for _, p := range parts {
				if a.to <= p.from || p.to <= a.from {
					rest = append(rest, p)
					continue
				}
				if p.from < a.from {
					rest = append(rest, span{p.from, a.from})
				}
				if a.to < p.to {
					rest = append(rest, span{a.to, p.to})
				}
			}
			parts = rest
		}
	})
	return parts
}

// toEnd is the end of a change whose place is known when it is done.
const toEnd = math.MaxInt64

// takePage takes what the kernel has written back of a mapping.
func (f *fileSystem) takePage(v Volume, call *penstock.Call, node uint64, ino meta.Ino, p []byte, off int64) {
	epoch := v.Epoch()
	p = slices.Clone(p)
	f.opens.clearTail(node, p, off)
	for i, s := range f.opens.besides(node, off, int64(len(p))) {
		c := *call
		c.Op.Step += uint32(i)
		f.addPage(node, pageWrite{v: v, call: &c, ino: ino, data: p[s.from-off : s.to-off : s.to-off], off: s.from, epoch: epoch})
	}
}

// hasHoles reports whether a file may have holes, which stat(2) tells.
func hasHoles(a *meta.Attr) bool { return a.IsRegular() && a.Blocks < a.Size }

// answered is what the kernel was told of a node, as far as it acts by it.
type answered struct {
	mode, uid, gid uint32
	size           uint64
}

func answeredOf(a *meta.Attr) answered { return answered{a.Mode, a.UID, a.GID, a.Size} }

// mayFill reports whether stat(2) may have to wait for dirty pages that lie in holes. The
// kernel then must not cache the attributes.
func (f *fileSystem) mayFill(node uint64, a *meta.Attr) (yes bool) {
	if hasHoles(a) {
		f.opens.with(node, false, func(n *openNode) {
			yes = n.mayBeDirty()
			n.told = answeredOf(a)
		})
	}
	return yes
}

// mustFill reports whether a GETATTR is to have dirty pages in holes written back. That
// makes the kernel take the answer for older than what it knows: it tells stat(2) of it and
// goes by the older attributes itself. So what it goes by must be the same.
func (f *fileSystem) mustFill(node uint64, a *meta.Attr) (yes bool) {
	if hasHoles(a) {
		f.opens.with(node, false, func(n *openNode) { yes = n.mayBeDirty() && n.told == answeredOf(a) })
	}
	return yes
}

// manyHoles are written back as one, with what lies between them.
const manyHoles = 32

// fillHoles has the kernel write back the pages that lie in a file's holes.
func (f *fileSystem) fillHoles(ctx request, v Volume, node uint64, ino meta.Ino) {
	for off, n := int64(0), 0; ; n++ {
		hole, err := v.Seek(ctx, ino, off, penstock.SeekHole)
		if err != nil {
			break // the end of the file
		}
		data, length := int64(0), int64(0)
		if n < manyHoles {
			if data, err = v.Seek(ctx, ino, hole, penstock.SeekData); err == nil {
				length = data - hole
			}
		}
		f.back.invalidate(node, func() { f.conn.invalidate(node, hole, length) })
		if length == 0 {
			break
		}
		off = data
	}
	f.back.settle(node)
}
