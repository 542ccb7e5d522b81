package log

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/twmb/franz-go/pkg/kmsg"

	"penstock.io/penstock/meta"
)

const maxBatch = 1 << 20

// randomBatch makes a batch of up to n records, encoded by this package, and the records.
func randomBatch(r *rand.Rand, base int64, n int) (Batch, []byte, []Record) {
	b := Batch{Base: base, LeaderEpoch: r.Int32N(100), BaseTime: r.Int64N(1 << 40), Producer: NoProducer, Epoch: -1, Sequence: -1}
	if r.IntN(2) == 0 {
		b.Producer, b.Epoch, b.Sequence = r.Int64N(1000), int16(r.IntN(10)), r.Int32()
	}
	b.MaxTime = b.BaseTime
	bytesOf := func(most int) []byte {
		if r.IntN(5) == 0 {
			return nil
		}
		p := make([]byte, r.IntN(most+1))
		for i := range p {
			p[i] = byte(r.Uint32())
		}
		return p
	}
	var encoded []byte
	var all []Record
	b.Records = 1 + r.Int32N(int32(n))
	b.LastDelta = b.Records - 1
	for i := range b.Records {
		dt := r.Int64N(2000) - 1000
		rec := Record{Offset: base + int64(i), Time: b.BaseTime + dt, Key: bytesOf(10), Value: bytesOf(200)}
		for range r.IntN(3) {
			rec.Headers = append(rec.Headers, Header{Name: fmt.Sprint("h", r.IntN(10)), Value: bytesOf(10)})
		}
		b.MaxTime = max(b.MaxTime, rec.Time)
		encoded = AppendRecord(encoded, i, dt, rec.Key, rec.Value, rec.Headers)
		all = append(all, rec)
	}
	return b, b.Encode(encoded), all
}

func same(a, b Record) bool {
	null := func(x, y []byte) bool { return bytes.Equal(x, y) && (x == nil) == (y == nil) }
	return a.Offset == b.Offset && a.Time == b.Time && null(a.Key, b.Key) && null(a.Value, b.Value) &&
		slices.EqualFunc(a.Headers, b.Headers, func(x, y Header) bool { return x.Name == y.Name && null(x.Value, y.Value) })
}

// TestAgainstKmsg: an independent encoder and decoder has the same batches.
func TestAgainstKmsg(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		b, p, want := randomBatch(r, r.Int64N(1<<50), 20)
		var theirs kmsg.RecordBatch
		if err := theirs.ReadFrom(p); err != nil {
			t.Fatal(err)
		}
		if theirs.FirstOffset != b.Base || theirs.ProducerID != b.Producer || theirs.FirstSequence != b.Sequence || theirs.NumRecords != b.Records ||
			theirs.MaxTimestamp != b.MaxTime || theirs.PartitionLeaderEpoch != b.LeaderEpoch || uint32(theirs.CRC) != b.crc {
			t.Fatalf("kmsg reads %+v of %+v", theirs, b)
		}
		rest := theirs.Records
		for i, rec := range want {
			var k kmsg.Record
			if err := k.ReadFrom(rest); err != nil {
				t.Fatal(err)
			}
			got := Record{Offset: b.Base + int64(k.OffsetDelta), Time: b.BaseTime + k.TimestampDelta64, Key: k.Key, Value: k.Value}
			for _, h := range k.Headers {
				got.Headers = append(got.Headers, Header{Name: h.Key, Value: h.Value})
			}
			if !same(got, rec) {
				t.Fatalf("DATA: kmsg reads record %d as %+v, not %+v", i, got, rec)
			}
			rest = rest[len(k.AppendTo(nil)):]
		}
		if again := theirs.AppendTo(nil); !bytes.Equal(again, p) {
			t.Fatalf("DATA: kmsg encodes\n%x, not\n%x", again, p)
		}
		got, err := Admit(p, maxBatch)
		if err != nil || got != b {
			t.Fatalf("Admit: %+v, %v; want %+v", got, err, b)
		}
		i := 0
		if err := got.Each(p[HeaderSize:], func(rec Record) error {
			if !same(rec, want[i]) {
				t.Fatalf("DATA: record %d is %+v, not %+v", i, rec, want[i])
			}
			i++
			return nil
		}); err != nil || i != len(want) {
			t.Fatalf("%d of %d records: %v", i, len(want), err)
		}
	}
}

// TestEveryBitIsNoticed: a flipped bit is an error, or is in the fields that the leader sets.
func TestEveryBitIsNoticed(t *testing.T) {
	_, p, _ := randomBatch(rand.New(rand.NewPCG(3, 4)), 77, 3)
	for i := range p {
		for bit := range 8 {
			q := slices.Clone(p)
			q[i] ^= 1 << bit
			if _, err := Admit(q, maxBatch); err == nil && i >= 8 && (i < 12 || i >= 16) {
				t.Errorf("bit %d of byte %d may be flipped", bit, i)
			}
		}
	}
	for n := range p {
		if _, err := Admit(p[:n], maxBatch); meta.KindOf(err) != meta.Corrupt {
			t.Errorf("cut at %d: %v", n, err)
		}
		if _, err := Parse(p[:n], maxBatch); !errors.Is(err, ErrShort) {
			t.Errorf("Parse of %d bytes: %v", n, err)
		}
	}
	if _, err := Admit(append(slices.Clone(p), 0), maxBatch); meta.KindOf(err) != meta.Corrupt {
		t.Errorf("a byte behind: %v", err)
	}
	if _, err := Admit(p, len(p)-1); meta.KindOf(err) != meta.TooBig {
		t.Errorf("a batch above the bound: %v", err)
	}
}

// TestNumbersAgree: batches with a right checksum and wrong numbers are refused.
func TestNumbersAgree(t *testing.T) {
	record := AppendRecord(nil, 0, 0, nil, []byte("v"), nil)
	good := Batch{Records: 1, Producer: NoProducer, Epoch: -1, Sequence: -1}
	for name, change := range map[string]func(b *Batch){
		"no record":           func(b *Batch) { b.Records = 0 },
		"a gap":               func(b *Batch) { b.LastDelta = 1 },
		"two records said":    func(b *Batch) { b.Records, b.LastDelta = 2, 1 },
		"a marker":            func(b *Batch) { b.Attributes = bitControl },
		"unknown compression": func(b *Batch) { b.Attributes = 5 },
		"unknown attribute":   func(b *Batch) { b.Attributes = 0x80 },
		"no sequence":         func(b *Batch) { b.Producer, b.Epoch = 5, 0 },
		"negative producer":   func(b *Batch) { b.Producer, b.Epoch, b.Sequence = -2, 0, 0 },
		"offsets overflow":    func(b *Batch) { b.Base = math.MaxInt64 },
	} {
		b := good
		change(&b)
		if _, err := Admit(b.Encode(record), maxBatch); meta.KindOf(err) != meta.Invalid && meta.KindOf(err) != meta.Corrupt {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Admit(good.Encode(record), maxBatch); err != nil {
		t.Error(err)
	}
}

// model is a slow second form of Producers: it has every batch that was ever appended.
type model struct {
	all []Batch
}

func (m *model) check(b *Batch, forgotten map[int64]bool) (Verdict, int64) {
	var mine []Batch
	epoch := int16(-1)
	for _, a := range m.all {
		if a.Producer == b.Producer {
			epoch = max(epoch, a.Epoch)
		}
	}
	for _, a := range m.all {
		if a.Producer == b.Producer && a.Epoch == epoch {
			mine = append(mine, a)
		}
	}
	switch {
	case len(mine) == 0 || forgotten[b.Producer]:
		return Append, 0
	case b.Epoch < epoch:
		return Fenced, 0
	case b.Epoch > epoch && b.Sequence == 0:
		return Append, 0
	case b.Epoch > epoch:
		return OutOfOrder, 0
	}
	for _, a := range mine[max(0, len(mine)-remembered):] {
		if a.Sequence == b.Sequence && a.Records == b.Records {
			return Repeated, a.Base
		}
	}
	if next := (int64(mine[len(mine)-1].Sequence) + int64(mine[len(mine)-1].Records)) % (1 << 31); next != int64(b.Sequence) {
		return OutOfOrder, 0
	}
	return Append, 0
}

func TestProducersAgainstModel(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 9))
		var ps Producers
		m := &model{}
		forgotten := map[int64]bool{}
		next := int64(0)
		last := map[int64]Batch{}
		seen := map[Verdict]int{}
		for step := range 2000 {
			id := r.Int64N(6)
			b := last[id]
			if b.Records == 0 {
				b = Batch{Producer: id, Records: 1, Sequence: math.MaxInt32 - r.Int32N(20)}
			}
			switch k := r.IntN(20); {
			case k < 12: // the next batch
				b.Sequence = addSequence(b.Sequence, b.Records)
				b.Records = 1 + r.Int32N(5)
			case k < 15: // a late repetition of a batch
				if n := len(m.all); n > 0 {
					b = m.all[max(0, n-1-r.IntN(30))]
				}
			case k < 16:
				b.Epoch, b.Sequence = b.Epoch+1, r.Int32N(2)
			case k < 17:
				b.Epoch = max(0, b.Epoch-1)
			default:
				b.Sequence = addSequence(b.Sequence, r.Int32N(3))
			}
			b.LastDelta = b.Records - 1
			got, at := ps.Check(&b)
			want, wantAt := m.check(&b, forgotten)
			if got != want || at != wantAt {
				t.Fatalf("seed %d, step %d: %v at %d, not %v at %d: %+v", seed, step, got, at, want, wantAt, b)
			}
			seen[got]++
			if got == Append {
				if forgotten[b.Producer] {
					m.all = slices.DeleteFunc(m.all, func(a Batch) bool { return a.Producer == b.Producer })
					delete(forgotten, b.Producer)
				}
				b.Base = next
				next += int64(b.Records)
				ps.Add(&b, int64(step))
				m.all = append(m.all, b)
				last[b.Producer] = b
			}
			switch r.IntN(300) {
			case 0: // saved and read again
				p := ps.AppendBinary(nil, next)
				again, end, err := DecodeProducers(p)
				if err != nil || end != next {
					t.Fatal(end, err)
				}
				ps = again
			case 1:
				ps.Expire(int64(step - 50))
				for id := range int64(6) {
					if ps.of[id] == nil {
						forgotten[id] = true
					}
				}
			}
			if err := ps.Consistent(); err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
		}
		for v := Append; v <= Fenced; v++ {
			if seen[v] == 0 {
				t.Errorf("seed %d: verdict %d was never given", seed, v)
			}
		}
	}
}

// TestTruncatedProducersAreThoseOfTheShorterLog: after a rollback the state equals the state of a
// log that was never longer.
func TestTruncatedProducersAreThoseOfTheShorterLog(t *testing.T) {
	var all []Batch
	next := int64(0)
	for i := range int32(5) {
		for id := range int64(3) {
			all = append(all, Batch{Base: next, Producer: id, Sequence: 2 * i, Records: 2, LastDelta: 1})
			next += 2
		}
	}
	for end := int64(0); end <= next; end += 2 {
		var long, short Producers
		for _, b := range all {
			long.Add(&b, 1)
			if b.Base < end {
				short.Add(&b, 1)
			}
		}
		long.Truncate(end)
		if !bytes.Equal(long.AppendBinary(nil, end), short.AppendBinary(nil, end)) {
			t.Errorf("DATA: truncated at %d: %v, not %v", end, long, short)
		}
	}
}

// TestDamagedProducers: each flipped bit and each cut of the saved state is noticed.
func TestDamagedProducers(t *testing.T) {
	var ps Producers
	for i := range int64(3) {
		ps.Add(&Batch{Base: i, Producer: i, Records: 1}, 7)
	}
	p := ps.AppendBinary(nil, 3)
	for i := range 8 * len(p) {
		q := slices.Clone(p)
		q[i/8] ^= 1 << (i % 8)
		if _, _, err := DecodeProducers(q); err == nil {
			t.Errorf("bit %d may be flipped", i)
		}
	}
	for n := range p {
		if _, _, err := DecodeProducers(p[:n]); err == nil {
			t.Errorf("the state may be cut at %d", n)
		}
	}
	p[4] = producersVersion + 1
	if _, _, err := DecodeProducers(p); meta.KindOf(err) != meta.Version {
		t.Errorf("a newer version: %v", err)
	}
}

// segmentOf makes a segment of n batches.
func segmentOf(r *rand.Rand, first int64, n int) (p []byte, batches []Batch, at []int) {
	next, epoch := first, int32(0)
	for range n {
		b, q, _ := randomBatch(r, next, 8)
		epoch += r.Int32N(2)
		b.Assign(q, next, epoch)
		at = append(at, len(p))
		p = append(p, q...)
		batches = append(batches, b)
		next = b.Next()
	}
	return p, batches, append(at, len(p))
}

// TestScan cuts a segment at every byte, and flips bits: Scan finds exactly the batches before
// the damage, whatever sizes reads have.
func TestScan(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	p, batches, at := segmentOf(r, 1000, 40)
	whole := func(n int) int { // whole batches in n bytes
		i, found := slices.BinarySearch(at, n)
		if found {
			return i
		}
		return i - 1
	}
	check := func(q []byte, want int, clean bool) {
		t.Helper()
		var got []Batch
		s, end, err := Scan(iotest.OneByteReader(bytes.NewReader(q)), 1000, maxBatch, func(b *Batch) { got = append(got, *b) })
		if err != nil || !slices.Equal(got, batches[:want]) || s.Size != int64(at[want]) || (end == nil) != clean {
			t.Fatalf("%d of %d batches in %d bytes; end: %v; %v", len(got), want, s.Size, end, err)
		}
		if want > 0 && s.Next != batches[want-1].Next() {
			t.Fatalf("the next offset is %d, not %d", s.Next, batches[want-1].Next())
		}
	}
	for n := range len(p) {
		if n > 400 && n%37 != 0 {
			continue
		}
		check(p[:n], whole(n), slices.Contains(at, n))
	}
	check(p, len(batches), true)
	for range 200 {
		i := r.IntN(len(p))
		q := slices.Clone(p)
		q[i] ^= 1 << r.IntN(8)
		b := whole(i)
		if off := i - at[b]; off >= 12 && off < 16 {
			continue // another epoch of the leader may be as good
		}
		check(q, b, false)
	}
	if _, _, err := Scan(iotest.ErrReader(errors.New("disk")), 0, maxBatch, nil); err == nil {
		t.Error("an error of the reader is not told")
	}
}

// TestIndex: a search by offset or time begins before the wanted record, and not far before.
func TestIndex(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 8))
	p, batches, at := segmentOf(r, 50, 400)
	s, _, err := Scan(bytes.NewReader(p), 50, maxBatch, nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Index.entries) < 10 {
		t.Fatalf("the index of %d bytes has %d entries", len(p), len(s.Index.entries))
	}
	for i, b := range batches {
		for _, offset := range []int64{b.Base, b.Next() - 1} {
			pos := s.Index.Find(offset)
			if pos > int64(at[i]) || int64(at[i])-pos > 2*indexEvery || !slices.Contains(at, int(pos)) {
				t.Errorf("offset %d, at %d, is looked for at %d", offset, at[i], pos)
			}
		}
	}
	for range 500 {
		ms := r.Int64N(1 << 40)
		first := len(p)
		for i, b := range batches {
			if b.MaxTime >= ms {
				first = at[i]
				break
			}
		}
		if pos := s.Index.FindTime(ms); pos > int64(first) {
			t.Errorf("time %d, first at %d, is looked for at %d", ms, first, pos)
		}
	}
}

func FuzzAdmit(f *testing.F) {
	r := rand.New(rand.NewPCG(9, 10))
	for range 5 {
		_, p, _ := randomBatch(r, 0, 3)
		f.Add(p)
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		b, err := Admit(p, maxBatch)
		if err != nil {
			return
		}
		if b.Compression() != Plain {
			return
		}
		if again := b.Encode(p[HeaderSize:]); !bytes.Equal(again, p) {
			t.Errorf("DATA: encoded again: %x, not %x", again, p)
		}
	})
}

func FuzzScan(f *testing.F) {
	p, _, _ := segmentOf(rand.New(rand.NewPCG(11, 12)), 0, 3)
	f.Add(p)
	f.Fuzz(func(t *testing.T, p []byte) {
		s, end, err := Scan(bytes.NewReader(p), 0, maxBatch, nil)
		if err != nil || s.Size > int64(len(p)) || (end == nil) != (s.Size == int64(len(p))) {
			t.Error(s.Size, len(p), end, err)
		}
	})
}

func FuzzDecodeProducers(f *testing.F) {
	var ps Producers
	ps.Add(&Batch{Producer: 1, Records: 1}, 1)
	f.Add(ps.AppendBinary(nil, 1))
	f.Fuzz(func(t *testing.T, p []byte) {
		ps, end, err := DecodeProducers(p)
		if err == nil && !bytes.Equal(ps.AppendBinary(nil, end), p) {
			t.Error("DATA: the state is encoded otherwise")
		}
	})
}

func BenchmarkAdmit(b *testing.B) {
	var enc []byte
	for i := range int32(64) {
		enc = AppendRecord(enc, i, 0, nil, make([]byte, 1024), nil)
	}
	h := Batch{Records: 64, LastDelta: 63, Producer: 1}
	p := h.Encode(enc)
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		if _, err := Admit(p, maxBatch); err != nil {
			b.Fatal(err)
		}
	}
}
