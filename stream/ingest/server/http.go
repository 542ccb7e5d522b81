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
	"penstock.io/penstock/stream/log"
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
	Refused      []refused `json:"refused,omitempty"`
	RefusedCount int64     `json:"refused_count"`
	// RepeatedCount counts the records among AppendedCount that the partition had before.
	RepeatedCount int64 `json:"repeated_count,omitempty"`
	// LastSequence is the number of the producer's last record.
	LastSequence *int64 `json:"last_sequence,omitempty"`
	// Error says why the request ended early. The records after AppendedCount and RefusedCount
	// may or may not be in the stream.
	Error string `json:"error,omitempty"`
}

// refused is a refused record.
type refused struct {
	Record int64  `json:"record"`
	Reason string `json:"reason"`
}

// maxListed bounds the listed runs and refusals of an answer.
const maxListed = 100

// refuse adds a refused record.
func (a *answer) refuse(number int64, why error) {
	if a.RefusedCount++; len(a.Refused) < maxListed {
		a.Refused = append(a.Refused, refused{Record: number, Reason: reasonOf(why)})
	}
}

// add adds what became of the records from a number on.
func (a *answer) add(number int64, t *taken) {
	for _, r := range t.runs {
		r.Record += number
		if runs := join(a.Appended, r); len(runs) <= maxListed {
			a.Appended = runs
		}
	}
	for _, r := range t.refused {
		a.refuse(number+r.Record, r.Reason)
	}
	a.AppendedCount += t.count
	a.RepeatedCount += t.repeated
}

// Types of the body of a request.
const (
	typeLines = "application/x-ndjson" // a JSON value a line
	typeText  = "text/plain"           // any bytes a line
)

// Headers of the requests of a producer with a name.
const (
	headerProducer = "Penstock-Producer"
	headerSequence = "Penstock-Sequence"          // number of the first record
	headerPrevious = "Penstock-Previous-Sequence" // number of the record before; default: one less
)

// upload is an HTTP request with records.
type upload struct {
	s      *Server
	target target
	series series
	first  int64 // sequence number of the next record, with a producer
	before int64 // sequence number of the record before, with a producer
	json   bool  // each line is JSON
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
	if other, ok := errors.AsType[*elsewhere](err); ok {
		redirect(w, r, u.answer.Partition, other)
		return
	}
	if err != nil {
		refuse(w, err)
		return
	}
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(errStopping) })()
	size := int64(4 * fullBatch) // lines, the last of which has up to maxRecord, and their batch
	if r.ContentLength >= 0 {
		size = min(size, 3*r.ContentLength+recordCosts)
	}
	for more := true; more && err == nil; {
		more, err = u.step(ctx, size)
	}
	reply(w, &u.answer, err)
}

// open examines a request and finds the partition. With the error *elsewhere, the upload says which.
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
	if u.series.format = u.target.format; kind == typeLines {
		u.series.format, u.json = "json", true
	}
	if err := u.numbers(r); err != nil {
		return nil, err
	}
	u.answer.Partition = s.choose(u.series.name, &u.target)
	if text := r.URL.Query().Get("partition"); text != "" {
		n, err := strconv.ParseInt(text, 10, 32)
		if err != nil {
			return nil, meta.E(op, meta.Invalid, p, fmt.Errorf("partition %q is no number", text))
		}
		u.answer.Partition = int32(n)
	}
	// Before the body is read: the partition exists, and can be opened.
	if _, err := u.target.open(r.Context(), u.answer.Partition); err != nil {
		return u, err
	}
	u.lines = newLines(http.MaxBytesReader(w, r.Body, s.cfg.Limits.Body))
	return u, nil
}

// numbers reads the headers of a producer with a name. Errors: Invalid.
func (u *upload) numbers(r *http.Request) error {
	bad := func(text string, args ...any) error {
		return meta.E("append", meta.Invalid, u.answer.Stream, fmt.Errorf(text, args...))
	}
	number := func(header string) (n int64, err error) {
		if n, err = strconv.ParseInt(r.Header.Get(header), 10, 64); err != nil || n < 0 || n > log.MaxNumber {
			err = bad("the header %s is %q, not a number of 0 to %d", header, r.Header.Get(header), int64(log.MaxNumber))
		}
		return n, err
	}
	if u.series.name = r.Header.Get(headerProducer); u.series.name == "" {
		if r.Header.Get(headerSequence) != "" || r.Header.Get(headerPrevious) != "" {
			return bad("sequence numbers are of a producer: send the header %s, too", headerProducer)
		}
		return nil
	}
	if err := checkName(u.series.name); err != nil {
		return err
	}
	var err error
	if u.first, err = number(headerSequence); err != nil {
		return err
	}
	u.before = u.first - 1
	if r.Header.Get(headerPrevious) != "" {
		u.before, err = number(headerPrevious)
	}
	return err
}

// recordCost is what a record takes in memory beside its bytes; a step takes records of at most
// recordCosts and a third of its memory.
const (
	recordCost  = 128
	recordCosts = 32 << 10
)

// step appends the next records and waits until they are durable. more is false after the last
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
	var records []record
	bytes := 0
	for more = true; more && err == nil && bytes < fullBatch && len(records)*recordCost < recordCosts+int(size)/3; {
		var r record
		var ok bool
		if r, ok, more, err = u.read(); ok {
			records = append(records, r)
			bytes += len(r.value)
		}
	}
	// The records before an error of the transfer are appended, too, as the answer says.
	if len(records) == 0 {
		return more && err == nil, err
	}
	if aerr := u.take(ctx, records); aerr != nil {
		return false, errors.Join(aerr, err)
	}
	return more && err == nil, err
}

// take appends records, and adds to the answer what became of the records.
func (u *upload) take(ctx context.Context, records []record) error {
	var err error
	if u.series.log, err = u.target.partition(ctx, u.answer.Partition); err != nil {
		return err
	}
	u.series.most = u.target.batchBytes()
	t, err := u.series.append(records, u.first, u.before)
	if err == nil {
		err = t.wait(ctx)
	}
	if err != nil {
		return err
	}
	u.answer.add(u.number, t)
	u.number += int64(len(records))
	if u.series.name != "" {
		u.first += int64(len(records))
		u.before = u.series.last
		u.answer.LastSequence = &t.last
	}
	return nil
}

// read reads the next line; ok is false for an empty line, more after the last line.
func (u *upload) read() (r record, ok, more bool, err error) {
	line, long, err := u.lines.next(maxRecord)
	if errors.Is(err, io.EOF) {
		return r, false, false, nil
	}
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); !ok {
			err = meta.E("read body", meta.Protocol, u.answer.Stream, err)
		}
		return r, false, false, err
	}
	if len(line) == 0 && !long && u.json {
		return r, false, true, nil
	}
	// The line is valid until the next call.
	return record{time: time.Now().UnixMilli(), value: append([]byte{}, line...), long: long}, true, true, nil
}
