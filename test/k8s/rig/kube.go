package rig

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Pods and nodes are in one network without routes. A node's pods have the addresses
// 10.88.N.x; N is the number of the node's machine.
const (
	network     = "10.88.0.0/16"
	networkBits = 16
	services    = "10.96.0.0/16"
	apiService  = "10.96.0.1"
)

func addrOf(n int) string { return fmt.Sprintf("10.88.0.%d", n) }

// kubernetes is a control plane on one machine and kubelets on several machines.
type kubernetes struct {
	programs
	pki    *authority
	server string // URL of the API server
	admin  string // kubeconfig
	main   *Machine
}

// startControl starts etcd and the control plane, and returns when the API server
// is ready.
func startControl(p programs, dir string, main *Machine) (*kubernetes, error) {
	k := &kubernetes{programs: p, main: main, server: "https://" + main.Addr + ":6443"}
	var err error
	if k.pki, err = newAuthority(filepath.Join(dir, "pki")); err != nil {
		return nil, err
	}
	names := []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}
	if err := errors.Join(
		k.pki.server("apiserver", names, "127.0.0.1", main.Addr, apiService),
		k.pki.client("apiserver-kubelet", "apiserver-kubelet", "system:masters"),
	); err != nil {
		return nil, err
	}
	if k.admin, err = k.pki.kubeconfig("admin", "admin", "system:masters", k.server); err != nil {
		return nil, err
	}
	manager, err := k.pki.kubeconfig("controller-manager", "system:kube-controller-manager", "", k.server)
	if err != nil {
		return nil, err
	}
	scheduler, err := k.pki.kubeconfig("scheduler", "system:kube-scheduler", "", k.server)
	if err != nil {
		return nil, err
	}
	pki := k.pki.path
	if err := k.run(main, "etcd",
		"--data-dir="+filepath.Join(main.dir, "etcd"), "--log-level=warn",
		// The machine is gone after the tests anyhow.
		"--unsafe-no-fsync",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379", "--listen-peer-urls=http://127.0.0.1:2380"); err != nil {
		return nil, err
	}
	if err := k.run(main, "kube-apiserver",
		"--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0", "--advertise-address="+main.Addr,
		"--tls-cert-file="+pki("apiserver.crt"), "--tls-private-key-file="+pki("apiserver.key"), "--client-ca-file="+pki("ca.crt"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
		"--service-cluster-ip-range="+services, "--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+pki("sa.key"), "--service-account-signing-key-file="+pki("sa.key"),
		"--kubelet-client-certificate="+pki("apiserver-kubelet.crt"), "--kubelet-client-key="+pki("apiserver-kubelet.key"),
		"--kubelet-certificate-authority="+pki("ca.crt"), "--kubelet-preferred-address-types=InternalIP"); err != nil {
		return nil, err
	}
	if err := until(time.Minute, "the API server is ready", func(ctx context.Context) error {
		out, err := k.kubectl(ctx, "", "get", "--raw", "/readyz")
		if err == nil && out != "ok" {
			err = errors.New(out)
		}
		return errors.Join(err, alive(main))
	}); err != nil {
		return nil, err
	}
	return k, errors.Join(
		k.run(main, "kube-controller-manager", "--kubeconfig="+manager, "--use-service-account-credentials", "--leader-elect=false", "--bind-address=127.0.0.1",
			"--service-account-private-key-file="+pki("sa.key"), "--root-ca-file="+pki("ca.crt"),
			"--cluster-signing-cert-file="+pki("ca.crt"), "--cluster-signing-key-file="+pki("ca.key")),
		k.run(main, "kube-scheduler", "--kubeconfig="+scheduler, "--leader-elect=false", "--bind-address=127.0.0.1"),
		k.run(main, "dns", "--kubeconfig="+k.admin, "--listen="+main.Addr+":53"),
	)
}

// run starts a part of Kubernetes.
func (k *kubernetes) run(m *Machine, part string, args ...string) error {
	_, err := m.Start(part, k.path("kube"), append([]string{part}, args...)...)
	return err
}

// kubectl runs kubectl as the administrator; in is its standard input.
func (k *kubernetes) kubectl(ctx context.Context, in string, args ...string) (string, error) {
	cmd := k.command(ctx, args...)
	cmd.Stdin = strings.NewReader(in)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out.String(), nil
}

// command is kubectl, run as the administrator. When ctx ends, nsenter's child ends with nsenter.
func (k *kubernetes) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := k.main.Command(ctx, k.path("kube"), append([]string{"kubectl", "--kubeconfig=" + k.admin}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}

// watch runs kubectl as the administrator until ctx ends, and tells each line at once.
func (k *kubernetes) watch(ctx context.Context, line func(string), args ...string) error {
	cmd := k.command(ctx, args...)
	var errs strings.Builder
	cmd.Stderr = &errs
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		line(lines.Text())
	}
	if err := errors.Join(lines.Err(), cmd.Wait()); err != nil {
		return fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return nil
}

const containerdSocket = "/run/containerd/containerd.sock"

// startRuntime starts containerd on a machine and loads images.
func startRuntime(m *Machine, number int, images []string) error {
	net := fmt.Sprintf(`{"cniVersion":"0.4.0","name":"k8s","plugins":[
 {"type":"bridge","bridge":"cni0","isGateway":false,"ipMasq":false,"hairpinMode":true,
  "ipam":{"type":"host-local","dataDir":"/run/cni","routes":[{"dst":"0.0.0.0/0"}],
   "ranges":[[{"subnet":%q,"rangeStart":"10.88.%d.1","rangeEnd":"10.88.%[2]d.250","gateway":%q}]]}},
 {"type":"portmap","capabilities":{"portMappings":true}}]}
`, network, number, m.Addr)
	config := fmt.Sprintf(`version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = %q
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  # Without CAP_SYS_RESOURCE no container may be less likely to be killed than
  # we are.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = %q
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
`, containerdSocket, pauseImage, filepath.Join(m.dir, "cni"))
	file := filepath.Join(m.dir, "containerd.toml")
	if err := errors.Join(
		os.MkdirAll(filepath.Join(m.dir, "cni"), 0o755),
		os.WriteFile(filepath.Join(m.dir, "cni", "10-bridge.conflist"), []byte(net), 0o644),
		os.WriteFile(file, []byte(config), 0o644),
	); err != nil {
		return err
	}
	if _, err := m.Start("containerd", "containerd", "-l", "warn", "-c", file); err != nil {
		return err
	}
	if err := until(time.Minute, "containerd answers", func(ctx context.Context) error { return ctr(ctx, m, "version") }); err != nil {
		return err
	}
	for _, i := range images {
		if err := ctr(context.Background(), m, "images", "import", i); err != nil {
			return err
		}
	}
	return nil
}

// ctr talks to the runtime of a machine.
func ctr(ctx context.Context, m *Machine, args ...string) error {
	out, err := m.Command(ctx, "ctr", append([]string{"-a", containerdSocket, "-n", "k8s.io"}, args...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ctr %v: %w: %s", args, err, out)
	}
	return nil
}

// startNode starts a kubelet and a kube-proxy.
func (k *kubernetes) startNode(m *Machine, cgroup string) error {
	if err := k.pki.server("kubelet-server-"+m.Name, []string{m.Name}, m.Addr); err != nil {
		return err
	}
	kubelet, err := k.pki.kubeconfig("kubelet-"+m.Name, "system:node:"+m.Name, "system:nodes", k.server)
	if err != nil {
		return err
	}
	proxy, err := k.pki.kubeconfig("proxy-"+m.Name, "system:kube-proxy", "", k.server)
	if err != nil {
		return err
	}
	config := fmt.Sprintf(`apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: false}, webhook: {enabled: false}, x509: {clientCAFile: %q}}
authorization: {mode: AlwaysAllow}
tlsCertFile: %q
tlsPrivateKeyFile: %q
containerRuntimeEndpoint: unix://%s
cgroupDriver: cgroupfs
cgroupRoot: %q
failCgroupV1: false
failSwapOn: false
oomScoreAdj: 0
resolvConf: ""
clusterDNS: [%q]
clusterDomain: cluster.local
# The disk is everybody's.
evictionHard: {memory.available: 50Mi, nodefs.available: "1%%", imagefs.available: "1%%"}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
syncFrequency: 5s
volumeStatsAggPeriod: 5s
`, k.pki.path("ca.crt"), k.pki.path("kubelet-server-"+m.Name+".crt"), k.pki.path("kubelet-server-"+m.Name+".key"), containerdSocket, cgroup, k.main.Addr)
	// All traffic is masqueraded: the network has no routes, so answers of a service must
	// come back through the node that chose the server.
	proxying := fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: %q}
mode: iptables
hostnameOverride: %q
clusterCIDR: %s
iptables: {masqueradeAll: true}
conntrack: {maxPerCore: 0, min: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`, proxy, m.Name, network)
	kubeletFile, proxyFile := filepath.Join(m.dir, "kubelet.yaml"), filepath.Join(m.dir, "proxy.yaml")
	return errors.Join(
		os.WriteFile(kubeletFile, []byte(config), 0o600),
		os.WriteFile(proxyFile, []byte(proxying), 0o600),
		k.kubelet(m, kubelet),
		k.run(m, "kube-proxy", "--config="+proxyFile),
	)
}

// kubelet starts a node's kubelet with the configuration that startNode wrote.
func (k *kubernetes) kubelet(m *Machine, kubeconfig string) error {
	return k.run(m, "kubelet", "--config="+filepath.Join(m.dir, "kubelet.yaml"), "--kubeconfig="+kubeconfig, "--hostname-override="+m.Name, "--node-ip="+m.Addr)
}

// RestartKubelet ends a node's kubelet with SIGKILL and starts it again.
func (r *Rig) RestartKubelet(node string) error {
	m := r.Machine(node)
	m.mu.Lock()
	running := m.running["kubelet"]
	m.mu.Unlock()
	if running == nil {
		return fmt.Errorf("%s has no kubelet of this process", node)
	}
	if err := m.Signal("kubelet", syscall.SIGKILL); err != nil {
		return err
	}
	select {
	case <-running.ended:
	case <-time.After(time.Minute):
		return fmt.Errorf("the kubelet of %s does not end", node)
	}
	return r.kube.kubelet(m, r.kube.pki.path("kubelet-"+node+".conf"))
}

// alive returns an error if a process that a machine should run has ended.
func alive(machines ...*Machine) error {
	for _, m := range machines {
		if died := m.Died(); len(died) > 0 {
			return fmt.Errorf("%w: %v", errDied, died)
		}
	}
	return nil
}

var errDied = errors.New("a part has ended")

// until tries until try succeeds, a part has ended, or time is up.
func until(d time.Duration, what string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	var last error
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil && last != nil {
			err = last // more useful than the timeout
		}
		last = err
		if ctx.Err() != nil || errors.Is(err, errDied) {
			return fmt.Errorf("%s: not in %v: %w", what, d, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
}
