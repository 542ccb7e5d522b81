package server

import (
	"context"
	"maps"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/placement"
)

// Each chunk server compresses its replicas of sealed chunks, as the order to seal or to copy
// a chunk says. Some replicas stay plain, since a server was down, or since the volume's
// policy demanded compression later. The servers' lists say how each replica is stored, and
// the owner orders the compression of plain replicas again. Compressed replicas stay
// compressed when the policy no longer demands compression.

// StoredBytes sums replicas of sealed chunks.
type StoredBytes struct {
	Replicas   uint64 `json:"replicas"`
	Compressed uint64 `json:"compressed"` // of Replicas
	Dense      uint64 `json:"dense"`      // of Replicas: compression would save nothing
	Plain      uint64 `json:"plain_bytes"`
	Stored     uint64 `json:"stored_bytes"` // bytes on the disks
}

// Ratio returns plain bytes per stored byte; 1 if no byte is stored.
func (b StoredBytes) Ratio() float64 {
	if b.Stored == 0 {
		return 1
	}
	return float64(b.Plain) / float64(b.Stored)
}

func (b *StoredBytes) plus(x StoredBytes) {
	b.Replicas += x.Replicas
	b.Compressed += x.Compressed
	b.Dense += x.Dense
	b.Plain += x.Plain
	b.Stored += x.Stored
}

// add counts a listed replica.
func (b *StoredBytes) add(c *meta.ReplicaInfo) {
	if c.State != meta.ChunkSealed {
		return
	}
	b.Replicas++
	b.Plain += c.Length
	if c.Form == meta.CompressNone {
		b.Stored += c.Length // also if the server does not report the form
		if c.Dense {
			b.Dense++
		}
		return
	}
	b.Compressed++
	b.Stored += c.Stored
}

func (in *inspection) setStored(server meta.ServerID, b StoredBytes) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.stored == nil {
		in.stored = map[meta.ServerID]StoredBytes{}
	}
	in.stored[server] = b
}

// forgetStored drops the sums of servers gone for good.
func (in *inspection) forgetStored(m *placement.Map) {
	in.mu.Lock()
	defer in.mu.Unlock()
	maps.DeleteFunc(in.stored, func(id meta.ServerID, _ StoredBytes) bool {
		s, ok := m.Server(id)
		return !ok || s.State == placement.Gone
	})
}

// storedNow adds up the sums of all servers, as listed last.
func (in *inspection) storedNow() (sum StoredBytes) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, b := range in.stored {
		sum.plus(b)
	}
	return sum
}

// tallyAge is how old a tally may be.
const tallyAge = 3 * time.Second

// tally returns how the volume is stored, for a status request. If replicas are compressed, or
// the policy demands compression, servers are listed again. For a server that does not answer,
// the last list counts.
func (o *owner) tally(ctx context.Context) StoredBytes {
	i := &o.inspection
	sum := i.storedNow()
	i.mu.Lock()
	fresh := time.Since(i.tallied) < tallyAge
	i.mu.Unlock()
	if sum.Compressed == 0 && o.words.compression() == meta.CompressNone {
		return StoredBytes{}
	}
	if fresh {
		return sum
	}
	for _, x := range o.srv.serverMap.sightings() {
		if !x.live {
			continue
		}
		var b StoredBytes
		err := o.inspection.eachPage(ctx, x.info.ID, func(page []meta.ReplicaInfo) error {
			for k := range page {
				b.add(&page[k])
			}
			return nil
		})
		if err == nil {
			i.setStored(x.info.ID, b)
		}
	}
	i.mu.Lock()
	i.tallied = time.Now()
	i.mu.Unlock()
	return i.storedNow()
}

// toCompress orders the compression of a server's listed replicas.
type toCompress struct {
	k      *kernel
	server meta.ServerID
	alg    meta.Compression
}

// add orders the compression of a replica, if the replica is plain and may shrink. After an
// order that fails, for instance at a server that can't compress, add orders nothing more.
func (t *toCompress) add(c *meta.ReplicaInfo) {
	if t.alg == meta.CompressNone || c.State != meta.ChunkSealed || c.Err != meta.KindOK || c.Form != meta.CompressNone || c.Dense || c.Length == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(t.k.ctx, orderPatience)
	defer cancel()
	_, err := t.k.order(ctx, t.server, meta.Order{Kind: meta.OrderCompress, Chunk: c.ID, Compress: t.alg})
	switch meta.KindOf(err) {
	case meta.KindOK, meta.NoSuchChunk:
	default:
		t.alg = meta.CompressNone
	}
}
