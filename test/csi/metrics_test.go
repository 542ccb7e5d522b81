package csi

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// told is the driver's output for Prometheus.
func (r *rig) told() (string, error) {
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", r.path("state", "admin.sock"))
	}}}
	a, err := c.Get("http://driver/metrics")
	if err != nil {
		return "", err
	}
	defer a.Body.Close()
	b, err := io.ReadAll(a.Body)
	if err == nil && a.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", a.Status, b)
	}
	return string(b), err
}

// tells waits until the driver serves a non-zero metric for each of the first beginnings, and no
// metric for the second beginnings.
func (r *rig) tells(what string, these, notThose []string) {
	r.t.Helper()
	r.until(what, func() error {
		text, err := r.told()
		if err != nil {
			return err
		}
		for _, s := range these {
			if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(s) + ` [0-9.e+-]*[1-9]`).MatchString(text) {
				return fmt.Errorf("no %s in\n%s", s, text)
			}
		}
		for _, s := range notThose {
			if strings.Contains(text, s) {
				return fmt.Errorf("it says %s", s)
			}
		}
		return nil
	})
}

// TestPodsWait: the driver tells the counters of the mounts of its node, by volume, and how
// long each pod waited for reads. The driver tells them also after the mount's process and the
// driver were replaced, and no more when the pod is gone.
func TestPodsWait(t *testing.T) {
	r := newRig(t)
	r.held()
	r.drive(nil)
	q := claim("pvc-1", nil)
	id := must(t, r.controller().CreateVolume, q).GetVolume().GetVolumeId()
	staging := r.path("staging")
	must(t, r.node().NodeStageVolume, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability(manyWriters)})
	target := func(pod string) string { return r.path("pod-" + pod) }
	for _, pod := range []string{"a", "b", "../c"} {
		at := target(filepath.Base(pod))
		p := publish(id, staging, at)
		p.VolumeContext = map[string]string{"csi.storage.k8s.io/pod.name": pod, "csi.storage.k8s.io/pod.namespace": "team"}
		must(t, r.node().NodePublishVolume, p)
		must(t, r.node().NodePublishVolume, p)
	}
	read := func() {
		t.Helper()
		name := filepath.Join(target("a"), "f")
		if err := os.WriteFile(name, []byte("hello"), 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_DIRECT, 0) // the kernel has the page, and must not answer
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := io.ReadAll(f); err != nil {
			t.Fatal(err)
		}
	}
	series := func(pod string) string {
		return `penstock_csi_pod_read_waiting_seconds_total{handle="` + id + `",namespace="team",pod="` + pod + `",volume="csi-pvc-1"}`
	}
	mount := []string{`penstock_mount_read_seconds_count{handle="` + id + `",volume="csi-pvc-1"}`, `penstock_client_read_bytes_total{handle="` + id + `",volume="csi-pvc-1"}`, `penstock_mount_held{handle="` + id + `",volume="csi-pvc-1"}`}
	begun := func(what string) {
		t.Helper()
		r.until(what, func() error {
			text, err := r.told()
			if err == nil && !strings.Contains(text, series("a")) {
				err = fmt.Errorf("nothing of the pod in\n%s", text)
			}
			return err
		})
	}
	begun("it is told of a pod")
	read()
	r.tells("both pods wait", append(mount, series("a"), series("b")), []string{`pod="c"`, `pod="../c"`, "go_goroutines{"})
	if err := syscall.Kill(r.server(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.passes(target("a"))
	begun("the next process tells")
	read()
	r.tells("the mount's next process tells", append(mount, series("a"), series("b")), nil)
	must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target("b")})
	r.driver.Kill()
	r.drive(nil)
	r.tells("the next driver knows who has it", []string{series("a")}, []string{series("b")})
	for _, pod := range []string{"a", "c"} {
		must(t, r.node().NodeUnpublishVolume, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target(pod)})
	}
	r.gone(id, staging, target("a"))
	r.tells("nobody waits", nil, []string{"csi-pvc-1"})
	r.clean()
	if l, err := os.ReadDir(r.path("state", "sockets")); err != nil || len(l) > 0 {
		t.Errorf("sockets are left: %v %v", l, err)
	}
}
