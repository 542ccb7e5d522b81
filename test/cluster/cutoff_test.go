package cluster

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream/log"
)

const cutTopic = "v.clicks"

// writer sends numbered records to the only partition of cutTopic through one gateway, whether the
// gateway leads the partition or not.
type writer struct {
	name string
	c    *kgo.Client

	mu    sync.Mutex
	acked map[int64]string // value of each acknowledged record, by offset
	after int              // acknowledged records that were sent after forbid
	late  bool             // forbid was called
	last  error
}

func newWriter(c *Cluster, gateway *Member) (*writer, error) {
	k, err := kgo.NewClient(kgo.SeedBrokers(gateway.addr(kafkaPort)), kgo.Dialer(c.users.Dial), kgo.RequestTimeoutOverhead(5*time.Second), kgo.RequestRetries(0))
	return &writer{name: gateway.Name, c: k, acked: map[int64]string{}}, err
}

// write sends a record, and notes the acknowledgement.
func (w *writer) write(ctx context.Context, n int) error {
	value := fmt.Sprint(w.name, " ", n)
	b := log.Batch{Producer: log.NoProducer, Epoch: -1, Sequence: -1, Records: 1, LeaderEpoch: -1}
	q := kmsg.NewPtrProduceRequest()
	q.Version, q.Acks, q.TimeoutMillis = 9, -1, 30_000
	qt := kmsg.NewProduceRequestTopic()
	qt.Topic = cutTopic
	qp := kmsg.NewProduceRequestTopicPartition()
	qp.Records = b.Encode(log.AppendRecord(nil, 0, 0, nil, []byte(value), nil))
	qt.Partitions = append(qt.Partitions, qp)
	q.Topics = append(q.Topics, qt)
	w.mu.Lock()
	late := w.late
	w.mu.Unlock()
	p, err := q.RequestWith(ctx, w.c.SeedBrokers()[0])
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.last = err; err != nil {
		return err
	}
	if w.last = kerr.ErrorForCode(p.Topics[0].Partitions[0].ErrorCode); w.last != nil {
		return w.last
	}
	w.acked[p.Topics[0].Partitions[0].BaseOffset] = value
	if late {
		w.after++
	}
	return nil
}

// run writes records until ctx ends.
func (w *writer) run(ctx context.Context) {
	for n := 0; ctx.Err() == nil; n++ {
		w.write(ctx, n) // the writer notes the error
		time.Sleep(5 * time.Millisecond)
	}
}

// forbid says that no record may be acknowledged any more that the writer begins to send now.
func (w *writer) forbid() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.late = true
}

func (w *writer) count() (acked, after int, last error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.acked), w.after, w.last
}

// TestLeaderIsCutOff cuts the gateway that leads a partition off from the metadata servers; the
// gateway's clients and the chunk servers still reach the gateway. Another gateway takes the
// partition over. From then on the first gateway acknowledges no record, neither while cut off
// nor after. The log has all records that the first gateway acknowledged, before all records that
// the second gateway acknowledged.
func TestLeaderIsCutOff(t *testing.T) {
	cfg := Config{Insecure: true, Racks: 1, EtcdMembers: 1, Metas: 1, ChunkServers: 2, Gateways: 2}
	if control := os.Getenv("PENSTOCK_CONTROL"); control != "" {
		cfg.Env = []string{"PENSTOCK_CONTROL=" + control}
	}
	c := start(t, cfg)
	for _, args := range [][]string{
		{"volume", "create", "v", "--force", "--attach", "/v", "--replicas", "2"},
		{"stream", "create", "/v/clicks", "--no-table"},
	} {
		if out, err := c.Penstock(t.Context(), args...); err != nil {
			t.Fatal(err, string(out))
		}
	}
	until := func(what string, try func() error) {
		t.Helper()
		var err error
		for end := time.Now().Add(partitionPatience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
			if err = try(); err == nil {
				return
			}
		}
		t.Fatalf("%s: not within %v: %v", what, partitionPatience, err)
	}
	var writers []*writer
	for _, g := range c.Gateways {
		w, err := newWriter(c, g)
		if err != nil {
			t.Fatal(err)
		}
		defer w.c.Close()
		writers = append(writers, w)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	first, second := 0, 1
	until("a gateway leads the partition", func() error {
		for i, w := range writers {
			if w.write(ctx, -1) == nil {
				first, second = i, 1-i
				return nil
			}
		}
		return fmt.Errorf("%v, %v", writers[0].last, writers[1].last)
	})
	old, next := writers[first], writers[second]
	wg.Go(func() { old.run(ctx) })
	acknowledges := func(w *writer, n int) func() error {
		before, _, _ := w.count()
		return func() error {
			if have, _, last := w.count(); have < before+n {
				return fmt.Errorf("%d of %d records; the last error is %v", have-before, n, last)
			}
			return nil
		}
	}
	until("the first gateway acknowledges records", acknowledges(old, 100))
	for _, m := range c.Metas {
		if err := c.Net.Cut(c.Gateways[first].Node, m.Node); err != nil {
			t.Fatal(err)
		}
	}
	cut := time.Now()
	before, _, _ := old.count()
	until("another gateway takes over", func() error { return next.write(ctx, -1) })
	old.forbid()
	took := time.Since(cut)
	during, _, _ := old.count()
	wg.Go(func() { next.run(ctx) })
	until("the second gateway acknowledges records", acknowledges(next, 100))
	time.Sleep(time.Second) // the first gateway is asked meanwhile
	if err := c.Net.HealAll(); err != nil {
		t.Fatal(err)
	}
	until("the second gateway acknowledges records after the cut", acknowledges(next, 100))
	until("the first gateway answers again", func() error {
		if _, _, last := old.count(); last != kerr.NotLeaderForPartition {
			return fmt.Errorf("it says: %v", last)
		}
		return nil
	})
	cancel()
	wg.Wait()
	if _, after, _ := old.count(); after > 0 {
		t.Errorf("DATA: the first gateway acknowledged %d records that were sent after the second gateway had acknowledged one", after)
	}
	if err := c.inLog(t.Context(), next, old); err != nil {
		t.Error(err)
	}
	t.Logf("the second gateway took over %v after the cut; the first acknowledged %d records after the cut, %d before", took.Round(time.Millisecond), during-before, before)
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
}

// inLog reads the log through the gateway of a writer, and compares the log with what both writers
// were told.
func (c *Cluster) inLog(ctx context.Context, by, former *writer) error {
	ctx, cancel := context.WithTimeout(ctx, partitionPatience)
	defer cancel()
	end, first := int64(-1), int64(-1)
	for o := range by.acked {
		end = max(end, o)
		if first < 0 || o < first {
			first = o
		}
	}
	for o, value := range former.acked {
		if o >= first {
			return fmt.Errorf("DATA: the first gateway acknowledged %q at offset %d, and the second gateway began at %d", value, o, first)
		}
	}
	k, err := kgo.NewClient(kgo.SeedBrokers(c.gatewayAddrs(kafkaPort, 0)...), kgo.Dialer(c.users.Dial), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{cutTopic: {0: kgo.NewOffset().AtStart()}}))
	if err != nil {
		return err
	}
	defer k.Close()
	values := map[int64]string{}
	for next := int64(0); next <= end; {
		f := k.PollFetches(ctx)
		if ctx.Err() != nil {
			return fmt.Errorf("DATA: the log ends before offset %d, and offset %d was acknowledged: %w", next, end, f.Err0())
		}
		f.EachRecord(func(r *kgo.Record) { values[r.Offset], next = string(r.Value), r.Offset+1 })
	}
	for _, w := range []*writer{former, by} {
		for o, value := range w.acked {
			if values[o] != value {
				return fmt.Errorf("DATA: %q was acknowledged at offset %d, and the log has %q there", value, o, values[o])
			}
		}
	}
	return nil
}
