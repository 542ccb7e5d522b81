package posix

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
	"penstock.io/penstock/test/program"
)

// binary builds penstock once for all tests.
var binary = sync.OnceValues(func() (string, error) {
	if p, err := program.Given(); p != "" || err != nil {
		return p, err
	}
	path := filepath.Join(scratchDir, "penstock")
	return path, program.Build(path, "penstock.io/penstock/cmd/penstock")
})

// scratchDir is the directory for all files that the tests make. Its path is short: the
// path of a socket has at most 107 bytes.
var scratchDir string

// cluster is a penstock of one machine with any number of mounts.
type cluster struct {
	dir   string
	mount string // the mount that penstock up serves
	log   *os.File
}

// startCluster starts a cluster for one test.
func startCluster(t *testing.T) *cluster {
	t.Helper()
	bin, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	base, err := os.MkdirTemp(scratchDir, "c")
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{dir: filepath.Join(base, "d"), mount: filepath.Join(base, "m")}
	for _, d := range []string{base, c.mount} {
		if err := errors.Join(os.MkdirAll(d, 0o755), os.Chmod(d, 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	if c.log, err = os.Create(filepath.Join(base, "log")); err != nil {
		t.Fatal(err)
	}
	p, err := spawn.Start(t.Context(), spawn.Config{Binary: bin, Dir: c.dir, Mount: c.mount, Log: c.log, Args: []string{"--suid", "--dev"}})
	if err != nil {
		t.Fatalf("penstock up: %v\n%s", err, c.tail())
	}
	t.Cleanup(func() {
		if err := p.Stop(time.Minute); err != nil {
			t.Errorf("stopping penstock: %v", err)
		}
		if err := p.End(); err != nil {
			t.Errorf("ending penstock: %v", err)
		}
		if t.Failed() {
			t.Logf("end of penstock's log:\n%s", c.tail())
		}
		c.log.Close()
		if err := os.RemoveAll(base); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { c.fsck(t) })
	return c
}

// fsck demands that the cluster is consistent after the test.
func (c *cluster) fsck(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	bin, err := binary()
	if err != nil {
		t.Error(err)
		return
	}
	if out, err := exec.CommandContext(ctx, bin, "fsck", "--dir", c.dir).CombinedOutput(); err != nil {
		t.Errorf("penstock fsck: %v\n%s", err, out)
	}
}

// tail returns the end of penstock's log; if the log ends in a panic, all of the panic.
func (c *cluster) tail() string {
	b, err := os.ReadFile(c.log.Name())
	if err != nil {
		return err.Error()
	}
	if at := bytes.Index(b, []byte("\npanic: ")); at >= 0 {
		return string(b[at:min(len(b), at+10000)])
	}
	return string(b[max(0, len(b)-4000):])
}

// mountAgain mounts the cluster's tree a second time, from a separate process.
func (c *cluster) mountAgain(t *testing.T) string {
	t.Helper()
	bin, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	at := c.mount + "2"
	if err := os.Mkdir(at, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "mount", "--dir", c.dir, "-o", "suid,dev", "/", at)
	cmd.Stdout, cmd.Stderr = c.log, c.log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // the process may have ended already
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("penstock mount: %v", err)
			}
		case <-time.After(90 * time.Second):
			_ = cmd.Process.Kill() // the same
			t.Errorf("penstock mount did not stop within 90 s")
		}
		if err := spawn.Unmount(at); err != nil {
			t.Error(err)
		}
	})
	for deadline := time.Now().Add(90 * time.Second); !spawn.Mounted(at); time.Sleep(5 * time.Millisecond) {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("penstock mount ended: %v\n%s", err, c.tail())
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("penstock mount does not serve after 90 s\n%s", c.tail())
		}
	}
	return at
}

// startMount starts a cluster and returns its mount.
func startMount(t *testing.T) string {
	t.Helper()
	return startCluster(t).mount
}

// subject returns the directory that a test works in: a fresh directory below -dir, or
// without -dir below a mount.
func subject(t *testing.T) string {
	t.Helper()
	base := *dirFlag
	if base == "" {
		base = startMount(t)
	}
	dir, err := os.MkdirTemp(base, "posix-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Errorf("removing everything afterwards: %v", err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}
