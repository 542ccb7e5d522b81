package stories

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var (
	suiteFocus       = flag.String("suite-focus", "External.Storage", "which of Kubernetes' storage tests TestStorageSuite runs, a regular expression")
	suiteSkip        = flag.String("suite-skip", `\[Disruptive\]|\[Feature:Windows\]|any volume data source|multiple pods should modify volumes`, "which of these not; docs/kubernetes.md says why")
	suiteDefinitions = flag.String("suite-definitions", "racks.yaml,driver.yaml", "the driver as described by which files of test/k8s/upstream; racks.yaml is for what depends on places, whatever -suite-focus says")
	suiteWithin      = flag.Duration("suite-within", 2*time.Hour, "when tests of TestStorageSuite are cut off")
	suiteProcs       = flag.Int("suite-procs", 4, "how many of them at a time")
)

// spec is a test in ginkgo's report.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeText            string
	LeafNodeType            string
	State                   string
	RunTime                 time.Duration
	Failure                 struct{ Message string }
}

func (s spec) name() string {
	return strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
}

// TestStorageSuite: Kubernetes' own tests of storage drivers, with the definition of
// ours in test/k8s/upstream.
func TestStorageSuite(t *testing.T) {
	s := begin(t)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour)
	defer cancel()
	suite, err := the.LoadSuite(ctx)
	if err != nil {
		t.Fatal(err)
	}
	// Of these are the tests' own.
	example := the.File("deploy/kubernetes/examples/attributes.yaml")
	s.kubectl("apply", "-f", example)
	t.Cleanup(func() { s.kubectl("delete", "-f", example, "--wait=false") })

	passed, failed, skipped := 0, 0, map[string]int{}
	for _, d := range strings.Split(*suiteDefinitions, ",") {
		definition, focus := d, *suiteFocus
		if definition == "racks.yaml" {
			focus = "topology|capacity"
		}
		out, err := os.Create(filepath.Join(t.TempDir(), "out"))
		if err != nil {
			t.Fatal(err)
		}
		report := filepath.Join(t.TempDir(), "report.json")
		err = suite.Run(ctx, the.File("test/k8s/upstream/"+definition), focus, *suiteSkip, *suiteProcs, *suiteWithin, report, out)
		out.Close()
		if err != nil {
			b, _ := os.ReadFile(out.Name())
			t.Fatalf("%v\n%s", err, b)
		}
		for _, r := range read(t, report) {
			switch name := r.name(); {
			case r.State == "passed":
				passed++
				t.Logf("%6.1f s  %s", r.RunTime.Seconds(), name)
			case r.State == "skipped" && r.Failure.Message != "":
				skipped[reason(r.Failure.Message)]++
			case r.State == "skipped" || r.State == "pending": // not in focus
			default:
				failed++
				t.Errorf("%s: %s\n%s", r.State, name, r.Failure.Message)
			}
		}
	}
	for _, why := range slices.SortedFunc(maps.Keys(skipped), func(a, b string) int { return cmp.Or(skipped[b]-skipped[a], cmp.Compare(a, b)) }) {
		t.Logf("skipped %3d: %s", skipped[why], why)
	}
	t.Logf("%d passed, %d failed", passed, failed)
	if passed == 0 {
		t.Errorf("no test of %q ran", *suiteFocus)
	}
	s.until(patience, "nothing is left of the tests' namespaces", func(ctx context.Context) error {
		out, err := the.Kubectl(ctx, "get", "namespaces", "-l", "e2e-framework", "-o", "name")
		if err == nil && out != "" {
			err = fmt.Errorf("left: %s", out)
		}
		return err
	})
}

func read(t *testing.T, report string) (all []spec) {
	t.Helper()
	b, err := os.ReadFile(report)
	var suites []struct{ SpecReports []spec }
	if err == nil {
		err = json.Unmarshal(b, &suites)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range suites {
		all = append(all, s.SpecReports...)
	}
	return slices.DeleteFunc(all, func(s spec) bool { return s.LeafNodeType != "It" })
}

// reason is why a test was skipped, without what is of it alone.
func reason(message string) string {
	return strings.TrimSpace(digits.ReplaceAllString(strings.Split(message, "\n")[0], "N"))
}

var digits = regexp.MustCompile(`\d+`)
