package operate

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

// TestVolumesPage runs docs/volumes.md as written, from its beginning to its end.
func TestVolumesPage(t *testing.T) {
	t.Parallel() // beside tests that wait
	r := newSecureRig(t, 1, nil)
	tree := r.mount("/", "tree", "--credentials", r.Credentials("admin"))
	old := filepath.Join(r.Dir, "old")
	for _, dir := range []string{filepath.Join(r.Dir, "bin"), old, filepath.Join(tree, "teams")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(program.Path, filepath.Join(r.Dir, "bin", "penstock")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { spawn.Unmount(old) })
	b, err := os.ReadFile("../../docs/volumes.md")
	if err != nil {
		t.Fatal(err)
	}
	followed, file := 0, filepath.Join(tree, "teams/vision/results/f")
	for line := range strings.Lines(string(b)) {
		section, is := strings.CutPrefix(strings.TrimSpace(line), "## ")
		if !is {
			continue
		}
		for _, block := range manual(t, "volumes.md", section) {
			for _, line := range block {
				if strings.HasPrefix(line, "penstock verify") { // the snapshot was taken a moment ago
					r.Until("the snapshot has a digest", func() error {
						out, err := r.Ctl("snapshot", "show", "results", "before-the-run")
						if err == nil && !bytes.Contains(out, []byte("sha256-tree-1:")) {
							return os.ErrNotExist
						}
						return err
					})
				}
				r.follow([]string{line}, nil,
					" --follow ", " ", // the command would wait for ever
					"--replicas 3 --spread rack", "--replicas 1", "/dc2", "/dc", // this rig has one chunk server
					"/mnt/penstock", tree, "/mnt/old", old)
				followed++
				// Somebody works in the mount meanwhile; now and then the volume is not there.
				// (Nobody did: docs/parts/volumes.md, Limits.)
				if got, err := os.ReadFile(file); err == nil && string(got) != "written" {
					t.Fatalf("DATA: %q after %s", got, line)
				}
			}
		}
		if section == "Make one" {
			if err := os.WriteFile(file, []byte("written"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	if followed < 30 {
		t.Errorf("the page has only %d commands", followed)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "written" {
		t.Errorf("DATA: %q %v", got, err)
	}
}
