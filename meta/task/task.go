// Package task owns background work that is done round after round by one goroutine:
// when a round is due, what wakes it, how long it waits after a failure, and what can
// be told of it meanwhile.
//
// A task's work is a function, Options.Round, that does a bounded amount and says when
// there is more to do. The task does the rest: it waits for a wake-up, an interval or
// the time that the last round named, whichever comes first, and ends with the context
// of Run. Whoever starts Run waits for it.
package task

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Idle, as the answer of a round, says that nothing is left to do: the next round is
// due at the next interval, or when the task is woken.
const Idle time.Duration = -1

// Options say what a task does and when.
type Options struct {
	// Name says what the work is, in a few words.
	Name string
	// Round does the work once. again is how long from now another round is due though
	// nothing wakes the task: 0 is at once, Idle never.
	Round func(ctx context.Context) (again time.Duration, err error)

	// Begin, if not nil, is called when Run begins.
	Begin func()
	// First is how long the first round waits. A wake-up does not wait for it.
	First time.Duration
	// Every, if not 0, has a round begin at least so often, counted from when Run
	// began. Rounds that take longer follow each other without a pause, and make up
	// for none that they missed.
	Every time.Duration
	// Gather is how long a round that was woken waits, so that what belongs together
	// comes together.
	Gather time.Duration

	// Retry, if not 0, is when a round that failed is done again, whatever it answered.
	// It doubles up to RetryMost while rounds go on failing.
	Retry, RetryMost time.Duration
	// Failed is what the log says of a round that failed, as a warning. Log may be nil
	// if it is empty.
	Failed string
	Log    *slog.Logger
}

// Task is work that is done round after round.
type Task struct {
	o    Options
	wake chan struct{} // capacity 1: a wake-up during a round is good for one more, one before it for none

	mu     sync.Mutex
	status Status
}

// Status is how a task stands.
type Status struct {
	Name   string
	Rounds uint64    // that began
	Failed uint64    // of these
	Busy   bool      // a round is under way,
	Since  time.Time // which began then; else: when the last one ended
	Due    time.Time // when the next round begins though nothing wakes the task; zero: not
	Woken  bool      // a wake-up waits for a round
	Err    error     // of the last round; nil: it did not fail
	// Done of Total units of work are done, as the round tells; both 0: it tells nothing.
	Done, Total uint64
}

// New makes a task, which may be woken at once; nothing is done before Run.
func New(o Options) *Task {
	return &Task{o: o, wake: make(chan struct{}, 1), status: Status{Name: o.Name}}
}

// Wake has a round begin soon: at once, or when the one under way is over.
func (t *Task) Wake() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// Woken takes a wake-up, if there is one, for a round that goes on for long and begins
// anew by itself then.
func (t *Task) Woken() bool {
	select {
	case <-t.wake:
		return true
	default:
		return false
	}
}

// Progress tells how far the work is.
func (t *Task) Progress(done, total uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.status.Done, t.status.Total = done, total
}

// Status tells how the task stands.
func (t *Task) Status() Status {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.status
	s.Woken = len(t.wake) > 0
	return s
}

// Run does rounds until ctx ends, and returns when the last one has.
func (t *Task) Run(ctx context.Context) {
	if t.o.Begin != nil {
		t.o.Begin()
	}
	c := clock{every: t.o.Every}
	c.begin(time.Now(), t.o.First)
	pause := t.o.Retry
	for t.wait(ctx, &c) {
		again, err := t.round(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			pause = t.o.Retry
		} else if t.o.Retry > 0 {
			again = pause
			pause = min(2*pause, max(t.o.Retry, t.o.RetryMost))
		}
		c.ended(time.Now(), again)
	}
}

// wait waits until a round is to begin; false: the context ended.
func (t *Task) wait(ctx context.Context, c *clock) bool {
	due, set := c.next()
	t.mu.Lock()
	if t.status.Due = (time.Time{}); set {
		t.status.Due = due
	}
	t.mu.Unlock()
	if wait := time.Until(due); !set || wait > 0 {
		var timer <-chan time.Time
		if set {
			x := time.NewTimer(wait)
			defer x.Stop()
			timer = x.C
		}
		select {
		case <-timer:
		case <-t.wake:
			if t.o.Gather > 0 {
				gather := time.NewTimer(t.o.Gather)
				defer gather.Stop()
				select {
				case <-gather.C:
				case <-ctx.Done():
				}
			}
		case <-ctx.Done():
		}
	}
	c.begun(time.Now())
	t.Woken() // the round that begins now is for all who woke it so far
	return ctx.Err() == nil
}

// round does one round and tells the log when it failed.
func (t *Task) round(ctx context.Context) (time.Duration, error) {
	t.mu.Lock()
	t.status.Rounds++
	t.status.Busy, t.status.Since = true, time.Now()
	t.status.Done, t.status.Total = 0, 0
	t.mu.Unlock()
	again, err := t.o.Round(ctx)
	t.mu.Lock()
	t.status.Busy, t.status.Since, t.status.Err = false, time.Now(), err
	if err != nil {
		t.status.Failed++
	}
	t.mu.Unlock()
	if err != nil && t.o.Failed != "" && ctx.Err() == nil {
		t.o.Log.Warn(t.o.Failed, "error", err)
	}
	return again, err
}

// clock says when a round is due.
type clock struct {
	every time.Duration
	tick  time.Time // when the interval has a round begin; only with every
	named time.Time // when the last round named; zero: it named none
}

// begin starts the interval.
func (c *clock) begin(now time.Time, first time.Duration) {
	c.tick, c.named = now.Add(c.every), now.Add(first)
}

// next is when a round is due; set: it is at all.
func (c *clock) next() (due time.Time, set bool) {
	due, set = c.named, !c.named.IsZero()
	if c.every > 0 && (!set || c.tick.Before(due)) {
		due, set = c.tick, true
	}
	return due, set
}

// begun notes that a round begins. Intervals that passed are over: of several that
// passed during one round, the round that begins now is for all.
func (c *clock) begun(now time.Time) {
	c.named = time.Time{}
	if c.every > 0 && !c.tick.After(now) {
		c.tick = c.tick.Add((now.Sub(c.tick)/c.every + 1) * c.every)
	}
}

// ended notes what the round answered.
func (c *clock) ended(now time.Time, again time.Duration) {
	if again >= 0 {
		c.named = now.Add(again)
	}
}
