package stream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
)

// changeFile is the empty file that the changer of a stream leads, so that one process at a time
// changes the stream. The file lies beside the directories of the partitions.
const changeFile = "change"

// changeWithin bounds the wait for another process that changes the same stream.
const changeWithin = time.Minute

// fileVersion identifies the contents of a stream.json: a change replaces the file, and leaves the
// old file as it was.
type fileVersion struct {
	ino    meta.Ino
	change uint64
}

func versionOf(e *penstock.Entry) fileVersion { return fileVersion{e.Attr.Ino, e.Attr.Change} }

// spec reads the stream.json of a stream's directory. Errors: NotFound, and errors of DecodeSpec.
func (d volumeDir) spec(ctx context.Context) (s Spec, file fileVersion, err error) {
	const tries = 5
	for try := 1; ; try++ {
		e, err := d.lookup(ctx, SpecFile)
		if err != nil {
			return s, file, err
		}
		p := make([]byte, e.Attr.Size)
		n, err := d.v.Read(ctx, e.Attr.Ino, p, 0)
		if errors.Is(err, meta.Stale) && try < tries {
			continue // a change has replaced the file meanwhile
		}
		if err != nil {
			return s, file, err
		}
		s, err = DecodeSpec(p[:n])
		return s, versionOf(&e), err
	}
}

// ChangeOptions say how Change changes a stream.
type ChangeOptions struct {
	// Change changes the Spec of the stream. An error of Change is the error of the whole.
	Change func(*Spec) error
	// Check only verifies that the change is possible.
	Check bool
}

// Change changes what stream.json says of a stream, and returns the new Spec. All hosts use the
// new Spec from their next look-up of the stream on. A stream can get more partitions, not fewer;
// the format, the lag and the schema of the table stay. An interrupted Change can be repeated.
// Errors: NotFound (no stream), Invalid (the new Spec, or a change of what stays), Busy (another
// process is changing the stream), ReadOnly (the stream lies where nobody can write).
func Change(ctx context.Context, t *penstock.Tree, p string, how ChangeOptions) (Spec, error) {
	dir, err := dirOf(ctx, t, p)
	if err != nil {
		return Spec{}, err
	}
	if how.Check {
		old, _, err := dir.spec(ctx)
		if err != nil {
			return Spec{}, err
		}
		return changed(p, old, how.Change)
	}
	log, err := dir.sub(ctx, logDir)
	if err != nil {
		return Spec{}, err
	}
	right, err := log.await(ctx, changeFile, p)
	if err != nil {
		return Spec{}, err
	}
	s, err := within{volumeDir: dir, right: right}.change(ctx, p, log, how.Change)
	return s, errors.Join(err, endLead(ctx, right))
}

// dirOf finds the directory of a stream. Errors: NotFound (no stream).
func dirOf(ctx context.Context, t *penstock.Tree, p string) (volumeDir, error) {
	e, err := t.Stat(ctx, p)
	var v *penstock.Volume
	if err == nil {
		v, err = t.VolumeOf(ctx, &e)
	}
	var dir volumeDir
	if err == nil {
		dir = volumeDir{v, e.Attr.Ino}
		_, err = dir.lookup(ctx, SpecFile)
	}
	if k := meta.KindOf(err); k == meta.NotFound || k == meta.NotDir {
		return dir, meta.E("open stream", meta.NotFound, p, errors.New("no stream is there"))
	}
	return dir, err
}

// await leads a file of the directory, when no other process does. Errors: Busy.
func (d volumeDir) await(ctx context.Context, name, p string) (*penstock.Leadership, error) {
	for end := time.Now().Add(changeWithin); ; {
		right, err := d.lead(ctx, name, "")
		if !errors.Is(err, meta.NotOwner) {
			return right, err
		}
		if time.Now().After(end) {
			return nil, meta.E("change stream", meta.Busy, p, fmt.Errorf("another process is changing the stream: %w", err))
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// changed returns the Spec after a change. Errors: Invalid, and the error of change.
func changed(p string, old Spec, change func(*Spec) error) (Spec, error) {
	s := old
	if err := change(&s); err != nil {
		return old, err
	}
	refuse := func(format string, args ...any) (Spec, error) {
		return old, meta.E("change stream", meta.Invalid, p, fmt.Errorf(format, args...))
	}
	switch {
	case s.Partitions < old.Partitions:
		return refuse("the stream has %d partitions, and can't have fewer: %d", old.Partitions, s.Partitions)
	case s.Format != old.Format || s.Lag != old.Lag || s.Schema != old.Schema:
		return refuse("the format, the lag and the schema can't be changed")
	case s.Partitions > old.Partitions && s.NamedPartitions == 0:
		s.NamedPartitions = old.Partitions
	}
	return s, s.Check()
}

// change replaces stream.json, after the new partitions were made. The caller leads changeFile in
// log.
func (d within) change(ctx context.Context, p string, log volumeDir, change func(*Spec) error) (Spec, error) {
	old, _, err := d.spec(ctx)
	if err != nil {
		return old, err
	}
	s, err := changed(p, old, change)
	if err != nil || s == old {
		return old, err
	}
	owner, err := d.v.GetAttr(ctx, log.ino)
	if err != nil {
		return old, err
	}
	for n := old.Partitions; n < s.Partitions; n++ {
		// The partition belongs to the owner of the others: rm -r needs that.
		_, err := d.v.Create(ctx, nil, meta.Create{Parent: log.ino, Name: strconv.Itoa(n), Mode: meta.TypeDir | dirMode, UID: owner.Attr.UID, GID: owner.Attr.GID})
		if err != nil && !errors.Is(err, meta.Exists) {
			return old, err
		}
	}
	return s, d.replaceSpec(ctx, s.Encode())
}

// replaceSpec replaces stream.json: a host reads the old or the new bytes, also after a crash.
func (d within) replaceSpec(ctx context.Context, b []byte) error {
	const draft = SpecFile + replaceSuffix
	old, err := d.lookup(ctx, SpecFile)
	if err != nil {
		return err
	}
	ino, err := d.draft(ctx, draft, &old.Attr)
	if err != nil {
		return err
	}
	f := &volumeFile{ctx: ctx, v: d.v, ino: ino, flags: writing}
	err = mark(ctx, d.v, f.ino)
	if err == nil {
		_, err = f.WriteAt(b, 0)
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	return d.rename(ctx, draft, SpecFile)
}
