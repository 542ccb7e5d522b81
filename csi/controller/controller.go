// Package controller is the Controller service of the Container Storage Interface. The service
// creates, changes and deletes volumes and snapshots of a cluster for an orchestrator. The
// service keeps no state of its own: a volume's name shows that the service made the volume,
// and the cluster has all other state. So after a call was cut off anywhere, the orchestrator
// can repeat the call to this process or another.
package controller

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// Cluster is the service's view of a cluster, implemented by cluster.Cluster.
type Cluster interface {
	ID(ctx context.Context) (string, error)
	Volume(ctx context.Context, id meta.VolumeID) (cluster.Volume, error)
	VolumeByName(ctx context.Context, name string) (cluster.Volume, error)
	Volumes(ctx context.Context) ([]cluster.Volume, error)
	Create(ctx context.Context, name string, t policy.Terms) (cluster.Volume, error)
	// Set changes the terms in which to differs from from.
	Set(ctx context.Context, id meta.VolumeID, from, to policy.Terms) (cluster.Volume, error)
	Rename(ctx context.Context, id meta.VolumeID, name string) (cluster.Volume, error)
	Delete(ctx context.Context, id meta.VolumeID) error
	// Discard deletes a never used volume without putting it into the trash, if the volume
	// still has this name. Errors: Busy (the volume has another name).
	Discard(ctx context.Context, id meta.VolumeID, name string) error
	Attach(ctx context.Context, id meta.VolumeID, at string) error
	Detach(ctx context.Context, id meta.VolumeID) error
	Tidy(ctx context.Context, dir string) error
	Dirs(ctx context.Context, at string) (names []string, err error)
	Nodes(ctx context.Context) ([]policy.Site, error)
	Health(ctx context.Context) (map[meta.VolumeID]meta.VolumeHealth, error)
	Snapshots(ctx context.Context, v meta.VolumeID) ([]cluster.Snapshot, error)
	TakeSnapshot(ctx context.Context, v meta.VolumeID, name string) (cluster.Snapshot, error)
	DeleteSnapshot(ctx context.Context, v meta.VolumeID, name string) error
}

// Config has the settings and surroundings of the service.
type Config struct {
	Cluster Cluster
	Grants  Grants
	Logger  *slog.Logger
	// Step is called between the steps of each call with the step's name: tests end the
	// process in Step. Nil: no function is called.
	Step func(step string)
}

// Server is the service.
type Server struct {
	csi.UnimplementedControllerServer
	Config
	pending reply.Pending
	index   index
	empty   empties
}

// New makes the service.
func New(cfg Config) *Server {
	if cfg.Step == nil {
		cfg.Step = func(string) {}
	}
	return &Server{Config: cfg, index: newIndex()}
}

// capabilities are the capabilities of the service for every cluster.
var capabilities = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
	csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
	csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
	csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
	csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
	csi.ControllerServiceCapability_RPC_GET_VOLUME,
	csi.ControllerServiceCapability_RPC_GET_CAPACITY,
	csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
	csi.ControllerServiceCapability_RPC_MODIFY_VOLUME,
	csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
	csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
}

// ControllerGetCapabilities lists the capabilities of this service.
func (s *Server) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	r := &csi.ControllerGetCapabilitiesResponse{}
	can := capabilities
	if _, clones := s.cloner(); clones {
		can = slices.Concat(capabilities, withClones)
	}
	for _, c := range can {
		r.Capabilities = append(r.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: c}}})
	}
	return r, nil
}

// handleOf is a volume's handle.
func (s *Server) handleOf(ctx context.Context, id meta.VolumeID) (string, error) {
	c, err := s.Cluster.ID(ctx)
	if err != nil {
		return "", err
	}
	return handle.Volume{Cluster: handle.ClusterOf(c), Volume: id}.String(), nil
}

// find returns the volume named by a handle. Errors: NoSuchVolume, also for a malformed
// handle, as the specification demands; Busy (the handle is another cluster's).
func (s *Server) find(ctx context.Context, id string) (cluster.Volume, error) {
	const op = "find volume"
	h, err := handle.ParseVolume(id)
	if err != nil {
		return cluster.Volume{}, meta.E(op, meta.NoSuchVolume, "", err)
	}
	if h.ByHand() {
		v, err := s.Cluster.VolumeByName(ctx, h.Name)
		if err != nil {
			return cluster.Volume{}, err
		}
		return v, nil
	}
	if err := s.ours(ctx, h.Cluster); err != nil {
		return cluster.Volume{}, err
	}
	return s.Cluster.Volume(ctx, h.Volume)
}

// there returns the volume named by a handle, for calls that don't change the volume. Errors:
// as of find; NoSuchVolume also for a volume being made or deleted; NoSuchSnapshot for the
// snapshot of a handle written by hand.
func (s *Server) there(ctx context.Context, id string) (cluster.Volume, error) {
	v, err := s.find(ctx, id)
	if err != nil {
		return v, err
	}
	if v.Deleting {
		return v, meta.E("find volume", meta.NoSuchVolume, v.Name, errors.New("it is being made or deleted"))
	}
	if h, err := handle.ParseVolume(id); err == nil && h.Snapshot != "" {
		if _, err := s.snapshotNamed(ctx, v.ID, h.Snapshot); err != nil {
			return v, err
		}
	}
	return v, nil
}

// ours refuses the handle of another cluster.
func (s *Server) ours(ctx context.Context, of string) error {
	c, err := s.Cluster.ID(ctx)
	if err != nil {
		return err
	}
	if handle.ClusterOf(c) != of {
		return meta.E("read handle", meta.Busy, of, errors.New("it belongs to another cluster than this driver's"))
	}
	return nil
}

// mine returns the volume named by a handle if this service made the volume, and so may change
// it. Errors: as of find; Busy (the service did not make the volume, or the handle is written
// by hand).
func (s *Server) mine(ctx context.Context, id string) (cluster.Volume, error) {
	if id == "" {
		return cluster.Volume{}, status.Error(codes.InvalidArgument, "no volume id")
	}
	v, err := s.find(ctx, id)
	if err != nil {
		return v, err
	}
	h, err := handle.ParseVolume(id)
	if err == nil && h.ByHand() && v.Deleting {
		return v, meta.E("find volume", meta.NoSuchVolume, v.Name, errors.New("it is being made or deleted"))
	}
	if err != nil || h.ByHand() || !made(v) {
		return v, meta.E("change volume", meta.Busy, v.Name, errors.New("it was not made by this driver; change it with 'penstock volume'"))
	}
	return v, nil
}

// made reports whether this service made a volume, by the volume's name, because the service
// keeps no list. Inline volumes belong to the node service, and drafts to the running call.
func made(v cluster.Volume) bool {
	return strings.HasPrefix(v.Name, handle.Made) && !strings.HasPrefix(v.Name, handle.Inline) && !handle.IsDraft(v.Name)
}

// ValidateVolumeCapabilities reports whether a volume supports capabilities and parameters.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, q *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if q.GetVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "no volume id")
	}
	if len(q.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "no volume capabilities")
	}
	if _, err := s.there(ctx, q.GetVolumeId()); err != nil {
		return nil, reply.Error(err)
	}
	if err := reply.Capabilities(q.GetVolumeCapabilities()); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
	}
	if _, err := policy.ReadClass(q.GetParameters(), q.GetMutableParameters(), ""); err != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: q.GetVolumeContext(), VolumeCapabilities: q.GetVolumeCapabilities(), Parameters: q.GetParameters(), MutableParameters: q.GetMutableParameters(),
	}}, nil
}

// GetCapacity returns the largest size, in bytes, of a new volume of a class.
func (s *Server) GetCapacity(ctx context.Context, q *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	c, err := policy.ReadClass(q.GetParameters(), nil, "capacity")
	if err != nil {
		return nil, reply.Error(err)
	}
	if len(q.GetVolumeCapabilities()) > 0 {
		if err := reply.Capabilities(q.GetVolumeCapabilities()); err != nil {
			return &csi.GetCapacityResponse{}, nil // no volume can be used so
		}
	}
	sites, err := s.Cluster.Nodes(ctx)
	if err != nil {
		return nil, reply.Error(err)
	}
	return &csi.GetCapacityResponse{AvailableCapacity: signed(policy.Room(c, sites, q.GetAccessibleTopology().GetSegments()))}, nil
}

// signed converts a number of bytes for messages, at most 1<<63-1.
func signed(n uint64) int64 { return int64(min(n, 1<<63-1)) }
