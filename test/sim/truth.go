package sim

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/journal"
	"penstock.io/penstock/meta/namespace"
)

// place is the subject of a read or a change: a name in a directory, or, with an empty
// name, a file's bytes.
type place struct {
	vol  meta.VolumeID
	ino  meta.Ino
	name string
}

// change says which operation changed a place last. Versions grow in the order
// in which owners first ran the operations.
type change struct {
	at  place
	op  meta.OpID
	ver uint64
	by  meta.SessionID
}

// done is a change that was answered to its client.
type done struct {
	change
	event int // when the answer came
	cv    *clientVolume
}

// truth knows the whole world, and checks the rules.
type truth struct {
	w         *world
	versions  map[meta.OpID]uint64
	last      uint64
	journaled map[meta.OpID]meta.Seq
	answers   map[meta.OpID]meta.Ino // inode of the first answer
	inos      map[place]meta.OpID    // name empty: the operation that got this inode number
	chunks    map[meta.ChunkID]bool  // handed out
	sealed    map[meta.ChunkID]meta.Fence
	done      map[place][]done
	shots     map[shotID]shot
	deleted   map[shotID]bool                     // a client requested the deletion
	taken     map[meta.VolumeID][]meta.Generation // a client got the answer; without deleted snapshots
}

func newTruth(w *world) *truth {
	return &truth{
		w: w, versions: map[meta.OpID]uint64{}, journaled: map[meta.OpID]meta.Seq{}, answers: map[meta.OpID]meta.Ino{},
		inos: map[place]meta.OpID{}, chunks: map[meta.ChunkID]bool{}, sealed: map[meta.ChunkID]meta.Fence{}, done: map[place][]done{},
		shots: map[shotID]shot{}, deleted: map[shotID]bool{}, taken: map[meta.VolumeID][]meta.Generation{},
	}
}

// version numbers an operation when an owner runs it. An operation with an earlier answer
// keeps its number.
func (t *truth) version(op meta.OpID, replay bool) uint64 {
	if !replay || t.versions[op] == 0 {
		t.last++
		t.versions[op] = t.last
	}
	return t.versions[op]
}

// committed: an entry is in the log. Terms never go back (rule 2), the chain
// holds (rule 1), and no operation is in twice (exactly-once).
func (t *truth) committed(l *volumeLog, p proposal) {
	if n := len(l.all); n > 1 {
		before := l.all[n-2].entry
		if p.entry.Term < before.Term {
			t.w.fail("volume %d: entry %d of term %d follows one of term %d: a fenced owner writes", l.vol, p.entry.Seq, p.entry.Term, before.Term)
			return
		}
		c := journal.Chain{Volume: l.vol, At: before.Position()}
		if err := c.Step(p.entry); err != nil {
			t.w.fail("volume %d: %v", l.vol, err)
			return
		}
	}
	effects, err := namespace.DecodeEffects(p.entry.Payload)
	if err != nil {
		t.w.fail("volume %d: entry %d: %v", l.vol, p.entry.Seq, err)
		return
	}
	for _, e := range effects {
		if e.Kind != namespace.Put || e.Key[0] != replyPrefix {
			continue
		}
		_, seq, op, res, err := namespace.DecodeReply(e.Key, e.Value)
		if err != nil || seq != p.entry.Seq {
			t.w.fail("volume %d: a reply of entry %d in entry %d: %v", l.vol, seq, p.entry.Seq, err)
			return
		}
		if was, ok := t.journaled[op]; ok {
			t.w.fail("volume %d: operation %v is in entry %d and again in entry %d", l.vol, op, was, p.entry.Seq)
			return
		}
		t.journaled[op] = p.entry.Seq
		if ino, ok := t.answers[op]; ok && ino != res.Attr.Ino {
			t.w.fail("volume %d: operation %v was answered with inode %d and journaled with %d", l.vol, op, ino, res.Attr.Ino)
			return
		}
	}
}

// answered notes that a client got the answer of a mutation, for the first time or again.
func (t *truth) answered(cv *clientVolume, r *reply, c *call) {
	ino := r.res.Attr.Ino
	if was, ok := t.answers[c.id]; ok && was != ino {
		t.w.fail("%s: operation %v was answered with inode %d, now with %d", cv.name(), c.id, was, ino)
	}
	t.answers[c.id] = ino
	if _, ok := c.op.(*meta.Create); ok {
		at := place{vol: cv.vol, ino: ino}
		if other, ok := t.inos[at]; ok && other != c.id {
			t.w.fail("%s: inode %d was given to %v and to %v", cv.name(), ino, other, c.id)
		}
		t.inos[at] = c.id
	}
	for _, ch := range r.changes {
		t.done[ch.at] = append(t.done[ch.at], done{ch, t.w.res.Events, cv})
	}
}

// saw notes that a client learned, from an answer or from its cache, the last change s of
// a place. start is the moment of the request. No client sees a change that could be lost
// (rule 13), and every client sees the changes finished before its request.
func (t *truth) saw(cv *clientVolume, what string, s change, start int) {
	if s.op != (meta.OpID{}) && s.by != cv.session {
		if _, ok := t.journaled[s.op]; !ok {
			t.w.fail("%s sees by %s what session %x did to %v, which is not in the journal", cv.name(), what, s.by, s.at)
		}
	}
	for _, d := range t.done[s.at] {
		if d.event < start && d.ver > s.ver {
			t.w.fail("%s sees by %s version %d of %v, but %s had finished version %d (%v) before", cv.name(), what, s.ver, s.at, d.cv.name(), d.ver, d.op)
		}
	}
}

// synced notes that a client got the answer that these operations are durable.
func (t *truth) synced(cv *clientVolume, ops []meta.OpID) {
	for _, op := range ops {
		if _, ok := t.journaled[op]; !ok {
			t.w.fail("%s was told that %v is durable; it is not in the journal", cv.name(), op)
		}
	}
}

// dropped notes that a client knows that its session ended. Answered operations that are
// not in the journal may be lost.
func (t *truth) dropped(cv *clientVolume) {
	for at, l := range t.done {
		t.done[at] = slices.DeleteFunc(l, func(d done) bool {
			_, in := t.journaled[d.op]
			return d.cv == cv && !in
		})
	}
	maps.DeleteFunc(t.inos, func(_ place, op meta.OpID) bool {
		_, in := t.journaled[op]
		return op.Incarnation == cv.incarnation && !in
	})
}

// ended notes that an owner ended a session. Answered operations that are not in the
// journal may be lost; the client will learn this (rule 3).
func (t *truth) ended(vol meta.VolumeID, id meta.SessionID) {
	for at, l := range t.done {
		t.done[at] = slices.DeleteFunc(l, func(d done) bool {
			_, in := t.journaled[d.op]
			if at.vol != vol || d.by != id || in {
				return false
			}
			maps.DeleteFunc(t.inos, func(p place, op meta.OpID) bool { return p.vol == vol && op == d.op })
			return true
		})
	}
}

func (t *truth) handedOut(cv *clientVolume, id meta.ChunkID) {
	if t.chunks[id] {
		t.w.fail("%s: chunk %v was handed out twice", cv.name(), id)
	}
	t.chunks[id] = true
	if id.Volume != cv.vol {
		t.w.fail("%s: chunk %v belongs to another volume", cv.name(), id)
	}
}

// appended: a replica is about to take bytes.
func (t *truth) appended(d *disk, id meta.ChunkID, f meta.Fence, r *replica) {
	if f.Less(r.fence) || r.sealed {
		t.w.fail("%s takes an append to %v at fence %v, it has seen %v: a fenced writer writes", d.name, id, f, r.fence)
	}
}

// atRest checks the final state of a world without faults: every state follows from its
// log, no record contradicts another record, and every byte of a file is there, as
// written last.
func (t *truth) atRest() {
	for _, l := range t.w.log {
		st := newStore()
		last := map[place]change{}
		for _, p := range l.all {
			effects, err := namespace.DecodeEffects(p.entry.Payload)
			if err != nil {
				t.w.fail("volume %d: %v", l.vol, err)
				return
			}
			st.apply(p.entry.Position(), effects)
			for _, c := range p.changes {
				last[c.at] = c
			}
		}
		r, err := namespace.Check(st)
		if err != nil || !r.OK() {
			t.w.fail("volume %d: %d problems: %v %v", l.vol, r.Count, r.Problems, err)
			return
		}
		o := l.owner.owners[l.vol]
		if o == nil || !o.recovered {
			t.w.fail("volume %d is not served when all is well again", l.vol)
			return
		}
		if same, key := equal(o.st, st); !same {
			t.w.fail("volume %d: the owner's store and the log differ at key %x", l.vol, key)
			return
		}
		t.files(l, st, 0, func(_ string, ino meta.Ino) meta.OpID { return last[place{l.vol, ino, ""}].op })
		t.snapshots(l, st)
		for _, c := range t.w.clients {
			if cv := c.vols[l.vol-1]; len(cv.retained) > 0 || len(cv.pending) > 0 {
				t.w.fail("%s still waits for %d operations, %d are not durable", cv.name(), len(cv.pending), len(cv.retained))
				return
			}
		}
	}
}

// files reads every file, live or in a snapshot, and returns the number of files. wrote
// returns the operation that wrote a file; zero: none.
func (t *truth) files(l *volumeLog, st *store, at meta.Generation, wrote func(name string, ino meta.Ino) meta.OpID) int {
	ctx := namespace.Context{Volume: l.vol, At: at}
	dir, err := namespace.Query(st, ctx, &meta.ReadDir{Ino: meta.RootIno, Max: 4096, Plus: true})
	if err != nil {
		t.w.fail("volume %d: %v", l.vol, err)
		return 0
	}
	for _, d := range dir.Entries {
		want := wrote(d.Name, d.Ino)
		if want == (meta.OpID{}) {
			continue
		}
		f, err := namespace.Query(st, ctx, &meta.Open{Ino: d.Ino})
		if err != nil || len(f.Extents) != 1 {
			t.w.fail("volume %d: %s has %d extents: %v", l.vol, d.Name, len(f.Extents), err)
			return 0
		}
		e := f.Extents[0]
		var errs []error
		for _, id := range f.Places[0].Servers {
			b, err := t.w.disks[id-1].read(e.Chunk, int(e.ChunkOff), int(e.Len))
			if err == nil && !bytes.Equal(b, block(want)) {
				err = fmt.Errorf("the bytes of %v, not of %v", blockOp(b), want)
			}
			if err != nil {
				errs = append(errs, err)
			}
		}
		if len(errs) == len(f.Places[0].Servers) {
			t.w.fail("volume %d: %s at %d, written and synced by %v, can't be read: %v", l.vol, d.Name, at, want, errs)
			return 0
		}
	}
	return len(dir.Entries)
}

// equal compares everything except replies, whose deletion may be under way.
func equal(a, b *store) (bool, []byte) {
	list := func(s *store) (all []item) {
		s.t.Ascend(func(i item) bool { all = append(all, i); return true })
		return all
	}
	x, y := list(a), list(b)
	for i := range max(len(x), len(y)) {
		if i >= len(x) {
			return false, []byte(y[i].k)
		}
		if i >= len(y) || x[i].k != y[i].k || !bytes.Equal(x[i].v, y[i].v) {
			return false, []byte(x[i].k)
		}
	}
	return true, nil
}

// blockSize is the number of bytes of one write. The bytes name the operation.
const blockSize = 32

func block(op meta.OpID) []byte {
	b := make([]byte, blockSize)
	binary.BigEndian.PutUint64(b, op.Incarnation)
	binary.BigEndian.PutUint64(b[8:], op.Unique)
	copy(b[16:], "penstock simulat")
	return b
}

func blockOp(b []byte) meta.OpID {
	return meta.OpID{Incarnation: binary.BigEndian.Uint64(b), Unique: binary.BigEndian.Uint64(b[8:])}
}

// replyPrefix is the first byte of reply records.
var replyPrefix = namespace.PutReply(0, 0, meta.OpID{}, &meta.Result{}).Key[0]

func sortedChunks[V any](m map[meta.ChunkID]V) []meta.ChunkID {
	return slices.SortedFunc(maps.Keys(m), func(a, b meta.ChunkID) int {
		return cmp.Or(cmp.Compare(a.Volume, b.Volume), cmp.Compare(a.Term, b.Term), cmp.Compare(a.Counter, b.Counter))
	})
}

func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
