package csi

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/test/takeover"
)

// useEnv makes this binary a pod's process: the process uses the named directory.
const useEnv = "PENSTOCK_TEST_CSI_USE"

// use is the pod's process.
func use(dir string) int {
	if err := takeover.Use(dir, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// held starts a holder, which drivers that are started from now on use.
func (r *rig) held(args ...string) {
	r.t.Helper()
	r.hold = r.path("hold.sock")
	r.start(nil, append([]string{"hold", "--socket", r.hold}, args...)...)
	r.until("the holder listens", func() error { _, err := r.orphans(); return err })
}

// orphans counts the holder's mounts, and the mounts without a server.
func (r *rig) orphans() (none int, err error) {
	h, err := hold.Dial(r.hold)
	if err != nil {
		return 0, err
	}
	defer h.Close()
	l, err := h.List()
	for _, m := range l {
		if m.PID == 0 {
			none++
		}
	}
	r.has = len(l)
	return none, err
}

// nothingHeld demands that the holder has nothing.
func (r *rig) nothingHeld() {
	r.t.Helper()
	r.until("the holder has nothing", func() error {
		if _, err := r.orphans(); err != nil || r.has > 0 {
			return fmt.Errorf("%d mounts, %w", r.has, err)
		}
		return nil
	})
}

// container runs a driver as in a pod: the first process of a name space, whose end ends all
// processes of the name space, with mounts of its own, shared with the machine only below one
// directory.
func (r *rig) container() (pods string) {
	r.t.Helper()
	pods = r.path("pods")
	err := os.Mkdir(pods, 0o755)
	if err == nil {
		err = unix.Mount(pods, pods, "", unix.MS_BIND, "")
	}
	if err == nil {
		r.t.Cleanup(func() {
			if err := unix.Unmount(pods, unix.MNT_DETACH); err != nil {
				r.t.Error(err)
			}
		})
		err = unix.Mount("", pods, "", unix.MS_SHARED, "")
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.contained = true
	return pods
}

// inContainer runs a command in a container.
func inContainer(cmd *exec.Cmd) {
	cmd.Args = append([]string{"sh", "-ec", `mount --make-private /proc; mount -t proc proc /proc; exec "$@"`, "sh"}, cmd.Args...)
	cmd.Path = "/bin/sh"
	cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID | syscall.CLONE_NEWNS
}

// pod is a process that uses a directory.
type pod struct {
	t    *testing.T
	cmd  *exec.Cmd
	in   io.Closer
	out  *bufio.Reader
	errs bytes.Buffer
}

func (r *rig) pod(dir string) *pod {
	r.t.Helper()
	p := &pod{t: r.t, cmd: exec.CommandContext(r.t.Context(), os.Args[0])}
	p.cmd.Env = append(os.Environ(), useEnv+"="+dir)
	p.cmd.Stderr = &p.errs
	in, err := p.cmd.StdinPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	p.in, p.out = in, bufio.NewReader(out)
	if line, err := p.out.ReadString('\n'); err != nil || line != "begun\n" {
		r.t.Fatalf("%q %v %s", line, err, p.errs.String())
	}
	return p
}

// end stops the pod; the pod must not have seen an error.
func (p *pod) end() {
	p.t.Helper()
	late := time.AfterFunc(60*time.Second, func() { p.cmd.Process.Kill() })
	defer late.Stop()
	p.in.Close()
	did, _ := io.ReadAll(p.out)
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("the pod saw: %v\n%s", err, p.errs.String())
	}
	p.t.Logf("the pod did %s", did)
}

// server is the process that serves the only mount of a test.
func (r *rig) server() int {
	r.t.Helper()
	l := r.processes()
	if len(l) != 1 {
		r.t.Fatalf("processes: %q", l)
	}
	pid, err := strconv.Atoi(strings.Split(l[0], "/")[2])
	if err != nil {
		r.t.Fatal(err)
	}
	return pid
}

// passes waits until a file can be made, and returns the wait.
func (r *rig) passes(dir string) time.Duration {
	r.t.Helper()
	begun := time.Now()
	name := filepath.Join(dir, "probe")
	if err := errors.Join(os.WriteFile(name, nil, 0o644), os.Remove(name)); err != nil {
		r.t.Error(err)
	}
	return time.Since(begun).Round(time.Millisecond)
}

// TestHeld: the process of a mount is killed, the driver's whole container is killed, or the
// process is told to end, in the middle of a pod's writes, with files mapped and open. The pod
// sees no error, and when the pod has gone nothing is left.
func TestHeld(t *testing.T) {
	r := newRig(t)
	r.held()
	pods := r.container()
	r.drive(nil)
	q := claim("pvc-1", nil)
	q.CapacityRange.RequiredBytes = 256 << 20 // of which the pod uses 50 MiB, and half as much again in deleted files
	id := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
	staging, target := filepath.Join(pods, "staging"), filepath.Join(pods, "pod")
	stage := &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)}
	must(t, r.node().NodeStageVolume, stage)
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	p := r.pod(target)
	time.Sleep(300 * time.Millisecond)
	if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	t.Logf("its process killed: a pause of %v", r.passes(target))
	for _, end := range []struct {
		how string
		do  func() error
	}{
		{"killed", func() error { r.driver.Kill(); return nil }},
		{"told to end", func() error { return r.driver.Stop(60 * time.Second) }},
	} {
		time.Sleep(300 * time.Millisecond)
		if err := end.do(); err != nil {
			t.Errorf("%s: %v", end.how, err)
		}
		if l := r.processes(); len(l) > 0 {
			t.Errorf("%s: the mounts' processes are no part of the container: %v", end.how, l)
		}
		begun := time.Now()
		r.drive(nil)
		r.passes(target)
		t.Logf("the driver %s: a pause of %v from the start of the next one", end.how, time.Since(begun).Round(time.Millisecond))
		must(t, r.node().NodeStageVolume, stage)
		must(t, r.node().NodePublishVolume, publish(id, staging, target))
	}
	p.end()
	r.gone(id, staging, target)
	r.nothingHeld()
	r.containerIsClean(pods)
}

// containerIsClean is clean for a driver that ran in a container.
func (r *rig) containerIsClean(pods string) {
	r.t.Helper()
	r.driver.Kill()
	if err := unix.Unmount(pods, 0); err != nil {
		r.t.Errorf("somebody has something below it: %v", err)
	}
	r.clean()
	if err := unix.Mount(pods, pods, "", unix.MS_BIND, ""); err != nil { // for the cleanup
		r.t.Fatal(err)
	}
}

// TestTakenUpSlowly: a process that takes a mount up waits for the cluster when its driver is
// killed. The next driver leaves the mount, and the mount's lock, to the process.
func TestTakenUpSlowly(t *testing.T) {
	r := newRig(t)
	r.held()
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	r.meta.Kill()
	if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaited := func() error {
		h, err := hold.Dial(r.hold)
		if err != nil {
			return err
		}
		defer h.Close()
		if l, err := h.List(); err != nil || len(l) != 1 || !l[0].Awaited {
			return fmt.Errorf("%+v, %w", l, err)
		}
		return nil
	}
	r.until("somebody takes it up", awaited)
	who := r.server()
	r.driver.Kill()
	// Without inline volumes, which the driver would look for in the cluster first.
	r.driver = r.start(nil, "csi", "--endpoint", "unix://"+r.socket(), "--cluster", r.cluster(), "--state-dir", r.path("state"), "--node-name", "node1", "--hold", r.hold)
	for begun := time.Now(); time.Since(begun) < 4*time.Second; time.Sleep(20 * time.Millisecond) {
		if l := r.processes(); len(l) != 1 {
			t.Fatalf("processes of mounts: %q", l)
		}
	}
	r.startMeta()
	r.passes(staging)
	r.answers(r.conn)
	if now := r.server(); now != who {
		t.Errorf("process %d serves, %d took it up", now, who)
	}
	r.gone(id, staging)
	r.nothingHeld()
	r.clean()
}

// TestHeldAsItIs: pods use a mount that no process serves. Staging the volume with other
// options is refused. Staging with the mount's own options succeeds, although the volume has
// another name by now.
func TestHeldAsItIs(t *testing.T) {
	r := newRig(t)
	r.held()
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	f, err := os.Create(filepath.Join(staging, "f"))
	if err != nil {
		t.Fatal(err)
	}
	rename := func(from, to string) {
		t.Helper()
		if _, err := r.ctl("volume", "rename", from, to); err != nil {
			t.Fatal(err)
		}
	}
	rename("csi-pvc-1", "another")
	as := &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)}
	other := &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters, "noatime")}
	for range 2 {
		must(t, r.node().NodeStageVolume, as)
		if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		_, err := r.node().NodeStageVolume(t.Context(), other)
		wants(t, "staged with other options", err, codes.AlreadyExists)
		r.passes(staging)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Errorf("what was open: %v", err)
	}
	rename("another", "csi-pvc-1") // the driver deletes nothing else
	r.gone(id, staging)
	r.clean()
}

// TestHeldByNobody: the processes of mounts are gone, and so is the cluster, so that no process
// can take the mounts up. The volumes are taken away from the pods all the same, once and
// again, and nothing is left.
func TestHeldByNobody(t *testing.T) {
	r := newRig(t)
	r.held()
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	targets := []string{r.path("a"), r.path("b")}
	for _, target := range targets {
		must(t, r.node().NodePublishVolume, publish(id, staging, target))
	}
	// All written bytes are durable: otherwise the volume stays staged until the bytes are.
	f, err := os.Create(filepath.Join(targets[0], "f"))
	if err == nil {
		_, err = f.WriteString("x")
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	r.meta.Kill()
	if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.until("nobody serves", func() error {
		if n, err := r.orphans(); err != nil || n != 1 {
			return fmt.Errorf("%d %w", n, err)
		}
		return nil
	})
	begun := time.Now()
	for range 2 {
		for _, target := range targets {
			must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		}
	}
	t.Logf("unpublished in %v", time.Since(begun).Round(time.Millisecond))
	for range 2 {
		again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	}
	t.Logf("and unstaged in %v", time.Since(begun).Round(time.Millisecond))
	if _, err := r.orphans(); err != nil || r.has > 0 {
		t.Errorf("the holder has %d mounts yet, %v", r.has, err)
	}
	if m, p := r.mounts(), r.processes(); len(m)+len(p) > 0 {
		t.Errorf("left: %v %v", m, p)
	}
	// The same path is good for the next volume.
	r.startMeta()
	r.hasChunkServer()
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
	must(t, r.node().NodePublishVolume, publish(id, staging, targets[0]))
	r.passes(targets[0])
	r.gone(id, staging, targets[0])
	r.clean()
}

// TestKilledAfterUnmounting: a mount's process is killed after its mount was taken away and
// before all written bytes are durable. The next process makes the bytes durable: a volume is
// unstaged only when its bytes are durable.
func TestKilledAfterUnmounting(t *testing.T) {
	r := newRig(t)
	r.held()
	r.drive(nil)
	id, staging := r.staged("pvc-1")
	target := r.path("a")
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	f, err := os.Create(filepath.Join(target, "f"))
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte("written, not synced. "), 5000)
	r.halt(r.chunks.PID())
	goOn := func() { _ = syscall.Kill(r.chunks.PID(), syscall.SIGCONT) }
	t.Cleanup(goOn)
	if _, err := f.Write(want); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	pid := r.server()
	must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	unmounted := make(chan error, 1)
	go func() { unmounted <- unix.Unmount(staging, unix.UMOUNT_NOFOLLOW) }() // as a driver that is killed then
	r.until("the mount is taken away", func() error {
		if m := r.mounts(); len(m) > 0 {
			return fmt.Errorf("%v", m)
		}
		return nil
	})
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	goOn()
	if err := <-unmounted; err != nil {
		t.Error(err)
	}
	again(r, r.node().NodeUnstageVolume, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	r.nothingHeld()
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
	must(t, r.node().NodePublishVolume, publish(id, staging, target))
	if got, err := os.ReadFile(filepath.Join(target, "f")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("DATA: %d bytes of %d were there when the volume was unstaged: %v", len(got), len(want), err)
	}
	r.gone(id, staging, target)
	r.clean()
}
