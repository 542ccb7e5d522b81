package operate

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/test/program"
)

// manual returns the commands in a section of a page of docs, block by block, each line
// unchanged.
func manual(t testing.TB, page, section string) (blocks [][]string) {
	t.Helper()
	b, err := os.ReadFile("../../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	_, text, ok := strings.Cut(string(b), "\n## "+section+"\n")
	if !ok {
		t.Fatalf("docs/%s has no section %q", page, section)
	}
	text, _, _ = strings.Cut(text, "\n## ")
	in := false
	for line := range strings.Lines(text) {
		command, code := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		if code && !in {
			blocks = append(blocks, nil)
		}
		if in = code; !code {
			continue
		}
		last := &blocks[len(blocks)-1]
		if n := len(*last); n > 0 && strings.HasSuffix((*last)[n-1], `\`) {
			(*last)[n-1] = strings.TrimSuffix((*last)[n-1], `\`) + strings.TrimSpace(command)
			continue
		}
		*last = append(*last, command)
	}
	return blocks
}

// block is the block of a section of docs/operations.md that has a line with this beginning.
func block(t testing.TB, section, beginning string) []string {
	t.Helper()
	for _, b := range manual(t, "operations.md", section) {
		if slices.ContainsFunc(b, func(l string) bool { return strings.HasPrefix(l, beginning) }) {
			return b
		}
	}
	t.Fatalf("docs/operations.md, %s: no line begins with %q", section, beginning)
	return nil
}

// follow carries a block out. instead puts this test's names for the manual's, in pairs;
// systemctl does a service manager's work on the machine.
func (r *rig) follow(commands []string, systemctl func(verb, unit string), instead ...string) {
	r.T.Helper()
	replace := strings.NewReplacer(instead...)
	for _, line := range commands {
		line, _, _ = strings.Cut(line, "  #")
		if _, on, ok := strings.Cut(line, "$ "); ok && !strings.Contains(line[:len(line)-len(on)], " $") {
			line = on // "node7$ penstock ...": the node of the terminal
		}
		line = replace.Replace(line)
		if args := strings.Fields(line); args[0] == "systemctl" {
			systemctl(strings.Join(args[1:len(args)-1], " "), args[len(args)-1])
			continue
		}
		cmd := exec.CommandContext(r.T.Context(), "sh", "-euc", line)
		cmd.Dir = r.Dir
		cmd.Env = append(os.Environ(), append(r.Env, "PENSTOCK_CLUSTER="+r.Addr, "PATH="+filepath.Join(r.Dir, "bin")+":"+os.Getenv("PATH"))...)
		began := time.Now()
		if out, err := cmd.CombinedOutput(); err != nil {
			r.T.Fatalf("the manual says\n    %s\nand that gave: %v\n%s", line, err, out)
		}
		r.T.Logf("%5.1f s  %s", time.Since(began).Seconds(), line)
	}
}

// diskView is the command's output for one disk.
type diskView struct{ ID, Path, State string }

// disk is the only disk of a chunk server.
func (r *rig) disk(node int) diskView {
	r.T.Helper()
	var all []diskView
	if err := json.Unmarshal(r.Must("disk", "list", "--node", fmt.Sprint(node), "-o", "json"), &all); err != nil || len(all) != 1 {
		r.T.Fatalf("%d disks of node %d: %v", len(all), node, err)
	}
	return all[0]
}

// TestManual follows docs/operations.md on growing, upgrading and replacing a node, while a mount
// writes and reads: every file stays unchanged.
func TestManual(t *testing.T) {
	t.Parallel() // beside a test that waits
	r := newSecureRig(t, 3, nil, "--repair-delay", "1s", "--repair-grace", "200ms", "--repair-interval", "200ms")
	// The installed program, and a new version to install.
	if err := os.Mkdir(filepath.Join(r.Dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	installed := filepath.Join(r.Dir, "bin", "penstock")
	if err := os.Symlink(program.Path, installed); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(program.Path, filepath.Join(r.Dir, "penstock")); err != nil {
		t.Fatal(err)
	}
	r.Must("volume", "create", "v", "--attach", "/v", "--replicas", "2", "--spread", "rack")
	r.Join("client", "lab")
	r.Must("grant", "add", "lab", "v", "--rights", "write")
	at := r.mount("v:/", "w", "--credentials", r.Credentials("lab"))
	files := map[string][]byte{}
	write := func(step string) {
		t.Helper()
		for i := range 4 {
			path := filepath.Join(at, fmt.Sprint(strings.ReplaceAll(step, " ", "-"), i))
			files[path] = bytes.Repeat([]byte(step+"\n"), 20_000)
			f, err := os.Create(path)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.Write(files[path]); err != nil {
				t.Fatal(err)
			}
			if err := f.Sync(); err != nil {
				t.Fatalf("%s: %v", step, err)
			}
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	write("before")

	// services acts on the metadata server or on one chunk server.
	services := func(node int) func(verb, unit string) {
		return func(verb, unit string) {
			t.Helper()
			switch unit + ": " + verb {
			case "penstock-meta: restart":
				if err := r.meta.Stop(30 * time.Second); err != nil {
					t.Fatal(err)
				}
				r.meta = r.Run(r.flags...)
			case "penstock-chunkserver: restart", "penstock-chunkserver: stop":
				if err := r.chunks[node].Stop(30 * time.Second); err != nil {
					t.Fatal(err)
				}
				if verb == "restart" {
					r.chunks[node] = r.chunkServer(node)
				}
			case "penstock-chunkserver: enable --now":
				r.chunks = append(r.chunks, r.chunkServer(node))
			default:
				t.Fatalf("systemctl %s %s", verb, unit)
			}
		}
	}

	upgrade := block(t, "Upgrade", "systemctl restart penstock-meta")
	r.follow(upgrade, services(0), "/usr/local/bin/penstock", installed)
	write("metadata server upgraded")
	for i := range r.chunks {
		r.follow(upgrade, services(i), "/usr/local/bin/penstock", installed, "penstock-meta", "penstock-chunkserver")
		write(fmt.Sprint("chunk server upgraded ", i))
	}

	join := block(t, "Install", "admin$ penstock cluster join-token --role chunkserver")
	join = slices.DeleteFunc(join, func(line string) bool { return !strings.Contains(line, "$ penstock") }) // see TestInstall
	r.follow(join, services(3), "10.0.0.4:7400", r.Addr, "/etc/penstock/credentials/admin", r.Credentials("admin"), "/etc/penstock/credentials/chunkserver", r.Credentials("c3"))
	r.follow(block(t, "Grow", "systemctl enable"), services(3))
	r.Until("the new node is known", func() error {
		out, err := r.Ctl("node", "list", "-o", "json")
		if err == nil && !containsAll(string(out), `"id": 4,`) {
			err = fmt.Errorf("%s", out)
		}
		return err
	})
	write("grown")

	// No person is at a terminal to be asked.
	r.follow(block(t, "Replace a node", "penstock node drain"), services(2), "node remove 3", "node remove 3 --yes", "node drain 3", "node drain 3 --yes")
	write("node replaced")
	var nodes []struct {
		ID    uint64 `json:"id"`
		State string `json:"state"`
	}
	if err := json.Unmarshal(r.Must("node", "list", "-o", "json"), &nodes); err != nil {
		t.Fatal(err)
	}
	for _, n := range nodes {
		if n.ID == 3 && n.State != "removed" {
			t.Errorf("node 3 is %s after it was removed", n.State)
		}
	}
	r.Until("all is well", func() error { _, err := r.Ctl("cluster", "status", "--check", "--for-upgrade"); return err })

	d := r.disk(4)
	r.follow(block(t, "Replace a disk", "penstock disk fail"), nil, "4f1c09 ", d.ID[:6]+" --yes ", "umount /mnt/nvme0", "rm -r "+d.Path+" && mkdir "+d.Path)
	r.Until("there is a new disk", func() error {
		if n := r.disk(4); n.ID == d.ID || n.State != "ok" {
			return fmt.Errorf("%+v in the place of %+v", n, d)
		}
		return nil
	})
	write("disk replaced")
	r.Until("all is well with the new disk", func() error { _, err := r.Ctl("cluster", "status", "--check", "--for-upgrade"); return err })

	at = r.mount("v:/", "x", "--credentials", r.Credentials("lab")) // has nothing cached
	for path, want := range files {
		got, err := os.ReadFile(filepath.Join(at, filepath.Base(path)))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("DATA: %s: %d of %d bytes, %v", filepath.Base(path), len(got), len(want), err)
		}
	}
	if out, err := r.Ctl("fsck", "--volume", "v"); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}
