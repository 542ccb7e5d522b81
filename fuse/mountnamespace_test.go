package fuse

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta/keep"
)

// The control mount-nonamespace leaves the mount name space to the kernel.
func init() {
	if os.Getenv("PENSTOCK_CONTROL") == "mount-nonamespace" {
		kernel.OpenNamespace = func() error { return nil }
	}
}

// alone takes the copies of other tests' mounts out of a new mount name space, so that the mounts
// of other tests don't live as long as this process.
func alone() error {
	copies, err := mountinfo.GetMounts(func(i *mountinfo.Info) (skip, stop bool) { return !strings.HasPrefix(i.FSType, "fuse"), false })
	for _, m := range copies {
		err = errors.Join(err, unix.Unmount(m.Mountpoint, unix.MNT_DETACH))
	}
	return err
}

// partLone mounts at dir, prints the number of the connection, and serves until stdin ends.
func partLone(dir string) error {
	if err := alone(); err != nil {
		return err
	}
	return loneMount(dir, nil)
}

func loneMount(dir string, put func(*Mount) error) error {
	notifier := NewNotifier()
	m, err := New(context.Background(), Config{Tree: newMemTree(), Notifier: notifier, Logger: slog.New(slog.DiscardHandler), Dir: dir})
	if err != nil {
		return err
	}
	if !m.fs.conn.syncfs {
		return errors.New("it is no block mount: this test proves nothing")
	}
	if put != nil {
		if err := put(m); err != nil {
			return err
		}
	}
	fmt.Println(kernel.ConnectionAt(dir))
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// partLoneHolder is a holder, and the parent of the process that mounts; the child is killed as
// soon as the child serves, so that the holder has the last descriptor of the device.
func partLoneHolder(dir string) error {
	if err := alone(); err != nil {
		return err
	}
	h, err := hold.NewDaemon(hold.Config{Patience: time.Hour, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: dir + ".s", Net: "unixpacket"})
	if err != nil {
		return err
	}
	go func() { _ = h.Serve(context.Background(), l) }()
	serves := exec.Command(os.Args[0], dir)
	serves.Env = append(os.Environ(), partEnv+"=loneHeld")
	in, err := serves.StdinPipe()
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := serves.StdoutPipe()
	if err != nil {
		return err
	}
	if err := serves.Start(); err != nil {
		return err
	}
	connection, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return errors.Join(err, serves.Wait())
	}
	if err := serves.Process.Kill(); err != nil {
		return err
	}
	_ = serves.Wait() // "signal: killed"
	fmt.Print(connection)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// partLoneHeld mounts and gives the mount to the holder.
func partLoneHeld(dir string) error {
	return loneMount(dir, func(m *Mount) error {
		h, err := hold.Dial(dir + ".s")
		if err != nil {
			return err
		}
		device, err := kernel.Dup(m.fs.conn.fd)
		if err != nil {
			return err
		}
		memory, err := keep.New(1 << 20)
		if err != nil {
			return err
		}
		return h.Put(dir, hold.Command{Args: []string{"serve"}}, kernel.ConnectionAt(dir), os.NewFile(uintptr(device), "/dev/fuse"), os.NewFile(uintptr(memory.FD()), "memory"))
	})
}

// TestLastInItsNamespace: a killed process ends even if the process is the last in its mount name
// space, and has the last descriptor of a device whose only mount is in the name space.
func TestLastInItsNamespace(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("a mount name space needs root")
	}
	for _, part := range []string{"lone", "loneHolder"} {
		if !t.Run(part, func(t *testing.T) {
			dir := t.TempDir()
			last := child(t, part, dir)
			last.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
			in, err := last.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer in.Close()
			out, err := last.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := last.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(out).ReadString('\n')
			var connection uint64
			if _, serr := fmt.Sscan(line, &connection); err != nil || serr != nil || connection == 0 {
				t.Fatalf("%q %v %v", line, err, last.Wait())
			}
			if err := last.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() {
				_ = last.Wait() // "signal: killed"
				close(ended)
			}()
			select {
			case <-ended:
				return
			case <-time.After(30 * time.Second):
				t.Error("it does not end, and sync(2) hangs on the whole machine until its connection is aborted")
			}
			abort, err := kernel.OpenAbort(connection)
			if err == nil {
				_, err = abort.WriteString("1")
				abort.Close()
			}
			if err != nil {
				t.Error(err)
			}
			<-ended
		}) {
			return // one hang of the machine is enough
		}
	}
}
