// Package csi proves that `penstock csi` is a driver of the Container Storage
// Interface: real processes of a cluster and of the driver, real mounts.
package csi

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(useEnv); dir != "" {
		os.Exit(use(dir))
	}
	os.Exit(program.Main(m))
}

// rig is a metadata server, a chunk server, and a driver that may be killed and started again.
type rig struct {
	t      *testing.T
	dir    string
	driver *spawn.Process
	deaths int      // of drivers, seen by again
	killed []string // has a driver end at a step
	conn   *grpc.ClientConn
	secure string // address of a metadata server over TCP; "": a Unix socket
	meta   *spawn.Process
	chunks *spawn.Process // the chunk server

	hold      string // the socket of a holder that drivers use; "": no holder
	has       int    // the holder's mounts at the last question
	contained bool   // drivers run in a container

	looker *tree
	ends   func(func()) // has something done when the test ends
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := emptyRig(t)
	r.startMeta()
	r.chunks = r.start(nil, "chunkserver", "--data", r.path("c"), "--cluster", r.cluster(), "--topology", "/dc1/rack1/node1")
	r.hasChunkServer()
	return r
}

func (r *rig) startMeta() {
	r.t.Helper()
	r.meta = r.start(nil, "meta", "--dir", r.path("m"))
	r.until("the metadata server listens", func() error { _, err := os.Stat(r.path("m", "meta.sock")); return err })
}

// hasChunkServer waits for a chunk server.
func (r *rig) hasChunkServer() {
	r.t.Helper()
	r.until("the chunk server is known", func() error {
		if out, err := r.ctl("node", "list", "--output", "json"); err != nil || !bytes.Contains(out, []byte(`"live": true`)) {
			return fmt.Errorf("%s %w", out, err)
		}
		return nil
	})
}

// emptyRig is a directory with a cleanup.
func emptyRig(t *testing.T) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "ct")
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: dir, ends: t.Cleanup}
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("%s", b[max(0, len(b)-12000):])
		}
		if left := r.mounts(); len(left) > 0 {
			t.Errorf("mounts are left: %v", left)
			for _, m := range left {
				_ = unix.Unmount(m, unix.MNT_FORCE|unix.MNT_DETACH)
			}
			return // the directory could hold a mounted volume
		}
		os.RemoveAll(dir)
	})
	r.conn = r.dial(r.socket())
	return r
}

func (r *rig) dial(socket string) *grpc.ClientConn {
	r.t.Helper()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 100 * time.Millisecond}, MinConnectTimeout: time.Second}))
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

func (r *rig) path(parts ...string) string {
	return filepath.Join(append([]string{r.dir}, parts...)...)
}
func (r *rig) cluster() string { return cmp.Or(r.secure, "unix:"+r.path("m", "meta.sock")) }
func (r *rig) socket() string  { return r.path("csi.sock") }

// start runs a part as a process that ends with the test.
func (r *rig) start(env []string, args ...string) *spawn.Process {
	r.t.Helper()
	cmd := exec.Command(program.Path, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if r.contained && args[0] == "csi" {
		inContainer(cmd)
	}
	log, err := os.OpenFile(r.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.t.Fatal(err)
	}
	p, err := spawn.Begin(cmd, args[0], log, (*exec.Cmd).Start)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { p.Kill(); log.Close() })
	return p
}

// drive starts the driver, at its highest verbosity, and waits until the driver answers.
func (r *rig) drive(env []string, args ...string) {
	r.t.Helper()
	if r.secure != "" {
		args = append(args, "--credentials", r.path("cred", "admin"))
	}
	if r.hold != "" {
		args = append(args, "--hold", r.hold)
	}
	r.driver = r.start(env, append([]string{"csi", "--endpoint", "unix://" + r.socket(), "--cluster", r.cluster(), "--state-dir", r.path("state"), "--node-name", "node1", "--inline", "--log-level", "debug"}, args...)...)
	r.answers(r.conn)
}

func (r *rig) answers(conn *grpc.ClientConn) {
	r.t.Helper()
	r.until("the driver answers", func() error {
		ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second) // the driver may have ended
		defer cancel()
		p, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil && !p.GetReady().GetValue() {
			err = errors.New("the cluster does not answer")
		}
		return err
	})
}

func (r *rig) controller() csi.ControllerClient { return csi.NewControllerClient(r.conn) }
func (r *rig) node() csi.NodeClient             { return csi.NewNodeClient(r.conn) }

func (r *rig) until(what string, try func() error) {
	r.t.Helper()
	var err error
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	r.t.Fatalf("%s: %v", what, err)
}

// ctl runs a command of the program against the cluster; on a machine so busy that no server
// answers in time, ctl runs the command again.
func (r *rig) ctl(args ...string) ([]byte, error) {
	if args = append(args, "--cluster", r.cluster()); r.secure != "" {
		args = append(args, "--credentials", r.path("cred", "admin"))
	}
	for deadline := time.Now().Add(60 * time.Second); ; {
		cmd := exec.Command(program.Path, args...)
		var out, errs bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &errs
		err := cmd.Run()
		if err == nil {
			return out.Bytes(), nil
		}
		if !strings.Contains(errs.String(), "no answer from") || time.Now().After(deadline) {
			return nil, fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, errs.String())
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// volumes lists the names of the cluster's volumes besides the root.
func (r *rig) volumes() (names []string) {
	r.t.Helper()
	out, err := r.ctl("volume", "list", "--output", "json")
	if err != nil {
		r.t.Fatal(err)
	}
	var l []struct {
		ID   int    `json:"id"`
		Name string `json:"name"`
	}
	if err := json.Unmarshal(out, &l); err != nil {
		r.t.Fatal(err)
	}
	for _, v := range l {
		if v.ID != 1 {
			names = append(names, v.Name)
		}
	}
	return names
}

// mounts lists the mounts below the test's directory.
func (r *rig) mounts() (paths []string) {
	r.t.Helper()
	all, err := mountinfo.GetMounts(mountinfo.PrefixFilter(r.dir))
	if err != nil {
		r.t.Fatal(err)
	}
	for _, m := range all {
		paths = append([]string{m.Mountpoint}, paths...)
	}
	return paths
}

// processes lists the processes that mount below the test's directory.
func (r *rig) processes() (lines []string) {
	r.t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		r.t.Fatal(err)
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // the process ended
		}
		if line := string(bytes.ReplaceAll(b, []byte{0}, []byte{' '})); strings.Contains(line, r.dir) && strings.Contains(line, " mount ") {
			lines = append(lines, name+": "+line)
		}
	}
	return lines
}

// clean demands that no remains of any claim are left.
func (r *rig) clean() {
	r.t.Helper()
	if v := r.volumes(); len(v) > 0 {
		r.t.Errorf("volumes are left: %v", v)
	}
	if r.secure == "" { // otherwise the look needs a certificate
		if d := r.tree().dirs("/kubernetes"); len(d) > 0 {
			r.t.Errorf("directories of namespaces are left: %v", d)
		}
	}
	if m := r.mounts(); len(m) > 0 {
		r.t.Errorf("mounts are left: %v", m)
	}
	if p := r.processes(); len(p) > 0 {
		r.t.Errorf("processes are left: %v", p)
	}
	for _, d := range []string{"volumes", "inline"} {
		l, err := os.ReadDir(r.path("state", d))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			r.t.Fatal(err)
		}
		for _, e := range l {
			r.t.Errorf("state is left: %s/%s", d, e.Name())
		}
	}
}

// capability is a way to use a volume.
func capability(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
	}
}

const (
	manyWriters = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	manyReaders = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	oneWriter   = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
)

func claim(name string, parameters map[string]string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{Name: name, Parameters: parameters, VolumeCapabilities: []*csi.VolumeCapability{capability(manyWriters)}, CapacityRange: &csi.CapacityRange{RequiredBytes: 64 << 20}}
}

// must is the answer of a call that may not fail.
func must[Q, A any](t *testing.T, call func(context.Context, Q, ...grpc.CallOption) (A, error), q Q) A {
	t.Helper()
	a, err := call(t.Context(), q)
	if err != nil {
		t.Fatalf("%T: %v", q, err)
	}
	return a
}

// TestClaim is the life of a claim: made, mounted for two pods, written, read, grown, deleted.
func TestClaim(t *testing.T) {
	r := newRig(t)
	r.drive(nil)
	v := must(t, r.controller().CreateVolume, claim("pvc-1", map[string]string{"csi.storage.k8s.io/pvc/name": "data", "csi.storage.k8s.io/pvc/namespace": "team"})).GetVolume()
	if v.GetCapacityBytes() != 64<<20 {
		t.Errorf("the volume has %d bytes", v.GetCapacityBytes())
	}
	staging, a, b := r.path("staging"), r.path("pod-a"), r.path("pod-b")
	stage := &csi.NodeStageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging, VolumeCapability: capability(manyWriters), VolumeContext: v.GetVolumeContext()}
	must(t, r.node().NodeStageVolume, stage)
	publish := func(target string, readOnly bool) *csi.NodePublishVolumeRequest {
		return &csi.NodePublishVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability(manyWriters), Readonly: readOnly}
	}
	must(t, r.node().NodePublishVolume, publish(a, false))
	must(t, r.node().NodePublishVolume, publish(b, true))
	if err := os.WriteFile(filepath.Join(a, "f"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(b, "f")); err != nil || string(got) != "hello" {
		t.Errorf("DATA: the other pod reads %q, %v", got, err)
	}
	if err := os.WriteFile(filepath.Join(b, "g"), nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("a read-only pod writes: %v", err)
	}
	for _, p := range []string{a, b} {
		must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: p})
	}
	must(t, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging})
	must(t, r.controller().DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	r.clean()
}
