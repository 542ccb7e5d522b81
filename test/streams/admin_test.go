package streams

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/test/program"
)

// TestAdministration: streams are changed over the protocol and by commands during use.
func TestAdministration(t *testing.T) {
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
	m.Must("volume", "create", "v", "--attach", "/v")
	t.Run("partitions", func(t *testing.T) { m.testGrowth(t, mnt) })
	t.Run("configs", m.testConfigs)
	t.Run("records", func(t *testing.T) { m.testDeleteRecords(t, mnt) })
	t.Run("groups", func(t *testing.T) { m.testGroups(t, mnt) })
}

// restart kills the machine and starts the machine again.
func (m *machine) restart(mnt string) {
	m.T.Helper()
	m.kill()
	if err := spawn.Unmount(mnt); err != nil {
		m.T.Fatal(err)
	}
	m.start()
}

// command runs a command of the program that uses the gateway, with some input.
func (m *machine) command(in string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(m.T.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, program.Path, append(args, "--kafka", m.kafka)...)
	cmd.Stdin = strings.NewReader(in)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// ask sends a request to a gateway.
func ask[P kmsg.Response](t *testing.T, q kmsg.Request, c kmsg.Requestor) P {
	t.Helper()
	p, err := c.Request(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return p.(P)
}

// grow asks for more partitions of a topic, and returns the answer.
func grow(t *testing.T, c *kgo.Client, topic string, count int32, only bool) error {
	t.Helper()
	q := kmsg.NewPtrCreatePartitionsRequest()
	qt := kmsg.NewCreatePartitionsRequestTopic()
	qt.Topic, qt.Count = topic, count
	q.Topics, q.ValidateOnly, q.TimeoutMillis = append(q.Topics, qt), only, 30000
	return kerr.ErrorForCode(ask[*kmsg.CreatePartitionsResponse](t, q, c).Topics[0].ErrorCode)
}

// partitions asks a gateway how many partitions a topic has.
func partitions(t *testing.T, c *kgo.Client, topic string) int {
	t.Helper()
	q := kmsg.NewPtrMetadataRequest()
	qt := kmsg.NewMetadataRequestTopic()
	qt.Topic = &topic
	q.Topics = append(q.Topics, qt)
	return len(ask[*kmsg.MetadataResponse](t, q, c).Topics[0].Partitions)
}

// testGrowth: a stream gets more partitions while a producer, a group, a producer with a name and
// another gateway use it.
func (m *machine) testGrowth(t *testing.T, mnt string) {
	m.Must("stream", "create", "/v/g", "--partitions", "2", "--lag", "1s")
	c := m.client(kgo.MetadataMinAge(50 * time.Millisecond))
	group := m.client(kgo.ConsumerGroup("growing"), kgo.ConsumeTopics("v.g"), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.MetadataMinAge(50*time.Millisecond), kgo.MetadataMaxAge(200*time.Millisecond), kgo.HeartbeatInterval(200*time.Millisecond))
	produce := func(partition int32, value string) {
		t.Helper()
		if err := c.ProduceSync(t.Context(), &kgo.Record{Topic: "v.g", Partition: partition, Value: []byte(value)}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	produce(0, "a")
	produce(1, "b")
	m.poll(group, 2)
	names := map[string]int32{}
	for i := range 8 {
		name := fmt.Sprint("named ", i)
		code, a := m.postAs(name, 0, "/v/g", "x\n")
		if names[name] = a.Partition; code != 200 {
			t.Fatal(code, a)
		}
	}
	gateway := m.gateway("second")
	defer func() {
		gateway.Kill()
		<-gateway.Done()
	}()
	other := m.client(kgo.SeedBrokers(gateway.kafka))
	if n := partitions(t, other, "v.g"); n != 2 {
		t.Fatalf("the second gateway sees %d partitions", n)
	}
	m.Must("snapshot", "create", "v", "two")

	for _, n := range []int32{-1, 0, 1, 2, 4097} {
		if err := grow(t, c, "v.g", n, false); err != kerr.InvalidPartitions {
			t.Errorf("growth to %d partitions: %v", n, err)
		}
	}
	if err := grow(t, c, "v.none", 4, false); err != kerr.UnknownTopicOrPartition {
		t.Errorf("growth of no topic: %v", err)
	}
	if err := grow(t, c, "v.g", 3, true); err != nil || partitions(t, c, "v.g") != 2 {
		t.Errorf("a growth that is only checked: %v", err)
	}
	if err := grow(t, c, "v.g", 3, false); err != nil {
		t.Fatal(err)
	}
	m.Must("stream", "set", "/v/g", "--partitions", "5")
	if out, err := m.Ctl("stream", "set", "/v/g", "--partitions", "4"); err == nil {
		t.Errorf("a stream with 5 partitions has fewer: %s", out)
	}
	for what, client := range map[string]*kgo.Client{"first": c, "second": other} {
		if n := partitions(t, client, "v.g"); n != 5 {
			t.Errorf("the %s gateway sees %d partitions, not 5", what, n)
		}
	}
	c.ForceMetadataRefresh()
	for n := range int32(5) {
		produce(n, fmt.Sprint("after ", n))
	}
	var got []string
	for len(got) < 5 {
		for _, r := range m.poll(group, 1) {
			if string(r.Value) != "x" {
				got = append(got, string(r.Value))
			}
		}
	}
	if slices.Sort(got); fmt.Sprint(got) != "[after 0 after 1 after 2 after 3 after 4]" {
		t.Errorf("DATA: the group got %q", got)
	}
	for name, n := range names {
		var a appended
		m.Until("the gateways take a record again", func() error {
			var code int
			if code, a = m.postAs(name, 0, "/v/g", "x\n"); code != 200 {
				return fmt.Errorf("%d, %+v", code, a)
			}
			return nil
		})
		if a.Partition != n || a.Repeated != 1 {
			t.Errorf("DATA: %s, whose records are in partition %d, sends a record again: %+v", name, n, a)
		}
	}
	m.Until("the table has all partitions", func() error {
		list, err := filepath.Glob(filepath.Join(mnt, "v/g/data/p=*/*.parquet"))
		parts := map[string]bool{}
		for _, name := range list {
			parts[filepath.Base(filepath.Dir(name))] = true
		}
		if err != nil || len(parts) != 5 {
			return fmt.Errorf("%v, %v", list, err)
		}
		return nil
	})
	m.Must("clone", "create", "v@two", "two", "--attach", "/two")
	if n := partitions(t, c, "two.g"); n != 2 {
		t.Errorf("the snapshot from before has %d partitions", n)
	}
}

// alter changes configurations of a topic, op by op, and returns the answer.
func alter(t *testing.T, c *kgo.Client, topic string, only bool, ops ...kmsg.IncrementalAlterConfigsRequestResourceConfig) error {
	t.Helper()
	q := kmsg.NewPtrIncrementalAlterConfigsRequest()
	qr := kmsg.NewIncrementalAlterConfigsRequestResource()
	qr.ResourceType, qr.ResourceName, qr.Configs = kmsg.ConfigResourceTypeTopic, topic, ops
	q.Resources, q.ValidateOnly = append(q.Resources, qr), only
	return kerr.ErrorForCode(ask[*kmsg.IncrementalAlterConfigsResponse](t, q, c).Resources[0].ErrorCode)
}

// op is an operation on a configuration.
func op(how kmsg.IncrementalAlterConfigOp, name, value string) kmsg.IncrementalAlterConfigsRequestResourceConfig {
	return kmsg.IncrementalAlterConfigsRequestResourceConfig{Name: name, Op: how, Value: &value}
}

// configs asks for the configurations of a topic, beside the default values.
func configs(t *testing.T, c *kgo.Client, topic string) string {
	t.Helper()
	q := kmsg.NewPtrDescribeConfigsRequest()
	qr := kmsg.NewDescribeConfigsRequestResource()
	qr.ResourceType, qr.ResourceName = kmsg.ConfigResourceTypeTopic, topic
	q.Resources = append(q.Resources, qr)
	var all []string
	for _, x := range ask[*kmsg.DescribeConfigsResponse](t, q, c).Resources[0].Configs {
		if x.Source == kmsg.ConfigSourceDynamicTopicConfig {
			all = append(all, x.Name+"="+*x.Value)
		}
	}
	return strings.Join(all, " ")
}

// testConfigs: the configurations of a topic are changed while a gateway leads the topic, and count
// from then on, also after a restart.
func (m *machine) testConfigs(t *testing.T) {
	const set, clear, add, subtract = kmsg.IncrementalAlterConfigOpSet, kmsg.IncrementalAlterConfigOpDelete, kmsg.IncrementalAlterConfigOpAppend, kmsg.IncrementalAlterConfigOpSubtract
	m.Must("stream", "create", "/v/k")
	c := m.client(kgo.ProducerBatchMaxBytes(4<<20), kgo.ProducerBatchCompression(kgo.NoCompression()))
	produce := func(size int) error {
		return c.ProduceSync(t.Context(), &kgo.Record{Topic: "v.k", Value: []byte(strings.Repeat("x", size))}).FirstErr()
	}
	if err := produce(2 << 20); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		op   kmsg.IncrementalAlterConfigsRequestResourceConfig
		want error
		then string
	}{
		{op(set, "max.message.bytes", "0"), kerr.InvalidConfig, ""},
		{op(set, "max.message.bytes", "8388609"), kerr.InvalidConfig, ""},
		{op(set, "retention.ms", "soon"), kerr.InvalidConfig, ""},
		{op(set, "unclean.leader.election.enable", "true"), kerr.InvalidConfig, ""},
		{op(set, "compression.type", "zstd"), kerr.InvalidConfig, ""},
		{op(set, "cleanup.policy", "forget"), kerr.InvalidConfig, ""},
		{op(subtract, "cleanup.policy", "delete"), kerr.InvalidConfig, ""},
		{op(add, "retention.ms", "1"), kerr.InvalidConfig, ""},
		{op(9, "cleanup.policy", "delete"), kerr.InvalidRequest, ""},
		{kmsg.IncrementalAlterConfigsRequestResourceConfig{Name: "retention.ms", Op: set}, kerr.InvalidRequest, ""},
		{op(set, "compression.type", "producer"), nil, ""},
		{op(set, "max.message.bytes", "1000000"), nil, "max.message.bytes=1000000"},
		{op(set, "retention.ms", "3600000"), nil, "max.message.bytes=1000000 retention.ms=3600000"},
		{op(add, "cleanup.policy", "compact"), nil, "cleanup.policy=compact,delete max.message.bytes=1000000 retention.ms=3600000"},
		{op(subtract, "cleanup.policy", "compact"), nil, "max.message.bytes=1000000 retention.ms=3600000"},
		{op(clear, "retention.ms", ""), nil, "max.message.bytes=1000000"},
		{op(set, "retention.bytes", "100000000"), nil, "max.message.bytes=1000000 retention.bytes=100000000"},
	} {
		before := configs(t, c, "v.k")
		if err := alter(t, c, "v.k", true, x.op); err != x.want || configs(t, c, "v.k") != before {
			t.Errorf("%s %d is only checked: %v, then %s", x.op.Name, x.op.Op, err, configs(t, c, "v.k"))
		}
		if err := alter(t, c, "v.k", false, x.op); err != x.want || configs(t, c, "v.k") != x.then {
			t.Errorf("%s %d: %v, then %s", x.op.Name, x.op.Op, err, configs(t, c, "v.k"))
		}
	}
	if err := alter(t, c, "v.none", false, op(set, "retention.ms", "1000")); err != kerr.UnknownTopicOrPartition {
		t.Errorf("no topic: %v", err)
	}
	if err := produce(2 << 20); !errors.Is(err, kerr.MessageTooLarge) {
		t.Errorf("a batch beyond max.message.bytes: %v", err)
	}
	if err := produce(900_000); err != nil {
		t.Errorf("a batch within max.message.bytes: %v", err)
	}
	if out := string(m.Must("stream", "set", "/v/k", "--segment-bytes", "1M", "--retention", "2h")); !strings.Contains(out, "2h0m0s") {
		t.Errorf("the stream is %s", out)
	}
	if got := configs(t, c, "v.k"); got != "max.message.bytes=1000000 retention.bytes=100000000 retention.ms=7200000 segment.bytes=1048576" {
		t.Errorf("after the command: %s", got)
	}

	q := kmsg.NewPtrAlterConfigsRequest()
	qr := kmsg.NewAlterConfigsRequestResource()
	qr.ResourceType, qr.ResourceName = kmsg.ConfigResourceTypeTopic, "v.k"
	one := kmsg.NewAlterConfigsRequestResourceConfig()
	one.Name, one.Value = "segment.ms", kmsg.StringPtr("60000")
	qr.Configs = append(qr.Configs, one)
	broker := kmsg.NewAlterConfigsRequestResource()
	broker.ResourceType, broker.ResourceName = kmsg.ConfigResourceTypeBroker, "1"
	q.Resources = append(q.Resources, qr, broker)
	p := ask[*kmsg.AlterConfigsResponse](t, q, c.SeedBrokers()[0])
	if err := kerr.ErrorForCode(p.Resources[0].ErrorCode); err != nil || configs(t, c, "v.k") != "segment.ms=60000" {
		t.Errorf("all configurations are replaced: %v, then %s", err, configs(t, c, "v.k"))
	}
	if err := kerr.ErrorForCode(p.Resources[1].ErrorCode); err != kerr.InvalidRequest {
		t.Errorf("a configuration of a gateway: %v", err)
	}
	if err := produce(2 << 20); err != nil {
		t.Errorf("max.message.bytes is the default again: %v", err)
	}
	// Retention counts for the log that is open.
	l := m.library(t)
	l.host(func(h *stream.Host) {
		m.Must("stream", "create", "/v/r", "--no-table")
		log := l.lead(h, "/v/r")
		a, err := log.Append(oldBatch(nil, []byte("old")))
		if err == nil {
			err = a.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		m.Must("stream", "set", "/v/r", "--retention", "1h")
		l.lead(h, "/v/r")
		if n, err := log.Retain(t.Context()); err != nil || n != 1 {
			t.Errorf("DATA: %d old files were removed, %v", n, err)
		}
	})
}

// truncate deletes the records of the first partition of a topic before an offset, and returns the
// offset at which the partition begins then.
func truncate(t *testing.T, c *kgo.Client, topic string, offset int64) (int64, error) {
	t.Helper()
	q := kmsg.NewPtrDeleteRecordsRequest()
	qt := kmsg.NewDeleteRecordsRequestTopic()
	qp := kmsg.NewDeleteRecordsRequestTopicPartition()
	qp.Offset = offset
	qt.Topic, qt.Partitions = topic, append(qt.Partitions, qp)
	q.Topics, q.TimeoutMillis = append(q.Topics, qt), 30000
	p := ask[*kmsg.DeleteRecordsResponse](t, q, c.SeedBrokers()[0]).Topics[0].Partitions[0]
	return p.LowWatermark, kerr.ErrorForCode(p.ErrorCode)
}

// testDeleteRecords: deleted records stay deleted when the gateway is killed and another one leads
// the partition.
func (m *machine) testDeleteRecords(t *testing.T, mnt string) {
	m.Must("stream", "create", "/v/d", "--no-table")
	c := m.client()
	for i := range 10 {
		if err := c.ProduceSync(t.Context(), &kgo.Record{Topic: "v.d", Value: []byte(strconv.Itoa(i))}).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(offset, start int64, want error) {
		t.Helper()
		if got, err := truncate(t, c, "v.d", offset); got != start || err != want {
			t.Errorf("DATA: after the deletion before %d the partition begins at %d, %v", offset, got, err)
		}
	}
	expect(11, -1, kerr.OffsetOutOfRange)
	expect(-2, -1, kerr.OffsetOutOfRange)
	expect(6, 6, nil)
	expect(3, 6, nil)
	if _, err := truncate(t, c, "v.none", 0); err != kerr.UnknownTopicOrPartition {
		t.Errorf("no topic: %v", err)
	}
	begins := func(what string, at int64) {
		t.Helper()
		if r := m.consume("v.d", 0, 1)[0]; r.Offset != at || string(r.Value) != strconv.Itoa(int(at)) {
			t.Errorf("DATA: %s: the first record is %q at offset %d", what, r.Value, r.Offset)
		}
		q := kmsg.NewPtrFetchRequest()
		q.MaxBytes = 1 << 20
		qt := kmsg.NewFetchRequestTopic()
		qp := kmsg.NewFetchRequestTopicPartition()
		qp.FetchOffset, qp.PartitionMaxBytes, qp.CurrentLeaderEpoch = at-1, 1<<20, -1
		qt.Topic, qt.Partitions = "v.d", append(qt.Partitions, qp)
		_, qt.TopicID, _ = described(t, c, "v.d", topicID{})
		q.Topics = append(q.Topics, qt)
		p := ask[*kmsg.FetchResponse](t, q, c.SeedBrokers()[0]).Topics[0].Partitions[0]
		if err := kerr.ErrorForCode(p.ErrorCode); err != kerr.OffsetOutOfRange || p.LogStartOffset != at {
			t.Errorf("%s: a deleted offset: %v, the log begins at %d", what, err, p.LogStartOffset)
		}
	}
	begins("after the deletion", 6)
	m.restart(mnt)
	c = m.client()
	begins("after a restart", 6)
	expect(7, 7, nil)
	m.restart(mnt)
	l := m.library(t) // another process leads the partition now
	l.host(func(h *stream.Host) {
		m.Until("the leadership of the killed gateway has ended", func() error {
			s, err := h.Stream(t.Context(), nil, "/v/d", 0)
			if err == nil {
				_, err = s.Partition(t.Context(), 0)
			}
			return err
		})
		log := l.lead(h, "/v/d")
		if start, high := log.Bounds(); start != 7 || high != 10 {
			t.Errorf("DATA: for the next leader the log is from %d to %d", start, high)
		}
		if start, err := log.DeleteBefore(t.Context(), 9); err != nil || start != 9 {
			t.Errorf("DATA: the next leader deletes up to %d, %v", start, err)
		}
	})
	c = m.client()
	begins("after another leader", 9)
	expect(-1, 10, nil)
	if r := (&kgo.Record{Topic: "v.d", Value: []byte("next")}); c.ProduceSync(t.Context(), r).FirstErr() != nil || r.Offset != 10 {
		t.Errorf("DATA: the record after all deleted ones is at offset %d", r.Offset)
	}
}

// testGroups: the offsets of a group without members are reset and deleted; a group with members
// stays as it is.
func (m *machine) testGroups(t *testing.T, mnt string) {
	m.Must("stream", "create", "/v/one", "--partitions", "2", "--no-table")
	m.Must("stream", "create", "/v/two", "--no-table")
	c := m.client()
	for i := range 10 {
		r := &kgo.Record{Topic: "v.one", Partition: int32(i % 2), Value: []byte("x"), Timestamp: time.UnixMilli(1_700_000_000_000 + int64(i))}
		if err := c.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	committed := func(what string, want ...int64) {
		t.Helper()
		got := []int64{m.committed(c, "work", "v.one", 0), m.committed(c, "work", "v.one", 1), m.committed(c, "work", "v.two", 0)}
		if !slices.Equal(got, want) {
			t.Errorf("DATA: %s: the group is at %v, not %v", what, got, want)
		}
	}
	set := func(topic string, partition int32, offset int64) {
		t.Helper()
		if err := commit(t.Context(), c, "work", topic, partition, offset); err != nil {
			t.Fatal(err)
		}
	}
	set("v.one", 0, 3)
	set("v.two", 0, 1)
	reset := func(to string) (string, error) {
		return m.command("", "stream", "reset-group", "/v/one", "work", "--to", to)
	}
	for _, x := range []struct {
		to   string
		want []int64
	}{
		{"latest", []int64{5, 5, 1}}, {"earliest", []int64{0, 0, 1}}, {"4", []int64{4, 4, 1}}, {"400", []int64{5, 5, 1}},
		{time.UnixMilli(1_700_000_000_005).UTC().Format(time.RFC3339Nano), []int64{3, 2, 1}}, {"2100-01-01T00:00:00Z", []int64{5, 5, 1}}, {"2", []int64{2, 2, 1}},
	} {
		if out, err := reset(x.to); err != nil {
			t.Errorf("reset to %s: %v: %s", x.to, err, out)
		}
		committed("reset to "+x.to, x.want...)
	}
	if out, err := reset("yesterday"); err == nil {
		t.Errorf("reset to yesterday: %s", out)
	}
	member := m.client(kgo.ConsumerGroup("work"), kgo.ConsumeTopics("v.one"), kgo.DisableAutoCommit())
	m.poll(member, 6)
	deleteGroup := func() error {
		t.Helper()
		q := kmsg.NewPtrDeleteGroupsRequest()
		q.Groups = []string{"work"}
		return kerr.ErrorForCode(ask[*kmsg.DeleteGroupsResponse](t, q, c).Groups[0].ErrorCode)
	}
	if err := deleteGroup(); err != kerr.NonEmptyGroup {
		t.Errorf("a group with a member is deleted: %v", err)
	}
	if out, err := reset("earliest"); err == nil {
		t.Errorf("a group with a member is reset: %s", out)
	}
	if out, err := m.command("", "stream", "delete-group", "/v/one", "work", "--yes"); err == nil {
		t.Errorf("the offsets of a group with a member are deleted: %s", out)
	}
	committed("with a member", 2, 2, 1)
	member.Close()
	q := kmsg.NewPtrOffsetDeleteRequest()
	q.Group = "work"
	qt := kmsg.NewOffsetDeleteRequestTopic()
	qt.Topic, qt.Partitions = "v.one", []kmsg.OffsetDeleteRequestTopicPartition{kmsg.NewOffsetDeleteRequestTopicPartition()}
	q.Topics = append(q.Topics, qt)
	m.Until("the group has no member", func() error {
		return kerr.ErrorForCode(ask[*kmsg.OffsetDeleteResponse](t, q, c).ErrorCode)
	})
	committed("without partition 0", -1, 2, 1)
	if out, err := m.command("", "stream", "delete-group", "/v/one", "work", "--yes"); err != nil {
		t.Errorf("the offsets of a group without members: %v: %s", err, out)
	}
	committed("without the first stream", -1, -1, 1)
	if out := m.Must("stream", "groups", "/v/one", "--kafka", m.kafka); strings.Contains(string(out), "work") {
		t.Errorf("the first stream has the groups %s", out)
	}
	set("v.one", 1, 4)
	if err := deleteGroup(); err != nil {
		t.Errorf("a group without members: %v", err)
	}
	committed("deleted", -1, -1, -1)
	m.restart(mnt)
	c = m.client()
	committed("deleted, after a restart", -1, -1, -1)
	if err := deleteGroup(); err != kerr.GroupIDNotFound {
		t.Errorf("a group that is not there: %v", err)
	}
	set("v.one", 0, 1)
	committed("made again", 1, -1, -1)
}
