package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// promotePoll is how often the command asks how far it is, promoteTell how often
// it tells.
const (
	promotePoll = 200 * time.Millisecond
	promoteTell = 5 * time.Second
)

func newVolumePromote() *cobra.Command {
	var w where
	var detach bool
	cmd := &cobra.Command{
		Use:   "promote NAME",
		Short: "Copy what a clone shares with its origin, so that it needs that no more",
		Long: `Copies, from server to server, what a clone still shares with the volume that it
was cloned from. The clone and its snapshots are used meanwhile. Afterwards the
origin and its snapshot may be deleted. It goes on in the background when the
command is interrupted; run again, the command waits on.`,
		Example: `  penstock volume promote experiment-17`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			return w.withVolume(ctx, args[0], func(s *client.Session, v wire.VolumeInfo) error {
				for told := time.Now(); ; {
					st, err := s.Promote(ctx, v.ID)
					if err != nil || st.Done || detach {
						return err
					}
					if time.Since(told) >= promoteTell {
						told = time.Now()
						fmt.Fprintf(cmd.ErrOrStderr(), "%s copied, %s left\n", bytesText(st.Copied), bytesText(st.Left))
					}
					select {
					case <-time.After(promotePoll):
					case <-ctx.Done():
						return ctx.Err()
					}
				}
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().BoolVar(&detach, "detach", false, "do not wait")
	return cmd
}
