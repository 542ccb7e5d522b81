package fuse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"strings"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/meta"
)

// ServeConfig says what Serve mounts.
type ServeConfig struct {
	// Client says how to reach the cluster; Serve fills in Notify.
	Client penstock.Config
	// Source is [VOLUME[@SNAPSHOT]:]PATH, the directory to mount; see ParseSource.
	Source  string
	Dir     string
	Options Options
	// Grace is how long a mount in use may go on after ctx ended; 0: 10 s.
	Grace time.Duration
	// Force ends the waiting at once: a second signal.
	Force <-chan struct{}
	// Admit looks at the volume that Source names before it is mounted, and
	// refuses with an error; nil: nobody does.
	Admit func(context.Context, *penstock.Volume) error
	// Ready is told of the live mount; nil: nobody is.
	Ready func(*Mount, *penstock.Client)
	// Settling is told of a mount that has ended, once what was written to it is being
	// made durable; nil: nobody is.
	Settling func(*Mount)
	// Hold leaves the mount to a successor through a holder: Serve takes over what
	// the holder has under Dir, and else mounts, and gives that to the holder. Command starts
	// the successor.
	Hold    *hold.Client
	Command hold.Command
	// Redial reaches the holder again when it was replaced; nil: that is not tried.
	Redial func(context.Context) (*hold.Client, error)
	// Replace takes the mount from a process that serves it; then, or with Must,
	// Serve fails with NotFound if the holder doesn't have it.
	Replace bool
	Must    bool
	// Leave ends Serve with ErrYielded and ErrLeft, the mount stays with the holder
	// for a process that somebody starts; nil: never.
	Leave <-chan struct{}
}

// Defaults and bounds of the end of a mount.
const (
	defaultGrace = 10 * time.Second
	closeTimeout = 30 * time.Second // to end the session, once nothing is left to be made durable
)

// Serve connects, mounts, and serves until ctx ends or somebody unmounts. Then it waits
// until everything that was written is durable, however long that takes, or an operator
// gives it up (Mount.Abandon).
func Serve(ctx context.Context, cfg ServeConfig) (err error) {
	src, err := parseSource(cfg.Source)
	if err != nil {
		return err
	}
	notifier := NewNotifier()
	cfg.Client.Notify = notifier
	var place *hold.Registration
	var succession *Succession
	if cfg.Hold != nil {
		place = hold.NewRegistration(cfg.Hold, hold.RegistrationConfig{Command: cfg.Command, Redial: cfg.Redial, Logger: cfg.Client.Logger})
		// A process that yields keeps the connection to its end: until then it serves.
		defer func() {
			if !errors.Is(err, ErrYielded) {
				place.Close()
			}
		}()
		if succession, err = cfg.succeed(ctx, place); err != nil {
			return err
		}
		defer succession.close()
	}
	taking, taken := ctx, func() {}
	if succession != nil && succession.Predecessor != nil {
		taking, taken = place.Taking(ctx)
		defer func() { taken() }()
	}
	client, err := penstock.Dial(taking, cfg.Client)
	if err != nil {
		return err
	}
	served, held := false, false
	defer func() {
		if errors.Is(err, ErrYielded) {
			return // another process goes on with the session
		}
		if succession != nil && succession.Predecessor != nil && err != nil && !served {
			client.Leave() // another process may try
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		lost := client.Close(ctx)
		err = errors.Join(err, lost)
		// The holder's memory has what is written until all of it is durable: if this
		// process is killed before, or can't, the next one may.
		if held && lost == nil {
			err = errors.Join(err, place.Drop())
		}
	}()
	root, id, ino, err := src.find(taking, client, succession, cfg.Client.Logger)
	if err != nil {
		return err
	}
	if cfg.Admit != nil {
		if err := cfg.Admit(taking, root); err != nil {
			return err
		}
	}
	if succession != nil {
		succession.Session, succession.Count, succession.Resumed = client.Session(), client, client.Resumed
		succession.asked, succession.base = src.String(), root.ID()
	}
	m, err := New(taking, Config{
		Tree: ClientTree(client), Notifier: notifier, Logger: cfg.Client.Logger, Volume: id, Root: ino,
		Dir: cfg.Dir, Source: root.Name() + ":" + strings.TrimSuffix(src.dir, "/"), Options: cfg.Options, Succession: succession,
	})
	if err != nil {
		return err
	}
	taken()
	served, held = true, m.held
	if cfg.Ready != nil {
		cfg.Ready(m, client)
	}
	var yield, leave, lost <-chan struct{}
	if m.held {
		yield, leave, lost = place.Yields(), cfg.Leave, place.Lost()
	}
	select {
	case <-m.Done():
		return nil
	case <-yield:
		m.yielding(ctx)
		return ErrYielded
	case <-leave:
		m.yielding(ctx)
		switch {
		case place.Leave(ctx, m.Done()):
			return errors.Join(ErrYielded, ErrLeft)
		case ctx.Err() == nil:
			return nil // unmounted meanwhile
		}
	case <-lost:
		return ErrYielded // at once: what it writes from now on would be beside the other
	case <-ctx.Done():
	}
	grace := cfg.Grace
	if grace == 0 {
		grace = defaultGrace
	}
	return m.Stop(context.WithoutCancel(ctx), grace, cfg.Force)
}

// ErrYielded is what Serve returns when another process serves the mount now, or
// a holder has it for one that comes: nothing was unmounted.
var ErrYielded = errors.New("the mount goes on without this process")

// ErrLeft is with ErrYielded if no process serves the mount yet.
var ErrLeft = errors.New("its holder waits for a process that serves it")

// yieldSync bounds what is made durable before a process goes; its successor puts the rest
// back.
const yieldSync = 5 * time.Second

// yielding makes things durable before this process goes.
func (m *Mount) yielding(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), yieldSync)
	defer cancel()
	if err := m.syncWithin(ctx); err != nil {
		m.log.Warn("not everything is durable yet: the successor puts it back", "err", err)
	}
}

// source is [VOLUME[@SNAPSHOT]:]PATH.
type source struct{ volume, snapshot, dir string }

func parseSource(text string) (s source, err error) {
	s.volume, s.snapshot, s.dir, err = ParseSource(text)
	return s, err
}

// String is the same for all ways to write it.
func (s source) String() string {
	switch {
	case s.volume == "":
		return s.dir
	case s.snapshot == "":
		return s.volume + ":" + s.dir
	}
	return s.volume + "@" + s.snapshot + ":" + s.dir
}

// find gives the volume or snapshot that the source names, and the directory to
// mount. What is mounted already stays what it is: of that it gives the numbers,
// whatever it is called by now, if this is the source that it was mounted by, or
// one that leads to it; else it fails with Busy.
func (s source) find(ctx context.Context, c *penstock.Client, k *Succession, log *slog.Logger) (root *penstock.Volume, id meta.VolumeID, ino meta.Ino, err error) {
	if k == nil || k.Predecessor == nil {
		return s.resolve(ctx, c)
	}
	h := &k.Predecessor.head
	if h.Asked == s.String() {
		root, err = c.VolumeByID(ctx, h.Base)
		if err == nil && s.volume != "" && !strings.HasPrefix(s.String(), root.Name()+":") {
			log.Info("what is mounted has another name by now", "asked", s.String(), "volume", root.Name())
		}
		return root, h.Volume, h.Root, err
	}
	root, id, ino, err = s.resolve(ctx, c)
	if err == nil && (id != h.Volume || ino != h.Root) {
		err = errors.New("that is another directory")
	}
	if err != nil {
		return nil, 0, 0, meta.E("take over mount", meta.Busy, h.Dir,
			fmt.Errorf("what is mounted there was asked for as %s, and this is %s: %w; unmount it first, or say the same", cmp.Or(h.Asked, h.Source), s, err))
	}
	return root, id, ino, nil
}

func (s source) resolve(ctx context.Context, c *penstock.Client) (root *penstock.Volume, id meta.VolumeID, ino meta.Ino, err error) {
	if root, err = rootVolume(ctx, c, s.volume, s.snapshot); err == nil {
		id, ino, err = Resolve(ctx, ClientTree(c), root.ID(), s.dir)
	}
	return root, id, ino, err
}

func rootVolume(ctx context.Context, c *penstock.Client, name, snapshot string) (*penstock.Volume, error) {
	switch {
	case name == "":
		return c.VolumeByID(ctx, meta.RootVolume)
	case snapshot == "":
		return c.Volume(ctx, name)
	}
	return c.Snapshot(ctx, name, snapshot)
}

// ParseSource takes [VOLUME[@SNAPSHOT]:]PATH apart. Without a volume the path
// begins at the root of the tree. The path is cleaned and begins with "/".
func ParseSource(source string) (volume, snapshot, dir string, err error) {
	volume, dir, found := strings.Cut(source, ":")
	if !found {
		volume, dir = "", source
	}
	volume, snapshot, at := strings.Cut(volume, "@")
	if found && volume == "" || strings.ContainsAny(volume+snapshot, "/@") || at && snapshot == "" || source == "" {
		return "", "", "", meta.E("mount", meta.Invalid, source, errors.New("the source is [VOLUME[@SNAPSHOT]:]PATH, such as /, datasets:/images or datasets@v3:/images"))
	}
	return volume, snapshot, path.Clean("/" + dir), nil
}

// Resolve follows a path of directories from a volume's root, through
// junctions. Symbolic links are not followed: they belong to whoever looks at
// the tree through a mount. Errors: NotFound, NotDir.
func Resolve(ctx context.Context, tree Tree, volume meta.VolumeID, dir string) (meta.VolumeID, meta.Ino, error) {
	ino := meta.RootIno
	for name := range strings.SplitSeq(strings.Trim(dir, "/"), "/") {
		if name == "" {
			continue
		}
		v, err := tree.VolumeByID(ctx, volume)
		if err != nil {
			return 0, 0, err
		}
		e, err := v.Lookup(ctx, ino, name)
		switch {
		case err != nil:
			return 0, 0, err
		case e.Negative:
			return 0, 0, meta.E("mount", meta.NotFound, dir, fmt.Errorf("%q is not in the tree", name))
		case !e.Attr.IsDir():
			return 0, 0, meta.E("mount", meta.NotDir, dir, fmt.Errorf("%q is no directory", name))
		}
		volume, ino = e.Volume, e.Attr.Ino
	}
	return volume, ino, nil
}
