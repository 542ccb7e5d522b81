package partition

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// clock is a time that the test sets.
type clock struct {
	mu sync.Mutex
	at time.Time
}

func (c *clock) now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

func (c *clock) add(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = c.at.Add(d)
}

func open(t *testing.T, dir Dir, cfg Config) *Log {
	t.Helper()
	l, err := tryOpen(t, dir, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func tryOpen(t *testing.T, dir Dir, cfg Config) (*Log, error) {
	t.Helper()
	cfg.Name, cfg.Logger = "test", slog.New(slog.DiscardHandler)
	led, err := readLeaders(t.Context(), dir)
	if err != nil {
		return nil, err
	}
	return Open(t.Context(), dir, cfg, &leadership{epoch: uint64(led.list.last() + 1)})
}

// batch makes a batch of records with the given values, at a time.
func batch(producer int64, sequence int32, at int64, values ...string) []byte {
	b := log.Batch{Producer: producer, Sequence: sequence, BaseTime: at, MaxTime: at + int64(len(values)) - 1, Records: int32(len(values)), LastDelta: int32(len(values)) - 1}
	if producer == log.NoProducer {
		b.Epoch, b.Sequence = -1, -1
	}
	var records []byte
	for i, v := range values {
		records = log.AppendRecord(records, int32(i), int64(i), nil, []byte(v), nil)
	}
	return b.Encode(records)
}

// fixed configures a log with a policy that never changes.
func fixed(p Policy) Config { return Config{Policy: func() Policy { return p }} }

func appendAll(l *Log, p []byte) (int64, error) {
	a, err := l.Append(p)
	if err != nil {
		return 0, err
	}
	return a.Base, a.Wait(context.Background())
}

// values reads all records of a log, by offset.
func values(t *testing.T, l *Log, most int) (start int64, all []string) {
	t.Helper()
	start, high := l.Bounds()
	for at := start; at < high; {
		p, err := l.Read(at, most)
		if err != nil {
			t.Fatal(err)
		}
		if len(p) == 0 {
			t.Fatalf("DATA: nothing at offset %d of %d", at, high)
		}
		for len(p) > 0 {
			b, err := log.Parse(p, DefaultMaxBatch)
			if err != nil {
				t.Fatal(err)
			}
			if err := b.Verify(p); err != nil {
				t.Fatal("DATA:", err)
			}
			if err := b.Each(p[log.HeaderSize:b.Size], func(r log.Record) error {
				if r.Offset >= at {
					all = append(all, string(r.Value))
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			at, p = b.Next(), p[b.Size:]
		}
	}
	return start, all
}

// TestAppendReadReopen: reads return the appended records, over segments and leaders.
func TestAppendReadReopen(t *testing.T) {
	dir := newMemDir()
	cfg := fixed(Policy{SegmentBytes: 600})
	var want []string
	for leader := range 4 {
		l := open(t, dir, cfg)
		if int(l.Epoch()) != leader {
			t.Errorf("leader %d has epoch %d", leader, l.Epoch())
		}
		for i := range 20 {
			v := []string{fmt.Sprintf("%d/%d", leader, i), "second"}
			base, err := appendAll(l, batch(log.NoProducer, 0, int64(1000*leader+i), v...))
			if err != nil || base != int64(len(want)) {
				t.Fatalf("DATA: offset %d instead of %d, %v", base, len(want), err)
			}
			want = append(want, v...)
		}
		for _, most := range []int{0, 100, 1000, 1 << 20} {
			if _, got := values(t, l, most); fmt.Sprint(got) != fmt.Sprint(want) {
				t.Fatalf("DATA: read %v, not %v", got, want)
			}
		}
		// In the middle of a batch, Read returns the batch.
		if p, err := l.Read(3, 1); err != nil || len(p) == 0 {
			t.Errorf("offset 3: %d bytes, %v", len(p), err)
		}
		if _, err := l.Read(int64(len(want))+1, 1); !errors.Is(err, meta.Range) {
			t.Errorf("an offset after the end: %v", err)
		}
		for epoch := range int32(leader) + 1 {
			if e, end := l.EpochEnd(epoch); e != epoch || end != int64(epoch+1)*40 {
				t.Errorf("leader %d ends at %d of epoch %d", epoch, end, e)
			}
		}
		at, ms, ok, err := l.OffsetAt(t.Context(), int64(1000*leader+5))
		if wantAt := int64(leader*40 + 9); err != nil || !ok || at != wantAt || ms != int64(1000*leader+5) {
			t.Errorf("time %d is at offset %d, %d, %v, %v; want %d", 1000*leader+5, at, ms, ok, err, wantAt)
		}
		if _, _, ok, err := l.OffsetAt(t.Context(), 1<<40); ok || err != nil {
			t.Error("a record of the far future", ok, err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Append(batch(log.NoProducer, 0, 1, "late")); !errors.Is(err, meta.Unavailable) {
			t.Errorf("append after Close: %v", err)
		}
	}
}

// TestTimeInCompressedBatch: the record with a time is found within a compressed batch; in a
// batch whose compression differs from its header, the first record is found.
func TestTimeInCompressedBatch(t *testing.T) {
	l := open(t, newMemDir(), Config{})
	defer l.Close()
	for i, compress := range []func([]byte) []byte{gzipped, func([]byte) []byte { return []byte("no gzip") }} {
		at := int64(1000 * (i + 1))
		p := batch(log.NoProducer, 0, at, "a", "b", "c", "d")
		b, err := log.Parse(p, len(p))
		if err != nil {
			t.Fatal(err)
		}
		b.Attributes |= log.Gzip
		if _, err := appendAll(l, b.Encode(compress(p[log.HeaderSize:]))); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ ms, offset, at int64 }{{0, 0, 1000}, {1002, 2, 1002}, {1003, 3, 1003}, {1004, 4, 2000}, {2002, 4, 2000}} {
		offset, at, ok, err := l.OffsetAt(t.Context(), c.ms)
		if err != nil || !ok || offset != c.offset || at != c.at {
			t.Errorf("time %d is at offset %d, %d, %v, %v; want %d, %d", c.ms, offset, at, ok, err, c.offset, c.at)
		}
	}
}

func gzipped(p []byte) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Write(p)
	w.Close()
	return b.Bytes()
}

// TestOneSyncForMany: batches that arrive during a sync share the next sync.
func TestOneSyncForMany(t *testing.T) {
	dir := newMemDir()
	l := open(t, dir, Config{})
	defer l.Close()
	if _, err := appendAll(l, batch(log.NoProducer, 0, 1, "first")); err != nil {
		t.Fatal(err)
	}
	gate := make(chan struct{})
	dir.mu.Lock()
	before := dir.syncs
	dir.gate = gate
	dir.mu.Unlock()
	var all []*Append
	for i := range 100 {
		a, err := l.Append(batch(log.NoProducer, 0, 1, fmt.Sprint(i)))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, a)
	}
	if _, high := l.Bounds(); high != 1 {
		t.Errorf("DATA: the high watermark is %d before the sync", high)
	}
	close(gate)
	for _, a := range all {
		if err := a.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	dir.mu.Lock()
	defer dir.mu.Unlock()
	if n := dir.syncs - before; n > 2 {
		t.Errorf("100 batches took %d syncs", n)
	}
}

// TestProducers: a repeated batch is acknowledged with its first offset, also by the next
// leader; a gap and an earlier epoch are refused.
func TestProducers(t *testing.T) {
	dir := newMemDir()
	l := open(t, dir, fixed(Policy{SegmentBytes: 200}))
	for i := range 10 {
		if _, err := appendAll(l, batch(7, int32(i), 1, "x")); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		a, err := l.Append(batch(7, 9, 1, "x"))
		if err != nil || !a.Repeated || a.Base != 9 {
			t.Fatalf("DATA: repeated batch: %+v, %v", a, err)
		}
		if err := a.Wait(t.Context()); err != nil {
			t.Fatal(err)
		}
		var refused *SequenceError
		if _, err := l.Append(batch(7, 11, 1, "x")); !errors.As(err, &refused) || refused.Verdict != log.OutOfOrder {
			t.Errorf("a gap: %v", err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		l = open(t, dir.crash(1), fixed(Policy{SegmentBytes: 200}))
	}
	l.Close()
}

// TestLeadership: an earlier leader is refused, and a former leader appends nothing any more.
func TestLeadership(t *testing.T) {
	dir := newMemDir()
	lead := &leadership{epoch: 5, done: make(chan struct{})}
	l, err := Open(t.Context(), dir, Config{}, lead)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := appendAll(l, batch(log.NoProducer, 0, 1, "x")); err != nil {
		t.Fatal(err)
	}
	close(lead.done)
	if _, err := appendAll(l, batch(log.NoProducer, 0, 1, "y")); !errors.Is(err, meta.Fenced) {
		t.Errorf("DATA: append after the end of the leadership: %v", err)
	}
	if _, err := Open(t.Context(), dir, Config{}, &leadership{epoch: 5}); !errors.Is(err, meta.Fenced) {
		t.Errorf("the same epoch again: %v", err)
	}
}

type leadership struct {
	epoch uint64
	done  chan struct{}
}

func (l *leadership) Epoch() uint64         { return l.epoch }
func (l *leadership) Done() <-chan struct{} { return l.done }
func (l *leadership) Valid() bool           { return true }

// TestLostLeadership: a caller that waits for records or for a sync learns of the end of the
// leadership.
func TestLostLeadership(t *testing.T) {
	dir := newMemDir()
	lead := &leadership{epoch: 5, done: make(chan struct{})}
	l, err := Open(t.Context(), dir, Config{}, lead)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	notice := make(chan struct{}, 1)
	defer l.Watch(notice)()
	close(lead.done)
	<-notice
	if err := l.Err(); !errors.Is(err, meta.Fenced) {
		t.Errorf("DATA: a log without a leadership: %v", err)
	}
}

// TestEpochNumbers: Kafka's epochs grow with the counter of a volume, over a rollback that takes
// the file back, and in a volume into which the files were copied.
func TestEpochNumbers(t *testing.T) {
	var led leaders
	add := func(l leaders, volume, count uint64, end int64) (leaders, int32) {
		t.Helper()
		again, err := decodeLeaders(l.encode())
		if err != nil {
			t.Fatal(err)
		}
		epoch, err := again.number(volume, count)
		if err != nil {
			t.Fatal(err)
		}
		again.list = again.list.begin(epoch, end)
		return again, epoch
	}
	led, _ = add(led, 1, 1, 0)
	snapshot, first := add(led, 1, 3, 10)
	later, second := add(snapshot, 1, 9, 20)
	rolled, third := add(snapshot, 1, 10, 15)
	if first != 3 || second != 9 || third != 10 {
		t.Errorf("DATA: epochs %d, %d, %d", first, second, third)
	}
	if epoch, end := rolled.list.end(second, 30); epoch != first || end != 15 {
		t.Errorf("DATA: the undone epoch %d has become epoch %d, which ends at %d", second, epoch, end)
	}
	if _, err := later.number(1, 9); !errors.Is(err, meta.Fenced) {
		t.Errorf("DATA: the same count again: %v", err)
	}
	// A clone counts from 1 on, also after a rollback to its first state.
	clone, fourth := add(later, 2, 1, 30)
	_, fifth := add(clone, 2, 2, 40)
	_, sixth := add(later, 2, 3, 30)
	if fourth != 10 || fifth != 11 || sixth != 12 {
		t.Errorf("DATA: epochs %d, %d, %d in the clone", fourth, fifth, sixth)
	}
	if _, err := led.number(1, 1<<31); !errors.Is(err, meta.ResourceExceeded) {
		t.Errorf("a count beyond Kafka's epochs: %v", err)
	}
}

// TestEmptySegments: a segment that a leader began, and to which it appended nothing, is removed.
func TestEmptySegments(t *testing.T) {
	dir := newMemDir()
	l := open(t, dir, Config{})
	for i := range 3 {
		if _, err := appendAll(l, batch(log.NoProducer, 0, 1, fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for _, first := range []int64{2, 3} { // late leaders, and leaders in time
		if _, err := dir.Create(t.Context(), SegmentName(first)); err != nil {
			t.Fatal(err)
		}
	}
	l = open(t, dir, Config{})
	defer l.Close()
	if base, err := appendAll(l, batch(log.NoProducer, 0, 1, "3")); base != 3 || err != nil {
		t.Fatalf("DATA: the next record is at %d, %v", base, err)
	}
	if start, all := values(t, l, 1000); start != 0 || fmt.Sprint(all) != "[0 1 2 3]" {
		t.Errorf("DATA: %v from %d on", all, start)
	}
}

// TestEmptySegmentBetween: a segment that a leader began after its time, at an offset where the
// next leader appended on, is removed.
func TestEmptySegmentBetween(t *testing.T) {
	dir := newMemDir()
	cfg := fixed(Policy{SegmentBytes: 300})
	for i := range 8 {
		l := open(t, dir, cfg)
		if _, err := appendAll(l, batch(log.NoProducer, 0, 1, fmt.Sprint(i), "and")); err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := dir.Create(t.Context(), SegmentName(1)); err != nil {
		t.Fatal(err)
	}
	// Without the producers' state, each segment is scanned.
	if err := dir.Remove(t.Context(), producersFile); err != nil {
		t.Fatal(err)
	}
	l := open(t, dir, cfg)
	defer l.Close()
	if len(l.segments) < 3 {
		t.Fatalf("%d segments, too few to lie around the empty one", len(l.segments))
	}
	if start, all := values(t, l, 1000); start != 0 || len(all) != 16 {
		t.Errorf("DATA: %v from %d on", all, start)
	}
}

// TestRetention removes whole segments by time and by size, and empties an idle partition.
func TestRetention(t *testing.T) {
	c := &clock{at: time.UnixMilli(1_000_000)}
	dir := newMemDir()
	cfg := Config{Policy: fixed(Policy{SegmentBytes: 300, Retention: time.Minute}).Policy, Now: c.now}
	l := open(t, dir, cfg)
	for i := range 30 {
		if _, err := appendAll(l, batch(log.NoProducer, 0, c.now().UnixMilli(), fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
		c.add(4 * time.Second)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, dir, cfg) // knows nothing of the older segments yet
	if n, err := l.Retain(t.Context()); err != nil || n == 0 {
		t.Fatal(n, err)
	}
	start, got := values(t, l, 1<<20)
	if start < 10 || start > 15 || got[len(got)-1] != "29" || got[0] != fmt.Sprint(start) {
		t.Errorf("DATA: after a minute of two the log begins at %d: %v", start, got)
	}
	if _, err := l.Read(start-1, 1); !errors.Is(err, meta.Range) {
		t.Errorf("a removed offset: %v", err)
	}
	c.add(time.Hour)
	if _, err := l.Retain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if start, high := l.Bounds(); start != 30 || high != 30 {
		t.Errorf("an old partition has the offsets %d to %d", start, high)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l = open(t, dir, Config{Policy: fixed(Policy{SegmentBytes: 300, RetentionBytes: 1000}).Policy, Now: c.now})
	defer l.Close()
	for i := range 30 {
		if base, err := appendAll(l, batch(log.NoProducer, 0, 1, fmt.Sprint(i))); err != nil || base != int64(30+i) {
			t.Fatalf("DATA: offset %d, %v", base, err)
		}
	}
	if _, err := l.Retain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if size := l.Size(); size > 1000 || size == 0 {
		t.Errorf("%d bytes are left", size)
	}
}

// TestDamage: damage that no crash can cause is an error, and the log is not cut.
func TestDamage(t *testing.T) {
	dir := newMemDir()
	l := open(t, dir, fixed(Policy{SegmentBytes: 200}))
	for i := range 10 {
		if _, err := appendAll(l, batch(3, int32(i), 1, "value")); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	first := dir.files[SegmentName(0)]
	first.data[70] ^= 1
	l = open(t, dir, fixed(Policy{SegmentBytes: 200})) // does not read the damage
	if _, err := l.Read(0, 100); !errors.Is(err, meta.Corrupt) {
		t.Errorf("DATA: a damaged segment reads as %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	dir.files[producersFile].data[8] ^= 1 // now everything must be read
	if _, err := tryOpen(t, dir, fixed(Policy{SegmentBytes: 200})); !errors.Is(err, meta.Corrupt) {
		t.Errorf("DATA: opened with a damaged segment: %v", err)
	}
	first.data[70] ^= 1
	l = open(t, dir, fixed(Policy{SegmentBytes: 200}))
	defer l.Close()
	if a, err := l.Append(batch(3, 9, 1, "value")); err != nil || !a.Repeated {
		t.Errorf("DATA: the producers' state was not read from the log: %+v, %v", a, err)
	}
}

// TestCrashes cuts the power at every change in turn, and keeps a random part of the unsynced
// bytes. Every acknowledged record must be at its offset, once; other records may be in the log,
// and are sent again.
func TestCrashes(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	for at := range 160 {
		dir := newMemDir()
		acked := map[int64]string{} // by offset
		sent := 0                   // acknowledged idempotent batches
		for life := 0; life < 3; life++ {
			dir.left = at
			l, err := tryOpen(t, dir, fixed(Policy{SegmentBytes: 250}))
			for err == nil && sent < 12*(life+1) {
				v := fmt.Sprintf("p%d", sent)
				var base int64
				if base, err = appendAll(l, batch(9, int32(sent), 1, v)); err == nil {
					if old, ok := acked[base]; ok {
						t.Fatalf("DATA: seed %d, crash %d: offset %d has %q and %q", seed, at, base, old, v)
					}
					acked[base] = v
					sent++
				}
			}
			if err != nil && !errors.Is(err, meta.IO) {
				t.Fatalf("seed %d, crash %d: %v", seed, at, err)
			}
			if l != nil {
				l.Close()
			}
			dir = dir.crash(r.Float64())
		}
		l := open(t, dir, fixed(Policy{SegmentBytes: 250}))
		start, all := values(t, l, 1<<20)
		if start != 0 {
			t.Fatalf("DATA: seed %d, crash %d: the log begins at %d", seed, at, start)
		}
		seen := map[string]bool{}
		for _, v := range all {
			if seen[v] {
				t.Fatalf("DATA: seed %d, crash %d: %q is there twice", seed, at, v)
			}
			seen[v] = true
		}
		for offset, v := range acked {
			if offset >= int64(len(all)) || all[offset] != v {
				t.Fatalf("DATA: seed %d, crash %d: offset %d does not have %q", seed, at, offset, v)
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestManyProducers: producers, a reader and retention work at the same time.
func TestManyProducers(t *testing.T) {
	l := open(t, newMemDir(), fixed(Policy{SegmentBytes: 2000}))
	var wg sync.WaitGroup
	const producers, each = 8, 50
	for p := range producers {
		wg.Go(func() {
			for i := range each {
				if _, err := appendAll(l, batch(int64(p), int32(i), 1, fmt.Sprintf("%d/%d", p, i))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Go(func() {
		notice := make(chan struct{}, 1)
		defer l.Watch(notice)()
		for at := int64(0); at < producers*each; {
			p, err := l.Read(at, 500)
			if err != nil {
				t.Error(err)
				return
			}
			if len(p) == 0 {
				<-notice
			}
			for len(p) > 0 {
				b, err := log.Parse(p, DefaultMaxBatch)
				if err != nil || b.Base != at {
					t.Errorf("DATA: batch at %d instead of %d, %v", b.Base, at, err)
					return
				}
				at, p = b.Next(), p[b.Size:]
			}
		}
	})
	wg.Wait()
	_, all := values(t, l, 1<<20)
	next := map[string]int{}
	for _, v := range all {
		p, i, _ := bytes.Cut([]byte(v), []byte("/"))
		if string(i) != fmt.Sprint(next[string(p)]) {
			t.Fatalf("DATA: producer %s has record %s instead of %d", p, i, next[string(p)])
		}
		next[string(p)]++
	}
	if len(all) != producers*each {
		t.Errorf("DATA: %d records", len(all))
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func FuzzEpochs(f *testing.F) {
	f.Add((&leaders{7, 2, epochs{{0, 0}, {3, 17}}}).encode())
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := decodeLeaders(b)
		if err != nil {
			return
		}
		again, err := decodeLeaders(l.encode())
		if err != nil || fmt.Sprint(again) != fmt.Sprint(l) {
			t.Errorf("%v becomes %v, %v", l, again, err)
		}
	})
}
