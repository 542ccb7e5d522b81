package penstock

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/process"
	"penstock.io/penstock/meta/task"
)

// Config says how to reach a cluster and how much memory to use.
type Config struct {
	// Meta are the addresses of meta servers: "unix:/path" or "host:port".
	Meta []string
	// Name identifies this client for people: host, process, mount point.
	Name string
	// Host is the boot id of this machine; empty: Dial reads it from the kernel.
	Host string
	// Topology is the location of this client, /dc/rack/node, for reads from the nearest
	// replica; empty: the location of a chunk server on this machine.
	Topology string
	// Congestion is the TCP congestion control of connections to chunk servers;
	// empty leaves the machine's default.
	Congestion string
	// Creds are shown to servers reached over TCP; nil: Unix sockets only.
	Creds *peer.Credentials
	// Streams: the client serves streams, or copies them. Other clients can't change the
	// contents of a stream's files (meta.FlagStream), nor make names beside the files.
	Streams bool
	// UnsafeNoVerify skips the verification of read bytes (positive control).
	UnsafeNoVerify bool
	// UnsafeNoGrowthSync tells other clients the length of a file without a sync; a control of
	// tests.
	UnsafeNoGrowthSync bool
	// UnsafeNoLaunder gives leases back without flushing the kernel's dirty pages of shared
	// mappings (positive control).
	UnsafeNoLaunder bool
	// UnsafeTellOne returns a failure to the first handle that could report the failure, and
	// to no other handle (positive control).
	UnsafeTellOne bool
	// UnsafeNoSpaceWait gives a recalled file up although its bytes may become durable once
	// there is space (positive control).
	UnsafeNoSpaceWait bool
	// Logger receives messages that belong to no call; nil: slog.Default().
	Logger *slog.Logger
	// WriteBuffer bounds the written bytes that are not durable yet, in bytes; writers wait
	// when the buffer is full. 0: 256 MiB. At least 8 MiB.
	WriteBuffer int64
	// MetaCache bounds the cached inodes, each of which takes less than 500 bytes; 0: 500,000.
	// Open inodes and inodes with unsynced bytes stay cached beyond the bound.
	MetaCache int
	// MetaIdle is the time after which an inode that nobody used leaves the cache, and the client
	// gives the inode's lease back: after once to twice the time. 0: only MetaCache bounds the cache.
	MetaIdle time.Duration
	// Notify receives recalls; nil if no cache lies above this client.
	Notify Notifier
	// IndexDir is a folder for indexes of snapshots, created if missing. Processes of one
	// machine should share the folder. Empty: UseIndex does nothing. IndexKeep bounds the
	// folder in bytes; 0: 16 GiB.
	IndexDir  string
	IndexKeep int64
	// FlushEvery is the longest time until the client makes written bytes durable and commits
	// them in the background; 0: 1 s.
	FlushEvery time.Duration
	// Keep is the memory in which the client leaves its state for a successor process; nil:
	// the client leaves nothing.
	Keep *keep.Memory
	// Left is the state that a predecessor left; nil: there is no predecessor. With Left, the
	// client continues the predecessor's session Session; Generation counts the processes of
	// the session. Requests of the cluster to the client wait for Resumed.
	Left       *keep.Memory
	Session    meta.SessionID
	Generation uint32
	// Process is the process whose life bounds the session, for a holder that outlives the
	// client. Zero: the calling process.
	Process process.Process
	// Linger is how long a successor may continue the session after the client's last message,
	// as long as no other client wants anything that the session holds. Metadata servers allow
	// at most 15 minutes. 0: the session ends with its lease.
	Linger time.Duration
}

// Client is a connection to a cluster: one session, cache and write buffer for all volumes of
// all owners.
type Client struct {
	cfg    Config
	log    *slog.Logger
	sess   metaSession
	atimes atimes
	chunks chunkIO
	table  table
	buf    budget

	ctx    context.Context // of background work
	cancel context.CancelFunc
	wg     task.Group

	incarnation uint64
	unique      atomic.Uint64
	dentries    atomic.Int64
	evicting    atomic.Bool
	suspects    suspects

	flushEvery   time.Duration
	flushBytes   int64 // dirty bytes of a volume that wake the flusher
	streamCommit int64 // of one file

	mu      sync.Mutex
	closed  bool
	volumes map[meta.VolumeID]*Volume // by ID: live ones and views
	expired map[meta.VolumeID]uint64  // how often the session did in a volume, open or not
	// policies counts what owners said of volumes' policies.
	policies uint64
	views    views
	kept     kept

	stats counters
}

// counters are the counters behind Stats.
type counters struct {
	rpcs, hits, recalls, growths, written, read, appended, commits, lost, lostFiles, indexed, refused atomic.Uint64
}

// lose counts a file that lost bytes which a program wrote.
func (s *counters) lose(bytes int64) {
	if bytes > 0 {
		s.lost.Add(uint64(bytes))
		s.lostFiles.Add(1)
	}
}

const (
	defaultWriteBuffer = 256 << 20
	minWriteBuffer     = 8 << 20
	defaultMetaCache   = 500_000
	leaseMargin        = time.Second
)

// Cluster returns the id of the cluster; "" in tests without a cluster.
func (c *Client) Cluster() string {
	if s, ok := c.sess.(interface{ Cluster() string }); ok {
		return s.Cluster()
	}
	return ""
}

// Session returns the number of the client's session; zero in tests without a session.
func (c *Client) Session() meta.SessionID {
	if s, ok := c.sess.(interface{ ID() meta.SessionID }); ok {
		return s.ID()
	}
	return 0
}

// Leave closes the client without ending the session: another process continues the session
// from the state in Config.Keep. The calling process must end soon.
func (c *Client) Leave() {
	if s, ok := c.sess.(interface{ Leave() }); ok {
		c.cancel()
		s.Leave()
	}
}

// opID gives the id of the next operation of a request, or of background work.
func (c *Client) opID(call *Call) meta.OpID {
	if call == nil || call.within() != (meta.Led{}) {
		return meta.OpID{Incarnation: c.incarnation, Unique: c.unique.Add(1), Step: meta.BackgroundStep}
	}
	if call.Op.Incarnation == 0 {
		call.Op = meta.OpID{Incarnation: c.incarnation, Unique: c.unique.Add(1)}
	}
	id := call.Op
	call.Op.Step++
	return id
}

func (c *Client) maxDentries() int64 { return 4 * int64(c.cfg.MetaCache) }

// spawn runs fn in a goroutine that Close waits for.
func (c *Client) spawn(fn func()) { c.wg.Go(fn) }

func (c *Client) lookVolume(id meta.VolumeID) *Volume {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.volumes[id]
}

func (c *Client) openVolumes() []*Volume {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := make([]*Volume, 0, len(c.volumes))
	for _, v := range c.volumes {
		l = append(l, v)
	}
	return l
}

// Stats are counters and gauges for status pages and metrics.
type Stats struct {
	Inodes        int    // in the cache
	Dentries      int    // cached names, present and absent
	DirtyBytes    int64  // written, not yet durable and committed
	BufferBytes   int64  // memory of these blobs
	RPCs          uint64 // requests sent to meta servers
	LookupHits    uint64 // lookups answered from memory
	Indexed       uint64 // questions answered from the indexes of snapshots
	BadIndexes    uint64 // damaged indexes that were refused
	Recalls       uint64 // leases recalled
	Growths       uint64 // questions of owners about files to which this client appends
	WrittenBytes  uint64 // by Write
	ReadBytes     uint64 // by Read
	AppendedBytes uint64 // sent to chunk servers
	Commits       uint64 // files' extents committed
	LostBytes     uint64 // written bytes that were lost: to errors, to the end of the session, or given up by an operator
	LostFiles     uint64 // files that lost bytes, counted at each loss
	DirtyFiles    int    // files with bytes that are not durable and committed
}
