package controller

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// Grouper is a Cluster able to take snapshots of several volumes as of one moment.
type Grouper interface {
	// Group finds a group of any state. Errors: NotFound.
	Group(ctx context.Context, name string) (meta.Group, error)
	// TakeGroup takes all snapshots or none. Errors: Exists, Busy (the group is being taken).
	TakeGroup(ctx context.Context, name string, volumes []meta.VolumeID) (meta.Group, error)
	// DeleteGroup deletes the snapshots and the group. Errors: NotFound, Busy.
	DeleteGroup(ctx context.Context, name string) error
}

// Groups is the GroupController service.
type Groups struct {
	csi.UnimplementedGroupControllerServer
	s *Server
	c Grouper
}

// Groups returns the service of groups; nil if the cluster takes no groups or makes no clones.
func (s *Server) Groups() *Groups {
	c, can := s.Cluster.(Grouper)
	if _, clones := s.cloner(); !can || !clones {
		return nil
	}
	return &Groups{s: s, c: c}
}

// GroupControllerGetCapabilities lists the capabilities of this service.
func (*Groups) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return &csi.GroupControllerGetCapabilitiesResponse{Capabilities: []*csi.GroupControllerServiceCapability{{
		Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
			Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
		}},
	}}}, nil
}

// describe translates a group into the interface's message.
func (x *Groups) describe(ctx context.Context, g *meta.Group) (*csi.VolumeGroupSnapshot, error) {
	c, err := x.s.Cluster.ID(ctx)
	if err != nil {
		return nil, err
	}
	of := handle.ClusterOf(c)
	out := &csi.VolumeGroupSnapshot{GroupSnapshotId: handle.Group{Cluster: of, ID: g.ID, Name: g.Name}.String(), ReadyToUse: true}
	var last meta.Time
	for _, m := range g.Members {
		h := handle.Snapshot{Cluster: of, Volume: m.Volume, At: m.At}
		there, err := x.s.snapshotAt(ctx, h)
		y := &csi.Snapshot{
			SnapshotId: h.String(), SourceVolumeId: handle.Volume{Cluster: of, Volume: m.Volume}.String(), SizeBytes: signed(m.Bytes),
			CreationTime: timestamppb.New(time.Unix(0, int64(m.Created))), ReadyToUse: true, GroupSnapshotId: out.GroupSnapshotId,
		}
		switch meta.KindOf(err) {
		case meta.KindOK:
			y.SizeBytes = signed(there.Bytes)
		case meta.NoSuchSnapshot, meta.NoSuchVolume: // an administrator deleted the snapshot
			y.ReadyToUse, out.ReadyToUse = false, false
		default:
			return nil, err
		}
		last = max(last, m.Created)
		out.Snapshots = append(out.Snapshots, y)
	}
	out.CreationTime = timestamppb.New(time.Unix(0, int64(last)))
	return out, nil
}

// CreateVolumeGroupSnapshot takes snapshots of several volumes as of one moment, or finds the
// group taken by an earlier call.
func (x *Groups) CreateVolumeGroupSnapshot(ctx context.Context, q *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	s := x.s
	if q.GetName() == "" {
		return nil, status.Error(codes.InvalidArgument, "no name")
	}
	if n := len(q.GetSourceVolumeIds()); n == 0 || n > meta.MaxGroup {
		return nil, status.Errorf(codes.InvalidArgument, "%d volumes; a group has 1 to %d", n, meta.MaxGroup)
	}
	if err := policy.SnapshotParameters(q.GetParameters()); err != nil {
		return nil, reply.Error(err)
	}
	var volumes []meta.VolumeID
	for _, id := range q.GetSourceVolumeIds() {
		v, err := s.mine(ctx, id)
		if err == nil && v.Deleting {
			err = meta.E("find volume", meta.NoSuchVolume, v.Name, nil)
		}
		if err != nil {
			return nil, reply.Error(err)
		}
		if slices.Contains(volumes, v.ID) {
			return nil, status.Errorf(codes.InvalidArgument, "volume %s is there twice", v.Name)
		}
		volumes = append(volumes, v.ID)
	}
	slices.Sort(volumes)
	name := handle.NameOf("", q.GetName())
	end, err := s.pending.Begin("snapshot " + name)
	if err != nil {
		return nil, err
	}
	defer end()
	g, err := x.c.Group(ctx, name)
	switch {
	case err == nil && !slices.Equal(g.Volumes(), volumes):
		return nil, status.Errorf(codes.AlreadyExists, "there is a group %q of other volumes", q.GetName())
	case err != nil && !errors.Is(err, meta.NotFound):
		return nil, reply.Error(err)
	case err != nil || g.State != meta.GroupReady:
		s.Step("group.take")
		if g, err = x.c.TakeGroup(ctx, name, volumes); errors.Is(err, meta.Busy) {
			return nil, status.Error(codes.Aborted, err.Error()) // a cut-off call's group; the cluster soon ends the attempt
		}
		if err != nil {
			return nil, reply.Error(err)
		}
		s.Step("group.taken")
	}
	out, err := x.describe(ctx, &g)
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: out}, nil
}

// named parses the handle of a group. Errors: NotFound (malformed), Busy (of another cluster,
// or not taken by this driver).
func (x *Groups) named(ctx context.Context, id string) (h handle.Group, err error) {
	const op = "read handle"
	if h, err = handle.ParseGroup(id); err != nil {
		return h, meta.E(op, meta.NotFound, "", err)
	}
	if err := x.s.ours(ctx, h.Cluster); err != nil {
		return h, err
	}
	if !strings.HasPrefix(h.Name, handle.Made) {
		return h, meta.E(op, meta.Busy, h.Name, errors.New("it was not taken by this driver; see 'penstock snapshot group'"))
	}
	return h, nil
}

// find returns the group named by a handle. If snapshots is not empty, find checks that
// snapshots lists exactly the group's snapshots. Errors: NotFound, Busy (being taken), Invalid
// (other snapshots).
func (x *Groups) find(ctx context.Context, h handle.Group, snapshots []string) (meta.Group, error) {
	const op = "find group"
	g, err := x.c.Group(ctx, h.Name)
	if err == nil && g.ID != h.ID {
		err = meta.E(op, meta.NotFound, h.Name, errors.New("it was deleted; there is another one of its name"))
	}
	if err != nil || len(snapshots) == 0 {
		return g, err
	}
	of := h.Cluster
	want := map[string]bool{}
	for _, m := range g.Members {
		want[handle.Snapshot{Cluster: of, Volume: m.Volume, At: m.At}.String()] = true
	}
	for _, y := range snapshots {
		if !want[y] {
			return g, meta.E(op, meta.Invalid, h.Name, errors.New("a snapshot that is listed is not one of the group's"))
		}
	}
	if len(slices.Compact(slices.Sorted(slices.Values(snapshots)))) != len(want) {
		return g, meta.E(op, meta.Invalid, h.Name, errors.New("not all of the group's snapshots are listed"))
	}
	return g, nil
}

// DeleteVolumeGroupSnapshot deletes a group taken by this driver, with its snapshots.
func (x *Groups) DeleteVolumeGroupSnapshot(ctx context.Context, q *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	if q.GetGroupSnapshotId() == "" {
		return nil, status.Error(codes.InvalidArgument, "no group snapshot id")
	}
	done := &csi.DeleteVolumeGroupSnapshotResponse{}
	h, err := x.named(ctx, q.GetGroupSnapshotId())
	if errors.Is(err, meta.NotFound) {
		return done, nil
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	// Claim the name before find: DeleteGroup deletes by name, and another group could get the
	// name in between.
	end, err := x.s.pending.Begin("snapshot " + h.Name)
	if err != nil {
		return nil, err
	}
	defer end()
	if _, err = x.find(ctx, h, q.GetSnapshotIds()); errors.Is(err, meta.NotFound) {
		return done, nil
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	x.s.Step("ungroup.delete")
	if err := x.c.DeleteGroup(ctx, h.Name); err != nil && !errors.Is(err, meta.NotFound) {
		return nil, reply.Error(err)
	}
	x.s.Step("ungroup.deleted")
	return done, nil
}

// GetVolumeGroupSnapshot describes a group.
func (x *Groups) GetVolumeGroupSnapshot(ctx context.Context, q *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	if q.GetGroupSnapshotId() == "" {
		return nil, status.Error(codes.InvalidArgument, "no group snapshot id")
	}
	h, err := x.named(ctx, q.GetGroupSnapshotId())
	if err != nil {
		return nil, reply.Error(err)
	}
	g, err := x.find(ctx, h, q.GetSnapshotIds())
	if err == nil && g.State != meta.GroupReady {
		err = meta.E("find group", meta.NotFound, g.Name, nil)
	}
	if err != nil {
		return nil, reply.Error(err)
	}
	out, err := x.describe(ctx, &g)
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: out}, nil
}
