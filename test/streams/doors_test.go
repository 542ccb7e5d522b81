package streams

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/test/program"
)

// doors is a mount with a holder, so that other processes can take the mount over.
type doors struct {
	*machine
	at     string
	socket string
	args   []string
	hold   *hold.Client
}

// newDoors makes a machine with a mount; args are further flags of the mount.
func newDoors(t *testing.T, args ...string) *doors {
	t.Helper()
	return (&doors{machine: newMachine(t)}).another("mnt", args...)
}

// another makes a mount of the same machine, in a directory with a name.
func (d *doors) another(name string, args ...string) *doors {
	d.T.Helper()
	d = &doors{machine: d.machine, args: args, at: filepath.Join(d.Dir, name), socket: filepath.Join(d.Dir, name+".sock")}
	if err := os.Mkdir(d.at, 0o755); err != nil {
		d.T.Fatal(err)
	}
	holder := d.Run("hold", "--socket", d.socket)
	d.T.Cleanup(func() {
		_ = unix.Unmount(d.at, unix.MNT_FORCE|unix.MNT_DETACH)
		holder.Kill()
	})
	d.Until("the holder", func() (err error) { d.hold, err = hold.Dial(d.socket); return err })
	d.T.Cleanup(d.hold.Close)
	d.serve()
	return d
}

// serve starts a process that mounts, or serves an unserved mount.
func (d *doors) serve() {
	d.T.Helper()
	p := d.Run(append([]string{"mount", "--dir", filepath.Join(d.Dir, "d"), "--admin=none", "--hold=" + d.socket, "/", d.at}, d.args...)...)
	d.Until("the mount serves", func() error {
		if d.server() != p.PID() {
			return errors.New("not yet")
		}
		return nil
	})
}

// server returns the process that serves the mount; 0: none does.
func (d *doors) server() int {
	l, err := d.hold.Show(d.at)
	if err != nil || len(l) != 1 {
		return 0
	}
	return l[0].PID
}

// replace has another process serve the mount.
func (d *doors) replace() {
	d.T.Helper()
	if out, err := exec.Command(program.Path, append([]string{"mount", "--replace", d.at, "--hold=" + d.socket}, d.args...)...).CombinedOutput(); err != nil {
		d.T.Fatalf("%v: %s", err, out)
	}
}

// reader is a process that reads a file of tail.
type reader struct {
	d    *doors
	cmd  *exec.Cmd
	line chan string
}

// follow starts a process that prints a file of tail.
func (d *doors) follow(name string, args ...string) *reader {
	d.T.Helper()
	r := &reader{d: d, cmd: exec.CommandContext(d.T.Context(), name, args...), line: make(chan string, 10000)}
	r.cmd.Stderr = os.Stderr
	out, err := r.cmd.StdoutPipe()
	if err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		d.T.Fatal(err)
	}
	go func() {
		defer close(r.line)
		for s := bufio.NewScanner(out); s.Scan(); {
			r.line <- s.Text()
		}
	}()
	return r
}

// blocks waits until a process waits for a record.
func (d *doors) blocks(pid int, within string) {
	d.T.Helper()
	d.Until("a process waits in read", func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
		if err != nil {
			return err
		}
		f := strings.Fields(string(b))
		if f[0] != fmt.Sprint(unix.SYS_READ) {
			return fmt.Errorf("the process is in system call %s", f[0])
		}
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%d", pid, parse(f[1])))
		if err != nil || !strings.Contains(to, within) {
			return fmt.Errorf("the process reads %s, %v", to, err)
		}
		return nil
	})
}

// parse parses a hexadecimal number.
func parse(s string) (n int) {
	fmt.Sscanf(s, "0x%x", &n)
	return n
}

// next reads a record.
func (r *reader) next() (offset int, value any) {
	r.d.T.Helper()
	select {
	case text, ok := <-r.line:
		var v struct {
			Partition *int
			Offset    int
			Timestamp *int64
			Key       any
			Value     any
			Headers   []any
		}
		if err := json.Unmarshal([]byte(text), &v); err != nil || !ok || v.Timestamp == nil || v.Partition == nil {
			r.d.T.Fatalf("DATA: the tail printed %q, %v", text, err)
		}
		return v.Offset, v.Value
	case <-time.After(patience):
		r.d.T.Fatal("no record came")
	}
	return 0, nil
}

// ended waits until the process has ended.
func (r *reader) ended() *os.ProcessState {
	r.d.T.Helper()
	for range r.line {
	}
	r.cmd.Wait() // the state says the rest
	return r.cmd.ProcessState
}

// handled reads a file with a handler of SIGUSR1, and says when a read ended.
const handled = `
import os, signal, sys
class Told(Exception): pass
def told(*_): raise Told()
signal.signal(signal.SIGUSR1, told)
fd = os.open(sys.argv[1], os.O_RDONLY)
print("{}", flush=True)
while True:
    try:
        sys.stdout.write(os.read(fd, 65536).decode())
    except Told:
        sys.stdout.write("told\n")
    sys.stdout.flush()
`

// TestTail: tail/N of a mount has the records from now on, ends with a signal, and keeps its place
// when another process takes the mount over.
func TestTail(t *testing.T) {
	d := newDoors(t)
	d.Must("stream", "create", "/v/clicks", "--partitions", "2", "--segment-bytes", "4096", "--format", "json")
	stream := filepath.Join(d.at, "v/clicks")
	produce := func(from, to int) {
		t.Helper()
		var b strings.Builder
		for i := from; i < to; i++ {
			fmt.Fprintf(&b, "{\"n\": %d}\n", i)
		}
		d.kcat(b.String(), "-P", "-t", "v.clicks", "-p", "0")
	}
	produce(0, 100)
	tail := filepath.Join(stream, "tail/0")

	if list, err := os.ReadDir(stream); err != nil || slices.ContainsFunc(list, func(e os.DirEntry) bool { return e.Name() == "tail" }) {
		t.Errorf("the directory lists %v, %v", list, err)
	}
	if list, err := os.ReadDir(filepath.Dir(tail)); err != nil || len(list) != 2 || list[0].Name() != "0" || list[1].Name() != "1" {
		t.Errorf("tail lists %v, %v", list, err)
	}
	for name, mode := range map[string]os.FileMode{"tail": os.ModeDir | 0o555, "tail/1": 0o444} {
		if info, err := os.Stat(filepath.Join(stream, name)); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	for _, name := range []string{"tail/2", "tail/00", "tail/x", "log/tail", "../tail"} {
		if _, err := os.Stat(filepath.Join(stream, name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
	foreign := filepath.Join(stream, "foreign")
	if err := os.WriteFile(foreign, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"write":  os.WriteFile(tail, []byte("x"), 0o644),
		"create": os.WriteFile(filepath.Join(stream, "tail/9"), nil, 0o644),
		"remove": os.Remove(tail), "rmdir": os.Remove(filepath.Dir(tail)), "chmod": os.Chmod(tail, 0o777),
		"xattr":  unix.Setxattr(tail, "user.x", []byte("x"), 0),
		"rename": os.Rename(tail, foreign), "away": os.Rename(filepath.Dir(tail), filepath.Join(d.at, "v/away")),
	} {
		if err == nil {
			t.Errorf("%s of an unlisted file did not fail", name)
		}
	}
	walkers(t, stream, filepath.Join(d.Dir, "copy"))

	cat, python := d.follow("cat", tail), d.follow("python3", "-c", handled, tail)
	<-python.line // the program has opened the file
	d.blocks(cat.cmd.Process.Pid, "tail/0")
	seen := 100
	check := func(n int) {
		t.Helper()
		for _, r := range []*reader{cat, python} {
			for i := range n {
				if offset, value := r.next(); offset != seen+i || fmt.Sprint(value) != fmt.Sprintf("map[n:%d]", seen+i) {
					t.Fatalf("DATA: %v of offset %d in place of %d", value, offset, seen+i)
				}
			}
		}
		seen += n
	}
	produce(100, 300) // over several segments
	check(200)

	d.blocks(python.cmd.Process.Pid, "tail/0")
	if err := python.cmd.Process.Signal(unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-python.line:
		if got != "told" {
			t.Fatalf("after a signal with a handler: %q", got)
		}
	case <-time.After(patience):
		t.Fatal("a signal with a handler did not end the read")
	}

	for _, how := range []func(){d.replace, d.again, d.replace} {
		how()
		produce(seen, seen+50)
		check(50)
	}
	// The mount goes while records come.
	done := make(chan error, 1)
	from := seen
	go func() {
		var err error
		for i := from; i < from+200 && err == nil; i++ {
			cmd := exec.Command("kcat", "-b", d.kafka, "-q", "-P", "-t", "v.clicks", "-p", "0")
			cmd.Stdin = strings.NewReader(fmt.Sprintf("{\"n\":%d}\n{\"n\":%d}\n", i, i+1))
			i++
			err = cmd.Run()
		}
		done <- err
	}()
	check(60)
	d.replace()
	check(60)
	d.replace()
	check(80)
	if err := <-done; err != nil {
		t.Fatal(err)
	}

	if err := cat.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if s := cat.ended().Sys().(syscall.WaitStatus); !s.Signaled() || s.Signal() != syscall.SIGINT {
		t.Errorf("cat ended with %v", s)
	}
	d.Must("snapshot", "create", "root", "s")
	if _, err := os.Stat(filepath.Join(d.at, ".snapshot/s/v/clicks/log/0")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(d.at, ".snapshot/s/v/clicks/tail")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("tail in a snapshot: %v", err)
	}
	if err := os.RemoveAll(stream); err != nil {
		t.Error(err)
	}
	python.cmd.Process.Signal(unix.SIGTERM)
	python.ended()
}

// again kills the process that serves the mount, and starts another process.
func (d *doors) again() {
	d.T.Helper()
	pid := d.server()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		d.T.Fatal(err)
	}
	d.serve()
}

// walkers runs programs that read everything below a directory: all of them come to an end.
func walkers(t *testing.T, dir, copy string) {
	t.Helper()
	for _, args := range [][]string{{"grep", "-r", "no such text", dir}, {"tar", "-cf", "/dev/null", dir}, {"rsync", "-a", dir + "/", copy}, {"find", dir, "-type", "f", "-size", "+0"}, {"cp", "-a", dir, copy + "2"}} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
		if status, ok := err.(*exec.ExitError); err != nil && (!ok || args[0] != "grep" || status.ExitCode() != 1) {
			t.Errorf("%v: %v: %s", args, err, out)
		}
		cancel()
	}
	for _, c := range []string{copy, copy + "2"} {
		if b, err := os.ReadFile(filepath.Join(c, "stream.json")); err != nil || !bytes.Contains(b, []byte("json")) {
			t.Errorf("DATA: the copy has %q, %v", b, err)
		}
	}
}
