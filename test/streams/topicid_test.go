package streams

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// topicID is the UUID of a topic.
type topicID = [16]byte

// described asks for a topic by name, or, with the name "", by id.
func described(t *testing.T, c *kgo.Client, name string, id topicID) (string, topicID, error) {
	t.Helper()
	q := kmsg.NewPtrMetadataRequest()
	qt := kmsg.NewMetadataRequestTopic()
	if qt.TopicID = id; name != "" {
		qt.Topic = &name
	}
	q.Topics = append(q.Topics, qt)
	p := ask[*kmsg.MetadataResponse](t, q, c.SeedBrokers()[0])
	if p.Version < 12 || len(p.Topics) != 1 {
		t.Fatalf("version %d of Metadata has %d topics", p.Version, len(p.Topics))
	}
	if p.Topics[0].Topic != nil {
		name = *p.Topics[0].Topic
	}
	return name, p.Topics[0].TopicID, kerr.ErrorForCode(p.Topics[0].ErrorCode)
}

// created creates a topic and returns the topic's id.
func created(t *testing.T, c *kgo.Client, name string, only bool) (topicID, error) {
	t.Helper()
	q := kmsg.NewPtrCreateTopicsRequest()
	qt := kmsg.NewCreateTopicsRequestTopic()
	qt.Topic, qt.NumPartitions, qt.ReplicationFactor = name, 1, 1
	q.Topics, q.ValidateOnly = append(q.Topics, qt), only
	p := ask[*kmsg.CreateTopicsResponse](t, q, c.SeedBrokers()[0])
	if p.Version < 7 {
		t.Fatalf("version %d of CreateTopics", p.Version)
	}
	return p.Topics[0].TopicID, kerr.ErrorForCode(p.Topics[0].ErrorCode)
}

// deleted deletes a topic by name and id, "" and 0 stand for none, and returns the topic's name.
func deleted(t *testing.T, c *kgo.Client, name string, id topicID) (string, error) {
	t.Helper()
	q := kmsg.NewPtrDeleteTopicsRequest()
	qt := kmsg.NewDeleteTopicsRequestTopic()
	if qt.TopicID = id; name != "" {
		qt.Topic = &name
	}
	q.Topics = append(q.Topics, qt)
	p := ask[*kmsg.DeleteTopicsResponse](t, q, c.SeedBrokers()[0])
	if p.Topics[0].Topic != nil {
		name = *p.Topics[0].Topic
	}
	return name, kerr.ErrorForCode(p.Topics[0].ErrorCode)
}

// TestTopicIDs: a topic keeps its id over renames, restarts and the promotion of a mirror, and no
// other topic has or gets the id.
func TestTopicIDs(t *testing.T) {
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
	c := m.client()
	seen := map[topicID]string{{}: "no topic"}
	fresh := func(what string, id topicID) {
		t.Helper()
		if old := seen[id]; old != "" {
			t.Errorf("DATA: %s has the id of %s", what, old)
		}
		seen[id] = what
	}
	expect := func(what, name string, id topicID) {
		t.Helper()
		if got, same, err := described(t, c, name, topicID{}); got != name || same != id || err != nil {
			t.Errorf("%s: %s has the id %x, not %x: %v", what, name, same, id, err)
		}
		if got, same, err := described(t, c, "", id); got != name || same != id || err != nil {
			t.Errorf("%s: the id %x is %q, not %q: %v", what, id, got, name, err)
		}
	}
	// fetches reads the record with an offset, by the topic's id.
	fetches := func(what string, id topicID, offset int64, want error) {
		t.Helper()
		q := kmsg.NewPtrFetchRequest()
		q.MaxBytes = 1 << 20
		qt := kmsg.NewFetchRequestTopic()
		qp := kmsg.NewFetchRequestTopicPartition()
		qp.FetchOffset, qp.PartitionMaxBytes, qp.CurrentLeaderEpoch = offset, 1<<20, -1
		qt.TopicID, qt.Partitions = id, append(qt.Partitions, qp)
		q.Topics = append(q.Topics, qt)
		p := ask[*kmsg.FetchResponse](t, q, c.SeedBrokers()[0])
		tp := p.Topics[0].Partitions[0]
		if err := kerr.ErrorForCode(tp.ErrorCode); err != want || p.Version != 13 || p.Topics[0].TopicID != id || (err == nil) != (len(tp.RecordBatches) > 0) {
			t.Errorf("%s: Fetch by the id %x has %d bytes: %v", what, id, len(tp.RecordBatches), err)
		}
	}
	gone := func(what string, id topicID) {
		t.Helper()
		if got, same, err := described(t, c, "", id); got != "" || same != id || err != kerr.UnknownTopicID {
			t.Errorf("%s: the id %x is %q, %v", what, id, got, err)
		}
		if _, err := deleted(t, c, "", id); err != kerr.UnknownTopicID {
			t.Errorf("%s: deletion by id: %v", what, err)
		}
		fetches(what, id, 0, kerr.UnknownTopicID)
	}

	if id, err := created(t, c, "v.a", true); err != nil || id != (topicID{}) {
		t.Errorf("a creation that is only checked has the id %x, %v", id, err)
	}
	a, err := created(t, c, "v.a", false)
	if err != nil {
		t.Fatal(err)
	}
	fresh("v.a", a)
	expect("after the creation", "v.a", a)
	if _, err := deleted(t, c, "v.a", a); err != kerr.InvalidRequest {
		t.Errorf("a deletion by name and id: %v", err)
	}
	other := a
	other[0] ^= 1
	gone("another cluster", other)
	other = a
	other[15] ^= 64
	gone("another directory", other)
	gone("no id", topicID{})

	if err := c.ProduceSync(t.Context(), &kgo.Record{Topic: "v.a", Value: []byte("x")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	fetches("the topic", a, 0, nil)
	m.Must("snapshot", "create", "v", "s")
	m.Must("clone", "create", "v@s", "copy", "--attach", "/copy")
	_, id, err := described(t, c, "copy.a", topicID{})
	if err != nil {
		t.Fatal(err)
	}
	fresh("a clone", id)
	expect("the clone", "copy.a", id)
	fetches("the clone", id, 0, nil)

	if err := os.Rename(filepath.Join(mnt, "v/a"), filepath.Join(mnt, "v/b")); err != nil {
		t.Fatal(err)
	}
	fetches("after a rename", a, 0, nil)
	expect("after a rename", "v.b", a)
	m.restart(mnt)
	c = m.client()
	expect("after a restart", "v.b", a)
	if id, err = created(t, c, "v.a", false); err != nil {
		t.Fatal(err)
	}
	fresh("a new topic at the old name", id)
	if name, err := deleted(t, c, "", id); name != "v.a" || err != nil {
		t.Errorf("deletion by id: %q, %v", name, err)
	}
	gone("after the deletion", id)
	expect("after the deletion of another topic", "v.b", a)

	m.Must("mirror", "create", "v", "far", "--attach", "/far")
	m.Must("mirror", "sync", "far", "--wait")
	if _, id, err = described(t, c, "far.b", topicID{}); err != nil {
		t.Fatal(err)
	}
	fresh("a mirror's target", id)
	if err := c.ProduceSync(t.Context(), &kgo.Record{Topic: "v.b", Value: []byte("x")}).FirstErr(); err != nil {
		t.Fatal(err)
	}
	m.Must("mirror", "sync", "far", "--wait")
	expect("after a round", "far.b", id)
	m.Until("the second record comes", func() error {
		fetches("after a round", id, 0, nil)
		if end := m.ends(c, "far.b", 1)[0]; end != 2 {
			return fmt.Errorf("the log ends at %d", end)
		}
		return nil
	})
	m.Must("mirror", "promote", "far", "--yes")
	expect("after the promotion", "far.b", id)

	m.Until("nobody uses the volume, and it is rolled back", func() error {
		_, err := m.Ctl("snapshot", "rollback", "v", "s", "--yes", "--force")
		return err
	})
	m.Until("the gateway serves the volume again", func() error {
		_, id, err := described(t, c, "v.a", topicID{})
		if err == nil && id != a {
			err = fmt.Errorf("the id is %x, not %x", id, a)
		}
		return err
	})
	expect("after a rollback", "v.a", a)
	if id, err = created(t, c, "v.b", false); err != nil {
		t.Fatal(err)
	}
	fresh("a topic that is created after a rollback", id)
}
