package clients

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// franzStories are the cases of franz-go, with the administration client of franz-go (kadm).
func franzStories() []story {
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
	}
	var l []story
	for _, c := range compressions {
		l = append(l, story{"plain " + c, func(ctx context.Context, addr, topic string) error {
			return franzRoundTrip(ctx, addr, topic, kgo.ProducerBatchCompression(codecs[c]), kgo.DisableIdempotentWrite())
		}})
	}
	return append(l,
		story{"idempotent", func(ctx context.Context, addr, topic string) error { return franzRoundTrip(ctx, addr, topic) }},
		story{"lookup by time", franzByTime},
		story{"create, delete topic", franzTopics},
		story{"DescribeConfigs", franzConfigs},
		story{"transaction refused", franzTransaction},
	)
}

func franzClient(addr string, opts ...kgo.Opt) (*kgo.Client, *kadm.Client, error) {
	c, err := kgo.NewClient(append(opts, kgo.SeedBrokers(addr), kgo.ProducerBatchMaxBytes(4<<20))...)
	if err != nil {
		return nil, nil, err
	}
	return c, kadm.NewClient(c), nil
}

func franzRoundTrip(ctx context.Context, addr, topic string, opts ...kgo.Opt) error {
	c, admin, err := franzClient(addr, append(opts, kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := admin.CreateTopic(ctx, 1, 1, nil, topic); err != nil {
		return err
	}
	for _, n := range sizes {
		r := &kgo.Record{Topic: topic, Value: value(n), Headers: []kgo.RecordHeader{{Key: "a", Value: []byte("1")}}}
		if err := c.ProduceSync(ctx, r).FirstErr(); err != nil {
			return err
		}
	}
	var got []*kgo.Record
	for len(got) < len(sizes) {
		f := c.PollFetches(ctx)
		if err := f.Err0(); err != nil {
			return fmt.Errorf("%d records came: %w", len(got), err)
		}
		got = append(got, f.Records()...)
	}
	for i, n := range sizes {
		if !bytes.Equal(got[i].Value, value(n)) || len(got[i].Headers) != 1 {
			return fmt.Errorf("DATA: record %d is another one: %d bytes, not %d", i, len(got[i].Value), n)
		}
	}
	return nil
}

func franzByTime(ctx context.Context, addr, topic string) error {
	c, admin, err := franzClient(addr, kgo.ProducerLinger(100*time.Millisecond), kgo.ProducerBatchCompression(kgo.GzipCompression()))
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := admin.CreateTopic(ctx, 1, 1, nil, topic); err != nil {
		return err
	}
	var records []*kgo.Record
	for i := range 10 {
		records = append(records, &kgo.Record{Topic: topic, Value: value(100), Timestamp: time.UnixMilli(int64(1000000 + 1000*i))})
	}
	if err := c.ProduceSync(ctx, records...).FirstErr(); err != nil {
		return err
	}
	o, err := admin.ListOffsetsAfterMilli(ctx, 1004500, topic)
	if err != nil {
		return err
	}
	if at, _ := o.Lookup(topic, 0); at.Err != nil || at.Offset != 5 || at.Timestamp != 1005000 {
		return fmt.Errorf("the record after 1004500 has offset %d and time %d (%v), not 5 and 1005000", at.Offset, at.Timestamp, at.Err)
	}
	return nil
}

func franzTopics(ctx context.Context, addr, topic string) error {
	c, admin, err := franzClient(addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := admin.CreateTopic(ctx, 2, 1, nil, topic); err != nil {
		return err
	}
	if _, err := admin.CreateTopic(ctx, 2, 1, nil, topic); !errors.Is(err, kerr.TopicAlreadyExists) {
		return fmt.Errorf("a second topic of this name: %v", err)
	}
	if _, err := admin.DeleteTopic(ctx, topic); err != nil {
		return err
	}
	left, err := admin.ListTopics(ctx)
	if err == nil && left.Has(topic) {
		err = errors.New("the deleted topic is still listed")
	}
	return err
}

func franzConfigs(ctx context.Context, addr, topic string) error {
	c, admin, err := franzClient(addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := admin.CreateTopic(ctx, 1, 1, map[string]*string{"retention.ms": kadm.StringPtr("3600000")}, topic); err != nil {
		return err
	}
	all, err := admin.DescribeTopicConfigs(ctx, topic)
	if err != nil {
		return err
	}
	for _, c := range all[0].Configs {
		if c.Key == "retention.ms" && c.MaybeValue() == "3600000" {
			return nil
		}
	}
	return fmt.Errorf("retention.ms is not 3600000: %v", all[0])
}

func franzTransaction(ctx context.Context, addr, topic string) error {
	c, _, err := franzClient(addr, kgo.TransactionalID(topic))
	if err != nil {
		return err
	}
	defer c.Close()
	if err = c.BeginTransaction(); err == nil {
		err = c.ProduceSync(ctx, &kgo.Record{Topic: topic, Value: value(1)}).FirstErr()
	}
	if err == nil || !strings.Contains(err.Error(), kerr.TransactionalIDAuthorizationFailed.Message) {
		return fmt.Errorf("the transaction is not refused: %v", err)
	}
	return nil
}
