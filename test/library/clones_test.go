package library

import (
	"fmt"
	"strings"
	"testing"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

func TestClones(t *testing.T) {
	t.Parallel()
	c, ctx := newCluster(t), t.Context()
	admin, boss := c.admin(), c.operator("admin")
	v := c.volume(admin, "data")
	large := strings.Repeat("large ", 1_000_000)
	c.put(v, "/large", large)
	c.put(v, "/small", "then")
	c.must(second(boss.TakeSnapshot(ctx, v.ID(), "v1")))
	c.put(v, "/small", "now")

	c.must(v.Clone(ctx, "v1", "exp"))
	c.must(v.Clone(ctx, "", "copy"))
	c.refused(v.Clone(ctx, "v1", "exp"), meta.VolumeExists, "exp")
	c.refused(v.Clone(ctx, "none", "x"), meta.NoSuchSnapshot, "none")
	for _, name := range append(badNames, strings.Repeat("x", meta.MaxName+1)) {
		c.refused(v.Clone(ctx, "", name), meta.Invalid)
	}
	if l, err := boss.Snapshots(ctx, v.ID()); err != nil || len(l.Snapshots) != 2 { // v1, and the snapshot of the copy
		t.Errorf("what was refused left %+v, %v", l, err)
	}
	exp, cp := c.open(admin, "exp"), c.open(admin, "copy")
	c.has(exp, "/small", "then")
	c.has(cp, "/small", "now")
	c.put(exp, "/small", "mine")
	c.put(v, "/small", "theirs")
	c.has(exp, "/small", "mine")
	c.has(cp, "/small", "now")
	c.has(exp, "/large", large)

	clones, err := v.Clones(ctx)
	if err != nil || len(clones) != 2 {
		t.Fatalf("%+v, %v", clones, err)
	}
	for i, want := range []penstock.CloneOf{{Name: "exp", Snapshot: "v1"}, {Name: "copy", Implied: true}} {
		x := clones[i]
		if x.Name != want.Name || x.Origin != "data" || x.Implied != want.Implied || want.Snapshot != "" && x.Snapshot != want.Snapshot {
			t.Errorf("%+v", x)
		}
	}
	vols, err := admin.Volumes()
	c.must(err)
	c.refused(second(boss.DeleteSnapshot(ctx, v.ID(), "v1")), meta.Busy, "exp")
	c.refused(vols.Delete(ctx, v.ID(), true), meta.Busy, "exp", "copy")

	// A clone of a clone; then neither needs the origin.
	c.must(exp.Clone(ctx, "", "inner"))
	c.has(c.open(admin, "inner"), "/large", large)
	c.refused(second(exp.Promote(ctx)), meta.Busy, "inner")
	inner, err := vols.Find(ctx, "inner")
	c.must(err)
	c.must(vols.Delete(ctx, inner.ID, true))
	c.refused(second(exp.PromoteAt(ctx, penstock.MinPromoteRate-1)), meta.Invalid)
	if p, err := exp.PromoteAt(ctx, 1<<40); err != nil || p.Rate != 1<<40 {
		t.Errorf("%+v, %v", p, err)
	}
	c.Until("promoted", func() error {
		p, err := exp.Promote(ctx)
		if err == nil && !p.Done {
			err = fmt.Errorf("%+v", p)
		}
		return err
	})
	if p, err := v.Promote(ctx); err != nil || !p.Done {
		t.Errorf("of a volume that is no clone: %+v, %v", p, err)
	}
	if l, err := v.Clones(ctx); err != nil || len(l) != 1 || l[0].Name != "copy" {
		t.Errorf("%+v, %v", l, err)
	}
	c.must(second(boss.DeleteSnapshot(ctx, v.ID(), "v1")))
	c.must(vols.Delete(ctx, cp.ID(), true))
	c.Until("the snapshot goes with its clone", func() error {
		l, err := boss.Snapshots(ctx, v.ID())
		if err == nil && len(l.Snapshots) > 0 {
			err = fmt.Errorf("%+v", l)
		}
		return err
	})
	c.must(vols.Delete(ctx, v.ID(), true))
	c.has(c.open(c.dial("admin"), "exp"), "/large", large)
	c.Must("fsck", "--volume", "exp")

	// A new clone has no grants: only administrators of the cluster can make clones.
	c.must(second(boss.TakeSnapshot(ctx, exp.ID(), "e1")))
	s, err := exp.Snapshot(ctx, "e1")
	c.must(err)
	c.refused(s.Clone(ctx, "", "x"), meta.ReadOnly)
	for name, rights := range map[string]string{"reader": "read", "owner": "admin"} {
		u := c.open(c.user(name, "exp", rights), "exp")
		c.refused(u.Clone(ctx, "e1", "mine"), meta.AccessDenied)
		c.refused(second(u.Clones(ctx)), meta.AccessDenied)
	}
	c.refused(second(c.open(c.dial("reader"), "exp").Promote(ctx)), meta.AccessDenied)
}
