package cluster

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/test/history"
)

// produce starts the producers. They begin no record after ctx has ended, and end when their
// records are acknowledged, or with all.
func (s *StreamSoak) produce(ctx, all context.Context) {
	seed := func(n uint64) *rand.Rand { return rand.New(rand.NewPCG(s.Seed, 6000+n)) }
	s.producers.Go(func() { s.produceKgo(ctx, all, "kgo-idempotent-1", 0, history.Once, seed(0)) })
	s.producers.Go(func() { s.produceKgo(ctx, all, "kgo-idempotent-2", 1, history.Once, seed(1)) })
	s.producers.Go(func() { s.produceKgo(ctx, all, "kgo-plain", 1, history.Ordered, seed(2)) })
	s.producers.Go(func() { s.produceKcat(ctx, all, "kcat-idempotent", history.Once, seed(3)) })
	s.producers.Go(func() { s.produceKcat(ctx, all, "kcat-plain", history.Any, seed(4)) })
	s.producers.Go(func() { s.produceHTTP(ctx, all, "http", seed(5)) })
	s.producers.Go(func() { s.produceGRPC(ctx, all, "grpc", seed(6)) })
}

// size is the size of a record's value.
func size(r *rand.Rand) int {
	if r.IntN(20) == 0 {
		return r.IntN(20_000)
	}
	return r.IntN(200)
}

// rest is the pause between two records.
func rest(ctx context.Context, r *rand.Rand) { sleep(ctx, time.Duration(r.IntN(30))*time.Millisecond) }

func (s *StreamSoak) produceKgo(ctx, all context.Context, name string, turn int, promise history.Promise, r *rand.Rand) {
	opts := []kgo.Opt{kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.ProducerLinger(time.Millisecond), kgo.ProduceRequestTimeout(5 * time.Second), kgo.MaxBufferedRecords(200)}
	if promise != history.Once {
		opts = append(opts, kgo.DisableIdempotentWrite(), kgo.MaxProduceRequestsInflightPerBroker(1))
	}
	c := s.client(turn, opts...)
	defer c.Close()
	for n := int64(0); ctx.Err() == nil; n++ {
		to, rec := some(r, s.parts), history.Record{Producer: name, Number: n}
		s.history.Send(rec, to, promise)
		c.Produce(all, &kgo.Record{Topic: to.Topic, Partition: to.Number, Value: []byte(rec.Value(size(r)))}, func(k *kgo.Record, err error) {
			switch {
			case err == nil:
				s.history.Acknowledged(rec, k.Offset)
			case all.Err() != nil:
			case errors.Is(err, kerr.OutOfOrderSequenceNumber), errors.Is(err, kerr.UnknownProducerID), errors.Is(err, kerr.InvalidProducerEpoch):
				s.fail(fmt.Errorf("DATA: %s, record %d to %v: the log has lost the producer's state or records: %w", name, rec.Number, to, err))
			default:
				s.told.Add(1)
				s.Logf("%s: record %d to %v: %v", name, rec.Number, to, err)
			}
		})
		rest(ctx, r)
	}
	_ = c.Flush(all) // ends with all, if the soak has failed
}

// produceKcat lets one kcat after the other send records for some seconds. A kcat that ends well
// has delivered all.
func (s *StreamSoak) produceKcat(ctx, all context.Context, name string, promise history.Promise, r *rand.Rand) {
	for life := 1; ctx.Err() == nil; life++ {
		to, name := some(r, s.parts), fmt.Sprint(name, ".", life)
		args := []string{"-P", "-q", "-b", strings.Join(s.Cluster.gatewayAddrs(kafkaPort, life), ","), "-t", to.Topic, "-p", fmt.Sprint(to.Number), "-X", "socket.timeout.ms=10000", "-X", "linger.ms=1", "-X", "retry.backoff.ms=100"}
		if promise == history.Once {
			args = append(args, "-X", "enable.idempotence=true")
		} else {
			// librdkafka sends the next records to a new leader while the request to the former leader waits for
			// its timeout, so that even one request at a time keeps no order.
			args = append(args, "-X", "acks=all", "-X", "retries=1000000")
		}
		in, out := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			err := s.Cluster.users.Pipe(all, in, io.Discard, "kcat", args...)
			in.CloseWithError(errors.New("kcat has ended"))
			ended <- err
		}()
		var sent []history.Record
		for end := time.Now().Add(time.Duration(1000+r.IntN(5000)) * time.Millisecond); ctx.Err() == nil && time.Now().Before(end); {
			rec := history.Record{Producer: name, Number: int64(len(sent))}
			sent = append(sent, rec)
			s.history.Send(rec, to, promise)
			if _, err := fmt.Fprintln(out, rec.Value(size(r))); err != nil {
				break
			}
			rest(ctx, r)
		}
		out.Close()
		if err := <-ended; err != nil {
			if all.Err() == nil {
				s.told.Add(1)
				s.Logf("%s to %v: %v", name, to, err)
			}
			continue
		}
		for _, rec := range sent {
			s.history.Acknowledged(rec, -1)
		}
	}
}

// posted is the answer to an append over HTTP.
type posted struct {
	Appended []struct{ Record, Offset, Count int64 }
	Refused  []struct{ Reason string }
	Error    string
}

// produceHTTP appends as a producer with a name: it sends each request until the answer is good.
func (s *StreamSoak) produceHTTP(ctx, all context.Context, name string, r *rand.Rand) {
	hc := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: s.Cluster.users.Dial}}
	defer hc.CloseIdleConnections()
	to := some(r, s.parts)
	for n := int64(0); ctx.Err() == nil; {
		count := 1 + r.Int64N(5)
		var body strings.Builder
		for i := n; i < n+count; i++ {
			rec := history.Record{Producer: name, Number: i}
			s.history.Send(rec, to, history.Once)
			fmt.Fprintln(&body, rec.Value(size(r)))
		}
		for all.Err() == nil {
			code, p, err := s.post(all, hc, to, name, n, body.String())
			if err == nil && code == http.StatusOK {
				for i := n; i < n+count; i++ {
					s.history.Acknowledged(history.Record{Producer: name, Number: i}, -1)
				}
				for _, run := range p.Appended {
					for i := range run.Count {
						s.history.Acknowledged(history.Record{Producer: name, Number: n + run.Record + i}, run.Offset+i)
					}
				}
				break
			}
			if err == nil && (code == http.StatusConflict || code == http.StatusUnprocessableEntity || code == http.StatusBadRequest) {
				s.fail(fmt.Errorf("DATA: %s, numbers from %d on to %v: status %d: %s %v", name, n, to, code, p.Error, p.Refused))
				return
			}
			if all.Err() == nil {
				s.told.Add(1)
			}
			sleep(all, 200*time.Millisecond)
		}
		n += count
		rest(ctx, r)
	}
}

// pathOf is the path of a partition's stream.
func pathOf(p history.Partition) string { return "/" + strings.ReplaceAll(p.Topic, ".", "/") }

func (s *StreamSoak) post(ctx context.Context, hc *http.Client, to history.Partition, name string, first int64, body string) (int, posted, error) {
	var p posted
	addr := some(rand.New(rand.NewPCG(rand.Uint64(), 0)), s.Cluster.Gateways).addr(ingestPort)
	q, err := http.NewRequestWithContext(ctx, http.MethodPost, fmt.Sprintf("http://%s/v1/append%s?partition=%d", addr, pathOf(to), to.Number), strings.NewReader(body))
	if err != nil {
		return 0, p, err
	}
	q.Header.Set("Content-Type", "text/plain")
	q.Header.Set("Penstock-Producer", name)
	q.Header.Set("Penstock-Sequence", fmt.Sprint(first))
	a, err := hc.Do(q)
	if err != nil {
		return 0, p, err
	}
	defer a.Body.Close()
	text, err := io.ReadAll(a.Body)
	if err == nil {
		err = json.NewDecoder(bytes.NewReader(text)).Decode(&p)
	}
	return a.StatusCode, p, err
}

// produceGRPC appends as a producer with a name, in calls that end after some seconds or with an
// error. Each call goes on after the last number that the stream has.
func (s *StreamSoak) produceGRPC(ctx, all context.Context, name string, r *rand.Rand) {
	x := &grpcProducer{s: s, name: name, to: some(r, s.parts), acknowledged: -1, sent: -1}
	for turn := 0; all.Err() == nil && (ctx.Err() == nil || x.acknowledged < x.sent); turn++ {
		one, cancel := context.WithTimeout(all, time.Duration(1000+r.IntN(9000))*time.Millisecond)
		err := x.call(ctx, one, s.Cluster.gatewayAddrs(ingestPort, turn)[0], r)
		cancel()
		if err != nil && all.Err() == nil {
			s.told.Add(1)
			sleep(all, 100*time.Millisecond)
		}
	}
}

type grpcProducer struct {
	s            *StreamSoak
	name         string
	to           history.Partition
	acknowledged int64 // the greatest acknowledged number
	sent         int64 // the greatest number ever sent
}

// call is one call. It begins new numbers until more ends.
func (x *grpcProducer) call(more, ctx context.Context, addr string, r *rand.Rand) error {
	cc, err := grpc.NewClient("passthrough:///"+addr, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		return x.s.Cluster.users.Dial(ctx, "tcp", addr)
	}))
	if err != nil {
		return err
	}
	defer cc.Close()
	c, err := ingest.NewIngestClient(cc).Append(ctx)
	if err != nil {
		return err
	}
	if err := c.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Open{Open: &ingest.Open{Stream: pathOf(x.to), Partition: &x.to.Number, Producer: x.name}}}); err != nil {
		return err
	}
	p, err := c.Recv()
	if err != nil {
		return err
	}
	last := int64(-1)
	if p.GetOpened().LastSequence != nil {
		last = p.GetOpened().GetLastSequence()
	}
	if last < x.acknowledged || last > x.sent {
		err := fmt.Errorf("DATA: %s: %v ends at number %d, %d was acknowledged and %d sent", x.name, x.to, last, x.acknowledged, x.sent)
		x.s.fail(err)
		return err
	}
	for x.acknowledged < last {
		x.acknowledged++
		x.s.history.Acknowledged(history.Record{Producer: x.name, Number: x.acknowledged}, -1)
	}
	for {
		first := last + 1
		b := &ingest.Batch{Sequence: &first}
		for range 1 + r.IntN(5) {
			if last+1 > x.sent && more.Err() != nil {
				break
			}
			last++
			rec := history.Record{Producer: x.name, Number: last}
			if last > x.sent {
				x.s.history.Send(rec, x.to, history.Once)
				x.sent = last
			}
			b.Records = append(b.Records, &ingest.Record{Value: []byte(rec.Value(size(r)))})
		}
		if len(b.Records) == 0 {
			return nil
		}
		if err := c.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Batch{Batch: b}}); err != nil {
			return err
		}
		p, err := c.Recv()
		if err != nil {
			return err
		}
		for _, run := range p.GetAcknowledged().GetAppended() {
			for i := range run.GetCount() {
				x.s.history.Acknowledged(history.Record{Producer: x.name, Number: first + int64(run.GetRecord()+i)}, run.GetOffset()+int64(i))
			}
		}
		for x.acknowledged < last {
			x.acknowledged++
			x.s.history.Acknowledged(history.Record{Producer: x.name, Number: x.acknowledged}, -1)
		}
		rest(more, r)
	}
}
