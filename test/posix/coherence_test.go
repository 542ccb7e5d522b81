package posix

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

	"penstock.io/penstock/test/posix/suite"
)

// twoMounts returns the paths of one fresh directory on two mounts of one cluster, each
// served by a separate process.
func twoMounts(t *testing.T) (a, b string) {
	t.Helper()
	if *dirFlag != "" {
		a = subject(t)
		if *otherFlag == "" {
			return a, a
		}
		return a, filepath.Join(*otherFlag, filepath.Base(a))
	}
	c := startCluster(t)
	second := c.mountAgain(t)
	a, err := os.MkdirTemp(c.mount, "posix-")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(a, 0o755); err != nil {
		t.Fatal(err)
	}
	return a, filepath.Join(second, filepath.Base(a))
}

// TestCoherence runs the cases for two mounts.
func TestCoherence(t *testing.T) {
	a, b := twoMounts(t)
	conform(t, a, b, suite.CoherenceCases())
}

// mappedTable returns the cases of files that one process has mapped or open while other
// processes change the files or make them longer.
func mappedTable() []suite.Case { return slices.Concat(suite.MappedCases(), suite.GrownCases()) }

// TestMapped runs mappedTable in a plain volume, in a compressed volume, and in the clone
// of the compressed volume.
func TestMapped(t *testing.T) {
	if *dirFlag != "" {
		a, b := twoMounts(t)
		conform(t, a, b, mappedTable())
		return
	}
	c := startCluster(t)
	second := c.mountAgain(t)
	bin, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(bin, "volume", "create", "z", "--attach", "/z", "--compression", "zstd", "--dir", c.dir).CombinedOutput(); err != nil {
		t.Fatalf("penstock volume create: %v\n%s", err, out)
	}
	origin := filepath.Join(c.mount, "z", "of-a-clone")
	if err := errors.Join(os.Mkdir(origin, 0o755), suite.PrepareMapped(origin)); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(bin, "clone", "create", "z", "zc", "--attach", "/zc", "--dir", c.dir).CombinedOutput(); err != nil {
		t.Fatalf("penstock clone create: %v\n%s", err, out)
	}
	for _, below := range []string{"plain", "z/compressed", "zc/of-a-clone"} {
		a, b := filepath.Join(c.mount, below), filepath.Join(second, below)
		if err := os.MkdirAll(a, 0o755); err != nil {
			t.Fatal(err)
		}
		conform(t, a, b, mappedTable())
	}
}

// TestWhatCantBeHad compares the exceptions of the table of cases with the exceptions
// that the documentation tells users.
func TestWhatCantBeHad(t *testing.T) {
	b, err := os.ReadFile("../../docs/parts/posix.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(b), "\n## What is not seen at once")
	told := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| (.+) \\|$").FindAllStringSubmatch(table, -1) {
		told[row[1]] = row[2]
	}
	if !maps.Equal(told, suite.CantBeHad) {
		t.Errorf("docs/parts/posix.md says %q, the table excuses %q", told, suite.CantBeHad)
	}
}
