package penstock

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"time"

	chunkclient "penstock.io/penstock/chunkserver/client"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	metaclient "penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/keep"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/wire"
)

// Dial connects to a cluster. Errors: Unavailable when no metadata server answers before ctx
// ends.
func Dial(ctx context.Context, cfg Config) (*Client, error) {
	c := newClient(cfg)
	if c.cfg.Host == "" {
		c.cfg.Host = process.Boot()
	}
	// Grants and recalls come only after the first operation, so the handler
	// is whole by then; an expiry may come earlier and finds nothing to void.
	mc := metaclient.Config{Addrs: cfg.Meta, Name: cfg.Name, Handler: c, Logger: c.log, Host: c.cfg.Host, Creds: cfg.Creds, Succeeded: cfg.Keep != nil, Linger: cfg.Linger, Streams: cfg.Streams}
	if p := cfg.Process; p.PID != 0 {
		mc.Host, mc.PID, mc.Start = p.Space(), uint32(p.PID), p.Start
	}
	if cfg.Creds.Identity().Role == peer.Meta {
		// Commands on the machine of a metadata server use the server's certificate, which may
		// administer and is no client of any volume.
		mc.Role = wire.RoleAdmin
	}
	var left []keep.Record
	if cfg.Left != nil {
		var err error
		if left, err = cfg.Left.Records(); err != nil {
			c.cancel()
			return nil, err
		}
		mc.Session, mc.Generation, mc.Joined = cfg.Session, cfg.Generation, volumesOf(left)
	}
	s, err := metaclient.Dial(ctx, mc)
	if err != nil {
		c.cancel()
		return nil, err
	}
	io := chunkclient.New(chunkclient.Config{
		Resolve: s.Resolve, ReadChunkCap: s.ReadChunkCap, Renew: s.RenewChunkCap, AppendCap: s.AppendCap, Name: cfg.Name, HostID: c.cfg.Host, Logger: c.log, Creds: cfg.Creds, UnsafeNoVerify: cfg.UnsafeNoVerify,
		Topology: cfg.Topology, Servers: s.Servers, Congestion: cfg.Congestion,
		Corrupt: func(id meta.ChunkID, server meta.ServerID) {
			s.Trouble(id.Volume, nil, []wire.BadReplica{{Chunk: id, Server: server}})
		},
	})
	known := func() (addrs []string) {
		for _, m := range s.MetaServers() {
			addrs = append(addrs, m.Addr)
		}
		return addrs
	}
	c.attach(session{s, &administration{cfg: admin.Config{Addrs: cfg.Meta, Known: known, Creds: cfg.Creds}}}, chunkPool{io})
	if cfg.MetaIdle > 0 {
		c.spawn(func() { c.table.evictIdle(cfg.MetaIdle) })
	}
	if cfg.Left != nil {
		if err := c.resume(ctx, left); err != nil {
			c.cancel() // the session stays for another try
			s.Leave()
			c.wg.Wait()
			return nil, errors.Join(err, io.Close())
		}
	}
	return c, nil
}

// session translates between the types of meta/client and those of this package.
type session struct {
	*metaclient.Session
	administration *administration
}

func (s session) Close(ctx context.Context) error {
	return errors.Join(s.Session.Close(ctx), s.administration.close())
}

func (s session) Do(ctx context.Context, v meta.VolumeID, epoch uint64, id meta.OpID, op meta.Op, want meta.LeaseMode, over func()) (*meta.Result, error) {
	return s.DoThrough(ctx, v, epoch, id, op, want, over)
}

func (s session) DoBatch(ctx context.Context, v meta.VolumeID, epoch uint64, ops []batchOp) ([]meta.Result, []error, error) {
	l := make([]metaclient.BatchOp, len(ops))
	for i, o := range ops {
		l[i] = metaclient.BatchOp(o)
	}
	return s.Session.DoBatch(ctx, v, epoch, l)
}

func (s session) Suspect(v meta.VolumeID, servers []meta.ServerID) { s.Trouble(v, servers, nil) }

func (s session) Volume(ctx context.Context, id meta.VolumeID, name string) (volumeInfo, error) {
	v, err := s.LookUpVolume(ctx, id, name)
	if err != nil {
		return volumeInfo{}, err
	}
	if v.Deleting {
		return volumeInfo{}, meta.E("open volume", meta.NoSuchVolume, name, nil)
	}
	return volumeInfo{v.ID, v.Name, v.Policy}, nil
}

// chunkPool is chunkserver/client with interfaces in place of its writers.
type chunkPool struct{ *chunkclient.Client }

func (p chunkPool) NewWriter(g meta.ChunkGrant) chunkWriter { return p.Client.NewWriter(g) }

func (s session) ListSnapshots(ctx context.Context, v meta.VolumeID) ([]meta.Snapshot, error) {
	return s.ListViews(ctx, v)
}

// newClient makes a client without connections. attach adds the connections, because the
// session needs the client as its handler.
func newClient(cfg Config) *Client {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.WriteBuffer == 0 {
		cfg.WriteBuffer = defaultWriteBuffer
	}
	cfg.WriteBuffer = max(cfg.WriteBuffer, minWriteBuffer)
	if cfg.MetaCache <= 0 {
		cfg.MetaCache = defaultMetaCache
	}
	if cfg.FlushEvery <= 0 {
		cfg.FlushEvery = time.Second
	}
	c := &Client{
		cfg: cfg, log: cfg.Logger,
		volumes:      make(map[meta.VolumeID]*Volume),
		expired:      make(map[meta.VolumeID]uint64),
		flushEvery:   cfg.FlushEvery,
		flushBytes:   min(cfg.WriteBuffer/8, groupBytes),
		streamCommit: min(cfg.WriteBuffer/4, 64<<20),
	}
	c.buf.max, c.buf.keep = cfg.WriteBuffer, cfg.Keep
	c.kept.init(&c.cfg)
	c.views.keep = cfg.Keep
	c.table = table{c: c, max: cfg.MetaCache, m: make(map[inodeKey]*inode)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	c.incarnation = binary.BigEndian.Uint64(b[:]) | 1
	return c
}

func (c *Client) attach(s metaSession, chunks chunkIO) {
	c.sess, c.chunks = s, chunks
	c.kept.session, _ = s.(counted)
}
