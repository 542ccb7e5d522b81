package server

import (
	"errors"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/wire"
)

func (p *peer) admin(t *testing.T, a wire.Admin) *wire.AdminRe {
	t.Helper()
	r, err := p.Admin(t.Context(), a)
	if err != nil {
		t.Fatalf("admin %d: %v", a.Op, err)
	}
	return r
}

func (p *peer) refused(t *testing.T, why meta.Kind, a wire.Admin) {
	t.Helper()
	if _, err := p.Admin(t.Context(), a); !errors.Is(err, why) {
		t.Errorf("admin %d of %q %d: %v, want %v", a.Op, a.Name, a.Volume, err, why)
	}
}

// The life of a volume: made, attached below other volumes, found through its junction, detached,
// deleted; and every request that is refused on the way.
func TestVolumes(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	f := s.chunkServer(1)
	a := s.dial("a")
	make := func(name string) meta.VolumeID {
		return a.must(t, toCreate(name, meta.Policy{}))
	}
	v2, v3 := make("two"), make("three")
	a.mustNot(t, meta.VolumeExists, toCreate("two", meta.Policy{}))
	a.refused(t, meta.NoSuchVolume, wire.Admin{Op: wire.AdminVolumeByName, Name: "four"})

	attach := func(v, parent meta.VolumeID, name string) proto.Message {
		return toAttach(v, parent, name)
	}
	a.mustNot(t, meta.Invalid, attach(meta.RootVolume, v2, "root"))
	a.mustNot(t, meta.Invalid, attach(v2, v2, "self"))
	a.mustNot(t, meta.NotAttached, toDetach(v2))
	a.create(t, "taken")
	a.mustNot(t, meta.Exists, attach(v2, 1, "taken"))
	a.must(t, attach(v2, 1, "two"))
	a.must(t, attach(v3, v2, "three"))
	a.mustNot(t, meta.Exists, attach(v2, 1, "elsewhere"))
	a.must(t, toDetach(v2))
	a.mustNot(t, meta.Invalid, attach(v2, v3, "below itself"))
	a.must(t, attach(v2, 1, "two"))

	if r := a.do(t, &meta.Lookup{Parent: meta.RootIno, Name: "two"}, meta.LeaseNone); r.Volume != v2 {
		t.Fatalf("the junction leads to volume %d, want %d", r.Volume, v2)
	}
	for i, err := range a.Volumes(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if i.ID == v3 && i.Path != "/two/three" {
			t.Errorf("volume three is said to be at %q", i.Path)
		}
	}
	a.mustNot(t, meta.NotPermitted, toDelete(meta.RootVolume))
	a.mustNot(t, meta.Busy, toDelete(v2))
	a.must(t, toDetach(v2))
	a.mustNot(t, meta.NotEmpty, toDelete(v2))
	a.must(t, toDetach(v3))

	// A volume with a file: the file's chunk goes, too.
	r, err := a.Do(t.Context(), v3, meta.OpID{}, newFile("x"), meta.LeaseNone)
	if err != nil {
		t.Fatal(err)
	}
	g, err := a.AllocChunks(t.Context(), v3, 1, false)
	if err != nil {
		t.Fatal(err)
	}
	f.has(g[0].ID, 5000, 5000)
	write := &meta.Write{Ino: r.Attr.Ino, Extents: []meta.Extent{{Len: 5000, Chunk: g[0].ID}}, Size: 5000, Synced: true}
	if _, err := a.Do(t.Context(), v3, meta.OpID{}, write, meta.LeaseNone); err != nil {
		t.Fatal(err)
	}
	a.must(t, toDelete(v3))
	if len(f.ordered(g[0].ID, meta.OrderDelete)) == 0 {
		t.Error("the volume's chunk was not deleted")
	}
	if _, err := s.api().Volumes.CheckVolume(t.Context(), &admin.CheckVolumeRequest{Volume: admin.Numbered(v3)}); !errors.Is(err, meta.NoSuchVolume) {
		t.Errorf("the deleted volume is checked: %v", err)
	}
	if _, err := a.Do(t.Context(), v3, meta.OpID{}, &meta.GetAttr{Ino: meta.RootIno}, meta.LeaseNone); !errors.Is(err, meta.NoSuchVolume) {
		t.Errorf("the deleted volume answers: %v", err)
	}
	s.clean(t, 1)
	s.clean(t, v2)
}

// Rule 9: no chunk crosses volumes.
func TestChunksDoNotCrossVolumes(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	f := s.chunkServer(1)
	a := s.dial("a")
	v2 := a.must(t, toCreate("two", meta.Policy{}))
	g := a.alloc(t, false)
	f.has(g.ID, 5000, 5000)
	r, err := a.Do(t.Context(), v2, meta.OpID{}, newFile("thief"), meta.LeaseNone)
	if err != nil {
		t.Fatal(err)
	}
	write := &meta.Write{Ino: r.Attr.Ino, Extents: []meta.Extent{{Len: 5000, Chunk: g.ID}}, Size: 5000, Synced: true}
	if _, err := a.Do(t.Context(), v2, meta.OpID{}, write, meta.LeaseNone); err == nil {
		t.Fatal("a file of volume 2 lies in a chunk of volume 1")
	}
	s.clean(t, 1)
	s.clean(t, v2)
}

// Of two open volumes, the first loses its owner and comes back, the second keeps its own files
// and numbers, and a journal without space stops only its own volume.
func TestTwoVolumesAreIndependent(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, 0)
	a := s.dial("a")
	v2 := a.must(t, toCreate("two", meta.Policy{}))
	in := func(v meta.VolumeID, op meta.Op) (*meta.Result, error) {
		return a.Do(t.Context(), v, meta.OpID{}, op, meta.LeaseNone)
	}
	for _, v := range []meta.VolumeID{1, v2} {
		if _, err := in(v, newFile("same")); err != nil {
			t.Fatal(err)
		}
		if err := a.Sync(t.Context(), v); err != nil {
			t.Fatal(err)
		}
	}
	s.cluster.log.SetFull(true)
	eventually(t, "volume 1 refuses", func() error {
		if _, err := in(1, &meta.SetAttr{Ino: meta.RootIno, Mask: meta.SetMode, Mode: 0o711}); !errors.Is(err, meta.NoSpace) {
			return errors.Join(errors.New("not yet"), err)
		}
		return nil
	})
	if _, err := in(v2, newFile("other")); err != nil {
		t.Fatalf("volume 2 suffers: %v", err)
	}
	if err := a.Sync(t.Context(), v2); err != nil {
		t.Fatal(err)
	}
	s.cluster.log.SetFull(false)
	s.cluster.lose(1)
	for v, n := range map[meta.VolumeID]int{1: 1, v2: 2} {
		r, err := in(v, &meta.ReadDir{Ino: meta.RootIno, Max: 100})
		if err != nil || len(r.Entries) != n {
			t.Fatalf("volume %d: %d names, %v", v, len(r.Entries), err)
		}
		s.clean(t, v)
	}
}

// A chunk server without a number gets a new number, and a number that the server has is
// confirmed. While the cluster's records are restored, numbers are confirmed and other calls are
// refused.
func TestEnrolment(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	api := newAPIClient(t, "unix:"+s.addr, nil)
	one, err := api.Enrolment.EnrolChunkServer(t.Context(), &admin.EnrolChunkServerRequest{})
	if err != nil || one.Cluster != "test" || one.Server == 0 {
		t.Fatal(one, err)
	}
	if again, err := api.Enrolment.EnrolChunkServer(t.Context(), &admin.EnrolChunkServerRequest{Server: one.Server}); err != nil || again.Server != one.Server {
		t.Error(again, err)
	}
	if _, err := api.Enrolment.RenewCertificate(t.Context(), &admin.RenewCertificateRequest{}); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("a caller without a certificate renews it: %v", err)
	}
	for _, m := range admin.Methods() {
		enrols := strings.HasPrefix(m.Name, "/penstock.admin.v1.Enrolment/")
		if m.WhileRestoring != enrols {
			t.Errorf("%s is answered while records are restored: %v", m.Name, m.WhileRestoring)
		}
	}
}
