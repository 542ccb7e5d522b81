package program

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"penstock.io/penstock/cmd/penstock/spawn"
)

// Rig is a folder in which a test runs penstock processes; they end with the test.
type Rig struct {
	T    testing.TB
	Dir  string   // short: the paths of sockets are bounded
	Addr string   // address of the metadata server; default DIR/m/meta.sock
	Env  []string // more environment of processes and commands, "NAME=value"
}

// NewRig makes a rig. A failed test shows the end of the output of its processes.
func NewRig(t testing.TB, env ...string) *Rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "pr")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("%s", b[max(0, len(b)-12000):])
		}
		os.RemoveAll(dir)
	})
	return &Rig{T: t, Dir: dir, Addr: "unix:" + filepath.Join(dir, "m", "meta.sock"), Env: env}
}

// Run starts penstock with arguments; the test's end kills the process.
func (r *Rig) Run(args ...string) *spawn.Process {
	r.T.Helper()
	cmd := exec.Command(Path, args...)
	cmd.Env = append(os.Environ(), r.Env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	log, err := os.OpenFile(filepath.Join(r.Dir, "log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		r.T.Fatal(err)
	}
	p, err := spawn.Begin(cmd, args[0], log, (*exec.Cmd).Start)
	if err != nil {
		r.T.Fatal(err)
	}
	r.T.Cleanup(func() { p.Kill(); log.Close() })
	return p
}

// Until calls try until a success; the test fails after 90 s.
func (r *Rig) Until(what string, try func() error) {
	r.T.Helper()
	var err error
	for deadline := time.Now().Add(90 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	r.T.Fatalf("%s: %v", what, err)
}

// Ctl runs a penstock command against the cluster and returns the output. A command that
// does not end in five minutes prints its goroutines.
func (r *Rig) Ctl(args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, Path, append(args, "--cluster", r.Addr)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }
	cmd.WaitDelay = 10 * time.Second
	cmd.Env = append(os.Environ(), r.Env...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out.Bytes(), nil
}

// Must is Ctl for commands that must succeed.
func (r *Rig) Must(args ...string) []byte {
	r.T.Helper()
	out, err := r.Ctl(args...)
	if err != nil {
		r.T.Fatal(err)
	}
	return out
}

// Metrics reads the metrics that a process serves on a socket.
func Metrics(socket string) (map[string]float64, error) {
	c := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	re, err := c.Get("http://penstock/metrics")
	if err != nil {
		return nil, err
	}
	defer re.Body.Close()
	all := map[string]float64{}
	lines := bufio.NewScanner(re.Body)
	for lines.Scan() {
		// Labels may contain spaces.
		if i := strings.LastIndexByte(lines.Text(), ' '); i > 0 && !strings.HasPrefix(lines.Text(), "#") {
			if all[lines.Text()[:i]], err = strconv.ParseFloat(lines.Text()[i+1:], 64); err != nil {
				return nil, fmt.Errorf("%s: %w", lines.Text(), err)
			}
		}
	}
	return all, lines.Err()
}
