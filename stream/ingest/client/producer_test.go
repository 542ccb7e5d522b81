package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/ingest"
)

// gateway is a partition behind a gRPC server that fails. It keeps the rules of ingest.proto.
type gateway struct {
	ingest.UnimplementedIngestServer

	mu   sync.Mutex
	rng  *rand.Rand
	bad  float64 // chance of a failure at each step
	last int64
	log  []string
	at   map[int64]int64 // offset of each number
	// late is a batch of an ended call, which comes into the partition after the next call was
	// opened.
	late  *ingest.Batch
	hangs bool // the next batch is not answered
}

func newGateway(seed uint64, bad float64) *gateway {
	return &gateway{rng: rand.New(rand.NewPCG(seed, 1)), bad: bad, last: -1, at: map[int64]int64{}}
}

func (g *gateway) fails() bool { return g.rng.Float64() < g.bad }

// take appends a batch. Values with "bad" do not fit the stream.
func (g *gateway) take(b *ingest.Batch) (*ingest.Acknowledged, error) {
	first := b.GetSequence()
	previous := first - 1
	if b.PreviousSequence != nil {
		previous = *b.PreviousSequence
	}
	if g.last >= 0 && g.last < first && previous != g.last {
		return nil, status.Errorf(codes.FailedPrecondition, "the last number is %d, not %d", g.last, previous)
	}
	a := &ingest.Acknowledged{}
	for i, r := range b.Records {
		n := first + int64(i)
		offset, had := g.at[n]
		switch {
		case strings.Contains(string(r.Value), "bad"):
			a.Refused = append(a.Refused, &ingest.Refused{Record: int32(i), Reason: "it is bad"})
			continue
		case had:
			a.RepeatedRecords++
		case n <= g.last:
			a.RepeatedRecords++ // a number that was left out
			continue
		default:
			offset = int64(len(g.log))
			g.log, g.at[n], g.last = append(g.log, string(r.Value)), offset, n
		}
		a.Appended = append(a.Appended, &ingest.Run{Record: int32(i), Offset: offset, Count: 1})
	}
	last := g.last
	a.LastSequence = &last
	return a, nil
}

func (g *gateway) Append(s grpc.BidiStreamingServer[ingest.AppendRequest, ingest.AppendResponse]) error {
	gone := status.Error(codes.Unavailable, "the gateway fails")
	for {
		q, err := s.Recv()
		if err != nil {
			return nil
		}
		g.mu.Lock()
		p := &ingest.AppendResponse{}
		b := q.GetBatch()
		switch {
		case g.fails():
			err = gone
		case b == nil:
			o := &ingest.Opened{Partitions: 1}
			if last := g.last; last >= 0 {
				o.LastSequence = &last
			}
			p.Response = &ingest.AppendResponse_Opened{Opened: o}
			if g.late != nil {
				_, _ = g.take(g.late) // the append may be refused
				g.late = nil
			}
		case g.hangs:
			g.hangs, g.late = false, b
			g.mu.Unlock()
			<-s.Context().Done()
			return nil
		default:
			var a *ingest.Acknowledged
			if a, err = g.take(b); err == nil && g.fails() {
				err = gone
			}
			p.Response = &ingest.AppendResponse_Acknowledged{Acknowledged: a}
		}
		g.mu.Unlock()
		if err != nil {
			return err
		}
		if err := s.Send(p); err != nil {
			return err
		}
	}
}

// serve serves a gateway, and returns a producer.
func serve(t *testing.T, g *gateway) *Producer {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	ingest.RegisterIngestServer(s, g)
	go s.Serve(l)
	t.Cleanup(s.Stop)
	p, err := New(Config{Gateways: []string{l.Addr().String()}, Stream: "/v/clicks", Name: "test"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// TestOnce: over failures at every step, each acknowledged record is in the partition once, at
// the offset of its answer; a record of a failed Append is in the partition at most once.
func TestOnce(t *testing.T) {
	g := newGateway(1, 0.15)
	p := serve(t, g)
	at := map[string]int64{}
	sent := map[string]bool{}
	for i := range 60 {
		ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
		if i%7 == 3 { // the caller gives up, and the batch comes late
			g.mu.Lock()
			g.hangs = true
			g.mu.Unlock()
			time.AfterFunc(30*time.Millisecond, cancel)
		}
		var records []*ingest.Record
		for n := range 1 + i%4 {
			value := fmt.Sprintf("%d-%d", i, n)
			if n == 2 {
				value += "-bad"
			}
			records, sent[value] = append(records, &ingest.Record{Value: []byte(value)}), true
		}
		r, err := p.Append(ctx, records...)
		cancel()
		g.mu.Lock()
		g.hangs = false // the caller gave up before the batch came
		g.mu.Unlock()
		if err != nil {
			if !errors.Is(err, meta.Interrupted) {
				t.Fatal(err)
			}
			continue
		}
		for n := range records {
			value := string(records[n].Value)
			if _, refused := r.Refused[n]; refused != strings.Contains(value, "bad") || refused != (r.Offsets[n] < 0) {
				t.Fatalf("DATA: record %s: refused %v, offset %d", value, refused, r.Offsets[n])
			}
			if r.Offsets[n] >= 0 {
				at[value] = r.Offsets[n]
			}
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	seen := map[string]bool{}
	for offset, value := range g.log {
		if seen[value] || !sent[value] {
			t.Errorf("DATA: record %s is there twice, or was not sent", value)
		}
		if want, ok := at[value]; ok && want != int64(offset) {
			t.Errorf("DATA: record %s has offset %d, not %d", value, offset, want)
		}
		seen[value] = true
	}
	for value := range at {
		if !seen[value] {
			t.Errorf("DATA: record %s was acknowledged and is not there", value)
		}
	}
	if len(at) < 60 {
		t.Errorf("only %d records were acknowledged", len(at))
	}
}

// TestEnds: the errors of a producer that can't go on.
func TestEnds(t *testing.T) {
	if _, err := New(Config{Gateways: []string{"x"}, Stream: "/v"}); !errors.Is(err, meta.Invalid) {
		t.Errorf("a producer without a name: %v", err)
	}
	g := newGateway(1, 0)
	p := serve(t, g)
	record := &ingest.Record{Value: []byte("a")}
	if last, err := p.Last(t.Context()); err != nil || last != -1 {
		t.Fatalf("the last number is %d, %v", last, err)
	}
	for range 3 {
		if _, err := p.Append(t.Context(), record); err != nil {
			t.Fatal(err)
		}
	}
	again := func(last int64) error { // another call, which finds another last number
		g.last = last
		p.drop()
		_, err := p.Append(t.Context(), record)
		return err
	}
	if err := again(1); !errors.Is(err, meta.Stale) {
		t.Errorf("after a rollback: %v", err)
	}
	if err := again(1); err != nil {
		t.Errorf("after the rollback was told: %v", err)
	}
	if err := again(100); !errors.Is(err, meta.WrongOffset) {
		t.Errorf("another producer with the name: %v", err)
	}
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.Append(late, record); !errors.Is(err, meta.Interrupted) {
		t.Errorf("an Append that was given up: %v", err)
	}
}

// TestSuccessor: a Producer that continues an earlier Producer of the same name sends the same
// records with the same numbers, in other batches, while the last batch of the earlier Producer
// comes late: each record is in the partition once.
func TestSuccessor(t *testing.T) {
	for had := range 4 { // records that the earlier Producer had appended
		g := newGateway(1, 0)
		var records []*ingest.Record
		for n := range 4 {
			records = append(records, &ingest.Record{Value: fmt.Appendf(nil, "%d", n)})
		}
		first := int64(1)
		g.last = 0
		if had > 0 {
			if _, err := g.take(&ingest.Batch{Sequence: &first, Records: records[:had]}); err != nil {
				t.Fatal(err)
			}
		}
		g.late = &ingest.Batch{Sequence: &first, Records: records[:3]}
		p := serve(t, g)
		p.cfg.Next, p.cfg.Promised = 1, 5
		for _, batch := range [][]*ingest.Record{records[:1], records[1:2], records[2:]} {
			if _, err := p.Append(t.Context(), batch...); err != nil {
				t.Fatal(err)
			}
		}
		if want := "[0 1 2 3]"; fmt.Sprint(g.log) != want {
			t.Errorf("DATA: after %d records, the partition has %v, not %s", had, g.log, want)
		}
	}
	g := newGateway(1, 0)
	g.last = 9
	p := serve(t, g)
	p.cfg.Next, p.cfg.Promised = 1, 5
	if _, err := p.Append(t.Context(), &ingest.Record{Value: []byte("a")}); !errors.Is(err, meta.WrongOffset) {
		t.Errorf("a number that no earlier Producer gave: %v", err)
	}
}
