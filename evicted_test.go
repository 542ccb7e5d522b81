package penstock

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

// TestEvictedTellsWhatIsLost: a client with a refused identity does not look for other
// chunks: fsync returns the error, and the end of the client reports the number of lost
// bytes.
func TestEvictedTellsWhatIsLost(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{})
	ino := create(t, v, "f")
	write(t, v, ino, bytes.Repeat([]byte("x"), 100_000), 0)
	var allocs int // under the world's mu
	w.mu.Lock()
	w.fail = func(op meta.Op) error {
		if _, ok := op.(*meta.AllocChunks); ok {
			allocs++
		}
		return meta.E("find the owner", meta.AccessDenied, "", errors.New("it was evicted from the cluster"))
	}
	w.mu.Unlock()
	if err := v.Fsync(t.Context(), ino, false); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("fsync: %v", err)
	}
	w.mu.Lock()
	if allocs > 4 { // the flush in the background asks, too
		t.Errorf("asked for chunks %d times", allocs)
	}
	w.mu.Unlock()
	if err := c.Close(t.Context()); err == nil || !strings.Contains(err.Error(), "100000 written bytes are lost") {
		t.Errorf("close: %v", err)
	}
}
