// Package process identifies a process of one boot of one machine among all processes,
// and recognises that a process has surely ended.
package process

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
)

// Process names a process.
type Process struct {
	Boot  string `json:"boot"`  // the kernel's boot id
	PIDNS string `json:"pidns"` // the name space to which PID belongs
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks after boot, to tell a reused PID
}

// Self is the running process.
func Self() (Process, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return Process{}, meta.E("identify process", meta.IO, "", err)
	}
	ns, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return Process{}, meta.E("identify process", meta.IO, "", err)
	}
	p := Process{Boot: strings.TrimSpace(string(boot)), PIDNS: ns, PID: os.Getpid()}
	p.Start, err = startTime(p.PID)
	return p, err
}

// Dead reports whether p has surely ended, as seen by self: same boot, same name space of
// PIDs, and no such process. False means unknown: containers of one machine share the
// boot and not the name space.
func (p Process) Dead(self Process) bool {
	if !p.SeenBy(self) {
		return false
	}
	start, err := startTime(p.PID)
	if errors.Is(err, os.ErrNotExist) {
		return true
	}
	return err == nil && start != p.Start
}

// SeenBy reports whether self can tell if p runs.
func (p Process) SeenBy(self Process) bool {
	return p.Boot != "" && p.Boot == self.Boot && p.PIDNS != "" && p.PIDNS == self.PIDNS
}

// Space returns boot and name space of PIDs in one string, as sessions have them; see
// Parse.
func (p Process) Space() string { return p.Boot + " " + p.PIDNS }

// Parse reverses Space, with the id and the start. From any other string, Parse makes a
// process that never counts as dead.
func Parse(space string, pid uint32, start uint64) Process {
	boot, ns, _ := strings.Cut(space, " ")
	return Process{Boot: boot, PIDNS: ns, PID: int(pid), Start: start}
}

// Boot returns the kernel's random id of this boot; empty if the id can't be read.
func Boot() string {
	p, err := Self()
	if err != nil {
		return ""
	}
	return p.Boot
}

// startTime reads field 22 of /proc/PID/stat.
func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, meta.E("read process", meta.IO, strconv.Itoa(pid), err)
	}
	// The name in parentheses may contain any byte; the fields after the name are counted
	// from 3.
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 20 {
		return 0, meta.E("read process", meta.Corrupt, strconv.Itoa(pid), nil)
	}
	if f[0] == "Z" || f[0] == "X" { // ended, only not yet waited for
		return 0, meta.E("read process", meta.NotFound, strconv.Itoa(pid), os.ErrNotExist)
	}
	n, err := strconv.ParseUint(f[19], 10, 64)
	if err != nil {
		return 0, meta.E("read process", meta.Corrupt, strconv.Itoa(pid), err)
	}
	return n, nil
}

// Uptime returns the time since boot on a clock that goes on while the machine is
// suspended. Leases are counted on this clock.
func Uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("process: CLOCK_BOOTTIME is there since Linux 2.6.39: " + err.Error())
	}
	return time.Duration(ts.Nano())
}
