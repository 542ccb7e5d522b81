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

// Grants grants nodes rights to volumes; cluster.Cluster implements Grants.
type Grants interface {
	// Publish grants a node the rights to volumes for a handle; true: the right to write;
	// alone: refuse if another node has the handle. Errors: NotFound (the node), NoSuchVolume,
	// Exists (the node has other rights for the handle), Busy (another node has the handle).
	Publish(ctx context.Context, node, handle string, volumes map[meta.VolumeID]bool, alone bool) error
	// Unpublish revokes the rights; node "": the rights of all nodes.
	Unpublish(ctx context.Context, node, handle string) error
	// Published returns the nodes to which a handle is published; with "", of each handle.
	Published(ctx context.Context, handle string) (nodes map[string][]string, err error)
}

// ControllerPublishVolume grants a node the right to a volume. ControllerUnpublishVolume
// revokes the grant. The service attaches nothing to a machine. With an access mode for one
// node, a second node is refused.
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
	if alone { // else two calls for two nodes could both find no other node
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

// publication returns the key in pending of calls about a volume and a node.
func publication(node, volume string) string { return "node " + node + " " + volume }

// needed returns the volumes that a node opens for a handle; true: to write. The node mounts
// an immutable volume made of a snapshot as the snapshot itself, which lies in the volume of
// origin (csi/node, source).
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

// ControllerUnpublishVolume revokes a node's grant; without a node, the grants of all nodes.
// The volume and the node may not exist any more.
func (s *Server) ControllerUnpublishVolume(ctx context.Context, q *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if q.GetVolumeId() == "" {
		return nil, status.Error(codes.InvalidArgument, "no volume id")
	}
	done := &csi.ControllerUnpublishVolumeResponse{}
	h, err := handle.ParseVolume(q.GetVolumeId())
	if err != nil {
		return done, nil // no node has a grant for a malformed handle
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
