package server

import (
	"bytes"
	"context"
	"strings"
	"time"

	"github.com/google/btree"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/namespace"
	"penstock.io/penstock/meta/task"
)

// record is the newest value of a key whose journal entry is not yet applied
// to the store (rule 1: such effects live in memory only).
type record struct {
	key string
	val []byte
	del bool
	seq meta.Seq       // the entry with the value
	by  meta.SessionID // session whose operation wrote the value; zero: the owner itself
	idx int            // position in the entry's effects
}

// overlay holds effects that are not yet in the store. A map answers Get, a
// tree answers Scan.
type overlay struct {
	m map[string]*record
	t *btree.BTreeG[*record]
}

func newOverlay() *overlay {
	return &overlay{
		m: map[string]*record{},
		t: btree.NewG(32, func(a, b *record) bool { return a.key < b.key }),
	}
}

// entry is a journal entry being put together.
type entry struct {
	seq      meta.Seq
	effects  []namespace.Effect
	bytes    int
	sessions map[*session]struct{} // to notify when the entry is durable
	urgent   bool                  // somebody waits
	events   bool                  // some effects are events
}

// add adds an effect of an operation by session by. The last write of a key in an entry wins.
// Range deletions, reply records and events do not go into the overlay: no operation reads
// replies or events through the overlay, and range deletions concern only them, or keys that
// no operation reads again.
func (o *overlay) add(e *entry, ef namespace.Effect, by meta.SessionID) {
	if ef.Kind == namespace.DeleteRange {
		e.effects = append(e.effects, ef)
		e.bytes += len(ef.Key) + len(ef.Value)
		return
	}
	if ef.Key[0] == replyPrefix || ef.Key[0] == eventPrefix {
		e.events = e.events || ef.Key[0] == eventPrefix
		e.effects = append(e.effects, ef)
		e.bytes += len(ef.Key) + len(ef.Value)
		return
	}
	r := o.m[string(ef.Key)]
	if r == nil {
		r = &record{key: string(ef.Key)}
		o.m[r.key] = r
		o.t.ReplaceOrInsert(r)
	}
	if r.seq == e.seq {
		old := &e.effects[r.idx]
		e.bytes += len(ef.Value) - len(old.Value)
		*old = ef
	} else {
		r.idx = len(e.effects)
		e.effects = append(e.effects, ef)
		e.bytes += len(ef.Key) + len(ef.Value)
	}
	r.val, r.del, r.seq, r.by = ef.Value, ef.Kind == namespace.Delete, e.seq, by
}

// settle drops the effects of entry e from the overlay after the store has them, and moves the
// values to the cache.
func (o *overlay) settle(e *entry, c *cache) {
	for i := range e.effects {
		ef := &e.effects[i]
		if ef.Kind == namespace.DeleteRange || ef.Key[0] == replyPrefix || ef.Key[0] == eventPrefix {
			continue
		}
		r := o.m[string(ef.Key)]
		if r == nil || r.seq != e.seq {
			continue // written again in a later entry
		}
		delete(o.m, r.key)
		o.t.Delete(r)
		if r.del {
			c.put(r.key, nil)
		} else {
			// The value is a part of the buffer with all effects of its operation.
			c.put(r.key, bytes.Clone(r.val))
		}
	}
}

// cache holds hot records of the store; an absent record is nil. Records are in two
// generations: when the young generation is full, or has the age cacheAge, it becomes the old
// generation, and the records of the old generation stay only if they are read again. The size
// in bytes is bounded, and the cache of a volume that nobody uses becomes empty.
type cache struct {
	young, old map[string][]byte
	bytes, max int
}

const cacheOverhead = 64 // bytes for each record beside key and value, about

func newCache(max int) *cache {
	return &cache{young: map[string][]byte{}, old: map[string][]byte{}, max: max}
}

func (c *cache) get(key []byte) (val []byte, ok bool) {
	if val, ok = c.young[string(key)]; ok {
		return val, true
	}
	if val, ok = c.old[string(key)]; ok {
		c.put(string(key), val)
	}
	return val, ok
}

func (c *cache) put(key string, val []byte) {
	if old, ok := c.young[key]; ok {
		c.bytes += len(val) - len(old)
	} else {
		c.bytes += len(key) + len(val) + cacheOverhead
	}
	c.young[key] = val
	delete(c.old, key)
	if c.bytes > c.max/2 {
		c.turn()
	}
}

// turn begins a young generation.
func (c *cache) turn() { c.old, c.young, c.bytes = c.young, map[string][]byte{}, 0 }

// cacheAge is the time after which the cache begins a young generation: a record stays for once
// to twice the time after the record's last use.
const cacheAge = 2 * time.Minute

// newAgingTask makes the task that forgets the records that nobody uses.
func newAgingTask(k *kernel) *task.Task {
	return task.New(task.Options{Name: "age the cached records", First: cacheAge, Every: cacheAge, Round: func(context.Context) (time.Duration, error) {
		return task.Idle, k.read(func(*view) error {
			k.cache.turn()
			return nil
		})
	}})
}

// cached reports whether records with this key are cached: the records read by point
// operations. Extents and directory positions are read by scans, which bypass the cache.
func cached(key []byte) bool {
	switch key[0] {
	case 'v', 'i', 'd', 'c', 'x':
		return true
	}
	return false
}

// view is the state seen by one operation of a session: overlay over cache over store. If
// another session wrote a value read here, wait is the entry that must be durable before the
// answer is sent (rule 13).
type view struct {
	k       *kernel
	session meta.SessionID
	// counters: the operation reports the volume's counters, so rule 13 applies to them. Other
	// operations read the counters only for the next inode number.
	counters bool
	wait     meta.Seq
	squash   namespace.Squash // of the caller
	// noStreams: the caller does not serve streams (namespace.Context.NoStreams).
	noStreams bool
}

func (w *view) note(r *record) {
	if r.by == w.session || r.by == 0 || r.seq <= w.k.durable || w.k.srv.cfg.Unsafe.NoWait {
		return
	}
	if len(r.key) == 1 && !w.counters {
		return
	}
	w.wait = max(w.wait, r.seq)
}

// Get reads one key.
func (w *view) Get(key []byte) ([]byte, bool, error) {
	if w.k.stClosed {
		return nil, false, w.k.gone()
	}
	if r := w.k.ov.m[string(key)]; r != nil {
		w.note(r)
		return r.val, !r.del, nil
	}
	if !cached(key) {
		return w.k.st.Get(key)
	}
	if val, ok := w.k.cache.get(key); ok {
		return val, val != nil, nil
	}
	val, ok, err := w.k.st.Get(key)
	if err != nil {
		return nil, false, err
	}
	if ok {
		val = append(make([]byte, 0, len(val)), val...)
	} else {
		val = nil
	}
	w.k.cache.put(string(key), val)
	return val, ok, nil
}

// Scan merges overlay and store.
func (w *view) Scan(lo, hi []byte, fn func(k, v []byte) bool) error {
	if len(lo) == 0 || lo[0] == 0 {
		lo = []byte{1} // keys that begin with zero belong to the store
	}
	if w.k.stClosed {
		return w.k.gone()
	}
	var over []*record
	w.k.ov.t.AscendRange(&record{key: string(lo)}, &record{key: string(hi)}, func(r *record) bool {
		over = append(over, r)
		return true
	})
	stopped := false
	emit := func(r *record) bool {
		w.note(r)
		if !r.del && !fn([]byte(r.key), r.val) {
			stopped = true
		}
		return !stopped
	}
	err := w.k.st.Scan(lo, hi, func(k, v []byte) bool {
		for len(over) > 0 {
			c := strings.Compare(over[0].key, string(k))
			if c > 0 {
				break
			}
			r := over[0]
			over = over[1:]
			if !emit(r) {
				return false
			}
			if c == 0 {
				return true // the overlay's version stood for the store's
			}
		}
		if !fn(k, v) {
			stopped = true
		}
		return !stopped
	})
	for err == nil && !stopped && len(over) > 0 {
		r := over[0]
		over = over[1:]
		emit(r)
	}
	return err
}
