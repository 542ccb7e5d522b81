package server

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
)

// A checkpoint is the store's files, each a blob, and a manifest, also a blob. The manifest
// lists the files and names the volume, without need of other records. The record in etcd
// names the manifest. A blob that the record no longer names is deleted when no reader can
// have it pinned any more (rule 10).

const (
	// blobReplicas is how many servers store each blob, servers permitting, whatever the
	// volume's policy.
	blobReplicas = 3
	// checkpointLook is how often the checkpoint's age and replicas are looked at.
	checkpointLook = time.Second
	// DefaultCheckpointEvery is the age that a checkpoint reaches while the volume changes.
	// The age bounds the loss if etcd is lost entirely.
	DefaultCheckpointEvery = 5 * time.Minute
	// DefaultBlobGrace is how long a blob may have too few live replicas, and a
	// chunk server may restart, before the checkpoint is stored again.
	DefaultBlobGrace = 30 * time.Second
	// deleteCheckpoint is the age that a checkpoint reaches while chunks wait for the next
	// checkpoint to be deleted.
	deleteCheckpoint = 10 * time.Second
	// maxCheckpoint bounds the making of a checkpoint: within this time the collector of
	// leaked blobs leaves the new blobs alone.
	maxCheckpoint = time.Hour
)

var checkpointCount atomic.Uint64

// oldBlobs are blobs that no reader with a pin at seq or later needs.
type oldBlobs struct {
	seq  meta.Seq
	refs []meta.BlobRef
}

// checkpoints is an owner's state of the checkpoints of its volume.
type checkpoints struct {
	k *kernel

	one sync.Mutex // held while a checkpoint is made, locked before the owner's mu

	// The owner's mu guards the rest.

	since       int       // bytes journaled since the last checkpoint
	making      bool      // a checkpoint is being made in the background
	retry       time.Time // after a failure, no checkpoint before
	made        uint64    // by this owner
	recorded    recordedCheckpoint
	blobs       []meta.BlobRef // of the recorded checkpoint
	old         []oldBlobs     // to be deleted, ascending
	deletingOld bool           // old is being deleted
	// deletable are chunks that the last checkpoint does not refer to. waitDelete: other
	// garbage chunks wait for the next checkpoint.
	deletable  []meta.ChunkRecord
	waitDelete bool
}

// maybeCheckpoint starts a checkpoint when the log has grown enough.
func (cps *checkpoints) maybeCheckpoint() {
	k := cps.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if cps.since >= k.srv.cfg.CheckpointBytes {
		cps.startCheckpoint()
	}
}

// startCheckpoint makes a checkpoint in the background if none is being made. The caller holds
// the owner's mu.
func (cps *checkpoints) startCheckpoint() {
	k := cps.k
	if cps.making || k.failed != nil {
		return
	}
	cps.making = true
	k.wg.Go(func() {
		if err := cps.checkpoint(k.ctx); err != nil && k.ctx.Err() == nil {
			k.log.Error("a checkpoint failed: the journal grows until a checkpoint succeeds", "error", err)
			k.mu.Lock()
			cps.retry = time.Now().Add(10 * checkpointLook)
			k.mu.Unlock()
		}
		k.mu.Lock()
		cps.making = false
		k.mu.Unlock()
	})
}

// newCheckpointTask returns the task that makes a checkpoint when the last is old and the
// volume changed since, when deletable chunks wait for it, when its blobs lost replicas, or
// when cluster records in it have changed. The task also deletes the blobs of earlier
// checkpoints.
func newCheckpointTask(cps *checkpoints) *task.Task {
	var last, looked time.Time
	var made uint64
	var short time.Time // since when replicas are missing
	known := false
	look := func() {
		cps.deleteOldBlobs(cps.k.ctx)
		known = known || cps.readBlobs() == nil
		stale := false
		if cps.k.vol == meta.RootVolume && time.Since(looked) >= cps.checkpointEvery() {
			looked = time.Now()
			stale = known && cps.recordsStale()
		}
		cps.k.mu.Lock()
		if n := cps.made; n != made {
			made, last = n, time.Now()
		}
		refs := cps.blobs
		cps.k.mu.Unlock()
		if cps.k.srv.serverMap.blobsShort(refs) == 0 {
			short = time.Time{}
		} else if short.IsZero() {
			short = time.Now()
		}
		cps.k.mu.Lock()
		defer cps.k.mu.Unlock()
		switch {
		case time.Now().Before(cps.retry):
		case known && cps.uncovered() && time.Since(cps.ageFrom(last)) >= cps.checkpointEvery():
			cps.startCheckpoint()
		case stale:
			cps.startCheckpoint() // at the same entry, if no later entry exists
		case cps.waitDelete && time.Since(last) >= deleteCheckpoint:
			cps.startCheckpoint() // to free the chunks' space
		case !short.IsZero() && time.Since(short) >= cps.k.srv.cfg.BlobGrace:
			cps.k.log.Warn("the checkpoint's files have too few live replicas: they are stored again", "for", time.Since(short).Round(time.Second))
			short = time.Time{}
			cps.startCheckpoint()
		}
	}
	return task.New(task.Options{
		Name: "look after the checkpoint", First: checkpointLook, Every: checkpointLook,
		Begin: func() {
			last, looked = time.Now(), time.Now()
			cps.k.mu.Lock()
			made = cps.made
			cps.k.mu.Unlock()
		},
		Round: func(context.Context) (time.Duration, error) {
			look()
			return task.Idle, nil
		},
	})
}

// checkpointNow writes the volume's state to chunk servers, with every operation answered
// before the call.
func (cps *checkpoints) checkpointNow(ctx context.Context) error {
	if err := cps.k.flush(ctx); err != nil {
		return err
	}
	// A journaled entry is applied to the store a moment later.
	cps.k.mu.Lock()
	seq := cps.k.durable
	cps.k.mu.Unlock()
	if err := cps.awaitApplied(ctx, seq); err != nil {
		return err
	}
	return cps.checkpoint(ctx)
}

// readBlobs reads which blobs the recorded checkpoint consists of, unless this owner made a
// checkpoint.
func (cps *checkpoints) readBlobs() error {
	k := cps.k
	ctx, cancel := context.WithTimeout(k.ctx, k.srv.cfg.BlobGrace)
	defer cancel()
	cp, have, err := k.j.Checkpoint(ctx)
	if err != nil || !have {
		return err
	}
	full, err := loadManifest(ctx, k.srv.cfg.Blob, cp)
	if err != nil {
		full.Checkpoint = cp // only the manifest's blob is known
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if cps.made == 0 {
		cps.blobs = blobsOf(full.Checkpoint)
		if cps.recorded.seq = cp.Seq; err == nil {
			cps.recorded.take(&full)
		}
	}
	return err
}

func blobsOf(cp journal.Checkpoint) (refs []meta.BlobRef) {
	if !cp.Manifest.IsZero() {
		refs = append(refs, cp.Manifest)
	}
	for _, f := range cp.Files {
		refs = append(refs, f.Ref)
	}
	return refs
}

// short reports whether some part of the blob has fewer than most live replicas.
func short(r meta.BlobRef, live map[meta.ServerID]bool, most int) bool {
	for _, p := range r.Parts {
		n := 0
		for _, id := range p.Servers {
			if live[id] {
				n++
			}
		}
		if n < most {
			return true
		}
	}
	return false
}

// addNamed adds to named the chunks of the recorded checkpoint, and of earlier checkpoints whose
// blobs were not deleted yet.
func (cps *checkpoints) addNamed(named map[meta.ChunkID]bool) {
	cps.k.mu.Lock()
	defer cps.k.mu.Unlock()
	for _, old := range cps.old {
		addParts(named, old.refs)
	}
	addParts(named, cps.blobs)
}

// awaitApplied waits until the store has applied a journaled entry.
func (cps *checkpoints) awaitApplied(ctx context.Context, seq meta.Seq) error {
	k := cps.k
	for k.st.Applied().Seq < seq {
		select {
		case <-time.After(time.Millisecond):
		case <-k.ctx.Done():
			return context.Cause(k.ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// checkpoint stores the state's files and trims the journal. A file that is also in the
// checkpoint before is stored again only if the file's blob lost replicas.
func (cps *checkpoints) checkpoint(ctx context.Context) error {
	k := cps.k
	cps.one.Lock()
	defer cps.one.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, maxCheckpoint, errors.New("the checkpoint took too long"))
	defer cancel()
	start := time.Now()
	dir := fmt.Sprintf("%s/checkpoint-%d-%d", k.srv.cfg.ScratchDir, k.vol, checkpointCount.Add(1))
	defer os.RemoveAll(dir)
	k.mu.Lock()
	before := cps.since
	k.mu.Unlock()

	doomed, err := cps.doomed()
	if err != nil {
		return err
	}
	pos, files, err := k.st.Snapshot(dir)
	if err != nil {
		return err
	}
	old, have, err := k.j.Checkpoint(ctx)
	if err != nil {
		return err
	}
	live, most := k.srv.serverMap.blobServers()
	stored := map[string]journal.File{}
	lost := false
	records, err := cps.clusterRecords(ctx)
	if err != nil {
		return err
	}
	if have {
		full, err := loadManifest(ctx, k.srv.cfg.Blob, old)
		if err != nil {
			// All files are stored again. The collector of leaked blobs finds the files of the
			// unreadable manifest.
			k.log.Error("the manifest of the checkpoint can't be read: the checkpoint is made anew", "error", err)
			lost = true
		}
		for _, r := range blobsOf(full.Checkpoint) {
			lost = lost || short(r, live, most)
		}
		old = full.Checkpoint
		for _, f := range old.Files {
			stored[f.Name] = f
		}
		if old.Seq >= pos.Seq && !lost && (k.vol != meta.RootVolume || sumOf(records) == sumOf(full.Records)) {
			k.mu.Lock()
			cps.deletable, cps.waitDelete = doomed, false
			cps.recorded.take(&full)
			k.mu.Unlock()
			return nil
		}
	}
	m := journal.Manifest{
		Cluster: k.srv.cfg.Cluster.ID(), Written: k.now(),
		Checkpoint: journal.Checkpoint{Volume: k.vol, Position: pos, Term: k.own.Term(), Files: files},
		Records:    records,
	}
	if err := cps.describe(ctx, &m); err != nil {
		return err
	}
	var added []meta.BlobRef
	undo := func() {
		for _, r := range added {
			k.srv.cfg.Blob.Delete(context.WithoutCancel(ctx), r)
		}
	}
	for i := range m.Files {
		f := &m.Files[i]
		if s, ok := stored[f.Name]; ok && s.Size == f.Size && s.Sum == f.Sum && !short(s.Ref, live, most) {
			f.Ref = s.Ref
			delete(stored, f.Name)
			continue
		}
		if f.Ref, err = cps.putFile(ctx, dir+"/store/"+f.Name); err != nil {
			undo()
			return err
		}
		added = append(added, f.Ref)
	}
	b, err := journal.EncodeManifest(m)
	if err != nil {
		undo()
		return err
	}
	ref, err := k.srv.cfg.Blob.Put(ctx, cps.blobOwner(), "manifest", bytes.NewReader(b))
	if err != nil {
		undo()
		return err
	}
	cp := m.Checkpoint
	cp.Files, cp.Manifest = nil, ref
	if err := k.j.Trim(ctx, cp); err != nil {
		// The record may have been written: the blobs that it may refer to stay, and the next
		// checkpoint finds out.
		return err
	}
	// A checkpoint that lost replicas is stored again at the same entry. Then a reader with a
	// pin at that entry may be loading the checkpoint before.
	gone := oldBlobs{seq: max(pos.Seq, old.Seq+1)}
	for _, f := range stored {
		gone.refs = append(gone.refs, f.Ref)
	}
	if !old.Manifest.IsZero() {
		gone.refs = append(gone.refs, old.Manifest)
	}
	m.Manifest = ref
	k.mu.Lock()
	cps.deletable, cps.waitDelete = doomed, false
	cps.since -= before
	cps.made++
	cps.recorded.take(&m)
	cps.blobs = blobsOf(m.Checkpoint)
	if len(gone.refs) > 0 {
		cps.old = append(cps.old, gone)
	}
	k.mu.Unlock()
	k.srv.stats.checkpoints.Add(1)
	k.log.Info("a checkpoint was made", "seq", pos.Seq, "files", len(files), "stored", len(added), "took", time.Since(start).Round(time.Millisecond))
	cps.deleteOldBlobs(ctx)
	return nil
}

// A chunk is deleted only when the recorded checkpoint no longer refers to it: if etcd is lost
// entirely, the files of the checkpoint are complete to the last byte.

// doomed lists the chunks to be deleted, from the store, which has journaled entries only. A
// checkpoint begun later does not refer to these chunks.
func (cps *checkpoints) doomed() (all []meta.ChunkRecord, err error) {
	k := cps.k
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.stClosed {
		return nil, k.failed
	}
	err = namespace.DeletingChunks(k.st, func(c meta.ChunkRecord) bool {
		all = append(all, c)
		return len(all) < maxDoomed
	})
	return all, err
}

// maxDoomed bounds the chunks that a checkpoint lets go; the next checkpoint comes soon.
const maxDoomed = 1 << 17

// nextDeleted returns at most gcBatch chunks whose records say that the chunks are to be
// deleted, and that no checkpoint in use refers to. The caller holds the owner's mu.
func (cps *checkpoints) nextDeleted() (some []meta.ChunkRecord, err error) {
	k := cps.k
	if k.srv.cfg.KeepForCheckpoint {
		for len(cps.deletable) > 0 && len(some) < gcBatch {
			// The record may be gone since the list was made.
			id := cps.deletable[0].ID
			err := namespace.ChunksFrom(k.view(), id, func(c meta.ChunkRecord) bool {
				if c.ID == id {
					some = append(some, c)
				}
				return false
			})
			if err != nil {
				return nil, err
			}
			cps.deletable = cps.deletable[1:]
		}
		if len(some) > 0 {
			return some, nil
		}
	}
	err = namespace.DeletingChunks(k.view(), func(c meta.ChunkRecord) bool {
		some = append(some, c)
		return len(some) < gcBatch && !k.srv.cfg.KeepForCheckpoint
	})
	if k.srv.cfg.KeepForCheckpoint {
		cps.waitDelete = cps.waitDelete || len(some) > 0
		return nil, err
	}
	return some, err
}

// describe adds to a manifest the volume's row and the checkpoint's journal entry, from which
// a volume is made again if etcd is lost entirely.
func (cps *checkpoints) describe(ctx context.Context, m *journal.Manifest) error {
	k := cps.k
	row, err := k.srv.cfg.Cluster.Volume(ctx, k.vol)
	if err != nil {
		return err
	}
	if m.Row, err = json.Marshal(row); err != nil {
		panic("server: a volume's row is plain data: " + err.Error())
	}
	e, err := k.j.Entry(ctx, m.Seq)
	if err == nil && e.Hash != m.Hash {
		err = meta.E("checkpoint", meta.Corrupt, m.Position.String(), fmt.Errorf("the journal's entry is %s", e.Hash))
	}
	if err != nil {
		return err
	}
	m.Entry, err = journal.Encode(e)
	return err
}

// deleteOldBlobs deletes the old blobs that no pinned checkpoint needs. The collector of
// leaked blobs finds the blobs left by a crash.
func (cps *checkpoints) deleteOldBlobs(ctx context.Context) {
	k := cps.k
	k.mu.Lock()
	old := cps.old
	if cps.deletingOld || len(old) == 0 {
		k.mu.Unlock()
		return // a finished checkpoint and the task may both call
	}
	cps.deletingOld = true
	k.mu.Unlock()
	defer func() {
		k.mu.Lock()
		cps.deletingOld = false
		k.mu.Unlock()
	}()
	pin, pinned, err := k.j.OldestPin(ctx)
	if err != nil {
		return // the task tries again
	}
	for len(old) > 0 && (!pinned || pin >= old[0].seq) {
		for i, r := range old[0].refs {
			if err := k.srv.cfg.Blob.Delete(ctx, r); err != nil {
				// The next call goes on from this file.
				k.log.Warn("a file of an old checkpoint could not be deleted", "file", r.Name, "error", err)
				k.mu.Lock()
				cps.old[0].refs = cps.old[0].refs[i:]
				k.mu.Unlock()
				return
			}
		}
		old = old[1:]
		k.mu.Lock()
		cps.old = cps.old[1:]
		k.mu.Unlock()
	}
}

func (cps *checkpoints) blobOwner() meta.BlobOwner {
	return meta.BlobOwner{Volume: cps.k.vol, Term: cps.k.own.Term()}
}

func (cps *checkpoints) putFile(ctx context.Context, path string) (meta.BlobRef, error) {
	f, err := os.Open(path)
	if err != nil {
		return meta.BlobRef{}, meta.E("checkpoint", meta.IO, path, err)
	}
	defer f.Close()
	return cps.k.srv.cfg.Blob.Put(ctx, cps.blobOwner(), path, f)
}

// LoadManifest fills in the list of files of a checkpoint, if the list is kept in a blob.
// Errors: Corrupt, and those of Blob.Get.
func LoadManifest(ctx context.Context, blob meta.Blob, cp journal.Checkpoint) (journal.Checkpoint, error) {
	m, err := loadManifest(ctx, blob, cp)
	return m.Checkpoint, err
}

// loadManifest reads the manifest of a checkpoint. With an error, the result is only the
// checkpoint as the record has it.
func loadManifest(ctx context.Context, blob meta.Blob, cp journal.Checkpoint) (journal.Manifest, error) {
	bare := journal.Manifest{Checkpoint: cp}
	if cp.Manifest.IsZero() {
		return bare, nil
	}
	r, err := blob.Get(ctx, cp.Manifest)
	if err != nil {
		return bare, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, int64(cp.Manifest.Length)+1))
	if err != nil {
		return bare, err
	}
	m, err := journal.DecodeManifest(b)
	if err != nil {
		return bare, err
	}
	if m.Cluster != "" && (m.Volume != cp.Volume || m.Position != cp.Position) {
		return bare, meta.E("read manifest", meta.Corrupt, cp.Position.String(), fmt.Errorf("it is of volume %d at %s", m.Volume, m.Position))
	}
	cp.Files = m.Files
	m.Checkpoint = cp
	return m, nil
}
