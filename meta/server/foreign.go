package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/capability"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/wire"
)

const (
	// foreignFresh is how long the place of a foreign chunk is used without asking again: far
	// shorter than a moved replica stays at its old place.
	foreignFresh = 2 * time.Second
	// maxForeign bounds the foreign chunks that are remembered.
	maxForeign = 1 << 18
)

// sealFirst is the entry of an AdminChunkPlaces request to seal open chunks first.
const sealFirst = "seal"

// foreign holds the places of other volumes' chunks that files of this volume refer to, as
// seen in answers. The owners of the other volumes supply the places.
type foreign struct {
	k       *kernel
	sealing *sealing

	clone bool // files may lie in chunks of other volumes

	m map[meta.ChunkID]foreignPlace
}

type foreignPlace struct {
	meta.ChunkPlace
	at  time.Time
	err error // why the place is unknown
}

// fillPlaces adds to a result the places of the foreign chunks in the result's extents. If
// places are unknown or stale, it requests them in the background, and the caller waits for
// wait and tries again. The caller holds the owner's mu.
func (fo *foreign) fillPlaces(res *meta.Result) (wait <-chan struct{}, err error) {
	k := fo.k
	if !fo.clone || len(res.Extents) == 0 {
		return nil, nil
	}
	want := map[meta.ChunkID]bool{}
	for _, e := range res.Extents {
		if !e.Chunk.IsZero() && e.Chunk.Volume != k.vol {
			want[e.Chunk] = true
		}
	}
	if len(want) == 0 {
		return nil, nil
	}
	ids := slices.SortedFunc(maps.Keys(want), meta.ChunkID.Compare)
	stale := false
	places := res.Places
	for _, id := range ids {
		p, ok := fo.m[id]
		switch {
		case !ok || time.Since(p.at) > foreignFresh:
			stale = true
		case p.err != nil:
			err = p.err
		default:
			places = append(places, p.ChunkPlace)
		}
	}
	if !stale {
		if err == nil {
			res.Places = places
		}
		return nil, err
	}
	// All are asked for: places that are fresh now could be stale when the others come.
	done := make(chan struct{})
	k.wg.Go(func() {
		defer close(done)
		fo.learnPlaces(ids)
	})
	return done, nil
}

// learnPlaces asks the owners of chunks for the places, and records the answers together, so
// that all of them are fresh at its end, however slow some owners are. ids is sorted.
func (fo *foreign) learnPlaces(ids []meta.ChunkID) {
	k := fo.k
	ctx, cancel := context.WithTimeout(k.ctx, peerPatience)
	defer cancel()
	learnt := make([]foreignPlace, len(ids))
	var wg sync.WaitGroup
	for from := 0; from < len(ids); { // sorted by volume
		to := from + 1
		for to < len(ids) && ids[to].Volume == ids[from].Volume {
			to++
		}
		some, into := ids[from:to], learnt[from:to]
		wg.Go(func() {
			places, err := k.srv.peers.placesIn(ctx, some[0].Volume, some, false)
			for i, id := range some {
				p := &into[i]
				if p.err = err; err != nil {
					continue
				}
				if p.ChunkPlace = places[i]; len(p.Servers) == 0 && !p.Sealed { // sealed: accepted as lost
					p.err = meta.E("find chunk", meta.NoSuchChunk, id.String(), fmt.Errorf("volume %d has no record of it", id.Volume))
				}
			}
		})
		from = to
	}
	wg.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	if fo.m == nil || len(fo.m) > maxForeign {
		fo.m = map[meta.ChunkID]foreignPlace{}
	}
	now := time.Now()
	for i, id := range ids {
		learnt[i].at = now
		fo.m[id] = learnt[i]
	}
}

// placesOf reads the records of this volume's chunks. With seal, it seals them first.
func (fo *foreign) placesOf(ctx context.Context, ids []meta.ChunkID, seal bool) ([]meta.ChunkPlace, error) {
	k := fo.k
	if err := k.await(ctx, k.recovered); err != nil {
		return nil, err
	}
	if seal {
		for _, id := range ids {
			// A client writing to the chunk goes on in another.
			if _, err := fo.sealing.seal(ctx, id, nil); err != nil && !errors.Is(err, meta.NoSuchChunk) {
				return nil, err
			}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.failed != nil {
		return nil, k.failed
	}
	places := make([]meta.ChunkPlace, len(ids))
	for i, id := range ids {
		places[i].ID = id
		c, _, err := namespace.ReadChunk(k.view(), id)
		if errors.Is(err, meta.NoSuchChunk) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if c.State != meta.ChunkDeleting {
			places[i] = meta.ChunkPlace{ID: id, Servers: c.Servers, Sealed: c.State != meta.ChunkOpen, Length: c.Length}
		}
	}
	return places, nil
}

// serveForeignCap signs a capability to read a chunk of another volume, if the owner has seen
// a file of this volume refer to the chunk. Errors: NoSuchChunk.
func (fo *foreign) serveForeignCap(s *session, id uint64, chunk meta.ChunkID) {
	k := fo.k
	k.mu.Lock()
	p, ok := fo.m[chunk]
	k.mu.Unlock()
	re := &wire.CapsRe{TTL: uint64(CapLife.Milliseconds())}
	if !ok || p.err != nil {
		re.Status = wire.StatusOf(meta.E("read capability", meta.NoSuchChunk, chunk.String(), errors.New("no file was seen to lie in it: open the file again")))
	} else {
		re.Cap = k.srv.chunkServers.sign(CapLife, capability.Claims{
			Volume: chunk.Volume, Chunk: chunk, Rights: capability.Read | k.srv.chunkServers.bulkRights(chunk.Volume)&k.srv.chunkServers.bulkRights(k.vol),
			Client: s.holder(),
		})
	}
	s.enqueue(id, re)
	s.flush()
}
