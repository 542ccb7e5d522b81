package client

import (
	"os"
	"strconv"
	"strings"
)

// self identifies this process to a server on the same machine: where its
// process id counts, that id, and its start time, which tells a reused id.
func self() (host string, pid uint32, start uint64) {
	pid = uint32(os.Getpid())
	return PIDSpace(), pid, ProcessStart(pid)
}

// PIDSpace names what this process's id counts in: the boot's id and, after a
// space, the name space of process ids. Containers of one machine share the
// first and not the second: a process of another one must not look dead.
func PIDSpace() string {
	ns, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return "" // unknown: nobody is taken for dead
	}
	return BootID() + " " + ns
}

// BootID is the kernel's random id of this boot, empty if it can't be read.
func BootID() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// ProcessStart is when a process began, in clock ticks since boot (field 22 of
// /proc/PID/stat); zero when there is no such process.
func ProcessStart(pid uint32) uint64 {
	b, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(pid), 10) + "/stat")
	if err != nil {
		return 0
	}
	// The command name may hold spaces and parentheses: count from its end.
	i := strings.LastIndexByte(string(b), ')')
	if i < 0 {
		return 0
	}
	f := strings.Fields(string(b[i+1:]))
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return 0 // a zombie holds nothing
	}
	n, _ := strconv.ParseUint(f[19], 10, 64)
	return n
}
