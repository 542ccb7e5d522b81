package delta

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"

	"penstock.io/penstock/meta"
)

var errCrash = meta.E("write", meta.IO, "disk", errors.New("the power is gone"))

// memDir is a log's directory in memory. After a number of changes the power goes: the last
// change was made or not, and everything fails from then on.
type memDir struct {
	mu    sync.Mutex
	files map[string][]byte
	left  int  // changes until the crash; negative: no crash
	done  bool // the change of the crash is made
	dead  bool
	// before, unless nil, is called before each Create.
	before func(name string)
}

func newMemDir() *memDir { return &memDir{files: map[string][]byte{}, left: -1} }

// restart returns the directory as the next program finds it.
func (d *memDir) restart() *memDir { return &memDir{files: maps.Clone(d.files), left: -1} }

// change makes a change, or crashes.
func (d *memDir) change(do func()) error {
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

func (d *memDir) List(context.Context) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return nil, errCrash
	}
	return slices.Collect(maps.Keys(d.files)), nil
}

func (d *memDir) ReadFile(_ context.Context, name string) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead {
		return nil, errCrash
	}
	b, ok := d.files[name]
	if !ok {
		return nil, meta.E("open", meta.NotFound, name, nil)
	}
	return b, nil
}

func (d *memDir) Create(_ context.Context, name string, data []byte) error {
	if d.before != nil {
		d.before(name)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.files[name]; ok && !d.dead {
		return meta.E("create", meta.Exists, name, nil)
	}
	return d.change(func() { d.files[name] = data })
}

func (d *memDir) Replace(_ context.Context, name string, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.change(func() { d.files[name] = data })
}

func (d *memDir) Remove(_ context.Context, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.files[name]; !ok && !d.dead {
		return meta.E("remove", meta.NotFound, name, nil)
	}
	return d.change(func() { delete(d.files, name) })
}
