package fuse

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
)

// A killed daemon normally takes its connection along: the kernel aborts the connection when
// its last descriptor is closed. But a thread of the daemon may be in the kernel, invalidating
// a page, and wait without end for a READ to unlock the page, while the READ waits for the
// daemon. The kernel can't kill such a thread. So the descriptor stays open, the mount hangs,
// and with a block mount every sync(2) of the machine hangs behind the mount. Therefore a
// separate process watches the daemon, and aborts the connection if the dying daemon does not
// end.

// WatchdogName is argv[0] of a program that must run Watch.
const WatchdogName = "penstock-watchdog"

const (
	watchdogEvery = 500 * time.Millisecond
	watchdogLooks = 2 // looks at a dying daemon before the abort of its connection
)

// startWatchdog runs program beside the mount until stop is called or the
// daemon is gone.
func (m *Mount) startWatchdog(program string) (stop func(), err error) {
	info, err := kernel.MountAt(m.dir)
	if err != nil || info == nil {
		return nil, meta.E("watch mount", meta.NotFound, m.dir, err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, meta.E("watch mount", meta.IO, "pipe", err)
	}
	defer r.Close()
	// The kernel names a connection after the super block's device.
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

// Watch is the watchdog's main function. args are the daemon's process id, the number of the
// daemon's connection and the mount point. Watch returns when stdin ends, because the daemon
// closed stdin or is gone.
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
	// The open directory keeps naming this process, and never a later process with the same
	// number.
	proc, err := os.OpenRoot("/proc/" + args[0])
	if err != nil {
		return meta.E(op, meta.IO, args[0], err)
	}
	defer proc.Close()
	abort, err := kernel.OpenAbort(connection)
	if errors.Is(err, os.ErrNotExist) {
		return nil // the mount has ended meanwhile
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
		if err != nil || !kernel.DyingStatus(status) {
			looks = 0
			continue
		}
		if looks++; looks < watchdogLooks {
			continue
		}
		if _, err := abort.WriteString("1"); err != nil {
			return meta.E(op, meta.IO, args[2], err)
		}
		log.Warn("a mount's process was killed and could not end: the watchdog aborted the mount's connection", "dir", args[2], "pid", pid)
		looks = 0
	}
}
