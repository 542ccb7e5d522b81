package penstock

import (
	"bytes"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestSealIsTriedAgain: the servers of a failed chunk are unreachable when the chunk is
// to be sealed. Once they are reachable, the chunk is sealed without any further request.
func TestSealIsTriedAgain(t *testing.T) {
	w := newWorld(t, meta.Policy{})
	_, v := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, v, "f")
	put := func(c byte) {
		write(t, v, ino, bytes.Repeat([]byte{c}, 2*meta.InlineMax), 0)
		if err := v.Fsync(t.Context(), ino, false); err != nil {
			t.Fatal(err)
		}
	}
	put('a')
	refused := 0
	var first meta.ChunkID
	w.mu.Lock()
	for id, c := range w.chunks {
		if len(c.data) > 0 {
			first = id
		}
	}
	w.failChunk = func(_ string, id meta.ChunkID) error {
		if id == first {
			return meta.E("append", meta.IO, id.String(), nil)
		}
		return nil
	}
	w.failEnd = func(id meta.ChunkID) error {
		if id == first && refused < 2 {
			refused++
			return meta.E("seal", meta.Unavailable, id.String(), nil)
		}
		return nil
	}
	w.mu.Unlock()
	put('b')
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		w.mu.Lock()
		sealed, tries := w.chunks[first].sealed, refused
		w.mu.Unlock()
		if sealed {
			if tries != 2 {
				t.Errorf("sealed after %d refusals, want 2", tries)
			}
			break
		}
		if time.Now().After(end) {
			t.Fatalf("not sealed after %d refusals", tries)
		}
	}
	if b := contents(t, v, ino); !bytes.Equal(b, bytes.Repeat([]byte{'b'}, 2*meta.InlineMax)) {
		t.Error("DATA: other bytes than were written")
	}
}
