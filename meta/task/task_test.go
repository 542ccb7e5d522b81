package task

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// rounds runs a task in fake time and notes the beginnings of its rounds, counted from the
// beginning of Run. Everything runs in the same bubble of synctest.
type rounds struct {
	t     *Task
	begun time.Time
	mu    sync.Mutex
	at    []time.Duration
	take  time.Duration // a round takes so long
	next  func(n int) (time.Duration, error)
}

func start(t *testing.T, o Options, take time.Duration, next func(n int) (time.Duration, error)) *rounds {
	r := &rounds{begun: time.Now(), take: take, next: next}
	o.Round = func(ctx context.Context) (time.Duration, error) {
		r.mu.Lock()
		r.at = append(r.at, time.Since(r.begun))
		n, take := len(r.at), r.take
		r.mu.Unlock()
		select {
		case <-time.After(take):
		case <-ctx.Done():
		}
		return r.next(n)
	}
	r.t = New(o)
	ctx, cancel := context.WithCancel(t.Context())
	over := make(chan struct{})
	go func() { r.t.Run(ctx); close(over) }()
	t.Cleanup(func() { cancel(); <-over })
	return r
}

// until lets time pass until then, and gives the rounds so far.
func (r *rounds) until(d time.Duration) []time.Duration {
	time.Sleep(d - time.Since(r.begun))
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.at)
}

func idle(int) (time.Duration, error) { return Idle, nil }

func same(t *testing.T, got []time.Duration, want ...time.Duration) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("rounds began at %v, expected %v", got, want)
	}
}

const (
	ms  = time.Millisecond
	sec = time.Second
)

// bubble is a test in fake time.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func TestWhenRoundsBegin(t *testing.T) {
	bubble(t, "at once, then only when woken", func(t *testing.T) {
		r := start(t, Options{}, 0, idle)
		same(t, r.until(time.Hour), 0)
		r.t.Wake()
		same(t, r.until(2*time.Hour), 0, time.Hour)
	})
	bubble(t, "an interval, as a ticker ticks", func(t *testing.T) {
		r := start(t, Options{Every: 10 * sec}, 3*sec, idle)
		same(t, r.until(35*sec), 0, 10*sec, 20*sec, 30*sec)
	})
	bubble(t, "the first round waits for the interval", func(t *testing.T) {
		r := start(t, Options{First: 10 * sec, Every: 10 * sec}, 3*sec, idle)
		same(t, r.until(35*sec), 10*sec, 20*sec, 30*sec)
	})
	bubble(t, "a long round makes up for one interval, not for all", func(t *testing.T) {
		r := start(t, Options{Every: 10 * sec}, 35*sec, idle)
		same(t, r.until(36*sec), 0, 35*sec)
		r.mu.Lock()
		r.take = 0
		r.mu.Unlock()
		same(t, r.until(95*sec), 0, 35*sec, 70*sec, 80*sec, 90*sec)
	})
	bubble(t, "what the round names, counted from its end", func(t *testing.T) {
		r := start(t, Options{First: 2 * sec}, sec, func(int) (time.Duration, error) { return 2 * sec, nil })
		same(t, r.until(9*sec), 2*sec, 5*sec, 8*sec)
	})
	bubble(t, "at once as often as the round says", func(t *testing.T) {
		r := start(t, Options{Every: time.Hour}, sec, func(n int) (time.Duration, error) {
			if n < 4 {
				return 0, nil
			}
			return Idle, nil
		})
		same(t, r.until(time.Minute), 0, sec, 2*sec, 3*sec)
	})
	bubble(t, "a wake-up does not wait for what was named", func(t *testing.T) {
		r := start(t, Options{First: time.Hour}, 0, func(int) (time.Duration, error) { return time.Minute, nil })
		r.until(sec)
		r.t.Wake()
		same(t, r.until(62*sec), sec, 61*sec)
	})
	bubble(t, "a wake-up during a round is good for one more", func(t *testing.T) {
		r := start(t, Options{}, 10*sec, idle)
		r.until(2 * sec)
		r.t.Wake()
		r.until(4 * sec)
		r.t.Wake()
		same(t, r.until(time.Hour), 0, 10*sec)
	})
	bubble(t, "wake-ups are gathered", func(t *testing.T) {
		r := start(t, Options{Gather: 50 * ms}, 0, idle)
		r.until(sec)
		r.t.Wake()
		r.until(sec + 20*ms)
		r.t.Wake()
		same(t, r.until(sec+49*ms), 0)
		same(t, r.until(sec+50*ms), 0, sec+50*ms)
	})
	bubble(t, "the interval goes on beside wake-ups", func(t *testing.T) {
		r := start(t, Options{Every: 10 * sec}, 0, idle)
		r.until(9 * sec)
		r.t.Wake()
		same(t, r.until(25*sec), 0, 9*sec, 10*sec, 20*sec)
	})
}

// A failure is told once a round, and the pause grows until a round goes well.
func TestFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		bad := errors.New("no luck")
		r := start(t, Options{Name: "luck", Retry: sec, RetryMost: 3 * sec, Failed: "out of luck, it is tried again", Log: slog.New(slog.NewTextHandler(&out, nil))}, 0, func(n int) (time.Duration, error) {
			if n == 5 {
				return sec / 2, nil
			}
			if n == 7 {
				return Idle, nil
			}
			return Idle, bad
		})
		same(t, r.until(time.Hour), 0, sec, 3*sec, 6*sec, 9*sec, 9*sec+500*ms, 10*sec+500*ms)
		if n := strings.Count(out.String(), `msg="out of luck, it is tried again" error="no luck"`); n != 5 {
			t.Errorf("the log has %d failures of 5:\n%s", n, out.String())
		}
		if s := r.t.Status(); s.Name != "luck" || s.Rounds != 7 || s.Failed != 5 || s.Err != nil || s.Busy || !s.Due.IsZero() {
			t.Errorf("the status is %+v", s)
		}
	})
}

// Without a pause of its own for failures, the round's own pause holds.
func TestFailureNamesItsPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, Options{}, 0, func(n int) (time.Duration, error) {
			if n == 1 {
				return 7 * sec, errors.New("no luck")
			}
			return Idle, nil
		})
		r.until(sec)
		if s := r.t.Status(); s.Err == nil || !s.Due.Equal(r.begun.Add(7*sec)) {
			t.Errorf("the status is %+v", s)
		}
		same(t, r.until(time.Hour), 0, 7*sec)
	})
}

// The progress of a round is visible while the round runs, and gone with the next round.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := start(t, Options{First: sec}, 10*sec, idle)
		r.until(2 * sec)
		r.t.Progress(3, 9)
		if s := r.t.Status(); s.Done != 3 || s.Total != 9 || !s.Busy || !s.Since.Equal(r.begun.Add(sec)) {
			t.Errorf("during the round: %+v", s)
		}
		r.until(20 * sec)
		r.t.Wake()
		synctest.Wait()
		if s := r.t.Status(); s.Done != 0 || s.Total != 0 || !s.Busy || s.Rounds != 2 {
			t.Errorf("in the next round: %+v", s)
		}
	})
}

// A round that was told to stop reports no failure, and Run returns.
func TestStop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		task := New(Options{Failed: "failed", Log: slog.New(slog.NewTextHandler(&out, nil)), Round: func(ctx context.Context) (time.Duration, error) {
			<-ctx.Done()
			return 0, context.Cause(ctx)
		}})
		ctx, cancel := context.WithCancel(t.Context())
		over := make(chan struct{})
		go func() { task.Run(ctx); close(over) }()
		synctest.Wait()
		cancel()
		<-over
		if out.Len() > 0 {
			t.Errorf("it told:\n%s", out.String())
		}
	})
}

// TestNothingIsForgotten: in any sequence, after a wake-up a whole round begins, and with an
// interval each interval has a round.
func TestNothingIsForgotten(t *testing.T) {
	for range 200 {
		seed := rand.Uint64()
		synctest.Test(t, func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 1))
			every, gather, take := time.Duration(random.IntN(3))*sec, time.Duration(random.IntN(3))*100*ms, time.Duration(random.IntN(2500))*ms
			answers := rand.New(rand.NewPCG(seed, 2))
			r := start(t, Options{Every: every, Gather: gather}, take, func(int) (time.Duration, error) {
				if answers.IntN(2) == 0 {
					return Idle, nil
				}
				return time.Duration(1+answers.IntN(5000)) * ms, nil
			})
			now := time.Duration(0)
			for range 30 {
				now += time.Duration(1+random.IntN(4000)) * ms
				at := r.until(now)
				r.t.Wake()
				// The round under way has looked already; another round begins.
				now += 2*(take+gather) + ms
				if all := r.until(now); len(all) <= len(at) {
					t.Fatalf("seed %d: woken after %v: no round since; interval %v, a round takes %v", seed, now, every, take)
				}
			}
			if every > 0 {
				at := r.until(now)
				for i := 1; i < len(at); i++ {
					if d := at[i] - at[i-1]; d > max(every, take)+gather {
						t.Fatalf("seed %d: %v without a round; interval %v, a round takes %v", seed, d, every, take)
					}
				}
			}
		})
	}
}
