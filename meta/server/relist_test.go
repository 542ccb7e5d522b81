package server

import (
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta/cluster"
)

// A list that was under way when the volume was to be compressed from now on does not
// count as made: another follows at once, and no third.
func TestListUnderWayDoesNotCount(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.ListInterval = time.Hour })
	begun, hold := make(chan struct{}, 100), make(chan struct{})
	var held atomic.Bool
	g.mu.Lock()
	g.lists = func() {
		begun <- struct{}{}
		if held.Load() {
			<-hold
		}
	}
	g.mu.Unlock()
	g.add(1, racks[0])
	next := func(wait time.Duration) bool {
		select {
		case <-begun:
			return true
		case <-time.After(wait):
			return false
		}
	}
	for n := 0; next(time.Second); n++ { // the server has come
		if n == 50 {
			t.Fatal("lists without end")
		}
	}
	held.Store(true)
	g.s.srv.repairs.relist(1)
	if !next(30 * time.Second) {
		t.Fatal("no list")
	}
	g.s.srv.hosted.opened(1).words.set(&cluster.Volume{Compression: "zstd"})
	close(hold)
	if !next(30 * time.Second) {
		t.Fatal("what was under way counted")
	}
	if next(time.Second) {
		t.Error("a third list, with nothing new")
	}
}
