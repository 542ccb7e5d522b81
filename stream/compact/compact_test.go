package compact

import (
	"fmt"
	"testing"

	"penstock.io/penstock/stream/decompress"
	"penstock.io/penstock/stream/log"
)

// pack makes a batch at an offset, of records with some keys and the value "value", or none for
// keys in upper case.
func pack(t *testing.T, base int64, codec int, producer int64, keys ...string) (log.Batch, []byte) {
	t.Helper()
	var records []byte
	for i, k := range keys {
		value := []byte("value")
		if k < "a" {
			value = nil
		}
		records = log.AppendRecord(records, int32(i), int64(i), []byte(k), value, []log.Header{{Name: "h", Value: []byte(k)}})
	}
	n := int32(len(keys))
	b := log.Batch{Base: base, Records: n, LastDelta: n - 1, BaseTime: 1000, MaxTime: 1000 + int64(n) - 1, Producer: producer, Sequence: int32(base), LeaderEpoch: 3}
	as, packed, err := compress(codec, records)
	if err != nil {
		t.Fatal(err)
	}
	b.SetCompression(as)
	p := b.Encode(packed)
	b, err = log.Parse(p, len(p))
	if err != nil {
		t.Fatal(err)
	}
	return b, p
}

// TestRewriter: with each codec, the kept records of a batch have their offsets, times and
// headers.
func TestRewriter(t *testing.T) {
	for codec := range log.Zstd + 1 {
		keys := NewKeys(2)
		w := Rewriter{Keys: keys, Remembered: map[int64]struct{}{7: {}}}
		var in []byte
		for _, x := range []struct {
			base     int64
			producer int64
			keys     []string
		}{{0, log.NoProducer, []string{"a", "b", "c"}}, {3, 9, []string{"a", "a"}}, {5, 9, []string{"a", "b"}}, {7, 9, []string{"b"}}, {8, log.NoProducer, []string{"a", "b"}}} {
			b, p := pack(t, x.base, codec, x.producer, x.keys...)
			keys.Add(&b, p)
			in = append(in, p...)
		}
		if !keys.Full() || keys.Len() != 3 {
			t.Errorf("%d keys", keys.Len())
		}
		rest := in
		for len(rest) > 0 {
			b, err := log.Parse(rest, len(rest))
			if err == nil {
				err = w.Add(&b, rest[:b.Size])
			}
			if err != nil {
				t.Fatal(err)
			}
			rest = rest[b.Size:]
		}
		out, removed := w.Finish()
		got := ""
		for len(out) > 0 {
			b, err := log.Parse(out, len(out))
			if err == nil {
				err = b.Verify(out)
			}
			var plain []byte
			if err == nil {
				plain, err = decompress.Records(b.Compression(), out[log.HeaderSize:b.Size])
			}
			if err != nil {
				t.Fatal("DATA:", err)
			}
			got += fmt.Sprintf("[%d-%d of %d at %d:", b.Base, b.Next(), b.Producer, b.MaxTime)
			if err := b.Each(plain, func(r log.Record) error {
				got += fmt.Sprintf(" %d %s %d %s", r.Offset, r.Key, r.Time, r.Headers[0].Value)
				return nil
			}); err != nil {
				t.Fatal("DATA:", err)
			}
			got, out = got+"] ", out[b.Size:]
		}
		if want := "[0-3 of -1 at 1002: 2 c 1002 c] [3-7 of -1 at -1:] [7-8 of 9 at -1:] [8-10 of -1 at 1001: 8 a 1000 a 9 b 1001 b] "; got != want || removed != 7 {
			t.Errorf("DATA: compression %d: %d records are removed, left are %s, not %s", codec, removed, got, want)
		}
	}
}

// TestTombstones: a last record without a value is removed on request, and not before the records
// that the tombstone deletes.
func TestTombstones(t *testing.T) {
	for _, x := range []struct {
		name       string
		known      []string // keys of the batch at offset 10 that the pass has read
		clean      int64
		tombstones bool
		removed    int64
	}{
		{"not old", []string{"K"}, 0, false, 0},
		{"old", []string{"K"}, 0, true, 1},
		{"from before the pass", nil, 11, true, 1},
		{"after the pass", nil, 10, true, 0},
	} {
		keys := NewKeys(10)
		b, p := pack(t, 10, log.Plain, log.NoProducer, "K")
		if x.known != nil {
			keys.Add(&b, p)
		}
		w := Rewriter{Keys: keys, Clean: x.clean, Tombstones: x.tombstones}
		if err := w.Add(&b, p); err != nil {
			t.Fatal(err)
		}
		if _, removed := w.Finish(); removed != x.removed {
			t.Errorf("DATA: %s: %d tombstones are removed, not %d", x.name, removed, x.removed)
		}
	}
	// The key's last record read by the pass is an earlier record, and stays.
	keys := NewKeys(10)
	b, p := pack(t, 4, log.Plain, log.NoProducer, "K")
	keys.Add(&b, p)
	later, q := pack(t, 10, log.Plain, log.NoProducer, "K")
	w := Rewriter{Keys: keys, Tombstones: true}
	if err := w.Add(&later, q); err != nil {
		t.Fatal(err)
	}
	if _, removed := w.Finish(); removed != 0 {
		t.Error("DATA: a tombstone is removed before the record that it deletes")
	}
}

// TestUndecodable: an undecodable batch stays unchanged.
func TestUndecodable(t *testing.T) {
	b, p := pack(t, 0, log.Gzip, log.NoProducer, "a", "a")
	b.SetCompression(log.Zstd)
	p = b.Encode(p[log.HeaderSize:])
	keys := NewKeys(10)
	keys.Add(&b, p)
	w := Rewriter{Keys: keys}
	if err := w.Add(&b, p); err != nil {
		t.Fatal(err)
	}
	if out, removed := w.Finish(); removed != 0 || string(out) != string(p) {
		t.Errorf("DATA: %d records are removed", removed)
	}
}
