package penstock

import (
	"context"

	"penstock.io/penstock/meta"
)

// Flush is close(2) of one descriptor. It releases the POSIX locks of lockOwner and returns
// the error of a failure to make the file's bytes durable that the handle has not reported
// (failures.go; ctx may name the Handle). It syncs only on volumes with sync-on-close.
func (v *Volume) Flush(ctx context.Context, call *Call, ino meta.Ino, lockOwner uint64) error {
	unlock := v.locks.close(ctx, ino, lockOwner, call != nil && call.Resent)
	in := v.c.table.peek(v.id, ino)
	if in == nil {
		return unlock
	}
	defer in.put()
	in.mu.Lock()
	f := in.file
	if f == nil {
		in.mu.Unlock()
		return unlock
	}
	err := f.toldByClose(handleOf(ctx))
	if err == nil {
		err = unlock
	}
	syncNow := v.settings.policy.Load().SyncOnClose && (f.uncommitted > 0 || f.metaDirty || f.own.ended ||
		f.users.writers > 0 && v.owner.durable.Load() < v.owner.mutations.Load()) // it is committed, or made, and not journaled yet
	in.mu.Unlock()
	if syncNow {
		if e := v.Fsync(ctx, ino, false); err == nil {
			err = e
		}
	}
	return err
}

// Fsync makes durable the inode's bytes, and every namespace operation of this client answered
// before the call. ctx may name the Handle.
func (v *Volume) Fsync(ctx context.Context, ino meta.Ino, dataOnly bool) error {
	in := v.node(ino)
	defer in.put()
	h := handleOf(ctx)
	if err := v.back.flushOne(ctx, in, flushFsync); err != nil {
		if !passing(err) && meta.KindOf(err) != meta.Interrupted {
			in.mu.Lock()
			in.fileLocked().syncFailed(h, err)
			in.mu.Unlock()
		}
		return err
	}
	if err := v.owner.sync(ctx); err != nil {
		return err // the next fsync returns the other pending errors
	}
	in.mu.Lock()
	var err error
	if in.file != nil {
		err = in.file.toldBySync(h)
	}
	in.mu.Unlock()
	if e := v.lost.taken(ino); err == nil {
		err = e
	}
	return err
}

// SyncAll makes all changes of this client on the volume durable, as syncfs(2) does. Errors:
// IO when unsynced bytes or names are lost; only one call returns each loss.
func (v *Volume) SyncAll(ctx context.Context) error {
	err := v.back.syncAll(ctx)
	if e := v.lost.takenAll(); err == nil {
		err = e
	}
	return err
}

// FsyncDir makes all changes of this client on the volume durable, including the names of a
// directory. Errors: those of SyncAll, of this directory.
func (v *Volume) FsyncDir(ctx context.Context, ino meta.Ino) error {
	err := v.back.syncAll(ctx)
	if e := v.lost.taken(ino); err == nil {
		err = e
	}
	return err
}
