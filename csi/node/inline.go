package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/meta"
)

// Inline volumes (CSI ephemeral inline volumes, defined in a pod) live as long as the pod on
// its node: NodePublishVolume creates an inline volume, and NodeUnpublishVolume deletes the
// volume. The volume's name follows from the node's name and the orchestrator's id of the
// volume, so the driver keeps no other record.

// inlineStaging returns the path at which an inline volume is mounted.
func (s *Server) inlineStaging(volume string) string {
	return filepath.Join(s.State, "inline", keyOf(volume), "mount")
}

// stageInline creates an inline volume and mounts the volume.
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
	if s.InlineMax > 0 && want.Policy.QuotaBytes > s.InlineMax {
		return "", meta.E(op, meta.Invalid, "", fmt.Errorf("a volume that a pod brings along has at most %d bytes here (--inline-max), not %d", s.InlineMax, want.Policy.QuotaBytes))
	}
	// Sweep may be about to delete the volume.
	name := handle.InlineName(s.Name, q.GetVolumeId())
	end, err := s.pending.Begin(name)
	if err != nil {
		return "", err
	}
	defer end()
	v, err := s.Cluster.VolumeByName(ctx, name)
	if errors.Is(err, meta.NoSuchVolume) {
		s.Step("inline.make")
		v, err = s.Cluster.Create(ctx, name, want)
		s.Step("inline.made")
	}
	if err != nil {
		return "", err
	}
	if v.Deleting || v.Policy != want.Policy || v.Compression != want.Compression { // an administrator may have set the other terms
		return "", meta.E(op, meta.Exists, name, errors.New("there is one with other attributes"))
	}
	staging := s.inlineStaging(q.GetVolumeId())
	if err := os.MkdirAll(filepath.Dir(staging), 0o700); err != nil {
		return "", err
	}
	r.Source, r.Staging = name+":/", staging
	return staging, s.stage(ctx, r)
}

// removeInline unmounts and deletes a pod's inline volume. A driver without --inline may lack
// the right to delete the inline volumes made while it ran with --inline. Then removeInline
// logs an error and leaves the volume in the cluster, so that the pod can end.
func (s *Server) removeInline(ctx context.Context, volume string) error {
	if !mayBeInline(volume) {
		return nil
	}
	staging := s.inlineStaging(volume)
	if !s.Inline {
		if _, err := os.Lstat(filepath.Dir(staging)); errors.Is(err, os.ErrNotExist) {
			return nil
		}
	}
	if err := s.unstage(ctx, volume, staging); err != nil {
		return err
	}
	name := handle.InlineName(s.Name, volume)
	err := s.deleteInline(ctx, name)
	if err != nil && !s.Inline && (errors.Is(err, meta.AccessDenied) || errors.Is(err, meta.NotPermitted)) {
		s.Logger.Error("inline volume: not deleted, since the driver runs without --inline and its identity may not delete volumes; delete it by hand: penstock volume delete", "volume", name, "err", err)
		err = nil
	}
	if err != nil {
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

// Sweep unpins the snapshots of mounts that Recover found gone, and deletes this node's
// unstaged inline volumes, whose pods ended while the node was down. staged is the result of
// Recover. The service may serve calls meanwhile.
func (s *Server) Sweep(ctx context.Context, staged []string) error {
	for _, r := range s.pinnedYet {
		s.unpinGone(ctx, r)
	}
	if !s.Inline {
		return nil
	}
	if _, unread := s.folders(); unread > 0 {
		return meta.E("clear away inline volumes", meta.Corrupt, s.State, fmt.Errorf("%d records can't be read, and may be of pods that run: nothing is deleted", unread))
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
			errs = append(errs, s.sweepInline(ctx, v.Name))
		}
	}
	return errors.Join(errs...)
}

// sweepInline deletes an inline volume of this node, unless a pod has got the volume since the
// service began.
func (s *Server) sweepInline(ctx context.Context, name string) error {
	end, err := s.pending.Begin(name)
	if err != nil {
		return nil // a call is publishing the volume to a pod
	}
	defer end()
	staged, unread := s.folders()
	for _, f := range staged {
		r, err := f.read()
		if err != nil && meta.KindOf(err) != meta.NotFound {
			unread++
		}
		if err == nil && handle.InlineName(s.Name, r.Volume) == name {
			return nil
		}
	}
	if unread > 0 {
		return meta.E("clear away inline volumes", meta.Corrupt, s.State, fmt.Errorf("%d records can't be read: %s is not deleted", unread, name))
	}
	return s.deleteInline(ctx, name)
}
