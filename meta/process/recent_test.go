package process

import (
	"sync"
	"testing"
	"time"
)

// TestRecent: an expired lease never counts as valid. Recent advances with Uptime, also
// over a suspension, and does not read Uptime each time.
func TestRecent(t *testing.T) {
	var running, slept time.Duration
	asked := 0
	c := clocks{running: func() time.Duration { return running }, uptime: func() time.Duration { asked++; return running + slept }}
	running, slept = time.Second, time.Hour
	for range 10_000 {
		running += time.Microsecond
		if got := c.now(); got != running+slept {
			t.Fatalf("%v after the start it is %v, not %v", running, got, running+slept)
		}
	}
	if asked < 100 || asked > 101 {
		t.Errorf("in 10 ms the kernel was asked %d times", asked)
	}
	for range 100 {
		slept += time.Minute
		running += keepDifference // far less than the time that falling asleep takes
		if got := c.now(); got != running+slept {
			t.Fatalf("after a suspension it is %v, not %v", got, running+slept)
		}
	}
}

// TestRecentSideBySide: with many concurrent callers, each result is a time during the
// call, or is ahead by less than keepDifference: leases then end a little sooner.
func TestRecentSideBySide(t *testing.T) {
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 20_000 {
				before := Uptime()
				got := Recent()
				if after := Uptime(); got < before || got > after+keepDifference {
					t.Errorf("between %v and %v it was %v", before, after, got)
					return
				}
			}
		})
	}
	wg.Wait()
}

func BenchmarkRecent(b *testing.B) {
	for b.Loop() {
		Recent()
	}
}
