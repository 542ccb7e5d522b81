package client

import (
	"context"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// TestAnswersAreWaitedForSoLong: a living server that does not answer an administrative request,
// such as a server that can't finish its start, delays a caller no longer than the caller's
// bound, and the error names the server. Requests that take long by their nature wait as long as
// the caller wants, and so do all requests of callers without a bound.
func TestAnswersAreWaitedForSoLong(t *testing.T) {
	srv := newEvictingServer(t)
	for _, c := range []struct {
		name string
		wait time.Duration
		a    wire.Admin
		ends bool
	}{
		{"show", 100 * time.Millisecond, wire.Admin{Op: wire.AdminVolumeByName, Name: "v"}, true},
		{"snapshots", 100 * time.Millisecond, wire.Admin{Op: wire.AdminViews, Volume: 1}, true},
		{"a hand-over", 100 * time.Millisecond, wire.Admin{Op: wire.AdminHandOver, Volume: 1}, false},
		{"a mount", 0, wire.Admin{Op: wire.AdminVolumeByName, Name: "v"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
			defer cancel()
			s, err := Dial(ctx, Config{Addrs: []string{srv.addr}, Name: c.name, AnswerWait: c.wait})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Leave()
			for _, ask := range []func(context.Context) error{
				func(ctx context.Context) error { _, err := s.Admin(ctx, c.a); return err },
				func(ctx context.Context) error { _, err := s.AdminAt(ctx, srv.addr, c.a); return err },
			} {
				if c.ends {
					if err := ask(ctx); meta.KindOf(err) != meta.Unavailable || !strings.Contains(err.Error(), srv.addr) {
						t.Errorf("told %v", err)
					}
					continue
				}
				until, stop := context.WithTimeout(ctx, time.Second)
				if err := ask(until); meta.KindOf(err) != meta.Interrupted {
					t.Errorf("told %v before the caller's time was over", err)
				}
				stop()
			}
		})
	}
}
