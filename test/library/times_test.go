package library

import (
	"fmt"
	"testing"

	penstock "penstock.io/penstock"
)

// TestReadersKeepLeases: readers of the same files report access times, and take neither
// leases nor cached pages from each other.
func TestReadersKeepLeases(t *testing.T) {
	c := newCluster(t)
	ctx := t.Context()
	w := c.volume(c.admin(), "data")
	const files = 20
	name := func(i int) string { return fmt.Sprint("/f", i) }
	for i := range files {
		c.put(w, name(i), "bytes")
	}
	c.must(w.SyncAll(ctx))

	clients := []*penstock.Client{c.user("one", "data", "write"), c.user("two", "data", "write")}
	var readers []*penstock.Volume
	for _, cl := range clients {
		readers = append(readers, c.open(cl, "data"))
	}
	for i := range files {
		for _, v := range readers {
			c.has(v, name(i), "bytes")
		}
	}
	for _, v := range readers {
		c.must(v.SyncAll(ctx)) // with the times
	}
	for i, cl := range clients {
		if n := cl.Stats().Recalls; n != 0 {
			t.Errorf("reader %d lost %d leases to the other", i, n)
		}
	}
	// The owner has the access times: otherwise no lease could have been lost.
	fresh := c.open(c.dial("admin"), "data")
	for i := range files {
		a, err := fresh.Tree().Stat(ctx, name(i))
		c.must(err)
		if a.Attr.Atime <= a.Attr.Mtime {
			t.Fatalf("DATA: %s was read, and its access time is %v after it was written", name(i), a.Attr.Atime-a.Attr.Mtime)
		}
	}
}
