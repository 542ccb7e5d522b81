package store

import (
	"errors"
	"fmt"
	"io"
	"sync"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

var blockPool = sync.Pool{New: func() any { b := make([]byte, block); return &b }}

func getBlock() *[]byte { return blockPool.Get().(*[]byte) }

func putBlock(b *[]byte) { blockPool.Put(b) }

// readBlock reads b at off and verifies b, which must be exactly one checksum block, or the
// existing part of the last block.
func (s *Store) readBlock(id meta.ChunkID, h File, b []byte, off uint64, crc uint32) error {
	n, err := h.ReadAt(b, int64(off))
	s.stats.checked.Add(uint64(n))
	if err != nil && !errors.Is(err, io.EOF) {
		if err = ioError("read chunk", id.String(), err); meta.KindOf(err) == meta.Corrupt {
			s.stats.corrupt.Add(1)
		}
		s.bad.tellFailed(id, err)
		return err
	}
	if n == len(b) && (chunkserver.CRC(b) == crc || s.o.UnsafeNoVerify) {
		return nil
	}
	s.stats.corrupt.Add(1)
	bad := meta.E("read chunk", meta.Corrupt, id.String(), fmt.Errorf("block at %d", off))
	if n < len(b) {
		bad = meta.E("read chunk", meta.Corrupt, id.String(), fmt.Errorf("the data file ends at %d", off+uint64(n)))
	}
	s.bad.tell(id)
	return bad
}
