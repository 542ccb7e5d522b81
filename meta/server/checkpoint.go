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
	"penstock.io/penstock/meta/placement"
	"penstock.io/penstock/meta/task"
)

// A checkpoint is the store's files, each a blob, and a manifest, a blob too,
// that lists them and says all by itself which volume it is of. The record in
// etcd names the manifest. Whatever the record no longer names is deleted when
// nobody can be reading it any more (rule 10).

const (
	// blobReplicas is how many servers have each blob, as far as there are so
	// many, whatever any volume's policy.
	blobReplicas = 3
	// checkpointLook is how often the checkpoint's age and replicas are looked at.
	checkpointLook = time.Second
	// DefaultCheckpointEvery is how old a checkpoint gets while the volume is
	// being changed: it bounds what is lost with an etcd that is lost whole.
	DefaultCheckpointEvery = 5 * time.Minute
	// DefaultBlobGrace is how long a blob may have too few live replicas, and a
	// chunk server may restart, before the checkpoint is stored again.
	DefaultBlobGrace = 30 * time.Second
	// deleteCheckpoint is how old a checkpoint gets while chunks wait for the
	// next one to be deleted.
	deleteCheckpoint = 10 * time.Second
	// maxCheckpoint bounds one checkpoint: what it stored is not taken for
	// leaked meanwhile.
	maxCheckpoint = time.Hour
)

var checkpointCount atomic.Uint64

// oldBlobs are blobs that nobody needs who has pinned seq or later.
type oldBlobs struct {
	seq  meta.Seq
	refs []meta.BlobRef
}

// checkpoints are what an owner knows of the checkpoints of its volume.
type checkpoints struct {
	one sync.Mutex // held while one is made, before the owner's mu

	// The owner's mu guards the rest.

	since       int       // bytes journaled since the last checkpoint
	making      bool      // one is being made in the background
	retry       time.Time // after a failure, not before
	made        uint64    // here
	recorded    recordedCheckpoint
	blobs       []meta.BlobRef // of the recorded checkpoint
	old         []oldBlobs     // to be deleted, ascending
	deletingOld bool           // these are being deleted
	// deletable are chunks that the last checkpoint knows to be garbage;
	// waitDelete: there are others, which wait for the next.
	deletable  []meta.ChunkRecord
	waitDelete bool
}

// maybeCheckpoint starts a checkpoint when the log has grown enough.
func (o *owner) maybeCheckpoint() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.checkpoints.since >= o.srv.cfg.CheckpointBytes {
		o.startCheckpoint()
	}
}

// startCheckpoint makes a checkpoint in the background if none is being made.
// Caller holds mu.
func (o *owner) startCheckpoint() {
	if o.checkpoints.making || o.failed != nil {
		return
	}
	o.checkpoints.making = true
	o.wg.Go(func() {
		if err := o.checkpoint(o.ctx); err != nil && o.ctx.Err() == nil {
			o.log.Error("checkpoint failed, the journal grows until one succeeds", "error", err)
			o.mu.Lock()
			o.checkpoints.retry = time.Now().Add(10 * checkpointLook)
			o.mu.Unlock()
		}
		o.mu.Lock()
		o.checkpoints.making = false
		o.mu.Unlock()
	})
}

// newCheckpointTask makes a checkpoint when the last one is old and something
// changed since, when its blobs lost replicas, or when it holds cluster records that have
// changed; and deletes what earlier checkpoints left.
func newCheckpointTask(o *owner) *task.Task {
	var last, looked time.Time
	var made uint64
	var short time.Time // since when replicas are missing
	known := false
	look := func() {
		o.deleteOldBlobs(o.ctx)
		known = known || o.readBlobs() == nil
		stale := false
		if o.vol == meta.RootVolume && time.Since(looked) >= o.checkpointEvery() {
			looked = time.Now()
			stale = known && o.recordsStale()
		}
		o.mu.Lock()
		if n := o.checkpoints.made; n != made {
			made, last = n, time.Now()
		}
		refs := o.checkpoints.blobs
		o.mu.Unlock()
		if o.srv.blobsShort(refs) == 0 {
			short = time.Time{}
		} else if short.IsZero() {
			short = time.Now()
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		switch {
		case time.Now().Before(o.checkpoints.retry):
		case known && o.uncovered() && time.Since(o.ageFrom(last)) >= o.checkpointEvery():
			o.startCheckpoint()
		case stale:
			o.startCheckpoint() // of the same entry, if there is no later one
		case o.checkpoints.waitDelete && time.Since(last) >= deleteCheckpoint:
			o.startCheckpoint() // so that their space comes back
		case !short.IsZero() && time.Since(short) >= o.srv.cfg.BlobGrace:
			o.log.Warn("the checkpoint's files have too few live replicas: they are stored again", "for", time.Since(short).Round(time.Second))
			short = time.Time{}
			o.startCheckpoint()
		}
	}
	return task.New(task.Options{
		Name: "look after the checkpoint", First: checkpointLook, Every: checkpointLook,
		Begin: func() {
			last, looked = time.Now(), time.Now()
			made = o.srv.stats.checkpoints.Load()
		},
		Round: func(context.Context) (time.Duration, error) {
			look()
			return task.Idle, nil
		},
	})
}

// readBlobs learns which blobs the recorded checkpoint consists of, unless one
// was made here.
func (o *owner) readBlobs() error {
	ctx, cancel := context.WithTimeout(o.ctx, o.srv.cfg.BlobGrace)
	defer cancel()
	cp, have, err := o.j.Checkpoint(ctx)
	if err != nil || !have {
		return err
	}
	full, err := loadManifest(ctx, o.srv.cfg.Blob, cp)
	if err != nil {
		full.Checkpoint = cp // the manifest alone is known, and missed
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.checkpoints.made == 0 {
		o.checkpoints.blobs = blobsOf(full.Checkpoint)
		if o.checkpoints.recorded.seq = cp.Seq; err == nil {
			o.checkpoints.recorded.take(&full)
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

// blobsShort counts the blobs that have fewer live replicas than there could be.
func (s *Server) blobsShort(refs []meta.BlobRef) (n int) {
	live, most := s.blobServers()
	for _, r := range refs {
		if short(r, live, most) {
			n++
		}
	}
	return n
}

// blobServers are the servers that blobs may stay on: connected, and not to be
// emptied. most is how many replicas one that is stored now gets: fewer than there are
// servers if several stand on one host, or have no room. Who asked for more of those
// that are there would store the checkpoint again for ever.
func (s *Server) blobServers() (live map[meta.ServerID]bool, most int) {
	live = map[meta.ServerID]bool{}
	m := s.servers()
	for _, x := range m.Servers() {
		if x.State == placement.Live {
			live[x.ID] = true
		}
	}
	fit, err := m.Choose(chance{}, &systemPolicy, blobReplicas, placement.Writer{}, nil, nil)
	if err != nil { // nowhere: what is there is all there will be, and must not be nothing
		return live, min(1, len(live))
	}
	return live, len(fit)
}

// short: some part of the blob has fewer live replicas than it would get now.
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

// awaitApplied waits until the store has an entry that the journal has.
func (o *owner) awaitApplied(ctx context.Context, seq meta.Seq) error {
	for o.st.Applied().Seq < seq {
		select {
		case <-time.After(time.Millisecond):
		case <-o.ctx.Done():
			return context.Cause(o.ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// checkpoint stores the state's files and trims the journal. Files that the
// checkpoint before has, too, are not stored again unless they lost replicas.
func (o *owner) checkpoint(ctx context.Context) error {
	o.checkpoints.one.Lock()
	defer o.checkpoints.one.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, maxCheckpoint, errors.New("the checkpoint took too long"))
	defer cancel()
	start := time.Now()
	dir := fmt.Sprintf("%s/checkpoint-%d-%d", o.srv.cfg.ScratchDir, o.vol, checkpointCount.Add(1))
	defer os.RemoveAll(dir)
	o.mu.Lock()
	before := o.checkpoints.since
	o.mu.Unlock()

	doomed, err := o.doomed()
	if err != nil {
		return err
	}
	pos, files, err := o.st.Snapshot(dir)
	if err != nil {
		return err
	}
	old, have, err := o.j.Checkpoint(ctx)
	if err != nil {
		return err
	}
	live, most := o.srv.blobServers()
	stored := map[string]journal.File{}
	lost := false
	records, err := o.clusterRecords(ctx)
	if err != nil {
		return err
	}
	if have {
		full, err := loadManifest(ctx, o.srv.cfg.Blob, old)
		if err != nil {
			// All files are stored again; those of the lost list are found by
			// the collector of leaked blobs.
			o.log.Error("the manifest of the checkpoint can't be read: the checkpoint is made anew", "error", err)
			lost = true
		}
		for _, r := range blobsOf(full.Checkpoint) {
			lost = lost || short(r, live, most)
		}
		old = full.Checkpoint
		for _, f := range old.Files {
			stored[f.Name] = f
		}
		if old.Seq >= pos.Seq && !lost && (o.vol != meta.RootVolume || sumOf(records) == sumOf(full.Records)) {
			o.mu.Lock()
			o.checkpoints.deletable, o.checkpoints.waitDelete = doomed, false
			o.checkpoints.recorded.take(&full)
			o.mu.Unlock()
			return nil
		}
	}
	m := journal.Manifest{
		Cluster: o.srv.cfg.Cluster.ID(), Written: o.now(),
		Checkpoint: journal.Checkpoint{Volume: o.vol, Position: pos, Term: o.own.Term(), Files: files},
		Records:    records,
	}
	if err := o.describe(ctx, &m); err != nil {
		return err
	}
	var added []meta.BlobRef
	undo := func() {
		for _, r := range added {
			o.srv.cfg.Blob.Delete(context.WithoutCancel(ctx), r)
		}
	}
	for i := range m.Files {
		f := &m.Files[i]
		if s, ok := stored[f.Name]; ok && s.Size == f.Size && s.Sum == f.Sum && !short(s.Ref, live, most) {
			f.Ref = s.Ref
			delete(stored, f.Name)
			continue
		}
		if f.Ref, err = o.putFile(ctx, dir+"/store/"+f.Name); err != nil {
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
	ref, err := o.srv.cfg.Blob.Put(ctx, o.blobOwner(), "manifest", bytes.NewReader(b))
	if err != nil {
		undo()
		return err
	}
	cp := m.Checkpoint
	cp.Files, cp.Manifest = nil, ref
	if err := o.j.Trim(ctx, cp); err != nil {
		// Whether the record was written may be unknown: what it may refer to
		// stays; the next checkpoint finds out.
		return err
	}
	// Who has this one pinned may be loading the one before, if that is at the
	// same entry: one that lost replicas is stored again.
	gone := oldBlobs{seq: max(pos.Seq, old.Seq+1)}
	for _, f := range stored {
		gone.refs = append(gone.refs, f.Ref)
	}
	if !old.Manifest.IsZero() {
		gone.refs = append(gone.refs, old.Manifest)
	}
	m.Manifest = ref
	o.mu.Lock()
	o.checkpoints.deletable, o.checkpoints.waitDelete = doomed, false
	o.checkpoints.since -= before
	o.checkpoints.made++
	o.checkpoints.recorded.take(&m)
	o.checkpoints.blobs = blobsOf(m.Checkpoint)
	if len(gone.refs) > 0 {
		o.checkpoints.old = append(o.checkpoints.old, gone)
	}
	o.mu.Unlock()
	o.srv.stats.checkpoints.Add(1)
	o.log.Info("checkpoint", "seq", pos.Seq, "files", len(files), "stored", len(added), "took", time.Since(start).Round(time.Millisecond))
	o.deleteOldBlobs(ctx)
	return nil
}

// A chunk goes only when the recorded checkpoint refers to it no more: if etcd
// is lost whole, the files of the checkpoint are there, to the last byte.

// doomed lists the chunks that the store, without what is not journaled yet,
// says are to be deleted: a checkpoint made from now on does not refer to them.
func (o *owner) doomed() (all []meta.ChunkRecord, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stClosed {
		return nil, o.failed
	}
	err = namespace.DeletingChunks(o.st, func(c meta.ChunkRecord) bool {
		all = append(all, c)
		return len(all) < maxDoomed
	})
	return all, err
}

// maxDoomed bounds the chunks that one checkpoint lets go; the next comes soon.
const maxDoomed = 1 << 17

// nextDeleted gives some chunks whose record says that they are to be deleted,
// and which no checkpoint that may be needed refers to. Caller holds mu.
func (o *owner) nextDeleted() (some []meta.ChunkRecord, err error) {
	if o.srv.cfg.KeepForCheckpoint {
		for len(o.checkpoints.deletable) > 0 && len(some) < gcBatch {
			// It may be gone since the list was made.
			id := o.checkpoints.deletable[0].ID
			err := namespace.ChunksFrom(&view{o: o}, id, func(c meta.ChunkRecord) bool {
				if c.ID == id {
					some = append(some, c)
				}
				return false
			})
			if err != nil {
				return nil, err
			}
			o.checkpoints.deletable = o.checkpoints.deletable[1:]
		}
		if len(some) > 0 {
			return some, nil
		}
	}
	err = namespace.DeletingChunks(&view{o: o}, func(c meta.ChunkRecord) bool {
		some = append(some, c)
		return len(some) < gcBatch && !o.srv.cfg.KeepForCheckpoint
	})
	if o.srv.cfg.KeepForCheckpoint {
		o.checkpoints.waitDelete = o.checkpoints.waitDelete || len(some) > 0
		return nil, err
	}
	return some, err
}

// describe adds what a volume is made again from when etcd is lost whole.
func (o *owner) describe(ctx context.Context, m *journal.Manifest) error {
	row, err := o.srv.cfg.Cluster.Volume(ctx, o.vol)
	if err != nil {
		return err
	}
	if m.Row, err = json.Marshal(row); err != nil {
		panic("server: a volume's row is plain data: " + err.Error())
	}
	e, err := o.j.Entry(ctx, m.Seq)
	if err == nil && e.Hash != m.Hash {
		err = meta.E("checkpoint", meta.Corrupt, m.Position.String(), fmt.Errorf("the journal's entry is %s", e.Hash))
	}
	if err != nil {
		return err
	}
	m.Entry, err = journal.Encode(e)
	return err
}

// deleteOldBlobs deletes what no checkpoint needs that anybody may be loading.
// What a crash leaves is found by the collector of leaked blobs.
func (o *owner) deleteOldBlobs(ctx context.Context) {
	o.mu.Lock()
	old := o.checkpoints.old
	if o.checkpoints.deletingOld || len(old) == 0 {
		o.mu.Unlock()
		return // a checkpoint's end and the loop may come here at once
	}
	o.checkpoints.deletingOld = true
	o.mu.Unlock()
	defer func() {
		o.mu.Lock()
		o.checkpoints.deletingOld = false
		o.mu.Unlock()
	}()
	pin, pinned, err := o.j.OldestPin(ctx)
	if err != nil {
		return // looked at again in a moment
	}
	for len(old) > 0 && (!pinned || pin >= old[0].seq) {
		for i, r := range old[0].refs {
			if err := o.srv.cfg.Blob.Delete(ctx, r); err != nil {
				// Once more later, from here on.
				o.log.Warn("a file of an old checkpoint could not be deleted", "file", r.Name, "error", err)
				o.mu.Lock()
				o.checkpoints.old[0].refs = o.checkpoints.old[0].refs[i:]
				o.mu.Unlock()
				return
			}
		}
		old = old[1:]
		o.mu.Lock()
		o.checkpoints.old = o.checkpoints.old[1:]
		o.mu.Unlock()
	}
}

func (o *owner) blobOwner() meta.BlobOwner {
	return meta.BlobOwner{Volume: o.vol, Term: o.own.Term()}
}

func (o *owner) putFile(ctx context.Context, path string) (meta.BlobRef, error) {
	f, err := os.Open(path)
	if err != nil {
		return meta.BlobRef{}, meta.E("checkpoint", meta.IO, path, err)
	}
	defer f.Close()
	return o.srv.cfg.Blob.Put(ctx, o.blobOwner(), path, f)
}

// LoadManifest fills in the list of files of a checkpoint that keeps it in a
// blob. Errors: Corrupt, and those of Blob.Get.
func LoadManifest(ctx context.Context, blob meta.Blob, cp journal.Checkpoint) (journal.Checkpoint, error) {
	m, err := loadManifest(ctx, blob, cp)
	return m.Checkpoint, err
}

// loadManifest reads all that the manifest of a checkpoint says; after an error it gives
// the checkpoint as the record has it.
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
