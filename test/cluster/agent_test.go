package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/test/netns"
)

// agent is a node of Kubernetes as Penstock sees a node: a network name space with a certificate
// of its own, with a holder of mounts and the node part of the driver, which starts a process for
// each mount. A test calls the driver in place of the node's kubelet.
type agent struct {
	name    string
	node    *netns.Node
	members []*Member // the holder, the driver
	dir     string
	conn    *grpc.ClientConn
}

func (a *agent) path(name string) string { return filepath.Join(a.dir, name) }

// staging and pod are where the kubelet has a volume staged and published.
func (a *agent) staging() string { return a.path("staging") }
func (a *agent) pod() string     { return a.path("pod") }

// newAgent adds a node; nothing runs on the node yet.
func (c *Cluster) newAgent(name string, rack *netns.Rack) (*agent, error) {
	a := &agent{name: name, dir: filepath.Join(c.cfg.Dir, name)}
	var err error
	if a.node, err = rack.AddNode(name); err != nil {
		return nil, err
	}
	if err := os.Mkdir(a.dir, 0o755); err != nil {
		return nil, err
	}
	for _, args := range [][]string{
		{"hold", "--socket", a.path("hold.sock"), "--patience", "10m"},
		// The place is said: all nodes share the machine's boot id.
		append([]string{"csi", "--node", "--node-name", name, "--endpoint", "unix://" + a.path("csi.sock"), "--state-dir", a.path("state"), "--hold", a.path("hold.sock"),
			"--topology", fmt.Sprintf("/dc1/%s/%s", rack.Name, name), "--cluster", c.metaAddrs()}, c.creds.flags(name)...),
	} {
		m, err := c.memberOn(a.node, name+"-"+args[0], 0)
		if err != nil {
			return nil, err
		}
		m.path, m.args = c.cfg.Penstock, args
		m.clean = a.unmount
		a.members, c.others = append(a.members, m), append(c.others, m)
	}
	a.conn, err = dialDriver(a.path("csi.sock"))
	return a, err
}

// dialDriver connects to a driver that may not listen yet.
func dialDriver(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond}, MinConnectTimeout: time.Second,
	}))
}

// begin starts the node's processes; the node gets its certificate before.
func (a *agent) begin(ctx context.Context, c *Cluster) error {
	// Again if nobody answers, as a kubelet starts an init container again.
	if err := eventually(ctx, time.Minute, func(ctx context.Context) error { return c.join(ctx, peer.Client, a.name) }); err != nil {
		return err
	}
	for _, m := range a.members {
		if err := m.Start(); err != nil {
			return err
		}
	}
	return nil
}

// asked is a call that is made again, as orchestrators do, until the call succeeds.
func asked[Q, A any](ctx context.Context, call func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) (a A, err error) {
	err = eventually(ctx, time.Minute, func(ctx context.Context) error {
		a, err = call(ctx, q, grpc.WaitForReady(true))
		return err
	})
	if err != nil {
		err = fmt.Errorf("%T: %w", q, err)
	}
	return a, err
}

// shared is how the pods of all nodes use a volume.
func shared() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
	}
}

// use has a volume granted, staged, and published to a pod, as Kubernetes does.
func (a *agent) use(ctx context.Context, driver csi.ControllerClient, volume string) error {
	n := csi.NewNodeClient(a.conn)
	info, err := asked(ctx, n.NodeGetInfo, &csi.NodeGetInfoRequest{})
	if err != nil {
		return err
	}
	if rack := info.GetAccessibleTopology().GetSegments()["topology.penstock.io/rack"]; info.GetNodeId() != a.name || rack != a.node.Rack.Name {
		return fmt.Errorf("node %s says that it is %v", a.name, info)
	}
	if _, err := asked(ctx, driver.ControllerPublishVolume, &csi.ControllerPublishVolumeRequest{VolumeId: volume, NodeId: info.GetNodeId(), VolumeCapability: shared()}); err != nil {
		return err
	}
	if _, err := asked(ctx, n.NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: volume, StagingTargetPath: a.staging(), VolumeCapability: shared()}); err != nil {
		return err
	}
	_, err = asked(ctx, n.NodePublishVolume, &csi.NodePublishVolumeRequest{VolumeId: volume, StagingTargetPath: a.staging(), TargetPath: a.pod(), VolumeCapability: shared()})
	return err
}

// unpublish takes back the controller's grant to use.
func unpublish(ctx context.Context, driver csi.ControllerClient, volume, node string) error {
	_, err := asked(ctx, driver.ControllerUnpublishVolume, &csi.ControllerUnpublishVolumeRequest{VolumeId: volume, NodeId: node})
	return err
}

// drain takes the volume from the pod and the node, ends the node's processes, and demands that
// no leftovers stay.
func (a *agent) drain(ctx context.Context, volume string) error {
	n := csi.NewNodeClient(a.conn)
	if _, err := asked(ctx, n.NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: volume, TargetPath: a.pod()}); err != nil {
		return err
	}
	if _, err := asked(ctx, n.NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: volume, StagingTargetPath: a.staging()}); err != nil {
		return err
	}
	if spawn.Mounted(a.staging()) || spawn.Mounted(a.pod()) {
		return fmt.Errorf("node %s has a mount still", a.name)
	}
	var errs []error
	for _, m := range a.members {
		errs = append(errs, m.Stop())
	}
	pids, err := a.node.Processes()
	if len(pids) > 0 {
		errs = append(errs, fmt.Errorf("node %s has processes still: %v", a.name, pids))
	}
	state, serr := os.ReadDir(a.path("state/volumes"))
	if len(state) > 0 {
		errs = append(errs, fmt.Errorf("node %s has state of %d volumes still", a.name, len(state)))
	}
	return errors.Join(append(errs, err, serr, a.conn.Close())...)
}

// kill ends the node as a loss of power does: all of the node's processes at once. The node's
// kernel would go too, so its mounts do.
func (a *agent) kill() error {
	err := a.node.Kill()
	_ = unix.Unmount(a.staging(), unix.MNT_FORCE|unix.MNT_DETACH) // a process that waits for the mount can end then
	for _, m := range a.members {
		m.Kill()
	}
	return errors.Join(err, a.unmount(), a.conn.Close())
}

func (a *agent) unmount() error {
	return errors.Join(spawn.Unmount(a.pod()), spawn.Unmount(a.staging()))
}
