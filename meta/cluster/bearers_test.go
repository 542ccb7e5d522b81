package cluster

import (
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

// TestBindServer: a number belongs to the certificate that showed the number first, until the
// identity is evicted or the node removed.
func TestBindServer(t *testing.T) {
	c := join(t, client(t))
	ctx := t.Context()
	bind := func(id meta.ServerID, who string) error { t.Helper(); return c.BindServer(ctx, id, who) }
	for _, name := range []string{"a", "b"} {
		if _, err := c.Enrol(ctx, Member{Role: peer.ChunkServer, Name: name}, false); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := bind(1, "chunkserver/a"); err != nil {
			t.Fatal(err)
		}
	}
	want(t, bind(1, "chunkserver/b"), meta.AccessDenied)
	v, err := c.Refresh(ctx)
	if err != nil || v.Bearers[1].Who != "chunkserver/a" {
		t.Fatal(v.Bearers, err)
	}
	want(t, bind(1, "chunkserver/b"), meta.AccessDenied)
	if err := bind(2, "chunkserver/b"); err != nil {
		t.Fatal(err)
	}
	// The node was removed: its number goes to the next identity that comes with the
	// node's disks.
	if err := c.ObserveNode(ctx, NodeOf("a", meta.ServerInfo{ID: 1}), 1); err != nil {
		t.Fatal(err)
	}
	want(t, bind(1, "chunkserver/b"), meta.AccessDenied)
	if _, err := c.SetNodeState(ctx, 1, NodeRemoved, 2); err != nil {
		t.Fatal(err)
	}
	if err := bind(1, "chunkserver/b"); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Refresh(ctx); err != nil {
		t.Fatal(err)
	}
	// An evicted identity bears no number.
	want(t, bind(2, "chunkserver/c"), meta.AccessDenied)
	if err := c.Evict(ctx, peer.ChunkServer, "b"); err != nil {
		t.Fatal(err)
	}
	if err := bind(2, "chunkserver/c"); err != nil {
		t.Fatal(err)
	}
	if v, err = c.Refresh(ctx); err != nil || v.Bearers[2].Who != "chunkserver/c" {
		t.Fatal(v.Bearers, err)
	}
}

// TestDeletedVolumes: a deleted volume's record lasts until every server was seen without
// the volume's chunks.
func TestDeletedVolumes(t *testing.T) {
	c := join(t, client(t))
	ctx := t.Context()
	v, err := c.CreateVolume(ctx, "data", meta.Policy{Replicas: 1}, 1)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.DeleteVolume(ctx, v.ID, 1, 2); err != nil {
		t.Fatal(err)
	}
	on := func() (all []meta.ServerID) {
		t.Helper()
		d, err := c.DeletedVolumes(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range d {
			if x.Volume == v.ID {
				all = append(all, x.On...)
			}
		}
		return all
	}
	for i, server := range []meta.ServerID{2, 2, 1, 1} {
		if got, want := len(on()), []int{2, 1, 1, 0}[i]; got != want {
			t.Fatalf("step %d: %d servers", i, got)
		}
		if err := c.SweptVolume(ctx, v.ID, server); err != nil {
			t.Fatal(err)
		}
	}
	if on() != nil {
		t.Error("the record is still there")
	}
}
