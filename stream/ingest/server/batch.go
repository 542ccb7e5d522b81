package server

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"unicode/utf8"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// Bounds of records and batches, in bytes.
const (
	maxRecord = 1 << 20 // key, value and headers of a record
	fullBatch = 1 << 20 // a batch takes no further record from this size on
	maxHeader = 1 << 16 // names and number of a record's headers, with the values in maxRecord
)

// record is a record to append; nil stands for null.
type record struct {
	time    int64 // ms since 1970
	key     []byte
	value   []byte
	headers []log.Header
	long    bool // the record was skipped, because the value is longer than maxRecord
}

// recordFrame is more than a record has beside its key, value and headers, in bytes, when the record is
// alone in a batch; headerFrame is the same for a header.
const (
	recordFrame = 64
	headerFrame = 2 * binary.MaxVarintLen32
)

// alone returns the size of a batch with the record alone, in bytes, if the size may be more than
// most; else a number that is at most most.
func (r *record) alone(size, most int) int {
	if n := log.HeaderSize + recordFrame + size + headerFrame*len(r.headers); n <= most {
		return n
	}
	return log.HeaderSize + len(log.AppendRecord(nil, 0, 0, r.key, r.value, r.headers))
}

// check says why a record can't be in a stream whose values have a format, and whose batches have at
// most some bytes, as an error for the producer. Errors: TooBig, Invalid.
func (r *record) check(format string, most int) error {
	bad := func(kind meta.Kind, text string, args ...any) error {
		return meta.E("check record", kind, "record", fmt.Errorf(text, args...))
	}
	size, names := len(r.key)+len(r.value), 0
	for _, h := range r.headers {
		size += len(h.Name) + len(h.Value)
		names += len(h.Name) + 1
	}
	switch {
	case r.long:
		return bad(meta.TooBig, "a record of more than %d bytes", maxRecord)
	case size > maxRecord:
		return bad(meta.TooBig, "a record of %d bytes is larger than %d", size, maxRecord)
	case names > maxHeader:
		return bad(meta.TooBig, "the names of %d headers are longer than %d bytes", len(r.headers), maxHeader)
	case r.alone(size, most) > most:
		return bad(meta.TooBig, "a batch with the record alone has %d bytes, max.message.bytes of the stream is %d", r.alone(size, most), most)
	case r.time < 0:
		return bad(meta.Invalid, "the time %d is before 1970", r.time)
	case r.value == nil:
		return nil
	case format == "json":
		if err := checkJSON(r.value); err != nil {
			return bad(meta.Invalid, "the value is not JSON: %w", err)
		}
	case format == "utf8" && !utf8.Valid(r.value):
		return bad(meta.Invalid, "the value is not UTF-8")
	}
	return nil
}

// checkJSON verifies that bytes are one JSON value.
func checkJSON(p []byte) error {
	if !utf8.Valid(p) {
		return errors.New("it is not UTF-8")
	}
	if json.Valid(p) {
		return nil
	}
	var v json.RawMessage
	if err := json.Unmarshal(p, &v); err != nil {
		return err
	}
	return errors.New("bytes follow the value")
}

// batch collects records for a batch of a log.
type batch struct {
	log.Batch
	most    int // bytes of the batch
	records []byte
}

// add adds a record. A record that would make the batch too large is not added, beside the first
// record; add returns false then.
func (b *batch) add(r *record) bool {
	if b.Records == 0 {
		b.BaseTime, b.MaxTime = r.time, r.time
	}
	records := log.AppendRecord(b.records, b.Records, r.time-b.BaseTime, r.key, r.value, r.headers)
	if b.Records > 0 && log.HeaderSize+len(records) > b.most {
		return false
	}
	b.records = records
	b.MaxTime, b.LastDelta = max(b.MaxTime, r.time), b.Records
	b.Records++
	return true
}

// full reports that the batch takes no further record.
func (b *batch) full() bool { return len(b.records) >= fullBatch }
