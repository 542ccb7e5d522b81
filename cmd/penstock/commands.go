package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
)

// addCommands is the index of the subcommands: one constructor and one file
// each.
func addCommands(root *cobra.Command) {
	root.AddCommand(
		newBench(),
		newBenchFio(),
		newConfig(),
		newDemo(),
		newFsck(),
		newLocate(),
		newStatus(),
		newTop(),
		newVersion(),
		newVolume(),
	)
}

// runAs serves the other names that the binary may be called by.
func runAs(_ context.Context, _ []string, _, _ io.Writer) (status int, handled bool) {
	return 0, false
}
