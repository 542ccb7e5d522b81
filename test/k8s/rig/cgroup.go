package rig

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// cgroups are control groups, the only thing that the rig's machines share with the real
// machine: a group in each hierarchy, in which the machines' kubelets make the groups of
// pods.
type cgroups struct {
	name  string
	roots []string // of hierarchies
}

// newCgroups makes a group in each mounted hierarchy, and in it a group for each machine.
func newCgroups(name string, machines []string) (*cgroups, error) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return nil, err
	}
	g := &cgroups{name: name}
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 2 && (f[2] == "cgroup" || f[2] == "cgroup2") {
			g.roots = append(g.roots, f[1])
		}
	}
	if len(g.roots) == 0 {
		return nil, errors.New("no hierarchy of control groups is mounted")
	}
	for _, root := range g.roots {
		if err := enable(root); err != nil {
			return g, err
		}
		ours := filepath.Join(root, name)
		if err := makeGroup(ours); err != nil {
			return g, err
		}
		for _, m := range machines {
			if err := makeGroup(filepath.Join(ours, m)); err != nil {
				return g, err
			}
		}
	}
	return g, nil
}

// makeGroup makes a group that may contain processes.
func makeGroup(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	// A new group of the first version's cpuset has no processors.
	for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
		b, err := os.ReadFile(filepath.Join(filepath.Dir(dir), f))
		if err != nil {
			continue // another hierarchy, or the second version's root
		}
		if err := os.WriteFile(filepath.Join(dir, f), b, 0); err != nil {
			return err
		}
	}
	return enable(dir)
}

// enable gives the groups below a directory all controllers, in cgroup version 2.
func enable(dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return nil // the first version
	}
	for _, c := range strings.Fields(string(b)) {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+c), 0); err != nil {
			return fmt.Errorf("%s: controller %s: %w", dir, c, err)
		}
	}
	return nil
}

// of is the group of a machine, as a path in each hierarchy.
func (g *cgroups) of(machine string) string { return "/" + g.name + "/" + machine }

// remove removes the groups, whose processes have ended. The kernel may need a moment to
// notice the ends.
func (g *cgroups) remove() error {
	var errs []error
	for _, root := range g.roots {
		deadline := time.Now().Add(10 * time.Second)
		for {
			err := removeTree(filepath.Join(root, g.name))
			if err == nil {
				break
			}
			if time.Now().After(deadline) {
				errs = append(errs, err)
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	return errors.Join(errs...)
}

// removeTree removes a group and the groups below it.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.Remove(dir) // rmdir works although the directory has the group's files
}
