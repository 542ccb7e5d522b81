package streams

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/stream/ingest/client"
)

// appended is the answer to an append over HTTP.
type appended struct {
	Appended []struct{ Record, Offset, Count int64 }
	Refused  []struct {
		Record int64
		Reason string
	}
	Error     string
	Partition int32
	Repeated  int64 `json:"repeated_count"`
}

// post appends lines over HTTP.
func (m *machine) post(stream, kind, lines string) (int, appended) {
	m.T.Helper()
	return m.postWith(stream, http.Header{"Content-Type": {kind}}, lines)
}

// postAs appends lines as a producer with a name, whose first line has a number.
func (m *machine) postAs(producer string, sequence int, stream, lines string) (int, appended) {
	m.T.Helper()
	return m.postWith(stream, http.Header{"Content-Type": {"text/plain"}, "Penstock-Producer": {producer}, "Penstock-Sequence": {fmt.Sprint(sequence)}}, lines)
}

func (m *machine) postWith(stream string, header http.Header, lines string) (int, appended) {
	m.T.Helper()
	q, err := http.NewRequestWithContext(m.T.Context(), http.MethodPost, "http://"+m.ingest+"/v1/append"+stream, strings.NewReader(lines))
	if err != nil {
		m.T.Fatal(err)
	}
	q.Header = header
	p, err := http.DefaultClient.Do(q)
	if err != nil {
		m.T.Fatal(err)
	}
	defer p.Body.Close()
	var a appended
	if err := json.NewDecoder(p.Body).Decode(&a); err != nil {
		m.T.Fatal(err)
	}
	return p.StatusCode, a
}

// TestIngest appends over HTTP what Kafka clients read.
func TestIngest(t *testing.T) {
	m := newMachine(t)
	m.Must("stream", "create", "/v/logs of a", "--partitions", "2", "--format", "json")
	if code, a := m.post("/v/logs%20of%20a?partition=1", "application/x-ndjson", "{\"n\":1}\nbad\n{\"n\":2}\n"); code != 422 || fmt.Sprint(a.Appended) != "[{0 0 1} {2 1 1}]" || len(a.Refused) != 1 || a.Refused[0].Record != 1 {
		t.Errorf("DATA: %d, %+v", code, a)
	}
	if code, a := m.post("/v/none", "text/plain", "x\n"); code != 404 || !strings.Contains(a.Error, "no stream is there") {
		t.Errorf("an unknown stream: %d, %+v", code, a)
	}
	for i, r := range m.consume("v.logs..20of..20a", 1, 2) {
		if want := fmt.Sprintf(`{"n":%d}`, i+1); string(r.Value) != want || r.Offset != int64(i) {
			t.Errorf("DATA: offset %d has %q, not %q", r.Offset, r.Value, want)
		}
	}
	t.Run("killed", m.testKilledProducers)
}

// produceNumbers appends the numbers up to the last one as a producer with a name: in a call that
// begins after the last number that the stream has, with batches that are sent before earlier
// ones are answered. acknowledged is the greatest acknowledged number.
func produceNumbers(ctx context.Context, cc *grpc.ClientConn, name string, last int64, acknowledged *atomic.Int64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := ingest.NewIngestClient(cc).Append(ctx)
	if err != nil {
		return err
	}
	if err := c.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Open{Open: &ingest.Open{Stream: "/v/t", Producer: name}}}); err != nil {
		return err
	}
	p, err := c.Recv()
	if err != nil {
		return err
	}
	next := p.GetOpened().GetLastSequence() + 1
	if had := acknowledged.Load(); next <= had {
		return fmt.Errorf("DATA: producer %s: the stream ends at number %d, %d was acknowledged", name, next-1, had)
	}
	acknowledged.Store(next - 1) // a killed gateway may have made the last numbers durable without an answer
	go func() {
		for first := next; first <= last; first += 3 {
			b := &ingest.Batch{Sequence: &first}
			for n := first; n < first+3; n++ {
				b.Records = append(b.Records, &ingest.Record{Value: fmt.Append(nil, name, " ", n)})
			}
			if c.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Batch{Batch: b}}) != nil {
				return // Recv has the error
			}
		}
	}()
	for next <= last {
		p, err := c.Recv()
		if err != nil {
			return err
		}
		next = p.GetAcknowledged().GetLastSequence() + 1
		acknowledged.Store(next - 1)
	}
	return nil
}

// appendOnce appends records by the Go client until a channel is closed: each has the next offset.
func (m *machine) appendOnce(ctx context.Context, ended <-chan struct{}) error {
	p, err := client.New(client.Config{Gateways: []string{m.ingest}, Stream: "/v/c", Name: "once"})
	if err != nil {
		return err
	}
	defer p.Close()
	for n := int64(0); ; n++ {
		select {
		case <-ended:
			return nil
		default:
		}
		r, err := p.Append(ctx, &ingest.Record{Value: fmt.Append(nil, n)})
		if err != nil {
			return err
		}
		if r.Offsets[0] != n {
			return fmt.Errorf("DATA: record %d of the Go client has offset %d", n, r.Offsets[0])
		}
	}
}

// testKilledProducers: producers with names go on where the stream ends, while their calls end at
// any moment and the gateway is killed. The stream has each number once and in order.
func (m *machine) testKilledProducers(t *testing.T) {
	m.Must("stream", "create", "/v/t", "--segment-bytes", "20000")
	const producers, last = 4, 900
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	m.Must("stream", "create", "/v/c")
	once, killed := make(chan error, 1), make(chan struct{})
	go func() { once <- m.appendOnce(ctx, killed) }()
	var all atomic.Int64 // appended numbers, about
	done := make(chan error, producers)
	for i := range producers {
		go func() {
			cc, err := grpc.NewClient(m.ingest, grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				done <- err
				return
			}
			defer cc.Close()
			var acknowledged atomic.Int64
			for life := 1; acknowledged.Load() < last && ctx.Err() == nil; life++ {
				before := acknowledged.Load()
				// A life ends with the numbers, or after some milliseconds, the later the more.
				life, end := context.WithTimeout(ctx, time.Duration(life%7*20+5*life)*time.Millisecond)
				err := produceNumbers(life, cc, fmt.Sprint("p", i), last, &acknowledged)
				end()
				if err != nil && strings.HasPrefix(err.Error(), "DATA:") {
					done <- err
					return
				}
				all.Add(acknowledged.Load() - before)
			}
			done <- ctx.Err()
		}()
	}
	for kills := int64(1); kills <= 2; kills++ {
		m.Until("records are acknowledged", func() error {
			if n := all.Load(); n < kills*producers*last/4 {
				return fmt.Errorf("%d records", n)
			}
			return nil
		})
		m.kill()
		m.start()
	}
	close(killed)
	if err := <-once; err != nil {
		t.Error(err)
	}
	for range producers {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	next := map[string]int64{}
	c := m.client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{"v.t": {0: kgo.NewOffset().AtStart()}}))
	for _, r := range m.poll(c, producers*last) {
		name, n, _ := strings.Cut(string(r.Value), " ")
		if next[name]++; n != fmt.Sprint(next[name]) {
			t.Fatalf("DATA: offset %d has number %s of producer %s, after %d", r.Offset, n, name, next[name]-1)
		}
	}
}
