package fuse

import (
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
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
	// Hold leaves the mount to a successor through a holder: Serve takes over what
	// it has under Dir, and else mounts and gives it to it. Start is how that
	// successor is started.
	Hold  *Hold
	Start Start
	// Redial reaches the holder again when it was itself replaced; nil: not tried.
	Redial func(context.Context) (*Hold, error)
	// Replace takes the mount from a process that serves it; then, or with Must,
	// Serve fails with NotFound if the holder doesn't have it.
	Replace bool
	Must    bool
	// Leave ends Serve with ErrYielded, the mount stays with the holder; nil: never.
	Leave <-chan struct{}
}

// Defaults and bounds of the end of a mount.
const (
	defaultGrace = 10 * time.Second
	closeTimeout = 30 * time.Second // to make durable what is left, and to end the session
)

// Serve connects, mounts, and serves until ctx ends or somebody unmounts. Then
// everything is durable, or it fails and says what is not. It ends within
// Grace and half a minute.
func Serve(ctx context.Context, cfg ServeConfig) (err error) {
	volume, snapshot, dir, err := ParseSource(cfg.Source)
	if err != nil {
		return err
	}
	notifier := NewNotifier()
	cfg.Client.Notify = notifier
	var keeping *Keeping
	if cfg.Hold != nil {
		hold := &hold{Hold: cfg.Hold, cfg: &cfg}
		// Who yields keeps the connection to the end of the process: until then it
		// serves.
		defer func() {
			if !errors.Is(err, ErrYielded) {
				hold.Close()
			}
		}()
		if keeping, err = hold.keeping(); err != nil {
			return err
		}
		defer keeping.close()
	}
	client, err := penstock.Dial(ctx, cfg.Client)
	if err != nil {
		return err
	}
	served := false
	defer func() {
		if errors.Is(err, ErrYielded) {
			return // another process goes on with the session
		}
		if keeping != nil && keeping.Left != nil && err != nil && !served {
			client.Leave() // another process may try
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		err = errors.Join(err, client.Close(ctx))
	}()
	root, err := rootVolume(ctx, client, volume, snapshot)
	if err != nil {
		return err
	}
	if cfg.Admit != nil {
		if err := cfg.Admit(ctx, root); err != nil {
			return err
		}
	}
	tree := ClientTree(client)
	var id meta.VolumeID
	var ino meta.Ino
	if keeping != nil && keeping.Left != nil {
		id, ino = keeping.Left.head.Volume, keeping.Left.head.Root // it may have been renamed
	} else if id, ino, err = Resolve(ctx, tree, root.ID(), dir); err != nil {
		return err
	}
	if keeping != nil {
		keeping.Session, keeping.Count, keeping.Resumed = client.Session(), client, client.Resumed
	}
	m, err := New(ctx, Config{
		Tree: tree, Notifier: notifier, Logger: cfg.Client.Logger, Volume: id, Root: ino,
		Dir: cfg.Dir, Source: root.Name() + ":" + strings.TrimSuffix(dir, "/"), Options: cfg.Options, Keeping: keeping,
	})
	if err != nil {
		return err
	}
	served = true
	if m.held {
		defer func() {
			if !errors.Is(err, ErrYielded) {
				err = errors.Join(err, keeping.drop())
			}
		}()
	}
	if cfg.Ready != nil {
		cfg.Ready(m, client)
	}
	var yield <-chan struct{}
	var leave <-chan struct{}
	if m.held {
		yield, leave = keeping.yield(), cfg.Leave
	}
	select {
	case <-m.Done():
		return nil
	case <-yield:
		m.yielding(ctx)
		return ErrYielded
	case <-leave:
		m.yielding(ctx)
		return ErrYielded
	case <-ctx.Done():
	}
	grace := cfg.Grace
	if grace == 0 {
		grace = defaultGrace
	}
	return m.Stop(context.WithoutCancel(ctx), grace, cfg.Force)
}

// keepArena is the room for what is written and not committed, as a multiple of
// the write buffer: buffers of each size keep to themselves.
const keepArena = 4

// keeping asks the holder for what a predecessor left, and has the client leave
// as much.
func (h *hold) keeping() (*Keeping, error) {
	cfg := h.cfg
	dir, err := MountPath(cfg.Dir)
	if err != nil {
		return nil, err
	}
	device, memory, found, err := cfg.Hold.Take(dir, cfg.Replace)
	if err != nil {
		return nil, err
	}
	if !found && (cfg.Replace || cfg.Must) {
		return nil, meta.E("take over mount", meta.NotFound, dir, errors.New("the holder doesn't have it"))
	}
	k := &Keeping{hold: h}
	if found {
		defer memory.Close()
		k.device = device
		k.Device = int(device.Fd())
		if k.Left, err = OpenLeft(int(memory.Fd())); err != nil {
			k.close()
			return nil, err
		}
		cfg.Client.Left, cfg.Client.Session, cfg.Client.Generation = k.Left.Memory, k.Left.Session(), k.Left.Generation()
	}
	if k.Memory, err = keep.New(keepArena * max(cfg.Client.WriteBuffer, 64<<20)); err != nil {
		k.close()
		return nil, err
	}
	cfg.Client.Keep, cfg.Client.Process = k.Memory, cfg.Hold.Process()
	k.Put = func(device, memory int) error { return h.put(dir, device, memory) }
	return k, nil
}

// close lets go of what was taken. The memory of this process stays mapped until
// it ends: its client may still be at work in it.
func (k *Keeping) close() {
	if k.device != nil {
		k.device.Close()
	}
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
