package fuse

import (
	"math"
	"slices"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Rules for the kernel's dirty pages of shared mappings.
//
// The kernel reports neither a mapping nor a store into a mapping. But the kernel must send
// the READ that fills a page before a program can store into the page. So a node may have
// dirty pages while the node is open for writing, once a page was filled during that time. At
// the last RELEASE no mapping is left, and the kernel has written back all pages.
//
//   - The library gives a lease back only after the write-back of these pages (Launder).
//   - A write(2) bypasses the page cache. Suppose the kernel fills a page before the written
//     bytes are in the file, and a program stores into the page. Then the kernel writes back
//     old bytes beside the new store. So while a write runs, and until the kernel has dropped
//     the pages of the written range, takePage ignores that range of a page written back.
//   - stat(2) and SEEK_DATA count bytes in holes only after the kernel has written back the
//     pages in the holes.

var _ penstock.Launderer = (*Notifier)(nil)

// MayBeDirty reports whether the kernels may have dirty pages of an inode.
func (n *Notifier) MayBeDirty(v meta.VolumeID, ino meta.Ino) (yes bool) {
	n.each(func(f *fileSystem) {
		node := f.nodeID(v, ino)
		yes = yes || f.opens.mayBeDirty(node) || f.back.has(node)
	})
	return yes
}

// Launder has the kernels write back and drop an inode's pages, and waits until the pages are
// in the file.
func (n *Notifier) Launder(v meta.VolumeID, ino meta.Ino) {
	n.InvalData(v, ino, 0, 0)
	n.Settle(v, ino)
}

// Settle waits until all pages already written back by the kernel are in the file.
func (n *Notifier) Settle(v meta.VolumeID, ino meta.Ino) {
	n.each(func(f *fileSystem) { f.back.settle(f.nodeID(v, ino)) })
}

// mayBeDirty reports whether the kernel may have dirty pages of a node.
func (o *opens) mayBeDirty(node uint64) (yes bool) {
	o.with(node, false, func(n *openNode) { yes = n.mayBeDirty() })
	return yes
}

func (n *openNode) mayBeDirty() bool { return n.writers > 0 && (n.filled || n.mapped) }

// fills notes the filling of a page. first is true if the node may have dirty pages from now
// on, and could not before.
func (n *openNode) fills() (first bool) {
	first = n.writers > 0 && !n.filled
	n.filled = n.filled || first
	return first
}

// around is a change of a file's bytes that bypasses the page cache.
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

// endAround ends a change: the kernel has dropped the older pages.
func (o *opens) endAround(node, id uint64) {
	o.with(node, false, func(n *openNode) {
		n.around = slices.DeleteFunc(n.around, func(a around) bool { return a.id == id })
	})
}

// besides returns the parts of [off, off+length) outside every running change that bypasses
// the page cache.
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

// toEnd is the end of a change whose range is unknown until the change is done.
const toEnd = math.MaxInt64

// pages keeps the rules above for the requests of one mount.
type pages struct{ *fileSystem }

// takePage queues the bytes p of a mapping, written back by the kernel.
func (pg *pages) takePage(v Volume, call *penstock.Call, node uint64, ino meta.Ino, p []byte, off int64) {
	epoch := v.Epoch()
	p = slices.Clone(p)
	pg.opens.clearTail(node, p, off)
	for i, s := range pg.opens.besides(node, off, int64(len(p))) {
		c := *call
		c.Op.Step += uint32(i)
		pg.addPage(node, pageWrite{v: v, call: &c, ino: ino, data: p[s.from-off : s.to-off : s.to-off], off: s.from, epoch: epoch})
	}
}

// dropTail has the kernel write back and drop the page at the end of a file, before a change at
// off, beyond that page, makes the file longer. Bytes stored in a mapping beyond the old end must
// then read as zeros: the kernel, which still knows the old size, does not write these bytes
// back. A page that the change itself reaches is dropped by the kernel or by wroteAround.
func dropTail(ctx request, f *fileSystem, v Volume, node uint64, off int64) error {
	if !f.opens.mayBeDirty(node) {
		return nil
	}
	_, ino := f.split(node)
	e, err := v.GetAttr(ctx, ino)
	if err != nil {
		return err
	}
	size := int64(e.Attr.Size)
	if end := pageEnd(size); size < end && end <= off {
		f.back.invalidate(node, func() { f.conn.invalidate(node, size, end-size) })
	}
	return nil
}

// hasHoles reports whether a file may have holes, which stat(2) tells.
func hasHoles(a *meta.Attr) bool { return a.IsRegular() && a.Blocks < a.Size }

// answered holds the last attributes answered for a node, as far as the kernel acts by the
// attributes.
type answered struct {
	mode, uid, gid uint32
	size           uint64
}

func answeredOf(a *meta.Attr) answered { return answered{a.Mode, a.UID, a.GID, a.Size} }

// mayFill reports whether stat(2) may have to wait for dirty pages in holes. If so, the kernel
// must not cache the attributes.
func (pg *pages) mayFill(node uint64, a *meta.Attr) (yes bool) {
	if hasHoles(a) {
		pg.opens.with(node, false, func(n *openNode) {
			yes = n.mayBeDirty()
			n.told = answeredOf(a)
		})
	}
	return yes
}

// mustFill reports whether a GETATTR must have the kernel write back dirty pages in holes.
// After such a write-back the kernel takes the answer for older than its own attributes:
// stat(2) returns the answer, but the kernel itself acts by its own attributes. So mustFill
// requires that mode, ids and size are unchanged since the last answer.
func (pg *pages) mustFill(node uint64, a *meta.Attr) (yes bool) {
	if hasHoles(a) {
		pg.opens.with(node, false, func(n *openNode) { yes = n.mayBeDirty() && n.told == answeredOf(a) })
	}
	return yes
}

// manyHoles bounds the holes written back separately; the rest of the file is written back as
// a whole.
const manyHoles = 32

// fillHoles has the kernel write back the pages in a file's holes.
func (pg *pages) fillHoles(ctx request, v Volume, node uint64, ino meta.Ino) {
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
		pg.back.invalidate(node, func() { pg.conn.invalidate(node, hole, length) })
		if length == 0 {
			break
		}
		off = data
	}
	pg.back.settle(node)
}
