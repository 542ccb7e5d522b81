package penstock

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// cutOff makes every chunk server unreachable, in one of several ways, until back is
// called.
func cutOff(w *world, way string) (back func()) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch way {
	case "no chunk is handed out":
		w.fail = func(op meta.Op) error {
			if _, ok := op.(*meta.AllocChunks); ok {
				return meta.E("place chunk", meta.Unavailable, "", errors.New("2 of 3 servers are out of reach"))
			}
			return nil
		}
	case "appends end": // as on a server whose disk takes ten seconds for each append
		w.failChunk = func(what string, id meta.ChunkID) error {
			w.mu.Unlock()
			time.Sleep(10 * time.Second)
			w.mu.Lock()
			return meta.E(what, meta.Unavailable, id.String(), errors.New("it does not answer"))
		}
	case "chunks end": // the owner ends each chunk
		w.failChunk = func(what string, id meta.ChunkID) error {
			return meta.E(what, meta.Fenced, id.String(), nil)
		}
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.fail, w.failChunk = nil, nil
	}
}

// TestServersAwayAreAPause: chunk servers are away for longer than any limit. A caller
// that waits for durable bytes goes on waiting, and no caller gets an error: no byte is
// lost.
func TestServersAwayAreAPause(t *testing.T) {
	const away = 10 * time.Minute
	for _, way := range []string{"no chunk is handed out", "appends end", "chunks end"} {
		for name, wait := range map[string]func(ctx context.Context, v *Volume, ino meta.Ino) error{
			"fsync":  func(ctx context.Context, v *Volume, ino meta.Ino) error { return v.Fsync(ctx, ino, false) },
			"syncfs": func(ctx context.Context, v *Volume, ino meta.Ino) error { return v.SyncAll(ctx) },
			"truncate": func(ctx context.Context, v *Volume, ino meta.Ino) error {
				if _, err := v.SetAttr(ctx, &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 300_000}); err != nil {
					return err
				}
				return v.Fsync(ctx, ino, false)
			},
			"rename": func(ctx context.Context, v *Volume, ino meta.Ino) error {
				return v.Rename(ctx, &Call{}, meta.RootIno, "f", meta.RootIno, "over", 0)
			},
			"more": func(ctx context.Context, v *Volume, ino meta.Ino) error { // than the write buffer takes
				for i := range 4 {
					if _, err := v.Write(ctx, &Call{}, ino, make([]byte, 1<<20), int64(i+1)<<20, false, false); err != nil {
						return err
					}
				}
				return v.Fsync(ctx, ino, false)
			},
		} {
			t.Run(way+"/"+name, func(t *testing.T) {
				inFakeTime(t, Config{WriteBuffer: 2 << 20}, func(t *testing.T, w *world, v *Volume) {
					write(t, v, create(t, v, "over"), []byte("o"), 0)
					if err := v.SyncAll(t.Context()); err != nil {
						t.Fatal(err)
					}
					ino, p := create(t, v, "f"), bytes.Repeat([]byte("p"), 300_000)
					back := cutOff(w, way)
					write(t, v, ino, p, 0)
					began := time.Now()
					done := make(chan error)
					go func() { done <- wait(t.Context(), v, ino) }()
					killed, kill := context.WithCancel(t.Context())
					another := make(chan error)
					go func() { another <- v.Fsync(killed, ino, false) }()
					select {
					case err := <-done:
						t.Fatalf("it ended after %v: %v", time.Since(began), err)
					case err := <-another:
						t.Fatalf("another ended after %v: %v", time.Since(began), err)
					case <-time.After(away):
					}
					kill()
					if err := <-another; !errors.Is(err, meta.Interrupted) {
						t.Errorf("who was killed was told %v", err)
					}
					back()
					if err := <-done; err != nil {
						t.Fatalf("it was told %v after %v", err, time.Since(began))
					}
					if err := v.Fsync(t.Context(), ino, false); err != nil {
						t.Fatalf("the next fsync is told %v", err)
					}
					if err := v.Flush(t.Context(), &Call{}, ino, 0); err != nil {
						t.Fatalf("close is told %v", err)
					}
					write(t, v, ino, []byte("p"), 0)
					if got := contents(t, v, ino); !bytes.Equal(got[:len(p)], p) {
						t.Fatal("DATA: other bytes are there than were written")
					}
				})
			})
		}
	}
}

// TestBadDisksAreTold: a chunk server's disk fails each append: no pause would save the
// bytes, and the writer gets an error.
func TestBadDisksAreTold(t *testing.T) {
	inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
		bad := meta.E("append", meta.IO, "every disk", nil)
		w.failChunk = func(string, meta.ChunkID) error { return bad }
		ino := create(t, v, "f")
		write(t, v, ino, make([]byte, 300_000), 0)
		began := time.Now()
		if err := v.Fsync(t.Context(), ino, false); !errors.Is(err, bad) || meta.KindOf(err) != meta.IO || time.Since(began) > time.Minute {
			t.Fatalf("fsync tells %v after %v", err, time.Since(began))
		}
		w.mu.Lock()
		w.failChunk = nil
		w.mu.Unlock()
	})
}

// TestRecallWaitsForServers: while chunk servers are away, another client asks for a file
// that was written and closed. The request waits until the servers are back: no byte is
// given up, and the next reader gets all.
func TestRecallWaitsForServers(t *testing.T) {
	for _, way := range []string{"no chunk is handed out", "chunks end"} {
		t.Run(way, func(t *testing.T) {
			inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
				ino := create(t, v, "f")
				back := cutOff(w, way)
				write(t, v, ino, make([]byte, 300_000), 0)
				synced := make(chan error, 1)
				go func() { synced <- v.Fsync(t.Context(), ino, false) }()
				time.Sleep(time.Minute)
				done := make(chan struct{})
				v.c.Recall(meta.Recall{Volume: 1, Ino: ino, Keep: meta.LeaseNone}, func() { close(done) })
				select {
				case <-done:
					t.Errorf("DATA: the lease was given back, and what it covered is not durable: %d bytes are lost", v.c.Stats().LostBytes)
				case err := <-synced:
					t.Errorf("fsync tells %v", err)
				case <-time.After(time.Hour):
				}
				back()
				<-done
				if err := <-synced; err != nil || v.c.Stats().LostBytes > 0 {
					t.Errorf("DATA: fsync tells %v, %d bytes are lost", err, v.c.Stats().LostBytes)
				}
				if got := contents(t, v, ino); len(got) != 300_000 {
					t.Errorf("DATA: %d bytes are there", len(got))
				}
			})
		})
	}
}

// TestAbandon: bytes that an operator gives up are lost and counted, each open handle
// gets an error, and waiting callers stop waiting.
func TestAbandon(t *testing.T) {
	inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
		ino := create(t, v, "f")
		back := cutOff(w, "no chunk is handed out")
		write(t, v, ino, make([]byte, 300_000), 0)
		synced := make(chan error, 1)
		go func() { synced <- v.Fsync(t.Context(), ino, false) }()
		time.Sleep(time.Minute)
		if u := v.Unsynced(); u.Files != 1 || u.Bytes != 300_000 || u.Why == "" {
			t.Errorf("not durable: %+v", u)
		}
		if l := v.UnsyncedFiles(10); len(l) != 1 || l[0] != (UnsyncedFile{ino, 300_000}) {
			t.Errorf("not durable: %+v", l)
		}
		if u := v.Abandon(); u.Files != 1 || u.Bytes != 300_000 {
			t.Errorf("given up: %+v", u)
		}
		if err := <-synced; !errors.Is(err, meta.IO) {
			t.Errorf("DATA: fsync of bytes that were given up tells %v", err)
		}
		if s := v.c.Stats(); s.LostBytes != 300_000 || s.LostFiles != 1 || s.DirtyFiles != 0 || s.DirtyBytes != 0 {
			t.Errorf("counted: %+v", s)
		}
		if err := v.SyncAll(t.Context()); err != nil {
			t.Errorf("the next sync tells %v", err)
		}
		back()
	})
}
