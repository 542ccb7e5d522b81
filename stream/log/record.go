package log

import (
	"encoding/binary"
	"math"

	"penstock.io/penstock/meta"
)

// Record is one record of a batch. Its slices share the memory of the batch; nil stands for
// null.
type Record struct {
	Offset  int64
	Time    int64 // ms since 1970
	Key     []byte
	Value   []byte
	Headers []Header
}

// Header is a name and a value beside a record's value; a nil Value is null.
type Header struct {
	Name  string
	Value []byte
}

// Each calls fn for every record of the batch, in order. plain has the records, uncompressed.
// Record.Headers is valid until fn returns. An error of fn ends Each. Errors: Corrupt (plain
// has other records than the header says, or bytes after them), and fn's.
//
//	record   length:z | attributes 1 | time - base time:z | offset - base:z |
//	         key length:z | key | value length:z | value | headers:z | header*
//	header   name length:z | name | value length:z | value
//	         z is a zigzag varint; the length -1 stands for null
func (b *Batch) Each(plain []byte, fn func(Record) error) error {
	var headers []Header
	last := int64(-1) // offset of the record before, minus Base
	for i := int32(0); i < b.Records; i++ {
		length, n := binary.Varint(plain)
		if n <= 0 || length < 0 || length > int64(len(plain)-n) {
			return fail(meta.Corrupt, "record %d of %d at offset %d is cut", i, b.Records, b.Base)
		}
		d := recordDecoder{p: plain[n : n+int(length)]}
		plain = plain[n+int(length):]
		d.skip(1)
		dt, delta := d.varint(), d.varint()
		r := Record{Offset: b.Base + delta, Time: b.BaseTime + dt, Key: d.bytes(), Value: d.bytes()}
		headers = headers[:0]
		for left := d.varint(); left > 0 && !d.bad; left-- {
			name := d.bytes()
			if name == nil {
				d.bad = true
			}
			headers = append(headers, Header{Name: string(name), Value: d.bytes()})
		}
		if r.Headers = headers; len(headers) == 0 {
			r.Headers = nil
		}
		if d.bad || len(d.p) > 0 || delta <= last || delta > int64(b.LastDelta) {
			return fail(meta.Corrupt, "record %d of %d at offset %d is damaged", i, b.Records, b.Base)
		}
		last = delta
		if err := fn(r); err != nil {
			return err
		}
	}
	if len(plain) > 0 {
		return fail(meta.Corrupt, "%d bytes follow the %d records at offset %d", len(plain), b.Records, b.Base)
	}
	return nil
}

// recordDecoder decodes the fields of one record. After the first damage all fields are zero.
type recordDecoder struct {
	p   []byte
	bad bool
}

func (d *recordDecoder) skip(n int) {
	if len(d.p) < n {
		d.bad, d.p = true, nil
		return
	}
	d.p = d.p[n:]
}

func (d *recordDecoder) varint() int64 {
	v, n := binary.Varint(d.p)
	if n <= 0 || v > math.MaxInt32 && n > binary.MaxVarintLen64 {
		d.bad, d.p = true, nil
		return 0
	}
	d.p = d.p[n:]
	return v
}

// bytes decodes a length and that many bytes; nil for the length -1.
func (d *recordDecoder) bytes() []byte {
	n := d.varint()
	if n == -1 && !d.bad {
		return nil
	}
	if n < 0 || n > int64(len(d.p)) {
		d.bad, d.p = true, nil
		return nil
	}
	v := d.p[:n:n]
	d.p = d.p[n:]
	return v
}

// AppendRecord appends the encoding of a record whose offset and time are relative to the
// batch's first record: Each decodes it.
func AppendRecord(dst []byte, delta int32, dt int64, key, value []byte, headers []Header) []byte {
	body := make([]byte, 1, 32+len(key)+len(value))
	body = binary.AppendVarint(body, dt)
	body = binary.AppendVarint(body, int64(delta))
	body = appendBytes(body, key)
	body = appendBytes(body, value)
	body = binary.AppendVarint(body, int64(len(headers)))
	for _, h := range headers {
		body = binary.AppendVarint(body, int64(len(h.Name)))
		body = append(body, h.Name...)
		body = appendBytes(body, h.Value)
	}
	dst = binary.AppendVarint(dst, int64(len(body)))
	return append(dst, body...)
}

func appendBytes(dst, p []byte) []byte {
	if p == nil {
		return binary.AppendVarint(dst, -1)
	}
	dst = binary.AppendVarint(dst, int64(len(p)))
	return append(dst, p...)
}

// Encode makes a batch of already encoded records, compressed or not; b says everything else.
// Encode sets Size.
func (b *Batch) Encode(records []byte) []byte {
	b.Size = HeaderSize + len(records)
	p := make([]byte, HeaderSize, b.Size)
	p = append(p, records...)
	binary.BigEndian.PutUint32(p[8:], uint32(b.Size-prefixSize))
	p[16] = format
	binary.BigEndian.PutUint16(p[21:], uint16(b.Attributes))
	binary.BigEndian.PutUint32(p[23:], uint32(b.LastDelta))
	binary.BigEndian.PutUint64(p[27:], uint64(b.BaseTime))
	binary.BigEndian.PutUint64(p[35:], uint64(b.MaxTime))
	binary.BigEndian.PutUint64(p[43:], uint64(b.Producer))
	binary.BigEndian.PutUint16(p[51:], uint16(b.Epoch))
	binary.BigEndian.PutUint32(p[53:], uint32(b.Sequence))
	binary.BigEndian.PutUint32(p[57:], uint32(b.Records))
	b.Assign(p, b.Base, b.LeaderEpoch)
	b.crc = checksum(p)
	binary.BigEndian.PutUint32(p[17:], b.crc)
	return p
}
