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
	"penstock.io/penstock/meta"
	peering "penstock.io/penstock/meta/peer"
)

// Config has the means to reach chunk servers, and the identity of the client.
type Config struct {
	// Resolve returns the present address of a chunk server. The client calls Resolve often;
	// Resolve must not block.
	Resolve func(meta.ServerID) (meta.ServerInfo, bool)
	// ReadCap gives a valid capability to read the chunks of a volume (nil: none).
	ReadCap func(meta.VolumeID) []byte
	// AppendCap renews the capability of a grant with a TTL, and returns the lifetime of the
	// new one; nil: capabilities can't be renewed.
	AppendCap func(context.Context, meta.ChunkID) ([]byte, time.Duration, error)
	// ReadChunkCap, if not nil, returns the capability for one chunk, in place of ReadCap.
	ReadChunkCap func(meta.ChunkID) []byte
	// Name identifies the client in the logs of servers.
	Name string
	// HostID is this machine's boot id: a server with the same id passes descriptors. Empty:
	// no server does.
	HostID string
	Logger *slog.Logger // nil: slog.Default()
	// Creds are shown to servers reached over TCP; nil: Unix sockets only.
	Creds *peering.Credentials
	// Window bounds the unacknowledged bytes of one Writer; 0 means 16 MiB.
	Window int64
	// Files is the most descriptors of chunks to keep; 0 means 512.
	Files int
	// Congestion is the TCP congestion control to ask for ("" leaves the
	// machine's default).
	Congestion string
	// Timeout is how long a server that owes an answer may show no sign of life before it
	// counts as failed; 0 means 1.2 s. A server with a slow disk still shows signs of life.
	// The same bound holds for connecting.
	Timeout time.Duration
	// Topology is the location of this client, /dc/rack/node; empty: the client takes the
	// location of a server on this machine.
	Topology string
	// Servers lists all servers, for Topology; may be nil. A single server gets eight times
	// Timeout, since there is no alternative.
	Servers func() []meta.ServerInfo
	// Corrupt is called for replicas with wrong checksums; it must not block. May be nil.
	Corrupt func(meta.ChunkID, meta.ServerID)
	// Renew returns a new capability to read in place of the capability that a server refused;
	// nil: ReadCap.
	Renew func(id meta.ChunkID, old []byte) []byte
	// Conns bounds the connections to one server for reading, and the connections for
	// appending; 0 means 4.
	Conns int
	// Direct, if not nil, returns a server that lives in this process, and nil for any other
	// server. The client calls such a server for appends and syncs directly, without sockets,
	// copies or capabilities (fences apply all the same).
	Direct func(meta.ServerID) chunkserver.Service
	// NoShare: send appends through the socket even on the same machine.
	NoShare bool
	// UnsafeNoVerify trusts all bytes of servers and disks (positive control).
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
	noFile map[badReplica]time.Time // chunks without a file on a local server; the value ends the assumption
	lru    list.List                // of *file, least recently used in front

	checked atomic.Uint64 // bytes compared with checksums
	taken   atomic.Uint64 // how often a reader itself took bytes out of a socket
	place   atomic.Pointer[place]
	lat     latency

	toldMu sync.Mutex
	told   map[badReplica]time.Time // corrupt replicas, and when each was last reported

	runs   map[meta.ChunkID]*run // chunks being read in order; guarded by mu
	pieces chan struct{}         // bounds the pieces fetched ahead
	held   time.Duration         // aheadHold
	ctx    context.Context       // of fetching ahead
	cancel context.CancelFunc

	ahead chan struct{} // bounds prefetches under way
	stop  chan struct{}
	wg    sync.WaitGroup
}

// New makes a client. The caller must call Close.
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

// Checked returns the number of bytes of local chunks that this client itself compared with
// checksums, because the server had not verified the bytes yet.
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

// janitor watches connections and closes the files of deleted chunks, whose space the disk
// can't free while a descriptor is open.
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
