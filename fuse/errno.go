package fuse

import (
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

// errnos maps each kind of error to the errno for the calling process. A missing kind is EIO,
// since a lower layer should have handled the kind.
var errnos = map[meta.Kind]syscall.Errno{
	meta.NotFound:         syscall.ENOENT,
	meta.Exists:           syscall.EEXIST,
	meta.NotDir:           syscall.ENOTDIR,
	meta.IsDir:            syscall.EISDIR,
	meta.NotEmpty:         syscall.ENOTEMPTY,
	meta.NotPermitted:     syscall.EPERM,
	meta.AccessDenied:     syscall.EACCES,
	meta.Invalid:          syscall.EINVAL,
	meta.NameTooLong:      syscall.ENAMETOOLONG,
	meta.TooManyLinks:     syscall.EMLINK,
	meta.CrossVolume:      syscall.EXDEV,
	meta.NoSpace:          syscall.ENOSPC,
	meta.QuotaExceeded:    syscall.EDQUOT,
	meta.FileTooBig:       syscall.EFBIG,
	meta.NoAttribute:      syscall.ENODATA,
	meta.Range:            syscall.ERANGE,
	meta.ReadOnly:         syscall.EROFS,
	meta.Stale:            syscall.ESTALE,
	meta.Busy:             syscall.EBUSY,
	meta.WouldBlock:       syscall.EAGAIN,
	meta.Deadlock:         syscall.EDEADLK,
	meta.NotSupported:     syscall.EOPNOTSUPP,
	meta.NoSuchOffset:     syscall.ENXIO,
	meta.TextBusy:         syscall.ETXTBSY,
	meta.TooBig:           syscall.E2BIG,
	meta.Loop:             syscall.ELOOP,
	meta.Interrupted:      syscall.EINTR,
	meta.Canceled:         syscall.EINTR,
	meta.BadCapability:    syscall.EACCES,
	meta.NoSuchVolume:     syscall.ENOENT,
	meta.ResourceExceeded: syscall.ENOSPC,
}

// loud are the kinds of errors caused by the system, not by its user; status logs these
// errors.
var loud = map[meta.Kind]bool{
	meta.IO: true, meta.Corrupt: true, meta.Fenced: true, meta.SessionExpired: true,
	meta.Unavailable: true, meta.Version: true, meta.Protocol: true,
}

// status maps an error to the status for the kernel, and logs an error of a loud or unmapped
// kind.
func (f *fileSystem) status(op string, node uint64, err error) fuse.Status {
	if err == nil {
		return fuse.OK
	}
	kind := meta.KindOf(err)
	errno, ok := errnos[kind]
	if !ok {
		errno = syscall.EIO
	}
	if errno == syscall.ENXIO && op != "lseek" {
		// ENXIO is an answer only to SEEK_DATA and SEEK_HOLE. In other calls NoSuchOffset
		// means that a chunk is shorter than its record says.
		errno, ok = syscall.EIO, false
	}
	if loud[kind] || !ok {
		f.log.Warn("request failed", "op", op, "node", node, "errno", errno.Error(), "err", err)
	}
	return fuse.Status(errno)
}
