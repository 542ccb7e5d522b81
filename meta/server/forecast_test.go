package server

import (
	"slices"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Before a drain begins, the drain tells of the volumes that would be worse off, and of no
// others.
func TestDrainForecast(t *testing.T) {
	t.Parallel()
	g := newGrid(t, nil, racks[0], racks[2], racks[4])
	p := g.s.dial("a")
	g.policy(p, meta.Policy{Replicas: 1})
	for name, pol := range map[string]meta.Policy{
		"three": {Replicas: 3}, "all-three": {Replicas: 3, MinReplicas: 3}, "two": {Replicas: 2}, "here": {Replicas: 1, Topology: racks[4]}, "there": {Replicas: 1, Topology: racks[0]},
	} {
		if _, err := p.CreateVolume(t.Context(), name, pol, meta.VolumeWords{}); err != nil {
			t.Fatal(err)
		}
	}
	api := g.s.api()
	ask := func() (f DrainForecast) {
		t.Helper()
		answer, err := api.Nodes.ForecastDrain(t.Context(), &admin.ForecastDrainRequest{Node: 3})
		if err != nil {
			t.Fatal(err)
		}
		admin.Hear(&f, answer)
		return f
	}
	f := ask()
	want := []VolumeForecast{{"all-three", 3, 3, 0}, {"here", 1, 1, 0}, {"three", 3, 3, 2}}
	if !slices.Equal(f.Volumes, want) || f.Node != 3 || f.Used != 1<<39 || f.Room == 0 {
		t.Errorf("%+v, want %+v", f, want)
	}
	if n := g.s.srv.serverMap.servers().AtBest(); n.Most(&meta.Policy{Replicas: 3}, nil) != 3 {
		t.Error("to ask has begun the drain")
	}
	g.add(4, "/dc2/r5/n5")
	eventually(t, "with a fourth server none but what must lie there is worse off", func() error {
		return unless(slices.Equal(ask().Volumes, want[1:2]))
	})
}
