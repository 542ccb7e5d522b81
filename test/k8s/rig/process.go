package rig

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// Find lists the processes of a machine's pods whose command lines match.
func (r *Rig) Find(machine string, match func(line string) bool) (pids []int, err error) {
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	group := []byte("/" + filepath.Base(r.Dir) + "/" + machine + "/")
	for _, p := range all {
		line, err := os.ReadFile(p + "/cmdline")
		if err != nil || len(line) == 0 {
			continue // it ended
		}
		groups, err := os.ReadFile(p + "/cgroup")
		if err != nil || !bytes.Contains(groups, group) || !match(string(bytes.ReplaceAll(line, []byte{0}, []byte{' '}))) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(p))
		if err != nil {
			return nil, err
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// MemoryGroup is the control group in which a process's memory counts, as a
// directory, and what may be used in it.
func MemoryGroup(pid int) (dir string, limit int64, err error) {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", 0, err
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return "", 0, err
	}
	for _, group := range strings.Split(string(groups), "\n") {
		f := strings.SplitN(group, ":", 3)
		if len(f) != 3 {
			continue
		}
		for _, mount := range strings.Split(string(mounts), "\n") {
			m := strings.Fields(mount)
			if len(m) < 4 {
				continue
			}
			first := m[2] == "cgroup" && strings.Contains(","+f[1]+",", ",memory,") && strings.Contains(","+m[3]+",", ",memory,")
			for _, file := range []string{"memory.limit_in_bytes", "memory.max"} {
				if !first && (m[2] != "cgroup2" || f[1] != "") {
					continue
				}
				at := filepath.Join(m[1], f[2])
				b, err := os.ReadFile(filepath.Join(at, file))
				if err != nil {
					continue
				}
				limit, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
				if err != nil {
					return "", 0, fmt.Errorf("the limit of %s is %q", at, b)
				}
				return at, limit, nil
			}
		}
	}
	return "", 0, errors.New("the memory of the process is not counted")
}

// Slow measures how many times as long as on a quiet machine work takes from now on, until
// factor is called, which tells. It is asked of a program of the other module, since what
// this one requires decides whether Kubernetes is built anew.
func (r *Rig) Slow(ctx context.Context) (factor func() (float64, error), err error) {
	cmd := exec.CommandContext(ctx, filepath.Join(r.Dir, "user"), "slow")
	end, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	cmd.Stdout = &out
	if err := start(cmd); err != nil {
		return nil, err
	}
	return func() (f float64, err error) {
		if err := errors.Join(end.Close(), cmd.Wait()); err != nil {
			return 0, err
		}
		return strconv.ParseFloat(strings.TrimSpace(out.String()), 64)
	}, nil
}

// Fill has the memory of a control group filled, by a process of a machine that is
// put into it and writes to a file in memory, so that what it takes is nobody's to
// give back: the kernel must kill, and whom it kills frees too little, until all
// are gone. full is to be called then: the file's pages are charged to whatever is
// left of the pod.
func (m *Machine) Fill(ctx context.Context, group string, bytes int64) (full func() error, err error) {
	const file = "/run/fill"
	full = func() error {
		if out, err := m.Command(context.Background(), "rm", "-f", file).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	// The machine's shell is the process itself: its number is of another name
	// space, and 0 means who writes.
	cmd := m.Command(ctx, "sh", "-c", `echo 0 > "$1/cgroup.procs" && exec dd if=/dev/zero of=`+file+` bs=1M count="$2"`, "sh", group, strconv.FormatInt(bytes>>20, 10))
	if err := start(cmd); err != nil {
		return full, err
	}
	go func() { _ = cmd.Wait() }() // the kernel ends it, or it is done; with the machine at the latest
	return full, nil
}
