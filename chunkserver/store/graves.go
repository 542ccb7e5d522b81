package store

import "penstock.io/penstock/meta"

// bury remembers a deleted chunk and the fence of the deletion for a while.
func (s *Store) bury(id meta.ChunkID, fence meta.Fence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.tombs[id]; ok {
		if old.Less(fence) {
			s.tombs[id] = fence
		}
		return
	}
	if len(s.tombQ) >= maxTombs {
		delete(s.tombs, s.tombQ[0])
		s.tombQ = s.tombQ[1:]
	}
	s.tombs[id] = fence
	s.tombQ = append(s.tombQ, id)
}

func (s *Store) buried(id meta.ChunkID) bool {
	_, ok := s.tomb(id)
	return ok
}

func (s *Store) tomb(id meta.ChunkID) (meta.Fence, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f, ok := s.tombs[id]
	return f, ok
}

// unbury forgets that a chunk was deleted.
func (s *Store) unbury(id meta.ChunkID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.tombs[id]; !ok {
		return
	}
	delete(s.tombs, id)
	for i, t := range s.tombQ {
		if t == id {
			s.tombQ = append(s.tombQ[:i], s.tombQ[i+1:]...)
			break
		}
	}
}
