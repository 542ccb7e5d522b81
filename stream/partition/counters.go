package partition

import (
	"sync/atomic"
	"time"
)

// Counters count what the logs of a process do. The zero value is ready for use.
type Counters struct {
	AppendedRecords, AppendedBytes atomic.Uint64 // made durable
	ReadRecords, ReadBytes         atomic.Uint64 // read for consumers, in whole batches
	Append                         Durations     // from the arrival of a batch until the batch is durable
	Read                           Durations     // of reads for consumers
}

// DurationBounds are the upper bounds of the classes of Durations.
var DurationBounds = [...]time.Duration{
	time.Millisecond, 2 * time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second,
}

// Durations count durations by class.
type Durations struct {
	classes [len(DurationBounds) + 1]atomic.Uint64
	sum     atomic.Int64
}

// Add counts a duration.
func (d *Durations) Add(t time.Duration) {
	i := 0
	for i < len(DurationBounds) && t > DurationBounds[i] {
		i++
	}
	d.classes[i].Add(1)
	d.sum.Add(int64(t))
}

// Total returns how many durations were counted, their sum, and how many were at most as long as
// each of DurationBounds.
func (d *Durations) Total() (count uint64, sum time.Duration, upTo [len(DurationBounds)]uint64) {
	for i := range d.classes {
		count += d.classes[i].Load()
		if i < len(upTo) {
			upTo[i] = count
		}
	}
	return count, time.Duration(d.sum.Load()), upTo
}
