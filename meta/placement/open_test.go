package placement

import (
	"testing"

	"penstock.io/penstock/meta"
)

// An open chunk ends for a fuller chunk only where the fuller chunk would have more replicas,
// within the policy and with the servers that the writer reaches.
func TestFuller(t *testing.T) {
	servers := site(1, 2, 2, 100<<30, 50<<30) // ids in order: two racks of two
	id := func(i int) meta.ServerID { return servers[i].ID }
	for _, c := range []struct {
		name   string
		p      meta.Policy
		on     []meta.ServerID
		avoid  []meta.ServerID
		change func([]Server)
		fuller bool
	}{
		{"all there", meta.Policy{Replicas: 3}, []meta.ServerID{id(0), id(1), id(2)}, nil, nil, false},
		{"one is missing", meta.Policy{Replicas: 3}, []meta.ServerID{id(0), id(1)}, nil, nil, true},
		{"one of two is", meta.Policy{Replicas: 2, MinReplicas: 1}, []meta.ServerID{id(0)}, nil, nil, true},
		{"no other is there", meta.Policy{Replicas: 3}, []meta.ServerID{id(0), id(1)}, nil, func(s []Server) { s[2].State, s[3].State = Away, Draining }, false},
		{"the other is full", meta.Policy{Replicas: 3}, []meta.ServerID{id(0), id(1)}, nil, func(s []Server) { s[2].State, s[3].Disks[0].Free = Away, 1<<30 }, false},
		{"its writer reaches no other", meta.Policy{Replicas: 3}, []meta.ServerID{id(0), id(1)}, []meta.ServerID{id(2), id(3)}, nil, false},
		{"its writer says that of its own", meta.Policy{Replicas: 3}, []meta.ServerID{id(0), id(1)}, []meta.ServerID{id(0), id(3)}, nil, true},
		{"one of its own is away, another came", meta.Policy{Replicas: 3}, []meta.ServerID{id(0), id(1)}, nil, func(s []Server) { s[0].State, s[3].State = Away, Away }, false},
		{"elsewhere", meta.Policy{Replicas: 3, Topology: "/nowhere"}, []meta.ServerID{id(0), id(1)}, nil, nil, false},
		{"there are two racks for three", meta.Policy{Replicas: 3, Spread: meta.SpreadRack}, []meta.ServerID{id(0), id(2)}, nil, nil, true}, // a third replica within either rack
		{"two racks are too few", meta.Policy{Replicas: 3, MinReplicas: 3, Spread: meta.SpreadRack}, []meta.ServerID{id(0), id(2)}, nil, nil, false},
		{"both in one rack, and another is there", meta.Policy{Replicas: 2, Spread: meta.SpreadRack}, []meta.ServerID{id(0), id(1)}, nil, nil, true},
		{"both in one rack, and the other is away", meta.Policy{Replicas: 2, MinReplicas: 1, Spread: meta.SpreadRack}, []meta.ServerID{id(0), id(1)}, nil, func(s []Server) { s[2].State, s[3].State = Away, Away }, false},
		{"as far apart as can be", meta.Policy{Replicas: 3, Spread: meta.SpreadRack}, []meta.ServerID{id(0), id(1), id(2)}, nil, nil, false},
	} {
		all := site(1, 2, 2, 100<<30, 50<<30)
		if c.change != nil {
			c.change(all)
		}
		if got := NewMap(all).Fuller(&c.p, c.on, c.avoid); got != c.fuller {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestStanding(t *testing.T) {
	m := NewMap([]Server{{ID: 1, State: Live}, {ID: 2, State: Away}, {ID: 3, State: Gone}, {ID: 4, State: Draining}})
	got := m.Standing([]Replica{{Server: 1}, {Server: 1, State: Bad}, {Server: 1, State: Unfit}, {Server: 2}, {Server: 2, State: Bad}, {Server: 3}, {Server: 4}, {Server: 5}})
	if want := (Standing{Live: 3, Away: 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}
