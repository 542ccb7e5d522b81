package node

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/process"
)

// NodePublishVolume binds a staged volume to a pod's path. If the staged mount has ended, the
// service first mounts the volume again.
func (s *Server) NodePublishVolume(ctx context.Context, q *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if err := required(q.GetVolumeId(), q.GetTargetPath()); err != nil {
		return nil, err
	}
	_, group, err := s.wanted(q.GetVolumeId(), q.GetVolumeCapability())
	if err != nil {
		return nil, err
	}
	inline := q.GetVolumeContext()[policy.EphemeralMark] == "true"
	if !inline && q.GetStagingTargetPath() == "" {
		return nil, status.Error(codes.FailedPrecondition, "the volume was not staged: no staging_target_path")
	}
	end, err := s.pending.Begin(q.GetVolumeId(), targetKey(q.GetTargetPath()))
	if err != nil {
		return nil, err
	}
	defer end()
	staging := ""
	if inline {
		staging, err = s.stageInline(ctx, q)
	} else if err = checkPath(q.GetStagingTargetPath()); err == nil {
		staging, err = whole(q.GetStagingTargetPath())
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	target, err := whole(q.GetTargetPath())
	if err != nil {
		return nil, reply.Error(err)
	}
	namespace, name := policy.Pod(q.GetVolumeContext())
	p := publishing{
		volume: q.GetVolumeId(), staging: staging, target: target,
		readOnly: q.GetReadonly() || reply.ReadOnly(q.GetVolumeCapability()),
		pod:      pod{namespace, name},
		alone:    q.GetVolumeCapability().GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	}
	if err := s.publish(ctx, p); err != nil {
		return nil, reply.Error(err)
	}
	if !p.readOnly {
		if err := s.giveGroup(ctx, staging, group); err != nil {
			return nil, reply.Error(err)
		}
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// publishing describes a bind mount, by whole paths.
type publishing struct {
	volume, staging, target string
	readOnly                bool
	pod                     pod  // the receiving pod; zero if the orchestrator does not name the pod
	alone                   bool // refuse if the volume is published elsewhere on this node
}

func (s *Server) publish(ctx context.Context, p publishing) error {
	const op = "publish"
	staged, err := mountAt(p.staging)
	if err != nil {
		return err
	}
	f := s.folderOf(p.volume, p.staging)
	have, err := f.read()
	if err != nil {
		if _, gone := s.source(ctx, p.volume); missing(gone) {
			return gone // staging the volume would not help
		}
		return meta.E(op, meta.Busy, p.staging, errors.New("the volume is not staged there"))
	}
	if have.Volume != p.volume {
		panic(fmt.Sprintf("node: the record of %s says %s: its folder's name is not of both", p.volume, have.Volume))
	}
	var dead error
	if staged != nil {
		dead = s.probes.ask(ctx, p.staging)
	}
	if staged == nil || meta.KindOf(dead) == meta.IO {
		if have, staged, err = s.stageAgain(ctx, f, have); err != nil {
			return err
		}
	} else if dead != nil {
		return meta.E(op, meta.Busy, p.staging, fmt.Errorf("the staged mount does not answer: %w", dead))
	}
	// Record the pod before the bind: after a cut-off call the record has a pod too many,
	// never a pod too few.
	if err := f.note(have, p.target, p.pod); err != nil {
		return meta.E(op, meta.IO, string(f), err)
	}
	there, err := mountAt(p.target)
	if err != nil {
		return err
	}
	switch {
	case there == nil:
	case there.Major == staged.Major && there.Minor == staged.Minor:
		if isReadOnly(there) != (p.readOnly || isReadOnly(staged)) {
			return meta.E(op, meta.Exists, p.target, errors.New("the volume is published there, but writable where it should not be, or the other way round"))
		}
		return nil
	default:
		if s.probes.ask(ctx, p.target) == nil || ctx.Err() != nil {
			return meta.E(op, meta.Exists, p.target, fmt.Errorf("another volume (%s) is published there", there.Source))
		}
		if err := s.unmount(ctx, p.target); err != nil { // the binding of the ended mount
			return err
		}
	}
	if p.alone {
		others, err := publishedElsewhere(staged, p.staging, p.target)
		if err != nil {
			return err
		}
		if len(others) > 0 {
			return meta.E(op, meta.Busy, p.target, fmt.Errorf("a single writer has it already, at %s", others[0]))
		}
	}
	s.Step("publish.bind")
	if err := bind(p.staging, p.target, p.readOnly); err != nil {
		return err
	}
	s.Step("publish.bound")
	return nil
}

// stageAgain mounts a staged volume whose mount has ended, as after a kill of a process
// without a holder. The service can't wait for NodeStageVolume: a kubelet stages a volume
// once, and not again as long as a pod of its node has the volume.
func (s *Server) stageAgain(ctx context.Context, f folder, was record) (now record, at *mountinfo.Info, err error) {
	const op = "stage again"
	if mayBeInline(was.Volume) {
		return now, nil, meta.E(op, meta.Busy, was.Staging, errors.New("the mount has ended since it was made for this pod"))
	}
	from, err := s.source(ctx, was.Volume)
	if err != nil {
		return now, nil, err
	}
	// Write the record before stage removes the ended mount: from the removal on, only the
	// record shows that the volume is staged.
	was.Boot = process.Boot()
	if err := f.write(was); err != nil {
		return now, nil, meta.E(op, meta.IO, string(f), err)
	}
	want := record{Volume: was.Volume, Staging: was.Staging, Options: was.asked(), Pods: was.Pods, Boot: was.Boot}
	s.serve(&want, from)
	s.Logger.Warn("a staged mount has ended: the driver mounts the volume again for a new pod", "volume", was.Volume, "path", was.Staging)
	if err := s.stage(ctx, want); err != nil {
		return now, nil, err
	}
	if at, err = mountAt(was.Staging); err == nil && at == nil {
		err = meta.E(op, meta.Unavailable, was.Staging, errors.New("the mount has ended again"))
	}
	if err == nil {
		now, err = f.read()
	}
	return now, at, err
}

// targetKey returns the key in pending of calls about a target.
func targetKey(target string) string { return "target " + filepath.Clean(target) }

// NodeUnpublishVolume removes a volume from a pod, and deletes an inline volume. The target
// directory is removed only if empty. NodeUnpublishVolume does not wait for calls staging the
// volume, or publishing the volume to other pods: such calls may wait for an unreachable
// cluster, and be repeated without end.
func (s *Server) NodeUnpublishVolume(ctx context.Context, q *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if err := required(q.GetVolumeId(), q.GetTargetPath()); err != nil {
		return nil, err
	}
	things := []string{targetKey(q.GetTargetPath())}
	if mayBeInline(q.GetVolumeId()) { // unpublishing ends an inline volume
		things = append(things, q.GetVolumeId())
	}
	end, err := s.pending.Begin(things...)
	if err != nil {
		return nil, err
	}
	defer end()
	target, err := whole(q.GetTargetPath())
	if err == nil {
		err = s.unpublish(ctx, target)
	}
	if err != nil && meta.KindOf(err) != meta.NotFound {
		return nil, reply.Error(err)
	}
	if err := s.removeInline(ctx, q.GetVolumeId()); err != nil {
		return nil, reply.Error(err)
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

func (s *Server) unpublish(ctx context.Context, target string) error {
	s.Step("unpublish.unmount")
	if err := s.unmount(ctx, target); err != nil {
		return err
	}
	s.Step("unpublish.unmounted")
	if err := removeDir(target); err != nil {
		return err
	}
	s.Step("unpublish.removed")
	return nil
}
