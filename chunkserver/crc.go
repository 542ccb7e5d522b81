package chunkserver

import (
	"encoding/binary"
	"hash/crc32"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// CRC is the CRC32C (Castagnoli, RFC 3720) of p.
func CRC(p []byte) uint32 { return crc32.Update(0, castagnoli, p) }

// UpdateCRC is the CRC32C of what crc covered followed by p.
func UpdateCRC(crc uint32, p []byte) uint32 { return crc32.Update(crc, castagnoli, p) }

// CombineCRC is the CRC32C of a followed by b, from the two checksums and b's
// length in bytes. It lets one pass over an append yield both the checksum of
// the frame and those of the blocks that the frame covers parts of.
func CombineCRC(a, b uint32, lenB uint64) uint32 {
	if lenB == 0 {
		return a
	}
	return multModP(shiftOp(lenB), a) ^ b
}

// SealCRC is the checksum of a sealed chunk: CRC32C over the big-endian
// checksums of its blocks.
func SealCRC(blocks []uint32) uint32 {
	var crc uint32
	var buf [4096]byte
	for len(blocks) > 0 {
		n := min(len(blocks), len(buf)/4)
		for i, b := range blocks[:n] {
			binary.BigEndian.PutUint32(buf[4*i:], b)
		}
		crc = UpdateCRC(crc, buf[:4*n])
		blocks = blocks[n:]
	}
	return crc
}

// Blocks is the number of checksum blocks of a chunk of the given length.
func Blocks(length uint64) uint64 { return (length + ChecksumBlock - 1) / ChecksumBlock }

// Polynomials over GF(2) modulo Castagnoli's, bit-reversed as CRC32C is: bit
// 31 is x^0. A checksum a of A, shifted over n further bytes, is a*x^(8n).
const castagnoliPoly = 0x82f63b78

// multModP multiplies two polynomials modulo Castagnoli's.
func multModP(a, b uint32) uint32 {
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
			b = b>>1 ^ castagnoliPoly
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
		p = multModP(p, p)
	}
	return t
}()

// blockOp shifts over one whole checksum block, by far the commonest length.
var blockOp = shiftSlow(ChecksumBlock)

func shiftOp(n uint64) uint32 {
	if n == ChecksumBlock {
		return blockOp
	}
	return shiftSlow(n)
}

// shiftSlow is x^(8n).
func shiftSlow(n uint64) uint32 {
	op := uint32(1) << 31 // x^0
	for i := 3; n != 0 && i < len(powers); i, n = i+1, n>>1 {
		if n&1 != 0 {
			op = multModP(powers[i], op)
		}
	}
	return op
}
