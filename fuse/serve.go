package fuse

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

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
	// Settling is told of a mount that has ended, once what was written to it is being
	// made durable; nil: nobody is.
	Settling func(*Mount)
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
		if keeping, err = hold.keeping(ctx); err != nil {
			return err
		}
		defer keeping.close()
	}
	taking, taken := ctx, func() {}
	if keeping != nil && keeping.Left != nil {
		taking, taken = keeping.hold.taking(ctx)
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
		if keeping != nil && keeping.Left != nil && err != nil && !served {
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
			err = errors.Join(err, keeping.drop())
		}
	}()
	root, id, ino, err := src.find(taking, client, keeping, cfg.Client.Logger)
	if err != nil {
		return err
	}
	if cfg.Admit != nil {
		if err := cfg.Admit(taking, root); err != nil {
			return err
		}
	}
	if keeping != nil {
		keeping.Session, keeping.Count, keeping.Resumed = client.Session(), client, client.Resumed
		keeping.asked, keeping.base = src.String(), root.ID()
	}
	m, err := New(taking, Config{
		Tree: ClientTree(client), Notifier: notifier, Logger: cfg.Client.Logger, Volume: id, Root: ino,
		Dir: cfg.Dir, Source: root.Name() + ":" + strings.TrimSuffix(src.dir, "/"), Options: cfg.Options, Keeping: keeping,
	})
	if err != nil {
		return err
	}
	taken()
	served, held = true, m.held
	if cfg.Ready != nil {
		cfg.Ready(m, client)
	}
	var yield <-chan struct{}
	var leave, lost <-chan struct{}
	if m.held {
		yield, leave, lost = keeping.yield(), cfg.Leave, keeping.lost()
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
		case keeping.leave(ctx, m.Done()):
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
func (s source) find(ctx context.Context, c *penstock.Client, k *Keeping, log *slog.Logger) (root *penstock.Volume, id meta.VolumeID, ino meta.Ino, err error) {
	if k == nil || k.Left == nil {
		return s.resolve(ctx, c)
	}
	h := &k.Left.head
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

// keepArena is the room for what is written and not committed, as a multiple of
// the write buffer: buffers of each size keep to themselves.
const keepArena = 4

// keeping asks the holder for what a predecessor left, and has the client leave
// as much.
func (h *hold) keeping(ctx context.Context) (*Keeping, error) {
	cfg := h.cfg
	dir, err := MountPath(cfg.Dir)
	if err != nil {
		return nil, err
	}
	outliveNamespace(cfg.Client.Logger)
	device, memory, found, err := cfg.Hold.Take(dir, cfg.Replace)
	if err != nil {
		return nil, err
	}
	if found && (ended(int(device.Fd())) || !cfg.Replace && !cfg.Must && elsewhere(dir, memory)) {
		// Unmounted while nobody served, by force, or while something used it: then a
		// successor that the holder starts would serve that still, who is started by
		// others is to mount.
		taking, stop := h.taking(ctx)
		err := h.settle(taking, dir, device, memory)
		stop()
		closeAll([]*os.File{device, memory})
		if err != nil {
			return nil, err
		}
		found = false
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
		k.Left.follow(&cfg.Client)
	}
	if k.Memory, err = cfg.keep(); err != nil {
		k.close()
		return nil, err
	}
	cfg.Client.Keep, cfg.Client.Process, cfg.Client.Linger = k.Memory, cfg.Hold.Process(), cfg.Hold.Patience()
	k.Put = func(connection uint64, device, memory int) error { return h.put(dir, connection, device, memory) }
	return k, nil
}

func (cfg *ServeConfig) keep() (*keep.Memory, error) {
	return keep.New(keepArena * max(cfg.Client.WriteBuffer, 64<<20))
}

// follow has a client go on with the session of the predecessor.
func (l *Left) follow(cfg *penstock.Config) {
	cfg.Left, cfg.Session, cfg.Generation = l.Memory, l.Session(), l.Generation()
}

// ended reports whether a connection to the kernel has ended.
func ended(device int) bool {
	p := []unix.PollFd{{Fd: int32(device), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return err == nil && n == 1 && p[0].Revents&unix.POLLERR != 0
}

// elsewhere reports whether a predecessor's mount is not the one that is at dir.
func elsewhere(dir string, memory *os.File) bool {
	left, err := OpenLeft(int(memory.Fd()))
	if err != nil {
		return false
	}
	defer left.Close()
	n := left.head.Connection
	return n != 0 && n != connectionAt(dir)
}

// settle makes durable what was written to a mount that has ended while nobody
// served it, and ends its session; the holder forgets it.
func (h *hold) settle(ctx context.Context, dir string, device, memory *os.File) (err error) {
	log := h.cfg.Client.Logger
	log.Warn("a mount ended while nobody served it; what was written to it is made durable", "dir", dir)
	left, err := OpenLeft(int(memory.Fd()))
	if err != nil {
		return err
	}
	defer left.Close()
	records, err := left.Records()
	if err != nil {
		return err
	}
	cfg := h.cfg.Client
	cfg.Notify, cfg.Process = NewNotifier(), h.Process()
	left.follow(&cfg)
	if cfg.Keep, err = h.cfg.keep(); err != nil {
		return err
	}
	defer cfg.Keep.Close()
	client, err := penstock.Dial(ctx, cfg)
	if err != nil {
		return err
	}
	// Killed until the end, the memory of then is as it was: another process may begin
	// anew with it.
	f, err := newFileSystem(ctx, &Config{Tree: ClientTree(client), Logger: log, Volume: left.head.Volume, Root: left.head.Root})
	if meta.KindOf(err) == meta.NoSuchVolume {
		client.Resumed()
		log.Error("what was written to a mount last is lost: its volume is gone", "dir", dir, "err", err)
		return errors.Join(client.Close(ctx), h.Put(dir, h.cfg.Start, 0, device, memory), h.Drop(dir))
	}
	if err != nil {
		client.Leave()
		return err
	}
	f.dir, f.incarnation = dir, left.head.Incarnation
	f.restorePages(records, left.Bytes)
	client.Resumed()
	if h.cfg.Settling != nil {
		h.cfg.Settling(&Mount{dir: dir, fs: f, log: log})
	}
	if err = f.drain(ctx); ctx.Err() != nil {
		client.Leave()
		return errors.Join(err, context.Cause(ctx))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if err = errors.Join(err, client.Close(ctx)); err != nil {
		// Nobody has a descriptor any more that could be told.
		log.Error("not everything that was written to a mount is durable, and it is lost", "dir", dir, "err", err)
	}
	return errors.Join(h.Put(dir, h.cfg.Start, 0, device, memory), h.Drop(dir))
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
