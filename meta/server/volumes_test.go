package server

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/wire"
)

// TestUnreadLabels: a volume whose labels can't be read is found, used and changed like any
// other, and lists say that its labels are missing.
func TestUnreadLabels(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	a := s.dial("a")
	one := "1"
	labels := map[string]*string{"a": &one}
	var ids []meta.VolumeID
	for i := range 2 {
		v, err := a.CreateVolume(t.Context(), fmt.Sprint("v", i), meta.Policy{Replicas: 1}, meta.VolumeWords{Labels: labels})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, v.ID)
	}
	set := func(bad map[meta.VolumeID]error, reading, changing error) {
		s.cluster.mu.Lock()
		defer s.cluster.mu.Unlock()
		s.cluster.badLabels, s.cluster.noLabels, s.cluster.noChange = bad, reading, changing
	}
	set(map[meta.VolumeID]error{ids[0]: meta.E("read", meta.Version, "labels", nil)}, nil, nil)
	for v, err := range a.Volumes(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if bad := v.ID == ids[0]; (v.LabelsUnread != "") != bad || (v.Labels["a"] == "1") != (v.ID == ids[1]) {
			t.Errorf("%s is told of as %+v", v.Name, v)
		}
	}
	if v, err := a.FindVolume(t.Context(), "v0"); err != nil || v.LabelsUnread == "" {
		t.Errorf("%+v, %v", v, err)
	}
	if v, err := a.SetVolume(t.Context(), ids[0], meta.Policy{QuotaBytes: 5}, meta.VolumeWords{Only: []string{"quota"}}); err != nil || v.Policy.QuotaBytes != 5 {
		t.Errorf("%+v, %v", v.Policy, err)
	}
	if _, err := a.SetVolume(t.Context(), ids[0], meta.Policy{QuotaBytes: 6}, meta.VolumeWords{Only: []string{"quota"}, Labels: labels}); !errors.Is(err, meta.Version) {
		t.Errorf("labels that can't be read are changed: %v", err)
	}
	if v, err := a.FindVolume(t.Context(), "v0"); err != nil || v.Policy.QuotaBytes != 5 {
		t.Errorf("a change that was refused: %+v, %v", v.Policy, err)
	}

	// Where no labels can be read, the request is still carried out.
	away := meta.E("read", meta.Unavailable, "labels", nil)
	set(nil, away, nil)
	if v, err := a.CreateVolume(t.Context(), "v2", meta.Policy{Replicas: 1}, meta.VolumeWords{Labels: labels}); err != nil || v.LabelsUnread == "" {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := a.FindVolume(t.Context(), "v1"); !errors.Is(err, meta.Unavailable) {
		t.Errorf("labels are asked for: %v", err)
	}
	// A client that uses a volume asks for no labels.
	set(nil, nil, nil)
	read := s.cluster.labelled.Load()
	for _, m := range []wire.Admin{{Op: wire.AdminVolumeByName, Name: "v1"}, {Op: wire.AdminVolumeByName, Volume: ids[1]}} {
		if re, err := a.Admin(t.Context(), m); err != nil || len(re.Volumes) != 1 {
			t.Errorf("%+v, %v", re, err)
		}
	}
	// Nor does a server that asks for the usage.
	if l, err := a.API.Volumes.ListVolumes(t.Context(), &admin.ListVolumesRequest{Server: s.srv.cfg.Name}); err != nil || len(l.Volumes) == 0 {
		t.Errorf("%v, %v", l, err)
	}
	if n := s.cluster.labelled.Load() - read; n != 0 {
		t.Errorf("labels were read %d times", n)
	}
}

// TestLabelsRefused: where labels are refused nothing else is changed. Where writing
// them fails, the rest is in force at once.
func TestLabelsRefused(t *testing.T) {
	t.Parallel()
	s := newSiteTTL(t, time.Minute)
	a := s.dial("a")
	one, zstd := "1", "zstd"
	full := map[string]*string{}
	for i := range meta.MaxLabels {
		full[fmt.Sprint("k", i)] = &one
	}
	if _, err := a.SetVolume(t.Context(), 1, meta.Policy{}, meta.VolumeWords{Only: []string{}, Labels: full}); err != nil {
		t.Fatal(err)
	}
	change := func(key string) error {
		_, err := a.SetVolume(t.Context(), 1, meta.Policy{QuotaBytes: 5}, meta.VolumeWords{Only: []string{"quota"}, Compression: &zstd, Labels: map[string]*string{key: &one}})
		return err
	}
	if err := change("more"); !errors.Is(err, meta.ResourceExceeded) {
		t.Errorf("one label too many: %v", err)
	}
	v, err := a.FindVolume(t.Context(), "root")
	if err != nil || v.Policy.QuotaBytes != 0 || v.Compression == zstd {
		t.Errorf("after a change that was refused: %+v, %v", v, err)
	}
	s.cluster.mu.Lock()
	s.cluster.noChange = meta.E("write", meta.Unavailable, "labels", nil)
	s.cluster.mu.Unlock()
	if err := change("k0"); !errors.Is(err, meta.Unavailable) {
		t.Errorf("labels are not written: %v", err)
	}
	if c := s.srv.hosted.opened(1).words.compression(); c != meta.CompressZstd {
		t.Errorf("the row says %s, and chunks are stored as %v", zstd, c)
	}
}
