package penstock

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

var healthNow = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

// goodFacts are a cluster of two metadata servers of which nothing is to be said.
func goodFacts() *healthFacts {
	server := func(name string) serverFacts {
		return serverFacts{MetaServer: wire.MetaServer{Name: name, Addr: name + ":7400"}, asked: healthNow, health: meta.ServerHealth{
			Name: name, Now: healthNow.Add(time.Second),
			Certificate: &meta.CertHealth{Identity: "meta/" + name, Begins: healthNow.Add(-3 * 24 * time.Hour), Ends: healthNow.Add(4 * 24 * time.Hour)},
			Etcd: meta.EtcdHealth{Members: 3, Endpoints: []meta.EtcdEndpoint{
				{Address: "https://e1:2379", Bytes: 2 << 30, Used: 1 << 30, Quota: 8 << 30}, {Address: "https://e2:2379", Bytes: 1 << 20, Used: 1 << 20, Quota: 8 << 30}, {Address: "https://e3:2379"}}},
			MetaServers: []string{"m1", "m2"}, Nodes: 3, NodesLive: 3, Total: 300 << 30, Free: 100 << 30,
			Chunks: meta.ChunkHealth{Volumes: 2, Chunks: 100},
		}}
	}
	return &healthFacts{now: healthNow, servers: []serverFacts{server("m1"), server("m2")},
		own: &meta.CertHealth{Identity: "admin/a", Begins: healthNow.Add(-3 * 24 * time.Hour), Ends: healthNow.Add(4 * 24 * time.Hour)},
		mirrors: []meta.Mirror{
			{Target: 5, State: meta.MirrorRunning, Every: time.Hour, Last: &meta.MirrorRound{Taken: healthNow.Add(-2 * time.Hour)}},
			{Target: 6, State: meta.MirrorRunning, Every: time.Hour}, // the first copy
			{Target: 7, State: meta.MirrorPaused, Every: time.Hour, Error: "x", Last: &meta.MirrorRound{}},
			{Target: 8, State: meta.MirrorRunning, Last: &meta.MirrorRound{}}, // a round only on request
		}}
}

// TestHealthIsJudged: each problem is reported once, with its severity and the next step.
func TestHealthIsJudged(t *testing.T) {
	if h := goodFacts().judge(); h.Status != "ok" || len(h.Problems) != 0 || h.MetaServers != 2 || h.Nodes != 3 || h.Chunks != 200 || h.Free != 100<<30 {
		t.Fatalf("of a good cluster: %+v", h)
	}
	first := func(f *healthFacts) *meta.ServerHealth { return &f.servers[0].health }
	both := func(f *healthFacts, do func(*meta.ServerHealth)) {
		for i := range f.servers {
			do(&f.servers[i].health)
		}
	}
	for _, c := range []struct {
		name string
		hurt func(f *healthFacts)
		want []string // "severity part object: text", each a part of a problem's text
	}{
		{"a metadata server is silent", func(f *healthFacts) {
			f.servers[1] = serverFacts{MetaServer: f.servers[1].MetaServer, err: errors.New("it is silent\nvery")}
		}, []string{"critical metadata m2: does not answer, and is on the list of those that run: it is silent."}},
		{"all are", func(f *healthFacts) {
			for i := range f.servers {
				f.servers[i] = serverFacts{MetaServer: f.servers[i].MetaServer, err: errors.New("silent")}
			}
		}, []string{"critical metadata m1: does not", "critical metadata m2: does not", "critical metadata : no metadata server says"}},
		{"one stopped", func(f *healthFacts) { f.servers = f.servers[:1] }, []string{"warning metadata m2: has joined the cluster and does not run"}},
		{"a chunk server's clock, as two servers see it", func(f *healthFacts) {
			for i := range f.servers {
				f.servers[i].health.Clocks = []meta.ClockHealth{{ID: 7, Name: "c7", Ahead: -6 * time.Minute}}
			}
		}, []string{"warning clock 7 (c7): has a clock that is 6m0s behind that of metadata server m1"}},
		{"a clock", func(f *healthFacts) { first(f).Now = healthNow.Add(-6 * time.Minute) }, []string{"warning clock m1: has a clock that differs from this machine's by -6m0s"}},
		{"a long list", func(f *healthFacts) { first(f).Left = 3 }, []string{"warning metadata m1: has 3 more"}},
		{"etcd is away", func(f *healthFacts) { first(f).Etcd = meta.EtcdHealth{Error: "no leader"} }, []string{"critical etcd : can't be asked by metadata servers m1: no leader"}},
		{"etcd can't be asked, for two reasons", func(f *healthFacts) {
			f.servers = append(f.servers, f.servers[0])
			f.servers[2].Name, f.servers[2].health.Name = "m3", "m3"
			for i, err := range []string{"no route", "bad certificate", "no route"} {
				f.servers[i].health.Etcd = meta.EtcdHealth{Error: err}
			}
		}, []string{"critical etcd : can't be asked by metadata servers m1, m3: no route", "critical etcd : can't be asked by metadata servers m2: bad certificate"}},
		{"etcd is full", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) { h.Etcd.Alarms, h.JournalFull = []string{"NOSPACE"}, h.Name == "m1" })
		}, []string{"critical etcd NOSPACE: has raised", "critical metadata m1: has volumes that take no changes"}},
		{"etcd is nearly full", func(f *healthFacts) { both(f, func(h *meta.ServerHealth) { h.Etcd.Endpoints[0].Used = 7 << 30 }) }, []string{"warning etcd https://e1:2379: has 7.0 GiB in use and a file of 2.0 GiB, its quota is 8.0 GiB"}},
		{"etcd's file is", func(f *healthFacts) { both(f, func(h *meta.ServerHealth) { h.Etcd.Endpoints[0].Bytes = 7900 << 20 }) }, []string{"warning etcd https://e1:2379: has 1.0 GiB"}},
		{"a member is away", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) { h.Etcd.Endpoints[2].Error = "refused by " + h.Name })
		}, []string{"warning etcd https://e3:2379: does not answer metadata servers m1, m2: refused by m1"}},
		{"a member is away from one server", func(f *healthFacts) { first(f).Etcd.Endpoints[2].Error = "refused" }, []string{"warning etcd https://e3:2379: does not answer metadata servers m1, and answers others: refused"}},
		{"one server has members of its own", func(f *healthFacts) {
			first(f).Etcd.Endpoints = []meta.EtcdEndpoint{{Address: "https://own:2379", Error: "refused"}}
		}, []string{"warning etcd https://own:2379: does not answer metadata servers m1: refused"}},
		{"a server did not say which certificates it knows", func(f *healthFacts) {
			f.servers[1].certErr = errors.New("silent\nvery")
			f.servers[1].health.Chunks.Lost = 1
		}, []string{"warning metadata m2: did not say which certificates it was shown, so that one of which is told here that it ends may have been renewed: silent.", "critical chunks : 1 chunks have no good replica"}},
		{"no leader", func(f *healthFacts) { both(f, func(h *meta.ServerHealth) { h.Etcd.Endpoints[2].NoLeader = true }) }, []string{"critical etcd https://e3:2379: knows no leader"}},
		{"a node is away", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) {
				h.NodesLive, h.Away = 2, []meta.NodeHealth{{ID: 7, Name: "n7", Gone: "5s"}}
			})
		}, []string{"warning node 7 (n7): is away since 5s"}},
		{"all nodes are", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) {
				h.Nodes, h.NodesLive, h.Total, h.Away = 1, 0, 0, []meta.NodeHealth{{ID: 7, Name: "n7"}}
			})
		}, []string{"critical node : no chunk server is there", "warning node 7 (n7): is away."}},
		{"none ever was", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) { h.Nodes, h.NodesLive, h.Total = 0, 0, 0 })
		}, []string{"critical node : no chunk server has joined"}},
		{"a node is cut off from one server", func(f *healthFacts) { first(f).Away = []meta.NodeHealth{{ID: 7, Name: "n7"}} }, []string{"warning node 7 (n7): does not reach metadata servers m1, and reaches others"}},
		{"disks", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) {
				h.BadDisks = []meta.DiskHealth{
					{Node: 1, ID: "aaaaaaaaaaaabbbb", Path: "/d1", State: "failed", Detail: "I/O error"}, {Node: 1, Path: "/d2", State: "failed", Detail: "not mounted"}, {Node: 2, ID: "cc", Path: "/d3", State: "failing"},
					{Node: 2, ID: "dd", Path: "/d4", State: "full"}, {Node: 3, ID: "ee", Path: "/d5", State: "ok", Total: 100 << 20, Free: 9 << 20}, {Node: 3, ID: "ff", Path: "/d6", State: "removed"}}
			})
		}, []string{"warning disk /d1 of node 1: is failed: I/O error", "warning disk /d2 of node 1: is failed: not mounted", "warning disk /d3 of node 2: is being emptied", "warning disk /d4 of node 2: is full", "warning disk /d5 of node 3: has 9.0 MiB of 100.0 MiB left", "warning disk /d6 of node 3: was given up"}},
		{"little room", func(f *healthFacts) { both(f, func(h *meta.ServerHealth) { h.Free = 29 << 30 }) }, []string{"warning space : 29.0 GiB of 300.0 GiB are left"}},
		{"no room", func(f *healthFacts) { both(f, func(h *meta.ServerHealth) { h.Free = 0 }) }, []string{"critical space : nothing is left of 300.0 GiB"}},
		{"chunks", func(f *healthFacts) {
			both(f, func(h *meta.ServerHealth) {
				h.Volumes = []meta.VolumeHealth{{Name: "b", Endangered: 1}, {Name: "a", Endangered: 1}, {Name: "l", Lost: 1}, {Name: "r", Unreachable: 1}}
				for i := range 20 {
					h.Volumes = append(h.Volumes, meta.VolumeHealth{Name: fmt.Sprintf("v%02d", i), LastReachable: 1})
				}
				h.Chunks = meta.ChunkHealth{Unscanned: 1, Lost: 1, Unreachable: 9, LastReachable: 10, Endangered: 2, UnderReplicated: 3, Corrupt: 4, Misplaced: 5, Draining: 6, Surplus: 7, Blocked: 8}
			})
		}, []string{"critical chunks : 2 chunks have no good replica that can be reached: reads of them wait or fail; volume l.",
			"critical chunks : 18 chunks can't be read now, since the nodes that have them are away; volume r.", "critical chunks : 4 chunks have one replica left; volumes a, b.",
			"critical chunks : 20 chunks have one replica left that can be reached, since nodes are away; volumes v00, v01, v02, v03, v04, v05, v06, v07 and 12 more.", "warning chunks : 6 chunks have too few", "warning chunks : 8 chunks have a corrupt", "warning chunks : 10 chunks lie where",
			"warning chunks : 12 chunks are on a node", "warning chunks : 14 chunks have too many", "warning chunks : 16 chunks of these", "warning chunks : the chunks of 2 volumes were not"}},
		{"volumes", func(f *healthFacts) {
			first(f).Volumes = []meta.VolumeHealth{{Name: "a", Failed: "corrupt"}, {Name: "b", Recovering: true}, {Name: "c", UsedBytes: 95, QuotaBytes: 100, UsedInodes: 10, QuotaInodes: 10}, {Name: "d", Advisory: true}, {Name: "e", Undone: "no end", UndoneSince: healthNow}, {Name: "f", Unplaceable: "1 of 3 servers", Unmet: "said already"}, {Name: "g", Unmet: "3 replicas on 2 hosts"}, {Name: "h", GivenUpFiles: 2, GivenUpBytes: 300, GivenUpBy: "w1:/mnt", GivenUpAt: healthNow.Add(-time.Minute)}}
		}, []string{"critical volume a: can't be served by metadata server m1: corrupt", "critical volume f: can't be written to: 1 of 3 servers", "warning volume g: has a policy that nothing in the cluster can meet: 3 replicas on 2 hosts; ", "warning volume h: has files as they were synced last: an operator gave up 300 B of 2 files that were not durable, the last 1m0s ago by the client w1:/mnt", "warning volume b: is being taken over", "warning volume e: has no snapshot by its schedule: since 2026-11-22 12:00:00 UTC none could be taken: no end", "warning quota c: has used 95 B of 100 B (95 % of its quota of bytes)", "warning quota c: has used 10 of 10 (100 % of its quota of inodes)", "warning quota d: is above its advisory quota"}},
		{"followers", func(f *healthFacts) {
			first(f).Standbys = []meta.StandbyHealth{{Volume: 3, Behind: "1m0s", Error: "x"}}
		}, []string{"warning follower volume 3 at m1: was last up to date 1m0s ago: x"}},
		{"mirrors", func(f *healthFacts) {
			f.mirrors[0].Last.Taken = healthNow.Add(-2*time.Hour - 61*time.Second)
			f.mirrors[1].Error, f.mirrors[1].Since = "no route", healthNow
			f.mirrorErr = errors.New("y")
		}, []string{"warning mirror of , volume 5: is 2h1m1s behind, and is to copy every 1h0m0s", "warning mirror of , volume 6: fails since 2026-11-22T12:00:00Z: no route", "warning mirror : mirrors can't be listed: y"}},
		{"certificates", func(f *healthFacts) {
			f.own.Ends = healthNow.Add(23 * time.Hour)
			first(f).Certificate.Ends = healthNow
			first(f).Certificates = []meta.CertHealth{{Identity: "client/c", Begins: healthNow.Add(-6 * 24 * time.Hour), Ends: healthNow.Add(time.Hour)}, {Identity: "chunkserver/n", Begins: healthNow.Add(-6 * 24 * time.Hour), Ends: healthNow.Add(time.Hour)}}
			// The peer showed the other server its newer certificate.
			f.servers[1].health.Certificates = []meta.CertHealth{{Identity: "chunkserver/n", Begins: healthNow.Add(-time.Hour), Ends: healthNow.Add(6 * 24 * time.Hour)}}
		}, []string{"warning certificate admin/a: ends in 23h0m0s", "warning certificate client/c: ends in 1h0m0s", "critical certificate meta/m1: ended at 2026-11-22T12:00:00Z"}},
		{"clients", func(f *healthFacts) {
			first(f).CutOff = []meta.ClientHealth{{Name: "w1:/mnt (pid 3)", Why: "its lease ran out", At: healthNow.Add(-time.Minute)}}
		}, []string{"warning client w1:/mnt (pid 3): went without a good-bye 1m0s ago: its lease ran out"}},
	} {
		f := goodFacts()
		c.hurt(f)
		h := f.judge()
		var got []string
		for i, p := range h.Problems {
			got = append(got, string(p.Severity)+" "+p.Part+" "+p.Object+": "+p.Text+".")
			if p.Next == "" || strings.Contains(p.Text+p.Next, "%!") || i > 0 && p.Severity == Critical && h.Problems[i-1].Severity == Warning {
				t.Errorf("%s: %+v", c.name, p)
			}
		}
		for _, w := range c.want {
			n := 0
			for _, g := range got {
				if strings.Contains(g, w) {
					n++
				}
			}
			if n != 1 {
				t.Errorf("%s: %q is told %d times:\n%s", c.name, w, n, strings.Join(got, "\n"))
			}
		}
		if len(got) != len(c.want) || h.Status != string(h.Problems[0].Severity) {
			t.Errorf("%s: %s, %d problems instead of %d:\n%s", c.name, h.Status, len(got), len(c.want), strings.Join(got, "\n"))
		}
	}
}

// healthAsked are metadata servers whose answers the test determines.
type healthAsked struct {
	*fakeSession
	servers []wire.MetaServer
	// answer answers requests for the whole health, or for certificates alone.
	answer func(addr string, certificates bool) (meta.ServerHealth, error)
}

func (h *healthAsked) Cluster() string                           { return "c" }
func (h *healthAsked) Servers(context.Context) []wire.MetaServer { return h.servers }
func (h *healthAsked) Mirrors(context.Context) ([]meta.Mirror, error) {
	return nil, nil
}
func (h *healthAsked) Health(_ context.Context, addr string) (meta.ServerHealth, error) {
	return h.answer(addr, false)
}
func (h *healthAsked) Certificates(_ context.Context, addr string, _ []string) ([]meta.CertHealth, error) {
	x, err := h.answer(addr, true)
	return x.Certificates, err
}

// TestHealthAsksForCertificates: a server that has answered counts as healthy even if the server
// has no answer to a request about certificates known to other servers, or does not name its own
// certificates any more.
func TestHealthAsksForCertificates(t *testing.T) {
	ends := time.Now().Add(time.Hour)
	old := meta.CertHealth{Identity: "client/c", Begins: ends.Add(-7 * 24 * time.Hour), Ends: ends}
	mine := meta.CertHealth{Identity: "client/d", Begins: ends.Add(-7 * 24 * time.Hour), Ends: ends}
	next := meta.CertHealth{Identity: "client/c", Begins: ends.Add(-time.Hour), Ends: ends.Add(7 * 24 * time.Hour)}
	w := newWorld(t, meta.Policy{Replicas: 1})
	c, _ := open(t, w, Config{})
	asked := &healthAsked{fakeSession: c.sess.(*fakeSession)}
	var facts []meta.ServerHealth
	for _, s := range goodFacts().servers {
		s.health.Now = time.Now()
		s.health.Certificate = nil
		asked.servers, facts = append(asked.servers, s.MetaServer), append(facts, s.health)
	}
	facts[0].Chunks.Lost = 3
	facts[0].Certificates = []meta.CertHealth{old, mine}
	for _, x := range []struct {
		name  string
		again [2]error
		want  []string // "severity part object"
	}{
		{"both answer", [2]error{}, []string{"critical chunks ", "warning certificate client/d"}},
		{"the first is silent", [2]error{errors.New("silent"), nil}, []string{"critical chunks ", "warning metadata m1", "warning certificate client/d"}},
		{"the second is", [2]error{nil, errors.New("silent")}, []string{"critical chunks ", "warning metadata m2", "warning certificate client/c", "warning certificate client/d"}},
	} {
		asked.answer = func(addr string, certificates bool) (meta.ServerHealth, error) {
			i := slices.IndexFunc(asked.servers, func(s wire.MetaServer) bool { return s.Addr == addr })
			if !certificates {
				return facts[i], nil
			}
			var h meta.ServerHealth
			if i == 1 {
				h.Certificates = []meta.CertHealth{next}
			}
			if x.again[i] != nil {
				h.Certificates = nil
			}
			return h, x.again[i]
		}
		c.sess = asked
		h, err := c.Health(t.Context())
		c.sess = asked.fakeSession
		var got []string
		for _, p := range h.Problems {
			got = append(got, string(p.Severity)+" "+p.Part+" "+p.Object)
		}
		if err != nil || !slices.Equal(got, x.want) {
			t.Errorf("%s: %q, %v", x.name, got, err)
		}
	}
	asked.answer = func(_ string, certificates bool) (meta.ServerHealth, error) {
		if certificates {
			return meta.ServerHealth{}, meta.E("health", meta.AccessDenied, "", nil)
		}
		return facts[0], nil
	}
	c.sess = asked
	_, err := c.Health(t.Context())
	c.sess = asked.fakeSession
	if !errors.Is(err, meta.AccessDenied) {
		t.Errorf("of who may not ask any more: %v", err)
	}
}

// FuzzHealth judges arbitrary answers of servers.
func FuzzHealth(f *testing.F) {
	seed, err := json.Marshal(goodFacts().servers[0].health)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{"bad_disks":[{"id":"a"}],"away":[{}],"cut_off":[{}],"volumes":[{"quota_bytes":1,"used_bytes":18446744073709551615}],"certificates":[{}],"etcd":{"endpoints":[{"quota_bytes":1,"used_bytes":2}]}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		x := serverFacts{asked: healthNow}
		if json.Unmarshal(b, &x.health) != nil {
			return
		}
		good := goodFacts()
		good.servers = append(good.servers, x)
		h := good.judge()
		if (h.Status == "ok") != (len(h.Problems) == 0) {
			t.Errorf("%s with %d problems", h.Status, len(h.Problems))
		}
	})
}
