package publish

import (
	"context"
	"errors"
	"maps"
	"path"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

var errCrash = meta.E("write", meta.IO, "disk", errors.New("the power is gone"))

// memFiles is a stream's directory in memory. After a number of changes the power goes: the
// last change was made or not, and everything fails from then on.
type memFiles struct {
	mu    sync.Mutex
	files map[string]memFile
	now   func() time.Time
	left  int  // changes until the crash; negative: no crash
	done  bool // the change of the crash is made
	dead  bool
	// before, unless nil, is called before each Create.
	before func(name string)
}

type memFile struct {
	data    []byte
	created time.Time
}

func newMemFiles() *memFiles {
	return &memFiles{files: map[string]memFile{}, left: -1, now: time.Now}
}

// restart returns the directory as the next program finds it.
func (d *memFiles) restart() *memFiles {
	return &memFiles{files: maps.Clone(d.files), left: -1, now: d.now}
}

func (d *memFiles) change(do func()) error {
	if d.left == 0 && !d.dead {
		d.dead = true
		if d.done {
			do()
		}
	}
	if d.dead {
		return errCrash
	}
	d.left--
	do()
	return nil
}

func (d *memFiles) List(_ context.Context, dir string) (all []Info, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return nil, errCrash
	}
	for name, f := range d.files {
		if path.Dir(name) == path.Clean(dir) {
			all = append(all, Info{Name: path.Base(name), Created: f.created})
		}
	}
	return all, nil
}

func (d *memFiles) ReadFile(_ context.Context, name string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f, ok := d.files[name]
	if d.dead {
		return nil, errCrash
	}
	if !ok {
		return nil, meta.E("open", meta.NotFound, name, nil)
	}
	return f.data, nil
}

func (d *memFiles) Create(_ context.Context, name string, data []byte) error {
	if d.before != nil {
		d.before(name)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.files[name]; ok && !d.dead {
		return meta.E("create", meta.Exists, name, nil)
	}
	return d.change(func() { d.files[name] = memFile{data, d.now()} })
}

func (d *memFiles) Replace(_ context.Context, name string, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.change(func() { d.files[name] = memFile{data, d.now()} })
}

func (d *memFiles) Remove(_ context.Context, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.files[name]; !ok && !d.dead {
		return meta.E("remove", meta.NotFound, name, nil)
	}
	return d.change(func() { delete(d.files, name) })
}

// memLog is a partition's log in memory.
type memLog struct {
	mu      sync.Mutex
	start   int64
	batches [][]byte
	bases   []int64
	high    int64
}

// add appends a batch of records.
func (l *memLog) add(compression int16, compress func([]byte) []byte, records ...log.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b := log.Batch{Base: l.high, Attributes: compression, LastDelta: int32(len(records) - 1), BaseTime: 1000, MaxTime: 1000, Producer: log.NoProducer, Epoch: -1, Sequence: -1, Records: int32(len(records))}
	var plain []byte
	for i, r := range records {
		plain = log.AppendRecord(plain, int32(i), r.Time-1000, r.Key, r.Value, r.Headers)
	}
	if compress != nil {
		plain = compress(plain)
	}
	l.batches, l.bases = append(l.batches, b.Encode(plain)), append(l.bases, l.high)
	l.high = b.Next()
}

func (l *memLog) Bounds() (start, high int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.start, l.high
}

func (l *memLog) Read(offset int64, _ int) ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := len(l.batches) - 1; i >= 0; i-- {
		if l.bases[i] <= offset {
			return l.batches[i], nil
		}
	}
	return nil, nil
}
