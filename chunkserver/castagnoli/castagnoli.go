// Package castagnoli computes CRC32C, the checksum of every stored or sent byte (RFC 3720), as
// fast as the processor can.
//
// hash/crc32 uses the processor's CRC32C instruction, at best 8 bytes a cycle, which was a
// fifth of a reader's cost of reading a gigabyte over the network. Processors that multiply
// polynomials in 512-bit registers compute twice as fast in their caches and three times as
// fast beyond: Update folds the bytes, 256 at a time, to 64 bytes with the same checksum.
package castagnoli

import "hash/crc32"

var table = crc32.MakeTable(crc32.Castagnoli)

const (
	foldStep = 256  // bytes folded in one step
	foldFrom = 2048 // least number of bytes for which folding is faster
)

// Update returns the checksum of the bytes covered by crc, followed by p; the checksum of no
// bytes is 0.
func Update(crc uint32, p []byte) uint32 {
	if !folds || len(p) < foldFrom {
		return crc32.Update(crc, table, p)
	}
	n := len(p) &^ (foldStep - 1)
	var rest [64]byte
	fold(&p[0], n, ^crc, &constants, &rest)
	return crc32.Update(crc32.Update(^uint32(0), table, rest[:]), table, p[n:])
}

// Combine is the checksum of a followed by b, from the two checksums and b's
// length in bytes.
func Combine(a, b uint32, lenB uint64) uint32 {
	if lenB == 0 {
		return a
	}
	return Shift(a, Power(8*lenB)) ^ b
}

// Polynomials over GF(2) modulo Castagnoli's, bit-reversed as CRC32C is: bit
// 31 is x^0. A checksum a of A, shifted over n further bytes, is a*x^(8n).
const poly = 0x82f63b78

// Shift multiplies two polynomials: a checksum and a Power shift it.
func Shift(a, b uint32) uint32 {
	var p uint32
	for m := uint32(1) << 31; ; m >>= 1 {
		if a&m != 0 {
			p ^= b
			if a&(m-1) == 0 {
				return p
			}
		}
		if m == 1 {
			return p
		}
		if b&1 != 0 {
			b = b>>1 ^ poly
		} else {
			b >>= 1
		}
	}
}

// powers[i] is x^(2^i).
var powers = func() (t [64]uint32) {
	p := uint32(1) << 30 // x^1
	for i := range t {
		t[i] = p
		p = Shift(p, p)
	}
	return t
}()

// Power is x^n.
func Power(n uint64) uint32 {
	p := uint32(1) << 31 // x^0
	for i := 0; n != 0; i, n = i+1, n>>1 {
		if n&1 != 0 {
			p = Shift(powers[i], p)
		}
	}
	return p
}

// constants are the factors that fold 16 bytes onto the 16 bytes that follow 256 bytes
// later, and onto the 16 bytes that follow 64 bytes later. The 16 bytes are L, the first
// 8, and H: L*x^64 + H, and d bits further on L*x^(64+d) + H*x^d. The product of two
// bit-reversed words of 64 bits is bit-reversed, and too small by the factor x.
var constants = func() (k [4]uint64) {
	for i, d := range []uint64{8 * foldStep, 8 * 64} {
		k[2*i], k[2*i+1] = uint64(Power(64+d-1))<<32, uint64(Power(d-1))<<32
	}
	return k
}()
