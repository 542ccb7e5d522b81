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

// check refuses a change of names without the leadership. The owner of the volume decides (see
// within): check only spares requests that the owner would refuse.
func (d *ledDir) check(op, name string) error {
	if d.Valid() {
		return nil
	}
	return meta.E(op, meta.Fenced, name, errors.New("the leadership has ended, or the owner of the volume does not answer"))
}

// within returns the directory for changes of names within the leadership.
func (d *ledDir) within() within {
	w := within{volumeDir: d.volumeDir, unsafe: &d.unsafe}
	if d.unsafe.NoFence {
		return w
	}
	if w.right = d.right; w.right == nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		w.right = d.file
	}
	return w
}

// openTries bounds how often Open begins anew because the file has got a new name meanwhile.
const openTries = 5

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
		return d.unsafe.watch(&volumeFile{ctx: ctx, v: d.v, ino: e.Attr.Ino, flags: writing}, name), nil
	}
	for range openTries {
		ino := e.Attr.Ino
		l, err := d.leadFile(ctx, ino, name)
		if err != nil {
			return nil, err
		}
		// The leader before may have put another file in the place of this file, or removed this file,
		// between the look-up and the leadership. From here on only this process does that.
		if e, err = d.lookup(ctx, name); err != nil {
			return nil, err // leave ends the leadership
		}
		if e.Attr.Ino != ino {
			continue
		}
		if _, err := d.v.Open(ctx, nil, ino, writing); err != nil {
			return nil, err
		}
		return d.unsafe.watch(&ledFile{volumeFile{ctx: ctx, v: d.v, ino: ino, flags: writing}, l}, name), nil
	}
	return nil, meta.E("open", meta.Unavailable, name, errors.New("other processes replace the file all the time"))
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
	switch {
	case d.unsafe.NoSeal:
		ino, err := within{volumeDir: d.volumeDir}.create(ctx, name, nil)
		if err != nil {
			return nil, err
		}
		return d.unsafe.watch(&volumeFile{ctx: ctx, v: d.v, ino: ino, flags: writing}, name), nil
	case d.right == nil:
		return d.createLed(ctx, name)
	}
	if err := d.check("create", name); err != nil {
		return nil, err
	}
	w := d.within()
	ino, err := w.create(ctx, name, nil)
	if errors.Is(err, meta.Exists) {
		if e, lerr := d.lookup(ctx, name); lerr != nil || e.Attr.Size > 0 {
			return nil, err
		}
		if err := w.Remove(ctx, name); err != nil {
			return nil, err
		}
		ino, err = w.create(ctx, name, nil)
	}
	if err != nil {
		return nil, err
	}
	f := &ledFile{volumeFile{ctx: ctx, v: d.v, ino: ino, flags: writing}, nil}
	if f.lead, err = d.leadFile(ctx, ino, name); err == nil {
		// The leadership may have ended between the look at it and the creation.
		if err = d.check("create", name); err == nil {
			return d.unsafe.watch(f, name), nil
		}
	}
	return nil, errors.Join(err, f.Close(), w.Remove(ctx, name))
}

// createLed makes a file that this process leads before the file has its name: no other process
// ever leads the file before. Errors: Exists.
func (d *ledDir) createLed(ctx context.Context, name string) (partition.File, error) {
	info, err := d.v.Tmpfile(ctx, nil, meta.Tmpfile{Parent: d.volumeDir.ino, Mode: fileMode}, writing)
	if err != nil {
		return nil, err
	}
	f := &ledFile{volumeFile{ctx: ctx, v: d.v, ino: info.Entry.Attr.Ino, flags: writing}, nil}
	if f.lead, err = d.leadFile(ctx, f.ino, name); err == nil {
		if _, err = d.v.Link(ctx, nil, f.ino, d.volumeDir.ino, name); err == nil {
			return d.unsafe.watch(f, name), nil
		}
	}
	return nil, errors.Join(err, f.Close())
}

// Replace replaces a whole file. If the directory holds only the led file, this process leads the new
// file before the file takes the name, and still leads the old file then: at no moment does the name
// stand for a file that another process could lead. An error ends the leaderships, since the name may
// stand for either file: the caller opens the file again.
func (d *ledDir) Replace(ctx context.Context, name string, data []byte) error {
	if err := d.check("replace", name); err != nil {
		return err
	}
	w := d.within()
	if d.right != nil || d.unsafe.NoSeal {
		return w.replace(ctx, name, data)
	}
	d.mu.Lock()
	old := d.file
	d.mu.Unlock()
	if old == nil {
		return meta.E("replace", meta.Fenced, name, errors.New("the file is not open for writing"))
	}
	next, err := d.replaceLed(ctx, w, name, data)
	d.mu.Lock()
	d.file, d.ino = nil, 0
	if err == nil {
		d.file, d.ino = next.lead, next.ino
	}
	d.mu.Unlock()
	ended := endLead(ctx, old)
	if err == nil {
		return nil // nobody looks for the old file any more
	}
	if next != nil {
		err = errors.Join(err, endLead(ctx, next.lead))
	}
	return errors.Join(err, ended)
}

// replaceLed writes and leads a file, and then gives the file a name that another file has. A file
// is returned in any case in which this process may lead it.
func (d *ledDir) replaceLed(ctx context.Context, w within, name string, data []byte) (*ledFile, error) {
	draft := name + replaceSuffix
	ino, err := w.draft(ctx, draft, nil)
	if err != nil {
		return nil, err
	}
	f := &ledFile{volumeFile{ctx: ctx, v: d.v, ino: ino, flags: writing}, nil}
	if f.lead, err = d.leadIno(ctx, ino, draft, d.address); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	_, err = f.WriteAt(data, 0)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return f, err
	}
	return f, w.rename(ctx, draft, name)
}

func (d *ledDir) Remove(ctx context.Context, name string) error {
	if err := d.check("remove", name); err != nil {
		return err
	}
	return d.within().Remove(ctx, name)
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

func (f *ledFile) Truncate(size int64) error { return fenced(f.lead.Truncate(f.ctx, size)) }

func (f *ledFile) Sync() error { return fenced(f.volumeFile.Sync()) }

// fenced says what it means that the owner lets another session write.
func fenced(err error) error {
	if errors.Is(err, meta.NotPermitted) {
		return meta.E("write", meta.Fenced, "led file", fmt.Errorf("another process leads it: %w", err))
	}
	return err
}
