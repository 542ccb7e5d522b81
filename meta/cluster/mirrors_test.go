package cluster

import (
	"testing"

	"penstock.io/penstock/meta"
)

// TestMirrorGoesWithItsTarget: a mirror's record goes with its target, and no record is
// made for a deleted target.
func TestMirrorGoesWithItsTarget(t *testing.T) {
	c, ctx := join(t, client(t)), t.Context()
	if _, err := c.CreateVolume(ctx, "root", meta.Policy{Replicas: 1}, 1); err != nil {
		t.Fatal(err)
	}
	v, err := c.CreateVolume(ctx, "target", meta.Policy{Replicas: 1}, 2)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.PutMirror(ctx, meta.Mirror{Version: meta.MirrorVersion, Name: "m", Target: v.ID, State: meta.MirrorPromoted})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.PutMirror(ctx, meta.Mirror{Version: meta.MirrorVersion, Name: "other", Target: v.ID})
	want(t, err, meta.Again)
	// A request that is repeated after a lost answer is done once, with the same answer.
	once := r
	once.Asked++
	first, err := c.PutMirror(ctx, once)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := c.PutMirror(ctx, once); err != nil || again.Revision != first.Revision || again.Asked != 1 {
		t.Errorf("sent again: %+v, %v; it was %+v", again, err, first)
	}
	_, err = c.PutMirror(ctx, r)
	want(t, err, meta.Again)
	r = first
	if err := c.DeleteVolume(ctx, v.ID); err != nil {
		t.Fatal(err)
	}
	_, err = c.Mirror(ctx, v.ID)
	want(t, err, meta.NotFound)
	for _, revision := range []int64{0, r.Revision} {
		r.Revision = revision
		_, err = c.PutMirror(ctx, r)
		want(t, err, meta.NoSuchVolume)
	}
	if l, err := c.Mirrors(ctx); err != nil || len(l) != 0 {
		t.Error(l, err)
	}
}
