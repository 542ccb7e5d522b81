package store

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"sync"
	"syscall"
)

// memDisk is a disk in memory that forgets unsynced changes: bytes, lengths and directory
// entries. The disk can lose its power at any change, fail syncs the way kernels do (the dirty
// pages are dropped and the next sync succeeds), and be full.
type memDisk struct {
	mu      sync.Mutex
	dirs    map[string]*memDir
	locked  bool
	ops     int // changes so far
	powerAt int // the power fails at this change; 0: never
	dead    bool
	failAt  int   // this change fails with failErr
	failErr error // EIO or ENOSPC
	// syncFailed: the failed change was a sync.
	syncFailed bool
	room       int64 // bytes that may still be written beyond files' ends; -1: no bound
	// before, if not nil, is called before a file is made ("open"), renamed to a
	// name ("rename"), removed ("remove"), a directory is synced ("sync"), or a
	// file ("fsync"); nothing is locked. An error ends the call.
	before func(op, name string) error
	opened map[string]int // the number of opens of each open file
}

var errPower = errors.New("the power is off")

type memDir struct {
	now, durable map[string]*memInode
	pending      []dirOp // since the last sync
}

type dirOp struct {
	add    string
	inode  *memInode
	remove string
}

type memInode struct {
	now, durable []byte
	pending      []fileOp
	changed      int64
}

type fileOp struct {
	off      int64
	data     []byte
	truncate bool // to off
}

func newMemDisk() *memDisk {
	return &memDisk{dirs: map[string]*memDir{".": newMemDir()}, room: -1, opened: map[string]int{}}
}

func newMemDir() *memDir {
	return &memDir{now: map[string]*memInode{}, durable: map[string]*memInode{}}
}

// change counts a change; the power may fail at the change.
func (d *memDisk) change() error {
	if d.dead {
		return errPower
	}
	d.ops++
	if d.ops == d.powerAt {
		d.dead = true
		return nil // this change still happens, in the cache
	}
	if d.ops == d.failAt {
		return d.failErr
	}
	return nil
}

// after is the error of a changing call once the power is gone.
func (d *memDisk) after(err error) error {
	if err == nil && d.dead {
		return errPower
	}
	return err
}

func (d *memDisk) hook(op, name string) error {
	if d.before == nil {
		return nil
	}
	return d.before(op, name)
}

func (d *memDisk) find(name string) (*memDir, string) {
	dir, base := path.Split(path.Clean(name))
	return d.dirs[path.Clean(dir)], base
}

func (d *memDisk) Open(name string, create bool) (File, error) {
	if create {
		if err := d.hook("open", name); err != nil {
			return nil, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return nil, errPower
	}
	dir, base := d.find(name)
	if dir == nil {
		return nil, &os.PathError{Op: "open", Path: name, Err: os.ErrNotExist}
	}
	i := dir.now[base]
	if i == nil {
		if !create {
			return nil, &os.PathError{Op: "open", Path: name, Err: os.ErrNotExist}
		}
		if err := d.change(); err != nil {
			return nil, err
		}
		i = &memInode{}
		dir.now[base] = i
		dir.pending = append(dir.pending, dirOp{add: base, inode: i})
	}
	if d.dead {
		return nil, errPower
	}
	d.opened[name]++
	return &memFile{d: d, i: i, name: name, write: true}, nil
}

func (d *memDisk) OpenRead(name string) (File, error) {
	f, err := d.Open(name, false)
	if err != nil {
		return nil, err
	}
	f.(*memFile).write = false
	return f, nil
}

func (d *memDisk) Remove(name string) error {
	if err := d.hook("remove", name); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	dir, base := d.find(name)
	if dir == nil || dir.now[base] == nil {
		return &os.PathError{Op: "remove", Path: name, Err: os.ErrNotExist}
	}
	if err := d.change(); err != nil {
		return err
	}
	if d.room >= 0 {
		d.room += int64(len(dir.now[base].now))
	}
	delete(dir.now, base)
	dir.pending = append(dir.pending, dirOp{remove: base})
	return d.after(nil)
}

func (d *memDisk) Rename(from, to string) error {
	if err := d.hook("rename", to); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	a, abase := d.find(from)
	b, bbase := d.find(to)
	if a != b {
		panic("rename between directories")
	}
	if err := d.change(); err != nil {
		return err
	}
	i := a.now[abase]
	if over := a.now[bbase]; over != nil && d.room >= 0 {
		d.room += int64(len(over.now))
	}
	delete(a.now, abase)
	a.now[bbase] = i
	a.pending = append(a.pending, dirOp{add: bbase, inode: i, remove: abase})
	return d.after(nil)
}

func (d *memDisk) Mkdir(name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dirs[path.Clean(name)] != nil {
		return &os.PathError{Op: "mkdir", Path: name, Err: os.ErrExist}
	}
	d.dirs[path.Clean(name)] = newMemDir() // only Init makes directories; not lost
	return nil
}

func (d *memDisk) List(name string) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return nil, errPower
	}
	return slices.Sorted(maps.Keys(d.dirs[path.Clean(name)].now)), nil
}

func (d *memDisk) SyncDir(name string) error {
	if err := d.hook("sync", name); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.change(); err != nil {
		d.syncFailed = true
		return err
	}
	if d.dead {
		return errPower // not done any more
	}
	dir := d.dirs[path.Clean(name)]
	dir.durable, dir.pending = maps.Clone(dir.now), nil
	return nil
}

func (d *memDisk) SyncAll() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.change(); err != nil {
		d.syncFailed = true
		return err
	}
	if d.dead {
		return errPower
	}
	for _, dir := range d.dirs {
		for _, i := range dir.now {
			i.durable, i.pending = slices.Clone(i.now), nil
		}
		dir.durable, dir.pending = maps.Clone(dir.now), nil
	}
	return nil
}

func (d *memDisk) Space() (total, free uint64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.room >= 0 {
		return 1 << 40, uint64(d.room), nil
	}
	return 1 << 40, 1 << 39, nil
}

func (d *memDisk) Lock() (io.Closer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.locked {
		return nil, os.ErrExist
	}
	d.locked = true
	return closerFunc(func() error { d.mu.Lock(); d.locked = false; d.mu.Unlock(); return nil }), nil
}

type closerFunc func() error

func (f closerFunc) Close() error { return f() }

type memFile struct {
	d     *memDisk
	i     *memInode
	name  string
	write bool

	closed bool
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.d.dead {
		return 0, errPower
	}
	if off >= int64(len(f.i.now)) {
		return 0, io.EOF
	}
	n := copy(p, f.i.now[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if !f.write {
		panic("write to a file opened for reading: " + f.name)
	}
	if err := f.d.change(); err != nil {
		return 0, err
	}
	if grow := off + int64(len(p)) - int64(len(f.i.now)); grow > 0 && f.d.room >= 0 {
		if grow > f.d.room {
			return 0, syscall.ENOSPC
		}
		f.d.room -= grow
	}
	f.d.apply(f.i, fileOp{off: off, data: slices.Clone(p)})
	return len(p), f.d.after(nil)
}

func (d *memDisk) apply(i *memInode, op fileOp) {
	i.now = applyOp(i.now, op)
	i.pending = append(i.pending, op)
	i.changed++
}

func applyOp(b []byte, op fileOp) []byte {
	if op.truncate {
		if op.off <= int64(len(b)) {
			return slices.Clone(b[:op.off])
		}
		return append(b, make([]byte, op.off-int64(len(b)))...)
	}
	if need := op.off + int64(len(op.data)); need > int64(len(b)) {
		b = append(b, make([]byte, need-int64(len(b)))...)
	}
	copy(b[op.off:], op.data)
	return b
}

func (f *memFile) Sync() error {
	if err := f.d.hook("fsync", f.name); err != nil {
		return err
	}
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if err := f.d.change(); err != nil {
		// The pages are clean now and will never be written.
		f.i.pending = nil
		f.d.syncFailed = true
		return err
	}
	if f.d.dead {
		return errPower
	}
	for _, op := range f.i.pending {
		f.i.durable = applyOp(f.i.durable, op)
	}
	f.i.pending = nil
	return nil
}

func (f *memFile) Truncate(n int64) error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if err := f.d.change(); err != nil {
		return err
	}
	if f.d.room >= 0 {
		f.d.room += int64(len(f.i.now)) - n
	}
	f.d.apply(f.i, fileOp{off: n, truncate: true})
	return f.d.after(nil)
}

func (f *memFile) Size() (int64, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	return int64(len(f.i.now)), nil
}

func (f *memFile) Stamp() (Stamp, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	return Stamp{Inode: 1, Changed: f.i.changed, Size: int64(len(f.i.now))}, nil
}

func (f *memFile) Allocate(off, n int64) error { return nil }
func (f *memFile) StartWrite(off, n int64)     {}
func (f *memFile) WillNeed(off, n int64)       {}

func (f *memFile) Close() error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.closed {
		panic("closed twice: " + f.name)
	}
	f.closed = true
	if f.d.opened[f.name]--; f.d.opened[f.name] == 0 {
		delete(f.d.opened, f.name)
	}
	return nil
}

// crash returns the disk as the disk comes back: all synced bytes, and a random part of the rest,
// torn at sectors.
func (d *memDisk) crash(r *rand.Rand) *memDisk {
	// Mostly all is lost or all is kept; between lie the interesting mixtures.
	return d.keep(r, []float64{0, 0.1, 0.5, 0.9, 1}[r.IntN(5)])
}

// clone gives a copy, with everything kept and durable.
func (d *memDisk) clone() *memDisk { return d.keep(rand.New(rand.NewPCG(0, 0)), 1) }

func (d *memDisk) keep(r *rand.Rand, keep float64) *memDisk {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := newMemDisk()
	seen := map[*memInode]*memInode{}
	for _, name := range slices.Sorted(maps.Keys(d.dirs)) {
		dir := d.dirs[name]
		fresh := newMemDir()
		ents := maps.Clone(dir.durable)
		// File systems mostly keep the order of entries' changes, at least in one directory; no
		// promise rests on the order.
		for _, op := range dir.pending {
			if r.Float64() >= keep {
				continue
			}
			if op.remove != "" {
				delete(ents, op.remove)
			}
			if op.add != "" {
				ents[op.add] = op.inode
			}
		}
		for _, base := range slices.Sorted(maps.Keys(ents)) {
			i := ents[base]
			if seen[i] == nil {
				b := slices.Clone(i.durable)
				for _, op := range i.pending {
					b = tear(r, b, op, keep)
				}
				seen[i] = &memInode{now: slices.Clone(b), durable: b, changed: i.changed}
			}
			fresh.now[base] = seen[i]
		}
		fresh.durable = maps.Clone(fresh.now)
		n.dirs[name] = fresh
	}
	return n
}

// tear applies some sectors of a write.
func tear(r *rand.Rand, b []byte, op fileOp, keep float64) []byte {
	if op.truncate {
		if r.Float64() < keep {
			b = applyOp(b, op)
		}
		return b
	}
	const sector = 512
	for at := op.off; at < op.off+int64(len(op.data)); {
		next := min((at/sector+1)*sector, op.off+int64(len(op.data)))
		if r.Float64() < keep {
			b = applyOp(b, fileOp{off: at, data: op.data[at-op.off : next-op.off]})
		}
		at = next
	}
	return b
}

// inode finds a file to flip bits in.
func (d *memDisk) inode(name string) *memInode {
	dir, base := d.find(name)
	if dir == nil || dir.now[base] == nil {
		panic(fmt.Sprintf("no file %s", name))
	}
	return dir.now[base]
}
