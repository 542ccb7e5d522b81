package fuse

import (
	"context"
	"errors"
	"io"
	"strconv"
	"sync"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// Streams reads the streams of a mount's tree. Package fuse knows where the files of a stream lie,
// and not what the files contain.
type Streams interface {
	// Tail returns the text of the records of a partition, of which the directory is given, from
	// a place on: bytes of the line of the record with an offset. With offset -1 the text begins
	// with the next record to be appended.
	Tail(ctx context.Context, volume meta.VolumeID, partition meta.Ino, offset int64, skip int) (StreamTail, error)
	// HasInput reports whether there is a gateway that Input can use, or may be one soon, as far as the
	// metadata servers tell now.
	HasInput(ctx context.Context) bool
	// Input makes a StreamInput of the stream with a directory. Errors: Invalid.
	Input(volume meta.VolumeID, dir meta.Ino, as InputName) (StreamInput, error)
}

// StreamTail reads the text of a partition. The text behind a place does not change.
type StreamTail interface {
	// Read waits for text, and reads one byte or more. Errors: io.EOF (the partition was removed),
	// Interrupted (ctx has ended).
	Read(ctx context.Context, p []byte) (int, error)
	// Place returns the place of the next byte, as Streams.Tail takes it.
	Place() (offset int64, skip int)
}

// streamFiles are the files of streams that no listing shows.
type streamFiles struct {
	f       *fileSystem
	streams Streams // nil: the mount shows no such files
	inputs  inputs

	mu    sync.Mutex
	tails map[uint64]*tailHandle
}

// tailHandle is an open file of tail.
type tailHandle struct {
	node uint64
	// turn has room for the one READ that uses the fields below.
	turn   chan struct{}
	tail   StreamTail // nil: not opened yet by this process
	last   uint64     // number of the last READ, or of the OPEN
	before place      // before the last READ
	at     place      // of the next byte
	slot   keep.Slot
}

// place is the place of a byte in the text of a partition.
type place struct {
	offset int64
	skip   int
}

// nameIn finds a name that a directory of a volume does not have. ok is false if the directory is
// no stream, or the name is none of a stream's.
func (s *streamFiles) nameIn(ctx request, v Volume, node uint64, name string, out *fuse.EntryOut) (st fuse.Status, ok bool) {
	if !s.shows(ctx, v, node, name) {
		return 0, false
	}
	id, ino := s.f.split(node)
	kind := streamTails
	if name == inputName {
		kind = streamInput
	}
	return s.entry(ctx, kind, id, ino, out), true
}

// shows reports whether a name that a directory of a volume does not have is a file of a stream.
func (s *streamFiles) shows(ctx request, v Volume, node uint64, name string) bool {
	if s.streams == nil || !isStreamName(name) || s.f.noOpen {
		return false
	}
	id, ino := s.f.split(node)
	if id > meta.MaxVolume || ino > meta.LastIno {
		return false // a snapshot
	}
	e, err := v.Lookup(ctx, ino, streamSpec)
	return err == nil && !e.Negative && e.Attr.IsRegular() && e.Attr.Flags&meta.FlagStream != 0
}

// entry fills the entry of a node. The kernel asks for each use of the name, since no recall
// announces a change of the attributes of the stream's directory under the node's number.
func (s *streamFiles) entry(ctx request, kind streamKind, id meta.VolumeID, ino meta.Ino, out *fuse.EntryOut) fuse.Status {
	node := nodeOf(id, ino) | uint64(kind)<<markShift
	a, err := s.attr(ctx, node)
	if err != nil {
		return s.f.status("lookup", node, err)
	}
	out.NodeId, out.Generation = node, 1
	s.f.fillAttr(id, &a, &out.Attr)
	return fuse.OK
}

// attr makes the attributes of a node: owner, times and permissions are those of the stream's
// directory.
func (s *streamFiles) attr(ctx request, node uint64) (meta.Attr, error) {
	kind, id, ino := streamOf(node)
	v, err := s.f.volume(ctx, id)
	if err != nil {
		return meta.Attr{}, err
	}
	if ino, err = streamDir(ctx, v, kind, ino); err != nil {
		return meta.Attr{}, err
	}
	e, err := v.GetAttr(ctx, ino)
	if err != nil {
		return meta.Attr{}, err
	}
	a := e.Attr
	a.Ino, a.Size, a.Blocks, a.Nlink = meta.Ino(node)&meta.MaxIno, 0, 0, 1
	switch kind {
	case streamTails:
		a.Mode, a.Nlink = meta.TypeDir|a.Mode&0o555, 2
	case streamInput:
		a.Mode = meta.TypeRegular | a.Mode&0o222
	default:
		a.Mode = meta.TypeRegular | a.Mode&0o444
	}
	return a, nil
}

// streamDir returns the directory of the stream of a node.
func streamDir(ctx request, v Volume, kind streamKind, ino meta.Ino) (meta.Ino, error) {
	if kind != streamTail {
		return ino, nil
	}
	for range 2 { // of the partition, then of the log
		e, err := v.GetAttr(ctx, ino)
		if err != nil {
			return 0, err
		}
		if ino = e.Attr.Parent; ino == 0 {
			return 0, meta.E("stream", meta.Stale, "partition", errors.New("the directory has no parent"))
		}
	}
	return ino, nil
}

func (s *streamFiles) getAttr(ctx request, node uint64, out *fuse.AttrOut) fuse.Status {
	a, err := s.attr(ctx, node)
	_, id, _ := streamOf(node)
	s.f.fillAttr(id, &a, &out.Attr)
	return s.f.status("getattr", node, err)
}

func (s *streamFiles) statx(ctx request, node uint64, out *fuse.StatxOut) fuse.Status {
	a, err := s.attr(ctx, node)
	_, id, _ := streamOf(node)
	s.f.fillStatx(id, &a, out)
	return s.f.status("statx", node, err)
}

// lookup finds a partition by its number.
func (s *streamFiles) lookup(ctx request, node uint64, name string, out *fuse.EntryOut) fuse.Status {
	kind, id, ino := streamOf(node)
	if kind != streamTails {
		return fuse.ENOTDIR
	}
	if n, err := strconv.Atoi(name); err != nil || n < 0 || strconv.Itoa(n) != name {
		return fuse.ENOENT
	}
	e, err := s.partition(ctx, id, ino, name)
	if err != nil {
		return s.f.status("lookup", node, err)
	}
	if e.Negative || !e.Attr.IsDir() || e.Volume != id || e.Attr.Ino > meta.LastIno {
		return fuse.ENOENT
	}
	return s.entry(ctx, streamTail, id, e.Attr.Ino, out)
}

// partition looks a name up in the log of a stream.
func (s *streamFiles) partition(ctx request, id meta.VolumeID, stream meta.Ino, name string) (penstock.Entry, error) {
	v, err := s.f.volume(ctx, id)
	if err != nil {
		return penstock.Entry{}, err
	}
	e, err := v.Lookup(ctx, stream, logName)
	if err != nil || e.Negative {
		return e, err
	}
	return v.Lookup(ctx, e.Attr.Ino, name)
}

// readDir lists the partitions.
func (s *streamFiles) readDir(ctx request, in *fuse.ReadIn, add addEntry) fuse.Status {
	kind, id, ino := streamOf(in.NodeId)
	if kind != streamTails {
		return fuse.ENOTDIR
	}
	own := meta.Ino(in.NodeId) & meta.MaxIno
	if in.Offset < afterDot && !add(fuse.DirEntry{Name: ".", Ino: s.f.inumbers.of(id, own), Mode: meta.TypeDir, Off: afterDot}, nil) {
		return fuse.OK
	}
	if in.Offset < afterDotDot && !add(fuse.DirEntry{Name: "..", Ino: s.f.inumbers.of(id, ino), Mode: meta.TypeDir, Off: afterDotDot}, nil) {
		return fuse.OK
	}
	at := penstock.DirCursor{End: s.f.listings.end(in.Fh, in.Offset)}
	if in.Offset > afterDotDot {
		at.Cookie = in.Offset
	}
	v, err := s.f.volume(ctx, id)
	var log penstock.Entry
	if err == nil {
		log, err = v.Lookup(ctx, ino, logName)
	}
	if err != nil || log.Negative {
		return s.f.status("readdir", in.NodeId, err)
	}
	list, _, err := v.ReadDir(ctx, log.Attr.Ino, &at, int(in.Size)/direntBytes+1, false)
	if err != nil {
		return s.f.status("readdir", in.NodeId, err)
	}
	s.f.listings.endsAt(in.Fh, at.End)
	for _, d := range list {
		n := s.f.inumbers.of(id, d.Ino|meta.Ino(streamTail)<<markShift)
		if d.Type == meta.TypeDir && !add(fuse.DirEntry{Name: d.Name, Ino: n, Mode: meta.TypeRegular, Off: d.Cookie}, nil) {
			break
		}
	}
	return fuse.OK
}

// getXattr reads the ACL of the stream's directory, which the kernel obeys for the node, too.
func (s *streamFiles) getXattr(ctx request, node uint64, name string) ([]byte, error) {
	if name != "system.posix_acl_access" {
		return nil, meta.E("getxattr", meta.NoAttribute, name, nil)
	}
	kind, id, ino := streamOf(node)
	v, err := s.f.volume(ctx, id)
	if err == nil {
		ino, err = streamDir(ctx, v, kind, ino)
	}
	if err != nil {
		return nil, err
	}
	return v.GetXattr(ctx, ino, name)
}

// open opens a file of a stream.
func (s *streamFiles) open(ctx request, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	kind, id, ino := streamOf(in.NodeId)
	if kind == streamInput {
		return s.openInput(ctx, in, out)
	}
	if kind != streamTail {
		return fuse.Status(syscall.EISDIR)
	}
	if s.streams == nil || writable(in.Flags) || in.Flags&syscall.O_TRUNC != 0 {
		return fuse.EPERM
	}
	if in.Unique&resent != 0 {
		s.undoOpen(in.Unique &^ resent)
	}
	t, err := s.streams.Tail(ctx, id, ino, -1, 0)
	if err != nil {
		return s.f.status("open", in.NodeId, err)
	}
	h := &tailHandle{node: in.NodeId, turn: make(chan struct{}, 1), tail: t, last: in.Unique &^ resent}
	h.at.offset, h.at.skip = t.Place()
	h.before = h.at
	// A stream has no position: the kernel neither counts one, nor locks one while a READ waits.
	out.Fh, out.OpenFlags = s.f.opens.handle(modeVirtual|modeNoFlush), fuse.FOPEN_DIRECT_IO|fuse.FOPEN_STREAM|fuse.FOPEN_NOFLUSH
	s.add(out.Fh, h)
	return fuse.OK
}

// add adds a handle, and notes the handle for a successor.
func (s *streamFiles) add(fh uint64, h *tailHandle) {
	s.note(fh, h)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tails == nil {
		s.tails = make(map[uint64]*tailHandle)
	}
	s.tails[fh] = h
}

// note notes the places of a handle. The new record is written before the old one is erased: of
// two records the successor takes the later one.
func (s *streamFiles) note(fh uint64, h *tailHandle) {
	k := s.f.kept.keep
	if k == nil {
		return
	}
	old := h.slot
	h.slot = k.Note(keep.Record{Kind: keep.Tail, N: [6]uint64{
		h.node, fh, h.last, uint64(h.before.offset), uint64(h.at.offset), uint64(uint32(h.before.skip))<<32 | uint64(uint32(h.at.skip)),
	}})
	k.Erase(old)
}

// restore opens a handle of the predecessor again. Of two records of a handle, the later one
// comes last.
func (s *streamFiles) restore(r *keep.Record) (fh uint64) {
	fh = r.N[1]
	h := &tailHandle{
		node: r.N[0], turn: make(chan struct{}, 1), last: r.N[2],
		before: place{int64(r.N[3]), int(r.N[5] >> 32)}, at: place{int64(r.N[4]), int(uint32(r.N[5]))},
	}
	s.mu.Lock()
	if old := s.tails[fh]; old != nil {
		h.slot = old.slot
	}
	s.mu.Unlock()
	s.add(fh, h)
	return fh
}

// undoOpen forgets the handle that a predecessor gave to an OPEN, but could not answer.
func (s *streamFiles) undoOpen(unique uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for fh, h := range s.tails {
		if h.last == unique {
			s.f.kept.keep.Erase(h.slot)
			delete(s.tails, fh)
		}
	}
}

// handle returns an open file of tail; nil: there is none.
func (s *streamFiles) handle(fh uint64) *tailHandle {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tails[fh]
}

// read answers a READ of a file of tail, which may wait for ever.
func (s *streamFiles) read(ctx request, in *fuse.ReadIn, p []byte) (int, error) {
	h := s.handle(in.Fh)
	if h == nil || s.streams == nil {
		return 0, meta.E("read", meta.IO, "tail of a partition", errors.New("the mount's process does not know the open file"))
	}
	select {
	case h.turn <- struct{}{}:
	case <-ctx.Done():
		return 0, meta.E("read", meta.Interrupted, "tail of a partition", nil)
	}
	defer func() { <-h.turn }()
	unique := in.Unique &^ resent
	if in.Unique&resent != 0 && unique == h.last && h.at != h.before {
		// The predecessor made the answer, and could not send it.
		h.at, h.tail = h.before, nil
	}
	if h.tail == nil {
		_, id, ino := streamOf(h.node)
		t, err := s.streams.Tail(ctx, id, ino, h.at.offset, h.at.skip)
		if errors.Is(err, meta.Stale) || errors.Is(err, meta.NotFound) {
			return 0, nil // the partition was removed
		}
		if err != nil {
			return 0, err
		}
		h.tail = t
	}
	n, err := h.tail.Read(ctx, p)
	if errors.Is(err, io.EOF) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	h.before, h.last = h.at, unique
	h.at.offset, h.at.skip = h.tail.Place()
	s.note(in.Fh, h) // before the kernel has the bytes
	return n, nil
}

// release ends an open of a file of a stream.
func (s *streamFiles) release(fh uint64) {
	if i, err := s.input(fh); err == nil {
		i.release()
		return
	}
	s.mu.Lock()
	h := s.tails[fh]
	delete(s.tails, fh)
	s.mu.Unlock()
	if h != nil {
		s.f.kept.keep.Erase(h.slot)
	}
}
