package placement

import (
	"testing"

	"penstock.io/penstock/meta"
)

func TestMeets(t *testing.T) {
	m := NewMap([]Server{
		{ID: 1, Topology: "/dc1/r1/a", Disks: []Disk{{Class: "nvme", Total: 1}}},
		{ID: 2, Topology: "/dc1/r1/b", Disks: []Disk{{Class: "hdd", Total: 1}, {Class: "nvme", Total: 1}}},
		{ID: 3, Topology: "/dc1/r2/c", Disks: []Disk{{Class: "hdd", Total: 1}}},
	})
	for _, c := range []struct {
		p    meta.Policy
		on   []meta.ServerID
		want bool
	}{
		{meta.Policy{Replicas: 1}, []meta.ServerID{1}, true},
		{meta.Policy{Replicas: 1}, []meta.ServerID{1, 2}, true}, // too many is for when it is sealed
		{meta.Policy{Replicas: 2}, []meta.ServerID{1}, false},
		{meta.Policy{Replicas: 3}, []meta.ServerID{1}, false},
		{meta.Policy{Replicas: 3}, []meta.ServerID{1, 2}, true}, // two are its least
		{meta.Policy{Replicas: 2, MinReplicas: 1}, []meta.ServerID{1}, true},
		{meta.Policy{Replicas: 2, Spread: meta.SpreadRack}, []meta.ServerID{1, 2}, false},
		{meta.Policy{Replicas: 2, Spread: meta.SpreadRack}, []meta.ServerID{1, 3}, true},
		{meta.Policy{Replicas: 1, Topology: "/dc1/r2"}, []meta.ServerID{1}, false},
		{meta.Policy{Replicas: 1, Topology: "/dc1/r2"}, []meta.ServerID{3, 1}, false},
		{meta.Policy{Replicas: 1, Class: "nvme"}, []meta.ServerID{1}, true},
		{meta.Policy{Replicas: 1, Class: "nvme"}, []meta.ServerID{3}, false},
		{meta.Policy{Replicas: 1, Class: "nvme"}, []meta.ServerID{2}, false}, // on which of its disks?
		{meta.Policy{Replicas: 1}, []meta.ServerID{9}, true},
	} {
		if got := m.Meets(&c.p, c.on); got != c.want {
			t.Errorf("%+v on %v: %v", c.p, c.on, got)
		}
	}
}
