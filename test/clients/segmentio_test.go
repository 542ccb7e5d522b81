package clients

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"
)

// segmentioStories are the cases of segmentio's kafka-go.
func segmentioStories() []story {
	codecs := map[string]kafka.Compression{"none": 0, "gzip": kafka.Gzip, "snappy": kafka.Snappy, "lz4": kafka.Lz4, "zstd": kafka.Zstd}
	var l []story
	for _, c := range compressions {
		l = append(l, story{"plain " + c, func(ctx context.Context, addr, topic string) error {
			return segmentioRoundTrip(ctx, addr, topic, codecs[c])
		}})
	}
	return append(l,
		story{"group, commit", segmentioGroup},
		story{"lookup by time", segmentioByTime},
		story{"create, delete topic", segmentioTopics},
		story{"DescribeConfigs", segmentioConfigs},
	)
}

func segmentioClient(addr string) *kafka.Client {
	return &kafka.Client{Addr: segmentioAddr(addr), Timeout: patience}
}

func segmentioAddr(addr string) net.Addr { return kafka.TCP(addr) }

func segmentioCreate(ctx context.Context, addr, topic string, partitions int) error {
	r, err := segmentioClient(addr).CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{Topic: topic, NumPartitions: partitions, ReplicationFactor: 1}}})
	if err != nil {
		return err
	}
	return r.Errors[topic]
}

func segmentioSend(ctx context.Context, addr, topic string, codec kafka.Compression, messages ...kafka.Message) error {
	w := &kafka.Writer{Addr: segmentioAddr(addr), Topic: topic, RequiredAcks: kafka.RequireAll, Compression: codec, BatchBytes: 4 << 20, BatchTimeout: 10 * time.Millisecond}
	return errors.Join(w.WriteMessages(ctx, messages...), w.Close())
}

func segmentioRoundTrip(ctx context.Context, addr, topic string, codec kafka.Compression) error {
	if err := segmentioCreate(ctx, addr, topic, 1); err != nil {
		return err
	}
	var messages []kafka.Message
	for _, n := range sizes {
		messages = append(messages, kafka.Message{Value: value(n), Headers: []kafka.Header{{Key: "a", Value: []byte("1")}}})
	}
	if err := segmentioSend(ctx, addr, topic, codec, messages...); err != nil {
		return err
	}
	r := kafka.NewReader(kafka.ReaderConfig{Brokers: []string{addr}, Topic: topic, Partition: 0, MaxBytes: 8 << 20})
	defer r.Close()
	for i, n := range sizes {
		m, err := r.ReadMessage(ctx)
		if err != nil {
			return err
		}
		if !bytes.Equal(m.Value, value(n)) || len(m.Headers) != 1 {
			return fmt.Errorf("DATA: record %d is another one: %d bytes, not %d", i, len(m.Value), n)
		}
	}
	return nil
}

func segmentioGroup(ctx context.Context, addr, topic string) error {
	if err := segmentioCreate(ctx, addr, topic, 2); err != nil {
		return err
	}
	for round := range 2 {
		var messages []kafka.Message
		for range 10 {
			messages = append(messages, kafka.Message{Value: []byte{byte(round)}})
		}
		if err := segmentioSend(ctx, addr, topic, kafka.Compression(0), messages...); err != nil {
			return err
		}
		r := kafka.NewReader(kafka.ReaderConfig{Brokers: []string{addr}, Topic: topic, GroupID: topic, StartOffset: kafka.FirstOffset, MaxWait: 100 * time.Millisecond})
		for range 10 {
			m, err := r.ReadMessage(ctx) // commits
			if err == nil && m.Value[0] != byte(round) {
				err = fmt.Errorf("DATA: round %d reads a record of round %d", round, m.Value[0])
			}
			if err != nil {
				return errors.Join(err, r.Close())
			}
		}
		if err := r.Close(); err != nil {
			return err
		}
	}
	return nil
}

func segmentioByTime(ctx context.Context, addr, topic string) error {
	if err := segmentioCreate(ctx, addr, topic, 1); err != nil {
		return err
	}
	var messages []kafka.Message
	for i := range 10 {
		messages = append(messages, kafka.Message{Value: value(10), Time: time.UnixMilli(int64(1000000 + 1000*i))})
	}
	if err := segmentioSend(ctx, addr, topic, kafka.Gzip, messages...); err != nil {
		return err
	}
	r := kafka.NewReader(kafka.ReaderConfig{Brokers: []string{addr}, Topic: topic, Partition: 0})
	defer r.Close()
	if err := r.SetOffsetAt(ctx, time.UnixMilli(1004500)); err != nil {
		return err
	}
	if at := r.Offset(); at != 5 {
		return fmt.Errorf("the record after 1004500 has offset %d, not 5", at)
	}
	return nil
}

func segmentioTopics(ctx context.Context, addr, topic string) error {
	if err := segmentioCreate(ctx, addr, topic, 2); err != nil {
		return err
	}
	c := segmentioClient(addr)
	r, err := c.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}})
	if err != nil {
		return err
	}
	if err := r.Errors[topic]; err != nil {
		return err
	}
	// The client answers from its knowledge of some seconds ago.
	return until("the deleted topic is no longer listed", func() bool {
		m, err := c.Metadata(ctx, &kafka.MetadataRequest{})
		return err == nil && !slices.ContainsFunc(m.Topics, func(t kafka.Topic) bool { return t.Name == topic })
	})
}

func segmentioConfigs(ctx context.Context, addr, topic string) error {
	if err := segmentioCreate(ctx, addr, topic, 1); err != nil {
		return err
	}
	r, err := segmentioClient(addr).DescribeConfigs(ctx, &kafka.DescribeConfigsRequest{Resources: []kafka.DescribeConfigRequestResource{{ResourceType: kafka.ResourceTypeTopic, ResourceName: topic}}})
	if err != nil {
		return err
	}
	for _, e := range r.Resources[0].ConfigEntries {
		if e.ConfigName == "cleanup.policy" && e.ConfigValue == "delete" {
			return nil
		}
	}
	return errors.New("cleanup.policy is not there")
}
