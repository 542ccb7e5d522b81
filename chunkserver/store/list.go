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
	// Chunks known to the log only come first: a checkpoint may add such chunks to the
	// directory meanwhile, and nothing moves the other way.
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

// chunkOf tells which chunk a file is of.
func chunkOf(name string) (meta.ChunkID, bool) {
	for _, suffix := range []string{".data", ".pack", ".meta"} {
		if hex, ok := strings.CutSuffix(name, suffix); ok {
			id, err := meta.ParseChunkID(hex)
			return id, err == nil
		}
	}
	return meta.ChunkID{}, false
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

func errDamaged(id meta.ChunkID) error {
	return meta.E("stat", meta.Corrupt, id.String(), errors.New("bad bytes were found below its synced length"))
}

func (s *Store) isDamaged(c *chunk) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.damaged
}
