package server

import (
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// ScrubStats tells how far the reading of a disk is.
type ScrubStats struct {
	Version int    `json:"version"`
	Started int64  `json:"started"`
	Ended   int64  `json:"ended"`
	After   string `json:"after"`
	// The counts of the current pass, or of the last one.
	Chunks uint64 `json:"chunks"`
	Bytes  uint64 `json:"bytes"`
	Bad    uint64 `json:"bad"`
}

// running tells whether a pass is under way.
func (p *ScrubStats) running() bool { return p.Ended < p.Started }

// scrubState is the state of a disk's scrub. disk.mu guards it.
type scrubState struct {
	stats ScrubStats
	on    *store.Store  // the store that a goroutine is reading
	asked uint64        // bytes a second; not zero: begin now
	wake  chan struct{} // told of asked
}

// progress returns the thousandths of the current pass, and the end of the last one.
func (s *scrubState) progress() (uint32, meta.Time) {
	if s.stats.Started == s.stats.Ended { // as loadScrub leaves a new disk
		return 0, 0
	}
	if !s.stats.running() {
		return 0, meta.Time(s.stats.Ended)
	}
	var at uint32
	if id, err := meta.ParseChunkID(s.stats.After); err == nil {
		at = uint32(byte(id.Counter)) * 1000 / 256
	}
	return at, meta.Time(s.stats.Ended)
}
