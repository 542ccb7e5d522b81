package main

import "github.com/spf13/cobra"

func newCluster() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Manage the cluster as a whole",
	}
	cmd.AddCommand(newClusterBackup(), newClusterEvict(), newClusterInit(), newClusterJoin(), newClusterJoinToken(), newClusterMembers(),
		newClusterRestore(), newClusterSet(), newClusterStatus())
	return cmd
}
