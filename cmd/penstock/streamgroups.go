package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/stream"
)

// groupView is what the command prints of a consumer group.
type groupView struct {
	Group      string               `json:"group" yaml:"group"`
	State      string               `json:"state" yaml:"state"`
	Members    int                  `json:"members" yaml:"members"`
	Partitions []groupPartitionView `json:"partitions" yaml:"partitions"`
}

// groupPartitionView is how far a group is in a partition. Lag is the number of offsets
// between the committed one and the end.
type groupPartitionView struct {
	Partition int32 `json:"partition" yaml:"partition"`
	Committed int64 `json:"committed" yaml:"committed"`
	End       int64 `json:"end" yaml:"end"`
	Lag       int64 `json:"lag" yaml:"lag"`
}

func newStreamGroups() *cobra.Command {
	var w where
	var out output
	var at kafkaAt
	cmd := &cobra.Command{
		Use:   "groups STREAM",
		Short: "Show how far the consumer groups of a stream are",
		Long: `Shows the consumer groups with committed offsets in the stream: the present number of
members, and for each partition with a commit the committed offset (the offset of the
next record to consume), the end of the partition, and the lag (the number of records
between the two). The gateway at --kafka answers.`,
		Example: `  penstock stream groups /v/clicks`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := streamPath(args[0])
			if err != nil {
				return err
			}
			topic, err := stream.Topic(p)
			if err != nil {
				return err
			}
			var names []string
			err = w.onTree(cmd.Context(), func(t *penstock.Tree) error {
				if _, err := stream.Load(cmd.Context(), t, p); err != nil {
					return err
				}
				names, err = stream.Groups(cmd.Context(), t, p)
				return err
			})
			if err != nil {
				return err
			}
			c, err := at.reach(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer c.Close()
			views, err := viewGroups(cmd.Context(), c, topic, names)
			if err != nil {
				return fmt.Errorf("stream %s at the gateway %s: %w", args[0], at.addr, err)
			}
			return printGroups(cmd, &out, views)
		},
	}
	w.flags(cmd)
	out.flag(cmd)
	at.flags(cmd)
	return cmd
}

func printGroups(cmd *cobra.Command, out *output, views []groupView) error {
	return out.print(cmd.OutOrStdout(), views, func(t *table) {
		t.row("GROUP", "STATE", "MEMBERS", "PARTITION", "COMMITTED", "END", "LAG")
		for _, g := range views {
			for _, p := range g.Partitions {
				t.row(printable(g.Group), g.State, g.Members, p.Partition, p.Committed, p.End, p.Lag)
			}
		}
	})
}

// viewGroups asks the gateway how far groups are in a topic.
func viewGroups(ctx context.Context, c *kgo.Client, topic string, names []string) ([]groupView, error) {
	if len(names) == 0 {
		return nil, nil
	}
	ends, err := streamEnds(ctx, c, topic, -1)
	if err != nil {
		return nil, err
	}
	var views []groupView
	for _, name := range names {
		v, err := viewGroup(ctx, c, topic, name, ends)
		if err != nil {
			return nil, fmt.Errorf("group %s: %w", printable(name), err)
		}
		views = append(views, v)
	}
	return views, nil
}

// viewGroup asks the gateway how far a group is in a topic, whose partitions have bounds.
func viewGroup(ctx context.Context, c *kgo.Client, topic, name string, ends map[int32]bounds) (groupView, error) {
	v := groupView{Group: name, Partitions: []groupPartitionView{}}
	q := kmsg.NewPtrDescribeGroupsRequest()
	q.Groups = []string{name}
	p, err := q.RequestWith(ctx, c)
	if err != nil {
		return v, err
	}
	if len(p.Groups) != 1 {
		return v, errors.New("the gateway's answer describes another number of groups")
	}
	if err := kerr.ErrorForCode(p.Groups[0].ErrorCode); err != nil {
		return v, err
	}
	if v.State, v.Members = p.Groups[0].State, len(p.Groups[0].Members); v.State == "Dead" {
		v.State = "Empty" // the group has offsets, and had no members since the gateway began
	}
	oq := kmsg.NewPtrOffsetFetchRequest()
	oq.Group = name
	t := kmsg.NewOffsetFetchRequestTopic()
	t.Topic = topic
	for n := range int32(len(ends)) {
		t.Partitions = append(t.Partitions, n)
	}
	oq.Topics = append(oq.Topics, t)
	op, err := oq.RequestWith(ctx, c)
	if err != nil {
		return v, err
	}
	if err := kerr.ErrorForCode(op.ErrorCode); err != nil {
		return v, err
	}
	for _, t := range op.Topics {
		for _, tp := range t.Partitions {
			if err := kerr.ErrorForCode(tp.ErrorCode); err != nil {
				return v, fmt.Errorf("partition %d: %w", tp.Partition, err)
			}
			if end := ends[tp.Partition].end; tp.Offset >= 0 {
				v.Partitions = append(v.Partitions, groupPartitionView{tp.Partition, tp.Offset, end, max(end-tp.Offset, 0)})
			}
		}
	}
	return v, nil
}
