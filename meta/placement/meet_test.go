package placement

import (
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

func TestMeetable(t *testing.T) {
	disk := func(class string) []Disk { return []Disk{{Class: class, Total: 100 << 30}} } // full
	m := NewMap([]Server{
		{ID: 1, Topology: "/dc1/r1/a", Disks: disk("nvme"), State: Away},
		{ID: 2, Topology: "/dc1/r1/b", Disks: disk("hdd")},
		{ID: 3, Topology: "/dc1/r2/c", Disks: disk("hdd"), State: Gone},
		{ID: 4, Topology: "/dc1/r2/c", Disks: disk("hdd")}, // beside 3
	})
	for _, c := range []struct {
		p   meta.Policy
		why string // "": servers can meet the policy
	}{
		{meta.Policy{Replicas: 3}, ""},
		{meta.Policy{Replicas: 4}, "4 replicas on as many hosts"},
		{meta.Policy{Replicas: 4, MinReplicas: 1}, "4 replicas on as many hosts"},
		{meta.Policy{Replicas: 2, Spread: meta.SpreadRack}, ""},
		{meta.Policy{Replicas: 3, Spread: meta.SpreadRack}, "as many racks"},
		{meta.Policy{Replicas: 2, Spread: meta.SpreadDC}, "as many data centres"},
		{meta.Policy{Replicas: 2, Class: "hdd"}, ""},
		{meta.Policy{Replicas: 3, Class: "hdd"}, "stand on 2"},
		{meta.Policy{Replicas: 1, Class: "ssd"}, "there are hdd, nvme"},
		{meta.Policy{Replicas: 1, Topology: "/dc2"}, "below /dc2"},
		{meta.Policy{Replicas: 2, Topology: "/dc1/r1"}, ""},
		{meta.Policy{Replicas: 1, Topology: "/dc1/r2", Class: "nvme"}, "no chunk server below /dc1/r2 has disks of class nvme"},
	} {
		err := m.Meetable(&c.p)
		switch {
		case c.why == "" && err != nil:
			t.Errorf("%+v: %v", c.p, err)
		case c.why != "" && (meta.KindOf(err) != meta.ResourceExceeded || !strings.Contains(err.Error(), c.why)):
			t.Errorf("%+v: %v, which does not say %q", c.p, err, c.why)
		}
	}
}

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
		{meta.Policy{Replicas: 1}, []meta.ServerID{1, 2}, true}, // too many replicas count when the chunk is sealed
		{meta.Policy{Replicas: 2}, []meta.ServerID{1}, false},
		{meta.Policy{Replicas: 3}, []meta.ServerID{1}, false},
		{meta.Policy{Replicas: 3}, []meta.ServerID{1, 2}, true}, // two are the least number
		{meta.Policy{Replicas: 2, MinReplicas: 1}, []meta.ServerID{1}, true},
		{meta.Policy{Replicas: 2, Spread: meta.SpreadRack}, []meta.ServerID{1, 2}, false},
		{meta.Policy{Replicas: 2, Spread: meta.SpreadRack}, []meta.ServerID{1, 3}, true},
		{meta.Policy{Replicas: 1, Topology: "/dc1/r2"}, []meta.ServerID{1}, false},
		{meta.Policy{Replicas: 1, Topology: "/dc1/r2"}, []meta.ServerID{3, 1}, false},
		{meta.Policy{Replicas: 1, Class: "nvme"}, []meta.ServerID{1}, true},
		{meta.Policy{Replicas: 1, Class: "nvme"}, []meta.ServerID{3}, false},
		{meta.Policy{Replicas: 1, Class: "nvme"}, []meta.ServerID{2}, false}, // the disk of the server is not known
		{meta.Policy{Replicas: 1}, []meta.ServerID{9}, true},
	} {
		if got := m.Meets(&c.p, c.on); got != c.want {
			t.Errorf("%+v on %v: %v", c.p, c.on, got)
		}
	}
}
