package penstock

import "penstock.io/penstock/meta"

// How the client tells the owner of an inode, neither cached nor open, that the client has no
// lease on the inode.
//
// The message (Drop) and the client's requests travel in one order. But the answer to an
// earlier request may arrive after the Drop was sent, with a grant that the owner, after
// receiving the Drop, no longer counts. And a late Drop cancels a lease granted in between. If
// the client trusted either lease, the owner would never recall the lease: the client would
// read old bytes, and write over newer ones.
//
// So drops go in rounds. A round is the set of dropped inodes, noted before the Drop is sent.
// Until every operation in flight at that moment is answered, grants for the round's inodes
// are void. The owner may count a void grant and would not send the grant again, so a void
// grant adds the inode to the next round, which begins when the current round ends. Operations
// are counted in two generations: before and after the round's Drop.

// drops are a table's rounds. Guarded by the table's mu.
type drops struct {
	dropping map[inodeKey]struct{} // this round; nil: no round
	next     map[inodeKey]struct{} // the following round
	gen      int
	// flying are the operations in flight. INVARIANT: without a round, and until
	// the drop of a round is sent, flying[gen^1] is zero.
	flying [2]int
}

// begin counts an operation whose answer may contain grants; the caller passes the result to
// end.
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

// voidLocked reports that a grant for the inode is void.
func (t *table) voidLocked(k inodeKey) bool {
	if t.dropping == nil {
		return false
	}
	_, now := t.dropping[k]
	_, next := t.next[k]
	return now || next
}

// giveUpLocked notes inodes without a lease here, of which the owner is to be notified. If
// send is true, the caller must call sendDrops after unlocking mu.
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
	// Answers to operations in flight must not be cached under a later lease.
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

// sendDrops sends the Drop of the current round.
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

// overLocked ends the round if all operations of the generation before are answered, and
// begins the next round if it has inodes. If send is true, the caller must send the round's
// Drop.
func (t *table) overLocked() (send bool) {
	if t.dropping == nil || t.flying[t.gen^1] > 0 {
		return false
	}
	t.dropping, t.next = t.next, nil
	return t.dropping != nil
}
