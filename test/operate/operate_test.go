// Package operate proves with real processes and mounts what operators are
// promised: what happens to data that is lost, how soon a revoked grant ends, and that
// docs/operations.md works as it is written.
package operate

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) { os.Exit(program.Main(m)) }

// rig is a metadata server, chunk servers and mounts, each a process.
type rig struct {
	*program.Rig
	chunks []*spawn.Process
}

func newRig(t *testing.T, chunks int, flags ...string) *rig {
	t.Helper()
	r := &rig{Rig: program.NewRig(t)}
	r.Run(append([]string{"meta", "--dir", filepath.Join(r.Dir, "m")}, flags...)...)
	r.Until("the metadata server answers", func() error { _, err := r.Ctl("volume", "show", "root"); return err })
	for i := range chunks {
		r.chunks = append(r.chunks, r.chunkServer(i))
		r.Until("the chunk server is known", func() error {
			if out, err := r.Ctl("node", "list", "-o", "json"); err != nil || !containsAll(string(out), fmt.Sprintf(`"id": %d,`, i+1)) {
				return errors.Join(errors.New("not yet"), err)
			}
			return nil
		})
	}
	return r
}

func (r *rig) chunkServer(i int) *spawn.Process {
	r.T.Helper()
	return r.Run("chunkserver", "--data", filepath.Join(r.Dir, fmt.Sprint("c", i)), "--cluster", r.Addr, "--topology", fmt.Sprintf("/dc/r%d/n%d", i, i), "--local-clients=false")
}

// mount mounts a directory of the tree in a process of its own.
func (r *rig) mount(source, name string, flags ...string) string {
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
	return at
}
