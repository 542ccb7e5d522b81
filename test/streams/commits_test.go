package streams

import (
	"errors"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// TestCommitOnAFormerConnection: a commit that comes late, on a connection that the member has replaced,
// moves no committed offset back. Kafka's brokers make such a commit. On the present connection a member
// may commit an earlier offset.
func TestCommitOnAFormerConnection(t *testing.T) {
	m := newMachine(t)
	ctx := t.Context()
	m.Must("stream", "create", "/v/t", "--partitions", "2")
	member := m.client(kgo.ConsumerGroup("g"), kgo.ConsumeTopics("v.t"), kgo.DisableAutoCommit())
	var id string
	var generation int32
	m.Until("the member has joined", func() error {
		if id, generation = member.GroupMetadata(); generation < 0 {
			return errors.New("no generation yet")
		}
		return nil
	})
	former, present := m.client(), m.client()
	for _, c := range []*kgo.Client{former, present} { // connects
		if _, err := kmsg.NewPtrApiVersionsRequest().RequestWith(ctx, c.SeedBrokers()[0]); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	commit := func(c *kgo.Client, partition int32, offset int64) (code int16) {
		t.Helper()
		q := kmsg.NewPtrOffsetCommitRequest()
		q.Group, q.Generation, q.MemberID = "g", generation, id
		qt := kmsg.NewOffsetCommitRequestTopic()
		qt.Topic = "v.t"
		qp := kmsg.NewOffsetCommitRequestTopicPartition()
		qp.Partition, qp.Offset = partition, offset
		qt.Partitions = append(qt.Partitions, qp)
		q.Topics = append(q.Topics, qt)
		p, err := q.RequestWith(ctx, c.SeedBrokers()[0])
		if err != nil {
			t.Fatal(err)
		}
		return p.Topics[0].Partitions[0].ErrorCode
	}
	const again = 14 // COORDINATOR_LOAD_IN_PROGRESS
	for _, x := range []struct {
		what      string
		on        *kgo.Client
		partition int32
		offset    int64
		code      int16
		committed int64
	}{
		{"the first commit", former, 0, 5, 0, 5},
		{"a commit on the next connection", present, 0, 9, 0, 9},
		{"a late commit", former, 0, 7, again, 9},
		{"a late commit that moves nothing back", former, 0, 10, 0, 10},
		{"a late commit of another partition", former, 1, 3, 0, 3},
		{"the member goes back", present, 0, 2, 0, 2},
	} {
		if code := commit(x.on, x.partition, x.offset); code != x.code {
			t.Errorf("%s: code %d, not %d", x.what, code, x.code)
		}
		if got := m.committed(present, "g", "v.t", x.partition); got != x.committed {
			t.Errorf("DATA: %s: offset %d is committed, not %d", x.what, got, x.committed)
		}
	}
}
