package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/kube"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/csi"
	"penstock.io/penstock/csi/cluster"
	"penstock.io/penstock/csi/controller"
	"penstock.io/penstock/csi/node"
	"penstock.io/penstock/csi/policy"
	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
	metacluster "penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/peer"
)

// csiFlags are the flags of `penstock csi`.
type csiFlags struct {
	where
	logFlags
	port       adminPort
	endpoint   string
	controller bool
	node       bool
	name       string
	state      string
	topology   string
	placeFile  string
	inline     bool
	register   string
	hold       string
	tokens     []string
	inlineMax  uint64
	maxVolumes int64
}

func newCSI() *cobra.Command {
	var c csiFlags
	cmd := &cobra.Command{
		Use:   "csi",
		Short: "Serve the Container Storage Interface, for Kubernetes and others",
		Long: `Serves the Container Storage Interface (CSI) 1.13 on a Unix socket, as the driver
csi.penstock.io. The controller makes, changes and deletes volumes, and grants a volume
to a node as long as the volume is published to the node; it needs an administrator's
credentials. The node part mounts volumes on its machine and binds them to the paths
of pods. Each mount has a process of its own, which outlives this process. The node
part needs root, and a client's credentials. Where the orchestrator does not publish
volumes, the client needs grants for them. Without --controller and --node both parts
are served.

As the first process of a container the node part is a supervisor: it starts the
node agent as its child, and another agent whenever the agent ends. So mounts, whose
processes are in the container too, go on. At SIGHUP the supervisor replaces the agent,
which reads its configuration anew. SIGTERM ends agent and mounts; with --hold the
mounts' bytes are then durable, and the holder keeps the mounts.`,
		Example: `  penstock csi --controller --endpoint unix:///csi/csi.sock --cluster meta:7400 --credentials /etc/penstock/admin
  penstock csi --node --node-name "$NODE_NAME" --endpoint unix:///var/lib/kubelet/plugins/csi.penstock.io/csi.sock \
      --registration-dir /var/lib/kubelet/plugins_registry --cluster meta:7400 --credentials /etc/penstock/node`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd.Context(), cmd) },
	}
	c.where.flags(cmd)
	c.logFlags.add(cmd)
	f := cmd.Flags()
	f.StringVar(&c.endpoint, "endpoint", os.Getenv("CSI_ENDPOINT"), "socket to serve on, such as unix:///csi/csi.sock (default $CSI_ENDPOINT)")
	f.BoolVar(&c.controller, "controller", false, "serve the controller part")
	f.BoolVar(&c.node, "node", false, "serve the node part")
	f.StringVar(&c.name, "node-name", "", "this node's name, as the orchestrator knows it (default: the machine's)")
	f.StringVar(&c.state, "state-dir", csiStateDir, "directory where the node part keeps how volumes were staged")
	f.StringVar(&c.topology, "topology", "", "where this node stands, /datacenter/rack/node (default: where a chunk server on it does)")
	f.StringVar(&c.placeFile, "topology-file", "", "file that says so if --topology does not, as 'penstock csi place' writes it")
	f.BoolVar(&c.inline, "inline", false, "serve ephemeral inline volumes, which pods define themselves; the node part then needs an administrator's credentials")
	c.inlineMax = 100 << 30
	f.Var((*sizeFlag)(&c.inlineMax), "inline-max", "size of the largest inline volume; 0: no limit")
	f.Int64Var(&c.maxVolumes, "max-volumes", 0, "how many volumes the orchestrator may use on this node at a time (docs/sizing.md says what one takes); 0: it is told no limit")
	f.StringVar(&c.register, "registration-dir", "", "directory in which the kubelet looks for drivers, /var/lib/kubelet/plugins_registry: the node part registers itself there, so that no node-driver-registrar is needed; the path of --endpoint must then be the same for the kubelet (default: registers nowhere)")
	f.StringVar(&c.hold, "hold", "", "leave the node part's mounts to a holder that listens at this socket (see 'penstock hold'): pods see a pause and no error when the processes that serve them are killed or replaced, also together with this one (default: mounts end with their processes)")
	f.StringSliceVar(&c.tokens, "keep-token", nil, "SECRET=ROLE[:NAME], may be repeated: the controller, a pod of Kubernetes, puts a new join token under the key token of this Secret of its namespace when half of the life of the one there is over, or none holds (it must be allowed to get and patch it)")
	c.port.flag(cmd, "STATE-DIR/admin.sock, or csi-PID.sock in /run/penstock for a controller")
	c.port.openFlag(cmd)
	markDirs(cmd, "state-dir", "registration-dir")
	cmd.AddCommand(newCSIPlace(), newCSIGuard())
	return configurable(cmd)
}

// killVariable names the step of a call at which the process kills itself with SIGKILL. Tests
// set the variable to check the recovery by a successor.
const killVariable = "PENSTOCK_CSI_KILL_AT"

func killAt(log *slog.Logger) func(step string) {
	at := os.Getenv(killVariable)
	if at == "" {
		return nil
	}
	log.Error("this process ends itself at a step of a call: for tests only", "step", at)
	return func(step string) {
		if step == at {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {} // nothing more happens
		}
	}
}

func (c *csiFlags) run(ctx context.Context, cmd *cobra.Command) error {
	log, err := c.logger(cmd.ErrOrStderr())
	if err != nil {
		return err
	}
	if c.endpoint == "" {
		return usagef("say where to serve: --endpoint unix:///csi/csi.sock")
	}
	if !c.controller && !c.node {
		c.controller, c.node = true, true
	}
	if c.register != "" && !c.node {
		return usagef("--registration-dir is for the node part: the kubelet does not want controllers")
	}
	if c.hold != "" && !c.node {
		return usagef("--hold is for the node part: a controller has no mounts")
	}
	keeper, err := c.tokenKeeper(log)
	if err != nil {
		return err
	}
	if c.maxVolumes < 0 {
		return usagef("--max-volumes is a number of volumes, or 0")
	}
	if c.node && os.Geteuid() != 0 {
		return usagef("the node part mounts: run it as root")
	}
	if c.topology == "" && c.placeFile != "" {
		if c.topology, err = readPlace(c.placeFile); err != nil {
			return usagef("--topology-file: %w", err)
		}
	}
	if c.node && os.Getpid() == 1 {
		// The supervisor checks the command line itself: an agent's exit status does not
		// distinguish a wrong command line from a crash.
		if err := c.where.check(); err != nil {
			return err
		}
		return supervise(os.Args[1:], c.hold != "", log)
	}
	host, err := os.Hostname()
	if err != nil && c.name == "" {
		return err
	}
	if c.name == "" {
		c.name = host
	}
	addrs, creds, err := c.open()
	if err != nil {
		return err
	}
	renewing, stop := context.WithCancel(ctx)
	var renewed sync.WaitGroup
	renewed.Go(func() { local.KeepRenewed(renewing, addrs, creds, log) })
	defer renewed.Wait()
	defer stop()

	pool := cluster.New(cluster.Config{Addrs: addrs, Creds: creds, Name: fmt.Sprintf("%s: csi %d", host, os.Getpid()), Admin: c.controller || c.inline, Logger: log})
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), dialTimeout)
		defer cancel()
		if err := pool.Close(end); err != nil {
			log.Debug("the session did not end in order", "err", err)
		}
	}()
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), local.CertificateMetrics(creds))
	gather := prometheus.Gatherers{registry}
	if n, told := agentsEnded(); told {
		registry.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "penstock_csi_agents_ended_total", Help: "Node agents that ended, or were killed, before this one in its container.",
		}, func() float64 { return float64(n) }))
	}
	cfg := csi.Config{Endpoint: c.endpoint, Version: version, Registration: c.register, Ready: pool.Ready, Logger: log, Metrics: registry, Dying: kernel.Dying}
	step := killAt(log)
	standard := "unix:" + filepath.Join(noteDir(), fmt.Sprintf("csi-%d.sock", os.Getpid()))
	if c.controller {
		cfg.Controller = controller.New(controller.Config{Cluster: pool, Grants: pool, Logger: log, Step: step})
	}
	if keeper != nil {
		registry.MustRegister(keeper)
		looking, stopLooking := context.WithCancel(ctx)
		var looks sync.WaitGroup
		looks.Go(func() { keeper.run(looking) })
		defer looks.Wait()
		defer stopLooking()
	}
	if c.node {
		n, staged, err := c.newNode(pool, creds, log, step)
		if err != nil {
			return err
		}
		cfg.Node, gather = n, append(gather, n)
		// Keep starts before slower work: pods may be waiting.
		keep, stopKeeping := context.WithCancel(ctx)
		var keeping sync.WaitGroup
		keeping.Go(func() { n.Keep(keep) })
		defer func() {
			stopKeeping()
			keeping.Wait()
		}()
		// The sweep runs in the background: the cluster may not answer for long, and pods that
		// end need no answer from the cluster.
		sweep, stopSweeping := context.WithCancel(ctx)
		var sweeping sync.WaitGroup
		sweeping.Go(func() { sweepNode(sweep, n, staged, log) })
		defer func() {
			stopSweeping()
			sweeping.Wait()
		}()
		standard = adminSocket(c.state)
		// The earlier agent at this admin socket lost its endpoint to this agent. A port stays
		// in use as long as one of the earlier agent's threads waits in the kernel.
		c.port.replace, c.port.patience = true, portPatience
	}
	s, err := csi.Serve(cfg)
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		s.Close(end)
	}()
	ready := func() error {
		ask, cancel := context.WithTimeout(ctx, dialTimeout)
		defer cancel()
		return pool.Ready(ask)
	}
	addr, stopAdmin, err := c.port.serve(ctx, log, standard, gather, ready)
	if err != nil {
		return err
	}
	defer stopAdmin()
	started(log, "csi", "endpoint", c.endpoint, "controller", c.controller, "node", c.node, "admin", addr)
	select {
	case err := <-s.Failed():
		return err
	case <-ctx.Done():
		return nil
	}
}

// portPatience is how long a node agent waits for the port of an earlier agent. The earlier
// agent was killed, but can't end while one of its threads waits for a mount. This agent takes
// up the mount while it serves, so exiting early would prevent the end of the earlier agent.
const portPatience = time.Minute

// tokenKeeper returns the keeper for the flags --keep-token, nil without the flag.
func (c *csiFlags) tokenKeeper(log *slog.Logger) (*tokenKeeper, error) {
	if len(c.tokens) == 0 {
		return nil, nil
	}
	if !c.controller {
		return nil, usagef("--keep-token is for the controller: it needs an administrator's credentials")
	}
	k := &tokenKeeper{with: c.where.api, life: metacluster.MaxTokenLife, log: log, ends: map[string]time.Time{}}
	for _, s := range c.tokens {
		t, err := parseKeptToken(s)
		if err != nil {
			return nil, usagef("--keep-token: %w", err)
		}
		k.tokens = append(k.tokens, t)
	}
	var err error
	k.api, err = kube.InPod(kube.AccountDir, os.Getenv)
	return k, err
}

// sweepWait bounds sweepNode.
const sweepWait = 30 * time.Second

// newNode makes the node part and recovers the volumes staged by an earlier agent.
func (c *csiFlags) newNode(pool *cluster.Cluster, creds *peer.Credentials, log *slog.Logger, step func(string)) (n *node.Server, staged []string, err error) {
	state, err := filepath.Abs(c.state)
	if err == nil {
		err = os.MkdirAll(state, 0o700)
	}
	if err != nil {
		return nil, nil, err
	}
	c.state = state
	cfg := node.Config{
		Cluster: pool, Logger: log, Name: c.name, State: state, Topology: c.topology,
		Inline: c.inline, InlineMax: c.inlineMax, MaxVolumes: c.maxVolumes, Step: step, Command: c.mountCommand,
	}
	if creds != nil && creds.Identity().Role == peer.Client {
		cfg.ID = creds.Identity().Name
	}
	if c.hold != "" {
		cfg.Holder = csiHolder(c.hold)
		if release, holds := kernel.HoldsMounts(); !holds {
			log.Warn("this kernel can't leave mounts to a holder (Linux 6.9): they end with this process; drain the node before it is replaced", "kernel", release)
		}
	}
	n = node.New(cfg)
	if staged, err = n.Recover(); err != nil {
		return nil, nil, err
	}
	log.Info("looked for staged volumes", "volumes", len(staged))
	return n, staged, nil
}

// sweepNode removes the remains of pods that ended while the node agent was down.
func sweepNode(ctx context.Context, n *node.Server, staged []string, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(ctx, sweepWait)
	defer cancel()
	if err := n.Sweep(ctx, staged); err != nil {
		log.Warn("not everything that deleted pods left behind could be removed", "err", err)
	}
}

// csiHolder is the socket of a holder, in the form that the node part needs. Each call opens a
// new connection, because the holder may be replaced between calls.
type csiHolder string

func (c csiHolder) Orphans() (paths []string, err error) {
	h, err := hold.Dial(string(c))
	if err != nil {
		return nil, err
	}
	defer h.Close()
	mounts, err := h.List()
	for _, m := range mounts {
		if m.PID == 0 && !m.Awaited {
			paths = append(paths, m.Name)
		}
	}
	return paths, err
}

func (c csiHolder) Forget(path string) error {
	h, err := hold.Dial(string(c))
	if meta.KindOf(err) == meta.Unavailable {
		return nil // the holder's mounts ended with the holder
	}
	if err != nil {
		return err
	}
	defer h.Close()
	device, memory, found, err := h.Take(path, false)
	if err != nil || !found {
		return err
	}
	defer device.Close()
	defer memory.Close()
	if files, bytes, err := hold.Unsynced(memory); bytes > 0 || err != nil {
		return meta.E("forget mount", meta.Unavailable, path, cmp.Or(err, fmt.Errorf("%d files with %d bytes are not durable", files, bytes)))
	}
	return h.Drop(path)
}

func (c csiHolder) Unsynced(path string) (files int, bytes int64, err error) {
	h, err := hold.Dial(string(c))
	if err != nil {
		return 0, 0, err // a restarted holder may still have the mount
	}
	defer h.Close()
	device, memory, found, err := h.Take(path, false)
	if meta.KindOf(err) == meta.Busy || err == nil && !found {
		return 0, 0, nil
	}
	if err != nil {
		return 0, 0, err
	}
	defer device.Close()
	defer memory.Close()
	return hold.Unsynced(memory)
}

// csiPinTTL is how long a snapshot stays pinned after the last renewal by a mount, if the
// machine failed and nobody unstaged the volume.
const csiPinTTL = "10m"

// mountCommand returns a `penstock mount` that reports the result of mounting on descriptor 3.
// With takeUp, the command takes the mount over from the holder.
func (c *csiFlags) mountCommand(source, dir, logFile, socket string, options []string, takeUp bool) *exec.Cmd {
	args := []string{"mount", "--log-file=" + logFile, "--log-level=" + c.level, "--admin=unix:" + socket}
	// In a container, only the state directory is writable and persistent.
	args = append(args, "--index-dir="+filepath.Join(c.state, "indexes"))
	for _, o := range options {
		args = append(args, "--options="+o)
		if strings.HasPrefix(o, policy.PinOption) {
			args = append(args, "--pin-ttl="+csiPinTTL)
		}
	}
	for _, a := range c.cluster {
		args = append(args, "--cluster="+a)
	}
	if c.dir != "" {
		args = append(args, "--dir="+c.dir)
	}
	if c.credentials.credentials != "" {
		args = append(args, "--credentials="+c.credentials.credentials)
	}
	if c.insecure {
		args = append(args, "--insecure")
	}
	if c.topology != "" {
		args = append(args, "--topology="+c.topology)
	}
	if c.hold != "" {
		args = append(args, "--hold="+c.hold)
	}
	cmd := exec.Command("/proc/self/exe", append(args, "--", source, dir)...)
	cmd.Env = append(os.Environ(), readyEnv+"=3")
	if takeUp {
		cmd.Env = append(cmd.Env, hold.TakeoverEnv+"=1")
	}
	return cmd
}

// csiStateDir is the default state directory of the driver's node part.
const csiStateDir = "/var/lib/penstock-csi"
