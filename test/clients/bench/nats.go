package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func serveNATS(ctx context.Context) error {
	host, port, err := net.SplitHostPort(*address)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	s, err := server.NewServer(&server.Options{Host: host, Port: n, JetStream: true, StoreDir: *dir, SyncAlways: *sync, NoSigs: true, NoLog: true})
	if err != nil {
		return err
	}
	s.Start()
	<-ctx.Done()
	s.Shutdown()
	s.WaitForShutdown()
	return nil
}

// natsClient uses one stream, whose subjects stand for the partitions: JetStream orders a stream as a whole.
type natsClient struct {
	nc         *nats.Conn
	js         jetstream.JetStream
	partitions int
	next       int
	under      chan struct{} // records under way
}

func connectNATS(ctx context.Context, addr string, partitions int) (client, error) {
	nc, err := nats.Connect("nats://" + addr)
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(20_000))
	if err == nil {
		_, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "bench", Subjects: []string{"bench.*"}, Storage: jetstream.FileStorage})
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return &natsClient{nc: nc, js: js, partitions: partitions, under: make(chan struct{}, 4000)}, nil
}

func (c *natsClient) warm(ctx context.Context) (int, error) {
	_, err := c.js.Publish(ctx, "bench.0", make([]byte, valueSize))
	return 1, err
}

func (c *natsClient) publish(_ context.Context, value []byte, done func(error)) {
	c.under <- struct{}{}
	c.next++
	f, err := c.js.PublishAsync(fmt.Sprint("bench.", c.next%c.partitions), value)
	if err != nil {
		<-c.under
		done(err)
		return
	}
	go func() {
		select {
		case <-f.Ok():
			done(nil)
		case err := <-f.Err():
			done(err)
		}
		<-c.under
	}()
}

func (c *natsClient) flush(ctx context.Context) error {
	for range cap(c.under) {
		select {
		case c.under <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for range cap(c.under) {
		<-c.under
	}
	return nil
}

func (c *natsClient) consume(ctx context.Context, fromEnd bool, got func([]byte) bool) error {
	policy := jetstream.DeliverAllPolicy
	if fromEnd {
		policy = jetstream.DeliverNewPolicy
	}
	consumer, err := c.js.OrderedConsumer(ctx, "bench", jetstream.OrderedConsumerConfig{DeliverPolicy: policy})
	if err != nil {
		return err
	}
	ended, end := context.WithCancel(ctx)
	defer end()
	full := false
	k, err := consumer.Consume(func(m jetstream.Msg) {
		if !full && !got(m.Data()) {
			full = true
			end()
		}
	}, jetstream.PullMaxMessages(10_000))
	if err != nil {
		return err
	}
	<-ended.Done()
	k.Stop()
	select {
	case <-k.Closed():
	case <-time.After(10 * time.Second):
		return errors.New("the consumer does not end")
	}
	return context.Cause(ctx)
}

func (c *natsClient) close() { c.nc.Close() }
