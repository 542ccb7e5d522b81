package server

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/ingest"
)

// dial connects to the gRPC server.
func (r *rig) dial(opts ...grpc.DialOption) *grpc.ClientConn {
	r.t.Helper()
	cc, err := grpc.NewClient(r.addr, append(opts, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { cc.Close() })
	return cc
}

type appendCall = grpc.BidiStreamingClient[ingest.AppendRequest, ingest.AppendResponse]

// open opens a call.
func (r *rig) open(cc *grpc.ClientConn, q *ingest.Open) (appendCall, *ingest.Opened) {
	r.t.Helper()
	c, err := ingest.NewIngestClient(cc).Append(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	if err := c.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Open{Open: q}}); err != nil {
		r.t.Fatal(err)
	}
	p, err := c.Recv()
	if err != nil {
		r.t.Fatal(err)
	}
	return c, p.GetOpened()
}

// numbers makes a batch whose values are the sequence numbers.
func numbers(first int64, n int) *ingest.Batch {
	b := &ingest.Batch{Sequence: &first}
	for i := range n {
		b.Records = append(b.Records, &ingest.Record{Value: fmt.Append(nil, first+int64(i))})
	}
	return b
}

func request(b *ingest.Batch) *ingest.AppendRequest {
	return &ingest.AppendRequest{Request: &ingest.AppendRequest_Batch{Batch: b}}
}

// exchange sends a batch and returns the answer as a text.
func exchange(c appendCall, b *ingest.Batch) (string, error) {
	if err := c.Send(request(b)); err != nil {
		return "", err
	}
	p, err := c.Recv()
	if err != nil {
		return "", err
	}
	a := p.GetAcknowledged()
	text := fmt.Sprintf("last %d, %d repeated", a.GetLastSequence(), a.RepeatedRecords)
	for _, r := range a.Appended {
		text += fmt.Sprintf(", %d+%d at %d", r.Record, r.Count, r.Offset)
	}
	for _, r := range a.Refused {
		text += fmt.Sprintf(", %d refused", r.Record)
	}
	return text, nil
}

// TestSequences: a producer's numbers are appended once, over calls that begin again anywhere,
// refused records and a restart of the partition; missing numbers are an error. HTTP has the same
// numbers.
func TestSequences(t *testing.T) {
	r := newRig(t, "json", Limits{})
	cc := r.dial()
	one := int32(1)
	open := &ingest.Open{Stream: "/v/s", Partition: &one, Producer: "p"}
	c, p := r.open(cc, open)
	if p.Partition != 1 || p.Partitions != 2 || p.LastSequence != nil {
		t.Errorf("%v", p)
	}
	step := func(b *ingest.Batch, want string) {
		t.Helper()
		if got, err := exchange(c, b); got != want || err != nil {
			t.Errorf("DATA: %q, %v, not %q", got, err, want)
		}
	}
	again := func(last int64) {
		t.Helper()
		if err := c.CloseSend(); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Recv(); !errors.Is(err, io.EOF) {
			t.Errorf("the end of a call: %v", err)
		}
		if c, p = r.open(cc, open); p.GetLastSequence() != last {
			t.Errorf("DATA: opened again at %v, not at %d", p, last)
		}
	}
	step(numbers(10, 3), "last 12, 0 repeated, 0+3 at 0")
	step(numbers(10, 3), "last 12, 3 repeated, 0+3 at 0")
	step(numbers(11, 4), "last 14, 2 repeated, 0+4 at 1")
	again(14)
	bad := numbers(15, 4)
	bad.Records[1].Value, bad.Records[3].Value = []byte("bad"), []byte("{")
	step(bad, "last 17, 0 repeated, 0+1 at 5, 2+1 at 6, 1 refused, 3 refused")
	step(numbers(19, 1), "last 19, 0 repeated, 0+1 at 7") // 18 was refused
	bad = numbers(20, 1)
	bad.Records[0].Value = []byte("bad")
	step(bad, "last 19, 0 repeated, 0 refused")
	again(19)
	skip := numbers(21, 1) // the producer knows that 20 was refused
	skip.PreviousSequence = proto.Int64(19)
	step(skip, "last 21, 0 repeated, 0+1 at 8")
	r.mu.Lock()
	if err := r.logs[1].Close(); err != nil {
		t.Error(err)
	}
	r.mu.Unlock()
	if _, err := exchange(c, numbers(22, 1)); status.Code(err) != codes.Unavailable {
		t.Errorf("a closed partition: %v", err)
	}
	c, p = r.open(cc, open)
	if p.GetLastSequence() != 21 {
		t.Errorf("DATA: opened again at %v", p)
	}
	for _, first := range []int64{23, 100} {
		if _, err := exchange(c, numbers(first, 1)); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "21") {
			t.Errorf("DATA: a gap before %d: %v", first, err)
		}
		c, _ = r.open(cc, open)
	}
	// Over HTTP.
	for _, h := range []struct {
		first, previous, lines string
		status                 int
		want                   string
	}{
		{"22", "", "22\n23\n", 200, "[{0 9 2}] 0 23"},
		{"22", "", "22\n23\nx\n25", 422, "[{0 9 2} {3 11 1}] 2 25"},
		{"27", "", "27\n", 409, ""},
		{"27", "25", "27\n", 200, "[{0 12 1}] 0 27"},
		{"x", "", "27\n", 400, ""},
		{"", "", "27\n", 400, ""},
		{"70368744177663", "27", "1\n2\n", 400, ""},
	} {
		status, a, _ := r.post("/v/s?partition=1", typeText, strings.NewReader(h.lines), func(q *http.Request) {
			q.Header.Set(headerProducer, "p")
			q.Header.Set(headerSequence, h.first)
			q.Header.Set(headerPrevious, h.previous)
		})
		got := ""
		if a.LastSequence != nil {
			got = fmt.Sprintf("%v %d %d", a.Appended, a.RepeatedCount, *a.LastSequence)
		}
		if status != h.status || got != h.want {
			t.Errorf("DATA: HTTP from %q after %q: %d, %q, not %q: %+v", h.first, h.previous, status, got, h.want, a)
		}
	}
	want := []string{"10", "11", "12", "13", "14", "15", "17", "19", "21", "22", "23", "25", "27"}
	if got := r.values(1); !slices.Equal(got, want) {
		t.Errorf("DATA: the log has %v, not %v", got, want)
	}
}

// TestCallsWithoutAName: records have keys, headers and times, and no numbers.
func TestCallsWithoutAName(t *testing.T) {
	r := newRig(t, "bytes", Limits{})
	c, p := r.open(r.dial(), &ingest.Open{Stream: "/v/s"})
	b := &ingest.Batch{Records: []*ingest.Record{
		{Value: []byte("a"), Key: []byte("k"), TimestampMs: proto.Int64(5), Headers: []*ingest.Header{{Name: "h", Value: []byte("v")}}}, {}, {Value: []byte("c"), TimestampMs: proto.Int64(-1)},
	}}
	for i, want := range []string{"last 0, 0 repeated, 0+2 at 0, 2 refused", "last 0, 0 repeated, 0+2 at 2, 2 refused"} {
		if got, err := exchange(c, b); got != want || err != nil {
			t.Errorf("DATA: %d: %q, %v", i, got, err)
		}
	}
	if got := r.values(p.Partition); !slices.Equal(got, []string{"a", "", "a", ""}) {
		t.Errorf("DATA: %q", got)
	}
}

// TestBadCalls: a wrong call ends with a code and a reason, and its server goes on.
func TestBadCalls(t *testing.T) {
	r := newRig(t, "bytes", Limits{})
	cc := r.dial()
	open := func(q *ingest.Open) *ingest.AppendRequest {
		return &ingest.AppendRequest{Request: &ingest.AppendRequest_Open{Open: q}}
	}
	opened := open(&ingest.Open{Stream: "/v/s", Producer: "p"})
	many := &ingest.Batch{Sequence: proto.Int64(0), Records: make([]*ingest.Record, maxEntries+1)}
	for i := range many.Records {
		many.Records[i] = &ingest.Record{}
	}
	for _, c := range []struct {
		name string
		send []*ingest.AppendRequest
		opts []grpc.CallOption
		code codes.Code
		why  string
	}{
		{"no open", []*ingest.AppendRequest{request(numbers(0, 1))}, nil, codes.InvalidArgument, "is an Open"},
		{"nothing", nil, nil, codes.InvalidArgument, "is an Open"},
		{"no request", []*ingest.AppendRequest{{}}, nil, codes.InvalidArgument, "is an Open"},
		{"no stream", []*ingest.AppendRequest{open(&ingest.Open{Stream: "/v/none"})}, nil, codes.NotFound, "no stream is there"},
		{"no path", []*ingest.AppendRequest{open(&ingest.Open{Stream: "v/s"})}, nil, codes.InvalidArgument, "path of a stream"},
		{"no partition", []*ingest.AppendRequest{open(&ingest.Open{Stream: "/v/s", Partition: proto.Int32(7)})}, nil, codes.NotFound, "no such partition"},
		{"long name", []*ingest.AppendRequest{open(&ingest.Open{Stream: "/v/s", Producer: strings.Repeat("n", 257)})}, nil, codes.InvalidArgument, "256 bytes"},
		{"open twice", []*ingest.AppendRequest{opened, opened}, nil, codes.InvalidArgument, "is a Batch"},
		{"no records", []*ingest.AppendRequest{opened, request(&ingest.Batch{})}, nil, codes.InvalidArgument, "is a Batch"},
		{"no number", []*ingest.AppendRequest{opened, request(&ingest.Batch{Records: []*ingest.Record{{}}})}, nil, codes.InvalidArgument, "sequence number"},
		{"a large number", []*ingest.AppendRequest{opened, request(numbers(1<<46-1, 2))}, nil, codes.InvalidArgument, "sequence numbers are 0 to"},
		{"a negative number", []*ingest.AppendRequest{opened, request(numbers(-1, 2))}, nil, codes.InvalidArgument, "sequence numbers are 0 to"},
		{"many records", []*ingest.AppendRequest{opened, request(many)}, nil, codes.InvalidArgument, "at most 16384 records"},
		{"a large message", []*ingest.AppendRequest{opened, request(&ingest.Batch{Records: []*ingest.Record{{Value: make([]byte, maxMessage)}}})}, nil, codes.InvalidArgument, "larger than"},
		{"compressed", []*ingest.AppendRequest{opened}, []grpc.CallOption{grpc.UseCompressor(gzip.Name)}, codes.InvalidArgument, "compressed"},
	} {
		call, err := ingest.NewIngestClient(cc).Append(t.Context(), c.opts...)
		if err != nil {
			t.Fatal(err)
		}
		for _, q := range c.send {
			if err := call.Send(q); err != nil && !errors.Is(err, io.EOF) {
				t.Errorf("%s: %v", c.name, err)
			}
		}
		if err := call.CloseSend(); err != nil {
			t.Error(err)
		}
		for err == nil {
			_, err = call.Recv()
		}
		if status.Code(err) != c.code || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v, not %v: %s", c.name, err, c.code, c.why)
		}
	}
	if n := len(r.values(0)) + len(r.values(1)); n != 0 {
		t.Errorf("DATA: %d records", n)
	}
	r.close()
	if !r.server.memory.TryAcquire(r.server.cfg.Limits.Memory) || !r.server.entries.TryAcquire(allEntries) {
		t.Error("calls that ended hold memory")
	}
}

// TestManyCallsOnASlowDisk: 1,000 calls send as fast as they may, to partitions whose disk stands
// still. The server reads no more than its memory allows; when the disk goes on, each record is
// appended once.
func TestManyCallsOnASlowDisk(t *testing.T) {
	r := newRig(t, "bytes", Limits{Memory: 16 << 20})
	gate := make(chan struct{})
	for _, d := range r.dirs {
		d.gate = gate
	}
	const producers, each, size = 1000, 3, 20_000
	conns := []*grpc.ClientConn{r.dial(), r.dial(), r.dial(), r.dial(), r.dial()}
	var sent atomic.Int64
	var wg sync.WaitGroup
	for n := range producers {
		wg.Go(func() {
			c, err := ingest.NewIngestClient(conns[n%len(conns)]).Append(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			if err := c.Send(&ingest.AppendRequest{Request: &ingest.AppendRequest_Open{Open: &ingest.Open{Stream: "/v/s", Producer: fmt.Sprint(n)}}}); err != nil {
				t.Error(err)
			}
			for i := range int64(each) {
				v := make([]byte, size)
				copy(v, fmt.Sprintf("%d/%d ", n, i))
				if err := c.Send(request(&ingest.Batch{Sequence: &i, Records: []*ingest.Record{{Value: v}}})); err != nil {
					t.Error(err)
				}
				sent.Add(1)
			}
			for range each + 1 {
				if _, err := c.Recv(); err != nil {
					t.Errorf("producer %d: %v", n, err)
					return
				}
			}
			if err := c.CloseSend(); err != nil {
				t.Error(err)
			}
		})
	}
	// Until the memory is used up: a further message gets none.
	for deadline := time.Now().Add(time.Minute); r.server.memory.TryAcquire(3 * size); time.Sleep(time.Millisecond) {
		r.server.memory.Release(3 * size)
		if time.Now().After(deadline) {
			t.Error("the calls do not use the memory")
			break
		}
	}
	close(gate)
	wg.Wait()
	next := map[string]int{}
	for _, v := range append(r.values(0), r.values(1)...) {
		n, i, _ := strings.Cut(v[:strings.IndexByte(v, ' ')], "/")
		if i != fmt.Sprint(next[n]) {
			t.Fatalf("DATA: producer %s has %s after %d records", n, i, next[n])
		}
		next[n]++
	}
	for n, i := range next {
		if i != each {
			t.Errorf("DATA: producer %s has %d records", n, i)
		}
	}
	if len(next) != producers {
		t.Errorf("DATA: records of %d producers", len(next))
	}
}

// TestFailedSync: a batch whose sync failed is not acknowledged, and the call ends.
func TestFailedSync(t *testing.T) {
	r := newRig(t, "bytes", Limits{})
	cc := r.dial()
	open := &ingest.Open{Stream: "/v/s", Producer: "p", Partition: proto.Int32(0)}
	c, _ := r.open(cc, open)
	r.dirs[0].mu.Lock()
	r.dirs[0].fail = meta.E("sync", meta.QuotaExceeded, "disk", nil)
	r.dirs[0].mu.Unlock()
	if text, err := exchange(c, numbers(0, 2)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("DATA: %q, %v", text, err)
	}
	r.dirs[0].mu.Lock()
	r.dirs[0].fail = nil
	r.dirs[0].mu.Unlock()
	c, p := r.open(cc, open)
	first := int64(0)
	if p.LastSequence != nil {
		first = *p.LastSequence + 1
	}
	if _, err := exchange(c, numbers(first, 3)); err != nil {
		t.Error(err)
	}
	if got := r.values(0); !slices.Equal(got, []string{"0", "1", "2", "3", "4"}[:len(got)]) || len(got) < 3 {
		t.Errorf("DATA: %q", got)
	}
}

// FuzzInflow reads a body: whole messages come out as they were, or the body ends with an error.
func FuzzInflow(f *testing.F) {
	message, err := proto.Marshal(request(numbers(3, 2)))
	if err != nil {
		f.Fatal(err)
	}
	framed := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
	f.Add(append(framed, framed...))
	f.Add(framed[:9])
	f.Add([]byte{1, 0, 0, 0, 0})
	f.Add([]byte{0, 0xff, 0, 0, 0, 1})
	f.Add([]byte{0, 0, 0, 0, 4, 0x12, 2, 0x1a, 0})
	s := New(Config{})
	f.Fuzz(func(t *testing.T, p []byte) {
		in := newInflow(t.Context(), s, bytes.NewReader(p), func(time.Time) error { return nil })
		defer in.end()
		got, err := io.ReadAll(readOne{in})
		if err != nil || !bytes.HasPrefix(p, got) || in.failure() == nil && len(got) != len(p) {
			t.Fatalf("%x becomes %x, %v, %v", p, got, err, in.failure())
		}
	})
}

// readOne answers each message when it was read.
type readOne struct{ f *inflow }

func (r readOne) Read(p []byte) (int, error) {
	n, err := r.f.Read(p)
	if err == nil && r.f.rest == nil {
		r.f.decoded()
		r.f.answered()
	}
	return n, err
}

// A call whose client is gone may outlive its request: grpc-go does not wait for it. What the
// request held is given back once.
func TestCallOutlivesItsRequest(t *testing.T) {
	message, err := proto.Marshal(request(numbers(3, 2)))
	if err != nil {
		t.Fatal(err)
	}
	framed := append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message))), message...)
	s := New(Config{})
	in := newInflow(t.Context(), s, bytes.NewReader(append(framed, framed...)), func(time.Time) error { return nil })
	if _, err := io.ReadFull(in, make([]byte, len(framed))); err != nil {
		t.Fatal(err)
	}
	in.end()
	in.decoded()
	in.answered()
	if n, err := in.Read(make([]byte, 1)); err == nil {
		t.Errorf("%d bytes were read after the end of the request", n)
	}
	if !s.memory.TryAcquire(s.cfg.Limits.Memory) || !s.entries.TryAcquire(allEntries) {
		t.Error("the memory of the request was not given back")
	}
	if s.memory.TryAcquire(1) || s.entries.TryAcquire(1) {
		t.Error("the memory of the request was given back twice")
	}
}
