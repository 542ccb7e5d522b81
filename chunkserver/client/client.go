// Package client owns the user's side of the chunk protocol: append pipelines
// to every replica of a chunk, verified reads, and local descriptors.
package client

import (
	"container/list"
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/wire"
	"penstock.io/penstock/meta"
	peering "penstock.io/penstock/meta/peer"
)

// Config says where chunk servers are and who is asking.
type Config struct {
	// Resolve tells where a chunk server is reached now. Called often; it must
	// not block.
	Resolve func(meta.ServerID) (meta.ServerInfo, bool)
	// ReadCap gives a valid capability to read the chunks of a volume (nil: none).
	ReadCap func(meta.VolumeID) []byte
	// AppendCap renews the capability of a grant with a TTL, and tells how long
	// the new one holds; nil: it can't be renewed.
	AppendCap func(context.Context, meta.ChunkID) ([]byte, time.Duration, error)
	// ReadChunkCap, if not nil, gives the capability for one chunk instead.
	ReadChunkCap func(meta.ChunkID) []byte
	// Name tells the servers who we are, for their logs.
	Name string
	// HostID is this machine's boot id: a server with the same one passes
	// descriptors. Empty: never.
	HostID string
	Logger *slog.Logger // nil: slog.Default()
	// Creds are shown to servers reached over TCP; nil: Unix sockets only.
	Creds *peering.Credentials
	// Window is the most bytes of one Writer that may be unacknowledged; 0
	// means 16 MiB.
	Window int64
	// Files is the most descriptors of chunks to keep; 0 means 512.
	Files int
	// Congestion is the TCP congestion control to ask for ("" leaves the
	// machine's default).
	Congestion string
	// Timeout is how long a server that owes an answer may show no sign of
	// life before it counts as failed; 0 means 1.2 s. A server that is busy, on
	// a slow disk, gives such signs. Connecting may take as long.
	Timeout time.Duration
	// Topology is where this client stands, /dc/rack/node; empty: where a server
	// on the same machine does.
	Topology string
	// Servers lists the servers there are, for Topology; may be nil. One that is
	// alone is given eight times Timeout, since there is nowhere else to go.
	Servers func() []meta.ServerInfo
	// Corrupt is told of replicas that did not verify; it must not block. May be nil.
	Corrupt func(meta.ChunkID, meta.ServerID)
	// Renew gives another capability to read in place of one that a server did
	// not accept; nil: ReadCap.
	Renew func(id meta.ChunkID, old []byte) []byte
	// Conns bounds the connections to one server for reading, and as many for
	// appending; 0 means 4.
	Conns int
	// Direct, if not nil, gives servers that live in this process: appends and
	// syncs are then plain calls, without sockets, copies or capabilities
	// (fences count all the same). nil for any other server.
	Direct func(meta.ServerID) chunkserver.Service
	// NoShare: send appends through the socket even on the same machine.
	NoShare bool
	// UnsafeNoVerify believes whatever servers and disks say (positive control).
	UnsafeNoVerify bool
}

// limit is how long silence is borne.
func (c *Config) limit() time.Duration {
	if c.Servers != nil && len(c.Servers()) == 1 {
		return 8 * c.Timeout
	}
	return c.Timeout
}

// Client reads and appends chunks. It is safe for concurrent use.
type Client struct {
	cfg  Config
	slog *slog.Logger

	mu     sync.Mutex
	closed bool
	peers  map[meta.ServerID]*peer
	files  map[meta.ChunkID]*file
	noFile map[badReplica]time.Time // chunks that servers on this machine give no file of, and until when that is believed
	lru    list.List                // of *file, least recently used in front

	checked atomic.Uint64 // bytes compared with checksums
	taken   atomic.Uint64 // times that a reader took bytes out of a socket himself
	place   atomic.Pointer[place]
	lat     latency

	toldMu sync.Mutex
	told   map[badReplica]time.Time // corrupt replicas, when it was said last

	runs   map[meta.ChunkID]*run // that are read in order; guarded by mu
	pieces chan struct{}         // bounds what is fetched ahead
	held   time.Duration         // aheadHold
	ctx    context.Context       // of what is fetched ahead
	cancel context.CancelFunc

	ahead chan struct{} // bounds prefetches under way
	stop  chan struct{}
	wg    sync.WaitGroup
}

// New makes a client. Close it when done.
func New(cfg Config) *Client {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Window <= 0 {
		cfg.Window = 16 << 20
	}
	if cfg.Files <= 0 {
		cfg.Files = 512
	}
	if cfg.Timeout <= 0 {
		cfg.Timeout = 1200 * time.Millisecond
	}
	if cfg.Conns <= 0 {
		cfg.Conns = 4
	}
	if cfg.Direct == nil {
		cfg.Direct = func(meta.ServerID) chunkserver.Service { return nil }
	}
	if cfg.ReadCap == nil {
		cfg.ReadCap = func(meta.VolumeID) []byte { return nil }
	}
	c := &Client{
		cfg: cfg, slog: cfg.Logger, peers: map[meta.ServerID]*peer{}, files: map[meta.ChunkID]*file{},
		ahead: make(chan struct{}, 4), stop: make(chan struct{}),
		runs: map[meta.ChunkID]*run{}, pieces: make(chan struct{}, maxAhead), held: aheadHold,
	}
	c.lat.tokens = hedgeBurst
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.wg.Go(c.janitor)
	return c
}

// Checked is the number of bytes of local chunks that this client compared with
// their checksums itself: those that the server had not verified yet.
func (c *Client) Checked() uint64 { return c.checked.Load() }

// Close ends all connections; operations in flight fail.
func (c *Client) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	close(c.stop)
	c.cancel()
	links := c.linksLocked()
	files := c.files
	c.files = nil
	c.lru.Init()
	c.mu.Unlock()
	for _, l := range links {
		l.fail(meta.E("chunk client", meta.Canceled, "", nil))
	}
	for _, f := range files {
		f.unref()
	}
	c.dropRuns(true)
	c.wg.Wait()
	return nil
}

func (c *Client) linksLocked() (links []*link) {
	for _, p := range c.peers {
		p.mu.Lock()
		for _, pool := range p.pools {
			links = append(links, pool...)
		}
		p.mu.Unlock()
	}
	return links
}

// janitor watches connections and lets go of deleted chunks, whose space the
// disk can't give back while we hold descriptors.
func (c *Client) janitor() {
	period := min(max(c.cfg.Timeout/10, 10*time.Millisecond), time.Second)
	tick := time.NewTicker(period)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-c.stop:
			return
		case now := <-tick.C:
			c.mu.Lock()
			links := c.linksLocked()
			c.mu.Unlock()
			limit := c.cfg.limit()
			for _, l := range links {
				l.watch(now, limit)
			}
			if n%8 == 0 {
				c.dropDeleted()
				c.dropRuns(false)
			}
		}
	}
}

// readCap is the right to read a chunk.
func (c *Client) readCap(id meta.ChunkID) []byte {
	if c.cfg.ReadChunkCap != nil {
		return c.cfg.ReadChunkCap(id)
	}
	return c.cfg.ReadCap(id.Volume)
}

// Stat asks a server what it knows of a chunk. Errors: NoSuchChunk,
// Unavailable, BadCapability.
func (c *Client) Stat(ctx context.Context, server meta.ServerID, id meta.ChunkID) (chunkserver.Info, error) {
	q := wire.Request{Cap: c.readCap(id), Chunk: id}
	k := &call{t: wire.Stat}
	err := c.ask(ctx, server, &q, k, 0)
	return k.answer.Info, err
}

// Seal freezes or seals a chunk on one server, with a capability for it; as
// chunkserver.Service.Seal.
func (c *Client) Seal(ctx context.Context, server meta.ServerID, token []byte, id meta.ChunkID, fence meta.Fence, final bool, length uint64) (chunkserver.Info, error) {
	q := wire.Request{Cap: token, Chunk: id, Fence: fence, Final: final, Off: length}
	k := &call{t: wire.Seal}
	err := c.ask(ctx, server, &q, k, 0)
	return k.answer.Info, err
}

// Delete removes a chunk from one server, with a capability for it.
func (c *Client) Delete(ctx context.Context, server meta.ServerID, token []byte, id meta.ChunkID, fence meta.Fence) error {
	q := wire.Request{Cap: token, Chunk: id, Fence: fence}
	return c.ask(ctx, server, &q, &call{t: wire.Delete}, 0)
}

// ask does one request on any connection to a server. A connection that broke
// while idle is found out by using it: once more, then.
func (c *Client) ask(ctx context.Context, server meta.ServerID, q *wire.Request, k *call, flags uint16) error {
	for try := 0; ; try++ {
		l, err := c.peer(server).link(ctx, c.pool(forOthers, q.Cap))
		if err != nil {
			return err
		}
		err = l.do(ctx, q, k, flags)
		l.release()
		if meta.KindOf(err) != meta.Unavailable || try > 0 || ctx.Err() != nil {
			return err
		}
	}
}
