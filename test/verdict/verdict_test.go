package main

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "example.org/m"

// recorded reads recorded output of go test -json on packages of a small module
// (testdata).
func recorded(t *testing.T, names ...string) ([]*pkg, string) {
	t.Helper()
	var all []*pkg
	var out strings.Builder
	r := runner{out: &out}
	for _, name := range names {
		f, err := os.Open(filepath.Join("testdata", name+".json"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		packages, err := read(f, &out, r.tell)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, packages...)
	}
	return all, out.String()
}

// TestJudge checks which failures may be run again.
func TestJudge(t *testing.T) {
	for _, tc := range []struct {
		name   string
		runs   string // names of the recorded runs
		again  string // tests that run again,
		reason string // or a part of why the suite is red
		says   string // is in the output
	}{
		{"nothing failed", "fine", "", "", "ok  \texample.org/m/fine"},
		{"a subtest and a test", "fine flake", "flake TestOther, flake TestSlow", "", "nothing came within 30s"},
		{"a row of a table", "cmd", "test/cmd TestScripts/pins", "", "still: exit status 1"},
		{"three packages", "flake child cmd", "", `child: it says "panic:"`, "the server is away"},
		{"wrong bytes", "data", "", `data: it says "DATA:"`, "DATA: file 3"},
		{"wrong bytes beside what may be run again", "flake data", "", `data: it says "DATA:"`, "DATA: file 3"},
		{"fsck finds something", "fsck", "", `fsck: it says "fsck: 2 problems"`, "volume root"},
		{"a panic", "panics", "", `panics: it says "panic:"`, "assignment to entry in nil map"},
		{"a process that panics, heard by another test", "child", "", `child: it says "panic:"`, "the server is away"},
		{"a package's time is over", "timeout", "", "timeout: TestHangs did not end", "goroutine "},
		{"its panic alone", "timeout", "", `timeout: it says "panic:"`, "waiting"},
		{"many tests", "many", "", "5 tests failed, more than 4", "--- FAIL: TestE"},
		{"many packages", "packages", "", "tests of 4 packages failed, more than 3", "FAIL\texample.org/m/few4"},
		{"does not build", "broken", "", "broken: it does not build", "undefined: nothing"},
		{"is not vetted", "vetted", "", "vetted: it does not build", "Errorf format"},
		{"ends outside of tests", "outside", "", "outside: it failed, and none of its tests did", "3 processes of the tests do not end"},
		{"no time involved", "sim", "", "test/sim: neither time nor processes", "seed 7"},
		{"a fuzz test's seed", "fuzz", "", "FuzzDecode: the same input fails always", "refused"},
		{"all of it", "fine flake many data", "", "8 tests failed", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			all, out := recorded(t, strings.Fields(tc.runs)...)
			again, reasons := judge(module, all)
			if !strings.Contains(out, tc.says) {
				t.Errorf("what a test said is lost:\n%s", out)
			}
			if tc.reason != "" {
				if !strings.Contains(strings.Join(reasons, "\n"), tc.reason) {
					t.Errorf("%q, not %q", reasons, tc.reason)
				}
				return
			}
			var names []string
			for _, o := range again {
				names = append(names, strings.TrimPrefix(o.String(), module+"/"))
			}
			if got := strings.Join(names, ", "); got != tc.again || len(reasons) > 0 {
				t.Errorf("again: %s, not %s; red since %q", got, tc.again, reasons)
			}
		})
	}
}

// TestOutput: of a failed package, only the logs of passed tests are left out.
func TestOutput(t *testing.T) {
	_, out := recorded(t, "flake")
	const want = `--- FAIL: TestSlow (0.00s)
    --- FAIL: TestSlow/a_b (0.00s)
        x_test.go:4: nothing came within 30s
--- FAIL: TestOther (0.00s)
    x_test.go:5: late
FAIL
FAIL	example.org/m/flake	`
	var got, wanted []string
	for l := range strings.Lines(strings.TrimRight(out, "0123456789.s\n")) {
		got = append(got, strings.TrimSpace(l))
	}
	for l := range strings.Lines(want) {
		wanted = append(wanted, strings.TrimSpace(l))
	}
	slices.Sort(got) // a test's verdict comes behind its output
	slices.Sort(wanted)
	if !slices.Equal(got, wanted) {
		t.Errorf("%s\nnot\n%s", out, want)
	}
}

// TestCutOff: the report of a run that was cut off shows the tests under way.
func TestCutOff(t *testing.T) {
	b, err := os.ReadFile(filepath.Join("testdata", "timeout.json"))
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	text = text[:strings.Index(text, "panic")]
	packages, err := read(strings.NewReader(text), io.Discard, func(*pkg) { t.Error("it has a verdict") })
	if err != nil || len(packages) != 1 {
		t.Fatal(packages, err)
	}
	if left := packages[0].ended(""); len(left) != 1 || left[0] != "TestHangs" {
		t.Errorf("%q did not end", left)
	}
	if _, reasons := judge(module, packages); !strings.Contains(strings.Join(reasons, "\n"), "timeout: it did not end") {
		t.Errorf("%q", reasons)
	}
}

// TestPackagesAreThere: the packages named in rule.go exist.
func TestPackagesAreThere(t *testing.T) {
	for _, p := range append(exact, tables...) {
		if found, err := filepath.Glob(filepath.Join("..", "..", p, "*_test.go")); err != nil || len(found) == 0 {
			t.Errorf("%s has no tests: %v", p, err)
		}
	}
}

// TestAgain runs go test: a test that fails at first runs twice more, and is green if it
// passes both times.
func TestAgain(t *testing.T) {
	for _, tc := range []struct {
		name  string
		fails string // so many times
		wrong string
		green bool
		says  []string
		not   string
	}{
		{"green", "", "", true, []string{"ok  \texample.org/m/waits", "ok  \texample.org/m/wrong"}, "verdict:"},
		{"once", "1", "", true, []string{"nothing came within a minute", "FAIL\texample.org/m/waits", "verdict: RED ONCE, green twice alone: example.org/m/waits TestWaits"}, "nobody asks"},
		{"twice", "11", "", false, []string{"verdict: red, alone, too: example.org/m/waits TestWaits"}, "RED ONCE"},
		{"once and wrong bytes", "1", "yes", false, []string{"nothing came", "other bytes", `verdict: red, not run again: example.org/m/wrong: it says "DATA:"`}, "RED ONCE"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Chdir(filepath.Join("testdata", "module"))
			name := filepath.Join(t.TempDir(), "fails")
			if err := os.WriteFile(name, []byte(tc.fails), 0o600); err != nil {
				t.Fatal(err)
			}
			t.Setenv("VERDICT_FAILS", name)
			t.Setenv("VERDICT_WRONG", tc.wrong)
			var out strings.Builder
			green, err := runner{goTool: "go", timeout: "2m", out: &out}.suite(t.Context(), 2, []string{"./..."})
			if err != nil || green != tc.green {
				t.Errorf("green: %v, %v", green, err)
			}
			for _, s := range tc.says {
				if !strings.Contains(out.String(), s) {
					t.Errorf("it does not say %q", s)
				}
			}
			if strings.Contains(out.String(), tc.not) {
				t.Errorf("it says %q", tc.not)
			}
			if t.Failed() {
				t.Logf("%s", out.String())
			}
		})
	}
}
