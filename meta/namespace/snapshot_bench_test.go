package namespace

import (
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
)

// BenchmarkTakeSnapshot and BenchmarkMakeClone: the same whatever the volume's
// size, in time, in effects and in bytes of the one journal entry that they are.
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

// BenchmarkDiff compares a snapshot with the volume after some files changed, of
// 200,000: it costs what changed.
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

// BenchmarkWithSnapshots: creating a file, and committing an extent over one that
// a snapshot sees, in a volume with so many snapshots, each of which has changes.
func BenchmarkWithSnapshots(b *testing.B) {
	for _, snaps := range []int{0, 10, 100} {
		f := benchVolume(b, benchFiles)
		f.exec(b, &meta.AllocChunks{N: 1, Servers: [][]meta.ServerID{{1}}})
		c := meta.ChunkID{Volume: testVolume, Term: 3, Counter: 1}
		for i := range snaps {
			f.exec(b, &meta.TakeSnapshot{Name: fmt.Sprint(i)})
			for k := range 100 {
				f.exec(b, &meta.SetAttr{Ino: meta.Ino(2 + i*100 + k), Mask: meta.SetMode, Mode: uint32(i)})
			}
		}
		at := f.ctx()
		b.Run(fmt.Sprint("create/snapshots=", snaps), func(b *testing.B) {
			op := &meta.Create{Parent: meta.RootIno, Mode: meta.TypeRegular | 0o644, Excl: true}
			i := 0
			for b.Loop() {
				op.Name = names[i%len(names)]
				i++
				if _, _, err := Execute(f.s, at, op); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprint("write/snapshots=", snaps), func(b *testing.B) {
			i := uint64(0)
			for b.Loop() {
				op := &meta.Write{Ino: meta.Ino(2 + i%benchFiles), Synced: true, Extents: []meta.Extent{{Len: 4096, Chunk: c, ChunkOff: i * 4096}}}
				i++
				if _, _, err := Execute(f.s, at, op); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
