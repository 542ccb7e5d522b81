// Package task runs background work in rounds. A Task decides when a round is due, which
// wake-ups begin a round, and how long to wait after a failure, and reports the progress.
//
// The work of a task is a function, Options.Round, that does a bounded amount of work and
// returns when the next round is due. The task waits for a wake-up, an interval or the time
// named by the last round, whichever comes first, and ends with the context of Run. The
// goroutine that calls Run waits for the end.
//
// A Group waits for the end of all work of an owner, a server or a client.
package task

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Idle, as the result of a round, means: nothing is left to do; the next round is due at the
// next interval, or after a wake-up.
const Idle time.Duration = -1

// Options describe a task's work and its times.
type Options struct {
	// Name describes the work, in a few words.
	Name string
	// Round does the work once. again is how long from now another round is due though
	// nothing wakes the task: 0 is at once, Idle never.
	Round func(ctx context.Context) (again time.Duration, err error)

	// Begin, if not nil, is called when Run begins.
	Begin func()
	// First is the delay of the first round. A wake-up ends the delay.
	First time.Duration
	// Every, if not 0, is the interval at which rounds begin at the latest, counted from the
	// start of Run. Rounds that take longer follow each other without a pause; missed rounds
	// are not repeated.
	Every time.Duration
	// Gather is the delay of a round after a wake-up, in which further wake-ups can arrive.
	Gather time.Duration

	// Retry, if not 0, is the delay of the next round after a failed one, in place of the delay
	// that the round returned. The delay doubles up to RetryMost while rounds fail.
	Retry, RetryMost time.Duration
	// Failed is the message of the warning about a failed round. Log may be nil if Failed is
	// empty.
	Failed string
	Log    *slog.Logger
}

// Task is work that is done in rounds.
type Task struct {
	o    Options
	wake chan struct{} // capacity 1: a wake-up during a round causes one more round, wake-ups before it none

	mu     sync.Mutex
	status Status
}

// Status is how a task stands.
type Status struct {
	Name   string
	Rounds uint64    // rounds begun
	Failed uint64    // failed rounds among the rounds
	Busy   bool      // a round is under way,
	Since  time.Time // the start of the running round, else the end of the last one
	Due    time.Time // when the next round begins though nothing wakes the task; zero: not
	Woken  bool      // a wake-up waits for a round
	Err    error     // of the last round; nil: success
	// Done of Total units of work are done, as reported by the round; both 0: no report.
	Done, Total uint64
}

// New makes a task, which may be woken at once; nothing is done before Run.
func New(o Options) *Task {
	return &Task{o: o, wake: make(chan struct{}, 1), status: Status{Name: o.Name}}
}

// Wake makes a round begin soon: at once, or after the running one.
func (t *Task) Wake() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// Woken takes a pending wake-up, for a long round, which then starts over by itself.
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
	t.Woken() // the round serves all wake-ups so far
	return ctx.Err() == nil
}

// round does a round and logs a failure.
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
	named time.Time // time named by the last round; zero: none
}

// begin starts the interval.
func (c *clock) begin(now time.Time, first time.Duration) {
	c.tick, c.named = now.Add(c.every), now.Add(first)
}

// next returns when a round is due; set: a round is due at all.
func (c *clock) next() (due time.Time, set bool) {
	due, set = c.named, !c.named.IsZero()
	if c.every > 0 && (!set || c.tick.Before(due)) {
		due, set = c.tick, true
	}
	return due, set
}

// begun notes the beginning of a round, which serves all intervals that have passed.
func (c *clock) begun(now time.Time) {
	c.named = time.Time{}
	if c.every > 0 && !c.tick.After(now) {
		c.tick = c.tick.Add((now.Sub(c.tick)/c.every + 1) * c.every)
	}
}

// ended notes the result of a round.
func (c *clock) ended(now time.Time, again time.Duration) {
	if again >= 0 {
		c.named = now.Add(again)
	}
}
