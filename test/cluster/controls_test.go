package cluster

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/test/load"
)

// soakControls are mechanisms that are switched off one at a time, for which the soak must turn
// red within ten minutes. PENSTOCK_CONTROL switches the mechanisms of penstock; journal-nosync is
// a flag of etcd's.
var soakControls = []struct {
	name   string
	faults string // kinds; empty for all
}{
	{"chunk-nosync", ""},
	{"chunk-noverify", ""},
	{"chunk-nofence", ""},
	{"chunk-nocap", ""},
	{"journal-nosync", ""},
}

// TestSoakControls runs the soak without each mechanism.
func TestSoakControls(t *testing.T) {
	if !*controls {
		t.Log("only with -controls (make controls)")
		return
	}
	for _, control := range soakControls {
		t.Run(control.name, func(t *testing.T) {
			cfg := soakCluster
			if control.name == "journal-nosync" {
				cfg.EtcdArgs = []string{"--unsafe-no-fsync"}
			} else {
				cfg.Env = []string{"PENSTOCK_CONTROL=" + control.name}
			}
			c := start(t, cfg)
			s := soak(t, c)
			s.For = min(s.For, 5*time.Minute) // with the checks at the end, ten in all
			began := time.Now()
			err := s.Run(t.Context())
			if err == nil {
				t.Fatalf("without %s the soak stays green for %v:\n%s", control.name, s.For, s.Report())
			}
			// Red is not enough: the error must be the error that the mechanism prevents.
			var v *load.Violation
			if !errors.As(err, &v) && !strings.Contains(err.Error(), "INTRUDER") && !strings.Contains(err.Error(), "at the end") &&
				// A member that lost synced entries or pages of its database does not come back.
				!strings.Contains(err.Error(), "healing blackout of all etcd") && !strings.Contains(err.Error(), "raft log corrupted, truncated, or lost") &&
				!strings.Contains(err.Error(), "freepages: failed to get all reachable pages") &&
				!(strings.Contains(err.Error(), "ended by itself") && !strings.Contains(err.Error(), "panic:")) {
				t.Fatalf("without %s the soak is not red but broken: %v", control.name, err)
			}
			first, _, _ := strings.Cut(err.Error(), "\n")
			t.Logf("red after %v, as it must be: %s", time.Since(began).Round(time.Second), first)
		})
	}
}

// soak is a run as the flags say.
func soak(t *testing.T, c *Cluster) *Soak {
	s := &Soak{Cluster: c, For: *soakFor, Seed: *seed, Logf: t.Logf, Every: *every, Patience: *patience, Self: os.Args[0], Copies: *copies}
	if *only != "" {
		s.Only = strings.Split(*only, ",")
	}
	return s
}
