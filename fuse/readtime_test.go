package fuse

import (
	"testing"
	"time"
)

// Overlapping READs are waited for once, and an unanswered READ counts.
func TestReadClock(t *testing.T) {
	var c readClock
	at := func(ms int) time.Time { return time.Unix(1000, 0).Add(time.Duration(ms) * time.Millisecond) }
	c.begin(at(0))
	c.begin(at(10))
	c.end(at(0), at(20))
	c.end(at(10), at(50))
	c.begin(at(100))
	c.end(at(100), at(101))
	c.begin(at(200))
	got := c.read(at(260))
	if got.Count != 3 || got.Sum != 61*time.Millisecond || got.Waiting != 111*time.Millisecond {
		t.Errorf("%d READs of %v, waited for %v", got.Count, got.Sum, got.Waiting)
	}
	want := map[time.Duration]uint64{300 * time.Microsecond: 0, time.Millisecond: 1, 10 * time.Millisecond: 1, 30 * time.Millisecond: 2, 100 * time.Millisecond: 3, 10 * time.Second: 3}
	for i, bound := range ReadBounds {
		if n, ok := want[bound]; ok && got.Buckets[i] != n {
			t.Errorf("%d READs took at most %v, not %d", got.Buckets[i], bound, n)
		}
	}
}
