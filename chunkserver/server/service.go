package server

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// find returns the store with a chunk; with create, the store for a new chunk: on a disk of
// the class, or of any.
func (s *Server) find(ctx context.Context, id meta.ChunkID, create bool, class string) (*store.Store, error) {
	d, err := s.findDisk(ctx, id, create, class)
	if err != nil {
		return nil, err
	}
	if st := d.serves(); st != nil {
		return st, nil
	}
	_, why := d.state()
	return nil, meta.E("find chunk", meta.IO, id.String(), fmt.Errorf("its disk failed: %s", why))
}

// findDisk returns the disk with a chunk; with create, the disk for a new chunk: of the disks
// of a class (or of any) that take new chunks, the emptiest.
func (s *Server) findDisk(ctx context.Context, id meta.ChunkID, create bool, class string) (*disk, error) {
	all := s.disks.list()
	if len(all) == 1 {
		return all[0], nil
	}
	s.mu.Lock()
	d := s.where[id]
	s.mu.Unlock()
	if d != nil && (!create || d.serves() != nil) {
		return d, nil
	}
	var found *disk
	var failed error
	for _, d := range all {
		st := d.serves()
		if st == nil {
			continue
		}
		_, err := st.Peek(id)
		if k := meta.KindOf(err); k == meta.IO {
			failed = err // the chunk may be on this disk
		} else if k == meta.NoSuchChunk {
			continue
		}
		// An interrupted move left the chunk on two disks: the replica that may stay counts.
		if found == nil {
			found = d
		}
		if state, _ := d.state(); state != meta.DiskFailing {
			found = d
			break
		}
	}
	if found == nil && failed != nil {
		return nil, failed
	}
	if found == nil && create {
		if found = emptiest(all, class); found == nil {
			return nil, meta.E("find chunk", meta.NoSpace, id.String(), errors.New("no disk takes new chunks"))
		}
	}
	if found == nil {
		return nil, meta.E("find chunk", meta.NoSuchChunk, id.String(), nil)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if other := s.where[id]; other != nil && other.serves() != nil {
		return other, nil
	}
	if len(s.where) >= 1<<20 {
		clear(s.where)
	}
	s.where[id] = found
	return found, nil
}

// emptiest chooses where a new chunk goes: by chance, the more room a disk has
// the likelier.
func emptiest(all []*disk, class string) (best *disk) {
	var sum float64
	for _, d := range all {
		if state, _ := d.state(); state != meta.DiskOK || class != "" && d.class != class {
			continue
		}
		_, free := d.st.Load().Space()
		room := float64(free) + 1
		if sum += room; rand.Float64()*sum < room {
			best = d
		}
	}
	return best
}

// Append implements chunkserver.Service.
func (s *Server) Append(ctx context.Context, id meta.ChunkID, fence meta.Fence, off uint64, p []byte, crc uint32) error {
	return s.appendOn(ctx, "", id, fence, off, p, crc)
}

// appendOn is Append; a new chunk goes to a disk of the class.
func (s *Server) appendOn(ctx context.Context, class string, id meta.ChunkID, fence meta.Fence, off uint64, p []byte, crc uint32) error {
	st, err := s.find(ctx, id, off == 0, class)
	if err != nil {
		return err
	}
	return st.Append(ctx, id, fence, off, p, crc)
}

// Sync implements chunkserver.Service.
func (s *Server) Sync(ctx context.Context, id meta.ChunkID, upTo uint64) (uint64, error) {
	st, err := s.find(ctx, id, false, "")
	if err != nil {
		return 0, err
	}
	return st.Sync(ctx, id, upTo)
}

// Seal implements chunkserver.Service.
func (s *Server) Seal(ctx context.Context, id meta.ChunkID, fence meta.Fence, final bool, length uint64) (chunkserver.Info, error) {
	st, err := s.find(ctx, id, true, "")
	if err != nil {
		return chunkserver.Info{}, err
	}
	return st.Seal(ctx, id, fence, final, length)
}

// Read implements chunkserver.Service.
func (s *Server) Read(ctx context.Context, id meta.ChunkID, p []byte, off uint64) error {
	st, err := s.find(ctx, id, false, "")
	if err != nil {
		return err
	}
	return st.Read(ctx, id, p, off)
}

// Stat implements chunkserver.Service.
func (s *Server) Stat(ctx context.Context, id meta.ChunkID) (chunkserver.Info, error) {
	st, err := s.find(ctx, id, false, "")
	if err != nil {
		return chunkserver.Info{}, err
	}
	return st.Stat(ctx, id)
}

// Delete implements chunkserver.Service. Every store remembers the deletion, so that a late
// append fails on every disk.
func (s *Server) Delete(ctx context.Context, id meta.ChunkID, fence meta.Fence) error {
	d, err := s.findDisk(ctx, id, false, "")
	if err != nil && meta.KindOf(err) != meta.NoSuchChunk {
		return err
	}
	if err == nil && d.serves() == nil {
		_, why := d.state()
		return meta.E("delete", meta.IO, id.String(), fmt.Errorf("its disk failed: %s", why))
	}
	for _, x := range s.disks.list() {
		st := x.serves()
		if st == nil {
			continue
		}
		if err := st.Delete(ctx, id, fence); err != nil && (x == d || st.Err() == nil) {
			return err
		}
	}
	s.mu.Lock()
	delete(s.where, id)
	s.mu.Unlock()
	return nil
}
