package main

import "github.com/spf13/cobra"

func newCluster() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Manage the cluster as a whole",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newClusterEvict(), newClusterInit(), newClusterJoin(), newClusterJoinToken(), newClusterMembers(),
		newClusterRestore(), newClusterSet(), newClusterStatus())
	return cmd
}
