package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/wire"
)

// metaSocket returns the socket of the metadata server of a data directory.
func metaSocket(dir string) string { return filepath.Join(dir, local.MetaSocket) }

// identityFile marks a folder as a data directory; see package local.
const identityFile = "penstock.json"

// rootNotes is the folder of root's notes; see noteDir. Tests change it.
var rootNotes = "/run/penstock"

// where finds the running system for a command: by --cluster, else --dir, else
// PENSTOCK_CLUSTER, else the only 'penstock up' of this machine.
type where struct {
	credentials
	cluster []string
	dir     string
	now     func() time.Time  // nil: the clock
	opened  *peer.Credentials // the credentials of the last open, for advise
}

func (w *where) flags(cmd *cobra.Command) {
	w.credentials.flags(cmd)
	f := cmd.Flags()
	f.StringSliceVar(&w.cluster, "cluster", nil, "addresses of meta servers: host:port or unix:/path (default $PENSTOCK_CLUSTER)")
	f.StringVar(&w.dir, "dir", "", "data directory of a running 'penstock up' (default: the only one on this machine)")
	if err := cmd.MarkFlagDirname("dir"); err != nil {
		panic(err) // the flag was added the line before
	}
}

// check refuses --cluster together with --dir, and wrong flags of credentials.
func (w *where) check() error {
	if len(w.cluster) > 0 && w.dir != "" {
		return usagef("--cluster and --dir say two places; give one of them")
	}
	return w.credentials.check()
}

// addrs returns the addresses of metadata servers to try.
func (w *where) addrs() ([]string, error) {
	if err := w.check(); err != nil {
		return nil, err
	}
	switch {
	case len(w.cluster) > 0:
		return w.cluster, nil
	case w.dir != "":
		dir, err := filepath.Abs(w.dir)
		if err != nil {
			return nil, err
		}
		socket := metaSocket(dir)
		// A killed process leaves its socket behind, so connect to find a live server.
		c, err := net.Dial("unix", socket)
		if err != nil {
			return nil, &advisedError{meta.E("connect", meta.Unavailable, w.dir, fmt.Errorf("nothing runs on this data directory: %w", err)),
				"start 'penstock up --dir " + w.dir + "', or say with --cluster where the metadata servers are"}
		}
		c.Close()
		return []string{"unix:" + socket}, nil
	}
	if c := os.Getenv("PENSTOCK_CLUSTER"); c != "" {
		return strings.Split(c, ","), nil
	}
	running, err := runningHere()
	if err != nil {
		return nil, err
	}
	switch len(running) {
	case 0:
		return nil, usagef("no 'penstock up' runs on this machine; say where the system is with --dir or --cluster")
	case 1:
		return []string{"unix:" + metaSocket(running[0].Dir)}, nil
	}
	var dirs []string
	for _, r := range running {
		dirs = append(dirs, r.Dir)
	}
	return nil, usagef("several systems run on this machine; choose one with --dir: %s", strings.Join(dirs, ", "))
}

// identity returns the cluster's addresses and the caller's credentials. After half of the
// certificate's life, identity renews the certificate; an administrator's certificate is
// renewed nowhere else.
func (w *where) identity(ctx context.Context) ([]string, *peer.Credentials, error) {
	addrs, creds, err := w.open()
	if err != nil {
		return nil, nil, err
	}
	now := time.Now
	if w.now != nil {
		now = w.now
	}
	if creds.Identity().Role != "" && now().After(creds.RenewAt()) {
		// A failed renewal is ignored while the certificate is valid. For an expired
		// certificate, return a clear error here: a server only answers "bad certificate".
		renewing, cancel := withinDial(ctx)
		defer cancel()
		err := admin.Renew(renewing, addrs, creds)
		if end := creds.Identity().Expires; err != nil && now().After(end) {
			return nil, nil, fmt.Errorf("the certificate in %s ended at %s, and only one that holds is renewed; join again with a token from 'penstock cluster join-token --role %s': %w",
				creds.Dir(), end.Format(time.DateTime), creds.Identity().Role, err)
		}
	}
	return addrs, creds, nil
}

// dialTimeout bounds a command's wait for a metadata server's answer to a connection.
const dialTimeout = 5 * time.Second

// withinDial bounds a wait by dialTimeout. The error of the end is for the user.
func withinDial(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, dialTimeout, fmt.Errorf("no answer within %v", dialTimeout))
}

// answerTimeout bounds the wait for answers that a healthy server gives at once.
const answerTimeout = 30 * time.Second

// dial opens a session for administration. The caller closes the session.
func (w *where) dial(ctx context.Context) (*client.Session, error) {
	addrs, creds, err := w.identity(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := withinDial(ctx)
	defer cancel()
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	role := wire.RoleAdmin
	if creds.Identity().Role == peer.Client {
		role = wire.RoleClient // a client may administer volumes
	}
	s, err := client.Dial(ctx, client.Config{
		Addrs: addrs, Creds: creds, Role: role, Handler: cacheless{}, AnswerWait: answerTimeout,
		Name: fmt.Sprintf("%s: %s %d", host, filepath.Base(os.Args[0]), os.Getpid()),
	})
	if err != nil {
		return nil, w.advise(fmt.Errorf("no answer from %s: %w", strings.Join(addrs, ", "), err), true)
	}
	return s, nil
}

// api runs work with a client of the administrative API. The client waits dialTimeout for a
// server, and answerTimeout for an answer to a request that changes nothing.
func (w *where) api(ctx context.Context, work func(*admin.Client) error) error {
	return w.apiKnowing(ctx, nil, work)
}

// apiKnowing is api with a client that also tries the servers that known lists; known may be
// nil.
func (w *where) apiKnowing(ctx context.Context, known func() []string, work func(*admin.Client) error) error {
	addrs, creds, err := w.identity(ctx)
	if err != nil {
		return err
	}
	c, err := admin.New(admin.Config{Addrs: addrs, Known: known, Creds: creds, Reach: dialTimeout, AnswerWait: answerTimeout})
	if err != nil {
		return err
	}
	defer c.Close()
	err = work(c)
	return w.advise(err, admin.IsUnanswered(err))
}

// withAPI combines with and api, for commands that need a session and the API.
func (w *where) withAPI(ctx context.Context, work func(*client.Session, *admin.Client) error) error {
	return w.with(ctx, func(s *client.Session) error {
		known := func() (addrs []string) {
			for _, m := range s.MetaServers() {
				addrs = append(addrs, m.Addr)
			}
			return addrs
		}
		return w.apiKnowing(ctx, known, func(c *admin.Client) error { return work(s, c) })
	})
}

// with runs work in an administrator's session.
func (w *where) with(ctx context.Context, work func(*client.Session) error) error {
	s, err := w.dial(ctx)
	if err != nil {
		return err
	}
	err = w.advise(work(s), false)
	ctx, cancel := withinDial(context.WithoutCancel(ctx))
	defer cancel()
	// All requests have been answered. An error of Close, such as a busy server's silence,
	// says nothing about the requests, and an unclosed session expires by itself.
	_ = s.Close(ctx)
	return err
}

// withOrAlone calls withAPI. If no process serves the data directory of --dir, withOrAlone
// serves the directory during the call, without a mount.
func (w *where) withOrAlone(ctx context.Context, work func(*client.Session, *admin.Client) error) (err error) {
	if w.dir == "" || len(w.cluster) > 0 {
		return w.withAPI(ctx, work)
	}
	if _, err := w.addrs(); meta.KindOf(err) != meta.Unavailable {
		return w.withAPI(ctx, work)
	}
	if _, err := os.Stat(filepath.Join(w.dir, identityFile)); err != nil {
		return fmt.Errorf("%s is no data directory: %w", w.dir, err)
	}
	system, err := local.Up(ctx, local.Config{Dir: w.dir, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		err = errors.Join(err, system.Close(end))
	}()
	return w.withAPI(ctx, work)
}

// cacheless answers recalls at once: administrators cache nothing.
type cacheless struct{}

func (cacheless) Granted(meta.VolumeID, meta.Grant) {}
func (cacheless) Recall(_ meta.Recall, done func()) { done() }
func (cacheless) Expired([]meta.VolumeID, error)    {}

// volumeByName finds a volume. Errors: NoSuchVolume.
func volumeByName(ctx context.Context, s *client.Session, name string) (wire.VolumeInfo, error) {
	return s.LookUpVolume(ctx, 0, name)
}

// running is the note of a 'penstock up' for other commands on this machine, in a file named
// after the process id.
type running struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // of the process, clock ticks since boot
	Dir   string `json:"dir"`
	Mount string `json:"mount,omitempty"`
}

// noteDir returns the folder of the notes: a folder for root, and a folder for each other
// user.
func noteDir() string {
	if os.Geteuid() == 0 {
		return rootNotes
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "penstock")
	}
	return filepath.Join(os.TempDir(), fmt.Sprintf("penstock-%d", os.Geteuid()))
}

// leaveNote writes a note that this process serves dir; remove deletes the note. Readers check
// everything in the note.
func leaveNote(dir, mount string) (remove func(), err error) {
	self, err := process.Self()
	if err != nil {
		return nil, err
	}
	note := running{PID: self.PID, Start: self.Start, Dir: dir, Mount: mount}
	b, err := json.Marshal(note)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(noteDir(), 0o700); err != nil {
		return nil, err
	}
	name := filepath.Join(noteDir(), strconv.Itoa(note.PID)+".json")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		return nil, err
	}
	return func() { os.Remove(name) }, nil
}

// runningHere reads the notes of running processes, and removes the notes of ended processes.
func runningHere() ([]running, error) {
	self, err := process.Self()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(noteDir())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var alive []running
	for _, e := range entries {
		name := filepath.Join(noteDir(), e.Name())
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil || int(st.Uid) != os.Geteuid() {
			continue // removed in the meantime, or another user's
		}
		b, err := os.ReadFile(name)
		if err != nil {
			continue // removed in the meantime
		}
		var r running
		if json.Unmarshal(b, &r) != nil || r.PID == 0 || (process.Process{Boot: self.Boot, PIDNS: self.PIDNS, PID: r.PID, Start: r.Start}).Dead(self) {
			os.Remove(name)
			continue
		}
		alive = append(alive, r)
	}
	slices.SortFunc(alive, func(a, b running) int { return strings.Compare(a.Dir, b.Dir) })
	return alive, nil
}
