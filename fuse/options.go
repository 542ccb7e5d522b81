package fuse

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
)

// timed is a tree that can stop updating access times.
type timed interface{ LeaveAtimes(all, dirs bool) }

// heedTimes makes reading leave access times alone. The kernel leaves all access times to the
// server, and does not tell the server the mount's options.
func (f *fileSystem) heedTimes(noAtime, noDirAtime bool) {
	if t, ok := f.tree.(timed); ok {
		t.LeaveAtimes(noAtime, noDirAtime)
	}
}

// Words of showOptions besides the kernel's options.
const (
	optionFrozen  = "frozen" // a snapshot or an immutable volume: never writable
	optionNoOpen  = "noopen"
	optionPrivate = "private"
)

// showOptions returns the mount's options as the kernel has them now, then frozen, noopen and
// private if set, separated by commas.
func (f *fileSystem) showOptions() ([]byte, error) {
	m, err := f.mountedWith()
	if err != nil {
		return nil, err
	}
	options := m.Options
	for _, o := range []struct {
		on   bool
		name string
	}{{f.frozen, optionFrozen}, {f.noOpen, optionNoOpen}, {!has(m.VFSOptions, "allow_other"), optionPrivate}} {
		if o.on {
			options += "," + o.name
		}
	}
	return []byte(options), nil
}

// mountedWith reads the mount from mountinfo, and applies its options about access times.
func (f *fileSystem) mountedWith() (*mountinfo.Info, error) {
	m, err := mountOf(f.dir)
	if err == nil {
		f.heedTimes(has(m.Options, "noatime"), has(m.Options, "nodiratime"))
	}
	return m, err
}

func has(options, option string) bool { return slices.Contains(strings.Split(options, ","), option) }

// mountOf returns the topmost mount at a path. Errors: NotFound, IO.
func mountOf(dir string) (*mountinfo.Info, error) {
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != dir, false })
	switch {
	case err != nil:
		return nil, meta.E("look at mount", meta.IO, dir, err)
	case len(all) == 0:
		return nil, meta.E("look at mount", meta.NotFound, dir, errors.New("nothing is mounted there"))
	}
	return all[len(all)-1], nil
}

// Remount gives the mount at dir new options: all of the kernel's options, from ReadOnly to
// NoSymFollow. Privacy and the way of opening files are fixed at the mount. Errors: NotFound
// (no penstock mount is there), ReadOnly (a snapshot can't become writable), Invalid (an
// option can't change), Busy (files are open for writing), NotPermitted.
func Remount(dir string, o Options) error {
	const op = "remount"
	at, err := MountPath(dir)
	if err != nil {
		return err
	}
	m, err := mountOf(at)
	if err != nil {
		return err
	}
	kind, sub, _ := strings.Cut(m.FSType, ".")
	if sub != kernel.Subtype {
		return meta.E(op, meta.NotFound, at, fmt.Errorf("%s of type %s is mounted there, and not penstock", m.Source, m.FSType))
	}
	has, err := mountSays(at)
	if err != nil {
		return err
	}
	switch {
	case slices.Contains(has, optionFrozen) && !o.ReadOnly:
		return meta.E(op, meta.ReadOnly, at, errors.New("a snapshot or an immutable volume can't be mounted for writing: remount it with the option ro"))
	case o.Private && !slices.Contains(has, optionPrivate), o.AllowOther && slices.Contains(has, optionPrivate):
		return meta.E(op, meta.Invalid, at, errors.New("a remount can't change which users may look into the mount: unmount the mount first"))
	case o.NoBlock && kind == typeBlock:
		return meta.E(op, meta.Invalid, at, errors.New("a remount can't change noblock: unmount the mount first"))
	case o.NoOpen && !slices.Contains(has, optionNoOpen), o.Passthrough && slices.Contains(has, optionNoOpen):
		return meta.E(op, meta.Invalid, at, errors.New("a remount can't change how files are opened: unmount the mount first"))
	}
	flags := o.flags() | unix.MS_REMOUNT
	if !o.NoAtime { // without such a flag a remount keeps the old setting
		flags |= unix.MS_RELATIME
	}
	switch err := unix.Mount("", at, "", flags, ""); {
	case errors.Is(err, syscall.EBUSY):
		return meta.E(op, meta.Busy, at, errors.New("files are open for writing there"))
	case errors.Is(err, syscall.EPERM):
		return meta.E(op, meta.NotPermitted, at, err)
	case err != nil:
		return meta.E(op, meta.IO, at, err)
	}
	_, err = mountSays(at) // makes the mount's process read the options
	return err
}

// mountSays reads showOptions through the mount.
func mountSays(at string) ([]string, error) {
	b := make([]byte, 4<<10)
	n, err := unix.Getxattr(at, XattrMount, b)
	if errors.Is(err, syscall.ENODATA) || errors.Is(err, syscall.EOPNOTSUPP) {
		return nil, meta.E("remount", meta.NotSupported, at, errors.New("the file system there does not answer as a mount of penstock does: nothing was changed"))
	}
	if err != nil {
		return nil, meta.E("remount", meta.Unavailable, at, err)
	}
	return strings.Split(string(b[:n]), ","), nil
}
