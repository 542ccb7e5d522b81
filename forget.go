package penstock

import (
	"sync"

	"penstock.io/penstock/meta"
)

// Holder is a Notifier that can tell whether something above the client still
// refers to an inode: a kernel keeps one that has no name and no opener while a
// descriptor made with O_PATH leads to it, or while an open that has found the
// name is on its way. What it holds is not released until Forget.
type Holder interface {
	Holds(v meta.VolumeID, ino meta.Ino) bool
}

// holds are the inodes without names or openers that a Holder still refers to.
type holds struct {
	mu   sync.Mutex
	inos map[meta.Ino]struct{}
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
		return true
	}
	return !v.holds.remove(ino) // Forget came meanwhile, and did it
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
