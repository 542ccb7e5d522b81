package kernel

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// Dying tells that a process was killed, or has Ended, and is not gone: a thread of it
// may be in the kernel, waiting for a mount. It does nothing more.
func Dying(pid int) bool {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return err == nil && DyingStatus(status)
}

// StandsStill tells of a process that was killed that none of its threads runs, or is
// about to: each has Ended, or waits in the kernel for what no signal interrupts.
func StandsStill(pid int) bool {
	all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false
	}
	for _, name := range all {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has Ended meanwhile
		}
		// TID (NAME) STATE: a name may have brackets in it.
		f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		if len(f) == 0 || !bytes.Contains([]byte("DZX"), f[0]) {
			return false
		}
	}
	return true
}

// DyingStatus tells from /proc/PID/status (proc_pid_status(5)) that a process was
// killed: its first thread has Ended, or has SIGKILL pending.
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
