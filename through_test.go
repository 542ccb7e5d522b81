package penstock

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// lateAnswer runs an operation whose caller is killed while the owner is silent, calls
// meanwhile, and then lets the owner execute the operation.
func lateAnswer(t *testing.T, w *world, code meta.OpCode, run func(context.Context) error, meanwhile func()) {
	t.Helper()
	asked, silent := make(chan struct{}), make(chan struct{})
	var first, last sync.Once
	speak := func() { last.Do(func() { close(silent) }) }
	defer speak()
	w.mu.Lock()
	w.before = func(op meta.Op) {
		if op.Code() == code {
			mine := false
			first.Do(func() { mine = true })
			if mine {
				close(asked)
				<-silent
			}
		}
	}
	w.mu.Unlock()
	ctx, kill := context.WithCancel(t.Context())
	defer kill()
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	<-asked
	kill()
	select {
	case err := <-done:
		if !errors.Is(err, meta.Interrupted) {
			t.Fatalf("who was killed was told %v", err)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("who was killed waits for the owner")
	}
	meanwhile()
	speak()
}

// TestLateAnswersAreTaken: the operation of a killed caller is executed late. Afterwards
// the caches of the client and the kernel agree with its result.
func TestLateAnswersAreTaken(t *testing.T) {
	const f = "f"
	mode := func(v *Volume, ino meta.Ino) uint32 {
		e, err := v.GetAttr(t.Context(), ino)
		if err != nil {
			return 0
		}
		return e.Attr.Mode & 0o7777
	}
	there := func(v *Volume, name string) bool {
		e, err := v.Lookup(t.Context(), meta.RootIno, name)
		return err == nil && !e.Negative
	}
	for _, c := range []struct {
		name string
		code meta.OpCode
		run  func(ctx context.Context, v *Volume, ino meta.Ino) error
		done func(v *Volume, ino meta.Ino) bool
	}{
		{"chmod", meta.OpSetAttr, func(ctx context.Context, v *Volume, ino meta.Ino) error {
			_, err := v.SetAttr(ctx, &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600})
			return err
		}, func(v *Volume, ino meta.Ino) bool { return mode(v, ino) == 0o600 }},
		{"truncate", meta.OpSetAttr, func(ctx context.Context, v *Volume, ino meta.Ino) error {
			_, err := v.SetAttr(ctx, &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 3})
			return err
		}, func(v *Volume, ino meta.Ino) bool { return string(contents(t, v, ino)) == "its" }},
		{"xattr", meta.OpSetXattr, func(ctx context.Context, v *Volume, ino meta.Ino) error {
			return v.SetXattr(ctx, &Call{}, meta.SetXattr{Ino: ino, Name: "user.x", Value: []byte("y")})
		}, func(v *Volume, ino meta.Ino) bool {
			b, err := v.GetXattr(t.Context(), ino, "user.x")
			return err == nil && string(b) == "y"
		}},
		{"unlink", meta.OpUnlink, func(ctx context.Context, v *Volume, _ meta.Ino) error {
			return v.Unlink(ctx, &Call{}, meta.RootIno, f, false)
		}, func(v *Volume, ino meta.Ino) bool {
			_, err := v.GetAttr(t.Context(), ino)
			return !there(v, f) && errors.Is(err, meta.Stale)
		}},
		{"rename", meta.OpRename, func(ctx context.Context, v *Volume, _ meta.Ino) error {
			return v.Rename(ctx, &Call{}, meta.RootIno, f, meta.RootIno, "g", 0)
		}, func(v *Volume, _ meta.Ino) bool { return !there(v, f) && there(v, "g") }},
		{"link", meta.OpLink, func(ctx context.Context, v *Volume, ino meta.Ino) error {
			_, err := v.Link(ctx, &Call{}, ino, meta.RootIno, "g")
			return err
		}, func(v *Volume, ino meta.Ino) bool {
			e, err := v.GetAttr(t.Context(), ino)
			return err == nil && e.Attr.Nlink == 2 && there(v, "g")
		}},
		{"mkdir", meta.OpCreate, func(ctx context.Context, v *Volume, _ meta.Ino) error {
			_, err := v.Create(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: "g", Mode: meta.TypeDir | 0o755})
			return err
		}, func(v *Volume, _ meta.Ino) bool {
			e, err := v.GetAttr(t.Context(), meta.RootIno)
			return err == nil && e.Attr.Nlink == 3 && there(v, "g")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, meta.Policy{Replicas: 1})
			k := newKernel()
			_, v := open(t, w, Config{FlushEvery: time.Hour, Notify: k})
			ino := create(t, v, f)
			write(t, v, ino, []byte("its bytes"), 0)
			if err := v.Fsync(t.Context(), ino, false); err != nil {
				t.Fatal(err)
			}
			v.Release(t.Context(), ino, rdwr)
			lateAnswer(t, w, c.code, func(ctx context.Context) error { return c.run(ctx, v, ino) }, func() {
				// Somebody looks, and all is cached, here and above.
				for _, i := range []meta.Ino{ino, meta.RootIno} {
					e, err := v.GetAttr(t.Context(), i)
					if err != nil {
						t.Fatal(err)
					}
					k.mu.Lock()
					k.attrs[i] = e.Attr
					k.mu.Unlock()
				}
				there(v, f)
				there(v, "g")
			})
			eventually(t, "what is told is what was done", func() bool { return c.done(v, ino) })
			changed := ino
			switch c.name {
			case "mkdir":
				changed = meta.RootIno
			case "unlink":
				changed = 0 // no caller waits for it any more
			}
			eventually(t, "the kernel forgets what it has", func() bool {
				k.mu.Lock()
				defer k.mu.Unlock()
				_, has := k.attrs[changed]
				return !has
			})
			w.check()
		})
	}
}

// TestLateOpensAreClosed: a file that was made and opened for a killed caller is closed
// again, and goes if it has no name.
func TestLateOpensAreClosed(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{FlushEvery: time.Hour})
	for _, code := range []meta.OpCode{meta.OpCreate, meta.OpTmpfile} {
		lateAnswer(t, w, code, func(ctx context.Context) (err error) {
			if code == meta.OpCreate {
				_, err = v.CreateOpen(ctx, &Call{}, meta.Create{Parent: meta.RootIno, Name: "f", Mode: 0o644}, rdwr)
			} else {
				_, err = v.Tmpfile(ctx, &Call{}, meta.Tmpfile{Parent: meta.RootIno, Mode: meta.TypeRegular | 0o644}, rdwr)
			}
			return err
		}, func() {})
	}
	// The owner has made both files before it answers a later request.
	eventually(t, "both files were made", func() bool {
		e, err := v.Lookup(t.Context(), meta.RootIno, "f")
		w.mu.Lock()
		defer w.mu.Unlock()
		return err == nil && !e.Negative && w.calls[meta.OpTmpfile] == 1
	})
	eventually(t, "none is open", func() bool {
		for _, in := range c.table.all(func(*inode) bool { return true }) {
			in.mu.Lock()
			open := in.file != nil && in.file.users.opens > 0
			in.mu.Unlock()
			in.put()
			if open {
				return false
			}
		}
		return true
	})
	eventually(t, "the one without a name is gone", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.calls[meta.OpReleaseOrphans] > 0
	})
	w.check()
}

// TestWriteAfterALateTruncate: while the truncation of a killed caller may still be
// executed, writes wait: a write's bytes would be truncated.
func TestWriteAfterALateTruncate(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{FlushEvery: time.Hour})
	_, other := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, v, "f")
	write(t, v, ino, []byte("0123456789"), 0)
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	wrote := make(chan struct{})
	lateAnswer(t, w, meta.OpSetAttr, func(ctx context.Context) error {
		_, err := v.SetAttr(ctx, &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 0})
		return err
	}, func() {
		begun := make(chan struct{})
		go func() {
			defer close(wrote)
			close(begun)
			if _, err := v.Write(context.Background(), &Call{}, ino, []byte("ab"), 4, false, false); err != nil {
				t.Errorf("DATA: the write after it: %v", err)
			}
		}()
		<-begun
		in := v.node(ino)
		defer in.put()
		eventually(t, "the write waits, or is in", func() bool {
			select {
			case <-wrote:
				return true
			default:
			}
			in.mu.Lock()
			defer in.mu.Unlock()
			return in.file != nil && in.file.turns.wake != nil
		})
	})
	<-wrote
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	const want = "\x00\x00\x00\x00ab"
	for i, r := range []*Volume{v, other} {
		if got := string(contents(t, r, ino)); got != want {
			t.Errorf("DATA: client %d reads %q, not %q", i, got, want)
		}
	}
	w.check()
}
