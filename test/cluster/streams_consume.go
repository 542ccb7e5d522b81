package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/test/history"
)

// groupName is the name of the consumer group.
const groupName = "readers"

// consume starts the consumers, which end with ctx, and returns the names of the consumers without a group.
func (s *StreamSoak) consume(ctx context.Context, wg *sync.WaitGroup) (names []string) {
	for i := range 2 {
		name := fmt.Sprint("kgo-consumer-", i+1)
		names = append(names, name)
		wg.Go(func() { s.consumeKgo(ctx, name, i) })
	}
	name := "kcat-consumer"
	names = append(names, name)
	for _, p := range s.parts {
		s.history.Assign(name, p, 0)
		wg.Go(func() { s.consumeKcat(ctx, name, p) })
	}
	for i := range 2 {
		wg.Go(func() {
			s.members(ctx, fmt.Sprint("member-", i+1), i, rand.New(rand.NewPCG(s.Seed, 7000+uint64(i))))
		})
	}
	return names
}

// consumed tells the history of the records of a poll.
func (s *StreamSoak) consumed(name string, f kgo.Fetches) {
	f.EachError(func(topic string, n int32, err error) {
		var loss *kgo.ErrDataLoss
		if errors.As(err, &loss) {
			s.fail(fmt.Errorf("DATA: consumer %s of %s/%d: %w", name, topic, n, err))
		}
	})
	f.EachRecord(func(k *kgo.Record) {
		r, err := history.ParseRecord(string(k.Value))
		if err != nil {
			s.fail(fmt.Errorf("consumer %s, offset %d of %s/%d: %w", name, k.Offset, k.Topic, k.Partition, err))
			return
		}
		s.history.Read(name, history.Partition{Topic: k.Topic, Number: k.Partition}, k.Offset, r)
	})
}

// consumeKgo reads all partitions from the beginning.
func (s *StreamSoak) consumeKgo(ctx context.Context, name string, turn int) {
	from := map[string]map[int32]kgo.Offset{}
	for _, p := range s.parts {
		if from[p.Topic] == nil {
			from[p.Topic] = map[int32]kgo.Offset{}
		}
		from[p.Topic][p.Number] = kgo.NewOffset().At(0)
		s.history.Assign(name, p, 0)
	}
	c := s.client(turn, kgo.ConsumePartitions(from), kgo.FetchMaxWait(time.Second))
	defer c.Close()
	for ctx.Err() == nil {
		s.consumed(name, c.PollFetches(ctx))
	}
}

// consumeKcat reads a partition by one kcat after the other: each goes on at the end of the
// previous kcat.
func (s *StreamSoak) consumeKcat(ctx context.Context, name string, p history.Partition) {
	for turn := 0; ctx.Err() == nil; turn++ {
		out, in := io.Pipe()
		go func() {
			err := s.Cluster.users.Pipe(ctx, nil, in, "kcat", "-C", "-q", "-u", "-b", strings.Join(s.Cluster.gatewayAddrs(kafkaPort, turn), ","),
				"-t", p.Topic, "-p", fmt.Sprint(p.Number), "-o", fmt.Sprint(s.history.Position(name, p)), "-f", "%o %s\n", "-X", "socket.timeout.ms=10000", "-X", "topic.metadata.refresh.fast.interval.ms=100")
			in.CloseWithError(err)
		}()
		lines := bufio.NewScanner(out)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			var offset int64
			at, value, _ := strings.Cut(lines.Text(), " ")
			_, err := fmt.Sscan(at, &offset)
			r, perr := history.ParseRecord(value)
			if err = errors.Join(err, perr); err != nil && ctx.Err() == nil {
				s.fail(fmt.Errorf("consumer %s of %v: %q: %w", name, p, lines.Text(), err))
			}
			if err != nil {
				break
			}
			s.history.Read(name, p, offset, r)
		}
		out.Close()
		if ctx.Err() == nil {
			s.told.Add(1)
			sleep(ctx, 200*time.Millisecond)
		}
	}
}

// members lets one member of the group after the other consume for some seconds.
func (s *StreamSoak) members(ctx context.Context, name string, turn int, r *rand.Rand) {
	for life := 1; ctx.Err() == nil; life++ {
		one, cancel := context.WithTimeout(ctx, time.Duration(10+r.IntN(20))*time.Second)
		s.member(one, fmt.Sprint(name, ".", life), turn+life)
		cancel()
	}
}

// member consumes in the group, and commits after each poll.
func (s *StreamSoak) member(ctx context.Context, name string, turn int) {
	var topics []string
	for _, v := range soakVolumes {
		topics = append(topics, v.name+"."+streamName)
	}
	each := func(do func(history.Partition)) func(context.Context, *kgo.Client, map[string][]int32) {
		return func(_ context.Context, _ *kgo.Client, parts map[string][]int32) {
			for topic, numbers := range parts {
				for _, n := range numbers {
					do(history.Partition{Topic: topic, Number: n})
				}
			}
		}
	}
	left := each(func(p history.Partition) { s.history.Leave(name, p) })
	c := s.client(turn, kgo.ConsumerGroup(groupName), kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(), kgo.FetchMaxWait(time.Second), kgo.HeartbeatInterval(500*time.Millisecond), kgo.SessionTimeout(10*time.Second), kgo.RebalanceTimeout(15*time.Second),
		kgo.OnPartitionsAssigned(each(func(p history.Partition) { s.history.Join(groupName, name, p) })), kgo.OnPartitionsRevoked(left), kgo.OnPartitionsLost(left))
	defer c.CloseAllowingRebalance()
	for ctx.Err() == nil {
		// An empty poll ends after a second, so that a failed commit is tried again.
		one, cancel := context.WithTimeout(ctx, time.Second)
		s.consumed(name, c.PollRecords(one, 500))
		cancel()
		s.commit(ctx, c)
		c.AllowRebalance()
	}
}

// commit commits the records of a member's polls.
func (s *StreamSoak) commit(ctx context.Context, c *kgo.Client) {
	offsets := c.UncommittedOffsets()
	if len(offsets) == 0 {
		return
	}
	each := func(do func(group string, p history.Partition, offset int64)) {
		for topic, parts := range offsets {
			for n, at := range parts {
				do(groupName, history.Partition{Topic: topic, Number: n}, at.Offset)
			}
		}
	}
	each(s.history.Commit)
	one, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var failed error
	c.CommitOffsetsSync(one, offsets, func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, p *kmsg.OffsetCommitResponse, err error) {
		failed = err
		if p == nil {
			return
		}
		for _, t := range p.Topics {
			for _, tp := range t.Partitions {
				failed = errors.Join(failed, kerr.ErrorForCode(tp.ErrorCode))
			}
		}
	})
	if failed == nil {
		each(s.history.Committed)
	} else if ctx.Err() == nil {
		s.told.Add(1)
		s.Logf("%s a commit of group %s: %v", time.Now().Format("15:04:05.000"), groupName, failed)
	}
}
