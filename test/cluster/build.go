package cluster

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Binaries are the programs that a cluster is made of.
type Binaries struct{ Penstock, Etcd string }

// Build builds the programs below dir; penstock as given, if it is. The etcd is
// the release that go.mod names, built from its own main package.
func Build(dir, penstock string, race bool) (Binaries, error) {
	b := Binaries{Penstock: penstock, Etcd: filepath.Join(dir, "etcd")}
	if err := build(b.Etcd, "go.etcd.io/etcd/server/v3", false); err != nil || penstock != "" {
		return b, err
	}
	b.Penstock = filepath.Join(dir, "penstock")
	return b, build(b.Penstock, "penstock.io/penstock/cmd/penstock", race)
}

func build(to, pkg string, race bool) error {
	args, env := []string{"build", "-o", to}, "CGO_ENABLED=0"
	if race {
		args, env = append(args, "-race"), "CGO_ENABLED=1"
	}
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Env = append(os.Environ(), env)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w\n%s", pkg, err, out)
	}
	return nil
}
