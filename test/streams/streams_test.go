// Package streams uses streams of a running 'penstock up' with Kafka clients that nobody here
// wrote: kcat (librdkafka) and franz-go.
package streams

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/child"
	"penstock.io/penstock/test/port"
	"penstock.io/penstock/test/program"
)

func TestMain(m *testing.M) { os.Exit(child.Main[late](tests{m})) }

// tests are the tests of the package, which use the program.
type tests struct{ m *testing.M }

func (t tests) Run() int { return program.Main(t.m) }

// patience bounds a wait for a required event.
const patience = 90 * time.Second

// machine is a 'penstock up' with a gateway.
type machine struct {
	*program.Rig
	kafka  string
	ingest string
	args   []string
	up     *spawn.Process
}

func newMachine(t *testing.T, args ...string) *machine {
	t.Helper()
	m := &machine{Rig: program.NewRig(t)}
	m.Addr = "unix:" + filepath.Join(m.Dir, "d", "meta.sock")
	for _, addr := range []*string{&m.kafka, &m.ingest} {
		var err error
		if *addr, err = port.Find(); err != nil {
			t.Fatal(err)
		}
	}
	m.args = append([]string{"up", "--dir", filepath.Join(m.Dir, "d"), "--kafka", m.kafka, "--ingest", m.ingest}, args...)
	m.start()
	return m
}

func (m *machine) start() {
	m.T.Helper()
	m.up = m.Run(m.args...)
	m.Until("the gateway answers", func() error {
		c, err := net.Dial("tcp", m.kafka)
		if err == nil {
			c.Close()
		}
		return err
	})
}

func (m *machine) kill() {
	m.up.Kill()
	<-m.up.Done()
}

// client makes a client of franz-go, which ends with the test.
func (m *machine) client(opts ...kgo.Opt) *kgo.Client {
	m.T.Helper()
	c, err := kgo.NewClient(append([]kgo.Opt{kgo.SeedBrokers(m.kafka), kgo.RecordPartitioner(kgo.ManualPartitioner())}, opts...)...)
	if err != nil {
		m.T.Fatal(err)
	}
	m.T.Cleanup(c.Close)
	return c
}

// kcat runs kcat with some input and returns its output.
func (m *machine) kcat(in string, args ...string) string {
	m.T.Helper()
	ctx, cancel := context.WithTimeout(m.T.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "kcat", append([]string{"-b", m.kafka, "-q"}, args...)...)
	cmd.Stdin = strings.NewReader(in)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		m.T.Fatalf("kcat %v: %v: %s", args, err, errs.String())
	}
	return string(out)
}

// consume reads records of a topic's partition from its beginning.
func (m *machine) consume(topic string, partition int32, n int) []*kgo.Record {
	m.T.Helper()
	c := m.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: {partition: kgo.NewOffset().AtStart()}}))
	defer c.Close()
	return m.poll(c, n)
}

// poll polls a client until it has some records, which must be without errors.
func (m *machine) poll(c *kgo.Client, n int) (all []*kgo.Record) {
	m.T.Helper()
	ctx, cancel := context.WithTimeout(m.T.Context(), patience)
	defer cancel()
	for len(all) < n {
		f := c.PollFetches(ctx)
		if err := f.Err0(); err != nil {
			m.T.Fatalf("DATA: %d of %d records came: %v", len(all), n, err)
		}
		f.EachRecord(func(r *kgo.Record) { all = append(all, r) })
	}
	return all
}

// lines numbers lines from 1 on.
func lines(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintln(&b, i+1)
	}
	return b.String()
}

// sorted sorts lines of numbers.
func sorted(text string) []int {
	var l []int
	for _, s := range strings.Fields(text) {
		n, err := strconv.Atoi(s)
		if err != nil {
			n = -1
		}
		l = append(l, n)
	}
	slices.Sort(l)
	return l
}

func want(n int) (l []int) {
	for i := range n {
		l = append(l, i+1)
	}
	return l
}

// TestKcat follows the first commands of the documentation, then a restart, a rename and a
// deletion.
func TestKcat(t *testing.T) {
	mnt := filepath.Join(t.TempDir(), "m")
	if err := os.Mkdir(mnt, 0o755); err != nil {
		t.Fatal(err)
	}
	m := newMachine(t, "--mount", mnt)
	defer func() {
		m.kill()
		if err := spawn.Unmount(mnt); err != nil {
			t.Error(err)
		}
	}()
	m.Must("stream", "create", "/v/clicks", "--partitions", "4")
	m.kcat(lines(1000), "-P", "-t", "v.clicks")
	if got := sorted(m.kcat("", "-C", "-t", "v.clicks", "-o", "beginning", "-e")); !slices.Equal(got, want(1000)) {
		t.Fatalf("DATA: consumed %d records: %v", len(got), got)
	}
	m.Until("the mount serves", func() error { _, err := os.Stat(filepath.Join(mnt, "v")); return err })
	list, err := filepath.Glob(filepath.Join(mnt, "v/clicks/log/?/*.seg"))
	if err != nil || len(list) == 0 {
		t.Fatalf("the partitions have the files %v, %v", list, err)
	}
	size := int64(0)
	for _, name := range list {
		info, err := os.Stat(name)
		if err != nil || info.Mode() != 0o444 {
			t.Fatalf("a segment has mode %v, %v", info.Mode(), err)
		}
		size += info.Size()
	}
	if size < 1000 {
		t.Errorf("DATA: the segments have %d bytes", size)
	}
	// The topic moves with its directory, and a group's committed offsets, too.
	if got := sorted(m.kcat("", "-G", "g", "-X", "auto.offset.reset=earliest", "-e", "v.clicks")); !slices.Equal(got, want(1000)) {
		t.Errorf("DATA: the group got %v", got)
	}
	keeps(t, filepath.Join(mnt, "v/clicks"), list[0])
	if err := os.Rename(filepath.Join(mnt, "v/clicks"), filepath.Join(mnt, "v/moved")); err != nil {
		t.Fatal(err)
	}
	m.kcat("1001\n", "-P", "-t", "v.moved", "-p", "2")
	if got := m.kcat("", "-G", "g", "-X", "auto.offset.reset=earliest", "-e", "v.moved"); strings.TrimSpace(got) != "1001" {
		t.Errorf("DATA: after the rename the group got %q", got)
	}
	if out, err := exec.Command("kcat", "-b", m.kafka, "-L", "-t", "v.clicks").CombinedOutput(); err != nil || !strings.Contains(string(out), "Unknown topic or partition") {
		t.Errorf("the old name: %s, %v", out, err)
	}
	m.kill()
	if err := spawn.Unmount(mnt); err != nil {
		t.Fatal(err)
	}
	m.start()
	if got := sorted(m.kcat("", "-C", "-t", "v.moved", "-o", "beginning", "-e")); !slices.Equal(got, want(1001)) {
		t.Fatalf("DATA: after the kill there are %d records: %v", len(got), got)
	}
	if out := m.Must("stream", "list"); !strings.Contains(string(out), "/v/moved") {
		t.Errorf("the list is %s", out)
	}
	m.Until("the mount serves again", func() error { _, err := os.Stat(filepath.Join(mnt, "v/moved")); return err })
	m.Must("stream", "create", "/v/removed")
	m.kcat("1\n", "-P", "-t", "v.removed")
	if err := os.RemoveAll(filepath.Join(mnt, "v/removed")); err != nil {
		t.Errorf("rm -r of a stream: %v", err)
	}
	m.Must("stream", "delete", "v.moved", "--yes")
	if out := m.Must("stream", "list"); strings.Contains(string(out), "/v/moved") {
		t.Errorf("the list is %s", out)
	}
}

// TestRecords: keys, values of 0 bytes to 1 MiB, headers, times and every compression come back
// as they were sent, to kgo and to kcat.
func TestRecords(t *testing.T) {
	m := newMachine(t)
	m.Must("stream", "create", "/v/t")
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	var sent []*kgo.Record
	for _, codec := range []kgo.CompressionCodec{kgo.NoCompression(), kgo.GzipCompression(), kgo.SnappyCompression(), kgo.Lz4Compression(), kgo.ZstdCompression()} {
		c := m.client(kgo.ProducerBatchCompression(codec), kgo.ProducerBatchMaxBytes(2<<20))
		for _, size := range []int{0, 1, 100, 10_000, 1 << 20} {
			value := make([]byte, size)
			for i := range value {
				value[i] = byte(r.Uint32() % 64)
			}
			rec := &kgo.Record{Topic: "v.t", Value: value, Timestamp: time.UnixMilli(1_700_000_000_000 + int64(len(sent)))}
			if size > 0 {
				rec.Key = value[:1]
				rec.Headers = []kgo.RecordHeader{{Key: "a", Value: []byte("b")}, {Key: "", Value: nil}}
			}
			if err := c.ProduceSync(t.Context(), rec).FirstErr(); err != nil {
				t.Fatal(err)
			}
			sent = append(sent, rec)
		}
	}
	for i, got := range m.consume("v.t", 0, len(sent)) {
		was := sent[i]
		if got.Offset != int64(i) || got.Offset != was.Offset || !bytes.Equal(got.Key, was.Key) || !bytes.Equal(got.Value, was.Value) || !got.Timestamp.Equal(was.Timestamp) || len(got.Headers) != len(was.Headers) {
			t.Fatalf("DATA: seed %d: record %d: offset %d, %d bytes at %v, sent %d bytes at %v as %d", seed, i, got.Offset, len(got.Value), got.Timestamp, len(was.Value), was.Timestamp, was.Offset)
		}
	}
	if got := m.kcat("", "-C", "-t", "v.t", "-o", "beginning", "-e", "-f", "%o %S %T\n", "-X", "fetch.message.max.bytes=3000000"); strings.Count(got, "\n") != len(sent) || !strings.HasSuffix(got, fmt.Sprintf("%d 1048576 %d\n", len(sent)-1, 1_700_000_000_000+len(sent)-1)) {
		t.Errorf("DATA: kcat read %s", got)
	}
	// By time: exactly the record in a batch that is not compressed.
	for _, i := range []int{0, 3} {
		text := m.kcat("", "-Q", "-t", fmt.Sprintf("v.t:0:%d", 1_700_000_000_000+i))
		if !strings.HasSuffix(strings.TrimSpace(text), fmt.Sprintf("offset %d", i)) {
			t.Errorf("DATA: the time of record %d has %s", i, text)
		}
	}
}

// TestGroup: two members share the partitions, the remaining member gets the rest, and the next
// member goes on behind the committed offsets, also after a restart.
func TestGroup(t *testing.T) {
	m := newMachine(t)
	m.Must("stream", "create", "/v/t", "--partitions", "4")
	p := m.client()
	produce := func(from, to int) {
		t.Helper()
		for i := from; i < to; i++ {
			p.Produce(t.Context(), &kgo.Record{Topic: "v.t", Partition: int32(i % 4), Value: []byte(strconv.Itoa(i))}, func(_ *kgo.Record, err error) {
				if err != nil {
					t.Error(err)
				}
			})
		}
		if err := p.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	var mu sync.Mutex
	owned := map[string][]int32{}
	member := func(name string) *kgo.Client {
		track := func(add bool) func(context.Context, *kgo.Client, map[string][]int32) {
			return func(_ context.Context, _ *kgo.Client, parts map[string][]int32) {
				mu.Lock()
				defer mu.Unlock()
				for _, n := range parts["v.t"] {
					owned[name] = slices.DeleteFunc(owned[name], func(o int32) bool { return o == n })
					if add {
						owned[name] = append(owned[name], n)
					}
				}
			}
		}
		return m.client(kgo.ConsumerGroup("g"), kgo.ConsumeTopics("v.t"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit(),
			kgo.OnPartitionsAssigned(track(true)), kgo.OnPartitionsRevoked(track(false)), kgo.OnPartitionsLost(track(false)), kgo.HeartbeatInterval(200*time.Millisecond))
	}
	counts := func(a, b int) func() error {
		return func() error {
			mu.Lock()
			defer mu.Unlock()
			if len(owned["a"]) != a || len(owned["b"]) != b {
				return fmt.Errorf("the members have %v", owned)
			}
			return nil
		}
	}
	produce(0, 40)
	a := member("a")
	seen := map[string]int{}
	take := func(c *kgo.Client, n int) {
		t.Helper()
		for _, r := range m.poll(c, n) {
			seen[string(r.Value)]++
		}
		if err := c.CommitUncommittedOffsets(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	take(a, 40)
	m.Until("the only member has all partitions", counts(4, 0))
	b := member("b")
	m.Until("two members share the partitions", counts(2, 2))
	b.Close()
	m.Until("one member has all partitions again", counts(4, 0))
	produce(40, 60)
	take(a, 20)
	a.Close()
	m.kill()
	m.start()
	produce(60, 80)
	c := member("c")
	take(c, 20)
	p.ProduceSync(t.Context(), &kgo.Record{Topic: "v.t", Partition: 1, Value: []byte("lag")})
	out := m.Must("stream", "groups", "/v/t", "--kafka", m.kafka, "--output", "json")
	var groups []struct {
		Group, State string
		Members      int
		Partitions   []struct{ Partition, Committed, End, Lag int64 }
	}
	if err := json.Unmarshal(out, &groups); err != nil || fmt.Sprint(groups) != "[{g Stable 1 [{0 20 20 0} {1 20 21 1} {2 20 20 0} {3 20 20 0}]}]" {
		t.Errorf("DATA: the groups are %s, %v", out, err)
	}
	for i := range 80 {
		if n := seen[strconv.Itoa(i)]; n != 1 {
			t.Errorf("DATA: record %d came %d times", i, n)
		}
	}
}

// TestKill: the process is killed again and again while producers send. Every acknowledged record
// is at its offset, and records of idempotent producers are in the log once.
func TestKill(t *testing.T) {
	m := newMachine(t)
	m.Must("stream", "create", "/v/t", "--partitions", "2", "--segment-bytes", "20000")
	type ack struct {
		partition int32
		offset    int64
		value     string
	}
	var mu sync.Mutex
	var acks []ack
	var failed atomic.Int32
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	for i := range 4 {
		opts := []kgo.Opt{kgo.ProducerLinger(time.Millisecond), kgo.RetryBackoffFn(func(int) time.Duration { return 50 * time.Millisecond })}
		if i%2 == 1 {
			opts = append(opts, kgo.DisableIdempotentWrite(), kgo.MaxProduceRequestsInflightPerBroker(1))
		}
		c := m.client(opts...)
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				value := fmt.Sprintf("%d/%d", i, n)
				c.Produce(context.Background(), &kgo.Record{Topic: "v.t", Partition: int32(i / 2), Value: []byte(value)}, func(r *kgo.Record, err error) {
					if err != nil {
						failed.Add(1)
						return
					}
					mu.Lock()
					defer mu.Unlock()
					acks = append(acks, ack{r.Partition, r.Offset, value})
				})
				time.Sleep(2 * time.Millisecond)
			}
			end, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			if err := c.Flush(end); err != nil {
				t.Error(err)
			}
		})
	}
	acked := func() int { mu.Lock(); defer mu.Unlock(); return len(acks) }
	for range 3 {
		before := acked()
		m.Until("records are acknowledged", func() error {
			if n := acked(); n < before+100 {
				return fmt.Errorf("%d after %d", n, before)
			}
			return nil
		})
		m.kill()
		m.start()
	}
	cancel()
	wg.Wait()
	if failed.Load() > 0 {
		t.Errorf("%d records were given up", failed.Load())
	}
	have := map[int32]map[int64]string{}
	seen := map[string]int{}
	for p := range int32(2) {
		have[p] = map[int64]string{}
		most := int64(-1)
		for _, a := range acks {
			if a.partition == p {
				most = max(most, a.offset)
			}
		}
		for _, r := range m.consume("v.t", p, int(most)+1) {
			have[p][r.Offset] = string(r.Value)
			seen[string(r.Value)]++
		}
	}
	for _, a := range acks {
		if got := have[a.partition][a.offset]; got != a.value {
			t.Errorf("DATA: offset %d of partition %d has %q, and %q was acknowledged", a.offset, a.partition, got, a.value)
		}
	}
	for value, n := range seen {
		if producer := value[0]; (producer == '0' || producer == '2') && n != 1 {
			t.Errorf("DATA: record %s of an idempotent producer is there %d times", value, n)
		}
	}
	t.Logf("%d records were acknowledged", len(acks))
}

// TestRefused: the gateway refuses unsupported requests by the protocol's own errors, and the
// connection goes on.
func TestRefused(t *testing.T) {
	m := newMachine(t)
	m.Must("stream", "create", "/v/t")
	c := m.client()
	short, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	unknown := m.client(kgo.UnknownTopicRetries(0))
	if err := unknown.ProduceSync(short, &kgo.Record{Topic: "v.none", Value: []byte("x")}).FirstErr(); !errors.Is(err, kerr.UnknownTopicOrPartition) {
		t.Errorf("an unknown topic: %v", err)
	}
	init := kmsg.NewPtrInitProducerIDRequest()
	init.TransactionalID = kmsg.StringPtr("t")
	if p, err := init.RequestWith(short, c.SeedBrokers()[0]); err != nil || kerr.ErrorForCode(p.ErrorCode) != kerr.TransactionalIDAuthorizationFailed {
		t.Errorf("a transaction: %+v, %v", p, err)
	}
	produce := func(records []byte) int16 {
		t.Helper()
		q := kmsg.NewPtrProduceRequest()
		q.Version, q.Acks, q.TimeoutMillis = 7, -1, 1000
		topic := kmsg.NewProduceRequestTopic()
		topic.Topic = "v.t"
		part := kmsg.NewProduceRequestTopicPartition()
		part.Records = records
		topic.Partitions = append(topic.Partitions, part)
		q.Topics = append(q.Topics, topic)
		p, err := q.RequestWith(short, c.SeedBrokers()[0])
		if err != nil {
			t.Fatal(err)
		}
		return p.Topics[0].Partitions[0].ErrorCode
	}
	for name, records := range map[string][]byte{"nothing": nil, "noise": bytes.Repeat([]byte{2}, 100), "zeros": make([]byte, 200)} {
		if code := produce(records); code == 0 {
			t.Errorf("DATA: %s was taken", name)
		}
	}
	big := m.client(kgo.ProducerBatchMaxBytes(20<<20), kgo.BrokerMaxWriteBytes(40<<20), kgo.ProducerBatchCompression(kgo.NoCompression()))
	if err := big.ProduceSync(short, &kgo.Record{Topic: "v.t", Value: make([]byte, 9<<20)}).FirstErr(); !errors.Is(err, kerr.MessageTooLarge) {
		t.Errorf("a large record: %v", err)
	}
	// None of the refused records is in the log.
	if err := c.ProduceSync(short, &kgo.Record{Topic: "v.t", Value: []byte("good")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if got := m.consume("v.t", 0, 1); string(got[0].Value) != "good" || got[0].Offset != 0 {
		t.Errorf("DATA: the log has %q at offset %d", got[0].Value, got[0].Offset)
	}
}

// TestTopics: topics are made, described and deleted over the protocol.
func TestTopics(t *testing.T) {
	m := newMachine(t)
	c := m.client()
	create := kmsg.NewPtrCreateTopicsRequest()
	for _, name := range []string{"a.b..20c", "a...b"} {
		topic := kmsg.NewCreateTopicsRequestTopic()
		topic.Topic, topic.NumPartitions, topic.ReplicationFactor = name, 3, 1
		cfg := kmsg.NewCreateTopicsRequestTopicConfig()
		cfg.Name, cfg.Value = "retention.ms", kmsg.StringPtr("3600000")
		topic.Configs = append(topic.Configs, cfg)
		create.Topics = append(create.Topics, topic)
	}
	p, err := create.RequestWith(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	for _, topic := range p.Topics {
		want := int16(0)
		if topic.Topic == "a...b" {
			want = kerr.InvalidTopicException.Code
		}
		if topic.ErrorCode != want {
			t.Errorf("topic %s: %v", topic.Topic, kerr.ErrorForCode(topic.ErrorCode))
		}
	}
	if out := string(m.Must("stream", "show", "/a/b c")); !strings.Contains(out, "1h0m0s") || !strings.Contains(out, "a.b..20c") {
		t.Errorf("the stream is %s", out)
	}
	if p, err := create.RequestWith(t.Context(), c); err != nil || kerr.ErrorForCode(p.Topics[0].ErrorCode) != kerr.TopicAlreadyExists {
		t.Errorf("again: %+v, %v", p, err)
	}
	if err := c.ProduceSync(t.Context(), &kgo.Record{Topic: "a.b..20c", Partition: 2, Value: []byte("x")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	remove := kmsg.NewPtrDeleteTopicsRequest()
	remove.TopicNames = []string{"a.b..20c"}
	topic := kmsg.NewDeleteTopicsRequestTopic()
	topic.Topic = kmsg.StringPtr("a.b..20c")
	remove.Topics = append(remove.Topics, topic)
	if p, err := remove.RequestWith(t.Context(), c); err != nil || p.Topics[0].ErrorCode != 0 {
		t.Errorf("deletion: %+v, %v", p, err)
	}
	if _, err := m.Ctl("stream", "show", "/a/b c"); err == nil {
		t.Error("the stream is still there")
	}
	// A new stream of the name has none of the old records.
	m.Must("stream", "create", "/a/b c", "--partitions", "3")
	c2 := m.client()
	r := &kgo.Record{Topic: "a.b..20c", Partition: 2, Value: []byte("y")}
	if err := c2.ProduceSync(t.Context(), r).FirstErr(); err != nil || r.Offset != 0 {
		t.Errorf("DATA: the new stream begins at offset %d, %v", r.Offset, err)
	}
}

// TestCommands: the program's own commands append lines and print them.
func TestCommands(t *testing.T) {
	m := newMachine(t)
	m.Must("stream", "create", "/v/t", "--partitions", "3")
	run := func(in string, args ...string) (string, error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, program.Path, append(args, "--kafka", m.kafka)...)
		cmd.Stdin = strings.NewReader(in)
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%w: %s", err, errs.String())
		}
		return string(out), err
	}
	for _, args := range [][]string{{"stream", "consume", "/v/t"}, {"stream", "consume", "/v/t", "--from", "end"}} {
		if out, err := run("", args...); out != "" || err != nil {
			t.Errorf("an empty stream has %q, %v", out, err)
		}
	}
	if out, err := run(lines(500), "stream", "produce", "v.t"); out != "" || err != nil {
		t.Fatal(out, err)
	}
	if out, err := run("a\n\nb\n", "stream", "produce", "/v/t", "--partition", "1"); out != "" || err != nil {
		t.Fatal(out, err)
	}
	out, err := run("", "stream", "consume", "/v/t")
	if err != nil || !strings.Contains(out, "a\n\nb\n") {
		t.Errorf("DATA: %q, %v", out, err)
	}
	if got := sorted(strings.Replace(out, "a\n\nb\n", "", 1)); !slices.Equal(got, want(500)) {
		t.Errorf("DATA: consumed %v", got)
	}
	part, err := run("", "stream", "consume", "/v/t", "--partition", "1")
	if err != nil || !strings.HasSuffix(part, "a\n\nb\n") {
		t.Errorf("DATA: partition 1 has %q, %v", part, err)
	}
	last := strconv.Itoa(strings.Count(part, "\n") - 1)
	if out, err := run("", "stream", "consume", "/v/t", "--partition", "1", "--from", last); out != "b\n" || err != nil {
		t.Errorf("DATA: from offset %s there is %q, %v", last, out, err)
	}
	for _, args := range [][]string{{"stream", "produce", "/v/none"}, {"stream", "consume", "/v/none"}, {"stream", "consume", "/v/t", "--partition", "3"}} {
		if out, err := run("x\n", args...); err == nil {
			t.Errorf("%v: %q", args, out)
		}
	}
}

// TestRollback: an unused gateway has no session, so that its volume can be rolled back. A
// consumer that has read beyond learns that the log was cut, also when the log has grown again,
// and a group goes on from its offsets in the snapshot.
func TestRollback(t *testing.T) {
	m := newMachine(t, "--stream-idle", "500ms")
	m.Must("volume", "create", "v", "--attach", "/v")
	m.Must("stream", "create", "/v/t")
	produce := func(c *kgo.Client, values ...string) {
		t.Helper()
		for _, v := range values {
			if err := c.ProduceSync(t.Context(), &kgo.Record{Topic: "v.t", Value: []byte(v)}).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
	}
	// A client refreshes its knowledge of topics, which is a use of the topics, whenever the
	// client wants.
	rare := kgo.MetadataMaxAge(time.Hour)
	p := m.client(rare)
	produce(p, "0", "1")
	m.Must("snapshot", "create", "v", "s")
	produce(p, "2", "3")
	c := m.client(rare, kgo.MetadataMinAge(10*time.Millisecond), kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"v.t": {0: kgo.NewOffset().AtStart()}}))
	for i, r := range m.poll(c, 4) {
		if string(r.Value) != strconv.Itoa(i) {
			t.Fatalf("DATA: record %d is %q", i, r.Value)
		}
	}
	c.PauseFetchTopics("v.t") // the waiting request is a use of the partition
	m.Until("nobody uses the volume, and it is rolled back", func() error {
		_, err := m.Ctl("snapshot", "rollback", "v", "s", "--yes")
		return err
	})
	produce(m.client(), "a", "b", "c")
	c.ResumeFetchTopics("v.t")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var loss *kgo.ErrDataLoss
	for loss == nil {
		f := c.PollFetches(ctx)
		if err := f.Err0(); err != nil && ctx.Err() != nil {
			t.Fatal("DATA: the consumer hears nothing of the cut log:", err)
		}
		f.EachError(func(_ string, _ int32, err error) { errors.As(err, &loss) }) // records of a slow poll come with the error
		f.EachRecord(func(r *kgo.Record) {
			if loss == nil {
				t.Errorf("DATA: record %d is %q, and the consumer knows of no cut", r.Offset, r.Value)
			}
		})
	}
	if loss.ResetTo != 2 {
		t.Errorf("DATA: the log was cut at offset 2: %v", loss)
	}
	for i, r := range m.consume("v.t", 0, 5) {
		if want := []string{"0", "1", "a", "b", "c"}[i]; string(r.Value) != want || r.Offset != int64(i) {
			t.Errorf("DATA: record %d is %q at %d", i, r.Value, r.Offset)
		}
	}
}
