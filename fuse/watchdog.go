package fuse

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// A killed daemon normally takes its connection along: the kernel aborts it
// when the last descriptor of it is closed. But a thread of the daemon may be
// in the kernel, waiting without end for a page that a READ has locked (it
// invalidates that page), and the READ waits for the daemon. Such a thread
// can't be killed, so the descriptor stays open, the mount hangs, and with a
// block mount every sync(2) of the machine behind it. So a process of its own
// watches the daemon and aborts the connection when it is dying and does not
// get on with it.

// WatchdogName is argv[0] of a program that is to run Watch.
const WatchdogName = "penstock-watchdog"

const (
	watchdogEvery = 500 * time.Millisecond
	watchdogLooks = 2 // looks at a dying daemon before its connection is aborted
)

// startWatchdog runs program beside the mount until stop is called or the
// daemon is gone.
func (m *Mount) startWatchdog(program string) (stop func(), err error) {
	info, err := mountedAt(m.dir)
	if err != nil || info == nil {
		return nil, meta.E("watch mount", meta.NotFound, m.dir, err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, meta.E("watch mount", meta.IO, "pipe", err)
	}
	defer r.Close()
	// The kernel names a connection after its super block's device.
	connection := info.Major<<20 | info.Minor
	cmd := exec.Cmd{
		Path: program, Args: []string{WatchdogName, strconv.Itoa(os.Getpid()), strconv.Itoa(connection), m.dir},
		Stdin: r, Stderr: os.Stderr, Dir: "/",
		// A signal from the terminal is for the daemon.
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := cmd.Start(); err != nil {
		w.Close()
		return nil, meta.E("watch mount", meta.IO, program, err)
	}
	ended := make(chan struct{})
	go func() { // ends with the watchdog, which ends when w is closed
		defer close(ended)
		if err := cmd.Wait(); err != nil {
			m.log.Warn("the mount's watchdog ended", "dir", m.dir, "err", err)
		}
	}()
	return func() {
		w.Close()
		<-ended
	}, nil
}

// Watch is the watchdog's whole life: args are the daemon's process id, the
// number of its connection and the mount point. It returns when stdin ends:
// the daemon closed it, or is gone altogether.
func Watch(args []string, stdin io.Reader, log *slog.Logger) error {
	const op = "watch mount"
	if len(args) != 3 {
		return meta.E(op, meta.Invalid, fmt.Sprint(args), errors.New("want a process, a connection and a directory"))
	}
	pid, err := strconv.Atoi(args[0])
	if err != nil || pid != os.Getppid() {
		return meta.E(op, meta.Invalid, args[0], errors.New("no process that started this one"))
	}
	connection, err := strconv.ParseUint(args[1], 10, 32)
	if err != nil {
		return meta.E(op, meta.Invalid, args[1], err)
	}
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
	// Held open: it goes on naming this process and no later one of its number.
	proc, err := os.OpenRoot("/proc/" + args[0])
	if err != nil {
		return meta.E(op, meta.IO, args[0], err)
	}
	defer proc.Close()
	abort, err := openAbort(connection)
	if errors.Is(err, os.ErrNotExist) {
		return nil // it was unmounted meanwhile
	}
	if err != nil {
		return meta.E(op, meta.NotSupported, args[2], err)
	}
	defer abort.Close()
	gone := make(chan struct{})
	go func() { // ends with the process at the latest
		_, _ = io.Copy(io.Discard, stdin)
		close(gone)
	}()
	for looks := 0; ; {
		select {
		case <-gone:
			return nil
		case <-time.After(watchdogEvery):
		}
		status, err := proc.ReadFile("status")
		if err != nil || !dying(status) {
			looks = 0
			continue
		}
		if looks++; looks < watchdogLooks {
			continue
		}
		if _, err := abort.WriteString("1"); err != nil {
			return meta.E(op, meta.IO, args[2], err)
		}
		log.Warn("a mount's daemon was killed and could not end: its connection was aborted", "dir", args[2], "pid", pid)
		looks = 0
	}
}

// Dying tells that a process was killed, or has ended, and is not gone: a thread of it
// may be in the kernel, waiting for a mount. It does nothing more.
func Dying(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && dying(status)
}

// standsStill tells of a process that was killed that none of its threads runs, or is
// about to: each has ended, or waits in the kernel for what no signal interrupts.
func standsStill(pid int) bool {
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended meanwhile
		}
		// TID (NAME) STATE: a name may have brackets in it.
		f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		if len(f) == 0 || !bytes.Contains([]byte("DZX"), f[0]) {
			return false
		}
	}
	return true
}

// dying tells from /proc/PID/status (proc_pid_status(5)) that a process was
// killed: its first thread has ended, or has SIGKILL pending.
func dying(status []byte) bool {
	for line := range bytes.Lines(status) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch string(name) {
		case "State":
			if len(value) > 0 && (value[0] == 'Z' || value[0] == 'X') {
				return true
			}
		case "SigPnd":
			set, err := strconv.ParseUint(string(value), 16, 64)
			if err == nil && set&(1<<(unix.SIGKILL-1)) != 0 {
				return true
			}
		}
	}
	return false
}

// openAbort opens the file that aborts a connection. Where the control file
// system is not mounted, or a container hides it, it is opened unmounted, which
// needs CAP_SYS_ADMIN. Errors: os.ErrNotExist (no such connection any more).
func openAbort(connection uint64) (*os.File, error) {
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
