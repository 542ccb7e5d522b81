package fuse

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// stuckFS has one file whose READs are never answered.
type stuckFS struct {
	fuse.RawFileSystem
	reading chan struct{}
}

const stuckNode = 2

func (f *stuckFS) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	f.attr(in.NodeId, &out.Attr)
	return fuse.OK
}

func (f *stuckFS) attr(node uint64, a *fuse.Attr) {
	a.Ino, a.Mode, a.Nlink = node, syscall.S_IFDIR|0o755, 2
	if node == stuckNode {
		a.Mode, a.Size = syscall.S_IFREG|0o644, 4096
	}
}

func (f *stuckFS) Lookup(_ <-chan struct{}, _ *fuse.InHeader, _ string, out *fuse.EntryOut) fuse.Status {
	out.NodeId = stuckNode
	out.SetEntryTimeout(time.Hour)
	out.SetAttrTimeout(time.Hour)
	f.attr(stuckNode, &out.Attr)
	return fuse.OK
}

func (f *stuckFS) Open(<-chan struct{}, *fuse.OpenIn, *fuse.OpenOut) fuse.Status { return fuse.OK }

func (f *stuckFS) Read(<-chan struct{}, *fuse.ReadIn, []byte) (fuse.ReadResult, fuse.Status) {
	close(f.reading)
	select {} // until the process ends
}

// partStuck is a daemon that invalidates a page while the READ that has locked the page waits for
// the daemon. The daemon prints "ready" in that state, which takes 90 s at most.
func partStuck(dir string) error {
	fs := &stuckFS{RawFileSystem: fuse.NewDefaultRawFileSystem(), reading: make(chan struct{})}
	srv, err := fuse.NewServer(fs, dir, &fuse.MountOptions{DirectMountStrict: true, FsName: "stuck", Name: "stuck", MaxBackground: 4})
	if err != nil {
		return err
	}
	go srv.Serve()
	if err := srv.WaitMount(); err != nil {
		return err
	}
	if os.Getenv(watchEnv) != "" {
		m := &Mount{dir: dir, log: slog.New(slog.DiscardHandler)}
		if _, err := m.startWatchdog("/proc/self/exe"); err != nil {
			return err
		}
	}
	fmt.Println("mounted")
	late := time.After(90 * time.Second)
	select {
	case <-fs.reading:
	case <-late:
		return errors.New("nobody reads")
	}
	go srv.InodeNotify(stuckNode, 0, 4096)
	for !waitsInKernel() {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-late:
			return errors.New("no thread waits for the page")
		}
	}
	fmt.Println("ready")
	select {}
}

// waitsInKernel reports whether a thread of this process waits where no signal
// reaches it, at two looks in a row.
func waitsInKernel() bool {
	tasks, _ := filepath.Glob("/proc/self/task/*/stat")
	return slices.ContainsFunc(tasks, func(name string) bool {
		for range 2 {
			b, _ := os.ReadFile(name)
			if !bytes.Contains(b, []byte(") D ")) {
				return false
			}
			time.Sleep(20 * time.Millisecond)
		}
		return true
	})
}

const watchEnv = "PENSTOCK_FUSE_TEST_WATCH"

// A daemon that is killed while a thread waits for a page in the kernel could neither end nor be
// unmounted: the watchdog ends the daemon's connection. Without the watchdog, the daemon stays
// so.
func TestWatchdogEndsAConnectionThatAKillLeaves(t *testing.T) {
	for _, watched := range []bool{true, false} {
		t.Run(fmt.Sprintf("watched=%v", watched), func(t *testing.T) {
			dir := t.TempDir()
			daemon := child(t, "stuck", dir)
			daemon.Env = append(daemon.Env, "GOMAXPROCS=8")
			if watched {
				daemon.Env = append(daemon.Env, watchEnv+"=1")
			}
			out, err := daemon.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			daemon.Stderr = os.Stderr
			if err := daemon.Start(); err != nil {
				t.Fatal(err)
			}
			expectLine(t, out, "mounted")
			t.Cleanup(func() {
				_ = unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH)
			})
			reader := exec.Command("dd", "if="+filepath.Join(dir, "file"), "of=/dev/null", "bs=4096", "count=1", "status=none")
			if err := reader.Start(); err != nil {
				t.Fatal(err)
			}
			expectLine(t, out, "ready")
			if err := daemon.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan error, 1)
			go func() { ended <- reader.Wait() }()
			wait := 4 * time.Second // the watchdog needs 1.5
			if watched {
				wait = time.Minute
			}
			select {
			case err := <-ended:
				if !watched {
					t.Errorf("the read ended without a watchdog (%v): this test proves nothing", err)
				} else if err == nil {
					t.Error("a read that nobody answered succeeded")
				}
			case <-time.After(wait):
				if watched {
					t.Error("the read still hangs")
				}
				if err := unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH); err != nil {
					t.Error(err)
				}
				<-ended
			}
			_ = daemon.Wait() // "signal: killed"
		})
	}
}

func expectLine(t *testing.T, r io.Reader, want string) {
	t.Helper()
	b := make([]byte, len(want)+1)
	if _, err := io.ReadFull(r, b); err != nil || strings.TrimSpace(string(b)) != want {
		t.Fatalf("%q %v, want %q", b, err, want)
	}
}

// The watchdog of a mount ends with the mount.
func TestWatchdogEndsWithTheMount(t *testing.T) {
	m := mount(t, Options{Watchdog: "/proc/self/exe"}, nil)
	children := watchdogs(t)
	if len(children) != 1 {
		t.Fatalf("watchdogs: %v", children)
	}
	if err := m.Unmount(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-m.Done()
	if left := watchdogs(t); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

func watchdogs(t *testing.T) (found []string) {
	t.Helper()
	list, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range list {
		b, err := os.ReadFile(name)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		for _, pid := range strings.Fields(string(b)) {
			line, _ := os.ReadFile("/proc/" + pid + "/cmdline")
			if strings.HasPrefix(string(line), WatchdogName) {
				found = append(found, pid)
			}
		}
	}
	return found
}
