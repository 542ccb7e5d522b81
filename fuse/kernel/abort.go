package kernel

import (
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// OpenAbort opens the file that aborts a connection. If the control file system is not
// mounted, or a container hides the mount, OpenAbort makes a detached mount, which needs
// CAP_SYS_ADMIN. Errors: os.ErrNotExist (the connection is gone).
func OpenAbort(connection uint64) (*os.File, error) {
	name := strconv.FormatUint(connection, 10) + "/abort"
	const dir, magic = "/sys/fs/fuse/connections/", 0x65735543 // of fusectl
	f, err := os.OpenFile(dir+name, os.O_WRONLY, 0)
	if err == nil {
		return f, nil
	}
	var st unix.Statfs_t
	if errors.Is(err, os.ErrNotExist) && unix.Statfs(dir, &st) == nil && st.Type == magic {
		return nil, err
	}
	fsfd, ferr := unix.Fsopen("fusectl", unix.FSOPEN_CLOEXEC)
	if ferr != nil {
		return nil, os.NewSyscallError("fsopen", ferr)
	}
	defer unix.Close(fsfd)
	if ferr := unix.FsconfigCreate(fsfd); ferr != nil {
		return nil, os.NewSyscallError("fsconfig", ferr)
	}
	root, ferr := unix.Fsmount(fsfd, unix.FSMOUNT_CLOEXEC, 0)
	if ferr != nil {
		return nil, os.NewSyscallError("fsmount", ferr)
	}
	defer unix.Close(root)
	fd, ferr := unix.Openat(root, name, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if ferr != nil {
		return nil, os.NewSyscallError("openat", ferr)
	}
	return os.NewFile(uintptr(fd), "abort"), nil
}
