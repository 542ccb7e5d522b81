package node

import (
	"context"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// abandonAfter is how long a mount that nobody wants may give no answer.
const abandonAfter = 2 * probeWait

// abandonLook is how long it is left alone first, and between two questions.
const abandonLook = 2 * time.Second

// releases are the watches over staged volumes that no pod has any more.
type releases struct {
	mu      sync.Mutex
	on      map[string]*release            // by volume
	targets map[string]map[string]struct{} // by volume: where it was asked for, in vain or not, and not taken away since
}

type release struct{ end context.CancelFunc }

// want ends the watch over a volume: somebody calls for it, to have it at a target or,
// if that is empty, staged or unstaged.
func (r *releases) want(volume, target string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if target != "" {
		if r.targets == nil {
			r.targets = map[string]map[string]struct{}{}
		}
		if r.targets[volume] == nil {
			r.targets[volume] = map[string]struct{}{}
		}
		r.targets[volume][target] = struct{}{}
	}
	if w := r.on[volume]; w != nil {
		w.end()
		delete(r.on, volume)
	}
}

// begin makes a watch, in place of one that is there, if a volume is wanted nowhere now
// that it was taken from a target. Else ctx is nil.
func (r *releases) begin(volume, target string) (ctx context.Context, done func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.targets[volume], target)
	if len(r.targets[volume]) > 0 {
		return nil, nil
	}
	delete(r.targets, volume)
	ctx, cancel := context.WithCancel(context.Background())
	w := &release{cancel}
	if before := r.on[volume]; before != nil {
		before.end()
	}
	if r.on == nil {
		r.on = map[string]*release{}
	}
	r.on[volume] = w
	return ctx, func() {
		cancel()
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.on[volume] == w {
			delete(r.on, volume)
		}
	}
}

// released watches a volume that was taken from the last pod until somebody calls for it. A
// kubelet looks at a staged mount (stat) before it has it unstaged, and with a cluster that
// is gone waits there for ever, and never calls. So a mount that no pod has and that gives
// no answer for some time is taken away, as NodeUnstageVolume would: the kubelet finds
// that it has ended, and calls.
func (s *Server) released(volume, target string) {
	ctx, done := s.releases.begin(volume, target)
	if ctx == nil {
		return
	}
	go func() { // ends when the volume is wanted or unmounted
		defer done()
		staged, _ := s.folders()
		for path, f := range staged {
			if r, err := f.read(); err == nil && r.Volume == volume {
				s.abandon(ctx, volume, path)
				return
			}
		}
	}()
}

// abandon is released, of where the volume is staged.
func (s *Server) abandon(ctx context.Context, volume, path string) {
	unused := func() bool {
		m, err := mountAt(path)
		if err != nil || m == nil {
			return false
		}
		others, err := publishedElsewhere(m, path)
		return err == nil && len(others) == 0 && ctx.Err() == nil
	}
	for answered := time.Now(); ; {
		select { // most are unstaged before the first look
		case <-ctx.Done():
			return
		case <-time.After(min(abandonLook, s.AbandonAfter)):
		}
		if !unused() {
			return
		}
		switch err := s.probes.ask(ctx, path); {
		case err == nil:
			answered = time.Now()
		case meta.KindOf(err) != meta.Unavailable:
			return // it has ended
		case ctx.Err() == nil && time.Since(answered) >= s.AbandonAfter:
			end, err := s.pending.Begin(volume)
			if err != nil {
				return
			}
			defer end()
			if !unused() {
				return
			}
			s.Logger.Warn("a mount that no pod has and that does not answer is taken away", "volume", volume, "path", path)
			if err := s.takeAway(ctx, path, true); err != nil {
				s.Logger.Warn("a mount that does not answer stays", "path", path, "err", err)
			}
			return
		}
	}
}
