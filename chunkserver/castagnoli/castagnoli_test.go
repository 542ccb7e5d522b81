package castagnoli

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

func bytesOf(n int) []byte {
	r := rand.New(rand.NewPCG(1, uint64(n)))
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return p
}

// Every length around the steps, every alignment, and any checksum before.
func TestUpdate(t *testing.T) {
	p := bytesOf(5000)
	for n := range foldFrom + 4*foldStep {
		for _, at := range []int{0, 1, 63, 4096 - n} {
			if at < 0 || at+n > len(p) {
				continue
			}
			before := uint32(n) * 0x9e3779b9
			if got, want := Update(before, p[at:at+n]), crc32.Update(before, table, p[at:at+n]); got != want {
				t.Fatalf("%d bytes at %d: %08x, want %08x", n, at, got, want)
			}
		}
	}
	if Update(0, []byte("123456789")) != 0xe3069283 {
		t.Fatal("not CRC32C")
	}
}

// TestEveryBit: a flip of any bit changes the checksum: folding leaves no byte out.
func TestEveryBit(t *testing.T) {
	p := bytesOf(foldFrom + foldStep + 77)
	was := Update(0, p)
	for i := range 8 * len(p) {
		p[i/8] ^= 1 << (i % 8)
		if Update(0, p) == was {
			t.Fatalf("bit %d of byte %d does not count", i%8, i/8)
		}
		p[i/8] ^= 1 << (i % 8)
	}
}

func TestCombine(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		p := bytesOf(r.IntN(200_000))
		cut := r.IntN(len(p) + 1)
		if got, want := Combine(Update(0, p[:cut]), Update(0, p[cut:]), uint64(len(p)-cut)), Update(0, p); got != want {
			t.Fatalf("combine at %d of %d: %08x, want %08x", cut, len(p), got, want)
		}
	}
}

func FuzzUpdate(f *testing.F) {
	f.Add(uint32(0), []byte{})
	f.Add(uint32(1), bytesOf(foldFrom-1))
	f.Add(^uint32(0), bytesOf(foldFrom))
	f.Add(uint32(7), bytesOf(5*foldStep+3))
	f.Fuzz(func(t *testing.T, before uint32, p []byte) {
		if got, want := Update(before, p), crc32.Update(before, table, p); got != want {
			t.Fatalf("%08x, want %08x", got, want)
		}
	})
}

func BenchmarkUpdate(b *testing.B) {
	for _, way := range []struct {
		name string
		sum  func([]byte) uint32
	}{
		{"folded", func(p []byte) uint32 { return Update(0, p) }},
		{"plain", func(p []byte) uint32 { return crc32.Update(0, table, p) }},
	} {
		for _, size := range []int{1 << 10, 64 << 10, 1 << 20, 64 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", way.name, size>>10), func(b *testing.B) {
				p := bytesOf(size)
				b.SetBytes(int64(size))
				for b.Loop() {
					way.sum(p)
				}
			})
		}
	}
}
