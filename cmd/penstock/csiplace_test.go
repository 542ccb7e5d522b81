package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"penstock.io/penstock/cmd/penstock/kube/kubetest"
	"penstock.io/penstock/meta"
)

// TestPlaceByLabels: a node's place follows its labels, as far as it has them. If the place would
// be impossible, or another node's, the node gets no place.
func TestPlaceByLabels(t *testing.T) {
	zone, rack := "topology.kubernetes.io/zone", "example.com/rack"
	long := strings.Repeat("x", 63)
	for _, c := range []struct {
		have   map[string]string
		node   string
		at     string
		whole  bool
		labels []string
	}{
		{map[string]string{zone: "a", rack: "r1", "other": "x"}, "worker-1", "/a/r1/worker-1", true, []string{zone, rack}},
		{map[string]string{zone: "a"}, "worker-1", "/a/worker-1", false, []string{zone, rack}},
		{map[string]string{rack: "r1"}, "worker-1", "", false, []string{zone, rack}}, // not /r1/worker-1: a rack is no zone
		{map[string]string{zone: "a", rack: ""}, "worker-1", "/a/worker-1", false, []string{zone, rack}},
		{nil, "worker-1", "", false, []string{zone, rack}},
		{map[string]string{zone: "a"}, "worker-1", "/a/worker-1", true, []string{zone}},
		{map[string]string{zone: "a", "row": "b", rack: "r1"}, "w.example.com", "/a/b/r1/w.example.com", true, []string{zone, "row", rack}},
		{map[string]string{zone: long, rack: long}, strings.Repeat("n", 200), "", false, []string{zone, rack}},
	} {
		at, err := placeByLabels(c.have, c.labels, c.node)
		if at != c.at || (err == nil) != c.whole {
			t.Errorf("%v: %q, %v; want %q", c.have, at, err, c.at)
		}
	}
}

// TestPlaceIsNoted: the place by Kubernetes' answer is written; while Kubernetes does not
// answer, the last answer stands, and without any answer no place is written.
func TestPlaceIsNoted(t *testing.T) {
	s := kubetest.New(t)
	s.Label("worker-1", map[string]string{"zone": "a", "rack": "r1"})
	s.Label("bare", nil)
	file := filepath.Join(t.TempDir(), "topology")
	note := func(ctx context.Context, node string) error {
		p := placeFlags{name: node, labels: []string{"zone", "rack"}, file: file}
		return p.write(ctx, s.API(t), slog.New(slog.DiscardHandler))
	}
	is := func(want string) {
		t.Helper()
		if at, err := readPlace(file); err != nil || at != want {
			t.Errorf("the file says %q, %v; want %q", at, err, want)
		}
	}
	if err := note(t.Context(), "none"); meta.KindOf(err) != meta.NotFound {
		t.Errorf("a node that is not there: %v", err)
	}
	if _, err := readPlace(file); err == nil {
		t.Error("there is a file of a node that is not there")
	}
	if err := note(t.Context(), "worker-1"); err != nil {
		t.Fatal(err)
	}
	is("/a/r1/worker-1")
	s.Account(t, "somebody else")
	if err := note(t.Context(), "worker-1"); err != nil {
		t.Errorf("an account that may not, with a file of before: %v", err)
	}
	is("/a/r1/worker-1")
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // no more patience
	if err := note(ctx, "worker-1"); err != nil {
		t.Errorf("nobody answers, with a file of before: %v", err)
	}
	is("/a/r1/worker-1")
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := note(ctx, "worker-1"); meta.KindOf(err) != meta.Unavailable {
		t.Errorf("nobody answers, and never did: %v", err)
	}
	s = kubetest.New(t)
	s.Label("bare", nil)
	if err := note(t.Context(), "bare"); err != nil {
		t.Fatal(err)
	}
	is("")
	if b, err := os.ReadFile(file); err != nil || string(b) != "none\n" {
		t.Errorf("of a node without a place the file says %q, %v", b, err)
	}
	for _, bad := range []string{"dc1/rack1\n", "", "\n"} { // an empty file was cut off
		if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if at, err := readPlace(file); meta.KindOf(err) != meta.Invalid {
			t.Errorf("a file that says %q: %q, %v", bad, at, err)
		}
	}
}
