package node

import (
	"context"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// Holder keeps mounts alive beyond the processes that serve the mounts, and beyond this
// process. The driver takes up an unserved mount of the holder: either Keep does, as soon as
// Keep sees the end of the mount's process, or an earlier call about the volume. Both take the
// volume's lock and pass the lock to the new process. So a mount has one process at a time,
// and a driver killed meanwhile leaves one living process or none.
type Holder interface {
	// Orphans lists the holder's mounts without a process serving them or starting to, by
	// whole paths.
	Orphans() ([]string, error)
	// Unsynced returns how much data written to an unserved mount is not durable. Both results
	// are zero if the holder does not have the mount, or if a process serves the mount.
	Unsynced(path string) (files int, bytes int64, err error)
	// Forget makes the holder drop an unserved mount; Forget succeeds without such a mount.
	// Errors: Busy (a process serves the mount), Unavailable (written data is not durable).
	Forget(path string) error
}

const (
	keepEvery  = 250 * time.Millisecond // between looks for processes started by an earlier driver
	keepSoon   = 20 * time.Millisecond  // between looks after a process of this driver has ended,
	keepAlert  = time.Second            // for 1 s, since the holder sees the end later
	takeUpWait = 30 * time.Second       // then another process is tried
	takeUps    = 8                      // at once: a start takes 0.1 s of a CPU
	againAfter = 200 * time.Millisecond // after a failed try; doubled each time, up to
	againLimit = 5 * time.Second
	dyingAfter = 2 * time.Second // the lock is held so long after the holder saw the process end
)

// children tracks the processes started by this driver.
type children struct {
	mu    sync.Mutex
	takes map[folder]context.CancelFunc // of mounts being taken up
	ended chan struct{}                 // has one element if a process has ended since the last receive
}

// end records that a process has ended.
func (c *children) end() {
	select {
	case c.ended <- struct{}{}:
	default:
	}
}

// take records that f's mount is being taken up. The caller calls done afterwards. The
// returned context ends after takeUpWait.
func (c *children) take(ctx context.Context, f folder) (_ context.Context, done func()) {
	ctx, cancel := context.WithTimeout(ctx, takeUpWait)
	c.mu.Lock()
	c.takes[f] = cancel // at most one take-up: its caller has the lock
	c.mu.Unlock()
	return ctx, func() {
		cancel()
		c.mu.Lock()
		delete(c.takes, f)
		c.mu.Unlock()
	}
}

// takesUp reports whether f's mount is being taken up.
func (c *children) takesUp(f folder) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.takes[f] != nil
}

// giveUp cancels the take-up of a mount that was unmounted.
func (c *children) giveUp(f folder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cancel := c.takes[f]; cancel != nil {
		cancel()
	}
}

// effort is Keep's record of an unserved mount.
type effort struct {
	since time.Time     // when Keep first saw the mount unserved
	next  time.Time     // when to try again
	pause time.Duration // between the next try and the try after
	under bool          // a try is under way
}

// Keep takes up the holder's unserved mounts until ctx ends. Without a holder Keep returns at
// once.
func (s *Server) Keep(ctx context.Context) {
	if s.Holder == nil {
		return
	}
	var (
		tries sync.WaitGroup
		mu    sync.Mutex // of the efforts
		room  = make(chan struct{}, takeUps)
		known = map[string]*effort{}
		alert time.Time
		said  string
	)
	defer tries.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.children.ended:
			alert = time.Now().Add(keepAlert)
		case <-timer.C:
		}
		orphans, err := s.Holder.Orphans()
		if err != nil && err.Error() != said {
			said = err.Error()
			s.Logger.Warn("the holder of mounts can't be asked", "err", err)
		} else if err == nil {
			said = ""
		}
		mu.Lock()
		for path, e := range known {
			if !e.under && !slices.Contains(orphans, path) {
				delete(known, path)
			}
		}
		now := time.Now()
		var staged map[string]folder
		for _, path := range orphans {
			e := known[path]
			if e == nil {
				e = &effort{since: now, next: now, pause: againAfter}
				known[path] = e
			}
			if e.under || now.Before(e.next) {
				continue
			}
			if staged == nil {
				staged, _ = s.folders()
			}
			f, ours := staged[path]
			if !ours {
				continue // another program's
			}
			e.under = true
			tries.Go(func() {
				room <- struct{}{}
				err := s.takeUp(ctx, f, e.since)
				<-room
				mu.Lock()
				defer mu.Unlock()
				e.under, e.next, e.pause = false, time.Now().Add(e.pause), min(2*e.pause, againLimit)
				if err != nil && meta.KindOf(err) != meta.Busy {
					s.Logger.Error("no successor could be started yet for a mount without a process", "path", path, "err", err)
				}
			})
		}
		mu.Unlock()
		if now.Before(alert) {
			timer.Reset(keepSoon)
		} else {
			timer.Reset(keepEvery)
		}
	}
}

// takeUp starts a process for a mount unserved since the given time, and waits until the
// process serves the mount. Errors: Busy (a starting process has the lock), Unavailable.
func (s *Server) takeUp(ctx context.Context, f folder, since time.Time) error {
	lock, err := f.lock()
	if meta.KindOf(err) == meta.Busy && time.Since(since) > dyingAfter && !s.children.takesUp(f) {
		// A killed process can't end: one of its threads waits in the kernel for an answer
		// that only the next process will give. The killed process keeps its lock on the
		// removed file.
		if err := os.Remove(f.file(lockName)); err != nil {
			return meta.E("take up mount", meta.IO, string(f), err)
		}
		lock, err = f.lock()
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	return s.takeUpLocked(ctx, f, lock)
}

func (s *Server) takeUpLocked(ctx context.Context, f folder, lock *os.File) error {
	r, err := f.read()
	if meta.KindOf(err) == meta.NotFound {
		// The volume was unstaged before f.lock, and f.lock made the folder again.
		return errors.Join(err, f.remove())
	}
	if err != nil {
		return err
	}
	ctx, done := s.children.take(ctx, f)
	defer done()
	m, err := mountAt(r.Staging)
	if err != nil {
		return err
	}
	if m == nil {
		return s.settle(ctx, f, r, lock)
	}
	s.Logger.Warn("the driver starts a successor for a mount without a process", "volume", r.Volume, "path", r.Staging)
	s.Step("takeup.start")
	err = s.start(ctx, f, r, lock, true)
	if err == nil {
		s.Logger.Info("a mount was taken up", "volume", r.Volume, "path", r.Staging)
	}
	return err
}

// settle starts a process to make durable the data of a removed mount, if the mount's own
// process was killed before all was durable. The holder still has the data, and drops the data
// once durable. The caller has the lock. Errors: Unavailable (not yet durable).
func (s *Server) settle(ctx context.Context, f folder, r record, lock *os.File) error {
	if !s.orphaned(r.Staging) {
		return s.forget(r.Staging)
	}
	s.Logger.Warn("a mount's process ended before all written bytes were durable: the driver starts another process", "volume", r.Volume, "path", r.Staging)
	err := s.start(ctx, f, r, lock, true) // without a mount, the process ends as soon as all is durable
	if s.orphaned(r.Staging) {
		return meta.E("settle mount", meta.Unavailable, r.Staging, err)
	}
	return nil
}

// orphaned reports whether the holder has an unserved mount at path.
func (s *Server) orphaned(path string) bool {
	if s.Holder == nil {
		return false
	}
	l, err := s.Holder.Orphans()
	if err != nil {
		s.Logger.Warn("the holder of mounts can't be asked", "path", path, "err", err)
	}
	return slices.Contains(l, path)
}
