package cluster

import (
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
)

func TestRank(t *testing.T) {
	var servers []MetaServer
	for i := range 5 {
		servers = append(servers, MetaServer{Name: fmt.Sprint("m", i)})
	}
	count := map[string]int{}
	for v := range meta.VolumeID(1000) {
		all := Rank(v, servers)
		if len(all) != len(servers) {
			t.Fatal(all)
		}
		count[all[0].Name]++
		// A server goes: the order of the others stays.
		gone := all[v%5].Name
		var left, want []MetaServer
		for _, s := range servers {
			if s.Name != gone {
				left = append(left, s)
			}
		}
		for _, s := range all {
			if s.Name != gone {
				want = append(want, s)
			}
		}
		if got := Rank(v, left); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatal(got, want)
		}
	}
	for _, s := range servers {
		if n := count[s.Name]; n < 120 || n > 280 {
			t.Errorf("%s ranks first for %d of 1,000 volumes", s.Name, n)
		}
	}
}
