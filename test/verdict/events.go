package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"slices"
	"strings"
)

// event is a line of go test -json (go doc test2json), of a build or of a test.
type event struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Output      string
	FailedBuild string
}

// pkg collects the events of one package.
type pkg struct {
	name    string
	verdict string // pass, fail or skip; "" before the end
	build   bool   // the package could not be built
	lines   []line // in the order of arrival
	// tests counts the results by test and result; begun counts the tests without a
	// result yet.
	tests map[string]map[string]int
	begun map[string]int
	names []string // of tests, in the order of their beginnings
}

type line struct{ test, text string }

// ended returns the tests with at least one result how; for "", the tests without a
// result.
func (p *pkg) ended(how string) []string {
	var names []string
	for _, n := range p.names {
		if how == "" && p.begun[n] > 0 || how != "" && p.tests[n][how] > 0 {
			names = append(names, n)
		}
	}
	return names
}

// told says whether the output of a test is printed. The output of a passed test is not
// printed (as by go test), unless the package ended outside of any test, or in the middle
// of a test.
func (p *pkg) told(test string) bool {
	if len(p.ended("fail")) == 0 || len(p.ended("")) > 0 {
		return true
	}
	return test == "" || p.tests[test]["fail"] > 0
}

// output returns the output of the package and of the tests that of selects.
func (p *pkg) output(of func(test string) bool) string {
	var b strings.Builder
	for _, l := range p.lines {
		if !noise(l.text) && of(l.test) {
			b.WriteString(l.text)
		}
	}
	return b.String()
}

// noise reports whether go test prints the line only with -v.
func noise(text string) bool {
	text = strings.TrimLeft(text, " ")
	return slices.ContainsFunc([]string{"=== RUN ", "=== PAUSE ", "=== CONT ", "=== NAME ", "--- PASS: "}, func(p string) bool { return strings.HasPrefix(text, p) })
}

// read reads the output of go test -json to the end. It calls done for each package as
// soon as the package has a verdict, and copies lines that are no events to w at once.
// Packages without a verdict at the end come last.
func read(from io.Reader, w io.Writer, done func(*pkg)) ([]*pkg, error) {
	var all []*pkg
	by := map[string]*pkg{}
	in := bufio.NewReader(from)
	for {
		text, err := in.ReadBytes('\n')
		var e event
		switch {
		case len(bytes.TrimSpace(text)) == 0:
		case text[0] != '{' || json.Unmarshal(text, &e) != nil:
			if _, err := w.Write(text); err != nil {
				return all, err
			}
		case e.Package == "": // of a build
			if _, err := io.WriteString(w, e.Output); err != nil {
				return all, err
			}
		default:
			p := by[e.Package]
			if p == nil {
				p = &pkg{name: e.Package, tests: map[string]map[string]int{}, begun: map[string]int{}}
				by[e.Package] = p
				all = append(all, p)
			}
			p.hear(e)
			if p.verdict != "" {
				done(p)
				if p.verdict != "fail" {
					p.lines = nil
				}
			}
		}
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return all, err
		}
	}
}

func (p *pkg) hear(e event) {
	switch e.Action {
	case "output":
		p.lines = append(p.lines, line{e.Test, e.Output})
	case "run":
		p.test(e.Test)
		p.begun[e.Test]++
	case "pass", "fail", "skip":
		if e.Test == "" {
			p.verdict, p.build = e.Action, e.FailedBuild != ""
			return
		}
		p.test(e.Test)[e.Action]++
		p.begun[e.Test]--
	}
}

// test is how often a test ended in which way.
func (p *pkg) test(name string) map[string]int {
	if p.tests[name] == nil {
		p.tests[name] = map[string]int{}
		p.names = append(p.names, name)
	}
	return p.tests[name]
}
