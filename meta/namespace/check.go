package namespace

import (
	"bytes"
	"encoding/binary"
	"maps"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
)

// JunctionAt is an entry that leads to another volume.
type JunctionAt struct {
	Parent meta.Ino
	Name   string
	Volume meta.VolumeID
}

// OK reports that nothing is wrong.
func (r *Report) OK() bool { return r.Count == 0 }

// Check walks the live generation of a whole volume and verifies that its records agree: names
// with inodes and link counts, positions with names, extents with Blocks and with the live
// counts of chunks, orphans with holders, queues with states, counters with the counted
// records. Check decodes every record with code of its own, written from the drawing in
// records.go, so that a fault in the machine's decoding can't hide. Check needs about 100 bytes
// of memory for an inode, 200 for a directory or chunk. The error is the store's; damage is in
// the report.
func Check(r Reader) (*Report, error) {
	c := &checker{
		r: r, rep: &Report{}, inodes: map[uint64]*checkedInode{}, dirs: map[uint64]*checkedDir{}, ends: map[uint64]openEnd{},
		chunks: map[[16]byte]*checkedChunk{}, orphans: map[uint64]uint32{}, sessions: map[uint64]bool{}, reaps: map[uint64]bool{},
	}
	if v, ok, err := r.Get(volumeKey); err != nil {
		return nil, err
	} else if ok {
		c.volume(v)
	}
	if err := c.readSnapshots(); err != nil {
		return nil, err
	}
	// Keys that begin with zero belong to the store. The walk goes in pages, because other
	// reads are impossible within Scan.
	type item struct{ k, v []byte }
	var page []item
	for lo := []byte{1}; lo != nil; {
		page = page[:0]
		err := r.Scan(lo, []byte{0xff}, func(k, v []byte) bool {
			page = append(page, item{append([]byte(nil), k...), append([]byte(nil), v...)})
			return len(page) < checkPage
		})
		if err != nil {
			return nil, err
		}
		for _, it := range page {
			if err := c.record(it.k, it.v); err != nil {
				return nil, err
			}
		}
		lo = nil
		if len(page) == checkPage {
			lo = append(page[len(page)-1].k, 0)
		}
	}
	c.compare()
	return c.rep, nil
}

// checkPage is how many records Check reads at a time.
const checkPage = 1024

// checkedInode is the walk's knowledge of one inode.
type checkedInode struct {
	there   bool // the walk saw the inode's record
	reap    bool
	mode    uint32
	nlink   uint32
	flags   uint32
	holders uint32
	inline  uint32 // bytes in the record of a regular file
	xattrs  uint32 // flags required by the extended attributes
	names   uint32 // entries that lead to the inode
	blocks  uint64
	extents uint64 // bytes
}

// checkedDir is the additional knowledge of a directory, or of an inode that entries name as a
// directory.
type checkedDir struct {
	size, next, parent uint64 // of the record
	in                 uint64 // directory of the entry that leads here
	nameLen            uint64 // sum of the lengths of the entries' names
	subdirs            uint64
	lastCookie         uint64
	entries, positions uint64
}

// openEnd is an open-ended extent, and the inode's fields about it.
type openEnd struct {
	start, end        uint64
	saysStart, saysSz uint64
}

type checkedChunk struct {
	key                  []byte
	state, own           byte
	live, length, owner  uint64
	session              uint64
	counted              uint64
	openBy               uint64
	opens                int
	queued, writerListed bool
	lost, gone           bool // the loss of some bytes, or of all, was accepted
}

type checker struct {
	r        Reader
	rep      *Report
	vol      *wireVolume
	inodes   map[uint64]*checkedInode
	dirs     map[uint64]*checkedDir
	ends     map[uint64]openEnd
	seen     []byte // base of the last versioned key
	based    []byte // base of the last key whose version of the clone's base was seen
	snaps    checkedSnapshots
	tally    checkedTally
	chunks   map[[16]byte]*checkedChunk
	orphans  map[uint64]uint32
	sessions map[uint64]bool
	leaders  checkedLeaders
	reaps    map[uint64]bool
	event1   uint64 // the first event's number
	events   uint64

	// Extents come in order of inode and offset:
	curIno  uint64
	curEnd  uint64 // end of the last extent
	curOpen bool   // the last extent was open-ended; only preallocated space may follow
}

// record handles one key. The walk is in key order: buried versions (b), chunks (c), names
// (d), extents (e), inodes (i), deletions (k), leaders (l), sessions (n), orphans (o), replies (p), reap
// queue (q), positions (r), volume (v), writers (w), xattrs (x), events (y).
func (c *checker) record(k, v []byte) error {
	switch k[0] {
	case 'i', 'd', 'r', 'e', 'x':
		if len(k) < 13 {
			c.bad(k, "a versioned key of %d bytes", len(k))
			return nil
		}
		base := k[:len(k)-4]
		gen := ^binary.BigEndian.Uint32(k[len(k)-4:])
		if c.outside(k, base, v, gen) {
			return nil
		}
		if gen == 0 || c.vol != nil && uint64(gen) > c.vol.gen {
			c.bad(k, "generation %d", gen)
		}
		// A chunk counts the extents of all generations; all else is judged in
		// the newest.
		older := string(base) == string(c.seen)
		newer := uint32(0)
		if older {
			newer = c.snaps.newer
		}
		c.version(k, base, v, gen, older)
		c.seen = append(c.seen[:0], base...)
		if k[0] == 'i' && c.counts() {
			c.tallyRecord(k, v, gen, newer)
		}
		if older && k[0] != 'e' || len(v) == 1 && v[0] == 0 {
			return nil
		}
		switch k[0] {
		case 'i':
			c.inode(k, v)
		case 'd':
			c.name(k, v)
		case 'r':
			return c.position(k, v)
		case 'e':
			c.extent(k, v, gen, newer, older)
		case 'x':
			c.xattr(k, v)
		}
	case 'v':
		if len(k) != 1 {
			c.bad(k, "a volume key of %d bytes", len(k))
		}
	case 'c':
		c.chunk(k, v)
	case 'k', 'w', 'o', 'q':
		c.markerKey(k, v)
	case 'n':
		c.session(k, v)
	case 'p':
		c.rep.Replies++
		if _, _, _, _, err := DecodeReply(k, v); err != nil {
			c.bad(k, "reply: %v", err)
		}
	case 'b', 'g', 'h':
		c.note(k, v)
	case 'f':
		c.clone(k, v)
	case 's': // read before
	case 't':
		c.pin(k, v)
	case 'm':
		c.digest(k, v)
	case 'j':
		c.index(k, v)
	case 'y':
		c.event(k, v)
	case 'z':
		c.changer(k, v)
	case 'a':
		c.over(k, v)
	case 'u':
		c.mirror(k, v)
	case 'l':
		c.leaders.record(k, v, c.bad)
	default:
		c.bad(k, "unknown prefix %q", k[0])
	}
	return nil
}

func (c *checker) at(ino uint64) *checkedInode {
	in := c.inodes[ino]
	if in == nil {
		in = &checkedInode{}
		c.inodes[ino] = in
	}
	return in
}

func (c *checker) dir(ino uint64) *checkedDir {
	d := c.dirs[ino]
	if d == nil {
		d = &checkedDir{}
		c.dirs[ino] = d
	}
	return d
}

func (c *checker) inode(k, v []byte) {
	if len(k) != 13 {
		c.bad(k, "an inode key of %d bytes", len(k))
		return
	}
	rec, problem := readInode(v)
	if problem != "" {
		c.bad(k, "inode record: %s", problem)
		return
	}
	ino := binary.BigEndian.Uint64(k[1:])
	in := c.at(ino)
	in.there, in.reap = true, rec.reap
	in.mode, in.nlink, in.flags, in.holders, in.blocks = rec.mode, rec.nlink, rec.flags, rec.holders, rec.blocks
	switch rec.mode >> 12 {
	case 4:
		d := c.dir(ino)
		d.size, d.next, d.parent = rec.size, rec.next, rec.parent
	case 8:
		in.inline = uint32(rec.data)
	}
	if e, ok := c.ends[ino]; ok {
		e.saysStart, e.saysSz = rec.open, rec.size
		c.ends[ino] = e
	}
	c.rep.Inodes++
	c.rep.Bytes += rec.blocks
}

// wireEntry is a directory entry as decoded from the record by name or the record by position.
type wireEntry struct {
	ino, cookie, vol uint64
	typ              byte
}

func readDentry(v []byte) (e wireEntry, problem string) {
	w := walker{b: v}
	ver := w.u8()
	e.typ = w.u8()
	e.ino, e.cookie, e.vol = w.n(), w.n(), w.n()
	return e, w.done(ver)
}

func (c *checker) name(k, v []byte) {
	if len(k) < 15 || k[len(k)-5] != 0 {
		c.bad(k, "a name's key without its zero byte")
		return
	}
	name := string(k[9 : len(k)-5])
	if name == "" || len(name) > 255 || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		c.bad(k, "a name that can't be: %q", name)
	}
	e, problem := readDentry(v)
	if problem != "" {
		c.bad(k, "directory entry: %s", problem)
		return
	}
	c.rep.Entries++
	parent := binary.BigEndian.Uint64(k[1:])
	d := c.dir(parent)
	d.entries++
	d.nameLen += uint64(len(name))
	d.lastCookie = max(d.lastCookie, e.cookie)
	if e.typ == 4 {
		d.subdirs++
	}
	switch {
	case e.vol == 0:
		c.at(e.ino).names++
		if e.typ == 4 {
			c.dir(e.ino).in = parent
		}
	case e.ino != 0 || e.typ != 4:
		c.bad(k, "a junction to volume %d with inode %d and type %d", e.vol, e.ino, e.typ)
	default:
		c.rep.Junctions = append(c.rep.Junctions, JunctionAt{meta.Ino(parent), name, meta.VolumeID(e.vol)})
	}
}

// position looks up the name of a position. If each position has its name, and a directory has
// equally many names and positions, the two agree.
func (c *checker) position(k, v []byte) error {
	if len(k) != 21 {
		c.bad(k, "a position's key of %d bytes", len(k))
		return nil
	}
	w := walker{b: v}
	ver := w.u8()
	got := wireEntry{typ: w.u8(), cookie: binary.BigEndian.Uint64(k[9:])}
	got.ino, got.vol = w.n(), w.n()
	if w.damaged || ver != 1 {
		c.bad(k, "directory position of version %d, damaged %v", ver, w.damaged)
		return nil
	}
	parent := binary.BigEndian.Uint64(k[1:])
	c.dir(parent).positions++
	base := append(append([]byte{'d'}, k[1:9]...), w.b...)
	base = append(base, 0)
	newest, gen, found, err := c.newest(base)
	want, problem := readDentry(newest)
	switch {
	case err != nil:
		return err
	case !found:
		c.bad(k, "position %d of directory %d names %s, which is not there", got.cookie, parent, printable(string(w.b)))
	case problem != "" || want != got:
		c.bad(k, "position %+v of directory %d: name %s says %+v", got, parent, printable(string(w.b)), want)
	case got.cookie < 3:
		c.bad(k, "position %d", got.cookie)
	case gen != ^binary.BigEndian.Uint32(k[17:]):
		c.bad(k, "position %d of directory %d was written in another generation than its name %s, %d", got.cookie, parent, printable(string(w.b)), gen)
	}
	return nil
}

// newest reads the last version of a key and its generation.
func (c *checker) newest(base []byte) (v []byte, gen uint32, ok bool, err error) {
	if c.vol != nil && c.vol.gen == 1 { // the only possible version
		v, ok, err = c.r.Get(append(base, 0xff, 0xff, 0xff, 0xfe))
		return v, 1, ok, err
	}
	err = c.r.Scan(base, append(append([]byte(nil), base...), 0xff, 0xff, 0xff, 0xff), func(k, b []byte) bool {
		if gen = ^binary.BigEndian.Uint32(k[len(k)-4:]); c.hidden(gen) {
			return true
		}
		v = append([]byte(nil), b...)
		ok = len(v) != 1 || v[0] != 0
		return false
	})
	return v, gen, ok, err
}

func (c *checker) extent(k, v []byte, gen, newer uint32, older bool) {
	if len(k) != 21 {
		c.bad(k, "an extent's key of %d bytes", len(k))
		return
	}
	ino, end := binary.BigEndian.Uint64(k[1:]), binary.BigEndian.Uint64(k[9:])
	w := walker{b: v}
	ver, bits := w.u8(), w.u8()
	length := w.n()
	var id [16]byte
	var off uint64
	if bits&2 == 0 {
		vol, term, counter := w.n(), w.n(), w.n()
		binary.BigEndian.PutUint32(id[0:], uint32(vol))
		binary.BigEndian.PutUint32(id[4:], uint32(term))
		binary.BigEndian.PutUint64(id[8:], counter)
		off = w.n()
	}
	if problem := w.done(ver); problem != "" || length == 0 || length > end || end > meta.MaxFileSize || bits > 3 {
		c.bad(k, "extent: %s; length %d, bits %x", problem, length, bits)
		return
	}
	if c.counts() {
		c.tallyExtent(ino, seenExtent{chunk: id, lo: end - length, hi: end, at: off}, gen, newer)
	}
	if bits&2 == 0 {
		ch := c.chunks[id]
		switch {
		case c.foreign(id):
		case ch == nil:
			c.bad(k, "extent of inode %d in chunk %x, which has no record", ino, id)
		case bits&1 != 0:
			ch.openBy = ino
			ch.opens++
		default:
			ch.counted += length
			switch {
			case ch.gone:
				c.rep.Lost += length
			case ch.lost && ch.state != 1 && off+length > ch.length:
				c.rep.Lost += min(length, off+length-ch.length)
			case ch.state != 1 && off+length > ch.length:
				c.bad(k, "extent of inode %d ends at %d of chunk %x, which ends at %d", ino, off+length, id, ch.length)
			}
		}
	}
	if older {
		if bits&3 == 0 && !c.foreign(id) {
			c.snaps.bytes += length
		}
		return
	}
	if ino != c.curIno {
		c.curIno, c.curEnd, c.curOpen = ino, 0, false
	}
	c.rep.Extents++
	start := end - length
	if start < c.curEnd {
		c.bad(k, "extent %d-%d of inode %d begins before %d, where the one before it ends", start, end, ino, c.curEnd)
	}
	if c.curOpen && bits&2 == 0 {
		c.bad(k, "extent %d-%d of inode %d lies behind an open-ended one", start, end, ino)
	}
	c.curEnd = end
	c.at(ino).extents += length
	if bits&1 != 0 {
		c.curOpen = true
		c.ends[ino] = openEnd{start: start, end: end}
	}
}

func (c *checker) xattr(k, v []byte) {
	if len(k) < 15 || k[len(k)-5] != 0 {
		c.bad(k, "an attribute's key without its zero byte")
		return
	}
	if len(v) == 0 || v[0] != 1 || len(v) > meta.MaxXattrVal+1 {
		c.bad(k, "attribute value of %d bytes", len(v))
		return
	}
	c.rep.Xattrs++
	in := c.at(binary.BigEndian.Uint64(k[1:]))
	in.xattrs |= uint32(meta.FlagHasXattrs)
	switch name := string(k[9 : len(k)-5]); name {
	case "system.posix_acl_access", "system.posix_acl_default":
		in.xattrs |= uint32(meta.FlagHasACL)
		c.acl(k, v[1:], in, name == "system.posix_acl_access")
	case "security.capability":
		in.xattrs |= uint32(meta.FlagHasCaps)
	default:
		if !strings.HasPrefix(name, "user.") && !strings.HasPrefix(name, "trusted.") && !strings.HasPrefix(name, "security.") {
			c.bad(k, "attribute %q in no name space", name)
		}
	}
}

// acl verifies that an access ACL agrees with the mode.
func (c *checker) acl(k, v []byte, in *checkedInode, access bool) {
	if len(v) < 4+3*8 || (len(v)-4)%8 != 0 || binary.LittleEndian.Uint32(v) != 2 {
		c.bad(k, "an ACL of %d bytes", len(v))
		return
	}
	var perm, group uint32
	mask := false
	for e := v[4:]; len(e) > 0; e = e[8:] {
		p := uint32(binary.LittleEndian.Uint16(e[2:]))
		switch binary.LittleEndian.Uint16(e) {
		case 1:
			perm |= p << 6
		case 4:
			if !mask {
				group = p
			}
		case 16:
			group, mask = p, true
		case 32:
			perm |= p
		}
	}
	if perm |= group << 3; access && in.there && in.mode&0o777 != perm {
		c.bad(k, "the ACL says mode %o, the inode %o", perm, in.mode&0o777)
	}
}

func (c *checker) volume(v []byte) {
	vol, problem := readVolume(v)
	if problem != "" {
		c.bad([]byte{'v'}, "volume record: %s", problem)
		return
	}
	c.vol = &vol
}

func (c *checker) chunk(k, v []byte) {
	if len(k) != 17 {
		c.bad(k, "a chunk key of %d bytes", len(k))
		return
	}
	w := walker{b: v}
	ver := w.u8()
	ch := &checkedChunk{key: append([]byte(nil), k...)}
	ch.state, ch.own = w.u8(), w.u8()
	ch.lost, ch.own = ch.own&2 != 0, ch.own&^2
	w.n()
	w.n()
	n := w.n()
	ch.gone = ch.lost && n == 0 && ch.state != 1
	for ; n > 0 && !w.damaged; n-- {
		w.n()
	}
	ch.live = w.n()
	if ch.state == 1 {
		ch.session = w.u64()
		ch.owner = w.n()
	} else {
		ch.length = w.n()
		w.take(4)
	}
	if problem := w.done(ver); problem != "" || ch.state < 1 || ch.state > 3 || ch.own > 1 {
		c.bad(k, "chunk record: %s; state %d, own %d", problem, ch.state, ch.own)
		return
	}
	c.rep.Chunks++
	c.chunks[[16]byte(k[1:])] = ch
}

func (c *checker) session(k, v []byte) {
	w := walker{b: v}
	ver, state := w.u8(), w.u8()
	w.n()
	w.n()
	name := w.take(int(min(w.n(), 1<<20)))
	host := w.take(int(min(w.n(), 1<<20)))
	if problem := w.done(ver); problem != "" || state < 1 || state > 2 || len(k) != 9 {
		c.bad(k, "session record %q %q: %s; state %d", name, host, problem, state)
		return
	}
	c.rep.Sessions++
	c.sessions[binary.BigEndian.Uint64(k[1:])] = true
}

func (c *checker) markerKey(k, v []byte) {
	want := map[byte]int{'k': 17, 'w': 25, 'o': 17, 'q': 9}[k[0]]
	if len(k) != want || len(v) != 1 || v[0] != 1 {
		c.bad(k, "a key of %d bytes with a value of %d", len(k), len(v))
		return
	}
	switch k[0] {
	case 'k':
		if ch := c.chunks[[16]byte(k[1:])]; ch == nil || ch.state != 3 {
			c.bad(k, "a deletion is queued for a chunk that is not to be deleted")
		} else {
			ch.queued = true
		}
	case 'w':
		s := binary.BigEndian.Uint64(k[1:])
		if ch := c.chunks[[16]byte(k[9:])]; ch == nil || ch.state != 1 || ch.session != s {
			c.bad(k, "session %x is listed as the writer of a chunk that it does not hold", s)
		} else {
			ch.writerListed = true
		}
	case 'o':
		c.rep.Orphans++
		s, ino := binary.BigEndian.Uint64(k[1:]), binary.BigEndian.Uint64(k[9:])
		c.orphans[ino]++
		if !c.sessions[s] {
			c.bad(k, "inode %d is held by session %x, which has no record", ino, s)
		}
	case 'q':
		c.reaps[binary.BigEndian.Uint64(k[1:])] = true
	}
}

// compare verifies the relations that only the complete walk knows.
func (c *checker) compare() {
	for _, ino := range slices.Sorted(maps.Keys(c.inodes)) {
		c.compareInode(ino, c.inodes[ino])
	}
	for _, ino := range slices.Sorted(maps.Keys(c.dirs)) {
		c.compareDir(ino, c.dirs[ino])
	}
	for _, ino := range slices.Sorted(maps.Keys(c.reaps)) {
		if in := c.inodes[ino]; in == nil || !in.reap {
			c.bad(inodeKey(ino), "inode %d is queued to be reaped and has nothing to reap", ino)
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(c.chunks), func(a, b [16]byte) int { return bytes.Compare(a[:], b[:]) }) {
		c.compareChunk(id[:], c.chunks[id])
	}
	c.leaders.compare(c.sessions, c.bad)
	if c.vol == nil {
		c.bad([]byte{'v'}, "no volume record that can be read")
		return
	}
	if c.vol.inodes != c.rep.Inodes {
		c.bad([]byte{'v'}, "%d inodes are counted, %d are there", c.vol.inodes, c.rep.Inodes)
	}
	if c.vol.bytes != c.rep.Bytes {
		c.bad([]byte{'v'}, "%d bytes are counted, the inodes have %d", c.vol.bytes, c.rep.Bytes)
	}
	if n := c.vol.nextEvent - c.vol.firstEvent; c.events != n || n != 0 && c.event1 != c.vol.firstEvent {
		c.bad([]byte{'v'}, "events %d up to %d are counted, %d are there from %d on", c.vol.firstEvent, c.vol.nextEvent, c.events, c.event1)
	}
	c.compareSnapshots()
	c.compareTally()
}

func inodeKey(ino uint64) []byte { return binary.BigEndian.AppendUint64([]byte{'i'}, ino) }

func (c *checker) compareInode(ino uint64, in *checkedInode) {
	key := inodeKey(ino)
	if !in.there {
		c.bad(key, "inode %d has no record, but %d names, %d bytes of extents, attributes %x", ino, in.names, in.extents, in.xattrs)
		return
	}
	if in.mode&0o170000 == 0o040000 {
		c.rep.Dirs++
	} else if in.nlink != in.names {
		c.bad(key, "inode %d: %d links, %d names", ino, in.nlink, in.names)
	}
	if c.vol != nil && ino >= c.vol.nextIno {
		c.bad(key, "inode %d, yet the next to be given out is %d", ino, c.vol.nextIno)
	}
	if in.nlink == 0 && in.holders != c.orphans[ino] {
		c.bad(key, "inode %d: %d holders are counted, %d hold it", ino, in.holders, c.orphans[ino])
	}
	if in.nlink != 0 && c.orphans[ino] != 0 {
		c.bad(key, "inode %d has %d links and %d sessions hold it as an orphan", ino, in.nlink, c.orphans[ino])
	}
	if in.reap && !c.reaps[ino] {
		c.bad(key, "inode %d is to be reaped and not queued", ino)
	}
	dead := in.nlink == 0 && in.holders == 0
	if dead && !in.reap {
		c.bad(key, "inode %d has no name, no holder, and is not queued to be reaped", ino)
	}
	if in.blocks != in.extents+uint64(in.inline) {
		c.bad(key, "inode %d counts %d bytes, its extents have %d and it holds %d", ino, in.blocks, in.extents, in.inline)
	}
	const attrFlags = uint32(meta.FlagHasXattrs | meta.FlagHasACL | meta.FlagHasCaps)
	if in.flags&attrFlags != in.xattrs {
		c.bad(key, "inode %d says attribute flags %x, its attributes say %x", ino, in.flags&attrFlags, in.xattrs)
	}
	e, open := c.ends[ino]
	switch {
	case open != (in.flags&uint32(meta.FlagOpenEnded) != 0):
		c.bad(key, "inode %d: open-ended extent %v, flag %v", ino, open, !open)
	case open && e.saysStart != e.start:
		c.bad(key, "inode %d: open-ended extent at %d, the record says %d", ino, e.start, e.saysStart)
	case open && e.saysSz != e.end:
		c.bad(key, "inode %d has size %d and an open-ended extent up to %d", ino, e.saysSz, e.end)
	}
}

func (c *checker) compareDir(ino uint64, d *checkedDir) {
	key := inodeKey(ino)
	in := c.inodes[ino]
	if in == nil || !in.there || in.mode&0o170000 != 0o040000 {
		if d.entries+d.positions != 0 {
			c.bad(key, "inode %d is no directory and has %d entries and %d positions", ino, d.entries, d.positions)
		}
		if d.in != 0 && in != nil && in.there {
			c.bad(key, "inode %d of mode %o is a directory by its entry", ino, in.mode)
		}
		return
	}
	switch links := uint64(in.nlink); {
	case ino == 1 && (d.parent != 1 || in.names != 0 || links != 2+d.subdirs):
		c.bad(key, "the root: parent %d, %d names, %d links for %d directories", d.parent, in.names, links, d.subdirs)
	case ino == 1:
	case links == 0 && in.names+uint32(d.entries) != 0, links != 0 && (in.names != 1 || links != 2+d.subdirs):
		c.bad(key, "directory %d: %d links, %d names, %d directories in it", ino, links, in.names, d.subdirs)
	case links != 0 && d.parent != d.in:
		c.bad(key, "directory %d lies in %d, but says %d", ino, d.in, d.parent)
	case links != 0:
		c.reachable(ino, d)
	}
	if d.size != d.nameLen {
		c.bad(key, "directory %d has size %d, its names have %d bytes", ino, d.size, d.nameLen)
	}
	if d.next <= d.lastCookie {
		c.bad(key, "directory %d gives out position %d next, but has %d", ino, d.next, d.lastCookie)
	}
	if d.entries != d.positions {
		c.bad(key, "directory %d has %d names and %d positions", ino, d.entries, d.positions)
	}
}

// reachable verifies that a directory's parents lead to the root.
func (c *checker) reachable(ino uint64, d *checkedDir) {
	for range len(c.dirs) {
		if d.parent == 1 {
			return
		}
		if d = c.dirs[d.parent]; d == nil {
			c.bad(inodeKey(ino), "directory %d does not lead to the root", ino)
			return
		}
	}
	c.bad(inodeKey(ino), "directory %d lies in itself", ino)
}

func (c *checker) compareChunk(id []byte, ch *checkedChunk) {
	if ch.live != ch.counted {
		c.bad(ch.key, "chunk %x counts %d live bytes, extents have %d", id, ch.live, ch.counted)
	}
	if ch.owner != ch.openBy || ch.opens > 1 {
		c.bad(ch.key, "chunk %x: open-ended extent of inode %d, %d such extents, the last of inode %d", id, ch.owner, ch.opens, ch.openBy)
	}
	if ch.opens > 0 && ch.own == 0 {
		c.bad(ch.key, "chunk %x is packed and has an open-ended extent", id)
	}
	if (ch.state == 3) != ch.queued {
		c.bad(ch.key, "chunk %x: state %d, queued for deletion %v", id, ch.state, ch.queued)
	}
	if ch.state == 2 && ch.live == 0 || ch.state == 3 && ch.live != 0 {
		c.bad(ch.key, "chunk %x: state %d with %d live bytes", id, ch.state, ch.live)
	}
	if (ch.state == 1) != ch.writerListed {
		c.bad(ch.key, "chunk %x: state %d, listed under its writer %v", id, ch.state, ch.writerListed)
	}
	if c.vol != nil && (uint64(binary.BigEndian.Uint32(id)) != c.vol.id || binary.BigEndian.Uint64(id[8:]) > c.vol.chunks) {
		c.bad(ch.key, "chunk %x in volume %d, which has given out %d", id, c.vol.id, c.vol.chunks)
	}
}
