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

	"penstock.io/penstock/test/k8s/rig"
)

var (
	suiteFocus       = flag.String("suite-focus", "External.Storage", "which of Kubernetes' storage tests TestStorageSuite runs, a regular expression")
	suiteSkip        = flag.String("suite-skip", suiteNever+`|any volume data source|volume-modify-stress|Always.*initial fsgroup, new pod`, "which of these not; docs/kubernetes.md says why")
	suiteDefinitions = flag.String("suite-definitions", "racks.yaml,at-once.yaml,limits.yaml,driver.yaml,inline.yaml", "the driver as described by which files of test/k8s/upstream; -suite-focus and -suite-skip are for driver.yaml, each other file is for the tests that it is needed for")
	suiteWithin      = flag.Duration("suite-within", 2*time.Hour, "when tests of TestStorageSuite are cut off")
	suiteProcs       = flag.Int("suite-procs", 4, "how many of them at a time")
	suiteReports     = flag.String("suite-reports", "", "directory to keep what they say of each test (ginkgo's output and report, for each definition); \"\": not kept")
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

// group returns the subject of a test, without kinds of volumes and features.
func (s spec) group() string {
	if len(s.ContainerHierarchyTexts) < 2 {
		return s.name()
	}
	return strings.Join(strings.Fields(brackets.ReplaceAllString(s.ContainerHierarchyTexts[1], " ")), " ")
}

var brackets = regexp.MustCompile(`\[[^]]*\]`)

// tally counts the tests of a group.
type tally struct{ passed, failed, skipped, left int }

// suiteFocuses selects the tests for each definition.
var suiteFocuses = map[string]string{
	"racks.yaml":   "topology|capacity",
	"at-once.yaml": "volume-modify-stress|volume-lifecycle-performance",
	"limits.yaml":  "volumeLimits",
	"inline.yaml":  "CSI Ephemeral",
}

// suiteDeployments has the changes of the driver's deployment that definitions need.
var suiteDeployments = map[string]rig.Change{
	"limits.yaml": {MaxVolumes: 4},
}

// suiteNever matches tests that run with no definition; docs/kubernetes.md gives the
// reasons.
const suiteNever = `\[Disruptive\]|\[Feature:Windows\]`

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
	// Some definitions name classes from these files.
	for _, f := range []string{"deploy/kubernetes/examples/attributes.yaml", "test/k8s/upstream/at-once-class.yaml"} {
		s.kubectl("apply", "-f", the.File(f))
		t.Cleanup(func() { s.kubectl("delete", "-f", the.File(f), "--wait=false") })
	}

	passed, failed, skipped, groups := 0, 0, map[string]int{}, map[string]*tally{}
	for _, d := range strings.Split(*suiteDefinitions, ",") {
		definition, focus, skip := d, *suiteFocus, *suiteSkip
		if own := suiteFocuses[definition]; own != "" {
			focus, skip = own, suiteNever
		}
		change, changed := suiteDeployments[definition]
		switch {
		case definition == "inline.yaml":
			s.inline()
		case changed:
			if err := the.Deploy(ctx, change); err != nil {
				t.Fatal(err)
			}
		}
		dir := cmp.Or(*suiteReports, t.TempDir())
		out, err := os.Create(filepath.Join(dir, definition+".out"))
		if err != nil {
			t.Fatal(err)
		}
		report := filepath.Join(dir, definition+".json")
		err = suite.Run(ctx, the.File("test/k8s/upstream/"+definition), focus, skip, *suiteProcs, *suiteWithin, report, out)
		out.Close()
		if changed {
			if err := the.Deploy(ctx, rig.Change{}); err != nil {
				t.Fatal(err)
			}
		}
		if err != nil {
			b, _ := os.ReadFile(out.Name())
			t.Fatalf("%v\n%s", err, b)
		}
		for _, r := range read(t, report) {
			group := definition + " " + r.group()
			g := groups[group]
			if g == nil {
				g = &tally{}
				groups[group] = g
			}
			switch name := r.name(); {
			case r.State == "passed":
				passed++
				g.passed++
				t.Logf("%6.1f s  %s", r.RunTime.Seconds(), name)
			case r.State == "skipped" && r.Failure.Message != "":
				skipped[reason(r.Failure.Message)]++
				g.skipped++
			case r.State == "skipped" || r.State == "pending": // not in focus
				g.left++
			default:
				failed++
				g.failed++
				t.Errorf("%s: %s\n%s", r.State, name, r.Failure.Message)
			}
		}
	}
	for _, why := range slices.SortedFunc(maps.Keys(skipped), func(a, b string) int { return cmp.Or(skipped[b]-skipped[a], cmp.Compare(a, b)) }) {
		t.Logf("skipped %3d: %s", skipped[why], why)
	}
	for _, name := range slices.Sorted(maps.Keys(groups)) {
		g := groups[name]
		if g.passed+g.failed+g.skipped == 0 {
			continue
		}
		t.Logf("%-40s %3d passed, %3d failed, %3d skipped themselves, %3d not asked to run", name, g.passed, g.failed, g.skipped, g.left)
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

// reason returns the reason for a skip, without the details of the single test.
func reason(message string) string {
	return strings.TrimSpace(digits.ReplaceAllString(strings.Split(message, "\n")[0], "N"))
}

var digits = regexp.MustCompile(`\d+`)
