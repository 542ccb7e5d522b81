package client

import (
	"bytes"
	"context"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/wire"
)

// Files of a clone lie in chunks of the volume from which the clone was made. A session that
// may read the clone may have no right to read the source volume: the clone's owner gives a
// capability for each source chunk in which the session saw a file of the clone.

// foreignCap is the capability to read a source chunk, and the clone in which the session saw
// the chunk last.
type foreignCap struct {
	via      meta.VolumeID
	cap      []byte
	until    time.Time
	life     time.Duration
	fetching bool
}

// maxForeignCaps bounds the capabilities kept. When the map is full the session drops all
// entries; Via notes a chunk again when a file is opened.
const maxForeignCaps = 100_000

// Via notes that files of volume v lie in a chunk of another volume.
func (s *Session) Via(id meta.ChunkID, v meta.VolumeID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.foreign[id]; f != nil {
		f.via = v
		return
	}
	if s.foreign == nil || len(s.foreign) >= maxForeignCaps {
		s.foreign = map[meta.ChunkID]*foreignCap{}
	}
	s.foreign[id] = &foreignCap{via: v}
}

// ReadChunkCap returns a capability to read a chunk, renewed at half its life; nil if none
// could be obtained.
func (s *Session) ReadChunkCap(id meta.ChunkID) []byte {
	s.mu.Lock()
	f := s.foreign[id]
	if f == nil {
		s.mu.Unlock()
		return s.ReadCap(id.Volume)
	}
	left := time.Until(f.until)
	if f.cap != nil && left > 0 {
		c := f.cap
		if left < f.life/2 && !f.fetching {
			f.fetching = true
			s.wg.Go(func() { s.fetchForeignCap(id, f, nil) })
		}
		s.mu.Unlock()
		return c
	}
	s.mu.Unlock()
	return s.fetchForeignCap(id, f, nil)
}

// RenewChunkCap returns a capability to read a chunk other than old, which a server did not
// accept.
func (s *Session) RenewChunkCap(id meta.ChunkID, old []byte) []byte {
	s.mu.Lock()
	f := s.foreign[id]
	if f == nil {
		s.mu.Unlock()
		return s.RenewCap(id.Volume, old)
	}
	now := f.cap
	s.mu.Unlock()
	if now != nil && !bytes.Equal(now, old) {
		return now
	}
	return s.fetchForeignCap(id, f, old)
}

// fetchForeignCap asks the clone's owner for a capability; refused is a capability that a
// server did not accept. If the clone gives none, the clone may be gone, and the reader may be
// a reader of the chunk's own volume, where the chunk is not foreign: fetchForeignCap then
// asks that volume. A reader of another clone opens the file again, and Via notes that clone.
func (s *Session) fetchForeignCap(id meta.ChunkID, f *foreignCap, refused []byte) []byte {
	if c, ok := s.askForeignCap(id, f, refused); ok {
		return c
	}
	return s.ReadCap(id.Volume)
}

func (s *Session) askForeignCap(id meta.ChunkID, f *foreignCap, refused []byte) (c []byte, ok bool) {
	ctx, cancel := context.WithTimeout(s.ctx, 10*time.Second)
	defer cancel()
	asked := time.Now()
	s.mu.Lock()
	via := f.via
	s.mu.Unlock()
	m, err := s.roundTrip(ctx, via, &wire.Caps{Volume: via, Chunk: id}, left)
	s.mu.Lock()
	defer s.mu.Unlock()
	f.fetching = false
	r, _ := m.(*wire.CapsRe)
	if err == nil && r != nil && r.Status.Err == meta.KindOK {
		f.cap, f.life = r.Cap, time.Duration(r.TTL)*time.Millisecond
		f.until = asked.Add(f.life)
		return f.cap, true
	}
	// The clone has a new owner, or its owner forgot the chunk: opening the file again makes
	// the owner note the chunk.
	s.log.Debug("the client got no capability to read a chunk through a clone", "chunk", id, "clone", via, "error", err)
	if f.cap != nil && time.Until(f.until) > 0 && !bytes.Equal(f.cap, refused) {
		return f.cap, true
	}
	if s.foreign[id] == f && f.via == via {
		delete(s.foreign, id)
	}
	return nil, false
}
