// Package client owns the user's side of the chunk protocol: append pipelines
// to every replica of a chunk, verified reads, and local descriptors.
package client

import (
	"context"
	"log/slog"
	"os"
	"time"

	"penstock.io/penstock/meta"
)

// Config says where chunk servers are and who is asking.
type Config struct {
	// Resolve tells where a chunk server is reached now. Called often; it must
	// not block.
	Resolve func(meta.ServerID) (meta.ServerInfo, bool)
	// ReadCap gives a valid capability to read the chunks of a volume (nil: none).
	ReadCap func(meta.VolumeID) []byte
	// HostID is this machine's boot id: a server with the same one passes
	// descriptors. Empty: never.
	HostID string
	Logger *slog.Logger // nil: slog.Default()
	// Window is the most bytes of one Writer that may be unacknowledged; 0
	// means 16 MiB.
	Window int64
	// Files is the most descriptors of chunks to keep; 0 means 512.
	Files int
	// Congestion is the TCP congestion control to ask for ("" leaves the
	// machine's default).
	Congestion string
	// Timeout is how long a replica may leave a request unanswered before it
	// counts as failed; 0 means 2 s for connecting and 10 s for an answer.
	Timeout time.Duration
}

// Client reads and appends chunks. It is safe for concurrent use.
type Client struct{ cfg Config }

// New makes a client. Close it when done.
func New(cfg Config) *Client { return &Client{cfg: cfg} }

// Close ends all connections; operations in flight fail with Canceled.
func (c *Client) Close() error { return nil }

// Writer appends to one chunk on all its replicas. Its methods may be called
// by several goroutines; appends take effect in the order of the calls.
type Writer struct{}

// NewWriter starts appending to a fresh chunk; nothing is sent before the
// first Append.
func (c *Client) NewWriter(g meta.ChunkGrant) *Writer { return &Writer{} }

// Append adds p at the chunk's end and returns the offset it got. p may be
// reused when Append returns; the bytes are on the replicas only after Wait,
// durable only after Sync. It blocks while more than the window is
// unacknowledged. Errors are sticky: after one, seal the chunk. FileTooBig
// (not sticky, nothing appended): p would exceed the grant's MaxLen.
func (w *Writer) Append(ctx context.Context, p []byte) (off uint64, err error) {
	return 0, meta.E("append", meta.NotSupported, "", nil)
}

// Wait returns when every replica has acknowledged all bytes appended before
// the call.
func (w *Writer) Wait(ctx context.Context) error { return meta.E("wait", meta.NotSupported, "", nil) }

// Sync returns when all bytes appended before the call are durable on every
// replica.
func (w *Writer) Sync(ctx context.Context) error { return meta.E("sync", meta.NotSupported, "", nil) }

// Len is the number of bytes appended so far, acknowledged or not.
func (w *Writer) Len() uint64 { return 0 }

// Acked is the number of bytes from the chunk's start that every replica has
// acknowledged; Synced, that are durable on every replica.
func (w *Writer) Acked() uint64 { return 0 }

// Synced is the number of bytes that are durable on every replica.
func (w *Writer) Synced() uint64 { return 0 }

// Err is the sticky error, or nil.
func (w *Writer) Err() error { return nil }

// Close gives up the writer's resources. It neither waits nor syncs nor seals.
func (w *Writer) Close() error { return nil }

// ReadAt fills p with the chunk's bytes from off on, verified against their
// checksums, from the nearest replica that can. Sealed and open chunks; of an
// open one only acknowledged bytes. Errors: NoSuchOffset (past the end), NoSuchChunk,
// Corrupt (on all replicas), Unavailable, BadCapability.
func (c *Client) ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error {
	return meta.E("read chunk", meta.NotSupported, pl.ID.String(), nil)
}

// File gives a read-only descriptor of the chunk's data file whose bytes
// [off, off+n) were verified; file offsets are chunk offsets. Read with pread
// or splice only, never close it: call the returned function when done. Errors: NotSupported
// (no replica on this machine), and those of ReadAt.
func (c *Client) File(ctx context.Context, pl meta.ChunkPlace, off, n uint64) (*os.File, func(), error) {
	return nil, nil, meta.E("open chunk", meta.NotSupported, pl.ID.String(), nil)
}

// Backing gives a fresh descriptor, owned by the caller, of a sealed chunk
// whose every byte was verified, for FUSE passthrough. Errors: NotSupported (not local or not
// sealed), and those of ReadAt.
func (c *Client) Backing(ctx context.Context, pl meta.ChunkPlace) (*os.File, error) {
	return nil, meta.E("open chunk", meta.NotSupported, pl.ID.String(), nil)
}

// Prefetch hints that [off, off+n) will be read soon. It does not block.
func (c *Client) Prefetch(pl meta.ChunkPlace, off, n uint64) {}
