package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// Dir lists, in order, the chunks of a volume whose counter ends in dir.
func (s *Store) Dir(ctx context.Context, v meta.VolumeID, dir byte) ([]meta.ChunkID, error) {
	return s.dir(ctx, dir, &v)
}

// DirAll lists, in order, the chunks of all volumes whose counter ends in dir.
func (s *Store) DirAll(ctx context.Context, dir byte) ([]meta.ChunkID, error) {
	return s.dir(ctx, dir, nil)
}

func (s *Store) dir(ctx context.Context, dir byte, v *meta.VolumeID) ([]meta.ChunkID, error) {
	where := fmt.Sprintf("%s/%02x", chunksDir, dir)
	if err := ctx.Err(); err != nil {
		return nil, meta.E("list chunks", meta.Canceled, "", err)
	}
	// List the chunks in the log before the files: a checkpoint moves chunks from the log to the
	// directory, and never back, so no chunk is missed.
	var ids []meta.ChunkID
	var pinned []*chunk
	s.mu.Lock()
	for id, c := range s.chunks {
		if c.pins > 0 && (v == nil || id.Volume == *v) && byte(id.Counter) == dir {
			pinned = append(pinned, c)
		}
	}
	s.mu.Unlock()
	for _, c := range pinned {
		c.mu.Lock()
		if c.exists {
			ids = append(ids, c.id)
		}
		c.mu.Unlock()
	}
	names, err := s.d.List(where)
	if err != nil {
		return nil, ioError("list chunks", where, err)
	}
	var both []meta.ChunkID // chunks with .data and .pack: one file is left over
	prefix := ""
	if v != nil {
		prefix = fmt.Sprintf("%08x", uint32(*v))
	}
	for _, n := range names {
		if !strings.HasPrefix(n, prefix) {
			continue
		}
		id, ok := chunkOf(n)
		if !ok {
			continue
		}
		ids = append(ids, id)
		if hex, ok := strings.CutSuffix(n, ".pack"); ok && slices.Contains(names, hex+".data") {
			both = append(both, id)
		}
	}
	s.packs.tidy(where, both)
	slices.SortFunc(ids, meta.ChunkID.Compare)
	return slices.Compact(ids), nil
}

// Peek is Stat without keeping the chunk in memory, for callers that look at many chunks once.
// With the error Corrupt, for a damaged chunk, the Info is valid, too.
func (s *Store) Peek(id meta.ChunkID) (chunkserver.Info, error) {
	s.mu.Lock()
	c := s.chunks[id]
	s.mu.Unlock()
	if c != nil {
		info, err := s.Stat(context.Background(), id)
		if err == nil && s.isDamaged(c) {
			err = errDamaged(id)
		}
		return info, err
	}
	b, err := readFile(s.d, metaName(id), maxMeta)
	if errors.Is(err, os.ErrNotExist) {
		return chunkserver.Info{}, meta.E("stat", meta.NoSuchChunk, id.String(), nil)
	}
	if err != nil {
		return chunkserver.Info{}, ioError("read chunk metadata", id.String(), err)
	}
	m, err := decodeMeta(id, b)
	if err != nil {
		return chunkserver.Info{ID: id}, err
	}
	t := chunk{id: id}
	t.set(m)
	if m.damaged {
		return t.info(), errDamaged(id)
	}
	return t.info(), nil
}

// Leftover reports whether the disk has a data file, plain or compressed, without any record. A
// crash left the file; the file may be deleted.
func (s *Store) Leftover(id meta.ChunkID) bool {
	s.mu.Lock()
	_, coming := s.coming[id]
	s.mu.Unlock()
	if coming || s.buried(id) {
		return false
	}
	f, err := s.d.OpenRead(dataName(id))
	if errors.Is(err, os.ErrNotExist) {
		f, err = s.d.OpenRead(packName(id))
	}
	if err != nil {
		return false
	}
	f.Close()
	_, err = s.Stat(context.Background(), id)
	return meta.KindOf(err) == meta.NoSuchChunk
}

func (s *Store) isDamaged(c *chunk) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.damaged
}

// List calls fn for every chunk on the disk, in no order, until fn returns false. err is set
// where a chunk's metadata is unreadable. A data file, plain or compressed, without any record
// (left by a crash) is listed as an open and empty chunk; it may be deleted.
func (s *Store) List(ctx context.Context, fn func(info chunkserver.Info, err error) bool) error {
	for i := range chunkDirs {
		dir := fmt.Sprintf("%s/%02x", chunksDir, i)
		names, err := s.d.List(dir)
		if err != nil {
			return ioError("list chunks", dir, err)
		}
		ids := map[meta.ChunkID]struct{}{}
		for _, n := range names {
			if id, ok := chunkOf(n); ok {
				ids[id] = struct{}{}
			}
		}
		// Chunks of which only the log knows so far.
		s.mu.Lock()
		for c := range s.dirty {
			if dirOf(c.id) == dir {
				ids[c.id] = struct{}{}
			}
		}
		s.mu.Unlock()
		for id := range ids {
			if err := ctx.Err(); err != nil {
				return meta.E("list chunks", meta.Canceled, "", err)
			}
			info, err := s.Stat(ctx, id)
			if meta.KindOf(err) == meta.NoSuchChunk {
				if s.buried(id) {
					continue
				}
				info, err = chunkserver.Info{ID: id, State: meta.ChunkOpen}, nil
			}
			if !fn(info, err) {
				return nil
			}
		}
	}
	return nil
}
