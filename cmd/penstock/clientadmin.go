package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/fuse"
	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/meta"
)

// At its admin socket, a mount lists the written data that is not durable, and discards the
// data on an operator's request.

// unsyncedListed bounds the listed files of a volume.
const unsyncedListed = 100

// unsyncedView describes the data that is not durable of a volume in a mount.
type unsyncedView struct {
	Mount string `json:"mount"`
	penstock.Unsynced
	List []penstock.UnsyncedFile `json:"list,omitempty"`

	socket string // of the mount's process
	hold   string // of the holder, if no process serves the mount
}

// mountRoutes returns the routes of a mount's admin socket besides metrics and health.
func mountRoutes(m *fuse.Mount) map[string]http.HandlerFunc {
	tell := func(w http.ResponseWriter, l []penstock.Unsynced, list bool) {
		views := []unsyncedView{}
		for _, u := range l {
			v := unsyncedView{Mount: m.Dir(), Unsynced: u}
			if list {
				v.List = m.UnsyncedFiles(u.Volume, unsyncedListed)
			}
			views = append(views, v)
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(views) // the caller may be gone
	}
	return map[string]http.HandlerFunc{
		"GET /unsynced": func(w http.ResponseWriter, q *http.Request) { tell(w, m.Unsynced(), q.FormValue("list") != "") },
		"POST /abandon": func(w http.ResponseWriter, _ *http.Request) { tell(w, m.Abandon(), false) },
	}
}

// settling serves the admin socket of an ended mount until its data is durable, so that an
// operator can list and discard the data.
func (m *mountFlags) settling(ctx context.Context, log *slog.Logger, mount *fuse.Mount) {
	port := m.port
	port.routes, port.replace = mountRoutes(mount), true
	if _, _, err := port.serve(ctx, log, mountSocket(), nil, nil); err != nil { // the socket ends with the process
		log.Warn("the socket for 'penstock client' fails: unsynced bytes of this mount can't be listed", "error", err)
	}
}

// mountsHere holds the flags that select mounts of this machine.
type mountsHere struct {
	sockets []string
	state   string
	hold    []string
}

func (h *mountsHere) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVar(&h.sockets, "socket", nil, "admin sockets of mounts that were started with another --admin")
	f.StringVar(&h.state, "state-dir", csiStateDir, "directory of state of the CSI driver, whose mounts are looked at, too")
	f.StringSliceVar(&h.hold, "hold", nil, "sockets of holders: also look at their mounts without a process")
}

// look asks each mount and returns the answers. The error names mounts that did not answer.
func (h *mountsHere) look(ctx context.Context, dirs []string) (l []unsyncedView, err error) {
	sockets := slices.Clone(h.sockets)
	for _, pattern := range []string{filepath.Join(noteDir(), "mount-*.sock"), filepath.Join(h.state, "sockets", "*")} {
		found, _ := filepath.Glob(pattern) // the pattern is well formed
		sockets = append(sockets, found...)
	}
	slices.Sort(sockets)
	var errs []error
	for _, s := range slices.Compact(sockets) {
		var views []unsyncedView
		err := askMount(ctx, s, http.MethodGet, "/unsynced?list=1", &views)
		if err != nil && !errors.Is(err, os.ErrNotExist) && meta.KindOf(err) != meta.NotFound {
			errs = append(errs, err)
		}
		for _, v := range views {
			v.socket = s
			l = append(l, v)
		}
	}
	for _, hold := range h.hold {
		views, err := unsyncedHeld(hold, l)
		l, errs = append(l, views...), append(errs, err)
	}
	if len(dirs) > 0 {
		want := make([]string, len(dirs))
		for i, d := range dirs {
			if want[i], err = fuse.MountPath(d); err != nil {
				return nil, err
			}
			if _, serr := os.Lstat(want[i]); errors.Is(serr, os.ErrNotExist) {
				errs = append(errs, fmt.Errorf("%s: there is no such directory, so nothing is mounted there; 'penstock client unsynced' lists mounts by themselves", d))
			}
		}
		l = slices.DeleteFunc(l, func(v unsyncedView) bool { return !slices.Contains(want, v.Mount) })
	}
	return l, errors.Join(errs...)
}

// unsyncedHeld describes the data of a holder's mounts without a process, except mounts in
// told, whose processes have answered.
func unsyncedHeld(socket string, told []unsyncedView) (l []unsyncedView, err error) {
	h, err := hold.Dial(socket)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	mounts, err := h.List()
	for _, m := range mounts {
		if m.PID != 0 || slices.ContainsFunc(told, func(v unsyncedView) bool { return v.Mount == m.Name }) {
			continue
		}
		files, bytes, uerr := heldUnsynced(h, m.Name, false)
		if meta.KindOf(uerr) != meta.Busy {
			err = errors.Join(err, uerr)
		}
		if bytes > 0 {
			l = append(l, unsyncedView{Mount: m.Name, Unsynced: penstock.Unsynced{Files: files, Bytes: bytes, Why: "nobody serves the mount"}, hold: socket})
		}
	}
	return l, err
}

// heldUnsynced counts the data that a holder has of a mount without a process. With drop,
// heldUnsynced makes the holder drop the mount.
func heldUnsynced(h *hold.Client, name string, drop bool) (files int, bytes int64, err error) {
	device, memory, found, err := h.Take(name, false)
	if err != nil || !found {
		return 0, 0, err
	}
	defer device.Close()
	defer memory.Close()
	if files, bytes, err = hold.Unsynced(memory); err != nil {
		return 0, 0, err
	}
	if drop {
		return files, bytes, h.Drop(name)
	}
	// The end of the connection returns the mount to the holder; the caller looks at other
	// mounts first.
	return files, bytes, nil
}

// askMount sends a request to a mount's process at its socket. Errors: NotFound (no process
// listens), Unavailable (no answer within 10 s), Invalid, Protocol.
func askMount(ctx context.Context, socket, method, what string, into any) error {
	const op, patience = "ask mount", 10 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(socket, "unix:"))
	}}
	q, err := http.NewRequestWithContext(ctx, method, "http://mount"+what, nil)
	if err != nil {
		return meta.E(op, meta.Invalid, socket, err)
	}
	a, err := transport.RoundTrip(q)
	if err != nil && ctx.Err() == nil {
		return meta.E(op, meta.NotFound, socket, err)
	}
	if err != nil {
		return meta.E(op, meta.Unavailable, socket, err)
	}
	defer a.Body.Close()
	if a.StatusCode != http.StatusOK {
		return meta.E(op, meta.NotFound, socket, errors.New(a.Status))
	}
	if err := json.NewDecoder(a.Body).Decode(into); err != nil {
		return meta.E(op, meta.Protocol, socket, err)
	}
	return nil
}

func unsyncedTable(t *table, l []unsyncedView) {
	t.row("MOUNT", "VOLUME", "FILES", "BYTES", "CHANGES", "WAITS FOR")
	for _, v := range l {
		changes := ""
		if v.Changes {
			changes = "yes"
		}
		t.row(v.Mount, v.Name, v.Files, v.Bytes, changes, firstLine(errors.New(v.Why)))
		for _, f := range v.List {
			t.row("", fmt.Sprintf("inode %d", f.Ino), "", f.Bytes, "", "")
		}
		if left := v.Files - len(v.List); left > 0 && len(v.List) > 0 {
			t.row("", fmt.Sprintf("and %d files more", left), "", "", "", "")
		}
	}
}

func newClient() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "client",
		Short: "List or give up bytes of this machine's mounts that are not durable",
		Long: `Bytes that a program wrote through a mount and did not sync become durable a second
later, as long as chunk servers take them. While chunk servers are away, the bytes wait
in the mount's process, and every unmount waits too: umount(8), NodeUnstageVolume of
the CSI driver, a signal. Only 'penstock client abandon' gives the bytes up.`,
		Example: `  penstock client unsynced
  penstock client abandon /mnt/penstock`,
	}
	cmd.AddCommand(newClientUnsynced(), newClientAbandon())
	return cmd
}

func newClientUnsynced() *cobra.Command {
	var here mountsHere
	var out output
	cmd := &cobra.Command{
		Use:   "unsynced [DIR...]",
		Short: "List the bytes of this machine's mounts that are not durable",
		Example: `  penstock client unsynced
  penstock client unsynced /mnt/penstock --output json`,
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := here.look(cmd.Context(), args)
			return errors.Join(out.print(cmd.OutOrStdout(), l, func(t *table) { unsyncedTable(t, l) }), err)
		},
	}
	here.flags(cmd)
	out.flag(cmd)
	return cmd
}

func newClientAbandon() *cobra.Command {
	var here mountsHere
	var yes bool
	cmd := &cobra.Command{
		Use:   "abandon DIR...",
		Short: "Give up written bytes of mounts that are not durable",
		Long: `Makes the process of each mount, or the holder of a mount without a process, give up
written bytes that are not durable. The bytes are lost for good; the files are then as
of their last sync. Do so only if the missing servers will not come back. The command
first lists the bytes; the mount's log has them as an ERROR, and
penstock_client_lost_bytes_total counts them. A program with one of the files open gets
EIO. A mount in use goes on; a mount that waits for its end, ends.`,
		Example: `  penstock client abandon /mnt/penstock
  penstock client abandon /var/lib/kubelet/plugins/kubernetes.io/csi/csi.penstock.io/0123/globalmount --yes`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			l, err := here.look(ctx, args)
			if len(l) == 0 && err == nil {
				cmd.PrintErrln("everything is durable")
				return nil
			}
			if len(l) == 0 {
				return err
			}
			if !yes {
				t := &table{w: newTabs(cmd.ErrOrStderr())}
				unsyncedTable(t, l)
				if err := t.w.Flush(); err != nil {
					return err
				}
				if err := confirm(cmd, "Give this up for good?", "lost"); err != nil {
					return err
				}
			}
			done := map[string]bool{}
			var given []unsyncedView
			var errs []error
			for _, v := range l {
				switch {
				case v.hold != "":
					u, err := abandonHeld(v)
					if err == nil {
						given = append(given, u)
					}
					errs = append(errs, err)
				case !done[v.socket]:
					done[v.socket] = true
					var views []unsyncedView
					errs = append(errs, askMount(ctx, v.socket, http.MethodPost, "/abandon", &views))
					given = append(given, views...)
				}
			}
			for _, g := range given {
				fmt.Fprintf(cmd.OutOrStdout(), "%s: gave up %d bytes of %d files of volume %s\n", g.Mount, g.Bytes, g.Files, g.Name)
			}
			return errors.Join(errs...)
		},
	}
	here.flags(cmd)
	destroying(cmd, &yes)
	return cmd
}

// abandonHeld makes a holder drop a mount without a process.
func abandonHeld(v unsyncedView) (unsyncedView, error) {
	h, err := hold.Dial(v.hold)
	if err != nil {
		return v, err
	}
	defer h.Close()
	v.Files, v.Bytes, err = heldUnsynced(h, v.Mount, true)
	return v, err
}
