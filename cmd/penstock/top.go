package main

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
)

func newTop() *cobra.Command {
	var w where
	var interval time.Duration
	var rounds int
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show the present activity: counters and their rates, again and again",
		Example: `  penstock top
  penstock top --interval 5s --rounds 12`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < 100*time.Millisecond {
				return usagef("--interval %v is too short; at least 100ms", interval)
			}
			return w.withAPI(cmd.Context(), func(s *client.Session, c *admin.Client) error {
				return top(cmd, s, c, interval, rounds)
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "time between two readings")
	cmd.Flags().IntVar(&rounds, "rounds", 0, "readings to show; 0 means until interrupted")
	return cmd
}

// top prints all counters after each interval, with the rates of changed counters. rounds
// bounds the printed readings; 0: no bound.
func top(cmd *cobra.Command, s *client.Session, c *admin.Client, interval time.Duration, rounds int) error {
	clear := isTerminal(cmd.OutOrStdout())
	read := func() (map[string]any, time.Time, error) {
		view, err := readStatus(cmd.Context(), s, c)
		if err != nil {
			return nil, time.Time{}, err
		}
		leaves := map[string]any{}
		flatten("", view.Meta, leaves)
		for _, v := range view.Volumes {
			leaves["volume."+v.Name+".used_bytes"] = float64(v.UsedBytes)
			leaves["volume."+v.Name+".used_inodes"] = float64(v.UsedInodes)
		}
		return leaves, time.Now(), nil
	}
	before, at, err := read()
	if err != nil {
		return err
	}
	out := output{format: "table"}
	for n := 0; rounds == 0 || n < rounds; n++ {
		select {
		case <-cmd.Context().Done():
			return nil // Ctrl-C ends top without an error
		case <-time.After(interval):
		}
		now, when, err := read()
		if err != nil {
			if context.Cause(cmd.Context()) != nil {
				return nil
			}
			return err
		}
		if clear {
			cmd.Print("\x1b[H\x1b[2J")
		}
		err = out.print(cmd.OutOrStdout(), nil, func(t *table) {
			t.row(when.Format(time.TimeOnly), "NOW", "CHANGE/S")
			for _, k := range slices.Sorted(maps.Keys(now)) {
				value, isNumber := now[k].(float64)
				if !isNumber {
					continue
				}
				old, known := before[k].(float64)
				rate := (value - old) / when.Sub(at).Seconds()
				if !known || rate == 0 {
					t.row(k, leafText(value), "")
					continue
				}
				t.row(k, leafText(value), strings.TrimSuffix(leafText(rate), ".0"))
			}
		})
		if err != nil {
			return err
		}
		before, at = now, when
	}
	return nil
}
