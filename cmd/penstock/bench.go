package main

import (
	"os"
	"strings"

	"github.com/spf13/cobra"

	"penstock.io/penstock/cmd/penstock/bench"
)

func newBench() *cobra.Command {
	var out output
	var cfg bench.Config
	var compare string
	cmd := &cobra.Command{
		Use:   "bench DIR",
		Short: "Run the project's workloads on a directory, or on two to compare them",
		Long: `Runs the project's own workloads below DIR and prints the median of several
rounds for each. With --compare the rounds of two directories alternate, and
each row has the ratio of the first directory to the second: of the speeds, or,
for rows in seconds, of the durations.

The tool works in the same way on every file system. All bytes that the tool reads are
compared with the bytes that it wrote. Cold rows drop the kernel's caches, which needs
root, after running the restart command for each directory, with BENCH_DIR set
to the directory: a script that stops and starts the directory's file system.

The first stat and the first readdir come after the kernel's dentries and
inodes were dropped. CPU is given twice: for the whole machine, and, in
brackets, for this tool and the processes named by --pids or --pids-cmd.

Rows: ` + strings.Join(bench.Rows(), ", ") + `.
Groups of them: large, checkpoint, small, entries-1, entries-8, list, append, tree.`,
		Example: `  penstock bench /mnt/penstock --compare /var/tmp
  penstock bench /mnt/penstock --only small,append-fsync --rounds 5
  penstock bench /mnt/penstock --compare /var/tmp --restart-cmd ./restart.sh --pids-cmd 'pgrep -x penstock' --output json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Dirs = []string{args[0]}
			if compare != "" {
				cfg.Dirs = append(cfg.Dirs, compare)
			}
			cfg.Progress = cmd.ErrOrStderr()
			if os.Geteuid() != 0 {
				cmd.PrintErrln("penstock bench: not root: cold rows will fail; leave them out with --only")
			}
			report, err := bench.Run(cmd.Context(), cfg)
			if err != nil {
				return err
			}
			if out.format == "table" {
				return report.WriteTable(cmd.OutOrStdout())
			}
			return out.print(cmd.OutOrStdout(), report, nil)
		},
	}
	out.flag(cmd)
	f := cmd.Flags()
	f.StringVar(&compare, "compare", "", "second directory; rounds alternate between the two")
	f.IntVar(&cfg.Rounds, "rounds", 3, "rounds of each row; the median counts")
	f.StringSliceVar(&cfg.Only, "only", nil, "rows or groups to run, separated by commas (default all)")
	f.Float64Var(&cfg.Scale, "scale", 1, "multiply sizes and counts by this")
	f.StringVar(&cfg.RestartCmd, "restart-cmd", "", "shell command that restarts what serves BENCH_DIR, before each cold row")
	f.StringVar(&cfg.PreparedCmd, "prepared-cmd", "", "shell command run for BENCH_DIR once a group's files are made, before its rows")
	f.StringVar(&cfg.FinishCmd, "finish-cmd", "", "shell command run for BENCH_DIR after a group's rows")
	f.IntSliceVar(&cfg.PIDs, "pids", nil, "processes whose CPU time counts for DIR")
	f.StringVar(&cfg.PIDsCmd, "pids-cmd", "", "shell command that prints such processes, asked before each row")
	f.StringVar(&cfg.Tree, "tree", "", "source tree to pack and unpack (default the installed Go's)")
	return cmd
}

// newBenchFio is hidden: the command checks the tool, not a file system.
func newBenchFio() *cobra.Command {
	var cfg bench.Config
	cmd := &cobra.Command{
		Use:     "bench-fio DIR",
		Short:   "Compare four rows of the benchmark with fio on the same directory",
		Example: "  penstock bench-fio /var/tmp --rounds 5",
		Hidden:  true,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cfg.Dirs = args
			cfg.Progress = cmd.ErrOrStderr()
			return bench.CompareWithFio(cmd.Context(), cfg, cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.Rounds, "rounds", 3, "rounds of each row; the median counts")
	f.Float64Var(&cfg.Scale, "scale", 1, "multiply sizes and counts by this")
	f.StringVar(&cfg.RestartCmd, "restart-cmd", "", "shell command that restarts what serves BENCH_DIR, before each cold row")
	return cmd
}
