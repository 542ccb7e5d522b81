package suite

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// helperVariable, an environment variable, makes the program a second process for a case:
// the process reads commands, a line each, from its standard input, and answers each with
// a line.
const helperVariable = "PENSTOCK_POSIX_HELPER"

// Helper is a second process of a case, with the same working directory.
type Helper struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// Helper starts a second process; it ends with the case.
func (t *T) Helper() *Helper { return t.HelperIn(".") }

// HelperIn starts a second process in the directory.
func (t *T) HelperIn(dir string) *Helper {
	exe, err := os.Executable()
	t.OK("finding the own program", err)
	h := &Helper{cmd: exec.Command(exe)}
	h.cmd.Env = append(os.Environ(), helperVariable+"=1")
	h.cmd.Dir = dir
	h.cmd.Stderr = os.Stderr
	h.in, err = h.cmd.StdinPipe()
	t.OK("pipe", err)
	out, err := h.cmd.StdoutPipe()
	t.OK("pipe", err)
	h.out = bufio.NewReader(out)
	t.OK("starting the helper process", h.cmd.Start())
	t.Cleanup(func() {
		h.in.Close()
		h.cmd.Process.Kill()
		h.cmd.Wait()
	})
	return h
}

// Start gives the process a command without waiting for the answer.
func (h *Helper) Start(t *T, command string) {
	_, err := fmt.Fprintln(h.in, command)
	t.OK("talking to the helper process", err)
}

// Answer is the answer to the last command: text, or an errno.
func (h *Helper) Answer(t *T) (string, error) {
	line, err := h.out.ReadString('\n')
	t.OK("listening to the helper process", err)
	line = strings.TrimSuffix(line, "\n")
	if no, ok := strings.CutPrefix(line, "errno "); ok {
		n, err := strconv.Atoi(no)
		t.OK("answer of the helper process: "+line, err)
		return "", unix.Errno(n)
	}
	text, err := strconv.Unquote(line)
	t.OK("answer of the helper process: "+line, err)
	return text, nil
}

// Wait expects the last command to have succeeded.
func (h *Helper) Wait(t *T) string {
	text, err := h.Answer(t)
	t.OK("in the other process", err)
	return text
}

// Do runs a command that must succeed.
func (h *Helper) Do(t *T, command string) string {
	h.Start(t, command)
	text, err := h.Answer(t)
	t.OK(command+" in the other process", err)
	return text
}

// Try runs a command that may fail.
func (h *Helper) Try(t *T, command string) error {
	h.Start(t, command)
	_, err := h.Answer(t)
	return err
}

// Kill ends the process as SIGKILL does, and waits for its end.
func (h *Helper) Kill() {
	h.cmd.Process.Kill()
	h.cmd.Wait()
}

// RunAsHelper is called first by the main function of a program that runs
// cases: if a case started this process, it serves the case and never returns.
func RunAsHelper() {
	if os.Getenv(helperVariable) == "" {
		return
	}
	unix.Umask(0)
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	h := helper{fds: map[string]int{}, maps: map[string][]byte{}}
	for in.Scan() {
		text, err := h.obey(strings.Fields(in.Text()))
		var no unix.Errno
		switch {
		case errors.As(err, &no):
			fmt.Printf("errno %d\n", int(no))
		case err != nil:
			fmt.Printf("%q\n", "bad command: "+err.Error())
		default:
			fmt.Printf("%q\n", text)
		}
	}
	os.Exit(0)
}

// helper is the state of the second process: named descriptors and mappings.
type helper struct {
	fds  map[string]int
	maps map[string][]byte
}

var openModes = map[string]int{
	"rdonly": unix.O_RDONLY, "wronly": unix.O_WRONLY, "rdwr": unix.O_RDWR, "append": unix.O_WRONLY | unix.O_APPEND,
	"creat": unix.O_RDWR | unix.O_CREAT, "excl": unix.O_RDWR | unix.O_CREAT | unix.O_EXCL, "trunc": unix.O_RDWR | unix.O_TRUNC, "dir": unix.O_RDONLY | unix.O_DIRECTORY,
}

func (h *helper) obey(w []string) (string, error) {
	num := func(i int) int64 {
		n, _ := strconv.ParseInt(w[i], 10, 64)
		return n
	}
	if len(w) < 2 {
		return "", fmt.Errorf("%q", w)
	}
	fd := h.fds[w[1]]
	switch w[0] {
	case "open": // name path mode
		fd, err := unix.Open(w[2], openModes[w[3]]|unix.O_CLOEXEC, 0o644)
		h.fds[w[1]] = fd
		return "", err
	case "close":
		return "", unix.Close(fd)
	case "pread": // name offset length
		b := make([]byte, num(3))
		n, err := unix.Pread(fd, b, num(2))
		return string(b[:max(n, 0)]), err
	case "pwrite": // name offset text
		_, err := unix.Pwrite(fd, []byte(w[3]), num(2))
		return "", err
	case "fsync":
		return "", unix.Fsync(fd)
	case "ftruncate":
		return "", unix.Ftruncate(fd, num(2))
	case "size":
		var st unix.Stat_t
		err := unix.Fstat(fd, &st)
		return fmt.Sprint(st.Size), err
	case "map": // name length
		m, err := unix.Mmap(fd, 0, int(num(2)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		h.maps[w[1]] = m
		return "", err
	case "peek": // name offset length
		return string(h.maps[w[1]][num(2) : num(2)+num(3)]), nil
	case "poke": // name offset text
		copy(h.maps[w[1]][num(2):], w[3])
		return "", nil
	case "appendlines": // name process lines
		for i := range num(3) {
			line := fmt.Sprintf("process %s line %d\n", w[2], i)
			if n, err := unix.Write(fd, []byte(line)); err != nil || n != len(line) {
				return "", errors.Join(err, fmt.Errorf("wrote %d of %d bytes", n, len(line)))
			}
		}
		return "", nil
	case "setlk", "setlkw", "ofdsetlk", "ofdsetlkw": // name type start length
		cmd := map[string]int{"setlk": unix.F_SETLK, "setlkw": unix.F_SETLKW, "ofdsetlk": unix.F_OFD_SETLK, "ofdsetlkw": unix.F_OFD_SETLKW}[w[0]]
		return "", unix.FcntlFlock(uintptr(fd), cmd, &unix.Flock_t{Type: lockTypes[w[2]], Start: num(3), Len: num(4)})
	case "getlk", "ofdgetlk": // name type start length
		cmd := map[string]int{"getlk": unix.F_GETLK, "ofdgetlk": unix.F_OFD_GETLK}[w[0]]
		l := unix.Flock_t{Type: lockTypes[w[2]], Start: num(3), Len: num(4)}
		err := unix.FcntlFlock(uintptr(fd), cmd, &l)
		return fmt.Sprintf("%s %d %d %d", lockName(l.Type), l.Start, l.Len, l.Pid), err
	case "flock": // name sh|ex|un|shnb|exnb
		how := map[string]int{"sh": unix.LOCK_SH, "ex": unix.LOCK_EX, "un": unix.LOCK_UN, "shnb": unix.LOCK_SH | unix.LOCK_NB, "exnb": unix.LOCK_EX | unix.LOCK_NB}[w[2]]
		return "", unix.Flock(fd, how)
	case "mkdir":
		return "", unix.Mkdir(w[1], 0o777)
	case "rmdir":
		return "", unix.Rmdir(w[1])
	case "unlink":
		return "", unix.Unlink(w[1])
	case "rename":
		return "", unix.Rename(w[1], w[2])
	case "link":
		return "", unix.Link(w[1], w[2])
	case "exists":
		var st unix.Stat_t
		return "", unix.Lstat(w[1], &st)
	case "read":
		b, err := os.ReadFile(w[1])
		return string(b), err
	case "write": // path text
		return "", os.WriteFile(w[1], []byte(w[2]), 0o644)
	case "chdir":
		return "", unix.Chdir(w[1])
	case "pid":
		return fmt.Sprint(os.Getpid()), nil
	case "sleep": // milliseconds
		time.Sleep(time.Duration(num(1)) * time.Millisecond)
		return "", nil
	}
	return "", fmt.Errorf("no such command %q", w[0])
}

var lockTypes = map[string]int16{"read": unix.F_RDLCK, "write": unix.F_WRLCK, "un": unix.F_UNLCK}

func lockName(typ int16) string {
	for name, v := range lockTypes {
		if v == typ {
			return name
		}
	}
	return fmt.Sprint(typ)
}
