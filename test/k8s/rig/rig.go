// Package rig is a Kubernetes of several nodes and a Penstock cluster on one machine, for
// tests: real programs, in namespaces that end with this process.
//
// A Rig has these machines, in two racks:
//
//	node1, rack1   Kubernetes' control plane, a kubelet, a metadata server, a chunk server
//	node2, rack2   a kubelet, a chunk server with a small disk
//	store1, rack1  a chunk server
//	store2, rack2  a chunk server with a small disk
//	desk           a workstation with nothing but the programs that a test starts there
//
// The driver is installed as users install it: by deploy/kubernetes.
package rig

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Namespace is where deploy/kubernetes puts the driver.
const Namespace = "penstock-system"

const (
	// pauseImage holds pods' namespaces, and has a shell.
	pauseImage = Image
	// Image is the image of the tests' pods: busybox, and the program `load`.
	Image = "localhost/penstock-e2e/busybox:1"
	// NextTag is the tag of a second image of the product, for upgrades: a later version
	// in name, and the same sources.
	NextTag = "0.1.0-next"
	// library is the prefix that runtimes put before names without a registry.
	library = "docker.io/library/"
)

// Rig is the system under test.
type Rig struct {
	Dir      string // the rig's files; gone after Down
	root     string // of the repository
	penstock string // the program
	machines map[string]*Machine
	order    []*Machine
	groups   *cgroups
	kube     *kubernetes
	say      func(string, ...any)
	loops    map[string]bool // loop devices in use before Up
	held     bool            // by another process
}

// place is where a machine stands.
type place struct {
	name, rack string
	kubelet    bool
	disk       string // size of a separate disk in memory; "": a directory of this machine
}

// Claims of 8 GiB fit into rack1 only.
var places = []place{
	{"node1", "rack1", true, ""},
	{"node2", "rack2", true, "2g"},
	{"store1", "rack1", false, ""},
	{"store2", "rack2", false, "2g"},
	{"desk", "", false, ""},
}

// configDir is where on a node the driver's configuration file lies.
const configDir = "/run/penstock-csi-config"

// MetaPort is the port of the metadata server.
const MetaPort = "7400"

// Up starts the whole rig; root is the root of the repository. After a failure, Up stops
// all parts again.
func Up(root string, say func(string, ...any)) (r *Rig, err error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("run as root: machines are namespaces, and mount")
	}
	begin := time.Now()
	if root, err = filepath.Abs(root); err != nil {
		return nil, err
	}
	r = &Rig{root: root, machines: map[string]*Machine{}, say: say}
	defer func() {
		if err != nil {
			if r.Dir != "" {
				r.Failed()
			}
			err = errors.Join(err, r.Down())
			r = nil
		}
	}()
	p, err := buildPrograms(filepath.Join(root, "test", "k8s"), say)
	if err != nil {
		return r, err
	}
	if r.loops, err = loopsInUse(); err != nil {
		return r, err
	}
	if r.Dir, err = os.MkdirTemp("", "penstock-k8s-"); err != nil {
		return r, err
	}
	images, err := r.build(p)
	if err != nil {
		return r, err
	}
	r.step(&begin, "penstock and %d images were built", len(images))

	hosts := map[string]string{}
	var names []string
	for n, p := range places {
		hosts[p.name] = addrOf(n + 1)
		names = append(names, p.name)
	}
	if r.groups, err = newCgroups(filepath.Base(r.Dir), names); err != nil {
		return r, err
	}
	for n, p := range places {
		m, err := newMachine(r.Dir, p.name, addrOf(n+1), hosts)
		if err != nil {
			return r, err
		}
		r.machines[p.name], r.order = m, append(r.order, m)
		if n > 0 {
			if err := r.order[0].link(m); err != nil {
				return r, err
			}
		}
	}
	// The runtimes load images while the control plane starts.
	var loading sync.WaitGroup
	failed := make([]error, len(places))
	for n, p := range places {
		if p.kubelet {
			loading.Go(func() { failed[n] = startRuntime(r.order[n], n+1, images) })
		}
	}
	r.kube, err = startControl(p, r.Dir, r.order[0])
	if err == nil {
		r.step(&begin, "the API server is ready")
		err = r.startPenstock()
	}
	loading.Wait()
	if err = errors.Join(append(failed, err)...); err != nil {
		return r, err
	}
	r.step(&begin, "containerd has the images")
	for n, p := range places {
		if p.kubelet {
			if err := r.kube.startNode(r.order[n], r.groups.of(p.name)); err != nil {
				return r, err
			}
		}
	}
	if err := r.snapshots(); err != nil {
		return r, err
	}
	if err := r.Until(2*time.Minute, "the nodes are ready", func(ctx context.Context) error {
		_, err := r.Kubectl(ctx, "wait", "--for=condition=Ready", "node/node1", "node/node2", "--timeout=5s")
		if err == nil {
			_, err = r.Kubectl(ctx, "get", "serviceaccount", "default")
		}
		return err
	}); err != nil {
		return r, err
	}
	r.step(&begin, "the nodes are ready")
	if err := r.deploy(); err != nil {
		return r, err
	}
	r.step(&begin, "the driver is deployed by deploy/kubernetes, and registered")
	return r, r.note()
}

// note has the data that another process needs to work with a held rig.
type note struct {
	PIDs     map[string]int
	Programs string
}

const noteName = "rig.json"

func (r *Rig) note() error {
	n := note{PIDs: map[string]int{}, Programs: r.kube.dir}
	for _, m := range r.order {
		n.PIDs[m.Name] = m.pid
	}
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.Dir, noteName), b, 0o600)
}

// Attach returns the rig that another process holds in a directory. Its Down does
// nothing.
func Attach(root, dir string, say func(string, ...any)) (*Rig, error) {
	b, err := os.ReadFile(filepath.Join(dir, noteName))
	if err != nil {
		return nil, err
	}
	var n note
	if err := json.Unmarshal(b, &n); err != nil {
		return nil, err
	}
	if root, err = filepath.Abs(root); err != nil {
		return nil, err
	}
	r := &Rig{Dir: dir, root: root, penstock: filepath.Join(dir, "penstock"), machines: map[string]*Machine{}, say: say, held: true}
	for i, p := range places {
		m := &Machine{Name: p.name, Addr: addrOf(i + 1), dir: filepath.Join(dir, p.name), pid: n.PIDs[p.name], running: map[string]*Process{}}
		r.machines[p.name], r.order = m, append(r.order, m)
	}
	r.kube = &kubernetes{programs: programs{n.Programs}, main: r.order[0], admin: filepath.Join(dir, "pki", "admin.conf")}
	return r, nil
}

// step prints the present step and its duration.
func (r *Rig) step(since *time.Time, format string, args ...any) {
	r.say("%s (%.1f s)", fmt.Sprintf(format, args...), time.Since(*since).Seconds())
	*since = time.Now()
}

// build makes penstock and the images; it returns the names of the archives.
func (r *Rig) build(p programs) (archives []string, err error) {
	r.penstock = filepath.Join(r.Dir, "penstock")
	if _, err := output(r.root, "go", "build", "-o", r.penstock, "./cmd/penstock"); err != nil {
		return nil, err
	}
	next := filepath.Join(r.Dir, "penstock-next")
	if _, err := output(r.root, "go", "build", "-ldflags", "-X main.version="+NextTag, "-o", next, "./cmd/penstock"); err != nil {
		return nil, err
	}
	load := filepath.Join(r.Dir, "load")
	if _, err := output(filepath.Join(r.root, "test", "k8s"), "go", "build", "-o", load, "./load"); err != nil {
		return nil, err
	}
	user := filepath.Join(r.Dir, "user")
	if _, err := output(r.root, "go", "build", "-o", user, "./test/takeover/user"); err != nil {
		return nil, err
	}
	dockerfile, err := os.ReadFile(filepath.Join(r.root, "deploy", "docker", "Dockerfile"))
	if err != nil {
		return nil, err
	}
	// The names of the manifests, which then need no change.
	manifest, err := os.ReadFile(filepath.Join(r.root, "deploy", "kubernetes", "controller.yaml"))
	if err != nil {
		return nil, err
	}
	product, err := fromDockerfile(string(dockerfile), map[string]string{"/penstock": r.penstock})
	if err != nil {
		return nil, err
	}
	var images []image
	known := map[string]bool{}
	for _, line := range strings.Split(string(manifest), "\n") {
		name, ok := strings.CutPrefix(strings.TrimSpace(line), "image: ")
		if !ok || known[name] {
			continue
		}
		known[name] = true
		short, _, _ := strings.Cut(name[strings.LastIndex(name, "/")+1:], ":")
		i := image{Names: []string{name}, User: "65532:65532", Entrypoint: []string{"/" + short}, Files: map[string]string{"/" + short: p.path(short)}}
		if short == "penstock" {
			i = product
			i.Names = []string{library + name}
			later := product
			later.Names, later.Files = []string{library + short + ":" + NextTag}, map[string]string{"/penstock": next}
			images = append(images, later)
		}
		images = append(images, i)
	}
	// The shipped examples name a newer busybox than Debian's.
	pods, err := shell(Image, library+"busybox:1.37")
	if err != nil {
		return nil, err
	}
	pods.Files["/bin/load"], pods.Files["/bin/user"] = load, user
	for n, i := range append(images, pods) {
		to := filepath.Join(r.Dir, fmt.Sprintf("image%d.tar", n))
		if err := i.write(to); err != nil {
			return nil, fmt.Errorf("image %s: %w", i.Names, err)
		}
		archives = append(archives, to)
	}
	return archives, nil
}

// snapshots adds snapshots to the cluster, as most clusters have them: the kinds of
// objects, also for groups, and the controller that belongs to Kubernetes and not to a
// driver.
func (r *Rig) snapshots() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	kinds := []string{
		"snapshot.storage.k8s.io_volumesnapshotclasses", "snapshot.storage.k8s.io_volumesnapshotcontents", "snapshot.storage.k8s.io_volumesnapshots",
		"groupsnapshot.storage.k8s.io_volumegroupsnapshotclasses", "groupsnapshot.storage.k8s.io_volumegroupsnapshotcontents", "groupsnapshot.storage.k8s.io_volumegroupsnapshots",
	}
	for _, kind := range kinds {
		if _, err := r.Kubectl(ctx, "apply", "-f", r.kube.path("crd/"+kind+".yaml")); err != nil {
			return err
		}
	}
	if _, err := r.Kubectl(ctx, "wait", "--for=condition=Established", "crd/volumesnapshots.snapshot.storage.k8s.io", "crd/volumegroupsnapshots.groupsnapshot.storage.k8s.io", "--timeout=30s"); err != nil {
		return err
	}
	_, err := r.order[0].Start("snapshot-controller", r.kube.path("snapshot-controller"), "--kubeconfig="+r.kube.admin, "--feature-gates=CSIVolumeGroupSnapshot=true")
	return err
}

// deploy follows docs/kubernetes.md.
func (r *Rig) deploy() error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	shipped := filepath.Join(r.root, "deploy", "kubernetes")
	if _, err := r.Kubectl(ctx, "apply", "-f", filepath.Join(shipped, "namespace.yaml")); err != nil {
		return err
	}
	if err := r.Tokens(ctx); err != nil {
		return err
	}
	// A node finds its place by the chunk server on it, which the node recognises by the
	// boot of the kernel. Here all machines have one kernel, so a file tells each node
	// its place.
	for n, p := range places {
		if p.kubelet {
			at := filepath.Join(r.Dir, p.name, "driver")
			if err := errors.Join(os.Mkdir(at, 0o755), os.WriteFile(filepath.Join(at, "csi.yaml"), []byte("topology: /dc1/"+p.rack+"/"+p.name+"\n"), 0o644)); err != nil {
				return err
			}
			if out, err := r.order[n].Command(ctx, "ln", "-s", at, configDir).CombinedOutput(); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
		}
	}
	return r.Deploy(ctx, Change{})
}

// Tokens makes the Secrets by which the driver joins the rig's own cluster.
func (r *Rig) Tokens(ctx context.Context) error {
	for _, s := range []struct{ secret, role, name string }{
		{"penstock-controller-token", "admin", "kubernetes"},
		{"penstock-node-token", "client", ""},
	} {
		args := []string{"cluster", "join-token", "--role", s.role}
		if s.name != "" {
			args = append(args, "--name", s.name)
		}
		token, err := r.Penstock(ctx, args...)
		if err != nil {
			return err
		}
		if _, err := r.Kubectl(ctx, "-n", Namespace, "create", "secret", "generic", s.secret, "--from-literal=token="+strings.TrimSpace(token)); err != nil {
			return err
		}
	}
	return nil
}

// Change is the part of the deployment that users change.
type Change struct {
	Tag    string // tag of the image; "": as shipped
	Memory string // memory limit of the node part; "": as shipped
	Inline bool   // pods may bring volumes along
	Groups bool   // snapshots of groups of claims
	// MaxVolumes is the largest number of volumes on a node; 0: as shipped.
	MaxVolumes int
	// Cluster is the address of another cluster than the rig's own.
	Cluster string
}

// Deploy applies deploy/kubernetes with the change that every user makes and with c,
// replaces the driver's pods on the nodes by the shipped roll-nodes.sh, and waits until
// everything runs. The holder's pods stay until they are deleted.
func (r *Rig) Deploy(ctx context.Context, c Change) error {
	if err := r.Configure(ctx, c); err != nil {
		return err
	}
	if err := r.RollNodes(ctx); err != nil {
		return err
	}
	return r.Driver(ctx)
}

// RollNodes runs roll-nodes.sh, as users do.
func (r *Rig) RollNodes(ctx context.Context) error {
	bin := filepath.Join(r.Dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return err
	}
	if err := os.Symlink(r.kube.path("kube"), filepath.Join(bin, "kubectl")); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	begin := time.Now()
	out, err := r.order[0].Command(ctx, "env", "KUBECONFIG="+r.kube.admin, "PATH="+bin+":"+os.Getenv("PATH"),
		"sh", filepath.Join(r.root, "deploy", "kubernetes", "roll-nodes.sh"), Namespace).CombinedOutput()
	if err != nil {
		return fmt.Errorf("roll-nodes.sh: %w: %s", err, out)
	}
	r.say("roll-nodes.sh, %.1f s: %s", time.Since(begin).Seconds(), strings.Join(strings.Fields(string(out)), " "))
	return nil
}

// Configure is Deploy without waiting.
func (r *Rig) Configure(ctx context.Context, c Change) error {
	relative, err := filepath.Rel(filepath.Join(r.Dir, "kustomize"), filepath.Join(r.root, "deploy", "kubernetes"))
	if err != nil {
		return err
	}
	images, components, more := "", "", ""
	if c.Groups {
		components = fmt.Sprintf("components: [%q]\n", filepath.Join(relative, "group-snapshots"))
	}
	if c.Tag != "" {
		images = "images: [{name: penstock, newTag: " + c.Tag + "}]\n"
	}
	if c.Memory != "" {
		more += fmt.Sprintf("      - {op: replace, path: /spec/template/spec/containers/0/resources, value: {requests: {cpu: 100m, memory: 64Mi}, limits: {memory: %s}}}\n", c.Memory)
	}
	if c.MaxVolumes > 0 {
		more += fmt.Sprintf("      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --max-volumes=%d}\n", c.MaxVolumes)
	}
	if c.Inline {
		more += `      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --inline}
  - target: {kind: CSIDriver, name: csi.penstock.io}
    patch: '[{"op": "add", "path": "/spec/volumeLifecycleModes/-", "value": "Ephemeral"}]'
`
	}
	text := fmt.Sprintf(`apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [%q]
%spatches:
  - target: {kind: ConfigMap, name: penstock}
    patch: '[{"op": "replace", "path": "/data/cluster", "value": "%s"}]'
  - target: {kind: DaemonSet, name: penstock-node}
    patch: |-
      - {op: add, path: /spec/template/spec/volumes/-, value: {name: config, hostPath: {path: %s}}}
      - {op: add, path: /spec/template/spec/containers/0/volumeMounts/-, value: {name: config, mountPath: /etc/penstock, readOnly: true}}
%s%s`, relative, components, cmp.Or(c.Cluster, r.Meta()), configDir, more, images)
	if err := errors.Join(
		os.MkdirAll(filepath.Join(r.Dir, "kustomize"), 0o755),
		os.WriteFile(filepath.Join(r.Dir, "kustomize", "kustomization.yaml"), []byte(text), 0o644),
	); err != nil {
		return err
	}
	_, err = r.Kubectl(ctx, "apply", "-k", filepath.Join(r.Dir, "kustomize"))
	return err
}

// Driver waits until the driver's pods are ready and the kubelets know the driver.
func (r *Rig) Driver(ctx context.Context) error {
	if _, err := r.Kubectl(ctx, "-n", Namespace, "rollout", "status", "deployment/penstock-controller", "--timeout=120s"); err != nil {
		return err
	}
	// kubectl has no rollout status of objects that are updated by hand (OnDelete).
	for _, set := range []string{"penstock-hold", "penstock-node"} {
		if _, err := r.Kubectl(ctx, "-n", Namespace, "wait", "--for=jsonpath={.status.numberReady}=2", "daemonset/"+set, "--timeout=120s"); err != nil {
			return err
		}
	}
	return r.Until(time.Minute, "the kubelets have the driver", func(ctx context.Context) error {
		out, err := r.Kubectl(ctx, "get", "csinodes", "-o", "jsonpath={.items[*].spec.drivers[*].name}")
		if err == nil && out != "csi.penstock.io csi.penstock.io" {
			err = fmt.Errorf("they have %q", out)
		}
		return err
	})
}

// Kubectl runs kubectl as the administrator.
func (r *Rig) Kubectl(ctx context.Context, args ...string) (string, error) {
	return r.kube.kubectl(ctx, "", args...)
}

// Watch runs kubectl and passes on each line of its output at once, until kubectl or ctx
// ends.
func (r *Rig) Watch(ctx context.Context, line func(string), args ...string) error {
	return r.kube.watch(ctx, line, args...)
}

// Apply applies a manifest.
func (r *Rig) Apply(ctx context.Context, manifest string) error {
	_, err := r.kube.kubectl(ctx, manifest, "apply", "-f", "-")
	return err
}

// Machine returns a machine by its name.
func (r *Rig) Machine(name string) *Machine {
	m := r.machines[name]
	if m == nil {
		panic("rig: there is no machine " + name)
	}
	return m
}

// Until tries until try succeeds; it gives up when time is up, or when a part of the rig
// that should run has ended.
func (r *Rig) Until(d time.Duration, what string, try func(context.Context) error) error {
	return until(d, what, func(ctx context.Context) error { return errors.Join(try(ctx), alive(r.order...)) })
}

// Failed shows the ends of all logs.
func (r *Rig) Failed() {
	logs, _ := filepath.Glob(filepath.Join(r.Dir, "*", "log", "*.log"))
	for _, f := range logs {
		if out, err := exec.Command("tail", "-n", "15", f).Output(); err == nil && len(out) > 0 {
			r.say("--- %s\n%s", strings.TrimPrefix(f, r.Dir+"/"), out)
		}
	}
}

// Down ends everything, removes the rig's files, and fails if anything is left on the
// real machine.
func (r *Rig) Down() error {
	if r.held {
		return nil
	}
	var errs []error
	for _, m := range r.order {
		errs = append(errs, m.stop())
	}
	if r.groups != nil {
		errs = append(errs, r.groups.remove())
	}
	if err := errors.Join(errs...); err != nil {
		return err // a process still runs, and may use the files
	}
	if r.Dir == "" {
		return nil
	}
	return errors.Join(r.left(), os.RemoveAll(r.Dir))
}

// left fails if the machine below still has something of ours: mounts, loop devices,
// processes.
func (r *Rig) left() error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	var errs []error
	for _, line := range strings.Split(string(mounts), "\n") {
		if strings.Contains(line, r.Dir) {
			errs = append(errs, fmt.Errorf("a mount is left: %s", line))
		}
	}
	errs = append(errs, r.loopsLeft())
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, f := range lines {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it ended
		}
		if strings.Contains(string(b), r.Dir+"/") {
			errs = append(errs, fmt.Errorf("a process is left: %s: %q", f, b))
		}
	}
	return errors.Join(errs...)
}

// loopsLeft fails if there is a new loop device. All mounts' loop devices have a file in
// memory with the same name, so loopsLeft recognises the device of another test by its
// mount; a mount that has just gone keeps its device for a moment.
func (r *Rig) loopsLeft() error {
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Second) {
		loops, err := loopsInUse()
		if err != nil {
			return err
		}
		mounted, err := mountedLoops()
		if err != nil {
			return err
		}
		var errs []error
		for l := range loops {
			device := strings.Split(l, "/")[3]
			if !r.loops[l] && (strings.Contains(l, r.Dir) || strings.Contains(l, "/memfd:penstock") && !mounted[device]) {
				errs = append(errs, fmt.Errorf("a loop device is left: %s", l))
			}
		}
		if len(errs) == 0 || time.Now().After(deadline) {
			return errors.Join(errs...)
		}
	}
}

// mountedLoops are the loop devices, loop0 and so on, of which any process sees a
// mount.
func mountedLoops() (map[string]bool, error) {
	files, err := filepath.Glob("/proc/[0-9]*/mountinfo")
	if err != nil {
		return nil, err
	}
	mounted := map[string]bool{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it ended
		}
		for line := range strings.Lines(string(b)) {
			// 7 is the major number of loop devices (Linux, devices.txt).
			if f := strings.Fields(line); len(f) > 2 && strings.HasPrefix(f[2], "7:") {
				mounted["loop"+f[2][2:]] = true
			}
		}
	}
	return mounted, nil
}

// loopsInUse lists the loop devices with their files.
func loopsInUse() (map[string]bool, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		used[f+": "+strings.TrimSpace(string(b))] = true
	}
	return used, nil
}

// Enter returns a command that opens a shell on a machine.
func (r *Rig) Enter(machine string) string {
	return fmt.Sprintf("nsenter -t %d -m -n -p -u -i --wd=/ -- env KUBECONFIG=%s PATH=%s:$PATH bash   (kube kubectl ...)",
		r.Machine(machine).pid, r.kube.admin, r.kube.dir)
}

// Memory returns a table of the private resident memory of each process of the machines,
// in MiB.
func (r *Rig) Memory() (string, error) {
	var b strings.Builder
	for _, m := range r.order {
		out, err := m.Command(context.Background(), "sh", "-c", `for p in /proc/[0-9]*; do
	a=$(tr '\0' ' ' < $p/cmdline 2>/dev/null | cut -c1-300); s=$(awk '/^RssAnon/ {print $2}' $p/status 2>/dev/null)
	[ -n "$a" ] && [ -n "$s" ] && echo "$s $a"; done`).Output()
		if err != nil {
			return "", err
		}
		for _, line := range strings.Split(strings.TrimSpace(string(out)), "\n") {
			f := strings.Fields(line)
			if len(f) < 2 {
				continue
			}
			kib, err := strconv.Atoi(f[0])
			if err != nil || kib < 4096 {
				continue
			}
			name := filepath.Base(f[1])
			if len(f) > 2 && !strings.HasPrefix(f[2], "-") {
				name += " " + f[2]
			}
			fmt.Fprintf(&b, "  %-7s %-40s %5d\n", m.Name, name, kib/1024)
		}
	}
	return b.String(), nil
}

// File returns the whole path of a file of the repository.
func (r *Rig) File(path string) string { return filepath.Join(r.root, path) }
