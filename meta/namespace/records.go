package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// Records. The first byte is the record's version; n is an unsigned varint, z a zigzag varint,
// :k a big-endian number of k bytes. A versioned key whose value is the single byte 00 is a
// tombstone: the key is absent from that generation on. Records are decoded to the last byte:
// a further byte is damage.
//
//	volume   01 parts:1 id:n gen:n nextIno:n inodes:n bytes:n chunks:n
//	            quotaBytes:n quotaInodes:n replicas:n maxChunk:n policyFlags:1
//	            parts&1  placeFlags:1 spread:1 length:n topology length:n class
//	                     without: local first, anywhere, any class
//	            parts&2  lastSnap:n snaps:n buried:n
//	                     the youngest snapshot's generation, the number of snapshots,
//	                     the bytes of extents that only snapshots see
//	            parts&4  gaps:n (lo:n hi:n)*
//	                     a clone: versions of generations above lo and up to hi are
//	                     absent; extents may lie in chunks of other volumes
//	            parts&8  keep:n first:n next:n
//	                     events were switched on once: the number of events kept, the
//	                     oldest one, the number of the next one
//	            parts&16 mode:1 alone:z ref:n epoch:n
//	                     bytes that only snapshots hold count in the quota. mode 1: a
//	                     count is under way, alone is the change since; 2: alone is the
//	                     sum; 3: alone is too large, count again; 4: alone may be too
//	                     large or too small, count again
//	            parts&32 minReplicas:n
//	inode    01 bits:1 mode:n nlink:n uid:n gid:n flags:n change:n size:n blocks:n
//	            btime:8 (ctime-btime):z (mtime-ctime):z (atime-mtime):z
//	            directory: parent:n nextCookie:n
//	            device: rdev:n
//	            symbolic link, or flag inline: length:n bytes
//	            nlink 0: holders:n            sessions with the inode open
//	            bits&1: session:8             holder of an O_TMPFILE inode
//	            bits&2: from:n                extents ending after it are to be reaped
//	            flag open-ended: start:n      file offset of the open-ended extent
//	            bits&4: parent:n cookie:n     position of the newest name, which the
//	                                          inode may have lost since
//	dentry   01 type:1 ino:n cookie:n volume:n
//	cookie   01 type:1 ino:n volume:n name    to the end of the record
//	extent   01 bits:1 length:n [volume:n term:n counter:n chunkOff:n]
//	            bits&1 open-ended; bits&2 preallocated zeros, no chunk follows
//	xattr    01 value                         to the end of the record
//	chunk    01 state:1 bits:1 fenceTerm:n fenceSeals:n servers:n (server:n)* live:n
//	            open: session:8 inode:n       the inode of its open-ended extent, or 0
//	            else: length:n crc:4
//	            bits&1 own; bits&2 the loss of bytes was accepted
//	session  01 state:1 pid:n start:n len:n name len:n host
//	snapshot 01 state:1 created:8 inodes:n bytes:n token:8 len:n name
//	            state 1: live; 2: deleted; 3: deleted, its list of versions is being
//	            worked off; 4: the volume is being rolled back to it; 5: the volume
//	            was cloned from it
//	pin      01 made:8 until:8 len:n by
//	digest   01 version:1 sum:32 made:8 inodes:n bytes:n read:n
//	index    01 version:1 sum:32 length:n inodes:n made:8 parts:n (volume:n term:n counter:n length:n)*parts
//	event    01 kind:1 bits:1 type:1 time:8 ino:n parent:n len:n name
//	            [fromParent:n len:n from] [replaced:n] [volume:n]
//	            bits&1 from; bits&2 replaced; bits&4 volume; bits&8 the last name
//	            kind quota: ino is the use, replaced the quota, bits&8: the use is above
//	over     01 bits:1                        bits&1 of bytes, bits&2 of inodes; never 0
//	epoch    01 epoch:n                       of the last leadership begun
//	leader   01 epoch:n session:8 length:n address
//	delete, writer, orphan, reap, buried, changed inode, changed entry, clone, changer
//	         01
//
// type:1 holds the S_IFMT bits shifted right by 12.
const (
	tombstone   = 0
	volumeV1    = 1
	inodeV1     = 1
	dentryV1    = 1
	cookieV1    = 1
	extentV1    = 1
	xattrV1     = 1
	chunkV1     = 1
	bitOwn      = 1
	bitLost     = 2
	sessionV1   = 1
	snapshotV1  = 1
	pinV1       = 1
	digestV1    = 1
	indexV1     = 1
	eventV1     = 1
	mirrorV1    = 1
	overV1      = 1
	leaderV1    = 1
	epochV1     = 1
	markerV1    = 1
	bitTmpfile  = 1
	bitReap     = 2
	bitHome     = 4
	bitOpenEnd  = 1
	bitNoChunk  = 2
	firstCookie = 3 // clients use 1 and 2 for "." and ".."
)

const (
	policySealOnClose = 1 << iota
	policyImmutable
	policySyncOnClose
	policyNoAtime
)

const (
	placeLocalFirst = 1 << iota
	placeEncrypt
)

// The optional parts of a volume's record.
const (
	volumeIsPlaced     = 1 << iota // a policy for the place of chunks
	volumeHasSnapshots             // the generation is not the first
	volumeIsClone
	volumeHasEvents
	volumeHasTally // snapshots count in the quota
	volumeHasLeast // MinReplicas
	volumePartsEnd
)

const (
	sessionLive  = 1
	sessionEnded = 2
)

const (
	snapshotLive    = 1
	snapshotGone    = 2 // deleted for users; waits to be dissolved
	snapshotLeaving = 3 // at most one: part of the list has moved to the previous snapshot
	snapshotRolling = 4 // in the record only: snapshot.rolling
	snapshotBase    = 5 // of a clone: the oldest, which users don't see
)

var marker = []byte{markerV1}

// volume holds the counters of a volume, in one record: nearly every operation changes a
// counter, and a journal entry keeps only the last version of a key.
type volume struct {
	id      meta.VolumeID
	gen     uint32
	nextIno uint64
	inodes  uint64 // INVARIANT: inode records, orphans included
	bytes   uint64 // INVARIANT: the sum of the inodes' Blocks
	chunks  uint64 // counter of the last chunk handed out
	policy  meta.Policy

	lastSnap uint32 // INVARIANT: the youngest snapshot's generation, below gen; 0: no snapshot
	snaps    uint64 // INVARIANT: snapshot records
	buried   uint64 // INVARIANT: bytes of buried extents in chunks of this volume

	base *base // of a clone; never changed, only replaced

	events eventLog
	tally  tally
}

// inode is a decoded inode record.
type inode struct {
	meta.Attr
	next     uint64         // directories: cookie of the next entry
	data     []byte         // target or inline bytes; may alias the store
	holders  uint32         // INVARIANT: orphan records of this inode, when Nlink is 0
	tmp      meta.SessionID // holder of a tmpfile never linked; 0: no tmpfile
	reap     bool           // extents ending after reapFrom are garbage
	reapFrom uint64
	openOff  uint64   // with FlagOpenEnded: where the open-ended extent begins
	home     meta.Ino // directory of the newest name; a hint
	homeAt   uint64   // cookie of the newest name

	gen   uint32 // of the loaded version; 0: a new inode
	known bool   // under is true,
	under uint32 // of the newest version in the store, also of a tombstone; 0: no version
	dirty bool
	gone  bool
	wasB  uint64 // Blocks when loaded
	// wasInline is the inline data of the same time; the bytes may alias the store.
	wasInline []byte
}

// dead reports that the inode only waits to be reaped.
func (in *inode) dead() bool { return in.Nlink == 0 && in.holders == 0 }

type dentry struct {
	typ    uint32 // S_IFMT bits
	ino    meta.Ino
	cookie uint64
	vol    meta.VolumeID
}

type extent struct {
	meta.Extent
	gen uint32
}

type chunk struct {
	meta.ChunkRecord
	owner meta.Ino // inode with an open-ended extent in this chunk
	was   meta.ChunkRecord
	wasO  meta.Ino
	fresh bool
	gone  bool
}

type session struct {
	state byte
	pid   uint32
	start uint64
	name  string
	host  string
}

// snapshot is a decoded snapshot record.
type snapshot struct {
	gen     uint32 // the snapshot sees the newest versions up to gen
	state   byte
	created meta.Time
	inodes  uint64 // of the volume, when the snapshot was taken
	bytes   uint64
	token   uint64 // of the request for the snapshot
	rolling bool   // live, and a rollback of the volume to it is under way
	name    string
}

// ---- decoding

// decoder decodes a record. After the first damage all fields are zero, and end returns the
// error.
type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) uint() uint64 {
	if len(d.b) > 0 && d.b[0] < 0x80 {
		v := d.b[0]
		d.b = d.b[1:]
		return uint64(v)
	}
	v, n := binary.Uvarint(d.b)
	if n <= 0 {
		d.bad, d.b = true, nil
		return 0
	}
	d.b = d.b[n:]
	return v
}

func (d *decoder) uint32() uint32 {
	v := d.uint()
	if v > 1<<32-1 {
		d.bad = true
		return 0
	}
	return uint32(v)
}

func (d *decoder) int() int64 {
	v := d.uint()
	return int64(v>>1) ^ -int64(v&1)
}

func (d *decoder) byte() byte {
	if len(d.b) == 0 {
		d.bad = true
		return 0
	}
	v := d.b[0]
	d.b = d.b[1:]
	return v
}

func (d *decoder) fixed64() uint64 {
	if len(d.b) < 8 {
		d.bad, d.b = true, nil
		return 0
	}
	v := binary.BigEndian.Uint64(d.b)
	d.b = d.b[8:]
	return v
}

func (d *decoder) fixed32() uint32 {
	if len(d.b) < 4 {
		d.bad, d.b = true, nil
		return 0
	}
	v := binary.BigEndian.Uint32(d.b)
	d.b = d.b[4:]
	return v
}

func (d *decoder) bytes() []byte {
	n := d.uint()
	if n > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

// version decodes the first byte and checks it. Errors: Version, Corrupt.
func (d *decoder) version(want byte, what string) error {
	if len(d.b) == 0 {
		return fail("decode "+what, meta.Corrupt, "empty record")
	}
	if v := d.byte(); v != want {
		return fail("decode "+what, meta.Version, fmt.Sprintf("record version %d, this program knows %d", v, want))
	}
	return nil
}

// end checks that the record was complete and has no further bytes.
func (d *decoder) end(what string) error {
	if d.bad || len(d.b) != 0 {
		return fail("decode "+what, meta.Corrupt, fmt.Sprintf("%d bytes left over, damaged %v", len(d.b), d.bad))
	}
	return nil
}

func appendInt(b []byte, v int64) []byte {
	return binary.AppendUvarint(b, uint64(v)<<1^uint64(v>>63))
}

// decodeVolume decodes the output of appendVolume. Errors: Version, Corrupt.
func decodeVolume(b []byte, v *volume) error {
	d := decoder{b: b}
	if err := d.version(volumeV1, "volume"); err != nil {
		return err
	}
	parts := d.byte()
	v.id = meta.VolumeID(d.uint32())
	v.gen = d.uint32()
	v.nextIno, v.inodes, v.bytes, v.chunks = d.uint(), d.uint(), d.uint(), d.uint()
	p := &v.policy
	*p = meta.Policy{LocalFirst: true}
	p.QuotaBytes, p.QuotaInodes, p.Replicas, p.MaxChunk = d.uint(), d.uint(), d.uint32(), d.uint()
	f := d.byte()
	p.SealOnClose = f&policySealOnClose != 0
	p.Immutable = f&policyImmutable != 0
	p.SyncOnClose = f&policySyncOnClose != 0
	p.NoAtime = f&policyNoAtime != 0
	if v.gen == 0 || f > policySealOnClose|policyImmutable|policySyncOnClose|policyNoAtime || parts >= volumePartsEnd {
		d.bad = true
	}
	if parts&volumeIsPlaced != 0 {
		f := d.byte()
		p.LocalFirst = f&placeLocalFirst != 0
		p.Encrypt = f&placeEncrypt != 0
		p.Spread = meta.Spread(d.byte())
		p.Topology, p.Class = string(d.bytes()), string(d.bytes())
		if f > placeLocalFirst|placeEncrypt || p.Spread > meta.SpreadDC {
			d.bad = true
		}
	}
	v.lastSnap, v.snaps, v.buried = 0, 0, 0
	if parts&volumeHasSnapshots != 0 {
		v.lastSnap, v.snaps, v.buried = d.uint32(), d.uint(), d.uint()
		if v.lastSnap >= v.gen || (v.lastSnap == 0) != (v.snaps == 0) {
			d.bad = true
		}
	}
	v.base, v.events, v.tally = nil, eventLog{}, tally{}
	if parts&volumeIsClone != 0 {
		v.base = &base{gaps: make([]gap, 0, 1)}
		for n := d.uint(); n > 0 && !d.bad; n-- {
			g := gap{d.uint32(), d.uint32()}
			if g.lo >= g.hi || g.hi >= v.gen || len(v.base.gaps) > 0 && g.lo < v.base.gaps[len(v.base.gaps)-1].hi {
				d.bad = true
			}
			v.base.gaps = append(v.base.gaps, g)
		}
	}
	if parts&volumeHasEvents != 0 {
		e := &v.events
		e.keep, e.first, e.next = d.uint(), d.uint(), d.uint()
		if e.first == 0 || e.first > e.next || e.keep == 0 && e.first != e.next {
			d.bad = true
		}
	}
	if p.QuotaSnapshots = parts&volumeHasTally != 0; p.QuotaSnapshots {
		y := &v.tally
		y.mode, y.alone, y.ref, y.epoch = d.byte(), d.int(), d.uint32(), d.uint()
		if y.mode == tallyOff || y.mode >= tallyUnknown || y.ref > v.lastSnap || y.inForce() && y.mode != tallyMoved && y.alone < 0 {
			d.bad = true
		}
	}
	if parts&volumeHasLeast != 0 {
		if p.MinReplicas = d.uint32(); p.MinReplicas == 0 {
			d.bad = true
		}
	}
	return d.end("volume")
}

// parts returns the parts of the volume's record. Nearly every operation writes the record,
// and most volumes have no optional part.
func (v *volume) parts() (parts byte) {
	for _, part := range []struct {
		bit byte
		has bool
	}{
		{volumeIsPlaced, !v.policy.LocalFirst || v.policy.Encrypt || v.policy.Spread != meta.SpreadHost || v.policy.Topology != "" || v.policy.Class != ""},
		{volumeHasSnapshots, v.gen != firstGen},
		{volumeIsClone, v.base != nil},
		{volumeHasEvents, v.events.next != 0},
		{volumeHasTally, v.tally.mode != tallyOff},
		{volumeHasLeast, v.policy.MinReplicas != 0},
	} {
		if part.has {
			parts |= part.bit
		}
	}
	return parts
}

func appendVolume(b []byte, v *volume) []byte {
	parts := v.parts()
	b = append(b, volumeV1, parts)
	b = binary.AppendUvarint(b, uint64(v.id))
	b = binary.AppendUvarint(b, uint64(v.gen))
	b = binary.AppendUvarint(b, v.nextIno)
	b = binary.AppendUvarint(b, v.inodes)
	b = binary.AppendUvarint(b, v.bytes)
	b = binary.AppendUvarint(b, v.chunks)
	p := &v.policy
	b = binary.AppendUvarint(b, p.QuotaBytes)
	b = binary.AppendUvarint(b, p.QuotaInodes)
	b = binary.AppendUvarint(b, uint64(p.Replicas))
	b = binary.AppendUvarint(b, p.MaxChunk)
	var f byte
	if p.SealOnClose {
		f |= policySealOnClose
	}
	if p.Immutable {
		f |= policyImmutable
	}
	if p.SyncOnClose {
		f |= policySyncOnClose
	}
	if p.NoAtime {
		f |= policyNoAtime
	}
	b = append(b, f)
	if parts&volumeIsPlaced != 0 {
		var place byte
		if p.LocalFirst {
			place |= placeLocalFirst
		}
		if p.Encrypt {
			place |= placeEncrypt
		}
		b = append(b, place, byte(p.Spread))
		b = appendBytes(b, p.Topology)
		b = appendBytes(b, p.Class)
	}
	if parts&volumeHasSnapshots != 0 {
		b = binary.AppendUvarint(b, uint64(v.lastSnap))
		b = binary.AppendUvarint(b, v.snaps)
		b = binary.AppendUvarint(b, v.buried)
	}
	if parts&volumeIsClone != 0 {
		b = binary.AppendUvarint(b, uint64(len(v.base.gaps)))
		for _, g := range v.base.gaps {
			b = binary.AppendUvarint(b, uint64(g.lo))
			b = binary.AppendUvarint(b, uint64(g.hi))
		}
	}
	if parts&volumeHasEvents != 0 {
		b = binary.AppendUvarint(b, v.events.keep)
		b = binary.AppendUvarint(b, v.events.first)
		b = binary.AppendUvarint(b, v.events.next)
	}
	if parts&volumeHasTally != 0 {
		y := &v.tally
		b = append(b, y.mode)
		b = appendInt(b, y.alone)
		b = binary.AppendUvarint(b, uint64(y.ref))
		b = binary.AppendUvarint(b, y.epoch)
	}
	if parts&volumeHasLeast != 0 {
		b = binary.AppendUvarint(b, uint64(p.MinReplicas))
	}
	return b
}

func decodeInode(b []byte, ino meta.Ino, in *inode) error {
	d := decoder{b: b}
	if err := d.version(inodeV1, "inode"); err != nil {
		return err
	}
	bits := d.byte()
	in.Ino = ino
	in.Mode, in.Nlink, in.UID, in.GID = d.uint32(), d.uint32(), d.uint32(), d.uint32()
	in.Flags = meta.AttrFlags(d.uint32())
	in.Change, in.Size, in.Blocks = d.uint(), d.uint(), d.uint()
	in.Btime = meta.Time(d.fixed64())
	in.Ctime = in.Btime + meta.Time(d.int())
	in.Mtime = in.Ctime + meta.Time(d.int())
	in.Atime = in.Mtime + meta.Time(d.int())
	switch in.Mode & meta.TypeMask {
	case meta.TypeDir:
		in.Parent, in.next = meta.Ino(d.uint()), d.uint()
	case meta.TypeChar, meta.TypeBlock:
		in.Rdev = d.uint32()
	case meta.TypeSymlink:
		in.data = d.bytes()
	case meta.TypeRegular:
		if in.Flags&meta.FlagInline != 0 {
			in.data = d.bytes()
		}
	case meta.TypeFIFO, meta.TypeSocket:
	default:
		d.bad = true
	}
	if in.Nlink == 0 {
		in.holders = d.uint32()
	}
	if bits&bitTmpfile != 0 {
		in.tmp = meta.SessionID(d.fixed64())
	}
	if bits&bitReap != 0 {
		in.reap, in.reapFrom = true, d.uint()
	}
	if in.Flags&meta.FlagOpenEnded != 0 {
		in.openOff = d.uint()
	}
	in.home, in.homeAt = 0, 0
	if bits&bitHome != 0 {
		in.home, in.homeAt = meta.Ino(d.uint()), d.uint()
	}
	if bits > bitTmpfile|bitReap|bitHome || (bits&bitHome != 0) != (in.home != 0) {
		d.bad = true
	}
	in.wasB = in.Blocks
	return d.end("inode")
}

func appendInode(b []byte, in *inode) []byte {
	var bits byte
	if in.tmp != 0 {
		bits |= bitTmpfile
	}
	if in.reap {
		bits |= bitReap
	}
	if in.home != 0 {
		bits |= bitHome
	}
	b = append(b, inodeV1, bits)
	b = binary.AppendUvarint(b, uint64(in.Mode))
	b = binary.AppendUvarint(b, uint64(in.Nlink))
	b = binary.AppendUvarint(b, uint64(in.UID))
	b = binary.AppendUvarint(b, uint64(in.GID))
	b = binary.AppendUvarint(b, uint64(in.Flags))
	b = binary.AppendUvarint(b, in.Change)
	b = binary.AppendUvarint(b, in.Size)
	b = binary.AppendUvarint(b, in.Blocks)
	b = binary.BigEndian.AppendUint64(b, uint64(in.Btime))
	b = appendInt(b, int64(in.Ctime-in.Btime))
	b = appendInt(b, int64(in.Mtime-in.Ctime))
	b = appendInt(b, int64(in.Atime-in.Mtime))
	switch in.Mode & meta.TypeMask {
	case meta.TypeDir:
		b = binary.AppendUvarint(b, uint64(in.Parent))
		b = binary.AppendUvarint(b, in.next)
	case meta.TypeChar, meta.TypeBlock:
		b = binary.AppendUvarint(b, uint64(in.Rdev))
	case meta.TypeSymlink:
		b = appendBytes(b, in.data)
	case meta.TypeRegular:
		if in.Flags&meta.FlagInline != 0 {
			b = appendBytes(b, in.data)
		}
	}
	if in.Nlink == 0 {
		b = binary.AppendUvarint(b, uint64(in.holders))
	}
	if in.tmp != 0 {
		b = binary.BigEndian.AppendUint64(b, uint64(in.tmp))
	}
	if in.reap {
		b = binary.AppendUvarint(b, in.reapFrom)
	}
	if in.Flags&meta.FlagOpenEnded != 0 {
		b = binary.AppendUvarint(b, in.openOff)
	}
	if in.home != 0 {
		b = binary.AppendUvarint(b, uint64(in.home))
		b = binary.AppendUvarint(b, in.homeAt)
	}
	return b
}

func appendBytes[T string | []byte](b []byte, v T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(v))), v...)
}

func decodeDentry(b []byte) (e dentry, err error) {
	d := decoder{b: b}
	if err := d.version(dentryV1, "directory entry"); err != nil {
		return e, err
	}
	e.typ = uint32(d.byte()) << 12
	e.ino, e.cookie, e.vol = meta.Ino(d.uint()), d.uint(), meta.VolumeID(d.uint32())
	return e, d.end("directory entry")
}

func appendDentry(b []byte, e dentry) []byte {
	b = append(b, dentryV1, byte(e.typ>>12))
	b = binary.AppendUvarint(b, uint64(e.ino))
	b = binary.AppendUvarint(b, e.cookie)
	return binary.AppendUvarint(b, uint64(e.vol))
}

// decodeCookie decodes an entry by position; the cookie is part of the key.
func decodeCookie(b []byte) (e dentry, name []byte, err error) {
	d := decoder{b: b}
	if err := d.version(cookieV1, "directory position"); err != nil {
		return e, nil, err
	}
	e.typ = uint32(d.byte()) << 12
	e.ino, e.vol = meta.Ino(d.uint()), meta.VolumeID(d.uint32())
	name, d.b = d.b, nil
	if len(name) == 0 || len(name) > meta.MaxName {
		d.bad = true
	}
	return e, name, d.end("directory position")
}

func appendCookie(b []byte, e dentry, name string) []byte {
	b = append(b, cookieV1, byte(e.typ>>12))
	b = binary.AppendUvarint(b, uint64(e.ino))
	b = binary.AppendUvarint(b, uint64(e.vol))
	return append(b, name...)
}

// decodeExtent decodes an extent; its end is part of the key.
func decodeExtent(b []byte, end uint64) (e meta.Extent, err error) {
	d := decoder{b: b}
	if err := d.version(extentV1, "extent"); err != nil {
		return e, err
	}
	bits := d.byte()
	e.Len = d.uint()
	if bits&bitNoChunk == 0 {
		e.Chunk = meta.ChunkID{Volume: meta.VolumeID(d.uint32()), Term: d.uint32(), Counter: d.uint()}
		e.ChunkOff = d.uint()
	}
	e.OpenEnded = bits&bitOpenEnd != 0
	if e.Len == 0 || e.Len > end || bits > bitOpenEnd|bitNoChunk {
		d.bad = true
	}
	e.Off = end - e.Len
	return e, d.end("extent")
}

func appendExtent(b []byte, e meta.Extent) []byte {
	var bits byte
	if e.OpenEnded {
		bits |= bitOpenEnd
	}
	if e.Chunk.IsZero() {
		bits |= bitNoChunk
	}
	b = append(b, extentV1, bits)
	b = binary.AppendUvarint(b, e.Len)
	if bits&bitNoChunk == 0 {
		b = binary.AppendUvarint(b, uint64(e.Chunk.Volume))
		b = binary.AppendUvarint(b, uint64(e.Chunk.Term))
		b = binary.AppendUvarint(b, e.Chunk.Counter)
		b = binary.AppendUvarint(b, e.ChunkOff)
	}
	return b
}

func decodeChunk(b []byte, id meta.ChunkID) (c *chunk, err error) {
	d := decoder{b: b}
	if err := d.version(chunkV1, "chunk"); err != nil {
		return nil, err
	}
	c = &chunk{}
	c.ID = id
	c.State = meta.ChunkState(d.byte())
	bits := d.byte()
	c.Own, c.Lost = bits&bitOwn != 0, bits&bitLost != 0
	c.Fence = meta.Fence{Term: meta.Term(d.uint()), Seals: d.uint32()}
	n := d.uint()
	if n > uint64(len(d.b)) || bits > bitOwn|bitLost || c.State < meta.ChunkOpen || c.State > meta.ChunkDeleting {
		return nil, fail("decode chunk", meta.Corrupt, id.String())
	}
	c.Servers = make([]meta.ServerID, n)
	for i := range c.Servers {
		c.Servers[i] = meta.ServerID(d.uint())
	}
	c.Live = d.uint()
	if c.State == meta.ChunkOpen {
		c.Session = meta.SessionID(d.fixed64())
		c.owner = meta.Ino(d.uint())
	} else {
		c.Length = d.uint()
		c.CRC = d.fixed32()
	}
	c.was, c.wasO = c.ChunkRecord, c.owner
	return c, d.end("chunk")
}

func appendChunk(b []byte, c *chunk) []byte {
	var bits byte
	if c.Own {
		bits = bitOwn
	}
	if c.Lost {
		bits |= bitLost
	}
	b = append(b, chunkV1, byte(c.State), bits)
	b = binary.AppendUvarint(b, uint64(c.Fence.Term))
	b = binary.AppendUvarint(b, uint64(c.Fence.Seals))
	b = binary.AppendUvarint(b, uint64(len(c.Servers)))
	for _, s := range c.Servers {
		b = binary.AppendUvarint(b, uint64(s))
	}
	b = binary.AppendUvarint(b, c.Live)
	if c.State == meta.ChunkOpen {
		b = binary.BigEndian.AppendUint64(b, uint64(c.Session))
		return binary.AppendUvarint(b, uint64(c.owner))
	}
	b = binary.AppendUvarint(b, c.Length)
	return binary.BigEndian.AppendUint32(b, c.CRC)
}

func decodeSession(b []byte) (s session, err error) {
	d := decoder{b: b}
	if err := d.version(sessionV1, "session"); err != nil {
		return s, err
	}
	s.state, s.pid, s.start = d.byte(), d.uint32(), d.uint()
	s.name, s.host = string(d.bytes()), string(d.bytes())
	if s.state != sessionLive && s.state != sessionEnded {
		d.bad = true
	}
	return s, d.end("session")
}

func appendSession(b []byte, s *session) []byte {
	b = append(b, sessionV1, s.state)
	b = binary.AppendUvarint(b, uint64(s.pid))
	b = binary.AppendUvarint(b, s.start)
	b = appendBytes(b, s.name)
	return appendBytes(b, s.host)
}

func decodeSnapshot(b []byte, gen uint32) (s snapshot, err error) {
	d := decoder{b: b}
	if err := d.version(snapshotV1, "snapshot"); err != nil {
		return s, err
	}
	s.gen = gen
	s.state, s.created = d.byte(), meta.Time(d.fixed64())
	s.inodes, s.bytes = d.uint(), d.uint()
	s.token = d.fixed64()
	s.name = string(d.bytes())
	if s.state == snapshotRolling {
		s.state, s.rolling = snapshotLive, true
	}
	if s.state < snapshotLive || s.state > snapshotLeaving && s.state != snapshotBase {
		d.bad = true
	}
	return s, d.end("snapshot")
}

func appendSnapshot(b []byte, s *snapshot) []byte {
	state := s.state
	if s.rolling {
		state = snapshotRolling
	}
	b = append(b, snapshotV1, state)
	b = binary.BigEndian.AppendUint64(b, uint64(s.created))
	b = binary.AppendUvarint(b, s.inodes)
	b = binary.AppendUvarint(b, s.bytes)
	b = binary.BigEndian.AppendUint64(b, s.token)
	return appendBytes(b, s.name)
}

func decodeXattr(b []byte) ([]byte, error) {
	d := decoder{b: b}
	if err := d.version(xattrV1, "extended attribute"); err != nil {
		return nil, err
	}
	return d.b, nil
}
