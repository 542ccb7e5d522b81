package local

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"penstock.io/penstock/meta"
)

// A start and a stop wait for what this process does not have in its hands: disks, etcd,
// other servers. Each of these waits has an end, a name in the log, and ends on SIGTERM,
// which ends the context of a start.

const (
	// startBound bounds each wait of a start. Opening reads much where much is stored.
	startBound = 10 * time.Minute
	// failedStart bounds the stop of what a start that failed had begun.
	failedStart = time.Minute
	// waitWord is the time between two words about the same wait.
	waitWord = 10 * time.Second
	// waitGrace is for how long a step may go on whose context ended, to say by itself why
	// it did not get further. A step that waits for a disk may not hear of its context.
	waitGrace = 3 * time.Second
	// closeGrace is that of a stop: what it does not wait for was asked for all the same.
	closeGrace = 10 * time.Second
)

// waits says how long and how loudly something is waited for.
type waits struct {
	log                *slog.Logger
	bound, word, grace time.Duration
}

func waitsOf(log *slog.Logger, bound time.Duration) waits {
	return waits{log: log, bound: bound, word: waitWord, grace: waitGrace}
}

// closing is waitsOf for a step that stops something.
func closing(log *slog.Logger) waits {
	w := waitsOf(log, startBound)
	w.grace = closeGrace
	return w
}

// forStep runs a step and waits for it until ctx ends or the bound is over. A step that is
// given up goes on by itself until the process ends: the caller must use nothing that the
// step uses. Errors: those of the step, Interrupted (ctx ended), Unavailable (the bound).
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
			w.log.Warn("still waiting: it is slow or does not answer", "for", step, "object", object, "since", time.Since(began).Round(time.Second))
		case <-ended:
			ended, over = nil, time.After(w.grace)
		case <-over:
			kind, why := meta.Unavailable, "it did not end within "+w.bound.String()
			if ctx.Err() != nil {
				kind, why = meta.Interrupted, fmt.Sprintf("it did not end within %v, and is waited for no more", time.Since(began).Round(time.Second))
			}
			return meta.E(step, kind, object, fmt.Errorf("%s: see whether its disk, or the server that it needs, answers", why))
		}
	}
}

// stopping gives a context in which what a failed start had begun is stopped.
func stopping(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), failedStart)
}
