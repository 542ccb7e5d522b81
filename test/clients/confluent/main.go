// Command confluent uses the streams at an address with confluent-kafka-go, and prints a line
// "CASE<tab>passed" or "CASE<tab>why it failed" for each case. The client is librdkafka in C, so the
// command is a module of its own: no other module needs a C compiler.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
)

// patience bounds a wait for what must come.
const patience = 60 * time.Second

// sizes are the lengths of the values that are sent and read back.
var sizes = []int{0, 1, 1000, 1 << 20}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: confluent HOST:PORT")
		os.Exit(2)
	}
	c := client{addr: os.Args[1]}
	for i, s := range c.stories() {
		outcome := "passed"
		if err := s.run(fmt.Sprint("confluent-go-", i)); err != nil {
			outcome = strings.ReplaceAll(err.Error(), "\n", " ")
		}
		fmt.Printf("%s\t%s\n", s.name, outcome)
	}
}

// story is a case. The name of the topic is the case's own.
type story struct {
	name string
	run  func(topic string) error
}

// client makes producers and consumers of the streams at an address.
type client struct{ addr string }

func (c client) stories() (l []story) {
	for _, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
		l = append(l, story{"plain " + codec, func(topic string) error {
			return c.roundTrip(topic, kafka.ConfigMap{"compression.type": codec})
		}})
	}
	return append(l,
		story{"idempotent", func(topic string) error { return c.roundTrip(topic, kafka.ConfigMap{"enable.idempotence": true}) }},
		story{"headers", c.headers},
		story{"group, commit", c.group},
		story{"rebalance", func(topic string) error { return c.rebalance(topic, "") }},
		story{"static members", func(topic string) error { return c.rebalance(topic, "member") }},
		story{"lookup by time", c.byTime},
		story{"reset of offsets", c.reset},
		story{"create, delete topic", c.topics},
		story{"DescribeConfigs", c.configs},
		story{"transaction refused", c.transaction},
	)
}

// config returns a configuration with the address.
func (c client) config(more ...kafka.ConfigMap) *kafka.ConfigMap {
	m := kafka.ConfigMap{"bootstrap.servers": c.addr, "message.max.bytes": 4 << 20}
	for _, l := range more {
		for k, v := range l {
			m[k] = v
		}
	}
	return &m
}

// value is a value of n bytes that does not compress to nothing.
func value(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// admin works with a client for administration.
func (c client) admin(work func(ctx context.Context, a *kafka.AdminClient) error) error {
	a, err := kafka.NewAdminClient(c.config())
	if err != nil {
		return err
	}
	defer a.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return work(ctx, a)
}

// create makes a topic.
func (c client) create(topic string, partitions int) error {
	return c.admin(func(ctx context.Context, a *kafka.AdminClient) error {
		results, err := a.CreateTopics(ctx, []kafka.TopicSpecification{{Topic: topic, NumPartitions: partitions, ReplicationFactor: 1}})
		return firstError(results, err)
	})
}

// firstError returns the error of a request for topics, or the first error of a topic.
func firstError(results []kafka.TopicResult, err error) error {
	for _, r := range results {
		if err == nil && r.Error.Code() != kafka.ErrNoError {
			err = r.Error
		}
	}
	return err
}

// produce sends messages, and waits for the acknowledgement of each.
func (c client) produce(config kafka.ConfigMap, messages ...*kafka.Message) error {
	p, err := kafka.NewProducer(c.config(config))
	if err != nil {
		return err
	}
	defer p.Close()
	done := make(chan kafka.Event, len(messages))
	for _, m := range messages {
		if err := p.Produce(m, done); err != nil {
			return err
		}
	}
	late := time.After(patience)
	for range messages {
		select {
		case e := <-done:
			if m := e.(*kafka.Message); m.TopicPartition.Error != nil {
				return m.TopicPartition.Error
			}
		case <-late:
			return errors.New("not all messages were acknowledged")
		}
	}
	return nil
}

// to makes a message for a partition.
func to(topic string, partition int32, value []byte) *kafka.Message {
	return &kafka.Message{TopicPartition: kafka.TopicPartition{Topic: &topic, Partition: partition}, Value: value}
}

// consume works with a consumer of a group.
func (c client) consume(config kafka.ConfigMap, work func(*kafka.Consumer) error) error {
	k, err := kafka.NewConsumer(c.config(kafka.ConfigMap{"group.id": "none", "auto.offset.reset": "earliest", "enable.auto.commit": false}, config))
	if err != nil {
		return err
	}
	return errors.Join(work(k), k.Close())
}

// read reads n messages.
func read(k *kafka.Consumer, n int) (all []*kafka.Message, err error) {
	for end := time.Now().Add(patience); len(all) < n; {
		m, err := k.ReadMessage(time.Second)
		if err == nil {
			all = append(all, m)
			continue
		}
		if e, ok := errors.AsType[kafka.Error](err); !ok || !e.IsTimeout() {
			return nil, err
		}
		if time.Now().After(end) {
			return nil, fmt.Errorf("%d of %d messages came", len(all), n)
		}
	}
	return all, nil
}

// fromStart reads n messages of a topic's first partition.
func (c client) fromStart(topic string, n int) (all []*kafka.Message, err error) {
	err = c.consume(nil, func(k *kafka.Consumer) error {
		if err := k.Assign([]kafka.TopicPartition{{Topic: &topic, Partition: 0, Offset: kafka.OffsetBeginning}}); err != nil {
			return err
		}
		all, err = read(k, n)
		return err
	})
	return all, err
}

func (c client) roundTrip(topic string, config kafka.ConfigMap) error {
	if err := c.create(topic, 1); err != nil {
		return err
	}
	var sent []*kafka.Message
	for _, n := range sizes {
		sent = append(sent, to(topic, 0, value(n)))
	}
	if err := c.produce(config, sent...); err != nil {
		return err
	}
	got, err := c.fromStart(topic, len(sizes))
	if err != nil {
		return err
	}
	for i, m := range got {
		if !bytes.Equal(m.Value, value(sizes[i])) {
			return fmt.Errorf("DATA: message %d has another value of %d bytes", i, len(m.Value))
		}
	}
	return nil
}

func (c client) headers(topic string) error {
	if err := c.create(topic, 1); err != nil {
		return err
	}
	m := to(topic, 0, []byte("x"))
	m.Key, m.Headers = []byte("k"), []kafka.Header{{Key: "a", Value: []byte("1")}, {Key: "b", Value: []byte{}}}
	if err := c.produce(nil, m); err != nil {
		return err
	}
	got, err := c.fromStart(topic, 1)
	if err == nil && (string(got[0].Key) != "k" || fmt.Sprint(got[0].Headers) != fmt.Sprint(m.Headers)) {
		err = fmt.Errorf("DATA: the key is %q, the headers are %v", got[0].Key, got[0].Headers)
	}
	return err
}

func (c client) group(topic string) error {
	if err := c.create(topic, 2); err != nil {
		return err
	}
	var sent []*kafka.Message
	for i := range 10 {
		sent = append(sent, to(topic, int32(i%2), []byte("x")))
	}
	if err := c.produce(nil, sent...); err != nil {
		return err
	}
	group := kafka.ConfigMap{"group.id": topic}
	err := c.consume(group, func(k *kafka.Consumer) error {
		if err := k.Subscribe(topic, nil); err != nil {
			return err
		}
		if _, err := read(k, 10); err != nil {
			return err
		}
		_, err := k.Commit()
		return err
	})
	if err != nil {
		return err
	}
	if err := c.produce(nil, to(topic, 1, []byte("y"))); err != nil {
		return err
	}
	return c.consume(group, func(k *kafka.Consumer) error {
		if err := k.Subscribe(topic, nil); err != nil {
			return err
		}
		got, err := read(k, 1)
		if err == nil && string(got[0].Value) != "y" {
			err = fmt.Errorf("DATA: after the commit comes %q", got[0].Value)
		}
		return err
	})
}

// rebalance shares four partitions between two members, and one member gets all partitions when the
// other member leaves. Members with ids of their own are static: a static member that leaves keeps its
// partitions for the session timeout.
func (c client) rebalance(topic, instance string) error {
	if err := c.create(topic, 4); err != nil {
		return err
	}
	member := func(name string) kafka.ConfigMap {
		m := kafka.ConfigMap{"group.id": topic}
		if instance != "" {
			m["group.instance.id"] = instance + name
		}
		return m
	}
	return c.consume(member("a"), func(a *kafka.Consumer) error {
		if err := a.Subscribe(topic, nil); err != nil {
			return err
		}
		if err := assigned([]*kafka.Consumer{a}, 4); err != nil {
			return err
		}
		err := c.consume(member("b"), func(b *kafka.Consumer) error {
			if err := b.Subscribe(topic, nil); err != nil {
				return err
			}
			return assigned([]*kafka.Consumer{a, b}, 2, 2)
		})
		if err != nil || instance != "" {
			return err
		}
		return assigned([]*kafka.Consumer{a}, 4)
	})
}

// assigned polls consumers until each has some partitions.
func assigned(all []*kafka.Consumer, want ...int) error {
	var have []int
	for end := time.Now().Add(patience); time.Now().Before(end); {
		have = nil
		for _, k := range all {
			k.Poll(100)
			l, err := k.Assignment()
			if err != nil {
				return err
			}
			have = append(have, len(l))
		}
		if slices.Equal(have, want) {
			return nil
		}
	}
	return fmt.Errorf("the members have %v partitions, not %v", have, want)
}

func (c client) byTime(topic string) error {
	if err := c.create(topic, 1); err != nil {
		return err
	}
	for i := range 10 {
		m := to(topic, 0, []byte(fmt.Sprint(i)))
		m.Timestamp = time.UnixMilli(int64(1000000 + 1000*i))
		if err := c.produce(nil, m); err != nil {
			return err
		}
	}
	return c.consume(nil, func(k *kafka.Consumer) error {
		for at, want := range map[int64]kafka.Offset{1000000: 0, 1004500: 5, 1009000: 9} {
			got, err := k.OffsetsForTimes([]kafka.TopicPartition{{Topic: &topic, Partition: 0, Offset: kafka.Offset(at)}}, int(patience.Milliseconds()))
			if err != nil {
				return err
			}
			if got[0].Offset != want {
				return fmt.Errorf("the message after %d has offset %d, not %d", at, got[0].Offset, want)
			}
		}
		return nil
	})
}

func (c client) reset(topic string) error {
	if err := c.create(topic, 1); err != nil {
		return err
	}
	if err := c.produce(nil, to(topic, 0, []byte("x")), to(topic, 0, []byte("x")), to(topic, 0, []byte("x"))); err != nil {
		return err
	}
	return c.consume(kafka.ConfigMap{"group.id": topic}, func(k *kafka.Consumer) error {
		if err := k.Assign([]kafka.TopicPartition{{Topic: &topic, Partition: 0, Offset: 1000}}); err != nil {
			return err
		}
		got, err := read(k, 3)
		if err != nil {
			return err
		}
		if got[0].TopicPartition.Offset != 0 {
			return fmt.Errorf("the consumer goes on at %d", got[0].TopicPartition.Offset)
		}
		if _, err := k.CommitOffsets([]kafka.TopicPartition{{Topic: &topic, Partition: 0, Offset: 1}}); err != nil {
			return err
		}
		at, err := k.Committed([]kafka.TopicPartition{{Topic: &topic, Partition: 0}}, int(patience.Milliseconds()))
		if err == nil && at[0].Offset != 1 {
			err = fmt.Errorf("DATA: offset %d is committed, not 1", at[0].Offset)
		}
		return err
	})
}

func (c client) topics(topic string) error {
	if err := c.create(topic, 2); err != nil {
		return err
	}
	return c.admin(func(ctx context.Context, a *kafka.AdminClient) error {
		known, err := a.DescribeTopics(ctx, kafka.NewTopicCollectionOfTopicNames([]string{topic}))
		if err != nil {
			return err
		}
		if d := known.TopicDescriptions[0]; d.Error.Code() != kafka.ErrNoError || len(d.Partitions) != 2 || d.TopicID.String() == "" {
			return fmt.Errorf("the topic has %d partitions and the id %q: %v", len(d.Partitions), d.TopicID.String(), d.Error)
		}
		if err := firstError(a.DeleteTopics(ctx, []string{topic})); err != nil {
			return err
		}
		all, err := a.GetMetadata(nil, true, int(patience.Milliseconds()))
		if err != nil {
			return err
		}
		if _, ok := all.Topics[topic]; ok {
			return errors.New("the deleted topic is still listed")
		}
		return nil
	})
}

func (c client) configs(topic string) error {
	if err := c.create(topic, 1); err != nil {
		return err
	}
	return c.admin(func(ctx context.Context, a *kafka.AdminClient) error {
		got, err := a.DescribeConfigs(ctx, []kafka.ConfigResource{{Type: kafka.ResourceTopic, Name: topic}})
		if err == nil && got[0].Config["cleanup.policy"].Value != "delete" {
			err = fmt.Errorf("the configuration is %v", got)
		}
		return err
	})
}

func (c client) transaction(topic string) error {
	p, err := kafka.NewProducer(c.config(kafka.ConfigMap{"transactional.id": topic}))
	if err != nil {
		return err
	}
	defer p.Close()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	err = p.InitTransactions(ctx)
	if e, ok := errors.AsType[kafka.Error](err); ok && e.Code() == kafka.ErrTransactionalIDAuthorizationFailed {
		return nil
	}
	return fmt.Errorf("the transaction is not refused: %v", err)
}
