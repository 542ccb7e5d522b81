package publish

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
	"github.com/parquet-go/parquet-go"
	"github.com/pierrec/lz4/v4"

	"penstock.io/penstock/stream/decompress"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/table/delta"
)

func open(t testing.TB, d *memFiles, cfg Config) *Table {
	t.Helper()
	control := os.Getenv("PENSTOCK_CONTROL")
	cfg.Unsafe = Unsafe{NoBase: control == "table-nobase", NoFence: control == "table-nofence"}
	table, err := Open(context.Background(), d, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// publishAll publishes until nothing is left.
func publishAll(table *Table, logs map[int]Log) error {
	for {
		more, err := table.Publish(context.Background(), logs)
		if err != nil || !more {
			return err
		}
	}
}

// tableRow is a row of a table with the format utf8.
type tableRow struct {
	Partition int32   `parquet:"partition"`
	Offset    int64   `parquet:"offset"`
	Timestamp *int64  `parquet:"timestamp,optional"`
	Key       []byte  `parquet:"key,optional"`
	Value     *string `parquet:"value,optional"`
}

// values reads the table's rows by its Delta log: the values of each partition by offset. A
// repeated row and a missing offset are errors.
func values(d *memFiles) (map[int32][]string, error) {
	table, err := delta.Open(context.Background(), logFiles{d})
	if err != nil {
		return nil, err
	}
	all := map[int32]map[int64]string{}
	for p, a := range table.State().Files {
		f, ok := d.files[p]
		if !ok || int64(len(f.data)) != a.Size {
			return nil, fmt.Errorf("%s is in the table with %d bytes, and has %d (there: %v)", p, a.Size, len(f.data), ok)
		}
		rows, err := parquet.Read[tableRow](bytes.NewReader(f.data), a.Size)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		for _, r := range rows {
			if all[r.Partition] == nil {
				all[r.Partition] = map[int64]string{}
			}
			if _, twice := all[r.Partition][r.Offset]; twice {
				return nil, fmt.Errorf("partition %d has offset %d twice", r.Partition, r.Offset)
			}
			all[r.Partition][r.Offset] = *r.Value
		}
	}
	lists := map[int32][]string{}
	for n, m := range all {
		for o := range int64(len(m)) {
			v, ok := m[o]
			if !ok {
				return nil, fmt.Errorf("partition %d has %d records and no offset %d", n, len(m), o)
			}
			lists[n] = append(lists[n], v)
		}
	}
	return lists, nil
}

func value(partition, i int) string { return fmt.Sprintf("value %d of partition %d", i, partition) }

func (l *memLog) produce(partition, n int) {
	var records []log.Record
	for i := range n {
		records = append(records, log.Record{Time: 1000, Key: []byte("k"), Value: []byte(value(partition, int(l.high)+i))})
	}
	l.add(log.Plain, nil, records...)
}

// verify compares the table with the produced records.
func verify(d *memFiles, counts map[int]int) error {
	got, err := values(d)
	if err != nil {
		return err
	}
	for n, count := range counts {
		var want []string
		for i := range count {
			want = append(want, value(n, i))
		}
		if !slices.Equal(got[int32(n)], want) {
			return fmt.Errorf("partition %d has %d records, want %d", n, len(got[int32(n)]), count)
		}
	}
	return nil
}

// TestCrashes crashes the publisher at each change of the stream's directory; the next one goes on.
// The table must have each record once, whether the last change was made or not.
func TestCrashes(t *testing.T) {
	const rounds = 10
	for _, done := range []bool{false, true} {
		for left := 0; left < 45; left++ {
			d := newMemFiles()
			d.left, d.done = left, done
			a, b := &memLog{}, &memLog{}
			logs := map[int]Log{0: a, 1: b}
			var table *Table
			for round := range rounds {
				a.produce(0, 3)
				if round%2 == 0 {
					b.produce(1, 2)
				}
				for {
					var err error
					if table == nil {
						table, err = Open(t.Context(), d, Config{Format: UTF8})
					}
					if err == nil {
						err = publishAll(table, logs)
					}
					if err == nil {
						break
					}
					if !errors.Is(err, errCrash) {
						t.Fatalf("DATA: after a crash at change %d: %v", left, err)
					}
					d, table = d.restart(), nil
				}
			}
			if err := verify(d, map[int]int{0: 3 * rounds, 1: rounds}); err != nil {
				t.Fatalf("DATA: after a crash at change %d (made: %v): %v", left, done, err)
			}
		}
	}
}

// TestTwoPublishers: two publishers of the same partitions publish each record once.
func TestTwoPublishers(t *testing.T) {
	d := newMemFiles()
	a, b := &memLog{}, &memLog{}
	logs := map[int]Log{0: a, 1: b}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			table := open(t, d, Config{Format: UTF8})
			for range 30 {
				if err := publishAll(table, logs); err != nil {
					t.Error(err)
				}
			}
			for a, b := 0, 0; a < 60 || b < 60; a, b = int(table.Published(0)), int(table.Published(1)) {
				if err := publishAll(table, logs); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 20 {
		a.produce(0, 3)
		b.produce(1, 3)
	}
	wg.Wait()
	if err := verify(d, map[int]int{0: 60, 1: 60}); err != nil {
		t.Error("DATA:", err)
	}
	table := open(t, d, Config{Format: UTF8})
	if n := len(spans(table.table.State(), 0)); n >= 2*joinCount {
		t.Errorf("partition 0 has %d files: they were not joined", n)
	}
}

// TestOvertaken: a publisher whose records another publisher published, between the file and the
// commit of the first, commits nothing, and removes its file.
func TestOvertaken(t *testing.T) {
	d := newMemFiles()
	l := &memLog{}
	logs := map[int]Log{0: l}
	slow, fast := open(t, d, Config{Format: UTF8}), open(t, d, Config{Format: UTF8})
	for round := range 3 {
		l.produce(0, 3)
		d.before = func(name string) {
			if strings.HasPrefix(name, "_delta_log/") {
				d.before = nil
				l.produce(0, 1)
				if err := publishAll(fast, logs); err != nil {
					t.Error(err)
				}
			}
		}
		if err := publishAll(slow, logs); err != nil {
			t.Fatal(err)
		}
		if err := verify(d, map[int]int{0: 4 * (round + 1)}); err != nil {
			t.Fatal("DATA:", err)
		}
	}
	n := 0
	for name := range d.files {
		if strings.HasPrefix(name, "data/") {
			n++
		}
	}
	if n != 3 {
		t.Errorf("%d files, want those of the fast publisher only", n)
	}
}

// TestSweep: joined files stay for a while; then they go, and files that were never committed,
// too. A publisher that slept over the sweep commits none of these files.
func TestSweep(t *testing.T) {
	at := time.Unix(1e9, 0)
	now := func() time.Time { return at }
	d := newMemFiles()
	d.now = now
	cfg := Config{Format: UTF8, KeepJoined: time.Minute, Now: now}
	table := open(t, d, cfg)
	l := &memLog{}
	logs := map[int]Log{0: l}
	step := func() {
		t.Helper()
		if err := publishAll(table, logs); err != nil {
			t.Fatal(err)
		}
	}
	parquets := func() (n int) {
		for name := range d.files {
			if strings.HasPrefix(name, "data/") {
				n++
			}
		}
		return n
	}
	for range joinCount - 1 {
		l.produce(0, 2)
		step()
	}
	// The sleeper joins its files, and falls asleep before its commit.
	l.produce(0, 2)
	sleeper := open(t, d, cfg)
	step()
	if n := parquets(); n != joinCount+1 {
		t.Fatalf("%d files, want %d and their joined file", n, joinCount)
	}
	at = at.Add(2 * time.Minute)
	step()
	if n := parquets(); n != 1 {
		t.Errorf("%d files, want the joined one", n)
	}
	l.produce(0, 2)
	if err := sleeper.table.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	f, _, err := sleeper.write(t.Context(), 0, l)
	if err != nil {
		t.Fatal(err)
	}
	at = at.Add(2 * time.Minute)
	d.files["data/p=0/unfinished.parquet"+Unfinished] = memFile{nil, at.Add(-time.Hour)}
	d.files["_delta_log/unfinished.json"+Unfinished] = memFile{nil, at.Add(-time.Hour)}
	table.clean[0] = false
	// A leader that has not seen the records.
	if err := publishAll(table, map[int]Log{0: &memLog{high: table.Published(0)}}); err != nil {
		t.Fatal(err)
	}
	if _, there := d.files[f.path]; there || parquets() != 1 {
		t.Errorf("a file that was never committed was not removed (%d files)", parquets())
	}
	if _, there := d.files["_delta_log/unfinished.json"+Unfinished]; there {
		t.Error("an unfinished commit was not removed")
	}
	if err := sleeper.commit(t.Context(), []pending{*f}); err != nil {
		t.Fatal(err)
	}
	step()
	if err := verify(d, map[int]int{0: 2*joinCount + 2}); err != nil {
		t.Error("DATA:", err)
	}
}

// TestDamage: a publisher does not write to a table whose end lies behind its log's end.
func TestDamage(t *testing.T) {
	d := newMemFiles()
	l := &memLog{}
	l.produce(0, 5)
	table := open(t, d, Config{Format: UTF8})
	if err := publishAll(table, map[int]Log{0: l}); err != nil {
		t.Fatal(err)
	}
	if err := publishAll(table, map[int]Log{0: &memLog{}}); err == nil {
		t.Error("a log that lost records was published")
	}
}

func compressors() map[int16]func([]byte) []byte {
	return map[int16]func([]byte) []byte{
		log.Gzip: func(p []byte) []byte {
			var b bytes.Buffer
			w := gzip.NewWriter(&b)
			w.Write(p)
			w.Close()
			return b.Bytes()
		},
		log.LZ4: func(p []byte) []byte {
			var b bytes.Buffer
			w := lz4.NewWriter(&b)
			w.Write(p)
			w.Close()
			return b.Bytes()
		},
		log.Snappy: func(p []byte) []byte { return s2.EncodeSnappy(nil, p) },
		log.Zstd: func(p []byte) []byte {
			w, _ := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
			return w.EncodeAll(p, nil)
		},
	}
}

// javaSnappy is the form of snappy of Java's clients.
func javaSnappy(p []byte) []byte {
	out := []byte("\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01")
	for part := range slices.Chunk(p, 7) {
		block := s2.EncodeSnappy(nil, part)
		out = append(binary.BigEndian.AppendUint32(out, uint32(len(block))), block...)
	}
	return out
}

// rejected returns the lines of all files of rejected records.
func rejected(t *testing.T, d *memFiles) (all []reject) {
	t.Helper()
	for name, f := range d.files {
		if path.Ext(name) != ".jsonl" {
			continue
		}
		for line := range bytes.Lines(f.data) {
			var r reject
			if err := json.Unmarshal(line, &r); err != nil {
				t.Fatal(err)
			}
			all = append(all, r)
		}
	}
	return all
}

// TestCompression: records of each compression are in the table; a batch that can't be
// decompressed is rejected, and the next batches are in the table.
func TestCompression(t *testing.T) {
	d := newMemFiles()
	l := &memLog{}
	n := 0
	add := func(compression int16, compress func([]byte) []byte) {
		l.add(compression, compress, log.Record{Time: 1000, Value: []byte(value(0, n))}, log.Record{Time: 1000, Value: []byte(value(0, n+1))})
		n += 2
	}
	for compression, compress := range compressors() {
		add(compression, compress)
	}
	add(log.Snappy, javaSnappy)
	table := open(t, d, Config{Format: UTF8})
	if err := publishAll(table, map[int]Log{0: l}); err != nil {
		t.Fatal(err)
	}
	if err := verify(d, map[int]int{0: n}); err != nil {
		t.Error("DATA:", err)
	}
	zeros := make([]byte, decompress.Max+1)
	for compression, compress := range compressors() {
		l.add(compression, func([]byte) []byte { return []byte("no such thing") }, log.Record{Value: []byte("lost")})
		l.add(compression, func([]byte) []byte { return compress(zeros) }, log.Record{Value: []byte("a bomb")})
	}
	if err := publishAll(table, map[int]Log{0: l}); err != nil {
		t.Fatal(err)
	}
	if got := rejected(t, d); len(got) != 8 || got[0].Batch != 1 || got[0].Reason == "" {
		t.Errorf("8 batches can't be read, rejected are %+v", got)
	}
	if table.Published(0) != l.high {
		t.Errorf("published up to %d of %d", table.Published(0), l.high)
	}
}

// TestFields: fields of JSON values are columns; a value that does not fit is rejected with the
// reason.
func TestFields(t *testing.T) {
	fields, err := ParseSchema("user:string, n:long,small:integer,f:float,x:double,ok:boolean,raw:binary,at:timestamp,list:array<float>")
	if err != nil {
		t.Fatal(err)
	}
	d := newMemFiles()
	l := &memLog{}
	for _, v := range []string{
		`{"user":"é","n":9007199254740993,"small":-1,"f":1.5,"x":2.25,"ok":true,"raw":"AQI=","at":"2026-01-02T03:04:05.000006Z","list":[1,null,2.5],"other":1}`,
		`{"list":[],"user":null}`,
		`{"n":1.5}`, `{"small":2147483648}`, `{"f":1e300}`, `{"ok":"yes"}`, `{"raw":"*"}`, `{"at":"noon"}`, `{"list":[1,"2"]}`, `{"list":3}`, `[]`, `{`, "\xff",
	} {
		l.add(log.Plain, nil, log.Record{Time: 2000, Key: []byte("k"), Value: []byte(v), Headers: []log.Header{{Name: "a", Value: []byte("1")}, {Name: "b"}}})
	}
	l.add(log.Plain, nil, log.Record{Time: -5})
	table := open(t, d, Config{Format: JSON, Fields: fields})
	if err := publishAll(table, map[int]Log{0: l}); err != nil {
		t.Fatal(err)
	}
	if got := rejected(t, d); len(got) != 11 || got[0].Offset != 2 || !strings.Contains(got[0].Reason, "n: 1.5 is no long") || string(got[0].Value) != `{"n":1.5}` {
		t.Errorf("%d rejected: %+v", len(got), got)
	}
	type header struct {
		Name  string `parquet:"name"`
		Value []byte `parquet:"value,optional"`
	}
	type row struct {
		Offset  int64    `parquet:"offset"`
		Time    *int64   `parquet:"timestamp,optional"`
		Headers []header `parquet:"headers,list"`
		User    *string  `parquet:"user,optional"`
		N       *int64   `parquet:"n,optional"`
		Small   *int32   `parquet:"small,optional"`
		F       *float32 `parquet:"f,optional"`
		X       *float64 `parquet:"x,optional"`
		OK      *bool    `parquet:"ok,optional"`
		Raw     []byte   `parquet:"raw,optional"`
		At      *int64   `parquet:"at,optional"`
	}
	all := spans(table.table.State(), 0)
	if len(all) != 1 || all[0].rows != 3 {
		t.Fatalf("files %+v", all)
	}
	rows, err := parquet.Read[row](bytes.NewReader(d.files[all[0].path].data), all[0].size)
	if err != nil {
		t.Fatal(err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC).UnixMicro()
	want := []row{
		{Offset: 0, Time: new(int64(2000_000)), Headers: []header{{"a", []byte("1")}, {Name: "b"}}, User: new("é"), N: new(int64(9007199254740993)), Small: new(int32(-1)),
			F: new(float32(1.5)), X: new(2.25), OK: new(true), Raw: []byte{1, 2}, At: &at},
		{Offset: 1, Time: new(int64(2000_000)), Headers: []header{{"a", []byte("1")}, {Name: "b"}}},
		{Offset: 13},
	}
	for i := range want {
		if len(rows) <= i || !reflect.DeepEqual(norm(rows[i]), norm(want[i])) {
			t.Errorf("row %d is %s, want %s", i, norm(rows[i]), norm(want[i]))
		}
	}
	// A joined file has the same values, in each column.
	p := d.files[all[0].path].data
	joined, err := joinFiles(table.columns, [][]byte{p, p})
	if err != nil {
		t.Fatal(err)
	}
	var lists [2]string
	for i, b := range [][]byte{p, joined} {
		r := parquet.NewReader(bytes.NewReader(b))
		rows := make([]parquet.Row, 6)
		n, _ := r.ReadRows(rows)
		lists[i] = fmt.Sprintf("%+v", rows[n-3:n])
	}
	if lists[0] != lists[1] || !strings.Contains(lists[0], "2.5") {
		t.Errorf("DATA: joined rows are %s, want %s", lists[1], lists[0])
	}
}

// norm makes a row comparable: null and empty are the same to the test's reader.
func norm(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return strings.NewReplacer(`[]`, "null", `""`, "null").Replace(string(b))
}

func TestSchemas(t *testing.T) {
	for _, text := range []string{"", "a", "a:", "a:text", "a:string,A:long", "offset:long", "a b:string", "a:array<array<long>>", ":string", "a:array<long", strings.Repeat("x:long,", 2000)} {
		if fields, err := ParseSchema(text); err == nil {
			t.Errorf("schema %q is %+v", text, fields)
		}
	}
}

// FuzzDecompress: any bytes decompress or are an error.
func FuzzDecompress(f *testing.F) {
	for compression, compress := range compressors() {
		f.Add(int(compression), compress([]byte("some records")))
	}
	f.Add(log.Snappy, javaSnappy([]byte("some records")))
	f.Fuzz(func(t *testing.T, compression int, p []byte) {
		if plain, err := decompress.Records(compression, p); err == nil && len(plain) > max(decompress.Max, len(p)) {
			t.Errorf("%d bytes", len(plain))
		}
	})
}

// FuzzValue: any value becomes a row that Parquet takes, or does not fit.
func FuzzValue(f *testing.F) {
	fields, err := ParseSchema("s:string,n:long,x:double,t:timestamp,l:array<binary>")
	if err != nil {
		f.Fatal(err)
	}
	c := newColumns(JSON, fields)
	f.Add([]byte(`{"s":"a","n":1,"x":2.5,"t":"2026-01-02T03:04:05Z","l":["AA==",null]}`), []byte("k"))
	f.Add([]byte(`{"l":[],"n":null}`), []byte(nil))
	f.Fuzz(func(t *testing.T, v, k []byte) {
		l := &memLog{}
		l.add(log.Plain, nil, log.Record{Time: 1, Key: k, Value: v, Headers: []log.Header{{Name: string(k), Value: v}}})
		b := newBuilder(c, 0, 0)
		if err := b.batches(l.batches[0]); err != nil {
			t.Fatal(err)
		}
		p, err := b.finish()
		if err != nil {
			t.Fatal(err)
		}
		if b.rows+int64(b.rejects) != 1 {
			t.Errorf("%d rows and %d rejected", b.rows, b.rejects)
		}
		if r := parquet.NewReader(bytes.NewReader(p)); r.NumRows() != b.rows {
			t.Errorf("%d rows in the file, want %d", r.NumRows(), b.rows)
		}
	})
}
