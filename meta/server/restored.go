package server

import (
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// skipInodes are left out after a restoration: more than a volume gives out
// between two checkpoints.
const skipInodes = 1 << 32

// restoration is what the cluster says of a volume's restoration.
type restoration struct {
	r   *cluster.Restoration // nil: it never was
	err error
}

// askRestoration asks beside what else a volume's opening takes.
func (s *Server) askRestoration(ctx context.Context, v meta.VolumeID) <-chan restoration {
	ch := make(chan restoration, 1)
	s.wg.Go(func() {
		r, ok, err := s.cfg.Cluster.Restored(ctx, v)
		if !ok {
			ch <- restoration{err: err}
			return
		}
		ch <- restoration{&r, err}
	})
	return ch
}

// loadRestoration notes whether the volume was made again from a checkpoint.
// Its sessions are those of a time that others have forgotten: what a client of
// before knows and has acknowledged may not be there. None of them comes back.
func (o *owner) loadRestoration(r *cluster.Restoration) {
	if r == nil {
		return
	}
	o.restored = r
	if !r.Settled {
		o.log.Warn("the volume was restored from a checkpoint: the sessions that it names are ended, and their mounts must be mounted again", "seq", r.Seq, "sessions", len(o.sessions))
		o.over = o.over[:0]
		for id := range o.awaited {
			o.over = append(o.over, id)
		}
	}
}

// settleRestoration skips the inode numbers that may have been given out after
// the checkpoint, once the sessions that the checkpoint names are ended.
func (o *owner) settleRestoration() error {
	if o.restored == nil || o.restored.Settled {
		return nil
	}
	o.mu.Lock()
	effects, err := namespace.SkipInodes(&view{o: o}, skipInodes)
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

// quarantined: what the journal does not know is not to be deleted from disks.
func (o *owner) quarantined() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return isQuarantined(o.restored)
}

func isQuarantined(r *cluster.Restoration) bool {
	return r != nil && time.Now().UnixNano() < int64(r.Quarantine)
}
