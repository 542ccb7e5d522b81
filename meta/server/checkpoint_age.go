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

// If etcd is lost entirely, entries in no checkpoint are lost. So entries that the recorded
// checkpoint lacks get into the next checkpoint within CheckpointEvery, whoever owns the
// volume meanwhile and however idle the volume is: the age counts from the checkpoint, not
// from the opening by the owner. An owner closes a volume only when the volume's checkpoint
// has all entries. A volume left without such a checkpoint, since its servers stopped, is
// opened to make the checkpoint.
//
// The cluster's records (grants, members, attachments) are in the manifest of the root
// volume's checkpoint. When records change, the owner writes a new manifest with the same
// files.

// recordsEvery is how often the root volume's owner compares the cluster's records with the
// records in the checkpoint: the checkpoint's are at most a minute old.
const recordsEvery = 30 * time.Second

// recordedCheckpoint is an owner's knowledge of the checkpoint recorded in etcd.
type recordedCheckpoint struct {
	seq     meta.Seq  // 0: no checkpoint
	written time.Time // without a checkpoint: when the volume was made
	records [sha256.Size]byte
}

// noCheckpoint is the value for a volume without a known checkpoint.
func noCheckpoint(created meta.Time) recordedCheckpoint {
	return recordedCheckpoint{written: notLater(created), records: sumOf(nil)}
}

// take sets r from a checkpoint's manifest.
func (r *recordedCheckpoint) take(m *journal.Manifest) {
	*r = recordedCheckpoint{seq: m.Seq, written: notLater(m.Written), records: sumOf(m.Records)}
}

// notLater returns a time from another server's clock, or now if the time is 0 or later than
// now.
func notLater(t meta.Time) time.Time {
	now := time.Now()
	if at := time.Unix(0, int64(t)); t != 0 && at.Before(now) {
		return at
	}
	return now
}

// checkpointEvery is the age that a checkpoint reaches while the journal has later entries.
// For the root volume, it is at most recordsEvery: the directories of the root volume say
// where volumes are attached, which belongs to the cluster's records.
func (cps *checkpoints) checkpointEvery() time.Duration {
	k := cps.k
	if k.vol == meta.RootVolume {
		return min(k.srv.cfg.CheckpointEvery, recordsEvery)
	}
	return k.srv.cfg.CheckpointEvery
}

// ageFrom returns the time from which the age of the recorded checkpoint counts. opened is
// when the owner opened the volume or last made a checkpoint. The caller holds the owner's mu.
func (cps *checkpoints) ageFrom(opened time.Time) time.Time {
	if cps.k.srv.cfg.Unsafe.NoCheckpointAge {
		return opened
	}
	return cps.recorded.written
}

// uncovered reports whether the journal has entries that the recorded checkpoint lacks. The
// caller holds the owner's mu.
func (cps *checkpoints) uncovered() bool { return cps.recorded.seq < cps.k.durable }

// mayRest reports whether an unused volume may be closed. If the volume only lacks its
// checkpoint, mayRest starts making the checkpoint. The root volume is never closed, since its
// owner keeps the cluster's records on the chunk servers.
func (cps *checkpoints) mayRest() bool {
	k := cps.k
	if k.vol == meta.RootVolume {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if !cps.uncovered() {
		return true
	}
	if time.Now().After(cps.retry) {
		cps.startCheckpoint()
	}
	return false
}

// behindJournal reports whether the checkpoint of a volume without an owner lacks entries of
// the volume's journal.
func (hs *hosted) behindJournal(ctx context.Context, v meta.VolumeID) (bool, error) {
	j, err := hs.cfg.Cluster.Follow(ctx, v)
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

// clusterRecords returns the cluster's records for the root volume's manifest, and nil for
// other volumes.
func (cps *checkpoints) clusterRecords(ctx context.Context) (all []journal.KeyValue, err error) {
	if cps.k.vol != meta.RootVolume {
		return nil, nil
	}
	records, err := cps.k.srv.cfg.Cluster.Records(ctx)
	for _, r := range records {
		all = append(all, journal.KeyValue{Key: []byte(r.Key), Value: r.Value})
	}
	return all, err
}

// recordsStale reports whether the cluster's records differ from the records in the recorded
// checkpoint. Without a checkpoint, or if the records can't be read, it is false.
func (cps *checkpoints) recordsStale() bool {
	k := cps.k
	ctx, cancel := context.WithTimeout(k.ctx, recordsEvery/2)
	defer cancel()
	records, err := cps.clusterRecords(ctx)
	if err != nil {
		if k.ctx.Err() == nil {
			k.log.Warn("the cluster's records can't be read: changes of them are not on the chunk servers yet", "error", err)
		}
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return cps.recorded.seq > 0 && cps.recorded.records != sumOf(records)
}

// sumOf returns a hash of a list of records.
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
