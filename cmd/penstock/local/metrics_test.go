package local

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
)

// TestServerHealth: a metadata server's health is in its metrics, each problem in a metric of its
// own.
func TestServerHealth(t *testing.T) {
	h := &meta.ServerHealth{
		Nodes: 5, NodesLive: 3, Total: 100, Free: 7,
		Chunks:       meta.ChunkHealth{Lost: 1, Endangered: 2, UnderReplicated: 3, Corrupt: 4, Misplaced: 5, Draining: 6, Surplus: 7, Blocked: 8},
		Volumes:      []meta.VolumeHealth{{Name: "a", Failed: "why"}, {Name: "b", Recovering: true}},
		Certificates: make([]meta.CertHealth, 2),
		CutOff:       make([]meta.ClientHealth, 3),
		Etcd: meta.EtcdHealth{Alarms: []string{"NOSPACE"}, Endpoints: []meta.EtcdEndpoint{
			{Address: "a", Bytes: 30, Used: 20, Quota: 40}, {Address: "a"}, {Address: "b", Error: "away"}, {Address: "c", NoLeader: true},
		}},
	}
	got := map[string]float64{}
	for _, l := range serverHealth(h) {
		for _, r := range l.readings {
			name := r.name + l.labels["state"] + l.labels["endpoint"]
			if _, twice := got[name]; twice {
				t.Errorf("%s is told twice", name)
			}
			got[name] = r.value
		}
	}
	for name, want := range map[string]float64{
		"known": 5, "away": 2,
	} {
		if got["penstock_meta_chunkservers_"+name] != want {
			t.Errorf("chunk servers %s: %v", name, got["penstock_meta_chunkservers_"+name])
		}
	}
	for name, want := range map[string]float64{
		"cluster_bytes": 100, "cluster_free_bytes": 7, "volumes_failed": 1, "certificates_ending": 2, "clients_cut_off": 3,
		"etcd_reached": 1, "etcd_alarms": 1, "etcd_endpoint_upa": 1, "etcd_endpoint_upb": 0, "etcd_endpoint_upc": 0,
		"etcd_bytesa": 30, "etcd_used_bytesa": 20, "etcd_quota_bytesa": 40,
		"bad_chunkslost": 1, "bad_chunksendangered": 2, "bad_chunksunder_replicated": 3, "bad_chunkscorrupt": 4,
		"bad_chunksmisplaced": 5, "bad_chunksdraining": 6, "bad_chunkssurplus": 7, "bad_chunksblocked": 8,
	} {
		if v, told := got["penstock_meta_"+name]; !told || v != want {
			t.Errorf("%s: %v, %t", name, v, told)
		}
	}
	if _, told := got["penstock_meta_etcd_quota_bytesb"]; told {
		t.Error("a quota is told of a member that does not answer")
	}
	h.Etcd = meta.EtcdHealth{Error: "no answer"}
	for _, l := range serverHealth(h) {
		for _, r := range l.readings {
			if r.name == "penstock_meta_etcd_reached" && r.value != 0 {
				t.Error("etcd that can't be asked is reached")
			}
		}
	}
}

// TestHealthIsAskedOnce: however many ask for metrics at once, and again right after,
// etcd is asked once; later it is asked again.
func TestHealthIsAskedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := lastHealth{turn: make(chan struct{}, 1)}
		var asked atomic.Int32
		of := func(context.Context) *meta.ServerHealth {
			time.Sleep(time.Second)
			return &meta.ServerHealth{Name: fmt.Sprint(asked.Add(1))}
		}
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if h := l.ask(of); h.Name != "1" {
					t.Errorf("told what was asked the %s. time", h.Name)
				}
			})
		}
		all.Wait()
		time.Sleep(healthHolds - time.Millisecond)
		if h := l.ask(of); h.Name != "1" {
			t.Errorf("a moment later: %s", h.Name)
		}
		time.Sleep(time.Millisecond)
		if h := l.ask(of); h.Name != "2" {
			t.Errorf("later: %s", h.Name)
		}
	})
}
