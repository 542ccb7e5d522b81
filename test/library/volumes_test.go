package library

import (
	"slices"
	"strings"
	"testing"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

func TestVolumes(t *testing.T) {
	t.Parallel()
	c, ctx := newCluster(t), t.Context()
	admin := c.admin()
	vols, err := admin.Volumes()
	c.must(err)
	day, zstd, vision := uint64(86400), "zstd", "vision"
	data, err := vols.Create(ctx, "data", meta.Policy{Replicas: 1, QuotaBytes: 1 << 30}, penstock.VolumeWords{TrashSeconds: &day, Compression: &zstd, Labels: map[string]*string{"team": &vision}})
	c.must(err)
	if data.Name != "data" || data.Policy.QuotaBytes != 1<<30 || data.TrashSeconds != day || data.Compression != zstd || data.Labels["team"] != vision {
		t.Errorf("%+v", data)
	}
	inner, err := vols.Create(ctx, "inner", meta.Policy{Replicas: 1}, penstock.VolumeWords{})
	c.must(err)
	create := func(name string) error {
		return second(vols.Create(ctx, name, meta.Policy{Replicas: 1}, penstock.VolumeWords{}))
	}
	c.refused(create("data"), meta.VolumeExists, "data")
	for _, name := range append(badNames, strings.Repeat("x", meta.MaxName+1)) {
		c.refused(create(name), meta.Invalid)
		c.refused(second(vols.Rename(ctx, inner.ID, name)), meta.Invalid)
	}
	c.refused(second(vols.Create(ctx, "many", meta.Policy{Replicas: 99}, penstock.VolumeWords{})), meta.Invalid)
	c.must(create(strings.Repeat("ö", meta.MaxName/2)))

	// Found, by name and in the list.
	if v, err := vols.Find(ctx, "data"); err != nil || v.ID != data.ID {
		t.Errorf("%+v, %v", v, err)
	}
	c.refused(second(vols.Find(ctx, "none")), meta.NoSuchVolume, "none")
	c.refused(second(admin.Volume(ctx, "none")), meta.NoSuchVolume, "none")
	names := func() (l []string) {
		t.Helper()
		for v, err := range vols.All(ctx) {
			c.must(err)
			l = append(l, v.Name)
		}
		return l
	}
	if l := names(); len(l) != 4 || !slices.Equal(l[:3], []string{"root", "data", "inner"}) {
		t.Errorf("%q", l)
	}
	for range vols.All(ctx) {
		break // ends the iteration
	}

	// Words that the request does not name stay.
	got, err := vols.Set(ctx, data.ID, meta.Policy{QuotaInodes: 500}, penstock.VolumeWords{Only: []string{"quota-inodes"}})
	c.must(err)
	if got.Policy.QuotaInodes != 500 || got.Policy.QuotaBytes != 1<<30 || got.Compression != zstd {
		t.Errorf("%+v", got)
	}
	c.refused(second(vols.Set(ctx, 99, meta.Policy{Replicas: 1}, penstock.VolumeWords{})), meta.NoSuchVolume)
	c.refused(second(vols.Set(ctx, data.ID, meta.Policy{}, penstock.VolumeWords{Only: []string{"colour"}})), meta.NotSupported, "colour")
	v := c.open(admin, "data")
	if s, err := v.StatFS(ctx); err != nil || s.QuotaBytes != 1<<30 || s.QuotaInode != 500 {
		t.Errorf("%+v, %v", s, err)
	}

	// The volumes are attached, one inside the other, and used by paths through the tree.
	root := c.open(admin, "root")
	c.refused(second(vols.Attach(ctx, data.ID, "/teams/data", false)), meta.NotFound)
	for range 2 {
		c.must(second(vols.Attach(ctx, data.ID, "/teams/data", true)))
	}
	c.refused(second(vols.Attach(ctx, data.ID, "/elsewhere", false)), meta.Exists)
	c.refused(second(vols.Attach(ctx, inner.ID, "/teams/data", false)), meta.Exists)
	c.refused(second(vols.Attach(ctx, data.ID, "/teams/data/below", false)), meta.Invalid, "below itself")
	c.must(second(vols.Attach(ctx, inner.ID, "/teams/data/inner", false)))
	c.put(root, "/teams/data/f", "through the tree")
	c.put(root, "/teams/data/inner/f", "deeper")
	c.has(v, "/f", "through the tree")
	c.refused(root.Tree().Rename(ctx, "/teams/data/f", "/f"), meta.CrossVolume)
	c.refused(root.Tree().Remove(ctx, "/teams/data"), meta.Busy)
	c.refused(vols.Delete(ctx, data.ID, false), meta.Busy, "data")
	c.must(vols.Detach(ctx, data.ID))
	c.refused(vols.Detach(ctx, data.ID), meta.NotAttached)
	c.refused(vols.Delete(ctx, data.ID, false), meta.NotEmpty)
	c.refused(second(root.Tree().Stat(ctx, "/teams/data")), meta.NotFound)
	c.must(vols.Detach(ctx, inner.ID))

	// Another name.
	c.refused(second(vols.Rename(ctx, data.ID, "inner")), meta.VolumeExists)
	c.refused(second(vols.Rename(ctx, meta.RootVolume, "tree")), meta.NotPermitted)
	c.must(second(vols.Rename(ctx, data.ID, "results")))
	c.has(c.open(admin, "results"), "/f", "through the tree")

	// Into the trash and back, under another name if need be; and gone.
	c.must(vols.Delete(ctx, data.ID, false))
	c.refused(second(vols.Find(ctx, "results")), meta.NoSuchVolume)
	c.must(create("results"))
	c.refused(second(vols.Undelete(ctx, 0, "results", "")), meta.VolumeExists)
	c.refused(second(vols.Undelete(ctx, 0, "results", "a@b")), meta.Invalid)
	back, err := vols.Undelete(ctx, 0, "results", "again")
	if err != nil || back.ID != data.ID || back.Name != "again" {
		t.Errorf("%+v, %v", back, err)
	}
	c.refused(second(vols.Undelete(ctx, data.ID, "", "")), meta.NoSuchVolume)
	c.has(c.open(c.dial("admin"), "again"), "/f", "through the tree")
	c.must(vols.Delete(ctx, inner.ID, true))
	c.refused(second(vols.Undelete(ctx, inner.ID, "", "")), meta.NoSuchVolume)
	c.refused(vols.Delete(ctx, meta.RootVolume, true), meta.NotPermitted)

	// A client with rights on a volume can administer at most this volume.
	reader := c.user("reader", "again", "read")
	theirs, err := reader.Volumes()
	c.must(err)
	c.must(second(theirs.Find(ctx, "again")))
	c.refused(second(theirs.Find(ctx, "results")), meta.AccessDenied)
	owner, err := c.user("owner", "again", "admin").Volumes()
	c.must(err)
	for _, u := range []penstock.Volumes{theirs, owner} {
		c.refused(second(u.Create(ctx, "mine", meta.Policy{Replicas: 1}, penstock.VolumeWords{})), meta.AccessDenied)
		c.refused(u.Delete(ctx, meta.RootVolume, true), meta.AccessDenied)
		c.refused(second(u.Undelete(ctx, 0, "inner", "")), meta.AccessDenied)
	}
	c.refused(second(theirs.Rename(ctx, data.ID, "mine")), meta.AccessDenied)
	c.refused(second(theirs.Set(ctx, data.ID, meta.Policy{Replicas: 1}, penstock.VolumeWords{})), meta.AccessDenied)
	c.must(second(owner.Set(ctx, data.ID, meta.Policy{QuotaBytes: 1 << 31}, penstock.VolumeWords{Only: []string{"quota"}})))
	c.must(second(owner.Rename(ctx, data.ID, "mine")))
}
