// Package node is the Node service of the Container Storage Interface. The service mounts
// volumes on this machine and binds the mounts to the pods' paths. Each staged volume has its
// own process, which outlives the driver: an upgrade or kill of the driver breaks no pod. With
// a holder the mount outlives its process, too, and the driver starts the next process. The
// kernel's table lists the mounts. A directory of state has, for each staged volume, a record
// of how the volume was mounted, and a lock held by the volume's process.
//
//	STATE/volumes/KEY/record.json     see record
//	                 /lock            held (flock) as long as the process lives
//	                 /log             of the process
//	STATE/sockets/KEY                 metrics and requests of the process
//	STATE/inline/KEY/mount            staging path of an inline volume
package node

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"os/exec"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/handle"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/csi/reply"
	"penstock.io/penstock/meta"
)

// Cluster is the service's view of a cluster, implemented by cluster.Cluster. The service
// creates and deletes only inline volumes.
type Cluster interface {
	ID(ctx context.Context) (string, error)
	Ready(ctx context.Context) error
	Here(ctx context.Context) (string, error)
	Volume(ctx context.Context, id meta.VolumeID) (cluster.Volume, error)
	VolumeByName(ctx context.Context, name string) (cluster.Volume, error)
	Volumes(ctx context.Context) ([]cluster.Volume, error)
	Create(ctx context.Context, name string, t policy.Terms) (cluster.Volume, error)
	Delete(ctx context.Context, id meta.VolumeID) error
	Snapshots(ctx context.Context, v meta.VolumeID) ([]cluster.Snapshot, error)
	Unpin(ctx context.Context, v meta.VolumeID, snapshot, holder string) error
}

// Config has the settings and surroundings of the service.
type Config struct {
	Cluster Cluster
	Logger  *slog.Logger
	// Name is the orchestrator's name of the node.
	Name string
	// ID is the node's name in the cluster, to which the controller grants volumes; "": Name.
	ID string
	// State is the directory of state; the service creates a missing directory.
	State string
	// Topology is the machine's place, /zone/rack/host; "": the place of the chunk server on
	// this machine.
	Topology string
	// PlaceEvery is the interval of looks for a chunk server on this machine while the node
	// has no place; 0: 5 s.
	PlaceEvery time.Duration
	// Inline: the service serves inline volumes; the driver must be an administrator.
	Inline bool
	// InlineMax bounds the size of an inline volume, in bytes; 0: no limit.
	InlineMax uint64
	// MaxVolumes is the number of volumes that the orchestrator may have on this node at a
	// time; 0: no limit.
	MaxVolumes int64
	// Command returns the program that mounts source ([VOLUME[@SNAPSHOT]:]PATH) at dir with
	// options of mount(8), appends its log to a file, and serves until dir is unmounted. The
	// program writes "ok" to descriptor 3 after mounting, or the error, and closes the
	// descriptor. The program keeps descriptor 4 open as long as it lives. With takeUp the
	// program continues the holder's mount instead of mounting. The program serves /metrics on
	// the socket.
	Command func(source, dir, log, socket string, options []string, takeUp bool) *exec.Cmd
	// Holder has the mounts made by Command after their processes have ended; nil: a mount
	// ends with its process.
	Holder Holder
	// Step is called between the steps of each call with the step's name: tests end the
	// process in Step. Nil: no function is called.
	Step func(step string)
}

// Server is the service.
type Server struct {
	csi.UnimplementedNodeServer
	Config
	pending  reply.Pending
	probes   probes
	syncs    syncs
	children children
	// pinnedYet has the records that Recover removed of mounts with a pinned snapshot; Sweep
	// unpins the snapshots.
	pinnedYet []record

	placeless atomic.Bool // NodeGetInfo last answered without a place
	// mountsAt is the function mountsAt; tests replace the function by a failing function.
	mountsAt func(path string) ([]*mountinfo.Info, error)
}

// New makes the service.
func New(cfg Config) *Server {
	if cfg.Step == nil {
		cfg.Step = func(string) {}
	}
	if cfg.PlaceEvery == 0 {
		cfg.PlaceEvery = placeEvery
	}
	return &Server{Config: cfg, mountsAt: mountsAt, children: children{takes: map[folder]context.CancelFunc{}, ended: make(chan struct{}, 1)}}
}

var capabilities = []csi.NodeServiceCapability_RPC_Type{
	csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
	csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
	csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
	csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP,
	csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
	csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
}

// NodeGetCapabilities lists the capabilities of this service.
func (s *Server) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	r := &csi.NodeGetCapabilitiesResponse{}
	for _, c := range capabilities {
		r.Capabilities = append(r.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: c}}})
	}
	return r, nil
}

// NodeGetInfo returns the node's name and place, and the maximum number of its volumes.
func (s *Server) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	at := s.Topology
	if at == "" {
		var err error
		if at, err = s.Cluster.Here(ctx); err != nil {
			return nil, reply.Error(err)
		}
	}
	r := &csi.NodeGetInfoResponse{NodeId: cmp.Or(s.ID, s.Name), MaxVolumesPerNode: s.MaxVolumes}
	if labels := policy.Segments(at, true); labels != nil {
		r.AccessibleTopology = &csi.Topology{Segments: labels}
	}
	s.placeless.Store(r.AccessibleTopology == nil)
	return r, nil
}

// PlaceLearned waits until this node has a place after NodeGetInfo answered without a place:
// the chunk server on a machine may start after the machine's driver. Then the orchestrator
// must call NodeGetInfo again. Errors: ctx's.
func (s *Server) PlaceLearned(ctx context.Context) error {
	t := time.NewTicker(s.PlaceEvery)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-t.C:
		}
		if !s.placeless.Load() {
			continue
		}
		at, err := s.Cluster.Here(ctx)
		if err == nil && policy.Segments(at, true) != nil {
			s.placeless.Store(false)
			s.Logger.Info("this node's place is now known", "place", at)
			return nil
		}
	}
}

const placeEvery = 5 * time.Second

// source is the volume or snapshot to mount for a handle.
type source struct {
	path string // [VOLUME[@SNAPSHOT]:]PATH
	// of is the volume of the snapshot to mount; zero: no snapshot is mounted.
	of       meta.VolumeID
	snapshot string
}

func viewOf(v cluster.Volume, snapshot string) source {
	return source{path: v.Name + "@" + snapshot + ":/", of: v.ID, snapshot: snapshot}
}

// source finds the volume or snapshot to mount for a handle. For an immutable volume made of a
// snapshot, source returns the snapshot itself: the snapshot has the same files, an index, and
// a cache shared by all claims of the snapshot. source also looks up a handle written by hand,
// so that a missing volume is reported before a process is started for the mount. Errors:
// NoSuchVolume, NoSuchSnapshot, Busy (of another cluster), AccessDenied (the cluster does not
// tell a client whether the volume exists).
func (s *Server) source(ctx context.Context, id string) (source, error) {
	const op = "find volume"
	none := source{}
	h, err := handle.ParseVolume(id)
	switch {
	case err != nil:
		return none, meta.E(op, meta.NoSuchVolume, "", err)
	case h.ByHand():
		v, err := s.Cluster.VolumeByName(ctx, h.Name)
		if err != nil {
			return none, err
		}
		if v.Deleting {
			return none, meta.E(op, meta.NoSuchVolume, v.Name, errors.New("it is being deleted"))
		}
		if h.Snapshot == "" {
			return source{path: h.Name + ":/"}, nil
		}
		all, err := s.Cluster.Snapshots(ctx, v.ID)
		if err != nil {
			return none, err
		}
		if !slices.ContainsFunc(all, func(x cluster.Snapshot) bool { return x.Ready && x.Name == h.Snapshot }) {
			return none, meta.E("find snapshot", meta.NoSuchSnapshot, v.Name+"@"+h.Snapshot, nil)
		}
		return viewOf(v, h.Snapshot), nil
	}
	c, err := s.Cluster.ID(ctx)
	if err != nil {
		return none, err
	}
	if handle.ClusterOf(c) != h.Cluster {
		return none, meta.E(op, meta.Busy, h.Cluster, errors.New("the volume belongs to another cluster than this driver's"))
	}
	v, err := s.Cluster.Volume(ctx, h.Volume)
	if err != nil {
		return none, err
	}
	if v.Deleting {
		return none, meta.E(op, meta.NoSuchVolume, v.Name, errors.New("it is being deleted"))
	}
	own := source{path: v.Name + ":/"}
	if !v.Policy.Immutable || v.Origin.Volume == 0 {
		return own, nil
	}
	of, err := s.Cluster.Volume(ctx, v.Origin.Volume)
	switch meta.KindOf(err) {
	case meta.KindOK:
		return viewOf(of, v.Origin.Snapshot), nil
	case meta.AccessDenied, meta.NotPermitted, meta.NoSuchVolume:
		s.Logger.Debug("a volume is not mounted as the snapshot that it was made of: this node was not granted that", "volume", v.Name, "snapshot", v.Origin.Snapshot, "err", err)
		return own, nil
	}
	return none, err
}

// missing reports whether an error of source means that the volume or snapshot does not exist.
func missing(err error) bool {
	k := meta.KindOf(err)
	return k == meta.NoSuchVolume || k == meta.NoSuchSnapshot
}

// required refuses a call without a volume, or with an invalid path.
func required(volume string, paths ...string) error {
	if volume == "" {
		return status.Error(codes.InvalidArgument, "no volume id")
	}
	for _, p := range paths {
		if err := checkPath(p); err != nil {
			return err
		}
	}
	return nil
}
