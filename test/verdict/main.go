// Command verdict runs tests and says whether they are green:
//
//	go run ./test/verdict [-p N] [-timeout D] PACKAGES...
//
// The command owns the rule for tests that wait for real processes on a machine that may stand
// still for seconds. A few tests may fail once, if each passes twice when run again
// alone, with nothing else on the machine. The end of the output names these tests; the
// reports of their failures stand above. A failure that no slow moment explains is final:
// see rule.go.
//
// The output has the form of go test's output. For a failed package it has the whole
// output of the failed tests.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// runner runs go test and prints its output.
type runner struct {
	goTool  string
	timeout string
	out     io.Writer
}

func main() {
	processors := flag.Int("p", 2, "packages tested at a time")
	timeout := flag.String("timeout", "25m", "how long a package's tests may take")
	flag.Parse()
	goTool := os.Getenv("GO")
	if goTool == "" {
		goTool = "go"
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := runner{goTool: goTool, timeout: *timeout, out: os.Stdout}
	green, err := r.suite(ctx, *processors, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "verdict:", err)
	}
	if err != nil || !green {
		os.Exit(1)
	}
}

// suite runs the tests of packages, then runs some of the failed tests again, as judge
// allows.
func (r runner) suite(ctx context.Context, processors int, packages []string) (green bool, err error) {
	module, err := exec.CommandContext(ctx, r.goTool, "list", "-m").Output()
	if err != nil {
		return false, fmt.Errorf("%s list -m: %w", r.goTool, err)
	}
	all, err := r.test(ctx, append([]string{"-count", "1", "-p", fmt.Sprint(processors)}, packages...)...)
	if ctx.Err() != nil {
		fmt.Fprintln(r.out, "verdict: ended from outside")
		return false, nil
	}
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		return false, err
	}
	again, reasons := judge(strings.TrimSpace(string(module)), all)
	if err != nil && len(again) == 0 && len(reasons) == 0 {
		return false, err // go test failed, no package did
	}
	for _, why := range reasons {
		fmt.Fprintf(r.out, "verdict: red, not run again: %s\n", why)
	}
	if len(reasons) > 0 {
		return false, nil
	}
	var once []one
	for _, o := range again {
		fmt.Fprintf(r.out, "verdict: %s failed; alone, twice:\n", o)
		began := time.Now()
		if !r.alone(ctx, o) {
			fmt.Fprintf(r.out, "verdict: red, alone, too: %s\n", o)
			return false, nil
		}
		fmt.Fprintf(r.out, "verdict: %s passed twice in %v\n", o, time.Since(began).Round(time.Second))
		once = append(once, o)
	}
	for _, o := range once {
		fmt.Fprintf(r.out, "verdict: RED ONCE, green twice alone: %s (above is what it said)\n", o)
	}
	return true, nil
}

// alone runs one test twice with nothing else beside the test.
func (r runner) alone(ctx context.Context, o one) bool {
	all, err := r.test(ctx, "-count", "2", "-p", "1", "-parallel", "1", "-run", o.pattern(), o.pkg)
	return err == nil && len(all) == 1 && all[0].tests[o.name]["pass"] == 2
}

// test runs go test with arguments, and prints its verdict on each package and the output
// of failed tests.
func (r runner) test(ctx context.Context, args ...string) ([]*pkg, error) {
	cmd := exec.CommandContext(ctx, r.goTool, append([]string{"test", "-json", "-timeout", r.timeout}, args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Stderr = os.Stderr
	from, to := io.Pipe()
	cmd.Stdout = to
	ended := make(chan error, 1)
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		err := cmd.Wait()
		to.Close()
		ended <- err
	}()
	all, err := read(from, r.out, r.tell)
	from.CloseWithError(err) // ends go test, because no reader takes its output
	if werr := <-ended; err == nil {
		err = werr
	}
	for _, p := range all {
		if p.verdict == "" {
			fmt.Fprintf(r.out, "%sFAIL\t%s\tdid not end; %s\n", p.output(p.told), p.name, strings.Join(p.ended(""), ", "))
		}
	}
	return all, err
}

// tell prints the output of a package in the form of go test without -v.
func (r runner) tell(p *pkg) {
	if p.verdict == "fail" {
		io.WriteString(r.out, p.output(p.told))
		return
	}
	for _, l := range p.lines {
		if l.test == "" && (strings.HasPrefix(l.text, "ok ") || strings.HasPrefix(l.text, "? ") || strings.HasPrefix(l.text, "\t")) {
			io.WriteString(r.out, l.text)
		}
	}
}
