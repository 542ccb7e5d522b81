// Package slow measures how much slower than a quiet machine the test's machine is, for bounds
// that are promised in seconds: ten seconds of a client's wait are a promise of a machine with
// idle processors, and mean nothing on a machine that shares its processors with twenty other
// programs, or its disk with a build. On the first machine, the bound holds unchanged.
package slow

import (
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// steps of the work take quiet on a processor of the bounds' machines, without other work.
	// The work is long enough for the kernel to give the processor to others in between, as the
	// tested programs experience.
	steps = 12_000_000
	quiet = 20 * time.Millisecond
	// most is the largest Factor: a standstill of seconds in a short time would
	// come to a bound that nothing exceeds.
	most = 10
	// quietSync is how long a quiet disk takes at most to have a few bytes for good.
	quietSync = 20 * time.Millisecond
	// pause between two pieces of work: a tenth of a processor is used.
	pause = 9 * quiet
)

// Meter measures until Close.
type Meter struct {
	sync func() error // makes something durable; nil if no disk is involved
	file *os.File     // that the step is done with
	stop chan struct{}
	wg   sync.WaitGroup

	mu   sync.Mutex
	took []time.Duration // by a piece of work each
}

// Start begins to measure; somebody must call Close.
func Start() *Meter {
	m := &Meter{stop: make(chan struct{})}
	m.wg.Go(m.run)
	return m
}

// StartOn measures the disk of a folder, too, on which the tested program keeps its data.
func StartOn(dir string) (*Meter, error) {
	f, err := os.CreateTemp(dir, "slow-")
	if err != nil {
		return nil, err
	}
	m := &Meter{stop: make(chan struct{}), file: f, sync: func() error {
		if _, err := f.WriteAt([]byte("some bytes"), 0); err != nil {
			return err
		}
		return f.Sync()
	}}
	m.wg.Go(m.run)
	return m, nil
}

func (m *Meter) run() {
	var late time.Duration // by so much a pause was longer than asked for
	for {
		d := late + work() + m.disk()
		m.mu.Lock()
		m.took = append(m.took, d)
		m.mu.Unlock()
		began := time.Now()
		select {
		case <-time.After(pause):
		case <-m.stop:
			return
		}
		// A goroutine that stands still between two pieces, or gets no processor, is late for the
		// next piece.
		late = max(0, time.Since(began)-pause)
	}
}

var sink atomic.Uint64 // so that the compiler keeps the work

// work is a chain of steps, each of which needs the previous step.
func work() time.Duration {
	began := time.Now()
	x := uint64(began.UnixNano()) | 1
	for range steps {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
	}
	sink.Store(x)
	return time.Since(began)
}

// disk is how much longer a sync takes than on a quiet disk.
func (m *Meter) disk() time.Duration {
	if m.sync == nil {
		return 0
	}
	began := time.Now()
	if m.sync() != nil {
		return 0 // a failed disk gives no measure
	}
	return max(0, time.Since(began)-quietSync)
}

// Factor tells how many times as long as on a quiet machine work took since Start, or
// since the last call: the mean of the slowest quarter, at least 1 and at most
// 10. It waits for the piece that is under way.
func (m *Meter) Factor() float64 {
	m.mu.Lock()
	n := len(m.took)
	m.mu.Unlock()
	for {
		m.mu.Lock()
		if len(m.took) > n {
			took := m.took
			m.took = nil
			m.mu.Unlock()
			return factor(took)
		}
		m.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
}

func factor(took []time.Duration) float64 {
	slices.Sort(took)
	slowest := took[len(took)-(len(took)+3)/4:]
	var sum time.Duration
	for _, d := range slowest {
		sum += d
	}
	return min(most, max(1, float64(sum)/float64(len(slowest))/float64(quiet)))
}

// Close ends the measuring. Factor must not be called afterwards.
func (m *Meter) Close() {
	close(m.stop)
	m.wg.Wait()
	if m.file != nil {
		m.file.Close()
		os.Remove(m.file.Name())
	}
}

// Bound is what a bound that is promised of a quiet machine comes to where work takes
// so many times as long: of the bounds here about half is work, the rest is waiting
// for leases and other clocks, which are no slower.
func Bound(quiet time.Duration, factor float64) time.Duration {
	return quiet/2 + time.Duration(float64(quiet/2)*factor)
}
