package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

// commitLoop journals entries one after the other (one in flight: pipelined
// transactions may commit out of order). An entry that nobody waits for
// gathers operations for CommitDelay.
func (o *owner) commitLoop(pos journal.Position) {
	for {
		o.mu.Lock()
		e, urgent := o.take()
		o.mu.Unlock()
		if e == nil {
			select {
			case <-o.wake:
				continue
			case <-o.ctx.Done():
				return
			}
		}
		if !urgent && !o.gather(e) {
			return
		}
		next, err := o.commit(e, pos)
		if err != nil {
			o.lose(err)
			return
		}
		pos = next
		o.maybeCheckpoint()
	}
}

// take gives the entry to journal next; the current one stays open until
// gather closes it. Caller holds mu.
func (o *owner) take() (e *entry, urgent bool) {
	if len(o.queue) > 0 {
		return o.queue[0], true // it is full
	}
	if len(o.cur.effects) == 0 {
		return nil, false
	}
	return o.cur, o.cur.urgent
}

// gather waits until the entry is worth a transaction.
func (o *owner) gather(e *entry) bool {
	t := time.NewTimer(o.srv.cfg.CommitDelay)
	defer t.Stop()
	for {
		select {
		case <-o.wake:
			o.mu.Lock()
			ready := e.urgent || len(o.queue) > 0
			o.mu.Unlock()
			if ready {
				return true
			}
		case <-t.C:
			return true
		case <-o.ctx.Done():
			return false
		}
	}
}

// commit journals one entry, then tells who waits, then applies it to the
// store and takes it out of the overlay.
func (o *owner) commit(e *entry, pos journal.Position) (journal.Position, error) {
	o.mu.Lock()
	if len(o.queue) > 0 && o.queue[0] == e {
		o.queue = o.queue[1:]
		o.queued -= e.bytes
	} else {
		o.cur = &entry{seq: e.seq + 1, sessions: map[*session]struct{}{}}
	}
	dropped := o.forgetReplies(e)
	o.mu.Unlock()
	e.effects = append(e.effects, dropped...)

	je := journal.Next(o.vol, pos, o.own.Term(), namespace.AppendEffects(nil, e.effects))
	if je.Seq != e.seq {
		panic(fmt.Sprintf("entry %d of volume %d would be journaled as %d: an entry was skipped or taken twice", e.seq, o.vol, je.Seq))
	}
	for {
		err := o.j.Append(o.ctx, je)
		if err == nil {
			break
		}
		if !errors.Is(err, meta.NoSpace) {
			return pos, err
		}
		if err := o.waitForSpace(err); err != nil {
			return pos, err
		}
	}
	pos = je.Position()

	o.mu.Lock()
	o.noSpace = nil
	o.durable = e.seq
	kept := o.waiters[:0]
	for _, w := range o.waiters {
		if w.seq <= e.seq {
			close(w.ch)
		} else {
			kept = append(kept, w)
		}
	}
	o.waiters = kept
	for s := range e.sessions {
		s.enqueue(0, &wire.Durable{Volume: o.vol, Seq: e.seq})
	}
	o.mu.Unlock()
	for s := range e.sessions {
		s.flush()
	}

	if err := o.st.Apply(pos, e.effects); err != nil {
		return pos, err
	}
	o.mu.Lock()
	o.ov.settle(e, o.cache)
	o.sinceCheckpoint += len(je.Payload)
	o.mu.Unlock()
	o.srv.stats.entries.Add(1)
	o.srv.stats.journalBytes.Add(uint64(len(je.Payload)))
	return pos, nil
}

// forgetReplies makes the effects that drop reply records which clients
// acknowledged. Caller holds mu.
func (o *owner) forgetReplies(e *entry) (effects []namespace.Effect) {
	for s := range e.sessions {
		j := o.sessions[s.id]
		if j == nil || len(j.order) == 0 || j.order[0].seq > j.acked {
			continue
		}
		n := 0
		for n < len(j.order) && j.order[n].seq <= j.acked {
			delete(j.replies, j.order[n].id)
			j.order[n] = nil
			n++
		}
		j.order = j.order[n:]
		effects = append(effects, namespace.DeleteReplies(s.id, j.forgot, j.acked))
		j.forgot = j.acked
	}
	return effects
}

// waitForSpace goes on when etcd takes writes again: reads go on meanwhile,
// new mutations are refused, and a checkpoint lets the log be trimmed.
func (o *owner) waitForSpace(cause error) error {
	o.mu.Lock()
	if o.noSpace == nil {
		o.noSpace = meta.E("journal", meta.NoSpace, fmt.Sprintf("volume %d", o.vol), cause)
		o.log.Error("the journal has no space: the volume takes no changes until there is some", "error", cause)
	}
	o.mu.Unlock()
	if err := o.srv.cfg.Cluster.Relieve(o.ctx); err != nil {
		o.log.Warn("no space could be freed in etcd", "error", err)
	}
	select {
	case <-time.After(200 * time.Millisecond):
		return nil
	case <-o.ctx.Done():
		return context.Cause(o.ctx)
	}
}

// lose ends the serving of a volume: the fence, the journal or the store says
// that this server can't go on. What was not journaled is dropped with the
// overlay; clients send it to the next owner.
func (o *owner) lose(cause error) {
	o.srv.startOver(cause) // before anybody can hear of it
	o.mu.Lock()
	if o.failed == nil {
		o.failed = meta.E("volume", meta.Unavailable, fmt.Sprint(o.vol), cause)
	}
	o.waiters = nil // their context ends
	o.mu.Unlock()
	o.cancel(cause)
	if o.ctx.Err() == nil || !errors.Is(cause, context.Canceled) {
		o.log.Warn("the volume is served here no more", "error", cause)
	}
}

// maybeCheckpoint starts a checkpoint when the log has grown enough.
func (o *owner) maybeCheckpoint() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.checkpointing || o.sinceCheckpoint < o.srv.cfg.CheckpointBytes {
		return
	}
	o.checkpointing = true
	o.wg.Go(func() {
		if err := o.checkpoint(o.ctx); err != nil && o.ctx.Err() == nil {
			o.log.Error("checkpoint failed, the journal grows until one succeeds", "error", err)
		}
		o.mu.Lock()
		o.checkpointing = false
		o.mu.Unlock()
	})
}

var checkpointCount atomic.Uint64

// checkpoint stores the state's files and trims the journal. Files that the
// checkpoint before has, too, are not stored again.
func (o *owner) checkpoint(ctx context.Context) error {
	start := time.Now()
	dir := fmt.Sprintf("%s/checkpoint-%d-%d", o.srv.cfg.ScratchDir, o.vol, checkpointCount.Add(1))
	defer os.RemoveAll(dir)
	o.mu.Lock()
	before := o.sinceCheckpoint
	o.mu.Unlock()

	pos, files, err := o.st.Snapshot(dir)
	if err != nil {
		return err
	}
	old, have, err := o.j.Checkpoint(ctx)
	if err != nil {
		return err
	}
	if have && old.Seq >= pos.Seq {
		return nil
	}
	stored := map[string]journal.File{}
	if have {
		if old, err = LoadManifest(ctx, o.srv.cfg.Blob, old); err != nil {
			return err
		}
		for _, f := range old.Files {
			stored[f.Name] = f
		}
	}
	cp := journal.Checkpoint{Volume: o.vol, Position: pos, Term: o.own.Term(), Files: files}
	var added []meta.BlobRef
	undo := func() {
		for _, r := range added {
			o.srv.cfg.Blob.Delete(context.WithoutCancel(ctx), r)
		}
	}
	for i := range cp.Files {
		f := &cp.Files[i]
		if s, ok := stored[f.Name]; ok && s.Size == f.Size && s.Sum == f.Sum {
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
	list, err := journal.EncodeFiles(cp.Files)
	if err != nil {
		undo()
		return err
	}
	if len(list) > journal.MaxInlineFiles {
		ref, err := o.srv.cfg.Blob.Put(ctx, "manifest", bytesReader(list))
		if err != nil {
			undo()
			return err
		}
		cp.Files, cp.Manifest = nil, ref
	}
	if err := o.j.Trim(ctx, cp); err != nil {
		// Whether the record was written may be unknown: what it may refer to
		// stays; the next checkpoint finds out.
		return err
	}
	for _, f := range stored {
		if err := o.srv.cfg.Blob.Delete(ctx, f.Ref); err != nil {
			o.log.Warn("a file of an old checkpoint could not be deleted", "file", f.Name, "error", err)
		}
	}
	if !old.Manifest.IsZero() {
		o.srv.cfg.Blob.Delete(ctx, old.Manifest)
	}
	o.mu.Lock()
	o.sinceCheckpoint -= before
	o.mu.Unlock()
	o.srv.stats.checkpoints.Add(1)
	o.log.Info("checkpoint", "seq", pos.Seq, "files", len(files), "stored", len(added), "took", time.Since(start).Round(time.Millisecond))
	return nil
}

func (o *owner) putFile(ctx context.Context, path string) (meta.BlobRef, error) {
	f, err := os.Open(path)
	if err != nil {
		return meta.BlobRef{}, meta.E("checkpoint", meta.IO, path, err)
	}
	defer f.Close()
	return o.srv.cfg.Blob.Put(ctx, path, f)
}
