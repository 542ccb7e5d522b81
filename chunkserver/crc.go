package chunkserver

import (
	"encoding/binary"

	"penstock.io/penstock/chunkserver/castagnoli"
)

// CRC is the CRC32C (Castagnoli, RFC 3720) of p.
func CRC(p []byte) uint32 { return castagnoli.Update(0, p) }

// UpdateCRC returns the CRC32C of the bytes covered by crc, followed by p.
func UpdateCRC(crc uint32, p []byte) uint32 { return castagnoli.Update(crc, p) }

// CombineCRC returns the CRC32C of a followed by b, from the two checksums and b's length in
// bytes. So one pass over an append yields the checksum of the frame and those of the blocks
// that the frame partly covers.
func CombineCRC(a, b uint32, lenB uint64) uint32 {
	if lenB == ChecksumBlock {
		return castagnoli.Shift(a, blockPower) ^ b
	}
	return castagnoli.Combine(a, b, lenB)
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

// blockPower shifts a checksum by one whole checksum block, the most frequent length by far.
var blockPower = castagnoli.Power(8 * ChecksumBlock)
