package deploy

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const units = "../../deploy/systemd"

// settings are the lines KEY=VALUE of a unit; comments that they stand in for are
// left out.
func settings(text []byte) map[string][]string {
	all := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		if key, value, found := strings.Cut(strings.TrimSpace(line), "="); found && !strings.HasPrefix(key, "#") {
			all[key] = append(all[key], value)
		}
	}
	return all
}

// TestUnits: units start commands that there are, as users that are made.
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

// TestDriverUnit: its restart leaves mounts alone, they are seen by pods, and its
// example is one that the program reads.
func TestDriverUnit(t *testing.T) {
	text := read(t, units, "penstock-csi-node.service")
	s, flags := settings(text), programFlags(t)
	if len(s["KillMode"]) != 1 || s["KillMode"][0] != "process" {
		t.Errorf("mounts end with the driver: KillMode=%v", s["KillMode"])
	}
	for key := range s {
		if regexp.MustCompile(`^(Protect|Private|ReadOnlyPaths|ReadWritePaths|InaccessiblePaths|TemporaryFileSystem|Bind|RootDirectory|RootImage|MountFlags|DynamicUser)`).MatchString(key) {
			t.Errorf("%s gives the unit mounts that pods don't see", key)
		}
	}
	keys := regexp.MustCompile(`(?m)^#   ([a-z-]+): `).FindAllSubmatch(text, -1)
	if len(keys) == 0 {
		t.Error("the unit has no example of a configuration")
	}
	for _, k := range keys {
		if !flags[string(k[1])] {
			t.Errorf("penstock knows no key %s", k[1])
		}
	}
}
