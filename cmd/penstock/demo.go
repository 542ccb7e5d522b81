package main

import (
	"os"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/demo"
)

func newDemo() *cobra.Command {
	var cfg demo.Config
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Bring a system up in a scratch folder and run the main job on it",
		Long: `Brings 'penstock up' up in a scratch folder, ingests a source tree, 10,000
image-like files and large shards, reads them like a training job (two epochs,
shuffled, several readers), replaces a checkpoint, kills the process with
SIGKILL, starts it again, verifies every byte, and cleans up. Each step runs on
the native file system too, and a table has the ratios.`,
		Example: `  penstock demo
  penstock demo --scratch /data --images 1000`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			binary, err := os.Executable()
			if err != nil {
				return err
			}
			cfg.Binary = binary
			cfg.Out = cmd.OutOrStdout()
			return demo.Run(cmd.Context(), cfg)
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Scratch, "scratch", "/var/tmp", "folder that holds the data, the mount and the native copy meanwhile")
	f.StringVar(&cfg.Target, "target", "", "run the steps on this plain directory; nothing is started or killed")
	f.StringVar(&cfg.Tree, "tree", "", "source tree to ingest (default the installed Go's)")
	f.IntVar(&cfg.Images, "images", 10_000, "image-like files to generate")
	return cmd
}
