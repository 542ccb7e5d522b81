package server

import (
	"testing"

	"penstock.io/penstock/meta/namespace"
)

// TestCacheForgets: a record stays in the cache as long as it is read in each generation, and
// leaves the cache after two generations in which nobody reads it.
func TestCacheForgets(t *testing.T) {
	c := newCache(1 << 20)
	c.put("ia", []byte("a"))
	c.put("ib", []byte("b"))
	for range 5 {
		c.turn()
		if v, ok := c.get([]byte("ia")); !ok || string(v) != "a" {
			t.Fatalf("a record that is read in each generation is %q, %v", v, ok)
		}
	}
	if _, ok := c.get([]byte("ib")); ok {
		t.Error("a record that nobody reads stays")
	}
	c.turn()
	c.turn()
	if n := len(c.young) + len(c.old); n != 0 {
		t.Errorf("an unused cache has %d records", n)
	}
}

// TestCacheKeepsValuesOnly: a value in the cache does not keep the memory of the operation that wrote
// the value: the values of an operation are parts of one buffer.
func TestCacheKeepsValuesOnly(t *testing.T) {
	o, c, e := newOverlay(), newCache(1<<20), &entry{seq: 1}
	buffer := make([]byte, 512)
	o.add(e, namespace.Effect{Kind: namespace.Put, Key: []byte("ia"), Value: buffer[:3:3]}, 0)
	o.settle(e, c)
	buffer[0] = 'x'
	if v, ok := c.get([]byte("ia")); !ok || len(v) != 3 || v[0] == 'x' {
		t.Errorf("the cached value is %q, %v", v, ok)
	}
}
