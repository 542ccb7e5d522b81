package penstock

import (
	"bytes"
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestKilledSyncUndoesNothing: a process is killed while its fsync waits for the owner,
// which does the commit late. Meanwhile the file is written and synced again: these later
// bytes stay.
func TestKilledSyncUndoesNothing(t *testing.T) {
	for _, way := range []string{"fsync", "syncfs"} {
		w := newWorld(t, meta.Policy{})
		_, v := open(t, w, Config{FlushEvery: time.Hour})
		ino := create(t, v, "f")
		content := func(c byte) []byte { return bytes.Repeat([]byte{c}, 2*meta.InlineMax) }
		sync := func(ctx context.Context) error {
			if way == "syncfs" {
				return v.SyncAll(ctx)
			}
			return v.Fsync(ctx, ino, false)
		}
		write(t, v, ino, content('a'), 0)
		if err := sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		var commits atomic.Int32
		sent, late := make(chan struct{}), make(chan struct{})
		w.mu.Lock()
		was := w.calls[meta.OpWrite]
		w.before = func(op meta.Op) {
			if op.Code() == meta.OpWrite && commits.Add(1) == 1 {
				close(sent)
				<-late
			}
		}
		w.mu.Unlock()
		write(t, v, ino, content('b'), 0)
		ctx, kill := context.WithCancel(t.Context())
		killed := make(chan error, 1)
		go func() { killed <- sync(ctx) }()
		<-sent
		kill()
		if err := <-killed; !errors.Is(err, meta.Interrupted) {
			t.Fatalf("%s: the killed one was told %v", way, err)
		}
		write(t, v, ino, content('c'), 0)
		done := make(chan error, 1)
		go func() { done <- sync(t.Context()) }()
		select {
		case err := <-done: // the second sync did not wait for the first
			done <- err
		case <-time.After(100 * time.Millisecond):
		}
		close(late)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			w.mu.Lock()
			n := w.calls[meta.OpWrite] - was
			w.mu.Unlock()
			if n == 2 {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %d commits, want 2", way, n)
			}
		}
		_, other := open(t, w, Config{})
		if b := contents(t, other, ino); !bytes.Equal(b, content('c')) {
			t.Errorf("DATA: %s: others see %q..., want c", way, b[0])
		}
		w.check()
	}
}
