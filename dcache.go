package penstock

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"penstock.io/penstock/meta"
)

// dent is the inode behind a name. A zero ino: the name does not exist.
type dent struct {
	ino meta.Ino
	vol meta.VolumeID // not zero for a junction
}

// dir caches the entries of a directory. It is right while the inode is leased.
type dir struct {
	names map[string]dent
	// complete: names has every existing entry.
	complete bool
	// changes counts the beginnings and ends of this client's own changes. The answer to a
	// lookup or listing sent before a change and received after the change may show either
	// state, so the answer is cached only if changes is unchanged.
	changes uint64
	misses  uint8
	// ahead is the position of the next prefetch, aheadRun whether a prefetch is running.
	ahead    uint64
	aheadRun bool
	// State of a listing under way: the cookie at which the next page continues, and the value
	// of changes at its beginning.
	listNext, listChanges uint64
	page                  *dirPage
}

// dirPage is one page of a listing, kept so that a reader with small buffers does not send a
// request for each buffer.
type dirPage struct {
	from    uint64 // the page follows this cookie
	entries []meta.Dirent
	eof     bool
	stamp   stamp
	named   bool   // the names are cached, so removals are known
	end     uint64 // cookie of the next name to be added; 0: none is ever added
}

// noListing as listNext: no page continues the listing.
const noListing = 1<<64 - 1

// Bounds of listings.
const (
	missesToPrefetch = 3
	prefetchPages    = 8
	firstPage        = 256
	fullPage         = 2048
	prefetchPage     = 1024
)

// dirLocked gives the directory's state, made on first use.
func (in *inode) dirLocked() *dir {
	if in.dir == nil {
		in.dir = &dir{}
	}
	return in.dir
}

// setNameLocked caches one name.
func (in *inode) setNameLocked(name string, to dent) {
	d, c := in.dirLocked(), in.vol.c
	if d.names == nil {
		d.names = make(map[string]dent)
	}
	if to.ino == 0 && d.complete {
		in.delNameLocked(name)
		return
	}
	old := len(d.names)
	if c.dentries.Load() >= c.maxDentries() && old > 0 {
		if _, ok := d.names[name]; !ok {
			c.dentries.Add(-int64(old))
			d.names, d.complete, d.page, old = make(map[string]dent), false, nil, 0
			d.listNext = noListing // the names cached so far are gone
		}
	}
	d.names[name] = to
	c.dentries.Add(int64(len(d.names) - old))
}

func (in *inode) delNameLocked(name string) {
	d := in.dirLocked()
	if _, ok := d.names[name]; ok {
		delete(d.names, name)
		in.vol.c.dentries.Add(-1)
	}
}

// lookLocked answers a lookup from memory.
func (in *inode) lookLocked(name string) (to dent, known bool) {
	d := in.dir
	if d == nil || !in.liveLocked() {
		return dent{}, false
	}
	to, known = d.names[name]
	return to, known || d.complete
}

// Lookup finds a name in a directory. An absent name is no error:
// Entry.Negative. "." and ".." work. Errors: NotDir, NameTooLong.
func (v *Volume) Lookup(ctx context.Context, parent meta.Ino, name string) (Entry, error) {
	if name == "." {
		return v.GetAttr(ctx, parent)
	}
	if len(name) > meta.MaxName {
		return Entry{}, meta.E("lookup", meta.NameTooLong, "", nil)
	}
	if v.view.isStub(parent) {
		return Entry{Volume: v.id, Negative: true, Valid: v.valid()}, nil
	}
	if e, ok, err := v.index.lookup(parent, name); ok {
		return e, err
	}
	p := v.node(parent)
	defer p.put()
	p.mu.Lock()
	to, known := p.lookLocked(name)
	steady := p.recall == nil
	if name == ".." { // listings do not contain "..", not even complete ones
		to, known = dent{ino: p.attr.Parent}, p.attrOK && p.attr.Parent != 0 && p.liveLocked()
	}
	if known {
		p.mu.Unlock()
		v.c.stats.hits.Add(1)
		return v.dirs.entryOf(ctx, to, steady)
	}
	d := p.dirLocked()
	changes := d.changes
	d.misses = min(d.misses+1, 200)
	ahead := d.misses >= missesToPrefetch && !d.aheadRun && p.lease != meta.LeaseNone && name != ".."
	if ahead {
		d.aheadRun, d.misses = true, 0
	}
	p.mu.Unlock()
	if ahead {
		p.pins.Add(1)
		v.c.spawn(func() {
			defer p.put()
			p.prefetch()
		})
	}

	res, stamp, err := v.owner.do(ctx, nil, &meta.Lookup{Parent: parent, Name: name}, meta.LeaseShared)
	if err != nil && !errors.Is(err, meta.NotFound) {
		return Entry{}, err
	}
	if err == nil {
		to = dent{ino: res.Attr.Ino, vol: res.Volume}
		if res.Volume != 0 {
			to.ino = meta.RootIno
		}
	}
	p.mu.Lock()
	// A reply overtaken by another change of this client is returned, but not cached.
	fresh := p.cacheableLocked(stamp) && p.dirLocked().changes == changes
	if fresh && name != ".." {
		p.setNameLocked(name, to)
	}
	if err == nil && res.ParentAttr.Ino == parent {
		p.learnLocked(&res.ParentAttr, stamp)
	}
	steady = fresh && p.recall == nil
	p.mu.Unlock()
	if err != nil {
		e := Entry{Volume: v.id, Negative: true}
		if steady {
			e.Valid = v.valid()
		}
		return e, nil
	}
	if to.vol != 0 {
		return v.dirs.entryOf(ctx, to, steady)
	}
	e := v.learn(&res.Attr, stamp)
	if !steady {
		e.Valid = 0
	}
	return e, nil
}

// entryOf makes the Entry of a cached name.
func (ds *directories) entryOf(ctx context.Context, to dent, steady bool) (Entry, error) {
	v := ds.v
	if to.ino == 0 {
		e := Entry{Volume: v.id, Negative: true}
		if steady {
			e.Valid = v.valid()
		}
		return e, nil
	}
	w := v
	if to.vol != 0 && v.frozen() {
		return v.view.stub(stubIno(to.vol)), nil
	}
	if to.vol != 0 {
		var err error
		if w, err = v.c.VolumeByID(ctx, to.vol); err != nil {
			return Entry{}, err
		}
	}
	e, err := w.GetAttr(ctx, to.ino)
	if !steady {
		e.Valid = 0
	}
	return e, err
}

// GetAttr returns an inode's attributes, including uncommitted writes of this client.
func (v *Volume) GetAttr(ctx context.Context, ino meta.Ino) (Entry, error) {
	if v.view.isStub(ino) {
		return v.view.stub(ino), nil
	}
	if e, ok, err := v.index.attr(ino); ok {
		return e, err
	}
	in := v.node(ino)
	defer in.put()
	in.mu.Lock()
	if in.attrOK && in.liveLocked() {
		e := in.entryLocked(nil, true)
		in.mu.Unlock()
		return e, nil
	}
	in.mu.Unlock()
	res, stamp, err := v.owner.do(ctx, nil, &meta.GetAttr{Ino: ino}, meta.LeaseShared)
	if err != nil {
		return Entry{}, err
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.entryLocked(&res.Attr, in.learnLocked(&res.Attr, stamp)), nil
}

// fetchPage fetches one page of a listing with attributes, and caches the entries that a lease
// covers.
func (in *inode) fetchPage(ctx context.Context, cookie uint64, n int, plus bool) (*dirPage, error) {
	v := in.vol
	in.mu.Lock()
	d := in.dirLocked()
	changes := d.changes
	in.mu.Unlock()
	res, stamp, err := v.owner.do(ctx, nil, &meta.ReadDir{Ino: in.ino, Cookie: cookie, Max: uint32(n), Plus: plus}, meta.LeaseShared)
	if err != nil {
		return nil, err
	}
	stamp.index()
	for i := range res.Entries {
		if a := res.Entries[i].Attr; a != nil && res.Entries[i].Volume == 0 {
			v.learn(a, stamp)
		}
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	in.learnLocked(&res.Attr, stamp)
	d = in.dirLocked()
	if cookie == 0 {
		d.listNext, d.listChanges = 0, changes
	}
	pg := &dirPage{from: cookie, entries: res.Entries, eof: res.EOF, stamp: stamp, end: res.Off}
	if in.cacheableLocked(stamp) && d.changes == changes {
		pg.named = true
		for _, e := range res.Entries {
			to := dent{ino: e.Ino, vol: e.Volume}
			if e.Volume != 0 {
				to.ino = meta.RootIno
			}
			in.setNameLocked(e.Name, to)
		}
		if d.listNext == cookie && d.listChanges == changes && v.c.dentries.Load() < v.c.maxDentries() {
			if res.EOF {
				in.completeLocked()
			} else if k := len(res.Entries); k > 0 {
				d.listNext = res.Entries[k-1].Cookie
			}
		}
	}
	return pg, nil
}

// completeLocked notes that every entry is cached. Missing names then need no negative
// entries.
func (in *inode) completeLocked() {
	d := in.dirLocked()
	d.complete = true
	if d.names == nil {
		d.names = make(map[string]dent)
	}
	for name, to := range d.names {
		if to.ino == 0 {
			in.delNameLocked(name)
		}
	}
}

// prefetch lists some pages of a directory in which lookups miss.
func (in *inode) prefetch() {
	in.mu.Lock()
	cookie := in.dirLocked().ahead
	in.mu.Unlock()
	eof := false
	for range prefetchPages {
		pg, err := in.fetchPage(in.vol.c.ctx, cookie, prefetchPage, true)
		if err != nil || len(pg.entries) == 0 {
			eof = true
			break
		}
		cookie = pg.entries[len(pg.entries)-1].Cookie
		if eof = pg.eof; eof {
			break
		}
	}
	in.mu.Lock()
	d := in.dirLocked()
	d.ahead = cookie
	if eof {
		d.ahead = 0
	}
	d.aheadRun = false
	in.mu.Unlock()
}

// ReadDir lists at most max entries after the cursor (0: a page of the server's choice), in
// the order of cookies, and moves the cursor behind them. With plus, entries have attributes
// and may be cached; Entry.Attr.Ino is zero where the attributes are not known. "." and ".."
// are left out. eof: no more entries follow.
func (v *Volume) ReadDir(ctx context.Context, ino meta.Ino, at *DirCursor, max int, plus bool) (list []DirEntry, eof bool, err error) {
	if at.Cookie == 0 {
		at.End = 0
	}
	list, end, eof, err := v.dirs.readDir(ctx, ino, *at, max, plus)
	if err != nil {
		return nil, false, err
	}
	if at.End == 0 {
		at.End = end
	}
	if at.End != 0 {
		n, _ := slices.BinarySearchFunc(list, at.End, func(e DirEntry, c uint64) int { return cmp.Compare(e.Cookie, c) })
		eof = eof || n < len(list) || n > 0 && list[n-1].Cookie+1 == at.End
		list = list[:n]
	}
	if n := len(list); n > 0 {
		at.Cookie = list[n-1].Cookie
	}
	return list, eof, nil
}

// readDir is ReadDir without a look at what was added since the listing began: end is
// the cookie that the next name gets.
func (ds *directories) readDir(ctx context.Context, ino meta.Ino, at DirCursor, max int, plus bool) (list []DirEntry, end uint64, eof bool, err error) {
	v := ds.v
	cookie := at.Cookie
	if v.view.isStub(ino) {
		return nil, 0, true, nil
	}
	if list, eof, ok, err := v.index.list(ctx, ino, cookie, max, plus); ok {
		return list, 0, eof, err
	}
	in := v.node(ino)
	defer in.put()
	if cookie == 0 && !v.c.atimes.noDirs.Load() {
		v.atimes.touch(in)
	}
	if cookie != 0 {
		if list, end, eof, ok := in.servePage(ctx, at, max, plus); ok {
			return list, end, eof, nil
		}
	}
	n := fullPage
	if cookie == 0 {
		n = firstPage
	}
	if max > n {
		n = min(max, 4096)
	}
	pg, err := in.fetchPage(ctx, cookie, n, plus)
	if err != nil {
		in.mu.Lock()
		dead := errors.Is(err, meta.Stale) && in.attrOK && in.attr.Nlink == 0
		in.mu.Unlock()
		if dead { // removed while someone lists it: empty, as on other file systems
			return nil, 0, true, nil
		}
		return nil, 0, false, err
	}
	if pg.named && len(pg.entries) > 0 {
		in.mu.Lock()
		in.dirLocked().page = pg
		in.mu.Unlock()
	}
	list, eof = in.entries(ctx, pg.entries, pg.eof, max, plus, pg.named)
	return list, pg.end, eof, nil
}

// servePage answers from the cached page with the entries after the cursor, if the page has
// the cursor. Removed entries are left out: with attributes, the kernel would cache their
// names. A name that now leads to another inode is returned at its old position: the name was
// replaced and kept its place, or was added again, behind the listing's end.
func (in *inode) servePage(ctx context.Context, from DirCursor, max int, plus bool) (list []DirEntry, end uint64, eof, ok bool) {
	cookie := from.Cookie
	in.mu.Lock()
	d := in.dirLocked()
	pg := d.page
	// A page from before the listing began does not know what was added until then.
	if pg == nil || !in.liveLocked() || in.low > pg.stamp.tick || pg.end < from.End {
		in.mu.Unlock()
		return nil, 0, false, false
	}
	at, found := slices.BinarySearchFunc(pg.entries, cookie, func(e meta.Dirent, c uint64) int { return cmp.Compare(e.Cookie, c) })
	switch {
	case found:
		at++
	case pg.from != cookie:
		in.mu.Unlock()
		return nil, 0, false, false
	}
	live := make([]meta.Dirent, 0, min(len(pg.entries)-at, 512))
	var others []int // of live: names that lead to another inode by now
	eof = pg.eof
	for i := at; i < len(pg.entries); i++ {
		e := pg.entries[i]
		if max > 0 && len(live) == max {
			eof = false
			break
		}
		to, known := d.names[e.Name]
		switch {
		case known && to.ino == 0, !known && d.complete: // it is gone
			continue
		case !known, to.vol != e.Volume: // the owner is asked once what comes before is told
			eof, i = false, len(pg.entries)
			continue
		case to.vol == 0 && to.ino != e.Ino:
			e.Ino, e.Attr = to.ino, nil
			others = append(others, len(live))
		}
		live = append(live, e)
	}
	if eof {
		d.page = nil
	}
	in.mu.Unlock()
	for _, i := range others {
		if !in.vol.dirs.knowsType(&live[i]) {
			live, eof = live[:i], false
			break
		}
	}
	if len(live) == 0 && !eof {
		return nil, 0, false, false
	}
	list, _ = in.entries(ctx, live, eof, 0, plus, true)
	return list, pg.end, eof, true
}

// knowsType sets the type of an entry from the cached attributes of the inode, if any.
func (ds *directories) knowsType(e *meta.Dirent) bool {
	in := ds.v.c.table.peek(ds.v.id, e.Ino)
	if in == nil {
		return false
	}
	defer in.put()
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.attrOK {
		return false
	}
	e.Type = in.attr.Mode & meta.TypeMask
	return true
}

// entries converts the server's entries to entries for the caller.
func (in *inode) entries(ctx context.Context, es []meta.Dirent, eof bool, max int, plus, cached bool) ([]DirEntry, bool) {
	v := in.vol
	if max > 0 && len(es) > max {
		es, eof = es[:max], false
	}
	list := make([]DirEntry, len(es))
	in.mu.Lock()
	steady := cached && in.recall == nil
	in.mu.Unlock()
	for i, e := range es {
		list[i] = DirEntry{Name: e.Name, Ino: e.Ino, Volume: v.id, Type: e.Type, Cookie: e.Cookie}
		if e.Volume != 0 {
			list[i].Volume, list[i].Ino, list[i].Type = e.Volume, meta.RootIno, meta.TypeDir
			if v.frozen() {
				list[i].Volume, list[i].Ino = v.id, stubIno(e.Volume)
			}
			if plus {
				list[i].Entry, _ = v.dirs.entryOf(ctx, dent{meta.RootIno, e.Volume}, steady)
			}
			continue
		}
		if !plus {
			continue
		}
		ch := v.c.table.peek(v.id, e.Ino)
		if ch == nil {
			if e.Attr != nil && !cached {
				list[i].Entry = Entry{Attr: *e.Attr, Volume: v.id}
			}
			continue
		}
		ch.mu.Lock()
		if ch.attrOK && ch.liveLocked() {
			list[i].Entry = ch.entryLocked(nil, true)
			if !steady {
				list[i].Entry.Valid = 0
			}
		} else if e.Attr != nil && !cached {
			list[i].Entry = Entry{Attr: *e.Attr, Volume: v.id}
		}
		ch.mu.Unlock()
		ch.put()
	}
	return list, eof
}

// beginChange notes the begin of a change of the directory's entries.
func (in *inode) beginChange() {
	in.mu.Lock()
	in.dirLocked().changes++
	in.mu.Unlock()
}

// endChange records the effect of a change on one name. With an error after which the change
// may have happened, endChange forgets the name.
//
// steady reports that the lease granted with the reply still covers the directory's names.
// Without the lease, a cache above may not keep the name: the owner would not notify this
// client when another client changes the name.
func (in *inode) endChange(name string, to dent, after *meta.Attr, stamp stamp, err error) (steady bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	d := in.dirLocked()
	d.changes++
	if err != nil {
		if undecided(err) {
			in.delNameLocked(name)
			d.complete = false
		}
		return false
	}
	if after.Ino == in.ino {
		in.learnLocked(after, stamp)
	}
	if !in.cacheableLocked(stamp) {
		in.delNameLocked(name)
		d.complete = false
		return false
	}
	in.setNameLocked(name, to)
	return in.recall == nil
}

// undecided reports that an operation with this error may have happened.
func undecided(err error) bool {
	switch meta.KindOf(err) {
	case meta.IO, meta.Unavailable, meta.Canceled, meta.Interrupted, meta.SessionExpired, meta.NotOwner, meta.Fenced, meta.Protocol, meta.Corrupt, meta.Stale:
		return true
	}
	return false
}

// forgetName makes the next lookup of a name ask.
func (in *inode) forgetName(name string) {
	in.mu.Lock()
	in.delNameLocked(name)
	in.dirLocked().complete = false
	in.mu.Unlock()
}
