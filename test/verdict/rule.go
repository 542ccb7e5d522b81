package main

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// At most so many tests, of so many packages, may be red once: more of them are a
// defect that shows in many places, or a machine that nothing can be said on.
const (
	mostTests    = 4
	mostPackages = 3
)

// exact are the packages whose tests involve neither time that passes nor
// processes: what is red there once is wrong.
var exact = []string{
	"chunkserver", "chunkserver/castagnoli", "chunkserver/wire",
	"csi/handle", "csi/policy",
	"meta", "meta/capability", "meta/digest", "meta/index", "meta/lock", "meta/namespace", "meta/placement", "meta/replica", "meta/wire",
	"test/layers", "test/sim", "test/sim/replicas", "test/verdict",
}

// grave is what no slow moment explains, wherever in the output of a package that
// failed: what a process prints may be taken for another test's. "DATA:" begins
// what tests say of bytes, names and counts that are wrong or lost
// (CONTRIBUTING.md); penstock fsck says how many problems it found.
var grave = regexp.MustCompile(`DATA:|fsck: [0-9]+ problems|panic:|fatal error:|DATA RACE`)

// tables are packages in which each subtest stands alone, so that one can be run
// without the others; anywhere else a subtest may go on where the one before ended.
var tables = []string{"test/cmd", "test/posix"}

// one is a test that can be run by its name.
type one struct{ pkg, name string }

func (o one) String() string { return o.pkg + " " + o.name }

// pattern is what go test's -run takes for that test alone.
func (o one) pattern() string {
	var elems []string
	for e := range strings.SplitSeq(o.name, "/") {
		elems = append(elems, "^"+regexp.QuoteMeta(e)+"$")
	}
	return strings.Join(elems, "/")
}

// judge gives the tests that failed and may be run again, and why others may
// not: if there is a reason, the suite is red.
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
		// Of a table, those that have no failing test below them.
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
