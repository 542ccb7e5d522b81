// Package index owns the index of a snapshot: all names, attributes, extents,
// extended attributes, link targets and inline bytes of a tree in one file, made
// once and never changed. Who has it answers every question about the tree by
// itself. Rows have a fixed size and are sorted, so that a file that is mapped
// into memory needs no decoding; what is looked at is checked first, by block.
//
// Numbers are little-endian.
//
//	0      header                 4096 bytes, the rest of it zeros:
//	         "PNSTKIDX" | version 4 | block size 4 | volume 8 | generation 8 |
//	         bytes used 8 | inodes used 8 | length of the body 8 |
//	         8 sections * (offset in the body 8 | rows, or bytes of the heap 8)
//	4096   body                   the sections, each beginning at a multiple of 8
//	       sums                   SHA-256 of each block of 64 KiB of the body; the last may be shorter
//
//	inodes   by number      ino 8 | size 8 | blocks 8 | atime 8 | mtime 8 | ctime 8 | btime 8 | change 8 |
//	                        first 8 | count 4 | mode 4 | nlink 4 | uid 4 | gid 4 | flags 4
//	dirs     as inodes      parent 8 | first of its entries 8 | how many 8
//	entries  by directory,  cookie 8 | target 8 | name 8
//	         cookie         target: type >> 12 in the upper 4 bits, 1 in the next for a
//	                        junction, then the inode or the volume
//	order    as entries     which entry of the directory is the next by name 4
//	extents  by inode,      offset 8 | length 8 | offset in the chunk 8 | number of the
//	         offset         chunk from 1 on, 0 for preallocated space 4 | zero 4
//	attached by inode,      ino 8 | name 8 | value 8: an extended attribute, or under the
//	         name           empty name a link's target or inline bytes
//	chunks   as met         volume 4 | term 4 | counter 8 | length, if sealed 8 | 1 if sealed 4 |
//	                        how many servers 4 | their numbers 8 * 8
//	heap                    names and values
//
// first and count of an inode: of a directory the row of dirs, of a file its
// extents; of a device first is its number. A name or value is its place in the
// heap: the offset in the lower 40 bits, the length above.
//
// The digest of an index is the SHA-256 of header and sums.
package index

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"
	"sync/atomic"

	"penstock.io/penstock/meta"
)

// Version is the only version so far.
const Version = 1

const (
	headerSize = 4096
	blockSize  = 64 << 10
	magic      = "PNSTKIDX"
	bodyAt     = 48 // in the header: the length of the body, and the sections after it
)

// The sections, in their order.
const (
	secInodes = iota
	secDirs
	secEntries
	secOrder
	secExtents
	secAttached
	secChunks
	secHeap
	sections
)

var rowSize = [sections]uint64{secInodes: 96, secDirs: 24, secEntries: 24, secOrder: 4, secExtents: 32, secAttached: 24, secChunks: 32 + 8*MaxServers, secHeap: 1}

// Bounds of an index.
const (
	heapBits   = 40
	maxHeap    = 1 << heapBits
	maxValue   = 1<<(64-heapBits) - 1
	maxEntries = 1<<32 - 1 // of a directory
	maxChunks  = 1<<32 - 2
	// MaxServers is how many replicas of a chunk are kept; more are left out.
	MaxServers = 8
	junction   = 1 << 59
	// MaxSize bounds the indexes that a reader accepts, in bytes.
	MaxSize = 1 << 42
)

// Sum is the digest of an index.
type Sum [sha256.Size]byte

// Head identifies the tree of an index.
type Head struct {
	Volume     meta.VolumeID
	At         meta.Generation
	UsedBytes  uint64 // of the volume when the snapshot was taken
	UsedInodes uint64
}

// Index answers questions from the bytes of an index. Safe for concurrent use.
type Index struct {
	Head
	body []byte
	sums []byte
	sec  [sections]struct{ off, n uint64 }
	good []atomic.Uint64 // a bit for each verified block
}

// Open opens an index whose bytes lie in memory, and whose digest is known. It reads and
// verifies only the header and sums; blocks of the body are verified on first use. The bytes
// must not change. Errors: Corrupt, Version.
func Open(data []byte, want Sum) (*Index, error) {
	x := &Index{}
	if len(data) < headerSize || string(data[:8]) != magic {
		return nil, corrupt("%d bytes that are no index", len(data))
	}
	if v := binary.LittleEndian.Uint32(data[8:]); v != Version {
		return nil, meta.E("open index", meta.Version, fmt.Sprint(v), nil)
	}
	num := func(at int) uint64 { return binary.LittleEndian.Uint64(data[at:]) }
	body := num(bodyAt)
	blocks := (body + blockSize - 1) / blockSize
	if binary.LittleEndian.Uint32(data[12:]) != blockSize || body > MaxSize || uint64(len(data)) != headerSize+body+blocks*sha256.Size {
		return nil, corrupt("%d bytes with a body of %d", len(data), body)
	}
	x.body, x.sums = data[headerSize:headerSize+body], data[headerSize+body:]
	if digest(data[:headerSize], x.sums) != want {
		return nil, corrupt("its digest is another")
	}
	if num(16) > uint64(meta.MaxVolume) || num(24) > 1<<32-1 {
		return nil, corrupt("of volume %d, generation %d", num(16), num(24))
	}
	x.Head = Head{Volume: meta.VolumeID(num(16)), At: meta.Generation(num(24)), UsedBytes: num(32), UsedInodes: num(40)}
	for i := range x.sec {
		s := &x.sec[i]
		s.off, s.n = num(bodyAt+8+16*i), num(bodyAt+16+16*i)
		if s.off%8 != 0 || s.off > body || s.n > (body-s.off)/rowSize[i] {
			return nil, corrupt("section %d of %d rows at %d", i, s.n, s.off)
		}
	}
	if x.sec[secOrder].n != x.sec[secEntries].n {
		return nil, corrupt("%d entries in an order of %d", x.sec[secEntries].n, x.sec[secOrder].n)
	}
	x.good = make([]atomic.Uint64, (blocks+63)/64)
	return x, nil
}

func digest(header, sums []byte) (s Sum) {
	h := sha256.New()
	h.Write(header)
	h.Write(sums)
	h.Sum(s[:0])
	return s
}

func corrupt(format string, args ...any) error {
	return meta.E("read index", meta.Corrupt, "", fmt.Errorf(format, args...))
}

// Check verifies every block. Errors: Corrupt.
func (x *Index) Check() error {
	_, err := x.at(0, uint64(len(x.body)))
	return err
}

// Inodes returns the number of inodes.
func (x *Index) Inodes() uint64 { return x.sec[secInodes].n }

// Size is the length of the whole index, in bytes.
func (x *Index) Size() uint64 { return headerSize + uint64(len(x.body)) + uint64(len(x.sums)) }

// at returns n bytes of the body after verifying their blocks.
func (x *Index) at(off, n uint64) ([]byte, error) {
	if off > uint64(len(x.body)) || n > uint64(len(x.body))-off {
		return nil, corrupt("%d bytes at %d of %d", n, off, len(x.body))
	}
	if n == 0 {
		return nil, nil
	}
	for b := off / blockSize; b <= (off+n-1)/blockSize; b++ {
		w, bit := &x.good[b/64], uint64(1)<<(b%64)
		if w.Load()&bit != 0 {
			continue
		}
		block := x.body[b*blockSize : min((b+1)*blockSize, uint64(len(x.body)))]
		if sha256.Sum256(block) != [sha256.Size]byte(x.sums[b*sha256.Size:]) {
			return nil, corrupt("block %d is not what it was", b)
		}
		w.Or(bit)
	}
	return x.body[off : off+n : off+n], nil
}

// row gives the bytes of a row of a section.
func (x *Index) row(sec int, i uint64) (row, error) {
	s := &x.sec[sec]
	if i >= s.n {
		return nil, corrupt("row %d of section %d, which has %d", i, sec, s.n)
	}
	b, err := x.at(s.off+i*rowSize[sec], rowSize[sec])
	return b, err
}

type row []byte

func (r row) u32(at int) uint32 { return binary.LittleEndian.Uint32(r[at:]) }
func (r row) u64(at int) uint64 { return binary.LittleEndian.Uint64(r[at:]) }

// value gives bytes of the heap.
func (x *Index) value(ref uint64) ([]byte, error) {
	off, n := ref&(maxHeap-1), ref>>heapBits
	s := &x.sec[secHeap]
	if off > s.n || n > s.n-off {
		return nil, corrupt("%d bytes at %d of a heap of %d", n, off, s.n)
	}
	return x.at(s.off+off, n)
}

// search returns the first row lo <= i < hi for which less is false. The first error ends it.
func search(lo, hi uint64, less func(i uint64) (bool, error)) (uint64, error) {
	for lo < hi {
		mid := lo + (hi-lo)/2
		yes, err := less(mid)
		if err != nil {
			return 0, err
		}
		if yes {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo, nil
}

// ---- inodes

// node is an inode's row.
type node struct {
	meta.Attr
	first uint64
	count uint32
}

// node finds an inode. Errors: Stale.
func (x *Index) node(ino meta.Ino) (n node, err error) {
	rows := x.sec[secInodes].n
	// Inode numbers are dense, so the row is usually near its position in a list without gaps.
	lo, hi := uint64(0), min(rows, uint64(ino))
	i, err := search(lo, hi, func(i uint64) (bool, error) {
		r, err := x.row(secInodes, i)
		return err == nil && r.u64(0) < uint64(ino), err
	})
	if err != nil {
		return n, err
	}
	if i == rows {
		return n, stale(ino)
	}
	r, err := x.row(secInodes, i)
	if err != nil {
		return n, err
	}
	if r.u64(0) != uint64(ino) {
		return n, stale(ino)
	}
	n.Attr = meta.Attr{
		Ino: ino, Size: r.u64(8), Blocks: r.u64(16),
		Atime: meta.Time(r.u64(24)), Mtime: meta.Time(r.u64(32)), Ctime: meta.Time(r.u64(40)), Btime: meta.Time(r.u64(48)), Change: r.u64(56),
		Mode: r.u32(76), Nlink: r.u32(80), UID: r.u32(84), GID: r.u32(88), Flags: meta.AttrFlags(r.u32(92)),
	}
	n.first, n.count = r.u64(64), r.u32(72)
	switch n.Mode & meta.TypeMask {
	case meta.TypeDir:
		d, err := x.row(secDirs, n.first)
		if err != nil {
			return n, err
		}
		n.Parent = meta.Ino(d.u64(0))
	case meta.TypeBlock, meta.TypeChar:
		n.Rdev = uint32(n.first)
	}
	return n, nil
}

func stale(ino meta.Ino) error {
	return meta.E("inode", meta.Stale, fmt.Sprintf("inode %d", ino), nil)
}

// Attr gives an inode's attributes. Errors: Stale.
func (x *Index) Attr(ino meta.Ino) (meta.Attr, error) {
	n, err := x.node(ino)
	return n.Attr, err
}

// ---- entries

// dir gives the entries of a directory: the first, and how many. Errors: NotDir.
func (x *Index) dir(op string, n *node) (first, count uint64, err error) {
	if !n.IsDir() {
		return 0, 0, meta.E(op, meta.NotDir, fmt.Sprintf("inode %d", n.Ino), nil)
	}
	r, err := x.row(secDirs, n.first)
	if err != nil {
		return 0, 0, err
	}
	first, count = r.u64(8), r.u64(16)
	if all := x.sec[secEntries].n; first > all || count > all-first {
		return 0, 0, corrupt("directory %d has %d entries at %d of %d", n.Ino, count, first, all)
	}
	return first, count, nil
}

// entry reads an entry; volume is not zero for a junction.
func (x *Index) entry(i uint64) (cookie uint64, ino meta.Ino, volume meta.VolumeID, typ uint32, name []byte, err error) {
	r, err := x.row(secEntries, i)
	if err != nil {
		return
	}
	target := r.u64(8)
	low := target & (junction - 1)
	typ = uint32(target>>60) << 12
	if target&junction != 0 {
		volume, ino, typ = meta.VolumeID(low), meta.RootIno, meta.TypeDir
		if low == 0 || low > uint64(meta.MaxVolume) {
			err = corrupt("a junction to volume %d", low)
			return
		}
	} else if ino = meta.Ino(low); ino > meta.MaxIno {
		err = corrupt("an entry of inode %d", low)
		return
	}
	name, err = x.value(r.u64(16))
	return r.u64(0), ino, volume, typ, name, err
}

// Lookup finds a name in a directory: its attributes or, for a junction, the volume. "." and
// ".." are valid names. Errors: NotFound, NotDir, NameTooLong, Invalid, Stale.
func (x *Index) Lookup(parent meta.Ino, name string) (a meta.Attr, volume meta.VolumeID, err error) {
	const op = "lookup"
	switch {
	case len(name) > meta.MaxName:
		return a, 0, meta.E(op, meta.NameTooLong, fmt.Sprintf("a name of %d bytes", len(name)), nil)
	case name == "":
		return a, 0, meta.E(op, meta.NotFound, "the empty name", nil)
	case strings.IndexByte(name, '/') >= 0 || strings.IndexByte(name, 0) >= 0:
		return a, 0, meta.E(op, meta.Invalid, name, nil)
	}
	d, err := x.node(parent)
	if err != nil {
		return a, 0, err
	}
	first, count, err := x.dir(op, &d)
	if err != nil {
		return a, 0, err
	}
	switch name {
	case ".":
		return d.Attr, 0, nil
	case "..":
		a, err = x.named(d.Parent)
		return a, 0, err
	}
	at := func(i uint64) (uint64, error) {
		r, err := x.row(secOrder, first+i)
		if err != nil {
			return 0, err
		}
		k := uint64(r.u32(0))
		if k >= count {
			return 0, corrupt("entry %d of the %d of directory %d", k, count, parent)
		}
		return first + k, nil
	}
	i, err := search(0, count, func(i uint64) (bool, error) {
		k, err := at(i)
		if err != nil {
			return false, err
		}
		_, _, _, _, have, err := x.entry(k)
		return string(have) < name, err
	})
	if err != nil {
		return a, 0, err
	}
	if i < count {
		k, err := at(i)
		if err != nil {
			return a, 0, err
		}
		_, ino, v, _, have, err := x.entry(k)
		switch {
		case err != nil:
			return a, 0, err
		case string(have) != name:
		case v != 0:
			return a, v, nil
		default:
			a, err = x.named(ino)
			return a, 0, err
		}
	}
	return a, 0, meta.E(op, meta.NotFound, name, nil)
}

// named is Attr for the inode of an entry, which must exist.
func (x *Index) named(ino meta.Ino) (meta.Attr, error) {
	a, err := x.Attr(ino)
	if meta.KindOf(err) == meta.Stale {
		err = corrupt("inode %d has a name and no row", ino)
	}
	return a, err
}

// maxReadDir and maxOpen bound answers, as those of an owner.
const (
	maxReadDir = 4096
	maxOpen    = 4096
)

func (x *Index) readDir(op *meta.ReadDir) (*meta.Result, error) {
	d, err := x.node(op.Ino)
	if err != nil {
		return nil, err
	}
	first, count, err := x.dir("readdir", &d)
	if err != nil {
		return nil, err
	}
	i, err := search(first, first+count, func(i uint64) (bool, error) {
		r, err := x.row(secEntries, i)
		return err == nil && r.u64(0) <= op.Cookie, err
	})
	if err != nil {
		return nil, err
	}
	limit := uint64(op.Max)
	if limit == 0 || limit > maxReadDir {
		limit = maxReadDir
	}
	n := min(first+count-i, limit)
	res := &meta.Result{Attr: d.Attr, EOF: i+n == first+count}
	if n == 0 {
		return res, nil
	}
	res.Entries = make([]meta.Dirent, n)
	var attrs []meta.Attr
	if op.Plus {
		attrs = make([]meta.Attr, n)
	}
	for k := range res.Entries {
		cookie, ino, volume, typ, name, err := x.entry(i + uint64(k))
		if err != nil {
			return nil, err
		}
		e := &res.Entries[k]
		*e = meta.Dirent{Name: string(name), Ino: ino, Type: typ, Cookie: cookie, Volume: volume}
		if !op.Plus || volume != 0 {
			continue
		}
		if attrs[k], err = x.named(ino); err != nil {
			return nil, err
		}
		e.Attr = &attrs[k]
	}
	return res, nil
}

// ---- what is attached to inodes

// attached returns what is attached to an inode under a name.
func (x *Index) attached(ino meta.Ino, name string) (value []byte, ok bool, err error) {
	rows := x.sec[secAttached].n
	i, err := search(0, rows, func(i uint64) (bool, error) {
		r, err := x.row(secAttached, i)
		if err != nil || r.u64(0) != uint64(ino) {
			return err == nil && r.u64(0) < uint64(ino), err
		}
		have, err := x.value(r.u64(8))
		return string(have) < name, err
	})
	if err != nil || i == rows {
		return nil, false, err
	}
	r, err := x.row(secAttached, i)
	if err != nil || r.u64(0) != uint64(ino) {
		return nil, false, err
	}
	have, err := x.value(r.u64(8))
	if err != nil || string(have) != name {
		return nil, false, err
	}
	value, err = x.value(r.u64(16))
	return value, err == nil, err
}

func (x *Index) readLink(ino meta.Ino) (*meta.Result, error) {
	n, err := x.node(ino)
	if err != nil {
		return nil, err
	}
	if n.Mode&meta.TypeMask != meta.TypeSymlink {
		return nil, meta.E("readlink", meta.Invalid, fmt.Sprintf("inode %d", ino), nil)
	}
	target, _, err := x.attached(ino, "")
	return &meta.Result{Attr: n.Attr, Data: bytes.Clone(target)}, err
}

func (x *Index) getXattr(op *meta.GetXattr) (*meta.Result, error) {
	n, err := x.node(op.Ino)
	if err != nil {
		return nil, err
	}
	if n.Flags&meta.FlagHasXattrs != 0 && op.Name != "" {
		v, ok, err := x.attached(op.Ino, op.Name)
		if err != nil || ok {
			return &meta.Result{Attr: n.Attr, Data: append([]byte{}, v...)}, err
		}
	}
	return nil, meta.E("getxattr", noXattr(&n.Attr, op.Name), op.Name, nil)
}

// noXattr returns the error kind for a missing attribute, as the state machine would.
func noXattr(a *meta.Attr, name string) meta.Kind {
	switch {
	case name == "" || len(name) > meta.MaxName:
		return meta.Range
	case strings.IndexByte(name, 0) >= 0:
		return meta.Invalid
	case name == "system.posix_acl_access" || name == "system.posix_acl_default":
		return meta.NoAttribute
	}
	for _, space := range [...]string{"user.", "trusted.", "security."} {
		if rest, ok := strings.CutPrefix(name, space); ok {
			if rest == "" {
				return meta.Invalid
			}
			return meta.NoAttribute
		}
	}
	return meta.NotSupported
}

func (x *Index) listXattr(ino meta.Ino) (*meta.Result, error) {
	n, err := x.node(ino)
	if err != nil {
		return nil, err
	}
	res := &meta.Result{Attr: n.Attr}
	if n.Flags&meta.FlagHasXattrs == 0 {
		return res, nil
	}
	rows := x.sec[secAttached].n
	i, err := search(0, rows, func(i uint64) (bool, error) {
		r, err := x.row(secAttached, i)
		return err == nil && r.u64(0) < uint64(ino), err
	})
	for ; err == nil && i < rows; i++ {
		var r row
		if r, err = x.row(secAttached, i); err != nil || r.u64(0) != uint64(ino) {
			break
		}
		var name []byte
		if name, err = x.value(r.u64(8)); len(name) > 0 {
			res.Data = append(append(res.Data, name...), 0)
		}
		if len(res.Data) > meta.MaxXattrs+meta.MaxName {
			err = corrupt("inode %d has %d bytes of names of attributes", ino, len(res.Data))
		}
	}
	return res, err
}

// ---- extents

func (x *Index) open(op *meta.Open) (*meta.Result, error) {
	n, err := x.node(op.Ino)
	if err != nil {
		return nil, err
	}
	res := &meta.Result{Attr: n.Attr, EOF: true}
	if !n.IsRegular() {
		return res, nil
	}
	if n.Flags&meta.FlagInline != 0 {
		data, _, err := x.attached(op.Ino, "")
		if err != nil {
			return nil, err
		}
		res.Data = bytes.Clone(data)
	}
	end := n.Size
	if op.Len != 0 && op.Off+op.Len >= op.Off {
		end = min(end, op.Off+op.Len)
	}
	first, count := n.first, uint64(n.count)
	if all := x.sec[secExtents].n; first > all || count > all-first {
		return nil, corrupt("inode %d has %d extents at %d of %d", op.Ino, count, first, all)
	}
	i, err := search(first, first+count, func(i uint64) (bool, error) {
		r, err := x.row(secExtents, i)
		return err == nil && r.u64(0)+r.u64(8) <= op.Off, err
	})
	if err != nil {
		return nil, err
	}
	seen := map[uint32]meta.ChunkID{}
	for ; i < first+count; i++ {
		r, err := x.row(secExtents, i)
		if err != nil {
			return nil, err
		}
		e := meta.Extent{Off: r.u64(0), Len: r.u64(8), ChunkOff: r.u64(16)}
		if e.Off >= end {
			break
		}
		if e.Len == 0 || e.End() < e.Off || e.End() > meta.MaxFileSize {
			return nil, corrupt("an extent of inode %d of %d bytes at %d", op.Ino, e.Len, e.Off)
		}
		if len(res.Extents) == maxOpen {
			res.EOF = false
			break
		}
		if k := r.u32(24); k != 0 {
			id, ok := seen[k]
			if !ok {
				pl, err := x.place(uint64(k - 1))
				if err != nil {
					return nil, err
				}
				id = pl.ID
				seen[k] = id
				res.Places = append(res.Places, pl)
			}
			e.Chunk = id
		}
		res.Extents = append(res.Extents, e)
	}
	return res, nil
}

// place is where a chunk lay when the index was made.
func (x *Index) place(i uint64) (pl meta.ChunkPlace, err error) {
	r, err := x.row(secChunks, i)
	if err != nil {
		return pl, err
	}
	pl.ID = meta.ChunkID{Volume: meta.VolumeID(r.u32(0)), Term: r.u32(4), Counter: r.u64(8)}
	if pl.ID.IsZero() {
		return pl, corrupt("chunk %d has no id", i)
	}
	if pl.Sealed = r.u32(24) == 1; pl.Sealed {
		pl.Length = r.u64(16)
	}
	n := r.u32(28)
	if n > MaxServers {
		return pl, corrupt("chunk %v has %d replicas", pl.ID, n)
	}
	for k := range int(n) {
		pl.Servers = append(pl.Servers, meta.ServerID(r.u64(32+8*k)))
	}
	return pl, nil
}

// Query answers a read as the owner of the volume does for the snapshot, except that places of
// chunks may be old. Errors: those of the operation; Corrupt (the index is damaged);
// NotSupported (Seek, and operations other than reads).
func (x *Index) Query(op meta.Op) (*meta.Result, error) {
	switch op := op.(type) {
	case *meta.Lookup:
		a, volume, err := x.Lookup(op.Parent, op.Name)
		if err != nil {
			return nil, err
		}
		return &meta.Result{Attr: a, Volume: volume}, nil
	case *meta.GetAttr:
		a, err := x.Attr(op.Ino)
		if err != nil {
			return nil, err
		}
		return &meta.Result{Attr: a}, nil
	case *meta.ReadDir:
		return x.readDir(op)
	case *meta.ReadLink:
		return x.readLink(op.Ino)
	case *meta.GetXattr:
		return x.getXattr(op)
	case *meta.ListXattr:
		return x.listXattr(op.Ino)
	case *meta.Open:
		return x.open(op)
	case *meta.StatFSOp:
		return &meta.Result{StatFS: meta.StatFS{UsedBytes: x.UsedBytes, UsedInodes: x.UsedInodes}}, nil
	}
	return nil, meta.E("query index", meta.NotSupported, fmt.Sprintf("operation code %d", op.Code()), nil)
}
