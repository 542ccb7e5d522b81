package server

import (
	"os"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/process"
)

// TestClocks: the time that a chunk server uses, by the reports of the metadata servers.
func TestClocks(t *testing.T) {
	const (
		up   = time.Hour // since boot
		noon = meta.Time(12 * time.Hour)
	)
	type told struct {
		server string
		ahead  time.Duration // difference of the server's clock from noon
		took   time.Duration // from the question to the answer
		ago    time.Duration // the answer
	}
	for _, c := range []struct {
		name  string
		told  []told
		alone bool
		want  time.Duration // less noon
	}{
		{"nobody was heard: this machine's clock", nil, false, -3 * time.Minute},
		{"one", []told{{"a", 0, 0, 0}}, false, 0},
		{"one, a while ago", []told{{"a", 0, 0, 40 * time.Second}}, false, 0},
		{"one, for long not: it is all there is", []told{{"a", 0, 0, 30 * time.Minute}}, false, 0},
		{"the answer took a while: as late as it may be", []told{{"a", 0, time.Second, 0}}, false, time.Second},
		{"the answer took long", []told{{"a", 30 * time.Second, 30 * time.Second, 0}}, false, 32 * time.Second},
		{"a quick answer and a slow one", []told{{"a", 0, time.Millisecond, 2 * time.Second}, {"a", 0, 5 * time.Second, 0}}, false, time.Millisecond},
		{"a slow answer and a quick one", []told{{"a", 0, 5 * time.Second, 2 * time.Second}, {"a", 0, time.Millisecond, 0}}, false, time.Millisecond},
		{"the slowest counts", []told{{"a", time.Minute, 0, 0}, {"b", -time.Minute, 0, 0}, {"c", 0, 0, 0}}, false, -time.Minute},
		{"but for one that is too far away", []told{{"a", 0, 0, 0}, {"b", -20 * time.Minute, 0, 0}}, false, -meta.ClockSkew},
		{"one that went counts no more", []told{{"b", -4 * time.Minute, 0, 2 * time.Minute}, {"a", 0, 0, 0}}, false, 0},
		{"a clock that was set back", []told{{"a", 4 * time.Minute, time.Millisecond, 2 * time.Second}, {"a", 0, time.Millisecond, 0}}, false, time.Millisecond},
		{"a clock that was set forward", []told{{"a", -4 * time.Minute, time.Millisecond, 2 * time.Second}, {"a", 0, time.Millisecond, 0}}, false, time.Millisecond},
		{"an answer to a question of the future is none", []told{{"a", time.Minute, -time.Second, 0}}, false, -3 * time.Minute},
		{"switched off", []told{{"a", 0, 0, 0}}, true, -3 * time.Minute},
	} {
		k := clocks{own: func() time.Time { return time.Unix(0, int64(noon)).Add(-3 * time.Minute) }, alone: c.alone}
		for _, x := range c.told {
			at := up - x.ago
			k.heardAt(x.server, at-x.took, at, noon-meta.Time(x.ago)+meta.Time(x.ahead))
		}
		if got := time.Duration(k.nowAt(up) - noon); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// TestCapabilitiesBySkewedClocks: a chunk server whose clock is minutes off accepts
// exactly the capabilities that are valid by the metadata servers' clocks.
func TestCapabilitiesBySkewedClocks(t *testing.T) {
	for _, off := range []time.Duration{-meta.ClockSkew, -time.Minute, 0, time.Minute, meta.ClockSkew} {
		s := New(Config{ID: 1, ScrubPeriod: -1, Clock: func() time.Time { return time.Now().Add(off) },
			UnsafeOwnClock: os.Getenv("PENSTOCK_CONTROL") == "chunk-ownclock"})
		s.SetKeys([]meta.CapKey{key})
		s.HeardClock("m1", process.Uptime(), meta.Time(time.Now().UnixNano()))
		sign := func(life time.Duration) []byte {
			return capability.Sign(key, capability.Claims{Volume: 1, Chunk: id, Rights: capability.Read, Expiry: meta.Time(time.Now().Add(life).UnixNano())})
		}
		if _, err := s.claims(sign(45 * time.Second)); err != nil {
			t.Errorf("a clock that is %v ahead: a fresh capability: %v", off, err)
		}
		if _, err := s.claims(sign(-time.Second)); meta.KindOf(err) != meta.BadCapability {
			t.Errorf("a clock that is %v ahead: an expired capability: %v", off, err)
		}
		s.Close()
	}
}
