package bench

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// clockTick is the unit of CPU times in /proc in seconds. USER_HZ is 100 on every Linux that
// Go runs on.
const clockTick = 0.01

// cpuTimes are CPU seconds. Only differences have a meaning.
type cpuTimes struct {
	machine   float64 // all CPU time but idle and iowait
	processes float64 // this process, its waited-for children, and the given pids
}

func readCPU(pids []int) (cpuTimes, error) {
	var t cpuTimes
	stat, err := os.ReadFile("/proc/stat")
	if err != nil {
		return t, err
	}
	if t.machine, err = busySeconds(stat); err != nil {
		return t, err
	}
	for _, who := range []int{unix.RUSAGE_SELF, unix.RUSAGE_CHILDREN} {
		var u unix.Rusage
		if err := unix.Getrusage(who, &u); err != nil {
			return t, err
		}
		t.processes += time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
	}
	for _, pid := range pids {
		seconds, err := processSeconds(pid)
		if err != nil {
			return t, err
		}
		t.processes += seconds
	}
	return t, nil
}

// busySeconds sums the first line of /proc/stat without idle and iowait.
// Fields (proc(5)): user nice system idle iowait irq softirq steal guest
// guest_nice; guest times are contained in user and nice.
func busySeconds(stat []byte) (float64, error) {
	line, _, _ := bytes.Cut(stat, []byte("\n"))
	fields := strings.Fields(string(line))
	if len(fields) < 9 || fields[0] != "cpu" {
		return 0, fmt.Errorf("/proc/stat begins with %q", line)
	}
	var ticks uint64
	for _, i := range []int{1, 2, 3, 6, 7} {
		n, err := strconv.ParseUint(fields[i], 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/stat: %w", err)
		}
		ticks += n
	}
	return float64(ticks) * clockTick, nil
}

// processSeconds returns the user and system time of a process: fields 14 and 15 of
// /proc/PID/stat, counted from the end of the name, because a name may contain spaces.
func processSeconds(pid int) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has only %d fields", pid, len(fields))
	}
	var ticks uint64
	for _, f := range fields[11:13] {
		n, err := strconv.ParseUint(f, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		ticks += n
	}
	return float64(ticks) * clockTick, nil
}

// dropCaches makes the kernel forget clean pages (1), dentries and inodes (2),
// or both (3). Needs root.
func dropCaches(what int) error {
	err := os.WriteFile("/proc/sys/vm/drop_caches", []byte(strconv.Itoa(what)), 0)
	if err != nil {
		return fmt.Errorf("cold rows drop the kernel's caches, which needs root: %w", err)
	}
	return nil
}

// syncDirs syncs the file systems of all measured directories.
func (c *Config) syncDirs() error {
	for _, dir := range c.Dirs {
		if err := syncAll(dir); err != nil {
			return err
		}
	}
	return nil
}

// syncAll syncs the whole file system of a directory, and the directory.
func syncAll(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return fmt.Errorf("syncfs %s: %w", dir, err)
	}
	return d.Sync()
}
