package client

import (
	"context"
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// cutting is a server whose chunks are cut by a seal during a sync.
type cutting struct {
	chunkserver.Service
	at uint64
}

func (c *cutting) Append(context.Context, meta.ChunkID, meta.Fence, uint64, []byte, uint32) error {
	return nil
}

func (c *cutting) Sync(_ context.Context, _ meta.ChunkID, upTo uint64) (uint64, error) {
	return min(c.at, upTo), nil
}

// TestSyncOfAChunkThatIsCut: a chunk that a seal cuts during a sync is shorter than the sync's
// length. The sync fails, no caller waits for the missing bytes, and the synced length is known.
func TestSyncOfAChunkThatIsCut(t *testing.T) {
	t.Parallel()
	c := New(Config{Direct: func(meta.ServerID) chunkserver.Service { return &cutting{at: 1000} }, Logger: quiet,
		Resolve: func(meta.ServerID) (meta.ServerInfo, bool) { return meta.ServerInfo{}, false }})
	defer c.Close()
	w := c.NewWriter(meta.ChunkGrant{ID: meta.ChunkID{Volume: 1, Term: 1, Counter: 1}, Servers: []meta.ServerID{1}})
	defer w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, n := range []int{1000, 500} {
		if _, err := w.Append(ctx, make([]byte, n)); err != nil {
			t.Fatal(err)
		}
		err := w.Sync(ctx)
		if n == 1000 && err != nil || n == 500 && !errors.Is(err, meta.Sealed) {
			t.Errorf("%d bytes of %d synced, and told %v", w.Synced(), w.Len(), err)
		}
	}
	if w.Synced() != 1000 || len(w.Failed()) != 0 {
		t.Errorf("%d bytes are synced, %v is blamed", w.Synced(), w.Failed())
	}
}
