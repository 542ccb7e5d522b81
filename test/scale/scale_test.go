package scale

import (
	"fmt"
	"os"
	"testing"
	"time"

	"penstock.io/penstock/test/child"
)

func TestMain(m *testing.M) { os.Exit(child.Main[role](m)) }

// TestMetadataServers measures creates with one, two and three metadata servers, alone and with
// followers. PENSTOCK_SCALE=full runs the test long enough for figures.
func TestMetadataServers(t *testing.T) {
	volumes, length, most := 4, 1500*time.Millisecond, 2
	if os.Getenv("PENSTOCK_SCALE") == "full" {
		volumes, length, most = 12, 10*time.Second, 3
	}
	for servers := 1; servers <= most; servers++ {
		for _, followers := range []int{-1, 2} {
			if servers == 1 && followers > 0 {
				continue // no follower exists
			}
			t.Run(fmt.Sprintf("servers=%d/followers=%d", servers, max(followers, 0)), func(t *testing.T) {
				r := measure(t, servers, volumes, followers, length)
				t.Logf("%d creates, %.0f/s; a create: %.0f µs of metadata servers (busiest %.0f), %.0f of etcd, %.0f of clients",
					r.made, r.rate, r.all, r.busiest, r.etcd, r.client)
				if servers > 1 && r.busiest > 0.95*r.all {
					t.Errorf("one of %d servers does %.0f %% of the work", servers, 100*r.busiest/r.all)
				}
			})
		}
	}
}

// TestSessions measures the cost, for its metadata server, of a client that only stays
// connected.
func TestSessions(t *testing.T) {
	n, length := 300, 2*time.Second
	if os.Getenv("PENSTOCK_SCALE") == "full" {
		n, length = 5000, 20*time.Second
	}
	memory, cpu := sessions(t, n, length)
	t.Logf("%d sessions: %.1f KiB and %.0f µs of processor time a second each", n, memory/1024, 1e6*cpu)
	if memory > 256<<10 {
		t.Errorf("a session takes %.0f KiB", memory/1024)
	}
}
