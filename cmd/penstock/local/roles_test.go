package local

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
)

// A server that finds etcd away while opening volumes tries again, and ends for lasting errors.
func TestWhenAvailable(t *testing.T) {
	t.Parallel()
	away := fmt.Errorf("volume v: %w", meta.E("find owner", meta.Unavailable, "volume 8", errors.New("connection reset")))
	corrupt := fmt.Errorf("volume w: %w", meta.E("open", meta.Corrupt, "volume 9", nil))
	fenced := fmt.Errorf("volume root: %w", meta.E("append to journal", meta.Fenced, "volume 1 entry 1", errors.New("ownership was lost")))
	for _, c := range []struct {
		name    string
		answers []error // the last answer comes again and again
		told    int
		want    error
	}{
		{"at once", []error{nil}, 0, nil},
		{"later", []error{away, errors.Join(away, away), nil}, 2, nil},
		{"stood still until another took it", []error{fenced, errors.Join(away, fenced), nil}, 2, nil},
		{"what does not pass", []error{away, corrupt}, 1, corrupt},
		{"what does not pass beside what does", []error{errors.Join(away, corrupt)}, 0, corrupt},
		{"and within one volume's", []error{fmt.Errorf("volume v: %w", errors.Join(errors.Unwrap(away), corrupt))}, 0, corrupt},
	} {
		calls, told := 0, 0
		err := whenAvailable(t.Context(), func(context.Context) error {
			calls++
			return c.answers[min(calls, len(c.answers))-1]
		}, func(error) { told++ })
		if told != c.told || (err != nil) != (c.want != nil) || !errors.Is(err, c.want) {
			t.Errorf("%s: told %d times, %v", c.name, told, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := whenAvailable(ctx, func(context.Context) error { return away }, func(error) { cancel() }); !errors.Is(err, meta.Unavailable) {
		t.Errorf("ended meanwhile: %v", err)
	}
}
