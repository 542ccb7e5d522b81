package server

import (
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
)

// Every server sees to it that keys are rotated; a new one is told before it signs.
func TestKeysAreRotated(t *testing.T) {
	g := newGrid(t, func(c *Config) { c.KeyLook = 10 * time.Millisecond })
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		g.s.cluster.mu.Lock()
		asked := g.s.cluster.keyLife
		g.s.cluster.mu.Unlock()
		if len(asked) > 1 {
			if asked[0] != cluster.DefaultKeyLife {
				t.Errorf("rotated after %v", asked[0])
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("nobody looks after the keys")
		}
	}
	s, two := g.s.srv, []meta.CapKey{{ID: 1, Secret: make([]byte, 32)}, {ID: 2, Secret: make([]byte, 32)}}
	s.takeKeys(&cluster.View{CapKeys: two})
	if k := s.signKey(); k.ID != 1 {
		t.Errorf("key %d signs at once", k.ID)
	}
	s.mu.Lock()
	s.keysAt = time.Now().Add(-keyHold)
	s.mu.Unlock()
	if k := s.signKey(); k.ID != 2 {
		t.Errorf("key %d signs, not the newest", k.ID)
	}
}
