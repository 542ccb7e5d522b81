package controller

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// Cloner is a Cluster able to make volumes from other volumes. Without a Cloner the service
// offers no snapshots, since the interface has no other use for snapshots.
type Cloner interface {
	// Clone makes a volume from a snapshot of volume of or, with snapshot empty, from the
	// present state of volume of. The clone begins with the policy of volume of. Errors:
	// VolumeExists, NoSuchVolume, NoSuchSnapshot.
	Clone(ctx context.Context, of meta.VolumeID, snapshot, name string) (cluster.Volume, error)
	// Origin returns the name of the snapshot from which clone was made; "" if the cluster
	// took the snapshot for the clone alone. With of 0, the origin may be any volume. Errors:
	// NotFound (clone is no clone of volume of).
	Origin(ctx context.Context, of meta.VolumeID, clone meta.VolumeID) (snapshot string, err error)
}

func (s *Server) cloner() (Cloner, bool) {
	c, is := s.Cluster.(Cloner)
	return c, is
}

// withClones are the additional capabilities with a Cloner.
var withClones = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
	csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
	csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
	csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
}

// ours reports whether this driver took the snapshot, and the snapshot is ready.
func ours(x cluster.Snapshot) bool { return x.Ready && strings.HasPrefix(x.Name, handle.Made) }

// snapshotNamed finds a volume's snapshot by its name. Errors: NoSuchSnapshot, NoSuchVolume.
func (s *Server) snapshotNamed(ctx context.Context, v meta.VolumeID, name string) (cluster.Snapshot, error) {
	return s.snapshot(ctx, v, name, func(x cluster.Snapshot) bool { return x.Name == name })
}

// snapshotAt finds a volume's snapshot by its generation. Errors: as of snapshotNamed.
func (s *Server) snapshotAt(ctx context.Context, h handle.Snapshot) (cluster.Snapshot, error) {
	return s.snapshot(ctx, h.Volume, h.String(), func(x cluster.Snapshot) bool { return x.At == h.At })
}

func (s *Server) snapshot(ctx context.Context, v meta.VolumeID, subject string, is func(cluster.Snapshot) bool) (cluster.Snapshot, error) {
	all, err := s.Cluster.Snapshots(ctx, v)
	if err != nil {
		return cluster.Snapshot{}, err
	}
	for _, x := range all {
		if x.Ready && is(x) {
			return x, nil
		}
	}
	return cluster.Snapshot{}, meta.E("find snapshot", meta.NoSuchSnapshot, subject, nil)
}

// eachSnapshot calls fn with this driver's snapshots, ordered by volume and generation, until
// fn returns false: the snapshots of volumes from number from on, or of volume only. Errors:
// the error of the first volume that does not answer, because a list without its snapshots
// would mean that the snapshots don't exist.
func (s *Server) eachSnapshot(ctx context.Context, from, only meta.VolumeID, fn func(cluster.Volume, cluster.Snapshot) (more bool)) error {
	var volumes []cluster.Volume
	if only != 0 {
		v, err := s.Cluster.Volume(ctx, only)
		if err != nil {
			return err
		}
		volumes = append(volumes, v)
	} else {
		var err error
		if volumes, err = s.Cluster.Volumes(ctx); err != nil {
			return err
		}
	}
	volumes = slices.DeleteFunc(volumes, func(v cluster.Volume) bool { return !made(v) || v.Deleting || v.ID < from })
	slices.SortFunc(volumes, func(a, b cluster.Volume) int { return cmp.Compare(a.ID, b.ID) })
	var failed error
	err := s.ask(ctx, 0, volumes, func(v cluster.Volume, all []cluster.Snapshot, err error) bool {
		if meta.KindOf(err) == meta.NoSuchVolume {
			return true // the volume was deleted meanwhile
		}
		if err != nil {
			failed = fmt.Errorf("list snapshots of volume %s: %w", v.Name, err)
			return false
		}
		slices.SortFunc(all, func(a, b cluster.Snapshot) int { return cmp.Compare(a.At, b.At) })
		for _, x := range all {
			if ours(x) && !fn(v, x) {
				return false
			}
		}
		return true
	})
	return cmp.Or(failed, err)
}

// describeSnapshot translates a snapshot into the interface's message.
func (s *Server) describeSnapshot(ctx context.Context, v meta.VolumeID, x cluster.Snapshot) (*csi.Snapshot, error) {
	c, err := s.Cluster.ID(ctx)
	if err != nil {
		return nil, err
	}
	of := handle.ClusterOf(c)
	group := ""
	if x.Group != 0 {
		group = handle.Group{Cluster: of, ID: x.Group, Name: x.Name}.String()
	}
	return &csi.Snapshot{
		GroupSnapshotId: group,
		SnapshotId:      handle.Snapshot{Cluster: of, Volume: v, At: x.At}.String(), SourceVolumeId: handle.Volume{Cluster: of, Volume: v}.String(),
		SizeBytes: signed(x.Bytes), CreationTime: timestamppb.New(x.Created), ReadyToUse: true,
	}, nil
}

// CreateSnapshot takes a snapshot of a volume, or finds the snapshot taken by an earlier call.
func (s *Server) CreateSnapshot(ctx context.Context, q *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if q.GetName() == "" {
		return nil, status.Error(codes.InvalidArgument, "no name")
	}
	if err := policy.SnapshotParameters(q.GetParameters()); err != nil {
		return nil, reply.Error(err)
	}
	v, err := s.mine(ctx, q.GetSourceVolumeId())
	if err == nil && v.Deleting {
		err = meta.E("find volume", meta.NoSuchVolume, v.Name, nil)
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	name := handle.NameOf("", q.GetName())
	end, err := s.pending.Begin(v.Name, "snapshot "+name)
	if err != nil {
		return nil, err
	}
	defer end()
	x, err := s.snapshotNamed(ctx, v.ID, name)
	if meta.KindOf(err) == meta.NoSuchSnapshot {
		var taken bool
		if taken, err = s.elsewhere(ctx, name, v.ID); err != nil {
			return nil, reply.Error(err)
		}
		if taken {
			return nil, status.Errorf(codes.AlreadyExists, "another volume has a snapshot %q", q.GetName())
		}
		s.Step("snapshot.take")
		if x, err = s.Cluster.TakeSnapshot(ctx, v.ID, name); err == nil {
			s.Step("snapshot.taken")
		}
	}
	if err == nil && x.Group != 0 {
		err = meta.E("take snapshot", meta.Exists, q.GetName(), errors.New("there is a group of this name"))
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	out, err := s.describeSnapshot(ctx, v.ID, x)
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.CreateSnapshotResponse{Snapshot: out}, nil
}

// DeleteSnapshot deletes a snapshot taken by this driver.
func (s *Server) DeleteSnapshot(ctx context.Context, q *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	if q.GetSnapshotId() == "" {
		return nil, status.Error(codes.InvalidArgument, "no snapshot id")
	}
	done := &csi.DeleteSnapshotResponse{}
	h, x, err := s.findSnapshot(ctx, q.GetSnapshotId())
	switch meta.KindOf(err) {
	case meta.KindOK:
	case meta.NoSuchSnapshot, meta.NoSuchVolume:
		return done, nil
	default:
		return nil, reply.Error(err)
	}
	if !strings.HasPrefix(x.Name, handle.Made) {
		return nil, status.Error(codes.FailedPrecondition, "the snapshot was not taken by this driver; delete it with 'penstock snapshot'")
	}
	if x.Group != 0 {
		return nil, status.Error(codes.InvalidArgument, "the snapshot is one of a group: it goes with that, by DeleteVolumeGroupSnapshot")
	}
	end, err := s.pending.Begin("snapshot " + x.Name)
	if err != nil {
		return nil, err
	}
	defer end()
	s.Step("unsnapshot.delete")
	if err := s.Cluster.DeleteSnapshot(ctx, h.Volume, x.Name); err != nil && meta.KindOf(err) != meta.NoSuchSnapshot && meta.KindOf(err) != meta.NoSuchVolume {
		return nil, reply.Error(err)
	}
	s.index.forget(x.Name, h.Volume)
	s.Step("unsnapshot.deleted")
	return done, nil
}

// findSnapshot returns the snapshot named by a handle. Errors: NoSuchSnapshot, also for a
// malformed handle, NoSuchVolume, Busy (of another cluster).
func (s *Server) findSnapshot(ctx context.Context, id string) (handle.Snapshot, cluster.Snapshot, error) {
	h, err := handle.ParseSnapshot(id)
	if err != nil {
		return h, cluster.Snapshot{}, meta.E("find snapshot", meta.NoSuchSnapshot, "", err)
	}
	if err := s.ours(ctx, h.Cluster); err != nil {
		return h, cluster.Snapshot{}, err
	}
	x, err := s.snapshotAt(ctx, h)
	return h, x, err
}

// GetSnapshot describes a snapshot.
func (s *Server) GetSnapshot(ctx context.Context, q *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	if q.GetSnapshotId() == "" {
		return nil, status.Error(codes.InvalidArgument, "no snapshot id")
	}
	h, x, err := s.findSnapshot(ctx, q.GetSnapshotId())
	if err != nil {
		return nil, reply.Error(err)
	}
	out, err := s.describeSnapshot(ctx, h.Volume, x)
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.GetSnapshotResponse{Snapshot: out}, nil
}

// ListSnapshots lists this driver's snapshots: one snapshot, the snapshots of a volume, or
// all. A token names the last listed snapshot, which may be deleted meanwhile.
func (s *Server) ListSnapshots(ctx context.Context, q *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	var after handle.Snapshot
	if t := q.GetStartingToken(); t != "" {
		if n, err := fmt.Sscanf(t, "%d.%d", &after.Volume, &after.At); n != 2 || err != nil {
			return nil, status.Error(codes.Aborted, "starting_token is not one that this driver gave")
		}
	}
	if q.GetMaxEntries() < 0 {
		return nil, status.Error(codes.InvalidArgument, "max_entries is negative")
	}
	var only handle.Snapshot // the requested volume and generation; zero: any
	if id := q.GetSnapshotId(); id != "" {
		h, _, err := s.findSnapshot(ctx, id)
		if err != nil {
			return none(err)
		}
		only = h
	}
	if id := q.GetSourceVolumeId(); id != "" {
		v, err := s.find(ctx, id)
		if err != nil {
			return none(err)
		}
		if only.Volume != 0 && only.Volume != v.ID {
			return &csi.ListSnapshotsResponse{}, nil
		}
		only.Volume = v.ID
	}
	r := &csi.ListSnapshotsResponse{}
	var last handle.Snapshot
	var failed error
	err := s.eachSnapshot(ctx, after.Volume, only.Volume, func(v cluster.Volume, x cluster.Snapshot) bool {
		if only.At != 0 && x.At != only.At || v.ID == after.Volume && x.At <= after.At {
			return true
		}
		if n := int(q.GetMaxEntries()); n > 0 && len(r.Entries) == n {
			r.NextToken = fmt.Sprintf("%d.%d", last.Volume, last.At)
			return false
		}
		out, err := s.describeSnapshot(ctx, v.ID, x)
		if failed = err; err != nil {
			return false
		}
		last = handle.Snapshot{Volume: v.ID, At: x.At}
		r.Entries = append(r.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: out})
		return true
	})
	if err = cmp.Or(err, failed); err != nil {
		return none(err)
	}
	return r, nil
}

// none returns the empty list if err says that the volume or snapshot does not exist, and
// otherwise the error.
func none(err error) (*csi.ListSnapshotsResponse, error) {
	if k := meta.KindOf(err); k == meta.NoSuchSnapshot || k == meta.NoSuchVolume {
		return &csi.ListSnapshotsResponse{}, nil
	}
	return nil, reply.Error(err)
}

// content is the source of a volume: a snapshot or, with an empty name, the present state of
// another volume.
type content struct {
	of       cluster.Volume
	snapshot string
	bytes    uint64 // at least
}

// contentOf finds the source of a volume to create; nil: an empty volume. Errors:
// NoSuchVolume, NoSuchSnapshot, Invalid, and find's.
func (s *Server) contentOf(ctx context.Context, source *csi.VolumeContentSource) (*content, error) {
	const op = "read content source"
	if source == nil {
		return nil, nil
	}
	if _, can := s.cloner(); !can {
		return nil, meta.E(op, meta.Invalid, "", errors.New("volumes are made empty here: neither from snapshots nor from volumes"))
	}
	switch {
	case source.GetSnapshot() != nil:
		h, x, err := s.findSnapshot(ctx, source.GetSnapshot().GetSnapshotId())
		if err != nil {
			return nil, err
		}
		v, err := s.Cluster.Volume(ctx, h.Volume)
		return &content{of: v, snapshot: x.Name, bytes: x.Bytes}, err
	case source.GetVolume() != nil:
		id := source.GetVolume().GetVolumeId()
		v, err := s.find(ctx, id)
		if err == nil && v.Deleting {
			err = meta.E("find volume", meta.NoSuchVolume, v.Name, nil)
		}
		c := &content{of: v}
		// If the handle names a snapshot, the copy is made from the snapshot, not from the
		// volume's present state.
		if h, herr := handle.ParseVolume(id); err == nil && herr == nil && h.Snapshot != "" {
			var x cluster.Snapshot
			if x, err = s.snapshotNamed(ctx, v.ID, h.Snapshot); err == nil {
				c.snapshot, c.bytes = x.Name, x.Bytes
			}
		}
		return c, err
	}
	return nil, meta.E(op, meta.Invalid, "", errors.New("it is a snapshot or a volume"))
}

// isOf reports whether a volume was made from a content; nil: from nothing.
func (s *Server) isOf(ctx context.Context, v cluster.Volume, c *content) (bool, error) {
	cl, can := s.cloner()
	if !can {
		return c == nil, nil
	}
	var of meta.VolumeID
	if c != nil {
		of = c.of.ID
	}
	snapshot, err := cl.Origin(ctx, of, v.ID)
	if meta.KindOf(err) == meta.NotFound {
		return c == nil, nil
	}
	return err == nil && c != nil && snapshot == c.snapshot, err
}

// clone makes a volume out of a content.
func (s *Server) clone(ctx context.Context, c *content, name string) (cluster.Volume, error) {
	cl, can := s.cloner()
	if !can {
		panic("controller: a content source was let through by a cluster that makes no clones")
	}
	return cl.Clone(ctx, c.of.ID, c.snapshot, name)
}
