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

// ServeConfig configures Serve.
type ServeConfig struct {
	// Client says how to reach the cluster; Serve fills in Notify.
	Client penstock.Config
	// Source is [VOLUME[@SNAPSHOT]:]PATH, the directory to mount; see ParseSource.
	Source  string
	Dir     string
	Options Options
	// Streams makes Config.Streams for the client; nil: the mount shows only the files of streams.
	Streams func(*penstock.Client) Streams
	// Grace is how long a mount in use may go on after ctx ended; 0: 10 s.
	Grace time.Duration
	// Force ends the waiting at once: a second signal.
	Force <-chan struct{}
	// Admit checks the volume of Source before the mount, and refuses with an error; nil: no
	// check.
	Admit func(context.Context, *penstock.Volume) error
	// Ready is called with the live mount; nil: no call.
	Ready func(*Mount, *penstock.Client)
	// Settling is called with a mount that has ended, before its bytes are made durable; nil:
	// no call.
	Settling func(*Mount)
	// Hold leaves the mount to a successor through a holder. If the holder has a mount under
	// Dir, Serve takes over that mount; otherwise Serve mounts and gives the holder the new
	// mount. Command starts the successor.
	Hold    *hold.Client
	Command hold.Command
	// Redial reconnects to a replaced holder; nil: Serve does not reconnect.
	Redial func(context.Context) (*hold.Client, error)
	// Replace takes the mount from the process serving it. With Replace or Must, Serve fails
	// with NotFound if the holder doesn't have the mount.
	Replace bool
	Must    bool
	// Leave ends Serve with ErrYielded and ErrLeft; the mount stays with the holder for a
	// process started later; nil: never.
	Leave <-chan struct{}
}

// Defaults and bounds of the end of a mount.
const (
	defaultGrace = 10 * time.Second
	closeTimeout = 30 * time.Second // to end the session, once nothing is left to be made durable
)

// Serve connects, mounts, and serves until ctx ends or the mount is unmounted. Then Serve
// waits until all written bytes are durable, however long that takes, or an operator gives the
// bytes up (Mount.Abandon).
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
		// A yielding process serves until its end and keeps the connection so long.
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
		// The holder's memory has the written bytes until all bytes are durable. If this
		// process is killed before, or can't make the bytes durable, the next process may.
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
	var streams Streams
	if cfg.Streams != nil {
		streams = cfg.Streams(client)
	}
	m, err := New(taking, Config{
		Streams: streams, Tree: ClientTree(client), Notifier: notifier, Logger: cfg.Client.Logger, Volume: id, Root: ino,
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
		return ErrYielded // at once: another process may already write
	case <-ctx.Done():
	}
	grace := cfg.Grace
	if grace == 0 {
		grace = defaultGrace
	}
	return m.Stop(context.WithoutCancel(ctx), grace, cfg.Force)
}

// ErrYielded is returned by Serve when another process now serves the mount, or a holder has
// the mount for a later process. Serve did not unmount.
var ErrYielded = errors.New("the mount goes on without this process")

// ErrLeft is with ErrYielded if no process serves the mount yet.
var ErrLeft = errors.New("its holder waits for a process that serves it")

// yieldSync bounds the sync of a yielding process; the successor puts back the rest.
const yieldSync = 5 * time.Second

// yielding makes written bytes durable, for yieldSync at most, before this process ends.
func (m *Mount) yielding(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), yieldSync)
	defer cancel()
	if err := m.syncWithin(ctx); err != nil {
		m.log.Warn("not all bytes are durable yet: the successor makes the rest durable", "err", err)
	}
}

// source is [VOLUME[@SNAPSHOT]:]PATH.
type source struct{ volume, snapshot, dir string }

func parseSource(text string) (s source, err error) {
	s.volume, s.snapshot, s.dir, err = ParseSource(text)
	return s, err
}

// String returns the same text for all spellings of a source.
func (s source) String() string {
	switch {
	case s.volume == "":
		return s.dir
	case s.snapshot == "":
		return s.volume + ":" + s.dir
	}
	return s.volume + "@" + s.snapshot + ":" + s.dir
}

// find returns the volume or snapshot named by the source, and the volume and inode number of
// the directory to mount. After a take-over the mounted directory stays: find returns the
// predecessor's numbers, even after a rename, if the source is the predecessor's source or
// resolves to the mounted directory. Otherwise find fails with Busy.
func (s source) find(ctx context.Context, c *penstock.Client, k *Succession, log *slog.Logger) (root *penstock.Volume, id meta.VolumeID, ino meta.Ino, err error) {
	if k == nil || k.Predecessor == nil {
		return s.resolve(ctx, c)
	}
	h := &k.Predecessor.head
	if h.Asked == s.String() {
		root, err = c.VolumeByID(ctx, h.Base)
		if err == nil && s.volume != "" && !strings.HasPrefix(s.String(), root.Name()+":") {
			log.Info("the mounted volume or snapshot was renamed", "asked", s.String(), "volume", root.Name())
		}
		return root, h.Volume, h.Root, err
	}
	root, id, ino, err = s.resolve(ctx, c)
	if err == nil && (id != h.Volume || ino != h.Root) {
		err = errors.New("that is another directory")
	}
	if err != nil {
		return nil, 0, 0, meta.E("take over mount", meta.Busy, h.Dir,
			fmt.Errorf("%s is mounted there, and %s was asked for: %w; unmount it first, or ask for the same", cmp.Or(h.Asked, h.Source), s, err))
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

// Resolve follows a path of directories from a volume's root, through junctions. Resolve
// follows no symbolic link, since a link belongs to the users of the tree. Errors: NotFound,
// NotDir.
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
