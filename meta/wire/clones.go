package wire

import "penstock.io/penstock/meta"

// ChunkWhere is the place of a chunk, in the report of AdminChunkPlaces. Servers is empty if the
// chunk has no record.
type ChunkWhere struct {
	Chunk   string          `json:"chunk"` // 32 hex digits
	Servers []meta.ServerID `json:"servers,omitempty"`
	Sealed  bool            `json:"sealed,omitempty"`
	Length  uint64          `json:"length,omitempty"`
}
