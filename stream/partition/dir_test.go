package partition

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// errCrash is the error of every call after the planned crash.
var errCrash = meta.E("write", meta.IO, "disk", errors.New("the power is gone"))

// memDir is a directory in memory that can lose power: unsynced bytes are then gone, in part or
// in the whole.
type memDir struct {
	mu    sync.Mutex
	files map[string]*memFile
	left  int // changes until the crash; negative: no crash
	dead  bool
	syncs int
	// gate, unless nil, delays syncs until gate is closed.
	gate chan struct{}
}

type memFile struct {
	d      *memDir
	data   []byte
	synced []byte // content after a crash, beside a part of the unsynced bytes
	named  bool   // the name survives a crash
}

func newMemDir() *memDir { return &memDir{files: map[string]*memFile{}, left: -1} }

// changeLocked counts a change, and reports whether the power is gone before the change.
func (d *memDir) changeLocked() bool {
	if d.left == 0 {
		d.dead = true
	}
	if d.left > 0 {
		d.left--
	}
	return d.dead
}

// crash returns the directory as a restart finds the directory. keep is the part, of 0 to 1, of
// the unsynced bytes that stay at the end of each file.
func (d *memDir) crash(keep float64) *memDir {
	d.mu.Lock()
	defer d.mu.Unlock()
	after := newMemDir()
	for name, f := range d.files {
		if !f.named {
			continue
		}
		data := slices.Clone(f.synced)
		if len(f.data) > len(data) {
			data = append(data, f.data[len(data):len(data)+int(keep*float64(len(f.data)-len(data)))]...)
		}
		after.files[name] = &memFile{d: after, data: data, synced: slices.Clone(data), named: true}
	}
	return after
}

func (d *memDir) List(context.Context) (l []Info, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(d.files)) {
		l = append(l, Info{Name: name, Size: int64(len(d.files[name].data)), Created: time.UnixMilli(0)})
	}
	return l, nil
}

func (d *memDir) Open(_ context.Context, name string, _ bool) (File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.files[name]
	if f == nil {
		return nil, meta.E("open", meta.NotFound, name, nil)
	}
	return f, nil
}

func (d *memDir) Create(_ context.Context, name string) (File, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changeLocked() {
		return nil, errCrash
	}
	if d.files[name] != nil {
		return nil, meta.E("create", meta.Exists, name, nil)
	}
	f := &memFile{d: d}
	d.files[name] = f
	return f, nil
}

func (d *memDir) ReadFile(_ context.Context, name string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f := d.files[name]
	if f == nil {
		return nil, meta.E("open", meta.NotFound, name, nil)
	}
	return slices.Clone(f.data), nil
}

func (d *memDir) Replace(_ context.Context, name string, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changeLocked() {
		return errCrash
	}
	d.files[name] = &memFile{d: d, data: slices.Clone(data), synced: slices.Clone(data), named: true}
	return nil
}

func (d *memDir) Remove(_ context.Context, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changeLocked() {
		return errCrash
	}
	delete(d.files, name)
	return nil
}

func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if off >= int64(len(f.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.data[off:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *memFile) WriteAt(p []byte, off int64) (int, error) {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	dead := f.d.dead
	if gone := f.d.changeLocked(); gone && !dead {
		p = p[:len(p)/2] // the power goes in the middle of the write
	} else if gone {
		return 0, errCrash
	}
	if need := int(off) + len(p); need > len(f.data) {
		f.data = append(f.data, make([]byte, need-len(f.data))...)
	}
	copy(f.data[off:], p)
	if f.d.dead {
		return 0, errCrash
	}
	return len(p), nil
}

func (f *memFile) Truncate(size int64) error {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.d.changeLocked() {
		return errCrash
	}
	f.data = f.data[:size]
	return nil
}

func (f *memFile) Sync() error {
	f.d.mu.Lock()
	gate := f.d.gate
	f.d.mu.Unlock()
	if gate != nil {
		<-gate
	}
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if f.d.changeLocked() {
		return errCrash
	}
	f.d.syncs++
	f.synced, f.named = slices.Clone(f.data), true
	return nil
}

func (f *memFile) Close() error { return nil }
