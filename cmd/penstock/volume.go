package main

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

func newVolume() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volume",
		Short: "Create, list, show, change, attach, detach and delete volumes",
		Long: `A volume is a part of the tree with a policy of its own: quota, replicas, how
its files are sealed and synced. It hangs in the tree where it is attached; a
mount of the tree shows it there, and it can be mounted by its name alone.`,
	}
	cmd.AddCommand(newVolumeCreate(), newVolumeList(), newVolumeShow(), newVolumeSet(), newVolumeAttach(), newVolumeDetach(), newVolumeDelete())
	return cmd
}

// volumeView is a volume as commands print it.
type volumeView struct {
	ID          uint32 `json:"id" yaml:"id"`
	Name        string `json:"name" yaml:"name"`
	Path        string `json:"path,omitempty" yaml:"path,omitempty"`
	State       string `json:"state" yaml:"state"`
	UsedBytes   uint64 `json:"used_bytes" yaml:"used_bytes"`
	UsedInodes  uint64 `json:"used_inodes" yaml:"used_inodes"`
	QuotaBytes  uint64 `json:"quota_bytes,omitempty" yaml:"quota_bytes,omitempty"`
	QuotaInodes uint64 `json:"quota_inodes,omitempty" yaml:"quota_inodes,omitempty"`
	Replicas    uint32 `json:"replicas" yaml:"replicas"`
	SealOnClose bool   `json:"seal_on_close" yaml:"seal_on_close"`
	Immutable   bool   `json:"immutable" yaml:"immutable"`
	SyncOnClose bool   `json:"sync_on_close" yaml:"sync_on_close"`
	NoAtime     bool   `json:"no_atime" yaml:"no_atime"`
	Topology    string `json:"topology" yaml:"topology"`
	Spread      string `json:"spread" yaml:"spread"`
	Class       string `json:"class,omitempty" yaml:"class,omitempty"`
	LocalFirst  bool   `json:"local_first" yaml:"local_first"`
	Degrade     bool   `json:"degrade" yaml:"degrade"`
	Encrypt     bool   `json:"encrypt" yaml:"encrypt"`
}

func viewOf(v wire.VolumeInfo) volumeView {
	view := volumeView{ID: uint32(v.ID), Name: v.Name, Path: v.Path, State: "ready",
		UsedBytes: v.Usage.UsedBytes, UsedInodes: v.Usage.UsedInodes,
		QuotaBytes: v.Policy.QuotaBytes, QuotaInodes: v.Policy.QuotaInodes, Replicas: v.Policy.Replicas,
		SealOnClose: v.Policy.SealOnClose, Immutable: v.Policy.Immutable, SyncOnClose: v.Policy.SyncOnClose, NoAtime: v.Policy.NoAtime,
		Topology: cmp.Or(v.Policy.Topology, "/"), Spread: v.Policy.Spread.String(), Class: v.Policy.Class,
		LocalFirst: v.Policy.LocalFirst, Degrade: v.Policy.Degrade, Encrypt: v.Policy.Encrypt}
	if v.Deleting {
		view.State = "deleting"
	}
	return view
}

// options names what the policy switches on.
func (v volumeView) options() string {
	var on []string
	for _, o := range []struct {
		set  bool
		name string
	}{{v.SealOnClose, "seal-on-close"}, {v.Immutable, "immutable"}, {v.SyncOnClose, "sync-on-close"}, {v.NoAtime, "noatime"},
		{!v.LocalFirst, "not-local-first"}, {v.Degrade, "degrade"}, {v.Encrypt, "encrypt"}} {
		if o.set {
			on = append(on, o.name)
		}
	}
	return strings.Join(on, ",")
}

// policyFlags are the flags that change a policy.
type policyFlags struct {
	quotaBytes  sizeFlag
	quotaInodes uint64
	replicas    uint32
	sealOnClose bool
	immutable   bool
	syncOnClose bool
	noAtime     bool
	topology    string
	spread      string
	class       string
	localFirst  bool
	degrade     bool
	encrypt     bool
}

func (p *policyFlags) add(f *pflag.FlagSet) {
	f.Var(&p.quotaBytes, "quota", "most bytes that its files may take, such as 500G; 0 for no limit")
	f.Uint64Var(&p.quotaInodes, "quota-inodes", 0, "most files and directories; 0 for no limit")
	f.Uint32Var(&p.replicas, "replicas", 1, "copies of each byte, on as many chunk servers")
	f.BoolVar(&p.sealOnClose, "seal-on-close", false, "a file becomes read-only when its writer closes it, and is read at the disk's own speed")
	f.BoolVar(&p.immutable, "immutable", false, "nothing can be changed; mounts may skip opening files")
	f.BoolVar(&p.syncOnClose, "sync-on-close", false, "close makes a file durable")
	f.BoolVar(&p.noAtime, "noatime", false, "never update access times")
	f.StringVar(&p.topology, "topology", "/", "subtree of the topology that its data lies in, such as /dc1 or /dc1/rack2")
	f.StringVar(&p.spread, "spread", "host", "what two copies never share: host, rack or dc")
	f.StringVar(&p.class, "class", "", "class of the disks that its data lies on, such as nvme, ssd, hdd; empty for any")
	f.BoolVar(&p.localFirst, "local-first", true, "the first copy lies on the writer's own host if it can")
	f.BoolVar(&p.degrade, "degrade", false, "where the rest can't be met, write with fewer or closer copies rather than refuse; repair makes up for it")
	f.BoolVar(&p.encrypt, "encrypt", false, "its bytes travel encrypted only")
}

// change applies the flags that were given to a policy, and checks the outcome.
func (p *policyFlags) change(f *pflag.FlagSet, to *meta.Policy) (changed bool, err error) {
	spread, err := meta.ParseSpread(p.spread)
	if err != nil {
		return false, usagef("--spread %s: write host, rack or dc", p.spread)
	}
	for name, set := range map[string]func(){
		"quota":         func() { to.QuotaBytes = uint64(p.quotaBytes) },
		"quota-inodes":  func() { to.QuotaInodes = p.quotaInodes },
		"replicas":      func() { to.Replicas = p.replicas },
		"seal-on-close": func() { to.SealOnClose = p.sealOnClose },
		"immutable":     func() { to.Immutable = p.immutable },
		"sync-on-close": func() { to.SyncOnClose = p.syncOnClose },
		"noatime":       func() { to.NoAtime = p.noAtime },
		"topology":      func() { to.Topology = path.Clean("/" + p.topology) },
		"spread":        func() { to.Spread = spread },
		"class":         func() { to.Class = p.class },
		"local-first":   func() { to.LocalFirst = p.localFirst },
		"degrade":       func() { to.Degrade = p.degrade },
		"encrypt":       func() { to.Encrypt = p.encrypt },
	} {
		if f.Changed(name) {
			set()
			changed = true
		}
	}
	if to.Topology == "/" {
		to.Topology = ""
	}
	if err := to.Check(); err != nil {
		return changed, &usageError{err}
	}
	return changed, nil
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
	var out output
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Create a volume, and attach it to the tree",
		Example: `  penstock volume create datasets --attach /datasets --quota 2T
  penstock volume create shards --attach /shards --seal-on-close --noatime
  penstock volume create results --attach /results --replicas 3 --spread rack --topology /dc1 --class nvme`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			policy := meta.Policy{Replicas: 1, LocalFirst: true}
			if _, err := p.change(cmd.Flags(), &policy); err != nil {
				return err
			}
			return w.with(cmd.Context(), func(s *client.Session) error {
				if attach != "" { // a mistake here must not leave a volume behind
					if _, _, err := walk(cmd.Context(), s, path.Dir(path.Clean("/"+attach))); err != nil {
						return err
					}
				}
				_, err := s.Admin(cmd.Context(), wire.Admin{Op: wire.AdminCreateVolume, Name: args[0], Policy: policy})
				if err != nil {
					return err
				}
				if attach != "" {
					if err := attachVolume(cmd.Context(), s, args[0], attach); err != nil {
						return fmt.Errorf("volume %s was created, but not attached: %w", args[0], err)
					}
				}
				v, err := volumeByName(cmd.Context(), s, args[0])
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), viewOf(v), func(t *table) { showVolume(t, viewOf(v)) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	p.add(cmd.Flags())
	cmd.Flags().StringVar(&attach, "attach", "", "path of the tree where the volume hangs; its parent must exist, the last name must not")
	return cmd
}

func attachVolume(ctx context.Context, s *client.Session, name, at string) error {
	v, err := volumeByName(ctx, s, name)
	if err != nil {
		return err
	}
	at = path.Clean("/" + at)
	if at == "/" {
		return usagef("a volume can't be attached at /: the root volume is there")
	}
	parent, dir, err := walk(ctx, s, path.Dir(at))
	if err != nil {
		return err
	}
	_, err = s.Admin(ctx, wire.Admin{Op: wire.AdminAttach, Name: name, Volume: v.ID, Parent: parent, Ino: dir, Entry: path.Base(at)})
	return err
}

func newVolumeList() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the volumes",
		Example: `  penstock volume list
  penstock volume list --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return w.with(cmd.Context(), func(s *client.Session) error {
				r, err := s.Admin(cmd.Context(), wire.Admin{Op: wire.AdminVolumes})
				if err != nil {
					return err
				}
				views := make([]volumeView, 0, len(r.Volumes))
				for _, v := range r.Volumes {
					views = append(views, viewOf(v))
				}
				return out.print(cmd.OutOrStdout(), views, func(t *table) { listVolumes(t, views) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
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
		t.row(v.ID, v.Name, at, bytesText(v.UsedBytes), v.UsedInodes, quota, v.Replicas, v.State, v.options())
	}
}

func newVolumeShow() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:     "show NAME",
		Short:   "Show one volume",
		Example: `  penstock volume show datasets --output yaml`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.with(cmd.Context(), func(s *client.Session) error {
				v, err := volumeByName(cmd.Context(), s, args[0])
				if err != nil {
					return err
				}
				return out.print(cmd.OutOrStdout(), viewOf(v), func(t *table) { showVolume(t, viewOf(v)) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
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
	t.row("replicas", v.Replicas)
	t.row("topology", v.Topology)
	t.row("spread", v.Spread)
	if v.Class != "" {
		t.row("class", v.Class)
	}
	t.row("options", v.options())
}

func newVolumeSet() *cobra.Command {
	var w where
	var p policyFlags
	cmd := &cobra.Command{
		Use:   "set NAME",
		Short: "Change a volume's policy; what no flag names stays",
		Example: `  penstock volume set datasets --immutable
  penstock volume set scratch --quota 500G --noatime`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.with(cmd.Context(), func(s *client.Session) error {
				v, err := volumeByName(cmd.Context(), s, args[0])
				if err != nil {
					return err
				}
				if changed, err := p.change(cmd.Flags(), &v.Policy); err != nil {
					return err
				} else if !changed {
					return usagef("no flag says what to change")
				}
				_, err = s.Admin(cmd.Context(), wire.Admin{Op: wire.AdminSetPolicy, Name: args[0], Volume: v.ID, Policy: v.Policy})
				return err
			})
		},
	}
	w.flags(cmd)
	p.add(cmd.Flags())
	return cmd
}

func newVolumeAttach() *cobra.Command {
	var w where
	cmd := &cobra.Command{
		Use:     "attach NAME PATH",
		Short:   "Hang a volume into the tree",
		Example: `  penstock volume attach datasets /projects/vision/datasets`,
		Args:    cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.with(cmd.Context(), func(s *client.Session) error {
				return attachVolume(cmd.Context(), s, args[0], args[1])
			})
		},
	}
	w.flags(cmd)
	return cmd
}

func newVolumeDetach() *cobra.Command {
	var w where
	cmd := &cobra.Command{
		Use:     "detach NAME",
		Short:   "Take a volume out of the tree; its files stay",
		Example: `  penstock volume detach datasets`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.with(cmd.Context(), func(s *client.Session) error {
				v, err := volumeByName(cmd.Context(), s, args[0])
				if err != nil {
					return err
				}
				_, err = s.Admin(cmd.Context(), wire.Admin{Op: wire.AdminDetach, Name: args[0], Volume: v.ID})
				return err
			})
		},
	}
	w.flags(cmd)
	return cmd
}

func newVolumeDelete() *cobra.Command {
	var w where
	var yes bool
	cmd := &cobra.Command{
		Use:   "delete NAME",
		Short: "Delete a volume with everything in it",
		Long: `Deletes a volume with everything in it, for ever. It must be detached first.
On a terminal the command asks; a script gives --yes.`,
		Example: `  penstock volume delete scratch --yes`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return w.with(cmd.Context(), func(s *client.Session) error {
				v, err := volumeByName(cmd.Context(), s, args[0])
				if err != nil {
					return err
				}
				if !yes {
					question := fmt.Sprintf("Delete volume %s (%s in %d files) for ever?", v.Name, bytesText(v.Usage.UsedBytes), v.Usage.UsedInodes)
					if err := confirm(cmd, question, v.Name); err != nil {
						return err
					}
				}
				_, err = s.Admin(cmd.Context(), wire.Admin{Op: wire.AdminDeleteVolume, Name: args[0], Volume: v.ID})
				return err
			})
		},
	}
	w.flags(cmd)
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return cmd
}

// confirm asks a person on a terminal to type a word.
func confirm(cmd *cobra.Command, question, word string) error {
	if !isTerminal(cmd.InOrStdin()) {
		return usagef("%s Nobody can be asked here: give --yes", question)
	}
	cmd.PrintErrf("%s Type %q to go on: ", question, word)
	line, err := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
	if err != nil {
		return err
	}
	if strings.TrimSpace(line) != word {
		return fmt.Errorf("nothing was deleted")
	}
	return nil
}
