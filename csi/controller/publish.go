package controller

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// Grants say which nodes may use which volumes; cluster.Cluster keeps them.
type Grants interface {
	// Publish lets a node have volumes for a handle; true: to write; alone: if no other
	// node has it. Errors: NotFound (the node), NoSuchVolume, Exists (it may do something
	// else for it already), Busy (another node has it).
	Publish(ctx context.Context, node, handle string, volumes map[meta.VolumeID]bool, alone bool) error
	// Unpublish takes that back; from all nodes if node is "".
	Unpublish(ctx context.Context, node, handle string) error
	// Published tells to which nodes a handle is published; with "", each handle.
	Published(ctx context.Context, handle string) (nodes map[string][]string, err error)
}

// ControllerPublishVolume lets a node have a volume: a grant of the node's name, which
// ends with ControllerUnpublishVolume. Nothing is attached to a machine. A volume
// that is to be used by one node is refused to a second one.
func (s *Server) ControllerPublishVolume(ctx context.Context, q *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	switch {
	case q.GetVolumeId() == "":
		return nil, status.Error(codes.InvalidArgument, "no volume id")
	case q.GetNodeId() == "":
		return nil, status.Error(codes.InvalidArgument, "no node id")
	}
	if err := reply.Capability(q.GetVolumeCapability()); err != nil {
		return nil, err
	}
	about := []string{publication(q.GetNodeId(), q.GetVolumeId())}
	alone := reply.OneNode(q.GetVolumeCapability())
	if alone { // else two nodes at once would find that nobody has it
		about = append(about, publication("", q.GetVolumeId()))
	}
	end, err := s.pending.Begin(about...)
	if err != nil {
		return nil, err
	}
	defer end()
	volumes, err := s.needed(ctx, q.GetVolumeId(), !q.GetReadonly() && !reply.ReadOnly(q.GetVolumeCapability()))
	if err != nil {
		return nil, reply.Error(err)
	}
	s.Step("grant.add")
	if err := s.Grants.Publish(ctx, q.GetNodeId(), q.GetVolumeId(), volumes, alone); err != nil {
		return nil, reply.Error(err)
	}
	s.Step("grant.added")
	return &csi.ControllerPublishVolumeResponse{}, nil
}

// publication is what calls about one volume and node are pending by.
func publication(node, volume string) string { return "node " + node + " " + volume }

// needed are the volumes that a node opens for a handle; true: to write. One that was
// made of a snapshot for readers alone is mounted as that snapshot, which lies in the
// volume that it was taken of (csi/node, source).
func (s *Server) needed(ctx context.Context, id string, write bool) (map[meta.VolumeID]bool, error) {
	v, err := s.there(ctx, id)
	if err != nil {
		return nil, err
	}
	if h, err := handle.ParseVolume(id); err == nil && h.Snapshot != "" {
		write = false
	}
	all := map[meta.VolumeID]bool{v.ID: write}
	if v.Policy.Immutable && v.Origin.Volume != 0 && v.Origin.Volume != v.ID {
		of, err := s.Cluster.Volume(ctx, v.Origin.Volume)
		switch {
		case err == nil && !of.Deleting:
			all[of.ID] = false
		case err != nil && !errors.Is(err, meta.NoSuchVolume):
			return nil, err
		}
	}
	return all, nil
}

// ControllerUnpublishVolume takes the grant back; with no node, those of all nodes. The
// volume and the node may be gone by now.
func (s *Server) ControllerUnpublishVolume(ctx context.Context, q *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if q.GetVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "no volume id")
	}
	done := &csi.ControllerUnpublishVolumeResponse{}
	h, err := handle.ParseVolume(q.GetVolumeId())
	if err != nil {
		return done, nil // nobody was granted anything for it
	}
	if !h.ByHand() {
		if err := s.ours(ctx, h.Cluster); err != nil {
			return nil, reply.Error(err)
		}
	}
	end, err := s.pending.Begin(publication(q.GetNodeId(), q.GetVolumeId()))
	if err != nil {
		return nil, err
	}
	defer end()
	s.Step("grant.revoke")
	if err := s.Grants.Unpublish(ctx, q.GetNodeId(), q.GetVolumeId()); err != nil {
		return nil, reply.Error(err)
	}
	s.Step("grant.revoked")
	return done, nil
}
