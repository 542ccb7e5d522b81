package namespace

import (
	"encoding/binary"
	"maps"
	"slices"
)

// checkedSnapshots is what Check keeps about snapshots. Versions of a key come
// newest first.
type checkedSnapshots struct {
	gens   []uint32          // of the snapshots, ascending
	leaves uint32            // the one whose list is partly with the one before
	buried map[string]uint32 // key of a version -> the snapshot it is buried with
	bytes  uint64            // of older versions of extents in chunks
	newer  uint32            // generation of the version before, of the same key
	tomb   bool              // that one is a tombstone,
	last   []byte            // under this key
}

func (c *checker) readSnapshots() error {
	c.snaps.buried = map[string]uint32{}
	names := map[string]bool{}
	rolling := false
	return c.r.Scan([]byte{'s'}, []byte{'t'}, func(k, v []byte) bool {
		w := walker{b: v}
		ver, state := w.u8(), w.u8()
		w.u64() // when
		w.n()   // what it holds
		w.n()
		if ver == 2 {
			if w.u64() == 0 {
				c.bad(k, "a snapshot record of version 2 without a token")
			}
			ver = 1
		}
		name := string(w.take(int(min(w.n(), 1<<20))))
		problem := w.done(ver)
		if len(k) != 5 || problem != "" || state < 1 || state > 4 || name == "" {
			c.bad(k, "snapshot record %q: %s; state %d", name, problem, state)
			return true
		}
		if state == 4 {
			if state = 1; rolling {
				c.bad(k, "the volume is being rolled back to two snapshots")
			}
			rolling = true
		}
		if state == 1 && names[name] {
			c.bad(k, "two snapshots are called %s", printable(name))
		}
		names[name] = names[name] || state == 1
		gen := binary.BigEndian.Uint32(k[1:])
		if state == 3 && c.snaps.leaves != 0 {
			c.bad(k, "two snapshots are being worked off")
		}
		if state == 3 {
			c.snaps.leaves = gen
		}
		c.snaps.gens = append(c.snaps.gens, gen)
		return true
	})
}

// note takes a key that says where to look: a buried version, or what changed
// in a generation.
func (c *checker) note(k, v []byte) {
	least := map[byte]int{'b': 5 + 13, 'g': 13, 'h': 14}[k[0]]
	if len(k) < least || k[0] == 'g' && len(k) != least || len(v) != 1 || v[0] != 1 {
		c.bad(k, "a note of %d bytes with a value of %d", len(k), len(v))
		return
	}
	gen := binary.BigEndian.Uint32(k[1:])
	if k[0] != 'b' {
		if c.vol != nil && (gen < 2 || uint64(gen) > c.vol.gen) {
			c.bad(k, "a change in generation %d", gen)
		}
		return
	}
	key := string(k[5:])
	if other, ok := c.snaps.buried[key]; ok {
		c.bad(k, "buried with snapshot %d and with %d", other, gen)
	}
	c.snaps.buried[key] = gen
}

// version judges one version of a key among the others: each but the newest is
// seen by a snapshot, and buried with the youngest such; the oldest is no
// tombstone.
func (c *checker) version(k, base, v []byte, gen uint32, older bool) {
	s := &c.snaps
	if !older {
		c.oldestVersion()
	} else {
		i, _ := slices.BinarySearch(s.gens, s.newer)
		with, ok := s.buried[string(k)]
		switch {
		case i == 0 || s.gens[i-1] < gen:
			c.bad(k, "no snapshot sees generation %d, which %d superseded", gen, s.newer)
		case !ok:
			c.bad(k, "generation %d was superseded in %d and is not buried", gen, s.newer)
		case with != s.gens[i-1] && s.gens[i-1] == s.leaves && i > 1 && with == s.gens[i-2] && gen <= with:
		case with != s.gens[i-1]:
			c.bad(k, "generation %d is buried with snapshot %d, %d is the youngest to see it", gen, with, s.gens[i-1])
		}
		delete(s.buried, string(k))
	}
	s.newer, s.tomb = gen, len(v) == 1 && v[0] == 0
	s.last = append(s.last[:0], k...)
}

func (c *checker) oldestVersion() {
	if c.snaps.tomb {
		c.bad(c.snaps.last, "a tombstone over nothing")
	}
	c.snaps.tomb = false
}

func (c *checker) compareSnapshots() {
	s := &c.snaps
	c.oldestVersion()
	for _, key := range slices.Sorted(maps.Keys(s.buried)) {
		c.bad([]byte(key), "buried with snapshot %d, and not superseded or not there", s.buried[key])
	}
	var last uint32
	if n := len(s.gens); n > 0 {
		last = s.gens[n-1]
	}
	if c.vol.lastSnap != uint64(last) || c.vol.snaps != uint64(len(s.gens)) {
		c.bad([]byte{'v'}, "%d snapshots are counted, the last of generation %d; %d are there, the last of %d", c.vol.snaps, c.vol.lastSnap, len(s.gens), last)
	}
	if c.vol.buried != s.bytes {
		c.bad([]byte{'v'}, "%d buried bytes are counted, %d are there", c.vol.buried, s.bytes)
	}
}
