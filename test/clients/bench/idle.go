package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	gosync "sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// idleMachine has an owner of volumes, which is a 'penstock up' without a gateway, and a gateway.
type idleMachine struct {
	owner, gateway *watched
	dir, kafka     string
	before         [2]footprint // of owner and gateway, before the streams were made
}

// measureIdle makes streams with a record each, and prints what owner and gateway take and do when nobody uses
// the streams, and how long a gateway that starts takes to list the streams.
func measureIdle(ctx context.Context, streams int) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	m := &idleMachine{dir: *dir, kafka: fmt.Sprintf("127.0.0.1:%d", port)}
	if m.owner, err = startWatched(m.dir, "owner", "up", "--dir", filepath.Join(m.dir, "d"), "--no-gateway"); err != nil {
		return err
	}
	defer m.owner.stop()
	if err := until(ctx, func(ctx context.Context) error { _, err := m.owner.metric(ctx, ""); return err }); err != nil {
		return err
	}
	if _, err := m.startGateway(ctx); err != nil {
		return err
	}
	defer func() { m.gateway.stop() }()
	if err := m.fill(ctx, "warm", 16); err != nil { // connections, and what the first stream makes
		return err
	}
	used, stop := context.WithCancel(ctx)
	defer stop()
	if err := m.use(used, "v.warm000000"); err != nil {
		return err
	}
	if err := m.givenUp(ctx); err != nil {
		return err
	}
	if m.before, err = m.print(ctx, "before", 0); err != nil {
		return err
	}
	if err := m.rest(ctx, 30*time.Second); err != nil {
		return err
	}
	began := time.Now()
	if err := m.fill(ctx, "idle", streams); err != nil {
		return err
	}
	fmt.Printf("%d streams made, with a record each: %.1f s\n", streams, time.Since(began).Seconds())
	if _, err := m.print(ctx, "used", streams); err != nil {
		return err
	}
	if err := m.givenUp(ctx); err != nil {
		return err
	}
	fmt.Printf("all given up after %.1f s\n", time.Since(began).Seconds())
	if _, err := m.print(ctx, "given up", streams); err != nil {
		return err
	}
	time.Sleep(5 * time.Minute) // the caches of records and inodes forget what nobody uses
	if _, err := m.print(ctx, "idle", streams); err != nil {
		return err
	}
	if err := m.rest(ctx, 30*time.Second); err != nil {
		return err
	}
	for range 2 {
		began = time.Now()
		n, err := m.list(ctx)
		if err != nil {
			return err
		}
		fmt.Printf("metadata of all %d topics: %.2f s\n", n, time.Since(began).Seconds())
	}
	if _, err := m.print(ctx, "listed", streams); err != nil {
		return err
	}
	began = time.Now()
	m.gateway.stop()
	stopped := time.Since(began)
	ready, err := m.startGateway(ctx)
	if err != nil {
		return err
	}
	n, err := m.list(ctx)
	if err != nil {
		return err
	}
	fmt.Printf("restart of the gateway: stopped in %.2f s, listens %.2f s after the start; stop, start, and the metadata of %d topics: %.2f s\n", stopped.Seconds(), ready.Seconds(), n, time.Since(began).Seconds())
	_, err = m.print(ctx, "restarted", streams)
	return err
}

// startGateway starts the gateway, and returns how long the gateway takes to listen.
func (m *idleMachine) startGateway(ctx context.Context) (ready time.Duration, err error) {
	began := time.Now()
	if m.gateway, err = startWatched(m.dir, "gateway", "gateway", "--dir", filepath.Join(m.dir, "d"), "--name", "bench", "--kafka", m.kafka); err != nil {
		return 0, err
	}
	err = until(ctx, func(ctx context.Context) error {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", m.kafka)
		if err == nil {
			err = c.Close()
		}
		return err
	})
	return time.Since(began), err
}

// fill makes streams with a record each, 16 at a time.
func (m *idleMachine) fill(ctx context.Context, prefix string, streams int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	names := make(chan string)
	var wg gosync.WaitGroup
	for range 16 {
		wg.Go(func() {
			if err := m.fillFrom(ctx, names); err != nil {
				cancel(err)
			}
		})
	}
	for i := range streams {
		select {
		case names <- fmt.Sprintf("v.%s%06d", prefix, i):
		case <-ctx.Done():
		}
	}
	close(names)
	wg.Wait()
	return context.Cause(ctx)
}

func (m *idleMachine) fillFrom(ctx context.Context, names <-chan string) error {
	c, err := newKafka(m.kafka)
	if err != nil {
		return err
	}
	defer c.Close()
	k := &kafkaClient{addr: m.kafka, c: c}
	for name := range names {
		err := k.create(ctx, name, 1)
		if err == nil {
			err = c.ProduceSync(ctx, &kgo.Record{Topic: name, Value: make([]byte, valueSize)}).FirstErr()
		}
		if err != nil {
			return fmt.Errorf("stream %s: %w", name, err)
		}
	}
	return nil
}

// use consumes a stream until ctx ends: the gateway keeps its session, as in a cluster in which other streams
// are in use.
func (m *idleMachine) use(ctx context.Context, topic string) error {
	c, err := kgo.NewClient(kgo.SeedBrokers(m.kafka), kgo.ConsumeTopics(topic))
	if err != nil {
		return err
	}
	go func() {
		defer c.Close()
		for ctx.Err() == nil {
			c.PollFetches(ctx)
		}
	}()
	return nil
}

// givenUp waits until the gateway leads only the stream in use.
func (m *idleMachine) givenUp(ctx context.Context) error {
	for end := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Second) {
		led, err := m.gateway.metric(ctx, "penstock_stream_partitions_led")
		if err != nil || led <= 1 {
			return err
		}
		if time.Now().After(end) {
			return fmt.Errorf("the gateway still leads %v partitions", led)
		}
	}
}

// list asks for the metadata of all topics.
func (m *idleMachine) list(ctx context.Context) (topics int, err error) {
	c, err := kgo.NewClient(kgo.SeedBrokers(m.kafka), kgo.RequestTimeoutOverhead(time.Minute))
	if err != nil {
		return 0, err
	}
	defer c.Close()
	q := kmsg.NewPtrMetadataRequest()
	q.Topics = nil
	r, err := q.RequestWith(ctx, c)
	if err != nil {
		return 0, err
	}
	return len(r.Topics), nil
}

// print prints the memory of owner and gateway, and for a number of streams the growth of the memory for each.
func (m *idleMachine) print(ctx context.Context, when string, streams int) (now [2]footprint, err error) {
	for i, w := range []*watched{m.owner, m.gateway} {
		if now[i], err = w.footprint(ctx, when); err != nil {
			return now, err
		}
	}
	led, err := m.gateway.metric(ctx, "penstock_stream_partitions_led")
	if err != nil {
		return now, err
	}
	mib := func(bytes int64) float64 { return float64(bytes) / (1 << 20) }
	fmt.Printf("%-9s leads %5.0f; owner: heap %6.1f MiB, resident %6.1f MiB; gateway: heap %6.1f MiB, resident %6.1f MiB; load %s\n", when, led,
		mib(now[0].heap), mib(now[0].resident), mib(now[1].heap), mib(now[1].resident), load())
	if streams > 0 {
		each := func(a, b int64) float64 { return float64(a-b) / 1024 / float64(streams) }
		fmt.Printf("          KiB a stream: owner: heap %.2f, resident %.2f; gateway: heap %.2f, resident %.2f\n",
			each(now[0].heap, m.before[0].heap), each(now[0].resident, m.before[0].resident), each(now[1].heap, m.before[1].heap), each(now[1].resident, m.before[1].resident))
	}
	return now, nil
}

// rest prints what owner and gateway do in a time in which nobody asks for anything.
func (m *idleMachine) rest(ctx context.Context, during time.Duration) error {
	at := func() (journal float64, written int64, owner, gateway time.Duration, err error) {
		var errs [4]error
		journal, errs[0] = m.owner.metric(ctx, "penstock_meta_journal_entries_total")
		written, errs[1] = m.owner.written()
		owner, errs[2] = m.owner.cpu()
		gateway, errs[3] = m.gateway.cpu()
		return journal, written, owner, gateway, errors.Join(errs[:]...)
	}
	journal, written, owner, gateway, err := at()
	if err != nil {
		return err
	}
	time.Sleep(during)
	journal2, written2, owner2, gateway2, err := at()
	if err != nil {
		return err
	}
	fmt.Printf("at rest for %v: %v journal entries, %d bytes written by the owner and its etcd; CPU of the owner %v, of the gateway %v\n", during,
		journal2-journal, written2-written, owner2-owner, gateway2-gateway)
	return nil
}
