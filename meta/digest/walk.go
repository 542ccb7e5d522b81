package digest

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// Source is a tree that does not change while it is walked: a snapshot.
type Source interface {
	Stat(ctx context.Context, ino meta.Ino) (meta.Attr, error)
	// List gives the entries of a directory in any order; a junction has a volume.
	List(ctx context.Context, dir meta.Ino, fn func(name string, ino meta.Ino, volume meta.VolumeID) error) error
	ReadLink(ctx context.Context, ino meta.Ino) (string, error)
	Xattrs(ctx context.Context, ino meta.Ino) ([]Xattr, error)
	// Extents maps a regular file, in order, holes left out; inline bytes are its
	// beginning.
	Extents(ctx context.Context, ino meta.Ino) (extents []meta.Extent, inline []byte, err error)
	// ReadAt fills p from off; bytes in holes are zeros.
	ReadAt(ctx context.Context, ino meta.Ino, p []byte, off uint64) error
}

// Known remembers blocks by the places of their bytes: bytes of chunks never
// change, so what was read once for one snapshot need not be read for the next.
// A nil Known remembers nothing.
type Known interface {
	Get(places Sum) (block Sum, ok bool)
	Put(places, block Sum)
}

// Progress is told as a walk goes on.
type Progress struct {
	Inodes uint64
	Bytes  uint64 // of all files so far, holes included
	Read   uint64 // bytes that were read for it
}

// Walk computes the digest of a tree. told, if not nil, hears now and then how
// far it is. Errors are the source's.
func Walk(ctx context.Context, src Source, known Known, told func(Progress)) (Sum, Progress, error) {
	w := &walker{src: src, known: known, told: told, buf: make([]byte, BlockSize)}
	root, err := w.entry(ctx, "", meta.RootIno, 0)
	if err != nil {
		return Sum{}, w.p, err
	}
	return Of(root), w.p, nil
}

// maxDepth bounds the directories below each other: a path holds no more.
const maxDepth = meta.MaxPath / 2

type walker struct {
	src   Source
	known Known
	told  func(Progress)
	p     Progress
	buf   []byte
}

func (w *walker) entry(ctx context.Context, name string, ino meta.Ino, depth int) (Entry, error) {
	e := Entry{Name: name}
	if depth > maxDepth {
		return e, meta.E("digest", meta.Corrupt, name, fmt.Errorf("%d directories below each other", depth))
	}
	a, err := w.src.Stat(ctx, ino)
	if err != nil {
		return e, err
	}
	e.Mode, e.UID, e.GID, e.Rdev = a.Mode, a.UID, a.GID, a.Rdev
	switch a.Mode & meta.TypeMask {
	case meta.TypeRegular:
		e.Size = a.Size
		e.Content, err = w.content(ctx, ino, a.Size)
	case meta.TypeDir:
		e.Content, err = w.dir(ctx, ino, depth)
	case meta.TypeSymlink:
		e.Target, err = w.src.ReadLink(ctx, ino)
	}
	if err == nil && a.Flags&meta.FlagHasXattrs != 0 {
		e.Xattrs, err = w.src.Xattrs(ctx, ino)
	}
	w.p.Inodes++
	if w.told != nil && w.p.Inodes%1024 == 0 {
		w.told(w.p)
	}
	return e, err
}

func (w *walker) dir(ctx context.Context, ino meta.Ino, depth int) (Sum, error) {
	type child struct {
		name string
		ino  meta.Ino
	}
	var d Dir
	var children []child
	err := w.src.List(ctx, ino, func(name string, ino meta.Ino, volume meta.VolumeID) error {
		if volume != 0 {
			d.Add(&Entry{Name: name, Junction: true})
			return nil
		}
		children = append(children, child{name, ino})
		return nil
	})
	if err != nil {
		return Sum{}, err
	}
	for _, c := range children {
		e, err := w.entry(ctx, c.name, c.ino, depth+1)
		if err != nil {
			return Sum{}, err
		}
		d.Add(&e)
	}
	return d.Root(), nil
}

// content is the tree of a file's blocks.
func (w *walker) content(ctx context.Context, ino meta.Ino, size uint64) (Sum, error) {
	var t Tree
	if size == 0 {
		return t.Root(), nil
	}
	extents, inline, err := w.src.Extents(ctx, ino)
	if err != nil {
		return Sum{}, err
	}
	for off := uint64(0); off < size; off += BlockSize {
		n := min(BlockSize, size-off)
		for len(extents) > 0 && extents[0].End() <= off {
			extents = extents[1:]
		}
		places, any := placesOf(extents, off, off+n)
		var leaf Sum
		ok := false
		switch {
		case off < uint64(len(inline)): // cheap to read again
		case !any:
			leaf, ok = Zeros(int(n)), true
		case w.known != nil:
			leaf, ok = w.known.Get(places)
		}
		if !ok {
			if err := w.src.ReadAt(ctx, ino, w.buf[:n], off); err != nil {
				return Sum{}, err
			}
			w.p.Read += n
			leaf = Block(w.buf[:n])
			if w.known != nil && off >= uint64(len(inline)) {
				w.known.Put(places, leaf)
			}
		}
		t.Add(leaf)
		w.p.Bytes += n
	}
	return t.Root(), nil
}

// placesOf names the bytes of a block by where they lie; any is false if there
// are none, only zeros.
//
//	H(05 | length 8 | (offset in the block 8 | length 8 | chunk 16 | offset in the chunk 8)*)
func placesOf(extents []meta.Extent, lo, hi uint64) (places Sum, any bool) {
	p := binary.BigEndian.AppendUint64([]byte{5}, hi-lo)
	for _, e := range extents {
		if e.Off >= hi {
			break
		}
		if e.End() <= lo || e.Chunk.IsZero() {
			continue
		}
		any = true
		from, to := max(e.Off, lo), min(e.End(), hi)
		p = binary.BigEndian.AppendUint64(p, from-lo)
		p = binary.BigEndian.AppendUint64(p, to-from)
		id := e.Chunk.Bytes()
		p = append(p, id[:]...)
		p = binary.BigEndian.AppendUint64(p, e.ChunkOff+from-e.Off)
	}
	return sha256.Sum256(p), any
}
