package cluster

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var streamsFor = flag.Duration("streams", 10*time.Second, "how long TestStreamSoak breaks things; make soak-streams: MINUTES")

// streamCluster describes the cluster of a soak of streams. Gateways without users serve loopback
// addresses only, so the cluster has no certificates: its nodes have addresses of 127.0.0.0/8.
var streamCluster = Config{Insecure: true, Racks: 3, Metas: 3, ChunkServers: 4, Mounts: 2, Gateways: 3, DiskBytes: 1 << 30}

// streamSoak is a run as the flags say.
func streamSoak(t *testing.T, c *Cluster) *StreamSoak {
	s := &StreamSoak{Soak: &Soak{Cluster: c, For: *streamsFor, Seed: *seed, Logf: t.Logf, Every: *every}}
	if *only != "" {
		s.Only = strings.Split(*only, ",")
	}
	return s
}

// TestStreamSoak: see StreamSoak. In a minute or less, few things break on a small cluster. The
// parts of the cluster speak without certificates.
func TestStreamSoak(t *testing.T) {
	cfg := streamCluster
	short := *streamsFor < time.Minute
	if short {
		cfg.EtcdMembers, cfg.Metas, cfg.ChunkServers, cfg.Mounts, cfg.Gateways = 1, 2, 3, 1, 2
	}
	c := start(t, cfg)
	file := filepath.Join(c.Mounts[0].Path, "file")
	if err := os.WriteFile(file, []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(file); string(b) != "hello" {
		t.Fatalf("DATA: read %q, %v", b, err)
	}
	s := streamSoak(t, c)
	if short {
		s.Every = 2 * time.Second
		s.Only = []string{"kill gateway", "pause gateway", "stop gateway", "kill chunk server", "kill meta"}
	}
	err := s.Run(t.Context())
	t.Logf("\n%s", s.Report())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
}

// streamControls are mechanisms that are switched off one at a time, for which the soak of
// streams must turn red within five minutes.
var streamControls = []struct {
	name   string
	faults string // kinds; empty for all
}{
	{"stream-nosync", "kill gateway,pause gateway"},
	{"stream-noepoch", "pause gateway,isolate gateway from meta"},
	{"stream-nooffsets", "kill gateway,pause gateway"},
	{"chunk-nosync", "blackout of all chunk servers"},
	{"journal-nosync", "blackout of all etcd"},
}

// TestStreamSoakControls runs the soak of streams without each mechanism.
func TestStreamSoakControls(t *testing.T) {
	if !*controls {
		t.Log("only with -controls (make controls)")
		return
	}
	for _, control := range streamControls {
		t.Run(control.name, func(t *testing.T) {
			cfg := streamCluster
			if control.name == "journal-nosync" {
				cfg.EtcdArgs = []string{"--unsafe-no-fsync"}
			} else {
				cfg.Env = []string{"PENSTOCK_CONTROL=" + control.name}
			}
			c := start(t, cfg)
			s := streamSoak(t, c)
			s.For, s.Only = 5*time.Minute, strings.Split(control.faults, ",")
			began := time.Now()
			err := s.Run(t.Context())
			if err == nil {
				t.Fatalf("without %s the soak stays green for %v:\n%s", control.name, s.For, s.Report())
			}
			// Red is not enough: the error must be the error that the mechanism prevents. Lost
			// chunks can't be read at the end, and an etcd that lost synced entries does not come
			// back.
			if err := errors.Join(s.verdict(), err); !strings.Contains(err.Error(), "DATA:") && !strings.Contains(err.Error(), "at the end") && control.name != "journal-nosync" {
				t.Fatalf("without %s the soak is not red but broken: %v", control.name, err)
			}
			first, _, _ := strings.Cut(err.Error(), "\n")
			t.Logf("red after %v, as it must be: %s", time.Since(began).Round(time.Second), first)
		})
	}
}
