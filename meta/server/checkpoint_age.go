package server

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
)

// What is in no checkpoint is lost with an etcd that is lost whole. So entries that the
// recorded checkpoint lacks get into the next one within CheckpointEvery, whoever owns the
// volume meanwhile and however idle it is: the age is that of the checkpoint, not of the
// owner. A volume is closed only when its checkpoint has all of its entries, and one that
// was left otherwise, since its servers stopped, is opened for that.
//
// The cluster's own records (grants, members, attachments) are in the manifest of the root
// volume's checkpoint. When they changed, that is written anew, with the same files.

// recordsEvery is how often the root volume's owner compares the cluster's records with
// those that its checkpoint holds: so they are at most a minute old there.
const recordsEvery = 30 * time.Second

// recordedCheckpoint is what an owner knows of the checkpoint that etcd records.
type recordedCheckpoint struct {
	seq     meta.Seq  // 0: there is none
	written time.Time // if there is none: when the volume was made
	records [sha256.Size]byte
}

// noCheckpoint is of a volume of which no checkpoint is known yet.
func noCheckpoint(created meta.Time) recordedCheckpoint {
	return recordedCheckpoint{written: notLater(created), records: sumOf(nil)}
}

// take notes what a manifest says.
func (r *recordedCheckpoint) take(m *journal.Manifest) {
	*r = recordedCheckpoint{seq: m.Seq, written: notLater(m.Written), records: sumOf(m.Records)}
}

// notLater is a time that another server's clock gave; now if it gave none, or a later one.
func notLater(t meta.Time) time.Time {
	now := time.Now()
	if at := time.Unix(0, int64(t)); t != 0 && at.Before(now) {
		return at
	}
	return now
}

// checkpointEvery is how old a checkpoint gets while the journal has more. The root
// volume's directories say where volumes are attached: they belong to the cluster's records.
func (o *owner) checkpointEvery() time.Duration {
	if o.vol == meta.RootVolume {
		return min(o.srv.cfg.CheckpointEvery, recordsEvery)
	}
	return o.srv.cfg.CheckpointEvery
}

// ageFrom is what the age of the recorded checkpoint counts from; opened is when its volume
// was, or a checkpoint was made here. Caller holds mu.
func (o *owner) ageFrom(opened time.Time) time.Time {
	if o.srv.cfg.Unsafe.NoCheckpointAge {
		return opened
	}
	return o.checkpoints.recorded.written
}

// uncovered: the journal has entries that the recorded checkpoint lacks. Caller holds mu.
func (o *owner) uncovered() bool { return o.checkpoints.recorded.seq < o.durable }

// mayRest tells whether a volume that nobody uses may be closed, and has its checkpoint
// made if that is what is missing. The root volume is never closed, since its owner keeps
// the cluster's records on the chunk servers.
func (o *owner) mayRest() bool {
	if o.vol == meta.RootVolume {
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.uncovered() {
		return true
	}
	if time.Now().After(o.checkpoints.retry) {
		o.startCheckpoint()
	}
	return false
}

// behindJournal tells whether the checkpoint of a volume that nobody serves lacks entries of its
// journal.
func (s *Server) behindJournal(ctx context.Context, v meta.VolumeID) (bool, error) {
	j, err := s.cfg.Cluster.Follow(ctx, v)
	if err != nil {
		return false, err
	}
	cp, _, err := j.Checkpoint(ctx)
	if err != nil {
		return false, err
	}
	_, err = j.Entry(ctx, cp.Seq+1)
	if errors.Is(err, meta.NotFound) {
		return false, nil
	}
	return err == nil, err
}

// clusterRecords are what the root volume's manifest holds besides; nil for others.
func (o *owner) clusterRecords(ctx context.Context) (all []journal.KeyValue, err error) {
	if o.vol != meta.RootVolume {
		return nil, nil
	}
	records, err := o.srv.cfg.Cluster.Records(ctx)
	for _, r := range records {
		all = append(all, journal.KeyValue{Key: []byte(r.Key), Value: r.Value})
	}
	return all, err
}

// recordsStale: the cluster's records are not those that the recorded checkpoint holds.
func (o *owner) recordsStale() bool {
	ctx, cancel := context.WithTimeout(o.ctx, recordsEvery/2)
	defer cancel()
	records, err := o.clusterRecords(ctx)
	if err != nil {
		if o.ctx.Err() == nil {
			o.log.Warn("the cluster's records can't be read: changes of them are not on the chunk servers yet", "error", err)
		}
		return false
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.checkpoints.recorded.seq > 0 && o.checkpoints.recorded.records != sumOf(records)
}

// sumOf tells one list of records from another.
func sumOf(records []journal.KeyValue) (sum [sha256.Size]byte) {
	h := sha256.New()
	var n [8]byte
	put := func(b []byte) {
		binary.BigEndian.PutUint64(n[:], uint64(len(b)))
		h.Write(n[:])
		h.Write(b)
	}
	for _, r := range records {
		put(r.Key)
		put(r.Value)
	}
	return [sha256.Size]byte(h.Sum(nil))
}
