package main

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

func serveKfake(ctx context.Context) error {
	_, port, err := net.SplitHostPort(*address)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	opts := []kfake.Opt{kfake.NumBrokers(1), kfake.Ports(n), kfake.DataDir(*dir)}
	if *sync {
		opts = append(opts, kfake.SyncWrites())
	}
	c, err := kfake.NewCluster(opts...)
	if err != nil {
		return err
	}
	<-ctx.Done()
	c.Close()
	return nil
}

const topic = "v.bench"

type kafkaClient struct {
	addr       string
	partitions int32
	c          *kgo.Client
}

func newKafka(addr string) (*kgo.Client, error) {
	// Records are spread over the partitions in runs, as sticky partitioners do.
	return kgo.NewClient(kgo.SeedBrokers(addr), kgo.RecordPartitioner(kgo.StickyPartitioner()), kgo.ProducerBatchCompression(kgo.NoCompression()),
		kgo.ProducerLinger(0), kgo.MaxBufferedRecords(20_000), kgo.ProducerBatchMaxBytes(1<<20))
}

func connectKafka(ctx context.Context, addr string, partitions int) (client, error) {
	c, err := newKafka(addr)
	if err != nil {
		return nil, err
	}
	k := &kafkaClient{addr: addr, partitions: int32(partitions), c: c}
	if err := k.create(ctx, topic, k.partitions); err != nil {
		c.Close()
		return nil, err
	}
	return k, nil
}

func (k *kafkaClient) create(ctx context.Context, topic string, partitions int32) error {
	q := kmsg.NewPtrCreateTopicsRequest()
	q.TimeoutMillis = 30_000
	t := kmsg.NewCreateTopicsRequestTopic()
	t.Topic, t.NumPartitions, t.ReplicationFactor = topic, partitions, 1
	q.Topics = append(q.Topics, t)
	p, err := q.RequestWith(ctx, k.c)
	if err != nil {
		return err
	}
	if err := kerr.ErrorForCode(p.Topics[0].ErrorCode); err != nil && err != kerr.TopicAlreadyExists {
		return fmt.Errorf("creating %s: %w", topic, err)
	}
	return nil
}

func (k *kafkaClient) warm(ctx context.Context) (int, error) {
	c, err := kgo.NewClient(kgo.SeedBrokers(k.addr), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return 0, err
	}
	defer c.Close()
	var all []*kgo.Record
	for n := range k.partitions {
		all = append(all, &kgo.Record{Topic: topic, Partition: n, Value: make([]byte, valueSize)})
	}
	return len(all), c.ProduceSync(ctx, all...).FirstErr()
}

func (k *kafkaClient) publish(ctx context.Context, value []byte, done func(error)) {
	k.c.Produce(ctx, &kgo.Record{Topic: topic, Value: value}, func(_ *kgo.Record, err error) { done(err) })
}

func (k *kafkaClient) flush(ctx context.Context) error { return k.c.Flush(ctx) }

func (k *kafkaClient) consume(ctx context.Context, fromEnd bool, got func([]byte) bool) error {
	at := kgo.NewOffset().AtStart()
	if fromEnd {
		at = kgo.NewOffset().AtEnd()
	}
	from := map[int32]kgo.Offset{}
	for n := range k.partitions {
		from[n] = at
	}
	c, err := kgo.NewClient(kgo.SeedBrokers(k.addr), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: from}), kgo.FetchMaxWait(time.Second))
	if err != nil {
		return err
	}
	defer c.Close()
	for {
		f := c.PollFetches(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err := f.Err(); err != nil {
			return err
		}
		for i := f.RecordIter(); !i.Done(); {
			if !got(i.Next().Value) {
				return nil
			}
		}
	}
}

func (k *kafkaClient) close() { k.c.Close() }
