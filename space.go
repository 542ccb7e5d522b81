package penstock

import (
	"context"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// space knows about how much the disks can still take, so that a writer is
// told that they are full when it writes, not when it is too late. A quota is
// reserved exactly: see meter.
//
// A reading of the free space comes from the volume's owner, which may not answer for
// a while. So a writer that finds an old reading has the next one asked for in the
// background, and goes on with the old one. Two writers wait: the first one of all, since
// nothing is known yet, and one for which the last reading leaves no room.
type space struct {
	mu   sync.Mutex
	left int64     // of the last reading, less what was taken since
	at   time.Time // of that reading; zero: there was none
	ask  *reading  // under way; nil: none
}

// reading is a question to the owner; done is closed when it is over. err may be read
// then.
type reading struct {
	done chan struct{}
	err  error
}

// spaceAge is how old a reading of free space may be before another is asked for.
const spaceAge = time.Second

// take books n bytes that are about to be written. Errors: NoSpace, Interrupted.
func (s *space) take(ctx context.Context, v *Volume, n int64) error {
	asked := false // by this call: what is known then is no older than the call
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

// readLocked asks the owner, unless that is under way.
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
