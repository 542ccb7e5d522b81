package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestRoll: roll.sh replaces what is old, metadata servers first, each when all was
// well three times in a row after the one before; and nothing when it is run again.
func TestRoll(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"sleep": "#!/bin/sh\n", "kubectl": string(read(t, "testdata", "kubectl"))} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	roll := func() []string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), "sh", filepath.Join(driverChart.plain, "roll.sh"), "elsewhere")
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "ROLL_DIR="+dir)
		if out, err := cmd.CombinedOutput(); err != nil {
			wrong, _ := os.ReadFile(filepath.Join(dir, "wrong"))
			t.Fatalf("%v: %s%s", err, out, wrong)
		}
		var asked []string
		for _, line := range strings.Split(string(read(t, dir, "log")), "\n") {
			if word, _, _ := strings.Cut(line, " "); word == "delete" || word == "wait" || word == "exec" {
				asked = append(asked, line)
			}
		}
		return asked
	}
	var gone []string
	looks := 0
	for _, line := range roll() {
		switch pod, is := strings.CutPrefix(line, "delete pod/penstock-"); {
		case is:
			if looks < 3 {
				t.Errorf("%s goes after %d looks at the cluster", pod, looks)
			}
			gone = append(gone, pod)
			looks = 0
		case strings.HasPrefix(line, "exec"):
			looks++
		case line != "wait --for=condition=Ready pod/penstock-"+gone[len(gone)-1]+" --timeout=60s":
			t.Errorf("after %v: %s", gone, line)
		}
	}
	if want := []string{"meta-0", "meta-first-0", "chunkserver-a-0", "chunkserver-a-1", "chunkserver-b-0"}; !slices.Equal(gone, want) {
		t.Errorf("replaced %v, not %v", gone, want)
	}
	if again := strings.Join(roll(), "\n"); strings.Count(again, "delete") != len(gone) {
		t.Errorf("run again it replaces what is new: %s", again)
	}
}
