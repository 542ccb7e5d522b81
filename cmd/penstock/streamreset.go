package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// resetTo is where a group is sent to.
type resetTo struct {
	earliest, latest bool
	offset           int64 // of every partition; -1: none
	at               time.Time
}

// parseReset parses the word of --to.
func parseReset(text string) (to resetTo, err error) {
	to.offset = -1
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && n >= 0 {
		to.offset = n
		return to, nil
	}
	switch text {
	case "earliest":
		to.earliest = true
	case "latest":
		to.latest = true
	default:
		if to.at, err = time.Parse(time.RFC3339, text); err != nil {
			return to, usagef("--to %s: write earliest, latest, an offset, or a time such as 2026-11-28T10:00:00Z", printable(text))
		}
	}
	return to, nil
}

// target returns the offset that a reset commits in a partition with some bounds.
func (to *resetTo) target(ctx context.Context, c *kgo.Client, topic string, n int32, b bounds) (int64, error) {
	switch {
	case to.earliest:
		return b.start, nil
	case to.latest:
		return b.end, nil
	case to.offset >= 0:
		return min(max(to.offset, b.start), b.end), nil
	}
	at, err := listOffset(ctx, c, topic, n, to.at.UnixMilli())
	if err == nil && at < 0 {
		at = b.end // no record is as late
	}
	return at, err
}

func newStreamResetGroup() *cobra.Command {
	var out output
	var at kafkaAt
	var text string
	cmd := &cobra.Command{
		Use:   "reset-group STREAM GROUP",
		Short: "Commit other offsets for a consumer group in a stream",
		Long: `Commits offsets for a group in all partitions of the stream, in place of those that its
members have committed. The group must have no members: stop them first. --to says where
the group goes on: earliest, latest, an offset, which counts for every partition and is
moved into the bounds of the partition, or a time (RFC 3339), for the first record with
this time or a later one.`,
		Example: `  penstock stream reset-group /v/clicks reports --to earliest
  penstock stream reset-group /v/clicks reports --to 2026-11-28T10:00:00Z`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, err := streamTopic(args[0])
			if err != nil {
				return err
			}
			to, err := parseReset(text)
			if err != nil {
				return err
			}
			c, err := at.reach(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer c.Close()
			views, err := resetGroup(cmd.Context(), c, topic, args[1], to)
			if err != nil {
				return fmt.Errorf("stream %s, group %s: %w", args[0], printable(args[1]), err)
			}
			return printGroups(cmd, &out, views)
		},
	}
	out.flag(cmd)
	at.flags(cmd)
	cmd.Flags().StringVar(&text, "to", "", "where the group goes on: earliest, latest, an offset, or a time")
	if err := cmd.MarkFlagRequired("to"); err != nil {
		panic(err)
	}
	return cmd
}

// resetGroup commits offsets for a group without members.
func resetGroup(ctx context.Context, c *kgo.Client, topic, group string, to resetTo) ([]groupView, error) {
	ends, err := streamEnds(ctx, c, topic, -1)
	if err != nil {
		return nil, err
	}
	q := kmsg.NewPtrOffsetCommitRequest()
	q.Group, q.Generation = group, -1
	t := kmsg.NewOffsetCommitRequestTopic()
	t.Topic = topic
	for n := range int32(len(ends)) {
		tp := kmsg.NewOffsetCommitRequestTopicPartition()
		tp.Partition = n
		if tp.Offset, err = to.target(ctx, c, topic, n, ends[n]); err != nil {
			return nil, err
		}
		t.Partitions = append(t.Partitions, tp)
	}
	q.Topics = append(q.Topics, t)
	p, err := q.RequestWith(ctx, c)
	if err != nil {
		return nil, err
	}
	for _, t := range p.Topics {
		for _, tp := range t.Partitions {
			err := kerr.ErrorForCode(tp.ErrorCode)
			if errors.Is(err, kerr.UnknownMemberID) {
				return nil, fmt.Errorf("the group has members: stop them, and try again: %w", err)
			}
			if err != nil {
				return nil, fmt.Errorf("partition %d: %w", tp.Partition, err)
			}
		}
	}
	return viewGroups(ctx, c, topic, []string{group})
}

func newStreamDeleteGroup() *cobra.Command {
	var at kafkaAt
	var yes bool
	var cmd *cobra.Command
	cmd = &cobra.Command{
		Use:   "delete-group STREAM GROUP",
		Short: "Delete what a consumer group has committed in a stream",
		Long: `Deletes the offsets that a group has committed in the stream. The group must have no
members: stop them first. Its next members begin where their configuration says
(auto.offset.reset). The offsets that the group has committed in other streams stay.`,
		Example: `  penstock stream delete-group /v/clicks reports --yes`,
		Args:    cobra.ExactArgs(2),
		RunE: func(_ *cobra.Command, args []string) error {
			topic, err := streamTopic(args[0])
			if err != nil {
				return err
			}
			if !yes {
				if err := confirm(cmd, fmt.Sprintf("Delete the offsets of group %s in stream %s?", printable(args[1]), args[0]), args[1]); err != nil {
					return err
				}
			}
			c, err := at.reach(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer c.Close()
			if err := deleteGroupOffsets(cmd.Context(), c, topic, args[1]); err != nil {
				return fmt.Errorf("stream %s, group %s: %w", args[0], printable(args[1]), err)
			}
			return nil
		},
	}
	at.flags(cmd)
	destroying(cmd, &yes)
	return cmd
}

// deleteGroupOffsets deletes the offsets of a group without members.
func deleteGroupOffsets(ctx context.Context, c *kgo.Client, topic, group string) error {
	ends, err := streamEnds(ctx, c, topic, -1)
	if err != nil {
		return err
	}
	v, err := viewGroup(ctx, c, topic, group, ends)
	if err != nil {
		return err
	}
	if len(v.Partitions) == 0 {
		return errors.New("the group has committed nothing in the stream")
	}
	q := kmsg.NewPtrOffsetDeleteRequest()
	q.Group = group
	t := kmsg.NewOffsetDeleteRequestTopic()
	t.Topic = topic
	for n := range int32(len(ends)) {
		tp := kmsg.NewOffsetDeleteRequestTopicPartition()
		tp.Partition = n
		t.Partitions = append(t.Partitions, tp)
	}
	q.Topics = append(q.Topics, t)
	p, err := q.RequestWith(ctx, c)
	if err != nil {
		return err
	}
	err = kerr.ErrorForCode(p.ErrorCode)
	if errors.Is(err, kerr.NonEmptyGroup) {
		return fmt.Errorf("the group has members: stop them, and try again: %w", err)
	}
	for _, t := range p.Topics {
		for _, tp := range t.Partitions {
			err = errors.Join(err, kerr.ErrorForCode(tp.ErrorCode))
		}
	}
	return err
}
