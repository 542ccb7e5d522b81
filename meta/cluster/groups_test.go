package cluster

import (
	"testing"

	"penstock.io/penstock/meta"
)

// TestGroupIsDecidedOnce: only a caller that has read the last version writes a group's
// record, so a group is decided once.
func TestGroupIsDecidedOnce(t *testing.T) {
	c, ctx := join(t, client(t)), t.Context()
	_, err := c.Group(ctx, "g")
	want(t, err, meta.NotFound)
	g, err := c.PutGroup(ctx, meta.Group{Version: meta.GroupVersion, Name: "g", ID: 2, State: meta.GroupTaking, Members: []meta.GroupMember{{Volume: 1}, {Volume: 2}}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.PutGroup(ctx, meta.Group{Version: meta.GroupVersion, Name: "g", ID: 4})
	want(t, err, meta.Again)
	_, err = c.PutGroup(ctx, meta.Group{Version: meta.GroupVersion + 1, Name: "h"})
	want(t, err, meta.Version)
	late := g
	g.State = meta.GroupAborted
	if g, err = c.PutGroup(ctx, g); err != nil {
		t.Fatal(err)
	}
	late.State = meta.GroupReady
	_, err = c.PutGroup(ctx, late)
	want(t, err, meta.Again)
	want(t, c.DropGroup(ctx, late), meta.Again)
	if l, err := c.Groups(ctx); err != nil || len(l) != 1 || l[0].State != meta.GroupAborted || l[0].Revision != g.Revision || l[0].Members[1].Volume != 2 {
		t.Fatal(l, err)
	}
	if err := c.DropGroup(ctx, g); err != nil {
		t.Fatal(err)
	}
	_, err = c.PutGroup(ctx, late)
	want(t, err, meta.Again)
	if l, err := c.Groups(ctx); err != nil || len(l) != 0 {
		t.Fatal(l, err)
	}
}
