package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"log/syslog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/fuse"
	"penstock.io/penstock/meta"
)

// mountFlags are the flags of `penstock mount`.
type mountFlags struct {
	where
	logFlags
	options    []string
	readOnly   bool
	background bool
	logFile    string
	grace      time.Duration
	buffer     int64
	topology   string
	congestion string
	port       adminPort
	pin        string
	pinTTL     span
	hold       string
	replace    string
	digest     string
	noIndex    bool
	indexDir   string
	gateways   local.StreamGateways
}

func newMount() *cobra.Command {
	var m mountFlags
	cmd := configurable(&cobra.Command{
		Use:   "mount [VOLUME[@SNAPSHOT]:]PATH DIR",
		Short: "Mount the tree, or a directory of it, and serve the mount",
		Long: `Mounts a directory of the tree: PATH from the root of the tree, or, after
VOLUME:, from the root of that volume. VOLUME@SNAPSHOT: is a snapshot of the volume,
read-only; a mount of the volume itself shows the volume's snapshots in the directory
.snapshot of its root. DIR must be an empty directory. The command serves until it is
interrupted or DIR is unmounted; with --background it returns when the mount is ready.

Interrupted, the command makes everything durable and unmounts. While DIR is in
use, the command waits for --grace, then unmounts by force; a second signal does so
at once. SIGHUP does the same, except with --hold: the command then leaves the mount
to the holder, and ends with status 75. Start the same command again at once, and
programs that use DIR see a pause.

The binary called as mount.penstock is the helper of mount(8), so that these
work once it is linked to /sbin/mount.penstock:

  mount -t penstock datasets:/images /mnt/images
  mount -t penstock -o remount,ro datasets:/images /mnt/images
  /etc/fstab:  datasets:/images /mnt/images penstock dir=/var/lib/penstock,_netdev 0 0

'mount -o remount' changes ro, rw, and the options from suid to nodiratime below;
of a mount that is not in /etc/fstab mount(8) finds the helper by the kernel's
names of the type: link it to mount.fuse.penstock and mount.fuseblk.penstock, too.
In /etc/fstab the whole tree is root:/.

Options (-o): ro, rw, suid, nosuid (the default), dev, nodev (the default), exec, noexec, symfollow,
nosymfollow, relatime (the default), noatime, atime, diratime, nodiratime, user,
users, owner and group as in mount(8); options without a meaning for this file system
(sync, dirsync, strictatime, mand, iversion, SELinux contexts) are
refused; nonempty, private (no other user may look in), allow_other (for users, with
user_allow_other in /etc/fuse.conf), noblock (mount as plain fuse: then sync(1)
and syncfs(2) do not reach penstock), dir=DIR, cluster=ADDRESS,
credentials=DIR, insecure, log=FILE, pin=HOLDER, digest=DIGEST, noindex and
indexdir=DIR (see --pin, --digest, --no-index, --index-dir), hold or
hold=SOCKET (see --hold), gateway=ADDRESS (for each gateway), gatewayca=FILE,
gatewaycert=FILE, gatewaykey=FILE and gatewaylogin=FILE (see --gateway). For snapshots and immutable volumes:
noopen (the kernel opens nothing, best for small files; the default) or
passthrough (the kernel itself reads files that lie whole in a chunk of this machine).

Without root the mount goes through fusermount3: no set-id programs and no
devices, no passthrough, no syncfs, and only the user who mounted sees the mount.`,
		Example: `  penstock mount / /mnt/penstock
  penstock mount --background --read-only datasets:/images /mnt/images
  penstock mount datasets@v3:/images /mnt/images --pin run-42
  penstock mount --hold=/run/penstock/hold.sock / /mnt/penstock
  penstock mount --replace /mnt/penstock
  umount /mnt/images`,
		Args: cobra.MaximumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if m.replace != "" {
				if len(args) > 0 {
					return usagef("--replace takes the mount point alone: source and options stay as they are")
				}
				return m.replaceMount(cmd)
			}
			if len(args) != 2 {
				return usagef("want a source and a directory")
			}
			if m.background {
				return m.inBackground(cmd, args)
			}
			return m.serve(cmd.Context(), args[0], args[1], cmd.ErrOrStderr())
		},
	})
	m.where.flags(cmd)
	m.logFlags.add(cmd)
	f := cmd.Flags()
	f.StringSliceVarP(&m.options, "options", "o", nil, "options of mount(8), see above")
	f.BoolVar(&m.readOnly, "read-only", false, "mount read-only")
	f.BoolVar(&m.background, "background", false, "return when the mount is there; another process serves the mount")
	f.StringVar(&m.logFile, "log-file", "", "append logs to this file instead of standard error (in the background: instead of syslog)")
	f.DurationVar(&m.grace, "grace", 10*time.Second, "how long a mount in use may go on after a signal")
	f.StringVar(&m.topology, "topology", "", "where this machine stands, /datacenter/rack/node, to read from the nearest replica (default: where a chunk server on it does)")
	f.StringVar(&m.congestion, "tcp-congestion", "", "TCP congestion control of bulk connections, as the kernel calls it (default: cubic, else the machine's)")
	f.StringVar(&m.pin, "pin", "", "keep the mounted snapshot from being deleted, for this holder, as long as the mount lives")
	f.StringVar(&m.digest, "digest", "", "refuse to mount a snapshot unless this is its recorded digest")
	f.BoolVar(&m.noIndex, "no-index", false, "ask metadata servers about a mounted snapshot, rather than its index")
	f.StringVar(&m.indexDir, "index-dir", "", "keep indexes of snapshots here, for all mounts of this machine (default: /var/cache/penstock/indexes, or in the user's cache directory)")
	f.StringVar(&m.hold, "hold", "", "leave the mount to a successor if this process is killed or replaced: a holder has it, which listens at this socket, or a process of the mount's own")
	f.Lookup("hold").NoOptDefVal = ownHolder
	f.StringVar(&m.replace, "replace", "", "directory of a mount with --hold: this version of penstock serves the mount from now on, without unmounting")
	f.StringSliceVar(&m.gateways.Addresses, "gateway", nil, "addresses host:port at which gateways take the records that programs append to streams through in.jsonl (default: the gateways on the list of the metadata servers, see 'penstock gateway list')")
	f.StringVar(&m.gateways.CA, "gateway-ca", "", "file with authorities (PEM) of the gateways' certificates (default: the system's; without this flag, --gateway-cert and --gateway-login the mount logs in with its certificate of the cluster)")
	f.StringVar(&m.gateways.Cert, "gateway-cert", "", "file with the certificate (PEM) that logs the mount in to gateways")
	f.StringVar(&m.gateways.Key, "gateway-key", "", "file with the key of --gateway-cert (PEM)")
	f.StringVar(&m.gateways.Login, "gateway-login", "", "file with NAME:PASSWORD that logs the mount in to gateways")
	m.pinTTL = span(time.Hour)
	f.Var(&m.pinTTL, "pin-ttl", "how long the pin lasts after the mount's last renewal, such as 30m or 7d")
	m.port.flag(cmd, "mount-PID.sock in /run/penstock or the user's runtime directory")
	f.Int64Var(&m.buffer, "write-buffer", 256, "memory for written bytes that are not durable yet, MiB")
	return cmd
}

// readyEnv holds the number of the descriptor on which a background process reports the result
// of mounting to its parent: "ok", or an error text for the user.
const readyEnv = "PENSTOCK_READY_FD"

// backgroundEnv marks a successor of a background process; no flag does.
const backgroundEnv = "PENSTOCK_SERVES_IN_BACKGROUND"

// serve mounts source at dir and serves the mount until its end.
func (m *mountFlags) serve(ctx context.Context, source, dir string, stderr io.Writer) (err error) {
	outliveReaders()
	ready := readyPipe()
	background := ready != nil || os.Getenv(backgroundEnv) != ""
	defer func() {
		if err != nil && ready != nil {
			fmt.Fprint(ready, explain(err))
		}
	}()
	opts, err := m.parse()
	if err != nil {
		return err
	}
	opts.Watchdog = watchdogProgram
	addrs, creds, err := m.open()
	if err != nil {
		return err
	}
	m.gateways.Meta, m.gateways.Creds = addrs, creds
	if err := m.gateways.Open(); err != nil {
		return err
	}
	defer m.gateways.Close() // nothing is under way
	holder, redial, takeover, err := m.holder(ctx, dir)
	if err != nil {
		return err
	}
	log, closeLog, err := m.openLog(stderr, background)
	if err != nil {
		return err
	}
	defer closeLog()
	unsafe, err := local.Controls(os.Getenv(local.ControlVariable), log)
	if err != nil {
		return err
	}
	opts.UnsafeNoDrain, opts.UnsafeLines = unsafe.NoDrain, unsafe.Lines
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	renewing, stop := context.WithCancel(ctx)
	var renewed sync.WaitGroup
	renewed.Go(func() { local.KeepRenewed(renewing, addrs, creds, log) })
	defer renewed.Wait()
	defer stop()
	admit := func(ctx context.Context, root *penstock.Volume) error {
		_, _, snapshot := root.View()
		if snapshot && !m.noIndex {
			if err := root.UseIndex(); err != nil {
				return err
			}
		}
		if m.pin == "" && m.digest == "" {
			return nil
		}
		if !snapshot {
			return usagef("--pin and --digest are about snapshots: the source is VOLUME@SNAPSHOT:PATH")
		}
		var want penstock.Digest
		if m.digest != "" {
			if want, err = parseDigest(m.digest); err != nil {
				return err
			}
		}
		// Pin first: the pin keeps the snapshot while the mount asks for the digest, also for
		// a caller that tries again.
		if m.pin != "" {
			if err := root.Pin(ctx, m.pin, time.Duration(m.pinTTL)); err != nil {
				return err
			}
		}
		if m.digest != "" {
			if err := root.Demand(ctx, want); err != nil {
				return err
			}
		}
		if m.pin != "" {
			renewed.Go(func() { root.KeepPinned(renewing, m.pin, time.Duration(m.pinTTL)) })
		}
		return nil
	}
	stopAdmin := func() {}
	defer func() { stopAdmin() }()
	command := startAgain()
	if background {
		command.Env = append(command.Env, backgroundEnv+"=1")
	}
	ctx, unmount := context.WithCancel(ctx)
	defer unmount()
	leave := make(chan struct{})
	err = fuse.Serve(ctx, fuse.ServeConfig{
		Hold: holder, Redial: redial, Command: command, Must: takeover != "", Replace: takeover == takeoverReplace, Leave: leave,
		Client: penstock.Config{
			Meta: addrs, Name: fmt.Sprintf("%s:%s (pid %d)", host, dir, os.Getpid()),
			IndexDir: m.indexes(), Logger: log, WriteBuffer: m.buffer << 20, Creds: creds, UnsafeNoVerify: unsafe.Store.UnsafeNoVerify, UnsafeNoLaunder: unsafe.NoLaunder, Topology: m.topology, Congestion: m.congestion,
		},
		Source: source, Dir: dir, Options: opts, Streams: local.StreamFiles(&m.gateways), Grace: m.grace, Force: secondSignal(ctx), Admit: admit,
		Settling: func(mount *fuse.Mount) { m.settling(ctx, log, mount) },
		Ready: func(mount *fuse.Mount, c *penstock.Client) {
			hangup(ctx, mount.Held(), leave, unmount)
			// A killed predecessor may not have ended yet, and a predecessor that left the
			// mount may still be listening.
			m.port.replace, m.port.routes = mount.TookOver(), mountRoutes(mount)
			addr, stop, err := m.port.serve(ctx, log, mountSocket(), local.Metrics(nil, nil, &local.Mount{Mount: mount, Client: c, Hold: holder != nil}), nil)
			if err != nil {
				// Programs may already use the mount, so go on without metrics.
				log.Error("the mount goes on without metrics, because its admin endpoint can't be served", "error", err)
			} else {
				stopAdmin = stop
			}
			started(log, "mount", "source", source, "dir", mount.Dir(), "admin", addr)
			if ready != nil {
				fmt.Fprint(ready, readyOK)
				ready.Close()
				ready = nil
				os.Chdir("/") // keeps no file system busy
			}
		},
	})
	if errors.Is(err, fuse.ErrLeft) {
		log.Info("the mount is left to the next process", "dir", dir)
		return &statusError{exitLeft}
	}
	if errors.Is(err, fuse.ErrYielded) {
		log.Info("another process serves the mount from now on", "dir", dir)
		return nil
	}
	return err
}

// indexes returns the folder for indexes of snapshots; "": the mount keeps no indexes.
func (m *mountFlags) indexes() string {
	if m.noIndex || m.indexDir != "" {
		return m.indexDir
	}
	if os.Geteuid() == 0 {
		return "/var/cache/penstock/indexes"
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "" // without a home directory, no indexes
	}
	return filepath.Join(dir, "penstock", "indexes")
}

// watchdogProgram is the binary of this process, even after its file was replaced.
const watchdogProgram = "/proc/self/exe"

const readyOK = "ok"

// readyPipe returns the pipe to a waiting parent, nil without a parent that waits.
func readyPipe() *os.File {
	fd, err := strconv.Atoi(os.Getenv(readyEnv))
	if err != nil {
		return nil
	}
	os.Unsetenv(readyEnv)
	syscall.CloseOnExec(fd)
	return os.NewFile(uintptr(fd), "ready")
}

// hangup handles SIGHUP: a held mount is left to the holder; any other mount is unmounted,
// because the terminal was closed. Without a holder, hangup respects an ignored SIGHUP
// (nohup(1)).
func hangup(ctx context.Context, held bool, leave chan struct{}, unmount func()) {
	if !held && signal.Ignored(syscall.SIGHUP) {
		return
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGHUP)
	go func() { // ends with the command
		select {
		case <-signals:
			if held {
				close(leave)
			} else {
				unmount()
			}
		case <-ctx.Done():
		}
	}()
}

// unitOf returns the systemd unit if process pid, started with env, is the unit's main
// process.
func unitOf(env []string, pid int) (name string, ok bool) {
	main := strconv.Itoa(pid)
	for _, v := range env {
		switch name, value, _ := strings.Cut(v, "="); name {
		case "INVOCATION_ID":
			ok = true
		case "SYSTEMD_EXEC_PID": // a parent's id: a process of the unit started pid
			main = value
		}
	}
	if !ok || main != strconv.Itoa(pid) {
		return "", false
	}
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	for line := range strings.Lines(string(b)) {
		if unit := filepath.Base(strings.TrimSpace(line)); strings.HasSuffix(unit, ".service") {
			return unit, true
		}
	}
	return "UNIT", true
}

// secondSignal is closed at the first signal after ctx has ended.
func secondSignal(ctx context.Context) <-chan struct{} {
	force := make(chan struct{})
	context.AfterFunc(ctx, func() {
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
		<-signals
		close(force)
	})
	return force
}

// openLog chooses where the log goes: a file, standard error, or, in the
// background, syslog.
func (m *mountFlags) openLog(stderr io.Writer, background bool) (*slog.Logger, func(), error) {
	w, done := stderr, func() {}
	switch {
	case m.logFile != "":
		f, err := os.OpenFile(m.logFile, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o640)
		if err != nil {
			return nil, nil, usagef("--log-file: %w", err)
		}
		w, done = f, func() { f.Close() }
	case background:
		if s, err := syslog.New(syslog.LOG_DAEMON|syslog.LOG_INFO, "penstock"); err == nil {
			w, done = s, func() { s.Close() }
		} else {
			w = io.Discard
		}
	}
	log, err := m.logger(w)
	return log, done, err
}

// backgroundTimeout bounds a parent's wait for the mount.
const backgroundTimeout = 60 * time.Second

// inBackground starts this command again in a session of its own, and waits until the new
// process has mounted or reported an error.
func (m *mountFlags) inBackground(cmd *cobra.Command, args []string) error {
	if _, err := m.parse(); err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.Command(self, sameCommand(cmd, args)...)
	child.Env = append(os.Environ(), readyEnv+"=3")
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return startReady(cmd, child)
}

// startReady starts a process that serves a mount, and waits until the process reports success
// or an error on descriptor 3.
func startReady(cmd *cobra.Command, child *exec.Cmd) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	child.ExtraFiles = []*os.File{w}
	if err := child.Start(); err != nil {
		w.Close()
		return err
	}
	w.Close()
	said, timeout := make(chan []byte, 1), time.After(backgroundTimeout)
	go func() {
		b, _ := io.ReadAll(r)
		said <- b
	}()
	select {
	case b := <-said:
		if string(b) == readyOK {
			return nil // the child outlives this process
		}
		werr := child.Wait()
		if len(b) == 0 {
			b = []byte(fmt.Sprintf("it ended without a word: %v", werr))
		}
		fmt.Fprintf(cmd.ErrOrStderr(), "penstock: %s\n", b)
		return &statusError{exitFailed}
	case <-timeout:
		return errors.Join(meta.E("mount", meta.Unavailable, "", fmt.Errorf("no mount after %v", backgroundTimeout)), child.Process.Kill())
	case <-cmd.Context().Done():
		return errors.Join(cmd.Context().Err(), child.Process.Kill())
	}
}

// sameCommand returns the arguments of cmd, with --background=false.
func sameCommand(cmd *cobra.Command, args []string) []string {
	line := []string{cmd.Name()}
	cmd.Flags().Visit(func(f *pflag.Flag) {
		value := f.Value.String()
		if list, ok := f.Value.(pflag.SliceValue); ok {
			value = strings.Join(list.GetSlice(), ",")
		}
		if f.Name != "background" {
			line = append(line, "--"+f.Name+"="+value)
		}
	})
	return append(append(line, "--background=false", "--"), args...)
}
