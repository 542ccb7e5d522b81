package kernel

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Dying reports whether a process was killed or its first thread has ended, and the process
// still exists. A thread may be in the kernel, waiting for a mount. The process runs no more
// user code.
func Dying(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && DyingStatus(status)
}

// StandsStill reports whether no thread of a killed process runs or is about to run: each
// thread has ended, or waits uninterruptibly in the kernel.
func StandsStill(pid int) bool {
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // the thread has ended meanwhile
		}
		// TID (NAME) STATE: NAME may contain brackets.
		f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		if len(f) == 0 || !bytes.Contains([]byte("DZX"), f[0]) {
			return false
		}
	}
	return true
}

// DyingStatus reports from /proc/PID/status (proc_pid_status(5)) whether a process was killed:
// the first thread has ended, or has SIGKILL pending.
func DyingStatus(status []byte) bool {
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
