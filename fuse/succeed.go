package fuse

import (
	"context"
	"errors"
	"os"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/fuse/hold"
	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// keepArena is the room for written and uncommitted bytes, as a multiple of the write buffer,
// since buffers of each size have their own room.
const keepArena = 4

// succeed asks the holder for a predecessor's mount, and prepares the client to leave its own
// state to a successor.
func (cfg *ServeConfig) succeed(ctx context.Context, place *hold.Registration) (*Succession, error) {
	dir, err := MountPath(cfg.Dir)
	if err != nil {
		return nil, err
	}
	kernel.OutliveNamespace(cfg.Client.Logger)
	device, memory, found, err := cfg.Hold.Take(dir, cfg.Replace)
	if err != nil {
		return nil, err
	}
	if found && (kernel.Ended(int(device.Fd())) || !cfg.Replace && !cfg.Must && elsewhere(dir, memory)) {
		// While no process served the mount, the mount was unmounted, by force or with a program
		// still inside. If a program is inside, a successor started by the holder continues the
		// old mount, and a process started otherwise makes a new mount.
		taking, stop := place.Taking(ctx)
		err := cfg.settle(taking, dir, device, memory)
		stop()
		device.Close()
		memory.Close()
		if err != nil {
			return nil, err
		}
		found = false
	}
	if !found && (cfg.Replace || cfg.Must) {
		return nil, meta.E("take over mount", meta.NotFound, dir, errors.New("the holder does not have this mount: mount without --replace"))
	}
	k := &Succession{}
	if found {
		defer memory.Close()
		k.device = device
		k.Device = int(device.Fd())
		if k.Predecessor, err = OpenPredecessor(int(memory.Fd())); err != nil {
			k.close()
			return nil, err
		}
		k.Predecessor.follow(&cfg.Client)
	}
	if k.Memory, err = cfg.keep(); err != nil {
		k.close()
		return nil, err
	}
	cfg.Client.Keep, cfg.Client.Process, cfg.Client.Linger = k.Memory, cfg.Hold.Process(), cfg.Hold.Patience()
	k.Put = func(connection uint64, device, memory int) error { return place.Put(dir, connection, device, memory) }
	return k, nil
}

func (cfg *ServeConfig) keep() (*keep.Memory, error) {
	return keep.New(keepArena * max(cfg.Client.WriteBuffer, 64<<20))
}

// follow has a client go on with the session of the predecessor.
func (l *Predecessor) follow(cfg *penstock.Config) {
	cfg.Left, cfg.Session, cfg.Generation = l.Memory, l.Session(), l.Generation()
}

// elsewhere reports whether the mount at dir is another mount than the predecessor's.
func elsewhere(dir string, memory *os.File) bool {
	left, err := OpenPredecessor(int(memory.Fd()))
	if err != nil {
		return false
	}
	defer left.Close()
	n := left.head.Connection
	return n != 0 && n != kernel.ConnectionAt(dir)
}

// settle makes durable the bytes written to a mount that ended while no process served it, and
// ends the mount's session. The holder forgets the mount.
func (cfg *ServeConfig) settle(ctx context.Context, dir string, device, memory *os.File) (err error) {
	log := cfg.Client.Logger
	log.Warn("a mount ended while no process served it: this process makes the mount's bytes durable", "dir", dir)
	left, err := OpenPredecessor(int(memory.Fd()))
	if err != nil {
		return err
	}
	defer left.Close()
	records, err := left.Records()
	if err != nil {
		return err
	}
	session := cfg.Client
	session.Notify, session.Process = NewNotifier(), cfg.Hold.Process()
	left.follow(&session)
	if session.Keep, err = cfg.keep(); err != nil {
		return err
	}
	defer session.Keep.Close()
	client, err := penstock.Dial(ctx, session)
	if err != nil {
		return err
	}
	// If this process is killed before the end, the predecessor's memory is unchanged, and
	// another process may start over with that memory.
	f, err := newFileSystem(ctx, &Config{Tree: ClientTree(client), Logger: log, Volume: left.head.Volume, Root: left.head.Root})
	if meta.KindOf(err) == meta.NoSuchVolume {
		client.Resumed()
		log.Error("the last bytes written to a mount are lost: the mount's volume is gone", "dir", dir, "err", err)
		return errors.Join(client.Close(ctx), cfg.Hold.Put(dir, cfg.Command, 0, device, memory), cfg.Hold.Drop(dir))
	}
	if err != nil {
		client.Leave()
		return err
	}
	f.dir, f.incarnation = dir, left.head.Incarnation
	f.restorePages(records, left.Bytes)
	client.Resumed()
	if cfg.Settling != nil {
		cfg.Settling(&Mount{dir: dir, fs: f, log: log})
	}
	if err = f.drain(ctx); ctx.Err() != nil {
		client.Leave()
		return errors.Join(err, context.Cause(ctx))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if err = errors.Join(err, client.Close(ctx)); err != nil {
		// No program has a descriptor any more that could return the error.
		log.Error("bytes written to a mount are lost: they could not be made durable", "dir", dir, "err", err)
	}
	return errors.Join(cfg.Hold.Put(dir, cfg.Command, 0, device, memory), cfg.Hold.Drop(dir))
}

// close closes the predecessor's device. The memory of this process stays mapped until the
// process ends, since the client may still use the memory.
func (k *Succession) close() {
	if k.device != nil {
		k.device.Close()
	}
}
