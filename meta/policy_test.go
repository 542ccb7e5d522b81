package meta

import (
	"strings"
	"testing"
)

func TestPolicyCheck(t *testing.T) {
	good := []Policy{
		{Replicas: 1},
		{Replicas: MaxReplicas, Topology: "/", Spread: SpreadDC, Class: "nvme"},
		{Replicas: 3, Topology: "/dc1/rack-2/Node_7.b", Class: "hdd-7200"},
	}
	for _, p := range good {
		if err := p.Check(); err != nil {
			t.Errorf("%+v: %v", p, err)
		}
	}
	bad := map[string]Policy{
		"replicas": {}, "17": {Replicas: MaxReplicas + 1}, "spread": {Replicas: 1, Spread: 3},
		"dc1": {Replicas: 1, Topology: "dc1"}, "/dc1/": {Replicas: 1, Topology: "/dc1/"}, "//": {Replicas: 1, Topology: "//x"},
		"..": {Replicas: 1, Topology: "/dc1/.."}, "a b": {Replicas: 1, Topology: "/a b"},
		"bytes": {Replicas: 1, Topology: "/" + strings.Repeat("x", MaxTopology)},
		"SSD":   {Replicas: 1, Class: "SSD"}, "class": {Replicas: 1, Class: strings.Repeat("x", MaxClass+1)},
	}
	for word, p := range bad {
		err := p.Check()
		if KindOf(err) != Invalid || !strings.Contains(err.Error(), word) {
			t.Errorf("%+v: %v, want it to mention %q", p, err, word)
		}
	}
	for s := range spreads {
		if got, err := ParseSpread(s.String()); err != nil || got != s {
			t.Errorf("%v: %v, %v", s, got, err)
		}
	}
	if _, err := ParseSpread("row"); KindOf(err) != Invalid {
		t.Error(err)
	}
}
