package state

import (
	"sync"

	"github.com/cockroachdb/pebble/v2"
)

// memory compensates the block cache for the stores' memory tables.
//
// Pebble reserves memory tables in the cache that all stores share, 16 MiB each and two or
// three for a busy volume, so two such volumes left no room for blocks. memory enlarges the
// cache by the size of the tables: the cache has its full size for blocks, and memory tables
// come on top.
//
// Pebble does not report a new table. But filling a table takes at least 256 KiB of writes, so
// memory counts the tables after every countEvery bytes and after each flush. In between, the
// cache may be smaller or larger by one table of each store.
type memory struct {
	cache *pebble.Cache

	mu      sync.Mutex
	db      *pebble.DB // nil: closed
	given   int64      // bytes
	back    func()     // takes given away from the cache again; nil: none is given
	written int        // bytes since the last count

	flushes sync.WaitGroup // running counts after flushes
}

// countEvery is the number of bytes written between two counts: small compared with a table,
// and so large that counting costs nothing.
const countEvery = 1 << 20

// wrote records written bytes.
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

// count enlarges the cache by the present size of memory tables. The caller holds mu.
func (m *memory) count() {
	m.written = 0
	if m.db == nil {
		return
	}
	t := &m.db.Metrics().MemTable
	m.give(int64(t.Size + t.ZombieSize))
}

// give sets the enlargement of the cache to n. The caller holds mu.
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

// close takes the whole enlargement away when db's tables are gone; before that it stops all
// use of db.
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
