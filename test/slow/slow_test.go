package slow

import (
	"errors"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestFactor(t *testing.T) {
	for _, c := range []struct {
		took []time.Duration
		want float64
	}{
		{[]time.Duration{quiet / 2}, 1}, // a quicker machine has no shorter bounds
		{[]time.Duration{quiet}, 1},
		{[]time.Duration{3 * quiet}, 3},
		{[]time.Duration{6 * quiet, quiet, quiet, 2 * quiet}, 6},
		{[]time.Duration{6 * quiet, quiet, quiet, 2 * quiet, 4 * quiet}, 5},
		{[]time.Duration{250 * quiet, quiet, quiet, quiet, quiet, quiet, quiet, quiet}, most}, // of a standstill no bound is without end
	} {
		if got := factor(c.took); got != c.want {
			t.Errorf("%v: %v, want %v", c.took, got, c.want)
		}
	}
}

func TestBound(t *testing.T) {
	for factor, want := range map[float64]time.Duration{1: 10 * time.Second, 2: 15 * time.Second, 5: 30 * time.Second} {
		if got := Bound(10*time.Second, factor); got != want {
			t.Errorf("%v: %v, want %v", factor, got, want)
		}
	}
}

// A slow disk is noticed, and a failing disk does not count as slow.
func TestDiskIsSeen(t *testing.T) {
	m := &Meter{sync: func() error { time.Sleep(3 * quietSync); return nil }}
	if d := m.disk(); d < 2*quietSync {
		t.Errorf("a sync that takes %v is %v late", 3*quietSync, d)
	}
	m.sync = func() error { return errors.New("no room") }
	if d := m.disk(); d != 0 {
		t.Errorf("a sync that fails is %v late", d)
	}
	dir := t.TempDir()
	m, err := StartOn(dir)
	if err != nil {
		t.Fatal(err)
	}
	m.Factor()
	m.Close()
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v is left: %v", left, err)
	}
}

// Other users of the processors are noticed.
func TestLoadIsSeen(t *testing.T) {
	m := Start()
	defer m.Close()
	time.Sleep(5 * pause)
	before := m.Factor()
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 8 * runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for x := uint64(1); !stop.Load(); {
				x ^= x << 13
				x ^= x >> 7
				x ^= x << 17
				sink.Store(x)
			}
		})
	}
	defer wg.Wait()
	defer stop.Store(true)
	m.Factor() // of the half-quiet time
	time.Sleep(5 * pause)
	// Other programs may stop meanwhile, or begin: only the existence of a load is sure.
	if f := m.Factor(); f < 1.5 {
		t.Errorf("with eight others for each processor work takes %.1f times as long, %.1f before", f, before)
	} else {
		t.Logf("%.1f times as long as on a quiet machine, %.1f before", f, before)
	}
}
