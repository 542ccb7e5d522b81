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
