package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// Holder outlives the processes that serve mounts, and this one. What it has and
// nobody serves is taken up: by Keep, as soon as it sees that a process is gone,
// or by a call about the volume that comes first. Whoever does so has the volume's
// lock and hands it to the process that it starts: there is one at a time, and a
// driver that is killed meanwhile leaves one that lives, or none.
type Holder interface {
	// Orphans lists the mounts that it has and nobody serves, nor is about to, by
	// their whole paths.
	Orphans() ([]string, error)
	// Unsynced tells what of a mount that nobody serves was written and is not durable;
	// zero also if it does not have the mount, or somebody serves it.
	Unsynced(path string) (files int, bytes int64, err error)
	// Forget has it drop a mount that nobody serves; there may be none.
	// Errors: Busy (somebody does), Unavailable (not all that was written is durable).
	Forget(path string) error
}

const (
	keepEvery  = 250 * time.Millisecond // looks for what a driver before this one had started
	keepSoon   = 20 * time.Millisecond  // and for a process of its own that has just ended,
	keepAlert  = time.Second            // so long, until the holder knows
	takeUpWait = 30 * time.Second       // then another process is tried
	takeUps    = 8                      // at once: to start one is a tenth of a second of a processor
	againAfter = 200 * time.Millisecond // after one that failed; twice as long each time, up to
	againLimit = 5 * time.Second
	dyingAfter = 2 * time.Second // a process has the lock still, though the holder saw its end
)

// children are the processes that this driver has started.
type children struct {
	mu    sync.Mutex
	takes map[folder]context.CancelFunc // of those that are about to take up
	ended chan struct{}                 // has one element if some have ended since it was read
}

// end notes that one has ended.
func (c *children) end() {
	select {
	case c.ended <- struct{}{}:
	default:
	}
}

// take notes that a mount is about to be taken up; done is to be called after.
func (c *children) take(ctx context.Context, f folder) (_ context.Context, done func()) {
	ctx, cancel := context.WithTimeout(ctx, takeUpWait)
	c.mu.Lock()
	c.takes[f] = cancel // there is one: it has the lock
	c.mu.Unlock()
	return ctx, func() {
		cancel()
		c.mu.Lock()
		delete(c.takes, f)
		c.mu.Unlock()
	}
}

// takesUp tells whether a mount is about to be taken up.
func (c *children) takesUp(f folder) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.takes[f] != nil
}

// giveUp ends taking up a mount that is no more.
func (c *children) giveUp(f folder) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cancel := c.takes[f]; cancel != nil {
		cancel()
	}
}

// effort is what Keep knows of a mount that nobody serves.
type effort struct {
	since time.Time     // it has been seen so
	next  time.Time     // when to try again
	pause time.Duration // before the try after that
	under bool          // a try is under way
}

// Keep has what the holder has and nobody serves taken up, until ctx ends.
func (s *Server) Keep(ctx context.Context) {
	if s.Holder == nil {
		return
	}
	var (
		tries sync.WaitGroup
		mu    sync.Mutex // of what efforts point to
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
					s.Logger.Error("a mount that nobody serves is not taken up yet", "path", path, "err", err)
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

// folders finds what is staged, by where, and counts the records that can't be
// read.
func (s *Server) folders() (all map[string]folder, unread int) {
	all = map[string]folder{}
	dirs, err := os.ReadDir(filepath.Join(s.State, "volumes"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		s.Logger.Error("the state can't be read", "err", err)
	}
	for _, d := range dirs {
		f := folder(filepath.Join(s.State, "volumes", d.Name()))
		r, err := f.read()
		if err == nil {
			all[r.Staging] = f
		} else if meta.KindOf(err) != meta.NotFound { // that one is being made, or removed
			unread++
		}
	}
	return all, unread
}

// takeUp starts a process that goes on with a mount that nobody has served since
// a time, and waits until it does. Errors: Busy (a process has the lock: it is
// starting), Unavailable.
func (s *Server) takeUp(ctx context.Context, f folder, since time.Time) error {
	lock, err := f.lock()
	if meta.KindOf(err) == meta.Busy && time.Since(since) > dyingAfter && !s.children.takesUp(f) {
		// A killed process that can't end: a thread of it waits, in the kernel, for
		// what a successor will serve. It keeps its lock, of a file that is no more.
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
		// It was unstaged between the look at it and the lock, which made the folder anew.
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
	s.Logger.Warn("a mount that nobody serves is taken up", "volume", r.Volume, "path", r.Staging)
	s.Step("takeup.start")
	err = s.start(ctx, f, r, lock, true)
	if err == nil {
		s.Logger.Info("a mount was taken up", "volume", r.Volume, "path", r.Staging)
	}
	return err
}

// settle has a process make durable what was written to a mount that is no more, if
// its own was killed before it had: the holder has it still, and drops it when it is
// durable. Caller has the lock. Errors: Unavailable (not yet).
func (s *Server) settle(ctx context.Context, f folder, r record, lock *os.File) error {
	if !s.orphaned(r.Staging) {
		return s.forget(r.Staging)
	}
	s.Logger.Warn("a mount's process ended before what was written was durable; another one sees to it", "volume", r.Volume, "path", r.Staging)
	err := s.start(ctx, f, r, lock, true) // it ends as soon as it is done: there is nothing to serve
	if s.orphaned(r.Staging) {
		return meta.E("settle mount", meta.Unavailable, r.Staging, err)
	}
	return nil
}

// orphaned tells whether the holder has a mount that nobody serves.
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
