package fuse

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// Nothing that a program wrote is given up because a mount ends: whoever ends it (a
// umount(8), a signal, the kernel's end of the connection) waits until all of it is
// durable, as with a local disk, and a line in the log says what for. Only an operator
// gives bytes up (Abandon).

// lasting is a Volume that tells what of it is not durable. *penstock.Volume is one.
type lasting interface {
	Unsynced() penstock.Unsynced
	UnsyncedFiles(most int) []penstock.UnsyncedFile
	Abandon() penstock.Unsynced
}

var _ lasting = (*penstock.Volume)(nil)

// Times of drain.
const (
	drainLook  = 200 * time.Millisecond // between two looks whether anything is left
	drainFirst = 3 * time.Second        // after which the log tells for the first time
	drainSay   = 10 * time.Second       // and then each time
	drainAgain = time.Second            // after a try that failed
)

// abandonment wakes whoever waits for what an operator gives up.
type abandonment struct {
	mu sync.Mutex
	ch chan struct{} // closed when that happens; nil: nobody has asked for it
}

func (a *abandonment) wait() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ch == nil {
		a.ch = make(chan struct{})
	}
	return a.ch
}

func (a *abandonment) tell() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ch != nil {
		close(a.ch)
		a.ch = nil
	}
}

// errAbandoned is what a wait ends with whose bytes an operator gave up.
var errAbandoned = errors.New("an operator gave up what was not durable")

// allVolumes are the ones that a mount has touched, and those that its client put bytes
// back to that a predecessor was given.
func (f *fileSystem) allVolumes() []Volume {
	if t, ok := f.tree.(interface{ OpenVolumes() []Volume }); ok {
		return t.OpenVolumes()
	}
	return f.opened()
}

func (t clientTree) OpenVolumes() []Volume {
	var l []Volume
	for _, v := range t.c.OpenVolumes() {
		l = append(l, v)
	}
	return l
}

// unsynced lists the volumes of which something is not durable, pages among it that the
// kernel wrote back and nobody has written yet.
func (f *fileSystem) unsynced() []penstock.Unsynced {
	pages := make(map[meta.VolumeID]penstock.Unsynced)
	for node, n := range f.back.waiting() {
		id, _ := f.split(node)
		u := pages[id]
		u.Files++
		u.Bytes += int64(n)
		pages[id] = u
	}
	var l []penstock.Unsynced
	for _, v := range f.allVolumes() {
		w, ok := v.(lasting)
		if !ok {
			continue
		}
		u := w.Unsynced()
		p := pages[u.Volume]
		u.Files, u.Bytes = u.Files+p.Files, u.Bytes+p.Bytes
		if !u.Empty() || u.Changes {
			l = append(l, u)
		}
	}
	slices.SortFunc(l, func(a, b penstock.Unsynced) int { return int(a.Volume) - int(b.Volume) })
	return l
}

// drain makes everything durable, and waits for that as long as it takes: it ends when
// nothing is left, with an error that tells of a loss, when an operator gives up what
// is left, or with ctx.
func (f *fileSystem) drain(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if f.noDrain {
		time.AfterFunc(drainLook, cancel)
	}
	abandoned := f.abandoned.wait()
	look := time.NewTicker(drainLook)
	defer look.Stop()
	say := time.Now().Add(drainFirst)
	ended := make(chan error, 1)
	try := func() { ended <- f.syncAll(ctx) } // ends when the library gives up, at the latest
	go try()
	var again time.Time // when to try, after a try that failed; zero: one is under way
	for {
		select {
		case err := <-ended:
			if err == nil || !f.waitsAfter(err) {
				return f.lossOf(err)
			}
			again = time.Now().Add(drainAgain)
		case <-abandoned:
			return meta.E("make durable", meta.IO, f.dir, errAbandoned)
		case <-ctx.Done():
			return meta.E("make durable", meta.Unavailable, f.dir, context.Cause(ctx))
		case now := <-look.C:
			if !again.IsZero() && now.After(again) {
				again = time.Time{}
				go try()
				continue
			}
			left := f.unsynced()
			if len(left) == 0 && f.knowsAll() {
				return nil // what is still asked for is not of what was written
			}
			if now.After(say) {
				say = now.Add(drainSay)
				f.sayUnsynced(left)
			}
		}
	}
}

// drainFor is drain for a umount(8), which may be killed: then it is over for that one, and
// the mount's process goes on by itself.
func (f *fileSystem) drainFor(ctx context.Context, killed <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f.drain(ctx) }() // ends with this call
	select {
	case err := <-done:
		return err
	case <-killed:
		f.log.Warn("whoever unmounts does not wait any longer; the mount's process goes on until what was written is durable", "dir", f.dir)
		return meta.E("umount", meta.Interrupted, f.dir, nil)
	}
}

// knowsAll reports that all volumes tell what of them is not durable.
func (f *fileSystem) knowsAll() bool {
	return !slices.ContainsFunc(f.allVolumes(), func(v Volume) bool { _, ok := v.(lasting); return !ok })
}

// waitsAfter reports that something is left to be made durable after a try that failed.
func (f *fileSystem) waitsAfter(err error) bool {
	for _, u := range f.unsynced() {
		if !u.Empty() || noAnswer(err) { // else it has changes only, and the answer is of those
			return true
		}
	}
	return false
}

// lossOf is what of a failed sync is a loss, now that nothing is left to be made durable:
// that nobody answered is none.
func (f *fileSystem) lossOf(err error) error {
	if noAnswer(err) && f.knowsAll() {
		return nil
	}
	return err
}

// noAnswer reports that a sync failed because the cluster did not answer.
func noAnswer(err error) bool {
	switch meta.KindOf(err) {
	case meta.Unavailable, meta.NotOwner, meta.Interrupted:
		return true
	}
	return false
}

// sayUnsynced logs what a mount that ends waits for.
func (f *fileSystem) sayUnsynced(left []penstock.Unsynced) {
	for _, u := range left {
		f.log.Warn("a mount waits until what was written to it is durable; 'penstock client abandon' would give it up",
			"dir", f.dir, "volume", u.Name, "files", u.Files, "bytes", u.Bytes, "for", u.Why)
	}
	if len(left) == 0 {
		f.log.Warn("a mount waits for the cluster's word that what was written to it is durable", "dir", f.dir)
	}
}

// Unsynced lists the volumes of which something is not durable that was written through
// the mount.
func (m *Mount) Unsynced() []penstock.Unsynced { return m.fs.unsynced() }

// UnsyncedFiles lists files of a volume with bytes that are not durable, those with the
// most first.
func (m *Mount) UnsyncedFiles(id meta.VolumeID, most int) []penstock.UnsyncedFile {
	for _, v := range m.fs.allVolumes() {
		if w, ok := v.(lasting); ok && w.Unsynced().Volume == id {
			return w.UnsyncedFiles(most)
		}
	}
	return nil
}

// Abandon gives up what is not durable, and tells what that was. Only an operator asks
// for it. Whoever has a file open of which bytes are lost hears of it.
func (m *Mount) Abandon() []penstock.Unsynced {
	f := m.fs
	pages := f.back.abandon()
	var l []penstock.Unsynced
	for _, v := range f.allVolumes() {
		w, ok := v.(lasting)
		if !ok {
			continue
		}
		u := w.Abandon()
		for node, n := range pages {
			if id, _ := f.split(node); id == u.Volume {
				u.Files++
				u.Bytes += int64(n)
			}
		}
		if u.Empty() && !u.Changes {
			continue
		}
		l = append(l, u)
		m.log.Error("an operator gave up what was written and not durable", "dir", m.dir, "volume", u.Name, "files", u.Files, "bytes", u.Bytes, "changes", u.Changes)
	}
	f.abandoned.tell()
	return l
}

// waiting tells how many bytes are queued, by node.
func (w *writeback) waiting() map[uint64]int {
	if w.queued.Load() == 0 {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	l := make(map[uint64]int, len(w.nodes))
	for node, q := range w.nodes {
		for _, p := range q.pages {
			l[node] += len(p.data)
		}
	}
	return l
}

// abandon drops what is queued, but for pages that are being written, and tells how many
// bytes that were by node. The nodes' next drains tell of it.
func (w *writeback) abandon() map[uint64]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := make(map[uint64]int)
	for node, q := range w.nodes {
		for i := 1; i < len(q.pages); i++ {
			p := &q.pages[i]
			l[node] += len(p.data)
			w.bytes -= len(p.data)
			w.queued.Add(-1)
			q.written++
			if p.keep != nil {
				p.keep.Erase(p.slot)
				p.keep.Recycle(p.kept)
			}
		}
		if len(q.pages) > 1 {
			clear(q.pages[1:])
			q.pages = q.pages[:1]
			q.err = meta.E("write back", meta.IO, "", errAbandoned)
		}
	}
	w.done.Broadcast()
	return l
}
