package namespace

import (
	"encoding/binary"
	"slices"

	"penstock.io/penstock/meta"
)

// A second implementation of the tree, as plain as possible: nodes, pointers and arrays.
// Files are made of units of 512 bytes, each with a number for its contents, so that a
// file is a small array.
const unit = 512

type mnode struct {
	ino      meta.Ino
	mode     uint32
	uid, gid uint32
	nlink    int
	rdev     uint32
	vol      meta.VolumeID // a junction
	parent   *mnode
	kids     map[string]*mnode
	target   string
	size     int // units
	data     []uint64
	alloc    []bool // may go on behind size
	inline   int    // units
	xattrs   map[string]string
	holders  map[meta.SessionID]bool
	tmp      bool
	sealed   bool
	unsynced bool
	open     *mchunk // of the open-ended extent
	openOff  int
	openAt   int // in the chunk, units
	a, m, c  meta.Time
}

type mchunk struct {
	id     meta.ChunkID
	own    bool
	open   bool
	length int // units appended so far, or sealed
	// servers are the servers of a sealed chunk.
	servers []meta.ServerID
}

type model struct {
	root    *mnode
	nodes   map[meta.Ino]*mnode
	chunks  []*mchunk
	now     meta.Time
	session meta.SessionID
}

func (n *mnode) isDir() bool { return n.mode&meta.TypeMask == meta.TypeDir }
func (n *mnode) isReg() bool { return n.mode&meta.TypeMask == meta.TypeRegular }

func (n *mnode) grow(to int) {
	for len(n.data) < to {
		n.data = append(n.data, 0)
		n.alloc = append(n.alloc, false)
	}
}

func (n *mnode) blocks() (b int) {
	for _, a := range n.alloc {
		if a {
			b++
		}
	}
	return b
}

func (n *mnode) attr() meta.Attr {
	a := meta.Attr{Ino: n.ino, Mode: n.mode, Nlink: uint32(n.nlink), UID: n.uid, GID: n.gid, Rdev: n.rdev, Atime: n.a, Mtime: n.m, Ctime: n.c}
	switch {
	case n.isDir():
		for name := range n.kids {
			a.Size += uint64(len(name))
		}
		if n.parent != nil {
			a.Parent = n.parent.ino
		}
	case n.isReg():
		a.Size = uint64(n.size * unit)
		a.Blocks = uint64(n.blocks() * unit)
	default:
		a.Size = uint64(len(n.target))
	}
	if len(n.xattrs) > 0 {
		a.Flags |= meta.FlagHasXattrs
	}
	if n.sealed {
		a.Flags |= meta.FlagSealed
	}
	if n.unsynced {
		a.Flags |= meta.FlagUnsynced
	}
	if n.inline > 0 {
		a.Flags |= meta.FlagInline
	}
	if n.open != nil {
		a.Flags |= meta.FlagOpenEnded
	}
	if _, ok := n.xattrs["security.capability"]; ok {
		a.Flags |= meta.FlagHasCaps
	}
	return a
}

func newModel(now meta.Time, s meta.SessionID) *model {
	m := &model{nodes: map[meta.Ino]*mnode{}, now: now, session: s}
	m.root = &mnode{ino: 1, mode: meta.TypeDir | 0o755, nlink: 2, kids: map[string]*mnode{}, a: now, m: now, c: now}
	m.root.parent = m.root
	m.nodes[1] = m.root
	return m
}

func (m *model) dir(ino meta.Ino) (*mnode, meta.Kind) {
	n := m.nodes[ino]
	switch {
	case n == nil || n.nlink == 0:
		if n != nil && !n.isDir() {
			return nil, meta.NotFound
		}
		return nil, meta.NotFound
	case !n.isDir():
		return nil, meta.NotDir
	}
	return n, 0
}

func (n *mnode) changed(now meta.Time) { n.m, n.c = now, now }

func (m *model) create(op *meta.Create, ino meta.Ino) meta.Kind {
	d, k := m.dir(op.Parent)
	if k != 0 {
		return k
	}
	if len(op.Name) > 255 {
		return meta.NameTooLong
	}
	if old := d.kids[op.Name]; old != nil {
		if !op.Excl && old.isReg() && op.Mode&meta.TypeMask == meta.TypeRegular {
			return 0
		}
		return meta.Exists
	}
	n := &mnode{ino: ino, mode: op.Mode, uid: op.UID, gid: op.GID, nlink: 1, a: m.now, m: m.now, c: m.now, xattrs: map[string]string{}}
	if d.mode&meta.ModeSetGID != 0 {
		n.gid = d.gid
	}
	switch op.Mode & meta.TypeMask {
	case meta.TypeDir:
		n.kids, n.nlink, n.parent = map[string]*mnode{}, 2, d
		d.nlink++
		n.mode |= d.mode & meta.ModeSetGID
		n.mode &^= op.Umask & 0o777
	case meta.TypeSymlink:
		n.target = op.Target
		n.mode |= 0o777
	case meta.TypeChar, meta.TypeBlock:
		n.rdev = op.Rdev
		n.mode &^= op.Umask & 0o777
	default:
		n.mode &^= op.Umask & 0o777
	}
	d.kids[op.Name] = n
	m.nodes[ino] = n
	d.changed(m.now)
	return 0
}

func (m *model) get(ino meta.Ino) (*mnode, meta.Kind) {
	if n := m.nodes[ino]; n != nil {
		return n, 0
	}
	return nil, meta.Stale
}

func (m *model) link(op *meta.Link) meta.Kind {
	n, k := m.get(op.Ino)
	if k != 0 {
		return k
	}
	d, k := m.dir(op.Parent)
	switch {
	case k != 0:
		return k
	case d.kids[op.Name] != nil:
		return meta.Exists
	case n.isDir():
		return meta.NotPermitted
	case n.nlink == 0 && !n.tmp:
		return meta.NotFound
	}
	if n.tmp {
		n.tmp, n.holders = false, nil
	}
	n.nlink++
	n.c = m.now
	d.kids[op.Name] = n
	d.changed(m.now)
	return 0
}

func (m *model) lose(n *mnode, holders []meta.SessionID) {
	n.c = m.now
	if n.isDir() {
		n.nlink = 0
	} else {
		n.nlink--
	}
	if n.nlink > 0 {
		return
	}
	n.holders = map[meta.SessionID]bool{}
	if len(holders) == 0 {
		n.holders[m.session] = true
	}
	for _, s := range holders {
		n.holders[s] = true
	}
}

func (m *model) unlink(op *meta.Unlink) meta.Kind {
	d, k := m.dir(op.Parent)
	if k != 0 {
		return k
	}
	n := d.kids[op.Name]
	switch {
	case n == nil:
		return meta.NotFound
	case n.vol != 0:
		return meta.Busy
	case op.Dir && !n.isDir():
		return meta.NotDir
	case !op.Dir && n.isDir():
		return meta.IsDir
	case op.Dir && len(n.kids) > 0:
		return meta.NotEmpty
	}
	delete(d.kids, op.Name)
	if op.Dir {
		d.nlink--
	}
	d.changed(m.now)
	m.lose(n, op.Holders)
	return 0
}

func below(d, top *mnode) bool {
	for ; ; d = d.parent {
		if d == top {
			return true
		}
		if d.parent == d {
			return false
		}
	}
}

func (m *model) rename(op *meta.Rename) meta.Kind {
	if op.Flags == 3 {
		return meta.Invalid
	}
	from, k := m.dir(op.Parent)
	if k != 0 {
		return k
	}
	to, k := m.dir(op.NewParent)
	if k != 0 {
		return k
	}
	n, old := from.kids[op.Name], to.kids[op.NewName]
	exch := op.Flags == meta.RenameExchange
	switch {
	case n == nil:
		return meta.NotFound
	case old != nil && op.Flags == meta.RenameNoReplace:
		return meta.Exists
	case old == nil && exch:
		return meta.NotFound
	case n.vol != 0 || old != nil && old.vol != 0:
		return meta.Busy
	case from != to && n.isDir() && below(to, n):
		return meta.Invalid
	case from != to && old != nil && old.isDir() && below(from, old) && exch:
		return meta.Invalid
	case from != to && old != nil && old.isDir() && below(from, old):
		return meta.NotEmpty
	case n == old:
		return 0
	}
	if old != nil && !exch {
		switch {
		case n.isDir() && !old.isDir():
			return meta.NotDir
		case !n.isDir() && old.isDir():
			return meta.IsDir
		case len(old.kids) > 0:
			return meta.NotEmpty
		case old.isReg() && n.unsynced:
			return meta.NotSynced
		}
	}
	delete(from.kids, op.Name)
	to.kids[op.NewName] = n
	if n.isDir() {
		from.nlink--
		to.nlink++
		n.parent = to
	}
	if exch {
		from.kids[op.Name] = old
		if old.isDir() {
			to.nlink--
			from.nlink++
			old.parent = from
		}
		old.c = m.now
	} else if old != nil {
		if old.isDir() {
			to.nlink--
		}
		m.lose(old, op.Holders)
	}
	n.c = m.now
	from.changed(m.now)
	to.changed(m.now)
	return 0
}

func (m *model) gone(n *mnode) {
	if n.nlink == 0 && len(n.holders) == 0 {
		delete(m.nodes, n.ino)
	}
}

func (n *mnode) cut(to int) {
	n.grow(to)
	n.data, n.alloc = n.data[:to], n.alloc[:to]
	n.inline = min(n.inline, to)
}

func (m *model) setAttr(op *meta.SetAttr) meta.Kind {
	n, k := m.get(op.Ino)
	if k != 0 {
		return k
	}
	if op.Mask&meta.SetSize != 0 {
		switch {
		case n.isDir():
			return meta.IsDir
		case !n.isReg():
			return meta.Invalid
		case n.sealed:
			return meta.NotPermitted
		case n.open != nil:
			return meta.Busy
		}
		size := int(op.Size / unit)
		if size <= n.size {
			n.cut(size)
		}
		n.size = size
		n.m = m.now
		if size == 0 {
			n.unsynced = false
		}
	}
	if op.Mask&meta.SetUID != 0 {
		n.uid = op.UID
	}
	if op.Mask&meta.SetGID != 0 {
		n.gid = op.GID
	}
	if op.Mask&meta.SetMode != 0 {
		n.mode = n.mode&meta.TypeMask | op.Mode
	}
	if op.Mask&meta.SetKillPriv != 0 {
		n.kill()
	}
	if op.Mask&meta.SetAtime != 0 {
		n.a = op.Atime
	}
	if op.Mask&meta.SetMtimeNow != 0 {
		n.m = m.now
	}
	if op.Mask != 0 {
		n.c = m.now
	}
	return 0
}

func (n *mnode) kill() bool {
	if n.isDir() {
		return false
	}
	was := n.mode
	n.mode &^= meta.ModeSetUID
	if n.mode&0o010 != 0 {
		n.mode &^= meta.ModeSetGID
	}
	_, caps := n.xattrs["security.capability"]
	delete(n.xattrs, "security.capability")
	return caps || n.mode != was
}

func (m *model) reg(ino meta.Ino) (*mnode, meta.Kind) {
	n, k := m.get(ino)
	switch {
	case k != 0:
		return nil, k
	case n.isDir():
		return nil, meta.IsDir
	case !n.isReg():
		return nil, meta.Invalid
	}
	return n, 0
}

func contents(c meta.ChunkID, at int) uint64 { return c.Counter<<20 | uint64(at) + 1 }

func (m *model) write(op *meta.Write) meta.Kind {
	n, k := m.reg(op.Ino)
	if k != 0 {
		return k
	}
	content := len(op.Extents) > 0 || op.Inline || int(op.Size/unit) > n.size
	closes := op.CloseEnded && n.open != nil
	if (content || closes) && n.sealed {
		return meta.NotPermitted
	}
	if op.Inline {
		if n.open != nil && !closes {
			return meta.Busy
		}
		n.cut(0)
		n.inline = len(op.Data) / unit
		n.grow(n.inline)
		for i := range n.inline {
			n.data[i], n.alloc[i] = binary.BigEndian.Uint64(op.Data[i*unit:]), true
		}
		n.size, n.unsynced = n.inline, false
		n.open = nil
	} else if len(op.Extents) > 0 {
		e := op.Extents[0]
		off, end := int(e.Off/unit), int(e.End()/unit)
		if n.open != nil && !closes {
			if !e.OpenEnded || e.Chunk != n.open.id || off != n.openOff || end < n.size {
				return meta.Busy
			}
		}
		if e.OpenEnded && end < n.size {
			return meta.Invalid
		}
		if off < n.inline && (off > 0 || end < n.inline) {
			return meta.Invalid
		}
		if off < n.inline {
			n.inline = 0
		}
		if closes {
			n.open = nil
		}
		n.grow(end)
		for i := off; i < end; i++ {
			n.data[i], n.alloc[i] = contents(e.Chunk, int(e.ChunkOff/unit)+i-off), true
		}
		n.size = max(n.size, end)
		n.unsynced = n.unsynced || !op.Synced
		if e.OpenEnded {
			n.openOff, n.openAt = off, int(e.ChunkOff/unit)
			for _, c := range m.chunks {
				if c.id == e.Chunk {
					n.open = c
				}
			}
		}
	} else if closes {
		n.open = nil
	} else if content && n.open != nil {
		return meta.Busy
	}
	n.size = max(n.size, int(op.Size/unit))
	if op.MarkSynced {
		n.unsynced = false
	}
	if content || closes {
		n.m, n.c = m.now, m.now
	}
	if op.Kill && n.kill() {
		n.c = m.now
	}
	if op.Seal {
		if n.open != nil {
			return meta.Busy
		}
		n.sealed = true
	}
	return 0
}

func (m *model) fallocate(op *meta.Fallocate) meta.Kind {
	n, k := m.reg(op.Ino)
	switch {
	case k != 0:
		return k
	case n.sealed:
		return meta.NotPermitted
	case n.open != nil:
		return meta.Busy
	}
	lo, hi := int(op.Off/unit), int((op.Off+op.Len)/unit)
	const block = meta.BlockSize / unit
	switch op.Mode &^ meta.FallocKeepSize {
	case 0:
		lo, end := lo/block*block, (hi+block-1)/block*block
		n.grow(end)
		for i := max(lo, n.inline); i < end; i++ {
			n.alloc[i] = true
		}
	case meta.FallocPunchHole:
		n.grow(hi)
		for i := lo; i < hi; i++ {
			n.data[i] = 0
			n.alloc[i] = i < n.inline
		}
	case meta.FallocZeroRange:
		n.grow(hi)
		for i := lo; i < hi; i++ {
			n.data[i], n.alloc[i] = 0, true
		}
	case meta.FallocCollapse:
		if lo%block != 0 || hi%block != 0 || hi >= n.size {
			return meta.Invalid
		}
		n.grow(hi)
		n.inline = min(n.inline, lo)
		n.data = slices.Delete(n.data, lo, hi)
		n.alloc = slices.Delete(n.alloc, lo, hi)
		n.size -= hi - lo
	case meta.FallocInsert:
		if lo%block != 0 || hi%block != 0 || lo >= n.size {
			return meta.Invalid
		}
		if lo < n.inline {
			return meta.NotSupported
		}
		n.grow(lo)
		n.data = slices.Insert(n.data, lo, make([]uint64, hi-lo)...)
		n.alloc = slices.Insert(n.alloc, lo, make([]bool, hi-lo)...)
		n.size += hi - lo
	}
	if op.Mode&(meta.FallocKeepSize|meta.FallocCollapse|meta.FallocInsert) == 0 {
		n.size = max(n.size, hi)
	}
	n.changed(m.now)
	return 0
}

// copyRange copies from the live volume, or from a snapshot's copy of the volume.
func (m *model) copyRange(op *meta.CopyRange, from map[meta.Ino]*mnode) (int, meta.Kind) {
	src, k := (&model{nodes: from}).reg(op.Src)
	if k != 0 {
		return 0, k
	}
	dst, k := m.reg(op.Dst)
	so, do, n := int(op.SrcOff/unit), int(op.DstOff/unit), int(op.Len/unit)
	switch {
	case k != 0:
		return 0, k
	case dst.sealed:
		return 0, meta.NotPermitted
	case so >= src.size:
		return 0, 0
	}
	n = min(n, src.size-so)
	switch {
	case src == dst && so < do+n && do < so+n:
		return 0, meta.Invalid
	case src.open != nil || dst.open != nil:
		return 0, meta.Busy
	case so < src.inline || do < dst.inline:
		return 0, meta.NotSupported
	}
	src.grow(so + n)
	dst.grow(do + n)
	for i := range n {
		dst.data[do+i] = src.data[so+i]
		dst.alloc[do+i] = src.alloc[so+i] && src.data[so+i] != 0
	}
	dst.size = max(dst.size, do+n)
	dst.unsynced = dst.unsynced || src.unsynced
	dst.changed(m.now)
	return n, 0
}

func (m *model) seal(c *mchunk, length int) {
	c.open, c.length = false, length
	for _, n := range m.nodes {
		if n.open != c {
			continue
		}
		was := n.size
		n.open = nil
		end := n.openOff + max(0, length-n.openAt)
		n.grow(end)
		for i := n.openOff; i < end; i++ {
			n.data[i], n.alloc[i] = contents(c.id, n.openAt+i-n.openOff), true
		}
		n.size = end
		if n.size != was {
			n.changed(m.now)
		}
	}
}
