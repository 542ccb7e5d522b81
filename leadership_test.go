package penstock

import (
	"bytes"
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// ended reports whether a leader knows that its leadership has ended.
func ended(l *Leadership) bool {
	select {
	case <-l.Done():
		return true
	default:
		return false
	}
}

// appendTo writes and syncs.
func appendTo(ctx context.Context, v *Volume, ino meta.Ino, p []byte, off int64) error {
	if _, err := v.Write(ctx, &Call{}, ino, p, off, false, false); err != nil {
		return err
	}
	return v.Fsync(ctx, ino, true)
}

// TestLeaderThatWasCutOff: a leader that was cut off appends nothing to the file after another
// client leads the file, neither in its old session nor once the end of the session is known
// (rule 25).
func TestLeaderThatWasCutOff(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	a, va := open(t, w, Config{FlushEvery: time.Hour})
	_, vb := open(t, w, Config{FlushEvery: time.Hour})
	_, vc := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, va, "log")
	if _, _, err := vb.Leaderships().Leader(t.Context(), ino); !errors.Is(err, meta.NotFound) {
		t.Errorf("the leader of a file that nobody leads: %v", err)
	}
	first, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{Address: "a:1"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{}); !errors.Is(err, meta.Busy) {
		t.Errorf("the leader leads the file again: %v", err)
	}
	if _, err := vb.Leaderships().Lead(t.Context(), ino, LeadOptions{}); !errors.Is(err, meta.Busy) {
		t.Errorf("a second leader: %v", err)
	}
	size := openEnd(t, va, ino)
	is := func(epoch uint64, address string) {
		t.Helper()
		if at, e, err := vc.Leaderships().Leader(t.Context(), ino); err != nil || at != address || e != epoch {
			t.Errorf("the leader is %q in epoch %d, %v; not %q in epoch %d", at, e, err, address, epoch)
		}
	}
	is(first.Epoch(), "a:1")
	if !first.Valid() || ended(first) {
		t.Error("a leader with a lease does not believe in its leadership")
	}
	waited := make(chan *Leadership)
	go func() {
		l, err := vb.Leaderships().Lead(t.Context(), ino, LeadOptions{Address: "b:1", Wait: true})
		if err != nil {
			t.Error(err)
		}
		waited <- l
	}()
	s := a.sess.(*fakeSession)
	left := s.left
	s.left = 0
	if first.Valid() {
		t.Error("DATA: a leader without a lease believes in its leadership")
	}
	tell := s.endUnheard()
	second := <-waited
	if second == nil {
		t.FailNow()
	}
	if second.Epoch() <= first.Epoch() {
		t.Errorf("DATA: epoch %d after epoch %d", second.Epoch(), first.Epoch())
	}
	is(second.Epoch(), "b:1")
	log := bytes.Clone(contents(t, vb, ino))
	if len(log) != int(size) {
		t.Errorf("DATA: the second leader begins at %d of %d bytes", len(log), size)
	}
	s.left = left // the first leader was stopped between a look at the clock and the append
	if err := appendTo(t.Context(), va, ino, []byte("late"), size); err == nil {
		t.Error("DATA: the first leader appended and synced in its old session")
	}
	tell()
	if first.Valid() || !ended(first) {
		t.Error("DATA: a leader that knows of its session's end believes in its leadership")
	}
	if err := appendTo(t.Context(), va, ino, []byte("later"), size); err == nil {
		t.Error("DATA: the first leader appended and synced in its next session")
	}
	if err := appendTo(t.Context(), vb, ino, []byte("of b"), size); err != nil {
		t.Error(err)
	}
	if err := appendTo(t.Context(), va, ino, []byte("latest"), size+4); !errors.Is(err, meta.NotPermitted) {
		t.Errorf("DATA: an append by the first leader: %v", err)
	}
	if err := second.Release(t.Context()); err != nil {
		t.Error(err)
	}
	// No session leads the file now, so a plain write would be taken.
	if _, err := first.Write(t.Context(), []byte("latest"), size); !errors.Is(err, meta.SessionExpired) {
		t.Errorf("DATA: the first leader writes in a session that does not lead: %v", err)
	}
	if second, err = vb.Leaderships().Lead(t.Context(), ino, LeadOptions{Address: "b:1"}); err != nil {
		t.Fatal(err)
	}
	for _, v := range []*Volume{vb, vc} {
		if got, want := contents(t, v, ino), append(bytes.Clone(log), "of b"...); !bytes.Equal(got, want) {
			t.Errorf("DATA: the file has %d bytes, and ends in %q", len(got), got[max(0, len(got)-20):])
		}
	}
	if err := first.Release(t.Context()); err != nil {
		t.Error(err)
	}
	is(second.Epoch(), "b:1")
	if err := second.Release(t.Context()); err != nil || !ended(second) || second.Valid() {
		t.Errorf("a leadership that was released lasts: %v", err)
	}
	third, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{Address: "a:2"})
	if err != nil {
		t.Fatal(err)
	}
	if third.Epoch() <= second.Epoch() {
		t.Errorf("DATA: epoch %d after epoch %d", third.Epoch(), second.Epoch())
	}
	w.check()
}

// TestStrayLeadership: a leadership that the owner keeps for a client after a failed request does
// not block the file for ever: the client's next Lead replaces the leadership, and the end of the
// session ends the leadership.
func TestStrayLeadership(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	a, va := open(t, w, Config{FlushEvery: time.Hour})
	_, vb := open(t, w, Config{FlushEvery: time.Hour})
	away := meta.E("call", meta.Unavailable, "", errors.New("nobody answers"))
	// lose has the next requests to end a leadership fail, and the next answer to a Lead.
	lose := func(ends, leads int) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.fail = func(op meta.Op) error {
			if _, ok := op.(*meta.EndLead); ok && ends > 0 {
				ends--
				return away
			}
			return nil
		}
		w.unanswered = func(op meta.Op) error {
			if _, ok := op.(*meta.Lead); ok && leads > 0 {
				leads--
				return meta.E("call", meta.Interrupted, "", context.Canceled)
			}
			return nil
		}
	}
	// again leads once no other call of the client is about to.
	again := func(ino meta.Ino) (*Leadership, error) {
		t.Helper()
		for end := time.Now().Add(60 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
			va.leaderships.mu.Lock()
			_, about := va.leaderships.m[ino]
			va.leaderships.mu.Unlock()
			if !about {
				return va.Leaderships().Lead(t.Context(), ino, LeadOptions{})
			}
		}
		t.Fatal("the request that was given up does not end")
		return nil, nil
	}
	busy := func(ino meta.Ino) {
		t.Helper()
		if _, err := vb.Leaderships().Lead(t.Context(), ino, LeadOptions{}); !errors.Is(err, meta.Busy) {
			t.Errorf("another client leads the file: %v", err)
		}
	}
	ends := func(ino meta.Ino, l *Leadership) {
		t.Helper()
		busy(ino)
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
		l, err := vb.Leaderships().Lead(t.Context(), ino, LeadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
	}

	ino := create(t, va, "release failed")
	first, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	lose(1, 0)
	if err := first.Release(t.Context()); !errors.Is(err, meta.Unavailable) || !ended(first) || first.Valid() {
		t.Errorf("a release that failed: %v; the leadership lasts: %v", err, first.Valid())
	}
	if err := first.Release(t.Context()); err != nil {
		t.Errorf("a leadership that has ended: %v", err)
	}
	busy(ino)
	second, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{})
	if err != nil {
		t.Fatalf("the client leads the file no more in its session: %v", err)
	}
	if second.Epoch() <= first.Epoch() {
		t.Errorf("DATA: epoch %d after epoch %d", second.Epoch(), first.Epoch())
	}
	ends(ino, second)

	ino = create(t, va, "given up")
	lose(1, 1)
	if _, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{}); !errors.Is(err, meta.Interrupted) {
		t.Fatalf("a request that was given up: %v", err)
	}
	third, err := again(ino)
	if err != nil {
		t.Fatalf("the client leads no file that it once gave up: %v", err)
	}
	ends(ino, third)

	ino = create(t, va, "given up, and ended")
	lose(0, 1)
	if _, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{}); !errors.Is(err, meta.Interrupted) {
		t.Fatalf("a request that was given up: %v", err)
	}
	other, err := vb.Leaderships().Lead(t.Context(), ino, LeadOptions{Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Release(t.Context()); err != nil {
		t.Error(err)
	}

	ino = create(t, va, "unknown to the client")
	if _, err := va.Leaderships().try(t.Context(), ino, LeadOptions{}); err != nil {
		t.Fatal(err)
	}
	unknown, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{})
	if err != nil {
		t.Fatalf("the owner has a leadership of the session that the client does not know: %v", err)
	}
	ends(ino, unknown)

	ino = create(t, va, "with the session")
	last, err := again(ino)
	if err != nil {
		t.Fatal(err)
	}
	lose(1, 0)
	if err := last.Release(t.Context()); err == nil {
		t.Fatal("the release did not fail")
	}
	a.sess.(*fakeSession).endUnheard()()
	if other, err = vb.Leaderships().Lead(t.Context(), ino, LeadOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := va.Leaderships().Lead(t.Context(), ino, LeadOptions{}); !errors.Is(err, meta.Busy) {
		t.Errorf("another client's leadership was ended: %v", err)
	}
	if err := other.Release(t.Context()); err != nil {
		t.Error(err)
	}
	lose(0, 0)
	w.check()
}

// TestChangesWithinALeadership: the owner makes changes of names and of the size while the
// leadership lasts. A late request of a former leader changes nothing, while another client leads the
// file, and when nobody leads the file any more (rule 25).
func TestChangesWithinALeadership(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, va := open(t, w, Config{FlushEvery: time.Hour})
	_, vb := open(t, w, Config{FlushEvery: time.Hour})
	ino := create(t, va, "log")
	if err := appendTo(t.Context(), va, ino, []byte("commit"), 0); err != nil {
		t.Fatal(err)
	}
	names := func() (all []string) {
		t.Helper()
		list, _, err := vb.ReadDir(t.Context(), meta.RootIno, &DirCursor{}, 0, false)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range list {
			all = append(all, e.Name)
		}
		slices.Sort(all)
		return all
	}
	changes := func(l *Leadership) []error {
		how := meta.Create{Parent: meta.RootIno, Name: "draft", Mode: meta.TypeRegular | 0o644, Excl: true}
		info, cerr := l.CreateOpen(t.Context(), how, uint32(os.O_RDWR))
		if cerr == nil {
			l.v.Release(t.Context(), info.Entry.Attr.Ino, uint32(os.O_RDWR))
		}
		return []error{cerr, l.Truncate(t.Context(), 3), l.Rename(t.Context(), meta.RootIno, "draft", "log", 0), l.Unlink(t.Context(), meta.RootIno, "log")}
	}
	lead := func(v *Volume) *Leadership {
		t.Helper()
		l, err := v.Leaderships().Lead(t.Context(), ino, LeadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	first := lead(va)
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	refused := func(what string) {
		t.Helper()
		create(t, vb, "draft")
		for i, err := range changes(first) {
			if !errors.Is(err, meta.Fenced) {
				t.Errorf("DATA: %s: change %d of the former leader: %v", what, i, err)
			}
		}
		if got := names(); !slices.Equal(got, []string{"draft", "log"}) || string(contents(t, vb, ino)) != "commit" {
			t.Errorf("DATA: %s: the names are %v, the file is %q", what, got, contents(t, vb, ino))
		}
		if err := vb.Unlink(t.Context(), &Call{}, meta.RootIno, "draft", false); err != nil {
			t.Fatal(err)
		}
	}
	refused("nobody leads")
	second := lead(vb)
	refused("another client leads")
	if err := second.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	third := lead(va)
	refused("the client leads again")
	for i, err := range changes(third) {
		if err != nil {
			t.Errorf("change %d of the leader: %v", i, err)
		}
	}
	if got := names(); len(got) != 0 {
		t.Errorf("after the changes of the leader the names are %v", got)
	}
	w.check()
}
