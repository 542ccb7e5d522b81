package penstock

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
)

// TestWriteDoesNotWaitForFreeSpace: once the free space is known, no write waits for the
// owner's next answer about it: an owner that stands still delays no writer with a lease
// and room in the buffer.
func TestWriteDoesNotWaitForFreeSpace(t *testing.T) {
	inFakeTime(t, Config{WriteBuffer: 64 << 20}, func(t *testing.T, w *world, v *Volume) {
		ino := create(t, v, "f")
		write(t, v, ino, []byte("first"), 0)
		stopped := make(chan struct{})
		answers := sync.OnceFunc(func() { close(stopped) })
		time.AfterFunc(time.Minute, answers) // callers that wait for the owner have waited by then
		w.mu.Lock()
		asked := w.calls[meta.OpStatFS]
		w.before = func(meta.Op) { <-stopped }
		w.mu.Unlock()
		for i := range 50 {
			time.Sleep(spaceAge / 5)
			began := time.Now()
			write(t, v, ino, []byte("more"), int64(5+4*i))
			if took := time.Since(began); took > 0 {
				t.Errorf("write %d waited %v for an owner that does not answer", i, took)
			}
		}
		w.mu.Lock()
		w.before = nil
		w.mu.Unlock()
		answers()
		flushAll(t, v)
		synctest.Wait() // the request in the background was sent
		w.mu.Lock()
		defer w.mu.Unlock()
		if n := w.calls[meta.OpStatFS] - asked; n == 0 || n > 2 {
			t.Errorf("the owner that stood still was asked for the free space %d times, not once", n)
		}
	})
}

// TestWriteAsksBeforeItIsRefused: a write without room by the known figures asks the
// owner before it is refused.
func TestWriteAsksBeforeItIsRefused(t *testing.T) {
	inFakeTime(t, Config{}, func(t *testing.T, w *world, v *Volume) {
		ino := create(t, v, "f")
		write(t, v, ino, []byte("first"), 0)
		v.space.mu.Lock()
		v.space.left = 1 // as if others had freed space since
		v.space.mu.Unlock()
		write(t, v, ino, []byte("there is room"), 0)
		err := v.Fallocate(t.Context(), &Call{}, meta.Fallocate{Ino: ino, Len: 1 << 40})
		if meta.KindOf(err) != meta.NoSpace {
			t.Errorf("more than the disks have: %v", err)
		}
		write(t, v, ino, []byte("and still there is"), 0)
	})
}
