package cluster

import (
	"slices"
	"testing"

	"penstock.io/penstock/meta"
)

func TestNodes(t *testing.T) {
	c := join(t, client(t))
	ctx := t.Context()
	_, err := c.SetNodeState(ctx, 7, NodeDraining, 1)
	want(t, err, meta.NotFound)
	info := meta.ServerInfo{ID: 7, Addr: "a:1", Topology: "/dc/r/n", Disks: []meta.DiskInfo{{ID: "b", Class: "ssd", Total: 5}, {ID: "a", Class: "hdd", Total: 6}}}
	if err := c.ObserveNode(ctx, NodeOf("n7", info), 10); err != nil {
		t.Fatal(err)
	}
	n, err := c.SetNodeState(ctx, 7, NodeDraining, 20)
	if err != nil || n.State != NodeDraining || n.Since != 20 || n.FirstSeen != 10 {
		t.Fatalf("%+v, %v", n, err)
	}
	if got := c.Nodes(); len(got) != 1 || got[0].State != NodeDraining || got[0].Name != "n7" {
		t.Fatalf("who set it does not see it: %+v", got)
	}
	// The node comes back elsewhere, with another disk, and is still draining.
	info.Addr, info.Disks = "b:2", info.Disks[:1]
	seen := NodeOf("n7", info)
	if n.Tells(&seen) {
		t.Error("nothing seems to have changed")
	}
	if err := c.ObserveNode(ctx, seen, 30); err != nil {
		t.Fatal(err)
	}
	v, err := c.Refresh(ctx)
	if err != nil {
		t.Fatal(err)
	}
	got := v.Nodes[0]
	if got.State != NodeDraining || got.FirstSeen != 10 || got.Since != 20 || got.Addr != "b:2" || !slices.Equal(got.Disks, []NodeDisk{{ID: "b", Class: "ssd", Total: 5}}) || !got.Tells(&seen) {
		t.Fatalf("%+v", got)
	}
	// The node's record outlives all records with a lease.
	all, err := c.Records(ctx)
	if err != nil || !slices.ContainsFunc(all, func(r Record) bool { return r.Key == "nodes/0000000000000007" }) {
		t.Fatal(all, err)
	}
}
