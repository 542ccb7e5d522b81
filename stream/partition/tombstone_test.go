package partition

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"penstock.io/penstock/stream/log"
)

// TestTombstonesGoLast cuts the power at every change of a compaction in turn. Wherever the power is
// cut, a deleted key does not come back: the record that deletes the key is there as long as an
// earlier record of the key is. The compaction after the cut removes both.
func TestTombstonesGoLast(t *testing.T) {
	const keys = 5
	c := &clock{at: time.Unix(1000, 0)}
	policy := fixed(Policy{SegmentBytes: 200, Compact: true, TombstoneAge: time.Hour}).Policy
	cfg := Config{Policy: policy, Now: c.now, UnsafeCompact: UnsafeCompact{NoOrder: os.Getenv("PENSTOCK_CONTROL") == "compact-noorder"}}
	for at, crashed := 0, true; crashed; at++ {
		dir := newMemDir()
		l := open(t, dir, cfg)
		write := func(key, value string) {
			t.Helper()
			if _, err := appendAll(l, keyedBatch(t, log.NoProducer, 0, false, []keyed{{key, value}})); err != nil {
				t.Fatal(err)
			}
		}
		for i := range keys {
			write(fmt.Sprint("k", i), "value")
		}
		for i := range keys {
			write(fmt.Sprint("k", i), "")
		}
		for range keys {
			write("", "the last segment is not compacted")
		}
		check := func(when string, gone bool) {
			t.Helper()
			got := contents(t, l)
			for i := range int64(keys) {
				value, deletes := there(got, i), there(got, keys+i)
				if value && !deletes {
					t.Fatalf("DATA: crash %d, %s: key k%d has its value again", at, when, i)
				}
				if gone && (value || deletes) {
					t.Errorf("crash %d, %s: of key k%d there is the value (%v) and the record that deletes it (%v)", at, when, i, value, deletes)
				}
			}
		}
		c.add(2 * time.Hour) // every segment is old now
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
			dir = dir.crash(1) // also the unsynced bytes
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
	}
}
