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
	client, err := penstock.Dial(ctx, cfg.Client)
	if err != nil {
		return err
	}
	defer func() {
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
	id, ino, err := Resolve(ctx, tree, root.ID(), dir)
	if err != nil {
		return err
	}
	m, err := New(ctx, Config{
		Tree: tree, Notifier: notifier, Logger: cfg.Client.Logger, Volume: id, Root: ino,
		Dir: cfg.Dir, Source: root.Name() + ":" + strings.TrimSuffix(dir, "/"), Options: cfg.Options,
	})
	if err != nil {
		return err
	}
	if cfg.Ready != nil {
		cfg.Ready(m, client)
	}
	select {
	case <-m.Done():
		return nil
	case <-ctx.Done():
	}
	grace := cfg.Grace
	if grace == 0 {
		grace = defaultGrace
	}
	return m.Stop(context.WithoutCancel(ctx), grace, cfg.Force)
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
