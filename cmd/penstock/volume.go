package main

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/client"
)

func newVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volume",
		Short: "Create, list, show, change, attach, rename and delete volumes",
		Long: `A volume is a part of the tree with a policy of its own: quota, replicas, how
its files are sealed and synced. A volume is attached to a path of the tree; a mount of
the tree shows the volume there. A volume can also be mounted by its name alone.`,
	}
	cmd.AddCommand(newVolumeCreate(), newVolumeList(), newVolumeShow(), newVolumeSet(), newVolumeAttach(), newVolumeDetach(), newVolumeRename(), newVolumeDelete(), newVolumePromote(), newVolumeUndelete())
	return cmd
}

// volumeView is a volume in the form that commands print.
type volumeView struct {
	ID          uint32 `json:"id" yaml:"id"`
	Name        string `json:"name" yaml:"name"`
	Path        string `json:"path,omitempty" yaml:"path,omitempty"`
	State       string `json:"state" yaml:"state"`
	UsedBytes   uint64 `json:"used_bytes" yaml:"used_bytes"`
	UsedInodes  uint64 `json:"used_inodes" yaml:"used_inodes"`
	QuotaBytes  uint64 `json:"quota_bytes,omitempty" yaml:"quota_bytes,omitempty"`
	QuotaInodes uint64 `json:"quota_inodes,omitempty" yaml:"quota_inodes,omitempty"`
	// QuotaSnapshots: UsedBytes includes the bytes that only snapshots hold.
	QuotaSnapshots bool   `json:"quota_snapshots,omitempty" yaml:"quota_snapshots,omitempty"`
	Replicas       uint32 `json:"replicas" yaml:"replicas"`
	// MinReplicas is the smallest number of replicas at the creation of a chunk.
	MinReplicas uint32 `json:"min_replicas" yaml:"min_replicas"`
	SealOnClose bool   `json:"seal_on_close" yaml:"seal_on_close"`
	Immutable   bool   `json:"immutable" yaml:"immutable"`
	SyncOnClose bool   `json:"sync_on_close" yaml:"sync_on_close"`
	NoAtime     bool   `json:"no_atime" yaml:"no_atime"`
	Topology    string `json:"topology" yaml:"topology"`
	Spread      string `json:"spread" yaml:"spread"`
	Class       string `json:"class,omitempty" yaml:"class,omitempty"`
	LocalFirst  bool   `json:"local_first" yaml:"local_first"`
	Encrypt     bool   `json:"encrypt" yaml:"encrypt"`
	MaxChunk    uint64 `json:"max_chunk" yaml:"max_chunk"` // bytes
	// TrashSeconds is how long the volume stays in the trash after its deletion.
	TrashSeconds uint64 `json:"trash_seconds" yaml:"trash_seconds"`
	// Compression of sealed chunks: none, s2 or zstd.
	Compression string `json:"compression" yaml:"compression"`
	// The advisory quota refuses nothing. BytesOver and InodesOver are the times when the
	// volume crossed the advisory quota; nil: the volume does not count as above.
	AdvisoryBytes  uint64     `json:"advisory_bytes,omitempty" yaml:"advisory_bytes,omitempty"`
	AdvisoryInodes uint64     `json:"advisory_inodes,omitempty" yaml:"advisory_inodes,omitempty"`
	BytesOver      *time.Time `json:"bytes_over,omitempty" yaml:"bytes_over,omitempty"`
	InodesOver     *time.Time `json:"inodes_over,omitempty" yaml:"inodes_over,omitempty"`
	// Labels are the labels for 'penstock volume list --label'.
	Labels map[string]string `json:"labels,omitempty" yaml:"labels,omitempty"`
	// LabelsUnread is the reason why the labels are unknown.
	LabelsUnread string     `json:"labels_unread,omitempty" yaml:"labels_unread,omitempty"`
	Created      *time.Time `json:"created,omitempty" yaml:"created,omitempty"`
	Deleted      *time.Time `json:"deleted,omitempty" yaml:"deleted,omitempty"` // in the trash
	Until        *time.Time `json:"until,omitempty" yaml:"until,omitempty"`
	// Closed: no client uses the volume, and the volume was not opened: UsedBytes and
	// UsedInodes are unknown.
	Closed bool `json:"closed,omitempty" yaml:"closed,omitempty"`
}

func viewOf(v meta.VolumeInfo) volumeView {
	at := func(t time.Time) *time.Time {
		if t.IsZero() {
			return nil
		}
		t = t.UTC().Truncate(time.Second)
		return &t
	}
	return volumeView{ID: uint32(v.ID), Name: v.Name, Path: v.Path, State: string(v.State),
		UsedBytes: v.UsedBytes, UsedInodes: v.UsedInodes,
		QuotaBytes: v.Policy.QuotaBytes, QuotaInodes: v.Policy.QuotaInodes, QuotaSnapshots: v.Policy.QuotaSnapshots, Replicas: v.Policy.Replicas, MinReplicas: v.Policy.Least(),
		SealOnClose: v.Policy.SealOnClose, Immutable: v.Policy.Immutable, SyncOnClose: v.Policy.SyncOnClose, NoAtime: v.Policy.NoAtime,
		Topology: cmp.Or(v.Policy.Topology, "/"), Spread: v.Policy.Spread.String(), Class: v.Policy.Class,
		LocalFirst: v.Policy.LocalFirst, Encrypt: v.Policy.Encrypt, MaxChunk: cmp.Or(v.Policy.MaxChunk, meta.DefaultChunk),
		Compression: cmp.Or(v.Compression, meta.CompressNone.String()), AdvisoryBytes: v.AdvisoryBytes, AdvisoryInodes: v.AdvisoryInodes,
		BytesOver: at(v.BytesOver), InodesOver: at(v.InodesOver), Labels: v.Labels, LabelsUnread: v.LabelsUnread,
		TrashSeconds: v.TrashSeconds, Created: at(v.Created), Deleted: at(v.Deleted), Until: at(v.Until), Closed: !v.Open}
}

// options names the options that the policy switches on.
func (v volumeView) options() string {
	var on []string
	for _, o := range []struct {
		set  bool
		name string
	}{{v.SealOnClose, "seal-on-close"}, {v.Immutable, "immutable"}, {v.SyncOnClose, "sync-on-close"}, {v.NoAtime, "noatime"}, {v.QuotaSnapshots, "quota-snapshots"},
		{!v.LocalFirst, "not-local-first"}, {v.Encrypt, "encrypt"}} {
		if o.set {
			on = append(on, o.name)
		}
	}
	if v.Compression != meta.CompressNone.String() {
		on = append(on, v.Compression)
	}
	return strings.Join(on, ",")
}

// policyFlags are the flags that change a policy.
type policyFlags struct {
	quotaBytes  sizeFlag
	quotaInodes uint64
	quotaSnaps  bool
	replicas    uint32
	minReplicas uint32
	sealOnClose bool
	immutable   bool
	syncOnClose bool
	noAtime     bool
	topology    string
	spread      string
	class       string
	localFirst  bool
	encrypt     bool
	maxChunk    sizeFlag
	trash       time.Duration

	compression    string
	advisoryBytes  sizeFlag
	advisoryInodes uint64
	labels         []string
}

func (p *policyFlags) add(f *pflag.FlagSet) {
	f.Var(&p.quotaBytes, "quota", "most bytes in the volume's files, such as 500G; 0 for no limit")
	f.Uint64Var(&p.quotaInodes, "quota-inodes", 0, "most files and directories; 0 for no limit")
	f.BoolVar(&p.quotaSnaps, "quota-snapshots", false, "bytes that only snapshots hold count in the quota of bytes")
	f.Uint32Var(&p.replicas, "replicas", 1, "copies of each byte, on as many chunk servers")
	f.Uint32Var(&p.minReplicas, "min-replicas", 0, "least number of copies of new data while servers are missing; repair adds the missing copies of such data first; 0 for the default: one less than --replicas from 3 on, else all")
	f.BoolVar(&p.sealOnClose, "seal-on-close", false, "the close of its writer makes a file read-only; mounts read such a file at the disk's own speed")
	f.BoolVar(&p.immutable, "immutable", false, "nothing can be changed; mounts may skip opening files")
	f.BoolVar(&p.syncOnClose, "sync-on-close", false, "close makes a file durable")
	f.BoolVar(&p.noAtime, "noatime", false, "never update access times")
	f.StringVar(&p.topology, "topology", "/", "subtree of the topology that its data lies in, such as /dc1 or /dc1/rack2")
	f.StringVar(&p.spread, "spread", "host", "what two copies never share: host, rack or dc")
	f.StringVar(&p.class, "class", "", "class of the disks that its data lies on, such as nvme, ssd, hdd; empty for any")
	f.BoolVar(&p.localFirst, "local-first", true, "the first copy lies on the writer's own host if that host has room")
	f.BoolVar(&p.encrypt, "encrypt", false, "the volume's bytes travel encrypted only")
	f.Var(&p.maxChunk, "max-chunk", "size of the largest chunk, 4M to 1G; 0 for 1G; present chunks stay as they are")
	f.StringVar(&p.compression, "compression", meta.CompressNone.String(), "compression of sealed chunks: none, s2 (fast) or zstd (smaller); holds for new chunks at once, and for present chunks soon")
	f.Var(&p.advisoryBytes, "advisory-quota", "bytes above which an event, a metric and a line in the log tell; nothing is refused; 0 for none")
	f.Uint64Var(&p.advisoryInodes, "advisory-quota-inodes", 0, "the same for files and directories")
	f.StringArrayVar(&p.labels, "label", nil, "a label KEY=VALUE, for 'penstock volume list --label'; KEY- removes the label; may be given several times")
	f.DurationVar(&p.trash, "trash", defaultTrash, "how long a deleted volume stays in the trash, from which 'penstock volume undelete' brings it back; 0: the volume is deleted at once")
}

// defaultTrash is the trash time of a volume created by this command.
const defaultTrash = 24 * time.Hour

// words returns the settings of the flags that are not part of the policy. With all, words
// includes the trash time even if --trash is not given.
func (p *policyFlags) words(f *pflag.FlagSet, all bool) (w meta.VolumeWords, err error) {
	if f.Changed("trash") || all {
		if p.trash < 0 || p.trash%time.Second != 0 {
			return w, usagef("--trash %v: whole seconds, such as 24h", p.trash)
		}
		n := uint64(p.trash / time.Second)
		w.TrashSeconds = &n
	}
	if f.Changed("compression") {
		if _, err := meta.ParseCompression(p.compression); err != nil {
			return w, usagef("--compression %s: write none, s2 or zstd", p.compression)
		}
		w.Compression = &p.compression
	}
	if f.Changed("advisory-quota") {
		n := uint64(p.advisoryBytes)
		w.AdvisoryBytes = &n
	}
	if f.Changed("advisory-quota-inodes") {
		w.AdvisoryInodes = &p.advisoryInodes
	}
	w.Labels, err = parseLabels(p.labels)
	return w, err
}

// parseLabels parses arguments KEY=VALUE, which set a label, and KEY-, which remove a label
// (value nil).
func parseLabels(args []string) (map[string]*string, error) {
	if len(args) == 0 {
		return nil, nil
	}
	all := map[string]*string{}
	for _, arg := range args {
		key, value, set := strings.Cut(arg, "=")
		to := &value
		if !set {
			var remove bool
			if key, remove = strings.CutSuffix(arg, "-"); !remove {
				return nil, usagef("--label %s: write KEY=VALUE, or KEY- to remove one", arg)
			}
			to = nil
		}
		if _, twice := all[key]; twice {
			return nil, usagef("--label %s: the key is named twice", arg)
		}
		all[key] = to
	}
	if err := meta.CheckLabels(all); err != nil {
		return nil, &usageError{err}
	}
	return all, nil
}

// change applies the given flags to a policy and checks the result. change returns the names of
// the flags that change the policy; the list may be empty.
func (p *policyFlags) change(f *pflag.FlagSet, to *meta.Policy) (words []string, err error) {
	spread, err := meta.ParseSpread(p.spread)
	if err != nil {
		return nil, usagef("--spread %s: write host, rack or dc", p.spread)
	}
	for name, set := range map[string]func(){
		"quota":           func() { to.QuotaBytes = uint64(p.quotaBytes) },
		"quota-inodes":    func() { to.QuotaInodes = p.quotaInodes },
		"quota-snapshots": func() { to.QuotaSnapshots = p.quotaSnaps },
		"replicas":        func() { to.Replicas = p.replicas },
		"seal-on-close":   func() { to.SealOnClose = p.sealOnClose },
		"immutable":       func() { to.Immutable = p.immutable },
		"sync-on-close":   func() { to.SyncOnClose = p.syncOnClose },
		"noatime":         func() { to.NoAtime = p.noAtime },
		"topology":        func() { to.Topology = path.Clean("/" + p.topology) },
		"spread":          func() { to.Spread = spread },
		"class":           func() { to.Class = p.class },
		"local-first":     func() { to.LocalFirst = p.localFirst },
		"min-replicas":    func() { to.MinReplicas = p.minReplicas },
		"encrypt":         func() { to.Encrypt = p.encrypt },
		"max-chunk":       func() { to.MaxChunk = uint64(p.maxChunk) },
	} {
		if f.Changed(name) {
			set()
			words = append(words, name)
		}
	}
	if to.Topology == "/" {
		to.Topology = ""
	}
	if err := to.Check(); err != nil {
		return nil, &usageError{err}
	}
	slices.Sort(words)
	return words, nil
}

// sizeFlag is a number of bytes with an optional binary unit.
type sizeFlag uint64

var sizePattern = regexp.MustCompile(`^([0-9]+(?:\.[0-9]+)?) ?([KMGTPE]?)(?:i?B)?$`)

// Set parses "10", "10K", "10 MiB", "2.5G".
func (s *sizeFlag) Set(text string) error {
	wrong := fmt.Errorf("%q is no size; write 500G, 1.5T or a number of bytes", text)
	m := sizePattern.FindStringSubmatch(text)
	if m == nil {
		return wrong
	}
	n, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		return wrong
	}
	if m[2] != "" {
		n *= float64(uint64(1) << (10 * (strings.Index("KMGTPE", m[2]) + 1)))
	}
	if n >= 1<<63 {
		return wrong
	}
	*s = sizeFlag(n)
	return nil
}

func (s *sizeFlag) String() string { return fmt.Sprint(uint64(*s)) }

// Type names the value in help texts.
func (s *sizeFlag) Type() string { return "size" }

func newVolumeCreate() *cobra.Command {
	var w where
	var p policyFlags
	var attach string
	var parents, force bool
	var out output
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a volume, and attach it to the tree",
		Example: `  penstock volume create datasets --attach /datasets --quota 2T
  penstock volume create shards --attach /teams/vision/shards --parents --seal-on-close --noatime
  penstock volume create results --attach /results --replicas 3 --spread rack --topology /dc1 --class nvme`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := treePath(attach); err != nil {
				return err
			}
			policy := meta.Policy{Replicas: 1, LocalFirst: true}
			if _, err := p.change(cmd.Flags(), &policy); err != nil {
				return err
			}
			words, err := p.words(cmd.Flags(), true)
			if err != nil {
				return err
			}
			words.Force = force
			return w.withAPI(cmd.Context(), func(s *client.Session, c *admin.Client) error {
				if attach != "" { // a wrong path must not leave a volume behind
					if _, _, err := s.Walk(cmd.Context(), path.Dir(path.Clean("/"+attach)), parents); err != nil {
						return err
					}
				}
				v, err := c.CreateVolume(cmd.Context(), args[0], policy, words)
				if err != nil {
					return err
				}
				if attach != "" {
					if v, err = c.AttachVolume(cmd.Context(), s, v.ID, attach, parents); err != nil {
						return fmt.Errorf("volume %s was created, but not attached: %w", args[0], err)
					}
				}
				return out.print(cmd.OutOrStdout(), viewOf(v), func(t *table) { showVolume(t, viewOf(v)) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	p.add(cmd.Flags())
	cmd.Flags().BoolVar(&force, "force", false, "also if nothing in the cluster can meet the policy")
	cmd.Flags().StringVar(&attach, "attach", "", "path of the tree where the volume hangs; its parent must exist, the last name must not")
	cmd.Flags().BoolVar(&parents, "parents", false, "make missing parent directories")
	return cmd
}

func newVolumeList() *cobra.Command {
	var w where
	var out output
	var trash bool
	var label string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the volumes",
		Long: `Lists the volumes. In a cluster with many volumes the command does not open volumes
that no client uses, and shows "-" as their usage; 'penstock volume show' opens the
volume.

A selector has demands with commas between them, all of which a volume's labels
meet: KEY, !KEY, KEY=VALUE, KEY!=VALUE, KEY in (VALUE,...), KEY notin (VALUE,...).`,
		Example: `  penstock volume list
  penstock volume list --trash
  penstock volume list --label 'team=vision,!draft'
  penstock volume list --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var selector meta.LabelSelector
			if cmd.Flags().Changed("label") {
				var err error
				if selector, err = meta.ParseLabelSelector(label); err != nil {
					return &usageError{err}
				}
			}
			return w.api(cmd.Context(), func(c *admin.Client) error {
				views := []volumeView{}
				for v, err := range c.EachVolume(cmd.Context(), &admin.ListVolumesRequest{}) {
					if err != nil {
						return err
					}
					if trash != (v.State == meta.VolumeInTrash) {
						continue
					}
					if v.LabelsUnread != "" && len(selector) > 0 {
						return fmt.Errorf("whether volume %s is meant is not known: %s", v.Name, v.LabelsUnread)
					}
					if selector.Matches(v.Labels) {
						views = append(views, viewOf(v))
					}
				}
				return out.print(cmd.OutOrStdout(), views, func(t *table) { listVolumes(t, views) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	cmd.Flags().StringVar(&label, "label", "", "those whose labels meet a selector, such as team=vision")
	cmd.Flags().BoolVar(&trash, "trash", false, "list the volumes in the trash: 'penstock volume undelete' brings them back")
	return cmd
}

func listVolumes(t *table, views []volumeView) {
	t.row("ID", "NAME", "PATH", "USED", "FILES", "QUOTA", "REPLICAS", "STATE", "OPTIONS")
	for _, v := range views {
		quota := "-"
		if v.QuotaBytes > 0 {
			quota = bytesText(v.QuotaBytes)
		}
		at := v.Path
		if at == "" {
			at = "-"
		}
		used, files := bytesText(v.UsedBytes), fmt.Sprint(v.UsedInodes)
		if v.Closed {
			used, files = "-", "-"
		}
		state := v.State
		if v.Until != nil {
			state += " until " + v.Until.Format(time.RFC3339)
		}
		t.row(v.ID, v.Name, at, used, files, quota, v.Replicas, state, v.options())
	}
}

func showVolume(t *table, v volumeView) {
	limit := func(n uint64, text string) string {
		if n == 0 {
			return "none"
		}
		return text
	}
	t.row("id", v.ID)
	t.row("name", v.Name)
	t.row("path", v.Path)
	t.row("state", v.State)
	t.row("used", bytesText(v.UsedBytes))
	t.row("files", v.UsedInodes)
	t.row("quota", limit(v.QuotaBytes, bytesText(v.QuotaBytes)))
	t.row("quota of files", limit(v.QuotaInodes, fmt.Sprint(v.QuotaInodes)))
	over := func(since *time.Time) string {
		if since == nil {
			return ""
		}
		return ", EXCEEDED since " + since.Format(time.RFC3339)
	}
	if v.AdvisoryBytes > 0 {
		t.row("advisory quota", bytesText(v.AdvisoryBytes)+over(v.BytesOver))
	}
	if v.AdvisoryInodes > 0 {
		t.row("advisory of files", fmt.Sprint(v.AdvisoryInodes)+over(v.InodesOver))
	}
	t.row("compression", v.Compression)
	t.row("largest chunk", bytesText(v.MaxChunk))
	t.row("replicas", fmt.Sprintf("%d, new data begins with at least %d", v.Replicas, v.MinReplicas))
	t.row("topology", v.Topology)
	t.row("spread", v.Spread)
	if v.Class != "" {
		t.row("class", v.Class)
	}
	t.row("trash time", time.Duration(v.TrashSeconds)*time.Second)
	t.row("options", v.options())
	for _, k := range slices.Sorted(maps.Keys(v.Labels)) {
		t.row("label", k+"="+v.Labels[k])
	}
	if v.LabelsUnread != "" {
		t.row("labels", "can't be read: "+v.LabelsUnread)
	}
}

func newVolumeSet() *cobra.Command {
	var w where
	var p policyFlags
	var wait, force bool
	var events eventsFlag
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Change a volume's policy; settings without a flag stay",
		Long: `Changes a volume's policy. Bytes written after the command has returned lie where the
policy says, also in open files. Other data is moved in the background while it is read
and written; 'penstock volume show' and --wait show the progress. A policy that the
cluster's chunk servers could not meet, even with all of them present, is refused.`,
		Example: `  penstock volume set datasets --immutable
  penstock volume set scratch --quota 500G --noatime
  penstock volume set results --topology /dc1/rack2 --wait
  penstock volume set results --label team=vision --label draft-
  penstock volume set inbox --events on`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.api(cmd.Context(), func(c *admin.Client) error {
				v, err := c.FindVolume(cmd.Context(), admin.Named(args[0]))
				if err != nil {
					return err
				}
				words, err := p.words(cmd.Flags(), false)
				if err != nil {
					return err
				}
				only, err := p.change(cmd.Flags(), &v.Policy)
				if err != nil {
					return err
				}
				changed := len(only) > 0 || !words.Empty()
				words.Force = force
				// Settings without a flag stay as they are, even if another client changes such
				// a setting now.
				words.Only = append([]string{}, only...)
				if cmd.Flags().Changed("events") {
					if _, err := c.Events.KeepEvents(cmd.Context(), &admin.KeepEventsRequest{Volume: admin.Numbered(v.ID), Keep: events.keep}); err != nil {
						return err
					}
					if !changed {
						return nil
					}
				}
				if !changed {
					return usagef("no flag says what to change")
				}
				if !wait {
					_, err := c.SetVolume(cmd.Context(), v.ID, v.Policy, words)
					return err
				}
				if err := setUntilHeld(cmd, c, v, words); err != nil {
					return err
				}
				return waitPlaced(cmd.Context(), cmd, c, v)
			})
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "show the number of chunks still to be moved, and wait until it is 0")
	cmd.Flags().BoolVar(&force, "force", false, "also if nothing in the cluster can meet the policy; with --immutable, also if mounts can't write back their bytes, which are lost then")
	cmd.Flags().Var(&events, "events", "record changes as events, for 'penstock events': on keeps the last 100000 events, a number keeps that number")
	w.flags(cmd)
	p.add(cmd.Flags())
	return cmd
}
