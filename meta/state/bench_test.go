package state

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// benchKey looks like a namespace key: a prefix byte, an inode, a generation.
func benchKey(i uint64) []byte {
	k := []byte{0x10}
	k = binary.BigEndian.AppendUint64(k, i*0x9e3779b97f4a7c15>>20)
	return append(k, 0xff, 0xff, 0xff, 0xfe)
}

const benchKeys = 1_000_000

// benchStore holds a million entries of 100 bytes, compacted as a store at
// rest is.
func benchStore(b *testing.B) (*Store, *Shared) {
	b.Helper()
	sh := NewShared(256<<20, 1000, nil)
	b.Cleanup(sh.Close)
	s, err := Create(filepath.Join(b.TempDir(), "v"), vol, sh)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() })
	val := bytes.Repeat([]byte("v"), 100)
	for n := 1; n <= benchKeys/1000; n++ {
		err := s.Apply(pos(n), func(batch Batch) error {
			for i := range 1000 {
				batch.Put(benchKey(uint64(n*1000+i)), val)
			}
			return nil
		})
		if err != nil {
			b.Fatal(err)
		}
	}
	if err := s.Flush(); err != nil {
		b.Fatal(err)
	}
	return s, sh
}

func BenchmarkStore(b *testing.B) {
	s, sh := benchStore(b)
	i := uint64(0)
	b.Run("GetExisting", func(b *testing.B) {
		for b.Loop() {
			i += 7919
			if _, ok, err := s.Get(benchKey(1000 + i%benchKeys)); err != nil || !ok {
				b.Fatal(ok, err)
			}
		}
	})
	b.Run("GetMissing", func(b *testing.B) {
		for b.Loop() {
			i += 7919
			k := benchKey(1000 + i%benchKeys)
			k[9] ^= 0x55
			if _, ok, err := s.Get(k); err != nil || ok {
				b.Fatal(ok, err)
			}
		}
	})
	b.Run("GetHot", func(b *testing.B) {
		for b.Loop() {
			i++
			if _, ok, err := s.Get(benchKey(1000 + i%64)); err != nil || !ok {
				b.Fatal(ok, err)
			}
		}
	})
	b.Run("Scan100", func(b *testing.B) {
		for b.Loop() {
			i += 7919
			n := 0
			if err := s.Scan(benchKey(1000+i%benchKeys), []byte{0x11}, func(k, v []byte) bool { n++; return n < 100 }); err != nil {
				b.Fatal(err)
			}
		}
	})
	// The versions of a single key, as a volume with snapshots reads the versions.
	b.Run("ScanVersions", func(b *testing.B) {
		for b.Loop() {
			i += 7919
			k := benchKey(1000 + i%benchKeys)
			n := 0
			if err := s.Scan(k[:9], append(bytes.Clone(k[:9]), 0xff, 0xff, 0xff, 0xff), func(k, v []byte) bool { n++; return false }); err != nil || n != 1 {
				b.Fatal(n, err)
			}
		}
	})
	b.Run("Apply100Puts", func(b *testing.B) {
		val := bytes.Repeat([]byte("w"), 100)
		for b.Loop() {
			err := s.Apply(pos(int(s.Applied().Seq)+1), func(batch Batch) error {
				for range 100 {
					i += 7919
					batch.Put(benchKey(1000+i%benchKeys), val)
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Checkpoint", func(b *testing.B) {
		n := 0
		top := b.TempDir()
		for b.Loop() {
			n++
			put(b, s, int(s.Applied().Seq)+1, benchKey(uint64(n)), []byte("x"))
			if _, _, err := s.Checkpoint(filepath.Join(top, fmt.Sprint(n)), sh); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkIdle measures the cost of an open, unused store.
func BenchmarkIdle(b *testing.B) {
	sh := NewShared(8<<20, 100, nil)
	defer sh.Close()
	top := b.TempDir()
	var before, after runtime.MemStats
	const n = 50
	for b.Loop() {
		b.StopTimer()
		runtime.GC()
		runtime.ReadMemStats(&before)
		g := runtime.NumGoroutine()
		var stores []*Store
		for i := range n {
			s, err := Create(filepath.Join(top, fmt.Sprint(i)), vol, sh)
			if err != nil {
				b.Fatal(err)
			}
			put(b, s, 1, key(1), []byte("x"))
			stores = append(stores, s)
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(after.HeapAlloc+after.StackInuse-before.HeapAlloc-before.StackInuse)/n, "bytes/store")
		b.ReportMetric(float64(runtime.NumGoroutine()-g)/n, "goroutines/store")
		for _, s := range stores {
			if err := s.Close(); err != nil {
				b.Fatal(err)
			}
		}
		if err := os.RemoveAll(top); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
