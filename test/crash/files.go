package crash

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// appender appends to one file after the other, with fsync now and then.
//
// After a crash a file has at least its synced bytes, at most what was
// written, and all of them are right.
type appender struct {
	dir   string
	rand  *rand.Rand
	over  func() bool
	id    uint64 // of the newest file
	open  *os.File
	files []*appended
}

type appended struct {
	name      string
	id        uint64
	attempted int64 // bytes that a write was called for
	written   int64 // bytes acknowledged
	synced    int64 // bytes acknowledged by fsync
	named     bool  // the name is durable: some fsync succeeded
}

const (
	maxAppendFile = 1 << 20
	keptFiles     = 16
)

func (a *appender) step() error {
	if a.open == nil {
		a.id++
		f := &appended{name: fmt.Sprintf("log-%x", a.id), id: a.id}
		a.files = append(a.files, f)
		var err error
		if a.open, err = os.OpenFile(filepath.Join(a.dir, f.name), os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o644); err != nil {
			return err
		}
	}
	f := a.files[len(a.files)-1]
	b := make([]byte, 1+a.rand.IntN(48<<10))
	pattern(b, f.id, f.written)
	f.attempted = f.written + int64(len(b))
	if _, err := a.open.Write(b); err != nil {
		return err
	}
	f.written = f.attempted
	if a.rand.IntN(4) == 0 {
		if err := a.open.Sync(); err != nil {
			return err
		}
		if !a.over() {
			f.synced, f.named = f.written, true
		}
	}
	if f.written < maxAppendFile {
		return nil
	}
	err := a.open.Close()
	a.open = nil
	return err
}

func (a *appender) close() {
	if a.open != nil {
		a.open.Close()
		a.open = nil
	}
}

func (a *appender) verify() error {
	var kept []*appended
	var errs []error
	for _, f := range a.files {
		there, err := f.verify(a.dir)
		if err != nil {
			errs = append(errs, err)
		}
		if there {
			kept = append(kept, f)
		}
	}
	for len(kept) > keptFiles {
		if err := os.Remove(filepath.Join(a.dir, kept[0].name)); err != nil {
			errs = append(errs, err)
		}
		kept = kept[1:]
	}
	a.files = kept
	return errors.Join(errs...)
}

func (f *appended) verify(dir string) (there bool, err error) {
	b, err := os.ReadFile(filepath.Join(dir, f.name))
	if errors.Is(err, os.ErrNotExist) {
		if f.named {
			return false, fmt.Errorf("%s is gone, with %d synced bytes", f.name, f.synced)
		}
		return false, nil
	}
	if err != nil {
		return true, err
	}
	if n := int64(len(b)); n < f.synced || n > f.attempted {
		return true, fmt.Errorf("%s has %d bytes; %d were synced, %d written, %d attempted", f.name, n, f.synced, f.written, f.attempted)
	}
	if err := checkPattern(b, f.id, 0); err != nil {
		return true, fmt.Errorf("%s of %d bytes, %d synced: %w", f.name, len(b), f.synced, err)
	}
	f.attempted, f.written, f.synced, f.named = int64(len(b)), int64(len(b)), int64(len(b)), true
	return true, nil
}

// overwriter writes blocks of one file again and again. Each block names its
// file, place and the number of the write:
//
//	+0   8  file          +16  8  number of the write
//	+8   8  block         +24  4  CRC32C of all but itself
//
// After a crash the blocks are those after some prefix of the writes, not
// before the last synced one.
type overwriter struct {
	dir    string
	rand   *rand.Rand
	over   func() bool
	id     uint64
	open   *os.File
	ready  bool // the file exists, durable
	seq    uint64
	writes []uint64 // block of each write since base
	base   uint64   // number of the first in writes
	start  [overwriteBlocks]uint64
	synced uint64 // every write up to this number is durable
}

const (
	overwriteBlocks = 64
	blockSize       = 4 << 10
)

func (o *overwriter) path() string { return filepath.Join(o.dir, "blocks") }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (o *overwriter) block(block int, seq uint64) []byte {
	b := make([]byte, blockSize)
	pattern(b, o.id^seq<<20, int64(block)*blockSize)
	binary.LittleEndian.PutUint64(b[0:], o.id)
	binary.LittleEndian.PutUint64(b[8:], uint64(block))
	binary.LittleEndian.PutUint64(b[16:], seq)
	binary.LittleEndian.PutUint32(b[24:], 0)
	binary.LittleEndian.PutUint32(b[24:], crc32.Checksum(b, castagnoli))
	return b
}

func (o *overwriter) prepare() error {
	f, err := os.OpenFile(o.path(), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return err
	}
	o.open = f
	if o.ready {
		return nil
	}
	for i := range overwriteBlocks {
		if _, err := f.WriteAt(o.block(i, 0), int64(i)*blockSize); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil {
		return err
	}
	o.ready = !o.over()
	return nil
}

func (o *overwriter) step() error {
	if o.open == nil {
		if err := o.prepare(); err != nil {
			return err
		}
	}
	block := o.rand.IntN(overwriteBlocks)
	o.seq++
	if len(o.writes) == 0 {
		o.base = o.seq
	}
	o.writes = append(o.writes, uint64(block))
	if _, err := o.open.WriteAt(o.block(block, o.seq), int64(block)*blockSize); err != nil {
		return err
	}
	if o.rand.IntN(8) == 0 {
		if err := o.open.Sync(); err != nil {
			return err
		}
		if !o.over() {
			o.synced = o.seq
		}
	}
	return nil
}

func (o *overwriter) close() {
	if o.open != nil {
		o.open.Close()
		o.open = nil
	}
}

func (o *overwriter) verify() error {
	if !o.ready {
		err := os.Remove(o.path())
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	}
	b, err := os.ReadFile(o.path())
	if err != nil {
		return err
	}
	if len(b) != overwriteBlocks*blockSize {
		return fmt.Errorf("%s has %d bytes, want %d", o.path(), len(b), overwriteBlocks*blockSize)
	}
	var found [overwriteBlocks]uint64
	last := o.synced
	for i := range found {
		p := b[i*blockSize:][:blockSize]
		found[i] = binary.LittleEndian.Uint64(p[16:])
		if string(p) != string(o.block(i, found[i])) {
			return fmt.Errorf("block %d is no block of this file: %x", i, p[:32])
		}
		last = max(last, found[i])
	}
	if last > o.seq {
		return fmt.Errorf("a block has write %d, only %d were made", last, o.seq)
	}
	expect := o.start
	for i, block := range o.writes {
		if seq := o.base + uint64(i); seq <= last {
			expect[block] = seq
		}
	}
	for i := range found {
		if found[i] != expect[i] {
			return fmt.Errorf("block %d has write %d, want %d: other blocks are as after write %d, and everything to %d was synced", i, found[i], expect[i], last, o.synced)
		}
	}
	// The next write takes the next number; what is there now is durable.
	o.start, o.writes, o.seq, o.synced = found, nil, last, last
	return nil
}

// replacer replaces a file by a new version, as editors and checkpoints do:
// write beside, rename over; with fsync of the new bytes before, or without,
// which must not lose both versions either.
//
// After a crash there is one whole version, not older than the last one whose
// directory was synced.
type replacer struct {
	dir     string
	rand    *rand.Rand
	over    func() bool
	id      uint64
	version uint64 // newest attempted
	synced  uint64 // durable
}

func (r *replacer) bytes(version uint64) []byte {
	size := rand.New(rand.NewPCG(r.id, version)).IntN(200 << 10)
	b := make([]byte, 16+size)
	pattern(b, r.id<<40^version, 0)
	binary.LittleEndian.PutUint64(b[0:], r.id)
	binary.LittleEndian.PutUint64(b[8:], version)
	return b
}

func (r *replacer) step() error {
	r.version++
	tmp, current := filepath.Join(r.dir, "tmp"), filepath.Join(r.dir, "current")
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write(r.bytes(r.version)); err != nil {
		return err
	}
	if r.rand.IntN(2) == 0 {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(tmp, current); err != nil {
		return err
	}
	if r.rand.IntN(3) == 0 {
		if err := syncFile(current); err != nil {
			return err
		}
		if err := syncDir(r.dir); err != nil {
			return err
		}
		if !r.over() {
			r.synced = r.version
		}
	}
	return nil
}

func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

func (r *replacer) close() {}

func (r *replacer) verify() error {
	b, err := os.ReadFile(filepath.Join(r.dir, "current"))
	if errors.Is(err, os.ErrNotExist) && r.synced == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	if len(b) < 16 {
		return fmt.Errorf("current has %d bytes: no version is so short; version %d was synced", len(b), r.synced)
	}
	version := binary.LittleEndian.Uint64(b[8:])
	if version < r.synced || version > r.version || string(b) != string(r.bytes(version)) {
		return fmt.Errorf("current has %d bytes and names version %d; version %d was synced, %d was the last attempted, and no version has these bytes (want %d)", len(b), version, r.synced, r.version, len(r.bytes(version)))
	}
	r.version, r.synced = version, version
	return nil
}
