package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// published returns the whole path of a mounted path. Errors: NotFound, Busy (the mount is not
// Penstock's), IO.
func (s *Server) published(path string) (string, error) {
	if err := checkPath(path); err != nil {
		return "", meta.E("find mount", meta.NotFound, path, err)
	}
	at, err := whole(path)
	if err != nil {
		return "", err
	}
	m, err := mountAt(at)
	if err == nil && m == nil {
		err = meta.E("find mount", meta.NotFound, path, errors.New("no volume is mounted there"))
	}
	return at, err
}

// named refuses a request without a volume or a path.
func named(volume, path string) error {
	if volume == "" {
		return status.Error(codes.InvalidArgument, "no volume id")
	}
	if path == "" {
		return status.Error(codes.InvalidArgument, "no volume path")
	}
	return nil
}

// NodeGetVolumeStats returns the quota and use of a volume, in bytes and inodes.
func (s *Server) NodeGetVolumeStats(ctx context.Context, q *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if err := named(q.GetVolumeId(), q.GetVolumePath()); err != nil {
		return nil, err
	}
	at, err := s.published(q.GetVolumePath())
	if err != nil {
		return nil, reply.Error(err)
	}
	if err := s.probes.ask(ctx, at); err != nil {
		return nil, reply.Error(err)
	}
	var st unix.Statfs_t
	if err := within(ctx, func() error { return unix.Statfs(at, &st) }); err != nil {
		if meta.KindOf(err) != meta.Unavailable {
			err = meta.E("statfs", meta.IO, at, err)
		}
		return nil, reply.Error(err)
	}
	block := uint64(st.Bsize)
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		usage(csi.VolumeUsage_BYTES, st.Blocks*block, st.Bfree*block, st.Bavail*block),
		usage(csi.VolumeUsage_INODES, st.Files, st.Ffree, st.Ffree),
	}}, nil
}

func usage(unit csi.VolumeUsage_Unit, total, free, available uint64) *csi.VolumeUsage {
	signed := func(n uint64) int64 { return int64(min(n, 1<<63-1)) }
	return &csi.VolumeUsage{Unit: unit, Total: signed(total), Used: signed(total - min(free, total)), Available: signed(available)}
}

// within runs fn, which a hung mount may block without limit, and waits for fn until ctx ends,
// at most probeWait. Errors: Unavailable, and fn's.
func within(ctx context.Context, fn func() error) error {
	done := make(chan error, 1)
	go func() { done <- fn() }() // ends with the mount's connection at the latest
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return meta.E("wait for mount", meta.Unavailable, "", context.Cause(ctx))
	case <-time.After(probeWait):
		return meta.E("wait for mount", meta.Unavailable, "", fmt.Errorf("no answer within %v", probeWait))
	}
}

// NodeExpandVolume has nothing to do: mounts see a new quota by themselves.
func (s *Server) NodeExpandVolume(_ context.Context, q *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	if err := named(q.GetVolumeId(), q.GetVolumePath()); err != nil {
		return nil, err
	}
	if _, err := s.published(q.GetVolumePath()); err != nil {
		return nil, reply.Error(err)
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: q.GetCapacityRange().GetRequiredBytes()}, nil
}

// NodeGetVolumeHealth reports whether a volume's mounts on this node answer.
func (s *Server) NodeGetVolumeHealth(ctx context.Context, q *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if err := required(q.GetVolumeId()); err != nil {
		return nil, err
	}
	if _, err := s.source(ctx, q.GetVolumeId()); missing(err) {
		return nil, reply.Error(err)
	}
	health := &csi.VolumeHealth{VolumeId: q.GetVolumeId()}
	for _, p := range []string{q.GetStagingTargetPath(), q.GetVolumePublishPath()} {
		if p == "" {
			continue
		}
		at, err := s.published(p)
		if meta.KindOf(err) == meta.NotFound {
			continue // a missing mount is not unhealthy
		}
		reason := "MountEnded"
		if err == nil {
			err = s.probes.ask(ctx, at)
			if meta.KindOf(err) == meta.Unavailable {
				reason = "MountNotAnswering"
			}
		}
		if err != nil {
			health.HealthStatuses = []*csi.VolumeHealth_VolumeHealthEntry{{Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: reason, Message: err.Error()}}
		}
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health}, nil
}

// NodeGetStorageHealth reports whether this node can reach the cluster.
func (s *Server) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	ask, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	r := &csi.NodeGetStorageHealthResponse{}
	if err := s.Cluster.Ready(ask); err != nil {
		r.BackendHealth = []*csi.NodeGetStorageHealthResponse_StorageBackendHealth{{
			Status: csi.StorageHealthErrorType_STORAGE_UNREACHABLE, Reason: "ClusterUnreachable", Message: err.Error(),
		}}
	}
	return r, nil
}
