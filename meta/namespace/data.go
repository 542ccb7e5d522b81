package namespace

import (
	"fmt"
	"slices"

	"penstock.io/penstock/meta"
)

// maxOpen bounds the extents in an answer to Open.
const maxOpen = 4096

// fileContent are the operations on the bytes of files, within an operation on the namespace.
type fileContent struct{ *tx }

func (t *tx) content() fileContent { return fileContent{t} }

// regular reads a regular file for an operation on its contents.
func (t fileContent) regular(op string, ino meta.Ino) (*inode, error) {
	in, err := t.inode(ino)
	if err != nil {
		return nil, err
	}
	switch {
	case in.IsRegular():
		return in, nil
	case in.IsDir():
		return nil, fail(op, meta.IsDir, fmt.Sprintf("inode %d", ino))
	}
	return nil, fail(op, meta.Invalid, fmt.Sprintf("inode %d is no regular file", ino))
}

// writable is regular for operations that change the contents.
func (t fileContent) writable(op string, ino meta.Ino) (*inode, error) {
	in, err := t.regular(op, ino)
	if err != nil {
		return nil, err
	}
	if err := t.c.keepStream(op, in); err != nil {
		return nil, err
	}
	return in, in.checkWritable(op)
}

func (in *inode) checkWritable(op string) error {
	if in.Flags&meta.FlagSealed != 0 {
		return fail(op, meta.NotPermitted, fmt.Sprintf("inode %d was sealed when it was closed", in.Ino))
	}
	return in.checkReaped(op)
}

// checkReaped refuses new bytes in a file whose truncated tail is not reaped yet.
func (in *inode) checkReaped(op string) error {
	if in.reap {
		return fail(op, meta.Again, fmt.Sprintf("inode %d", in.Ino))
	}
	return nil
}

func (in *inode) checkClosed(op string) error {
	if in.Flags&meta.FlagOpenEnded != 0 {
		return fail(op, meta.Busy, fmt.Sprintf("inode %d has an open-ended extent", in.Ino))
	}
	return nil
}

// ---- reads

func (t fileContent) open(op *meta.Open, res *meta.Result) error {
	in, err := t.inode(op.Ino)
	if err != nil {
		return err
	}
	res.Attr = in.Attr
	res.EOF = true
	if !in.IsRegular() {
		return nil
	}
	if in.Flags&meta.FlagInline != 0 {
		res.Data = append([]byte(nil), in.data...)
	}
	end := in.Size
	if op.Len != 0 && op.Off+op.Len >= op.Off {
		end = min(end, op.Off+op.Len)
	}
	err = t.extents().scanLive(in, op.Off, func(e extent) bool {
		if e.Off >= end {
			return false
		}
		if len(res.Extents) == maxOpen {
			res.EOF = false
			return false
		}
		res.Extents = append(res.Extents, e.Extent)
		return true
	})
	if err != nil {
		return err
	}
	var last meta.ChunkID
	for _, e := range res.Extents {
		if e.Chunk.IsZero() || e.Chunk == last || t.clones().foreign(e.Chunk) {
			continue
		}
		last = e.Chunk
		n := len(t.chunks)
		c, err := t.chunk(e.Chunk)
		if err != nil {
			return err
		}
		if len(t.chunks) > n {
			res.Places = append(res.Places, meta.ChunkPlace{ID: c.ID, Servers: c.Servers, Sealed: c.State != meta.ChunkOpen, Length: c.Length})
		}
	}
	return nil
}

func (t fileContent) seek(op *meta.Seek, res *meta.Result) error {
	in, err := t.regular("seek", op.Ino)
	if err != nil {
		return err
	}
	res.Attr = in.Attr
	if op.Off >= in.Size {
		return fail("seek", meta.NoSuchOffset, fmt.Sprintf("%d of %d", op.Off, in.Size))
	}
	at := op.Off // everything from op.Off to here is data, when looking for a hole
	found := false
	if n := uint64(len(in.data)); in.Flags&meta.FlagInline != 0 && op.Off < n {
		if !op.Hole {
			res.Off = op.Off
			return nil
		}
		at = n
	}
	err = t.extents().scanLive(in, at, func(e extent) bool {
		if e.Chunk.IsZero() {
			return true
		}
		if !op.Hole {
			at, found = max(op.Off, e.Off), true
			return false
		}
		if e.Off > at {
			return false
		}
		at = e.End()
		return true
	})
	if err != nil {
		return err
	}
	if !op.Hole && (!found || at >= in.Size) {
		return fail("seek", meta.NoSuchOffset, fmt.Sprintf("no data after %d", op.Off))
	}
	res.Off = min(at, in.Size)
	return nil
}

// ---- writing

func (t fileContent) write(op *meta.Write, res *meta.Result) error {
	in, err := t.regular("write", op.Ino)
	if err != nil {
		return err
	}
	closes := op.CloseEnded && in.Flags&meta.FlagOpenEnded != 0
	content := len(op.Extents) > 0 || op.Inline || op.Size > in.Size
	if content || closes || op.Seal {
		if err := t.c.keepStream("write", in); err != nil {
			return err
		}
	}
	if content || closes {
		if err := in.checkWritable("write"); err != nil {
			return err
		}
	}
	if op.Size > meta.MaxFileSize {
		return fail("write", meta.FileTooBig, fmt.Sprintf("size %d", op.Size))
	}
	switch {
	case op.Inline && len(op.Extents) > 0:
		return fail("write", meta.Invalid, "inline data and extents at once")
	case op.Inline:
		err = t.writeInline(in, op)
	case len(op.Extents) > 0:
		err = t.writeExtents(in, op)
	case closes:
		err = t.closeEnd(in, 0, false)
		in.Size = max(in.Size, op.Size)
	case op.Size > in.Size:
		err = in.checkClosed("write")
		in.Size = max(in.Size, op.Size)
	}
	if err != nil {
		return err
	}
	if op.MarkSynced && (op.Synced || len(op.Extents) == 0) {
		in.Flags &^= meta.FlagUnsynced
		in.dirty = true
	}
	now := t.c.Now
	if op.Mtime != 0 {
		now = op.Mtime
	}
	if content || closes {
		touch(in)
		in.Mtime, in.Ctime = now, max(in.Ctime, now)
		if err := t.changing(in, res); err != nil {
			return err
		}
	} else if op.Mtime != 0 && in.Mtime != op.Mtime {
		touch(in)
		in.Mtime, in.Ctime = now, max(in.Ctime, now)
	}
	if op.Kill {
		mode, flags := in.Mode, in.Flags
		if err := t.killPriv(in); err != nil {
			return err
		}
		if !content && !closes && (in.Mode != mode || in.Flags != flags) {
			if err := t.changing(in, res); err != nil {
				return err
			}
		}
	}
	if op.Seal {
		if err := in.checkClosed("seal"); err != nil {
			return err
		}
		if in.Flags&meta.FlagSealed == 0 {
			touch(in)
			in.Flags |= meta.FlagSealed
		}
	}
	res.Attr = in.Attr
	return nil
}

func (t fileContent) writeInline(in *inode, op *meta.Write) error {
	if !op.CloseEnded {
		if err := in.checkClosed("write"); err != nil {
			return err
		}
	}
	if len(op.Data) > meta.InlineMax {
		return fail("write", meta.TooBig, fmt.Sprintf("%d inline bytes", len(op.Data)))
	}
	if err := t.extents().truncateTo(in, 0); err != nil {
		return err
	}
	in.Flags &^= meta.FlagUnsynced | meta.FlagInline
	in.data = nil
	if len(op.Data) > 0 {
		in.data = op.Data
		in.Flags |= meta.FlagInline
		in.Blocks += uint64(len(op.Data))
	}
	in.Size = max(op.Size, uint64(len(op.Data)))
	return nil
}

// writeExtents maps bytes that a client appended to chunks.
func (t fileContent) writeExtents(in *inode, op *meta.Write) error {
	l := op.Extents
	if in.Flags&meta.FlagOpenEnded != 0 && op.CloseEnded {
		old, err := t.openExtent(in)
		if err != nil {
			return err
		}
		old.OpenEnded = false
		l = append([]meta.Extent{old.Extent}, l...)
	}
	news, err := arrange(l)
	if err != nil {
		return err
	}
	if in.Flags&meta.FlagOpenEnded != 0 && !op.CloseEnded {
		if err := t.checkContinues(in, news); err != nil {
			return err
		}
	}
	end := news[len(news)-1].End()
	for i, e := range news {
		if e.End() > meta.MaxFileSize || e.End() < e.Off {
			return fail("write", meta.FileTooBig, fmt.Sprintf("extent %d+%d", e.Off, e.Len))
		}
		if e.OpenEnded && (i != len(news)-1 || end < max(in.Size, op.Size)) {
			return fail("write", meta.Invalid, "an open-ended extent must hold the file's last bytes")
		}
		if err := t.checkNew(e); err != nil {
			return err
		}
	}
	if in.Flags&meta.FlagInline != 0 {
		if err := dropInline(in, news); err != nil {
			return err
		}
	}
	cuts := make([]span, len(news))
	for i, e := range news {
		cuts[i] = span{e.Off, e.End()}
	}
	if err := t.extents().edit(in, cuts, news); err != nil {
		return err
	}
	in.Size = max(in.Size, op.Size, end)
	if !op.Synced {
		in.Flags |= meta.FlagUnsynced
	}
	return nil
}

// arrange sorts extents. Of overlapping extents, the later in l wins.
func arrange(l []meta.Extent) ([]meta.Extent, error) {
	out := make([]meta.Extent, 0, len(l))
	for _, e := range l {
		if e.Len == 0 || e.End() < e.Off {
			return nil, fail("write", meta.Invalid, fmt.Sprintf("extent %d+%d", e.Off, e.Len))
		}
		if n := len(out); n == 0 || out[n-1].End() <= e.Off {
			out = append(out, e)
			continue
		}
		var next []meta.Extent
		for _, o := range out {
			next = appendOutside(next, o, []span{{e.Off, e.End()}})
		}
		i, _ := slices.BinarySearchFunc(next, e.Off, func(x meta.Extent, off uint64) int {
			if x.Off < off {
				return -1
			}
			return 1
		})
		out = slices.Insert(next, i, e)
	}
	return out, nil
}

// checkNew refuses an extent that refers to bytes which can't exist.
func (t fileContent) checkNew(e meta.Extent) error {
	if e.Chunk.IsZero() {
		if e.OpenEnded || e.ChunkOff != 0 {
			return fail("write", meta.Invalid, "preallocated space in no chunk, yet with a place in one")
		}
		return nil
	}
	if e.Chunk.Volume != t.vol.id {
		return fail("write", meta.CrossVolume, e.Chunk.String())
	}
	c, err := t.chunk(e.Chunk)
	if err != nil {
		return err
	}
	if c.State == meta.ChunkDeleting {
		return fail("write", meta.NoSuchChunk, e.Chunk.String())
	}
	if end := e.ChunkOff + e.Len; end < e.Len || c.State == meta.ChunkSealed && end > c.Length {
		return fail("write", meta.Sealed, fmt.Sprintf("chunk %v ends at %d, the extent at %d", e.Chunk, c.Length, end))
	}
	return nil
}

// checkContinues admits, in a file with an open-ended extent, only this extent with newly
// appended bytes (rule 7).
func (t fileContent) checkContinues(in *inode, news []meta.Extent) error {
	old, err := t.openExtent(in)
	if err != nil {
		return err
	}
	n := news[0]
	if len(news) != 1 || !n.OpenEnded || n.Chunk != old.Chunk || n.Off > old.Off || n.Off-old.Off != n.ChunkOff-old.ChunkOff || n.End() < old.End() {
		return fail("write", meta.Busy, fmt.Sprintf("inode %d has an open-ended extent", in.Ino))
	}
	return nil
}

func (t fileContent) openExtent(in *inode) (e extent, err error) {
	found := false
	err = t.extents().scanExtents(in.Ino, in.openOff, func(x extent) bool {
		e, found = x, true
		return false
	})
	if err == nil && (!found || !e.OpenEnded || e.Off != in.openOff) {
		err = fail("extent", meta.Corrupt, fmt.Sprintf("inode %d: no open-ended extent at %d", in.Ino, in.openOff))
	}
	return e, err
}

// closeEnd closes the open-ended extent: at the journaled length or, with sealed, at the end of
// the chunk. The file ends there.
func (t fileContent) closeEnd(in *inode, length uint64, sealed bool) error {
	old, err := t.openExtent(in)
	if err != nil {
		return err
	}
	e := old.Extent
	e.OpenEnded = false
	if sealed {
		e.Len = 0
		if length > e.ChunkOff {
			e.Len = min(length-e.ChunkOff, meta.MaxFileSize-e.Off)
		}
		if in.Flags&meta.FlagUnsynced == 0 {
			// Bytes journaled as synced and missing in the chunk are lost. The file keeps the
			// same length, and reads of the lost bytes fail (rule 5): a shorter file would hide
			// the loss.
			e.Len = max(e.Len, old.Len)
		}
		in.Size = e.Off + e.Len
	}
	in.dirty = true
	// The bytes may continue the previous extent, so edit puts the bytes into the file.
	if e.Len == 0 {
		return t.extents().edit(in, []span{{old.Off, old.End()}}, nil)
	}
	return t.extents().edit(in, []span{{old.Off, max(old.End(), e.End())}}, []meta.Extent{e})
}

// dropInline removes inline bytes replaced by extents. Extents entirely behind the inline bytes
// leave the inline bytes in place. Extents over a part of the inline bytes are refused: the
// rest would be lost, because the machine can't copy the rest into a chunk.
func dropInline(in *inode, news []meta.Extent) error {
	n := uint64(len(in.data))
	if news[0].Off >= n {
		return nil
	}
	at := uint64(0)
	for _, e := range news {
		if e.Off > at {
			break
		}
		at = max(at, e.End())
	}
	if at < n {
		return fail("write", meta.Invalid, fmt.Sprintf("extents replace only a part of %d inline bytes", n))
	}
	in.Blocks -= n
	in.data = nil
	in.Flags &^= meta.FlagInline
	return nil
}

// killPriv drops set-id bits and file capabilities, as POSIX and Linux require for a write by
// an unprivileged process.
func (t fileContent) killPriv(in *inode) error {
	if in.IsDir() {
		return nil
	}
	kill := in.Mode & meta.ModeSetUID
	if in.Mode&0o010 != 0 {
		kill |= in.Mode & meta.ModeSetGID
	}
	if kill != 0 {
		touch(in)
		in.Mode &^= kill
		in.Ctime = max(in.Ctime, t.c.Now)
	}
	if in.Flags&meta.FlagHasCaps != 0 {
		touch(in)
		in.Ctime = max(in.Ctime, t.c.Now)
		return t.xattrs().dropXattr(in, xattrCaps)
	}
	return nil
}

// ---- fallocate

func (t fileContent) fallocate(op *meta.Fallocate, res *meta.Result) error {
	if err := checkFalloc(op); err != nil {
		return err
	}
	in, err := t.writable("fallocate", op.Ino)
	if err != nil {
		return err
	}
	if err := in.checkClosed("fallocate"); err != nil {
		return err
	}
	lo, hi := op.Off, op.Off+op.Len
	switch mode := op.Mode &^ meta.FallocKeepSize; mode {
	case 0:
		err = t.preallocate(in, lo, hi)
	case meta.FallocPunchHole:
		zeroInline(in, lo, hi)
		err = t.extents().edit(in, []span{{lo, hi}}, nil)
	case meta.FallocZeroRange:
		zeroInline(in, lo, hi)
		if from := max(lo, uint64(len(in.data))); from < hi {
			err = t.extents().edit(in, []span{{from, hi}}, []meta.Extent{{Off: from, Len: hi - from}})
		}
	case meta.FallocCollapse:
		err = t.shift(in, lo, op.Len, true)
	case meta.FallocInsert:
		err = t.shift(in, lo, op.Len, false)
	}
	if err != nil {
		return err
	}
	if op.Mode&(meta.FallocKeepSize|meta.FallocCollapse|meta.FallocInsert) == 0 {
		in.Size = max(in.Size, hi)
	}
	touch(in)
	in.Mtime, in.Ctime = t.c.Now, t.c.Now
	res.Attr = in.Attr
	return t.changing(in, res)
}

// checkFalloc holds the rules of fallocate(2) and ext4 about modes.
func checkFalloc(op *meta.Fallocate) error {
	const known = meta.FallocKeepSize | meta.FallocPunchHole | meta.FallocCollapse | meta.FallocZeroRange | meta.FallocInsert
	m := op.Mode
	switch {
	case op.Len == 0:
		return fail("fallocate", meta.Invalid, "no length")
	case m&^known != 0, m&meta.FallocPunchHole != 0 && m&meta.FallocZeroRange != 0,
		m&meta.FallocPunchHole != 0 && m&meta.FallocKeepSize == 0:
		return fail("fallocate", meta.NotSupported, fmt.Sprintf("mode %#x", m))
	case m&meta.FallocCollapse != 0 && m != meta.FallocCollapse, m&meta.FallocInsert != 0 && m != meta.FallocInsert:
		return fail("fallocate", meta.Invalid, fmt.Sprintf("mode %#x", m))
	case op.Off > meta.MaxFileSize, op.Len > meta.MaxFileSize, op.Off+op.Len > meta.MaxFileSize:
		return fail("fallocate", meta.FileTooBig, fmt.Sprintf("%d+%d", op.Off, op.Len))
	}
	return nil
}

// zeroInline zeroes the inline bytes of a range.
func zeroInline(in *inode, lo, hi uint64) {
	n := uint64(len(in.data))
	if in.Flags&meta.FlagInline == 0 || lo >= n {
		return
	}
	in.data = slices.Clone(in.data)
	clear(in.data[lo:min(hi, n)])
	in.dirty = true
}

// preallocate fills the holes of a range, in whole blocks, with space that reads as zeros.
func (t fileContent) preallocate(in *inode, lo, hi uint64) error {
	lo = max(lo/meta.BlockSize*meta.BlockSize, uint64(len(in.data)))
	hi = min((hi+meta.BlockSize-1)/meta.BlockSize*meta.BlockSize, meta.MaxFileSize)
	var cuts []span
	var news []meta.Extent
	at := lo
	gap := func(to uint64) {
		if to > at {
			cuts = append(cuts, span{at, to})
			news = append(news, meta.Extent{Off: at, Len: to - at})
		}
	}
	err := t.extents().scanExtents(in.Ino, lo, func(e extent) bool {
		if e.Off >= hi || len(news) > maxEdit {
			return false
		}
		gap(e.Off)
		at = e.End()
		return true
	})
	if err != nil {
		return err
	}
	gap(hi)
	return t.extents().edit(in, cuts, news)
}

// shift collapses or inserts whole blocks: every extent behind them moves.
func (t fileContent) shift(in *inode, off, n uint64, collapse bool) error {
	switch {
	case off%meta.BlockSize != 0 || n%meta.BlockSize != 0,
		collapse && off+n >= in.Size, !collapse && off >= in.Size:
		return fail("fallocate", meta.Invalid, fmt.Sprintf("shift by %d at %d of %d", n, off, in.Size))
	case !collapse && in.Size+n > meta.MaxFileSize:
		return fail("fallocate", meta.FileTooBig, fmt.Sprintf("%d+%d", in.Size, n))
	}
	if inl := uint64(len(in.data)); in.Flags&meta.FlagInline != 0 && inl > off {
		if !collapse {
			return fail("fallocate", meta.NotSupported, "inserting before inline bytes")
		}
		in.Blocks -= inl - off // inline bytes end within the first block
		in.data = in.data[:off]
		if off == 0 {
			in.data, in.Flags = nil, in.Flags&^meta.FlagInline
		}
	}
	var old []extent
	err := t.extents().scanExtents(in.Ino, off, func(e extent) bool {
		old = append(old, e)
		return len(old) <= maxEdit
	})
	if err != nil {
		return err
	}
	if len(old) > maxEdit {
		return fail("fallocate", meta.ResourceExceeded, fmt.Sprintf("more than %d extents to move", maxEdit))
	}
	fresh := make([]meta.Extent, 0, len(old)+1)
	for _, o := range old {
		e := o.Extent
		if e.Off < off {
			fresh = append(fresh, sub(e, e.Off, off))
			e = sub(e, off, e.End())
		}
		if collapse {
			if e.End() <= off+n {
				continue
			}
			if e.Off < off+n {
				e = sub(e, off+n, e.End())
			}
			e.Off -= n
		} else {
			if e.End()+n > meta.MaxFileSize { // preallocated behind the end
				continue
			}
			e.Off += n
		}
		fresh = append(fresh, e)
	}
	if collapse {
		in.Size -= n
	} else {
		in.Size += n
	}
	return t.extents().replace(in, old, merge(fresh))
}

// ---- copying

func (t fileContent) copyRange(op *meta.CopyRange, res *meta.Result) error {
	from := t.tx
	if op.At != 0 {
		var err error
		if from, err = t.snaps().asOf(op.At); err != nil {
			return err
		}
	}
	src, err := from.content().regular("copy range", op.Src)
	if err != nil {
		return err
	}
	dst, err := t.writable("copy range", op.Dst)
	if err != nil {
		return err
	}
	n := op.Len
	switch {
	case n > meta.MaxFileSize || op.DstOff > meta.MaxFileSize-n:
		return fail("copy range", meta.FileTooBig, fmt.Sprintf("%d+%d", op.DstOff, n))
	case op.SrcOff >= src.Size || n == 0:
		res.Attr = dst.Attr
		return nil
	}
	n = min(n, src.Size-op.SrcOff)
	if op.At == 0 && op.Src == op.Dst && op.SrcOff < op.DstOff+n && op.DstOff < op.SrcOff+n {
		return fail("copy range", meta.Invalid, "the ranges overlap")
	}
	if err := src.checkClosed("copy range"); err != nil {
		return err
	}
	if err := dst.checkClosed("copy range"); err != nil {
		return err
	}
	if op.SrcOff < uint64(len(src.data)) || op.DstOff < uint64(len(dst.data)) {
		return fail("copy range", meta.NotSupported, "inline bytes can't be shared")
	}
	var news []meta.Extent
	err = from.extents().scanLive(src, op.SrcOff, func(e extent) bool {
		if e.Off >= op.SrcOff+n {
			return false
		}
		if len(news) == maxEdit/2 {
			n = e.Off - op.SrcOff // a copy may be short
			return false
		}
		if !e.Chunk.IsZero() {
			x := sub(e.Extent, max(e.Off, op.SrcOff), min(e.End(), op.SrcOff+n))
			x.Off = x.Off - op.SrcOff + op.DstOff
			news = append(news, x)
		}
		return true
	})
	if err != nil {
		return err
	}
	if err := t.extents().edit(dst, []span{{op.DstOff, op.DstOff + n}}, news); err != nil {
		return err
	}
	touch(dst)
	dst.Size = max(dst.Size, op.DstOff+n)
	dst.Flags |= src.Flags & meta.FlagUnsynced
	dst.Mtime, dst.Ctime = t.c.Now, t.c.Now
	res.Off, res.Attr = n, dst.Attr
	return t.changing(dst, res)
}
