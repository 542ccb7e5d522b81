package process

import (
	"sync"
	"testing"
	"time"
)

// A lease that is over is never taken for one that holds: Recent goes on with Uptime,
// also over a suspension, and is not asked for it each time.
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
		running += keepDifference // by far less than it takes to fall asleep
		if got := c.now(); got != running+slept {
			t.Fatalf("after a suspension it is %v, not %v", got, running+slept)
		}
	}
}

// However many ask at once, what they hear was true while they asked, or is ahead by less
// than the difference is believed: leases are then over a little sooner.
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
