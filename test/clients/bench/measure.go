package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync/atomic"
	"time"
)

// freePort returns a port of the loopback interface that nobody uses.
func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

// measure is one round of one server.
func measure(ctx context.Context, s system, partitions int) (r result, err error) {
	port, err := freePort()
	if err != nil {
		return r, err
	}
	srv, err := begin(ctx, s, port)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, srv.end()) }()
	var c client
	if err := until(ctx, func(ctx context.Context) (err error) {
		c, err = s.connect(ctx, srv.addr, partitions)
		return err
	}); err != nil {
		return r, err
	}
	defer c.close()
	warm, err := c.warm(ctx)
	if err != nil {
		return r, fmt.Errorf("first records: %w", err)
	}
	before, err := srv.cpu()
	if err != nil {
		return r, err
	}
	sent, seconds, err := publish(ctx, c, *length, 0)
	if err != nil {
		return r, fmt.Errorf("publish: %w", err)
	}
	r.publish = mb(sent) / seconds
	began, got := time.Now(), 0
	limit, cancel := context.WithTimeout(ctx, 20*(*length)+time.Minute)
	defer cancel()
	if err := c.consume(limit, false, func([]byte) bool { got++; return got < warm+sent }); err != nil {
		return r, fmt.Errorf("consume: %d of %d records: %w", got, sent, err)
	}
	r.consume = mb(got) / time.Since(began).Seconds()
	after, err := srv.cpu()
	if err != nil {
		return r, err
	}
	r.cpu = (after - before).Seconds() / (mb(sent+got) / 1000)
	r.p50, r.p99, err = latency(ctx, c, r.publish/10)
	return r, err
}

func mb(records int) float64 { return float64(records) * valueSize / 1e6 }

// publish publishes for a time, as fast as the server takes the records, or at a rate in MB/s.
func publish(ctx context.Context, c client, during time.Duration, rate float64) (acked int, seconds float64, err error) {
	var ok, failed atomic.Int64
	var first atomic.Pointer[error]
	value := make([]byte, valueSize)
	for i := range value {
		value[i] = byte(rand.Uint32())
	}
	began := time.Now()
	for n := 0; time.Since(began) < during; n++ {
		if rate > 0 {
			at := began.Add(time.Duration(mb(n) / rate * float64(time.Second)))
			if wait := time.Until(at); wait > 0 {
				time.Sleep(wait)
			}
		}
		v := slices.Clone(value)
		binary.LittleEndian.PutUint64(v, uint64(time.Now().UnixNano()))
		c.publish(ctx, v, func(err error) {
			if err != nil {
				failed.Add(1)
				first.CompareAndSwap(nil, &err)
				return
			}
			ok.Add(1)
		})
	}
	if err := c.flush(ctx); err != nil {
		return 0, 0, err
	}
	seconds = time.Since(began).Seconds()
	if failed.Load() > 0 {
		return 0, 0, fmt.Errorf("%d records failed: %w", failed.Load(), *first.Load())
	}
	return int(ok.Load()), seconds, nil
}

// latency publishes at a rate in MB/s, and returns how old the records are for a consumer.
func latency(ctx context.Context, c client, rate float64) (p50, p99 float64, err error) {
	reading, stop := context.WithCancel(ctx)
	defer stop()
	var ages []time.Duration
	warm := time.Now().Add(2 * time.Second)
	done := make(chan error, 1)
	go func() {
		done <- c.consume(reading, true, func(v []byte) bool {
			now := time.Now()
			if sent := time.Unix(0, int64(binary.LittleEndian.Uint64(v))); sent.After(warm) {
				ages = append(ages, now.Sub(sent))
			}
			return true
		})
	}()
	if _, _, err := publish(ctx, c, 2*time.Second+*length, rate); err != nil {
		return 0, 0, err
	}
	time.Sleep(300 * time.Millisecond)
	stop()
	if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
		return 0, 0, err
	}
	if len(ages) == 0 {
		return 0, 0, errors.New("the consumer of the latency got no record")
	}
	slices.Sort(ages)
	ms := func(q float64) float64 { return ages[int(q*float64(len(ages)-1))].Seconds() * 1000 }
	return ms(0.5), ms(0.99), nil
}
