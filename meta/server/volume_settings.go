package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/namespace"
)

// words are the settings in a volume's row, beside the policy, that the owner acts on: the
// compression of the volume's chunks, and the advisory quota. The owner reads the row when
// opening the volume. Changes go through the owner. The owner reads the row again every
// wordsEvery, for a change made between two owners.
type words struct {
	k          *kernel
	inspection *inspection
	leases     *leases

	name     string // the volume's name when its row was last read
	compress meta.Compression
	advisory cluster.Advisory
	read     time.Time
	// booking: a goroutine writes a crossing into the row; telling: a goroutine journals the
	// row's crossings, so that the state machine makes an event.
	booking, telling bool
}

// wordsEvery is how often an owner reads its volume's row again.
const wordsEvery = 10 * time.Minute

// set takes over the settings from the row.
func (w *words) set(v *cluster.Volume) {
	k := w.k
	alg, err := meta.ParseCompression(v.Compression)
	if v.Compression != "" && err != nil {
		k.log.Warn("this program does not know the volume's compression: new chunks are not compressed", "compression", v.Compression)
	}
	k.mu.Lock()
	w.name = v.Name // another server may have renamed the volume
	more := alg != meta.CompressNone && alg != w.compress
	w.compress, w.read = alg, time.Now()
	w.advisory = cluster.Advisory{}
	if v.Advisory != nil {
		w.advisory = *v.Advisory
	}
	if bytes, inodes, err := namespace.Counted(k.view()); err == nil {
		w.watchQuota(bytes, inodes)
		if !w.booking && !w.telling && !w.quotaTold() && k.ctx.Err() == nil {
			w.telling = true
			k.wg.Go(w.tellQuota)
		}
	}
	k.mu.Unlock()
	if more { // new lists show the uncompressed chunks
		w.inspection.listAnew()
	}
}

// readAgain reads the row again if the last read is older than wordsEvery.
func (w *words) readAgain() {
	k := w.k
	k.mu.Lock()
	due := time.Since(w.read) > wordsEvery
	k.mu.Unlock()
	if !due {
		return
	}
	if v, err := k.srv.cfg.Cluster.Volume(k.ctx, k.vol); err == nil {
		w.set(&v)
		w.comparePolicy(&v)
	}
}

// compression is how new chunks are stored.
func (w *words) compression() meta.Compression {
	k := w.k
	k.mu.Lock()
	defer k.mu.Unlock()
	return w.compress
}

// An advisory quota refuses nothing. The owner writes a crossing into the volume's row, once,
// logs the crossing, and shows it in metrics. The quota counts as crossed until the use is a
// twentieth below the limit.

// crossed reports whether a use counts as above a limit, given whether it did before.
func crossed(was bool, use, limit uint64) bool {
	switch {
	case limit == 0:
		return false
	case was:
		return use > limit-limit/20
	}
	return use > limit
}

// watchQuota starts bookCrossing if the volume's use crosses its advisory quota. The caller
// holds the owner's mu.
func (w *words) watchQuota(bytes, inodes uint64) {
	k := w.k
	a := &w.advisory
	if w.booking || k.ctx.Err() != nil || crossed(a.BytesOver != 0, bytes, a.Bytes) == (a.BytesOver != 0) && crossed(a.InodesOver != 0, inodes, a.Inodes) == (a.InodesOver != 0) {
		return
	}
	w.booking = true
	k.wg.Go(w.bookCrossing)
}

// bookCrossing writes into the row which advisory quotas are crossed, by the use at the time
// of the write, and tries again after errors until the owner ends.
func (w *words) bookCrossing() {
	k := w.k
	for k.ctx.Err() == nil {
		var told []func()
		v, err := k.srv.cfg.Cluster.UpdateVolume(k.ctx, k.vol, func(v *cluster.Volume) error {
			told = nil
			if v.Advisory == nil {
				return nil
			}
			k.mu.Lock()
			bytes, inodes, err := namespace.Counted(k.view())
			k.mu.Unlock()
			if err != nil {
				return err
			}
			a := *v.Advisory
			v.Advisory = &a
			book := func(over *meta.Time, use, limit uint64, what string) {
				now := crossed(*over != 0, use, limit)
				if now == (*over != 0) {
					return
				}
				if *over = 0; now {
					*over = meta.Time(time.Now().UnixNano())
				}
				told = append(told, func() {
					if now {
						k.log.Warn("the volume is above its advisory quota", "of", what, "used", use, "quota", limit)
					} else {
						k.log.Info("the volume is below its advisory quota again", "of", what, "used", use, "quota", limit)
					}
				})
			}
			book(&a.BytesOver, bytes, a.Bytes, "bytes")
			book(&a.InodesOver, inodes, a.Inodes, "inodes")
			return nil
		})
		if err == nil {
			for _, tell := range told {
				tell()
			}
			k.mu.Lock()
			w.booking = false
			k.mu.Unlock()
			w.set(&v) // set notices changes made meanwhile
			return
		}
		k.log.Warn("the event of a crossed advisory quota could not be recorded; the owner tries again", "error", err)
		select {
		case <-time.After(5 * time.Second):
		case <-k.ctx.Done():
		}
	}
}

// quotaTold reports whether the state and the row agree on crossed advisory quotas. The caller
// holds the owner's mu.
func (w *words) quotaTold() bool {
	k := w.k
	a := &w.advisory
	bytes, inodes, err := namespace.QuotaTold(k.view())
	return err != nil || bytes == (a.BytesOver != 0) && inodes == (a.InodesOver != 0)
}

// tellQuota journals the row's crossings of advisory quotas, with an event if events are on.
// The row is written first: if the owner dies between row and journal, the next owner finds
// the difference when opening the volume. tellQuota ends while bookCrossing runs, because the
// journal may agree with the outcome; set then starts tellQuota again if not.
func (w *words) tellQuota() {
	k := w.k
	for {
		k.mu.Lock()
		a := w.advisory
		if w.booking || k.ctx.Err() != nil || k.failed != nil || w.quotaTold() {
			w.telling = false
			k.mu.Unlock()
			return
		}
		k.mu.Unlock()
		err := w.leases.durably(k.ctx, &meta.TellQuota{Bytes: a.Bytes, Inodes: a.Inodes, BytesOver: a.BytesOver != 0, InodesOver: a.InodesOver != 0})
		if err != nil && k.ctx.Err() == nil {
			k.log.Warn("the event of a crossed advisory quota was not journaled; the owner tries again", "error", err)
			select {
			case <-time.After(5 * time.Second):
			case <-k.ctx.Done():
			}
		}
	}
}

// sayAdvisory changes a row's advisory quota as requested by w. A changed limit counts as not
// crossed until the next check.
func sayAdvisory(v *cluster.Volume, w *meta.VolumeWords) {
	if w.AdvisoryBytes == nil && w.AdvisoryInodes == nil {
		return
	}
	var a cluster.Advisory
	if v.Advisory != nil {
		a = *v.Advisory
	}
	if n := w.AdvisoryBytes; n != nil && *n != a.Bytes {
		a.Bytes, a.BytesOver = *n, 0
	}
	if n := w.AdvisoryInodes; n != nil && *n != a.Inodes {
		a.Inodes, a.InodesOver = *n, 0
	}
	if v.Advisory = &a; a == (cluster.Advisory{}) {
		v.Advisory = nil
	}
}

// checkCompression refuses an unknown algorithm. Errors: Invalid.
func checkCompression(name *string) error {
	if name == nil {
		return nil
	}
	if _, err := meta.ParseCompression(*name); err != nil {
		return fmt.Errorf("compression: %w", err)
	}
	return nil
}

// VolumeCounters are the metrics of a volume owned here, if the volume's row sets compression
// or an advisory quota.
type VolumeCounters struct {
	Name                  string
	UsedBytes, UsedInodes uint64
	// Advisory quota (0: none), and whether the quota counts as crossed.
	AdvisoryBytes, AdvisoryInodes uint64
	BytesOver, InodesOver         bool
	// Of replicas of sealed chunks, by the chunk servers' last lists: plain bytes, and stored
	// bytes.
	Compressed              bool // the volume is to be compressed
	PlainBytes, StoredBytes uint64
}

// VolumeCounters returns the counters of the volumes owned here.
func (s *Server) VolumeCounters() (all []VolumeCounters) {
	for _, o := range s.hosted.owners() {
		o.mu.Lock()
		w := &o.words
		c := VolumeCounters{Name: o.words.name, Compressed: w.compress != meta.CompressNone,
			AdvisoryBytes: w.advisory.Bytes, AdvisoryInodes: w.advisory.Inodes, BytesOver: w.advisory.BytesOver != 0, InodesOver: w.advisory.InodesOver != 0}
		var err error
		if c.UsedBytes, c.UsedInodes, err = namespace.Counted(o.view()); err != nil {
			c.Compressed, w = false, &words{}
		}
		wanted := c.Compressed || w.advisory != (cluster.Advisory{})
		o.mu.Unlock()
		if wanted {
			st := o.inspection.storedNow()
			c.PlainBytes, c.StoredBytes = st.Plain, st.Stored
			all = append(all, c)
		}
	}
	return all
}

// labelsFit refuses a change of labels if the volume has no room for the labels, or if its
// labels can't be read. Errors: ResourceExceeded, Corrupt, Version, Unavailable.
func (w *words) labelsFit(ctx context.Context, change map[string]*string) error {
	k := w.k
	if len(change) == 0 {
		return nil
	}
	all, err := k.srv.cfg.Cluster.Labels(ctx, k.vol, k.vol)
	if err == nil {
		err = all[k.vol].Err
	}
	if err == nil {
		_, err = meta.ChangeLabels(all[k.vol].Set, change)
	}
	return err
}

// settlePolicy writes the journal's policy into the row, with the changes of more. The caller
// has the turn. Errors: Unavailable if the owner's lease is uncertain.
func (w *words) settlePolicy(ctx context.Context, more func(*cluster.Volume)) (cluster.Volume, error) {
	k := w.k
	p, err := k.policy()
	if err != nil {
		return cluster.Volume{}, err
	}
	return k.srv.cfg.Cluster.UpdateVolume(ctx, k.vol, func(v *cluster.Volume) error {
		// A later owner may have journaled another policy.
		if err := k.ctx.Err(); err != nil || k.outsideLease() {
			return meta.E("change volume", meta.Unavailable, v.Name, errors.New("whether it is served here is not certain now"))
		}
		v.Policy = p
		more(v)
		return nil
	})
}

// comparePolicy writes the journal's policy into a row with another policy: the previous owner
// died between journal and row.
func (w *words) comparePolicy(v *cluster.Volume) {
	k := w.k
	if p, err := k.policy(); err != nil || p == v.Policy {
		return
	}
	k.goes(func() {
		end, err := k.srv.catalogue.setting.begin(k.ctx, k.vol)
		if err != nil {
			return
		}
		defer end()
		if err = k.await(k.ctx, k.recovered); err == nil {
			_, err = w.settlePolicy(k.ctx, func(*cluster.Volume) {})
		}
		switch {
		case err == nil:
			k.log.Info("the volume's row in etcd has the policy again: a dead server had only journaled the policy")
		case k.ctx.Err() == nil:
			k.log.Warn("the volume's row in etcd has another policy than the journal; the owner compares again later", "error", err)
		}
	})
}

// rename sets the volume's name as shown in metrics and errors.
func (w *words) rename(name string) {
	k := w.k
	k.mu.Lock()
	defer k.mu.Unlock()
	w.name = name
}
