package penstock

import (
	"errors"
	"slices"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// TestForUpgrade: an upgrade waits for problems that a missing server would make worse,
// and does not wait for problems that do not concern servers and may last for days.
func TestForUpgrade(t *testing.T) {
	first := func(f *healthFacts) *meta.ServerHealth { return &f.servers[0].health }
	both := func(f *healthFacts, do func(*meta.ServerHealth)) {
		for i := range f.servers {
			do(&f.servers[i].health)
		}
	}
	for _, c := range []struct {
		name   string
		hurt   func(f *healthFacts)
		status string // for an upgrade
	}{
		{"a metadata server is silent", func(f *healthFacts) { f.servers[1].err = errors.New("silent") }, "critical"},
		{"one does not run", func(f *healthFacts) { f.servers = f.servers[:1] }, "warning"},
		{"a clock", func(f *healthFacts) { first(f).Now = healthNow.Add(-time.Hour) }, "ok"},
		{"more than was told", func(f *healthFacts) { first(f).Left = 3 }, "warning"},
		{"a member of etcd is away", func(f *healthFacts) { both(f, func(h *meta.ServerHealth) { h.Etcd.Endpoints[2].Error = "refused" }) }, "warning"},
		{"etcd has no leader", func(f *healthFacts) { first(f).Etcd.Endpoints[0].NoLeader = true }, "critical"},
		{"etcd is large", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) { h.Etcd.Endpoints[0].Bytes, h.Etcd.Endpoints[0].Quota = 100, 100 })
		}, "ok"},
		{"no chunk server", func(f *healthFacts) { both(f, func(h *meta.ServerHealth) { h.Nodes, h.NodesLive = 0, 0 }) }, "critical"},
		{"a chunk server is away", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) { h.NodesLive, h.Away = 2, []meta.NodeHealth{{ID: 3, Name: "c"}} })
		}, "warning"},
		{"a disk is nearly full", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) {
				h.BadDisks = []meta.DiskHealth{{Node: 1, State: meta.DiskOK.String(), Total: 100, Free: 1}}
			})
		}, "ok"},
		{"the cluster is nearly full", func(f *healthFacts) { both(f, func(h *meta.ServerHealth) { h.Free = h.Total / 50 }) }, "ok"},
		{"chunks are short", func(f *healthFacts) { first(f).Chunks.UnderReplicated = 1 }, "warning"},
		{"a replica is corrupt", func(f *healthFacts) { first(f).Chunks.Corrupt = 1 }, "warning"},
		{"chunks have one replica left", func(f *healthFacts) { first(f).Chunks.Endangered = 1 }, "critical"},
		{"chunks were not looked at", func(f *healthFacts) { first(f).Chunks.Unscanned = 1 }, "warning"},
		{"chunks move", func(f *healthFacts) {
			c := &first(f).Chunks
			c.Misplaced, c.Draining, c.Surplus, c.Blocked = 1, 1, 1, 1
		}, "ok"},
		{"a volume is taken over", func(f *healthFacts) { first(f).Volumes = []meta.VolumeHealth{{ID: 2, Name: "v", Recovering: true}} }, "warning"},
		{"a volume can't be served", func(f *healthFacts) { first(f).Volumes = []meta.VolumeHealth{{ID: 2, Name: "v", Failed: "x"}} }, "critical"},
		{"a quota", func(f *healthFacts) {
			first(f).Volumes = []meta.VolumeHealth{{ID: 2, Name: "v", UsedBytes: 99, QuotaBytes: 100, Undone: "x"}}
		}, "ok"},
		{"a follower is behind", func(f *healthFacts) {
			first(f).Standbys = []meta.StandbyHealth{{Volume: 2, Behind: "1h"}}
		}, "warning"},
		{"a mirror is late", func(f *healthFacts) { f.mirrorErr = errors.New("x") }, "ok"},
		{"a client was cut off", func(f *healthFacts) { first(f).CutOff = []meta.ClientHealth{{Name: "c", At: healthNow}} }, "ok"},
		{"a certificate ends soon", func(f *healthFacts) { f.own.Ends = healthNow.Add(time.Minute) }, "ok"},
	} {
		f := goodFacts()
		c.hurt(f)
		h := f.judge()
		if h.Status == "ok" {
			t.Errorf("%s: health is ok", c.name)
		}
		left := h.ForUpgrade()
		if left.Status != c.status || (left.Status == "ok") != (len(left.Problems) == 0) {
			t.Errorf("%s: for an upgrade it is %s, want %s: %+v", c.name, left.Status, c.status, left.Problems)
		}
		if slices.ContainsFunc(left.Problems, func(p Problem) bool { return !p.BlocksUpgrade }) || left.Nodes != h.Nodes {
			t.Errorf("%s: %+v", c.name, left)
		}
	}
}
