package penstock

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestReloadKeepsWhatIsWritten: a reader whose chunk fails requests the file's map again.
// Meanwhile other readers see the last writes, a writer goes on, and the answer, or its
// absence, undoes none of these writes.
func TestReloadKeepsWhatIsWritten(t *testing.T) {
	for _, answered := range []bool{true, false} {
		w := newWorld(t, meta.Policy{})
		_, v := open(t, w, Config{FlushEvery: time.Hour})
		ino := create(t, v, "f")
		want := bytes.Repeat([]byte("a"), 4*blockOf)
		write(t, v, ino, want, 0)
		if err := v.Fsync(t.Context(), ino, false); err != nil {
			t.Fatal(err)
		}
		put := func(block int, c byte) {
			p := bytes.Repeat([]byte{c}, blockOf)
			copy(want[block*blockOf:], p)
			write(t, v, ino, p, int64(block*blockOf))
		}
		read := func(block int) {
			t.Helper()
			p := make([]byte, blockOf)
			if _, err := v.Read(t.Context(), ino, p, int64(block*blockOf)); err != nil {
				t.Fatalf("answered %v: block %d: %v", answered, block, err)
			}
			if w := want[block*blockOf:][:blockOf]; !bytes.Equal(p, w) {
				t.Fatalf("DATA: answered %v: block %d is %q, not %q", answered, block, p[0], w[0])
			}
		}
		put(0, 'b')
		put(1, 'b')

		asked, answer := make(chan struct{}), make(chan struct{})
		var opens atomic.Int32
		failed := false
		w.mu.Lock()
		w.failRead = func() error {
			if failed {
				return nil
			}
			failed = true // only the first request fails
			return meta.E("read", meta.Unavailable, "", nil)
		}
		w.before = func(op meta.Op) {
			if _, ok := op.(*meta.Open); ok && opens.Add(1) == 1 {
				close(asked)
				<-answer
			}
		}
		if !answered {
			w.fail = func(op meta.Op) error {
				if _, ok := op.(*meta.Open); ok {
					return meta.E("open", meta.Unavailable, "", nil)
				}
				return nil
			}
		}
		w.mu.Unlock()
		var got error
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, got = v.Read(t.Context(), ino, make([]byte, blockOf), 3*blockOf)
		}()
		<-asked
		read(0)
		read(2)
		put(0, 'c')
		put(2, 'c')
		read(0)
		close(answer)
		<-done
		if answered == (got != nil) {
			t.Fatalf("answered %v: the reader was told %v", answered, got)
		}
		w.mu.Lock()
		w.fail = nil
		w.mu.Unlock()
		for b := range 4 {
			read(b)
		}
		if err := v.Fsync(t.Context(), ino, false); err != nil {
			t.Fatal(err)
		}
		_, other := open(t, w, Config{})
		if b := contents(t, other, ino); !slices.Equal(b, want) {
			t.Fatalf("answered %v: others see %d bytes that differ from %d on", answered, len(b), diff(b, want))
		}
		w.check()
	}
}

// blockOf is the size of the blocks that TestReloadKeepsWhatIsWritten writes: no file of
// them is stored inline.
const blockOf = 4096

// TestReadAwaitsServers: while a chunk's server may be starting anew, a read waits, and
// can be interrupted; if the server is away for long, the read fails at once.
func TestReadAwaitsServers(t *testing.T) {
	w := newWorld(t, meta.Policy{})
	_, v := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, v, "f")
	write(t, v, ino, bytes.Repeat([]byte("a"), 2*blockOf), 0)
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	fails := 0
	set := func(n int, awaited bool) {
		w.mu.Lock()
		defer w.mu.Unlock()
		fails, w.awaited = n, awaited
		w.failRead = func() error {
			if fails == 0 {
				return nil
			}
			fails--
			return meta.E("read", meta.Unavailable, "", nil)
		}
	}
	read := func(ctx context.Context) error {
		_, err := v.Read(ctx, ino, make([]byte, blockOf), 0)
		return err
	}
	set(6, true)
	if err := read(t.Context()); err != nil {
		t.Errorf("a server that came: %v", err)
	}
	set(1000, true)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	if err := read(ctx); meta.KindOf(err) != meta.Interrupted || time.Since(began) > maxAwait {
		t.Errorf("an interrupted read: %v after %v", err, time.Since(began))
	}
	// The interruption comes at several moments.
	for n := range 3 {
		set(1000, true)
		ctx, cancel := context.WithCancel(t.Context())
		w.mu.Lock()
		w.failRead = func() error {
			if n--; n < 0 {
				cancel()
			}
			return meta.E("read", meta.Unavailable, "", nil)
		}
		w.mu.Unlock()
		if err := read(ctx); meta.KindOf(err) != meta.Interrupted {
			t.Errorf("interrupted while a server is asked: %v", err)
		}
	}
	set(1000, false)
	if err := read(t.Context()); !errors.Is(err, meta.Unavailable) {
		t.Errorf("a server that is away: %v", err)
	}
	if left := 1000 - fails; left > 5 {
		t.Errorf("a server that is away was asked %d times", left)
	}
}

// TestReadOutlivesItsCapability: a capability that a server refuses says nothing about
// the reader's rights: the capability expired on the way, or the server has just started
// and knows no keys yet. The read tries again, can be interrupted, and fails if the
// refusals continue.
func TestReadOutlivesItsCapability(t *testing.T) {
	for _, refused := range []int{6, 1 << 30} {
		inFakeTime(t, Config{FlushEvery: time.Hour}, func(t *testing.T, w *world, v *Volume) {
			ino := create(t, v, "f")
			want := bytes.Repeat([]byte("a"), 2*blockOf)
			write(t, v, ino, want, 0)
			if err := v.Fsync(t.Context(), ino, false); err != nil {
				t.Fatal(err)
			}
			n := refused
			w.mu.Lock()
			w.failRead = func() error {
				if n == 0 {
					return nil
				}
				n--
				return meta.E("read", meta.BadCapability, "", errors.New("expired"))
			}
			w.mu.Unlock()
			got := make([]byte, len(want))
			began := time.Now()
			_, err := v.Read(t.Context(), ino, got, 0)
			switch {
			case refused < 1<<30 && (err != nil || !bytes.Equal(got, want)):
				t.Errorf("DATA: read with the capability that was accepted in the end: %v", err)
			case refused == 1<<30 && (meta.KindOf(err) != meta.BadCapability || time.Since(began) < maxAwait):
				t.Errorf("refused for ever: %v after %v", err, time.Since(began))
			}
			ctx, cancel := context.WithCancel(t.Context())
			w.mu.Lock()
			w.failRead = func() error {
				cancel()
				return meta.E("read", meta.BadCapability, "", errors.New("expired"))
			}
			w.mu.Unlock()
			if _, err := v.Read(ctx, ino, got, 0); meta.KindOf(err) != meta.Interrupted {
				t.Errorf("interrupted while it asks again: %v", err)
			}
			w.mu.Lock()
			w.failRead = nil
			w.mu.Unlock()
		})
	}
}
