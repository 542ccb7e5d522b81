package namespace

import (
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
)

// The machine alone, over a B-tree in memory. Setting up and applying the
// effects is not timed.

const benchFiles = 20_000

func benchVolume(b *testing.B, n int) *fixture {
	f := &fixture{t: b, s: newMemStore(), now: 1_700_000_000_000_000_000, session: testSession}
	f.s.apply(Format(testVolume, f.now, 0o755, 0, 0, meta.Policy{Replicas: 1}))
	for i := range n {
		f.exec(b, &meta.Create{Parent: meta.RootIno, Name: fmt.Sprintf("file%08d", i), Mode: meta.TypeRegular | 0o644, UID: 1000, GID: 1000, Excl: true})
	}
	return f
}

func (f *fixture) exec(b *testing.B, op meta.Op) []Effect {
	f.now += 1_000_000
	_, l, err := Execute(f.s, f.ctx(), op)
	if err != nil {
		b.Fatal(err)
	}
	f.s.apply(l)
	return l
}

func BenchmarkCreate(b *testing.B)       { benchCreate(b, 0) }
func BenchmarkCreateEvents(b *testing.B) { benchCreate(b, meta.MaxEvents) }

func benchCreate(b *testing.B, events uint64) {
	f := benchVolume(b, benchFiles)
	f.exec(b, &meta.SetEvents{Keep: events})
	c := f.ctx()
	op := &meta.Create{Parent: meta.RootIno, Mode: meta.TypeRegular | 0o644, UID: 1000, GID: 1000, Excl: true}
	bytes := 0
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		op.Name = names[i%len(names)]
		i++
		_, l, err := Execute(f.s, c, op)
		if err != nil {
			b.Fatal(err)
		}
		bytes = len(AppendEffects(nil, l))
	}
	b.ReportMetric(float64(bytes), "journal-B/op")
}

func BenchmarkLookup(b *testing.B) {
	f := benchVolume(b, benchFiles)
	c := f.ctx()
	op := &meta.Lookup{Parent: meta.RootIno}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		op.Name = existing[i%len(existing)]
		i++
		if _, err := Query(f.s, c, op); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkUnlink(b *testing.B) {
	f := benchVolume(b, benchFiles)
	c := f.ctx()
	op := &meta.Unlink{Parent: meta.RootIno}
	bytes := 0
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		op.Name = existing[i%len(existing)]
		i++
		_, l, err := Execute(f.s, c, op)
		if err != nil {
			b.Fatal(err)
		}
		bytes = len(AppendEffects(nil, l))
	}
	b.ReportMetric(float64(bytes), "journal-B/op")
}

func BenchmarkWriteCommit(b *testing.B) {
	f := benchVolume(b, 100)
	c := f.ctx()
	res, l, err := Execute(f.s, c, &meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{{1}}})
	if err != nil {
		b.Fatal(err)
	}
	f.s.apply(l)
	op := &meta.Write{Ino: 50, Size: 100 << 10, Synced: true, Extents: []meta.Extent{{Len: 100 << 10, Chunk: res.Chunks[0].ID, ChunkOff: 1 << 20}}}
	bytes := 0
	b.ReportAllocs()
	for b.Loop() {
		_, l, err := Execute(f.s, c, op)
		if err != nil {
			b.Fatal(err)
		}
		bytes = len(AppendEffects(nil, l))
	}
	b.ReportMetric(float64(bytes), "journal-B/op")
}

func BenchmarkReadDirPlus(b *testing.B) {
	f := benchVolume(b, benchFiles)
	c := f.ctx()
	b.ReportAllocs()
	for b.Loop() {
		var cookie uint64
		for eof := false; !eof; {
			res, err := Query(f.s, c, &meta.ReadDir{Ino: meta.RootIno, Cookie: cookie, Max: 4096, Plus: true})
			if err != nil {
				b.Fatal(err)
			}
			cookie, eof = res.Entries[len(res.Entries)-1].Cookie, res.EOF
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/benchFiles, "ns/entry")
}

var names, existing = func() (n, e []string) {
	for i := range 1000 {
		n = append(n, fmt.Sprintf("new%08d", i))
		e = append(e, fmt.Sprintf("file%08d", i*17%benchFiles))
	}
	return n, e
}()
