package stream

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/partition"
)

// leaderFile is the empty file that the leader of a partition leads.
const leaderFile = "leader"

// leadWithin bounds how long a leadership may take to begin or to end. The time is no
// request's: an owner may still grant a request that was given up.
const leadWithin = 30 * time.Second

// lead makes this process the leader of a file of a directory; a missing file is made.
// Errors: NotOwner (another process leads the file).
func (d volumeDir) lead(ctx context.Context, name, address string) (*penstock.Leadership, error) {
	e, err := d.lookup(ctx, name)
	if errors.Is(err, meta.NotFound) {
		if _, err = d.v.Create(ctx, nil, meta.Create{Parent: d.ino, Name: name, Mode: meta.TypeRegular | fileMode, Excl: true}); err == nil || errors.Is(err, meta.Exists) {
			e, err = d.lookup(ctx, name)
		}
	}
	if err != nil {
		return nil, err
	}
	return d.leadIno(ctx, e.Attr.Ino, name, address)
}

func (d volumeDir) leadIno(ctx context.Context, ino meta.Ino, name, address string) (*penstock.Leadership, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leadWithin)
	defer cancel()
	l, err := d.v.Leaderships().Lead(ctx, ino, penstock.LeadOptions{Address: address})
	if errors.Is(err, meta.Busy) {
		err = meta.E("lead", meta.NotOwner, name, err)
	}
	return l, err
}

// ledDir is a directory in which one process writes. A file that is opened for writing is led
// by the process: nobody else can write to the file any more, and what others wrote before is
// final. The process writes to one file at a time.
type ledDir struct {
	volumeDir
	address string
	// right is the leadership of what the directory holds; nil: the leadership of the opened
	// file is all.
	right  *penstock.Leadership
	unsafe Unsafe

	mu   sync.Mutex
	file *penstock.Leadership // of the file for writing; nil: none
	ino  meta.Ino             // of that file
}

var _ partition.Dir = (*ledDir)(nil)

// Valid reports that nobody else leads what the directory holds.
func (d *ledDir) Valid() bool {
	if d.unsafe.NoEpoch || d.unsafe.NoSeal && d.right == nil {
		return true
	}
	if d.right != nil {
		return d.right.Valid()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.file != nil && d.file.Valid()
}

// check refuses a change of names without the leadership.
func (d *ledDir) check(op, name string) error {
	if d.Valid() {
		return nil
	}
	return meta.E(op, meta.Fenced, name, errors.New("the leadership has ended, or the owner of the volume does not answer"))
}

func (d *ledDir) Open(ctx context.Context, name string, write bool) (partition.File, error) {
	if !write {
		return d.volumeDir.open(ctx, name)
	}
	e, err := d.lookup(ctx, name)
	if err != nil {
		return nil, err
	}
	if d.unsafe.NoSeal {
		if _, err := d.v.Open(ctx, nil, e.Attr.Ino, writing); err != nil {
			return nil, err
		}
		return &volumeFile{ctx: ctx, v: d.v, ino: e.Attr.Ino, flags: writing}, nil
	}
	l, err := d.leadFile(ctx, e.Attr.Ino, name)
	if err != nil {
		return nil, err
	}
	if _, err := d.v.Open(ctx, nil, e.Attr.Ino, writing); err != nil {
		return nil, err // leave ends the leadership
	}
	return &ledFile{volumeFile{ctx: ctx, v: d.v, ino: e.Attr.Ino, flags: writing}, l}, nil
}

// leadFile begins the leadership of a file for writing, and ends that of the file before.
func (d *ledDir) leadFile(ctx context.Context, ino meta.Ino, name string) (*penstock.Leadership, error) {
	d.mu.Lock()
	old, was := d.file, d.ino
	d.mu.Unlock()
	if old != nil && was == ino {
		select {
		case <-old.Done():
		default:
			return old, nil
		}
	}
	l, err := d.leadIno(ctx, ino, name, d.address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	d.file, d.ino = l, ino
	d.mu.Unlock()
	if old == nil {
		return l, nil
	}
	return l, endLead(ctx, old)
}

func endLead(ctx context.Context, l *penstock.Leadership) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leadWithin)
	defer cancel()
	return l.Release(ctx)
}

// Create makes and leads a file. An empty file of the name is of a leader that was late.
func (d *ledDir) Create(ctx context.Context, name string) (partition.File, error) {
	if err := d.check("create", name); err != nil && d.right != nil {
		return nil, err
	}
	how := meta.Create{Parent: d.volumeDir.ino, Name: name, Mode: meta.TypeRegular | fileMode, Excl: true}
	info, err := d.v.CreateOpen(ctx, nil, how, writing)
	if errors.Is(err, meta.Exists) {
		if e, lerr := d.lookup(ctx, name); lerr != nil || e.Attr.Size > 0 || d.right == nil {
			return nil, err
		}
		if err := d.Remove(ctx, name); err != nil {
			return nil, err
		}
		info, err = d.v.CreateOpen(ctx, nil, how, writing)
	}
	if err != nil {
		return nil, err
	}
	if d.unsafe.NoSeal {
		return &volumeFile{ctx: ctx, v: d.v, ino: info.Entry.Attr.Ino, flags: writing}, nil
	}
	f := &ledFile{volumeFile{ctx: ctx, v: d.v, ino: info.Entry.Attr.Ino, flags: writing}, nil}
	if f.lead, err = d.leadFile(ctx, f.ino, name); err == nil {
		// The leadership may have ended between the look at it and the creation.
		if err = d.check("create", name); err == nil {
			return f, nil
		}
	}
	return nil, errors.Join(err, f.Close(), d.volumeDir.Remove(ctx, name))
}

func (d *ledDir) Replace(ctx context.Context, name string, data []byte) error {
	if err := d.check("replace", name); err != nil {
		return err
	}
	return d.volumeDir.Replace(ctx, name, data)
}

func (d *ledDir) Remove(ctx context.Context, name string) error {
	if err := d.check("remove", name); err != nil {
		return err
	}
	return d.volumeDir.Remove(ctx, name)
}

// leave ends the leaderships.
func (d *ledDir) leave(ctx context.Context) error {
	d.mu.Lock()
	file := d.file
	d.file = nil
	d.mu.Unlock()
	var errs []error
	for _, l := range []*penstock.Leadership{file, d.right} {
		if l != nil {
			errs = append(errs, endLead(ctx, l))
		}
	}
	return errors.Join(errs...)
}

// ledFile is an open file that this process leads.
type ledFile struct {
	volumeFile
	lead *penstock.Leadership
}

func (f *ledFile) WriteAt(p []byte, off int64) (int, error) {
	n, err := f.lead.Write(f.ctx, p, off)
	return n, fenced(err)
}

func (f *ledFile) Truncate(size int64) error { return fenced(f.volumeFile.Truncate(size)) }

func (f *ledFile) Sync() error { return fenced(f.volumeFile.Sync()) }

// fenced says what it means that the owner lets another session write.
func fenced(err error) error {
	if errors.Is(err, meta.NotPermitted) {
		return meta.E("write", meta.Fenced, "led file", fmt.Errorf("another process leads it: %w", err))
	}
	return err
}
