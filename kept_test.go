package penstock

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// keeping is a configuration whose buffers outlive the process. Bytes are committed only
// on request.
func keeping(t testing.TB) Config {
	t.Helper()
	m, err := keep.New(32 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	m.Whole()
	return Config{Keep: m, FlushEvery: time.Hour}
}

// heir kills a client and returns its successor's view of the volume.
func heir(t testing.TB, w *world, old *Client) (*Client, *Volume) {
	t.Helper()
	c := w.succeed(old, keeping(t))
	t.Cleanup(func() { _ = c.Close(context.Background()) })
	v, err := c.Volume(t.Context(), "root")
	if err != nil {
		t.Fatal(err)
	}
	return c, v
}

// TestKilledAfterAFailedTruncate: after a failed truncation, the written bytes are kept
// in the order of the writes, not of the file.
func TestKilledAfterAFailedTruncate(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, keeping(t))
	ino := create(t, v, "f")
	write(t, v, ino, bytes.Repeat([]byte("A"), 100), 50)
	write(t, v, ino, bytes.Repeat([]byte("B"), 70), 0)
	want := append(bytes.Repeat([]byte("B"), 70), bytes.Repeat([]byte("A"), 80)...)
	for _, kind := range []meta.Kind{meta.ReadOnly, meta.Interrupted, meta.ResourceExceeded} {
		w.failSetAttr(kind)
		if _, err := v.SetAttr(t.Context(), &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize}); meta.KindOf(err) != kind {
			t.Fatal(err)
		}
		w.failSetAttr(meta.KindOK)
	}
	_, v = heir(t, w, c)
	if got := contents(t, v, ino); !bytes.Equal(got, want) {
		t.Errorf("DATA: a successor has\n%s, not\n%s", got, want)
	}
}

// TestKilledAfterABufferGrewOverANewerOne: bytes that continue an old buffer, and replace
// bytes of a newer buffer that is still needed for its other bytes, are the newest
// nevertheless.
func TestKilledAfterABufferGrewOverANewerOne(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, keeping(t))
	ino := create(t, v, "f")
	want := make([]byte, 50)
	for _, p := range []struct {
		b       string
		off, to int
	}{{"A", 10, 40}, {"B", 0, 10}, {"C", 35, 50}, {"D", 10, 38}} {
		copy(want[p.off:], bytes.Repeat([]byte(p.b), p.to-p.off))
		write(t, v, ino, bytes.Repeat([]byte(p.b), p.to-p.off), int64(p.off))
	}
	_, v = heir(t, w, c)
	if got := contents(t, v, ino); !bytes.Equal(got, want) {
		t.Errorf("DATA: a successor has\n%s, not\n%s", got, want)
	}
}

func (w *world) failSetAttr(kind meta.Kind) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.fail = func(op meta.Op) error {
		if a, ok := op.(*meta.SetAttr); ok && kind != meta.KindOK && a.Mask&meta.SetSize != 0 {
			return meta.E("truncate", kind, "", nil)
		}
		return nil
	}
}

// TestKilledModel: after any writes, truncations, commits and failed commits, the
// successor of a killed process has the same bytes as a plain file.
func TestKilledModel(t *testing.T) {
	for seed := range uint64(60) {
		if !t.Run(fmt.Sprint(seed), func(t *testing.T) { killedModel(t, seed) }) {
			return
		}
	}
}

func killedModel(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 7))
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, keeping(t))
	var inos [2]meta.Ino
	var flat [2][]byte
	for i := range inos {
		inos[i] = create(t, v, fmt.Sprint("f", i))
	}
	log := ""
	check := func(what string) {
		t.Helper()
		for i, ino := range inos {
			if got := contents(t, v, ino); !bytes.Equal(got, flat[i]) {
				at := 0
				for at < min(len(got), len(flat[i])) && got[at] == flat[i][at] {
					at++
				}
				t.Fatalf("DATA: seed %d: %s: file %d has %d bytes, not %d, and differs at %d\n%s", seed, what, i, len(got), len(flat[i]), at, log)
			}
		}
	}
	reach := 1 << (6 + rng.IntN(6))
	if rng.IntN(4) == 0 {
		reach = 3 << 20 // above a buffer's largest size
	}
	next := byte(0)
	for step := range 60 {
		i := rng.IntN(len(inos))
		ino := inos[i]
		switch k := rng.IntN(20); {
		case k < 12:
			off, n := rng.IntN(reach), 1+rng.IntN(reach/2)
			if size := len(flat[i]); k < 3 { // as streams do
				off = size
			} else if k < 6 && size > 0 {
				off, n = rng.IntN(size), 1+rng.IntN(8)
			}
			next++
			if n+off > len(flat[i]) {
				flat[i] = append(flat[i], make([]byte, n+off-len(flat[i]))...)
			}
			for j := range n {
				flat[i][off+j] = next
			}
			if got, err := v.Write(t.Context(), &Call{}, ino, flat[i][off:off+n], int64(off), false, false); err != nil || got != n {
				t.Fatalf("seed %d: write: %d, %v\n%s", seed, got, err, log)
			}
			log += fmt.Sprintf("%d: file %d [%d, %d) = %d\n", step, i, off, off+n, next)
		case k < 15:
			size := uint64(0)
			if k == 14 {
				size = uint64(rng.IntN(reach))
			}
			kind := []meta.Kind{meta.KindOK, meta.ReadOnly, meta.Interrupted, meta.ResourceExceeded}[rng.IntN(4)]
			w.failSetAttr(kind)
			_, err := v.SetAttr(t.Context(), &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: size})
			w.failSetAttr(meta.KindOK)
			if meta.KindOf(err) != kind {
				t.Fatalf("truncate: %v, not %v", err, kind)
			}
			if err == nil {
				flat[i] = append(flat[i], make([]byte, max(int(size), len(flat[i]))-len(flat[i]))...)[:size]
			}
			log += fmt.Sprintf("%d: file %d truncated to %d: %v\n", step, i, size, err)
		case k < 16:
			if err := v.Fsync(t.Context(), ino, false); err != nil {
				t.Fatal(err)
			}
			log += fmt.Sprintf("%d: file %d synced\n", step, i)
		case k < 17:
			w.mu.Lock()
			w.fail = func(op meta.Op) error {
				if _, ok := op.(*meta.Write); ok {
					return meta.E("write", meta.Unavailable, "", nil)
				}
				return nil
			}
			w.mu.Unlock()
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
			err := v.Fsync(ctx, ino, false)
			cancel()
			w.failSetAttr(meta.KindOK)
			log += fmt.Sprintf("%d: file %d sync failed: %v\n", step, i, err)
		case k < 18:
			check("before")
		default:
			c, v = heir(t, w, c)
			log += fmt.Sprintf("%d: killed\n", step)
			check("killed")
			if rng.IntN(2) == 0 {
				for _, ino := range inos {
					v.Reopen(ino, rdwr)
				}
			}
		}
	}
	_, v = heir(t, w, c)
	check("killed at last")
}

// TestSuccessorWaitsForNoOwner: a volume whose owner is away, and without bytes to be put back,
// delays no mount.
func TestSuccessorWaitsForNoOwner(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1, QuotaBytes: 1 << 30})
	c, _ := open(t, w, keeping(t))
	w.mu.Lock()
	w.away = true
	w.mu.Unlock()
	came := make(chan *Client, 1)
	go func() { came <- w.succeed(c, keeping(t)) }()
	select {
	case c := <-came:
		_ = c.Close(context.Background())
	case <-time.After(30 * time.Second):
		t.Fatal("it waits")
	}
}

// TestSuccessorOfAPromise: a successor needs no promise for the bytes put back, and gives the
// rest of its predecessor's promise back, but only after the ends of its files are sealed: the
// ends count only then.
func TestSuccessorOfAPromise(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1, QuotaBytes: 1 << 30})
	c, v := open(t, w, keeping(t))
	ino := create(t, v, "f")
	const synced, buffered, promised = 1 << 20, 300_000, 5 << 20
	write(t, v, ino, bytes.Repeat([]byte("A"), synced), 0)
	if err := v.Fsync(t.Context(), ino, false); err != nil {
		t.Fatal(err)
	}
	write(t, v, ino, bytes.Repeat([]byte("B"), buffered), synced)
	w.mu.Lock()
	w.promised, w.asked, w.given = promised, 0, 0
	w.failEnd = func(id meta.ChunkID) error { return meta.E("seal", meta.Unavailable, id.String(), nil) }
	w.mu.Unlock()
	_, v = heir(t, w, c)
	reserved := func() (asked, given uint64) {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.asked, w.given
	}
	time.Sleep(2 * endAgain)
	if asked, given := reserved(); asked != 0 || given != 0 {
		t.Errorf("%d asked and %d given before the chunks are sealed", asked, given)
	}
	w.mu.Lock()
	w.failEnd = nil
	w.mu.Unlock()
	for begun := time.Now(); ; time.Sleep(time.Millisecond) {
		asked, given := reserved()
		if asked == 0 && given == promised-buffered {
			break
		}
		if asked > 0 || time.Since(begun) > 30*time.Second {
			t.Fatalf("%d asked, %d given of %d, of which %d are buffered", asked, given, promised, buffered)
		}
	}
	want := append(bytes.Repeat([]byte("A"), synced), bytes.Repeat([]byte("B"), buffered)...)
	if got := contents(t, v, ino); !bytes.Equal(got, want) {
		t.Errorf("DATA: %d bytes, not those written", len(got))
	}
}

// TestPromiseOfAnEndedSessionIsNotInherited: a predecessor's promise is void if the session ends
// before the successor knows of the promise: the successor must ask for its own bytes.
func TestPromiseOfAnEndedSessionIsNotInherited(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1, QuotaBytes: 1 << 30})
	c, v := open(t, w, keeping(t))
	ino := create(t, v, "f")
	write(t, v, ino, []byte("buffered"), 0)
	const promised, n = 5 << 20, 1 << 20
	w.mu.Lock()
	w.promised = promised
	w.inherited = func(s *fakeSession) { s.expire() }
	w.mu.Unlock()
	_, v = heir(t, w, c)
	if v.owner.epoch.Load() == 1 {
		t.Fatal("the session did not end: nothing is tested")
	}
	ino = create(t, v, "g")
	w.mu.Lock()
	w.asked = 0
	w.mu.Unlock()
	write(t, v, ino, make([]byte, n), 0)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.asked < n || w.given > 0 {
		t.Errorf("for %d bytes %d are asked for, and %d of a session that ended are given back", n, w.asked, w.given)
	}
}

// TestSuccessorsOfAnEndedSession: a successor whose session ended, before or while it
// took the state in, has no lease on its predecessor's files: another client writes them,
// and the lost bytes come back neither with this successor nor with the next successor,
// which finds a session that the owner knows.
func TestSuccessorsOfAnEndedSession(t *testing.T) {
	for _, killed := range []bool{false, true} { // the first successor is killed before it leaves any state
		w := newWorld(t, meta.Policy{Replicas: 1})
		c, v := open(t, w, keeping(t))
		_, other := open(t, w, Config{FlushEvery: time.Hour})
		ino := create(t, v, "f")
		write(t, v, ino, []byte("synced"), 0)
		if err := v.Fsync(t.Context(), ino, false); err != nil {
			t.Fatal(err)
		}
		write(t, v, ino, []byte("lost"), 0)
		first := c
		w.succeeding = func(s *fakeSession) { s.expire() }
		w.killedResuming = killed
		c = w.succeed(first, keeping(t))
		w.killedResuming = false
		w.check() // no client believes that it has leases which it lacks
		write(t, other, ino, []byte("newer"), 0)
		if err := other.Fsync(t.Context(), ino, false); err != nil {
			t.Fatal(err)
		}
		if killed {
			s := first.sess.(fakeKept).fakeSession
			s.id = c.sess.(fakeKept).id
			w.mu.Lock()
			for _, m := range w.leases { // the killed process's leases pass to the next process
				if mode, ok := m[c.sess.(fakeKept).fakeSession]; ok {
					m[s] = mode
				}
			}
			w.mu.Unlock()
			c = first // the next process finds this process's state
		}
		_, v = heir(t, w, c)
		v.Reopen(ino, rdwr)
		if _, err := v.Write(t.Context(), &Call{}, ino, []byte("x"), 0, false, false); killed && meta.KindOf(err) != meta.IO {
			t.Errorf("killed %v: a write is told %v of what is lost", killed, err)
		}
		if err := v.SyncAll(t.Context()); err != nil {
			t.Log(err)
		}
		if got := string(contents(t, other, ino)); got != "newerd" && (killed || got != "xewerd") {
			t.Errorf("killed %v: the file has %q", killed, got)
		}
		w.check()
	}
}

// TestKilledWhileItsSessionEnded: of bytes written before and after the session's end,
// only the later bytes are put back, even if the process was killed before it had
// forgotten the earlier bytes.
func TestKilledWhileItsSessionEnded(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, keeping(t))
	old, late := create(t, v, "old"), create(t, v, "late")
	if err := v.SyncAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	write(t, v, old, []byte("lost"), 0)
	in := v.node(old)
	defer in.put()
	in.mu.Lock() // so far the expiry comes
	f, slot := in.file, keep.Slot(0)
	f.m.each(0, 100, func(s *segment) bool { slot = s.b.slot; return true })
	kept, _ := c.cfg.Keep.Get(slot)
	in.mu.Unlock()
	c.sess.(fakeKept).expire()
	write(t, v, late, []byte("of the new session"), 0)
	c.cfg.Keep.Note(kept)
	_, v = heir(t, w, c)
	if got := string(contents(t, v, old)); got != "" {
		t.Errorf("what was given up is back: %q", got)
	}
	if got := string(contents(t, v, late)); got != "of the new session" {
		t.Errorf("the file has %q", got)
	}
	w.check()
}
