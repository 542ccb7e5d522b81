package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/peer"
)

func newMirror() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "mirror",
		Short: "Keep read-only copies of volumes, here or in another cluster",
		Long: `A mirror copies the snapshots of a volume, the source, into another volume, its
target: first everything, then what changed. The target may lie in another part of
the topology, or in another cluster. Readers of the target see the last snapshot
that was copied completely and has the same digest as in the source, and move to the
next snapshot at once. Run these commands in the target's cluster. 'penstock up' copies
for its mirrors; in a cluster 'penstock mirror run' does so, on one machine or several.`,
	}
	cmd.AddCommand(newMirrorCreate(), newMirrorList(), newMirrorStatus(), newMirrorSet(), newMirrorPause(), newMirrorResume(), newMirrorSync(),
		newMirrorPromote(), newMirrorResync(), newMirrorDelete(), newMirrorRun())
	return cmd
}

// withMirrors runs work with a client of the target's cluster.
func (w *where) withMirrors(ctx context.Context, work func(*penstock.Client, penstock.Mirrors) error) error {
	addrs, creds, err := w.identity(ctx)
	if err != nil {
		return err
	}
	dial, cancel := withinDial(ctx)
	c, err := penstock.Dial(dial, penstock.Config{Meta: addrs, Creds: creds, Name: "penstock mirror", Logger: slog.New(slog.DiscardHandler)})
	cancel()
	if err != nil {
		return w.advise(fmt.Errorf("no answer from %s: %w", strings.Join(addrs, ", "), err), true)
	}
	m, err := c.Mirrors()
	if err == nil {
		err = work(c, m)
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), dialTimeout)
	defer cancel()
	return errors.Join(w.advise(err, false), c.Close(end))
}

// elsewhere holds the flags that select the source's cluster.
type elsewhere struct {
	meta        []string
	dir         string
	credentials string
	token       string // a file
	name        string
}

func (e *elsewhere) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringSliceVar(&e.meta, "source-cluster", nil, "addresses of the meta servers of the source's cluster (default: the same cluster)")
	f.StringVar(&e.dir, "source-dir", "", "data directory of the 'penstock up' of this machine that has the source")
	f.StringVar(&e.credentials, "source-credentials", "", "directory with a certificate of the source's cluster, on the machine that runs the mirror")
	f.StringVar(&e.token, "source-token-file", "", "file with a join token of the source's cluster: if --source-credentials holds no certificate yet, it gets one")
	f.StringVar(&e.name, "source-name", "", "name to join the source's cluster under (default: mirror- and the machine's)")
	markDirs(cmd, "source-dir", "source-credentials")
}

// join gets a certificate of the source's cluster for a token, unless at.Credentials already
// has a certificate.
func (e *elsewhere) join(ctx context.Context, at meta.MirrorSource) error {
	switch {
	case e.token == "" && e.name == "":
		return nil
	case e.token == "" || len(e.meta) == 0 || at.Credentials == "":
		return usagef("--source-token-file, and --source-name with it, goes with --source-cluster and --source-credentials")
	}
	if have, err := peer.Load(at.Credentials, nil); err == nil {
		if e.name != "" && have.Identity().Name != e.name {
			return usagef("%s holds a certificate of %s already: leave --source-name out, or choose another directory", at.Credentials, have.Identity())
		}
		return nil
	} else if meta.KindOf(err) != meta.NotFound {
		return err
	}
	token, err := os.ReadFile(e.token)
	if err != nil {
		return usagef("--source-token-file: %w", err)
	}
	name := e.name
	if name == "" {
		host, err := os.Hostname()
		if err != nil {
			return usagef("this machine has no name; give --source-name")
		}
		name = "mirror-" + host
	}
	if _, err := client.Join(ctx, e.meta, strings.TrimSpace(string(token)), name, at.Credentials); err != nil {
		return fmt.Errorf("joining the source's cluster at %s: %w", strings.Join(e.meta, ", "), err)
	}
	return nil
}

// at returns the source in the form of the mirror's record.
func (e *elsewhere) at() (meta.MirrorSource, error) {
	at := meta.MirrorSource{Meta: e.meta}
	for _, dir := range []struct{ from, to *string }{{&e.dir, &e.dir}, {&e.credentials, &at.Credentials}} {
		if *dir.from == "" {
			continue
		}
		abs, err := filepath.Abs(*dir.from)
		if err != nil {
			return at, err
		}
		*dir.to = abs
	}
	switch {
	case e.dir != "" && len(e.meta) > 0:
		return at, usagef("--source-cluster and --source-dir say two places; give one of them")
	case e.dir != "":
		at.Meta = []string{"unix:" + metaSocket(e.dir)}
	case at.Credentials != "" && len(e.meta) == 0:
		return at, usagef("--source-credentials are for another cluster: say where it is with --source-cluster")
	}
	return at, nil
}

// sourceClient runs work with a client of the source's cluster; with c if source and target
// have the same cluster.
func sourceClient(ctx context.Context, c *penstock.Client, at meta.MirrorSource, work func(*penstock.Client) error) error {
	if len(at.Meta) == 0 {
		return work(c)
	}
	dial, cancel := withinDial(ctx)
	src, err := local.DialSource(dial, at, slog.New(slog.DiscardHandler))
	cancel()
	if err != nil {
		return fmt.Errorf("the source's cluster at %s: %w", strings.Join(at.Meta, ", "), err)
	}
	err = work(src)
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), dialTimeout)
	defer cancel()
	return errors.Join(err, src.Close(end))
}

func newMirrorCreate() *cobra.Command {
	var w where
	var e elsewhere
	var p policyFlags
	var every span
	var rate sizeFlag
	var keep int
	var attach string
	var parents, force bool
	cmd := &cobra.Command{
		Use:   "create SOURCE TARGET",
		Short: "Make a volume that mirrors another one",
		Long: `Makes volume TARGET, with the policy, trash time and compression of SOURCE as far as
no flag says otherwise, without its quotas and its schedule of snapshots, and with
access times off: after a promotion, set access times as the source has them. Until the first
round is complete the target shows nothing. The snapshot that source and target have in
common is pinned in the source.

If the source is in another cluster with certificates, each machine that runs the mirror
needs a certificate of that cluster in --source-credentials: a certificate of an
administrator, or of a client that was granted the source with the right admin. The
certificate comes from 'penstock cluster join', or from a token given here.`,
		Example: `  penstock mirror create datasets datasets-rack2 --topology /dc1/rack2 --every 1h --attach /mirror/datasets
  penstock mirror create datasets datasets --source-cluster meta.east:7400 --source-credentials /etc/penstock/east --every 15m --rate 200M
  penstock mirror create datasets datasets --source-cluster meta.east:7400 --source-credentials /etc/penstock/east --source-token-file east.token`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			at, err := e.at()
			if err != nil {
				return err
			}
			return w.withMirrors(ctx, func(c *penstock.Client, m penstock.Mirrors) error {
				if err := e.join(ctx, at); err != nil {
					return err
				}
				return sourceClient(ctx, c, at, func(from *penstock.Client) error {
					src, err := from.Volume(ctx, args[0])
					if err != nil {
						return err
					}
					policy := src.Policy()
					policy.NoAtime = true // only the mirror writes to the target
					policy.QuotaBytes, policy.QuotaInodes, policy.Immutable, policy.SealOnClose = 0, 0, false, false
					if len(at.Meta) > 0 { // the places are of the other cluster
						policy.Topology, policy.Class = "", ""
					}
					if _, err := p.change(cmd.Flags(), &policy); err != nil {
						return err
					}
					words, err := p.words(cmd.Flags(), false)
					if err != nil {
						return err
					}
					if err := likeSource(ctx, from, src, &words); err != nil {
						return err
					}
					r, err := m.Create(ctx, penstock.MirrorPlan{Source: src, At: at, Target: args[1], Policy: policy, Force: force, Every: time.Duration(every), Rate: uint64(rate), Keep: keep})
					if err != nil {
						return err
					}
					v, err := c.Volumes()
					if err == nil && !words.Empty() {
						words.Only = []string{}
						if _, err := v.Set(ctx, r.Target, policy, words); err != nil {
							return fmt.Errorf("volume %s was made, but not all that flags say of it is set: %w", args[1], err)
						}
					}
					if attach == "" || err != nil {
						return err
					}
					_, err = v.Attach(ctx, r.Target, attach, parents)
					if err != nil {
						return fmt.Errorf("volume %s was made, but not attached: %w", args[1], err)
					}
					return nil
				})
			})
		},
	}
	w.flags(cmd)
	e.flags(cmd)
	p.add(cmd.Flags())
	mirrorFlags(cmd, &every, &rate, &keep)
	cmd.Flags().StringVar(&attach, "attach", "", "path of the tree where the target hangs")
	cmd.Flags().BoolVar(&parents, "parents", false, "make missing parent directories")
	cmd.Flags().BoolVar(&force, "force", false, "also if nothing in the cluster can meet the target's policy")
	return cmd
}

// likeSource copies the source's trash time and compression to the target's words, unless a
// flag set the word. likeSource copies neither quotas nor advisory quotas, and no schedule of
// snapshots, because a volume that is being filled refuses a schedule.
func likeSource(ctx context.Context, from *penstock.Client, src *penstock.Volume, words *penstock.VolumeWords) error {
	all, err := from.Volumes()
	if err != nil {
		return err
	}
	v, err := all.Find(ctx, src.Name())
	if err != nil {
		return err
	}
	if words.TrashSeconds == nil && v.TrashSeconds != 0 {
		words.TrashSeconds = &v.TrashSeconds
	}
	if words.Compression == nil && v.Compression != "" && v.Compression != meta.CompressNone.String() {
		words.Compression = &v.Compression
	}
	return nil
}

func mirrorFlags(cmd *cobra.Command, every *span, rate *sizeFlag, keep *int) {
	f := cmd.Flags()
	f.Var(every, "every", "how often a round begins, such as 15m or 1d; 0: when 'penstock mirror sync' asks for one")
	f.Var(rate, "rate", "most bytes sent in a second, such as 100M; 0: no limit")
	f.IntVar(keep, "keep", 2, "how many complete snapshots stay in the target")
}

// mirrorView is a mirror in the form that commands print.
type mirrorView struct {
	Target      string `json:"target" yaml:"target"`
	meta.Mirror `yaml:",inline"`
	// LagSeconds is the age of the target's visible state; -1: the target has no state yet.
	LagSeconds int64 `json:"lag_seconds" yaml:"lag_seconds"`
}

func viewMirror(ctx context.Context, c *penstock.Client, r meta.Mirror) mirrorView {
	v := mirrorView{Target: fmt.Sprint(r.Target), Mirror: r, LagSeconds: -1}
	if t, err := c.VolumeByID(ctx, r.Target); err == nil {
		v.Target = t.Name()
	}
	if r.Last != nil {
		v.LagSeconds = int64(time.Since(r.Last.Taken) / time.Second)
	}
	return v
}

func (v *mirrorView) lag() string {
	if v.LagSeconds < 0 {
		return "nothing copied yet"
	}
	return (time.Duration(v.LagSeconds) * time.Second).String()
}

// doing returns the mirror's activity, in a word or two.
func (v *mirrorView) doing() string {
	switch n := v.Round; {
	case v.Mirror.State != meta.MirrorRunning:
		return string(v.Mirror.State)
	case v.Error != "":
		return "failing"
	case n == nil:
		return "idle"
	case !n.Copied.IsZero():
		return "checking"
	}
	return "copying"
}

func (v *mirrorView) source() string {
	if len(v.Source.Meta) == 0 {
		return v.Source.Volume
	}
	return v.Source.Volume + " at " + strings.Join(v.Source.Meta, ",")
}

func newMirrorList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List the mirrors whose targets are in this cluster",
		Example: `  penstock mirror list`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			return w.withMirrors(ctx, func(c *penstock.Client, m penstock.Mirrors) error {
				all, err := m.All(ctx)
				if err != nil {
					return err
				}
				views := []mirrorView{}
				for _, r := range all {
					views = append(views, viewMirror(ctx, c, r))
				}
				return out.print(cmd.OutOrStdout(), views, func(t *table) {
					t.row("TARGET", "SOURCE", "STATE", "LAG", "ROUNDS")
					for _, v := range views {
						t.row(v.Target, v.source(), v.doing(), v.lag(), v.Rounds)
					}
				})
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func newMirrorStatus() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:     "status TARGET",
		Short:   "Show how far a mirror is",
		Example: `  penstock mirror status datasets-rack2 --output json`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			return w.withMirrors(ctx, func(c *penstock.Client, m penstock.Mirrors) error {
				r, err := m.Find(ctx, args[0])
				if err != nil {
					return err
				}
				v := viewMirror(ctx, c, r)
				return out.print(cmd.OutOrStdout(), v, func(t *table) { showMirror(t, &v) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func showMirror(t *table, v *mirrorView) {
	t.row("target", v.Target)
	t.row("source", v.source())
	t.row("state", v.doing())
	t.row("lag", v.lag())
	if !v.Looked.IsZero() {
		t.row("behind", bytesText(v.Behind)+" as of "+v.Looked.Local().Format(time.DateTime))
	}
	if n := v.Last; n != nil {
		t.row("shown", n.Snapshot)
		t.row("digest", n.Digest)
		t.row("last round", fmt.Sprintf("%s, %d inodes, in %v", bytesText(n.Sent), n.Inodes, n.Ended.Sub(n.Began).Round(time.Millisecond)))
	}
	if n := v.Round; n != nil {
		t.row("round", fmt.Sprintf("%s: %s of %s known of, %d inodes", n.Snapshot, bytesText(n.Sent), bytesText(n.Planned), n.Inodes))
	}
	if v.Every > 0 {
		t.row("every", v.Every)
	}
	if v.Rate > 0 {
		t.row("rate", bytesText(v.Rate)+"/s")
	}
	if v.Error != "" {
		t.row("error", v.Error)
		t.row("since", v.Since.Local().Format(time.DateTime))
	}
}

// mirrorCommand makes a command that changes a single mirror.
func mirrorCommand(use, short, long, example string, do func(ctx context.Context, c *penstock.Client, m penstock.Mirrors, target string) error) *cobra.Command {
	var w where
	cmd := &cobra.Command{Use: use, Short: short, Long: long, Example: example, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.withMirrors(cmd.Context(), func(c *penstock.Client, m penstock.Mirrors) error {
				return do(cmd.Context(), c, m, args[0])
			})
		}}
	w.flags(cmd)
	return cmd
}

func newMirrorSet() *cobra.Command {
	var every span
	var rate sizeFlag
	var keep int
	var cmd *cobra.Command
	cmd = mirrorCommand("set TARGET", "Change how often a mirror copies, how fast, and how much it keeps",
		`Changes what the flags say. A new rate holds for the round that is under way, too,
within a few seconds.`,
		`  penstock mirror set datasets-rack2 --every 10m --rate 50M`,
		func(ctx context.Context, _ *penstock.Client, m penstock.Mirrors, target string) error {
			_, err := m.Change(ctx, target, func(r *penstock.Mirror) error {
				f := cmd.Flags()
				if f.Changed("every") {
					r.Every = time.Duration(every)
				}
				if f.Changed("rate") {
					r.Rate = uint64(rate)
				}
				if f.Changed("keep") {
					r.Keep = keep
				}
				if r.Every < 0 || r.Keep < 1 {
					return usagef("--every is not negative, --keep at least 1")
				}
				return nil
			})
			return err
		})
	mirrorFlags(cmd, &every, &rate, &keep)
	return cmd
}

func newMirrorPause() *cobra.Command {
	return mirrorCommand("pause TARGET", "Stop copying, for now",
		`A round that is under way stops within seconds. Readers go on.`,
		`  penstock mirror pause datasets-rack2`,
		func(ctx context.Context, _ *penstock.Client, m penstock.Mirrors, target string) error {
			_, err := m.Pause(ctx, target)
			return err
		})
}

func newMirrorResume() *cobra.Command {
	return mirrorCommand("resume TARGET", "Go on copying after a pause", `Goes on with the round that was stopped.`,
		`  penstock mirror resume datasets-rack2`,
		func(ctx context.Context, _ *penstock.Client, m penstock.Mirrors, target string) error {
			_, err := m.Resume(ctx, target)
			return err
		})
}

func newMirrorSync() *cobra.Command {
	var wait bool
	var timeout time.Duration
	var cmd *cobra.Command
	cmd = mirrorCommand("sync TARGET", "Copy what the source holds now",
		`Asks for a round. With --wait the command ends when the target shows a complete snapshot
that was taken after the command began. A failed round is tried again: the command
prints the error at once, and goes on waiting. After --timeout the command ends with
status 1; the round goes on.`,
		`  penstock mirror sync datasets-rack2 --wait --timeout 1h`,
		func(ctx context.Context, _ *penstock.Client, m penstock.Mirrors, target string) error {
			if timeout < 0 || timeout > 0 && !wait {
				return usagef("--timeout is not negative, and goes with --wait")
			}
			r, err := m.Sync(ctx, target)
			if err != nil || !wait {
				return err
			}
			within := ctx
			if timeout > 0 {
				var cancel context.CancelFunc
				within, cancel = context.WithTimeout(ctx, timeout)
				defer cancel()
			}
			now, err := m.Await(within, r, func(failing string) {
				fmt.Fprintf(cmd.ErrOrStderr(), "the round fails, and is tried again: %s\n", failing)
			})
			if err != nil && within.Err() != nil && ctx.Err() == nil {
				return fmt.Errorf("no round was complete after %v: %s", timeout, notComplete(&now, r.Asked, target))
			}
			return err
		})
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until it is complete")
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "longest time for --wait; 0: no limit")
	return cmd
}

// notComplete says why a requested round is not complete yet.
func notComplete(now *penstock.Mirror, asked uint64, target string) string {
	see := " is under way, see 'penstock mirror status " + target + "'"
	switch {
	case now.Error != "":
		return now.Error
	case now.Heard >= asked:
		return "it" + see
	case now.Round != nil:
		return "the round before it" + see
	}
	return "no process has begun it: 'penstock up', or 'penstock mirror run', runs mirrors"
}

func newMirrorPromote() *cobra.Command {
	var yes bool
	var cmd *cobra.Command
	cmd = mirrorCommand("promote TARGET", "Make a mirror's target writable, as its readers see it",
		`The target becomes a volume like others, with the contents of the last complete
snapshot. Data copied by a round under way is dropped. 'penstock mirror resync' can
make the volume a mirror again, or turn the direction; the bytes written until then to
the volume that becomes the target are lost. On a terminal the command asks; a script
gives --yes.`,
		`  penstock mirror promote datasets-rack2 --yes`,
		func(ctx context.Context, _ *penstock.Client, m penstock.Mirrors, target string) error {
			if !yes {
				r, err := m.Find(ctx, target)
				if err != nil {
					return err
				}
				question := fmt.Sprintf("End the mirroring of %s to %s, and make %s writable?", r.Source.Volume, target, target)
				if r.Round != nil {
					question += " What the round under way copied is lost."
				}
				if err := confirm(cmd, question, target); err != nil {
					return err
				}
			}
			_, err := m.Promote(ctx, target)
			return err
		})
	destroying(cmd, &yes)
	return cmd
}

func newMirrorResync() *cobra.Command {
	var w where
	var discard bool
	var reverse bool
	var back elsewhere
	cmd := &cobra.Command{
		Use:   "resync TARGET",
		Short: "Make a promoted target a mirror again, or make its source the mirror of the target",
		Long: `Both volumes have the last complete snapshot, so only later changes are copied. Bytes
that were written later to the volume that becomes the target are deleted; --discard
permits that. The sessions in that volume end.

With --reverse the source becomes the mirror of TARGET. The mirror's record moves to the
source's cluster, whose 'penstock up' or 'penstock mirror run' then copies, and reaches
the cluster of TARGET at --back-cluster.`,
		Example: `  penstock mirror resync datasets-rack2 --discard
  penstock mirror resync datasets --reverse --discard --back-cluster meta.west:7400 --back-credentials /etc/penstock/west`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx := cmd.Context()
			if !discard {
				return usagef("bytes that were written since the last round to the volume that becomes the target are lost: permit this with --discard")
			}
			at, err := back.at()
			if err != nil {
				return err
			}
			if len(at.Meta) > 0 && !reverse {
				return usagef("--back-cluster goes with --reverse")
			}
			return w.withMirrors(ctx, func(c *penstock.Client, m penstock.Mirrors) error {
				if !reverse {
					_, err := m.Resync(ctx, args[0])
					return err
				}
				r, err := m.Find(ctx, args[0])
				if err != nil {
					return err
				}
				if (len(r.Source.Meta) > 0) != (len(at.Meta) > 0) {
					return usagef("--back-cluster says how the source's cluster, if it is another one, reaches this one")
				}
				return sourceClient(ctx, c, r.Source, func(src *penstock.Client) error {
					there, err := src.Mirrors()
					if err == nil {
						_, err = there.Reverse(ctx, m, args[0], at)
					}
					return err
				})
			})
		},
	}
	w.flags(cmd)
	f := cmd.Flags()
	f.BoolVar(&discard, "discard", false, "permit the deletion of bytes that were written since the last round to the volume that becomes the target")
	f.BoolVar(&reverse, "reverse", false, "turn the direction: the source becomes the target")
	f.StringSliceVar(&back.meta, "back-cluster", nil, "addresses of the meta servers of TARGET's cluster, as the source's cluster reaches them")
	f.StringVar(&back.dir, "back-dir", "", "data directory of the 'penstock up' of that machine that has TARGET")
	f.StringVar(&back.credentials, "back-credentials", "", "directory with a certificate of TARGET's cluster, on the machine that runs the mirror then")
	markDirs(cmd, "back-dir", "back-credentials")
	return cmd
}

func newMirrorDelete() *cobra.Command {
	var leave, yes bool
	var cmd *cobra.Command
	cmd = mirrorCommand("delete TARGET", "Forget a mirror; its target stays, a volume like others",
		`Promotes the target, unless the target was promoted already, and deletes the mirror's
snapshots in source and target. With --leave-source the snapshots in the source stay,
and their pins run out. 'penstock volume delete' deletes the volume. On a terminal the
command asks; a script gives --yes.`,
		`  penstock mirror delete datasets-rack2 --yes`,
		func(ctx context.Context, c *penstock.Client, m penstock.Mirrors, target string) error {
			r, err := m.Find(ctx, target)
			if err != nil {
				return err
			}
			if !yes {
				question := fmt.Sprintf("Forget the mirror of %s to %s? Its snapshots, %s-*, are deleted.", r.Source.Volume, target, r.Name)
				if err := confirm(cmd, question, target); err != nil {
					return err
				}
			}
			if leave {
				return m.Delete(ctx, target, nil)
			}
			return sourceClient(ctx, c, r.Source, func(src *penstock.Client) error { return m.Delete(ctx, target, src) })
		})
	destroying(cmd, &yes)
	cmd.Flags().BoolVar(&leave, "leave-source", false, "the source is gone, or can't be reached")
	return cmd
}

func newMirrorRun() *cobra.Command {
	var w where
	var logs logFlags
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the mirrors of a cluster",
		Long: `Copies for all mirrors with a target in this cluster, until the command is stopped.
Several processes may run, on several machines: a single process runs a mirror at a
time, and another process takes over when that process ends. The command needs a
certificate that may administer the targets and, for each source in another cluster, a
certificate that may administer the source.`,
		Example: `  penstock mirror run --cluster meta1:7400,meta2:7400 --credentials /etc/penstock/mirror`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := logs.logger(cmd.ErrOrStderr())
			if err != nil {
				return err
			}
			addrs, creds, err := w.open()
			if err != nil {
				return err
			}
			renewing, stop := context.WithCancel(cmd.Context())
			var renewed sync.WaitGroup
			renewed.Go(func() { local.KeepRenewed(renewing, addrs, creds, log) })
			defer renewed.Wait()
			defer stop()
			return local.RunMirrors(cmd.Context(), penstock.Config{Meta: addrs, Creds: creds, Logger: log}, log)
		},
	}
	w.flags(cmd)
	logs.add(cmd)
	return cmd
}
