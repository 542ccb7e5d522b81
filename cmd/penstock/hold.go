package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse"
	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/peer"
)

func newHold() *cobra.Command {
	var (
		logs          logFlags
		socket        string
		patience      time.Duration
		settle        time.Duration
		respawn, once bool
		list          bool
	)
	cmd := configurable(&cobra.Command{
		Use:   "hold --socket PATH",
		Short: "Keep mounts alive while their processes are replaced",
		Long: `Keeps mounts alive (mount --hold=PATH) while their processes are killed, upgraded or
restarted: the holder has each mount's connection to the kernel, and memory with the
written bytes that are not committed yet. The holder belongs outside the control group
and the pod of the mounts' processes, and needs no access to the cluster.

If no process serves a mount for --patience, the holder gives the mount up: programs in
the mount get errors, as without a holder. The same happens if all processes end within
--settle, or hang before they serve.

The holder must see the mounts' processes: in a pod, with the machine's name space of
processes (hostPID).

The holder itself may be restarted: the mounts' processes give the next holder all that
the last holder had. Told to end while a mount has no process, the holder goes on for
25 s at most.`,
		Example: `  penstock hold --socket /run/penstock/hold.sock
  penstock hold --socket /run/penstock/hold.sock --list`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if socket == "" {
				return usagef("--socket says where to listen")
			}
			if list {
				return listHeld(cmd.OutOrStdout(), socket)
			}
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			outliveReaders()
			// When memory is short, the kernel should kill the holder last. Without the right
			// to lower the value, the holder keeps the inherited value.
			_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0)
			cfg := hold.Config{Patience: patience, Settle: settle, Respawn: respawn, Once: once, Logger: log}
			if !once {
				cfg.Outlast = holderOutlasts
			}
			h, err := hold.NewDaemon(cfg)
			if err != nil {
				return err
			}
			l, err := listenHold(socket)
			if err != nil {
				return err
			}
			if err := tellSystemd("READY=1"); err != nil {
				return err
			}
			started(log, "hold", "socket", socket)
			return h.Serve(cmd.Context(), l)
		},
	})
	logs.add(cmd)
	f := cmd.Flags()
	f.StringVar(&socket, "socket", "", "the socket at which it listens")
	f.DurationVar(&patience, "patience", 30*time.Second, "how long a mount may be without a process before the holder gives the mount up")
	f.DurationVar(&settle, "settle", 5*time.Second, "least time that a working process serves: after a process that ended sooner, the next process starts later, and --patience goes on")
	f.BoolVar(&respawn, "respawn", false, "start successors itself, as the process before was started")
	f.BoolVar(&once, "once", false, "end with the last mount")
	f.BoolVar(&list, "list", false, "list the mounts of the holder at the socket")
	return cmd
}

// outliveReaders keeps SIGPIPE from ending the process. Otherwise the next log line after the
// end of the log's reader, such as a pipe of the starting terminal, would end the process: a
// holder with its mounts, or a mount and each successor.
func outliveReaders() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }

// tellSystemd sends a message (sd_notify(3)) to the systemd that started this process. If
// NOTIFY_SOCKET is not set (no systemd, or a unit of another type than notify), tellSystemd
// does nothing.
func tellSystemd(message string) error {
	socket := os.Getenv("NOTIFY_SOCKET")
	if socket == "" {
		return nil
	}
	c, err := net.Dial("unixgram", socket)
	if err == nil {
		_, err = c.Write([]byte(message))
		err = errors.Join(err, c.Close())
	}
	if err != nil {
		return meta.E("notify systemd", meta.Unavailable, socket, err)
	}
	return nil
}

// listenHold listens at path. No other process listens at path, and no other user may replace
// the socket in its folder.
func listenHold(path string) (*net.UnixListener, error) {
	if err := ownFolder(filepath.Dir(path)); err != nil {
		return nil, meta.E("hold", meta.KindOf(err), path, err)
	}
	return peer.ListenUnix("unixpacket", path)
}

// ownFolder creates a folder, or checks that an existing folder belongs to this user or root,
// and that other users can't replace files in the folder. Errors: NotPermitted, IO.
func ownFolder(dir string) error {
	const op = "look at folder"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return meta.E(op, meta.IO, dir, err)
	}
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return meta.E(op, meta.IO, dir, err)
	}
	if int(st.Uid) != os.Geteuid() && st.Uid != 0 {
		return meta.E(op, meta.NotPermitted, dir, fmt.Errorf("it belongs to user %d", st.Uid))
	}
	if st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0 {
		return meta.E(op, meta.NotPermitted, dir, fmt.Errorf("others may write to it (mode %#o): chmod go-w, or choose another", st.Mode&0o7777))
	}
	return nil
}

func listHeld(w io.Writer, socket string) error {
	h, err := hold.Dial(socket)
	if err != nil {
		return err
	}
	defer h.Close()
	mounts, err := h.List()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		by := "nobody"
		switch {
		case m.PID != 0:
			by = fmt.Sprint("pid ", m.PID)
		case m.Awaited:
			by = "nobody yet"
		}
		fmt.Fprintf(w, "%s\tserved by %s\ttaken over %d times\n", m.Name, by, max(m.Taken, 0))
	}
	return nil
}

// holderOutlasts is how long a holder runs after SIGTERM while mounts have no server. A
// kubelet waits for 30 s.
const holderOutlasts = 25 * time.Second

// ownHolder is the value of --hold without a socket: a holder for this mount alone.
const ownHolder = "own"

// Values of hold.TakeoverEnv.
const takeoverReplace = "replace"

// holdSocket returns the socket of the holder of the mount at dir. own: the holder serves this
// mount alone.
func (m *mountFlags) holdSocket(dir string) (path string, own bool, err error) {
	if m.hold != ownHolder {
		return m.hold, false, nil
	}
	if dir, err = fuse.MountPath(dir); err != nil {
		return "", false, err
	}
	sum := sha256.Sum256([]byte(dir))
	return filepath.Join(noteDir(), "hold-"+hex.EncodeToString(sum[:8])+".sock"), true, nil
}

// holder connects to the mount's holder. If the mount has its own holder and the holder does
// not run, holder starts the holder. takeover is the value of hold.TakeoverEnv, "" if this
// process does not take over a mount.
func (m *mountFlags) holder(ctx context.Context, dir string) (h *hold.Client, redial func(context.Context) (*hold.Client, error), takeover string, err error) {
	takeover = os.Getenv(hold.TakeoverEnv)
	os.Unsetenv(hold.TakeoverEnv)
	if m.hold == "" {
		return nil, nil, "", nil
	}
	socket, own, err := m.holdSocket(dir)
	if err != nil {
		return nil, nil, "", err
	}
	redial = func(context.Context) (*hold.Client, error) { return hold.Dial(socket) }
	h, err = hold.Dial(socket)
	if !own || err == nil || takeover != "" {
		return h, redial, takeover, err
	}
	if err := spawnHolder(socket); err != nil {
		return nil, nil, "", err
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		h, err = hold.Dial(socket)
		if err == nil || time.Now().After(deadline) || ctx.Err() != nil {
			return h, redial, takeover, err
		}
	}
}

// spawnHolder starts a holder in a session of its own.
func spawnHolder(socket string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.Command(self, "hold", "--socket", socket, "--respawn", "--once")
	cmd.Dir, cmd.Stderr = "/", os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return meta.E("start holder", meta.IO, self, err)
	}
	go cmd.Wait() // reaps a holder that ends first
	return nil
}

// startAgain returns the command line and environment that started this process.
func startAgain() hold.Command {
	path, err := os.Executable()
	if err != nil {
		path = os.Args[0]
	}
	// If a new version replaced the binary, the successor runs the new version.
	path = strings.TrimSuffix(path, " (deleted)")
	dir, err := os.Getwd()
	if err != nil {
		dir = "/"
	}
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, hold.TakeoverEnv+"=") || strings.HasPrefix(v, readyEnv+"=")
	})
	oom := 0
	if b, err := os.ReadFile("/proc/self/oom_score_adj"); err == nil {
		oom, _ = strconv.Atoi(strings.TrimSpace(string(b)))
	}
	return hold.Command{Path: path, Args: slices.Clone(os.Args), Env: env, Dir: dir, OOM: oom}
}

// replaceMount starts this version of the program as the successor of the process that serves
// a mount, with the arguments of that process.
func (m *mountFlags) replaceMount(cmd *cobra.Command) error {
	const op = "replace mount"
	if m.hold == "" {
		m.hold = ownHolder
	}
	socket, _, err := m.holdSocket(m.replace)
	if err != nil {
		return err
	}
	h, err := hold.Dial(socket)
	if err != nil {
		return meta.E(op, meta.NotFound, m.replace, fmt.Errorf("%w: was it mounted with --hold? Say --hold=SOCKET if its holder listens elsewhere", err))
	}
	defer h.Close()
	dir, err := fuse.MountPath(m.replace)
	if err != nil {
		return err
	}
	mounts, err := h.Show(dir)
	if err != nil {
		return err
	}
	if len(mounts) != 1 {
		return meta.E(op, meta.NotFound, dir, errors.New("the holder has no mount at this path"))
	}
	start := mounts[0].Command
	if unit, ok := unitOf(start.Env, mounts[0].PID); ok {
		return meta.E(op, meta.NotPermitted, dir, fmt.Errorf("process %d, which serves it, is of a unit of systemd, which would lose sight of its successor: systemctl reload %s", mounts[0].PID, unit))
	}
	if len(start.Args) == 0 {
		return meta.E(op, meta.NotFound, dir, errors.New("the holder does not know how it was mounted; restart the mount's process"))
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := &exec.Cmd{
		Path: self, Args: start.Args, Dir: start.Dir,
		Env:         append(slices.Clone(start.Env), hold.TakeoverEnv+"="+takeoverReplace, readyEnv+"=3", fmt.Sprint(hold.OOMEnv, "=", start.OOM)),
		SysProcAttr: &syscall.SysProcAttr{Setsid: true},
	}
	if err := startReady(cmd, child); err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s is served by process %d now, it was %d\n", dir, child.Process.Pid, mounts[0].PID)
	return nil
}
