package rig

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// programs are Kubernetes' programs, built from their modules.
type programs struct {
	dir string // holds kube, the sidecars, snapshot-controller, and crd/
}

func (p programs) path(name string) string { return filepath.Join(p.dir, name) }

const (
	kubeModule     = "k8s.io/kubernetes"
	snapshotModule = "github.com/kubernetes-csi/external-snapshotter/client/v8"
)

// sidecars are the main packages of the sidecars.
var sidecars = []string{
	"github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner",
	"github.com/kubernetes-csi/external-attacher/v4/cmd/csi-attacher",
	"github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer",
	"github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter",
	"github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller",
}

// built returns a digest of everything that determines a program's bytes: the version of
// Go, the module's go.mod and go.sum, and sources.
func built(module string, sources ...string) (string, error) {
	version, err := output(module, "go", "env", "GOVERSION", "GOARCH")
	if err != nil {
		return "", err
	}
	var of strings.Builder
	fmt.Fprintln(&of, version)
	for _, f := range append([]string{"go.mod", "go.sum"}, sources...) {
		b, err := os.ReadFile(filepath.Join(module, f))
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&of, "%s %d\n%s", f, len(b), b)
	}
	return of.String(), nil
}

// buildPrograms builds the programs that are not in the cache. module is the directory of
// test/k8s.
func buildPrograms(module string, say func(string, ...any)) (p programs, err error) {
	of, err := built(module, "kube/main.go", "kube/dns.go")
	if err != nil {
		return p, err
	}
	p.dir, err = kept(of, func(dir string) error {
		begin := time.Now()
		say("building Kubernetes' programs: some 20 minutes of processor time, once")
		stamp, err := kubeVersion(module)
		if err != nil {
			return err
		}
		for _, args := range [][]string{
			{"-ldflags", "-s -w" + stamp, "./kube"},
			// The sidecars print their version, and a driver's log should show which
			// version it met.
			append([]string{"-ldflags", "-s -w"}, sidecars...),
		} {
			args = append([]string{"build", "-trimpath", "-tags", "providerless", "-o", dir + "/"}, args...)
			if _, err := output(module, "go", args...); err != nil {
				return err
			}
		}
		crds, err := output(module, "go", "list", "-m", "-f", "{{.Dir}}", snapshotModule)
		if err != nil {
			return err
		}
		if err := os.CopyFS(filepath.Join(dir, "crd"), os.DirFS(filepath.Join(crds, "config", "crd"))); err != nil {
			return err
		}
		say("built in %v", time.Since(begin).Round(time.Second))
		return nil
	})
	if err == nil {
		say("Kubernetes' programs are in %s", p.dir)
	}
	return p, err
}

// buildHelm builds helm, and an etcd for an image, unless they are in the cache, and
// returns the directory of both. helm is the directory of the module that names helm,
// test/helm.
func buildHelm(module, helm string, say func(string, ...any)) (dir string, err error) {
	var of strings.Builder
	for _, m := range []string{module, helm} {
		text, err := built(m)
		if err != nil {
			return "", err
		}
		of.WriteString(text)
	}
	return kept("helm "+of.String(), func(dir string) error {
		begin := time.Now()
		say("building helm: two minutes of processor time, once")
		for m, pkg := range map[string]string{helm: "helm.sh/helm/v3/cmd/helm", module: "go.etcd.io/etcd/server/v3"} {
			name := "helm"
			if m == module {
				name = "etcd"
			}
			if _, err := output(m, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", filepath.Join(dir, name), pkg); err != nil {
				return err
			}
		}
		say("built in %v", time.Since(begin).Round(time.Second))
		return nil
	})
}

// kubeVersion returns the linker's flags that set the version of Kubernetes' programs.
func kubeVersion(module string) (string, error) {
	kube, err := output(module, "go", "list", "-m", "-f", "{{.Version}}", kubeModule)
	if err != nil {
		return "", err
	}
	minor := strings.Split(kube, ".")[1]
	var stamp strings.Builder
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		fmt.Fprintf(&stamp, " -X %s.gitVersion=%s -X %[1]s.gitMajor=1 -X %[1]s.gitMinor=%s -X %[1]s.gitTreeState=clean", pkg, kube, minor)
	}
	return stamp.String(), nil
}

// output runs a program in a directory and returns its trimmed output.
func output(dir, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	var errs strings.Builder
	cmd.Stderr = &errs
	b, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, errs.String())
	}
	return strings.TrimSpace(string(b)), nil
}
