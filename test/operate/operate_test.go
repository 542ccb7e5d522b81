// Package operate proves with real processes and mounts the promises to operators: the fate of
// lost data, how soon a revoked grant ends, and that docs/operations.md works as written.
package operate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/etcd"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) {
	etcd.Main()
	os.Exit(program.Main(m))
}

// rig is a metadata server, chunk servers and mounts, each a process.
type rig struct {
	*program.Rig
	secure bool
	flags  []string // the metadata server's
	meta   *spawn.Process
	chunks []*spawn.Process
}

func newRig(t *testing.T, chunks int, flags ...string) *rig {
	t.Helper()
	r := &rig{Rig: program.NewRig(t)}
	r.start(chunks, flags...)
	return r
}

// newSecureRig is a rig whose parts know each other by certificates, over TCP. env is more
// environment of the processes.
func newSecureRig(t *testing.T, chunks int, env []string, flags ...string) *rig {
	t.Helper()
	r := &rig{Rig: program.NewRig(t, env...), secure: true}
	r.Secure()
	r.start(chunks, append(flags, "--listen", r.Addr, "--credentials", r.Credentials("meta"))...)
	return r
}

func (r *rig) start(chunks int, flags ...string) {
	r.T.Helper()
	r.flags = append([]string{"meta", "--dir", filepath.Join(r.Dir, "m")}, flags...)
	r.meta = r.Run(r.flags...)
	r.Until("the metadata server answers", func() error { _, err := r.Ctl("volume", "show", "root"); return err })
	for i := range chunks {
		if r.secure {
			r.Join("chunkserver", fmt.Sprint("c", i))
		}
		r.chunks = append(r.chunks, r.chunkServer(i))
		r.Until("the chunk server is known", func() error {
			if out, err := r.Ctl("node", "list", "-o", "json"); err != nil || !containsAll(string(out), fmt.Sprintf(`"id": %d,`, i+1)) {
				return errors.Join(errors.New("not yet"), err)
			}
			return nil
		})
	}
}

func (r *rig) chunkServer(i int) *spawn.Process {
	r.T.Helper()
	args := []string{"chunkserver", "--data", filepath.Join(r.Dir, fmt.Sprint("c", i)), "--cluster", r.Addr, "--topology", fmt.Sprintf("/dc/r%d/n%d", i, i), "--local-clients=false"}
	if r.secure {
		args = append(args, "--listen", "127.0.0.1:0", "--credentials", r.Credentials(fmt.Sprint("c", i)))
	}
	return r.Run(args...)
}

// mount mounts a directory of the tree in a process of its own.
func (r *rig) mount(source, name string, flags ...string) string {
	r.T.Helper()
	at, _ := r.mountBy(source, name, flags...)
	return at
}

// mountBy is mount, and returns the process.
func (r *rig) mountBy(source, name string, flags ...string) (string, *spawn.Process) {
	r.T.Helper()
	at := filepath.Join(r.Dir, name)
	if err := os.MkdirAll(at, 0o755); err != nil {
		r.T.Fatal(err)
	}
	p := r.Run(append([]string{"mount", "--cluster", r.Addr, source, at}, flags...)...)
	r.T.Cleanup(func() { p.Kill(); spawn.Unmount(at) })
	r.Until("mounted", func() error {
		if !spawn.Mounted(at) {
			return errors.New("not yet")
		}
		return nil
	})
	return at, p
}
