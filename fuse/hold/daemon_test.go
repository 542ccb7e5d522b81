package hold

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
	"penstock.io/penstock/meta/process"
)

// rig is a holder at a socket; the mounts are pipes and empty memories. A pipe resembles
// /dev/fuse in one way: the writing end reports an error to poll(2) once the other end, the
// "kernel", has closed.
type rig struct {
	*testing.T
	h      *Daemon
	socket string
}

// holds starts a holder.
func holds(t *testing.T, cfg Config, change ...func(*Daemon)) *rig {
	t.Helper()
	cfg.Logger = slog.New(slog.NewTextHandler(t.Output(), nil))
	h, err := NewDaemon(cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range change {
		c(h)
	}
	dir, err := os.MkdirTemp("", "ho")
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t, h, filepath.Join(dir, "s")}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: r.socket, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- h.Serve(t.Context(), l) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
		os.RemoveAll(dir)
	})
	return r
}

func (r *rig) dial() *Client {
	r.Helper()
	h, err := Dial(r.socket)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(h.Close)
	return h
}

// device returns a mount's device, and the kernel's end of the device.
func device(t *testing.T) (dev, kernel *os.File) {
	t.Helper()
	kernel, dev, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kernel.Close(); dev.Close() })
	return dev, kernel
}

// memory returns the memory left by a server.
func memory(t *testing.T, records ...keep.Record) *os.File {
	t.Helper()
	m, err := keep.New(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, r := range records {
		m.Note(r)
	}
	m.Whole()
	f, err := kernel.DupFile(m.FD())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

var someCommand = Command{Args: []string{"serve"}}

func (r *rig) put(h *Client, name string, command Command) (kernel *os.File) {
	r.Helper()
	dev, kernel := device(r.T)
	if err := h.Put(name, command, 0, dev, memory(r.T)); err != nil {
		r.Fatal(err)
	}
	dev.Close()
	return kernel
}

// goes ends the serving process; no process serves then.
func (r *rig) goes(h *Client) {
	r.Helper()
	h.Close()
	looks := r.dial()
	r.until("nobody serves", func() bool {
		return !slices.ContainsFunc(r.list(looks), func(m Mount) bool { return m.PID != 0 })
	})
}

type taken struct {
	device, memory *os.File
	ok             bool
	err            error
}

func (r *rig) take(h *Client, name string, replace bool) chan taken {
	c := make(chan taken, 1)
	go func() {
		var t taken
		t.device, t.memory, t.ok, t.err = h.Take(name, replace)
		c <- t
	}()
	return c
}

// comes waits for a required value.
func comes[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(90 * time.Second):
		t.Fatalf("%s did not come", what)
	}
	return v
}

// stays checks for a while that no value comes.
func stays[T any](t *testing.T, what string, c <-chan T, d time.Duration) {
	t.Helper()
	select {
	case v := <-c:
		t.Fatalf("%s came: %+v", what, v)
	case <-time.After(d):
	}
}

func (t taken) have(tb testing.TB) {
	tb.Helper()
	if t.err != nil || !t.ok {
		tb.Fatalf("not taken: found %v, %v", t.ok, t.err)
	}
	tb.Cleanup(func() { t.device.Close(); t.memory.Close() })
}

func (r *rig) until(what string, ok func() bool) {
	r.Helper()
	for deadline := time.Now().Add(90 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.Fatalf("never: %s", what)
		}
	}
}

func (r *rig) list(h *Client) []Mount {
	r.Helper()
	l, err := h.List()
	if err != nil {
		r.Fatal(err)
	}
	return l
}

func wantKind(t *testing.T, err error, want meta.Kind) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%v, want %v", err, want)
	}
}

// ---- a process serves

// cutOff makes a process that serves /m after the holder is gone.
func (r *rig) cutOff(device, memory *os.File) *Registration {
	old := r.dial()
	old.Close()
	server := NewRegistration(old, RegistrationConfig{
		Command: someCommand, Redial: func(context.Context) (*Client, error) { return Dial(r.socket) }, Logger: r.h.cfg.Logger,
	})
	server.name, server.fds = "/m", [2]*os.File{device, memory}
	go server.watch(old)
	return server
}

// TestLastPutIsAnswered: a daemon that was told to end waits for a serving process, and ends
// after answering the process's put.
func TestLastPutIsAnswered(t *testing.T) {
	for range 20 {
		dir, err := os.MkdirTemp("", "ho")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		h, err := NewDaemon(Config{Outlast: time.Hour, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		r := &rig{t, h, filepath.Join(dir, "s")}
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: r.socket, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- h.Serve(ctx, l) }()
		p, q := r.dial(), r.dial()
		r.put(p, "/m", someCommand)
		r.goes(p)
		took := comes(t, "the mount", r.take(q, "/m", false))
		took.have(t)
		end()
		if err := q.Put("/m", someCommand, 0, took.device, took.memory); err != nil {
			t.Fatal("the daemon took the mount and ended, and its server does not know:", err)
		}
		if err := comes(t, "the daemon's end", ended); err != nil {
			t.Fatal(err)
		}
	}
}

// TestServerComesBackTooLate: a server whose holder was replaced finds the mount given to another
// process. The holder tells the server so, and the server stops serving.
func TestServerComesBackTooLate(t *testing.T) {
	dev, _ := device(t)
	mem := memory(t)
	r := holds(t, Config{})
	r.put(r.dial(), "/m", someCommand)

	server := r.cutOff(dev, mem)
	comes(t, "the loss", server.Lost())
	server.Close()
}

// TestServerComesBack: a server whose holder was replaced gives the next holder the last holder's
// state.
func TestServerComesBack(t *testing.T) {
	dev, _ := device(t)
	mem := memory(t)
	r := holds(t, Config{})
	server := r.cutOff(dev, mem)
	looks := r.dial()
	r.until("held again", func() bool { l := r.list(looks); return len(l) == 1 && l[0].PID == os.Getpid() })
	server.Close()
	r.until("nobody serves", func() bool { return r.list(looks)[0].PID == 0 })
	comes(t, "the mount", r.take(looks, "/m", false)).have(t)
}

// TestPutBesideTaker: while one process takes a mount over, no other process may claim to serve
// the mount.
func TestPutBesideTaker(t *testing.T) {
	r := holds(t, Config{})
	p, q, other := r.dial(), r.dial(), r.dial()
	r.put(p, "/m", someCommand)
	r.goes(p)
	if l := r.list(other); len(l) != 1 || l[0].Awaited {
		t.Errorf("nobody serves it, and nobody comes: %+v", l)
	}
	took := comes(t, "the mount", r.take(q, "/m", false))
	took.have(t)
	if l := r.list(other); len(l) != 1 || !l[0].Awaited || l[0].PID != 0 {
		t.Errorf("somebody is about to serve it: %+v", l)
	}
	dev, _ := device(t)
	wantKind(t, other.Put("/m", someCommand, 0, dev, memory(t)), meta.Busy)
	if err := q.Put("/m", someCommand, 0, took.device, took.memory); err != nil {
		t.Fatal(err)
	}
	wantKind(t, other.Put("/m", someCommand, 0, dev, memory(t)), meta.Busy)
	if l := r.list(other); len(l) != 1 || l[0].Taken != 1 || l[0].Awaited {
		t.Fatalf("%+v", l)
	}
}

// TestTakeDuringTakeover: a process that asks for a mount during a take-over gets the mount from
// the taker, or an error about the serving process.
func TestTakeDuringTakeover(t *testing.T) {
	r := holds(t, Config{})
	p, s, plain, admin := r.dial(), r.dial(), r.dial(), r.dial()
	r.put(p, "/m", someCommand)
	r.goes(p)
	took := comes(t, "the mount", r.take(s, "/m", false))
	took.have(t)
	refused, replaced := r.take(plain, "/m", false), r.take(admin, "/m", true)
	stays(t, "an answer", refused, 50*time.Millisecond)
	stays(t, "an answer", replaced, 50*time.Millisecond)
	if err := s.Put("/m", someCommand, 0, took.device, took.memory); err != nil {
		t.Fatal(err)
	}
	wantKind(t, comes(t, "an answer", refused).err, meta.Busy)
	comes(t, "a yield", s.yield)
	s.Close()
	comes(t, "the mount", replaced).have(t)
}

// TestTakerFails: when a taker fails, the longest waiting process is next.
func TestTakerFails(t *testing.T) {
	r := holds(t, Config{})
	p, s, next := r.dial(), r.dial(), r.dial()
	r.put(p, "/m", someCommand)
	r.goes(p)
	comes(t, "the mount", r.take(s, "/m", false)).have(t)
	got := r.take(next, "/m", false)
	stays(t, "an answer", got, 50*time.Millisecond)
	s.Close()
	comes(t, "the mount", got).have(t)
}

// ---- patience

// TestPatienceCoversTaker: a successor that hangs does not keep users waiting for ever.
func TestPatienceCoversTaker(t *testing.T) {
	number := filepath.Join(t.TempDir(), "abort")
	r := holds(t, Config{Patience: 5 * time.Second}, aborts(number)) // the taker must come within this time
	p, q, looks := r.dial(), r.dial(), r.dial()
	kernel := r.put(p, "/m", someCommand)
	r.goes(p)
	took := comes(t, "the mount", r.take(q, "/m", false))
	took.have(t)
	serving, stop := NewRegistration(q, RegistrationConfig{}).Taking(t.Context())
	defer stop()
	comes(t, "the end of the taker's time", serving.Done())
	r.until("given up", func() bool { return len(r.list(looks)) == 0 })
	took.device.Close()
	if n, err := kernel.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Errorf("the device is held still: %d %v", n, err)
	}
}

// TestAbort: the holder aborts a mount by its number, if the number still belongs to the mount.
func TestAbort(t *testing.T) {
	for _, umounted := range []bool{false, true} {
		name := filepath.Join(t.TempDir(), "abort")
		r := holds(t, Config{Patience: 3 * time.Second}, aborts(name)) // the taker must come within this time
		p, q := r.dial(), r.dial()
		dev, kernel := device(t)
		if err := p.Put("/m", someCommand, 42, dev, memory(t)); err != nil {
			t.Fatal(err)
		}
		r.goes(p)
		// Taken, so that the holder does not see the mount's end before the time is over.
		comes(t, "the mount", r.take(q, "/m", false)).have(t)
		if umounted {
			kernel.Close()
		}
		r.until("given up", func() bool { return len(r.list(r.dial())) == 0 })
		comes(t, "the end of the taker", q.gone)
		r.until("looked", func() bool { _, err := os.Stat(name); return err == nil })
		time.Sleep(50 * time.Millisecond)
		b, err := os.ReadFile(name)
		if want := map[bool]string{false: "42 1", true: "42 "}[umounted]; err != nil || string(b) != want {
			t.Errorf("umounted %v: %q, want %q, %v", umounted, b, want, err)
		}
	}
}

// aborts has a file in place of the kernel's.
func aborts(name string) func(*Daemon) {
	return func(h *Daemon) {
		h.openAbort = func(n uint64) (*os.File, error) {
			f, err := os.Create(name)
			if err == nil {
				fmt.Fprint(f, n, " ")
			}
			return f, err
		}
	}
}

// TestUnmountedWhileNobodyServed: a mount that was unmounted while no process served can still be
// taken: the memory has the written bytes. The taker then has the holder drop the mount.
func TestUnmountedWhileNobodyServed(t *testing.T) {
	r := holds(t, Config{})
	p, q := r.dial(), r.dial()
	kernel := r.put(p, "/m", someCommand)
	r.goes(p)
	kernel.Close()
	comes(t, "the mount", r.take(q, "/m", false)).have(t)
	if err := r.dial().Drop("/m"); err != nil || len(r.list(q)) != 1 {
		t.Fatal("anybody may drop it", err)
	}
	if err := q.Drop("/m"); err != nil || len(r.list(q)) != 0 {
		t.Fatal("it is held still", err)
	}
}

// TestSuccessorsThatEnd: successors that end as soon as they serve are started with pauses, and a
// bounded number of times.
func TestSuccessorsThatEnd(t *testing.T) {
	for _, part := range []string{"holderPut", "holderNever"} {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			notes := filepath.Join(t.TempDir(), "notes")
			r := holds(t, Config{Patience: 3 * time.Second, Settle: time.Hour, Respawn: true})
			p := r.dial()
			r.put(p, "/m", Command{
				Path: os.Args[0], Args: []string{os.Args[0], r.socket}, Dir: "/",
				Env: append(os.Environ(), partEnv+"="+part, notesEnv+"="+notes),
			})
			p.Close()
			began := time.Now()
			looks := r.dial()
			r.until("given up", func() bool { return len(r.list(looks)) == 0 })
			b, _ := os.ReadFile(notes)
			n := strings.Count(string(b), "\n")
			// The pauses are 0, 0.2, 0.4 s and so on; without pauses the holder would start some
			// hundred. Where processors are short, a process that took the mount just before the
			// holder gave up begins the count anew.
			if n < 2 || n > 20 {
				t.Errorf("%d successors in %v", n, time.Since(began))
			}
		})
	}
}

// TestSuccessorsThatSettle: a successor that served for long is followed at once, whatever the
// number of earlier successors.
func TestSuccessorsThatSettle(t *testing.T) {
	notes := filepath.Join(t.TempDir(), "notes")
	r := holds(t, Config{Patience: time.Hour, Settle: time.Millisecond, Respawn: true})
	p := r.dial()
	r.put(p, "/m", Command{
		Path: os.Args[0], Args: []string{os.Args[0], r.socket}, Dir: "/",
		Env: append(os.Environ(), partEnv+"=holderPut", notesEnv+"="+notes),
	})
	time.Sleep(2 * time.Millisecond)
	p.Close()
	r.until("twelve", func() bool {
		b, _ := os.ReadFile(notes)
		return strings.Count(string(b), "\n") >= 12
	})
	r.h.mu.Lock()
	n := r.h.mounts["/m"].respawned
	r.h.mu.Unlock()
	if n > 1 {
		t.Errorf("%d count as failures", n)
	}
}

const notesEnv = "PENSTOCK_HOLD_NOTES"

func init() {
	// A successor takes over and ends; another ends before taking over.
	parts["holderPut"] = func(socket string) error {
		note()
		h, err := Dial(socket)
		if err != nil {
			return err
		}
		dev, mem, ok, err := h.Take("/m", false)
		if err != nil || !ok {
			return fmt.Errorf("found %v, %w", ok, err)
		}
		env := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, TakeoverEnv) })
		err = h.Put("/m", Command{Path: os.Args[0], Args: os.Args, Dir: "/", Env: env}, 0, dev, mem)
		time.Sleep(2 * time.Millisecond)
		return err
	}
	// A successor takes over and serves.
	parts["holderServes"] = func(socket string) error {
		h, err := Dial(socket)
		if err != nil {
			return err
		}
		dev, mem, ok, err := h.Take("/m", false)
		if err != nil || !ok {
			return fmt.Errorf("found %v, %w", ok, err)
		}
		if err := h.Put("/m", someCommand, 0, dev, mem); err != nil {
			return err
		}
		<-h.gone
		return nil
	}
	parts["holderNever"] = func(string) error { note(); return errors.New("no configuration") }
	// Listens, as another user.
	parts["holderStranger"] = func(socket string) error {
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
		if err != nil {
			return err
		}
		if err := os.Chmod(socket, 0o777); err != nil {
			return err
		}
		fmt.Println("listens")
		c, err := l.AcceptUnix()
		if err != nil {
			return err
		}
		p, _, err := readPacket(c)
		if err == nil {
			fmt.Println("told", p.Op)
		}
		return nil
	}
}

func note() {
	f, err := os.OpenFile(os.Getenv(notesEnv), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err == nil {
		fmt.Fprintln(f, os.Getpid())
		f.Close()
	}
}

// TestSuccessorsForWantOfMemory: the kernel spares the holder when memory is short, but not the
// holder's successor processes: a successor gets the value of the previous serving process.
func TestSuccessorsForWantOfMemory(t *testing.T) {
	notes := filepath.Join(t.TempDir(), "notes")
	r := holds(t, Config{Patience: time.Hour, Respawn: true})
	p := r.dial()
	r.put(p, "/m", Command{
		Path: os.Args[0], Args: []string{os.Args[0], r.socket}, Dir: "/", OOM: 123,
		Env: append(os.Environ(), partEnv+"=holderServes", notesEnv+"="+notes),
	})
	p.Close()
	var pid int
	looks := r.dial()
	r.until("served again", func() bool { pid = r.list(looks)[0].PID; return pid != 0 && pid != os.Getpid() })
	defer syscall.Kill(pid, syscall.SIGKILL)
	var score string
	r.until("its score", func() bool {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid))
		score = strings.TrimSpace(string(b))
		return err != nil || score == "123"
	})
	if score != "123" {
		t.Errorf("its score is %q", score)
	}
}

// TestGivenUpIsKept: a mount without a serving process for long is ended for its users. Its
// undurable bytes stay with the holder, for a process that saves the bytes.
func TestGivenUpIsKept(t *testing.T) {
	number := t.TempDir() + "/abort"
	r := holds(t, Config{Patience: 300 * time.Millisecond}, aborts(number))
	p, q := r.dial(), r.dial()
	dev, end := device(t)
	m := memory(t, keep.Record{Kind: keep.Data, N: [6]uint64{1, 5, 0, 4096, keep.Nowhere}}, keep.Record{Kind: keep.Data, N: [6]uint64{1, 5, 4096, 4096, keep.Nowhere}})
	if err := p.Put("/m", someCommand, 42, dev, m); err != nil {
		t.Fatal(err)
	}
	dev.Close()
	r.goes(p)
	r.until("ended for its users", func() bool { _, err := os.Stat(number); return err == nil })
	if n, err := end.Read(make([]byte, 1)); n != 0 {
		t.Errorf("the device is held still: %d %v", n, err)
	}
	time.Sleep(time.Second)
	device, left, found, err := q.Take("/m", false)
	if err != nil || !found {
		t.Fatalf("DATA: the holder gave up what is not durable: %v %v", found, err)
	}
	defer device.Close()
	defer left.Close()
	if !kernel.Ended(int(device.Fd())) {
		t.Error("who takes it takes it for a mount that lives")
	}
	if files, bytes, err := Unsynced(left); files != 1 || bytes != 8192 || err != nil {
		t.Errorf("DATA: the holder has %d files, %d bytes, %v", files, bytes, err)
	}
	time.Sleep(time.Second) // more than the holder's patience
	if err := q.Drop("/m"); err != nil {
		t.Errorf("who sees to it was not left the time: %v", err)
	}
	r.until("dropped", func() bool { return len(r.list(r.dial())) == 0 })
}

// ---- trust

// TestStrangerAtTheSocket: a client sends nothing to a process at a holder's path unless
// the process runs as root or as the client's own user.
func TestStrangerAtTheSocket(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("becoming another user needs root")
	}
	dir, err := os.MkdirTemp("", "ho")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(dir, "s")
	exe := filepath.Join(dir, "exe") // the test's own lies where others may not look
	if err := copyFile(exe, os.Args[0]); err != nil {
		t.Fatal(err)
	}
	cmd := child(t, "holderStranger", socket)
	cmd.Path, cmd.Dir = exe, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len("listens\n"))
	if _, err := io.ReadFull(out, b); err != nil {
		t.Fatal(err)
	}
	h, err := Dial(socket)
	if err == nil {
		h.Close()
	}
	wantKind(t, err, meta.NotPermitted)
	if rest, err := io.ReadAll(out); err != nil || len(rest) > 0 {
		t.Errorf("%q %v", rest, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

func copyFile(to, from string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o755)
}

// socketPair returns a connection without an accepting holder.
func socketPair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	var l [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		l[i] = c.(*net.UnixConn)
		t.Cleanup(func() { c.Close() })
	}
	return l[0], l[1]
}

// TestServerThatCannotBeSeen: a holder that can't see the serving process would not notice the
// process's death.
func TestServerThatCannotBeSeen(t *testing.T) {
	r := holds(t, Config{})
	a, b := socketPair(t)
	r.h.accept(a, 0)
	h, err := greet(b, "pair", answerIn)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	dev, _ := device(t)
	err = h.Put("/m", someCommand, 0, dev, memory(t))
	wantKind(t, err, meta.NotSupported)
	if !strings.Contains(err.Error(), "hostPID") {
		t.Errorf("%v does not say what to do", err)
	}
	_, _, _, err = h.Take("/m", false)
	wantKind(t, err, meta.NotSupported)
}

// ---- sizes

// TestManyMounts: many mounts with large environments are listed; the start of a single
// mount is shown.
func TestManyMounts(t *testing.T) {
	r := holds(t, Config{})
	p := r.dial()
	start := Command{Path: "/bin/x", Args: []string{"x"}, Env: []string{"A=" + strings.Repeat("a", 2000)}, Dir: "/"}
	dev, _ := device(t)
	mem := memory(t)
	const mounts = 400
	name := func(i int) string { return fmt.Sprintf("/m/%s/%04d", strings.Repeat("d", 900), i) }
	for i := range mounts {
		if err := p.Put(name(i), start, 0, dev, mem); err != nil {
			t.Fatal(err)
		}
	}
	l := r.list(r.dial())
	if len(l) != mounts {
		t.Fatalf("%d of %d are listed", len(l), mounts)
	}
	for i, m := range l {
		if m.Name != name(i) || m.PID != os.Getpid() || m.Command.Path != "" {
			t.Fatalf("%d: %+v", i, m)
		}
	}
	shown, err := p.Show(name(7))
	if err != nil || len(shown) != 1 || !slices.Equal(shown[0].Command.Env, start.Env) || shown[0].PID != os.Getpid() {
		t.Fatalf("%+v %v", shown, err)
	}
	if shown, err := p.Show("/none"); err != nil || len(shown) != 0 {
		t.Fatalf("%+v %v", shown, err)
	}
}

// TestLargeEnvironment: an environment of the largest size is kept and shown; for a
// larger one the error gives the reason.
func TestLargeEnvironment(t *testing.T) {
	r := holds(t, Config{})
	p := r.dial()
	env := func(n int) Command {
		return Command{Path: "/bin/x", Args: []string{"x"}, Env: []string{"A=" + strings.Repeat("a", n)}, Dir: "/"}
	}
	long := "/" + strings.Repeat("m", 4000)
	r.put(p, long, env(maxPut-6000))
	l, err := p.Show(long)
	if err != nil || len(l) != 1 || len(l[0].Command.Env[0]) != maxPut-6000+2 {
		t.Fatalf("%d mounts, %v", len(l), err)
	}
	dev, _ := device(t)
	err = p.Put("/m", env(300<<10), 0, dev, memory(t))
	wantKind(t, err, meta.Invalid)
	if !strings.Contains(err.Error(), "environment") {
		t.Errorf("%v does not say what is too large", err)
	}
	r.put(p, "/m", someCommand) // the connection goes on
}

// ---- nobody waits for others

// TestLateAnswer: a late answer is not taken for the answer to the next request.
func TestLateAnswer(t *testing.T) {
	a, b := socketPair(t)
	late := make(chan struct{}, 1) // answers the greeting, then a request for each value
	defer close(late)
	go func() {
		for n := 0; ; n++ {
			p, fds, err := readPacket(a)
			if err != nil {
				return
			}
			closeAll(fds)
			if n > 0 {
				<-late
			}
			self, _ := process.Self()
			_ = writePacket(a, (&packet{Op: p.Op, Process: &self, Mounts: []Mount{{Name: p.Name}}}).encode())
		}
	}()
	h, err := greet(b, "pair", time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	_, err = h.Show("/one")
	wantKind(t, err, meta.Unavailable)
	late <- struct{}{}
	time.Sleep(300 * time.Millisecond)
	if l, err := h.Show("/two"); err == nil {
		t.Fatalf("the answer is %+v", l)
	}
}

// TestNobodyWaitsForOthers: a process without reads delays no other process.
func TestNobodyWaitsForOthers(t *testing.T) {
	r := holds(t, Config{})
	p := r.dial()
	began := time.Now()
	r.put(p, "/m", someCommand)

	// The process asks and never reads: the holder's answers fill the kernel's buffer.
	a, b := socketPair(t)
	r.h.accept(a, os.Getpid())
	show := (&packet{Op: "show", Name: "/large"}).encode()
	r.put(p, "/large", Command{Path: "/", Env: []string{strings.Repeat("x", 200<<10)}})
	for range 40 {
		_ = b.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
		if _, err := b.Write(show); err != nil {
			break
		}
	}
	for range 20 {
		if l := r.list(p); len(l) != 2 {
			t.Fatalf("%+v", l)
		}
	}
	if d := time.Since(began); d > 4*time.Second { // waiting for each of them would take 5 s and more
		t.Errorf("others waited: %v", d)
	}
}

// TestOnce: a separate holder of one mount ends with the mount, but not before the last user is
// gone.
func TestOnce(t *testing.T) {
	dir, err := os.MkdirTemp("", "ho")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	h, err := NewDaemon(Config{Once: true, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(dir, "s"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- h.Serve(t.Context(), l) }()
	r := &rig{t, h, filepath.Join(dir, "s")}
	p := r.dial()
	r.put(p, "/m", someCommand)
	if err := p.Drop("/m"); err != nil {
		t.Fatal(err)
	}
	stays(t, "the end", ended, 200*time.Millisecond)
	r.put(p, "/m", someCommand)
	if err := p.Drop("/m"); err != nil {
		t.Fatal(err)
	}
	p.Close()
	if err := comes(t, "the end", ended); err != nil {
		t.Fatal(err)
	}
}

func FuzzPacket(f *testing.F) {
	self, err := process.Self()
	if err != nil {
		f.Fatal(err)
	}
	for _, p := range []*packet{
		{Op: "hello", Version: 1}, {Op: "hello", Version: 1, Process: &self}, {Op: "put", Name: "/m", Command: &someCommand, Connection: 42},
		{Op: "take", Name: "/m", Replace: true}, {Op: "take", Name: "/m", Found: true}, {Op: "take", Name: "/m", Kind: meta.Busy, Error: "no"},
		{Op: "list", Mounts: []Mount{{Name: "/m", PID: 7, Taken: 2}}, More: true}, {Op: "yield", Name: "/m"},
		{Op: "show", Mounts: []Mount{{Name: "/m", Command: someCommand}}},
	} {
		f.Add(p.encode())
	}
	// Messages of the first version.
	f.Add([]byte(`{"op":"list","mounts":[{"name":"/m","pid":7,"taken":0,"start":{"path":"/p","args":["p"],"env":null,"dir":"/"}}]}`))
	f.Add([]byte(`{"op":"take","name":`))
	h, err := NewDaemon(Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodePacket(b)
		if err != nil {
			if !errors.Is(err, meta.Protocol) {
				t.Fatal(err)
			}
			return
		}
		again, err := decodePacket(p.encode())
		if err != nil || string(again.encode()) != string(p.encode()) {
			t.Fatalf("%s becomes %s: %v", p.encode(), again.encode(), err)
		}
		// Any request without descriptors gets an answer, and the holder holds nothing.
		conn := &connection{pid: 1, queue: make(chan message, 2)}
		h.mu.Lock()
		err = h.answer(conn, p, nil)
		n := len(h.mounts)
		h.mu.Unlock()
		if n != 0 || (err == nil) != (len(conn.queue) == 1) {
			t.Fatalf("%d mounts, %d answers, %v", n, len(conn.queue), err)
		}
	})
}

// TestKilledThatRuns: a killed process with a thread that may still run is not followed by a
// successor yet: the thread may still take a request, and die with the request. Here a tracer
// stops the thread at its exit.
func TestKilledThatRuns(t *testing.T) {
	for _, most := range []time.Duration{time.Hour, time.Millisecond} {
		t.Run(most.String(), func(t *testing.T) {
			r := holds(t, Config{Patience: time.Hour}, func(h *Daemon) { h.dyingMost = most })
			first := r.dial()
			r.put(first, "/m", someCommand)
			r.goes(first)
			cmd := child(t, "holderServes", r.socket)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			pid := cmd.Process.Pid
			looks := r.dial()
			r.until("it serves", func() bool { return r.list(looks)[0].PID == pid })
			let := traceExit(t, pid)
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			r.until("it is dying", func() bool { return kernel.Dying(pid) })
			next := r.take(r.dial(), "/m", true)
			if most == time.Hour {
				stays(t, "a successor beside it", next, 1500*time.Millisecond)
				let()
			}
			comes(t, "the successor", next).have(t)
			let()
			_ = cmd.Wait()
		})
	}
}

// traceExit stops a thread of a process, other than its first thread, at its exit until
// let is called.
func traceExit(t *testing.T, pid int) (let func()) {
	const seize, traceExits = 0x4206, 0x40
	traced, over := make(chan error), make(chan struct{})
	let = sync.OnceFunc(func() { close(over) })
	t.Cleanup(let)
	go func() { // the tracer is this goroutine's thread, which ends with let
		runtime.LockOSThread() // and never unlocked: the thread goes with the goroutine
		all, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
		tid := 0
		for _, name := range all {
			if n, aerr := strconv.Atoi(filepath.Base(name)); aerr == nil && n != pid {
				tid = n
			}
		}
		if err == nil && tid == 0 {
			err = errors.New("it has one thread")
		}
		if err == nil {
			if _, _, errno := unix.RawSyscall6(unix.SYS_PTRACE, seize, uintptr(tid), 0, traceExits, 0, 0); errno != 0 {
				err = errno
			}
		}
		traced <- err
		<-over
		for err == nil { // also reaps the thread: otherwise the process stays
			var how unix.WaitStatus
			if _, err = unix.Wait4(tid, &how, unix.WALL, nil); err == unix.EINTR {
				err = nil
			} else if err == nil {
				if how.Exited() || how.Signaled() {
					return
				}
				err = unix.PtraceCont(tid, 0)
			}
		}
	}()
	if err := <-traced; err != nil {
		t.Fatal(err)
	}
	return let
}
