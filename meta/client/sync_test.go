package client

import (
	"context"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// TestSyncOfAnOwnerBefore: a sync that was requested while the volume had no owner covers
// everything: entries of the previous owner have other numbers at the next owner.
func TestSyncOfAnOwnerBefore(t *testing.T) {
	srv := newEvictingServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	s, err := Dial(ctx, Config{Addrs: []string{srv.addr}, Name: "syncs"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(ctx)
	srv.mu.Lock()
	srv.seq = 5
	srv.mu.Unlock()
	if _, err := s.Do(ctx, 1, meta.OpID{}, &meta.Create{Parent: meta.RootIno, Name: "f", Mode: meta.TypeRegular}, meta.LeaseNone); err != nil {
		t.Fatal(err)
	}
	srv.hangUp(func() { srv.away = true })
	until := func(what string, is func() bool) {
		t.Helper()
		for {
			s.mu.Lock()
			ok := is()
			s.mu.Unlock()
			if ok {
				return
			}
			select {
			case <-ctx.Done():
				t.Fatalf("not after a minute: %s", what)
			case <-time.After(time.Millisecond):
			}
		}
	}
	until("the volume is down", func() bool { return s.volume(1).conn == nil })
	done := make(chan error, 1)
	go func() { done <- s.Sync(ctx, 1) }()
	until("the sync waits", func() bool {
		for _, r := range s.pending {
			if _, ok := r.msg.(*wire.Sync); ok {
				return true
			}
		}
		return false
	})
	srv.mu.Lock()
	srv.away, srv.seq = false, 7
	srv.mu.Unlock()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if seq := <-srv.syncs; seq != wire.SyncAll {
		t.Errorf("the next owner is asked for entry %d of the one before", seq)
	}
}
