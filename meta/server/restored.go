package server

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// skipInodes is the number of inode numbers skipped after a restoration: more than a volume
// issues between two checkpoints.
const skipInodes = 1 << 32

// restoration is the cluster's record of a volume's restoration.
type restoration struct {
	r   *cluster.Restoration // nil: never restored
	err error
}

// askRestoration asks the cluster in the background, while the volume is being opened.
func (op *opener) askRestoration(ctx context.Context, v meta.VolumeID) <-chan restoration {
	ch := make(chan restoration, 1)
	op.wg.Go(func() {
		r, ok, err := op.cfg.Cluster.Restored(ctx, v)
		if !ok {
			ch <- restoration{err: err}
			return
		}
		ch <- restoration{&r, err}
	})
	return ch
}

// loadRestoration notes whether the volume was restored from a checkpoint. The checkpoint's
// sessions are then out of date: the volume may lack operations that a session saw
// acknowledged. So all sessions of the checkpoint end.
func (o *owner) loadRestoration(r *cluster.Restoration) {
	if r == nil {
		return
	}
	o.restored = r
	if !r.Settled {
		o.log.Warn("the volume was restored from a checkpoint: the owner ends the sessions in it, and their mounts must be mounted again", "seq", r.Seq, "sessions", len(o.sessions))
		o.over = o.over[:0]
		for id := range o.awaited {
			o.over = append(o.over, id)
		}
	}
}

// settleRestoration skips the inode numbers that may have been issued after the checkpoint,
// once the checkpoint's sessions have ended.
func (o *owner) settleRestoration() error {
	if o.restored == nil || o.restored.Settled {
		return nil
	}
	o.mu.Lock()
	effects, err := namespace.SkipInodes(o.view(), skipInodes)
	if err != nil {
		o.mu.Unlock()
		return err
	}
	o.apply(effects, 0)
	wait := o.untilDurable(o.newest())
	o.mu.Unlock()
	if err := o.await(o.ctx, wait); err != nil {
		return err
	}
	if err := o.srv.cfg.Cluster.SettleRestored(o.ctx, o.vol); err != nil {
		return err
	}
	o.mu.Lock()
	o.restored.Settled = true
	o.mu.Unlock()
	return nil
}

func isQuarantined(r *cluster.Restoration) bool {
	return r != nil && time.Now().UnixNano() < int64(r.Quarantine)
}
