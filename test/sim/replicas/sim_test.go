package replicas

import (
	"flag"
	"os"
	"strings"
	"testing"

	"penstock.io/penstock/meta/replica"
)

var (
	seeds = flag.Int("seeds", 60, "number of seeds")
	first = flag.Uint64("seed", 1, "the first seed; with -v its events are shown if it is the only one")
	steps = flag.Int("steps", 20_000, "events of one seed, before it comes to rest")
)

// TestRandom runs worlds with every fault: a million events and more.
func TestRandom(t *testing.T) {
	var sum Result
	n, cfg := *seeds, control(t)
	if cfg.Off != (Off{}) {
		n = max(n, bound)
	}
	for i := range n {
		cfg.Seed, cfg.Steps = *first+uint64(i), *steps
		if *seeds == 1 && testing.Verbose() {
			cfg.Log = func(s string) { t.Log(s) }
		}
		r, err := Run(cfg)
		if err != nil {
			t.Fatalf("%v\nshow it: go test ./test/sim/replicas -run Random -v -seeds 1 -seed %d", err, cfg.Seed)
		}
		sum.Add(r)
	}
	t.Logf("%+v", sum)
	if *seeds < 20 {
		return
	}
	if sum.Steps < 1_000_000 && *seeds**steps >= 1_000_000 {
		t.Errorf("only %d steps", sum.Steps)
	}
	// A world in which nothing happens proves nothing.
	for what, n := range map[string]int{
		"seals": sum.Seals, "crashes": sum.Crashes, "kills": sum.Kills, "empty disks": sum.Wipes, "flipped bytes": sum.Rots,
		"cuts": sum.Cuts, "pauses": sum.Pauses, "takeovers": sum.Takeovers, "copies": sum.Pulls, "returns": sum.Joins, "moves": sum.Moves,
		"deletions": sum.Deletes, "reads": sum.Reads, "promises": sum.Promises, "repeated appends": sum.Repeats,
		"appends of fenced writers": sum.Fenced, "successors": sum.Successors, "renewals": sum.Renewals, "seals short of replicas": sum.Shortened,
	} {
		if n < *seeds/2 {
			t.Errorf("only %d %s in %d worlds", n, what, *seeds)
		}
	}
}

// planted lists the bugs that can be switched on. make controls names each bug, and runs
// TestRandom with it.
var planted = []struct {
	name   string
	off    Off
	lonely bool     // needs a certain misfortune
	says   []string // one of these messages is expected
}{
	{"fence", Off{Off: replica.Off{Fence: true}}, false, []string{"from a fenced writer"}},
	{"compare", Off{Off: replica.Off{Compare: true}}, false, []string{"other bytes", "that a sync returned for", "differ"}},
	{"offset", Off{Off: replica.Off{Offset: true}}, false, []string{"can't be sealed", "to be sealed at", "other bytes", "that a sync returned for"}},
	{"keeptail", Off{Off: replica.Off{KeepTail: true}}, false, []string{"can't be sealed", "not its content", "other bytes", "that a sync returned for"}},
	{"short", Off{Off: replica.Off{Short: true}}, true, []string{"a sync returned for", "nobody has on its disk"}},
	{"tomb", Off{Off: replica.Off{Tomb: true}}, false, []string{"from a fenced writer"}},
	{"olddelete", Off{Off: replica.Off{OldDelete: true}}, false, []string{"which the journal counts on"}},
	{"freezesync", Off{Off: replica.Off{FreezeSync: true}}, false, []string{"nobody has on its disk", "has not its"}},
	{"ackall", Off{Off: replica.Off{AckAll: true}}, false, []string{"never had more than"}},
	{"acklate", Off{Off: replica.Off{AckLate: true}}, false, []string{"were acknowledged and a replica has"}},
	{"longest", Off{Off: replica.Off{Longest: true}}, false, []string{"were acknowledged and a replica has"}},
	{"bound", Off{Off: replica.Off{Bound: true}}, false, []string{"were acknowledged and a replica has", "a sync returned for"}},
	{"empty", Off{Off: replica.Off{Empty: true}}, true, []string{"a sync returned for", "were acknowledged and a replica has"}},
	{"tails", Off{Off: replica.Off{Tails: true}}, false, []string{"nobody has on its disk", "has not its"}},
	{"return", Off{Off: replica.Off{Return: true}}, false, []string{"has not its", "other bytes"}},
	{"markinplace", Off{MarkInPlace: true}, false, []string{"a sync returned for", "has not its"}},
	{"orphans", Off{Orphans: true}, false, []string{"which the journal counts on"}},
	{"members", Off{Members: true}, false, []string{"which the journal counts on"}},
	{"oldfences", Off{OldFences: true}, false, []string{"which the journal counts on", "has not its"}},
	{"cutfirst", Off{CutFirst: true}, false, []string{"before the journal says so"}},
	{"pull", Off{Pull: true}, false, []string{"not its content"}},
}

// bound is the number of seeds within which a planted bug must show.
const bound = 250

// control returns the switch that make controls sets.
func control(t *testing.T) (cfg Config) {
	c := os.Getenv("PENSTOCK_CONTROL")
	if c == "" {
		return cfg
	}
	for _, p := range planted {
		if c == "replica-"+p.name {
			return Config{Off: p.off, Lonely: p.lonely}
		}
	}
	t.Fatalf("no switch %q here", c)
	return cfg
}

// TestControls: with each bug planted, a check fails within a bounded number of seeds,
// with an expected message.
func TestControls(t *testing.T) {
	for _, c := range planted {
		t.Run(c.name, func(t *testing.T) {
			for seed := uint64(1); seed <= bound; seed++ {
				_, err := Run(Config{Seed: seed, Off: c.off, Lonely: c.lonely})
				if err == nil {
					continue
				}
				for _, s := range c.says {
					if strings.Contains(err.Error(), s) {
						t.Logf("red, as it must be: %v", err)
						return
					}
				}
				t.Fatalf("red, but for another reason: %v", err)
			}
			t.Fatalf("%d seeds, and nothing fails", bound)
		})
	}
}

// TestLonely: the special worlds for some planted bugs have no failures without the bug.
func TestLonely(t *testing.T) {
	for i := range *seeds / 4 {
		if _, err := Run(Config{Seed: *first + uint64(i), Lonely: true}); err != nil {
			t.Fatal(err)
		}
	}
}

// The same seed gives the same run, another seed another.
func TestSameSeedSameRun(t *testing.T) {
	hashes := map[uint64]bool{}
	for seed := uint64(1); seed <= 4; seed++ {
		a, err := Run(Config{Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		b, err := Run(Config{Seed: seed})
		if err != nil {
			t.Fatal(err)
		}
		if a != b {
			t.Fatalf("seed %d: first %+v, then %+v", seed, a, b)
		}
		hashes[a.Hash] = true
	}
	if len(hashes) != 4 {
		t.Fatal("different seeds give one run")
	}
}
