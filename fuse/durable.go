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

// The end of a mount gives up no written byte. The process ending the mount (after a
// umount(8), a signal, or the kernel's end of the connection) waits until all bytes are
// durable, as with a local disk, and logs the reason for waiting. Only an operator gives bytes
// up (Abandon).

// lasting is a Volume that reports its bytes not yet durable. *penstock.Volume implements
// lasting.
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
	drainAgain = time.Second            // after a failed try
)

// abandonment wakes every drain when an operator gives up bytes.
type abandonment struct {
	mu sync.Mutex
	ch chan struct{} // closed by tell; nil: no drain waits
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

// errAbandoned ends a wait for bytes that an operator gave up.
var errAbandoned = errors.New("an operator gave up the bytes that were not durable")

func (t clientTree) OpenVolumes() []Volume {
	var l []Volume
	for _, v := range t.c.OpenVolumes() {
		l = append(l, v)
	}
	return l
}

// draining makes everything durable that was written through the mount.
type draining struct {
	*fileSystem
	abandoned abandonment
	noDrain   bool // see Options.UnsafeNoDrain
}

// unsynced lists the volumes with bytes or changes not yet durable. The counts include pages
// written back by the kernel and still queued here.
func (d *draining) unsynced() []penstock.Unsynced {
	pages := make(map[meta.VolumeID]penstock.Unsynced)
	for node, n := range d.back.waiting() {
		id, _ := d.split(node)
		u := pages[id]
		u.Files++
		u.Bytes += int64(n)
		pages[id] = u
	}
	var l []penstock.Unsynced
	for _, v := range d.allVolumes() {
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

// drain makes everything durable, however long that takes. It returns when nothing is left,
// with an error if bytes were lost; when an operator gives up the rest; or when ctx ends.
func (d *draining) drain(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if d.noDrain {
		time.AfterFunc(drainLook, cancel)
	}
	abandoned := d.abandoned.wait()
	look := time.NewTicker(drainLook)
	defer look.Stop()
	say := time.Now().Add(drainFirst)
	ended := make(chan error, 1)
	try := func() { ended <- d.syncAll(ctx) } // ends when the library gives up, at the latest
	go try()
	var again time.Time // time of the next try after a failed try; zero: a try is running
	for {
		select {
		case err := <-ended:
			if err == nil || !d.waitsAfter(err) {
				return d.lossOf(err)
			}
			again = time.Now().Add(drainAgain)
		case <-abandoned:
			return meta.E("make durable", meta.IO, d.dir, errAbandoned)
		case <-ctx.Done():
			return meta.E("make durable", meta.Unavailable, d.dir, context.Cause(ctx))
		case now := <-look.C:
			if !again.IsZero() && now.After(again) {
				again = time.Time{}
				go try()
				continue
			}
			left := d.unsynced()
			if len(left) == 0 && d.knowsAll() {
				return nil // the running try concerns no written bytes
			}
			if now.After(say) {
				say = now.Add(drainSay)
				d.sayUnsynced(left)
			}
		}
	}
}

// drainFor is drain for a umount(8). If umount(8) is killed, drainFor fails with Interrupted,
// and finish drains later.
func (d *draining) drainFor(ctx context.Context, killed <-chan struct{}) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- d.drain(ctx) }() // ends with drainFor
	select {
	case err := <-done:
		return err
	case <-killed:
		d.log.Warn("umount waits no longer: the mount's process goes on until all written bytes are durable", "dir", d.dir)
		return meta.E("umount", meta.Interrupted, d.dir, nil)
	}
}

// knowsAll reports whether every volume reports its bytes not yet durable.
func (d *draining) knowsAll() bool {
	return !slices.ContainsFunc(d.allVolumes(), func(v Volume) bool { _, ok := v.(lasting); return !ok })
}

// waitsAfter reports whether, after a try failed with err, another try may make something
// durable.
func (d *draining) waitsAfter(err error) bool {
	for _, u := range d.unsynced() {
		if !u.Empty() || noAnswer(err) { // else only changes are left, and err answers for the changes
			return true
		}
	}
	return false
}

// lossOf returns err if a failed sync lost bytes. The caller has found nothing left to make
// durable, so a missing answer from the cluster is no loss.
func (d *draining) lossOf(err error) error {
	if noAnswer(err) && d.knowsAll() {
		return nil
	}
	return err
}

// noAnswer reports whether a sync failed because the cluster did not answer.
func noAnswer(err error) bool {
	switch meta.KindOf(err) {
	case meta.Unavailable, meta.NotOwner, meta.Interrupted:
		return true
	}
	return false
}

// sayUnsynced logs the volumes for which a mount waits at its end.
func (d *draining) sayUnsynced(left []penstock.Unsynced) {
	for _, u := range left {
		d.log.Warn("a mount waits until its written bytes are durable; 'penstock client abandon' would give the bytes up",
			"dir", d.dir, "volume", u.Name, "files", u.Files, "bytes", u.Bytes, "for", u.Why)
	}
	if len(left) == 0 {
		d.log.Warn("a mount waits for the cluster to confirm that the written bytes are durable", "dir", d.dir)
	}
}

// Unsynced lists the volumes with something written through the mount and not yet durable.
func (m *Mount) Unsynced() []penstock.Unsynced { return m.fs.unsynced() }

// UnsyncedFiles lists up to most files of a volume with bytes not yet durable, files with
// the most bytes first.
func (m *Mount) UnsyncedFiles(id meta.VolumeID, most int) []penstock.UnsyncedFile {
	for _, v := range m.fs.allVolumes() {
		if w, ok := v.(lasting); ok && w.Unsynced().Volume == id {
			return w.UnsyncedFiles(most)
		}
	}
	return nil
}

// Abandon gives up everything not yet durable, and returns the losses by volume. Only an
// operator asks for Abandon. Programs with a damaged file open get an error.
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
		m.log.Error("an operator gave up written bytes that were not durable", "dir", m.dir, "volume", u.Name, "files", u.Files, "bytes", u.Bytes, "changes", u.Changes)
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

// abandon drops all queued pages except pages being written, and returns the number of dropped
// bytes by node. The next drain of each node returns an error.
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

// syncAll is syncfs: everything written through the mount is durable afterwards.
func (d *draining) syncAll(ctx context.Context) error {
	err := d.back.drainAll()
	for _, v := range d.allVolumes() {
		if e := v.SyncAll(ctx); e != nil && err == nil {
			err = e
		}
	}
	return err
}
