// Package node is the Node service of the Container Storage Interface: it has
// volumes mounted on this machine and binds the mounts to where pods look for
// them. A staged volume is served by a process of its own, which outlives the
// driver: upgraded or killed, it breaks no pod. With a holder the mount outlives
// that process, too, and the driver starts the next one. What is mounted is in the
// kernel's table; a directory of state has, for each staged volume, how it was
// mounted, and a lock that its process holds.
//
//	STATE/volumes/KEY/record.json     see record
//	                 /lock            held (flock) as long as the process lives
//	                 /log             of the process
//	STATE/sockets/KEY                 where the process tells what it counts
//	STATE/inline/KEY/mount            where volumes of pods are staged
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

// Cluster is what the service needs of one; cluster.Cluster is it. Only volumes
// that pods bring along are made and deleted.
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

// Config says what the service works with.
type Config struct {
	Cluster Cluster
	Logger  *slog.Logger
	// Name is the node's, as the orchestrator knows it.
	Name string
	// ID is what the cluster knows the node by, for whom the controller publishes
	// volumes to it; "": Name.
	ID string
	// State is the directory of state; it is made if it does not exist.
	State string
	// Topology is where the machine stands, /zone/rack/host; "": where the chunk
	// server on it does.
	Topology string
	// PlaceEvery is how often is looked whether a chunk server is there by now, if
	// none was; 0: 5 s.
	PlaceEvery time.Duration
	// Inline: volumes that pods bring along are served, for which the driver must
	// be an administrator.
	Inline bool
	// InlineMax is the most bytes that one of them may have; 0: no limit.
	InlineMax uint64
	// MaxVolumes is how many volumes the orchestrator may have on this node at a
	// time; 0: as many as it likes.
	MaxVolumes int64
	// Command is the program that mounts source ([VOLUME[@SNAPSHOT]:]PATH) at dir
	// with options of mount(8), appends its log to a file, and serves until it is
	// unmounted. On descriptor 3 it writes "ok" once it has mounted, else what is
	// wrong, and closes it. Descriptor 4 it keeps open as long as it lives. With
	// takeUp it goes on with the mount that the holder has, instead of mounting.
	// At a socket it serves /metrics.
	Command func(source, dir, log, socket string, options []string, takeUp bool) *exec.Cmd
	// Holder has the mounts that Command makes when their processes are gone; nil:
	// they end with them.
	Holder Holder
	// Step is called between the steps of each call with the step's name: tests
	// end the process there. Nil: nobody is.
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
	// pinnedYet are records that Recover removed, of mounts that pinned a snapshot;
	// Sweep lets go.
	pinnedYet []record

	placeless atomic.Bool // the orchestrator was told of no place
	// mountsAt is the function of this name; tests have it fail.
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

// NodeGetCapabilities tells what this service can do.
func (s *Server) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	r := &csi.NodeGetCapabilitiesResponse{}
	for _, c := range capabilities {
		r.Capabilities = append(r.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: c}}})
	}
	return r, nil
}

// NodeGetInfo tells the node's name and place, and how many volumes it takes.
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

// PlaceLearned waits until the orchestrator was told of a node without a place, and
// there is one by now: the chunk server that stands on a machine may be started
// after its driver. Then NodeGetInfo is to be asked again. Errors: ctx's.
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
			s.Logger.Info("this node's place is known by now", "place", at)
			return nil
		}
	}
}

const placeEvery = 5 * time.Second

// source is what is mounted for a volume.
type source struct {
	path string // [VOLUME[@SNAPSHOT]:]PATH
	// of is the volume of the snapshot that is mounted; zero: none is.
	of       meta.VolumeID
	snapshot string
}

func viewOf(v cluster.Volume, snapshot string) source {
	return source{path: v.Name + "@" + snapshot + ":/", of: v.ID, snapshot: snapshot}
}

// source finds what is mounted for a handle. A volume that was made of a snapshot,
// and that nobody may write, is served by the snapshot itself: it has the same
// files, an index, and what it has cached all claims of the snapshot share. A volume that
// an administrator wrote down by name is looked for as well: what is missing is missing
// before a process is started to mount it. Errors: NoSuchVolume, NoSuchSnapshot, Busy (of
// another cluster), AccessDenied (a client is not told whether there is such a volume).
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

// missing tells errors of source that say that nothing is there to be mounted.
func missing(err error) bool {
	k := meta.KindOf(err)
	return k == meta.NoSuchVolume || k == meta.NoSuchSnapshot
}

// required refuses calls that lack a volume or a path.
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
