// Package known remembers on disk the digests of blocks, by the places of their bytes. Bytes of
// chunks never change, so a block that was read for a snapshot need not be read for the next
// snapshot. The package is a cache: a digest computes lost or damaged records again.
//
//	DIR/blocks     the blocks of the last finished digest
//	DIR/next       the blocks of the digest under way, so far
//	DIR/apart-N    blocks of a digest; untrusted until the digest ends (Apart)
//
//	file     = "PDB1" | slots, as a power of two 1 | zeros 59 | record * (slots + 63)
//	record   = places 32 | block 32 | CRC32C of both 4, big-endian; or zeros
//
// The first bits of the places number a slot, and the record is in this slot or in the next 63
// slots. Places are SHA-256 sums, so records are evenly distributed. When all 64 slots are
// taken, the records move to a file with twice the slots, which is then about half full. Only
// the kernel caches the files in memory. The files grow as long as the disk has plenty of
// space.
//
// Files are sparse, and not synced. A record with a wrong checksum counts as absent. A file
// whose head states another length begins anew. After an interruption, a digest continues with
// both files. A finished digest replaces blocks by next, which drops the blocks of deleted
// snapshots.
package known

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/digest"
)

const (
	// minBits and maxBits bound the slots of a file, powers of two: the largest
	// takes 18 GB and holds some 130 million blocks.
	minBits = 8
	maxBits = 28
	// spare bounds a file with twice the slots: the file may take 1/spare of the disk's free
	// space.
	spare = 4
	// piece is how many slots are copied at once when a file grows.
	piece = 4096

	magic      = "PDB1"
	headSize   = 64
	window     = 64 // slots in which a record may be
	sumSize    = len(digest.Sum{})
	recordSize = 2*sumSize + 4
	newEnd     = ".new" // suffix of the name of a larger file under construction
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Blocks is a digest.Known. For one goroutine.
type Blocks struct {
	// Growing, unless nil, is called before Get or Put enlarges a file, which takes as long as
	// copying it.
	Growing func()

	ctx       context.Context // of the whole work: cancels long operations
	dir       string
	old, next *table
	aparts    int // open Aparts
}

var _ digest.Known = (*Blocks)(nil)

// Open opens or creates the files in a directory, and creates a missing directory. When ctx
// ends, a file whose enlargement is under way stays as before. Errors: IO.
func Open(ctx context.Context, dir string) (*Blocks, error) {
	b := &Blocks{ctx: ctx, dir: dir}
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		b.old, err = open(filepath.Join(dir, "blocks"), minBits)
	}
	if err == nil { // as large as blocks, since most records will be the same
		b.next, err = open(filepath.Join(dir, "next"), b.old.bits)
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

// Before reports whether a block was known when the last digest finished.
func (b *Blocks) Before(places digest.Sum) bool {
	_, ok := b.old.get(places)
	return ok
}

// Put records a block. After a failed write Put records nothing, and on a full disk not all.
func (b *Blocks) Put(places, block digest.Sum) { b.put(b.next, places, block) }

func (b *Blocks) put(t *table, places, block digest.Sum) {
	for !t.put(places, block) && t.mayGrow() {
		if b.Growing != nil {
			b.Growing()
		}
		t.grow(b.ctx)
	}
}

// unproved is the key of a block that Get and Before must not find.
//
//	H(06 | places 32)
func unproved(places digest.Sum) digest.Sum {
	return sha256.Sum256(append([]byte{6}, places[:]...))
}

// PutUnproved records a block for GetUnproved only, also when another digest finishes
// meanwhile.
func (b *Blocks) PutUnproved(places, block digest.Sum) { b.Put(unproved(places), block) }

// GetUnproved returns a block that PutUnproved recorded.
func (b *Blocks) GetUnproved(places digest.Sum) (block digest.Sum, ok bool) {
	return b.Get(unproved(places))
}

// Apart has the blocks of one digest until the digest is known to be right: the end of another
// digest with the same Blocks does not make the blocks known.
type Apart struct {
	b *Blocks
	t *table
}

// Apart begins an Apart. The caller must close the new Apart before b and before older Aparts.
// Errors: IO.
func (b *Blocks) Apart() (*Apart, error) {
	name := filepath.Join(b.dir, fmt.Sprintf("apart-%d", b.aparts))
	err := os.Remove(name) // left by a killed process
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		var t *table
		if t, err = open(name, minBits); err == nil {
			b.aparts++
			return &Apart{b, t}, nil
		}
	}
	return nil, meta.E("open known blocks", meta.IO, name, err)
}

// Put remembers a block for Keep, as far as Blocks.Put would.
func (a *Apart) Put(places, block digest.Sum) { a.b.put(a.t, places, block) }

// Keep copies all blocks into the Blocks. Errors: IO, and the errors of the Blocks' context;
// after an error, some of the blocks are copied.
func (a *Apart) Keep() error {
	buf := make([]byte, piece*recordSize)
	for lo, all := int64(0), a.t.slots(); lo < all; lo += piece {
		if a.b.ctx.Err() != nil {
			return context.Cause(a.b.ctx)
		}
		p := buf[:min(piece, all-lo)*int64(recordSize)]
		if _, err := a.t.f.ReadAt(p, headSize+lo*int64(recordSize)); err != nil {
			return meta.E("keep known blocks", meta.IO, a.t.name, err)
		}
		for ; len(p) > 0; p = p[recordSize:] {
			if r := p[:recordSize]; digest.Sum(r[:sumSize]) != (digest.Sum{}) && right(r) {
				a.b.Put(digest.Sum(r[:sumSize]), digest.Sum(r[sumSize:2*sumSize]))
			}
		}
	}
	return nil
}

// Close discards the Apart. Errors: IO.
func (a *Apart) Close() error {
	a.b.aparts--
	if err := errors.Join(a.t.err, a.t.f.Close(), os.Remove(a.t.name)); err != nil {
		return meta.E("forget blocks", meta.IO, a.t.name, err)
	}
	return nil
}

// Finish reduces the known blocks to the blocks that this digest used, and closes. Errors: IO;
// after an error, the known blocks are the same as before, or fewer.
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

// Close keeps the records of an unfinished digest for its continuation.
func (b *Blocks) Close() error {
	var errs []error
	for _, t := range []*table{b.next, b.old} {
		if t != nil {
			errs = append(errs, t.err, t.f.Close())
		}
	}
	b.next, b.old = nil, nil
	return errors.Join(errs...)
}

// table is an open file of records.
type table struct {
	name string
	f    *os.File
	bits uint8
	full bool // must not grow any more
	err  error
	buf  [window * recordSize]byte
}

func sizeOf(bits uint8) int64 {
	return headSize + (int64(1)<<bits+window-1)*int64(recordSize)
}

// open opens a file; a file of another kind is begun anew.
func open(name string, bits uint8) (*table, error) {
	if err := os.Remove(name + newEnd); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	t := &table{name: name, f: f}
	ok, err := t.load()
	if err == nil && !ok {
		err = t.begin(bits)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return t, nil
}

// load reads the head.
func (t *table) load() (ok bool, err error) {
	head := make([]byte, headSize)
	if _, err := io.ReadFull(t.f, head); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	st, err := t.f.Stat()
	if err != nil {
		return false, err
	}
	t.bits = head[len(magic)]
	return string(head[:len(magic)]) == magic && t.bits >= minBits && t.bits <= maxBits && st.Size() == sizeOf(t.bits), nil
}

// begin makes the file an empty table.
func (t *table) begin(bits uint8) error {
	t.bits = bits
	if err := t.f.Truncate(0); err != nil {
		return err
	}
	if err := t.f.Truncate(sizeOf(bits)); err != nil {
		return err
	}
	_, err := t.f.WriteAt(append([]byte(magic), bits), 0)
	return err
}

// slots returns the number of slots.
func (t *table) slots() int64 { return int64(1)<<t.bits + window - 1 }

// slot returns the first slot in which a record may be.
func (t *table) slot(places []byte) int64 {
	return int64(binary.BigEndian.Uint64(places) >> (64 - t.bits))
}

// look reads the slots in which a record may be, and returns the number of the first.
func (t *table) look(places *digest.Sum) (at int64, slots []byte, ok bool) {
	at = headSize + t.slot(places[:])*int64(recordSize)
	_, err := t.f.ReadAt(t.buf[:], at)
	return at, t.buf[:], err == nil
}

func (t *table) get(places digest.Sum) (block digest.Sum, ok bool) {
	_, slots, ok := t.look(&places)
	for ; ok && len(slots) > 0; slots = slots[recordSize:] {
		if r := slots[:recordSize]; digest.Sum(r[:sumSize]) == places && right(r) {
			return digest.Sum(r[sumSize : 2*sumSize]), true
		}
	}
	return block, false
}

// right reports whether a record has a right checksum.
func right(r []byte) bool {
	return crc32.Checksum(r[:2*sumSize], castagnoli) == binary.BigEndian.Uint32(r[2*sumSize:])
}

// put returns false if no slot is free for the record.
func (t *table) put(places, block digest.Sum) bool {
	if t.err != nil {
		return true
	}
	at, slots, ok := t.look(&places)
	if !ok {
		return true
	}
	i := slotFor(slots, places[:])
	if i < 0 {
		return false
	}
	r := append(append(slots[:0], places[:]...), block[:]...)
	r = binary.BigEndian.AppendUint32(r, crc32.Checksum(r, castagnoli))
	_, t.err = t.f.WriteAt(r, at+int64(i))
	return true
}

// slotFor returns the index, among some slots, for a record: the slot of the present record,
// else the first empty slot; negative: all are taken.
func slotFor(slots, places []byte) int {
	var empty digest.Sum
	for i := 0; i < len(slots); i += recordSize {
		if have := slots[i : i+sumSize]; bytes.Equal(have, places) || bytes.Equal(have, empty[:]) {
			return i
		}
	}
	return -1
}

// mayGrow reports whether the table may have more slots.
func (t *table) mayGrow() bool {
	t.full = t.full || t.err != nil || t.bits == maxBits || !room(t.name, sizeOf(t.bits+1))
	return !t.full
}

// grow moves the records to a file with twice the slots. After a failure, or when ctx ends, the
// table stays as before, and mayGrow returns false from then on.
func (t *table) grow(ctx context.Context) {
	t.full = true
	f, err := os.OpenFile(t.name+newEnd, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		t.err = err
		return
	}
	to := &table{name: t.name, f: f}
	if err = to.begin(t.bits + 1); err == nil {
		if err = t.copyTo(ctx, to); err == nil {
			err = os.Rename(f.Name(), t.name)
		}
	}
	if err != nil {
		err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		if ctx.Err() == nil {
			t.err = err
		}
		return
	}
	t.f.Close() // the old file has no name any more
	t.f, t.bits, t.full = f, to.bits, false
}

// copyTo copies all records into a table with twice the slots, a piece at a time. A record in
// slot i numbers a slot between i-63 and i, and in the larger table a slot between 2(i-63) and
// 2i+1. Errors: ctx's.
func (t *table) copyTo(ctx context.Context, to *table) error {
	buf := make([]byte, piece*recordSize)
	out := make([]byte, (2*piece+3*window)*recordSize)
	for lo, all := int64(0), t.slots(); lo < all; lo += piece {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		hi := min(lo+piece, all)
		p := buf[:(hi-lo)*int64(recordSize)]
		if _, err := t.f.ReadAt(p, headSize+lo*int64(recordSize)); err != nil {
			return err
		}
		from, end := max(0, 2*(lo-window+1)), min(2*hi+window, to.slots())
		out := out[:(end-from)*int64(recordSize)]
		if _, err := to.f.ReadAt(out, headSize+from*int64(recordSize)); err != nil {
			return err
		}
		for ; len(p) > 0; p = p[recordSize:] {
			r := p[:recordSize]
			at := (to.slot(r) - from) * int64(recordSize)
			if digest.Sum(r[:sumSize]) == (digest.Sum{}) || !right(r) || at < 0 || at+window*int64(recordSize) > int64(len(out)) {
				continue // nothing, or damage
			}
			if i := slotFor(out[at:at+window*int64(recordSize)], r[:sumSize]); i >= 0 {
				copy(out[at+int64(i):], r)
			}
		}
		if _, err := to.f.WriteAt(out, headSize+from*int64(recordSize)); err != nil {
			return err
		}
	}
	return nil
}

// room reports whether a file may grow to a size on its disk.
func room(name string, size int64) bool {
	var st unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(name), &st); err != nil {
		return false
	}
	return uint64(size) <= st.Bavail*uint64(st.Bsize)/spare
}
