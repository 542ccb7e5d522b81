package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/meta"
)

// Volumes that pods bring along (CSI ephemeral inline volumes) live and die with
// the pod on its node: they are made when they are published, and deleted when
// they are unpublished. Their name is made of the node's and of the id that the
// orchestrator gives them, so nothing else needs to be kept.

// staging is where one is mounted.
func (s *Server) inlineStaging(volume string) string {
	return filepath.Join(s.State, "inline", keyOf(volume), "mount")
}

// stageInline makes the volume and mounts it.
func (s *Server) stageInline(ctx context.Context, q *csi.NodePublishVolumeRequest) (string, error) {
	const op = "make inline volume"
	if !s.Inline {
		return "", meta.E(op, meta.Busy, "", errors.New("this driver serves no inline volumes; use a generic ephemeral volume (volumeClaimTemplate), or start the driver with --inline"))
	}
	want, err := policy.ReadInline(q.GetVolumeContext())
	if err != nil {
		return "", err
	}
	r, _, err := s.wanted(q.GetVolumeId(), q.GetVolumeCapability())
	if err != nil {
		return "", err
	}
	name := handle.InlineName(s.Name, q.GetVolumeId())
	v, err := s.Cluster.VolumeByName(ctx, name)
	if errors.Is(err, meta.NoSuchVolume) {
		s.Step("inline.make")
		v, err = s.Cluster.Create(ctx, name, want)
		s.Step("inline.made")
	}
	if err != nil {
		return "", err
	}
	if v.Deleting || v.Terms != want {
		return "", meta.E(op, meta.Exists, name, errors.New("there is one with other attributes"))
	}
	staging := s.inlineStaging(q.GetVolumeId())
	if err := os.MkdirAll(filepath.Dir(staging), 0o700); err != nil {
		return "", err
	}
	r.Source, r.Staging = name+":/", staging
	return staging, s.stage(ctx, r)
}

// removeInline unmounts and deletes a pod's volume. Ids that are handles are not
// of such volumes.
func (s *Server) removeInline(ctx context.Context, volume string) error {
	if _, err := handle.ParseVolume(volume); err == nil || !s.Inline {
		return nil
	}
	staging := s.inlineStaging(volume)
	if err := s.unstage(ctx, volume, staging); err != nil {
		return err
	}
	if err := s.deleteInline(ctx, handle.InlineName(s.Name, volume)); err != nil {
		return err
	}
	if err := removeDir(staging); err != nil {
		return err
	}
	return removeDir(filepath.Dir(staging))
}

func (s *Server) deleteInline(ctx context.Context, name string) error {
	v, err := s.Cluster.VolumeByName(ctx, name)
	if errors.Is(err, meta.NoSuchVolume) {
		return nil
	}
	if err != nil {
		return err
	}
	s.Step("inline.delete")
	if err := s.Cluster.Delete(ctx, v.ID); err != nil && !errors.Is(err, meta.NoSuchVolume) {
		return err
	}
	s.Step("inline.deleted")
	return nil
}

// Sweep lets go of snapshots that mounts pinned which Recover found gone, and deletes
// this node's inline volumes that are not staged on it: their pods went while the
// node was down. staged is what Recover gave.
func (s *Server) Sweep(ctx context.Context, staged []string) error {
	for _, r := range s.pinnedYet {
		s.unpinGone(ctx, r)
	}
	if !s.Inline {
		return nil
	}
	keep := map[string]bool{}
	for _, v := range staged {
		keep[handle.InlineName(s.Name, v)] = true
	}
	all, err := s.Cluster.Volumes(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, v := range all {
		if strings.HasPrefix(v.Name, handle.InlinePrefix(s.Name)) && !keep[v.Name] {
			errs = append(errs, s.deleteInline(ctx, v.Name))
		}
	}
	return errors.Join(errs...)
}
