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
		newChunkServer(),
		newConfig(),
		newDemo(),
		newFsck(),
		newLocate(),
		newMeta(),
		newMount(),
		newStatus(),
		newTop(),
		newUp(),
		newVersion(),
		newVolume(),
	)
}

// runAs serves the other names that the binary may be called by.
func runAs(ctx context.Context, args []string, stdout, stderr io.Writer) (status int, handled bool) {
	if isMountHelper(args) {
		return mountHelper(ctx, args, stdout, stderr), true
	}
	return 0, false
}
