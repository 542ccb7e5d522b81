package rig

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// suiteImages are the images that Kubernetes' storage tests name, each with the program
// that the image has beside a shell. The names follow from the version of Kubernetes
// (test/utils/image); if an image is missing, a pod waits for it.
var suiteImages = map[string]string{
	"registry.k8s.io/e2e-test-images/busybox:1.37.0-1":        "",
	"registry.k8s.io/e2e-test-images/nginx:1.15-4":            "",
	"registry.k8s.io/e2e-test-images/agnhost:2.63.0":          "agnhost",
	"registry.k8s.io/e2e-test-images/glibc-dns-testing:2.0.0": "",
	"registry.k8s.io/pause:3.10.2":                            "",
}

// Suite is Kubernetes' own suite of storage tests, ready to run on a rig.
type Suite struct {
	rig *Rig
	dir string // of the suite's programs
}

// buildSuite builds the suite unless it is in the cache, and returns its directory.
// module is the directory of test/k8s.
func buildSuite(module string, say func(string, ...any)) (dir string, err error) {
	of, err := built(module, "upstream/upstream_test.go")
	if err != nil {
		return "", err
	}
	return kept("storage tests "+of, func(dir string) error {
		begin := time.Now()
		say("building Kubernetes' storage tests: some minutes of processor time, once")
		stamp, err := kubeVersion(module)
		if err != nil {
			return err
		}
		for _, args := range [][]string{
			{"test", "-c", "-vet=off", "-trimpath", "-ldflags", "-s -w" + stamp, "-o", filepath.Join(dir, "storage.test"), "./upstream"},
			{"build", "-trimpath", "-ldflags", "-s -w", "-o", dir + "/", "k8s.io/kubernetes/test/images/agnhost", "github.com/onsi/ginkgo/v2/ginkgo"},
		} {
			if _, err := output(module, "go", args...); err != nil {
				return err
			}
		}
		say("built in %v", time.Since(begin).Round(time.Second))
		return nil
	})
}

// LoadSuite builds the suite if it is missing, and loads its images into the nodes.
func (r *Rig) LoadSuite(ctx context.Context) (*Suite, error) {
	begin := time.Now()
	s := &Suite{rig: r}
	var err error
	s.dir, err = buildSuite(filepath.Join(r.root, "test", "k8s"), r.say)
	if err != nil {
		return nil, err
	}
	for name, program := range suiteImages {
		i, err := shell(name)
		if err != nil {
			return nil, err
		}
		if program != "" {
			i.Files["/"+program] = filepath.Join(s.dir, program)
			i.Entrypoint = []string{"/" + program}
		}
		archive := filepath.Join(r.Dir, "suite-image.tar")
		if err := i.write(archive); err != nil {
			return nil, fmt.Errorf("image %s: %w", name, err)
		}
		for n, p := range places {
			if p.kubelet {
				if err := ctr(ctx, r.order[n], "images", "import", archive); err != nil {
					return nil, err
				}
			}
		}
		if err := os.Remove(archive); err != nil {
			return nil, err
		}
	}
	r.step(&begin, "Kubernetes' storage tests and their %d images are there", len(suiteImages))
	return s, nil
}

// Run runs the tests that match focus and not skip, procs at a time, against the driver
// described by a file, and writes a report (ginkgo's, JSON) to another file. Run cuts off
// tests that do not end within a time. A failed test is no error of Run.
func (s *Suite) Run(ctx context.Context, definition, focus, skip string, procs int, within time.Duration, report string, out io.Writer) error {
	// The tests call kubectl by a path.
	kubectl := filepath.Join(s.rig.Dir, "kubectl")
	if err := os.Symlink(s.rig.kube.path("kube"), kubectl); err != nil && !os.IsExist(err) {
		return err
	}
	// Ginkgo does not start in the root.
	cmd := s.rig.order[0].Command(ctx, "env", "-C", s.rig.Dir, filepath.Join(s.dir, "ginkgo"), "run", fmt.Sprint("--procs=", procs), fmt.Sprint("--timeout=", within), "--no-color", "--succinct",
		"--focus="+focus, "--skip="+skip, "--output-dir="+filepath.Dir(report), "--json-report="+filepath.Base(report),
		filepath.Join(s.dir, "storage.test"), "--",
		"-kubeconfig="+s.rig.kube.admin, "-kubectl-path="+kubectl, "-storage.testdriver="+definition,
		"-provider=skeleton", "-dump-logs-on-failure=false", "-allowed-not-ready-nodes=-1")
	var tail strings.Builder
	cmd.Stdout, cmd.Stderr = out, io.MultiWriter(out, &tail)
	err := cmd.Run()
	if _, missing := os.Stat(report); missing != nil {
		return fmt.Errorf("the storage tests made no report: %w: %s", err, tail.String())
	}
	return nil
}

// shell is an image with busybox.
func shell(names ...string) (image, error) {
	i := image{Names: names, Entrypoint: []string{"/bin/sleep", "2147483647"},
		Files: map[string]string{"/bin/busybox": "/bin/busybox"}, Links: map[string]string{}, Dirs: []string{"/tmp"}}
	applets, err := output("/", "busybox", "--list")
	if err != nil {
		return i, err
	}
	for _, a := range strings.Fields(applets) {
		if a != "busybox" {
			i.Links["/bin/"+a] = "busybox"
		}
	}
	return i, nil
}
