package partition

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/decompress"
	"penstock.io/penstock/stream/log"
)

// keyed is a record of the model. An empty key stands for none, an empty value for none.
type keyed struct{ key, value string }

func (k keyed) bytes() (key, value []byte) {
	if k.key != "" {
		key = []byte(k.key)
	}
	if k.value != "" {
		value = []byte(k.value)
	}
	return key, value
}

// keyedBatch makes a batch of records.
func keyedBatch(t *testing.T, producer int64, sequence int32, packed bool, records []keyed) []byte {
	t.Helper()
	n := int32(len(records))
	b := log.Batch{Producer: producer, Sequence: sequence, BaseTime: 1000, MaxTime: 1000, Records: n, LastDelta: n - 1}
	if producer == log.NoProducer {
		b.Epoch, b.Sequence = -1, -1
	}
	var p []byte
	for i, r := range records {
		key, value := r.bytes()
		p = log.AppendRecord(p, int32(i), 0, key, value, nil)
	}
	if packed {
		var buf bytes.Buffer
		z := gzip.NewWriter(&buf)
		z.Write(p)
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		b.SetCompression(log.Gzip)
		p = buf.Bytes()
	}
	return b.Encode(p)
}

// contents reads the records of a log, by offset.
func contents(t *testing.T, l *Log) map[int64]keyed {
	t.Helper()
	all := map[int64]keyed{}
	start, high := l.Bounds()
	for at := start; at < high; {
		p, err := l.Read(at, 100)
		if err != nil || len(p) == 0 {
			t.Fatalf("DATA: offset %d of %d: %d bytes, %v", at, high, len(p), err)
		}
		for len(p) > 0 {
			b, err := log.Parse(p, DefaultMaxBatch)
			if err == nil {
				err = b.Verify(p)
			}
			var plain []byte
			if err == nil {
				plain, err = decompress.Records(b.Compression(), p[log.HeaderSize:b.Size])
			}
			if err == nil {
				err = b.Each(plain, func(r log.Record) error {
					all[r.Offset] = keyed{string(r.Key), string(r.Value)}
					return nil
				})
			}
			if err != nil {
				t.Fatal("DATA:", err)
			}
			at, p = b.Next(), p[b.Size:]
		}
	}
	return all
}

// TestCompaction cuts the power at every change of a compaction in turn. Before and after, the
// last record of each key is at its offset, no record is at another offset, and the producer's
// last batches are recognised, and a record that deletes a key is there as long as an earlier record
// of the key is; afterwards, no key has two records before the last segment.
func TestCompaction(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	control := os.Getenv("PENSTOCK_CONTROL")
	off := UnsafeCompact{NoAge: control == "compact-noage", NoOrder: control == "compact-noorder"}
	for at, crashed := 0, true; crashed; at++ {
		aged := at%2 == 1                   // tombstones are old enough to be removed
		c := &clock{at: time.Unix(1000, 0)} // files of a memDir are from 1970
		cfg := Config{Policy: fixed(Policy{SegmentBytes: 700, Compact: true, TombstoneAge: time.Hour}).Policy, CompactKeys: 1 + r.IntN(10), Now: c.now, UnsafeCompact: off}
		dir := newMemDir()
		l := open(t, dir, cfg)
		var model []keyed
		last := map[string]int64{}
		var lastBatch []byte
		// The last batches are of another producer, so that the producer's last batch lies before
		// the last segment.
		for n, sequence := 0, int32(0); n < 40; n++ {
			records := make([]keyed, 1+r.IntN(3))
			for i := range records {
				records[i] = keyed{fmt.Sprint("k", r.IntN(7)), fmt.Sprint("v", len(model)+i)}
				switch r.IntN(8) {
				case 0:
					records[i].key = ""
				case 1:
					records[i].value = ""
				}
			}
			producer := int64(log.NoProducer)
			if n < 25 && r.IntN(2) == 0 {
				producer = 9
			}
			p := keyedBatch(t, producer, sequence, r.IntN(2) == 0, records)
			if producer == 9 {
				lastBatch = bytes.Clone(p)
				sequence += int32(len(records))
			}
			if base, err := appendAll(l, p); err != nil || base != int64(len(model)) {
				t.Fatal(base, err)
			}
			for _, k := range records {
				if k.key != "" {
					last[k.key] = int64(len(model))
				}
				model = append(model, k)
			}
		}
		check := func(when string, whole bool) {
			t.Helper()
			got := contents(t, l)
			sealed := l.segments[len(l.segments)-1].First
			for o, want := range model {
				o := int64(o)
				k, ok := got[o]
				isLast := want.key == "" || last[want.key] == o
				switch {
				case ok && k != want:
					t.Fatalf("DATA: seed %d, crash %d, %s: offset %d has %v, not %v", seed, at, when, o, k, want)
				case !ok && isLast && (want.value != "" || !aged || want.key == ""):
					t.Fatalf("DATA: seed %d, crash %d, %s: the last record of %q is gone from offset %d", seed, at, when, want.key, o)
				case !ok && o >= sealed:
					t.Fatalf("DATA: seed %d, crash %d, %s: offset %d of the last segment is gone", seed, at, when, o)
				case ok && !isLast && model[last[want.key]].value == "" && !there(got, last[want.key]):
					t.Fatalf("DATA: seed %d, crash %d, %s: offset %d still has %v, and the record that deletes key %q is gone from offset %d", seed, at, when, o, k, want.key, last[want.key])
				case ok && whole && o < sealed && !isLast && last[want.key] < sealed:
					t.Fatalf("DATA: seed %d, crash %d, %s: offset %d still has %v of key %q, whose last record is at %d", seed, at, when, o, k, want.key, last[want.key])
				case ok && whole && o < sealed && want.key != "" && want.value == "" && aged && cfg.CompactKeys > 7: // in one pass
					t.Fatalf("DATA: seed %d, crash %d, %s: offset %d still has the tombstone of %q", seed, at, when, o, want.key)
				}
			}
			if a, err := l.Append(lastBatch); err != nil || !a.Repeated {
				t.Fatalf("DATA: seed %d, crash %d, %s: the producer's last batch is not recognised: %+v, %v", seed, at, when, a, err)
			}
		}
		if aged {
			c.add(2 * time.Hour)
		}
		dir.left = at
		_, err := l.Compact(t.Context())
		if crashed = errors.Is(err, errCrash); !crashed && err != nil {
			t.Fatal(err)
		}
		if !crashed {
			check("after the compaction", true)
		}
		l.Close()
		if crashed {
			dir = dir.crash(r.Float64())
		}
		dir.left = -1
		l = open(t, dir, cfg)
		check("when opened again", false)
		delete(dir.files, compactedFile)
		if _, err := l.Compact(t.Context()); err != nil {
			t.Fatal(err)
		}
		check("after another compaction", true)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		// Also without the state of the producers, which is then read from the log.
		delete(dir.files, producersFile)
		l = open(t, dir, cfg)
		check("without the producers' state", false)
		l.Close()
	}
}

// there reports whether an offset has a record.
func there(records map[int64]keyed, offset int64) bool { _, ok := records[offset]; return ok }

// TestCompactNothing: a log without the policy, or with few new bytes, stays as it is.
func TestCompactNothing(t *testing.T) {
	dir := newMemDir()
	l := open(t, dir, fixed(Policy{SegmentBytes: 200}))
	for range 10 {
		if _, err := appendAll(l, keyedBatch(t, log.NoProducer, 0, false, []keyed{{"k", "value"}})); err != nil {
			t.Fatal(err)
		}
	}
	if n, err := l.Compact(t.Context()); n > 0 || err != nil || len(contents(t, l)) != 10 {
		t.Errorf("DATA: %d records are gone, %v", n, err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, dir, fixed(Policy{SegmentBytes: 200, Compact: true}))
	defer l.Close()
	if n, err := l.Compact(t.Context()); n == 0 || err != nil {
		t.Errorf("%d records are gone, %v", n, err)
	}
	was := dir.syncs
	if n, err := l.Compact(t.Context()); n > 0 || err != nil || dir.syncs != was {
		t.Errorf("again: %d records are gone, %v", n, err)
	}
}

func FuzzCompacted(f *testing.F) {
	f.Add([]byte(`{"version":1,"end":7}`))
	f.Add([]byte(`{"version":2,"end":7}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if n, err := decodeCompacted(b); n < 0 || err != nil && !errors.Is(err, meta.Version) {
			t.Error(n, err)
		}
	})
}
