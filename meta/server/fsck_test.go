package server

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// Checks run while names come and go: the checks find nothing, and delay no operation.
func TestFsckUnderLoad(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	a.files(t, "there", 2000)
	ctx, cancel := context.WithCancel(t.Context())
	var worst atomic.Int64
	done := make(chan int)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			began := time.Now()
			name := fmt.Sprint("f", n)
			if _, err := a.Do(ctx, 1, meta.OpID{}, newFile(name), meta.LeaseNone); err == nil && n%2 == 0 {
				a.Do(ctx, 1, meta.OpID{}, &meta.Unlink{Parent: meta.RootIno, Name: name}, meta.LeaseNone)
			}
			worst.Store(max(worst.Load(), int64(time.Since(began))))
		}
		done <- n
	}()
	var checks time.Duration
	for range 20 {
		began := time.Now()
		r, err := s.srv.checker.Fsck(t.Context(), 1)
		if err != nil || r.Count > 0 {
			t.Fatalf("DATA: fsck: %v %+v", err, r)
		}
		checks += time.Since(began)
	}
	cancel()
	t.Logf("%d changes during 20 checks of %v each; the worst waited %v", <-done, checks/20, time.Duration(worst.Load()))
	if len(s.srv.checker.checks()) > 0 {
		t.Fatal("a check is still under way")
	}
}
