package digest

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"sync"

	"penstock.io/penstock/meta"
)

// Source is a tree that does not change during the walk: a snapshot.
type Source interface {
	Stat(ctx context.Context, ino meta.Ino) (meta.Attr, error)
	// List gives the entries of a directory in any order; a junction has a volume.
	List(ctx context.Context, dir meta.Ino, fn func(name string, ino meta.Ino, volume meta.VolumeID) error) error
	ReadLink(ctx context.Context, ino meta.Ino) (string, error)
	Xattrs(ctx context.Context, ino meta.Ino) ([]Xattr, error)
	// Extents returns the extents of a regular file, in order, without holes; inline bytes are
	// its beginning.
	Extents(ctx context.Context, ino meta.Ino) (extents []meta.Extent, inline []byte, err error)
	// ReadAt fills p from off; bytes in holes are zeros.
	ReadAt(ctx context.Context, ino meta.Ino, p []byte, off uint64) error
}

// Known remembers the digests of blocks by the places of their bytes: bytes of chunks never
// change, so a block that was read for one snapshot need not be read for the next. A nil Known
// remembers nothing.
type Known interface {
	Get(places Sum) (block Sum, ok bool)
	Put(places, block Sum)
}

// Progress is told as a walk goes on.
type Progress struct {
	Inodes uint64
	Bytes  uint64 // of all files so far, holes included
	Read   uint64 // bytes read
}

// Way says how a tree is walked. The zero value reads one block after the other, and remembers
// none.
type Way struct {
	Known Known // nil: remembers nothing
	// Told, unless nil, is called from time to time with the progress.
	Told func(Progress)
	// Turn, unless nil, is called before each block with the number of bytes to read: none if
	// the block's digest is known. When it returns, the walk reads them.
	Turn func(ctx context.Context, n int) error
	// Believe, unless nil, is asked about each block whose digest Known has. The block ends at
	// hi of its file, and lies in the first of these extents. If Believe returns false, the
	// walk reads the block.
	Believe func(extents []meta.Extent, hi uint64, places, block Sum) bool
	// Aside, unless nil, returns how many blocks may be read and summed in parallel from now
	// on. Each has a buffer. Only calls of Source.ReadAt run in parallel.
	Aside func() int
}

// Walk computes the digest of a tree. Errors are the source's, and those of Turn.
func Walk(ctx context.Context, src Source, way Way) (Sum, Progress, error) {
	ctx, cancel := context.WithCancel(ctx)
	w := &walker{Way: way, src: src}
	defer w.under.Wait()
	defer cancel()
	root, c, err := w.entry(ctx, "", meta.RootIno, 0)
	if err == nil {
		err = w.close(&root, c)
	}
	if err != nil {
		return Sum{}, w.p, err
	}
	return Of(root), w.p, nil
}

// maxDepth bounds the directories below each other: a path holds no more.
const maxDepth = meta.MaxPath / 2

// maxAside bounds the blocks that are read in parallel.
const maxAside = 16

type walker struct {
	Way
	src Source
	p   Progress

	under   sync.WaitGroup // blocks being read in parallel
	buffers chan []byte    // free buffers for them; nil: there never were any
	made    int            // number of buffers
	buf     []byte         // for blocks that are not read in parallel
}

// leaf is a block whose sum may still be being computed.
type leaf struct {
	n, read uint64
	places  Sum
	keep    bool // places are to be remembered
	sum     Sum
	err     error
	done    chan struct{} // nil: the sum is there
}

// content is a file's tree so far.
type content struct {
	t    Tree
	late []*leaf // leaves that are not in the tree yet
}

// settle adds finished leaves, and waits until at most most leaves are unfinished.
func (w *walker) settle(c *content, most int) error {
	for len(c.late) > 0 {
		l := c.late[0]
		if l.done != nil {
			select {
			case <-l.done:
			default:
				if len(c.late) <= most {
					return nil
				}
				<-l.done
			}
		}
		if l.err != nil {
			return l.err
		}
		if l.keep {
			w.Known.Put(l.places, l.sum)
		}
		w.p.Read += l.read
		w.p.Bytes += l.n
		c.t.Add(l.sum)
		c.late = c.late[1:]
	}
	return nil
}

// close completes an entry with contents.
func (w *walker) close(e *Entry, c *content) error {
	if c == nil {
		return nil
	}
	if err := w.settle(c, 0); err != nil {
		return err
	}
	e.Content = c.t.Root()
	return nil
}

// entry returns the entry of a name. If c is not nil, the entry is complete after close.
func (w *walker) entry(ctx context.Context, name string, ino meta.Ino, depth int) (e Entry, c *content, err error) {
	e.Name = name
	if depth > maxDepth {
		return e, nil, meta.E("digest", meta.Corrupt, name, fmt.Errorf("%d directories below each other", depth))
	}
	a, err := w.src.Stat(ctx, ino)
	if err != nil {
		return e, nil, err
	}
	e.Mode, e.UID, e.GID, e.Rdev = a.Mode, a.UID, a.GID, a.Rdev
	switch a.Mode & meta.TypeMask {
	case meta.TypeRegular:
		e.Size = a.Size
		c, err = w.content(ctx, ino, a.Size)
	case meta.TypeDir:
		e.Content, err = w.dir(ctx, ino, depth)
	case meta.TypeSymlink:
		e.Target, err = w.src.ReadLink(ctx, ino)
	}
	if err == nil && a.Flags&meta.FlagHasXattrs != 0 {
		e.Xattrs, err = w.src.Xattrs(ctx, ino)
	}
	w.p.Inodes++
	if w.Told != nil && w.p.Inodes%1024 == 0 {
		w.Told(w.p)
	}
	return e, c, err
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
	// Files whose last blocks are still being read wait here while the next file is begun.
	type open struct {
		e Entry
		c *content
	}
	var late []open
	finish := func(most int) error {
		for ; len(late) > most; late = late[1:] {
			if err := w.close(&late[0].e, late[0].c); err != nil {
				return err
			}
			d.Add(&late[0].e)
		}
		return nil
	}
	for _, c := range children {
		e, content, err := w.entry(ctx, c.name, c.ino, depth+1)
		if err != nil {
			return Sum{}, err
		}
		late = append(late, open{e, content})
		if err := finish(w.made); err != nil {
			return Sum{}, err
		}
	}
	if err := finish(0); err != nil {
		return Sum{}, err
	}
	return d.Root(), nil
}

// content begins the tree of a file's blocks.
func (w *walker) content(ctx context.Context, ino meta.Ino, size uint64) (*content, error) {
	c := &content{}
	if size == 0 {
		return c, nil
	}
	extents, inline, err := w.src.Extents(ctx, ino)
	if err != nil {
		return nil, err
	}
	for off := uint64(0); off < size; off += BlockSize {
		l := &leaf{n: min(BlockSize, size-off)}
		for len(extents) > 0 && extents[0].End() <= off {
			extents = extents[1:]
		}
		var any, ok bool
		l.places, any = PlacesOf(extents, off, off+l.n)
		switch {
		case off < uint64(len(inline)): // cheap to read again
		case !any:
			l.sum, ok = Zeros(int(l.n)), true
		case w.Known != nil:
			l.sum, ok = w.Known.Get(l.places)
			ok = ok && (w.Believe == nil || w.Believe(extents, off+l.n, l.places, l.sum))
			l.keep = !ok
		}
		if !ok {
			l.read = l.n
		}
		if w.Turn != nil {
			if err := w.Turn(ctx, int(l.read)); err != nil {
				return nil, err
			}
		}
		if !ok {
			if err := w.begin(ctx, ino, off, l); err != nil {
				return nil, err
			}
		}
		c.late = append(c.late, l)
		if err := w.settle(c, 2*w.made); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// begin reads and sums a block, in parallel to others if allowed.
func (w *walker) begin(ctx context.Context, ino meta.Ino, off uint64, l *leaf) error {
	sum := func(buf []byte) error {
		p := buf[:l.n]
		if err := w.src.ReadAt(ctx, ino, p, off); err != nil {
			return err
		}
		l.sum = Block(p)
		return nil
	}
	aside := 1
	if w.Aside != nil {
		aside = min(w.Aside(), maxAside)
	}
	if aside <= 1 {
		if w.buf == nil {
			w.buf = make([]byte, BlockSize)
		}
		return sum(w.buf)
	}
	if w.buffers == nil {
		w.buffers = make(chan []byte, maxAside)
	}
	for ; w.made < aside; w.made++ {
		w.buffers <- make([]byte, BlockSize)
	}
	buf := <-w.buffers
	l.done = make(chan struct{})
	w.under.Go(func() {
		l.err = sum(buf)
		w.buffers <- buf
		close(l.done)
	})
	return nil
}

// PlacesOf identifies the bytes of a block, [lo, hi) of a file, by their places. extents are
// sorted; any is false if the block has only zeros.
//
//	H(05 | length 8 | (offset in the block 8 | length 8 | chunk 16 | offset in the chunk 8)*)
func PlacesOf(extents []meta.Extent, lo, hi uint64) (places Sum, any bool) {
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
