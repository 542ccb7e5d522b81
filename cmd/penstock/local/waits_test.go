package local

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
)

// Each wait has an end, logs the awaited object, and ends with its context, also where the step
// ignores its context.
func TestWaits(t *testing.T) {
	t.Parallel()
	own := errors.New("the step's own")
	for _, c := range []struct {
		name  string
		stop  time.Duration // when the caller waits no more; 0: never
		do    func(ctx context.Context, hung <-chan struct{}) error
		want  meta.Kind
		after time.Duration
		words int
	}{
		{"a step that is done", 0, func(context.Context, <-chan struct{}) error { return nil }, 0, 0, 0},
		{"a step that is slow", 0, func(context.Context, <-chan struct{}) error { time.Sleep(35 * time.Second); return nil }, 0, 35 * time.Second, 3},
		{"a disk that does not answer", 0, func(_ context.Context, hung <-chan struct{}) error { <-hung; return nil }, meta.Unavailable, time.Minute + waitGrace, 6},
		{"a disk that does not answer, SIGTERM", 25 * time.Second, func(_ context.Context, hung <-chan struct{}) error { <-hung; return nil }, meta.Interrupted, 25*time.Second + waitGrace, 2},
		{"a step that hears of SIGTERM", 25 * time.Second, func(ctx context.Context, _ <-chan struct{}) error {
			<-ctx.Done()
			return meta.E("step", meta.Busy, "", own)
		}, meta.Busy, 25 * time.Second, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var said lockedBuffer
				w := waitsOf(slog.New(slog.NewTextHandler(&said, nil)), time.Minute)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if c.stop > 0 {
					time.AfterFunc(c.stop, cancel)
				}
				hung := make(chan struct{})
				defer close(hung) // the disk answers, after all
				began := time.Now()
				err := w.forStep(ctx, "open the disks", "/data", func(ctx context.Context) error { return c.do(ctx, hung) })
				if took := time.Since(began); took != c.after {
					t.Errorf("it took %v, want %v", took, c.after)
				}
				if c.want == 0 && err != nil || c.want != 0 && meta.KindOf(err) != c.want {
					t.Errorf("%v, want kind %v", err, c.want)
				}
				if c.want == meta.Unavailable || c.want == meta.Interrupted {
					if !strings.Contains(err.Error(), "open the disks /data") {
						t.Errorf("the error does not say what was waited for: %v", err)
					}
				}
				givenUp := strings.Count(said.String(), "a step is given up")
				if want := c.want == meta.Unavailable || c.want == meta.Interrupted; want != (givenUp == 1) || want && !strings.Contains(said.String(), "TestWaits") {
					t.Errorf("the log shows %d times where the step waits, want it shown: %v: %s", givenUp, want, said.String())
				}
				if n := strings.Count(said.String(), "still waiting"); n != c.words {
					t.Errorf("%d words about the wait, want %d: %s", n, c.words, said.String())
				}
			})
		})
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}
