package server

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

func (p *peer) try(t *testing.T, op meta.Op) error {
	t.Helper()
	_, err := p.Do(t.Context(), 1, meta.OpID{}, op, meta.LeaseNone)
	return err
}

func newFile(name string) *meta.Create {
	return &meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644, Excl: true}
}

// eventually tries until the call works, for a few seconds.
func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// A journal without space: changes are refused with NoSpace, reads go on, what
// was answered before is not lost, and all goes on when space is back.
func TestJournalWithoutSpace(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	before := a.create(t, "before").Attr.Ino
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	s.cluster.log.SetFull(true)
	early := a.create(t, "early").Attr.Ino // answered before anybody knows
	n := 0
	eventually(t, "a change is refused", func() error {
		n++
		if err := a.try(t, newFile(fmt.Sprint("late", n))); !errors.Is(err, meta.NoSpace) {
			return errors.Join(errors.New("not refused"), err)
		}
		return nil
	})
	if err := a.Sync(t.Context(), 1); !errors.Is(err, meta.NoSpace) {
		t.Fatalf("a sync of what is not in the journal says %v", err)
	}
	for name, ino := range map[string]meta.Ino{"before": before, "early": early} {
		if r := a.do(t, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseShared); r.Attr.Ino != ino {
			t.Fatalf("%s is inode %d, was %d", name, r.Attr.Ino, ino)
		}
	}
	s.cluster.log.SetFull(false)
	eventually(t, "changes again", func() error { return a.try(t, newFile("after")) })
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	s.crash()
	s.start()
	for _, name := range []string{"before", "early", "after"} {
		a.do(t, &meta.Lookup{Parent: meta.RootIno, Name: name}, meta.LeaseShared)
	}
	if a.expired != 0 {
		t.Fatal("the session expired")
	}
}

// On a nearly full metadata disk, changes that free space still work, then no change works;
// answered changes reach the journal all the time.
func TestMetadataDiskNearlyFull(t *testing.T) {
	t.Parallel()
	var free atomic.Uint64
	free.Store(1 << 30)
	s := newSite(t)
	s.crash()
	s.adjust = func(c *Config) { c.Room = func() (uint64, uint64, error) { return free.Load(), 1 << 40, nil } }
	s.start()
	a := s.dial("a")
	a.create(t, "x")

	n := 0
	refused := func(op func() meta.Op) func() error {
		return func() error {
			n++
			if err := a.try(t, op()); !errors.Is(err, meta.NoSpace) {
				return errors.Join(errors.New("not refused"), err)
			}
			return nil
		}
	}
	free.Store(roomSoft - 1)
	eventually(t, "a create is refused", refused(func() meta.Op { return newFile(fmt.Sprint("late", n)) }))
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatalf("what was answered before can't be made durable: %v", err)
	}
	if err := a.try(t, &meta.Unlink{Parent: meta.RootIno, Name: "x"}); err != nil {
		t.Fatalf("an unlink, which frees something: %v", err)
	}
	free.Store(roomSoft/4 - 1)
	eventually(t, "what frees something is refused, too", refused(func() meta.Op { return &meta.RemoveXattr{Ino: meta.RootIno, Name: "user.x"} }))
	if err := a.Sync(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	free.Store(1 << 30)
	eventually(t, "changes again", func() error { return a.try(t, newFile("after")) })
}
