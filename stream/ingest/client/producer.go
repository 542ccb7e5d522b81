// Package client appends records to streams through gateways: the package owns the sequence
// numbers of a producer, and the decision what to send again after a failure.
package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/ingest"
)

// Config configures a Producer.
type Config struct {
	// Gateways are addresses, host:port, of the gRPC servers of gateways. The Producer asks the
	// next one when one fails.
	Gateways []string
	// Find, if not nil, gives addresses in place of Gateways. The Producer calls Find before it
	// connects to a gateway that no other gateway has named.
	Find func(ctx context.Context) ([]string, error)
	// Stream is the path of the stream; "": Directory names the stream.
	Stream string
	// Directory is the directory of the stream.
	Directory *ingest.Directory
	// Name is the name of the producer, 1 to 256 bytes. One Producer at a time uses a name.
	Name string
	// Partition is the number of the partition; nil: the name determines the partition.
	Partition *int32
	// Next is the sequence number of the first record of Append; 0: the one after Last. Promised is
	// the number after the last one that an earlier Producer of the name may have sent; the first
	// records of Append are then those that the earlier Producer had numbered from Next on.
	Next, Promised int64
	// Impatient makes Append fail while the disk or the quota is full, in place of waiting for room.
	Impatient bool
	// Dial are options of the connections, such as credentials; nil: no encryption.
	Dial []grpc.DialOption
}

// Producer appends records to a partition of a stream, each exactly once: a Producer numbers the
// records, and sends records again until a gateway has acknowledged the records. The methods may
// be called concurrently; Append handles one call after the other.
type Producer struct {
	cfg     Config
	turn    chan struct{} // has room for the call that uses the fields below
	gateway int           // number of the gateway of conn
	sent    string        // address of another gateway, which a gateway has named; "": none
	conn    *grpc.ClientConn
	call    *call // nil: none is open

	partition *int32 // of the records; nil: not known yet
	known     bool   // a gateway has told the last number in the partition
	last      int64  // last number in the partition, as acknowledged or told; -1: none
	next      int64  // next number to be given out
}

// call is an Append call.
type call struct {
	grpc.BidiStreamingClient[ingest.AppendRequest, ingest.AppendResponse]
	cancel context.CancelFunc
}

// Result says what became of the records of an Append.
type Result struct {
	// Partition is the partition of the records.
	Partition int32
	// Offsets has the offset of each record; -1 of a refused record, and of a record that was
	// found in the partition when it was sent again, too late for the gateway to know the offset.
	Offsets []int64
	// Refused are the records that do not fit the stream: why, by the number of the record in
	// the call, from 0 on.
	Refused map[int]string
}

// New makes a Producer. Errors: Invalid.
func New(cfg Config) (*Producer, error) {
	if cfg.Stream == "" && cfg.Directory != nil {
		cfg.Stream = fmt.Sprintf("volume %d, inode %d", cfg.Directory.Volume, cfg.Directory.Inode)
	} else {
		cfg.Directory = nil
	}
	if len(cfg.Gateways) == 0 && cfg.Find == nil || cfg.Name == "" || cfg.Stream == "" {
		return nil, meta.E("make producer", meta.Invalid, cfg.Stream, errors.New("a producer has a name, a stream and the address of a gateway"))
	}
	if cfg.Dial == nil {
		cfg.Dial = []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}
	}
	return &Producer{cfg: cfg, turn: make(chan struct{}, 1), partition: cfg.Partition, last: -1}, nil
}

// Pauses between attempts.
const (
	firstPause = 20 * time.Millisecond
	lastPause  = time.Second
)

// maxDisputes bounds how often a gateway may deny, in a row, that the numbers follow each other.
const maxDisputes = 5

func (p *Producer) fail(kind meta.Kind, err error) error {
	return meta.E("append", kind, p.cfg.Stream, err)
}

// begin waits for the calls before.
func (p *Producer) begin(ctx context.Context) error {
	select {
	case p.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return p.fail(meta.Interrupted, context.Cause(ctx))
	}
}

func (p *Producer) end() { <-p.turn }

// Last returns the sequence number of the producer's last record in the partition; -1: the
// partition has no record of the producer, or has had none for 7 days. The next Append continues
// after this number, so that a program which was killed knows what to append next. Errors: as of
// Append.
func (p *Producer) Last(ctx context.Context) (int64, error) {
	if err := p.begin(ctx); err != nil {
		return 0, err
	}
	defer p.end()
	if p.known {
		return p.last, nil
	}
	err := p.retry(ctx, func() error { return nil })
	return p.last, err
}

// Append appends records, at most 4 MiB and 16,384 records and headers together, and waits until
// they are durable. After an error the records may be in the partition, in part or in the whole;
// the next Append continues in any case, with other numbers. Errors: Interrupted (ctx has ended),
// NotFound (no such stream or partition), Invalid, AccessDenied, WrongOffset (another
// producer uses the name), NoSpace and QuotaExceeded (Config.Impatient), Stale (a rollback has cut acknowledged records off the log, or the partition has
// forgotten the producer; the next Append goes on there).
func (p *Producer) Append(ctx context.Context, records ...*ingest.Record) (*Result, error) {
	if len(records) == 0 {
		return &Result{}, nil
	}
	if err := p.begin(ctx); err != nil {
		return nil, err
	}
	defer p.end()
	first, numbered := int64(0), false
	var r *Result
	err := p.retry(ctx, func() (err error) {
		if !numbered {
			// A number is given out once: a batch that failed may still come into the partition.
			first, numbered = p.next, true
			p.next += int64(len(records))
		}
		r, err = p.send(first, records)
		return err
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// retry runs work with an open call, again after failures that may go away.
func (p *Producer) retry(ctx context.Context, work func() error) error {
	disputes := 0
	for pause := firstPause; ; pause = min(2*pause, lastPause) {
		err := p.open(ctx)
		if err == nil {
			stop := context.AfterFunc(ctx, p.call.cancel)
			err = work()
			if !stop() && err == nil {
				p.drop() // ctx has ended just now, and the call with it
			}
		}
		if err == nil {
			return nil
		}
		p.drop()
		if ctx.Err() != nil {
			return p.fail(meta.Interrupted, errors.Join(context.Cause(ctx), err))
		}
		switch kind := meta.KindOf(err); kind {
		case meta.Unavailable:
			if p.sent == "" {
				p.gateway++
			}
			p.disconnect()
		case meta.WrongOffset:
			if disputes++; disputes > maxDisputes {
				return err
			}
		default:
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return p.fail(meta.Interrupted, errors.Join(context.Cause(ctx), err))
		}
	}
}

// open opens a call, unless one is open, and learns the last number in the partition.
func (p *Producer) open(ctx context.Context) error {
	if p.call != nil {
		return nil
	}
	if p.conn == nil {
		at, err := p.address(ctx)
		if err != nil {
			return err
		}
		conn, err := grpc.NewClient(at, p.cfg.Dial...)
		if err != nil {
			return p.fail(meta.Invalid, err)
		}
		p.conn = conn
	}
	// The call outlives ctx, which ends the wait for an answer only.
	of, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel)
	defer stop()
	stream, err := ingest.NewIngestClient(p.conn).Append(of)
	if err != nil {
		cancel()
		return p.of(err)
	}
	p.call = &call{stream, cancel}
	q := &ingest.Open{Stream: p.cfg.Stream, Directory: p.cfg.Directory, Partition: p.partition, Producer: p.cfg.Name}
	if q.Directory != nil {
		q.Stream = ""
	}
	a, err := p.ask(&ingest.AppendRequest{Request: &ingest.AppendRequest_Open{Open: q}})
	if err != nil {
		return err
	}
	opened := a.GetOpened()
	if opened == nil {
		return p.fail(meta.Protocol, errors.New("a gateway answered an Open with something else"))
	}
	// The name determines the partition together with the number of partitions, which may grow.
	p.partition = &opened.Partition
	last := int64(-1)
	if opened.LastSequence != nil {
		last = *opened.LastSequence
	}
	return p.learn(last)
}

// address returns the address of the gateway to connect to: the gateway that another gateway has
// named, else the next of the known gateways. Errors: Unavailable (no gateway is known now).
func (p *Producer) address(ctx context.Context) (string, error) {
	if at := p.sent; at != "" {
		p.sent = "" // if the named gateway fails, the Producer asks the known ones again
		return at, nil
	}
	known := p.cfg.Gateways
	if p.cfg.Find != nil {
		var err error
		if known, err = p.cfg.Find(ctx); err != nil {
			return "", p.fail(meta.Unavailable, err)
		}
	}
	if len(known) == 0 {
		return "", p.fail(meta.Unavailable, errors.New("no gateway that takes appends runs now"))
	}
	return known[p.gateway%len(known)], nil
}

// learn takes the last number in the partition from a gateway.
func (p *Producer) learn(last int64) error {
	before := p.last
	switch {
	case !p.known:
		p.known, p.last, p.next = true, last, cmp.Or(p.cfg.Next, last+1)
		if p.cfg.Next > 0 && last >= max(p.next, p.cfg.Promised) {
			return p.other(last)
		}
	case last < before:
		p.last = last
		return p.fail(meta.Stale, fmt.Errorf("the partition has the records up to number %d of producer %q, and %d was acknowledged: a rollback has undone records, or the partition has forgotten the producer", last, p.cfg.Name, before))
	case last >= max(p.next, p.cfg.Promised):
		return p.other(last)
	default:
		p.last = last
	}
	return nil
}

// other makes the error of a number that this Producer has not given.
func (p *Producer) other(last int64) error {
	return p.fail(meta.WrongOffset, fmt.Errorf("the partition has number %d of producer %q, and this producer has given numbers below %d: another producer uses the name", last, p.cfg.Name, max(p.next, p.cfg.Promised)))
}

// send sends a batch, and waits until it is durable.
func (p *Producer) send(first int64, records []*ingest.Record) (*Result, error) {
	b := &ingest.Batch{Sequence: &first, Records: records}
	if previous := p.last; previous < first {
		b.PreviousSequence = &previous
	}
	a, err := p.ask(&ingest.AppendRequest{Request: &ingest.AppendRequest_Batch{Batch: b}})
	if err != nil {
		return nil, err
	}
	done := a.GetAcknowledged()
	if done == nil {
		return nil, p.fail(meta.Protocol, errors.New("a gateway answered a Batch with something else"))
	}
	if done.LastSequence != nil && (len(done.Appended) > 0 || done.RepeatedRecords > 0) {
		p.last = max(p.last, *done.LastSequence)
	}
	r := &Result{Partition: *p.partition, Offsets: make([]int64, len(records))}
	for i := range r.Offsets {
		r.Offsets[i] = -1
	}
	for _, run := range done.Appended {
		for i := range run.Count {
			if n := int(run.Record + i); n >= 0 && n < len(r.Offsets) {
				r.Offsets[n] = run.Offset + int64(i)
			}
		}
	}
	for _, bad := range done.Refused {
		if r.Refused == nil {
			r.Refused = map[int]string{}
		}
		r.Refused[int(bad.Record)] = bad.Reason
	}
	return r, nil
}

// ask sends a request and receives its answer.
func (p *Producer) ask(q *ingest.AppendRequest) (*ingest.AppendResponse, error) {
	err := p.call.Send(q)
	if err != nil && !errors.Is(err, io.EOF) { // after io.EOF, Recv has the reason
		return nil, p.of(err)
	}
	a, err := p.call.Recv()
	if err != nil {
		if at := p.call.Trailer().Get(ingest.LeaderTrailer); len(at) == 1 {
			p.sent = at[0]
		}
		return nil, p.of(err)
	}
	return a, nil
}

// kinds are the kinds of the codes that ingest.proto names. Other codes are Unavailable: the
// connection failed, or the gateway can't serve the call now.
var kinds = map[codes.Code]meta.Kind{
	codes.NotFound:           meta.NotFound,
	codes.InvalidArgument:    meta.Invalid,
	codes.FailedPrecondition: meta.WrongOffset,
	codes.PermissionDenied:   meta.AccessDenied,
	codes.Unauthenticated:    meta.AccessDenied,
	codes.Unimplemented:      meta.NotSupported,
}

// full are the kinds of errors for which an impatient Producer does not wait.
var full = []meta.Kind{meta.NoSpace, meta.QuotaExceeded}

// of makes an error of the end of a call.
func (p *Producer) of(err error) error {
	for _, d := range status.Convert(err).Details() {
		info, ok := d.(*errdetails.ErrorInfo)
		for _, kind := range full {
			if ok && p.cfg.Impatient && info.Domain == ingest.ErrorDomain && info.Reason == kind.String() {
				return p.fail(kind, err)
			}
		}
	}
	if kind, ok := kinds[status.Code(err)]; ok {
		return p.fail(kind, err)
	}
	return p.fail(meta.Unavailable, err)
}

// drop ends the call.
func (p *Producer) drop() {
	if p.call != nil {
		p.call.cancel()
		p.call = nil
	}
}

func (p *Producer) disconnect() {
	if p.conn != nil {
		p.conn.Close() // nothing is under way
		p.conn = nil
	}
}

// Close ends the connection, after the calls under way.
func (p *Producer) Close() {
	p.turn <- struct{}{}
	defer p.end()
	p.drop()
	p.disconnect()
}
