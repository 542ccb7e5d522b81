package publish

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/parquet-go/parquet-go"

	"penstock.io/penstock/stream/log"
)

// rowMaker makes rows of records.
type rowMaker struct {
	*columns
	partition, offset, timestamp, key, headerName, headerValue int   // leaves
	values                                                     []int // leaves of the fields, or that of value
	row                                                        [][]parquet.Value
}

func newRowMaker(c *columns) *rowMaker {
	m := &rowMaker{columns: c, partition: c.leaf("partition"), offset: c.leaf("offset"), timestamp: c.leaf("timestamp"), key: c.leaf("key"),
		headerName: c.leaf("headers", "list", "element", "name"), headerValue: c.leaf("headers", "list", "element", "value"), row: make([][]parquet.Value, len(c.leaves))}
	for _, f := range c.fields {
		if f.Array {
			m.values = append(m.values, c.leaf(f.Name, "list", "element"))
		} else {
			m.values = append(m.values, c.leaf(f.Name))
		}
	}
	if len(c.fields) == 0 {
		m.values = []int{c.leaf("value")}
	}
	return m
}

// optional is the value of an optional column; null if p is nil.
func optional(p []byte) parquet.Value {
	if p == nil {
		return parquet.NullValue().Level(0, 0, 0)
	}
	return parquet.ByteArrayValue(p).Level(0, 1, 0)
}

// maxTime is the greatest time that microseconds since 1970 can express, in ms.
const maxTime = math.MaxInt64 / 1000

// make makes the row of a record. The row shares the record's memory. An error says why the
// record does not fit.
func (m *rowMaker) make(partition int, r *log.Record) (parquet.Row, error) {
	for i := range m.row {
		m.row[i] = m.row[i][:0]
	}
	put := func(leaf int, v parquet.Value) { m.row[leaf] = append(m.row[leaf], v) }
	put(m.partition, parquet.Int32Value(int32(partition)))
	put(m.offset, parquet.Int64Value(r.Offset))
	if r.Time < 0 || r.Time > maxTime {
		put(m.timestamp, parquet.NullValue())
	} else {
		put(m.timestamp, parquet.Int64Value(r.Time*1000).Level(0, 1, 0))
	}
	put(m.key, optional(r.Key))
	for i, h := range r.Headers {
		again := min(i, 1)
		put(m.headerName, parquet.ByteArrayValue([]byte(strings.ToValidUTF8(h.Name, "\uFFFD"))).Level(again, 1, 0))
		if h.Value == nil {
			put(m.headerValue, parquet.NullValue().Level(again, 1, 0))
		} else {
			put(m.headerValue, parquet.ByteArrayValue(h.Value).Level(again, 2, 0))
		}
	}
	if len(r.Headers) == 0 {
		put(m.headerName, parquet.NullValue())
		put(m.headerValue, parquet.NullValue())
	}
	if err := m.value(r.Value); err != nil {
		return nil, err
	}
	var row parquet.Row
	for leaf, values := range m.row {
		for _, v := range values {
			v.SetColumnIndex(leaf)
			row = append(row, v)
		}
	}
	return row, nil
}

// value sets the columns of a record's value.
func (m *rowMaker) value(p []byte) error {
	if len(m.fields) == 0 {
		switch {
		case p == nil:
		case m.format == UTF8 && !utf8.Valid(p):
			return fmt.Errorf("the value is not UTF-8")
		case m.format == JSON && (!utf8.Valid(p) || !json.Valid(p)):
			return fmt.Errorf("the value is no JSON")
		}
		m.row[m.values[0]] = append(m.row[m.values[0]], optional(p))
		return nil
	}
	var object map[string]json.RawMessage
	if p != nil {
		if err := json.Unmarshal(p, &object); err != nil {
			return fmt.Errorf("the value is no JSON object: %w", err)
		}
	}
	for i, f := range m.fields {
		var err error
		if m.row[m.values[i]], err = f.append(m.row[m.values[i]], object[f.Name]); err != nil {
			return fmt.Errorf("field %s: %w", f.Name, err)
		}
	}
	return nil
}

func null(p json.RawMessage) bool { return len(p) == 0 || string(p) == "null" }

// append appends the values of a field; p is the field's JSON, empty if the field is missing.
func (f *Field) append(to []parquet.Value, p json.RawMessage) ([]parquet.Value, error) {
	if null(p) {
		return append(to, parquet.NullValue()), nil
	}
	if !f.Array {
		v, err := scalar(f.Type, p)
		return append(to, v.Level(0, 1, 0)), err
	}
	var elements []json.RawMessage
	if err := json.Unmarshal(p, &elements); err != nil {
		return to, fmt.Errorf("it is no array")
	}
	if len(elements) == 0 {
		return append(to, parquet.NullValue().Level(0, 1, 0)), nil
	}
	for i, e := range elements {
		if null(e) {
			to = append(to, parquet.NullValue().Level(min(i, 1), 2, 0))
			continue
		}
		v, err := scalar(f.Type, e)
		if err != nil {
			return to, fmt.Errorf("element %d: %w", i, err)
		}
		to = append(to, v.Level(min(i, 1), 3, 0))
	}
	return to, nil
}

// scalar decodes a JSON value that is not null.
func scalar(typ string, p json.RawMessage) (v parquet.Value, err error) {
	text := string(bytes.TrimSpace(p))
	misfit := func() (parquet.Value, error) { return v, fmt.Errorf("%s is no %s", shorten(text), typ) }
	switch typ {
	case "boolean":
		if text != "true" && text != "false" {
			return misfit()
		}
		return parquet.BooleanValue(text == "true"), nil
	case "integer", "long":
		bits := 64
		if typ == "integer" {
			bits = 32
		}
		n, err := strconv.ParseInt(text, 10, bits)
		if err != nil {
			return misfit()
		}
		if bits == 32 {
			return parquet.Int32Value(int32(n)), nil
		}
		return parquet.Int64Value(n), nil
	case "float", "double":
		var n float64
		if json.Unmarshal(p, &n) != nil || typ == "float" && math.IsInf(float64(float32(n)), 0) {
			return misfit()
		}
		if typ == "float" {
			return parquet.FloatValue(float32(n)), nil
		}
		return parquet.DoubleValue(n), nil
	}
	var s string
	if json.Unmarshal(p, &s) != nil {
		return misfit()
	}
	switch typ {
	case "timestamp":
		at, err := time.Parse(time.RFC3339Nano, s)
		if err != nil {
			return misfit()
		}
		return parquet.Int64Value(at.UnixMicro()), nil
	case "binary":
		b, err := base64.StdEncoding.DecodeString(s)
		if err != nil {
			return misfit()
		}
		return parquet.ByteArrayValue(b), nil
	default:
		return parquet.ByteArrayValue([]byte(s)), nil
	}
}

// shorten cuts a text for a message.
func shorten(s string) string {
	if len(s) > 60 {
		return strings.ToValidUTF8(s[:60], "") + "..."
	}
	return s
}
