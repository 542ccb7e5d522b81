package rig

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// etcdImage is the name of etcd's image in the chart of the cluster, without the version.
const etcdImage = "registry.k8s.io/etcd:"

// Manual is a shell on node1 that runs commands of the documentation: with kubectl, helm
// and openssl, in a directory that looks like the repository.
type Manual struct {
	rig   *Rig
	dir   string
	knows []string // variables and functions of earlier commands, for later commands
}

// NewManual makes a shell, and loads etcd's image into the nodes. The programs are built
// if they are missing.
func (r *Rig) NewManual(ctx context.Context) (*Manual, error) {
	begin := time.Now()
	programs, err := buildHelm(filepath.Join(r.root, "test", "k8s"), filepath.Join(r.root, "test", "helm"), r.say)
	if err != nil {
		return nil, err
	}
	m := &Manual{rig: r, dir: filepath.Join(r.Dir, "manual")}
	bin := filepath.Join(m.dir, "bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return nil, err
	}
	for name, to := range map[string]string{
		filepath.Join(bin, "helm"): filepath.Join(programs, "helm"), filepath.Join(bin, "kubectl"): r.kube.path("kube"),
		filepath.Join(m.dir, "deploy"): filepath.Join(r.root, "deploy"),
	} {
		if err := os.Symlink(to, name); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	values, err := os.ReadFile(filepath.Join(r.root, "deploy", "helm", "penstock-cluster", "values.yaml"))
	if err != nil {
		return nil, err
	}
	_, tag, found := strings.Cut(string(values), "image: "+etcdImage)
	if !found {
		return nil, fmt.Errorf("the chart has no image %s", etcdImage)
	}
	tag, _, _ = strings.Cut(tag, "\n")
	archive := filepath.Join(r.Dir, "etcd-image.tar")
	defer os.Remove(archive)
	i := image{Names: []string{etcdImage + tag}, Entrypoint: []string{"/bin/etcd"}, Files: map[string]string{"/bin/etcd": filepath.Join(programs, "etcd")}}
	if err := i.write(archive); err != nil {
		return nil, err
	}
	for n, p := range places {
		if p.kubelet {
			if err := ctr(ctx, r.order[n], "images", "import", archive); err != nil {
				return nil, err
			}
		}
	}
	r.step(&begin, "helm and etcd's image are there")
	return m, nil
}

// Blocks reads the commands of a chapter of a document: the indented paragraphs below
// the heading, up to the next heading of any kind.
func (m *Manual) Blocks(document, heading string) (all []string, err error) {
	b, err := os.ReadFile(filepath.Join(m.rig.root, document))
	if err != nil {
		return nil, err
	}
	_, rest, found := strings.Cut(string(b), "\n"+heading+"\n")
	if !found {
		return nil, fmt.Errorf("%s has no %q", document, heading)
	}
	block := ""
	for _, line := range append(strings.Split(rest, "\n"), "#") {
		if command, is := strings.CutPrefix(line, "    "); is {
			block += command + "\n"
			continue
		}
		if block != "" {
			all = append(all, block)
			block = ""
		}
		if strings.HasPrefix(line, "#") {
			break
		}
	}
	return all, nil
}

// defines matches a command that sets variables or defines a function.
var defines = regexp.MustCompile(`^[a-z]+(=|\(\) \{)`)

// Run runs a block of commands until one fails, and returns the output.
func (m *Manual) Run(ctx context.Context, block string) (string, error) {
	script := strings.Join(m.knows, "\n") + "\n" + block
	cmd := m.rig.order[0].Command(ctx, "env", "-C", m.dir,
		"KUBECONFIG="+m.rig.kube.admin, "HOME="+m.dir, "PATH="+filepath.Join(m.dir, "bin")+":"+os.Getenv("PATH"), "bash", "-euc", script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%w: %s\n%s", err, block, out)
	}
	for _, line := range strings.Split(block, "\n") {
		if defines.MatchString(line) {
			m.knows = append(m.knows, line)
		}
	}
	return string(out), nil
}
