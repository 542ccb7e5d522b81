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
			continue // the process has ended
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

// MemoryGroup returns the directory of the control group that accounts a process's
// memory, and the group's limit.
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

// Slow measures from now on how many times longer work takes than on a quiet machine,
// until the caller calls factor. A program of the other module measures, because this
// module's requirements decide whether Kubernetes is built anew.
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

// Fill fills the memory of a control group: a process of a machine joins the group and
// writes to a file in memory, which no process can give back. So the kernel must kill,
// and each kill frees too little, until all processes of the group are gone. The caller
// then calls full: the file's pages are charged to the rest of the pod.
func (m *Machine) Fill(ctx context.Context, group string, bytes int64) (full func() error, err error) {
	const file = "/run/fill"
	full = func() error {
		if out, err := m.Command(context.Background(), "rm", "-f", file).CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	}
	// The shell writes 0, which means the writing process: the shell's number is of
	// another name space.
	cmd := m.Command(ctx, "sh", "-c", `echo 0 > "$1/cgroup.procs" && exec dd if=/dev/zero of=`+file+` bs=1M count="$2"`, "sh", group, strconv.FormatInt(bytes>>20, 10))
	if err := start(cmd); err != nil {
		return full, err
	}
	go func() { _ = cmd.Wait() }() // ends by the kernel's kill, by its own end, or with the machine
	return full, nil
}
