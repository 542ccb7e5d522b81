package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
)

// span is a flag's duration, which knows days and weeks.
type span time.Duration

func (s *span) Type() string { return "duration" }

func (s *span) String() string {
	d := time.Duration(*s)
	if d > 0 && d%(24*time.Hour) == 0 {
		return fmt.Sprintf("%dd", d/(24*time.Hour))
	}
	return d.String()
}

func (s *span) Set(text string) error {
	for unit, d := range map[string]time.Duration{"d": 24 * time.Hour, "w": 7 * 24 * time.Hour} {
		if n, ok := strings.CutSuffix(text, unit); ok {
			if x, err := strconv.ParseUint(n, 10, 16); err == nil {
				*s = span(time.Duration(x) * d)
				return nil
			}
		}
	}
	d, err := time.ParseDuration(text)
	*s = span(d)
	return err
}

// holders names the holders of a snapshot's pins, for a table.
func holders(pins []meta.PinInfo) string {
	var names []string
	for _, p := range pins {
		names = append(names, printable(p.Holder))
	}
	return strings.Join(names, ", ")
}

// snapshotOf takes VOLUME@SNAPSHOT apart.
func snapshotOf(arg string) (volume, snapshot string, err error) {
	volume, snapshot, ok := strings.Cut(arg, "@")
	if !ok || volume == "" || snapshot == "" {
		return "", "", usagef("%q is no snapshot: write VOLUME@SNAPSHOT, such as datasets@v3", arg)
	}
	return volume, snapshot, nil
}

func newPin() *cobra.Command {
	var w where
	var out output
	var holder string
	ttl := span(7 * 24 * time.Hour)
	cmd := &cobra.Command{
		Use:   "pin VOLUME@SNAPSHOT",
		Short: "Keep a snapshot from being deleted while a run needs it",
		Long: `Pins a snapshot for a holder, such as a training run: until the pin is released
or has run out, neither 'snapshot delete' nor a schedule deletes the snapshot, and
the volume can't be deleted. Pinning again makes a pin last longer, never shorter.
A client that may read the volume may pin. A mount with --pin renews its holder's pin
as long as the mount exists.`,
		Example: `  penstock pin datasets@v3 --holder run-42 --ttl 7d
  penstock pin list datasets`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			volume, snapshot, err := snapshotOf(args[0])
			if err != nil {
				return err
			}
			if holder == "" {
				return usagef("--holder is missing: the name of the pin's holder, such as run-42")
			}
			return w.ofVolume(cmd.Context(), volume, func(c *admin.Client, v *admin.VolumeRef) error {
				made, err := c.Snapshots.PinSnapshot(cmd.Context(), &admin.PinSnapshotRequest{Volume: v, Snapshot: snapshot, Holder: holder, Ttl: durationpb.New(time.Duration(ttl))})
				if err != nil {
					return err
				}
				p := made.Info()
				return out.print(cmd.OutOrStdout(), p, func(t *table) {
					t.row("pinned for " + printable(p.Holder) + " until " + p.Until.Local().Format(time.DateTime))
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	cmd.Flags().StringVar(&holder, "holder", "", "name of the pin's holder, such as run-42")
	cmd.Flags().Var(&ttl, "ttl", "how long the pin lasts unless it is renewed, such as 12h or 7d; at most 366d")
	cmd.AddCommand(newPinList())
	return cmd
}

// pinView is a pin in the form that commands print.
type pinView struct {
	Snapshot     string `json:"snapshot" yaml:"snapshot"`
	meta.PinInfo `yaml:",inline"`
}

func newPinList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:     "list VOLUME",
		Short:   "List the pins of a volume's snapshots",
		Example: `  penstock pin list datasets`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.ofVolume(cmd.Context(), args[0], func(c *admin.Client, v *admin.VolumeRef) error {
				l, err := c.Snapshots.ListSnapshots(cmd.Context(), &admin.ListSnapshotsRequest{Volume: v})
				if err != nil {
					return err
				}
				pins, more := []pinView{}, uint64(0)
				for _, i := range l.Snapshots {
					more += i.MorePins
					for _, p := range i.Pins {
						pins = append(pins, pinView{i.Name, p.Info()})
					}
				}
				return out.print(cmd.OutOrStdout(), pins, func(t *table) {
					t.row("SNAPSHOT", "HOLDER", "UNTIL", "BY")
					for _, p := range pins {
						t.row(p.Snapshot, printable(p.Holder), p.Until.Local().Format(time.DateTime), p.By)
					}
					if more > 0 {
						t.row(fmt.Sprintf("and %d more", more))
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func newUnpin() *cobra.Command {
	var w where
	var holder string
	cmd := &cobra.Command{
		Use:   "unpin VOLUME@SNAPSHOT",
		Short: "Release a pin: the snapshot may be deleted, unless others pinned it",
		Long: `Releases a holder's pin. The maker of the pin may do so, and administrators of the
volume.`,
		Example: `  penstock unpin datasets@v3 --holder run-42`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			volume, snapshot, err := snapshotOf(args[0])
			if err != nil {
				return err
			}
			if holder == "" {
				return usagef("--holder says whose pin is released; 'penstock pin list %s' shows them", volume)
			}
			return w.ofVolume(cmd.Context(), volume, func(c *admin.Client, v *admin.VolumeRef) error {
				answer, err := c.Snapshots.UnpinSnapshot(cmd.Context(), &admin.UnpinSnapshotRequest{Volume: v, Snapshot: snapshot, Holder: holder})
				if err == nil && !answer.Released {
					err = meta.E("unpin snapshot", meta.NotFound, args[0], fmt.Errorf("%s has no pin of it; 'penstock pin list %s' shows the pins", printable(holder), volume))
				}
				return err
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().StringVar(&holder, "holder", "", "whose pin")
	return cmd
}
