package operate

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// TestTakeAway: the commands of docs/operations.md that take Penstock off a machine leave no
// mount, no unit and no process, and all data; the same units, put back, serve the data.
func TestTakeAway(t *testing.T) {
	t.Parallel() // beside tests that wait
	r := newRig(t, 1)
	r.Must("volume", "create", "v", "--attach", "/v")
	units, etc, bin := filepath.Join(r.Dir, "units"), filepath.Join(r.Dir, "usrlib"), filepath.Join(r.Dir, "bin")
	for _, dir := range []string{units, bin, filepath.Join(etc, "sysusers.d"), filepath.Join(etc, "tmpfiles.d")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	shipped, err := filepath.Glob("../../deploy/systemd/*")
	if err != nil || len(shipped) == 0 {
		t.Fatalf("no units: %v", err)
	}
	copyOf := func(from, to string) {
		t.Helper()
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(to, b, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range shipped {
		switch name := strings.TrimSuffix(filepath.Base(f), ".example"); {
		case strings.HasSuffix(name, ".service"):
			copyOf(f, filepath.Join(units, name))
		case strings.HasSuffix(name, ".sysusers.conf"):
			copyOf(f, filepath.Join(etc, "sysusers.d", "penstock.conf"))
		case strings.HasSuffix(name, ".tmpfiles.conf"):
			copyOf(f, filepath.Join(etc, "tmpfiles.d", "penstock.conf"))
		}
	}
	if err := os.WriteFile(filepath.Join(bin, "penstock"), nil, 0o755); err != nil {
		t.Fatal(err)
	}

	// The units' processes, as the units start each process.
	socket := filepath.Join(r.Dir, "hold.sock")
	running := map[string]*spawn.Process{"penstock-meta": r.meta, "penstock-chunkserver": r.chunks[0], "penstock-hold": r.Run("hold", "--socket", socket)}
	r.Until("the holder listens", func() error { _, err := os.Stat(socket); return err })
	var at string
	at, running["penstock-data"] = r.mountBy("v:/", "w", "--hold="+socket)
	want := bytes.Repeat([]byte("kept\n"), 100_000)
	if err := os.WriteFile(filepath.Join(at, "f"), want, 0o644); err != nil { // and not synced
		t.Fatal(err)
	}

	stopped := map[string]bool{}
	systemctl := func(verb, unit string) {
		t.Helper()
		switch {
		case verb == "" && unit == "daemon-reload":
		case verb == "disable --now":
			if _, err := os.Stat(filepath.Join(units, unit+".service")); err != nil {
				t.Errorf("systemctl %s %s: nothing ships such a unit", verb, unit)
			}
			stopped[unit] = true
			if p := running[unit]; p != nil { // the driver does not run here
				if err := p.Stop(60 * time.Second); err != nil {
					t.Errorf("%s: %v", unit, err)
				}
			}
			if unit == "penstock-data" && spawn.Mounted(at) {
				t.Error("the mount is there after its unit was stopped")
			}
		default:
			t.Errorf("systemctl %s %s", verb, unit)
		}
	}
	r.follow(block(t, "Take it away", "systemctl disable"), systemctl, "/etc/systemd/system", units, "/usr/lib", etc, "/usr/local/bin", bin)

	for unit := range running {
		if !stopped[unit] {
			t.Errorf("%s was left running", unit)
		}
	}
	for _, dir := range []string{units, bin, filepath.Join(etc, "sysusers.d"), filepath.Join(etc, "tmpfiles.d")} {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%s has %v: %v", dir, left, err)
		}
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(r.Dir))
	if err != nil || len(mounts) > 0 {
		t.Errorf("still mounted: %v, %v", mounts, err)
	}
	if left := processesOf(t, r.Dir); len(left) > 0 {
		t.Errorf("still running: %v", left)
	}

	// The files are complete, once a server serves the mount again.
	r.meta = r.Run(r.flags...)
	r.chunks[0] = r.chunkServer(0)
	r.tells("it is served again", "ok")
	at = r.mount("v:/", "again")
	if got, err := os.ReadFile(filepath.Join(at, "f")); err != nil || !bytes.Equal(got, want) {
		t.Errorf("DATA: %d of %d bytes are there: %v", len(got), len(want), err)
	}
}

// processesOf lists the processes whose command line names a folder.
func processesOf(t *testing.T, dir string) (all []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil || len(files) == 0 {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the process has ended
		}
		if line := string(bytes.ReplaceAll(b, []byte{0}, []byte(" "))); strings.Contains(line, dir) {
			all = append(all, fmt.Sprint(filepath.Base(filepath.Dir(f)), ": ", line))
		}
	}
	return all
}
