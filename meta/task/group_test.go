package task

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestGroupGrowsWhileItIsWaitedFor adds work at the moment when the last work ends. A
// sync.WaitGroup panics here.
func TestGroupGrowsWhileItIsWaitedFor(t *testing.T) {
	for range 200 {
		var g Group
		g.Hold()
		waited := make(chan struct{})
		go func() {
			g.Wait()
			close(waited)
		}()
		time.Sleep(100 * time.Microsecond) // mostly enough for the goroutine to wait
		g.Release()
		g.Hold()
		time.Sleep(100 * time.Microsecond)
		g.Release()
		<-waited
		if !g.Empty() {
			t.Fatal("the group is not empty after its last release")
		}
	}
}

// TestGroupOfMany begins and awaits work in many goroutines, for the race detector.
func TestGroupOfMany(t *testing.T) {
	var g Group
	var running atomic.Int64
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 1_000 {
				running.Add(1)
				g.Go(func() { running.Add(-1) })
				g.Wait()
			}
		})
	}
	all.Wait()
	g.Wait()
	if n := running.Load(); n != 0 || !g.Empty() {
		t.Errorf("the group is empty: %v, and %d functions run", g.Empty(), n)
	}
}

func TestGroupWaitsForHolds(t *testing.T) {
	var g Group
	g.Hold()
	waited := make(chan struct{})
	go func() {
		g.Wait()
		close(waited)
	}()
	g.Hold()
	g.Release()
	select {
	case <-waited:
		t.Fatal("Wait returned while the group was held")
	case <-time.After(10 * time.Millisecond):
	}
	g.Release()
	<-waited
	defer func() {
		if recover() == nil {
			t.Error("a release without a hold did not panic")
		}
	}()
	g.Release()
}
