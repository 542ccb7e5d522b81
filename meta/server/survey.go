package server

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/state"
)

// A survey finds out, from the chunk servers alone, how much of a cluster can be rebuilt after
// the loss of its etcd. The survey lists the servers' chunks, reads the manifests among the
// chunks of volume 0, takes for each volume the newest checkpoint present to the last byte,
// and compares the checkpoint with the chunks on the disks.

// Survey is the result of a survey. A survey changes nothing.
type Survey struct {
	Cluster string             `json:"cluster"`
	Servers []meta.ServerInfo  `json:"servers"`
	Volumes []SurveyedVolume   `json:"volumes"`
	Notes   []string           `json:"notes,omitempty"`
	Written meta.Time          `json:"records_of"` // date of the cluster's own records; 0: no records
	records []journal.KeyValue // of the root volume's manifest, or of a backup
	besides []journal.KeyValue // of a backup; no manifest has these keys

	MaxVolume meta.VolumeID `json:"-"`
	MaxServer meta.ServerID `json:"-"`
}

// SurveyedVolume is one volume.
type SurveyedVolume struct {
	ID meta.VolumeID `json:"id"`
	// Name is the name in the row; a volume without a row is named after its ID.
	Name    string    `json:"name"`
	Seq     meta.Seq  `json:"seq"`     // of the checkpoint; 0: no checkpoint, the volume begins empty
	Written meta.Time `json:"written"` // time of the state; later changes are lost
	// Chunks referred to by the checkpoint: all, and missing on the disks (the files of
	// missing chunks answer EIO).
	Chunks       int    `json:"chunks"`
	Bytes        uint64 `json:"bytes"`
	MissingCount int    `json:"missing_chunks"`
	MissingBytes uint64 `json:"missing_bytes"`
	// Chunks on disks unknown to the checkpoint: written after the checkpoint. TailBytes also
	// counts the bytes of open chunks beyond the bytes referred to by the checkpoint.
	TailCount int    `json:"unknown_chunks"`
	TailBytes uint64 `json:"unknown_bytes"`
	// Incomplete counts newer checkpoints with missing or unreadable files.
	Incomplete int `json:"incomplete_checkpoints"`
	// FromBackup counts the journal entries taken from a backup, after the checkpoint.
	FromBackup int `json:"entries_from_backup"`

	row  cluster.Volume
	best *found
	tail []journal.Entry // the entries after best, from a backup
	term meta.Term
}

// found is a manifest on the disks.
type found struct {
	m   journal.Manifest
	ref meta.BlobRef
}

// NewSurveyor makes a server for chunk servers only. The server knows no volume and refuses
// all other callers.
func NewSurveyor(ctx context.Context, cfg Config) (*Server, error) {
	c := &lostCluster{key: meta.CapKey{ID: uint32(time.Now().Unix()), Secret: make([]byte, 32)}}
	rand.Read(c.key.Secret)
	cfg.Cluster, cfg.Followers, cfg.HomeAfter = c, -1, -1
	return New(ctx, cfg)
}

// surveyor finds the volumes on the chunk servers after the loss of all of etcd.
type surveyor struct {
	*process
	chunkServers *chunkServers
}

// listed are the replicas of one volume's chunks.
type listed map[meta.ChunkID]map[meta.ServerID]meta.ReplicaInfo

// listAll lists a volume's chunks on every connected server. A failed listing is an error,
// because an incomplete list proves nothing.
func (su *surveyor) listAll(ctx context.Context, v meta.VolumeID) (listed, error) {
	all := listed{}
	for _, srv := range su.chunkServers.liveServers() {
		if err := listReplicas(ctx, su.chunkServers.Order, srv.ID, v, func(page []meta.ReplicaInfo) error {
			for _, c := range page {
				if all[c.ID] == nil {
					all[c.ID] = map[meta.ServerID]meta.ReplicaInfo{}
				}
				all[c.ID][srv.ID] = c
			}
			return nil
		}); err != nil {
			return nil, fmt.Errorf("listing volume %d on server %d: %w", v, srv.ID, err)
		}
	}
	return all, nil
}

// whole reports whether each part of a blob is on a connected server, sealed and of the
// recorded length.
func (l listed) whole(ref meta.BlobRef) bool {
	for _, p := range ref.Parts {
		if !slices.ContainsFunc(p.Servers, func(id meta.ServerID) bool {
			i, ok := l[p.Chunk][id]
			return ok && i.Err == meta.KindOK && i.State == meta.ChunkSealed && i.Length == p.Length
		}) {
			return false
		}
	}
	return true
}

// Survey makes a survey. dir is for temporary states of volumes; backup is a backup of the
// cluster's records, or nil.
func (su *surveyor) Survey(ctx context.Context, dir string, shared *state.Shared, backup *cluster.Backup) (*Survey, error) {
	sv := &Survey{Servers: su.chunkServers.liveServers()}
	for _, i := range sv.Servers {
		sv.MaxServer = max(sv.MaxServer, i.ID)
	}
	blobs, err := su.listAll(ctx, 0)
	if err != nil {
		return nil, err
	}
	manifests, err := su.readManifests(ctx, sv, blobs)
	if err != nil {
		return nil, err
	}
	if backup != nil {
		if sv.Cluster != "" && sv.Cluster != backup.Cluster {
			return nil, meta.E("survey", meta.Invalid, backup.Cluster, fmt.Errorf("the backup is of this cluster, the chunk servers hold checkpoints of cluster %s", sv.Cluster))
		}
		sv.Cluster = backup.Cluster
	} else if len(manifests) == 0 {
		return nil, meta.E("survey", meta.NotFound, "", fmt.Errorf("no checkpoint is on the %d chunk servers that are connected", len(sv.Servers)))
	}
	byVolume := map[meta.VolumeID]*SurveyedVolume{}
	at := func(id meta.VolumeID) *SurveyedVolume {
		v := byVolume[id]
		if v == nil {
			v = &SurveyedVolume{ID: id}
			byVolume[id] = v
			sv.MaxVolume = max(sv.MaxVolume, id)
		}
		return v
	}
	// The newest checkpoint first; the term before the number, because an earlier restoration
	// set the numbers back but not the terms.
	slices.SortStableFunc(manifests, func(a, b *found) int {
		return cmp.Or(cmp.Compare(a.m.Volume, b.m.Volume), cmp.Compare(b.m.Term, a.m.Term), cmp.Compare(b.m.Seq, a.m.Seq), cmp.Compare(b.m.Written, a.m.Written))
	})
	for _, f := range manifests {
		v := at(f.m.Volume)
		v.term = max(v.term, f.m.Term)
		if v.best != nil {
			continue
		}
		if err := su.complete(ctx, blobs, f); err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			v.Incomplete++
			sv.note("volume %d: the checkpoint at %d of %s is not complete: %v", f.m.Volume, f.m.Seq, when(f.m.Written), err)
			continue
		}
		v.best = f
	}
	journals, err := sv.takeBackup(backup, byVolume)
	if err != nil {
		return nil, err
	}
	if err := sv.takeRows(byVolume, at); err != nil {
		return nil, err
	}
	for id, v := range byVolume {
		sv.takeTail(v, journals[id])
	}
	for id := range blobs {
		if v := byVolume[meta.VolumeID(id.Counter>>32)]; v != nil && id.Term < 1<<30 {
			v.term = max(v.term, meta.Term(id.Term))
		}
	}
	for _, id := range sortedVolumes(byVolume) {
		v := byVolume[id]
		if err := su.compare(ctx, v, dir, shared); err != nil {
			return nil, err
		}
		sv.Volumes = append(sv.Volumes, *v)
	}
	return sv, nil
}

func when(t meta.Time) string { return time.Unix(0, int64(t)).UTC().Format(time.RFC3339) }

func (sv *Survey) note(format string, a ...any) {
	if len(sv.Notes) < 1000 {
		sv.Notes = append(sv.Notes, fmt.Sprintf(format, a...))
	}
}

// readManifests reads every manifest among the chunks of volume 0.
func (su *surveyor) readManifests(ctx context.Context, sv *Survey, blobs listed) ([]*found, error) {
	var all []*found
	for id, on := range blobs {
		part := meta.BlobPart{Chunk: id}
		for srv, i := range on {
			if i.Err == meta.KindOK && i.State == meta.ChunkSealed && (part.Length == 0 || i.Length == part.Length) {
				part.Length, part.Servers = i.Length, append(part.Servers, srv)
			}
		}
		if part.Length == 0 {
			continue
		}
		slices.Sort(part.Servers)
		head, err := su.readPart(ctx, part, 4)
		if err != nil {
			sv.note("chunk %s can't be read: %v", id, err)
			continue
		}
		if !journal.LooksLikeManifest(head) {
			continue
		}
		b, err := su.readPart(ctx, part, part.Length)
		if err != nil {
			sv.note("chunk %s can't be read: %v", id, err)
			continue
		}
		m, err := journal.DecodeManifest(b)
		if errors.Is(err, meta.Version) {
			return nil, err // only a newer program can restore
		}
		if err != nil {
			continue // a table file that begins like a manifest
		}
		if sv.Cluster == "" {
			sv.Cluster = m.Cluster
		}
		if m.Cluster != sv.Cluster {
			return nil, meta.E("survey", meta.Invalid, m.Cluster, fmt.Errorf("the chunk servers hold checkpoints of two clusters, %s as well", sv.Cluster))
		}
		ref := meta.BlobRef{Name: "manifest", Length: part.Length, CRC: crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)), Parts: []meta.BlobPart{part}}
		all = append(all, &found{m, ref})
	}
	return all, nil
}

// readPart reads the first n bytes of a blob's part, at most the whole part.
func (su *surveyor) readPart(ctx context.Context, p meta.BlobPart, n uint64) ([]byte, error) {
	b := make([]byte, min(n, p.Length))
	if su.cfg.ReadChunk == nil {
		return nil, meta.E("survey", meta.NotSupported, p.Chunk.String(), nil)
	}
	return b, su.cfg.ReadChunk(ctx, meta.ChunkPlace{ID: p.Chunk, Servers: p.Servers, Sealed: true, Length: p.Length}, b, 0)
}

// complete reads all files of a checkpoint to the end; an error means that the checkpoint is
// incomplete.
func (su *surveyor) complete(ctx context.Context, blobs listed, f *found) error {
	for _, file := range f.m.Files {
		if !blobs.whole(file.Ref) {
			return meta.E("survey", meta.NotFound, file.Name, errors.New("no connected chunk server has all of it"))
		}
	}
	for _, file := range f.m.Files {
		r, err := su.cfg.Blob.Get(ctx, file.Ref)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, r)
		if err = errors.Join(err, r.Close()); err != nil {
			return err
		}
	}
	return nil
}

// takeRows decides which volumes exist: the volumes in the cluster's records (from the root
// volume's checkpoint or the backup, whichever is newer), and the volumes with a newer
// checkpoint of their own. A volume with an older checkpoint and without a record was deleted.
func (sv *Survey) takeRows(byVolume map[meta.VolumeID]*SurveyedVolume, at func(meta.VolumeID) *SurveyedVolume) error {
	kept := map[meta.VolumeID]cluster.Volume{}
	if root := byVolume[meta.RootVolume]; root != nil && root.best != nil && root.best.m.Written > sv.Written {
		sv.records, sv.Written = slices.Concat(root.best.m.Records, sv.besides), root.best.m.Written
	}
	for _, r := range sv.records {
		if len(r.Key) < 6 || string(r.Key[:6]) != "table/" {
			continue
		}
		v, err := cluster.DecodeVolume(r.Value)
		if err != nil {
			return err
		}
		kept[v.ID] = v
		if v.State != cluster.VolumeDeleting {
			at(v.ID)
		}
	}
	for id, v := range byVolume {
		row, known := kept[id]
		if v.best != nil && (!known || v.best.m.Written > sv.Written) {
			own, err := cluster.DecodeVolume(v.best.m.Row)
			if err != nil {
				return err
			}
			if !known && v.best.m.Written < sv.Written {
				sv.note("volume %s (%d) was deleted before %s: its checkpoint is left alone", own.Name, id, when(sv.Written))
				delete(byVolume, id)
				continue
			}
			row, known = own, true
		}
		if !known {
			row = cluster.Volume{ID: id, Name: fmt.Sprintf("restored-%d", id), State: cluster.VolumeActive, Policy: meta.Policy{Replicas: 1}}
			sv.note("of volume %d there is neither a row nor a complete checkpoint: it begins empty", id)
		}
		v.row, v.Name = row, row.Name
	}
	// Names are unique; two volumes may have had the same name one after the other.
	names := map[string]meta.VolumeID{}
	for _, id := range sortedVolumes(byVolume) {
		v := byVolume[id]
		if other, taken := names[v.Name]; taken {
			sv.note("volumes %d and %d are both called %q: the second is renamed", other, id, v.Name)
			v.row.Name = fmt.Sprintf("%s-%d", v.Name, id)
			v.Name = v.row.Name
		}
		names[v.Name] = id
	}
	return nil
}

func sortedVolumes(m map[meta.VolumeID]*SurveyedVolume) (ids []meta.VolumeID) {
	for id := range m {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// compare compares a volume's checkpoint, with the entries from a backup, with the chunks on
// the disks.
func (su *surveyor) compare(ctx context.Context, v *SurveyedVolume, dir string, shared *state.Shared) error {
	on, err := su.listAll(ctx, v.ID)
	if err != nil {
		return err
	}
	longest := func(id meta.ChunkID) (n uint64) {
		for _, i := range on[id] {
			n = max(n, i.Length)
		}
		return n
	}
	for id, replicas := range on {
		v.term = max(v.term, meta.Term(id.Term))
		for _, i := range replicas {
			v.term = max(v.term, i.Fence.Term)
		}
	}
	known := map[meta.ChunkID]bool{}
	if v.best != nil || len(v.tail) > 0 {
		tmp := filepath.Join(dir, fmt.Sprintf("survey-%08x", uint32(v.ID)))
		if err := os.RemoveAll(tmp); err != nil {
			return meta.E("survey", meta.IO, tmp, err)
		}
		defer os.RemoveAll(tmp)
		st, err := su.loadSurveyed(ctx, v, tmp, shared)
		if err != nil {
			return err
		}
		err = namespace.Chunks(st, func(c meta.ChunkRecord) bool {
			known[c.ID] = true
			if c.State == meta.ChunkDeleting || c.Live == 0 {
				return true
			}
			v.Chunks++
			v.Bytes += c.Live
			if n := longest(c.ID); c.State == meta.ChunkOpen && n > c.Live {
				v.TailBytes += n - c.Live // appended later, or garbage
			}
			have := slices.ContainsFunc(c.Servers, func(id meta.ServerID) bool {
				i, ok := on[c.ID][id]
				return ok && i.Err == meta.KindOK && (c.State != meta.ChunkSealed || i.Length >= c.Length)
			})
			if !have {
				v.MissingCount++
				v.MissingBytes += c.Live
			}
			return true
		})
		if err = errors.Join(err, st.Close()); err != nil {
			return err
		}
	}
	for id := range on {
		if !known[id] {
			v.TailCount++
			v.TailBytes += longest(id)
		}
	}
	return nil
}

// loadSurveyed makes the state of a volume in a folder: the checkpoint, and the backup's later
// journal entries.
func (su *surveyor) loadSurveyed(ctx context.Context, v *SurveyedVolume, dir string, shared *state.Shared) (st *state.Store, err error) {
	if v.best == nil {
		st, err = state.Create(dir, v.ID, shared)
	} else {
		if v.Seq = v.best.m.Seq; len(v.tail) == 0 {
			v.Written = v.best.m.Written
		}
		err = state.Restore(dir, v.ID, v.best.m.Files, func(f journal.File) (io.ReadCloser, error) { return su.cfg.Blob.Get(ctx, f.Ref) })
		if err == nil {
			st, err = state.Open(dir, v.ID, shared)
		}
	}
	if err != nil {
		return nil, err
	}
	if at := st.Applied(); v.best != nil && at != v.best.m.Position {
		return nil, errors.Join(meta.E("survey", meta.Corrupt, v.Name, fmt.Errorf("its files stand at %v, its manifest says %v", at, v.best.m.Position)), st.Close())
	}
	for _, e := range v.tail {
		if err := replay(store{st, shared}, e); err != nil {
			return nil, errors.Join(err, st.Close())
		}
		v.Seq = e.Seq
	}
	return st, nil
}

// restoreTerms is the distance of a restored volume's term from the highest term seen: owners
// may have come and gone without leaving a chunk.
const restoreTerms = 1000

// Quarantine is how long after a restoration the owners delete no unknown chunk.
const Quarantine = 14 * 24 * time.Hour

// Founding returns the records for the cluster's new beginning, and the volumes' journals.
func (sv *Survey) Founding(now meta.Time) (cluster.Founding, []RestoredVolume) {
	f := cluster.Founding{ID: sv.Cluster, At: now, MaxVolume: sv.MaxVolume, MaxServer: sv.MaxServer, Restored: map[meta.VolumeID]cluster.Restoration{}}
	for _, r := range sv.records {
		f.Records = append(f.Records, cluster.Record{Key: string(r.Key), Value: r.Value})
	}
	var all []RestoredVolume
	for _, v := range sv.Volumes {
		r := RestoredVolume{Volume: v.ID, Term: v.term + restoreTerms}
		if v.best != nil {
			cp := v.best.m.Checkpoint
			cp.Files, cp.Manifest = nil, v.best.ref
			r.Checkpoint, r.Entry = &cp, v.best.m.Entry
		}
		r.Tail = v.tail
		all = append(all, r)
		f.Volumes = append(f.Volumes, v.row)
		f.Restored[v.ID] = cluster.Restoration{At: now, Seq: v.Seq, Term: r.Term, Quarantine: now + meta.Time(Quarantine)}
	}
	return f, all
}

// RestoredVolume is the beginning of a restored volume's journal.
type RestoredVolume = etcd.Restored
