// Package namespace implements the rules of the tree: the effect of every operation of package
// meta on a volume's inodes, names, extents, attributes, chunks and sessions. The package is a
// pure state machine over an ordered key-value store, without clock, chance, goroutines or I/O.
// The owner of a volume calls Execute, journals the returned effects and applies them.
// Followers of the journal apply the same bytes without running the state machine.
//
// keys.go draws the keys, records.go the records.
package namespace

import (
	"fmt"

	"penstock.io/penstock/meta"
)

// Reader is the ordered store that the machine reads: the owner's overlay over its state
// store, or a map in tests.
type Reader interface {
	// Get returns the value of a key. The caller must not modify the value, which is valid
	// until the next write to the store.
	Get(key []byte) (val []byte, ok bool, err error)
	// Scan calls fn in ascending order for lo <= k < hi until fn says false.
	// k and v are valid only inside fn.
	Scan(lo, hi []byte, fn func(k, v []byte) bool) error
}

// EffectKind says what an effect does.
type EffectKind uint8

// The kinds of effects. The numbers are part of the journal's format.
const (
	Put         EffectKind = 1 // Key takes Value
	Delete      EffectKind = 2 // Key goes
	DeleteRange EffectKind = 3 // every key from Key up to, not including, Value goes
)

// Effect is one change of the store. Effects apply in order.
type Effect struct {
	Kind       EffectKind
	Key, Value []byte
}

// Context has everything besides the store on which the result of an operation depends.
type Context struct {
	Now     meta.Time
	Session meta.SessionID // the caller; zero is the owner itself
	Term    meta.Term
	Volume  meta.VolumeID
	Op      meta.OpID
	Seq     meta.Seq // of the future journal entry with the effects
	// Replay: an earlier owner answered the operation. The operation was admitted then, so
	// quotas don't refuse it now (rule 3).
	Replay bool
	// Reserved of the operation's bytes were promised to the caller earlier, so the quota
	// check skips them. Held bytes are promised to other callers and not available. Both are
	// ignored in a volume without a quota.
	Reserved, Held uint64
	// Squash says what the caller must not create.
	Squash Squash
	// NoStreams: the caller must not change what has FlagStream.
	NoStreams bool
	// At is the generation of the snapshot that Query reads; zero is the live volume. Errors:
	// NoSuchSnapshot.
	At meta.Generation
}

// Execute runs one mutation, and returns the result and the effects to journal, or an error
// (*meta.Error) and no effects. Execute modifies nothing. Execute does not reuse the bytes of
// the effects, and nobody may modify the bytes.
//
// Besides the errors named at each operation in package meta:
//
//	ReadOnly          the volume's policy is immutable
//	QuotaExceeded     the volume would hold more than its policy allows
//	Busy              the operation meets the file's open-ended extent: close the
//	                  extent first (Write.CloseEnded or SealChunk)
//	Again             the tail of a truncation is not yet reaped: run Reap on
//	                  the inode in the subject until EOF, then repeat the operation
//	ResourceExceeded  more than maxEdit extents lie in the range: split it
//	Fenced            the operation's Led does not hold
//	Corrupt, Version  a record is damaged, or newer than this program
func Execute(r Reader, c Context, op meta.Op) (*meta.Result, []Effect, error) {
	t := &tx{view: view{r: r}, c: c, budget: reapBatch}
	if err := t.begin(); err != nil {
		return nil, nil, err
	}
	if t.vol.policy.Immutable {
		switch op.Code() {
		case meta.OpTmpfile, meta.OpLink, meta.OpUnlink, meta.OpRename, meta.OpSetAttr, meta.OpWrite, meta.OpFallocate,
			meta.OpCopyRange, meta.OpSetXattr, meta.OpRemoveXattr, meta.OpJunction:
			return nil, nil, fail("immutable volume", meta.ReadOnly, "")
		}
	}
	if err := t.leaderships().require(op); err != nil {
		return nil, nil, err
	}
	res := &meta.Result{}
	var err error
	unmetered := c.Replay
	if c.Squash.On {
		if op, err = t.squash(op); err != nil {
			return nil, nil, err
		}
	}
	switch op := op.(type) {
	case *meta.Create:
		err = t.dirs().create(op, res)
	case *meta.Tmpfile:
		err = t.dirs().tmpfile(op, res)
	case *meta.Link:
		err = t.dirs().link(op, res)
	case *meta.Unlink:
		err = t.dirs().unlink(op, res)
	case *meta.Rename:
		err = t.dirs().rename(op, res)
	case *meta.SetAttr:
		err = t.setAttr(op, res)
	case *meta.Write:
		err = t.content().write(op, res)
	case *meta.Fallocate:
		err = t.content().fallocate(op, res)
	case *meta.CopyRange:
		err = t.content().copyRange(op, res)
	case *meta.SetXattr:
		err = t.xattrs().setXattr(op, res)
	case *meta.RemoveXattr:
		err = t.xattrs().removeXattr(op, res)
	case *meta.ReleaseOrphans:
		err = t.sessions().releaseOrphans(op)
	case *meta.AllocChunks:
		err = t.chunkRecords().allocChunks(op, res)
	case *meta.SealChunk:
		unmetered = true // the bytes of a sealed chunk were admitted when they were written
		err = t.chunkRecords().sealChunk(op, res)
	case *meta.DropChunk:
		err = t.chunkRecords().dropChunk(op)
	case *meta.SessionStart:
		err = t.sessions().sessionStart(op)
	case *meta.SessionEnd:
		err = t.sessions().sessionEnd(op, res)
	case *meta.ReplaceExtents:
		unmetered = true
		err = t.chunkRecords().replaceExtents(op, res)
	case *meta.SetReplicas:
		unmetered = true
		err = t.chunkRecords().setReplicas(op, res)
	case *meta.Junction:
		err = t.dirs().junction(op, res)
	case *meta.SetPolicy:
		t.vol.policy = op.Policy
		err = t.setTally(op.Policy.QuotaSnapshots)
	case *meta.Reap:
		err = t.extents().reap(op, res)
	case *meta.TakeSnapshot:
		err = t.snaps().takeSnapshot(op, res)
	case *meta.DropSnapshot:
		unmetered = true
		err = t.snaps().dropSnapshot(op, res)
	case *meta.PinClone:
		err = t.clones().pinClone(op)
	case *meta.SweepClone:
		unmetered = true
		err = t.clones().sweepClone(op, res)
	case *meta.AdoptExtents:
		unmetered = true
		err = t.clones().adoptExtents(op, res)
	case *meta.Rollback:
		unmetered = true // the bytes of the snapshot were admitted earlier
		err = t.rollbacks().rollback(op, res)
	case *meta.PinSnapshot:
		unmetered = true
		err = t.snaps().pinSnapshot(op, res)
	case *meta.UnpinSnapshot:
		unmetered = true
		err = t.snaps().unpinSnapshot(op, res)
	case *meta.SetDigest:
		unmetered = true
		err = t.setDigest(op)
	case *meta.SetIndex:
		unmetered = true
		err = t.setIndex(op, res)
	case *meta.SetEvents:
		err = t.setEvents(op)
	case *meta.Closed:
		err = t.closed(op)
	case *meta.Lead:
		err = t.leaderships().begin(op, res)
	case *meta.EndLead:
		err = t.leaderships().give(op)
	case *meta.TellQuota:
		unmetered = true
		err = t.tellQuota(op)
	case *meta.CountSnapshots:
		unmetered = true
		err = t.countSnapshots(op)
	case *meta.SetMirror:
		unmetered = true
		err = t.setMirror(op)
	default:
		err = fail("execute", meta.NotSupported, fmt.Sprintf("operation code %d", op.Code()))
	}
	if err != nil {
		return nil, nil, err
	}
	if err := t.finish(!unmetered); err != nil {
		return nil, nil, err
	}
	return res, t.effects, nil
}

// OpInodeQuota is the Op of an error about too many inodes. Promises of bytes don't matter for
// the number of inodes.
const OpInodeQuota = "inode quota"

// checkQuota refuses operations by which the volume grows beyond its policy. An operation that
// shrinks the volume, or leaves the size unchanged, succeeds even over the quota. So does
// growth promised before the quota was lowered.
func (t *tx) checkQuota() error {
	p := &t.vol.policy
	if p.QuotaInodes != 0 && t.vol.inodes > t.was.inodes && t.vol.inodes > p.QuotaInodes {
		return fail(OpInodeQuota, meta.QuotaExceeded, fmt.Sprintf("%d of %d inodes", t.was.inodes, p.QuotaInodes))
	}
	was, is := t.was.holds(), t.vol.holds()
	if p.QuotaBytes == 0 || is <= was || is-was <= t.c.Reserved {
		return nil
	}
	if free := p.QuotaBytes - min(p.QuotaBytes, is); is > p.QuotaBytes || t.c.Held > free {
		return fail("quota", meta.QuotaExceeded, fmt.Sprintf("%d of %d bytes", was, p.QuotaBytes))
	}
	return nil
}

// Query answers one read. The caller owns the bytes of the result.
func Query(r Reader, c Context, op meta.Op) (*meta.Result, error) {
	q := &tx{view: view{r: r}, c: c}
	if err := q.begin(); err != nil {
		return nil, err
	}
	if c.At != 0 {
		var err error
		if q, err = q.snaps().asOf(c.At); err != nil {
			return nil, err
		}
	}
	res := &meta.Result{}
	var err error
	switch op := op.(type) {
	case *meta.Lookup:
		err = q.dirs().lookup(op, res)
	case *meta.GetAttr:
		var in *inode
		if in, err = q.inode(op.Ino); err == nil {
			res.Attr = in.Attr
		}
	case *meta.ReadDir:
		err = q.dirs().readDir(op, res)
	case *meta.ReadLink:
		err = q.dirs().readLink(op, res)
	case *meta.GetXattr:
		err = q.xattrs().getXattr(op, res)
	case *meta.ListXattr:
		err = q.xattrs().listXattr(op, res)
	case *meta.Open:
		err = q.content().open(op, res)
	case *meta.StatFSOp:
		res.StatFS = meta.StatFS{UsedBytes: q.vol.holds(), UsedInodes: q.vol.inodes,
			QuotaBytes: q.vol.policy.QuotaBytes, QuotaInode: q.vol.policy.QuotaInodes}
	case *meta.Seek:
		err = q.content().seek(op, res)
	case *meta.Leader:
		err = q.leaderships().query(op, res)
	default:
		err = fail("query", meta.NotSupported, fmt.Sprintf("operation code %d", op.Code()))
	}
	if err != nil {
		return nil, err
	}
	return res, nil
}

// Format returns the effects of making an empty volume: the counters, the policy and a root
// directory. The effects are the volume's first journal entry.
func Format(v meta.VolumeID, now meta.Time, rootMode, uid, gid uint32, p meta.Policy) []Effect {
	t := &tx{}
	t.vol = volume{id: v, gen: firstGen, nextIno: uint64(meta.RootIno) + 1, inodes: 1, policy: p}
	if p.QuotaSnapshots {
		t.vol.tally.mode = tallyExact
	}
	t.gen = firstGen
	root := t.newInode(meta.RootIno, meta.TypeDir|rootMode&meta.ModePerm, uid, gid, now)
	root.Nlink = 2
	root.Parent = meta.RootIno
	root.next = firstCookie
	if err := t.finish(false); err != nil {
		panic("namespace: formatting reads nothing, yet failed: " + err.Error())
	}
	return t.effects
}
