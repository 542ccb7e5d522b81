package penstock

import (
	"context"
	"os"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// metaSession is the part of meta/client's session with the owners of volumes that this
// package needs. The session passes grants and recalls to the Client's Granted, Recall and
// Expired in wire order.
type metaSession interface {
	// Do requests one operation, in one epoch only as DoBatch says. If ctx ends, Do asks the
	// owner to give up a change, and returns when the outcome is known. A read may be left
	// unanswered. Do calls over once, when neither an answer nor a grant of the operation can
	// follow any more.
	Do(ctx context.Context, v meta.VolumeID, epoch uint64, id meta.OpID, op meta.Op, want meta.LeaseMode, over func()) (*meta.Result, error)
	// DoBatch fails with SessionExpired, without doing anything, if the session has expired in
	// the volume since epoch (Volume.epoch), unless epoch is metaclient.AnyEpoch.
	DoBatch(ctx context.Context, v meta.VolumeID, epoch uint64, ops []batchOp) ([]meta.Result, []error, error)
	// DoAt reads at a snapshot; nothing is leased.
	DoAt(ctx context.Context, v meta.VolumeID, at meta.Generation, op meta.Op) (*meta.Result, error)
	// ListSnapshots lists a volume's snapshots.
	ListSnapshots(ctx context.Context, v meta.VolumeID) ([]meta.Snapshot, error)
	// Sync returns when every earlier answer on this volume is journaled.
	Sync(ctx context.Context, v meta.VolumeID) error
	AllocChunks(ctx context.Context, v meta.VolumeID, n int, own bool) ([]meta.ChunkGrant, error)
	// EndChunk seals a chunk without further appends; need is its acknowledged length.
	EndChunk(ctx context.Context, v meta.VolumeID, id meta.ChunkID, need uint64) (meta.ChunkRecord, error)
	// Suspect tells which chunk servers failed, before chunks are asked for.
	Suspect(v meta.VolumeID, servers []meta.ServerID)
	// Reserve returns give bytes of the promised quota and asks for want more bytes, in one
	// epoch as in DoBatch.
	Reserve(ctx context.Context, v meta.VolumeID, epoch, give, want, round uint64, at metaclient.Place) (metaclient.Promise, error)
	SetLock(ctx context.Context, v meta.VolumeID, l meta.Lock, wait bool) error
	GetLock(ctx context.Context, v meta.VolumeID, l meta.Lock) (meta.Lock, error)
	// DropLocks releases every lock of l's owner on l's inode.
	DropLocks(ctx context.Context, v meta.VolumeID, l meta.Lock) error
	// Drop gives leases back without waiting for an answer. Later messages reach the owner
	// after the Drop.
	Drop(v meta.VolumeID, inos []meta.Ino)
	// LeaseLeft is how long the leases in a volume surely hold.
	LeaseLeft(v meta.VolumeID) time.Duration
	// Volume finds a volume by number or, if the number is zero, by name.
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

// chunkIO is the part of chunkserver/client used by this package; chunkserver/client documents
// the promises.
type chunkIO interface {
	NewWriter(g meta.ChunkGrant) chunkWriter
	ReadAt(ctx context.Context, pl meta.ChunkPlace, p []byte, off uint64) error
	File(ctx context.Context, pl meta.ChunkPlace, off, n uint64) (*os.File, func(), error)
	Backing(ctx context.Context, pl meta.ChunkPlace) (*os.File, error)
	Prefetch(pl meta.ChunkPlace, off, n uint64)
	// Awaited reports whether one of the servers, all of them unreachable, may come back in a
	// moment.
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
