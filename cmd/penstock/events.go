package main

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
)

// eventView is an event in the form that commands print.
type eventView struct {
	Seq        uint64        `json:"seq"`
	Time       time.Time     `json:"time"`
	Kind       string        `json:"kind"`
	Type       string        `json:"type,omitempty"`
	Ino        meta.Ino      `json:"ino,omitempty"`
	Parent     meta.Ino      `json:"parent,omitempty"`
	Name       string        `json:"name,omitempty"`
	Path       string        `json:"path,omitempty"` // with the current path of the directory
	FromParent meta.Ino      `json:"from_parent,omitempty"`
	From       string        `json:"from,omitempty"`
	FromPath   string        `json:"from_path,omitempty"`
	Replaced   meta.Ino      `json:"replaced,omitempty"`
	Last       bool          `json:"last,omitempty"`
	Volume     meta.VolumeID `json:"volume,omitempty"`
	Snapshot   string        `json:"snapshot,omitempty"`
	Quota      *quotaView    `json:"quota,omitempty"`
	// NameBytes and FromBytes are the names in base64, if a name is not UTF-8.
	NameBytes string `json:"name_bytes,omitempty"`
	FromBytes string `json:"from_bytes,omitempty"`
}

// quotaView is a crossing of an advisory quota.
type quotaView struct {
	Of    string `json:"of"`   // bytes, inodes
	Over  bool   `json:"over"` // the use is now above the quota
	Used  uint64 `json:"used"`
	Limit uint64 `json:"limit,omitempty"` // 0: the quota was removed
}

// rescanView is the JSON line for a RescanError.
type rescanView struct {
	Seq   uint64 `json:"seq"` // continue after this event
	Kind  string `json:"kind"`
	First uint64 `json:"first"` // the oldest event kept
}

func viewOfEvent(e admin.VolumeEvent) eventView {
	raw := func(s string) string {
		if utf8.ValidString(s) {
			return ""
		}
		return base64.StdEncoding.EncodeToString([]byte(s))
	}
	v := eventView{Seq: e.Seq, Time: time.Unix(0, int64(e.Time)).UTC(), Kind: e.Kind.String(), Ino: e.Ino, Parent: e.Parent, Name: e.Name, Path: e.Path,
		FromParent: e.FromParent, From: e.From, FromPath: e.FromPath, Replaced: e.Replaced, Last: e.Last, Volume: e.Volume,
		NameBytes: raw(e.Name), FromBytes: raw(e.From)}
	switch {
	case e.Kind == meta.EventSnapshotTaken || e.Kind == meta.EventSnapshotDeleted:
		v.Name, v.Snapshot = "", e.Name
	case e.Kind == meta.EventQuota:
		v.Name, v.Path, v.Quota = "", "", &quotaView{e.Name, e.Over, e.Used, e.Limit}
	case e.Volume != 0:
		v.Type = "volume"
	case e.Ino != 0:
		v.Type = typeText(e.Type)
	}
	return v
}

func (v *eventView) print(to io.Writer) error {
	or := func(path, name string, dir meta.Ino) string {
		if path == "" && name != "" { // the directory was removed
			return fmt.Sprintf("(%d)/%s", dir, printable(name))
		}
		return printable(path)
	}
	what := or(v.Path, v.Name, v.Parent)
	switch {
	case v.Snapshot != "":
		what = printable(v.Snapshot)
	case v.Quota != nil:
		q := v.Quota
		what = "below"
		if q.Over {
			what = "above"
		}
		what = fmt.Sprintf("%s %s it: %d of %d", q.Of, what, q.Used, q.Limit)
	case v.From != "":
		what = or(v.FromPath, v.From, v.FromParent) + " -> " + what
	case v.Ino == meta.RootIno:
		what = "/"
	case what == "":
		what = fmt.Sprintf("inode %d", v.Ino)
	}
	_, err := fmt.Fprintf(to, "%d %s %s %s %s\n", v.Seq, v.Time.Local().Format("2006-01-02T15:04:05.000"), v.Kind, v.Type, what)
	return err
}

func newEvents() *cobra.Command {
	var w where
	var since string
	var follow, asJSON bool
	cmd := &cobra.Command{
		Use:   "events VOLUME",
		Short: "Tell what changes in a volume: names, contents, snapshots",
		Long: `Prints the events of a volume, each with its number: created, linked, removed,
renamed, exchanged, changed (contents, told when the writer closed the file),
attributes, attached, detached, snapshot-taken, snapshot-deleted, quota (the use
crossed an advisory quota). A volume records events while they are switched on:
'penstock volume set VOLUME --events on'.

The first event printed is the event after number --since, or without --since the oldest
event that is kept; --since now begins with the next event. --follow waits for more
events. A program that was stopped goes on later with the number of the last event that
it handled. If some of the later events are not kept any more, the command says so and
fails, with --json after a line of the kind "rescan": then read the tree again, and go
on after the number in this line.

Paths use the present places of directories, and may differ from the paths at the time
of the event; parent (an inode number) and name are from the time of the event.`,
		Example: `  penstock events datasets
  penstock events datasets --follow --since now
  penstock events datasets --follow --since 4711 --json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			after := uint64(0)
			if since != "" && since != "now" {
				var err error
				if after, err = strconv.ParseUint(since, 10, 64); err != nil {
					return usagef("--since %s: write the number of an event, or now", since)
				}
			}
			// The session learns of servers that --cluster does not name.
			return w.withAPI(ctx, func(_ *client.Session, c *admin.Client) error {
				q := &admin.ReadEventsRequest{Volume: admin.Named(args[0]), Since: after, Oldest: since == ""}
				if since == "now" {
					log, err := c.EventLog(ctx, q.Volume)
					if err != nil {
						return err
					}
					q.Since = log.Last
				}
				out := cmd.OutOrStdout()
				lines := json.NewEncoder(out)
				tell := func(e admin.VolumeEvent) error {
					view := viewOfEvent(e)
					if asJSON {
						return lines.Encode(view)
					}
					return view.print(out)
				}
				err := c.Follow(ctx, q, follow, tell)
				if rescan, ok := errors.AsType[*meta.RescanError](err); ok && asJSON {
					err = errors.Join(err, lines.Encode(rescanView{rescan.Last, "rescan", rescan.First}))
				}
				if follow && ctx.Err() != nil {
					return nil // interrupted by the user
				}
				return err
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().StringVar(&since, "since", "", "number of the last event that is known, or now")
	cmd.Flags().BoolVar(&follow, "follow", false, "wait for more events, until interrupted")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print a JSON object a line")
	return cmd
}

// eventsFlag is the number of events to keep: on, off or a number.
type eventsFlag struct{ keep uint64 }

// Set parses "on", "off" and numbers.
func (e *eventsFlag) Set(text string) error {
	switch text {
	case "on":
		e.keep = meta.DefaultEvents
		return nil
	case "off":
		e.keep = 0
		return nil
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil || n < meta.MinEvents || n > meta.MaxEvents {
		return fmt.Errorf("%q: write on, off, or how many to keep, %d to %d", text, meta.MinEvents, meta.MaxEvents)
	}
	e.keep = n
	return nil
}

func (e *eventsFlag) String() string {
	if e.keep == 0 {
		return "off"
	}
	return fmt.Sprint(e.keep)
}

// Type names the value in help texts.
func (e *eventsFlag) Type() string { return "on|off|number" }

var _ pflag.Value = (*eventsFlag)(nil)
