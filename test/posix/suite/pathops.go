package suite

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pathOp is an operation on one path. The tables of path.go bring it into every situation
// of a path.
type pathOp struct {
	name   string
	need   Type // type of the object needed at the path; none: the operation makes the object
	at     bool // takes a directory descriptor
	follow bool // follows a symbolic link in the last place
	modify bool // adds or removes a name, so needs write permission on the directory
	// do runs the operation. The path is an address, so that bad addresses can be tried.
	do func(dirfd int, p uintptr) error
}

// call is a system call that reports only an errno, and closes nothing.
func call(nr uintptr, a ...uintptr) error {
	var args [6]uintptr
	copy(args[:], a)
	for {
		_, _, e := unix.Syscall6(nr, args[0], args[1], args[2], args[3], args[4], args[5])
		if e == unix.EINTR {
			continue
		}
		if e != 0 {
			return e
		}
		return nil
	}
}

// ptr passes a string to a system call. The bytes live on the heap, which the
// Go collector doesn't move; keep holds them until the end of the call.
func ptr(s string) (p uintptr, keep *byte) {
	b := append([]byte(s), 0)
	return uintptr(unsafe.Pointer(&b[0])), &b[0]
}

// onPath runs the operation on a path given as a string.
func (o pathOp) onPath(dirfd int, path string) error {
	p, keep := ptr(path)
	err := o.do(dirfd, p)
	runtime.KeepAlive(keep)
	return err
}

func openClose(dirfd int, p uintptr, flags int) error {
	fd, _, e := unix.Syscall6(unix.SYS_OPENAT, uintptr(dirfd), p, uintptr(flags|unix.O_CLOEXEC), 0o644, 0, 0)
	if e != 0 {
		return e
	}
	return unix.Close(int(fd))
}

// newObject makes the object that a path operation needs. Files are executable scripts
// with an extended attribute, so that one form serves all operations.
func (t *T) newObject(typ Type, path string) {
	switch typ {
	case none:
	case regular:
		t.File(path, "#!/bin/true\n")
		t.Chmod(path, 0o777)
		t.OK("setxattr "+short(path), unix.Setxattr(path, "user.a", []byte("v"), 0))
	default:
		t.Make(typ, path, 0o777)
	}
}

// with fixes a second path argument.
func with(path string, f func(p uintptr) error) error {
	p, keep := ptr(path)
	err := f(p)
	runtime.KeepAlive(keep)
	return err
}

const here = unix.AT_FDCWD

// cwd is AT_FDCWD as an argument of a raw system call.
var cwd = func() uintptr { d := here; return uintptr(d) }()

// pathOps is every system call family with a path. Operations with two paths
// stand once for each; the other path is "src" or "dst" in the case's
// directory, always good.
func pathOps() []pathOp {
	open := func(name string, need Type, flags int, follow, modify bool) pathOp {
		return pathOp{name: name, need: need, at: true, follow: follow, modify: modify,
			do: func(d int, p uintptr) error { return openClose(d, p, flags) }}
	}
	mknod := func(name string, bits uint32, dev uint64) pathOp {
		return pathOp{name: name, at: true, modify: true, do: func(d int, p uintptr) error {
			return call(unix.SYS_MKNODAT, uintptr(d), p, uintptr(bits|0o644), uintptr(dev))
		}}
	}
	rename := func(name string, flags uintptr, need Type, from bool) pathOp {
		return pathOp{name: name, need: need, at: true, modify: true, do: func(d int, p uintptr) error {
			if from {
				return with("dst", func(q uintptr) error { return call(unix.SYS_RENAMEAT2, uintptr(d), p, cwd, q, flags) })
			}
			return with("src", func(q uintptr) error { return call(unix.SYS_RENAMEAT2, cwd, q, uintptr(d), p, flags) })
		}}
	}
	xattr := func(name string, nr uintptr, follow bool, rest ...uintptr) pathOp {
		return pathOp{name: name, need: regular, follow: follow, do: func(_ int, p uintptr) error {
			return with("user.a", func(q uintptr) error {
				switch {
				case strings.Contains(name, "list"):
					return call(nr, p, 0, 0)
				case strings.Contains(name, "remove"):
					return call(nr, p, q)
				}
				return call(nr, append([]uintptr{p, q}, rest...)...)
			})
		}}
	}
	statx := func(name string, flags int, follow bool) pathOp {
		return pathOp{name: name, need: regular, at: true, follow: follow, do: func(d int, p uintptr) error {
			st := new(unix.Statx_t)
			return call(unix.SYS_STATX, uintptr(d), p, uintptr(flags), unix.STATX_BASIC_STATS, uintptr(unsafe.Pointer(st)))
		}}
	}
	return []pathOp{
		open("open-rdonly", regular, unix.O_RDONLY, true, false),
		open("open-wronly", regular, unix.O_WRONLY, true, false),
		open("open-rdwr-trunc", regular, unix.O_RDWR|unix.O_TRUNC, true, false),
		open("open-creat", none, unix.O_CREAT|unix.O_WRONLY, true, true),
		open("open-creat-excl", none, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR, false, true),
		open("open-directory", dir, unix.O_DIRECTORY|unix.O_RDONLY, true, false),
		open("open-path", regular, unix.O_PATH, true, false),
		open("open-tmpfile", dir, unix.O_TMPFILE|unix.O_RDWR, true, false),
		{name: "unlink", need: regular, at: true, modify: true, do: func(d int, p uintptr) error { return call(unix.SYS_UNLINKAT, uintptr(d), p, 0) }},
		{name: "rmdir", need: dir, at: true, modify: true, do: func(d int, p uintptr) error {
			return call(unix.SYS_UNLINKAT, uintptr(d), p, unix.AT_REMOVEDIR)
		}},
		{name: "mkdir", at: true, modify: true, do: func(d int, p uintptr) error { return call(unix.SYS_MKDIRAT, uintptr(d), p, 0o755) }},
		mknod("mkfifo", unix.S_IFIFO, 0),
		mknod("mknod-regular", unix.S_IFREG, 0),
		mknod("mknod-char", unix.S_IFCHR, nullDevice),
		mknod("mknod-block", unix.S_IFBLK, blockDevice),
		mknod("mknod-socket", unix.S_IFSOCK, 0),
		{name: "symlink", at: true, modify: true, do: func(d int, p uintptr) error {
			return with("target", func(q uintptr) error { return call(unix.SYS_SYMLINKAT, q, uintptr(d), p) })
		}},
		{name: "link-from", need: regular, at: true, do: func(d int, p uintptr) error {
			return with("dst", func(q uintptr) error { return call(unix.SYS_LINKAT, uintptr(d), p, cwd, q, 0) })
		}},
		{name: "link-to", at: true, modify: true, do: func(d int, p uintptr) error {
			return with("src", func(q uintptr) error { return call(unix.SYS_LINKAT, cwd, q, uintptr(d), p, 0) })
		}},
		rename("rename-from", 0, regular, true),
		rename("rename-to", 0, none, false),
		rename("rename-noreplace-to", unix.RENAME_NOREPLACE, none, false),
		rename("rename-exchange", unix.RENAME_EXCHANGE, regular, false),
		{name: "truncate", need: regular, follow: true, do: func(_ int, p uintptr) error { return call(unix.SYS_TRUNCATE, p, 7) }},
		{name: "chmod", need: regular, at: true, follow: true, do: func(d int, p uintptr) error { return call(unix.SYS_FCHMODAT, uintptr(d), p, 0o755) }},
		{name: "chown", need: regular, at: true, follow: true, do: func(d int, p uintptr) error {
			return call(unix.SYS_FCHOWNAT, uintptr(d), p, 1, 1, 0)
		}},
		{name: "lchown", need: regular, at: true, do: func(d int, p uintptr) error {
			return call(unix.SYS_FCHOWNAT, uintptr(d), p, 1, 1, unix.AT_SYMLINK_NOFOLLOW)
		}},
		{name: "utimensat", need: regular, at: true, follow: true, do: func(d int, p uintptr) error { return call(unix.SYS_UTIMENSAT, uintptr(d), p, 0, 0) }},
		{name: "lutimens", need: regular, at: true, do: func(d int, p uintptr) error {
			return call(unix.SYS_UTIMENSAT, uintptr(d), p, 0, unix.AT_SYMLINK_NOFOLLOW)
		}},
		{name: "readlink", need: symlink, at: true, do: func(d int, p uintptr) error {
			b := make([]byte, 64)
			return call(unix.SYS_READLINKAT, uintptr(d), p, uintptr(unsafe.Pointer(&b[0])), 64)
		}},
		statx("stat", 0, true),
		statx("lstat", unix.AT_SYMLINK_NOFOLLOW, false),
		{name: "access", need: regular, at: true, follow: true, do: func(d int, p uintptr) error { return call(unix.SYS_FACCESSAT, uintptr(d), p, unix.R_OK) }},
		xattr("getxattr", unix.SYS_GETXATTR, true, 0, 0),
		xattr("lgetxattr", unix.SYS_LGETXATTR, false, 0, 0),
		xattr("setxattr", unix.SYS_SETXATTR, true, 0, 0, 0),
		xattr("lsetxattr", unix.SYS_LSETXATTR, false, 0, 0, 0),
		xattr("listxattr", unix.SYS_LISTXATTR, true),
		xattr("llistxattr", unix.SYS_LLISTXATTR, false),
		xattr("removexattr", unix.SYS_REMOVEXATTR, true),
		xattr("lremovexattr", unix.SYS_LREMOVEXATTR, false),
		{name: "statfs", need: regular, follow: true, do: func(_ int, p uintptr) error {
			st := new(unix.Statfs_t)
			return call(unix.SYS_STATFS, p, uintptr(unsafe.Pointer(st)))
		}},
		{name: "chdir", need: dir, follow: true, do: func(_ int, p uintptr) error { return call(unix.SYS_CHDIR, p) }},
		{name: "exec", need: regular, follow: true, do: func(_ int, p uintptr) error {
			if p < 1<<16 {
				return unix.EFAULT // the address would be read here, not by the kernel
			}
			return execPath(goString(p))
		}},
	}
}

// execPath starts path as a program and waits for its end; the error is execve(2)'s.
// While another thread of this process forks, the child has a copy of each descriptor
// that is open for writing until the child executes, so ETXTBSY may come for a moment.
func execPath(path string) error {
	for range 200 {
		err := execOnce(path)
		if !errors.Is(err, unix.ETXTBSY) {
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
	return unix.ETXTBSY
}

// execOnce tries once, and fails if the program ends with another code than 0.
func execOnce(path string, args ...string) error {
	pid, err := syscall.ForkExec(path, append([]string{"case"}, args...), &syscall.ProcAttr{Env: []string{"PATH=/usr/bin:/bin"}})
	if err != nil {
		return err
	}
	p, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	state, err := p.Wait()
	if err == nil && !state.Success() {
		err = fmt.Errorf("%s: %s", path, state)
	}
	return err
}

// goString reads the string that ptr made.
func goString(p uintptr) string {
	b := *(**byte)(unsafe.Pointer(&p))
	return unix.BytePtrToString(b)
}
