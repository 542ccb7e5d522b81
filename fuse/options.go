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

// timed is a tree whose access times can be left alone.
type timed interface{ LeaveAtimes(all, dirs bool) }

// heedTimes has reading leave access times alone. The kernel leaves all of them to its
// servers, and tells them nothing of the mount's options.
func (f *fileSystem) heedTimes(noAtime, noDirAtime bool) {
	if t, ok := f.tree.(timed); ok {
		t.LeaveAtimes(noAtime, noDirAtime)
	}
}

// Words of showOptions beside those of the kernel.
const (
	optionFrozen  = "frozen" // a snapshot or an immutable volume: never writable
	optionNoOpen  = "noopen"
	optionPrivate = "private"
)

// showOptions gives the mount's options as the kernel has them now, and after them
// frozen, noopen and private where they are so, all with commas between them.
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

// mountedWith asks the kernel for the mount, and heeds what that says of access times.
func (f *fileSystem) mountedWith() (*mountinfo.Info, error) {
	m, err := mountOf(f.dir)
	if err == nil {
		f.heedTimes(has(m.Options, "noatime"), has(m.Options, "nodiratime"))
	}
	return m, err
}

func has(options, option string) bool { return slices.Contains(strings.Split(options, ","), option) }

// mountOf gives what is mounted at a whole path, the topmost. Errors: NotFound.
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

// Remount gives what is mounted at dir other options: those of the kernel, from
// ReadOnly to NoSymFollow, all of them. Whether it is private, and how files are opened,
// is decided when it is mounted. Errors: NotFound (nothing of ours is mounted there),
// ReadOnly (a snapshot is to be writable), Invalid (what can't be changed), Busy (files are
// open for writing), NotPermitted.
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
		return meta.E(op, meta.ReadOnly, at, errors.New("it is a snapshot or an immutable volume, which nobody writes: say ro"))
	case o.Private && !slices.Contains(has, optionPrivate), o.AllowOther && slices.Contains(has, optionPrivate):
		return meta.E(op, meta.Invalid, at, errors.New("who may look into a mount is decided when it is mounted: unmount it before"))
	case o.NoBlock && kind == typeBlock:
		return meta.E(op, meta.Invalid, at, errors.New("noblock is decided when it is mounted: unmount it before"))
	case o.NoOpen && !slices.Contains(has, optionNoOpen), o.Passthrough && slices.Contains(has, optionNoOpen):
		return meta.E(op, meta.Invalid, at, errors.New("how files are opened is decided when it is mounted: unmount it before"))
	}
	flags := o.flags() | unix.MS_REMOUNT
	if !o.NoAtime { // without a word of them a remount leaves access times as they are
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
	_, err = mountSays(at) // so that its process looks at them
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
