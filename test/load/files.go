package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
)

// appender appends to one file after the other, with fsync now and then.
//
// After a crash a file has at least its synced bytes, at most the written bytes, and all
// of these bytes are right.
type appender struct {
	dir   string
	rand  *rand.Rand
	over  func() bool
	meter *Meter
	id    uint64 // of the newest file
	open  *os.File
	files []*appended

	mu    sync.Mutex
	shown []appended // for other goroutines: the files with durable bytes, and the durable lengths
	lost  int        // how often acknowledged bytes were missing
}

type appended struct {
	name      string
	id        uint64
	attempted int64 // bytes handed to write(2), also by failed calls
	most      int64 // the same, also before the file was verified
	written   int64 // bytes acknowledged
	synced    int64 // bytes acknowledged by fsync
	named     bool  // the name is durable: some fsync succeeded
}

const (
	maxAppendFile = 1 << 20
	keptFiles     = 16
)

func (a *appender) Step() error {
	if a.open == nil {
		a.id++
		f := &appended{name: fmt.Sprintf("log-%x", a.id), id: a.id}
		a.files = append(a.files, f)
		err := a.meter.Time(Name, 0, func() (err error) {
			a.open, err = os.OpenFile(filepath.Join(a.dir, f.name), os.O_WRONLY|os.O_CREATE|os.O_EXCL|os.O_APPEND, 0o644)
			return err
		})
		if err != nil {
			a.open = nil
			return err
		}
	}
	f := a.files[len(a.files)-1]
	b := make([]byte, 1+a.rand.IntN(48<<10))
	Pattern(b, f.id, f.written)
	f.attempted = f.written + int64(len(b))
	f.most = max(f.most, f.attempted)
	a.show()
	if err := a.meter.Time(Write, len(b), func() error { _, err := a.open.Write(b); return err }); err != nil {
		return err
	}
	f.written = f.attempted
	a.show()
	if a.rand.IntN(4) == 0 {
		if err := a.meter.Time(Sync, 0, a.open.Sync); err != nil {
			return err
		}
		if !a.over() {
			f.synced, f.named = f.written, true
			a.show()
		}
	}
	if f.written < maxAppendFile {
		return nil
	}
	err := a.meter.Time(Write, 0, a.open.Close)
	a.open = nil
	return err
}

// show updates shown.
func (a *appender) show() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.shown = a.shown[:0]
	for _, f := range a.files {
		if f.named {
			a.shown = append(a.shown, *f)
		}
	}
}

// progress returns how far the durable files are.
func (a *appender) progress() (files map[uint64]progress, names map[uint64]string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	files, names = map[uint64]progress{}, map[uint64]string{}
	for _, f := range a.shown {
		files[f.id], names[f.id] = progress{lost: a.lost, begun: uint64(f.most), done: uint64(f.written), synced: uint64(f.synced)}, f.name
	}
	return files, names
}

func (a *appender) Freeze() func(bool) Check {
	before, names := a.progress()
	return func(whole bool) Check {
		after, _ := a.progress()
		return func(dir string) error {
			now, _ := a.progress()
			for id, p := range before {
				end, ok := after[id]
				if !ok {
					continue // removed meanwhile
				}
				b, err := a.meter.readFile(filepath.Join(dir, names[id]))
				least := p.least(now[id], whole)
				if errors.Is(err, os.ErrNotExist) {
					return violated("%s is not in the snapshot, with %d bytes before", names[id], least)
				}
				if err != nil {
					return err
				}
				if n := uint64(len(b)); n < least || n > end.begun {
					return violated("%s has %d bytes in the snapshot (whole: %v); before it %d were synced and %d written, after it %d attempted", names[id], n, whole, p.synced, p.done, end.begun)
				}
				if err := CheckPattern(b, id, 0); err != nil {
					return fmt.Errorf("%s in the snapshot: %w", names[id], err)
				}
			}
			return nil
		}
	}
}

func (a *appender) pick(r *rand.Rand) (appended, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.shown) == 0 {
		return appended{}, false
	}
	return a.shown[r.IntN(len(a.shown))], true
}

func (a *appender) shows(f appended) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.ContainsFunc(a.shown, func(g appended) bool { return g.id == f.id })
}

func (a *appender) Look(dir string, r *rand.Rand) error {
	f, ok := a.pick(r)
	if !ok {
		return nil
	}
	b, err := a.meter.readFile(filepath.Join(dir, f.name))
	if errors.Is(err, os.ErrNotExist) {
		if a.shows(f) {
			return violated("%s is not there for others, with %d synced bytes", f.name, f.synced)
		}
		return nil // removed meanwhile
	}
	if err != nil {
		return err
	}
	if int64(len(b)) < f.synced {
		return violated("%s has %d bytes for others; %d were synced before they looked", f.name, len(b), f.synced)
	}
	return CheckPattern(b, f.id, 0)
}

func (a *appender) Settle() error {
	for _, f := range a.files {
		if f.named && f.synced == f.attempted {
			continue
		}
		if err := syncFile(filepath.Join(a.dir, f.name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return SyncDir(a.dir)
}

func (a *appender) Close() {
	if a.open != nil {
		a.open.Close()
		a.open = nil
	}
}

func (a *appender) Verify() error {
	var kept []*appended
	var errs []error
	lost := false
	for _, f := range a.files {
		was := f.written
		there, err := f.verify(a.dir, a.meter)
		lost = lost || f.written < was
		if err != nil {
			errs = append(errs, err)
		}
		if there {
			kept = append(kept, f)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	old := kept[:max(0, len(kept)-keptFiles)]
	a.files = kept[len(old):]
	if lost {
		a.mu.Lock()
		a.lost++
		a.mu.Unlock()
	}
	a.show()
	for _, f := range old {
		if err := os.Remove(filepath.Join(a.dir, f.name)); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (f *appended) verify(dir string, meter *Meter) (there bool, err error) {
	b, err := meter.readFile(filepath.Join(dir, f.name))
	if errors.Is(err, os.ErrNotExist) {
		if f.named {
			return false, violated("%s is gone, with %d synced bytes", f.name, f.synced)
		}
		return false, nil
	}
	if err != nil {
		return true, err
	}
	if n := int64(len(b)); n < f.synced || n > f.attempted {
		return true, violated("%s has %d bytes; %d were synced, %d written, %d attempted", f.name, n, f.synced, f.written, f.attempted)
	}
	if err := CheckPattern(b, f.id, 0); err != nil {
		return true, fmt.Errorf("%s of %d bytes, %d synced: %w", f.name, len(b), f.synced, err)
	}
	f.attempted, f.written, f.synced, f.named = int64(len(b)), int64(len(b)), int64(len(b)), true
	return true, nil
}

// overwriter writes blocks of one file again and again. Each block names its file, place
// and the number of the write:
//
//	+0   8  file          +16  8  number of the write
//	+8   8  block         +24  4  CRC32C of the other bytes
//
// After a crash, the blocks have the state after some prefix of the writes, which
// includes the last synced write.
type overwriter struct {
	dir    string
	rand   *rand.Rand
	over   func() bool
	meter  *Meter
	id     uint64
	open   *os.File
	ready  bool // the file exists, durable
	seq    uint64
	writes []uint64 // block of each write since base
	base   uint64   // number of the first in writes
	start  [overwriteBlocks]uint64
	synced uint64 // every write up to this number is durable

	mu    sync.Mutex
	shown [overwriteBlocks]uint64 // durable write of each block
	whole bool                    // all blocks were written once, durable
	told  blocks
}

// blocks is how far an overwriter is.
type blocks struct {
	progress
	ready  bool
	start  [overwriteBlocks]uint64
	writes []uint64
	base   uint64
}

// tell notes that the writes up to done were acknowledged.
func (o *overwriter) tell(done uint64) {
	p := o.told.progress
	p.begun, p.done, p.synced = o.seq, done, o.synced
	o.is(p)
}

func (o *overwriter) is(p progress) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.told = blocks{p, o.ready, o.start, o.writes, o.base}
}

func (o *overwriter) progress() blocks {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.told
}

func (o *overwriter) Freeze() func(bool) Check {
	before := o.progress()
	return func(whole bool) Check {
		after := o.progress()
		if !before.ready || before.past != after.past {
			return nil
		}
		return func(dir string) error {
			b, err := o.meter.readFile(filepath.Join(dir, "blocks"))
			if errors.Is(err, os.ErrNotExist) {
				return violated("the file of blocks is not in the snapshot")
			}
			if err != nil {
				return err
			}
			_, _, err = o.prefix(b, &after, before.least(o.progress().progress, whole))
			return err
		}
	}
}

// prefix finds the last write of a prefix, of least or more, that explains the whole
// file.
func (o *overwriter) prefix(b []byte, t *blocks, least uint64) (found [overwriteBlocks]uint64, last uint64, err error) {
	if len(b) != overwriteBlocks*blockSize {
		return found, 0, violated("the file of blocks has %d bytes, want %d", len(b), overwriteBlocks*blockSize)
	}
	last = least
	for i := range found {
		p := b[i*blockSize:][:blockSize]
		found[i] = binary.LittleEndian.Uint64(p[16:])
		if string(p) != string(o.block(i, found[i])) {
			return found, 0, violated("block %d is no block of this file: %x", i, p[:32])
		}
		last = max(last, found[i])
	}
	if last > t.begun {
		return found, 0, violated("a block has write %d, only %d were made", last, t.begun)
	}
	expect := t.start
	for i, block := range t.writes {
		if seq := t.base + uint64(i); seq <= last {
			expect[block] = seq
		}
	}
	for i := range found {
		if found[i] != expect[i] {
			return found, 0, violated("block %d has write %d, want %d: other blocks are as after write %d, and all to %d must be there", i, found[i], expect[i], last, least)
		}
	}
	return found, last, nil
}

const (
	overwriteBlocks = 64
	blockSize       = 4 << 10
)

func (o *overwriter) path() string { return filepath.Join(o.dir, "blocks") }

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func (o *overwriter) block(block int, seq uint64) []byte {
	b := make([]byte, blockSize)
	Pattern(b, o.id^seq<<20, int64(block)*blockSize)
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
	o.show()
	return nil
}

// show updates shown.
func (o *overwriter) show() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.whole, o.shown = o.ready, o.start
	for i, block := range o.writes {
		if seq := o.base + uint64(i); seq <= o.synced {
			o.shown[block] = seq
		}
	}
}

func (o *overwriter) Look(dir string, _ *rand.Rand) error {
	o.mu.Lock()
	least, whole := o.shown, o.whole
	o.mu.Unlock()
	if !whole {
		return nil
	}
	b, err := o.meter.readFile(filepath.Join(dir, "blocks"))
	if errors.Is(err, os.ErrNotExist) {
		return violated("the file of blocks is not there for others")
	}
	if err != nil {
		return err
	}
	if len(b) != overwriteBlocks*blockSize {
		return violated("the file of blocks has %d bytes for others", len(b))
	}
	var newest uint64
	var older []int
	for i := range least {
		p := b[i*blockSize:][:blockSize]
		seq := binary.LittleEndian.Uint64(p[16:])
		if string(p) != string(o.block(i, seq)) {
			return violated("block %d is no block of this file for others: %x", i, p[:32])
		}
		newest = max(newest, seq)
		if seq < least[i] {
			older = append(older, i)
		}
	}
	if len(older) > 0 {
		i := older[0]
		return violated("block %d has write %d for others; %d was synced before they looked (as old are blocks %v; the newest write that they see is %d)",
			i, binary.LittleEndian.Uint64(b[i*blockSize+16:]), least[i], older, newest)
	}
	return nil
}

func (o *overwriter) Step() error {
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
	o.tell(o.seq - 1)
	err := o.meter.Time(Write, blockSize, func() error {
		_, err := o.open.WriteAt(o.block(block, o.seq), int64(block)*blockSize)
		return err
	})
	if err != nil {
		return err
	}
	if o.rand.IntN(8) == 0 {
		if err := o.meter.Time(Sync, 0, o.open.Sync); err != nil {
			return err
		}
		if !o.over() {
			o.synced, o.ready = o.seq, true
			o.show()
		}
	}
	o.tell(o.seq)
	return nil
}

func (o *overwriter) Settle() error {
	if err := syncFile(o.path()); o.ready || !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (o *overwriter) Close() {
	if o.open != nil {
		o.open.Close()
		o.open = nil
	}
}

func (o *overwriter) Verify() error {
	if !o.ready {
		err := os.Remove(o.path())
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		// The next file has no writes of this file. Its writes continue the numbers, so
		// that a block of this file would be recognised.
		o.start, o.writes, o.synced = [overwriteBlocks]uint64{}, nil, o.seq
		o.is(o.told.verified(0))
		return nil
	}
	b, err := o.meter.readFile(o.path())
	if errors.Is(err, os.ErrNotExist) {
		return violated("%s is gone; it was synced", o.path())
	}
	if err != nil {
		return err
	}
	found, last, err := o.prefix(b, &blocks{progress: progress{begun: o.seq}, start: o.start, writes: o.writes, base: o.base}, o.synced)
	if err != nil {
		return err
	}
	// The next write takes the next number; the present state is durable.
	o.start, o.writes, o.seq, o.synced = found, nil, last, last
	o.show()
	o.is(o.told.verified(last))
	return nil
}

// replacer replaces a file by a new version, as editors and checkpoints do: it writes a
// second file and renames it over the first. It syncs the new bytes before the rename or
// does not; even without the sync a crash must not lose both versions.
//
// After a crash, one whole version is there, at least as new as the last version after
// which the directory was synced. If no version was ever synced, the first, empty version
// is valid, too.
type replacer struct {
	dir     string
	rand    *rand.Rand
	over    func() bool
	meter   *Meter
	id      uint64
	version uint64        // newest attempted
	synced  uint64        // durable
	shown   atomic.Uint64 // synced, for others

	mu   sync.Mutex
	told progress
}

// tell notes that the version done was acknowledged.
func (r *replacer) tell(done uint64) {
	p := r.told
	p.begun, p.done, p.synced = r.version, done, r.synced
	r.is(p)
}

func (r *replacer) is(p progress) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.told = p
}

func (r *replacer) progress() progress {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.told
}

func (r *replacer) Freeze() func(bool) Check {
	before := r.progress()
	return func(whole bool) Check {
		after := r.progress()
		if before.past != after.past {
			return nil
		}
		return func(dir string) error {
			least := before.least(r.progress(), whole)
			b, err := r.meter.readFile(filepath.Join(dir, "current"))
			if errors.Is(err, os.ErrNotExist) || err == nil && len(b) == 0 {
				if least > 0 {
					return violated("current is not in the snapshot, or empty: %v; version %d was there before", err, least)
				}
				return nil
			}
			if err != nil {
				return err
			}
			version, err := r.judge(b, least)
			if err == nil && version > after.begun {
				err = violated("current has version %d in the snapshot, only %d were attempted", version, after.begun)
			}
			return err
		}
	}
}

func (r *replacer) bytes(version uint64) []byte {
	size := rand.New(rand.NewPCG(r.id, version)).IntN(200 << 10)
	b := make([]byte, 16+size)
	Pattern(b, r.id<<40^version, 0)
	binary.LittleEndian.PutUint64(b[0:], r.id)
	binary.LittleEndian.PutUint64(b[8:], version)
	return b
}

func (r *replacer) Step() error {
	r.version++
	r.tell(r.version - 1)
	tmp, current := filepath.Join(r.dir, "tmp"), filepath.Join(r.dir, "current")
	var f *os.File
	err := r.meter.Time(Name, 0, func() (err error) {
		f, err = os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
		return err
	})
	if err != nil {
		return err
	}
	defer f.Close()
	b := r.bytes(r.version)
	if err := r.meter.Time(Write, len(b), func() error { _, err := f.Write(b); return err }); err != nil {
		return err
	}
	if r.rand.IntN(2) == 0 {
		if err := r.meter.Time(Sync, 0, f.Sync); err != nil {
			return err
		}
	}
	if err := r.meter.Time(Write, 0, f.Close); err != nil {
		return err
	}
	if err := r.meter.Time(Name, 0, func() error { return os.Rename(tmp, current) }); err != nil {
		return err
	}
	if r.rand.IntN(3) == 0 {
		if err := r.meter.Time(Sync, 0, r.Settle); err != nil {
			return err
		}
		if !r.over() {
			r.synced = r.version
			r.shown.Store(r.synced)
		}
	}
	r.tell(r.version)
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

func (r *replacer) Settle() error {
	if err := syncFile(filepath.Join(r.dir, "current")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return SyncDir(r.dir)
}

func (r *replacer) Close() {}

func (r *replacer) Verify() error {
	b, err := r.meter.readFile(filepath.Join(r.dir, "current"))
	if errors.Is(err, os.ErrNotExist) {
		if r.synced > 0 {
			return violated("current is gone; version %d was synced", r.synced)
		}
		r.is(r.told.verified(0))
		return nil
	}
	if err != nil {
		return err
	}
	if len(b) == 0 && r.synced == 0 {
		// The first version replaced no file: such a rename waits for no bytes, and the
		// worker did not sync the bytes.
		r.is(r.told.verified(0))
		return os.Remove(filepath.Join(r.dir, "current"))
	}
	version, err := r.judge(b, r.synced)
	if err != nil {
		return err
	}
	if version > r.version {
		return violated("current has version %d, only %d were attempted", version, r.version)
	}
	r.version, r.synced = version, version
	r.shown.Store(version)
	r.is(r.told.verified(version))
	return nil
}

// judge returns an error unless b is one whole version, least or newer.
func (r *replacer) judge(b []byte, least uint64) (uint64, error) {
	if len(b) < 16 {
		return 0, violated("current has %d bytes: no version is so short; version %d was synced", len(b), least)
	}
	version := binary.LittleEndian.Uint64(b[8:])
	if want := r.bytes(version); version < least || string(b) != string(want) {
		return 0, violated("current has %d bytes and names version %d; version %d was synced, and no version has these bytes (want %d)", len(b), version, least, len(want))
	}
	return version, nil
}

func (r *replacer) Look(dir string, _ *rand.Rand) error {
	least := r.shown.Load()
	if least == 0 {
		return nil
	}
	b, err := r.meter.readFile(filepath.Join(dir, "current"))
	if errors.Is(err, os.ErrNotExist) {
		return violated("current is not there for others; version %d was synced", least)
	}
	if err != nil {
		return err
	}
	_, err = r.judge(b, least)
	return err
}
