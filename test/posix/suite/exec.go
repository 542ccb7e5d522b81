package suite

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// netRaw is a struct vfs_cap_data, revision 2: CAP_NET_RAW permitted and effective.
const netRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// setIDExecCases run a set-user-id program of root after a caller without privilege has
// changed its file, but not its text: the program must run as the calling user. exec(2)
// uses the mode that the kernel knows, whatever stat(2) returns.
func setIDExecCases() []Case {
	const head = 100
	changes := map[string]func(t *T, fd int, text []byte) error{
		"pwrite":       func(_ *T, fd int, text []byte) error { _, err := unix.Pwrite(fd, text[:head], 0); return err },
		"write-of-all": func(_ *T, fd int, text []byte) error { _, err := unix.Pwrite(fd, text, 0); return err },
		"append": func(_ *T, fd int, text []byte) error {
			_, err := unix.Pwrite(fd, []byte("x"), int64(len(text)))
			return err
		},
		"ftruncate":      func(_ *T, fd int, text []byte) error { return unix.Ftruncate(fd, int64(len(text))+5) },
		"fallocate":      func(_ *T, fd int, text []byte) error { return unix.Fallocate(fd, 0, 0, int64(len(text))+9999) },
		"fallocate-keep": func(_ *T, fd int, _ []byte) error { return unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, 1<<20) },
		"copy_file_range": func(t *T, fd int, _ []byte) error {
			_, err := unix.CopyFileRange(t.Open("src", unix.O_RDONLY, 0), nil, fd, nil, 1<<20, 0)
			return err
		},
		"sendfile": func(t *T, fd int, _ []byte) error {
			_, err := unix.Sendfile(fd, t.Open("src", unix.O_RDONLY, 0), nil, head)
			return err
		},
		"O_TRUNC": func(_ *T, fd int, text []byte) error {
			again, err := unix.Open("f", unix.O_WRONLY|unix.O_TRUNC|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(again)
			_, err = unix.Write(again, text)
			return err
		},
	}
	var cs []Case
	for name, change := range changes {
		for _, before := range []uint32{0o4777, 0o6777} {
			cs = append(cs, Case{"chmod/set-id/exec-after-" + name + "-with-" + strconv.FormatUint(uint64(before), 8), func(t *T) {
				text, err := os.ReadFile("/usr/bin/id")
				t.OK("reading a program", err)
				t.File("f", string(text))
				t.File("src", string(text))
				t.Chmod("f", before)
				t.As(alice, func() { Equal(t, "user before", runs(t), "0") })
				t.As(alice, func() {
					fd, err := unix.Open("f", unix.O_WRONLY|unix.O_CLOEXEC, 0)
					t.OK("open", err)
					err = change(t, fd, text)
					t.OK("close", unix.Close(fd))
					t.OK(name, err)
					Equal(t, "user after", runs(t), strconv.Itoa(alice.UID))
				})
			}})
		}
	}
	return cs
}

// runs runs the program f and returns its output. A busy program (ETXTBSY) is tried
// again: another case that starts a process has this case's descriptors for a moment.
func runs(t *T) string {
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		var out, failed bytes.Buffer
		cmd := exec.Command("./f", "-u")
		cmd.Stdout, cmd.Stderr = &out, &failed
		err := cmd.Run()
		if errors.Is(err, unix.ETXTBSY) && time.Now().Before(end) {
			continue
		}
		t.OK("exec: "+failed.String(), err)
		return strings.TrimSpace(out.String())
	}
}
