package store

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

const probeName = "probe"

// maxBad bounds the bad chunks that wait to be reported; further bad chunks are found again
// later.
const maxBad = 1024

// quarantine marks chunks that were found bad as damaged.
type quarantine struct {
	s      *Store
	chunks chan meta.ChunkID // bad chunks to be marked; nil: none are marked
}

// tell notes that a chunk has wrong checksums or could not be read. It does not block, and
// the caller may hold locks.
func (qu *quarantine) tell(id meta.ChunkID) {
	if qu.chunks == nil {
		return
	}
	select {
	case qu.chunks <- id:
	default:
	}
}

// tellFailed is tell for an error of the disk, without errors that only mean a shortage of
// the process or machine.
func (qu *quarantine) tellFailed(id meta.ChunkID, err error) {
	for _, e := range []error{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM} {
		if errors.Is(err, e) {
			return
		}
	}
	qu.tell(id)
}

// run marks bad chunks as damaged, and tells the owner of the store.
func (qu *quarantine) run() {
	for {
		select {
		case <-qu.s.stop:
			return
		case id := <-qu.chunks:
			if err := qu.markDamaged(id); err != nil && qu.s.o.Bad != nil {
				qu.s.o.Bad(id, err)
			}
		}
	}
}

// markDamaged checks the chunk again, because a new replica may have replaced the chunk
// meanwhile. An error is returned if the chunk is bad and was not known to be bad.
func (qu *quarantine) markDamaged(id meta.ChunkID) (err error) {
	c, err := qu.s.use(id)
	if err != nil {
		if meta.KindOf(err) == meta.NoSuchChunk || qu.s.shut.Load() {
			return nil
		}
		return err // the metadata is unreadable
	}
	known, state := !c.exists || c.damaged, c.state
	length, crcs := c.length, append([]uint32(nil), c.crcs...)
	var h *handle
	if !known && length > 0 {
		if h, err = qu.s.hold(c, false, false); errors.Is(err, os.ErrNotExist) {
			err = meta.E("read chunk", meta.Corrupt, id.String(), err)
		}
	}
	qu.s.leave(c)
	if known {
		return nil
	}
	if err == nil && h != nil {
		err = recheck(h, crcs, length)
		h.done()
	}
	if err == nil {
		return nil
	}
	if c, uerr := qu.s.use(id); uerr == nil {
		if meta.KindOf(err) == meta.Corrupt && qu.s.failed.Load() == nil && c.exists && c.state == state && c.length == length {
			c.damaged = true
			qu.s.touch(c) // the next checkpoint records the mark
		}
		qu.s.leave(c)
	}
	return err
}

// recheck compares a data file with checksums.
func recheck(h *handle, crcs []uint32, length uint64) error {
	buf := getBlock()
	defer putBlock(buf)
	for i, crc := range crcs {
		at := uint64(i) * block
		b := (*buf)[:min(block, length-at)]
		n, err := h.ReadAt(b, int64(at))
		if err != nil && !errors.Is(err, io.EOF) {
			return ioError("read chunk", "", err)
		}
		if n < len(b) || chunkserver.CRC(b) != crc {
			return meta.E("read chunk", meta.Corrupt, "", fmt.Errorf("block at %d", at))
		}
	}
	return nil
}

// Probe writes a few bytes to the disk and syncs the bytes, to distinguish a failed or
// read-only disk from an idle disk. An error other than a full disk fails the disk.
func (s *Store) Probe() error {
	if err := s.writable(); err != nil {
		return err
	}
	f, err := s.d.Open(probeName, true)
	if err == nil {
		_, err = f.WriteAt([]byte(time.Now().UTC().Format(time.RFC3339)+"\n"), 0)
		if err == nil {
			err = s.syncFile(f)
		}
		f.Close()
	}
	if err = ioError("probe disk", "", err); err != nil && meta.KindOf(err) != meta.NoSpace && !s.closed.Load() {
		return s.fail(err)
	}
	return err
}
