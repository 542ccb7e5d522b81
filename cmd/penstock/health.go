package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// Exit statuses of `penstock health`, by the convention of monitoring plugins.
const (
	healthWarning  = 1
	healthCritical = 2
	healthUnknown  = 3
)

// asMonitors marks a command with the exit statuses above. With the value alwaysMonitors the
// command always uses the statuses; with the name of a flag as the value, only with that flag.
const (
	asMonitors     = "penstock.io/monitors"
	alwaysMonitors = "yes"
)

// forMonitors reports whether a command uses the exit statuses of monitors.
func forMonitors(cmd *cobra.Command) bool {
	mark := cmd.Annotations[asMonitors]
	return mark == alwaysMonitors || mark != "" && cmd.Flags().Changed(mark)
}

func newHealth() *cobra.Command {
	var w where
	var out output
	var asJSON bool
	var process string
	var which judgement
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Show the problems of the cluster, and the next steps",
		Long: `Asks every metadata server, and prints the problems of the cluster, the most urgent
first, each with the next step: servers that do not answer, nodes that are away, failed
or full disks, chunks without their replicas, volumes near their quota, mirrors and
followers that are behind, certificates that end soon, etcd's size and alarms, and
clients that were cut off.

The exit status is the usual status for monitors: 0 all is well, 1 a warning, 2 critical
(also if no server answers), 3 the command was called wrongly.

With --process the command asks a single process of this machine, at the process's
--admin address, whether the process can serve: for probes, where no curl is.`,
		Example: `  penstock health
  penstock health --json
  penstock health --process unix:/var/lib/penstock-chunks/admin.sock`,
		Args:        cobra.NoArgs,
		Annotations: map[string]string{asMonitors: alwaysMonitors},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				out.format = "json"
			}
			if process != "" {
				if err := askReady(cmd.Context(), process); err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), "ok")
				return nil
			}
			h, err := w.health(cmd.Context())
			if err != nil {
				return err
			}
			h = which.of(h)
			if err := out.print(cmd.OutOrStdout(), h, func(t *table) { showHealth(t, &h) }); err != nil {
				return err
			}
			return healthStatus(&h)
		},
	}
	w.flags(cmd)
	out.flag(cmd)
	which.flag(cmd)
	f := cmd.Flags()
	f.BoolVar(&asJSON, "json", false, "the same as --output json")
	f.StringVar(&process, "process", "", "ask the one process that serves its --admin here, unix:/path or host:port")
	return cmd
}

// judgement selects the problems that a command prints and judges by. `penstock health` and
// `penstock cluster status` use the same selection.
type judgement struct{ forUpgrade bool }

func (j *judgement) flag(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&j.forUpgrade, "for-upgrade", false, "leave out problems that no upgrade has to wait for, such as a nearly full quota: all is well if one server may be stopped")
}

func (j *judgement) of(h penstock.Health) penstock.Health {
	if j.forUpgrade {
		return h.ForUpgrade()
	}
	return h
}

// healthStatus returns the exit status for a cluster's health.
func healthStatus(h *penstock.Health) error {
	switch penstock.Severity(h.Status) {
	case penstock.Critical:
		return &statusError{healthCritical}
	case penstock.Warning:
		return &statusError{healthWarning}
	}
	return nil
}

// health asks the cluster for its health. If no server answers, health returns a critical
// health and no error.
func (w *where) health(ctx context.Context) (h penstock.Health, err error) {
	addrs, creds, err := w.open()
	if meta.KindOf(err) == meta.Unavailable { // no process serves --dir
		return unreachable(w.dir, err), nil
	}
	if err != nil {
		return h, &usageError{err}
	}
	dial, cancel := withinDial(ctx)
	defer cancel()
	if creds.Identity().Role != "" && time.Now().After(creds.RenewAt()) {
		// Best effort: without a valid certificate, Dial below fails.
		_ = admin.Renew(dial, addrs, creds)
	}
	c, err := penstock.Dial(dial, penstock.Config{Meta: addrs, Creds: creds, Name: "penstock health", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return unreachable(strings.Join(addrs, ", "), err), nil
	}
	h, err = c.Health(ctx)
	end, cancel := withinDial(context.WithoutCancel(ctx))
	defer cancel()
	return h, errors.Join(w.advise(err, false), c.Close(end))
}

func unreachable(at string, err error) penstock.Health {
	return penstock.NewHealth(penstock.Problem{Severity: penstock.Critical, Part: "metadata", Object: at, BlocksUpgrade: true,
		Text: "no metadata server answers: " + firstLine(err),
		Next: "see that they run (systemctl status penstock-meta, or their pods), that etcd has a majority, and that this machine reaches them with a certificate that holds"})
}

func showHealth(t *table, h *penstock.Health) {
	t.row(h.Status)
	if h.Cluster != "" {
		t.row(fmt.Sprintf("cluster %s: %d metadata servers, %d chunk servers, %d chunks of open volumes, %s of %s free", h.Cluster, h.MetaServers, h.Nodes, h.Chunks, bytesText(h.Free), bytesText(h.Total)))
	}
	showProblems(t, h.Problems)
}

func showProblems(t *table, problems []penstock.Problem) {
	for _, p := range problems {
		t.row()
		object := p.Part
		if p.Object != "" {
			object += " " + p.Object
		}
		t.row(strings.ToUpper(string(p.Severity)) + "  " + object + ": " + p.Text)
		t.row("  next: " + p.Next)
	}
}

// readyWait bounds the wait for a process's answer.
const readyWait = 5 * time.Second

// askReady asks a process whether it can serve. Errors: a usageError (the address),
// Unavailable.
func askReady(ctx context.Context, address string) error {
	const op = "ask"
	network, host := "tcp", address
	path, unix := strings.CutPrefix(address, "unix:")
	if unix {
		network, host = "unix", path
	} else if _, _, err := net.SplitHostPort(address); err != nil {
		return usagef("--process: %q is neither unix:/path nor host:port", address)
	}
	ctx, cancel := context.WithTimeout(ctx, readyWait)
	defer cancel()
	transport := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, host)
	}}
	rq, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://process/readyz", nil)
	if err != nil {
		return err
	}
	re, err := (&http.Client{Transport: transport}).Do(rq)
	if err != nil {
		return meta.E(op, meta.Unavailable, address, err)
	}
	defer re.Body.Close()
	said, err := io.ReadAll(io.LimitReader(re.Body, 4<<10))
	if err == nil && re.StatusCode != http.StatusOK {
		err = errors.New(strings.TrimSpace(string(said)))
	}
	if err != nil {
		return meta.E(op, meta.Unavailable, address, err)
	}
	return nil
}

// monitorStatus returns the exit status for an error of a command for monitors. A caller
// without the right to ask does not know the state.
func monitorStatus(err error) int {
	var usage *usageError
	if errors.As(err, &usage) || isCobraUsage(err) || meta.KindOf(err) == meta.AccessDenied {
		return healthUnknown
	}
	return healthCritical
}
