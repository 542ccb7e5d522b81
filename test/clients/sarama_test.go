package clients

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/IBM/sarama"
)

// saramaStories are the cases of sarama.
func saramaStories() []story {
	codecs := map[string]sarama.CompressionCodec{
		"none": sarama.CompressionNone, "gzip": sarama.CompressionGZIP, "snappy": sarama.CompressionSnappy, "lz4": sarama.CompressionLZ4, "zstd": sarama.CompressionZSTD,
	}
	var l []story
	for _, c := range compressions {
		l = append(l, story{"plain " + c, func(_ context.Context, addr, topic string) error {
			return saramaRoundTrip(addr, topic, func(cfg *sarama.Config) { cfg.Producer.Compression = codecs[c] })
		}})
	}
	return append(l,
		story{"idempotent", func(_ context.Context, addr, topic string) error {
			return saramaRoundTrip(addr, topic, func(cfg *sarama.Config) {
				cfg.Producer.Idempotent, cfg.Net.MaxOpenRequests = true, 1
			})
		}},
		story{"group, commit", func(ctx context.Context, addr, topic string) error { return saramaGroup(ctx, addr, topic, "") }},
		story{"static members", func(ctx context.Context, addr, topic string) error { return saramaGroup(ctx, addr, topic, "m") }},
		story{"lookup by time", saramaByTime},
		story{"create, delete topic", saramaTopics},
		story{"DescribeConfigs", saramaConfigs},
	)
}

func saramaConfig() *sarama.Config {
	cfg := sarama.NewConfig()
	cfg.Version = sarama.V2_8_0_0
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	cfg.Producer.MaxMessageBytes = 4 << 20
	cfg.Producer.Return.Successes = true
	cfg.Consumer.Offsets.Initial = sarama.OffsetOldest
	cfg.Consumer.Group.Heartbeat.Interval = 500 * time.Millisecond
	return cfg
}

func saramaCreate(addr, topic string, partitions int32) error {
	admin, err := sarama.NewClusterAdmin([]string{addr}, saramaConfig())
	if err != nil {
		return err
	}
	return errors.Join(admin.CreateTopic(topic, &sarama.TopicDetail{NumPartitions: partitions, ReplicationFactor: 1}, false), admin.Close())
}

func saramaSend(cfg *sarama.Config, addr string, messages ...*sarama.ProducerMessage) error {
	p, err := sarama.NewSyncProducer([]string{addr}, cfg)
	if err != nil {
		return err
	}
	err = p.SendMessages(messages)
	if l, ok := errors.AsType[sarama.ProducerErrors](err); ok {
		err = fmt.Errorf("%w: %w", err, l[0].Err)
	}
	return errors.Join(err, p.Close())
}

func saramaRoundTrip(addr, topic string, set func(*sarama.Config)) error {
	if err := saramaCreate(addr, topic, 1); err != nil {
		return err
	}
	cfg := saramaConfig()
	set(cfg)
	var messages []*sarama.ProducerMessage
	for _, n := range sizes {
		messages = append(messages, &sarama.ProducerMessage{
			Topic: topic, Value: sarama.ByteEncoder(value(n)), Headers: []sarama.RecordHeader{{Key: []byte("a"), Value: []byte("1")}},
		})
	}
	if err := saramaSend(cfg, addr, messages...); err != nil {
		return err
	}
	c, err := sarama.NewConsumer([]string{addr}, cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	p, err := c.ConsumePartition(topic, 0, sarama.OffsetOldest)
	if err != nil {
		return err
	}
	defer p.Close()
	for i, n := range sizes {
		select {
		case m := <-p.Messages():
			if !bytes.Equal(m.Value, value(n)) || len(m.Headers) != 1 {
				return fmt.Errorf("DATA: record %d is another one: %d bytes, not %d", i, len(m.Value), n)
			}
		case <-time.After(patience):
			return fmt.Errorf("record %d did not come", i)
		}
	}
	return nil
}

// saramaMember is a member of a group: the member counts its partitions and marks each read
// record.
type saramaMember struct {
	group sarama.ConsumerGroup
	end   context.CancelFunc
	wg    sync.WaitGroup

	mu     sync.Mutex
	claims int
	read   int
}

func (m *saramaMember) Setup(s sarama.ConsumerGroupSession) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.claims = 0
	for _, l := range s.Claims() {
		m.claims += len(l)
	}
	return nil
}

func (m *saramaMember) Cleanup(sarama.ConsumerGroupSession) error { return nil }

func (m *saramaMember) ConsumeClaim(s sarama.ConsumerGroupSession, c sarama.ConsumerGroupClaim) error {
	for r := range c.Messages() {
		s.MarkMessage(r, "")
		m.mu.Lock()
		m.read++
		m.mu.Unlock()
	}
	return nil
}

func (m *saramaMember) counts() (claims, read int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.claims, m.read
}

func (m *saramaMember) leave() error {
	m.end()
	m.wg.Wait()
	return m.group.Close()
}

func saramaJoin(ctx context.Context, addr, topic, instance string) (*saramaMember, error) {
	cfg := saramaConfig()
	cfg.Consumer.Group.InstanceId = instance
	g, err := sarama.NewConsumerGroup([]string{addr}, topic, cfg)
	if err != nil {
		return nil, err
	}
	m := &saramaMember{group: g}
	ctx, m.end = context.WithCancel(ctx)
	m.wg.Go(func() {
		for ctx.Err() == nil {
			if err := g.Consume(ctx, []string{topic}, m); err != nil {
				time.Sleep(100 * time.Millisecond)
			}
		}
	})
	return m, nil
}

// saramaGroup has a second member join and leave a group, and a third member go on at the first
// member's commit. Static members keep their partitions when they leave, so that the group of
// static members ends with two.
func saramaGroup(ctx context.Context, addr, topic, instance string) error {
	if err := saramaCreate(addr, topic, 4); err != nil {
		return err
	}
	names := [2]string{}
	if instance != "" {
		names = [2]string{instance + "a", instance + "b"}
	}
	cfg := saramaConfig()
	cfg.Producer.Partitioner = sarama.NewRoundRobinPartitioner
	var messages []*sarama.ProducerMessage
	for range 20 {
		messages = append(messages, &sarama.ProducerMessage{Topic: topic, Value: sarama.ByteEncoder(value(10))})
	}
	if err := saramaSend(cfg, addr, messages...); err != nil {
		return err
	}
	a, err := saramaJoin(ctx, addr, topic, names[0])
	if err != nil {
		return err
	}
	if err := until("one member reads all", func() bool { c, r := a.counts(); return c == 4 && r == 20 }); err != nil {
		return errors.Join(err, a.leave())
	}
	b, err := saramaJoin(ctx, addr, topic, names[1])
	if err != nil {
		return errors.Join(err, a.leave())
	}
	err = until("each of two members has two partitions", func() bool {
		ac, _ := a.counts()
		bc, _ := b.counts()
		return ac == 2 && bc == 2
	})
	err = errors.Join(err, b.leave())
	if err == nil && instance == "" {
		err = until("the member has all again", func() bool { c, _ := a.counts(); return c == 4 })
	}
	if err = errors.Join(err, a.leave()); err != nil {
		return err
	}
	if _, n := a.counts(); n != 20 {
		return fmt.Errorf("20 records were sent, the first member read %d", n)
	}
	if _, n := b.counts(); n != 0 {
		return fmt.Errorf("the second member read %d records that the first had committed", n)
	}
	return nil
}

// until waits until something has happened.
func until(what string, done func() bool) error {
	for end := time.Now().Add(patience); !done(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			return errors.New(what + ": it did not happen")
		}
	}
	return nil
}

func saramaByTime(_ context.Context, addr, topic string) error {
	if err := saramaCreate(addr, topic, 1); err != nil {
		return err
	}
	cfg := saramaConfig()
	cfg.Producer.Compression = sarama.CompressionGZIP
	cfg.Producer.Flush.Messages, cfg.Producer.Flush.Frequency = 10, time.Second
	var messages []*sarama.ProducerMessage
	for i := range 10 {
		messages = append(messages, &sarama.ProducerMessage{Topic: topic, Value: sarama.ByteEncoder(value(10)), Timestamp: time.UnixMilli(int64(1000000 + 1000*i))})
	}
	if err := saramaSend(cfg, addr, messages...); err != nil {
		return err
	}
	c, err := sarama.NewClient([]string{addr}, cfg)
	if err != nil {
		return err
	}
	defer c.Close()
	at, err := c.GetOffset(topic, 0, 1004500)
	if err == nil && at != 5 {
		err = fmt.Errorf("the record after 1004500 has offset %d, not 5", at)
	}
	return err
}

func saramaTopics(_ context.Context, addr, topic string) error {
	if err := saramaCreate(addr, topic, 2); err != nil {
		return err
	}
	admin, err := sarama.NewClusterAdmin([]string{addr}, saramaConfig())
	if err != nil {
		return err
	}
	defer admin.Close()
	if err := admin.DeleteTopic(topic); err != nil {
		return err
	}
	left, err := admin.ListTopics()
	if _, ok := left[topic]; ok && err == nil {
		err = errors.New("the deleted topic is still listed")
	}
	return err
}

func saramaConfigs(_ context.Context, addr, topic string) error {
	if err := saramaCreate(addr, topic, 1); err != nil {
		return err
	}
	admin, err := sarama.NewClusterAdmin([]string{addr}, saramaConfig())
	if err != nil {
		return err
	}
	defer admin.Close()
	l, err := admin.DescribeConfig(sarama.ConfigResource{Type: sarama.TopicResource, Name: topic})
	if err != nil {
		return err
	}
	for _, e := range l {
		if e.Name == "cleanup.policy" && e.Value == "delete" {
			return nil
		}
	}
	return errors.New("cleanup.policy is not there")
}
