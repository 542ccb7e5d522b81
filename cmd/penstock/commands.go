package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"penstock.io/penstock/fuse"
)

// addCommands is the index of the subcommands: a constructor and a file for each.
func addCommands(root *cobra.Command) {
	root.AddCommand(
		newBench(),
		newBenchFio(),
		newChunk(),
		newChunkServer(),
		newClient(),
		newClone(),
		newCluster(),
		newConfig(),
		newCSI(),
		newDemo(),
		newDisk(),
		newFsck(),
		newGateway(),
		newGrant(),
		newHealth(),
		newHold(),
		newLocate(),
		newMeta(),
		newMirror(),
		newMount(),
		newNode(),
		newScrub(),
		newSnapshot(),
		newEvents(),
		newPin(),
		newUnpin(),
		newVerify(),
		newDigest(),
		newStatus(),
		newStream(),
		newTop(),
		newUp(),
		newVersion(),
		newVolume(),
	)
}

// runAs runs the mount helper or the watchdog if the binary was called by one of their names.
// handled is false for other names.
func runAs(ctx context.Context, args []string, stdout, stderr io.Writer) (status int, handled bool) {
	if isMountHelper(args) {
		return mountHelper(ctx, args, stdout, stderr), true
	}
	if len(args) > 0 && args[0] == fuse.WatchdogName {
		if err := fuse.Watch(args[1:], os.Stdin, slog.New(slog.NewTextHandler(stderr, nil))); err != nil {
			fmt.Fprintf(stderr, "%s: %v\n", fuse.WatchdogName, err)
			return exitFailed, true
		}
		return exitOK, true
	}
	return 0, false
}
