package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"sync"

	"github.com/spf13/cobra"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/partition"
)

// streamTopic returns the topic of the stream that an argument names.
func streamTopic(arg string) (string, error) {
	p, err := streamPath(arg)
	if err != nil {
		return "", err
	}
	return stream.Topic(p)
}

// maxLine is the greatest length of a line that produce takes, in bytes.
const maxLine = partition.DefaultMaxBatch / 2

func newStreamProduce() *cobra.Command {
	var at kafkaAt
	part := int32(-1)
	cmd := &cobra.Command{
		Use:   "produce STREAM",
		Short: "Append each line of the input to a stream, as a record",
		Long: `Appends each line of the standard input to the stream, as a record, through the
gateway at --kafka. When the command ends with status 0, all records are durable, each
once. Without --partition the records are spread over the partitions.`,
		Example: `  seq 1000 | penstock stream produce /v/clicks`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, err := streamTopic(args[0])
			if err != nil {
				return err
			}
			opts := []kgo.Opt{kgo.DefaultProduceTopic(topic), kgo.ProducerBatchMaxBytes(partition.DefaultMaxBatch), kgo.UnknownTopicRetries(2)}
			if part >= 0 {
				opts = append(opts, kgo.RecordPartitioner(kgo.ManualPartitioner()))
			}
			c, err := at.reach(cmd.Context(), args[0], opts...)
			if err != nil {
				return err
			}
			defer c.Close()
			if _, err := streamEnds(cmd.Context(), c, topic, part); err != nil {
				return fmt.Errorf("stream %s at the gateway %s: %w", args[0], at.addr, err)
			}
			return produceLines(cmd.Context(), c, cmd.InOrStdin(), max(part, 0))
		},
	}
	at.flags(cmd)
	cmd.Flags().Int32Var(&part, "partition", -1, "number of the partition")
	return cmd
}

// produceLines produces every line of r, and waits until all records are acknowledged. The
// first error ends the command.
func produceLines(ctx context.Context, c *kgo.Client, r io.Reader, partition int32) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	in := bufio.NewScanner(r)
	in.Buffer(nil, maxLine)
	var once sync.Once
	var failed error
	for in.Scan() && ctx.Err() == nil {
		c.Produce(ctx, &kgo.Record{Value: slices.Clone(in.Bytes()), Partition: partition}, func(_ *kgo.Record, err error) {
			if err != nil {
				once.Do(func() { failed = err; cancel(err) })
			}
		})
	}
	err := c.Flush(context.WithoutCancel(ctx))
	if failed != nil {
		return fmt.Errorf("not all records were appended: %w", failed)
	}
	return errors.Join(err, in.Err(), context.Cause(ctx))
}

func newStreamConsume() *cobra.Command {
	var at kafkaAt
	var from string
	var follow bool
	part := int32(-1)
	cmd := &cobra.Command{
		Use:   "consume STREAM",
		Short: "Print the values of a stream's records, a line each",
		Long: `Prints the values of the stream's records, a line each, through the gateway at
--kafka. Records of a partition come in their order. With --follow the command goes
on with new records until it is interrupted.`,
		Example: `  penstock stream consume /v/clicks
  penstock stream consume /v/clicks --from end --follow`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			topic, err := streamTopic(args[0])
			if err != nil {
				return err
			}
			start := kgo.NewOffset()
			switch n, err := strconv.ParseInt(from, 10, 64); {
			case from == "beginning":
				start = start.AtStart()
			case from == "end":
				start = start.AtEnd()
			case err == nil && n >= 0:
				start = start.At(n)
			default:
				return usagef("--from %s: write beginning, end or an offset", printable(from))
			}
			c, err := at.reach(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			defer c.Close()
			ends, err := streamEnds(cmd.Context(), c, topic, part)
			if err != nil {
				return fmt.Errorf("stream %s at the gateway %s: %w", args[0], at.addr, err)
			}
			return consumeLines(cmd.Context(), c, cmd.OutOrStdout(), topic, start, ends, follow)
		},
	}
	at.flags(cmd)
	cmd.Flags().Int32Var(&part, "partition", -1, "number of the only partition to read")
	cmd.Flags().StringVar(&from, "from", "beginning", "where to begin: beginning, end or an offset")
	cmd.Flags().BoolVar(&follow, "follow", false, "go on with new records")
	return cmd
}

// bounds are the first offset of a partition and the offset after the last record.
type bounds struct{ start, end int64 }

// streamEnds asks for the bounds of a topic's partitions, or of one.
func streamEnds(ctx context.Context, c *kgo.Client, topic string, only int32) (map[int32]bounds, error) {
	q := kmsg.NewPtrMetadataRequest()
	t := kmsg.NewMetadataRequestTopic()
	t.Topic = &topic
	q.Topics = append(q.Topics, t)
	p, err := q.RequestWith(ctx, c)
	if err != nil {
		return nil, err
	}
	all := map[int32]bounds{}
	for _, t := range p.Topics {
		if err := kerr.ErrorForCode(t.ErrorCode); err != nil {
			return nil, err
		}
		for _, tp := range t.Partitions {
			if only >= 0 && tp.Partition != only {
				continue
			}
			var b bounds
			if b.start, err = listOffset(ctx, c, topic, tp.Partition, -2); err == nil {
				b.end, err = listOffset(ctx, c, topic, tp.Partition, -1)
			}
			if err != nil {
				return nil, err
			}
			all[tp.Partition] = b
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("it has no partition %d", only)
	}
	return all, nil
}

// listOffset asks for the first offset (-2) or the end (-1) of a partition.
func listOffset(ctx context.Context, c *kgo.Client, topic string, n int32, at int64) (int64, error) {
	q := kmsg.NewPtrListOffsetsRequest()
	t := kmsg.NewListOffsetsRequestTopic()
	t.Topic = topic
	tp := kmsg.NewListOffsetsRequestTopicPartition()
	tp.Partition, tp.Timestamp = n, at
	t.Partitions = append(t.Partitions, tp)
	q.Topics = append(q.Topics, t)
	p, err := q.RequestWith(ctx, c)
	if err != nil {
		return 0, err
	}
	if len(p.Topics) != 1 || len(p.Topics[0].Partitions) != 1 {
		return 0, errors.New("the gateway's answer has no offset")
	}
	return p.Topics[0].Partitions[0].Offset, kerr.ErrorForCode(p.Topics[0].Partitions[0].ErrorCode)
}

// consumeLines prints records until the ends are reached, or, with follow, until ctx ends.
func consumeLines(ctx context.Context, c *kgo.Client, w io.Writer, topic string, from kgo.Offset, ends map[int32]bounds, follow bool) error {
	offsets := map[int32]kgo.Offset{}
	for n, b := range ends {
		begin := b.start
		switch at := from.EpochOffset().Offset; {
		case at == -1: // the end
			begin = b.end
		case at >= 0:
			begin = max(at, b.start)
		}
		if begin < b.end || follow {
			offsets[n] = kgo.NewOffset().At(begin)
		}
		if begin >= b.end {
			delete(ends, n)
		}
	}
	if len(offsets) == 0 {
		return nil
	}
	c.AddConsumePartitions(map[string]map[int32]kgo.Offset{topic: offsets})
	out := bufio.NewWriter(w)
	for follow || len(ends) > 0 {
		f := c.PollFetches(ctx)
		if ctx.Err() != nil && follow {
			return out.Flush() // the user has seen enough
		}
		if err := f.Err0(); err != nil {
			return errors.Join(err, out.Flush())
		}
		f.EachRecord(func(r *kgo.Record) {
			if b, wanted := ends[r.Partition]; wanted && r.Offset+1 >= b.end {
				delete(ends, r.Partition)
			} else if !wanted && !follow {
				return // appended after the command began
			}
			out.Write(r.Value)
			out.WriteByte('\n')
		})
		if err := errors.Join(fetchErrors(f), out.Flush()); err != nil {
			return err
		}
	}
	return nil
}

// fetchErrors returns the errors of partitions.
func fetchErrors(f kgo.Fetches) (err error) {
	f.EachError(func(_ string, n int32, perr error) { err = errors.Join(err, fmt.Errorf("partition %d: %w", n, perr)) })
	return err
}
