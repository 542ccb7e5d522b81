package penstock

import (
	"context"
	"os"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// metaSession is what this package needs of a session with the owners of
// volumes; meta/client has it. Grants and recalls come to the Client's Granted,
// Recall and Expired in wire order.
type metaSession interface {
	// Do asks for one operation, in one epoch only as DoBatch says. If ctx ends, a change
	// is asked to be given up, and Do returns when it is known what became of it. A read
	// may be left; over is called once, when nothing of the operation comes any more, no
	// grant either.
	Do(ctx context.Context, v meta.VolumeID, epoch uint64, id meta.OpID, op meta.Op, want meta.LeaseMode, over func()) (*meta.Result, error)
	// DoBatch fails with SessionExpired, and does nothing, if the session has
	// expired in the volume since epoch (Volume.epoch), unless that is
	// metaclient.AnyEpoch.
	DoBatch(ctx context.Context, v meta.VolumeID, epoch uint64, ops []batchOp) ([]meta.Result, []error, error)
	// DoAt reads at a snapshot; nothing is leased.
	DoAt(ctx context.Context, v meta.VolumeID, at meta.Generation, op meta.Op) (*meta.Result, error)
	// ListSnapshots lists a volume's snapshots.
	ListSnapshots(ctx context.Context, v meta.VolumeID) ([]meta.Snapshot, error)
	// Sync returns when everything answered before on this volume is journaled.
	Sync(ctx context.Context, v meta.VolumeID) error
	AllocChunks(ctx context.Context, v meta.VolumeID, n int, own bool) ([]meta.ChunkGrant, error)
	// EndChunk seals a chunk that is written to no more; need is how far it was acknowledged.
	EndChunk(ctx context.Context, v meta.VolumeID, id meta.ChunkID, need uint64) (meta.ChunkRecord, error)
	// Suspect tells which chunk servers failed, before chunks are asked for.
	Suspect(v meta.VolumeID, servers []meta.ServerID)
	// Reserve gives back give bytes of what was promised of a volume's quota and
	// asks for want more, in one epoch only as DoBatch says.
	Reserve(ctx context.Context, v meta.VolumeID, epoch, give, want, round uint64, at metaclient.Place) (metaclient.Promise, error)
	SetLock(ctx context.Context, v meta.VolumeID, l meta.Lock, wait bool) error
	GetLock(ctx context.Context, v meta.VolumeID, l meta.Lock) (meta.Lock, error)
	// DropLocks releases every lock of l's owner on l's inode.
	DropLocks(ctx context.Context, v meta.VolumeID, l meta.Lock) error
	// Drop gives leases back without waiting for an answer. What is sent after
	// it reaches the owner after it.
	Drop(v meta.VolumeID, inos []meta.Ino)
	// LeaseLeft is how long the leases in a volume surely hold.
	LeaseLeft(v meta.VolumeID) time.Duration
	// Volume finds a volume by number or, if that is zero, by name.
	Volume(ctx context.Context, id meta.VolumeID, name string) (volumeInfo, error)
	Close(ctx context.Context) error
}

// batchOp is one operation of a batch.
type batchOp struct {
	ID   meta.OpID
	Op   meta.Op
	Want meta.LeaseMode
	At   meta.Generation // a read at a snapshot
	// Reserved, Draw: see wire.Call.
	Reserved uint64
	Draw     bool
}

type volumeInfo struct {
	ID     meta.VolumeID
	Name   string
	Policy meta.Policy
}

// chunkIO is what this package needs of chunkserver/client; the methods'
// promises are there.
type chunkIO interface {
	NewWriter(g meta.ChunkGrant) chunkWriter
	ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error
	File(ctx context.Context, pl meta.ChunkPlace, off, n uint64) (*os.File, func(), error)
	Backing(ctx context.Context, pl meta.ChunkPlace) (*os.File, error)
	Prefetch(pl meta.ChunkPlace, off, n uint64)
	// Awaited tells whether one of the servers, none of which could be reached, may be
	// there in a moment.
	Awaited(servers []meta.ServerID) bool
	Close() error
}

type chunkWriter interface {
	Append(ctx context.Context, p []byte) (off uint64, err error)
	// Within waits until at most n of the bytes are not acknowledged.
	Within(ctx context.Context, n uint64) error
	Sync(ctx context.Context) error
	Len() uint64
	// Acked is how many bytes every replica has.
	Acked() uint64
	// Failed lists the servers whose failure ended the writer.
	Failed() []meta.ServerID
	Close() error
}
