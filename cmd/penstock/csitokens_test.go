package main

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"penstock.io/penstock/cmd/penstock/kube/kubetest"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/port"
)

// ownMeta starts a metadata server in this process, of a cluster with certificates. It
// returns the address, and a function for paths next to the credentials, which are in c.
func ownMeta(t *testing.T) (m *local.Meta, addr string, at func(name string) string) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	dir, err := os.MkdirTemp("", "tk") // short: the path of a socket is bounded
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	at = func(name string) string { return filepath.Join(dir, name) }
	if _, err := local.Found(t.Context(), local.FoundConfig{Dir: at("m"), Credentials: at("c"), Meta: "m", Logger: log}); err != nil {
		t.Fatal(err)
	}
	own, err := peer.Load(at("c/meta"), log)
	if err != nil {
		t.Fatal(err)
	}
	addr = port.Free(t)
	m, release, err := local.RunMeta(t.Context(), local.MetaConfig{Dir: at("m"), Listen: addr, Creds: own, Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
		if err := release(); err != nil {
			t.Error(err)
		}
	})
	return m, addr, at
}

// TestMetaTellsHealth: a metadata server has metrics of its etcd, chunk servers, chunks
// and certificate.
func TestMetaTellsHealth(t *testing.T) {
	m, _, _ := ownMeta(t)
	families, err := local.Metrics(m, nil, nil).Gather()
	if err != nil {
		t.Fatal(err)
	}
	told := map[string][]float64{}
	for _, f := range families {
		for _, x := range f.Metric {
			told[f.GetName()] = append(told[f.GetName()], x.GetGauge().GetValue())
		}
	}
	now := float64(time.Now().Unix())
	for name, well := range map[string]func(v float64) bool{
		"penstock_certificate_end_timestamp_seconds":   func(v float64) bool { return v > now+3600 },
		"penstock_certificate_begin_timestamp_seconds": func(v float64) bool { return v > 0 && v <= now },
		"penstock_meta_etcd_reached":                   func(v float64) bool { return v == 1 },
		"penstock_meta_etcd_endpoint_up":               func(v float64) bool { return v == 1 },
		"penstock_meta_etcd_quota_bytes":               func(v float64) bool { return v > 1<<20 },
		"penstock_meta_etcd_used_bytes":                func(v float64) bool { return v > 0 },
		"penstock_meta_etcd_alarms":                    func(v float64) bool { return v == 0 },
		"penstock_meta_chunkservers_known":             func(v float64) bool { return v == 0 },
		"penstock_meta_chunkservers_away":              func(v float64) bool { return v == 0 },
	} {
		if v := told[name]; len(v) != 1 || !well(v[0]) {
			t.Errorf("%s: %v", name, v)
		}
	}
	if n := len(told["penstock_meta_bad_chunks"]); n != 10 {
		t.Errorf("chunks are told of in %d states", n)
	}
}

// TestTokensAreKept: a token that is half over, missing, revoked or of another role is
// replaced by a token by which a pod can join; a token with more time stays. A token that
// another writer put there first stays, too, and no unused token is left.
func TestTokensAreKept(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	_, addr, at := ownMeta(t)
	w := where{cluster: []string{addr}}
	w.credentials.credentials = at("c/admin")
	fake := kubetest.New(t)
	k := &tokenKeeper{api: fake.API(t), with: w.api, life: cluster.MaxTokenLife, log: log, ends: map[string]time.Time{}, tokens: []keptToken{
		{secret: "controller", role: peer.Admin, name: "kubernetes"}, {secret: "node", role: peer.Client},
	}}
	holding := func() (all map[string]cluster.TokenRecord) {
		t.Helper()
		all = map[string]cluster.TokenRecord{}
		if err := w.api(t.Context(), func(c *admin.Client) error {
			l, err := listTokens(t.Context(), c)
			for _, r := range l {
				all[r.ID] = r
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return all
	}
	look := func(now time.Time) {
		t.Helper()
		if err := k.look(t.Context(), now); err != nil {
			t.Fatal(err)
		}
	}
	token := func(secret string) string { return fake.Get(secret)["token"] }
	joins := func(secret, name string, want peer.Role) {
		t.Helper()
		id, err := client.Join(t.Context(), []string{addr}, token(secret), name, at("joined-"+token(secret)[:20]))
		if err != nil || id.Role != want {
			t.Errorf("by Secret %s: %v, %v", secret, id, err)
		}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(k)
	// kept demands the values of the metrics of each Secret.
	kept := func(when string, want map[string]float64) {
		t.Helper()
		all, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range all {
			for _, x := range f.Metric {
				if f.GetName() == "penstock_csi_token_kept" {
					got[x.GetLabel()[0].GetValue()] = x.GetGauge().GetValue()
				}
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("%s: told of as kept: %v, want %v", when, got, want)
		}
	}
	kept("before the first look", map[string]float64{"controller": 0, "node": 0})
	if err := k.look(t.Context(), time.Now()); err == nil {
		t.Error("Secrets that are not there are well")
	}
	kept("none is there", map[string]float64{"controller": 0, "node": 0})
	fake.Put("controller", map[string]string{"token": "long over", "other": "stays"})
	fake.Put("node", nil)
	look(time.Now())
	kept("all is well", map[string]float64{"controller": 1, "node": 1})
	joins("controller", "kubernetes", peer.Admin)
	joins("node", "worker-1", peer.Client)
	if fake.Get("controller")["other"] != "stays" || len(holding()) != 2 {
		t.Errorf("the Secret has %v, the cluster %d tokens", fake.Get("controller"), len(holding()))
	}
	first := token("node")
	look(time.Now().Add(k.life/2 - time.Hour))
	if token("node") != first {
		t.Error("a token that holds for long is replaced")
	}
	look(time.Now().Add(k.life/2 + time.Hour))
	second := token("node")
	if second == first || len(holding()) != 4 {
		t.Errorf("a token that is half over stays, or the one before ends at once: %d tokens", len(holding()))
	}
	joins("node", "worker-2", peer.Client)

	// Revoked.
	parsed, err := peer.ParseToken(second)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.api(t.Context(), func(c *admin.Client) error {
		_, err := c.Grants.RevokeJoinToken(t.Context(), &admin.RevokeJoinTokenRequest{Id: parsed.ID})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	look(time.Now())
	if token("node") == second {
		t.Error("a token that was revoked stays")
	}
	joins("node", "worker-3", peer.Client)

	// A token of another role: pods would join with the wrong role.
	fake.Put("node", map[string]string{"token": token("controller")})
	look(time.Now())
	joins("node", "worker-4", peer.Client)

	// Nobody answers.
	dead := where{cluster: []string{"127.0.0.1:1"}}
	dead.credentials = w.credentials
	k.with = dead.api
	asking, stop := context.WithTimeout(t.Context(), time.Second)
	if err := k.look(asking, time.Now()); err == nil {
		t.Error("a cluster that is not there is well")
	}
	stop()
	kept("no cluster answers", map[string]float64{"controller": 0, "node": 0})
	k.with = w.api

	// Of another cluster.
	before := len(holding())
	others := peer.NewToken(peer.Client, strings.Repeat("ab", 32)).String()
	fake.Put("node", map[string]string{"token": others})
	if err := k.look(t.Context(), time.Now()); !errors.Is(err, meta.NotPermitted) || token("node") != others || len(holding()) != before {
		t.Errorf("a token of another cluster becomes %q, %v; %d tokens, %d before", token("node"), err, len(holding()), before)
	}

	kept("one is of another cluster", map[string]float64{"controller": 1, "node": 0})

	// Somebody else is faster.
	fake.Put("node", nil)
	fake.Patching = func() { fake.Put("node", map[string]string{"token": "another's"}) }
	look(time.Now())
	fake.Patching = nil
	if token("node") != "another's" || len(holding()) != before {
		t.Errorf("what another put there became %q; %d tokens, %d before", token("node"), len(holding()), before)
	}
}

// TestKeptTokenFlag: the forms of --keep-token.
func TestKeptTokenFlag(t *testing.T) {
	for s, want := range map[string]keptToken{
		"a=client":           {secret: "a", role: peer.Client},
		"b=admin:kubernetes": {secret: "b", role: peer.Admin, name: "kubernetes"},
	} {
		if got, err := parseKeptToken(s); err != nil || got != want {
			t.Errorf("%s: %+v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "a", "=client", "a=king", "a=client:two words"} {
		if got, err := parseKeptToken(s); err == nil {
			t.Errorf("%q: %+v", s, got)
		}
	}
}
