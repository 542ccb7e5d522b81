package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"path"
	"strconv"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/partition"
)

// answer is the JSON of a response.
type answer struct {
	Stream    string `json:"stream,omitempty"`
	Partition int32  `json:"partition"`
	// Appended lists the durable records, in at most maxListed runs; AppendedCount counts all
	// durable records. The records of the request are numbered from 0 on.
	Appended      []run `json:"appended"`
	AppendedCount int64 `json:"appended_count"`
	// Refused lists the first maxListed refused records, RefusedCount counts all refused records.
	Refused      []refusal `json:"refused,omitempty"`
	RefusedCount int64     `json:"refused_count"`
	// Error says why the request ended early. The records after AppendedCount and RefusedCount
	// may or may not be in the stream.
	Error string `json:"error,omitempty"`
}

// run is a run of records with consecutive offsets.
type run struct {
	Record int64 `json:"record"` // number of the first record in the request
	Offset int64 `json:"offset"` // of the first record
	Count  int64 `json:"count"`
}

// refusal is a record that does not fit its stream.
type refusal struct {
	Record int64  `json:"record"`
	Reason string `json:"reason"`
}

// maxListed bounds the listed runs and refusals of an answer.
const maxListed = 100

// refuse adds a refused record.
func (a *answer) refuse(number int64, why error) {
	a.RefusedCount++
	if len(a.Refused) >= maxListed {
		return
	}
	reason := why.Error()
	if e, ok := errors.AsType[*meta.Error](why); ok && e.Err != nil {
		reason = e.Err.Error()
	}
	a.Refused = append(a.Refused, refusal{Record: number, Reason: reason})
}

// appended adds the durable records of a batch.
func (a *answer) appended(base int64, runs []run, count int64) {
	a.AppendedCount += count
	for _, r := range runs {
		r.Offset += base
		a.Appended = join(a.Appended, r)
	}
}

// join adds a run to a list of runs. Runs that follow each other become one; of further runs the
// list has the first maxListed.
func join(runs []run, r run) []run {
	if n := len(runs); n > 0 {
		last := &runs[n-1]
		if last.Record+last.Count == r.Record && last.Offset+last.Count == r.Offset {
			last.Count += r.Count
			return runs
		}
		if n >= maxListed {
			return runs
		}
	}
	return append(runs, r)
}

// Types of the body of a request.
const (
	typeLines = "application/x-ndjson" // a JSON value a line
	typeText  = "text/plain"           // any bytes a line
)

// upload is an HTTP request with records.
type upload struct {
	s      *Server
	target target
	format string // that the values must have
	lines  *lines
	number int64 // of records so far
	answer answer
	// deadline moves the deadline of the transfer of the body.
	deadline func(time.Time) error
}

// appendLines appends each line of the body as the value of a record. Empty lines of JSON lines
// are skipped.
func (s *Server) appendLines(w http.ResponseWriter, r *http.Request) {
	u, err := s.open(w, r)
	if err != nil {
		refuse(w, err)
		return
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(errStopping) })()
	size := int64(4 * fullBatch) // lines of up to maxRecord, and their batch
	if r.ContentLength >= 0 {
		size = min(size, 2*r.ContentLength+16<<10)
	}
	for more := true; more && err == nil; {
		more, err = u.step(ctx, size)
	}
	reply(w, &u.answer, err)
}

// open examines a request and finds the partition.
func (s *Server) open(w http.ResponseWriter, r *http.Request) (*upload, error) {
	const op = "append"
	p := path.Join("/", r.PathValue("path"))
	u := &upload{s: s, answer: answer{Stream: p, Appended: []run{}}, deadline: http.NewResponseController(w).SetReadDeadline}
	if r.ContentLength > s.cfg.Limits.Body {
		return nil, meta.E(op, meta.TooBig, p, fmt.Errorf("a body has at most %d bytes: send several requests", s.cfg.Limits.Body))
	}
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != typeLines && kind != typeText || r.Header.Get("Content-Encoding") != "" {
		return nil, meta.E(op, meta.NotSupported, p, fmt.Errorf("send Content-Type: %s (a JSON value a line) or %s (a record a line), without Content-Encoding", typeLines, typeText))
	}
	if u.target, err = s.find(r.Context(), p); err != nil {
		return nil, err
	}
	if u.format = u.target.format; kind == typeLines {
		u.format = "json"
	}
	u.answer.Partition = int32(s.turn.Add(1) % uint32(u.target.partitions))
	if text := r.URL.Query().Get("partition"); text != "" {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return nil, meta.E(op, meta.Invalid, p, fmt.Errorf("partition %q is no number", text))
		}
		u.answer.Partition = int32(n)
	}
	// Before the body is read: the partition exists, and can be opened.
	if _, err := u.target.partition(r.Context(), u.answer.Partition); err != nil {
		return nil, err
	}
	u.lines = newLines(http.MaxBytesReader(w, r.Body, s.cfg.Limits.Body))
	return u, nil
}

// step appends the next batch and waits until the batch is durable. more is false after the last
// record.
func (u *upload) step(ctx context.Context, size int64) (more bool, err error) {
	release, err := u.s.reserve(ctx, size)
	if err != nil {
		return false, err
	}
	defer release()
	if err := u.deadline(time.Now().Add(u.s.cfg.Limits.Transfer)); err != nil {
		return false, err
	}
	var b batch
	var runs []run // offsets are relative to the batch
	more = true
	for more && err == nil && !b.full() {
		more, err = u.read(&b, &runs)
	}
	// The records before an error of the transfer are appended, too, as the answer says.
	if b.Records == 0 {
		return more && err == nil, err
	}
	l, aerr := u.target.partition(ctx, u.answer.Partition)
	if aerr != nil {
		return false, errors.Join(aerr, err)
	}
	var a *partition.Append
	if a, aerr = l.Append(b.encode()); aerr == nil {
		aerr = a.Wait(ctx)
	}
	if aerr != nil {
		return false, errors.Join(aerr, err)
	}
	u.answer.appended(a.Base, runs, int64(b.Records))
	return more && err == nil, err
}

// read reads the next line into a batch, and adds the record to the runs of the batch; more is
// false after the last line.
func (u *upload) read(b *batch, runs *[]run) (more bool, err error) {
	line, long, err := u.lines.next(maxRecord)
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return false, err
		}
		return false, meta.E("read body", meta.Protocol, u.answer.Stream, err)
	}
	if long {
		u.answer.refuse(u.number, fmt.Errorf("a record of more than %d bytes", maxRecord))
		u.number++
		return true, nil
	}
	if len(line) == 0 && u.format == "json" {
		return true, nil
	}
	r := record{time: time.Now().UnixMilli(), value: line}
	if why := r.check(u.format); why != nil {
		u.answer.refuse(u.number, why)
	} else {
		*runs = join(*runs, run{Record: u.number, Offset: int64(b.Records), Count: 1})
		b.add(&r)
	}
	u.number++
	return true, nil
}
