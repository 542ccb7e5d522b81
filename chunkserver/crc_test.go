package chunkserver

import (
	"math/rand/v2"
	"testing"
)

func TestCombineCRC(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		p := make([]byte, r.IntN(3*ChecksumBlock))
		for i := range p {
			p[i] = byte(r.Uint32())
		}
		cut := r.IntN(len(p) + 1)
		if got, want := CombineCRC(CRC(p[:cut]), CRC(p[cut:]), uint64(len(p)-cut)), CRC(p); got != want {
			t.Fatalf("combine at %d of %d: %08x, want %08x", cut, len(p), got, want)
		}
	}
	if CRC([]byte("123456789")) != 0xe3069283 {
		t.Fatal("not CRC32C")
	}
}

func BenchmarkCRC(b *testing.B) {
	p := make([]byte, ChecksumBlock)
	b.SetBytes(ChecksumBlock)
	for b.Loop() {
		CRC(p)
	}
}

func BenchmarkCombineCRC(b *testing.B) {
	for b.Loop() {
		CombineCRC(1, 2, 4097)
	}
}
