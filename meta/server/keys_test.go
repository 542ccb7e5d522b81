package server

import (
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/cluster"
)

// Every server sees to the rotation of keys; a new server gets the keys before the server signs.
func TestKeysAreRotated(t *testing.T) {
	t.Parallel()
	g := newGrid(t, func(c *Config) { c.KeyLook = 10 * time.Millisecond })
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
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
	// A server that starts does not know how long the others have had the key.
	g.s.crash()
	g.s.cluster.capKeys = []meta.CapKey{{ID: 1<<31 + 5, Secret: make([]byte, 32)}, {ID: 4, Secret: make([]byte, 32)}}
	g.s.start()
	if k := g.s.srv.chunkServers.signKey(); k.ID != 4 {
		t.Errorf("key %d signs at once after a start", k.ID)
	}
	s, two := g.s.srv, []meta.CapKey{{ID: 1, Secret: make([]byte, 32)}, {ID: 2, Secret: make([]byte, 32)}}
	s.chunkServers.takeKeys(&cluster.View{CapKeys: two})
	if k := s.chunkServers.signKey(); k.ID != 1 {
		t.Errorf("key %d signs at once", k.ID)
	}
	s.chunkServers.mu.Lock()
	s.chunkServers.keysAt = time.Now().Add(-keyHold)
	s.chunkServers.mu.Unlock()
	if k := s.chunkServers.signKey(); k.ID != 2 {
		t.Errorf("key %d signs, not the newest", k.ID)
	}
}

// No capability holds longer than its signing key stays valid, whatever life the caller asks for;
// and a copy of any size, however low its bound, ends within the capability's life.
func TestNothingIsSignedForLonger(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil)
	s := g.s.srv
	token := s.chunkServers.sign(24*time.Hour, capability.Claims{Volume: 1, Rights: capability.Read})
	keys := []meta.CapKey{s.chunkServers.signKey()}
	at := func(d time.Duration) meta.Time { return meta.Time(time.Now().Add(d).UnixNano()) }
	if _, err := capability.Verify(keys, token, at(capability.MaxLife-time.Minute)); err != nil {
		t.Error(err)
	}
	if _, err := capability.Verify(keys, token, at(capability.MaxLife+time.Second)); meta.KindOf(err) != meta.BadCapability {
		t.Errorf("it holds longer than %v: %v", capability.MaxLife, err)
	}
	for _, n := range []uint64{0, 1, 1799, 1800, 3599, 1 << 20, 256 << 20, 1 << 30, 1 << 40} {
		for _, bound := range []uint64{0, 1, 1000, minCopyRate - 1, minCopyRate, 1 << 30} {
			rate, patience := copyTerms(n, bound)
			if rate < bound || rate == 0 || patience < copyPatience || patience+time.Minute > capability.MaxLife {
				t.Errorf("%d bytes at %d: %d a second within %v", n, bound, rate, patience)
			}
			if took := time.Duration(n/rate) * time.Second; took > patience {
				t.Errorf("%d bytes at %d take %v, and may %v", n, rate, took, patience)
			}
			if bound >= minCopyRate && n <= 1<<30 && rate != bound {
				t.Errorf("%d bytes at %d: the bound is exceeded by %d", n, bound, rate)
			}
		}
	}
}
