package penstock

import (
	"bytes"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
)

// ask asks a client about a file as the volume's owner does.
func askGrowth(v *Volume, ino meta.Ino) meta.Growth {
	told := make(chan meta.Growth, 1)
	v.c.Growth(v.id, ino, func(g meta.Growth) { told <- g })
	return <-told
}

// openEnd appends and syncs until the journal has an open end. It returns the file's
// length.
func openEnd(t *testing.T, v *Volume, ino meta.Ino) int64 {
	t.Helper()
	size := int64(0)
	for range endedAfter + 2 {
		write(t, v, ino, bytes.Repeat([]byte("l"), 5000), size)
		size += 5000
		if err := v.Fsync(t.Context(), ino, true); err != nil {
			t.Fatal(err)
		}
	}
	return size
}

// TestToldGrowthIsSynced: the length that a client reports of a file to which it appends
// covers every write that returned, and is synced: a reader that was told of bytes must
// find them after the writer's death.
func TestToldGrowthIsSynced(t *testing.T) {
	unsafe := os.Getenv("PENSTOCK_CONTROL") == "client-nogrowthsync"
	inFakeTime(t, Config{FlushEvery: time.Hour, UnsafeNoGrowthSync: unsafe}, func(t *testing.T, w *world, v *Volume) {
		ino := create(t, v, "log")
		if g := askGrowth(v, ino); g.OK {
			t.Errorf("a file without an open end: %+v", g)
		}
		size := openEnd(t, v, ino)
		w.mu.Lock()
		commits := w.calls[meta.OpWrite]
		w.mu.Unlock()
		for i := range 20 {
			write(t, v, ino, bytes.Repeat([]byte("m"), 100+i), size)
			size += int64(100 + i)
			g := askGrowth(v, ino)
			if !g.OK || g.Size != uint64(size) || g.Mtime == 0 {
				t.Fatalf("after %d bytes: %+v", size, g)
			}
			in := v.node(ino)
			in.mu.Lock()
			id, base := in.file.own.chunk.id, in.file.own.base
			in.mu.Unlock()
			in.put()
			w.mu.Lock()
			synced := uint64(w.chunks[id].synced)
			w.mu.Unlock()
			if base+synced < g.Size {
				t.Fatalf("DATA: %d bytes were told of, %d are synced", g.Size, base+synced)
			}
		}
		w.mu.Lock()
		if n := w.calls[meta.OpWrite] - commits; n > 0 {
			t.Errorf("%d commits", n)
		}
		w.mu.Unlock()

		// An overwrite ends the open end: the owner must recall.
		write(t, v, ino, []byte("over"), 10)
		if g := askGrowth(v, ino); g.OK {
			t.Errorf("after an overwrite: %+v", g)
		}
		synctest.Wait()
	})
}
