// Package known remembers on disk which digest the block at some places has:
// bytes of chunks never change, so what was read for one snapshot need not be
// read for the next. It is a cache: what is lost or damaged is read again.
//
//	DIR/blocks     what the last digest that was finished used
//	DIR/next       what the one under way has used so far
//
//	file     = "PDB1" | record*
//	record   = places 32 | block 32 | CRC32C of both 4, big-endian
//
// Files are appended to and not synced. A record whose checksum is wrong, and
// half of one at the end, is not there. A digest that is interrupted goes on with
// both; one that is finished puts next in place of blocks, so that blocks that no
// snapshot has any more are forgotten.
package known

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/digest"
)

const (
	// MaxBlocks bounds what is remembered: 1 TiB of files in 68 MiB of disk, and
	// while a digest is computed some 80 MB of memory.
	MaxBlocks = 1 << 20

	magic      = "PDB1"
	sumSize    = len(digest.Sum{})
	recordSize = 2*sumSize + 4
	batch      = 256 // records written at a time; they are what a crash costs
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Blocks is a digest.Known. It is for one goroutine.
type Blocks struct {
	dir       string
	old, next *file
}

var _ digest.Known = (*Blocks)(nil)

// Open opens or makes the files in a directory, which it makes, too. Errors: IO.
func Open(dir string) (*Blocks, error) {
	b := &Blocks{dir: dir}
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		b.old, err = open(filepath.Join(dir, "blocks"))
	}
	if err == nil {
		b.next, err = open(filepath.Join(dir, "next"))
	}
	if err != nil {
		return nil, errors.Join(meta.E("open known blocks", meta.IO, dir, err), b.Close())
	}
	return b, nil
}

// Get finds a block.
func (b *Blocks) Get(places digest.Sum) (block digest.Sum, ok bool) {
	if block, ok = b.next.get(places); ok {
		return block, true
	}
	if block, ok = b.old.get(places); ok {
		b.Put(places, block)
	}
	return block, ok
}

// Put remembers a block; after a write that failed, or beyond MaxBlocks, no
// more.
func (b *Blocks) Put(places, block digest.Sum) { b.next.put(places, block) }

// Finish makes what this digest used all that is remembered, and closes. Errors:
// IO; then as much is remembered as before, or less.
func (b *Blocks) Finish() error {
	err := b.Close()
	if err == nil {
		err = os.Rename(filepath.Join(b.dir, "next"), filepath.Join(b.dir, "blocks"))
	}
	if err != nil {
		return meta.E("keep known blocks", meta.IO, b.dir, err)
	}
	return nil
}

// Close keeps what was found out for the next time.
func (b *Blocks) Close() error {
	var errs []error
	for _, f := range []*file{b.next, b.old} {
		if f != nil {
			f.flush()
			errs = append(errs, f.err, f.f.Close())
		}
	}
	b.next, b.old = nil, nil
	return errors.Join(errs...)
}

// file is one of the two.
type file struct {
	f     *os.File
	at    map[uint64]uint32 // the beginning of places -> number of the record
	n     uint32            // records, tail included
	tail  []byte            // of them, those not yet written
	err   error
	bytes [recordSize]byte
}

func open(name string) (*file, error) {
	h, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	f := &file{f: h, at: map[uint64]uint32{}}
	if err := f.load(); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return f, nil
}

// load reads which places are there; a file of another kind is begun anew.
func (f *file) load() error {
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(f.f, head); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	if string(head) != magic {
		if err := f.f.Truncate(0); err != nil {
			return err
		}
		_, err := f.f.WriteAt([]byte(magic), 0)
		return err
	}
	buf := make([]byte, batch*recordSize)
	for f.n < MaxBlocks {
		n, err := io.ReadFull(f.f, buf)
		for p := buf[:n]; len(p) >= recordSize && f.n < MaxBlocks; p = p[recordSize:] {
			f.at[binary.BigEndian.Uint64(p)] = f.n
			f.n++
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func offset(record uint32) int64 { return int64(len(magic)) + int64(record)*int64(recordSize) }

func (f *file) get(places digest.Sum) (block digest.Sum, ok bool) {
	n, ok := f.at[binary.BigEndian.Uint64(places[:])]
	if !ok {
		return block, false
	}
	p := f.bytes[:]
	if first := f.n - uint32(len(f.tail)/recordSize); n >= first {
		copy(p, f.tail[int(n-first)*recordSize:])
	} else if _, err := f.f.ReadAt(p, offset(n)); err != nil {
		return block, false
	}
	if digest.Sum(p[:sumSize]) != places || crc32.Checksum(p[:2*sumSize], castagnoli) != binary.BigEndian.Uint32(p[2*sumSize:]) {
		return block, false
	}
	return digest.Sum(p[sumSize : 2*sumSize]), true
}

func (f *file) put(places, block digest.Sum) {
	if f.err != nil || f.n == MaxBlocks {
		return
	}
	from := len(f.tail)
	f.tail = append(append(f.tail, places[:]...), block[:]...)
	f.tail = binary.BigEndian.AppendUint32(f.tail, crc32.Checksum(f.tail[from:], castagnoli))
	f.at[binary.BigEndian.Uint64(places[:])] = f.n
	if f.n++; len(f.tail) == batch*recordSize {
		f.flush()
	}
}

func (f *file) flush() {
	if f.err == nil && len(f.tail) > 0 {
		_, f.err = f.f.WriteAt(f.tail, offset(f.n)-int64(len(f.tail)))
	}
	f.tail = f.tail[:0]
}
