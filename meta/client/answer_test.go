package client

import (
	"context"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// A server that lives and answers no administrative request, as one that is starting and
// can't go on, is not waited for without end by who said how long: the error names it. What
// takes long by its nature is waited for as long as the caller wants, and so is everything
// by who said nothing.
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
