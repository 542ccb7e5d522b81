package main

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

func newSnapshot() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "snapshot",
		Short: "Take, list, delete and compare snapshots of a volume, and roll back to a snapshot",
		Long: `A snapshot keeps a volume as of one moment. Taking a snapshot takes a moment whatever
the size of the volume; afterwards the snapshot keeps only the bytes that have changed
since. Bytes for which write() had returned are in the snapshot and durable; bytes in
memory maps are in the snapshot as far as they were flushed.`,
	}
	cmd.AddCommand(newSnapshotCreate(), newSnapshotList(), newSnapshotShow(), newSnapshotUsage(), newSnapshotDelete(), newSnapshotDiff(), newSnapshotRollback(), newSnapshotSchedule(), newSnapshotGroup())
	return cmd
}

// withVolume runs fn with a session and a volume.
func (w *where) withVolume(ctx context.Context, name string, fn func(s *client.Session, v wire.VolumeInfo) error) error {
	return w.with(ctx, func(s *client.Session) error {
		v, err := volumeByName(ctx, s, name)
		if err != nil {
			return err
		}
		return adviseSnapshot(fn(s, v), name)
	})
}

// ofVolume runs fn with the administrative API and the number of a volume, and adds advice to an
// error. A request that is sent again after a rename is still of the same volume.
func (w *where) ofVolume(ctx context.Context, name string, fn func(c *admin.Client, v *admin.VolumeRef) error) error {
	return w.api(ctx, func(c *admin.Client) error {
		v, err := c.FindVolume(ctx, admin.Named(name))
		if err != nil {
			return err
		}
		return adviseSnapshot(fn(c, admin.Numbered(v.ID)), name)
	})
}

// adviseSnapshot adds advice to an error.
func adviseSnapshot(err error, volume string) error {
	switch {
	case errors.Is(err, meta.NoSuchSnapshot):
		return fmt.Errorf("%w; 'penstock snapshot list %s' shows the snapshots", err, volume)
	case errors.Is(err, meta.Busy) && strings.Contains(err.Error(), "pinned by"):
		return fmt.Errorf("%w; 'penstock unpin' releases it", err)
	case errors.Is(err, meta.Exists):
		return fmt.Errorf("%w; choose another name, or delete that one", err)
	}
	return err
}

func newSnapshotCreate() *cobra.Command {
	var w where
	var out output
	var strict bool
	cmd := &cobra.Command{
		Use:   "create VOLUME [NAME]",
		Short: "Take a snapshot; without a name the snapshot is called after the time",
		Long: `Takes a snapshot. Without a name the snapshot is called after the time. Clients first
commit their buffered bytes. If a client can't within a second, its files are in the
snapshot as of their last sync, and the command says so; with --strict the command then
fails and takes no snapshot.`,
		Example: `  penstock snapshot create datasets v3
  penstock snapshot create results --strict --output json`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			name := time.Now().UTC().Format("20060102T150405Z")
			if len(args) > 1 {
				name = args[1]
			}
			return w.ofVolume(cmd.Context(), args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				var taken *admin.Snapshot
				var err error
				if strict {
					taken, err = c.TakeWhole(cmd.Context(), v, name)
				} else {
					taken, err = c.Snapshots.CreateSnapshot(cmd.Context(), &admin.CreateSnapshotRequest{Volume: v, Name: name})
				}
				if err != nil {
					return err
				}
				i := taken.Info()
				if i.Unanswered > 0 {
					fmt.Fprintf(cmd.ErrOrStderr(), "warning: %s\n", unansweredText(&i))
				}
				return out.print(cmd.OutOrStdout(), i, func(t *table) { t.row(i.Name) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	cmd.Flags().BoolVar(&strict, "strict", false, "take no snapshot if a file would be in it only as of its last sync")
	return cmd
}

// unansweredText describes the files that a snapshot has only as last synced.
func unansweredText(i *meta.SnapshotInfo) string {
	return fmt.Sprintf("%d files are in %s only as they were synced last: their clients did not commit within a second what they had buffered (%s)", i.Unanswered, printable(i.Name), printable(strings.Join(i.UnansweredBy, ", ")))
}

// heldText describes the bytes that snapshots hold.
func heldText(n uint64, counted bool) string {
	if counted {
		return "alone hold " + bytesText(n)
	}
	return "hold superseded extents of " + bytesText(n) + "; penstock snapshot usage counts what they alone hold"
}

// failingText says why a schedule's snapshot is missing.
func failingText(f *meta.ScheduleFailing) string {
	return fmt.Sprintf("none could be taken since %s, %d tries: %s", f.Since.Local().Format(time.DateTime), f.Tries, printable(f.Why))
}

func newSnapshotList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:     "list VOLUME",
		Short:   "List a volume's snapshots, oldest first",
		Example: `  penstock snapshot list datasets`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.ofVolume(cmd.Context(), args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				answer, err := c.Snapshots.ListSnapshots(cmd.Context(), &admin.ListSnapshotsRequest{Volume: v, Count: true})
				if err != nil {
					return err
				}
				l := answer.List()
				return out.print(cmd.OutOrStdout(), l, func(t *table) {
					t.row("NAME", "CREATED", "FILES", "SIZE", "STATE", "DIGEST", "PINNED BY")
					for _, i := range l.Snapshots {
						t.row(i.Name, i.Created.Local().Format(time.DateTime), i.Inodes, bytesText(i.Bytes), i.State, shortDigest(&i), holders(i.Pins))
					}
					if len(l.Snapshots) > 0 {
						t.row("snapshots " + heldText(l.Held, l.Counted))
					}
					if l.Quota != nil {
						t.row("in the quota: " + countedText(l.Quota))
					}
					if l.Keep != "" {
						t.row("schedule " + l.Keep)
					}
					if l.Failing != nil {
						t.row(failingText(l.Failing))
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

// shortDigest returns the beginning of a digest, for a table.
func shortDigest(i *meta.SnapshotInfo) string {
	switch {
	case i.Digest == nil && i.DigestError != "":
		return "failed"
	case i.Digest == nil:
		return "-"
	}
	_, digits, _ := strings.Cut(i.Digest.Digest, ":")
	return digits[:min(12, len(digits))]
}

func newSnapshotShow() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:     "show VOLUME NAME",
		Short:   "Show one snapshot: its digest and its pins",
		Example: `  penstock snapshot show datasets v3`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.ofVolume(cmd.Context(), args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				found, err := c.FindSnapshot(cmd.Context(), v, args[1])
				if err != nil {
					return err
				}
				i := found.Info()
				return out.print(cmd.OutOrStdout(), i, func(t *table) {
					t.row("name", i.Name)
					t.row("created", i.Created.Local().Format(time.DateTime))
					t.row("files", i.Inodes)
					t.row("size", bytesText(i.Bytes))
					t.row("state", i.State)
					if i.Unanswered > 0 {
						t.row("not all in", unansweredText(&i))
					}
					if d := i.Digest; d != nil {
						t.row("digest", d.Digest)
						t.row("read for it", bytesText(d.Read)+" of "+bytesText(d.Bytes))
					} else if i.DigestTrying {
						t.row("digest", "is being tried again, failed before: "+printable(i.DigestError))
					} else if i.DigestError != "" {
						t.row("digest", "failed, and is tried again: "+printable(i.DigestError))
					} else {
						t.row("digest", "not computed yet")
					}
					for _, p := range i.Pins {
						t.row("pinned by", printable(p.Holder)+" until "+p.Until.Local().Format(time.DateTime))
					}
					if i.MorePins > 0 {
						t.row("", fmt.Sprintf("and %d more", i.MorePins))
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func newSnapshotUsage() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "usage VOLUME [NAME...]",
		Short: "Count the bytes that only snapshots keep, and the bytes that deleting some would free",
		Long: `Counts, to the byte, the data that the snapshots of a volume keep beside the volume as
it is now. A stored byte counts once, however many snapshots have it, and does not count
if the volume still has it. ALONE is the number of bytes that deleting the snapshot
gives back. With names, the last line has the number for deleting all named snapshots;
the number is more than the sum if they share bytes that no other snapshot has. Bytes
are bytes of files, as a quota counts them: before compression, one replica.

The command looks at everything that changed since the oldest snapshot, which takes some
seconds for a million changes; the volume stays in use. Nothing is changed.`,
		Example: `  penstock snapshot usage results
  penstock snapshot usage results v1 v2 --output json`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.ofVolume(cmd.Context(), args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				answer, err := c.Snapshots.GetSnapshotUsage(cmd.Context(), &admin.GetSnapshotUsageRequest{Volume: v, Delete: args[1:]})
				if err != nil {
					return adviseSnapshot(err, args[0])
				}
				u := answer.Use()
				return out.print(cmd.OutOrStdout(), u, func(t *table) {
					t.row("NAME", "SIZE", "ALONE")
					for _, i := range u.Snapshots {
						t.row(i.Name, bytesText(i.Bytes), bytesText(i.Alone))
					}
					t.row("the volume holds " + bytesText(u.Live))
					t.row("snapshots alone hold " + bytesText(u.Alone))
					if u.Going > 0 {
						t.row("of that is being freed " + bytesText(u.Going))
					}
					if len(args) > 1 {
						t.row("deleting " + strings.Join(args[1:], " ") + " gives back " + bytesText(u.Freed))
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

// snapshotPoll is the interval at which a command checks for the end of a wait.
const snapshotPoll = 100 * time.Millisecond

func newSnapshotDelete() *cobra.Command {
	var w where
	var yes, wait bool
	cmd := &cobra.Command{
		Use:   "delete VOLUME NAME...",
		Short: "Delete snapshots; their bytes are freed in the background",
		Long: `Deletes snapshots for good: from now on they can't be read. Data that only these
snapshots have is freed in the background; --wait waits for the end of this. On a
terminal the command asks; a script gives --yes.`,
		Example: `  penstock snapshot delete datasets v1 v2 --yes`,
		Args:    cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			return w.ofVolume(ctx, args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				if names := args[1:]; !yes {
					word := names[0]
					if len(names) > 1 {
						word = args[0]
					}
					if err := confirm(cmd, fmt.Sprintf("Delete snapshots %s of volume %s for ever?", strings.Join(names, ", "), args[0]), word); err != nil {
						return err
					}
				}
				var gone []uint64
				for _, name := range args[1:] {
					i, err := c.DeleteSnapshot(ctx, v, name, false)
					if err != nil {
						return err
					}
					gone = append(gone, i.Generation)
				}
				for wait {
					l, err := c.Snapshots.ListSnapshots(ctx, &admin.ListSnapshotsRequest{Volume: v})
					if err != nil {
						return err
					}
					wait = slices.ContainsFunc(l.Snapshots, func(i *admin.Snapshot) bool { return slices.Contains(gone, i.Generation) })
					select {
					case <-time.After(snapshotPoll):
					case <-ctx.Done():
						return ctx.Err()
					}
				}
				return nil
			})
		},
	}
	w.flags(cmd)
	destroying(cmd, &yes)
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until all is freed")
	return cmd
}

// changeView is a change in the form that commands print.
type changeView struct {
	Change  string `json:"change" yaml:"change"` // added, removed, renamed, changed
	Path    string `json:"path" yaml:"path"`
	From    string `json:"from,omitempty" yaml:"from,omitempty"`
	Type    string `json:"type" yaml:"type"`
	Content bool   `json:"content,omitempty" yaml:"content,omitempty"`
	// PathBytes is the path in base64, if the path is not UTF-8.
	PathBytes string `json:"path_bytes,omitempty" yaml:"path_bytes,omitempty"`
	FromBytes string `json:"from_bytes,omitempty" yaml:"from_bytes,omitempty"`
}

func viewOfChange(c meta.Change) changeView {
	raw := func(s string) string {
		if utf8.ValidString(s) {
			return ""
		}
		return base64.StdEncoding.EncodeToString([]byte(s))
	}
	v := changeView{Path: c.Path, From: c.From, Content: c.Content, PathBytes: raw(c.Path), FromBytes: raw(c.From)}
	switch c.Kind {
	case meta.PathAdded:
		v.Change = "added"
	case meta.PathRemoved:
		v.Change = "removed"
	case meta.PathRenamed:
		v.Change = "renamed"
	default:
		v.Change = "changed"
	}
	v.Type = "volume"
	if c.Ino != 0 {
		v.Type = typeText(c.Type)
	}
	return v
}

// typeText names the S_IFMT bits of a mode.
func typeText(typ uint32) string {
	switch typ {
	case meta.TypeDir:
		return "directory"
	case meta.TypeRegular:
		return "file"
	case meta.TypeSymlink:
		return "symlink"
	}
	return "special"
}

func newSnapshotDiff() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "diff VOLUME FROM [TO]",
		Short: "List the changes between two snapshots, or since a snapshot",
		Long: `Lists the paths that were added, removed, renamed and changed from one snapshot to a
later snapshot or, without TO, to the volume as committed now. The time grows with the
number of changes. A renamed directory is one line, whatever the size of its tree.`,
		Example: `  penstock snapshot diff datasets v1 v2
  penstock snapshot diff datasets v2 --output json`,
		Args: cobra.RangeArgs(2, 3),
		RunE: func(cmd *cobra.Command, args []string) error {
			to := ""
			if len(args) > 2 {
				to = args[2]
			}
			return w.ofVolume(cmd.Context(), args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				changes := []changeView{}
				if err := c.Diff(cmd.Context(), &admin.DiffSnapshotsRequest{Volume: v, From: args[1], To: to}, func(x meta.Change) error {
					changes = append(changes, viewOfChange(x))
					return nil
				}); err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), changes, func(t *table) {
					for _, c := range changes {
						what := c.Change
						if c.Change == "changed" && !c.Content {
							what = "attributes"
						}
						path := printable(c.Path)
						if c.From != "" {
							path = printable(c.From) + " -> " + path
						}
						t.row(what, c.Type, path)
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

// printable quotes a path with characters that would control the terminal.
func printable(path string) string {
	if q := strconv.Quote(path); q != `"`+path+`"` {
		return q
	}
	return path
}

func newSnapshotRollback() *cobra.Command {
	var w where
	var yes, force bool
	cmd := &cobra.Command{
		Use:   "rollback VOLUME NAME",
		Short: "Bring a volume back to a snapshot; later changes are lost",
		Long: `Brings a volume back to the state of a snapshot. Later writes are lost, unless a later
snapshot has them. No session may be in the volume; --force ends the sessions: their
open files fail, and their unsynced bytes are lost. No session may enter until the
rollback is over. On a terminal the command asks; a script gives --yes.`,
		Example: `  penstock snapshot rollback results before-the-run --yes`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.ofVolume(cmd.Context(), args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				if !yes {
					if err := confirm(cmd, fmt.Sprintf("Go back to snapshot %s? What was written to volume %s since is lost.", args[1], args[0]), args[1]); err != nil {
						return err
					}
				}
				_, err := c.Snapshots.RollBackVolume(cmd.Context(), &admin.RollBackVolumeRequest{Volume: v, Snapshot: args[1], Force: force})
				if errors.Is(err, meta.Busy) && !force {
					return fmt.Errorf("%w; unmount it, or give --force", err)
				}
				return err
			})
		},
	}
	w.flags(cmd)
	destroying(cmd, &yes)
	cmd.Flags().BoolVar(&force, "force", false, "end the sessions in the volume")
	return cmd
}

func newSnapshotSchedule() *cobra.Command {
	var w where
	var keep string
	var none bool
	cmd := &cobra.Command{
		Use:   "schedule VOLUME",
		Short: "Have snapshots taken and deleted by schedule, or show the schedule",
		Long: `Makes the cluster take snapshots by itself. --keep lists periods with intervals:
for each, the first snapshot of every interval is kept for the period. The
shortest interval says how often a snapshot is taken. Periods and intervals are written
like 30m, 24h, 30d, 8w; intervals also as minutely, hourly, daily, weekly, monthly.
Snapshots by schedule are called auto-TIME; others are never touched.`,
		Example: `  penstock snapshot schedule results --keep 24h:hourly,30d:daily
  penstock snapshot schedule results --none`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if none && keep != "" {
				return usagef("--none and --keep exclude each other")
			}
			return w.ofVolume(cmd.Context(), args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				if none || keep != "" {
					_, err := c.Snapshots.SetSchedule(cmd.Context(), &admin.SetScheduleRequest{Volume: v, Keep: keep})
					return err
				}
				l, err := c.Snapshots.ListSnapshots(cmd.Context(), &admin.ListSnapshotsRequest{Volume: v})
				if err == nil {
					fmt.Fprintln(cmd.OutOrStdout(), cmp.Or(l.Keep, "none"))
				}
				return err
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().StringVar(&keep, "keep", "", "the snapshots to keep, such as 24h:hourly,30d:daily")
	cmd.Flags().BoolVar(&none, "none", false, "take no more scheduled snapshots; present snapshots stay")
	return cmd
}
