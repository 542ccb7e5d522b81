package rig

import (
	"crypto/sha256"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// programs are Kubernetes' own, built from their modules.
type programs struct {
	dir string // holds kube, the sidecars, snapshot-controller, and crd/
}

func (p programs) path(name string) string { return filepath.Join(p.dir, name) }

const (
	kubeModule     = "k8s.io/kubernetes"
	snapshotModule = "github.com/kubernetes-csi/external-snapshotter/client/v8"
)

// buildPrograms builds what is not in the cache yet. The key is everything that
// the result depends on: the module's go.mod and go.sum, the sources of kube, and
// the version of Go. module is the directory of test/k8s.
func buildPrograms(module string, say func(string, ...any)) (programs, error) {
	var p programs
	version, err := output(module, "go", "env", "GOVERSION", "GOARCH")
	if err != nil {
		return p, err
	}
	h := sha256.New()
	fmt.Fprintln(h, version)
	for _, f := range []string{"go.mod", "go.sum", "kube/main.go"} {
		b, err := os.ReadFile(filepath.Join(module, f))
		if err != nil {
			return p, err
		}
		fmt.Fprintf(h, "%s %d\n%s", f, len(b), b)
	}
	cache, err := os.UserCacheDir() // $XDG_CACHE_HOME or ~/.cache
	if err != nil {
		return p, err
	}
	p.dir = filepath.Join(cache, "penstock-e2e", fmt.Sprintf("%x", h.Sum(nil)[:12]))
	if _, err := os.Stat(p.dir); err == nil {
		say("Kubernetes' programs are in %s", p.dir)
		return p, nil
	}
	begin := time.Now()
	say("building Kubernetes' programs into %s: some 20 minutes of processor time, once", p.dir)
	// Whole or not at all: whoever is interrupted leaves a directory that nobody
	// looks into.
	tmp, err := os.MkdirTemp(mkdir(filepath.Dir(p.dir)), "building-")
	if err != nil {
		return p, err
	}
	defer os.RemoveAll(tmp)
	kube, err := output(module, "go", "list", "-m", "-f", "{{.Version}}", kubeModule)
	if err != nil {
		return p, err
	}
	minor := strings.Split(kube, ".")[1]
	var stamp strings.Builder
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		fmt.Fprintf(&stamp, " -X %s.gitVersion=%s -X %[1]s.gitMajor=1 -X %[1]s.gitMinor=%s -X %[1]s.gitTreeState=clean", pkg, kube, minor)
	}
	for _, args := range [][]string{
		{"-ldflags", "-s -w" + stamp.String(), "./kube"},
		// The sidecars: a driver that meets one of version "unknown" can't tell
		// which it was.
		{"-ldflags", "-s -w", "tool"},
	} {
		args = append([]string{"build", "-trimpath", "-tags", "providerless", "-o", tmp + "/"}, args...)
		if _, err := output(module, "go", args...); err != nil {
			return p, err
		}
	}
	crds, err := output(module, "go", "list", "-m", "-f", "{{.Dir}}", snapshotModule)
	if err != nil {
		return p, err
	}
	if err := os.CopyFS(filepath.Join(tmp, "crd"), os.DirFS(filepath.Join(crds, "config", "crd"))); err != nil {
		return p, err
	}
	if err := os.Rename(tmp, p.dir); err != nil {
		return p, err
	}
	say("built in %v", time.Since(begin).Round(time.Second))
	return p, nil
}

// mkdir makes a directory; if it can't, whoever uses it will say so.
func mkdir(dir string) string {
	_ = os.MkdirAll(dir, 0o755)
	return dir
}

// output runs a program in a directory and gives what it printed, trimmed.
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
