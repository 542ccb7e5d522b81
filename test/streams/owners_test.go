package streams

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// commitOf makes a request that commits an offset in the first partitions of topics.
func commitOf(group string, offset int64, topics ...string) *kmsg.OffsetCommitRequest {
	q := kmsg.NewPtrOffsetCommitRequest()
	q.Group = group
	for _, topic := range topics {
		qt := kmsg.NewOffsetCommitRequestTopic()
		qt.Topic = topic
		qp := kmsg.NewOffsetCommitRequestTopicPartition()
		qp.Offset = offset
		qt.Partitions = append(qt.Partitions, qp)
		q.Topics = append(q.Topics, qt)
	}
	return q
}

// commits runs a request to commit, and compares the errors of its topics.
func (g *guarded) commits(what string, c *kgo.Client, q *kmsg.OffsetCommitRequest, want ...error) {
	g.t.Helper()
	p, err := q.RequestWith(g.t.Context(), c)
	if err != nil || len(p.Topics) != len(want) {
		g.t.Fatalf("%s: %v, %+v", what, err, p)
	}
	for i, topic := range p.Topics {
		if err := kerr.ErrorForCode(topic.Partitions[0].ErrorCode); !errors.Is(err, want[i]) {
			g.t.Errorf("DATA: %s: a commit in %s: %v, want %v", what, topic.Topic, err, want[i])
		}
	}
}

// fetched asks for the offsets of a group; no topics are all topics.
func (g *guarded) fetched(c *kgo.Client, group string, topics ...string) string {
	g.t.Helper()
	q := kmsg.NewPtrOffsetFetchRequest()
	q.Group = group
	for _, topic := range topics {
		qt := kmsg.NewOffsetFetchRequestTopic()
		qt.Topic, qt.Partitions = topic, []int32{0}
		q.Topics = append(q.Topics, qt)
	}
	p, err := q.RequestWith(g.t.Context(), c)
	if err != nil {
		g.t.Fatal(err)
	}
	text := ""
	if p.ErrorCode != 0 {
		text = fmt.Sprint("error ", p.ErrorCode)
	}
	for _, topic := range p.Topics {
		text += fmt.Sprintf("%s:%d", topic.Topic, topic.Partitions[0].Offset)
		if code := topic.Partitions[0].ErrorCode; code != 0 {
			text += fmt.Sprintf(" error %d", code)
		}
		text += " "
	}
	return text
}

// TestGroupsOfUsers: users share groups and streams. A user commits and reads offsets only in
// streams that the user may read. A group with members is of use to the members' user alone:
// another user with the id of a member can neither join, commit, nor end the member.
func TestGroupsOfUsers(t *testing.T) {
	g := newGuarded(t)
	g.Until("the mount serves", func() error { _, err := os.Stat(g.mnt + "/.snapshot"); return err })
	for _, s := range []struct {
		path  string
		owner int
		mode  os.FileMode
	}{{"/v/ann", 1000, 0o700}, {"/v/bob", 1001, 0o700}, {"/v/both", 0, 0o777}} {
		g.Must("stream", "create", s.path, "--no-table")
		if err := errors.Join(os.Chown(g.mnt+s.path, s.owner, s.owner), os.Chmod(g.mnt+s.path, s.mode)); err != nil {
			t.Fatal(err)
		}
	}
	ann, bob := g.as("ann", "secret"), g.as("bob", "secret")
	for _, topic := range []string{"v.ann", "v.both"} {
		if err := g.code(ann, "write", topic); err != nil {
			t.Fatal(err)
		}
	}
	denied := kerr.TopicAuthorizationFailed

	// A group without members, over streams of different rights.
	g.commits("ann", ann, commitOf("g", 7, "v.ann", "v.bob", "v.both"), nil, denied, nil)
	g.commits("bob", bob, commitOf("g", 3, "v.ann", "v.bob", "v.both"), denied, nil, nil)
	for _, x := range []struct {
		who        *kgo.Client
		topics     []string
		want, name string
	}{
		{ann, nil, "v.ann:7 v.both:3 ", "ann, all topics"},
		{bob, nil, "v.bob:3 v.both:3 ", "bob, all topics"},
		{ann, []string{"v.ann", "v.bob"}, "v.ann:7 v.bob:-1 error 29 ", "ann"},
		{bob, []string{"v.ann", "v.bob"}, "v.ann:-1 error 29 v.bob:3 ", "bob"},
	} {
		if got := g.fetched(x.who, "g", x.topics...); got != x.want {
			t.Errorf("DATA: %s: the group is at %s, want %s", x.name, got, x.want)
		}
	}

	// A group whose members are ann's.
	member := g.client(kgo.DialTLSConfig(g.trust("")), kgo.SASL(g.mechanism("ann", "secret")), kgo.ConsumerGroup("mine"), kgo.ConsumeTopics("v.ann", "v.both"),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit())
	g.poll(member, 2)
	id, generation := member.GroupMetadata()
	for name, code := range g.intrude(bob, "mine", id, generation) {
		if err := kerr.ErrorForCode(code); !errors.Is(err, kerr.GroupAuthorizationFailed) {
			t.Errorf("DATA: bob, %s of ann's group: %v", name, err)
		}
	}
	if got := g.fetched(bob, "mine", "v.both"); got != "error 30" {
		t.Errorf("DATA: bob asks for the offsets of ann's group: %s", got)
	}
	if p, err := kmsg.NewPtrListGroupsRequest().RequestWith(t.Context(), bob); err != nil || len(p.Groups) > 1 {
		t.Errorf("DATA: bob sees the groups %+v, %v", p, err)
	}
	if err := member.CommitUncommittedOffsets(t.Context()); err != nil {
		t.Error("ann's member can't commit:", err)
	}
	if again, same := member.GroupMetadata(); again != id || same != generation {
		t.Errorf("ann's member was disturbed: %s in generation %d is %s in generation %d", id, generation, again, same)
	}
	if got := g.fetched(ann, "mine"); got != "v.ann:1 v.both:1 " {
		t.Errorf("DATA: ann's group is at %s", got)
	}

	// When ann's member has left, bob may use the group, in streams that bob may read.
	member.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	next := g.client(kgo.DialTLSConfig(g.trust("")), kgo.SASL(g.mechanism("bob", "secret")), kgo.ConsumerGroup("mine"), kgo.ConsumeTopics("v.ann", "v.both"),
		kgo.DisableAutoCommit(), kgo.UnknownTopicRetries(0))
	if err := g.code(bob, "write", "v.both"); err != nil {
		t.Fatal(err)
	}
	refused, got := false, 0
	for !refused || got == 0 {
		f := next.PollFetches(ctx)
		if ctx.Err() != nil {
			t.Fatalf("bob's member has %d records of v.both, and an error for v.ann: %v", got, refused)
		}
		f.EachError(func(topic string, _ int32, err error) {
			refused = refused || topic == "v.ann" && errors.Is(err, denied)
		})
		f.EachRecord(func(r *kgo.Record) {
			if got++; r.Topic != "v.both" || r.Offset != 1 {
				t.Errorf("DATA: bob's member gets offset %d of %s", r.Offset, r.Topic)
			}
		})
	}

	// A right that ends counts at once.
	if err := os.Chmod(g.mnt+"/v/ann", 0o300); err != nil {
		t.Fatal(err)
	}
	g.commits("ann, without the right to read", ann, commitOf("g", 8, "v.ann", "v.both"), denied, nil)
	if err := os.Chmod(g.mnt+"/v/ann", 0o700); err != nil {
		t.Fatal(err)
	}
	if got := g.fetched(ann, "g"); got != "v.ann:7 v.both:8 " {
		t.Errorf("DATA: the group is at %s", got)
	}
}

// intrude sends each request about a group with members, by a user who knows the id of a member. It
// returns the error codes.
func (g *guarded) intrude(c *kgo.Client, group, member string, generation int32) map[string]int16 {
	g.t.Helper()
	codes := map[string]int16{}
	send := func(name string, q kmsg.Request, code func(kmsg.Response) int16) {
		p, err := c.Request(g.t.Context(), q)
		if err != nil {
			g.t.Errorf("%s: %v", name, err)
			return
		}
		codes[name] = code(p)
	}
	join := kmsg.NewPtrJoinGroupRequest()
	join.Group, join.SessionTimeoutMillis, join.RebalanceTimeoutMillis, join.ProtocolType = group, 10_000, 10_000, "consumer"
	protocol := kmsg.NewJoinGroupRequestProtocol()
	protocol.Name = "cooperative-sticky"
	join.Protocols = append(join.Protocols, protocol)
	asMember := *join
	asMember.MemberID = member
	for name, q := range map[string]*kmsg.JoinGroupRequest{"JoinGroup": join, "JoinGroup as the member": &asMember} {
		send(name, q, func(p kmsg.Response) int16 { return p.(*kmsg.JoinGroupResponse).ErrorCode })
	}
	beat := kmsg.NewPtrHeartbeatRequest()
	beat.Group, beat.MemberID, beat.Generation = group, member, generation
	send("Heartbeat", beat, func(p kmsg.Response) int16 { return p.(*kmsg.HeartbeatResponse).ErrorCode })
	sync := kmsg.NewPtrSyncGroupRequest()
	sync.Group, sync.MemberID, sync.Generation = group, member, generation
	send("SyncGroup", sync, func(p kmsg.Response) int16 { return p.(*kmsg.SyncGroupResponse).ErrorCode })
	leave := kmsg.NewPtrLeaveGroupRequest()
	m := kmsg.NewLeaveGroupRequestMember()
	m.MemberID = member
	leave.Group, leave.MemberID, leave.Members = group, member, append(leave.Members, m)
	send("LeaveGroup", leave, func(p kmsg.Response) int16 { return p.(*kmsg.LeaveGroupResponse).ErrorCode })
	for name, q := range map[string]*kmsg.OffsetCommitRequest{"OffsetCommit": commitOf(group, 9, "v.both"), "OffsetCommit as the member": commitOf(group, 9, "v.both")} {
		if name != "OffsetCommit" {
			q.MemberID, q.Generation = member, generation
		}
		send(name, q, func(p kmsg.Response) int16 { return p.(*kmsg.OffsetCommitResponse).Topics[0].Partitions[0].ErrorCode })
	}
	describe := kmsg.NewPtrDescribeGroupsRequest()
	describe.Groups = []string{group}
	send("DescribeGroups", describe, func(p kmsg.Response) int16 {
		d := p.(*kmsg.DescribeGroupsResponse).Groups[0]
		if len(d.Members) > 0 {
			return 0
		}
		return d.ErrorCode
	})
	return codes
}
