package penstock

import (
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// Holder is a Notifier that can tell whether something above the client still
// refers to an inode: a kernel keeps one that has no name and no opener while a
// descriptor made with O_PATH leads to it, or while an open that has found the
// name is on its way. What it holds is not released until Forget.
type Holder interface {
	Holds(v meta.VolumeID, ino meta.Ino) bool
}

// Pruner is a Holder that can have what is above the client let go of inodes that it
// only remembers: a kernel keeps one, with a name that another mount has removed, until
// it lacks memory.
type Pruner interface {
	Holder
	// Prune may wait for what is under way with the inodes. What is in use stays.
	Prune(v meta.VolumeID, inos []meta.Ino)
}

// holds are the inodes without names or openers that a Holder still refers to.
type holds struct {
	mu   sync.Mutex
	inos map[meta.Ino]struct{}
	// kick makes who prunes look again; nil: nobody does.
	kick chan struct{}
}

// Forget tells that what is above the client refers to an inode no more. It is
// cheap for inodes that were not held.
func (v *Volume) Forget(ino meta.Ino) {
	if v.holds.remove(ino) {
		in := v.node(ino)
		defer in.put()
		v.buryNow(in)
	}
}

// hold keeps an inode until Forget, if somebody above refers to it.
func (v *Volume) hold(ino meta.Ino) bool {
	h, ok := v.c.cfg.Notify.(Holder)
	if !ok {
		return false
	}
	// First the note, then the question: the answer may be overtaken by Forget.
	v.holds.add(ino)
	if h.Holds(v.id, ino) {
		v.prune()
		return true
	}
	return !v.holds.remove(ino) // Forget came meanwhile, and did it
}

// Bounds of the pause before what is held is pruned, and pruned again: what was in use
// may not be any more, and nobody tells.
const (
	pruneFirst = 10 * time.Millisecond
	pruneMost  = 30 * time.Second
)

// prune has a Pruner let go of what is held, until nothing is.
func (v *Volume) prune() {
	p, ok := v.c.cfg.Notify.(Pruner)
	if !ok {
		return
	}
	h := &v.holds
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.kick != nil {
		select {
		case h.kick <- struct{}{}:
		default:
		}
		return
	}
	kick := make(chan struct{}, 1)
	h.kick = kick
	v.c.spawn(func() {
		for wait := pruneFirst; ; {
			select {
			case <-time.After(wait):
				wait = min(2*wait, pruneMost)
			case <-kick:
				wait = pruneFirst
				continue
			case <-v.c.ctx.Done():
				return
			}
			h.mu.Lock()
			inos := make([]meta.Ino, 0, len(h.inos))
			for ino := range h.inos {
				inos = append(inos, ino)
			}
			if len(inos) == 0 {
				h.kick = nil
				h.mu.Unlock()
				return
			}
			h.mu.Unlock()
			slices.Sort(inos)
			p.Prune(v.id, inos)
		}
	})
}

func (h *holds) add(ino meta.Ino) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.inos == nil {
		h.inos = make(map[meta.Ino]struct{})
	}
	h.inos[ino] = struct{}{}
}

// clear forgets all: the session expired.
func (h *holds) clear() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.inos)
}

func (h *holds) remove(ino meta.Ino) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.inos[ino]
	delete(h.inos, ino)
	return ok
}
