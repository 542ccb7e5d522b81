// Package program builds the penstock that tests start as processes of its own.
package program

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Path of the penstock that Main built or was given.
var Path string

// Variable of the environment that names a penstock to test instead of one
// that is built.
const Variable = "PENSTOCK_BINARY"

// Main builds penstock, runs the tests of a package, and removes what it built.
// It gives the exit status.
func Main(m *testing.M) int {
	if !flag.Parsed() { // a caller may have put in defaults since
		flag.Parse()
	}
	if Path = os.Getenv(Variable); Path != "" {
		return m.Run()
	}
	dir, err := os.MkdirTemp("", "penstock-program-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	Path = filepath.Join(dir, "penstock")
	if err := Build(Path, "penstock.io/penstock/cmd/penstock"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// Build builds a program, static; with the race detector if the test has it.
func Build(to, pkg string) error {
	args, env := []string{"build", "-o", to}, "CGO_ENABLED=0"
	if race {
		args, env = append(args, "-race"), "CGO_ENABLED=1"
	}
	cmd := exec.Command("go", append(args, pkg)...)
	cmd.Env = append(os.Environ(), env)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("building %s: %w\n%s", pkg, err, out)
	}
	return nil
}
