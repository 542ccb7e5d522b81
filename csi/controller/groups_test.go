package controller

import (
	"context"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/meta"
)

// grouped has groups in memory. After each read of a group, look is called, before the reader
// goes on.
type grouped struct {
	*memory
	groups map[string]meta.Group
	look   func()
}

func (c *grouped) Group(_ context.Context, name string) (meta.Group, error) {
	g, there := c.groups[name]
	if !there {
		return g, meta.E("group", meta.NotFound, name, nil)
	}
	if look := c.look; look != nil {
		c.look = nil
		look()
	}
	return g, nil
}

func (c *grouped) TakeGroup(_ context.Context, name string, _ []meta.VolumeID) (meta.Group, error) {
	return meta.Group{}, meta.E("take group", meta.Exists, name, nil)
}

func (c *grouped) DeleteGroup(_ context.Context, name string) error {
	delete(c.groups, name)
	return nil
}

// TestGroupOfSameName: while two calls delete a group, another group gets its name: that
// group is not deleted.
func TestGroupOfSameName(t *testing.T) {
	s, m := newServer()
	const name = handle.Made + "g"
	c := &grouped{memory: m, groups: map[string]meta.Group{name: {Name: name, ID: 2, State: meta.GroupReady}}}
	s.Cluster = c
	x := &Groups{s: s, c: c}
	q := &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: handle.Group{Cluster: handle.ClusterOf("c1"), ID: 2, Name: name}.String()}
	again := false
	c.look = func() {
		if _, err := x.DeleteVolumeGroupSnapshot(t.Context(), q); err == nil {
			c.groups[name] = meta.Group{Name: name, ID: 4, State: meta.GroupReady}
			again = true
		}
	}
	ok(t, x.DeleteVolumeGroupSnapshot, q)
	if g, there := c.groups[name]; there != again || there && g.ID != 4 {
		t.Errorf("groups are %v; another one was taken: %t", c.groups, again)
	}
	// Of another group of the name nothing is deleted.
	c.groups[name] = meta.Group{Name: name, ID: 4, State: meta.GroupReady}
	ok(t, x.DeleteVolumeGroupSnapshot, q)
	if len(c.groups) != 1 {
		t.Errorf("groups are %v", c.groups)
	}
}
