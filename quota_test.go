package penstock

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestVoidAnswerAboutRoom: the owner answers that an overwrite takes no room, since the
// bytes are stored and in no snapshot. Before the write gets the answer, the file is
// truncated there: then the write takes room, and asks the owner again.
func TestVoidAnswerAboutRoom(t *testing.T) {
	const size, at, n = 1 << 20, 512 << 10, 4096
	for what, meanwhile := range map[string]func(v *Volume, ino meta.Ino) error{
		"": func(*Volume, meta.Ino) error { return nil },
		"it is cut": func(v *Volume, ino meta.Ino) error {
			_, err := v.SetAttr(t.Context(), &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: at})
			return err
		},
		"a hole is punched": func(v *Volume, ino meta.Ino) error {
			return v.Fallocate(t.Context(), &Call{}, meta.Fallocate{Ino: ino, Mode: meta.FallocPunchHole | meta.FallocKeepSize, Off: at, Len: n})
		},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, meta.Policy{Replicas: 1})
			c, v := open(t, w, Config{})
			ino := create(t, v, "f")
			write(t, v, ino, bytes.Repeat([]byte("A"), size), 0)
			if err := v.Fsync(t.Context(), ino, false); err != nil {
				t.Fatal(err)
			}
			c.Metered(v.id, true, true, nil)
			times := 0
			w.mu.Lock()
			w.room = func(want uint64) uint64 {
				if times++; times > 1 {
					return want
				}
				if err := meanwhile(v, ino); err != nil {
					t.Error(err)
				}
				return 0
			}
			w.mu.Unlock()
			write(t, v, ino, bytes.Repeat([]byte("B"), n), at)
			in := v.node(ino)
			in.mu.Lock()
			promised := v.meter.has(&in.file.promised)
			in.mu.Unlock()
			in.put()
			if what == "" && (times != 1 || promised != 0) || what != "" && promised < n {
				t.Errorf("DATA: it was asked %d times, and %d bytes are promised", times, promised)
			}
			w.check()
		})
	}
}

// stopAfterReserve holds writers of an inode back once the next promise has come. stands
// reports that a writer waits; on lets the writer continue.
func stopAfterReserve(w *world, in *inode) (stands func() bool, on func()) {
	w.mu.Lock()
	w.reserved = func() {
		in.mu.Lock()
		in.fileLocked().turns.gate++
		in.mu.Unlock()
	}
	w.mu.Unlock()
	stands = func() bool {
		in.mu.Lock()
		defer in.mu.Unlock()
		return in.file != nil && in.file.turns.gate > 0 && in.file.turns.wake != nil
	}
	return stands, func() {
		in.mu.Lock()
		in.file.turns.gate--
		in.file.turns.changed()
		in.mu.Unlock()
	}
}

// TestPromiseEndsWithItsSession: a write's promise ends with the session: in the next
// session a waiting write asks anew, and an abandoned write leaves no promise for others.
func TestPromiseEndsWithItsSession(t *testing.T) {
	const n = 1 << 20
	for _, killed := range []bool{false, true} {
		w := newWorld(t, meta.Policy{Replicas: 1, QuotaBytes: 1 << 30})
		c, v := open(t, w, Config{FlushEvery: time.Hour})
		ino := create(t, v, "f")
		if _, err := v.Open(t.Context(), &Call{}, ino, rdwr); err != nil {
			t.Fatal(err)
		}
		in := v.node(ino)
		stands, on := stopAfterReserve(w, in)
		ctx, kill := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := v.Write(ctx, &Call{}, ino, make([]byte, n), 0, false, false)
			done <- err
		}()
		eventually(t, "the write has its promise, and waits", stands)
		c.sess.(*fakeSession).expire()
		w.mu.Lock()
		if w.asked != n {
			t.Fatalf("%d bytes were asked for, not %d", w.asked, n)
		}
		w.asked = 0
		w.mu.Unlock()
		if killed {
			kill()
			if err := <-done; !errors.Is(err, meta.Interrupted) {
				t.Fatalf("killed, and told %v", err)
			}
			on()
			v.meter.mu.Lock()
			if v.meter.idle != 0 {
				t.Errorf("DATA: %d bytes that an ended session was promised are taken for room", v.meter.idle)
			}
			v.meter.mu.Unlock()
		} else {
			on()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			w.mu.Lock()
			if w.asked != n {
				t.Errorf("DATA: %d bytes were written in the new session, of which %d are promised", n, w.asked)
			}
			w.mu.Unlock()
			if has := v.meter.has(&in.file.promised); has != n {
				t.Errorf("DATA: the file's promise is %d", has)
			}
		}
		kill()
		in.put()
		w.check()
	}
}

// TestReserveOfAnEndedSession: a request for a promise of an ended session does not count in the
// next session: its answer would be thrown away, and its room be lost. The request fails no
// write, even if this client learns of the end later.
func TestReserveOfAnEndedSession(t *testing.T) {
	const n = 1 << 20
	for _, later := range []bool{false, true} {
		w := newWorld(t, meta.Policy{Replicas: 1, QuotaBytes: 1 << 30})
		c, v := open(t, w, Config{FlushEvery: time.Hour})
		ino := create(t, v, "f")
		s := c.sess.(*fakeSession)
		w.mu.Lock()
		w.reserving = s.expire
		if later {
			w.reserving = func() {
				w.mu.Lock()
				defer w.mu.Unlock()
				s.expired++
				w.reserving = func() { // the request was refused, and is sent again
					w.mu.Lock()
					s.expired--
					w.mu.Unlock()
					s.expire()
				}
			}
		}
		w.mu.Unlock()
		write(t, v, ino, make([]byte, n), 0)
		w.mu.Lock()
		if w.asked != n || w.given != 0 {
			t.Errorf("%d bytes were promised for %d, %d given back", w.asked, n, w.given)
		}
		w.mu.Unlock()
		w.check()
	}
}
