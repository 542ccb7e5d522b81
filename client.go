package penstock

import (
	"context"
	"log/slog"
	"time"

	"penstock.io/penstock/meta"
)

// Config says how to reach a cluster and how much memory to use.
type Config struct {
	// Meta are the addresses of meta servers: "unix:/path" or "host:port".
	Meta []string
	// Name tells people what this client is: host, process, mount point.
	Name string
	// Host is the boot id of this machine; empty: read from the kernel.
	Host string
	// Logger gets what nobody asked for; nil: slog.Default().
	Logger *slog.Logger
	// WriteBuffer bounds the bytes that are written and not yet durable, in
	// bytes; writers wait beyond it. 0: 256 MiB. At least 8 MiB.
	WriteBuffer int64
	// MetaCache bounds the inodes kept in memory, each under 500 bytes of it;
	// 0: 500,000. Inodes that are open or hold unsynced bytes stay beyond it.
	MetaCache int
	// Notify is told of recalls; nil if nobody caches above this client.
	Notify Notifier
	// FlushEvery is the longest that written bytes wait before the background
	// makes them durable and commits them; 0: 1 s.
	FlushEvery time.Duration
}

// Client is a connection to a cluster: one session, one cache, one write
// buffer for all volumes.
type Client struct {
}

// Dial connects to a cluster. It fails with Unavailable when no meta server
// answers before ctx ends.
func Dial(ctx context.Context, cfg Config) (*Client, error) { panic("not yet") }

// Volume opens a volume by name. Errors: NoSuchVolume.
func (c *Client) Volume(ctx context.Context, name string) (*Volume, error) { panic("not yet") }

// VolumeByID opens a volume by number, as a junction names it. It asks nobody
// after the first time. Errors: NoSuchVolume.
func (c *Client) VolumeByID(ctx context.Context, id meta.VolumeID) (*Volume, error) { panic("not yet") }

// Close makes everything durable, gives all leases back and ends the session.
// If that fails or ctx ends first, it tells what was lost.
func (c *Client) Close(ctx context.Context) error { panic("not yet") }

// Stats are counters and gauges for status pages and metrics.
type Stats struct {
	Inodes        int    // in the cache
	Dentries      int    // cached names, present and absent
	DirtyBytes    int64  // written, not yet durable and committed
	BufferBytes   int64  // memory that these take
	RPCs          uint64 // requests sent to meta servers
	LookupHits    uint64 // lookups answered from memory
	Recalls       uint64 // leases recalled
	WrittenBytes  uint64 // by Write
	ReadBytes     uint64 // by Read
	AppendedBytes uint64 // sent to chunk servers
	Commits       uint64 // files' extents committed
	LostBytes     uint64 // dirty bytes lost to errors that were told
}

// Stats takes a reading.
func (c *Client) Stats() Stats { panic("not yet") }
