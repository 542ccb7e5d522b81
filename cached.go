package penstock

import "penstock.io/penstock/meta"

// Answers from memory.
//
// A caller that serves many programs with one goroutine (package fuse) must know beforehand
// whether a call could wait: for an owner, a chunk server, a recall. The methods of this file
// never wait. If ok is false, the method did nothing, and the caller calls the method of the
// same name without Cached. Answers are covered by the same leases as the answers of the other
// methods, and may be cached for the same time.

// LookupCached is Lookup of a name that is cached, or known to be absent.
func (v *Volume) LookupCached(parent meta.Ino, name string) (e Entry, ok bool) {
	if name == "." || name == ".." || len(name) > meta.MaxName || v.view.isStub(parent) || v.index.inUse() != nil {
		return Entry{}, false
	}
	p := v.node(parent)
	defer p.put()
	p.mu.Lock()
	to, known := p.lookLocked(name)
	steady := p.recall == nil
	p.mu.Unlock()
	switch {
	case !known || to.vol != 0:
		return Entry{}, false
	case to.ino == 0:
		e = Entry{Volume: v.id, Negative: true, Valid: v.valid()}
	default:
		if e, ok = v.GetAttrCached(to.ino); !ok {
			return Entry{}, false
		}
	}
	v.c.stats.hits.Add(1)
	return e.named(steady), true
}

// GetAttrCached is GetAttr of an inode whose attributes are cached.
func (v *Volume) GetAttrCached(ino meta.Ino) (e Entry, ok bool) {
	if v.view.isStub(ino) || v.index.inUse() != nil {
		return Entry{}, false
	}
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.attrOK || !in.liveLocked() {
		return Entry{}, false
	}
	return in.entryLocked(nil, true), true
}

// OpenCached is Open for reading of a file whose map is cached under a lease, and
// which is not sealed: of a sealed one a descriptor may have to be asked for.
func (v *Volume) OpenCached(ino meta.Ino, flags uint32) (info OpenInfo, ok bool) {
	if forWriting(flags) || flags&flagTrunc != 0 {
		return OpenInfo{}, false
	}
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	f := in.readableLocked()
	if f == nil || f.sealWant {
		in.mu.Unlock()
		return OpenInfo{}, false
	}
	info = in.openInfoLocked()
	if info.Sealed || !in.attr.IsRegular() {
		in.mu.Unlock()
		return OpenInfo{}, false
	}
	f.users.opens++
	in.openedLocked(f, info)
	head := f.head()
	in.mu.Unlock()
	v.reads.readAhead(head)
	return info, true
}

// readableLocked gives the file if its map may be used for reading now, else nil.
func (in *inode) readableLocked() *file {
	f := in.file
	if f == nil || !f.mapOK || !in.attrOK || in.recall != nil || in.lease < meta.LeaseShared || !in.liveLocked() {
		return nil
	}
	if f.ahead {
		f.ahead = false
		in.vol.opens.used.Add(1)
	}
	return f
}

// head is the first segment of a file.
func (f *file) head() (s segment) {
	if len(f.m.pages) > 0 {
		s = f.m.pages[0][0]
	}
	return s
}

// ReadCached is Read of bytes that are in memory; atime false leaves the access time
// alone.
func (v *Volume) ReadCached(ino meta.Ino, p []byte, off int64, atime bool) (n int, ok bool) {
	if off < 0 {
		return 0, false
	}
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	f := in.readableLocked()
	if f == nil {
		in.mu.Unlock()
		return 0, false
	}
	if f.m.inChunks(uint64(off), uint64(off)+uint64(len(p))) {
		in.mu.Unlock()
		return 0, false
	}
	n, _ = planRead(&f.m, f.size, p, uint64(off), nil)
	in.mu.Unlock()
	v.c.stats.read.Add(uint64(n))
	if off == 0 && atime {
		v.atimes.touch(in)
	}
	return n, true
}

// ReleaseCached is Release of an inode opened for reading, unless the release of its last
// opener deletes the file.
func (v *Volume) ReleaseCached(ino meta.Ino, flags uint32) (ok bool) {
	if forWriting(flags) {
		return false
	}
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	defer in.mu.Unlock()
	f := in.file
	switch {
	case f == nil || f.users.opens == 0:
		return true // opened through a predecessor of this process
	case f.users.opens == 1 && in.deadLocked(f) || f.failed != nil:
		return false
	}
	if !in.deadLocked(f) {
		v.closed.closedLocked(in)
	}
	in.releaseLocked(f, Handle{})
	return true
}
