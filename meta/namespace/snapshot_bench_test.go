package namespace

import (
	"fmt"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// BenchmarkTakeSnapshot and BenchmarkMakeClone: time, effects and bytes of the journal
// entry are the same for every size of the volume.
func BenchmarkTakeSnapshot(b *testing.B) {
	for _, files := range []int{1_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprint("files=", files), func(b *testing.B) {
			f := benchVolume(b, files)
			c := f.ctx()
			var l []Effect
			for b.Loop() {
				var err error
				if _, l, err = Execute(f.s, c, &meta.TakeSnapshot{Name: "s"}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(len(l)), "effects")
			b.ReportMetric(float64(len(AppendEffects(nil, l))), "journal-B")
		})
	}
}

func BenchmarkMakeClone(b *testing.B) {
	for _, files := range []int{1_000, 100_000, 1_000_000} {
		b.Run(fmt.Sprint("files=", files), func(b *testing.B) {
			f := benchVolume(b, files)
			f.exec(b, &meta.TakeSnapshot{Name: "s"})
			var l []Effect
			for b.Loop() {
				var err error
				if l, err = CloneEffects(f.s, 1, testVolume+1, meta.Policy{Replicas: 1}, f.now); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(len(l)), "effects")
			b.ReportMetric(float64(len(AppendEffects(nil, l))), "journal-B")
		})
	}
}

// BenchmarkDiff compares a snapshot with the volume after changes of some of 200,000
// files: the cost is that of the changes.
func BenchmarkDiff(b *testing.B) {
	f := benchVolume(b, 200_000)
	f.exec(b, &meta.TakeSnapshot{Name: "s"})
	changed := 0
	for _, n := range []int{100, 1_000, 10_000} {
		for ; changed < n; changed++ {
			f.exec(b, &meta.SetAttr{Ino: meta.Ino(2 + changed*20), Mask: meta.SetMode, Mode: 0o600})
		}
		b.Run(fmt.Sprint("changed=", n), func(b *testing.B) {
			for b.Loop() {
				if l, err := Diff(f.s, 1, 0); err != nil || len(l) != n {
					b.Fatal(len(l), err)
				}
			}
		})
	}
}

// BenchmarkReadHeld counts the bytes that only a snapshot has, after half of the 16
// extents of some of 100,000 files were overwritten: the cost is that of the changes.
func BenchmarkReadHeld(b *testing.B) {
	f := benchVolume(b, 100_000)
	f.exec(b, &meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{{1}}})
	at := uint64(0)
	write := func(file, n int) {
		op := &meta.Write{Ino: meta.Ino(2 + file), Synced: true}
		for i := range n {
			op.Extents = append(op.Extents, meta.Extent{Off: uint64(i) * 8192, Len: 4096, Chunk: meta.ChunkID{Volume: testVolume, Term: 3, Counter: 1}, ChunkOff: at})
			at += 8192
		}
		f.exec(b, op)
	}
	for i := range 10_000 {
		write(i, 16)
	}
	f.exec(b, &meta.TakeSnapshot{Name: "s"})
	changed := 0
	for _, n := range []int{100, 1_000, 10_000} {
		for ; changed < n; changed++ {
			write(changed, 8)
		}
		b.Run(fmt.Sprint("changed=", n), func(b *testing.B) {
			for b.Loop() {
				if h, err := ReadHeld(f.s, nil); err != nil || h.Alone != uint64(n)*8*4096 {
					b.Fatal(h, err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N)/float64(n), "µs/file")
		})
	}
}

// BenchmarkWithSnapshots creates files, and commits extents, in volumes with a number of
// snapshots, each with changes. In the case "steady" the directory or file has changed
// since the last snapshot; in the case "first" it has not, so a version is kept for the
// snapshot and its place noted. The volumes take turns, a hundred operations each, and
// only the processor time of this thread counts, so that other work on the machine does
// not matter. The benchmark reports the processor time of an operation (cpu-ns), the
// throughput as a share of that without snapshots (ratio), the number of reads of the
// store, and the bytes in the journal.
func BenchmarkWithSnapshots(b *testing.B) {
	const touched = 1000
	snaps := []int{0, 10, 100}
	for _, what := range []string{"create/steady", "create/first", "write/steady", "write/first"} {
		var all []*snapBench
		for _, n := range snaps {
			f := benchVolume(b, benchFiles)
			f.exec(b, &meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{{1}}})
			for i := range n {
				f.exec(b, &meta.TakeSnapshot{Name: fmt.Sprint(i)})
				for k := range 100 {
					f.exec(b, &meta.SetAttr{Ino: meta.Ino(2 + i*100 + k), Mask: meta.SetMode, Mode: uint32(i)})
				}
			}
			first := meta.Ino(2 + benchFiles/2) // not changed since the first snapshot
			if strings.HasSuffix(what, "/steady") {
				for i := range touched {
					f.exec(b, &meta.SetAttr{Ino: first + meta.Ino(i), Mask: meta.SetMode, Mode: 0o600})
				}
				f.exec(b, &meta.SetAttr{Ino: meta.RootIno, Mask: meta.SetMode, Mode: 0o700})
			}
			s := &snapBench{at: f.ctx(), r: countingReader{r: f.s}}
			all = append(all, s)
			s.op = func(i uint64) meta.Op {
				return &meta.Create{Parent: meta.RootIno, Name: names[i%uint64(len(names))], Mode: meta.TypeRegular | 0o644, Excl: true}
			}
			if strings.HasPrefix(what, "write") {
				c := meta.ChunkID{Volume: testVolume, Term: 3, Counter: 1}
				s.op = func(i uint64) meta.Op {
					return &meta.Write{Ino: first + meta.Ino(i%touched), Synced: true, Extents: []meta.Extent{{Len: 4096, Chunk: c, ChunkOff: i * 4096}}}
				}
			}
		}
		b.Run(what, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			for _, s := range all {
				s.reset()
			}
			for b.Loop() {
				for _, s := range all {
					s.run(b, 100)
				}
			}
			for i, s := range all {
				per := func(n int64) float64 { return float64(n) / float64(s.n) }
				at := fmt.Sprint("-", snaps[i])
				b.ReportMetric(per(s.cpu), "cpu-ns"+at)
				b.ReportMetric(per(s.r.gets), "gets"+at)
				b.ReportMetric(per(s.r.scans), "scans"+at)
				b.ReportMetric(per(s.bytes), "journal-B"+at)
				if i > 0 {
					b.ReportMetric(float64(all[0].cpu)/float64(all[0].n)/per(s.cpu), "ratio"+at)
				}
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// snapBench is a volume of the benchmark, with its costs.
type snapBench struct {
	at Context
	op func(i uint64) meta.Op
	r  countingReader

	n          uint64
	cpu, bytes int64
}

func (s *snapBench) reset() { s.n, s.cpu, s.bytes, s.r.gets, s.r.scans = 0, 0, 0, 0, 0 }

func (s *snapBench) run(b *testing.B, n int) {
	ops := make([]meta.Op, n)
	for i := range ops {
		ops[i] = s.op(s.n + uint64(i))
	}
	var l []Effect
	from := threadTime(b)
	for _, op := range ops {
		var err error
		if _, l, err = Execute(&s.r, s.at, op); err != nil {
			b.Fatal(err)
		}
	}
	s.cpu += threadTime(b) - from
	s.n += uint64(n)
	s.bytes += int64(n * len(AppendEffects(nil, l)))
}

// threadTime returns the processor time of this thread, in ns.
func threadTime(b *testing.B) int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		b.Fatal(err)
	}
	return ts.Nano()
}

// countingReader counts how often the store is read.
type countingReader struct {
	r           Reader
	gets, scans int64
}

func (c *countingReader) Get(key []byte) ([]byte, bool, error) {
	c.gets++
	return c.r.Get(key)
}

func (c *countingReader) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	c.scans++
	return c.r.Scan(lo, hi, fn)
}

// TestReadsWithSnapshots: in a store with snapshots, records are read by scans. The
// number of scans is bounded, whatever the number of snapshots.
func TestReadsWithSnapshots(t *testing.T) {
	f := newFixture(t)
	id := f.chunks(1, false)[0]
	old := f.file("old")
	small := f.file("small")
	f.do(&meta.Write{Ino: small, Inline: true, Data: []byte("bytes")})
	for i := range 20 {
		f.do(&meta.TakeSnapshot{Name: fmt.Sprint(i)})
		f.do(&meta.SetAttr{Ino: old, Mask: meta.SetMode, Mode: uint32(i)})
	}
	write := func() meta.Op {
		return &meta.Write{Ino: old, Synced: true, Extents: []meta.Extent{{Len: 4096, Chunk: id}}}
	}
	for _, c := range []struct {
		what  string
		op    meta.Op
		scans int64
	}{
		{"a create, the first in the directory since the snapshot", &meta.Create{Parent: meta.RootIno, Name: "a", Mode: meta.TypeRegular}, 2},
		{"a create", &meta.Create{Parent: meta.RootIno, Name: "b", Mode: meta.TypeRegular}, 1},
		{"a write", write(), 1},
		{"the same again", write(), 1},
		{"unlink of an old name", &meta.Unlink{Parent: meta.RootIno, Name: "old"}, 1},
		{"unlink of an old name and inode", &meta.Unlink{Parent: meta.RootIno, Name: "small"}, 2},
		{"its end", &meta.ReleaseOrphans{Inos: []meta.Ino{small}}, 1}, // the records below the inode
	} {
		r := &countingReader{r: f.s}
		if _, _, err := Execute(r, f.ctx(), c.op); err != nil {
			t.Fatal(err)
		}
		if r.scans > c.scans {
			t.Errorf("%s: %d scans, %d are enough", c.what, r.scans, c.scans)
		}
		f.do(c.op)
	}
}

// BenchmarkCountedSnapshots: the cost of a commit in a volume whose quota counts
// snapshots: over bytes that a snapshot has, over bytes that a snapshot had, and at the
// end of a file.
func BenchmarkCountedSnapshots(b *testing.B) {
	const file, piece = 4 << 20, 4 << 10
	for _, c := range []struct {
		what string
		off  func(i uint64) uint64
	}{
		{"overwrite-kept", func(i uint64) uint64 { return (2*(i%512) + 1) * piece }},
		{"overwrite-again", func(i uint64) uint64 { return 2 * (i % 512) * piece }},
		{"append", func(uint64) uint64 { return file }},
	} {
		b.Run(c.what, func(b *testing.B) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var both [2]*snapBench
			for i := range both {
				f := newFixture(b)
				f.do(&meta.SetPolicy{Policy: meta.Policy{Replicas: 1, QuotaSnapshots: i == 1}})
				ino, id := f.file("f"), f.chunks(1, false)[0]
				next := uint64(0)
				write := func(off, n uint64) *meta.Write {
					next += n + piece // nothing joins
					return &meta.Write{Ino: ino, Synced: true, Extents: []meta.Extent{{Off: off, Len: n, Chunk: id, ChunkOff: next - n}}}
				}
				for off := uint64(0); off < file; off += piece {
					f.do(write(off, piece))
				}
				f.do(&meta.TakeSnapshot{Name: "s"})
				for off := uint64(0); off < file; off += 2 * piece {
					f.do(write(off, piece))
				}
				both[i] = &snapBench{at: f.ctx(), r: countingReader{r: f.s}, op: func(i uint64) meta.Op { return write(c.off(i), piece) }}
			}
			for _, s := range both {
				s.run(b, 5000)
				s.reset()
			}
			for b.Loop() {
				for _, s := range both {
					s.run(b, 200)
				}
			}
			for i, s := range both {
				at := []string{"-off", "-on"}[i]
				b.ReportMetric(float64(s.cpu)/float64(s.n), "cpu-ns"+at)
				b.ReportMetric(float64(s.bytes)/float64(s.n), "journal-B"+at)
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
