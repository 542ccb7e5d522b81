package server

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Requests that change volumes. Each is a different request, unless the test sets request_id.

func toCreate(name string, p meta.Policy) *admin.CreateVolumeRequest {
	settings, err := admin.SettingsOf(p, meta.VolumeWords{})
	if err != nil {
		panic(err)
	}
	return &admin.CreateVolumeRequest{Name: name, Settings: settings}
}

func toDelete(v meta.VolumeID) *admin.DeleteVolumeRequest {
	return &admin.DeleteVolumeRequest{Volume: admin.Numbered(v)}
}

func toAttach(v, parent meta.VolumeID, name string) *admin.AttachVolumeRequest {
	return &admin.AttachVolumeRequest{Volume: admin.Numbered(v), Parent: admin.Numbered(parent), Directory: uint64(meta.RootIno), Name: []byte(name)}
}

func toDetach(v meta.VolumeID) *admin.DetachVolumeRequest {
	return &admin.DetachVolumeRequest{Volume: admin.Numbered(v)}
}

// ask sends a request to change a volume.
func (p *peer) ask(ctx context.Context, request proto.Message) (*admin.Volume, error) {
	c := p.API.Volumes
	switch q := proto.Clone(request).(type) { // a clone: the client names requests
	case *admin.CreateVolumeRequest:
		return c.CreateVolume(ctx, q)
	case *admin.DeleteVolumeRequest:
		_, err := c.DeleteVolume(ctx, q)
		return nil, err
	case *admin.UndeleteVolumeRequest:
		return c.UndeleteVolume(ctx, q)
	case *admin.RenameVolumeRequest:
		return c.RenameVolume(ctx, q)
	case *admin.AttachVolumeRequest:
		return c.AttachVolume(ctx, q)
	case *admin.DetachVolumeRequest:
		return c.DetachVolume(ctx, q)
	}
	panic(fmt.Sprintf("a %T", request))
}

// must is ask for a request that must succeed; must returns the number of the volume.
func (p *peer) must(t *testing.T, request proto.Message) meta.VolumeID {
	t.Helper()
	v, err := p.ask(t.Context(), request)
	if err != nil {
		t.Fatalf("%T: %v", request, err)
	}
	return meta.VolumeID(v.GetId())
}

// mustNot is ask for a request that must be refused.
func (p *peer) mustNot(t *testing.T, why meta.Kind, request proto.Message) {
	t.Helper()
	if _, err := p.ask(t.Context(), request); !errors.Is(err, why) {
		t.Errorf("%T %v: %v, want %v", request, request, err, why)
	}
}

// mustSet gives the root volume a policy.
func (p *peer) mustSet(t *testing.T, policy meta.Policy) {
	t.Helper()
	if _, err := p.SetVolume(t.Context(), 1, policy, meta.VolumeWords{}); err != nil {
		t.Fatal(err)
	}
}

// A repeated request finds its volume by number: by the time of the repetition, the name may
// belong to another volume.
func TestDoneOnceByNumber(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	a := s.dial("a")
	v := a.must(t, toCreate("v", meta.Policy{}))
	for _, q := range []proto.Message{
		&admin.DeleteVolumeRequest{Volume: admin.Named("v")},
		&admin.RenameVolumeRequest{Volume: admin.Named("v"), Name: "w"},
		&admin.AttachVolumeRequest{Volume: admin.Named("v"), Parent: admin.Numbered(1), Directory: 1, Name: []byte("v")},
		&admin.DetachVolumeRequest{Volume: admin.Named("v")},
		&admin.DeleteVolumeRequest{},
	} {
		a.mustNot(t, meta.Invalid, q)
	}
	if i, err := a.VolumeByID(t.Context(), v); err != nil || i.Name != "v" || i.State != meta.VolumeReady || i.Path != "" {
		t.Errorf("%+v, %v", i, err)
	}
}
