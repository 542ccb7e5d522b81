package client

import (
	"context"
	"errors"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestWhatBecameOfIt: a caller that gave up a change learns the outcome, however late; a caller
// of a read goes, and over is called when the read's answer, with its grants, has come.
func TestWhatBecameOfIt(t *testing.T) {
	srv := newEvictingServer(t)
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	s, err := Dial(ctx, Config{Addrs: []string{srv.addr}, Name: "killed"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close(ctx)
	srv.mu.Lock()
	srv.held = make(chan func(), 10)
	srv.mu.Unlock()
	for _, op := range []meta.Op{&meta.SetAttr{Ino: 9, Mask: meta.SetMode}, &meta.GetAttr{Ino: 9}} {
		killed, kill := context.WithCancel(ctx)
		over := make(chan struct{})
		done := make(chan error, 1)
		go func() {
			_, err := s.DoThrough(killed, 1, AnyEpoch, meta.OpID{}, op, meta.LeaseShared, func() { close(over) })
			done <- err
		}()
		answer := <-srv.held
		kill()
		if op.Code().Mutates() {
			select {
			case err := <-done:
				t.Fatalf("%T: not known what became of it, and told %v", op, err)
			case <-time.After(killedWait + 200*time.Millisecond):
			}
			answer()
			if err := <-done; err != nil {
				t.Errorf("%T: it was done, and told %v", op, err)
			}
			<-over
			continue
		}
		if err := <-done; !errors.Is(err, meta.Interrupted) {
			t.Errorf("%T: %v", op, err)
		}
		select {
		case <-over:
			t.Errorf("%T: it is over before its answer has come", op)
		default:
		}
		answer()
		select {
		case <-over:
		case <-ctx.Done():
			t.Fatalf("%T: answered, and not over", op)
		}
	}
	// A request that was never sent, and a refused request, are over at once.
	srv.hangUp(func() { srv.away = true })
	gone, kill := context.WithCancel(ctx)
	kill()
	n := 0
	for _, epoch := range []uint64{AnyEpoch, 77} {
		if _, err := s.DoThrough(gone, 2, epoch, meta.OpID{}, &meta.SetAttr{Ino: 9}, meta.LeaseShared, func() { n++ }); err == nil {
			t.Error("it went through")
		}
	}
	if n != 2 {
		t.Errorf("over was called %d times for 2 operations", n)
	}
}
