package server

import (
	"context"
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// writing gives a peer a file that the peer holds exclusively and gives back when the test
// allows.
func (s *site) writing() (a *peer, ino meta.Ino) {
	s.t.Helper()
	a = s.dial("a")
	ino = a.create(s.t, "f").Attr.Ino
	if a.mode(ino) != meta.LeaseExclusive {
		s.t.Fatal("a new file came without an exclusive lease")
	}
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()
	return a, ino
}

func (p *peer) put(t *testing.T, ino meta.Ino, text string) error {
	t.Helper()
	_, err := p.Do(t.Context(), 1, meta.OpID{}, &meta.Write{Ino: ino, Inline: true, Data: []byte(text), Size: uint64(len(text)), Synced: true}, meta.LeaseNone)
	return err
}

// setPolicy changes words of volume 1's policy.
func (p *peer) setWords(ctx context.Context, force bool, change func(*meta.Policy), words ...string) error {
	v, err := p.VolumeByID(ctx, 1)
	if err != nil {
		return err
	}
	change(&v.Policy)
	_, err = p.SetVolume(ctx, 1, v.Policy, meta.VolumeWords{Only: words, Force: force})
	return err
}

// TestImmutableTakesBackWhatWritersHold: writes that were acknowledged to a program before its
// volume becomes immutable are in the volume, and later writes are refused.
func TestImmutableTakesBackWhatWritersHold(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, ino := s.writing()
	admin := s.dial("admin")
	done := make(chan error, 1)
	go func() {
		done <- admin.setWords(t.Context(), false, func(p *meta.Policy) { p.Immutable = true }, "immutable")
	}()
	// Without the barrier, the volume is immutable before the writer heard of the change.
	eventually(t, "the lease is asked for, or the volume is immutable", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		return unless(len(a.held) > 0 || len(done) > 0)
	})
	const text = "written before"
	if err := a.put(t, ino, text); err != nil {
		t.Errorf("DATA: what was written before the volume became immutable is refused: %v", err)
	}
	a.letGo()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	b := s.dial("b")
	if r := b.do(t, &meta.Open{Ino: ino}, meta.LeaseShared); string(r.Data) != text {
		t.Errorf("DATA: the file has %q", r.Data)
	}
	for _, p := range []*peer{a, b} {
		_, err := p.Do(t.Context(), 1, meta.OpID{}, &meta.Open{Ino: ino}, meta.LeaseExclusive)
		wantKind(t, err, meta.ReadOnly)
		wantKind(t, p.put(t, ino, "later"), meta.ReadOnly)
	}
	// The policy is taken back, and the file is written again.
	if err := admin.setWords(t.Context(), false, func(p *meta.Policy) { p.Immutable = false }, "immutable"); err != nil {
		t.Fatal(err)
	}
	b.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive)
	if err := b.put(t, ino, "later"); err != nil {
		t.Fatal(err)
	}
	s.exact()
}

// TestImmutableWaitsForWriters: a volume does not become immutable while a mount can't commit its
// buffered writes, unless an administrator gives the writes up.
func TestImmutableWaitsForWriters(t *testing.T) {
	t.Parallel()
	s := newSiteWith(t, 10*time.Second, func(c *Config) { c.endingFor = 100 * time.Millisecond })
	a, ino := s.writing()
	a.mu.Lock()
	a.hold, a.holdsOn = false, true
	a.mu.Unlock()
	admin := s.dial("admin")
	immutable := func(p *meta.Policy) { p.Immutable = true }
	err := admin.setWords(t.Context(), false, immutable, "immutable")
	wantKind(t, err, meta.Unavailable)
	if err := a.put(t, ino, "at last"); err != nil {
		t.Errorf("DATA: a change of policy that was refused cost a writer its bytes: %v", err)
	}
	if err := admin.setWords(t.Context(), true, immutable, "immutable"); err != nil {
		t.Fatal(err)
	}
	wantKind(t, a.put(t, ino, "too late"), meta.ReadOnly)
}

// TestTrashHasWhatWasWritten: bytes written before the deletion of a volume are in the volume
// when the volume comes out of the trash.
func TestTrashHasWhatWasWritten(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	admin := s.dial("admin")
	day := uint64(86400)
	v, err := admin.CreateVolume(t.Context(), "bin", meta.Policy{Replicas: 1}, meta.VolumeWords{TrashSeconds: &day})
	if err != nil {
		t.Fatal(err)
	}
	a := s.dial("a")
	r, err := a.Do(t.Context(), v.ID, meta.OpID{}, newFile("f"), meta.LeaseExclusive)
	if err != nil {
		t.Fatal(err)
	}
	ino := r.Attr.Ino
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- admin.DeleteVolume(t.Context(), v.ID, false) }()
	const text = "written before"
	commit := func() error {
		_, err := a.Do(t.Context(), v.ID, meta.OpID{}, &meta.Write{Ino: ino, Inline: true, Data: []byte(text), Size: uint64(len(text)), Synced: true}, meta.LeaseNone)
		return err
	}
	eventually(t, "the lease is asked for, or the volume is gone", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		return unless(len(a.held) > 0 || len(done) > 0)
	})
	if err := commit(); err != nil {
		t.Errorf("DATA: what was written before the volume was deleted is refused: %v", err)
	}
	// The writer goes on once its lease is back: the writer writes more while the row is changed.
	a.mu.Lock()
	a.hold = false
	a.mu.Unlock()
	a.letGo()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if _, err := admin.UndeleteVolume(t.Context(), v.ID, "", ""); err != nil {
		t.Fatal(err)
	}
	r, err = s.dial("b").Do(t.Context(), v.ID, meta.OpID{}, &meta.Open{Ino: ino}, meta.LeaseShared)
	if err != nil || string(r.Data) != text {
		t.Fatalf("DATA: out of the trash the file has %v, %v", r, err)
	}
}

// TestForcedRollbackTakesBackFirst: a forced rollback recalls the writers' leases before the
// rollback lets any session in.
func TestForcedRollbackTakesBackFirst(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a, ino := s.writing()
	admin := s.dial("admin")
	a.mu.Lock()
	a.hold = false
	a.mu.Unlock()
	admin.snapshot(t, "one")
	a.do(t, &meta.Open{Ino: ino}, meta.LeaseExclusive)
	a.mu.Lock()
	a.hold = true
	a.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- admin.RollBack(t.Context(), 1, "one", true) }()
	eventually(t, "the lease is asked for, or the volume was rolled back", func() error {
		a.mu.Lock()
		defer a.mu.Unlock()
		return unless(len(a.held) > 0 || len(done) > 0)
	})
	if err := a.put(t, ino, "before"); err != nil {
		t.Errorf("DATA: a writer was not waited for: %v", err)
	}
	a.mu.Lock()
	asked := len(a.held) > 0
	a.mu.Unlock()
	if !asked {
		t.Error("DATA: the volume was rolled back, and its writer was not asked for what it holds")
	}
	a.letGo()
	if err := <-done; err != nil && !errors.Is(err, meta.Busy) {
		t.Fatal(err)
	}
	s.exact()
}

func wantKind(t *testing.T, err error, kind meta.Kind) {
	t.Helper()
	if meta.KindOf(err) != kind {
		t.Errorf("%v, not %v", err, kind)
	}
}
