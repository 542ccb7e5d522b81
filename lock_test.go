package penstock

import (
	"testing"

	"penstock.io/penstock/meta"
)

// TestCloseGivesUpLocks: close(2) gives up the possible locks of its process, and sends no
// request if none is possible. Locks may exist if this client booked locks, if a predecessor had
// an unbooked request before its death, or if a predecessor's close may not have reached the
// owner.
func TestCloseGivesUpLocks(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, v := open(t, w, Config{})
	ino := create(t, v, "f")
	s := c.sess.(*fakeSession)
	closes := func(what string, resent bool, drops int) {
		t.Helper()
		before := s.dropped
		if err := v.Flush(t.Context(), &Call{Resent: resent}, ino, 7); err != nil {
			t.Fatal(err)
		}
		if n := s.dropped - before; n != drops {
			t.Errorf("%s: the owner is asked %d times, not %d", what, n, drops)
		}
	}
	lock := meta.Lock{Ino: ino, Owner: 7, Type: meta.LockWrite, End: 9}
	closes("nothing", false, 0)
	c.Locked(v.ID(), lock)
	closes("booked", false, 1)
	closes("closed", false, 0)
	closes("sent again", true, 1)
	v.MayLock(ino, 7)
	closes("asked for", false, 1)
	closes("closed again", false, 0)
}
