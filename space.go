package penstock

import (
	"context"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// space estimates how many more bytes the disks can take, so that a write fails on a full disk
// at once, and not later in the background. For quotas, see meter: they are reserved exactly.
//
// The volume's owner reports the free space, and may not answer for a while. So a writer that
// finds an old report requests a new one in the background and continues with the old one. Two
// kinds of writers wait: the first writer of all, since there is no report yet, and a writer
// for which the last report leaves no room.
type space struct {
	mu   sync.Mutex
	left int64     // of the last report, minus the bytes taken since
	at   time.Time // time of the report; zero: no report yet
	ask  *reading  // under way; nil: none
}

// reading is a request to the owner. done is closed when the request has ended; then err may
// be read.
type reading struct {
	done chan struct{}
	err  error
}

// spaceAge is how old a reading of free space may be before another is asked for.
const spaceAge = time.Second

// take records n bytes that are about to be written. Errors: NoSpace, Interrupted.
func (s *space) take(ctx context.Context, v *Volume, n int64) error {
	asked := false // this call has sent a request, so the report is newer than the call
	for {
		s.mu.Lock()
		known := !s.at.IsZero()
		if known && s.left >= n {
			s.left -= n
			if time.Since(s.at) >= spaceAge {
				s.readLocked(v)
			}
			s.mu.Unlock()
			return nil
		}
		if known && asked {
			s.mu.Unlock()
			return meta.E("write", meta.NoSpace, v.name, nil)
		}
		r := s.ask
		if r == nil {
			r, asked = s.readLocked(v), true
		}
		s.mu.Unlock()
		select {
		case <-r.done:
		case <-ctx.Done():
			return meta.E("write", meta.Interrupted, v.name, context.Cause(ctx))
		}
		if r.err != nil {
			return nil // the write finds out
		}
	}
}

// readLocked sends a request to the owner, unless a request is under way.
func (s *space) readLocked(v *Volume) *reading {
	if s.ask != nil {
		return s.ask
	}
	r := &reading{done: make(chan struct{})}
	s.ask = r
	v.c.spawn(func() {
		st, err := v.StatFS(v.c.ctx)
		s.mu.Lock()
		defer s.mu.Unlock()
		defer close(r.done)
		s.ask = nil
		if r.err = err; err != nil {
			return
		}
		s.at, s.left = time.Now(), 1<<62
		if st.DiskTotal > 0 {
			s.left = int64(min(st.DiskFree, 1<<62))
		}
	})
	return r
}

// StatFS tells usage and limits, what is buffered here included.
func (v *Volume) StatFS(ctx context.Context) (meta.StatFS, error) {
	res, _, err := v.owner.do(ctx, nil, &meta.StatFSOp{}, meta.LeaseNone)
	if err != nil {
		return meta.StatFS{}, err
	}
	st := res.StatFS
	if d := v.back.dirtyBytes.Load(); d > 0 {
		st.UsedBytes += uint64(d)
		st.DiskFree -= min(st.DiskFree, uint64(d))
	}
	return st, nil
}
