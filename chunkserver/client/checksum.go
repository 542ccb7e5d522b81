package client

import (
	"fmt"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// matches compares whole blocks with their checksums.
func matches(p []byte, crcs []uint32) bool {
	for i := 0; len(p) > 0; i++ {
		n := min(len(p), block)
		if i >= len(crcs) || chunkserver.CRC(p[:n]) != crcs[i] {
			return false
		}
		p = p[n:]
	}
	return true
}

func corrupt(id meta.ChunkID, off uint64) error {
	return meta.E("read chunk", meta.Corrupt, id.String(), fmt.Errorf("block at %d", off))
}
