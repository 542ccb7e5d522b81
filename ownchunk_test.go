package penstock

import (
	"bytes"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestRemovedWhileFlushedEndsItsChunk: a file that is removed during its flush leaves no
// open chunk behind.
func TestRemovedWhileFlushedEndsItsChunk(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, v := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, v, "f")
	write(t, v, ino, bytes.Repeat([]byte("x"), 3<<20), 0)
	in := v.node(ino)
	defer in.put()
	// As the flusher: captured, not pushed yet.
	ws, _ := v.back.nextGroup(false)
	if len(ws) != 1 {
		t.Fatal(len(ws))
	}
	ws[0].pushTurn = true
	in.mu.Lock()
	v.back.capture(ws[0])
	in.mu.Unlock()
	g := gather{v: v}
	v.Release(t.Context(), ino, rdwr)
	if err := v.Unlink(t.Context(), &Call{}, meta.RootIno, "f", false); err != nil {
		t.Fatal(err)
	}
	if err := v.back.push(t.Context(), ws[0], &g); err != nil {
		t.Fatal(err)
	}
	v.back.commitGroup(t.Context(), ws)
	v.back.settleGroup(t.Context(), ws)
	wrote := 0
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		w.mu.Lock()
		open := 0
		wrote = 0
		for _, c := range w.chunks {
			wrote += len(c.data)
			if len(c.data) > 0 && !c.sealed {
				open++
			}
		}
		w.mu.Unlock()
		if open == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d chunks stay open", open)
		}
	}
	if wrote == 0 {
		t.Fatal("the flush wrote nothing")
	}
}
