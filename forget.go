package penstock

import (
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// Holder is a Notifier that can tell whether the layer above the client still refers to an
// inode. A kernel keeps an inode without names and openers while an O_PATH descriptor leads to
// it, or while an open that has found the name is under way. Such an inode is not released
// until Forget.
type Holder interface {
	Holds(v meta.VolumeID, ino meta.Ino) bool
}

// Pruner is a Holder that can drop merely cached inodes: a kernel keeps an inode, with a name
// that another mount has removed, until memory is short.
type Pruner interface {
	Holder
	// Prune may wait for running operations on the inodes. It does not drop inodes in use.
	Prune(v meta.VolumeID, inos []meta.Ino)
}

// holds are the inodes without names or openers to which a Holder still refers.
type holds struct {
	v *Volume

	mu   sync.Mutex
	inos map[meta.Ino]struct{}
	// kick wakes the pruning goroutine; nil: it is not running.
	kick chan struct{}
}

// Forget tells that the layer above no longer refers to an inode. The call is cheap for inodes
// that were not held.
func (v *Volume) Forget(ino meta.Ino) {
	if v.holds.remove(ino) {
		in := v.node(ino)
		defer in.put()
		v.back.buryNow(in)
	}
}

// hold keeps an inode until Forget, if the layer above refers to it.
func (h *holds) hold(ino meta.Ino) bool {
	above, ok := h.v.c.cfg.Notify.(Holder)
	if !ok {
		return false
	}
	// First the note, then the question: the answer may be overtaken by Forget.
	h.add(ino)
	if above.Holds(h.v.id, ino) {
		h.prune()
		return true
	}
	return !h.remove(ino) // Forget came meanwhile and removed the inode
}

// Bounds of the pause between two calls of Prune: an inode in use may become unused, and
// nobody reports it.
const (
	pruneFirst = 10 * time.Millisecond
	pruneMost  = 30 * time.Second
)

// prune calls Prune until no inode is held.
func (h *holds) prune() {
	v := h.v
	p, ok := v.c.cfg.Notify.(Pruner)
	if !ok {
		return
	}
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
