package server

import (
	"encoding/json"
	"fmt"
	"strings"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
)

// A backup has each volume's journal after some checkpoint, but not the files of the
// checkpoint: the files were on the chunk servers, and a later checkpoint may have replaced
// the files since. So the newest complete checkpoint on the chunk servers decides, and the
// backup supplies the later journal entries. A volume with a checkpoint newer than the backup
// is restored to that checkpoint.

// takeBackup takes the cluster's records from a backup, and returns the volumes' journals.
// Errors: Corrupt, Version.
func (sv *Survey) takeBackup(b *cluster.Backup, byVolume map[meta.VolumeID]*SurveyedVolume) (map[meta.VolumeID]*backedUp, error) {
	if b == nil {
		return nil, nil
	}
	// If the root volume's checkpoint is newer, takeRows replaces the records.
	sv.Written = b.At
	for _, r := range b.ClusterRecords() {
		kv := journal.KeyValue{Key: []byte(r.Key), Value: r.Value}
		sv.records = append(sv.records, kv)
		if r.Key == "authority" || strings.HasPrefix(r.Key, "groups/") {
			sv.besides = append(sv.besides, kv)
		}
	}
	all := map[meta.VolumeID]*backedUp{}
	for id, records := range b.VolumeRecords() {
		j, err := decodeBackedUp(id, records)
		if err != nil {
			return nil, err
		}
		j.at = b.At
		all[id] = j
		if v := byVolume[id]; v != nil {
			v.term = max(v.term, j.term)
		}
	}
	return all, nil
}

// backedUp is a volume's journal in a backup.
type backedUp struct {
	at      meta.Time
	term    meta.Term
	behind  bool            // after a checkpoint: the first entries of the journal are missing
	entries []journal.Entry // ascending
}

func decodeBackedUp(v meta.VolumeID, records []cluster.Record) (*backedUp, error) {
	j := &backedUp{}
	for _, r := range records {
		switch {
		case r.Key == "checkpoint":
			j.behind = true
		case r.Key == "term":
			var owner struct {
				Term meta.Term `json:"term"`
			}
			if err := json.Unmarshal(r.Value, &owner); err != nil {
				return nil, meta.E("read backup", meta.Corrupt, fmt.Sprintf("volume %d, term", v), err)
			}
			j.term = owner.Term
		case strings.HasPrefix(r.Key, "journal/"):
			e, err := journal.Decode(r.Value)
			if err != nil {
				return nil, err
			}
			j.entries = append(j.entries, e)
			j.term = max(j.term, e.Term)
		}
	}
	return j, nil
}

// takeTail takes from a backup's journal the entries after the volume's checkpoint.
func (sv *Survey) takeTail(v *SurveyedVolume, j *backedUp) {
	if j == nil || len(j.entries) == 0 {
		return
	}
	v.term = max(v.term, j.term)
	chain := journal.Chain{Volume: v.ID}
	switch {
	case v.best != nil:
		chain.At = v.best.m.Position
	case j.behind:
		sv.note("volume %d: the backup has its journal from entry %d on, and no connected chunk server has the checkpoint before that: it begins empty", v.ID, j.entries[0].Seq)
		return
	case v.row.Origin != nil:
		sv.note("volume %d is a clone of which there is no checkpoint: it begins empty", v.ID)
		return
	}
	for _, e := range j.entries {
		if e.Seq < chain.At.Seq || e.Position() == chain.At {
			continue
		}
		if err := chain.Step(e); err != nil {
			sv.note("volume %d: the backup's journal does not follow the checkpoint at entry %d (%v): nothing is taken from it", v.ID, chain.At.Seq, err)
			v.tail = nil
			return
		}
		v.tail = append(v.tail, e)
	}
	if v.FromBackup = len(v.tail); v.FromBackup > 0 {
		v.Seq, v.Written = chain.At.Seq, j.at
	}
}
