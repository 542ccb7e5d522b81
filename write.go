package penstock

import (
	"context"
	"errors"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// Write writes p at offset off or, with atEnd, at the end of the file at the moment of the
// write (O_APPEND). With kill, set-id bits and capabilities are dropped, as for a writer
// without CAP_FSETID. Write writes all of p or nothing, and waits while the client's write
// buffer is full. Errors: NoSpace, QuotaExceeded, FileTooBig, NotPermitted (sealed), and the
// error of an earlier write in the background.
func (v *Volume) Write(ctx context.Context, call *Call, ino meta.Ino, p []byte, off int64, atEnd, kill bool) (n int, err error) {
	if err := v.readOnly("write"); err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, meta.E("write", meta.Invalid, v.subject(ino), nil)
	}
	in := v.node(ino)
	defer in.put()
	if len(p) == 0 {
		return 0, nil
	}
	if v.settings.policy.Load().Immutable { // a lease may have survived the change of policy
		if v.settings.refresh(ctx); v.settings.policy.Load().Immutable {
			return 0, meta.E("write", meta.ReadOnly, v.subject(ino), errors.New("the volume is immutable"))
		}
	}
	if kill {
		if err := v.changes.killPriv(ctx, call, in); err != nil {
			return 0, err
		}
	}
	return v.buffers.write(ctx, call, in, p, writing{off: off, atEnd: atEnd})
}

// fileBuffers takes written bytes into the client's buffers: a lease, a promise of the quota,
// blobs in the file's map, and a kick for the write-back.
type fileBuffers struct{ v *Volume }

// writing says where bytes go.
type writing struct {
	off   int64
	atEnd bool   // at the end of the file instead
	page  bool   // the bytes are written back from a mapping (see WritePage)
	epoch uint64 // the bytes are taken in this epoch only; 0: in any, unless page is set
}

// write buffers p.
func (fb *fileBuffers) write(ctx context.Context, call *Call, in *inode, p []byte, w writing) (n int, err error) {
	v := fb.v
	off, atEnd, all := w.off, w.atEnd, int64(len(p))
	if err := v.space.take(ctx, v, all); err != nil {
		return 0, err
	}
	if err := v.c.buf.take(ctx, all, v.back.kick); err != nil {
		return 0, err
	}
	grew := 0
	defer func() { v.c.buf.give(all - int64(grew)) }()

	var f *file
	var at uint64
	var got promise // of the quota
	var told enough
	defer func() { v.meter.drop(&got) }()
	for {
		if w.page {
			if f, err = in.toWritePage(ctx, w.epoch); err != nil {
				return 0, err
			}
			if uint64(off) >= f.size {
				in.mu.Unlock()
				return 0, nil
			}
			p = p[:min(uint64(len(p)), f.size-uint64(off))]
		} else if f, err = in.toWrite(ctx); err != nil {
			return 0, err
		} else if w.epoch != 0 && (w.epoch != f.epoch || w.epoch != v.owner.epoch.Load()) {
			in.mu.Unlock()
			return 0, meta.E("write", meta.SessionExpired, v.subject(in.ino), errors.New("the leadership of the file has ended with its session"))
		}
		if !w.page {
			err = f.toldByWrite()
		}
		if err == nil {
			at, err = in.mayWrite(f, off, len(p), atEnd)
		}
		if err != nil {
			in.mu.Unlock()
			return 0, err
		}
		if atEnd && v.c.cfg.Keep != nil {
			at = v.c.kept.appendAt(in, call, at)
		}
		if !v.meter.on.Load() {
			break
		}
		need := in.needs(f, at, uint64(len(p)))
		spare := told.spared(in, f, need, at, uint64(len(p)))
		told = in.asked(f, need, at, uint64(len(p)))
		need -= spare
		if v.meter.use(&f.promised, &got, need) {
			break
		}
		in.mu.Unlock()
		lacks := need - v.meter.has(&got)
		var to metaclient.Place
		if v.meter.overwrites.Load() {
			to = told.at
		}
		more, err := v.meter.room(ctx, lacks, to)
		if err != nil {
			return 0, err
		}
		told.spare = lacks - min(lacks, more.n)
		v.meter.move(&more, &got, more.n)
	}
	if f.uncommitted == 0 {
		f.lo, f.hi = at, at+uint64(len(p))
	} else {
		f.lo, f.hi = min(f.lo, at), max(f.hi, at+uint64(len(p)))
	}
	grew = fb.putLocked(f, p, at)
	f.size = max(f.size, at+uint64(len(p)))
	now := meta.Time(time.Now().UnixNano())
	f.mtime, f.ctime = now, now
	f.puts++
	if f.turns.want > 0 {
		f.turns.changed()
	}
	v.back.listDirtyLocked(in)
	stream := !f.pushing && f.unpushed >= 2*blockSize && f.streamsLocked()
	if stream {
		f.pushing = true
		in.pins.Add(1)
	}
	many := f.uncommitted >= v.c.streamCommit
	in.mu.Unlock()

	v.c.stats.written.Add(uint64(len(p)))
	if stream {
		v.c.spawn(func() {
			defer in.put()
			v.back.stream(in)
		})
	}
	if v.back.dirtyBytes.Add(int64(grew)) >= v.c.flushBytes || many {
		v.back.kick()
	}
	return len(p), nil
}

// toWrite waits until the file may be written, and returns with mu held.
func (in *inode) toWrite(ctx context.Context) (*file, error) {
	for {
		f, _, err := in.withMap(ctx, meta.LeaseExclusive)
		if err != nil || f.turns.gate == 0 {
			return f, err
		}
		err = in.wait(ctx, f)
		in.mu.Unlock()
		if err != nil {
			return nil, err
		}
	}
}

// mayWrite says where n bytes go, or why not. mu is held.
func (in *inode) mayWrite(f *file, off int64, n int, atEnd bool) (at uint64, err error) {
	if in.attr.Flags&meta.FlagSealed != 0 || in.keptByStreamLocked() {
		return 0, meta.E("write", meta.NotPermitted, in.vol.subject(in.ino), nil)
	}
	at = uint64(off)
	if atEnd {
		at = f.size
	}
	if at+uint64(n) > meta.MaxFileSize {
		return 0, meta.E("write", meta.FileTooBig, in.vol.subject(in.ino), nil)
	}
	return at, nil
}

// putLocked buffers p at off and returns by how many bytes the buffers grew.
func (fb *fileBuffers) putLocked(f *file, p []byte, off uint64) (grew int) {
	// The first change turns a stored inline file into ordinary buffered bytes: the commit
	// replaces the whole file.
	if s, ok := f.m.at(off); ok && s.b != nil && !s.b.frozen && s.b.cw == nil {
		// Overwrite in place as far as the bytes are buffered and no flush uses them.
		if off+uint64(len(p)) <= s.end() {
			copy(s.b.data[s.pos+(off-s.off):], p)
			return 0
		}
	}
	total := 0
	for len(p) > 0 {
		n, g := fb.putPart(f, p, off)
		p, off, total = p[n:], off+uint64(n), total+g
	}
	return total
}

// putPart buffers a prefix of p: at the end of the previous blob if it has room, else in a new
// blob.
func (fb *fileBuffers) putPart(f *file, p []byte, off uint64) (n, grew int) {
	v := fb.v
	prev, ok := f.m.before(off)
	var run uint64 // how far the bytes just before are a stream
	if ok && prev.b != nil && !prev.b.clean {
		b := prev.b
		run = uint64(len(b.data))
		if !b.frozen && b.refs == 1 && prev.pos+prev.n == uint64(len(b.data)) && len(b.data) < blockSize {
			n = v.c.kept.upToNoted(f, off, len(p))
			if room := cap(b.data) - len(b.data); room < n && cap(b.data) < blockSize {
				fb.grow(b, len(b.data)+n)
			}
			if n = min(n, cap(b.data)-len(b.data), blockSize-len(b.data)); n > 0 {
				f.m.replace(off, off+uint64(n), nil, fb.freeBlobOf(f))
				b.data = append(b.data, p[:n]...)
				prev, _ = f.m.before(off) // replace may have moved the blob
				prev.n += uint64(n)
				f.uncommitted += int64(n)
				f.unpushed += int64(n)
				v.c.cfg.Keep.SetN(b.slot, 3, uint64(len(b.data)))
				return n, n
			}
		}
	}
	n = min(len(p), blockSize)
	b := &blob{}
	switch {
	case run >= blockSize/2:
		b.data, b.pooled = v.c.buf.buffer(blockSize), true
	case n >= smallBuffer/2 || v.c.cfg.Keep != nil:
		b.data, b.pooled = v.c.buf.buffer(n), true
	default:
		b.data = make([]byte, 0, n)
	}
	b.data = append(b.data, p[:n]...)
	v.c.kept.blob(f, b, off) // before the replaced bytes are forgotten
	f.m.replace(off, off+uint64(n), []segment{{off: off, n: uint64(n), b: b}}, fb.freeBlobOf(f))
	f.uncommitted += int64(n)
	f.unpushed += int64(n)
	return n, n
}

// grow gives a blob at least want bytes of room, up to a block.
func (fb *fileBuffers) grow(b *blob, want int) {
	v := fb.v
	want = max(want, 2*cap(b.data))
	old, was := b.data, b.pooled
	if b.pooled = want >= smallBuffer/2 || v.c.cfg.Keep != nil; b.pooled {
		b.data = append(v.c.buf.buffer(want), old...)
	} else {
		b.data = append(make([]byte, 0, want), old...)
	}
	v.c.kept.moved(b)
	if was {
		v.c.buf.recycle(old)
	}
}

// at returns the segment with the byte at off.
func (m *extmap) at(off uint64) (*segment, bool) {
	if len(m.pages) == 0 {
		return nil, false
	}
	p, i := m.find(off)
	if p >= len(m.pages) || m.pages[p][i].off > off {
		return nil, false
	}
	return &m.pages[p][i], true
}

// freeBlobOf returns the function that replace calls when a blob has lost its last segment.
func (fb *fileBuffers) freeBlobOf(f *file) func(*blob) {
	return func(b *blob) {
		if b.clean {
			return
		}
		fb.v.c.kept.forget(f, b)
		f.uncommitted -= int64(len(b.data))
		if b.cw == nil {
			f.unpushed -= int64(len(b.data))
		}
		fb.settle(b)
	}
}

// settle returns the memory of a blob that is no longer needed.
func (fb *fileBuffers) settle(b *blob) {
	v := fb.v
	if b.refs > 0 || b.busy > 0 || b.data == nil || b.clean {
		return
	}
	n := int64(len(b.data))
	v.c.buf.give(n)
	v.back.dirtyBytes.Add(-n)
	if b.pooled {
		v.c.buf.recycle(b.data)
	}
	b.data = nil
	if b.cw != nil {
		v.chunks.dropBlob(b.cw)
		b.cw = nil
	}
}

// killPriv drops set-id bits and capabilities before an unprivileged write.
func (ch *inodeChanges) killPriv(ctx context.Context, call *Call, in *inode) error {
	in.mu.Lock()
	known, a := in.attrOK && in.liveLocked(), in.attr
	in.mu.Unlock()
	if !known {
		e, err := ch.v.GetAttr(ctx, in.ino)
		if err != nil {
			return err
		}
		a = e.Attr
	}
	const groupExec = 0o010
	if a.Mode&meta.ModeSetUID == 0 && (a.Mode&meta.ModeSetGID == 0 || a.Mode&groupExec == 0) && a.Flags&meta.FlagHasCaps == 0 {
		return nil
	}
	_, err := ch.v.SetAttr(ctx, call, meta.SetAttr{Ino: in.ino, Mask: meta.SetKillPriv})
	return err
}
