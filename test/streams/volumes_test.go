package streams

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/partition"
	"penstock.io/penstock/test/program"
)

// ends asks for the end offsets of the first partitions of a topic.
func (m *machine) ends(c *kgo.Client, topic string, partitions int32) (all []int64) {
	m.T.Helper()
	q := kmsg.NewPtrListOffsetsRequest()
	qt := kmsg.NewListOffsetsRequestTopic()
	qt.Topic = topic
	for n := range partitions {
		qp := kmsg.NewListOffsetsRequestTopicPartition()
		qp.Partition, qp.Timestamp = n, -1
		qt.Partitions = append(qt.Partitions, qp)
	}
	q.Topics = append(q.Topics, qt)
	p, err := q.RequestWith(m.T.Context(), c)
	if err != nil {
		m.T.Fatal(err)
	}
	all = make([]int64, partitions)
	for _, tp := range p.Topics[0].Partitions {
		if err := kerr.ErrorForCode(tp.ErrorCode); err != nil {
			m.T.Fatalf("the end of partition %d of %s: %v", tp.Partition, topic, err)
		}
		all[tp.Partition] = tp.Offset
	}
	return all
}

// committed asks for the offset that a group has committed in a partition; -1: none.
func (m *machine) committed(c *kgo.Client, group, topic string, partition int32) int64 {
	m.T.Helper()
	q := kmsg.NewPtrOffsetFetchRequest()
	q.Group = group
	qt := kmsg.NewOffsetFetchRequestTopic()
	qt.Topic, qt.Partitions = topic, []int32{partition}
	q.Topics = append(q.Topics, qt)
	p, err := q.RequestWith(m.T.Context(), c)
	if err == nil {
		err = kerr.ErrorForCode(p.ErrorCode)
	}
	if err == nil {
		err = kerr.ErrorForCode(p.Topics[0].Partitions[0].ErrorCode)
	}
	if err != nil {
		m.T.Fatalf("the offset of group %s in %s: %v", group, topic, err)
	}
	return p.Topics[0].Partitions[0].Offset
}

// commit commits an offset of a group without members.
func commit(ctx context.Context, c *kgo.Client, group, topic string, partition int32, offset int64) error {
	q := kmsg.NewPtrOffsetCommitRequest()
	q.Group = group
	qt := kmsg.NewOffsetCommitRequestTopic()
	qt.Topic = topic
	qp := kmsg.NewOffsetCommitRequestTopicPartition()
	qp.Partition, qp.Offset = partition, offset
	qt.Partitions = append(qt.Partitions, qp)
	q.Topics = append(q.Topics, qt)
	p, err := q.RequestWith(ctx, c)
	if err != nil {
		return err
	}
	return kerr.ErrorForCode(p.Topics[0].Partitions[0].ErrorCode)
}

// TestVolumes: snapshots, clones, mirrors, quotas and checks of a volume with streams.
func TestVolumes(t *testing.T) {
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
	m.Must("stream", "create", "/v/t", "--partitions", "2", "--lag", "1s", "--segment-bytes", "4096")
	t.Run("order", func(t *testing.T) { m.testOrder(t, mnt) })
	t.Run("clone", m.testClone)
	t.Run("mirror", m.testMirror)
	t.Run("quota", m.testQuota)
	t.Run("retention", m.testRetention)
	t.Run("compaction", m.testCompaction)
	t.Run("checks", m.testChecks)
}

// testOrder: a producer writes a number to partition 0, after the acknowledgement to partition 1,
// and then commits an offset. A snapshot with a later step has the earlier steps.
func (m *machine) testOrder(t *testing.T, mnt string) {
	c := m.client()
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := int64(0); ctx.Err() == nil; n++ {
			for p := range int32(2) {
				r := &kgo.Record{Topic: "v.t", Partition: p, Value: fmt.Append(nil, "number ", n)}
				if err := c.ProduceSync(ctx, r).FirstErr(); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
			if err := commit(ctx, c, "g", "v.t", 0, n+1); err != nil && ctx.Err() == nil {
				t.Error(err)
			}
		}
	})
	seen := m.client()
	for i := range 5 {
		before := m.ends(seen, "v.t", 2)[1]
		m.Until("records come", func() error {
			if n := m.ends(seen, "v.t", 2)[1]; n < before+20 {
				return fmt.Errorf("%d after %d", n, before)
			}
			return nil
		})
		m.Must("snapshot", "create", "v", fmt.Sprint("order", i))
	}
	m.Must("fsck", "--volume", "v") // while the stream is in use
	var counted map[string]float64
	m.Until("the metrics show the stream", func() (err error) {
		counted, err = program.Metrics(filepath.Join(m.Dir, "d", "admin.sock"))
		if _, ok := counted[`penstock_stream_group_lag_records{group="g",stream="/v/t"}`]; err == nil && !ok || counted["penstock_stream_partitions_led"] < 2 {
			err = fmt.Errorf("lag %v, partitions led %v", ok, counted["penstock_stream_partitions_led"])
		}
		return err
	})
	if n, count := counted["penstock_stream_appended_records_total"], counted["penstock_stream_append_seconds_count"]; n < 200 || count < 200 || counted["penstock_stream_appended_bytes_total"] < 70*n {
		t.Errorf("the metrics count %v records in %v batches of %v bytes", n, count, counted["penstock_stream_appended_bytes_total"])
	}
	stop()
	wg.Wait()
	for i := range 5 {
		name := fmt.Sprint("order", i)
		m.Must("clone", "create", "v@"+name, name, "--attach", "/"+name)
		ends, done := m.ends(seen, name+".t", 2), m.committed(seen, "g", name+".t", 0)
		if ends[0] < ends[1] || ends[0] > ends[1]+1 || ends[1] < done || done < int64(20*i) {
			t.Errorf("DATA: snapshot %s ends at the offsets %v, and %d is committed", name, ends, done)
		}
		rows, _, err := readTable(filepath.Join(mnt, "v/.snapshot", name, "t"))
		if err != nil || int64(len(rows)) > ends[0]+ends[1] {
			t.Errorf("DATA: snapshot %s ends at the offsets %v, and its table has %d rows, %v", name, ends, len(rows), err)
		}
	}
}

// testClone: a clone is a topic of its own that goes on at the end of its origin, also for
// producers and groups.
func (m *machine) testClone(t *testing.T) {
	m.Must("stream", "create", "/v/c", "--no-table")
	send := func(stream string, sequence int, lines string) (int, appended) {
		t.Helper()
		return m.postAs("p", sequence, stream, lines)
	}
	if code, a := send("/v/c", 0, "0\n1\n"); code != 200 {
		t.Fatal(code, a)
	}
	c := m.client(kgo.RetryTimeout(patience))
	idempotent := m.client()
	if err := idempotent.ProduceSync(t.Context(), &kgo.Record{Topic: "v.c", Value: []byte("2")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	if err := commit(t.Context(), c, "g", "v.c", 0, 2); err != nil {
		t.Fatal(err)
	}
	m.Must("snapshot", "create", "v", "c1")
	m.Must("clone", "create", "v@c1", "copy", "--attach", "/copy")
	if code, a := send("/copy/c", 0, "0\n1\n3\n"); code != 200 || fmt.Sprint(a.Appended) != "[{0 0 2} {2 3 1}]" {
		t.Errorf("DATA: the clone takes what it has: %d, %+v", code, a)
	}
	if code, a := send("/v/c", 2, "origin\n"); code != 200 || fmt.Sprint(a.Appended) != "[{0 3 1}]" {
		t.Errorf("DATA: the origin goes on: %d, %+v", code, a)
	}
	g := m.client(kgo.ConsumerGroup("g"), kgo.ConsumeTopics("copy.c"), kgo.DisableAutoCommit())
	for i, r := range m.poll(g, 2) {
		if want := strconv.Itoa(i + 2); string(r.Value) != want || r.Offset != int64(i+2) {
			t.Errorf("DATA: the group goes on in the clone with %q at %d, not %q", r.Value, r.Offset, want)
		}
	}
	if err := g.CommitUncommittedOffsets(t.Context()); err != nil {
		t.Error(err)
	}
	if n := m.committed(c, "g", "v.c", 0); n != 2 {
		t.Errorf("DATA: in the origin the group is at %d, not 2", n)
	}
}

// testMirror: a mirror's target can be consumed and not produced to; after its promotion the
// target takes records.
func (m *machine) testMirror(t *testing.T) {
	m.Must("mirror", "create", "v", "far", "--attach", "/far")
	m.Must("mirror", "sync", "far", "--wait")
	c := m.client()
	reader := m.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"far.c": {0: kgo.NewOffset().AtStart()}}))
	values := func(n int) (s string) {
		for _, r := range m.poll(reader, n) {
			s += fmt.Sprintf("%d:%s ", r.Offset, r.Value)
		}
		return s
	}
	if got := values(4); got != "0:0 1:1 2:2 3:origin " {
		t.Errorf("DATA: the target has %s", got)
	}
	if n := m.committed(c, "g", "far.c", 0); n != 2 {
		t.Errorf("DATA: in the target the group is at %d, not 2", n)
	}
	if err := c.ProduceSync(t.Context(), &kgo.Record{Topic: "far.c", Value: []byte("x")}).FirstErr(); !errors.Is(err, kerr.TopicAuthorizationFailed) {
		t.Errorf("DATA: a record for a mirror's target: %v", err)
	}
	if err := commit(t.Context(), c, "h", "far.c", 0, 3); !errors.Is(err, kerr.TopicAuthorizationFailed) {
		t.Errorf("DATA: a commit in a mirror's target: %v", err)
	}
	if code, a := m.postAs("p", 9, "/far/c", "x\n"); code != 403 {
		t.Errorf("DATA: an append to a mirror's target: %d, %+v", code, a)
	}
	// The next round's records reach the waiting consumers.
	if code, a := m.postAs("p", 3, "/v/c", "next\n"); code != 200 {
		t.Fatal(code, a)
	}
	m.Must("mirror", "sync", "far", "--wait")
	if got := values(1); got != "4:next " {
		t.Errorf("DATA: the next round brings %s", got)
	}
	m.Must("mirror", "promote", "far", "--yes")
	m.Until("the promoted stream takes records", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		return c.ProduceSync(ctx, &kgo.Record{Topic: "far.c", Value: []byte("promoted")}).FirstErr()
	})
	if got := values(1); got != "5:promoted " {
		t.Errorf("DATA: after the promotion there is %s", got)
	}
	if code, a := m.postAs("p", 3, "/far/c", "next\nlater\n"); code != 200 || fmt.Sprint(a.Appended) != "[{0 4 1} {1 6 1}]" {
		t.Errorf("DATA: a producer goes on after the promotion: %d, %+v", code, a)
	}
	if err := commit(t.Context(), c, "h", "far.c", 0, 3); err != nil {
		t.Error(err)
	}
}

// testQuota: a full quota is a retriable error, nothing is half written, and the stream goes on
// when there is room.
func (m *machine) testQuota(t *testing.T) {
	m.Must("volume", "create", "q", "--attach", "/q", "--quota", "1M")
	m.Must("stream", "create", "/q/t", "--no-table")
	value := make([]byte, 50_000)
	var codes []int16
	acked := 0
	c := m.client()
	for n := 0; len(codes) < 3; n++ {
		if n == 200 {
			t.Fatal("DATA: 10 MB go into a quota of 1 MB")
		}
		code, _ := m.produceOnce(c, "q.t", value)
		if code == 0 {
			acked++
			continue
		}
		codes = append(codes, code)
	}
	for _, code := range codes {
		if code != kerr.KafkaStorageError.Code {
			t.Errorf("a full quota has the error %v", kerr.ErrorForCode(code))
		}
	}
	if end := m.ends(c, "q.t", 1)[0]; end != int64(acked) {
		t.Errorf("DATA: %d records were taken, and the log ends at %d", acked, end)
	}
	m.Must("volume", "set", "q", "--quota", "100M")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r := &kgo.Record{Topic: "q.t", Value: []byte("room")}
	if err := c.ProduceSync(ctx, r).FirstErr(); err != nil || r.Offset != int64(acked) {
		t.Errorf("DATA: with room, a record is at %d (%v), after %d", r.Offset, err, acked)
	}
	if all := m.consume("q.t", 0, acked+1); len(all) != acked+1 || len(all[0].Value) != len(value) {
		t.Errorf("DATA: the log has %d records of %d", len(all), acked+1)
	}
}

// produceOnce sends a batch with one record, once.
func (m *machine) produceOnce(c *kgo.Client, topic string, value []byte) (code int16, offset int64) {
	m.T.Helper()
	q := kmsg.NewPtrProduceRequest()
	q.Version, q.Acks, q.TimeoutMillis = 9, -1, 30_000
	qt := kmsg.NewProduceRequestTopic()
	qt.Topic = topic
	qp := kmsg.NewProduceRequestTopicPartition()
	qp.Records = oldBatch(nil, value)
	qt.Partitions = append(qt.Partitions, qp)
	q.Topics = append(q.Topics, qt)
	p, err := q.RequestWith(m.T.Context(), c.SeedBrokers()[0])
	if err != nil {
		m.T.Fatal(err)
	}
	tp := p.Topics[0].Partitions[0]
	return tp.ErrorCode, tp.BaseOffset
}

// library is a client of a machine that serves streams itself.
type library struct {
	t    *testing.T
	root *penstock.Volume
	c    *penstock.Client
}

func (m *machine) library(t *testing.T) *library {
	t.Helper()
	c, err := penstock.Dial(t.Context(), penstock.Config{Meta: []string{m.Addr}, Name: "test", Streams: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	root, err := c.VolumeByID(t.Context(), meta.RootVolume)
	if err != nil {
		t.Fatal(err)
	}
	return &library{t, root, c}
}

// host works with a host, and closes the host.
func (l *library) host(work func(h *stream.Host)) {
	l.t.Helper()
	h := stream.NewHost(l.c, l.root, slog.New(slog.DiscardHandler))
	work(h)
	if err := h.Close(); err != nil {
		l.t.Error(err)
	}
}

// lead leads the first partition of a stream.
func (l *library) lead(h *stream.Host, path string) *partition.Log {
	l.t.Helper()
	s, err := h.Stream(l.t.Context(), nil, path, 0)
	if err != nil {
		l.t.Fatal(err)
	}
	log, err := s.Partition(l.t.Context(), 0)
	if err != nil {
		l.t.Fatal(err)
	}
	return log
}

// oldBatch makes a batch with a record from 1970.
func oldBatch(key, value []byte) []byte {
	b := log.Batch{BaseTime: 1000, MaxTime: 1000, Producer: log.NoProducer, Epoch: -1, Sequence: -1, Records: 1, LeaderEpoch: -1}
	return b.Encode(log.AppendRecord(nil, 0, 0, key, value, nil))
}

// testRetention: a gateway removes old records of an idle partition without a leader, and leads
// the partition no longer than the removal takes.
func (m *machine) testRetention(t *testing.T) {
	m.Must("stream", "create", "/v/old", "--retention", "1s", "--no-table")
	l := m.library(t)
	l.host(func(h *stream.Host) {
		a, err := l.lead(h, "/v/old").Append(oldBatch(nil, []byte("old")))
		if err == nil {
			err = a.Wait(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
	})
	m.Until("the records are old and removed", func() error {
		l.host(func(h *stream.Host) {
			if err := h.RetainIdle(t.Context()); err != nil {
				t.Fatal(err)
			}
			if h.Idle = 0; !h.CloseIdle() {
				t.Error("the host leads a partition that nobody uses")
			}
		})
		if _, size, err := stream.Usage(t.Context(), l.root.Tree(), "/v/old"); err != nil || size > 0 {
			return fmt.Errorf("%d bytes, %v", size, err)
		}
		return nil
	})
	l.host(func(h *stream.Host) {
		if start, high := l.lead(h, "/v/old").Bounds(); start != 1 || high != 1 {
			t.Errorf("DATA: the log is from %d to %d", start, high)
		}
	})
}

// testCompaction: clients read a log of which a compaction has left the last record of each key,
// and a snapshot from before has all records.
func (m *machine) testCompaction(t *testing.T) {
	const keys, records = 10, 200
	m.Must("stream", "create", "/v/keys", "--cleanup", "compact", "--segment-bytes", "4096", "--no-table")
	l := m.library(t)
	l.host(func(h *stream.Host) {
		led := l.lead(h, "/v/keys")
		var a *partition.Append
		for i := range records {
			var err error
			if a, err = led.Append(oldBatch(fmt.Append(nil, "key ", i%keys), fmt.Appendf(nil, "%050d", i))); err != nil {
				t.Fatal(err)
			}
			if i%20 == 0 || i == records-1 {
				if err := a.Wait(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		}
		m.Must("snapshot", "create", "v", "full")
		if n, err := led.Compact(t.Context()); err != nil || n < records/2 {
			t.Errorf("%d records were removed, %v", n, err)
		}
	})
	for _, x := range []struct {
		topic string
		whole bool
	}{{"v.keys", false}, {"whole.keys", true}} {
		if x.whole {
			m.Must("clone", "create", "v@full", "whole", "--attach", "/whole")
		}
		text := m.kcat("", "-C", "-t", x.topic, "-o", "beginning", "-e", "-f", "%o %k %s\n")
		last := map[string]int{}
		n := 0
		for line := range strings.Lines(text) {
			var offset, key, value int
			if _, err := fmt.Sscanf(line, "%d key %d %d", &offset, &key, &value); err != nil || value != offset || key != offset%keys {
				t.Fatalf("DATA: %s has %q, %v", x.topic, line, err)
			}
			last[fmt.Sprint(key)] = offset
			n++
		}
		if len(last) != keys || last["9"] != records-1 || last["0"] != records-keys || x.whole != (n == records) {
			t.Errorf("DATA: kcat read %d records of %s, the last of the keys at %v", n, x.topic, last)
		}
		if got := m.consume(x.topic, 0, n); len(got) != n || got[n-1].Offset != records-1 {
			t.Errorf("DATA: kgo read %d records of %s, kcat %d", len(got), x.topic, n)
		}
	}
}

// testChecks: fsck finds volumes with streams clean, and a snapshot has its digest.
func (m *machine) testChecks(*testing.T) {
	m.Must("fsck")
	m.Must("snapshot", "create", "v", "checked")
	m.Must("verify", "v@checked")
}
