// Package kernel owns Linux's information about mounts, connections and processes outside of
// the FUSE protocol: the mount at a path, the end of a connection, the file that aborts a
// connection, and whether a killed process can still run.
package kernel

import (
	"os"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// Subtype is the type of our mounts behind the kernel's own: fuse.penstock.
const Subtype = "penstock"

// MountAt finds the topmost mount at a path; nil: none.
func MountAt(dir string) (*mountinfo.Info, error) {
	list, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) { return i.Mountpoint != dir, false })
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return list[len(list)-1], nil
}

// Ours reports whether a mount's type is penstock's.
func Ours(info *mountinfo.Info) bool {
	return info != nil && strings.HasPrefix(info.FSType, "fuse") && strings.HasSuffix(info.FSType, "."+Subtype)
}

// ConnectionAt returns the kernel's number of the connection of the penstock mount at dir; 0:
// none.
func ConnectionAt(dir string) uint64 {
	info, err := MountAt(dir)
	if err != nil || !Ours(info) {
		return 0
	}
	return uint64(info.Major<<20 | info.Minor)
}

// Ended reports whether the connection of a device has ended.
func Ended(device int) bool {
	p := []unix.PollFd{{Fd: int32(device), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&unix.POLLERR != 0
}

// DupFile gives a copy of a descriptor as a file.
func DupFile(fd int) (*os.File, error) {
	n, err := Dup(fd)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(n), "held"), nil
}

// Dup gives a copy of a descriptor.
func Dup(fd int) (int, error) {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return 0, meta.E("take over mount", meta.IO, "", err)
	}
	return n, nil
}
