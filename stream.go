package penstock

import (
	"errors"

	"penstock.io/penstock/meta"
)

// streamBatch is the number of blocks that a stream appends before it checks the file again.
const streamBatch = 8

// streamEnd is where the next block of a stream would start.
func (f *file) streamEnd() uint64 {
	if f.own.chunk != nil {
		return f.own.base + f.own.chunk.w.Len()
	}
	return 0
}

// streamsLocked reports that a full block waits at the end of the file's own chunk, or at the
// start of a file without a chunk.
func (f *file) streamsLocked() bool {
	if f.turns.busy&turnPush != 0 {
		return false
	}
	at := f.streamEnd()
	if f.own.chunk != nil && f.own.chunk.w.Len()+blockSize > f.own.chunk.max {
		return false // the next flush takes another chunk
	}
	s, ok := f.m.at(at)
	return ok && s.streamable(at)
}

func (s *segment) streamable(at uint64) bool {
	return s.b != nil && s.b.cw == nil && s.b.busy == 0 && s.off == at && s.pos == 0 && s.n == blockSize && len(s.b.data) == blockSize
}

// stream appends each full block of a file to the file's own chunk soon after the write, so
// that a later sync has little left to do. Failures are left to the flush, which has the
// retries.
func (wb *writeBack) stream(in *inode) {
	v := wb.v
	ctx := v.c.ctx
	for {
		in.mu.Lock()
		f := in.fileLocked()
		var err error
		for err == nil && (f.turns.pushers > 0 || f.turns.busy&turnPush != 0) {
			err = in.wait(ctx, f)
			f = in.fileLocked()
		}
		if err != nil {
			in.fileLocked().pushing = false
			in.mu.Unlock()
			return
		}
		f.turns.busy |= turnPush
		var blobs []*blob
		at := f.streamEnd()
		room := v.settings.maxChunk()
		if f.own.chunk != nil {
			room = f.own.chunk.max - f.own.chunk.w.Len()
		}
		for len(blobs) < streamBatch && room >= blockSize {
			s, ok := f.m.at(at)
			if !ok || !s.streamable(at) || f.own.chunk == nil && len(blobs) == 0 && f.anyCommitted() {
				break
			}
			s.b.frozen = true
			s.b.busy++
			blobs = append(blobs, s.b)
			at += blockSize
			room -= blockSize
		}
		own, epoch := f.own.chunk, f.epoch
		if len(blobs) == 0 || own != nil && own.doubtful() {
			for _, b := range blobs {
				b.busy--
			}
			f.pushing = false
			f.turns.leave(turnPush)
			in.mu.Unlock()
			return
		}
		in.mu.Unlock()
		if own == nil {
			if own, err = v.chunks.newOwn(ctx); err == nil {
				in.mu.Lock()
				if err = in.expiredSince(f, epoch); err == nil {
					f.own.chunk, f.own.base = own, 0
				}
				in.mu.Unlock()
				if err != nil {
					v.chunks.retire(own)
					own = nil
				}
			}
		}
		for i := 0; i < len(blobs) && err == nil; i++ {
			var off uint64
			if off, err = own.w.Append(ctx, blobs[i].data); err == nil {
				v.c.stats.appended.Add(blockSize)
				wb.placed(in, blobs[i], own, off)
			}
		}
		if err != nil && own != nil && ctx.Err() == nil && !errors.Is(err, meta.FileTooBig) {
			v.chunks.breakChunk(own, err)
		}
		in.mu.Lock()
		for _, b := range blobs {
			b.busy--
			v.buffers.settle(b)
		}
		f.turns.leave(turnPush)
		if err != nil {
			f.pushing = false
			in.mu.Unlock()
			return
		}
		in.mu.Unlock()
	}
}

// anyCommitted reports that some byte of the file lies in a chunk.
func (f *file) anyCommitted() bool {
	s, ok := f.m.at(f.m.end() - 1)
	return ok && s.b == nil
}
