package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"penstock.io/penstock/test/load"
)

// TestDrain: all data of a drained server lies on other servers, whole, and the drained server
// can be killed for good.
func TestDrain(t *testing.T) {
	c := start(t, Config{Racks: 2, Metas: 2, ChunkServers: 4, Mounts: 1})
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	_, err := c.Penstock(t.Context(), "volume", "create", "data", "--force", "--attach", "/data", "--replicas", "2")
	check(err)
	const files, size = 6, 2 << 20
	name := func(i int) string { return filepath.Join(c.Mounts[0].Path, "data", fmt.Sprint("file", i)) }
	b := make([]byte, size)
	for i := range files {
		load.Pattern(b, uint64(i), 0)
		check(os.WriteFile(name(i), b, 0o644))
	}
	l, err := c.Locate(t.Context(), name(0))
	check(err)
	id := l.Extents[0].Servers[0]
	by, err := c.ByID(t.Context())
	check(err)
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	out, err := c.Penstock(ctx, "node", "drain", fmt.Sprint(id), "--yes", "--wait")
	check(err)
	t.Logf("drained after %v: %s", time.Since(began).Round(time.Millisecond), out)
	by[id].Kill()
	for i := range files {
		l, err := c.Locate(t.Context(), name(i))
		check(err)
		for _, e := range l.Extents {
			for _, s := range e.Servers {
				if s == id {
					t.Errorf("chunk %s still lies on the drained server", e.Chunk)
				}
			}
		}
		got, err := os.ReadFile(name(i))
		check(err)
		if len(got) != size {
			t.Fatalf("DATA: %s has %d bytes", name(i), len(got))
		}
		check(load.CheckPattern(got, uint64(i), 0))
	}
}
