package main

import (
	"fmt"
	"math"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/stream"
)

func newStreamSet() *cobra.Command {
	var w where
	var out output
	var c streamChange
	cmd := &cobra.Command{
		Use:   "set STREAM",
		Short: "Change a stream: more partitions, retention, cleanup",
		Long: `Changes what the flags name; the rest stays. A stream can get more partitions, not fewer:
records of a key may go to another partition from then on, and consumers find the new
partitions when their clients next ask for them. Retention counts for the records that are
there, too. The format, the schema and the lag of the table can't be changed.`,
		Example: `  penstock stream set /v/clicks --partitions 8
  penstock stream set /v/clicks --retention 7d --retention-bytes 100G`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := streamPath(args[0])
			if err != nil {
				return err
			}
			if err := c.check(cmd.Flags()); err != nil {
				return err
			}
			return w.onTree(cmd.Context(), func(t *penstock.Tree) error {
				change := func(s *stream.Spec) error { return c.apply(cmd.Flags(), s) }
				if _, err := stream.Change(cmd.Context(), t, p, stream.ChangeOptions{Change: change}); err != nil {
					return err
				}
				v, err := viewStream(cmd.Context(), t, p)
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), v, func(t *table) { showStream(t, &v) })
			})
		},
	}
	w.flags(cmd)
	out.flag(cmd)
	c.flags(cmd.Flags())
	return cmd
}

// streamChange is a change of a stream, by flags.
type streamChange struct {
	partitions    int
	retention     span
	most, segment sizeFlag
	cleanup       string
	batch         sizeFlag
}

func (c *streamChange) flags(f *pflag.FlagSet) {
	f.IntVar(&c.partitions, "partitions", 0, fmt.Sprintf("number of partitions: more than the stream has, up to %d", stream.MaxPartitions))
	f.Var(&c.retention, "retention", "how long records are kept, such as 7d; 0: for ever")
	f.Var(&c.most, "retention-bytes", "largest size of a partition; 0: no bound")
	f.StringVar(&c.cleanup, "cleanup", "", "delete: only --retention removes records; compact: of each key, records before the last one are removed, too")
	f.Var(&c.segment, "segment-bytes", "largest size of a partition's file, after which the next file begins; 0: 64 MiB")
	f.Var(&c.batch, "max-message-bytes", "largest batch of a Kafka producer; 0: 8 MiB")
}

// streamChangeFlags are the flags of which one at least must be given.
var streamChangeFlags = []string{"partitions", "retention", "retention-bytes", "cleanup", "segment-bytes", "max-message-bytes"}

// check refuses a command that changes nothing, or has a wrong word.
func (c *streamChange) check(f *pflag.FlagSet) error {
	for _, name := range streamChangeFlags {
		if f.Changed(name) {
			return c.apply(f, &stream.Spec{})
		}
	}
	return usagef("nothing to change: give --%s, or another flag", streamChangeFlags[0])
}

// apply changes what the flags name.
func (c *streamChange) apply(f *pflag.FlagSet, s *stream.Spec) error {
	if f.Changed("partitions") {
		s.Partitions = c.partitions
	}
	if f.Changed("retention") {
		s.Retention = time.Duration(c.retention)
	}
	if f.Changed("retention-bytes") {
		s.RetentionBytes = int64(c.most)
	}
	if f.Changed("segment-bytes") {
		s.SegmentBytes = int64(c.segment)
	}
	if f.Changed("max-message-bytes") {
		s.MaxBatch = int(min(c.batch, math.MaxInt32))
	}
	if f.Changed("cleanup") {
		return setCleanup(s, c.cleanup)
	}
	return nil
}

// setCleanup sets what a word of --cleanup says.
func setCleanup(s *stream.Spec, word string) error {
	switch word {
	case cleanupDelete:
		s.Compact = false
	case cleanupCompact:
		s.Compact = true
	default:
		return usagef("--cleanup is %s or %s, not %q", cleanupDelete, cleanupCompact, word)
	}
	return nil
}
