package stream

import (
	"context"
	"errors"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// within is a directory whose names this process changes within a leadership. The owner of the
// volume makes each change only while the leadership lasts: the request of a process that was
// stopped or cut off changes nothing when the request arrives later. Errors of all changes: Fenced.
type within struct {
	volumeDir
	right  *penstock.Leadership // nil: the changes have no condition
	unsafe *Unsafe              // nil: all mechanisms are on
}

// before tells a test of a change.
func (w within) before(change, name string) {
	if w.unsafe != nil {
		w.unsafe.before(change, name)
	}
}

// create makes and opens an empty file; owner has the user and the group of the file, nil: root.
// Errors: Exists.
func (w within) create(ctx context.Context, name string, owner *meta.Attr) (meta.Ino, error) {
	how := meta.Create{Parent: w.ino, Name: name, Mode: meta.TypeRegular | fileMode, Excl: true}
	if owner != nil {
		how.UID, how.GID = owner.UID, owner.GID
	}
	w.before("create", name)
	var info penstock.OpenInfo
	var err error
	if w.right == nil {
		info, err = w.v.CreateOpen(ctx, nil, how, writing)
	} else {
		info, err = w.right.CreateOpen(ctx, how, writing)
	}
	return info.Entry.Attr.Ino, err
}

// draft is create for a file that is to be renamed. A file that an interrupted change has left under the
// name is removed.
func (w within) draft(ctx context.Context, name string, owner *meta.Attr) (meta.Ino, error) {
	ino, err := w.create(ctx, name, owner)
	if !errors.Is(err, meta.Exists) {
		return ino, err
	}
	if err := w.Remove(ctx, name); err != nil {
		return 0, err
	}
	return w.create(ctx, name, owner)
}

// replace replaces a whole file: after a crash the file has the old or the new bytes.
func (w within) replace(ctx context.Context, name string, data []byte) error {
	draft := name + replaceSuffix
	ino, err := w.draft(ctx, draft, nil)
	if err != nil {
		return err
	}
	f := &volumeFile{ctx: ctx, v: w.v, ino: ino, flags: writing}
	_, err = f.WriteAt(data, 0)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return w.rename(ctx, draft, name)
}

// rename gives a file another name, in place of the file that has the name, durably.
func (w within) rename(ctx context.Context, name, to string) error {
	w.before("rename", name)
	var err error
	if w.right == nil {
		err = w.v.Rename(ctx, nil, w.ino, name, w.ino, to, 0)
	} else {
		err = w.right.Rename(ctx, w.ino, name, to, 0)
	}
	if err != nil {
		return err
	}
	return w.v.FsyncDir(ctx, w.ino)
}

// Remove removes a file.
func (w within) Remove(ctx context.Context, name string) error {
	w.before("remove", name)
	if w.right == nil {
		return w.volumeDir.Remove(ctx, name)
	}
	return w.right.Unlink(ctx, w.ino, name)
}
