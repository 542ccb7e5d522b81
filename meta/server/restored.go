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
func (k *kernel) settleRestoration() error {
	if k.restored == nil || k.restored.Settled {
		return nil
	}
	k.mu.Lock()
	effects, err := namespace.SkipInodes(k.view(), skipInodes)
	if err != nil {
		k.mu.Unlock()
		return err
	}
	k.apply(effects, 0)
	wait := k.untilDurable(k.newest())
	k.mu.Unlock()
	if err := k.await(k.ctx, wait); err != nil {
		return err
	}
	if err := k.srv.cfg.Cluster.SettleRestored(k.ctx, k.vol); err != nil {
		return err
	}
	k.mu.Lock()
	k.restored.Settled = true
	k.mu.Unlock()
	return nil
}

func isQuarantined(r *cluster.Restoration) bool {
	return r != nil && time.Now().UnixNano() < int64(r.Quarantine)
}
