package local

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"time"

	"penstock.io/penstock/meta"
)

// A start and a stop wait for disks, etcd and other servers. Each wait has a bound and a name
// in the log. SIGTERM ends the context of a start, and so its waits.

const (
	// startBound bounds each wait of a start. A start with much data reads much.
	startBound = 10 * time.Minute
	// failedStart bounds the stop of the parts that a failed start had begun.
	failedStart = time.Minute
	// waitWord is the interval of log lines about the same wait.
	waitWord = 10 * time.Second
	// waitGrace is how long forStep waits for a step after the step's context ended, so that
	// the step can return a precise error. A step blocked on a disk may not notice its
	// context.
	waitGrace = 3 * time.Second
	// closeGrace is the grace of a stop, longer than waitGrace: a step given up has at least
	// begun.
	closeGrace = 10 * time.Second
)

// waits holds the bound, the interval of log lines and the grace of a wait.
type waits struct {
	log                *slog.Logger
	bound, word, grace time.Duration
}

func waitsOf(log *slog.Logger, bound time.Duration) waits {
	return waits{log: log, bound: bound, word: waitWord, grace: waitGrace}
}

// closing returns the waits for a step that stops a part.
func closing(log *slog.Logger) waits {
	w := waitsOf(log, startBound)
	w.grace = closeGrace
	return w
}

// forStep runs a step and waits until the step returns, ctx ends or the bound is over. After
// ctx or the bound, forStep waits for the grace and gives the step up. The given-up step runs
// until the process ends: the caller must use nothing that the step uses. Errors: the step's
// error, Interrupted (ctx ended), Unavailable (the bound).
func (w waits) forStep(ctx context.Context, step, object string, do func(context.Context) error) error {
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	began := time.Now()
	run, cancel := context.WithTimeout(ctx, w.bound)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- do(run) }()
	word := time.NewTicker(w.word)
	defer word.Stop()
	ended := run.Done()
	var over <-chan time.Time
	for {
		select {
		case err := <-done:
			return err
		case <-word.C:
			w.log.Warn("still waiting for a step: the object is slow or does not answer", "for", step, "object", object, "since", time.Since(began).Round(time.Second))
		case <-ended:
			ended, over = nil, time.After(w.grace)
		case <-over:
			w.log.Error("a step is given up; its goroutines are below", "for", step, "object", object, "goroutines", stacks())
			kind, why := meta.Unavailable, "it did not end within "+w.bound.String()
			if ctx.Err() != nil {
				kind, why = meta.Interrupted, fmt.Sprintf("it did not end within %v, and is waited for no more", time.Since(began).Round(time.Second))
			}
			return meta.E(step, kind, object, fmt.Errorf("%s: see whether its disk, or the server that it needs, answers", why))
		}
	}
}

// maxStacks bounds the stacks in the log, in bytes.
const maxStacks = 1 << 20

// stacks returns the stacks of all goroutines of the process, so that the log shows where a
// step that was given up waits. The stacks beyond maxStacks are left out.
func stacks() string {
	b := make([]byte, maxStacks)
	return string(b[:runtime.Stack(b, true)])
}

// stopping returns a context for stopping the parts that a failed start had begun.
func stopping(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), failedStart)
}
