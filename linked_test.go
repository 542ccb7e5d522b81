package penstock

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// holdingKernel is a kernel that refers to all inodes, or to none.
type holdingKernel struct {
	*kernel
	held atomic.Bool
}

func newHoldingKernel() *holdingKernel { return &holdingKernel{kernel: newKernel()} }

func (h *holdingKernel) Holds(meta.VolumeID, meta.Ino) bool { return h.held.Load() }

// eventually waits for a condition that must come true.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for began := time.Now(); !is(); time.Sleep(time.Millisecond) {
		if time.Since(began) > 60*time.Second {
			t.Fatalf("not after a minute: %s", what)
		}
	}
}

func tmpfile(t testing.TB, v *Volume) meta.Ino {
	t.Helper()
	info, err := v.Tmpfile(t.Context(), &Call{}, meta.Tmpfile{Parent: meta.RootIno, Mode: meta.TypeRegular | 0o644}, rdwr)
	if err != nil {
		t.Fatal(err)
	}
	return info.Entry.Attr.Ino
}

// TestLinkedWhileHeld: a file made without a name is closed while an O_PATH descriptor
// leads to it, and linked through this descriptor. When the kernel drops the file, it is
// an ordinary file with its bytes, and is sealed if its volume seals on close.
func TestLinkedWhileHeld(t *testing.T) {
	for _, seals := range []bool{false, true} {
		w := newWorld(t, meta.Policy{Replicas: 1, SealOnClose: seals})
		k := newHoldingKernel()
		k.held.Store(true)
		_, v := open(t, w, Config{FlushEvery: time.Hour, Notify: k})
		_, other := open(t, w, Config{FlushEvery: time.Hour})
		ino := tmpfile(t, v)
		write(t, v, ino, []byte("its bytes"), 0)
		v.Release(t.Context(), ino, rdwr)
		if _, err := v.Link(t.Context(), &Call{}, ino, meta.RootIno, "f"); err != nil {
			t.Fatal(err)
		}
		k.held.Store(false)
		v.Forget(ino)
		if got := string(contents(t, other, ino)); got != "its bytes" {
			t.Errorf("seals %v: it has %q", seals, got)
		}
		if _, err := other.Open(t.Context(), &Call{}, ino, rdwr); errors.Is(err, meta.NotPermitted) != seals {
			t.Errorf("seals %v: opened for writing: %v", seals, err)
		}
		w.check()
	}
}

// TestKilledWhileLinking: a process that links a file without a name is killed while the
// owner is silent. If the name exists in the end, so do the bytes; otherwise the file
// goes.
func TestKilledWhileLinking(t *testing.T) {
	for _, done := range []bool{true, false} {
		w := newWorld(t, meta.Policy{Replicas: 1})
		_, v := open(t, w, Config{FlushEvery: time.Hour})
		_, other := open(t, w, Config{FlushEvery: time.Hour})
		ino := tmpfile(t, v)
		write(t, v, ino, []byte("its bytes"), 0)
		asked, silent := make(chan struct{}), make(chan struct{})
		w.mu.Lock()
		w.before = func(op meta.Op) {
			if op.Code() == meta.OpLink {
				close(asked)
				<-silent
			}
		}
		w.fail = func(op meta.Op) error {
			if op.Code() == meta.OpLink && !done {
				return meta.E("link", meta.Exists, "", nil)
			}
			return nil
		}
		w.mu.Unlock()
		ctx, kill := context.WithCancel(t.Context())
		go func() {
			<-asked
			kill()
		}()
		linked := make(chan error, 1)
		go func() {
			_, err := v.Link(ctx, &Call{}, ino, meta.RootIno, "f")
			linked <- err
		}()
		<-asked
		kill()
		select {
		case err := <-linked:
			if !errors.Is(err, meta.Interrupted) {
				t.Fatalf("who was killed was told %v", err)
			}
			v.Release(t.Context(), ino, rdwr) // as the kernel does for a killed process
			close(silent)
		case <-time.After(30 * time.Second):
			t.Error("who was killed waits for the owner")
			close(silent)
			<-linked
			v.Release(t.Context(), ino, rdwr)
		}
		if done {
			eventually(t, "the name is there", func() bool {
				e, err := other.Lookup(t.Context(), meta.RootIno, "f")
				return err == nil && !e.Negative
			})
			if got := string(contents(t, other, ino)); got != "its bytes" {
				t.Errorf("it has %q", got)
			}
		} else {
			eventually(t, "the file is gone", func() bool {
				_, err := v.GetAttr(t.Context(), ino)
				return errors.Is(err, meta.Stale)
			})
		}
		w.check()
	}
}

// TestOwnChangeIsNotOlder: if a reply to this client's own change can't be cached, the
// cached state is void: no recall announces the change.
func TestOwnChangeIsNotOlder(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, v, "f")
	if _, err := v.GetAttr(t.Context(), ino); err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	w.before = func(op meta.Op) {
		if op.Code() != meta.OpSetAttr {
			return
		}
		// The lease goes and comes back, with attributes, before the owner decides.
		in := v.node(ino)
		in.mu.Lock()
		in.lowerLocked(meta.LeaseNone)
		in.mu.Unlock()
		in.put()
		w.mu.Lock()
		delete(w.leases[ino], c.sess.(*fakeSession))
		w.mu.Unlock()
		if _, err := v.GetAttr(t.Context(), ino); err != nil {
			t.Error(err)
		}
	}
	w.mu.Unlock()
	if _, err := v.SetAttr(t.Context(), &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600}); err != nil {
		t.Fatal(err)
	}
	if e, err := v.GetAttr(t.Context(), ino); err != nil || e.Attr.Mode&0o7777 != 0o600 {
		t.Errorf("mode %o after it was made 600, %v", e.Attr.Mode&0o7777, err)
	}
	w.check()
}

// pruningKernel is a kernel that drops merely remembered inodes on request.
type pruningKernel struct {
	*holdingKernel
	v      *Volume
	inUse  atomic.Bool
	pruned atomic.Int32
}

func (k *pruningKernel) Prune(_ meta.VolumeID, inos []meta.Ino) {
	k.pruned.Add(1)
	if k.inUse.Load() {
		return
	}
	k.held.Store(false)
	for _, ino := range inos {
		k.v.Forget(ino)
	}
}

// TestRemovedElsewhereIsPruned: a file removed by another client goes as soon as no
// process uses it, though the kernel remembers a name of it.
func TestRemovedElsewhereIsPruned(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	k := &pruningKernel{holdingKernel: newHoldingKernel()}
	k.held.Store(true)
	k.inUse.Store(true)
	c, v := open(t, w, Config{FlushEvery: time.Hour, Notify: k})
	k.v = v
	ino := create(t, v, "f")
	write(t, v, ino, []byte("bytes"), 0)
	v.Release(t.Context(), ino, rdwr)
	if err := v.Unlink(t.Context(), &Call{}, meta.RootIno, "f", false); err != nil {
		t.Fatal(err)
	}
	c.Orphaned(1, ino)
	eventually(t, "the kernel is asked again", func() bool { return k.pruned.Load() > 2 })
	if _, err := v.GetAttr(t.Context(), ino); err != nil {
		t.Fatalf("what is in use is gone: %v", err)
	}
	k.inUse.Store(false)
	eventually(t, "the file is gone", func() bool {
		_, err := v.GetAttr(t.Context(), ino)
		return errors.Is(err, meta.Stale)
	})
	n := k.pruned.Load()
	eventually(t, "nobody prunes", func() bool {
		v.holds.mu.Lock()
		defer v.holds.mu.Unlock()
		return v.holds.kick == nil
	})
	if k.pruned.Load() > n+1 {
		t.Error("it prunes what is not held")
	}
	w.check()
}

// TestRemovedAndClosedWithoutALease: the last close of a file that this client removed
// makes the kernel forget the file, even if the lease is gone under which the removal was
// known.
func TestRemovedAndClosedWithoutALease(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{FlushEvery: time.Hour})
	for _, tmp := range []bool{false, true} {
		var ino meta.Ino
		if tmp {
			ino = tmpfile(t, v)
		} else {
			ino = create(t, v, "f")
			if err := v.Unlink(t.Context(), &Call{}, meta.RootIno, "f", false); err != nil {
				t.Fatal(err)
			}
		}
		done := make(chan struct{})
		c.Recall(meta.Recall{Volume: 1, Ino: ino, Keep: meta.LeaseNone}, func() { close(done) })
		<-done
		w.mu.Lock()
		delete(w.leases[ino], c.sess.(*fakeSession))
		w.mu.Unlock()
		v.Release(t.Context(), ino, rdwr)
		eventually(t, "the file is gone", func() bool {
			_, err := v.GetAttr(t.Context(), ino)
			return errors.Is(err, meta.Stale)
		})
	}
	w.check()
}
