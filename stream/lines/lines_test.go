package lines

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/stream/partition"
)

// memory is a partition with one segment, in memory.
type memory struct {
	bytes []byte
	next  int64
	err   error
}

func (m *memory) Segments(context.Context) ([]int64, error) { return []int64{0}, m.err }
func (m *memory) Size(_ context.Context, first int64) (int64, error) {
	if m.err == nil && first != 0 {
		return 0, meta.E("open", meta.NotFound, "segment", nil)
	}
	return int64(len(m.bytes)), m.err
}

func (m *memory) ReadAt(_ context.Context, _ int64, p []byte, off int64) (int, error) {
	n := copy(p, m.bytes[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, m.err
}

// add appends a batch.
func (m *memory) add(compression int16, squeeze func([]byte) []byte, records ...log.Record) {
	var p []byte
	for i, r := range records {
		p = log.AppendRecord(p, int32(i), r.Time-records[0].Time, r.Key, r.Value, r.Headers)
	}
	if squeeze != nil {
		p = squeeze(p)
	}
	n := int32(len(records))
	b := log.Batch{Base: m.next, LeaderEpoch: 1, Attributes: compression, LastDelta: n - 1, Records: n, BaseTime: records[0].Time, MaxTime: records[0].Time, Producer: log.NoProducer, Epoch: -1, Sequence: -1}
	m.bytes, m.next = append(m.bytes, b.Encode(p)...), m.next+int64(n)
}

func tailOf(t *testing.T, m *memory, offset int64, skip int, asJSON bool) *Tail {
	t.Helper()
	from, err := partition.OpenTail(t.Context(), m, "test", offset)
	if err != nil {
		t.Fatal(err)
	}
	return NewTail(from, 7, asJSON, skip)
}

// read reads until n bytes came, with a buffer of a size.
func read(t *testing.T, tl *Tail, n, size int) string {
	t.Helper()
	var all []byte
	for len(all) < n {
		p := make([]byte, size)
		m, err := tl.Read(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, p[:m]...)
	}
	return string(all)
}

func TestRecords(t *testing.T) {
	m := &memory{}
	squeeze := func(p []byte) []byte {
		w, _ := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
		return w.EncodeAll(p, nil)
	}
	m.add(log.Plain, nil, log.Record{Time: 5, Value: []byte("text \"<\n\u2028")}, log.Record{Time: -1})
	m.add(log.Zstd, squeeze, log.Record{Time: 6, Key: []byte("k"), Value: []byte{0xff, 0}, Headers: []log.Header{{Name: "h", Value: []byte("v")}, {Name: "\xff"}}})
	m.add(log.Plain, nil, log.Record{Time: 7, Key: []byte{0xfe}, Value: []byte("{\"a\":\n [1, 2]}")})
	m.add(log.Gzip, func([]byte) []byte { return []byte("no gzip") }, log.Record{Time: 8}, log.Record{Time: 8})
	m.add(log.Plain, nil, log.Record{Time: 9, Value: []byte("")})
	want := `{"partition":7,"offset":0,"timestamp":5,"key":null,"value":"text \"<\n\u2028","headers":[]}
{"partition":7,"offset":1,"timestamp":null,"key":null,"value":null,"headers":[]}
{"partition":7,"offset":2,"timestamp":6,"key":"k","value_base64":"/wA=","headers":[{"name":"h","value":"v"},{"name_base64":"/w==","value":null}]}
{"partition":7,"offset":3,"timestamp":7,"key_base64":"/g==","value":"{\"a\":\n [1, 2]}","headers":[]}
{"partition":7,"offset":4,"records":2,"error":"unexpected EOF"}
{"partition":7,"offset":6,"timestamp":9,"key":null,"value":"","headers":[]}
`
	got := read(t, tailOf(t, m, 0, 0, false), len(want), 4096)
	if got != want {
		t.Errorf("DATA: got\n%s\nwant\n%s", got, want)
	}
	for line := range strings.Lines(got) {
		if !json.Valid([]byte(line)) {
			t.Errorf("DATA: %q is no JSON", line)
		}
	}
	asJSON := strings.Replace(want, `"{\"a\":\n [1, 2]}"`, `{"a":[1,2]}`, 1)
	if got := read(t, tailOf(t, m, 0, 0, true), len(asJSON), 4096); got != asJSON {
		t.Errorf("DATA: as JSON, got\n%s\nwant\n%s", got, asJSON)
	}
	// From each place, the text goes on.
	tl := tailOf(t, m, 0, 0, false)
	for at := range len(want) {
		offset, skip := tl.Place()
		if rest := read(t, tailOf(t, m, offset, skip, false), len(want)-at, 50); rest != want[at:] {
			t.Fatalf("DATA: from byte %d, offset %d and %d bytes: %q", at, offset, skip, rest)
		}
		if c := read(t, tl, 1, 1); c != want[at:at+1] {
			t.Fatalf("DATA: byte %d is %q", at, c)
		}
	}
}

// TestManyRecords: a batch with more text than is made at once, and a wait that ends.
func TestManyRecords(t *testing.T) {
	m := &memory{}
	value := []byte(strings.Repeat("x", 1000))
	records := make([]log.Record, 1000)
	for i := range records {
		records[i] = log.Record{Time: 1, Value: value}
	}
	m.add(log.Plain, nil, records...)
	tl := tailOf(t, m, 0, 0, false)
	lines := 0
	for lines < len(records) {
		p := make([]byte, 70_000)
		n, err := tl.Read(t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		lines += strings.Count(string(p[:n]), "\n")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := tl.Read(ctx, make([]byte, 1)); n != 0 || !errors.Is(err, meta.Interrupted) {
		t.Errorf("a wait that was ended: %d, %v", n, err)
	}
	m.err = meta.E("read", meta.Stale, "partition", nil)
	if n, err := tl.Read(t.Context(), make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("a partition that was removed: %d, %v", n, err)
	}
}
