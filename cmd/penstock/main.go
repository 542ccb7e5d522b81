// Command penstock is the whole system in a static binary: each role and each tool is a
// subcommand, in a file of its own. This package owns flags, configuration, signals, output
// and exit statuses only: the called packages do the work.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit statuses of every subcommand.
const (
	exitOK     = 0
	exitFailed = 1  // the work failed, or a check found something
	exitUsage  = 2  // the command line or the configuration is wrong
	exitLeft   = 75 // of `penstock mount`: a holder has the mount for the next process
)

func main() {
	takeOOM()
	os.Exit(run(os.Args, os.Stdin, os.Stdout, os.Stderr))
}

// run is main with its arguments and streams as parameters. The first SIGINT or SIGTERM ends
// the command's context; the second ends the process at once.
func run(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	go func() {
		<-ctx.Done()
		stop()
	}()

	if status, handled := runAs(ctx, args, stdout, stderr); handled {
		return status
	}
	root := newRoot()
	root.SetArgs(args[1:])
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	return exitStatus(cmd, err, stderr)
}

// exitStatus prints err for people and returns the exit status.
func exitStatus(cmd *cobra.Command, err error, stderr io.Writer) int {
	if err == nil {
		return exitOK
	}
	var silent *statusError
	if errors.As(err, &silent) {
		return silent.status
	}
	fmt.Fprintln(stderr, "penstock: "+explain(err))
	if forMonitors(cmd) {
		return monitorStatus(err)
	}
	var usage *usageError
	if errors.As(err, &usage) || isCobraUsage(err) {
		fmt.Fprintf(stderr, "Run '%s --help' for usage.\n", cmd.CommandPath())
		return exitUsage
	}
	return exitFailed
}

// usageError marks a mistake in the command line or the configuration.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

// usagef makes a usageError.
func usagef(format string, a ...any) error { return &usageError{fmt.Errorf(format, a...)} }

// statusError ends the program with a status and without a message.
type statusError struct{ status int }

func (e *statusError) Error() string { return fmt.Sprintf("exit status %d", e.status) }

// isCobraUsage recognises cobra's untyped errors of usage by their texts.
func isCobraUsage(err error) bool {
	for _, prefix := range []string{"unknown command ", "unknown flag", "unknown shorthand flag", "required flag(s)", "accepts ", "requires at least ", "if any flags in the group", "at least one of the flags in the group"} {
		if strings.HasPrefix(err.Error(), prefix) {
			return true
		}
	}
	return false
}

// newRoot builds the command tree.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "penstock",
		Short: "One tree of files, tables and streams, as fast as the hardware below",
		Long: `Penstock is a distributed file system for training data: one path tree, cut
into volumes that say where data lives, reached by plain POSIX calls.

'penstock up' brings everything up on this machine, in one process. The other
subcommands run one role of a cluster each, or administer a running system.

A running system is found through --cluster, else --dir, else PENSTOCK_CLUSTER,
else the configuration file, else the only 'penstock up' of this machine.`,
		Example: `  penstock up --dir /var/lib/penstock --mount /mnt/penstock
  penstock volume create datasets --attach /datasets
  penstock status`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	addCommands(root)
	requireExamples(root)
	finishTree(root)
	return root
}

// requireExamples stops the program if a command has no example: help without an example is a
// bug.
func requireExamples(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		if c.Example == "" && !c.HasSubCommands() && c.Name() != "help" && c.Name() != "completion" {
			panic(fmt.Sprintf("command %q has no example", c.CommandPath()))
		}
		requireExamples(c)
	}
}
