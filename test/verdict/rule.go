package main

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Bounds on the number of tests, and of their packages, that may fail once. More failures
// show a defect in many places, or a machine on which no test proves anything.
const (
	mostTests    = 4
	mostPackages = 3
)

// exact lists the packages whose tests depend neither on the passing of time nor on
// processes: each failure in such a package is final.
var exact = []string{
	"chunkserver", "chunkserver/castagnoli", "chunkserver/wire",
	"csi/handle", "csi/policy",
	"meta", "meta/capability", "meta/digest", "meta/index", "meta/lock", "meta/namespace", "meta/placement", "meta/replica", "meta/wire",
	"test/layers", "test/sim", "test/sim/replicas", "test/verdict",
}

// grave matches reports that no slow moment explains, anywhere in the output of a failed package:
// the output of a process may appear below another test's name. Tests begin their reports about
// wrong or lost bytes, names and counts with "DATA:" (CONTRIBUTING.md); penstock fsck prints the
// number of problems.
var grave = regexp.MustCompile(`DATA:|fsck: [0-9]+ problems|panic:|fatal error:|DATA RACE`)

// tables lists packages with independent subtests, which can run alone; in other packages
// a subtest may continue the work of the previous subtest.
var tables = []string{"test/cmd", "test/posix"}

// one names a test for a run alone.
type one struct{ pkg, name string }

func (o one) String() string { return o.pkg + " " + o.name }

// pattern returns the argument of go test's -run for this test alone.
func (o one) pattern() string {
	var elems []string
	for e := range strings.SplitSeq(o.name, "/") {
		elems = append(elems, "^"+regexp.QuoteMeta(e)+"$")
	}
	return strings.Join(elems, "/")
}

// judge returns the failed tests that may be run again, and the reasons against running
// others again: with any reason, the suite has failed.
func judge(module string, packages []*pkg) (again []one, reasons []string) {
	never := func(format string, a ...any) { reasons = append(reasons, fmt.Sprintf(format, a...)) }
	failed := 0
	for _, p := range packages {
		if p.verdict == "pass" || p.verdict == "skip" {
			continue
		}
		failed++
		below := strings.TrimPrefix(strings.TrimPrefix(p.name, module), "/")
		var tests []one
		for _, t := range p.ended("fail") {
			if slices.Contains(tables, below) || !strings.Contains(t, "/") {
				tests = append(tests, one{p.name, t})
			}
		}
		// In tables, only the failed tests without a failed subtest run again.
		tests = slices.DeleteFunc(tests, func(o one) bool {
			return slices.ContainsFunc(tests, func(sub one) bool { return strings.HasPrefix(sub.name, o.name+"/") })
		})
		left := p.ended("")
		switch {
		case p.build:
			never("%s: it does not build", p.name)
		case p.verdict == "":
			never("%s: it did not end", p.name)
		case len(left) > 0:
			never("%s: %s did not end", p.name, strings.Join(left, ", "))
		case len(tests) == 0:
			never("%s: it failed, and none of its tests did", p.name)
		case slices.Contains(exact, below):
			never("%s: neither time nor processes are involved there", p.name)
		}
		if w := grave.FindString(p.output(func(string) bool { return true })); w != "" {
			never("%s: it says %q", p.name, w)
		}
		for _, o := range tests {
			if strings.HasPrefix(o.name, "Fuzz") {
				never("%s: the same input fails always", o)
			}
		}
		again = append(again, tests...)
	}
	if len(again) > mostTests {
		never("%d tests failed, more than %d", len(again), mostTests)
	}
	if failed > mostPackages {
		never("tests of %d packages failed, more than %d", failed, mostPackages)
	}
	slices.SortFunc(again, func(a, b one) int { return cmp.Or(cmp.Compare(a.pkg, b.pkg), cmp.Compare(a.name, b.name)) })
	return again, reasons
}
