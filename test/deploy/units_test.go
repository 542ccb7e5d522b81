package deploy

import (
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const units = "../../deploy/systemd"

// settings are the lines KEY=VALUE of a unit; comment lines with settings are left out.
func settings(text []byte) map[string][]string {
	all := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, found := strings.Cut(strings.TrimSpace(line), "="); found && !strings.HasPrefix(key, "#") {
			all[key] = append(all[key], value)
		}
	}
	return all
}

// TestUnits: units start commands that exist, as users that the sysusers file makes.
func TestUnits(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(units, "*.service"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no units: %v", err)
	}
	sysusers := string(read(t, units, "penstock.sysusers.conf"))
	for _, f := range files {
		s := settings(read(t, f))
		start := strings.Fields(strings.Join(s["ExecStart"], " "))
		if len(start) < 4 || start[0] != "/usr/local/bin/penstock" || start[2] != "--config" || start[3] != "/etc/penstock/"+start[1]+".yaml" {
			t.Errorf("%s starts %q", f, start)
			continue
		}
		read(t, "../../cmd/penstock", start[1]+".go") // a command has a file of its name
		for _, u := range s["User"] {
			if !strings.Contains(sysusers, "\nu "+u+" ") {
				t.Errorf("%s runs as %s, whom penstock.sysusers.conf does not make", f, u)
			}
		}
	}
	for line := range strings.Lines(string(read(t, units, "penstock.tmpfiles.conf"))) {
		if !strings.HasPrefix(line, "#") && !regexp.MustCompile(`^d /\S+ 0[0-7]{3} (root|penstock) (root|penstock) -\n$`).MatchString(line) {
			t.Errorf("penstock.tmpfiles.conf: %q", line)
		}
	}
}

// TestDriverUnit: a restart of the driver's unit leaves mounts alone, pods see the mounts, and
// the program reads the example configuration.
func TestDriverUnit(t *testing.T) {
	text := read(t, units, "penstock-csi-node.service")
	s := settings(text)
	if len(s["KillMode"]) != 1 || s["KillMode"][0] != "process" {
		t.Errorf("mounts end with the driver: KillMode=%v", s["KillMode"])
	}
	for key := range s {
		if regexp.MustCompile(`^(Protect|Private|ReadOnlyPaths|ReadWritePaths|InaccessiblePaths|TemporaryFileSystem|Bind|RootDirectory|RootImage|MountFlags|DynamicUser)`).MatchString(key) {
			t.Errorf("%s gives the unit mounts that pods don't see", key)
		}
	}
}

// TestUnitsConfigure: the flags that units give to their command, and the configurations in the
// comments of the units, are those of that command.
func TestUnitsConfigure(t *testing.T) {
	examples := 0
	for name, text := range shippedUnits(t) {
		start := strings.Fields(strings.Join(settings([]byte(text))["ExecStart"], " "))
		if len(start) == 0 {
			continue // a mount
		}
		command := start[1]
		takes(t, name, start[1:])
		for _, k := range regexp.MustCompile(`(?m)^#   ([a-z-]+): `).FindAllStringSubmatch(text, -1) {
			examples++
			if !commandFlags(t, command)[k[1]] {
				t.Errorf("%s: penstock %s knows no key %s", name, command, k[1])
			}
		}
	}
	if examples < 10 {
		t.Errorf("units have %d keys in examples", examples)
	}
}

// verify has systemd check units, under their own names, and returns systemd's messages.
func verify(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	var paths []string
	for name, text := range files {
		path := filepath.Join(dir, name)
		// systemd looks for the program.
		if err := os.WriteFile(path, []byte(strings.ReplaceAll(text, "/usr/local/bin/penstock", "/bin/true")), 0o644); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, path)
	}
	slices.Sort(paths)
	cmd := exec.CommandContext(t.Context(), "systemd-analyze", append([]string{"verify", "--man=no", "--generators=no"}, paths...)...)
	out, err := cmd.CombinedOutput()
	var said []string
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, dir) || strings.Contains(line, "penstock") {
			said = append(said, line)
		}
	}
	if _, ended := errors.AsType[*exec.ExitError](err); err != nil && !ended {
		t.Fatal(err)
	} else if err != nil && len(said) == 0 {
		said = append(said, err.Error()+": "+string(out))
	}
	return strings.Join(said, "")
}

// shippedUnits are the units of deploy/systemd, the examples under their final names.
func shippedUnits(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pattern := range []string{"*.service", "*.example"} {
		files, err := filepath.Glob(filepath.Join(units, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("no units: %v", err)
		}
		for _, f := range files {
			all[strings.TrimSuffix(filepath.Base(f), ".example")] = string(read(t, f))
		}
	}
	return all
}

// TestSystemdTakesUnits: systemd finds nothing wrong in any of the units.
func TestSystemdTakesUnits(t *testing.T) {
	all := shippedUnits(t)
	if len(all) < 6 {
		t.Fatalf("units %v", slices.Collect(maps.Keys(all)))
	}
	if said := verify(t, all); said != "" {
		t.Error(said)
	}
	// Messages about other units.
	for name, text := range all {
		wrong := strings.Replace(text, "[Unit]\n", "[Unit]\nNonsense=yes\n", 1)
		if text == wrong || !strings.Contains(verify(t, map[string]string{name: wrong}), "Nonsense") {
			t.Errorf("%s: a line that systemd does not know is not seen", name)
		}
	}
}

// TestHolderIsThere: after a boot, and after every end, the holder runs for the units that
// leave mounts to it: something starts the holder, and these units are ordered after the
// holder.
func TestHolderIsThere(t *testing.T) {
	all := shippedUnits(t)
	const holder = "penstock-hold.service"
	h := settings([]byte(all[holder]))
	if got := h["WantedBy"]; !slices.Equal(got, []string{"multi-user.target"}) {
		t.Errorf("the holder is started by %v: a passive target is nobody's to start", got)
	}
	users := 0
	for name, text := range all {
		if name == holder || !strings.Contains(text, "hold.sock") {
			continue
		}
		users++
		s := settings([]byte(text))
		for _, key := range []string{"After", "Wants"} {
			if !slices.Contains(strings.Fields(strings.Join(s[key], " ")), holder) {
				t.Errorf("%s: %s=%v lacks the holder", name, key, s[key])
			}
		}
		if s["Requires"] != nil || s["BindsTo"] != nil || s["PartOf"] != nil {
			t.Errorf("%s stops with the holder", name)
		}
		if !slices.Equal(s["StartLimitIntervalSec"], []string{"0"}) {
			t.Errorf("%s is given up when it ends often", name)
		}
	}
	if users < 2 || !slices.Equal(h["StartLimitIntervalSec"], []string{"0"}) {
		t.Errorf("%d units leave mounts to the holder, whose StartLimitIntervalSec is %v", users, h["StartLimitIntervalSec"])
	}
}
