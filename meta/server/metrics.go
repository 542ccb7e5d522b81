package server

import "time"

// Counters are the metrics of a metadata server: counts since its start, and present numbers.
type Counters struct {
	Calls, Entries, JournalBytes, Checkpoints, Expired, Sealed, Deleted uint64
	// Held are operations that waited because their client exceeded its rate. HeldFor is their
	// waiting time in total.
	Held    uint64
	HeldFor time.Duration

	Sessions, Volumes, ChunkServers, Leases, OverlayRecords int
	// QueuedBytes of effects wait for the journal.
	QueuedBytes int
	// Followed is the number of followed volumes, FollowUnknown how many of them have an
	// unknown lag. The other counts are the entries and bytes applied, the copies opened or
	// made from a checkpoint, and the copies found damaged. FollowLag is the longest time
	// since a followed copy was last at the end of its journal.
	Followed, FollowUnknown                                int
	FollowEntries, FollowBytes, FollowLoads, FollowDamaged uint64
	FollowLag                                              time.Duration
	// Compaction: chunks filled, bytes copied into them (counted once, whatever the number of
	// replicas), extents moved, rounds that failed; and, as of the last search, files to be
	// joined and the fragments in them.
	Compacted, CompactedBytes, CompactedExtents, CompactFailed uint64
	FragmentedFiles, Fragments                                 uint64
	// NoSpace: at least one volume refuses changes because its journal is full.
	NoSpace bool
}

// Counters takes a reading.
func (s *Server) Counters() Counters {
	c := Counters{
		Calls: s.stats.calls.Load(), Entries: s.stats.entries.Load(), JournalBytes: s.stats.journalBytes.Load(),
		Checkpoints: s.stats.checkpoints.Load(), Expired: s.stats.expired.Load(), Sealed: s.stats.sealed.Load(), Deleted: s.stats.deleted.Load(),
	}
	c.Held, c.HeldFor = s.clients.paces.held.Load(), time.Duration(s.clients.paces.waited.Load())
	c.Sessions, c.Volumes, c.ChunkServers = len(s.clients.all()), s.hosted.count(), len(s.chunkServers.all())
	standbys, lag := s.standbys.status()
	c.Followed, c.FollowLag = len(standbys), lag
	for _, f := range standbys {
		if f.Behind == unknownLag {
			c.FollowUnknown++
		}
	}
	b := s.standbys
	c.FollowEntries, c.FollowBytes, c.FollowLoads, c.FollowDamaged = b.applied.Load(), b.bytes.Load(), b.reloads.Load(), b.damaged.Load()
	c.Compacted, c.CompactedBytes = s.stats.compacted.Load(), s.stats.compactedBytes.Load()
	c.CompactedExtents, c.CompactFailed = s.stats.compactedExtents.Load(), s.stats.compactFailed.Load()
	for _, o := range s.hosted.owners() {
		c.FragmentedFiles += o.compaction.files.Load()
		c.Fragments += o.compaction.fragments.Load()
		o.mu.Lock()
		c.Leases += o.leases.Len()
		c.OverlayRecords += len(o.ov.m)
		c.QueuedBytes += o.queued + o.cur.bytes
		c.NoSpace = c.NoSpace || o.noSpace != nil
		o.mu.Unlock()
	}
	return c
}
