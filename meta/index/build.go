package index

import (
	"bufio"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strings"

	"penstock.io/penstock/meta"
)

// Xattr is an extended attribute.
type Xattr struct {
	Name  string
	Value []byte
}

// Node is an inode with everything that belongs to it.
type Node struct {
	Attr    meta.Attr
	Data    []byte        // inline bytes of a file, or a link's target
	Xattrs  []Xattr       // in any order
	Extents []meta.Extent // of a file, by offset
	Entries []meta.Dirent // of a directory, by cookie
}

// Spool stores bytes until they are read.
type Spool interface {
	io.Writer
	io.ReaderAt
}

// Builder makes an index. It keeps in memory the ids of the chunks and the entries or extents
// of the present inode; rows wait in spools.
type Builder struct {
	head   Head
	out    [sections]*bufio.Writer
	spools [sections]Spool
	rows   [sections]uint64
	chunks map[meta.ChunkID]uint32
	last   meta.Ino
	buf    []byte
	err    error
}

// NewBuilder begins an index; it opens a spool for each section.
func NewBuilder(h Head, spool func() (Spool, error)) (*Builder, error) {
	b := &Builder{head: h, chunks: map[meta.ChunkID]uint32{}}
	for i := range b.spools {
		var err error
		if b.spools[i], err = spool(); err != nil {
			return nil, err
		}
		b.out[i] = bufio.NewWriterSize(b.spools[i], 64<<10)
	}
	return b, nil
}

// Knows tells whether the place of a chunk was given.
func (b *Builder) Knows(id meta.ChunkID) bool { return b.chunks[id] != 0 }

// Place adds the place of a chunk, before the first inode with extents in it. Errors:
// ResourceExceeded.
func (b *Builder) Place(pl meta.ChunkPlace) error {
	if b.Knows(pl.ID) {
		return nil
	}
	if len(b.chunks) == maxChunks {
		return tooMuch("%d chunks", len(b.chunks))
	}
	pl.Servers = pl.Servers[:min(len(pl.Servers), MaxServers)]
	var sealed uint32
	if pl.Sealed {
		sealed = 1
	} else {
		pl.Length = 0
	}
	b.u32(uint32(pl.ID.Volume), pl.ID.Term)
	b.u64(pl.ID.Counter, pl.Length)
	b.u32(sealed, uint32(len(pl.Servers)))
	for i := range MaxServers {
		var s meta.ServerID
		if i < len(pl.Servers) {
			s = pl.Servers[i]
		}
		b.u64(uint64(s))
	}
	b.add(secChunks)
	b.chunks[pl.ID] = uint32(len(b.chunks) + 1)
	return b.err
}

func tooMuch(format string, args ...any) error {
	return meta.E("build index", meta.ResourceExceeded, "", fmt.Errorf(format, args...))
}

func (b *Builder) u32(l ...uint32) {
	for _, v := range l {
		b.buf = binary.LittleEndian.AppendUint32(b.buf, v)
	}
}

func (b *Builder) u64(l ...uint64) {
	for _, v := range l {
		b.buf = binary.LittleEndian.AppendUint64(b.buf, v)
	}
}

// add ends a row.
func (b *Builder) add(sec int) {
	if uint64(len(b.buf)) != rowSize[sec] {
		panic(fmt.Sprintf("index: a row of section %d of %d bytes, not %d", sec, len(b.buf), rowSize[sec]))
	}
	if _, err := b.out[sec].Write(b.buf); err != nil && b.err == nil {
		b.err = err
	}
	b.rows[sec]++
	b.buf = b.buf[:0]
}

// keep appends bytes to the heap and returns their position.
func (b *Builder) keep(p string) (ref uint64) {
	off := b.rows[secHeap]
	if off+uint64(len(p)) > maxHeap || len(p) > maxValue {
		b.err = cmp.Or(b.err, tooMuch("%d bytes of names and values", off))
		return 0
	}
	if _, err := b.out[secHeap].WriteString(p); err != nil && b.err == nil {
		b.err = err
	}
	b.rows[secHeap] += uint64(len(p))
	return off | uint64(len(p))<<heapBits
}

// Add adds an inode. Inodes come in the order of their numbers. Errors: Invalid (the order, or
// an extent in a chunk without a place), ResourceExceeded, and those of the spools.
func (b *Builder) Add(n *Node) error {
	a := &n.Attr
	if a.Ino <= b.last {
		return meta.E("build index", meta.Invalid, fmt.Sprintf("inode %d after %d", a.Ino, b.last), nil)
	}
	b.last = a.Ino
	var first, count uint64
	switch a.Mode & meta.TypeMask {
	case meta.TypeDir:
		first = b.rows[secDirs]
		b.directory(n)
	case meta.TypeRegular:
		first, count = b.rows[secExtents], uint64(len(n.Extents))
		for _, e := range n.Extents {
			chunk := b.chunks[e.Chunk]
			if chunk == 0 && !e.Chunk.IsZero() || e.OpenEnded {
				return meta.E("build index", meta.Invalid, fmt.Sprintf("inode %d", a.Ino), fmt.Errorf("an extent in chunk %v, open-ended: %v", e.Chunk, e.OpenEnded))
			}
			b.u64(e.Off, e.Len, e.ChunkOff)
			b.u32(chunk, 0)
			b.add(secExtents)
		}
	case meta.TypeBlock, meta.TypeChar:
		first = uint64(a.Rdev)
	}
	if count > 1<<32-1 {
		return tooMuch("inode %d has %d extents", a.Ino, count)
	}
	b.u64(uint64(a.Ino), a.Size, a.Blocks, uint64(a.Atime), uint64(a.Mtime), uint64(a.Ctime), uint64(a.Btime), a.Change, first)
	b.u32(uint32(count), a.Mode, a.Nlink, a.UID, a.GID, uint32(a.Flags))
	b.add(secInodes)
	if len(n.Data) > 0 {
		b.attach(a.Ino, "", n.Data)
	}
	l := slices.Clone(n.Xattrs)
	slices.SortFunc(l, func(p, q Xattr) int { return strings.Compare(p.Name, q.Name) })
	for _, x := range l {
		b.attach(a.Ino, x.Name, x.Value)
	}
	return b.err
}

func (b *Builder) attach(ino meta.Ino, name string, value []byte) {
	b.u64(uint64(ino), b.keep(name), b.keep(string(value)))
	b.add(secAttached)
}

func (b *Builder) directory(n *Node) {
	if len(n.Entries) > maxEntries {
		b.err = cmp.Or(b.err, tooMuch("directory %d has %d entries", n.Attr.Ino, len(n.Entries)))
		return
	}
	b.u64(uint64(n.Attr.Parent), b.rows[secEntries], uint64(len(n.Entries)))
	b.add(secDirs)
	order := make([]uint32, len(n.Entries))
	for i, e := range n.Entries {
		order[i] = uint32(i)
		target := uint64(e.Type>>12)<<60 | uint64(e.Ino)
		if e.Volume != 0 {
			target = uint64(e.Type>>12)<<60 | junction | uint64(e.Volume)
		}
		b.u64(e.Cookie, target, b.keep(e.Name))
		b.add(secEntries)
	}
	slices.SortFunc(order, func(i, j uint32) int { return strings.Compare(n.Entries[i].Name, n.Entries[j].Name) })
	for _, i := range order {
		b.u32(i)
		b.add(secOrder)
	}
}

// Finish writes the index, and returns its length in bytes and its digest.
func (b *Builder) Finish(w io.Writer) (length uint64, sum Sum, err error) {
	for i := range b.out {
		if err := b.out[i].Flush(); err != nil && b.err == nil {
			b.err = err
		}
	}
	if b.err != nil {
		return 0, sum, b.err
	}
	var off [sections]uint64
	body := uint64(0)
	for i := range off {
		off[i] = body
		body += (b.rows[i]*rowSize[i] + 7) &^ 7
	}
	header := append(make([]byte, 0, headerSize), magic...)
	header = binary.LittleEndian.AppendUint32(header, Version)
	header = binary.LittleEndian.AppendUint32(header, blockSize)
	for _, v := range []uint64{uint64(b.head.Volume), uint64(b.head.At), b.head.UsedBytes, b.head.UsedInodes, body} {
		header = binary.LittleEndian.AppendUint64(header, v)
	}
	for i := range off {
		header = binary.LittleEndian.AppendUint64(header, off[i])
		header = binary.LittleEndian.AppendUint64(header, b.rows[i])
	}
	header = header[:headerSize]
	s := &summer{w: w, h: sha256.New()}
	if _, err := w.Write(header); err != nil {
		return 0, sum, err
	}
	for i := range b.spools {
		n := b.rows[i] * rowSize[i]
		if _, err := io.Copy(s, io.NewSectionReader(b.spools[i], 0, int64(n))); err != nil {
			return 0, sum, err
		}
		if pad := -n & 7; pad > 0 {
			if _, err := s.Write(make([]byte, pad)); err != nil {
				return 0, sum, err
			}
		}
	}
	if s.n%blockSize != 0 {
		s.sums = s.h.Sum(s.sums)
	}
	if s.n != body {
		return 0, sum, meta.E("build index", meta.IO, "", errors.New("spools gave back less than was written to them"))
	}
	if _, err := w.Write(s.sums); err != nil {
		return 0, sum, err
	}
	return headerSize + body + uint64(len(s.sums)), digest(header, s.sums), nil
}

// summer passes bytes on and sums them by block.
type summer struct {
	w    io.Writer
	h    hash.Hash
	n    uint64
	sums []byte
}

func (s *summer) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	for p = p[:n]; len(p) > 0; {
		k := min(len(p), blockSize-int(s.n%blockSize))
		s.h.Write(p[:k])
		s.n += uint64(k)
		p = p[k:]
		if s.n%blockSize == 0 {
			s.sums = s.h.Sum(s.sums)
			s.h.Reset()
		}
	}
	return n, err
}
