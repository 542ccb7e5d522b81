package penstock

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"penstock.io/penstock/meta"
)

// packedMax is the length at which a packed chunk is finished and the next is
// begun, in bytes.
const packedMax = 256 << 20

// A packed chunk of at least idleMin bytes is finished when nothing was appended for
// idleAfter: only sealed chunks are compacted, and deleted bytes of an open chunk would take
// their space for as long as the mount lives.
const (
	idleMin   = 2 << 20
	idleAfter = 3 * time.Second
)

// chunk is an open chunk to which this client appends: a packed chunk (bytes of many files) or
// the own chunk of one file.
type chunk struct {
	v       *Volume
	id      meta.ChunkID
	ref     *chunkRef
	w       chunkWriter
	max     uint64
	own     bool
	servers []meta.ServerID
	asked   time.Time  // time of the request for the grant
	sealing sync.Mutex // held while the owner is asked to seal the chunk; taken before mu
	sealed  bool       // the owner did; under sealing

	mu      sync.Mutex
	blobs   int  // appended here and not committed yet
	retired bool // nothing more will be appended; sealed when blobs is zero
	broken  bool // an append or sync failed
	synced  uint64
	idle    *time.Timer // runs while everything appended is committed
}

// openChunks are the chunks to which a volume's writers append, and the known places of chunks.
type openChunks struct {
	v *Volume

	mu     sync.Mutex
	places map[meta.ChunkID]*chunkRef

	pack packer
}

// packer hands out chunks from grants that it requests ahead.
type packer struct {
	alloc sync.Mutex // held during requests for grants; never taken under another lock

	mu    sync.Mutex
	cur   *chunk
	spare [2][]grant                  // packed, own
	told  map[meta.ServerID]time.Time // when the volume's owner was told that a server is suspected
}

// grant is the grant of a chunk, and the time of its request.
type grant struct {
	meta.ChunkGrant
	asked time.Time
}

func (oc *openChunks) newChunk(g grant, own bool) *chunk {
	v := oc.v
	limit := g.MaxLen
	if limit == 0 {
		limit = v.settings.maxChunk()
	}
	if own {
		limit = min(limit, v.settings.maxChunk())
	} else {
		limit = min(limit, packedMax)
	}
	c := &chunk{v: v, id: g.ID, w: v.c.chunks.NewWriter(g.ChunkGrant), max: limit, own: own, servers: g.Servers, asked: g.asked}
	c.ref = oc.refOf(meta.ChunkPlace{ID: g.ID, Servers: g.Servers})
	return c
}

// alloc asks the owner for grants; k.alloc is held.
func (oc *openChunks) alloc(ctx context.Context, n int, own bool) ([]grant, error) {
	v := oc.v
	oc.tellSuspects()
	asked := time.Now()
	gs, err := v.c.sess.AllocChunks(ctx, v.id, n, own)
	if err == nil && len(gs) == 0 {
		err = meta.E("allocate chunk", meta.Unavailable, v.name, nil)
	}
	l := make([]grant, len(gs))
	for i, g := range gs {
		l[i] = grant{g, asked}
		v.c.kept.chunk(g.ID)
	}
	return l, err
}

// grant returns a chunk grant, a spare one if there is any.
func (oc *openChunks) grant(ctx context.Context, own bool) (grant, error) {
	v := oc.v
	k := &oc.pack
	i := 0
	if own {
		i = 1
	}
	pop := func() (g grant, ok bool) {
		k.mu.Lock()
		defer k.mu.Unlock()
		for len(k.spare[i]) > 0 {
			g, k.spare[i] = k.spare[i][0], k.spare[i][1:]
			if !v.c.suspects.since(g.Servers, g.asked) {
				return g, true
			}
			oc.giveBack(g)
		}
		return grant{}, false
	}
	g, ok := pop()
	if !ok {
		k.alloc.Lock()
		defer k.alloc.Unlock()
		if g, ok = pop(); ok {
			return g, nil
		}
		gs, err := oc.alloc(ctx, 2, own)
		if err != nil {
			return grant{}, err
		}
		k.mu.Lock()
		k.spare[i] = append(k.spare[i], gs[1:]...)
		k.mu.Unlock()
		return gs[0], nil
	}
	// The spare grant is used: get another before it is needed.
	v.c.spawn(func() {
		if !k.alloc.TryLock() {
			return
		}
		defer k.alloc.Unlock()
		k.mu.Lock()
		have := len(k.spare[i])
		k.mu.Unlock()
		if have > 0 {
			return
		}
		if gs, err := oc.alloc(v.c.ctx, 1, own); err == nil {
			k.mu.Lock()
			k.spare[i] = append(k.spare[i], gs...)
			k.mu.Unlock()
		}
	})
	return g, nil
}

// giveBack ends an unwritten chunk.
func (oc *openChunks) giveBack(g grant) {
	v := oc.v
	oc.endLater(g.ID, func(ctx context.Context) error {
		v.c.stats.rpcs.Add(1)
		_, err := v.c.sess.EndChunk(ctx, v.id, g.ID, 0)
		return err
	})
}

func (oc *openChunks) newOwn(ctx context.Context) (*chunk, error) {
	g, err := oc.grant(ctx, true)
	if err != nil {
		return nil, err
	}
	return oc.newChunk(g, true), nil
}

// packed returns the packed chunk, with room for n more bytes.
func (oc *openChunks) packed(ctx context.Context, n int) (*chunk, error) {
	k := &oc.pack
	for {
		k.mu.Lock()
		c := k.cur
		if c != nil && !c.doubtful() && c.w.Len()+uint64(n) <= c.max {
			k.mu.Unlock()
			return c, nil
		}
		k.cur = nil
		k.mu.Unlock()
		if c != nil {
			oc.retire(c)
		}
		g, err := oc.grant(ctx, false)
		if err != nil {
			return nil, err
		}
		c = oc.newChunk(g, false)
		if c.max < uint64(n) {
			return nil, meta.E("append", meta.FileTooBig, c.id.String(), nil)
		}
		k.mu.Lock()
		if k.cur == nil {
			k.cur = c
			k.mu.Unlock()
			return c, nil
		}
		// Another goroutine was faster: this grant becomes a spare.
		k.spare[0] = append(k.spare[0], g)
		k.mu.Unlock()
		_ = c.w.Close()
	}
}

// chunkTries bounds the fresh chunks that are tried for the same bytes in one attempt: each
// failure excludes a server from the next chunk. The flush repeats the attempt, with pauses.
const chunkTries = 3

// appendPacked appends p to the packed chunk or, after a failure, to a fresh chunk.
func (oc *openChunks) appendPacked(ctx context.Context, p []byte) (*chunk, uint64, error) {
	for try := 0; ; try++ {
		c, err := oc.packed(ctx, len(p))
		if err != nil {
			return nil, 0, err
		}
		off, err := c.w.Append(ctx, p)
		if err == nil {
			oc.v.c.stats.appended.Add(uint64(len(p)))
			return c, off, nil
		}
		if ctx.Err() != nil {
			return nil, 0, err
		}
		if errors.Is(err, meta.FileTooBig) { // another append took the room
			oc.unpack(c)
			oc.retire(c)
		} else {
			oc.unpack(c)
			oc.breakChunk(c, err)
		}
		if try >= chunkTries {
			return nil, 0, errors.Join(errAgain, err)
		}
	}
}

func (oc *openChunks) unpack(c *chunk) {
	oc.pack.mu.Lock()
	if oc.pack.cur == c {
		oc.pack.cur = nil
	}
	oc.pack.mu.Unlock()
}

func (c *chunk) isBroken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.broken
}

// doubtful reports that no more bytes should be appended: the chunk failed, or another chunk
// on one of its servers failed.
func (c *chunk) doubtful() bool { return c.isBroken() || c.v.c.suspects.since(c.servers, c.asked) }

// holdBlob counts an appended blob. dropBlob ends the count when the blob is committed or
// given up.
func (c *chunk) holdBlob() {
	c.mu.Lock()
	c.blobs++
	c.mu.Unlock()
}

func (oc *openChunks) dropBlob(c *chunk) {
	c.mu.Lock()
	c.blobs--
	seal := c.blobs == 0 && c.retired
	if c.blobs == 0 && !c.retired && !c.own && c.w.Len() >= idleMin {
		if c.idle == nil {
			c.idle = time.AfterFunc(idleAfter, func() { oc.retireIdle(c) })
		} else {
			c.idle.Reset(idleAfter)
		}
	}
	c.mu.Unlock()
	if seal {
		oc.sealLater(c)
	}
}

// retireIdle finishes the packed chunk if no appends are under way.
func (oc *openChunks) retireIdle(c *chunk) {
	c.mu.Lock()
	busy := c.blobs > 0 || c.retired
	c.mu.Unlock()
	if !busy && oc.v.c.ctx.Err() == nil {
		oc.unpack(c)
		oc.retire(c)
	}
}

// retire ends the appending to a chunk. The chunk is sealed when all its bytes are committed
// or given up.
func (oc *openChunks) retire(c *chunk) {
	c.mu.Lock()
	c.retired = true
	seal := c.blobs == 0
	c.mu.Unlock()
	if seal {
		oc.sealLater(c)
	}
}

// breakChunk notes that a chunk failed. The client appends the chunk's unsynced bytes to
// another chunk, and the owner seals the failed one.
func (oc *openChunks) breakChunk(c *chunk, err error) {
	c.mu.Lock()
	first := !c.broken
	c.broken, c.retired = true, true
	// Synced bytes are committed first: the owner would take a sealed chunk without references
	// for garbage.
	seal := first && c.blobs == 0
	c.mu.Unlock()
	if first {
		oc.unpack(c)
		failed := c.w.Failed()
		oc.v.c.suspects.add(failed)
		oc.v.c.log.Warn("appends to a chunk failed: the client goes on in a new chunk", "chunk", c.id, "servers", failed, "err", err)
	}
	if seal {
		oc.sealLater(c)
	}
}

// endOwnLocked ends a file's own chunk after a flush if no opener writes the file any more.
// The last release may have come before the flush made the chunk, and after the removal of a
// file no later call would end the chunk.
func (oc *openChunks) endOwnLocked(f *file) {
	if own := f.own.chunk; own != nil && f.users.writers == 0 && f.uncommitted == 0 && !f.own.ended && !f.sealWant {
		f.own.chunk = nil
		oc.retire(own)
	}
}

// sealLater seals in the background.
func (oc *openChunks) sealLater(c *chunk) {
	oc.endLater(c.id, func(ctx context.Context) error { return oc.seal(ctx, c) })
}

// Bounds of the pause before a failed seal is tried again.
const (
	endAgain  = 200 * time.Millisecond
	endAtMost = 30 * time.Second
)

// endLater ends a chunk in the background, and tries again while the chunk's servers are
// unreachable: otherwise the chunk would stay open until the session ends, and an open chunk
// is never repaired, compacted or deleted.
func (oc *openChunks) endLater(id meta.ChunkID, end func(context.Context) error) {
	v := oc.v
	epoch := v.owner.epoch.Load()
	v.c.spawn(func() {
		ctx := v.c.ctx
		for wait := endAgain; ; wait = min(2*wait, endAtMost) {
			err := end(ctx)
			switch k := meta.KindOf(err); {
			case err == nil, k == meta.NoSuchChunk:
				v.c.kept.ended(id)
				return
			case ctx.Err() != nil:
				return
			case v.owner.epoch.Load() != epoch:
				return // the chunk belonged to a session that has ended
			case k != meta.Unavailable && k != meta.Fenced && k != meta.Interrupted:
				v.c.log.Warn("a chunk could not be sealed: the end of its session will seal it", "chunk", id, "err", err)
				return
			}
			if wait == endAgain {
				v.c.log.Warn("chunk can't be sealed yet", "chunk", id, "err", err)
			}
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return
			}
		}
	})
}

// seal has the owner end the chunk for ever.
func (oc *openChunks) seal(ctx context.Context, c *chunk) error {
	v := oc.v
	c.sealing.Lock()
	defer c.sealing.Unlock()
	if c.sealed {
		return nil
	}
	_ = c.w.Close()
	v.c.stats.rpcs.Add(1)
	rec, err := v.c.sess.EndChunk(ctx, v.id, c.id, c.w.Acked())
	if err != nil {
		return err
	}
	c.sealed = true
	v.c.kept.ended(c.id)
	v.owner.mutations.Add(1)
	if rec.State == meta.ChunkSealed {
		pl := *c.ref.place.Load()
		pl.Sealed, pl.Length = true, rec.Length
		if len(rec.Servers) > 0 {
			pl.Servers = rec.Servers
		}
		c.ref.place.Store(&pl)
	}
	return nil
}

// sync makes everything appended to the chunk so far durable.
func (c *chunk) sync(ctx context.Context) error {
	if c.isBroken() {
		return meta.E("sync", meta.IO, c.id.String(), nil)
	}
	n := c.w.Len()
	if err := c.w.Sync(ctx); err != nil {
		if ctx.Err() == nil {
			c.v.chunks.breakChunk(c, err)
		}
		return err
	}
	c.mu.Lock()
	c.synced = max(c.synced, n)
	c.mu.Unlock()
	return nil
}

// forget forgets all open chunks of a session that has ended.
func (oc *openChunks) forget() {
	k := &oc.pack
	k.mu.Lock()
	c := k.cur
	k.cur, k.spare, k.told = nil, [2][]grant{}, nil
	k.mu.Unlock()
	if c != nil {
		c.mu.Lock()
		c.broken, c.retired = true, true
		c.mu.Unlock()
		_ = c.w.Close()
	}
}

// ---- suspicion

// suspects are the chunk servers that failed this client, with the times of their last
// failures. The client uses no chunk on a suspect server if the grant was requested before the
// failure. The client reports suspects to the owners, which leave these servers out for a
// while.
type suspects struct {
	mu sync.Mutex
	at map[meta.ServerID]time.Time
}

// tellFor is the time after a failure during which owners are told.
const tellFor = 10 * time.Second

func (u *suspects) add(servers []meta.ServerID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.at == nil {
		u.at = make(map[meta.ServerID]time.Time)
	}
	for _, id := range servers {
		u.at[id] = time.Now()
	}
}

// since reports that one of the servers failed after t.
func (u *suspects) since(servers []meta.ServerID, t time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.at) == 0 {
		return false
	}
	return slices.ContainsFunc(servers, func(id meta.ServerID) bool { return u.at[id].After(t) })
}

// recent returns the servers with recent failures.
func (u *suspects) recent() map[meta.ServerID]time.Time {
	u.mu.Lock()
	defer u.mu.Unlock()
	var l map[meta.ServerID]time.Time
	for id, at := range u.at {
		if time.Since(at) < tellFor {
			if l == nil {
				l = make(map[meta.ServerID]time.Time)
			}
			l[id] = at
		}
	}
	return l
}

// tellSuspects reports new suspects to the volume's owner.
func (oc *openChunks) tellSuspects() {
	v := oc.v
	recent := v.c.suspects.recent()
	if len(recent) == 0 {
		return
	}
	k := &oc.pack
	var news []meta.ServerID
	k.mu.Lock()
	for id, at := range recent {
		if k.told[id] != at {
			news = append(news, id)
		}
	}
	k.told = recent
	k.mu.Unlock()
	if len(news) > 0 {
		v.c.sess.Suspect(v.id, news)
	}
}

// ---- places

// maxPlaces bounds the number of chunk places that are cached for sharing.
const maxPlaces = 200_000

// refOf gives the shared reference to a chunk, with a newer place.
func (oc *openChunks) refOf(pl meta.ChunkPlace) *chunkRef {
	oc = &oc.v.home().chunks
	oc.mu.Lock()
	defer oc.mu.Unlock()
	r := oc.places[pl.ID]
	if r == nil {
		if len(oc.places) >= maxPlaces {
			clear(oc.places) // maps in use keep theirs
		}
		r = &chunkRef{}
		oc.places[pl.ID] = r
	}
	if old := r.place.Load(); old == nil || !(old.Sealed && !pl.Sealed) {
		r.place.Store(&pl)
	}
	return r
}

func (oc *openChunks) addPlaces(pls []meta.ChunkPlace) {
	home := oc.v.home().id // a view has a volume number of its own, but no chunks
	for _, pl := range pls {
		if pl.ID.Volume != home {
			if s, ok := oc.v.c.sess.(foreignSession); ok {
				s.Via(pl.ID, home)
			}
		}
		oc.refOf(pl)
	}
}

// foreignSession learns which files of a clone lie in chunks of other volumes, and requests
// the right to read from the owners of those volumes.
type foreignSession interface {
	Via(id meta.ChunkID, v meta.VolumeID)
}

// committed makes the segment of a committed extent. The places that came with the extent were
// added before.
func (oc *openChunks) committed(e meta.Extent) segment {
	s := segment{off: e.Off, n: e.Len, pos: e.ChunkOff}
	if e.Chunk.IsZero() {
		s.pos = 0
		return s
	}
	oc = &oc.v.home().chunks
	oc.mu.Lock()
	s.ref = oc.places[e.Chunk]
	if s.ref == nil { // the owner sent no place: the read asks again
		s.ref = &chunkRef{}
		s.ref.place.Store(&meta.ChunkPlace{ID: e.Chunk})
		oc.places[e.Chunk] = s.ref
	}
	oc.mu.Unlock()
	return s
}

// retireAll seals the volume's open packed chunk.
func (oc *openChunks) retireAll(ctx context.Context) {
	oc.pack.mu.Lock()
	cur := oc.pack.cur
	oc.pack.cur = nil
	oc.pack.mu.Unlock()
	if cur == nil {
		return
	}
	if err := oc.seal(ctx, cur); err != nil {
		oc.v.c.log.Warn("a chunk could not be sealed: the end of the session will seal it", "chunk", cur.id, "err", err)
	}
}
