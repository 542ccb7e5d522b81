package penstock

import (
	"bytes"
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
)

// TestIdleInodesLeave: inodes that nobody uses leave the cache within two rounds of the hand, and their
// leases go back to the owner; an inode in use stays, and an open file stays.
func TestIdleInodesLeave(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{})
	var inos []meta.Ino
	for i := range 50 {
		ino := create(t, v, fmt.Sprint("f", i))
		write(t, v, ino, bytes.Repeat([]byte("x"), 100), 0)
		inos = append(inos, ino)
	}
	flushAll(t, v)
	used, opened := inos[10], inos[20]
	for _, ino := range inos {
		if ino != opened {
			v.Release(t.Context(), ino, rdwr)
		}
	}
	if n := c.table.len(); n < 50 {
		t.Fatalf("%d inodes are cached", n)
	}
	for range 3 * idleTurns {
		if _, err := v.GetAttr(t.Context(), used); err != nil {
			t.Fatal(err)
		}
		c.table.evict(c.table.chooseIdle())
		if err := c.table.check(); err != nil {
			t.Fatal(err)
		}
	}
	c.table.mu.Lock()
	left, there, stays := len(c.table.m), c.table.m[inodeKey{v.id, used}] != nil, c.table.m[inodeKey{v.id, opened}] != nil
	c.table.mu.Unlock()
	if left > 5 || !there || !stays {
		t.Errorf("%d inodes are cached; the used one is: %v, the open one: %v", left, there, stays)
	}
	w.mu.Lock()
	leased := 0
	for _, ino := range inos {
		if _, ok := w.leases[ino][c.sess.(*fakeSession)]; ok {
			leased++
		}
	}
	w.mu.Unlock()
	if leased > 5 {
		t.Errorf("the owner still counts %d leases", leased)
	}
	if got := contents(t, v, inos[5]); len(got) != 100 {
		t.Errorf("DATA: an evicted file has %d bytes", len(got))
	}
	w.check()
}
