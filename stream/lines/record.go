// Package lines shows the records of a partition as lines of text, for programs that read a
// stream as a file: the package owns the text of a record, and the place of a reader in the text.
//
// A line is a JSON object with the fields partition, offset, timestamp (ms since 1970, or null),
// key, value and headers (an array of objects with name and value). Bytes that are UTF-8 are
// text. Other bytes are base64, in a field whose name ends with _base64: key_base64,
// value_base64. null stands for an absent key or value. Values of a stream of the format json are
// the JSON values themselves; a value that is not JSON is shown like the values of other streams.
// In place of the records of a batch that can't be decoded, a line has partition, offset, records
// (their number) and error.
package lines

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strconv"
	"unicode/utf8"

	"penstock.io/penstock/stream/log"
)

// appendRecord appends the line of a record. asJSON: the value is shown as JSON, if it is.
func appendRecord(to []byte, partition int, r *log.Record, asJSON bool) []byte {
	to = appendPlace(to, partition, r.Offset)
	to = append(to, `,"timestamp":`...)
	if r.Time < 0 {
		to = append(to, "null"...)
	} else {
		to = strconv.AppendInt(to, r.Time, 10)
	}
	to = appendBytes(append(to, ','), "key", r.Key)
	to = append(to, ',')
	if value, ok := compact(r.Value, asJSON); ok {
		to = append(append(to, `"value":`...), value...)
	} else {
		to = appendBytes(to, "value", r.Value)
	}
	to = append(to, `,"headers":[`...)
	for i, h := range r.Headers {
		if i > 0 {
			to = append(to, ',')
		}
		to = appendBytes(append(to, '{'), "name", []byte(h.Name))
		to = appendBytes(append(to, ','), "value", h.Value)
		to = append(to, '}')
	}
	return append(to, "]}\n"...)
}

// appendFailure appends the line that stands for records that can't be decoded.
func appendFailure(to []byte, partition int, offset, records int64, why error) []byte {
	to = appendPlace(to, partition, offset)
	to = strconv.AppendInt(append(to, `,"records":`...), records, 10)
	to = appendText(append(to, `,"error":`...), why.Error())
	return append(to, "}\n"...)
}

func appendPlace(to []byte, partition int, offset int64) []byte {
	to = strconv.AppendInt(append(to, `{"partition":`...), int64(partition), 10)
	return strconv.AppendInt(append(to, `,"offset":`...), offset, 10)
}

// compact returns a JSON value without line feeds; ok is false if p is no JSON, or JSON is not
// wanted.
func compact(p []byte, wanted bool) (value []byte, ok bool) {
	if !wanted || !utf8.Valid(p) {
		return nil, false
	}
	var b bytes.Buffer
	if err := json.Compact(&b, p); err != nil {
		return nil, false
	}
	return b.Bytes(), true
}

// appendBytes appends a field with bytes: as text, in base64, or null.
func appendBytes(to []byte, name string, p []byte) []byte {
	to = append(append(to, '"'), name...)
	switch {
	case p == nil:
		return append(to, `":null`...)
	case utf8.Valid(p):
		return appendText(append(to, `":`...), string(p))
	}
	to = base64.StdEncoding.AppendEncode(append(to, `_base64":"`...), p)
	return append(to, '"')
}

// appendText appends a JSON string.
func appendText(to []byte, s string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(s); err != nil {
		panic("lines: a string can't be encoded: " + err.Error())
	}
	return append(to, bytes.TrimSuffix(b.Bytes(), []byte("\n"))...)
}
