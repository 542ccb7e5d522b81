package publish

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/parquet-go/parquet-go"
	"github.com/parquet-go/parquet-go/compress/zstd"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/decompress"
	"penstock.io/penstock/stream/log"
	"penstock.io/penstock/table/delta"
)

// span is a file of the table: records of a partition from offset first to before next.
type span struct {
	partition   int
	first, next int64
	rows        int64
	level       int // how often the records were joined
	path        string
	size        int64
}

// Tags of an Add, in which the Delta log keeps a span.
const (
	tagPartition = "penstock.partition"
	tagFirst     = "penstock.first"
	tagNext      = "penstock.next"
	tagRows      = "penstock.rows"
	tagLevel     = "penstock.level"
)

// add returns the action that takes the file into the table. now is in ms since 1970.
func (s *span) add(now int64, new bool) delta.Action {
	low := map[string]int64{"partition": int64(s.partition), "offset": s.first}
	high := map[string]int64{"partition": int64(s.partition), "offset": s.next - 1}
	stats, err := json.Marshal(map[string]any{"numRecords": s.rows, "minValues": low, "maxValues": high, "nullCount": map[string]int64{"partition": 0, "offset": 0}})
	if err != nil {
		panic("publish: numbers can't be encoded: " + err.Error())
	}
	text := func(n int64) string { return strconv.FormatInt(n, 10) }
	return delta.Action{Add: &delta.Add{Path: s.path, PartitionValues: map[string]string{}, Size: s.size, Modified: now, DataChange: new, Stats: string(stats), Tags: map[string]string{
		tagPartition: text(int64(s.partition)), tagFirst: text(s.first), tagNext: text(s.next), tagRows: text(s.rows), tagLevel: text(int64(s.level))}}}
}

// spanOf decodes the span of an Add; ok is false if another program made the file.
func spanOf(a *delta.Add) (s span, ok bool) {
	number := func(tag string) int64 {
		n, err := strconv.ParseInt(a.Tags[tag], 10, 64)
		if err != nil || n < 0 {
			ok = false
		}
		return n
	}
	ok = true
	s = span{partition: int(number(tagPartition)), first: number(tagFirst), next: number(tagNext), rows: number(tagRows), level: int(number(tagLevel)), path: a.Path, size: a.Size}
	return s, ok
}

// builder makes a Parquet file, and lists the records that do not fit.
type builder struct {
	span
	maker    *rowMaker
	buf      bytes.Buffer
	w        *parquet.GenericWriter[any]
	rejected bytes.Buffer
	rejects  int
}

func newBuilder(c *columns, partition int, first int64) *builder {
	b := &builder{span: span{partition: partition, first: first, next: first}, maker: newRowMaker(c)}
	b.w = newParquet(&b.buf, c)
	return b
}

var codec = &zstd.Codec{Level: zstd.SpeedFastest}

func newParquet(to io.Writer, c *columns) *parquet.GenericWriter[any] {
	return parquet.NewGenericWriter[any](to, c.schema, parquet.Compression(codec), parquet.CreatedBy("penstock", "", ""))
}

// reject is a line of a file of rejected records. Batch counts the records of a batch that can't
// be decoded.
type reject struct {
	Partition int    `json:"partition"`
	Offset    int64  `json:"offset"`
	Batch     int32  `json:"batch,omitempty"`
	Reason    string `json:"reason"`
	Key       []byte `json:"key,omitempty"`
	Value     []byte `json:"value,omitempty"`
}

func (b *builder) reject(r reject) error {
	b.rejects++
	r.Partition = b.partition
	p, err := json.Marshal(r)
	if err != nil {
		return err
	}
	b.rejected.Write(append(p, '\n'))
	return nil
}

// batches adds the records of whole batches from offset next on. Errors: Corrupt (the log is
// damaged), and errors of the Parquet writer.
func (b *builder) batches(p []byte) error {
	for len(p) > 0 {
		batch, err := log.Parse(p, len(p))
		if err != nil {
			return meta.E("publish", meta.Corrupt, fmt.Sprintf("partition %d, offset %d", b.partition, b.next), err)
		}
		if err := b.batch(&batch, p[:batch.Size]); err != nil {
			return err
		}
		b.next = max(b.next, batch.Next())
		p = p[batch.Size:]
	}
	return nil
}

// batch adds a batch. A batch whose records can't be decoded is rejected as a whole.
func (b *builder) batch(batch *log.Batch, p []byte) error {
	if err := batch.Verify(p); err != nil {
		return err
	}
	plain, err := decompress.Records(batch.Compression(), p[log.HeaderSize:])
	var rows []parquet.Row
	var rejects []reject
	if err == nil {
		err = batch.Each(plain, func(r log.Record) error {
			if r.Offset < b.next {
				return nil
			}
			row, err := b.maker.make(b.partition, &r)
			if err != nil {
				rejects = append(rejects, reject{Offset: r.Offset, Reason: err.Error(), Key: r.Key, Value: r.Value})
				return nil
			}
			rows = append(rows, row)
			return nil
		})
	}
	if err != nil {
		return b.reject(reject{Offset: batch.Base, Batch: batch.Records, Reason: err.Error()})
	}
	for _, r := range rejects {
		if err := b.reject(r); err != nil {
			return err
		}
	}
	_, err = b.w.WriteRows(rows)
	b.rows += int64(len(rows))
	return err
}

// finish returns the bytes of the file, and sets the size.
func (b *builder) finish() ([]byte, error) {
	if err := b.w.Close(); err != nil {
		return nil, err
	}
	b.size = int64(b.buf.Len())
	return b.buf.Bytes(), nil
}

// joinFiles returns the bytes of a Parquet file with the rows of others, in order.
func joinFiles(c *columns, files [][]byte) ([]byte, error) {
	var buf bytes.Buffer
	w := newParquet(&buf, c)
	for _, p := range files {
		if err := copyRows(w, p, c.schema); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return buf.Bytes(), err
}

func copyRows(w *parquet.GenericWriter[any], p []byte, schema *parquet.Schema) error {
	r := parquet.NewReader(bytes.NewReader(p), schema)
	_, err := parquet.CopyRows(w, r)
	return errors.Join(err, r.Close())
}
