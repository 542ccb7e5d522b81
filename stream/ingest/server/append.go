package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/ingest"
	"penstock.io/penstock/stream/log"
)

// codeOf translates a kind of error to the code of a gRPC status.
func codeOf(k meta.Kind) codes.Code {
	switch statusOf(k) {
	case http.StatusNotFound:
		return codes.NotFound
	case http.StatusBadRequest, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType:
		return codes.InvalidArgument
	case http.StatusForbidden:
		return codes.PermissionDenied
	case http.StatusConflict:
		return codes.FailedPrecondition
	case http.StatusTooManyRequests, http.StatusInsufficientStorage:
		return codes.ResourceExhausted
	case http.StatusServiceUnavailable:
		return codes.Unavailable
	}
	return codes.Internal
}

// statusError makes an error a gRPC status.
func statusError(err error) error {
	if err == nil {
		return nil
	}
	kind := meta.KindOf(err)
	s := status.New(codeOf(kind), err.Error())
	// Several kinds have the same code: RESOURCE_EXHAUSTED is a full quota, or too many calls.
	if full, derr := s.WithDetails(&errdetails.ErrorInfo{Domain: ingest.ErrorDomain, Reason: kind.String()}); derr == nil {
		s = full
	}
	return s.Err()
}

// newGRPC makes the gRPC server, which runs as a handler of the HTTP server.
func (s *Server) newGRPC() *grpc.Server {
	g := grpc.NewServer(grpc.MaxRecvMsgSize(maxMessage))
	ingest.RegisterIngestServer(g, service{s: s})
	reflection.Register(g)
	return g
}

// inflowKey is the key of the inflow of a call in its context.
type inflowKey struct{}

// maxOther bounds the body of a call other than Append, in bytes.
const maxOther = 1 << 20

// serveGRPC serves a gRPC call.
func (s *Server) serveGRPC(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != ingest.Ingest_Append_FullMethodName {
		r.Body = http.MaxBytesReader(w, r.Body, maxOther)
		s.grpc.ServeHTTP(w, r)
		return
	}
	d := &deadlines{rc: http.NewResponseController(w)}
	defer d.end()
	f := newInflow(r.Context(), s, r.Body, d.read)
	defer f.end()
	defer context.AfterFunc(s.ctx, func() { f.abort(errStopping) })()
	r = r.WithContext(context.WithValue(r.Context(), inflowKey{}, &call{inflow: f, deadlines: d}))
	r.Body = f
	s.grpc.ServeHTTP(w, r)
}

// deadlines sets the deadlines of a call. Timers may set deadlines when the call has ended.
type deadlines struct {
	mu    sync.Mutex
	rc    *http.ResponseController
	ended bool // rc must not be used any more
}

// past is a deadline that ends what waits.
var past = time.Unix(1, 0)

// read sets the deadline of reads of the body.
func (d *deadlines) read(t time.Time) error {
	return d.set((*http.ResponseController).SetReadDeadline, t)
}

// write sets the deadline of writes.
func (d *deadlines) write(t time.Time) error {
	return d.set((*http.ResponseController).SetWriteDeadline, t)
}

func (d *deadlines) set(set func(*http.ResponseController, time.Time) error, t time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		return net.ErrClosed
	}
	return set(d.rc, t)
}

// end makes the deadlines unchangeable.
func (d *deadlines) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = true
}

// isGRPC reports that a request is a gRPC call.
func isGRPC(r *http.Request) bool {
	return r.ProtoMajor == 2 && strings.HasPrefix(r.Header.Get("Content-Type"), "application/grpc")
}

// service is the gRPC service.
type service struct {
	ingest.UnimplementedIngestServer
	s *Server
}

// call is an Append call. A goroutine reads batches and appends; the goroutine of the call waits
// until the batches are durable, and answers.
type call struct {
	inflow    *inflow
	deadlines *deadlines

	stream    grpc.BidiStreamingServer[ingest.AppendRequest, ingest.AppendResponse]
	target    target
	partition int32
	series    series
}

// Append serves an Append call.
func (v service) Append(stream grpc.BidiStreamingServer[ingest.AppendRequest, ingest.AppendResponse]) error {
	c, ok := stream.Context().Value(inflowKey{}).(*call)
	if !ok {
		panic("ingest: an Append call came past serveGRPC")
	}
	c.stream = stream
	err := c.run(stream.Context(), v.s)
	if other, ok := errors.AsType[*elsewhere](err); ok {
		stream.SetTrailer(metadata.Pairs(ingest.LeaderTrailer, other.gateway))
	}
	return statusError(err)
}

// run serves the call to the end.
func (c *call) run(ctx context.Context, s *Server) error {
	q, err := c.receive()
	if errors.Is(err, io.EOF) {
		err = meta.E("append", meta.Invalid, "call", errors.New("the first request of a call is an Open"))
	}
	if err != nil {
		return err
	}
	if err := c.open(ctx, s, q.GetOpen()); err != nil {
		return err
	}
	c.inflow.decoded()
	c.inflow.answered()
	batches := make(chan *taken, window)
	ended := make(chan error, 1)
	go func() {
		defer close(batches)
		ended <- c.read(ctx, batches)
	}()
	var failed error
	for t := range batches {
		if failed != nil {
			continue
		}
		if failed = t.wait(ctx); failed == nil {
			failed = c.acknowledge(t)
		}
		if failed != nil {
			c.inflow.abort(failed)
			continue
		}
		c.inflow.answered()
	}
	if err := <-ended; failed == nil {
		failed = err
	}
	return failed
}

// receive receives a request. Errors: io.EOF after the last one.
func (c *call) receive() (*ingest.AppendRequest, error) {
	q, err := c.stream.Recv()
	if err == nil {
		return q, nil
	}
	if why := c.inflow.failure(); why != nil {
		err = why
	}
	if _, ok := errors.AsType[*meta.Error](err); ok || errors.Is(err, io.EOF) {
		return nil, err
	}
	return nil, meta.E("append", meta.Unavailable, "call", fmt.Errorf("the requests ended: %w", err))
}

// open finds the partition of a call, and tells the client where the records go.
func (c *call) open(ctx context.Context, s *Server, q *ingest.Open) error {
	if q == nil {
		return meta.E("append", meta.Invalid, "call", errors.New("the first request of a call is an Open"))
	}
	if err := checkName(q.Producer); err != nil {
		return err
	}
	target, err := s.named(ctx, q)
	if err != nil {
		return err
	}
	n := s.choose(q.Producer, &target)
	if q.Partition != nil {
		n = *q.Partition
	}
	l, err := target.open(ctx, n)
	if err != nil {
		return err
	}
	c.target, c.partition = target, n
	c.series = series{log: l, format: target.format, name: q.Producer}
	p := &ingest.Opened{Partition: n, Partitions: int32(target.partitions)}
	if q.Producer != "" {
		if at, wait, ok := l.Place(log.NamedProducer(q.Producer)); ok {
			if err := wait.Wait(ctx); err != nil {
				return err
			}
			p.LastSequence = &at.Last
		}
	}
	return c.send(&ingest.AppendResponse{Response: &ingest.AppendResponse_Opened{Opened: p}})
}

// named finds the stream that an Open names.
func (s *Server) named(ctx context.Context, q *ingest.Open) (target, error) {
	switch d := q.Directory; {
	case d != nil && q.Stream != "":
		return target{}, meta.E("append", meta.Invalid, q.Stream, errors.New("an Open has the path of a stream or its directory, and not both"))
	case d != nil && (d.Volume == 0 || d.Volume > uint64(meta.MaxVolume) || d.Inode == 0 || d.Inode > uint64(meta.LastIno)):
		return target{}, meta.E("append", meta.Invalid, "directory", fmt.Errorf("volume %d, inode %d is no directory", d.Volume, d.Inode))
	case d != nil:
		return s.directory(ctx, meta.VolumeID(d.Volume), meta.Ino(d.Inode))
	case !strings.HasPrefix(q.Stream, "/") || path.Clean(q.Stream) != q.Stream:
		return target{}, meta.E("append", meta.Invalid, q.Stream, errors.New("the path of a stream is like /volume/name"))
	}
	return s.find(ctx, q.Stream)
}

// read reads batches and appends until the client ends the call.
func (c *call) read(ctx context.Context, batches chan<- *taken) error {
	for {
		q, err := c.receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		t, err := c.take(ctx, q.GetBatch())
		c.inflow.decoded()
		if err != nil {
			return err
		}
		batches <- t // has room for a window, and no more messages are read
	}
}

// take appends the records of a batch.
func (c *call) take(ctx context.Context, q *ingest.Batch) (*taken, error) {
	bad := func(text string) (*taken, error) {
		return nil, meta.E("append", meta.Invalid, "batch", errors.New(text))
	}
	switch {
	case len(q.GetRecords()) == 0:
		return bad("each request after the Open is a Batch with records")
	case (c.series.name != "") != (q.Sequence != nil):
		return bad("a producer with a name gives the sequence number of each Batch, and only such a producer")
	}
	// The look-up tells the gateway that the partition is in use. A log that was opened again may
	// not have the batches before.
	l, err := c.target.partition(ctx, c.partition)
	if err == nil && l != c.series.log {
		err = meta.E("append", meta.Unavailable, "call", errors.New("the partition was opened again: open another call"))
	}
	if err != nil {
		return nil, err
	}
	c.series.most = c.target.batchBytes()
	now := time.Now().UnixMilli()
	records := make([]record, len(q.Records))
	for i, r := range q.Records {
		records[i] = record{time: now, key: r.Key, value: r.Value}
		if r.TimestampMs != nil {
			records[i].time = *r.TimestampMs
		}
		for _, h := range r.Headers {
			records[i].headers = append(records[i].headers, log.Header{Name: h.Name, Value: h.Value})
		}
	}
	first := q.GetSequence()
	previous := first - 1
	if q.PreviousSequence != nil {
		previous = *q.PreviousSequence
	}
	return c.series.append(records, first, previous)
}

// acknowledge tells the client what became of a batch.
func (c *call) acknowledge(t *taken) error {
	p := &ingest.Acknowledged{RepeatedRecords: int32(t.repeated)}
	for _, r := range t.runs {
		p.Appended = append(p.Appended, &ingest.Run{Record: int32(r.Record), Offset: r.Offset, Count: int32(r.Count)})
	}
	for _, r := range t.refused {
		p.Refused = append(p.Refused, &ingest.Refused{Record: int32(r.Record), Reason: reasonOf(r.Reason)})
	}
	if c.series.name != "" {
		p.LastSequence = &t.last
	}
	return c.send(&ingest.AppendResponse{Response: &ingest.AppendResponse_Acknowledged{Acknowledged: p}})
}

// send sends a response. A client that does not read responses loses the call.
func (c *call) send(p *ingest.AppendResponse) error {
	stuck := time.AfterFunc(c.inflow.s.cfg.Limits.Transfer, func() {
		// An error says that the client is gone: the writes have ended.
		_ = c.deadlines.write(past)
	})
	defer stuck.Stop()
	if err := c.stream.Send(p); err != nil {
		return meta.E("append", meta.Unavailable, "call", err)
	}
	return nil
}
