package client

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
)

// TestRenewedCapability (rule 18): an expired capability is no failure of a replica. The
// writer renews its capability at half its life; if that fails, no replica is blamed.
func TestRenewedCapability(t *testing.T) {
	t.Parallel()
	const life = 1500 * time.Millisecond // for the client
	// Servers accept the capability for longer: a process may stand still between sending
	// and checking.
	const taken = life + time.Minute
	var renewed atomic.Int32
	var slowly, last, refuse atomic.Bool
	var f *fixture
	sign := func(id meta.ChunkID, life time.Duration) []byte {
		return capability.Sign(f.key, capability.Claims{Volume: 1, Chunk: id, Rights: capability.Append | f.plainRight(), Client: "client/c", Fence: meta.Fence{Term: 1},
			MaxLen: 1 << 30, Expiry: meta.Time(time.Now().Add(life).UnixNano())})
	}
	f = newFixture(t, "tcp", 2, Config{AppendCap: func(_ context.Context, id meta.ChunkID) ([]byte, time.Duration, error) {
		switch {
		case refuse.Load():
			return nil, 0, errors.New("no")
		case last.Load():
			refuse.Store(true)
			return sign(id, life), life, nil
		case slowly.Load():
			time.Sleep(500 * time.Millisecond)
		}
		renewed.Add(1)
		return sign(id, taken), life, nil
	}})
	g := f.grant()
	g.Cap, g.TTL, g.Asked = sign(g.ID, taken), uint64(life.Milliseconds()), meta.Time(time.Now().UnixNano())
	w := f.NewWriter(g)
	defer w.Close()
	write := func() error {
		if _, err := w.Append(t.Context(), random(1000, 1)); err != nil {
			return err
		}
		return w.Sync(t.Context())
	}
	began := time.Now()
	for end := began.Add(time.Minute); renewed.Load() < 4; time.Sleep(20 * time.Millisecond) {
		if err := write(); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(end) {
			t.Fatalf("renewed %d times in a minute", renewed.Load())
		}
	}
	time.Sleep(2 * life) // no request meanwhile: the next request waits for the renewal
	n := renewed.Load()
	slowly.Store(true)
	if err := write(); err != nil {
		t.Fatal(err)
	}
	if renewed.Load() == n {
		t.Error("what ran out was used, or not renewed")
	}
	slowly.Store(false)
	if n, most := renewed.Load(), 2+int32(time.Since(began)/(life/2)); n > most {
		t.Errorf("renewed %d times, %d at most in that time", n, most)
	}
	last.Store(true) // a last capability, which servers accept no longer than the client does
	var err error
	for end := time.Now().Add(time.Minute); err == nil && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		err = write()
	}
	if meta.KindOf(err) != meta.BadCapability || len(w.Failed()) != 0 {
		t.Fatalf("%v, blamed %v", err, w.Failed())
	}
}

// TestKeysRotateUnderClients: the signing key is replaced again and again, each time in the
// middle of a capability's life. As long as a server also knows the previous key, writers and
// readers notice nothing; after the last rotation the server knows only the newest key, and calls
// with earlier keys fail.
func TestKeysRotateUnderClients(t *testing.T) {
	t.Parallel()
	const life = 600 * time.Millisecond // for the client: a server accepts by the key alone
	var mu sync.Mutex
	var refuse bool
	var f *fixture
	keys := []meta.CapKey{{ID: 1, Secret: bytes.Repeat([]byte{1}, 32)}}
	sign := func(id meta.ChunkID, rights capability.Rights) []byte {
		mu.Lock()
		defer mu.Unlock()
		if refuse {
			return nil
		}
		return capability.Sign(keys[len(keys)-1], capability.Claims{Volume: 1, Chunk: id, Rights: rights | f.plainRight(), Client: "client/c", Fence: meta.Fence{Term: 1},
			MaxLen: 1 << 30, Expiry: meta.Time(time.Now().Add(time.Hour).UnixNano())})
	}
	f = newFixture(t, "tcp", 2, Config{AppendCap: func(_ context.Context, id meta.ChunkID) ([]byte, time.Duration, error) {
		if token := sign(id, capability.Append); token != nil {
			return token, life, nil
		}
		return nil, 0, errors.New("no")
	}})
	tell := func(kept int) {
		mu.Lock()
		defer mu.Unlock()
		for _, s := range f.servers {
			s.SetKeys(slices.Clone(keys[max(0, len(keys)-kept):]))
		}
	}
	tell(2)
	g := f.grant()
	g.Cap, g.TTL, g.Asked = sign(g.ID, capability.Append), uint64(life.Milliseconds()), meta.Time(time.Now().UnixNano())
	w := f.NewWriter(g)
	defer w.Close()
	for id := uint32(2); ; id++ {
		last := id == 6
		mu.Lock()
		refuse = last // the writer's capability was signed with an earlier key, and the writer gets no other
		keys = append(keys, meta.CapKey{ID: id, Secret: bytes.Repeat([]byte{byte(id)}, 32)})
		mu.Unlock()
		if last {
			tell(1)
		} else {
			tell(2)
		}
		wait := life
		if last {
			wait = time.Minute // for an error
		}
		var err error
		for end := time.Now().Add(wait); err == nil && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if _, err = w.Append(t.Context(), random(1000, 1)); err == nil {
				err = w.Sync(t.Context())
			}
		}
		if last {
			if meta.KindOf(err) != meta.BadCapability {
				t.Fatalf("without the key before: %v", err)
			}
			return
		}
		if err != nil {
			t.Fatalf("after %d rotations: %v", id-1, err)
		}
	}
}
