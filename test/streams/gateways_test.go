package streams

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/stream/ingest/client"
	"penstock.io/penstock/test/port"
)

// gatewayAt is a gateway beside the machine's gateway.
type gatewayAt struct {
	*spawn.Process
	kafka, ingest string
}

// gateway starts one more gateway of the machine, by a name.
func (m *machine) gateway(name string) gatewayAt {
	m.T.Helper()
	var g gatewayAt
	for _, at := range []*string{&g.kafka, &g.ingest} {
		var err error
		if *at, err = port.Find(); err != nil {
			m.T.Fatal(err)
		}
	}
	g.Process = m.Run("gateway", "--cluster", m.Addr, "--name", name, "--kafka", g.kafka, "--ingest", g.ingest, "--admin", "none")
	m.Until("the gateway answers", func() error {
		c, err := net.Dial("tcp", g.kafka)
		if err == nil {
			c.Close()
		}
		return err
	})
	return g
}

// registered returns the numbers of the running gateways, by name.
func (m *machine) registered() (map[string]int32, error) {
	var list []struct {
		Name   string `json:"name"`
		Number int32  `json:"number"`
		Live   bool   `json:"live"`
	}
	if err := json.Unmarshal([]byte(m.Must("gateway", "list", "--output", "json")), &list); err != nil {
		return nil, err
	}
	of := map[string]int32{}
	for _, g := range list {
		if g.Live {
			of[g.Name] = g.Number
		}
	}
	return of, nil
}

// leaders asks the gateway at an address for the leaders of the partitions of v.t.
func (m *machine) leaders(at string) (of map[int32]int32, brokers []int32, err error) {
	c, err := kgo.NewClient(kgo.SeedBrokers(at))
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	q := kmsg.NewPtrMetadataRequest()
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = kmsg.StringPtr("v.t")
	q.Topics = append(q.Topics, topic)
	ctx, cancel := context.WithTimeout(m.T.Context(), 20*time.Second)
	defer cancel()
	r, err := q.RequestWith(ctx, c)
	if err != nil {
		return nil, nil, err
	}
	of = map[int32]int32{}
	for _, t := range r.Topics {
		for _, p := range t.Partitions {
			of[p.Partition] = p.Leader
		}
	}
	for _, b := range r.Brokers {
		brokers = append(brokers, b.NodeID)
	}
	slices.Sort(brokers)
	return of, brokers, nil
}

// settled waits until gateways at addresses tell the same leaders, all of the leaders among the
// given gateways and more than one, and returns the number of partitions of each gateway.
func (m *machine) settled(numbers []int32, addrs ...string) (share map[int32]int) {
	m.T.Helper()
	slices.Sort(numbers)
	m.Until(fmt.Sprintf("the gateways %v lead all partitions", numbers), func() error {
		var first map[int32]int32
		for _, at := range addrs {
			of, brokers, err := m.leaders(at)
			if err != nil {
				return err
			}
			if !slices.Equal(brokers, numbers) {
				return fmt.Errorf("the gateway at %s tells of the gateways %v", at, brokers)
			}
			if first == nil {
				first = of
			}
			if !maps.Equal(of, first) {
				return fmt.Errorf("%v, and at %s %v", first, at, of)
			}
		}
		share = map[int32]int{}
		for _, g := range first {
			share[g]++
		}
		for g := range share {
			if !slices.Contains(numbers, g) {
				return fmt.Errorf("gateway %d leads something, too: %v", g, first)
			}
		}
		if len(share) < 2 {
			return fmt.Errorf("nothing is spread: %v", first)
		}
		return nil
	})
	return share
}

// producer appends numbered records to each partition of v.t, one after the other.
type producer struct {
	acked [parts]int // acknowledged records
	last  [parts]time.Time
	mu    sync.Mutex
}

// parts is the number of partitions of v.t.
const parts = 12

// write appends to a partition until ctx ends; each record waits for the previous record.
func (w *producer) write(ctx context.Context, c *kgo.Client, n int32) error {
	for i := 0; ctx.Err() == nil; i++ {
		err := c.ProduceSync(context.WithoutCancel(ctx), &kgo.Record{Topic: "v.t", Partition: n, Value: []byte(strconv.Itoa(i))}).FirstErr()
		if err != nil {
			return fmt.Errorf("record %d of partition %d: %w", i, n, err)
		}
		w.mu.Lock()
		w.acked[n], w.last[n] = i+1, time.Now()
		w.mu.Unlock()
		time.Sleep(20 * time.Millisecond)
	}
	return nil
}

// after waits until each partition has acknowledged a record sent after a time, and returns the
// longest time of the partitions.
func (w *producer) after(m *machine, what string, from time.Time) (longest time.Duration) {
	m.T.Helper()
	var had [parts]int
	w.mu.Lock()
	copy(had[:], w.acked[:])
	w.mu.Unlock()
	m.Until(what, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		longest = 0
		for n, k := range w.acked {
			if k < had[n]+2 { // the first record may have been under way
				return fmt.Errorf("partition %d takes no records", n)
			}
			longest = max(longest, w.last[n].Sub(from))
		}
		return nil
	})
	return longest
}

// TestGateways: partitions and groups are spread over the gateways, and move when a gateway comes,
// stops or is killed, under producers and a group of consumers. No acknowledged record is lost or
// doubled, the order of each partition stays, and the members of the group keep their ids.
func TestGateways(t *testing.T) {
	m := newMachine(t)
	m.Must("stream", "create", "/v/t", "--partitions", strconv.Itoa(parts))
	second, third := m.gateway("second"), m.gateway("third")
	numbers, err := m.registered()
	if err != nil || len(numbers) != 3 || numbers["up"] != 1 {
		t.Fatal(numbers, err)
	}
	all := func() []int32 { return slices.Collect(maps.Values(numbers)) }
	t.Log("partitions by gateway:", m.settled(all(), m.kafka, second.kafka, third.kafka))

	c := m.client(kgo.SeedBrokers(m.kafka, second.kafka, third.kafka), kgo.MetadataMinAge(100*time.Millisecond), kgo.RetryBackoffFn(func(int) time.Duration { return 100 * time.Millisecond }))
	group := m.groupOf(numbers["second"])
	reader := func() *kgo.Client {
		return m.client(kgo.SeedBrokers(m.kafka, second.kafka, third.kafka), kgo.ConsumerGroup(group), kgo.ConsumeTopics("v.t"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
			kgo.MetadataMinAge(100*time.Millisecond), kgo.HeartbeatInterval(500*time.Millisecond), kgo.SessionTimeout(time.Minute), kgo.RebalanceTimeout(time.Minute))
	}
	readers := []*kgo.Client{reader(), reader()}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var w producer
	var wg sync.WaitGroup
	for n := range int32(parts) {
		wg.Go(func() {
			if err := w.write(ctx, c, n); err != nil {
				t.Error("DATA:", err)
			}
		})
	}
	var seen sync.Map // partition and number of the records that a reader had
	for _, r := range readers {
		wg.Go(func() {
			for ctx.Err() == nil {
				r.PollFetches(ctx).EachRecord(func(r *kgo.Record) { seen.Store(fmt.Sprint(r.Partition, "/", string(r.Value)), true) })
			}
		})
	}
	w.after(m, "all partitions take records", time.Now())
	ids := func() (l []string) {
		for _, r := range readers {
			id, _ := r.GroupMetadata()
			l = append(l, id)
		}
		return l
	}
	m.Until("the readers are members", func() error {
		if slices.Contains(ids(), "") {
			return fmt.Errorf("%q", ids())
		}
		return nil
	})
	before := ids()

	fourth := m.gateway("fourth")
	if numbers, err = m.registered(); err != nil || len(numbers) != 4 {
		t.Fatal(numbers, err)
	}
	began := time.Now()
	t.Log("with another gateway:", m.settled(all(), m.kafka, third.kafka, fourth.kafka))
	t.Logf("all partitions took records %v after another gateway came", w.after(m, "all partitions take records beside the new gateway", began))

	began = time.Now()
	if err := second.Stop(patience); err != nil {
		t.Error("the orderly end of a gateway:", err)
	}
	t.Logf("a gateway stopped within %v", time.Since(began))
	delete(numbers, "second")
	t.Logf("all partitions took records %v after the order to stop", w.after(m, "all partitions take records after a stop", began))
	m.settled(all(), m.kafka, third.kafka, fourth.kafka)

	began = time.Now()
	third.Kill()
	<-third.Done()
	t.Logf("all partitions took records %v after SIGKILL", w.after(m, "all partitions take records after a kill", began))
	delete(numbers, "third")
	t.Log("at the end:", m.settled(all(), m.kafka, fourth.kafka))
	m.redirected(fourth)

	m.Until("the group has read what was acknowledged", func() error {
		w.mu.Lock()
		acked := w.acked
		w.mu.Unlock()
		for n, k := range acked {
			for i := range k {
				if _, ok := seen.Load(fmt.Sprint(n, "/", i)); !ok {
					return fmt.Errorf("record %d of partition %d", i, n)
				}
			}
		}
		return nil
	})
	if after := ids(); !slices.Equal(before, after) {
		t.Errorf("the members had the ids %q, and have %q", before, after)
	}
	stop()
	wg.Wait()
	for n := range int32(parts) {
		next := 0
		for _, r := range m.consume("v.t", n, w.acked[n]) {
			if strings.HasPrefix(string(r.Value), "h") {
				continue // of redirected
			}
			if string(r.Value) != strconv.Itoa(next) {
				t.Fatalf("DATA: partition %d has %q in the place of %d", n, r.Value, next)
			}
			next++
		}
	}
}

// groupOf returns the name of a group that a gateway is to coordinate.
func (m *machine) groupOf(gateway int32) string {
	m.T.Helper()
	c := m.client()
	for i := range 1000 {
		name := fmt.Sprint("group-", i)
		q := kmsg.NewPtrFindCoordinatorRequest()
		q.CoordinatorKey = name
		r, err := q.RequestWith(m.T.Context(), c)
		if err != nil {
			m.T.Fatal(err)
		}
		if r.NodeID == gateway || len(r.Coordinators) == 1 && r.Coordinators[0].NodeID == gateway {
			return name
		}
	}
	m.T.Fatal("gateway ", gateway, " coordinates nothing")
	return ""
}

// redirected: over HTTP and gRPC, a gateway sends a client to the gateway that leads the partition.
func (m *machine) redirected(other gatewayAt) {
	m.T.Helper()
	of, _, err := m.leaders(m.kafka)
	if err != nil {
		m.T.Fatal(err)
	}
	for n, g := range of {
		if g == 1 {
			continue
		}
		url := fmt.Sprintf("http://%s/v1/append/v/t?partition=%d", m.ingest, n)
		r, err := http.Post(url, "text/plain", strings.NewReader("h1\n")) // follows 307
		if err != nil {
			m.T.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || r.StatusCode != http.StatusOK || r.Request.URL.Host != other.ingest || !strings.Contains(string(body), `"appended_count":1`) {
			m.T.Errorf("an append to partition %d, which gateway %d leads: %d at %s: %s, %v", n, g, r.StatusCode, r.Request.URL.Host, body, err)
		}
		p, err := client.New(client.Config{Gateways: []string{m.ingest}, Stream: "/v/t", Name: "h", Partition: &n})
		if err != nil {
			m.T.Fatal(err)
		}
		defer p.Close()
		ctx, cancel := context.WithTimeout(m.T.Context(), patience)
		defer cancel()
		if r, err := p.Append(ctx, &ingest.Record{Value: []byte("h2")}); err != nil || len(r.Offsets) != 1 {
			m.T.Errorf("an append over gRPC to partition %d, which gateway %d leads: %+v, %v", n, g, r, err)
		}
		return
	}
	m.T.Error("gateway 1 leads everything")
}
