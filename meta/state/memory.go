package state

import (
	"sync"

	"github.com/cockroachdb/pebble/v2"
)

// memory keeps a store's memory tables out of the block cache's size.
//
// Pebble reserves them in the cache that all stores share, 16 MiB each and two or three
// of them for a volume that is written to much, so two such volumes left it no block at
// all. What they take is given back to the cache: it has its size for blocks, and memory
// tables come on top, as they are there.
//
// Nothing tells when Pebble makes one. But it takes writes to fill one, and each has at
// least 256 KiB: so they are counted after every countEvery bytes and after each flush.
// In between the cache may be smaller by one table of each store, or larger.
type memory struct {
	cache *pebble.Cache

	mu      sync.Mutex
	db      *pebble.DB // nil: closed
	given   int64      // bytes
	back    func()     // takes given away from the cache again; nil: none is given
	written int        // since it was counted last

	flushes sync.WaitGroup // those that are being counted
}

// countEvery is how many bytes are written between two counts: small beside a table, and
// so many that counting costs nothing.
const countEvery = 1 << 20

// wrote books bytes that were written.
func (m *memory) wrote(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.written += n; m.written >= countEvery {
		m.count()
	}
}

// flushed is told of each flush, by Pebble, which may not be asked anything then.
func (m *memory) flushed() {
	m.flushes.Go(func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.count()
	})
}

// count gives the cache what memory tables take by now. Caller holds mu.
func (m *memory) count() {
	m.written = 0
	if m.db == nil {
		return
	}
	t := &m.db.Metrics().MemTable
	m.give(int64(t.Size + t.ZombieSize))
}

// give makes n what the cache has more. Caller holds mu.
func (m *memory) give(n int64) {
	if n == m.given {
		return
	}
	old := m.back
	m.given, m.back = n, nil
	if n > 0 {
		m.back = m.cache.Reserve(int(-n))
	}
	if old != nil {
		old()
	}
}

// close takes all of it away again, when db's tables are gone; before that nobody asks
// db any more.
func (m *memory) close(db func() error) error {
	m.mu.Lock()
	m.db = nil
	m.mu.Unlock()
	err := db()
	m.flushes.Wait()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.give(0)
	return err
}
