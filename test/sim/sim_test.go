package sim

import (
	"flag"
	"os"
	"strings"
	"testing"
)

var (
	seeds = flag.Int("seeds", 40, "number of seeds")
	first = flag.Uint64("seed", 1, "the first seed; with -v its events are shown if it is the only one")
)

// bound is the number of worlds in which a check must notice that a mechanism is off.
const bound = 100

// TestRandom runs worlds with every fault.
func TestRandom(t *testing.T) {
	var sum Result
	off := control(t)
	worlds := *seeds
	if off != (Off{}) {
		worlds = max(worlds, bound)
	}
	for i := range worlds {
		cfg := Config{Seed: *first + uint64(i), Off: off}
		if *seeds == 1 && testing.Verbose() {
			cfg.Log = func(s string) { t.Log(s) }
		}
		r, err := Run(cfg)
		if err != nil {
			t.Fatalf("%v\nshow it: go test ./test/sim -run Random -v -seeds 1 -seed %d", err, cfg.Seed)
		}
		sum.add(r)
		t.Logf("seed %d: hash %016x", cfg.Seed, r.Hash)
	}
	t.Logf("%+v", sum)
	if *seeds < 20 {
		return
	}
	// A world in which nothing happens proves nothing.
	for what, n := range map[string]int{
		"takeovers": sum.Takeovers, "replays": sum.Replays, "crashes": sum.Crashes, "seals": sum.Seals, "checkpoints": sum.Checkpoints,
		"sessions expired": sum.Expired, "reads of bytes": sum.Reads, "writes": sum.Writes,
		"snapshots": sum.Snapshots, "files read in snapshots": sum.Shown, "rollbacks": sum.Rollbacks,
	} {
		if n < *seeds {
			t.Errorf("only %d %s in %d worlds", n, what, *seeds)
		}
	}
}

// control returns the switch that make controls sets.
func control(t *testing.T) (o Off) {
	switch c := os.Getenv("PENSTOCK_CONTROL"); c {
	case "":
	case "sim-nofence":
		o.Fence = true
	case "sim-noorder":
		o.ReplayOrder = true
	case "sim-noownerlease":
		o.OwnerLease = true
	case "sim-nowait":
		o.Wait = true
	case "sim-norecall":
		o.Recall = true
	default:
		t.Fatalf("no switch %q here", c)
	}
	return o
}

func (r *Result) add(x Result) {
	r.Events += x.Events
	r.Commits += x.Commits
	r.Takeovers += x.Takeovers
	r.Replays += x.Replays
	r.Crashes += x.Crashes
	r.Pauses += x.Pauses
	r.Breaks += x.Breaks
	r.Seals += x.Seals
	r.Operations += x.Operations
	r.Expired += x.Expired
	r.Checkpoints += x.Checkpoints
	r.Reads += x.Reads
	r.Writes += x.Writes
	r.Snapshots += x.Snapshots
	r.Shown += x.Shown
	r.Rollbacks += x.Rollbacks
}

// The same seed gives the same run, another seed another.
func TestSameSeedSameRun(t *testing.T) {
	hashes := map[uint64]bool{}
	for seed := uint64(1); seed <= 3; seed++ {
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
	if len(hashes) != 3 {
		t.Fatal("different seeds give one run")
	}
}

// TestControls are positive controls: with a mechanism off, its check must fail within a
// bounded number of seeds, with an expected message.
func TestControls(t *testing.T) {
	for name, c := range map[string]struct {
		off  Off
		says []string // one of these messages is expected
	}{
		"no fence":            {Off{Fence: true}, []string{"fenced writer", "fenced owner", "is another's", "follow", "store and the log differ"}},
		"no order of replays": {Off{ReplayOrder: true}, []string{"sent again it fails", "was answered with"}},
		"no wait for durable": {Off{Wait: true}, []string{"not in the journal", "sent again it fails", "had finished"}},
		"no recall":           {Off{Recall: true}, []string{"by its cache"}},
		"no owner's lease":    {Off{OwnerLease: true}, []string{"had finished", "another's", "sent again it fails"}},
		"no sync of chunks":   {Off{Sync: true}, []string{"can't be read", "seal", "bytes of", "which ends at", "than it told"}},
	} {
		t.Run(name, func(t *testing.T) {
			for seed := uint64(1); seed <= bound; seed++ {
				_, err := Run(Config{Seed: seed, Off: c.off})
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
