package csi

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"penstock.io/penstock/fuse/hold"
)

var volumes = flag.Int("volumes", 4, "volumes of the node in TestManyVolumes; make many-volumes: 100")

// each does something about each of n things, eight at once, and joins the errors.
func each(n int, do func(i int) error) error {
	var wg sync.WaitGroup
	errs, room := make([]error, n), make(chan struct{}, 8)
	for i := range n {
		room <- struct{}{}
		wg.Go(func() {
			errs[i] = do(i)
			<-room
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// TestManyVolumes: pods of a node use many volumes when the agent and the processes of all
// mounts are killed, as the kernel does with a container that has no memory left. The next
// agent takes each mount up, and each pod sees a pause and the bytes that the pod wrote.
func TestManyVolumes(t *testing.T) {
	r := newRig(t)
	r.held("--settle=100ms", "--patience=10m")
	pods := r.container()
	r.drive(nil)
	n := *volumes
	ids := make([]string, n)
	staging := func(i int) string { return filepath.Join(pods, fmt.Sprint("staging", i)) }
	pod := func(i int) string { return filepath.Join(pods, fmt.Sprint("pod", i)) }
	ready := grpc.WaitForReady(true)
	begun := time.Now()
	if err := each(n, func(i int) error {
		v, err := r.controller().CreateVolume(t.Context(), claim(fmt.Sprint("pvc-", i), nil), ready)
		if err != nil {
			return err
		}
		ids[i] = v.GetVolume().GetVolumeId()
		if _, err := r.node().NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: ids[i], StagingTargetPath: staging(i), VolumeCapability: capability(manyWriters)}, ready); err != nil {
			return err
		}
		if _, err := r.node().NodePublishVolume(t.Context(), publish(ids[i], staging(i), pod(i)), ready); err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(pod(i), "f"), []byte(ids[i]), 0o644)
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d volumes made, staged and published in %v", n, time.Since(begun).Round(time.Millisecond))
	ticks := make([]*ticks, n)
	for i := range ticks {
		ticks[i] = tick(pod(i), time.Duration(n)*time.Millisecond) // all together a thousand times a second
	}
	before := r.below()
	supervisor := r.driver.PID()
	for _, k := range ticks {
		k.take(t)
	}
	killed := map[int]bool{}
	for _, p := range before {
		if p.pid == supervisor || p.dying {
			continue
		}
		if err := syscall.Kill(p.pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		killed[p.pid] = true
	}
	begun = time.Now()
	if len(killed) < n+1 {
		t.Fatalf("%d processes were killed, of %d mounts and an agent", len(killed), n)
	}
	pauses := make([]time.Duration, n)
	// Each start takes a tenth of a second of a processor, and other processes may want the
	// processor.
	for deadline := begun.Add(60*time.Second + time.Duration(n)*2*time.Second); ; time.Sleep(20 * time.Millisecond) {
		served, err := r.servedByOthers(killed)
		if err == nil && served == n {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d mounts of %d are served again, %v", served, n, err)
		}
	}
	all := time.Since(begun)
	for i, k := range ticks {
		pauses[i] = k.take(t)
		k.end(t)
	}
	slices.Sort(pauses)
	t.Logf("%d mounts killed with their agent: all served again after %v; pauses of p50 %v, p90 %v, max %v", n, all.Round(time.Millisecond),
		pauses[n/2].Round(time.Millisecond), pauses[n*9/10].Round(time.Millisecond), pauses[n-1].Round(time.Millisecond))
	var memory float64
	for _, p := range r.below() {
		if killed[p.pid] && !p.dying {
			t.Errorf("process %d was not killed: %s", p.pid, p.line)
		}
		memory += float64(resident(p.pid))
	}
	t.Logf("the container takes %.0f MB, %.1f for each volume", memory/1e6, memory/1e6/float64(n))
	r.answers(r.conn)
	if err := each(n, func(i int) error {
		b, err := os.ReadFile(filepath.Join(pod(i), "f"))
		if err == nil && string(b) != ids[i] {
			err = fmt.Errorf("DATA: the pod of %s reads %q", ids[i], b)
		}
		if err != nil {
			return err
		}
		if _, err := r.node().NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: ids[i], TargetPath: pod(i)}, ready); err != nil {
			return err
		}
		if _, err := r.node().NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: ids[i], StagingTargetPath: staging(i)}, ready); err != nil {
			return err
		}
		_, err = r.controller().DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: ids[i]}, ready)
		return err
	}); err != nil {
		t.Error(err)
	}
	r.nothingHeld()
	r.containerIsClean(pods)
}

// servedByOthers counts the mounts that processes other than these serve.
func (r *rig) servedByOthers(than map[int]bool) (served int, err error) {
	h, err := hold.Dial(r.hold)
	if err != nil {
		return 0, err
	}
	defer h.Close()
	l, err := h.List()
	for _, m := range l {
		if m.PID != 0 && !than[m.PID] {
			served++
		}
	}
	return served, err
}

// resident is the memory of a process in bytes; 0: the process has ended.
func resident(pid int) int64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	var size, pages int64
	if _, err := fmt.Fscan(bytes.NewReader(b), &size, &pages); err != nil {
		return 0
	}
	return pages * int64(os.Getpagesize())
}
