package load

import (
	"math"
	"os"
	"slices"
	"sync"
	"time"
)

// Kind is a kind of call to the kernel.
type Kind int

// Kinds of calls that a Meter counts separately.
const (
	Write Kind = iota // and close
	Sync
	Read
	Name // create, rename, remove, look up
	kindCount
)

func (k Kind) String() string { return [...]string{"write", "fsync", "read", "name"}[k] }

// Meter counts calls and stores their durations.
type Meter struct {
	// Observe, if not nil, is called after each call.
	Observe func(k Kind, bytes int, took time.Duration, err error)

	mu    sync.Mutex
	kinds [kindCount]measured
}

type measured struct {
	calls, failed, bytes int64
	worst                time.Duration
	buckets              [64]int64 // by quarter of a power of two, from 1 µs
}

// Figures has the counts and durations of one kind of call.
type Figures struct {
	Calls, Failed, Bytes int64
	Median, P99, Worst   time.Duration // of successful calls
}

// Time runs f, which moves a number of bytes, and counts the call.
func (m *Meter) Time(k Kind, bytes int, f func() error) error {
	began := time.Now()
	err := f()
	m.Count(k, bytes, time.Since(began), err)
	return err
}

// Count counts a call that the caller made and timed.
func (m *Meter) Count(k Kind, bytes int, d time.Duration, err error) {
	if m.Observe != nil {
		m.Observe(k, bytes, d, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	at := &m.kinds[k]
	at.calls++
	if err != nil && !os.IsNotExist(err) && !os.IsExist(err) { // these two are answers, not failures
		at.failed++
		return
	}
	at.bytes += int64(bytes)
	at.worst = max(at.worst, d)
	at.buckets[bucket(d)]++
}

func bucket(d time.Duration) int {
	us := max(float64(d)/float64(time.Microsecond), 1)
	return min(int(2*math.Log2(us)), len(measured{}.buckets)-1)
}

// upTo is the upper end of a bucket.
func upTo(b int) time.Duration {
	return time.Duration(math.Exp2(float64(b+1)/2) * float64(time.Microsecond))
}

// Figures returns the figures of a kind.
func (m *Meter) Figures(k Kind) Figures {
	m.mu.Lock()
	defer m.mu.Unlock()
	at := m.kinds[k]
	f := Figures{Calls: at.calls, Failed: at.failed, Bytes: at.bytes, Worst: at.worst}
	share := func(p float64) time.Duration {
		left := int64(math.Ceil(p * float64(at.calls-at.failed)))
		for b, n := range at.buckets {
			if left -= n; left <= 0 {
				return min(upTo(b), at.worst)
			}
		}
		return at.worst
	}
	f.Median, f.P99 = share(0.5), share(0.99)
	return f
}

// Kinds are all kinds, in order.
func Kinds() []Kind { return slices.Clone([]Kind{Write, Sync, Read, Name}) }

func (m *Meter) readFile(path string) ([]byte, error) {
	began := time.Now()
	b, err := os.ReadFile(path)
	m.Count(Read, len(b), time.Since(began), err)
	return b, err
}
