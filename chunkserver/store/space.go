package store

import "sync"

// spaceCache knows the free space without asking the kernel each time.
type spaceCache struct {
	mu    sync.Mutex
	known bool
	total uint64
	free  uint64
	taken uint64 // bytes taken since free was read from the disk
}

func (c *spaceCache) forget() {
	c.mu.Lock()
	c.known = false
	c.mu.Unlock()
}

// take counts n bytes and returns the remaining free space; take asks the disk again whenever
// the result would come close to the reserve.
func (c *spaceCache) take(d Disk, n, reserve uint64) (free uint64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.known || c.taken > 64<<20 || c.free < c.taken+n+reserve {
		if c.total, c.free, err = d.Space(); err != nil {
			return 0, err
		}
		c.known, c.taken = true, 0
	}
	c.taken += n
	return c.free - min(c.free, c.taken), nil
}

// Full tells whether appends are refused because the disk is full.
func (s *Store) Full() bool {
	free, err := s.space.take(s.d, 0, s.reserve)
	return err == nil && free < s.reserve+fullAt
}

// fullAt is how much room above the reserve a disk must have to take new chunks.
const fullAt = 64 << 10

// Space returns the size of the disk and the bytes available to appends, as of a moment ago.
func (s *Store) Space() (total, free uint64) {
	free, err := s.space.take(s.d, 0, s.reserve)
	if err != nil {
		return 0, 0
	}
	s.space.mu.Lock()
	total = s.space.total
	s.space.mu.Unlock()
	return total, free - min(free, s.reserve)
}
