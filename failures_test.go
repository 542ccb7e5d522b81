package penstock

import (
	"bytes"
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// by is a context of a request through a handle.
func by(ctx context.Context, h Handle) context.Context {
	return context.WithValue(ctx, HandleKey{}, h)
}

// opens opens a file for writing as handle id.
func opens(t *testing.T, v *Volume, ino meta.Ino, id uint64) Handle {
	t.Helper()
	info, err := v.Open(t.Context(), &Call{}, ino, rdwr)
	if err != nil {
		t.Fatal(err)
	}
	return Handle{ID: id, Failures: info.Failures}
}

// TestEachHandleHears: bytes written through one handle are lost. Each open handle gets the error
// from fsync, once, and from each close until then; a later handle gets the error if no other
// handle did.
func TestEachHandleHears(t *testing.T) {
	inFakeTime(t, Config{UnsafeTellOne: os.Getenv("PENSTOCK_CONTROL") == "client-tellone"}, func(t *testing.T, w *world, v *Volume) {
		ino := create(t, v, "f")
		sync := func(h Handle) error { return v.Fsync(by(t.Context(), h), ino, false) }
		closes := func(h Handle) error { return v.Flush(by(t.Context(), h), &Call{}, ino, 0) }
		hears := func(what string, err error) {
			t.Helper()
			if !errors.Is(err, errAbandoned) {
				t.Errorf("DATA: %s tells %v of lost bytes", what, err)
			}
		}
		well := func(what string, err error) {
			t.Helper()
			if err != nil {
				t.Errorf("%s tells %v", what, err)
			}
		}
		lose := func() {
			back := cutOff(w, "no chunk is handed out")
			write(t, v, ino, make([]byte, 300_000), 0)
			time.Sleep(time.Minute)
			v.Abandon()
			back()
		}
		a, b := opens(t, v, ino, 1), opens(t, v, ino, 2)
		well("fsync before", sync(a))
		lose()
		unheard := opens(t, v, ino, 3)
		hears("close of a child's descriptor", closes(a))
		hears("close of another descriptor of the same handle", closes(a))
		hears("fsync", sync(a))
		well("the next fsync", sync(a))
		well("close after an fsync told", closes(a))
		hears("fsync of another handle", sync(b))
		well("the next fsync of another handle", sync(b))
		hears("fsync of a handle that was opened before anybody heard", sync(unheard))
		late := opens(t, v, ino, 4)
		well("fsync of a handle that was opened after somebody heard", sync(late))
		well("its close", closes(late))
		writes := func() error {
			_, err := v.Write(t.Context(), &Call{}, ino, []byte("x"), 0, false, false)
			return err
		}
		well("a write after somebody heard", writes())
		well("its fsync", sync(a))
		lose()
		if err := v.WritePage(t.Context(), &Call{}, ino, make([]byte, 4096), 0, v.Epoch()); err != nil {
			t.Errorf("DATA: a page of a mapping is lost as it is told of an earlier loss: %v", err)
		}
		hears("a write before anybody heard", writes())
		well("the next write", writes())
		for _, h := range []Handle{a, b, unheard, late} {
			hears("fsync after the next loss", sync(h))
		}
		for _, h := range []Handle{{}, a, b, unheard, late} { // Handle{} made the file
			v.Release(by(t.Context(), h), ino, rdwr)
		}
		in := v.node(ino)
		defer in.put()
		in.mu.Lock()
		if in.file != nil && in.file.failed != nil {
			t.Error("it is remembered though all heard of it, and nobody has the file open")
		}
		in.mu.Unlock()
	})
}

// TestToldByTheFsyncThatFailed: an fsync that waits for servers fails because an operator
// gives the bytes up, the session has ended, or there is no space (which the flush in the
// background found, too). Only this handle gets the error: its next fsync and close
// succeed, and so do later handles and writes.
func TestToldByTheFsyncThatFailed(t *testing.T) {
	for _, way := range []string{"given up", "session ended", "no space"} {
		t.Run(way, func(t *testing.T) {
			inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
				ino := create(t, v, "f")
				v.Release(by(t.Context(), Handle{}), ino, rdwr)
				a := opens(t, v, ino, 1)
				var back func()
				if way == "no space" {
					back = full(w, meta.NoSpace)
				} else {
					back = cutOff(w, "no chunk is handed out")
				}
				write(t, v, ino, make([]byte, 300_000), 0)
				time.Sleep(time.Minute)
				told := make(chan error, 1)
				go func() { told <- v.Fsync(by(t.Context(), a), ino, false) }()
				time.Sleep(time.Minute)
				switch way {
				case "given up":
					v.Abandon()
				case "session ended":
					v.c.sess.(*fakeSession).expire()
				}
				if err := <-told; err == nil {
					t.Error("DATA: fsync tells nothing")
				}
				late := opens(t, v, ino, 2)
				back()
				for what, err := range map[string]error{
					"write":                   func() error { _, err := v.Write(t.Context(), &Call{}, ino, []byte("x"), 0, false, false); return err }(),
					"close":                   v.Flush(by(t.Context(), a), &Call{}, ino, 0),
					"fsync":                   v.Fsync(by(t.Context(), a), ino, false),
					"close of a later handle": v.Flush(by(t.Context(), late), &Call{}, ino, 0),
					"fsync of a later handle": v.Fsync(by(t.Context(), late), ino, false),
				} {
					if err != nil {
						t.Errorf("after an fsync told, %s tells %v", what, err)
					}
				}
			})
		})
	}
}

// TestLostPagesAreTold: if a page of a mapping can't be written, each open handle of the
// file gets the error.
func TestLostPagesAreTold(t *testing.T) {
	inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
		ino := create(t, v, "f")
		a, b := opens(t, v, ino, 1), opens(t, v, ino, 2)
		v.PageLost(ino, 4096, meta.E("write", meta.NoSpace, "", nil))
		for _, h := range []Handle{a, b} {
			if err := v.Flush(by(t.Context(), h), &Call{}, ino, 0); !errors.Is(err, meta.NoSpace) {
				t.Errorf("DATA: close tells %v", err)
			}
			if err := v.Fsync(by(t.Context(), h), ino, false); !errors.Is(err, meta.NoSpace) {
				t.Errorf("DATA: msync tells %v", err)
			}
		}
		if err := v.SyncAll(t.Context()); !errors.Is(err, meta.NoSpace) {
			t.Errorf("DATA: syncfs tells %v", err)
		}
		if err := v.SyncAll(t.Context()); err != nil {
			t.Errorf("the next syncfs tells %v", err)
		}
		if s := v.c.Stats(); s.LostBytes != 4096 {
			t.Errorf("%d lost bytes are counted", s.LostBytes)
		}
	})
}

// full makes all writes fail for want of space: of a quota, of a disk, or because a disk
// is broken.
func full(w *world, way meta.Kind) (back func()) {
	err := meta.E("append", way, "every chunk server", nil)
	w.mu.Lock()
	defer w.mu.Unlock()
	if way == meta.IO {
		w.failChunk = func(string, meta.ChunkID) error { return err }
	} else {
		w.fail = func(op meta.Op) error {
			if _, ok := op.(*meta.AllocChunks); ok {
				return err
			}
			return nil
		}
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.fail, w.failChunk = nil, nil
	}
}

// TestCloseTellsWhatIsKnown: an error of an fsync through one handle is also returned by
// the close of another handle, which does not try to sync again.
func TestCloseTellsWhatIsKnown(t *testing.T) {
	for _, way := range []meta.Kind{meta.NoSpace, meta.QuotaExceeded, meta.IO} {
		t.Run(way.String(), func(t *testing.T) {
			inFakeTime(t, Config{FlushEvery: 24 * time.Hour}, func(t *testing.T, w *world, v *Volume) {
				ino := create(t, v, "f")
				a, b := opens(t, v, ino, 1), opens(t, v, ino, 2)
				back := full(w, way)
				write(t, v, ino, make([]byte, 300_000), 0)
				if err := v.Flush(by(t.Context(), b), &Call{}, ino, 0); err != nil {
					t.Fatalf("nothing is known yet, and close tells %v", err)
				}
				if err := v.Fsync(by(t.Context(), a), ino, false); !errors.Is(err, way) {
					t.Fatalf("fsync tells %v", err)
				}
				if err := v.Flush(by(t.Context(), b), &Call{}, ino, 0); !errors.Is(err, way) {
					t.Errorf("DATA: close of another handle tells %v", err)
				}
				if err := v.Flush(by(t.Context(), a), &Call{}, ino, 0); err != nil {
					t.Errorf("close of the handle that heard tells %v", err)
				}
				back()
				if err := v.Fsync(by(t.Context(), a), ino, false); err != nil {
					t.Errorf("fsync with space again: %v", err)
				}
			})
		})
	}
}

// TestRecallWaitsForSpace: disks are full, a quota is used up or a disk is broken while another
// client asks for a written and closed file. The request waits, open handles get errors, and no
// byte is given up: once space is free, all bytes are in the file.
func TestRecallWaitsForSpace(t *testing.T) {
	off := os.Getenv("PENSTOCK_CONTROL") == "client-nospacewait"
	for _, way := range []meta.Kind{meta.NoSpace, meta.QuotaExceeded, meta.IO} {
		t.Run(way.String(), func(t *testing.T) {
			inFakeTime(t, Config{UnsafeNoSpaceWait: off}, func(t *testing.T, w *world, v *Volume) {
				ino := create(t, v, "f")
				h := opens(t, v, ino, 1)
				back := full(w, way)
				want := bytes.Repeat([]byte("p"), 300_000)
				write(t, v, ino, want, 0)
				done := make(chan struct{})
				v.c.Recall(meta.Recall{Volume: 1, Ino: ino, Keep: meta.LeaseNone}, func() { close(done) })
				select {
				case <-done:
					t.Errorf("DATA: the lease was given back, and %d bytes that it covered are lost", v.c.Stats().LostBytes)
				case <-time.After(5 * time.Minute):
				}
				if err := v.Flush(by(t.Context(), h), &Call{}, ino, 0); !errors.Is(err, way) {
					t.Errorf("DATA: close meanwhile tells %v", err)
				}
				if err := v.Fsync(by(t.Context(), h), ino, false); !errors.Is(err, way) {
					t.Errorf("DATA: fsync meanwhile tells %v", err)
				}
				back()
				<-done
				if n := v.c.Stats().LostBytes; n > 0 {
					t.Errorf("DATA: %d bytes are lost", n)
				}
				if got := contents(t, v, ino); !bytes.Equal(got, want) {
					t.Errorf("DATA: %d bytes are there, or others than were written", len(got))
				}
			})
		})
	}
}
