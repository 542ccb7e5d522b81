package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/test/history"
	"penstock.io/penstock/test/slow"
)

// StreamSoak is a soak whose load is producers and consumers of streams: franz-go, librdkafka
// (kcat), HTTP and gRPC. history.Stream checks the answers to all of the clients.
type StreamSoak struct {
	*Soak
	// Partitions of each stream; 0: 2.
	Partitions int

	history   *history.Stream
	parts     []history.Partition
	producers sync.WaitGroup
	snapshots atomic.Int64
	listings  atomic.Int64
}

// streamName is the name of the stream in each volume of the soak.
const streamName = "clicks"

// reachWithin is the promise for the consumers: after the faults, all reach the end.
const reachWithin = 30 * time.Second

// streamPatience bounds waits without a promise in seconds.
const streamPatience = 2 * time.Minute

// Run runs the soak.
func (s *StreamSoak) Run(ctx context.Context) (err error) {
	defer s.silence()()
	if s.Every == 0 {
		s.Every = 5 * time.Second
	}
	if s.Partitions == 0 {
		s.Partitions = 2
	}
	s.history = history.NewStream()
	s.began, s.stalls = time.Now(), newStalls()
	if err := s.prepare(ctx); err != nil {
		return fmt.Errorf("preparing: %w", err)
	}
	s.nemesis = newNemesis(s.Soak)
	all, cancel := context.WithCancel(ctx)
	defer cancel()
	s.cancel = cancel
	var wg, copies sync.WaitGroup
	defer func() {
		cancel()
		for _, of := range []*sync.WaitGroup{&wg, &copies, &s.producers} {
			if !waitFor(of, hangs) {
				err = errors.Join(err, fmt.Errorf("the load hangs %v after its end", hangs))
			}
		}
	}()
	wg.Go(func() { s.watch(all) })
	wg.Go(func() { s.judgeHistory(all) })
	producing, stop := context.WithCancel(all)
	defer stop()
	s.produce(producing, all)
	consumers := s.consume(all, &wg)
	wg.Go(func() { s.ask(all) })
	wg.Go(func() { s.list(producing) })
	copies.Go(func() { s.copy(producing, rand.New(rand.NewPCG(s.Seed, 5000))) })
	faults, end := context.WithTimeout(all, s.For)
	defer end()
	err = s.nemesis.run(faults)
	if s.verdict() == nil { // otherwise the failed state is kept for inspection
		err = errors.Join(err, s.nemesis.healAll(ctx))
	}
	s.Logf("healed after %v", time.Since(s.began).Round(time.Second))
	if err := errors.Join(err, s.verdict()); err != nil {
		return err
	}
	sleep(all, time.Second)
	stop()
	copies.Wait()
	if !waitFor(&s.producers, streamPatience) {
		return fmt.Errorf("a producer hangs %v after the faults", streamPatience)
	}
	if err := s.verdict(); err != nil {
		return err
	}
	return s.end(all, consumers)
}

// hangs is how long a part of the load may take to end.
const hangs = time.Minute

// silence lets Logf do nothing after the call of the returned function: goroutines that still
// hang then in a broken cluster must not write into the log of an ended test.
func (s *StreamSoak) silence() (end func()) {
	var mu sync.Mutex
	over, logf := false, s.Logf
	s.Logf = func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		if !over {
			logf(format, args...)
		}
	}
	return func() {
		mu.Lock()
		defer mu.Unlock()
		over = true
	}
}

// waitFor waits for a group, or until the time is over.
func waitFor(wg *sync.WaitGroup, within time.Duration) bool {
	done := make(chan struct{})
	go func() { wg.Wait(); close(done) }()
	select {
	case <-done:
		return true
	case <-time.After(within):
		return false
	}
}

// prepare makes volumes and streams.
func (s *StreamSoak) prepare(ctx context.Context) error {
	for _, v := range soakVolumes {
		if _, err := s.Cluster.Penstock(ctx, "volume", "create", v.name, "--force", "--attach", "/"+v.name, "--replicas", fmt.Sprint(min(v.replicas, len(s.Cluster.Chunks)))); err != nil {
			return err
		}
		// Small segments, so that leaders begin many; lag, so that the table is published
		// meanwhile.
		if _, err := s.Cluster.Penstock(ctx, "stream", "create", "/"+v.name+"/"+streamName, "--partitions", fmt.Sprint(s.Partitions), "--format", "utf8", "--segment-bytes", "100000", "--lag", "5s"); err != nil {
			return err
		}
		for n := range s.Partitions {
			s.parts = append(s.parts, history.Partition{Topic: v.name + "." + streamName, Number: int32(n)})
		}
	}
	return nil
}

// judgeHistory ends the soak at the first violation.
func (s *StreamSoak) judgeHistory(ctx context.Context) {
	for ctx.Err() == nil {
		if err := s.history.Err(); err != nil {
			s.fail(err)
			return
		}
		sleep(ctx, 200*time.Millisecond)
	}
}

// client makes a client of franz-go on the node of the users; turn chooses the gateway that the
// client asks first.
func (s *StreamSoak) client(turn int, opts ...kgo.Opt) *kgo.Client {
	c, err := kgo.NewClient(append([]kgo.Opt{
		kgo.SeedBrokers(s.Cluster.gatewayAddrs(kafkaPort, turn)...), kgo.Dialer(s.Cluster.users.Dial),
		kgo.RecordPartitioner(kgo.ManualPartitioner()), kgo.RequestTimeoutOverhead(5 * time.Second), kgo.MetadataMinAge(100 * time.Millisecond),
		kgo.RetryBackoffFn(func(int) time.Duration { return time.Duration(50+rand.IntN(150)) * time.Millisecond }),
	}, opts...)...)
	if err != nil {
		panic(fmt.Sprintf("options of a Kafka client: %v", err)) // a mistake in this file
	}
	return c
}

// ends asks for the ends of partitions, and tells the history of the answers.
func (s *StreamSoak) ends(ctx context.Context, c kmsg.Requestor, parts []history.Partition) (map[history.Partition]int64, error) {
	ends := map[history.Partition]int64{}
	for _, p := range parts {
		least := s.history.AskEnd(p)
		start, err := listOffset(ctx, c, p, -2)
		if err != nil {
			return nil, err
		}
		end, err := listOffset(ctx, c, p, -1)
		if err != nil {
			return nil, err
		}
		s.history.SawEnd(p, least, start, end)
		ends[p] = end
	}
	return ends, nil
}

// listOffset asks for an offset by time, or by the numbers for the ends.
func listOffset(ctx context.Context, c kmsg.Requestor, p history.Partition, at int64) (int64, error) {
	q := kmsg.NewPtrListOffsetsRequest()
	t := kmsg.NewListOffsetsRequestTopic()
	t.Topic = p.Topic
	n := kmsg.NewListOffsetsRequestTopicPartition()
	n.Partition, n.Timestamp = p.Number, at
	t.Partitions = append(t.Partitions, n)
	q.Topics = append(q.Topics, t)
	r, err := q.RequestWith(ctx, c)
	if err != nil {
		return 0, err
	}
	if len(r.Topics) != 1 || len(r.Topics[0].Partitions) != 1 || r.Topics[0].Partitions[0].ErrorCode != 0 {
		return 0, fmt.Errorf("ListOffsets of %v: %+v", p, r.Topics)
	}
	return r.Topics[0].Partitions[0].Offset, nil
}

// ask asks for the ends of the logs and the committed offsets of the group, again and again: the
// leaders, and each gateway by itself, which may have been the leader before.
func (s *StreamSoak) ask(ctx context.Context) {
	var asked []kmsg.Requestor
	for i := range s.Cluster.Gateways {
		c := s.client(i)
		defer c.Close()
		asked = append(asked, c, c.SeedBrokers()[0])
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, of := range asked {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				p := s.parts[i%len(s.parts)]
				one, cancel := context.WithTimeout(ctx, 10*time.Second)
				_, err := s.ends(one, of, []history.Partition{p})
				if err == nil {
					err = s.askCommitted(one, of, p)
				}
				cancel()
				if err != nil && ctx.Err() == nil {
					s.told.Add(1)
				}
				sleep(ctx, 200*time.Millisecond)
			}
		})
	}
}

func (s *StreamSoak) askCommitted(ctx context.Context, c kmsg.Requestor, p history.Partition) error {
	least := s.history.AskCommitted(groupName, p)
	q := kmsg.NewPtrOffsetFetchRequest()
	q.Group = groupName
	t := kmsg.NewOffsetFetchRequestTopic()
	t.Topic, t.Partitions = p.Topic, []int32{p.Number}
	q.Topics = append(q.Topics, t)
	r, err := q.RequestWith(ctx, c)
	if err != nil {
		return err
	}
	topics := r.Topics
	if r.ErrorCode != 0 || len(topics) != 1 || len(topics[0].Partitions) != 1 || topics[0].Partitions[0].ErrorCode != 0 {
		return fmt.Errorf("OffsetFetch of %v: error %d, %+v", p, r.ErrorCode, topics)
	}
	s.history.SawCommitted(groupName, p, least, topics[0].Partitions[0].Offset)
	return nil
}

// list walks over the volumes through a mount, as ls -lR does.
func (s *StreamSoak) list(ctx context.Context) {
	for ctx.Err() == nil {
		// Errors are right while parts of the cluster are away.
		_ = filepath.WalkDir(s.Cluster.Mounts[0].Path, func(_ string, e fs.DirEntry, err error) error {
			if err == nil {
				_, _ = e.Info()
			}
			return ctx.Err()
		})
		s.listings.Add(1)
		sleep(ctx, 100*time.Millisecond)
	}
}

// copy takes snapshots and makes clones, compares the copies with the history, and removes the
// copies.
func (s *StreamSoak) copy(ctx context.Context, r *rand.Rand) {
	for i := 1; ctx.Err() == nil; i++ {
		sleep(ctx, time.Duration(r.IntN(4000))*time.Millisecond)
		if ctx.Err() != nil {
			return
		}
		v := some(r, soakVolumes).name
		one, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		err := s.copyOnce(one, v, fmt.Sprint("s", i), i%2 == 0)
		cancel()
		if err != nil {
			s.told.Add(1)
			s.Logf("%s snapshot s%d of %s: %v", time.Now().Format("15:04:05.000"), i, v, err)
		}
	}
}

func (s *StreamSoak) copyOnce(ctx context.Context, volume, name string, clone bool) error {
	c := s.Cluster
	least := map[history.Partition]int64{}
	for _, p := range s.parts {
		least[p] = s.history.AskEnd(p)
	}
	at := filepath.Join(c.Mounts[0].Path, volume, ".snapshot", name)
	undo := []string{"snapshot", "delete", volume, name, "--yes"}
	if clone {
		at = filepath.Join(c.Mounts[0].Path, volume+"-"+name)
		undo = []string{"volume", "delete", volume + "-" + name, "--yes", "--now"}
		if _, err := c.Penstock(ctx, "clone", "create", volume, volume+"-"+name, "--attach", "/"+volume+"-"+name); err != nil {
			return err
		}
	} else if _, err := c.Penstock(ctx, "snapshot", "create", volume, name); err != nil {
		return err
	}
	var errs []error
	for _, p := range s.parts {
		if strings.TrimSuffix(p.Topic, "."+streamName) != volume {
			continue
		}
		era := c.Mounts[0].era.Load()
		records, err := readLog(filepath.Join(at, streamName, "log", fmt.Sprint(p.Number)))
		if err == nil && (era%2 == 0 || c.Mounts[0].era.Load() != era) {
			err = errors.New("the mount was away")
		}
		if err == nil {
			s.history.Snapshot(volume+"@"+name, p, least[p], records)
			s.snapshots.Add(1)
		}
		errs = append(errs, err)
	}
	if clone {
		if _, err := c.Penstock(ctx, "volume", "detach", volume+"-"+name); err != nil {
			errs = append(errs, err)
		}
	}
	_, err := c.Penstock(ctx, undo...)
	return errors.Join(append(errs, err)...)
}

// readLog reads the records of a partition's files.
func readLog(dir string) (records []history.Record, err error) {
	files, err := os.ReadDir(dir) // in the order of the names
	if err != nil {
		return nil, err
	}
	for _, e := range files {
		if filepath.Ext(e.Name()) != ".seg" {
			continue
		}
		if records, err = readSegment(filepath.Join(dir, e.Name()), records); err != nil {
			return nil, fmt.Errorf("%s: %w", e.Name(), err)
		}
	}
	return records, nil
}

// readSegment adds the records of a file, up to a batch that is not whole: a snapshot may have
// been taken in the middle of a write.
func readSegment(name string, records []history.Record) ([]history.Record, error) {
	p, err := os.ReadFile(name)
	if err != nil {
		return records, err
	}
	for len(p) > 0 {
		b, err := log.Parse(p, len(p))
		if err == nil {
			err = b.Verify(p)
		}
		if err != nil || b.Base != int64(len(records)) {
			break
		}
		if b.Compression() != log.Plain {
			return records, fmt.Errorf("the batch at offset %d is compressed", b.Base)
		}
		if err := b.Each(p[log.HeaderSize:b.Size], func(x log.Record) error {
			r, err := history.ParseRecord(string(x.Value))
			records = append(records, r)
			return err
		}); err != nil {
			return records, err
		}
		p = p[b.Size:]
	}
	return records, nil
}

// end checks the promises after the faults.
func (s *StreamSoak) end(ctx context.Context, consumers []string) error {
	c := s.client(0)
	defer c.Close()
	var ends map[history.Partition]int64
	if err := eventually(ctx, streamPatience, func(ctx context.Context) (err error) {
		ends, err = s.ends(ctx, c, s.parts)
		return err
	}); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	meter := slow.Start()
	began := time.Now()
	var err error
	for {
		if err = s.reached(ends, consumers); err == nil || ctx.Err() != nil {
			break
		}
		if time.Since(began) > slow.Bound(reachWithin, meter.Factor()) {
			break
		}
		sleep(ctx, 100*time.Millisecond)
	}
	meter.Close()
	if err != nil {
		q := kmsg.NewPtrDescribeGroupsRequest()
		q.Groups = []string{groupName}
		r, derr := q.RequestWith(ctx, c)
		s.Logf("the group: %+v, %v", r, derr)
		return errors.Join(s.verdict(), fmt.Errorf("at the end, after %v: %w", time.Since(began).Round(time.Second), err))
	}
	s.Logf("all consumers reached the end after %v", time.Since(began).Round(time.Millisecond))
	if err := s.history.Final(ends, consumers); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	for _, p := range s.parts {
		dir := filepath.Join(s.Cluster.Mounts[0].Path, strings.TrimSuffix(p.Topic, "."+streamName), streamName, "log", fmt.Sprint(p.Number))
		if err := eventually(ctx, streamPatience, func(context.Context) error {
			records, err := readLog(dir)
			if err == nil {
				s.history.Snapshot("the mount", p, ends[p], records)
			}
			return err
		}); err != nil {
			return fmt.Errorf("at the end: %w", err)
		}
	}
	if err := s.history.Err(); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	if err := s.Cluster.Fsck(ctx, streamPatience); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	return nil
}

// reached demands that all consumers, and the group's commits, are at the end.
func (s *StreamSoak) reached(ends map[history.Partition]int64, consumers []string) error {
	for p, end := range ends {
		for _, name := range consumers {
			if at := s.history.Position(name, p); at != end {
				return fmt.Errorf("consumer %s is at offset %d of %v, which ends at %d", name, at, p, end)
			}
		}
		if at := s.history.AskCommitted(groupName, p); at != end {
			return fmt.Errorf("group %s has committed offset %d of %v, which ends at %d", groupName, at, p, end)
		}
	}
	return nil
}

// Report is a table of the events.
func (s *StreamSoak) Report() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d, %v\n", s.Seed, time.Since(s.began).Round(time.Second))
	if s.nemesis != nil {
		for _, c := range s.nemesis.counts() {
			fmt.Fprintf(&b, "%-35s %4d  %v\n", c.kind, c.times, c.lasted.Round(time.Second))
		}
	}
	for _, p := range s.parts {
		fmt.Fprintf(&b, "%v ends at %d\n", p, s.history.AskEnd(p))
	}
	fmt.Fprintf(&b, "acknowledged records %d, logs read in snapshots and clones %d, walks over the tree %d, errors told %d\n", s.history.Acknowledgements(), s.snapshots.Load(), s.listings.Load(), s.told.Load())
	return b.String()
}
