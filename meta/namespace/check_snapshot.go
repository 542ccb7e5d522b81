package namespace

import (
	"encoding/binary"
	"maps"
	"slices"
)

// checkedSnapshots is Check's state about snapshots. The versions of a key come newest first.
type checkedSnapshots struct {
	gens   []uint32          // of the snapshots, ascending
	live   []uint32          // readable snapshots
	based  bool              // the oldest is the base of a clone
	leaves uint32            // the snapshot whose list has partly moved to the previous one
	buried map[string]uint32 // key of a version -> the snapshot with which it is buried
	bytes  uint64            // of older versions of extents in chunks
	newer  uint32            // generation of the version before, of the same key
	tomb   bool              // the last version is a tombstone,
	last   []byte            // of this key
}

func (c *checker) readSnapshots() error {
	c.snaps.buried = map[string]uint32{}
	names := map[string]bool{}
	rolling := false
	return c.r.Scan([]byte{'s'}, []byte{'t'}, func(k, v []byte) bool {
		w := walker{b: v}
		ver, state := w.u8(), w.u8()
		w.u64() // when
		w.n()   // bytes
		w.n()
		w.u64() // token
		name := string(w.take(int(min(w.n(), 1<<20))))
		problem := w.done(ver)
		if len(k) != 5 || problem != "" || state < 1 || state > 5 || name == "" {
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
		c.countedGen(k, state)
		gen := binary.BigEndian.Uint32(k[1:])
		if state == 5 && (len(c.snaps.gens) > 0 || c.vol == nil || !c.vol.clone) {
			c.bad(k, "what a clone began with, in a volume that is none, or not the oldest")
		}
		if state == 5 && c.vol != nil {
			if n := len(c.vol.gaps); n > 0 && c.vol.gaps[n-1][0] != uint64(gen) {
				c.bad(k, "the clone began with generation %d, but leaves out what is above %d", gen, c.vol.gaps[n-1][0])
			}
			c.snaps.based = true
		}
		if state == 1 {
			c.snaps.live = append(c.snaps.live, gen)
		}
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

// note handles a key that is a note: of a buried version, or of a change in a generation.
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

// hidden reports that versions of the generation are absent.
func (c *checker) hidden(gen uint32) bool {
	if c.vol == nil {
		return false
	}
	for _, g := range c.vol.gaps {
		if uint64(gen) > g[0] && uint64(gen) <= g[1] {
			return true
		}
	}
	return false
}

// outside reports whether a version belongs to the state of the origin and not of the clone:
// the version is hidden, or below the version of the clone's base, or the base's version is a
// tombstone.
func (c *checker) outside(k, base, v []byte, gen uint32) bool {
	if c.vol == nil || len(c.vol.gaps) == 0 {
		return false
	}
	if c.hidden(gen) {
		return true
	}
	if uint64(gen) > c.vol.gaps[len(c.vol.gaps)-1][0] {
		return false
	}
	if string(base) == string(c.based) {
		return true
	}
	c.based = append(c.based[:0], base...)
	if len(v) == 1 && v[0] == 0 {
		// Older programs noted that the version was superseded, and left tombstones over the
		// version.
		delete(c.snaps.buried, string(k))
		if string(base) == string(c.seen) {
			c.snaps.tomb = false
		}
		return true
	}
	return false
}

// foreign reports that a clone may refer to the chunk without counting the reference.
func (c *checker) foreign(id [16]byte) bool {
	return c.vol != nil && c.vol.clone && uint64(binary.BigEndian.Uint32(id[:])) != c.vol.id
}

// clone handles the note of a volume that was cloned from a snapshot.
func (c *checker) clone(k, v []byte) {
	if len(k) != 9 || len(v) != 1 || v[0] != 1 {
		c.bad(k, "the note of a clone of %d bytes with a value of %d", len(k), len(v))
		return
	}
	if gen := binary.BigEndian.Uint32(k[1:]); !slices.Contains(c.snaps.live, gen) {
		c.bad(k, "volume %d is a clone of snapshot %d, which is not there", binary.BigEndian.Uint32(k[5:]), gen)
	}
}

// digest checks the digest of a readable snapshot.
func (c *checker) digest(k, v []byte) {
	w := walker{b: v}
	ver, form := w.u8(), w.u8()
	w.take(32)
	w.u64()
	inodes, all, read := w.n(), w.n(), w.n()
	problem := w.done(ver)
	if len(k) != 5 || problem != "" || form == 0 || inodes == 0 || read > all {
		c.bad(k, "a digest of form %d over %d inodes and %d bytes, %d read: %s", form, inodes, all, read, problem)
		return
	}
	if gen := binary.BigEndian.Uint32(k[1:]); !slices.Contains(c.snaps.live, gen) {
		c.bad(k, "a digest of snapshot %d, which is not there", gen)
	}
}

// index checks the index of a readable snapshot and counts the index's bytes in the index's
// chunks, which the walk has read before.
func (c *checker) index(k, v []byte) {
	w := walker{b: v}
	ver, form := w.u8(), w.u8()
	w.take(32)
	length, inodes := w.n(), w.n()
	w.u64()
	var sum uint64
	parts := w.n()
	for range min(parts, 1<<16) {
		var id [16]byte
		vol, term, counter := w.n(), w.n(), w.n()
		binary.BigEndian.PutUint32(id[0:], uint32(vol))
		binary.BigEndian.PutUint32(id[4:], uint32(term))
		binary.BigEndian.PutUint64(id[8:], counter)
		n := w.n()
		sum += n
		switch ch := c.chunks[id]; {
		case w.damaged:
		case ch == nil:
			c.bad(k, "an index in chunk %x, which has no record", id)
		default:
			ch.counted += n
			if ch.state != 1 && !ch.lost && n > ch.length {
				c.bad(k, "a part of an index of %d bytes in chunk %x, which ends at %d", n, id, ch.length)
			}
		}
	}
	if problem := w.done(ver); len(k) != 5 || problem != "" || form == 0 || inodes == 0 || parts == 0 || sum != length {
		c.bad(k, "an index of form %d of %d inodes, %d bytes, %d in %d parts: %s", form, inodes, length, sum, parts, problem)
		return
	}
	if gen := binary.BigEndian.Uint32(k[1:]); !slices.Contains(c.snaps.live, gen) {
		c.bad(k, "an index of snapshot %d, which is not there", gen)
	}
}

// mirror checks the record of a mirror's target: readers see a readable snapshot.
func (c *checker) mirror(k, v []byte) {
	if len(k) != 1 || len(v) != 5 || v[0] != 1 {
		c.bad(k, "a mirror of %d bytes", len(v))
		return
	}
	if gen := binary.BigEndian.Uint32(v[1:]); !slices.Contains(c.snaps.live, gen) {
		c.bad(k, "readers of the mirror are shown snapshot %d, which is not there", gen)
	}
}

// pin checks a pin: of a readable snapshot, by a holder with a name.
func (c *checker) pin(k, v []byte) {
	w := walker{b: v}
	ver := w.u8()
	made, until := w.u64(), w.u64()
	w.take(int(min(w.n(), 1<<20)))
	problem := w.done(ver)
	if len(k) < 6 || problem != "" || until <= made {
		c.bad(k, "a pin from %d to %d: %s", made, until, problem)
		return
	}
	if gen := binary.BigEndian.Uint32(k[1:]); !slices.Contains(c.snaps.live, gen) {
		c.bad(k, "a pin of snapshot %d, which is not there", gen)
	}
}

// version checks one version of a key: every version but the newest is seen by a snapshot and
// buried with the youngest such snapshot; the oldest is not a tombstone.
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
	if len(c.vol.gaps) > 0 && !s.based {
		c.bad([]byte{'v'}, "the record of what the clone began with is not there")
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
