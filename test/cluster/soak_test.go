package cluster

import (
	"flag"
	"testing"
	"time"
)

var (
	soakFor  = flag.Duration("soak", 150*time.Second, "how long TestSoak breaks things; make soak: MINUTES")
	every    = flag.Duration("every", 5*time.Second, "mean time between the faults of TestSoak")
	patience = flag.Duration("patience", 0, "how long repair may take at the end of TestSoak")
	only     = flag.String("faults", "", "kinds of faults of TestSoak, with commas between; empty for all")
	copies   = flag.Bool("copies", false, "TestSoak makes snapshots and clones, changes and deletes them; make soak does")
	controls = flag.Bool("controls", false, "switch each mechanism off, and demand that the soak fails")
)

// soakCluster describes the cluster of a soak. Certificates are renewed about once a minute. The
// disks are sized for changed and promoted clones, several times the load's own bytes: a full
// cluster refuses every operation of the soak.
var soakCluster = Config{Racks: 3, Metas: 3, ChunkServers: 4, Mounts: 3, CertificateLife: 2 * time.Minute, DiskBytes: 2 << 30}

// TestSoak: see Soak.
func TestSoak(t *testing.T) {
	c := start(t, soakCluster)
	s := soak(t, c)
	err := s.Run(t.Context())
	t.Logf("\n%s", s.Report())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
}
