package streams

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// TestAdministration: streams are changed over the protocol and by commands while they are used.
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
	gateway, second := m.gateway("second")
	defer func() {
		gateway.Kill()
		<-gateway.Done()
	}()
	other := m.client(kgo.SeedBrokers(second))
	for _, client := range []*kgo.Client{c, other} { // the first gateway leads, and takes appends over HTTP
		if n := partitions(t, client, "v.g"); n != 2 {
			t.Fatalf("a gateway sees %d partitions", n)
		}
	}
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
		if code, a := m.postAs(name, 0, "/v/g", "x\n"); code != 200 || a.Partition != n || a.Repeated != 1 {
			t.Errorf("DATA: %s, whose records are in partition %d, sends a record again: %d, %+v", name, n, code, a)
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
