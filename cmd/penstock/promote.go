package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// promotePoll is the interval between requests for the progress; promoteTell is the interval
// between printed lines.
const (
	promotePoll = 200 * time.Millisecond
	promoteTell = 5 * time.Second
)

func newVolumePromote() *cobra.Command {
	var w where
	var detach bool
	var rate sizeFlag
	cmd := &cobra.Command{
		Use:   "promote NAME",
		Short: "Copy the data that a clone shares with its origin, so that the clone does not need the origin",
		Long: `Copies the data that a clone still shares with its origin, from server to server. The
clone and its snapshots stay in use. Afterwards the origin and its snapshot may be
deleted. If the command is interrupted, the copying goes on in the background; run
again, the command waits for its end. --rate bounds the copying, until the command is
run with another --rate.`,
		Example: `  penstock volume promote experiment-17
  penstock volume promote experiment-17 --rate 100M --detach
  penstock volume promote experiment-17 --rate 0`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			var bound *uint64 // nil: unchanged
			if cmd.Flags().Changed("rate") {
				bound = (*uint64)(&rate)
			}
			if rate != 0 && rate < penstock.MinPromoteRate {
				return usagef("--rate is 0 or at least %s a second", bytesText(penstock.MinPromoteRate))
			}
			return w.withVolume(ctx, args[0], func(_ *client.Session, v wire.VolumeInfo) error {
				return w.api(ctx, func(api *admin.Client) error {
					for told := time.Now(); ; {
						st, err := api.Clones.PromoteClone(ctx, &admin.PromoteCloneRequest{Volume: admin.Numbered(v.ID), Rate: bound})
						bound = nil // set once: another command may change the bound later
						if err != nil || st.Done || detach {
							return err
						}
						if time.Since(told) >= promoteTell {
							told = time.Now()
							at := ""
							if st.Rate != 0 {
								at = fmt.Sprintf(", at most %s a second", bytesText(st.Rate))
							}
							fmt.Fprintf(cmd.ErrOrStderr(), "%s copied, %s left%s\n", bytesText(st.CopiedBytes), bytesText(st.LeftBytes), at)
						}
						select {
						case <-time.After(promotePoll):
						case <-ctx.Done():
							return ctx.Err()
						}
					}
				})
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().Var(&rate, "rate", "most bytes copied in a second, such as 100M; 0: no limit (default: the limit of the last call)")
	cmd.Flags().BoolVar(&detach, "detach", false, "do not wait")
	return cmd
}
