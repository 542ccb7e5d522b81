package penstock

import "penstock.io/penstock/meta"

// How the owner is told that nothing of an inode is leased, cached or open here.
//
// What is told (Drop) and what is asked travel in one order, but an operation
// that was sent before a drop may be answered after it was sent: with a grant
// that the owner, who sees the drop later, does not count any more. And a drop
// that is sent late takes a lease that was granted in between. Believed in,
// either one is a lease that nobody recalls: old bytes are read, and written
// over newer ones.
//
// So drops go in rounds. A round is the set of inodes dropped, noted before the
// drop is sent; until every operation in flight at that moment has been answered,
// grants for them are void. The owner may count a void grant, and would not tell
// of it again: it makes its inode a part of the next round, which begins when
// this one ends. Operations are counted by two generations: those sent before the
// round's drop, and those after.

// drops are a table's rounds. Guarded by the table's mu.
type drops struct {
	dropping map[inodeKey]struct{} // this round; nil: there is none
	next     map[inodeKey]struct{} // the round after it
	gen      int
	// flying are the operations in flight. INVARIANT: without a round, and until
	// the drop of a round is sent, flying[gen^1] is zero.
	flying [2]int
}

// begin counts an operation that may bring grants; end with what it returned.
func (t *table) begin() int {
	t.mu.Lock()
	g := t.gen
	t.flying[g]++
	t.mu.Unlock()
	return g
}

// end may send drops: nothing is locked.
func (t *table) end(g int) {
	t.mu.Lock()
	t.flying[g]--
	send := g != t.gen && t.overLocked()
	t.mu.Unlock()
	if send {
		t.sendDrops()
	}
}

// voidLocked reports that a grant for an inode counts for nothing.
func (t *table) voidLocked(k inodeKey) bool {
	if t.dropping == nil {
		return false
	}
	_, now := t.dropping[k]
	_, next := t.next[k]
	return now || next
}

// giveUpLocked has the owner told that inodes which are not leased here are not.
// With send, the caller has to call sendDrops when it has let go of mu.
func (t *table) giveUpLocked(keys ...inodeKey) (send bool) {
	if len(keys) == 0 {
		return false
	}
	round := &t.next
	if t.dropping == nil {
		round, send = &t.dropping, true
	}
	if *round == nil {
		*round = make(map[inodeKey]struct{}, len(keys))
	}
	// What operations in flight say of them is not to be cached under a lease
	// that comes later.
	t.evicted = t.tick.Add(1)
	for _, k := range keys {
		(*round)[k] = struct{}{}
		if in := t.m[k]; in != nil {
			in.mu.Lock()
			in.low = t.evicted
			in.mu.Unlock()
		}
	}
	return send
}

// sendDrops sends the drop of the round that has begun.
func (t *table) sendDrops() {
	for more := true; more; {
		byVolume := make(map[meta.VolumeID][]meta.Ino)
		t.mu.Lock()
		for k := range t.dropping {
			byVolume[k.v] = append(byVolume[k.v], k.ino)
		}
		t.mu.Unlock()
		for v, inos := range byVolume {
			t.c.sess.Drop(v, inos)
		}
		t.mu.Lock()
		t.gen ^= 1
		more = t.overLocked()
		t.mu.Unlock()
	}
}

// overLocked ends the round if all of the generation before have been answered,
// and begins the next if there is one: the caller has to send its drop.
func (t *table) overLocked() (send bool) {
	if t.dropping == nil || t.flying[t.gen^1] > 0 {
		return false
	}
	t.dropping, t.next = t.next, nil
	return t.dropping != nil
}
